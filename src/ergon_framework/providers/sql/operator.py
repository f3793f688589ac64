"""Operator actions on the provider state, each with an actor and a reason, and the listings for operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.books import ProviderScope
from ergon_framework.providers.circuit_breaker import BreakerState, OverrideKind
from ergon_framework.providers.errors import ProviderBadRequestError
from ergon_framework.providers.health import ProviderHealthState
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.sql import statements
from ergon_framework.providers.sql.names import parse_scope_key, scope_key
from ergon_framework.providers.sql.sweeping import LostReservation
from ergon_framework.schema.lines import ConnectionPool
from ergon_framework.schema.operation import Operation, Query, Rows

R = TypeVar("R")

_MAX_ACTOR_CHARS: Final = 200
_MAX_REASON_CHARS: Final = 1000
#: Maximum duration of an override in seconds: permanent limits belong into the policy.
_MAX_OVERRIDE_SECONDS: Final = 31 * 86_400.0
_MAX_ROWS: Final = 10_000
_MAX_EXTRA_CALLS: Final = 10**12


@dataclass(frozen=True, slots=True)
class BreakerRow:
    """A breaker as it is stored: an open breaker stays open after its cooldown until the next call.

    An override that has ended is omitted.
    """

    account: ProviderScope
    state: BreakerState
    consecutive_failures: int
    open_until: datetime | None
    generation: int
    override: OverrideKind | None
    override_until: datetime | None
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """One quota window; its limit includes an extension only after the first call that needs it."""

    account: ProviderScope
    kind: WindowKind
    window_start: datetime
    window_end: datetime
    limit_count: int
    used_count: int
    remaining_count: int
    last_exhausted_at: datetime | None
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class OverrideRow:
    """One recorded operator action."""

    at: datetime
    account: ProviderScope
    action: str
    until: datetime | None
    calls: int | None
    actor: str
    reason: str


# -- actions --------------------------------------------------------------------------------------------


def force_open(
    dsn: str,
    scope: ProviderScope,
    *,
    actor: str,
    reason: str,
    until: datetime | None = None,
    seconds: float | None = None,
) -> BreakerRow:
    """Admit no calls to the provider of *scope* until *until* or for *seconds*."""
    return _apply_override(dsn, scope, "force_open", actor=actor, reason=reason, end=_parse_end(until, seconds))


def disable(
    dsn: str,
    scope: ProviderScope,
    *,
    actor: str,
    reason: str,
    until: datetime | None = None,
    seconds: float | None = None,
) -> BreakerRow:
    """Admit all calls until *until* or for *seconds*, whatever the breaker's state."""
    return _apply_override(dsn, scope, "disable", actor=actor, reason=reason, end=_parse_end(until, seconds))


def clear_override(dsn: str, scope: ProviderScope, *, actor: str, reason: str) -> BreakerRow:
    """Clear the override, so that the breaker decides again."""
    return _apply_override(dsn, scope, "lift", actor=actor, reason=reason)


def extend_quota(
    dsn: str,
    scope: ProviderScope,
    *,
    calls: int,
    actor: str,
    reason: str,
    until: datetime | None = None,
    seconds: float | None = None,
) -> list[QuotaRow]:
    """Allow *calls* extra calls in every limited window while it is active; the last action counts, so 0 ends it."""
    if not 0 <= calls <= _MAX_EXTRA_CALLS:
        raise ConfigurationError(f"a quota is extended by 0 to {_MAX_EXTRA_CALLS:,} calls, not {calls}")
    end = _parse_end(until, seconds)

    def record_action(tenant: str) -> Operation[list[QuotaRow]]:
        yield _build_override_query(scope, tenant, "extend_quota", actor=actor, reason=reason, end=end, calls=calls)
        rows = yield _build_scope_query(_SELECT_QUOTAS, scope, tenant)
        return _to_quota_rows(rows)

    return _run(dsn, lambda: record_action(_check_scope(scope)))


def _apply_override(
    dsn: str, scope: ProviderScope, action: str, *, actor: str, reason: str, end: dict[str, Any] | None = None
) -> BreakerRow:
    def record_action(tenant: str) -> Operation[BreakerRow]:
        yield _build_override_query(scope, tenant, action, actor=actor, reason=reason, end=end)
        (row,) = _to_breaker_rows((yield _build_scope_query(_SELECT_BREAKERS, scope, tenant)))
        return row

    return _run(dsn, lambda: record_action(_check_scope(scope)))


def _build_override_query(
    scope: ProviderScope,
    tenant: str,
    action: str,
    *,
    actor: str,
    reason: str,
    end: dict[str, Any] | None,
    calls: int | None = None,
) -> Query:
    """Return the query that records the action and applies it, in one statement and so in one transaction."""
    for what, text, max_chars in (("actor", actor, _MAX_ACTOR_CHARS), ("reason", reason, _MAX_REASON_CHARS)):
        if not 0 < len(text.strip()) <= max_chars or "\0" in text:
            raise ConfigurationError(f"an override needs its {what}: 1 to {max_chars} characters")
    parameters = {
        "tenant": tenant,
        "provider": scope.provider_name,
        "capability": scope.capability,
        "action": action,
        "calls": calls,
        "actor": actor.strip(),
        "reason": reason.strip(),
        **(end or {"until": None, "seconds": None}),
    }
    return Query(statements.OVERRIDE, parameters)


def _parse_end(until: datetime | None, seconds: float | None) -> dict[str, Any]:
    """Return the end of an override: a time, or a number of seconds by the server's clock."""
    if (until is None) == (seconds is None):
        raise ConfigurationError("an override ends by itself: say until when, or after how many seconds, not both")
    if until is not None and until.tzinfo is None:
        raise ConfigurationError(f"{until.isoformat()} names no zone, so it is no moment")
    remaining_seconds = seconds if until is None else (until - datetime.now(UTC)).total_seconds()
    if remaining_seconds is None or not 0 < remaining_seconds <= _MAX_OVERRIDE_SECONDS:
        raise ConfigurationError("an override holds for more than 0 seconds and at most for 31 days")
    return {"until": until, "seconds": seconds}


def _check_scope(scope: ProviderScope) -> str:
    try:
        return scope_key(scope)
    except ProviderBadRequestError as error:
        raise ConfigurationError(str(error)) from None


# -- listings -------------------------------------------------------------------------------------------


def list_breakers(
    dsn: str, tenant: str | None = None, *, provider: str | None = None, limit: int = 1000
) -> list[BreakerRow]:
    """Return the breakers of *tenant*, or of all tenants; ``"*"`` is the scope that all tenants share."""
    return _read_rows(dsn, _SELECT_BREAKERS, _to_breaker_rows, tenant, provider=provider, limit=limit)


def list_quotas(
    dsn: str, tenant: str | None = None, *, provider: str | None = None, limit: int = 1000
) -> list[QuotaRow]:
    """Return the quota windows that have not ended."""
    return _read_rows(dsn, _SELECT_QUOTAS, _to_quota_rows, tenant, provider=provider, limit=limit)


def list_health_states(dsn: str, tenant: str | None = None, *, limit: int = 1000) -> list[ProviderHealthState]:
    """Return the rows of ``provider_health_states``, of one tenant or of all."""
    return _read_rows(
        dsn, _SELECT_HEALTH_STATES, lambda rows: [_to_health_state(row) for row in rows], tenant, limit=limit
    )


def list_lost_reservations(dsn: str, tenant: str | None = None, *, limit: int = 1000) -> list[LostReservation]:
    """Return expired reservations, the newest first; they count as used, whether the calls were made or not."""
    return _read_rows(
        dsn, _SELECT_LOST, lambda rows: [LostReservation.from_row(row) for row in rows], tenant, limit=limit
    )


def list_overrides(dsn: str, tenant: str | None = None, *, limit: int = 100) -> list[OverrideRow]:
    """Return the recorded operator actions, the newest first."""
    return _read_rows(dsn, _SELECT_OVERRIDES, _to_override_rows, tenant, limit=limit)


_SELECT_BREAKERS: Final = """
select b.tenant_id, b.provider_name, b.capability, b.state, b.consecutive_failures, b.open_until, b.generation,
    case when b.override_until > ergon.provider_clock() then b.override_kind end,
    case when b.override_until > ergon.provider_clock() then b.override_until end, b.updated_at
from ergon.provider_breakers b
where (%(tenant)s::text is null or b.tenant_id = %(tenant)s) and (%(provider)s::text is null or
    b.provider_name = %(provider)s) and (%(capability)s::text is null or b.capability = %(capability)s)
order by 1, 2, 3 limit %(limit)s
"""

_SELECT_QUOTAS: Final = """
select q.tenant_id, q.provider_name, q.capability, q.window_kind, q.window_start, q.window_end, q.limit_count,
    q.used_count, q.remaining_count, q.last_exhausted_at, q.updated_at
from ergon.provider_quota_windows q
where q.window_end > ergon.provider_clock() and (%(tenant)s::text is null or q.tenant_id = %(tenant)s)
    and (%(provider)s::text is null or q.provider_name = %(provider)s)
    and (%(capability)s::text is null or q.capability = %(capability)s)
order by 1, 2, 3, 6 limit %(limit)s
"""

_HEALTH_FIELDS: Final = tuple(field.name for field in fields(ProviderHealthState))
_SELECT_HEALTH_STATES: Final = """
select h.id, h.tenant_id, h.provider_name, h.capability, h.breaker_state, h.consecutive_failures, h.success_rate_1h,
    h.p95_latency_ms_1h, h.last_error_code, h.last_error_at, h.last_success_at, h.updated_at
from ergon.provider_health_states h
where %(tenant)s::text is null or h.tenant_id = %(tenant)s
order by h.tenant_id, h.provider_name, h.capability limit %(limit)s
"""

_SELECT_LOST: Final = """
select r.id, r.tenant_id, r.provider_name, r.capability, r.window_starts, r.owner, r.calls, r.until, r.lost_at,
    r.created_at
from ergon.provider_reservations r
where (r.lost_at is not null or r.until < ergon.provider_clock())
    and (%(tenant)s::text is null or r.tenant_id = %(tenant)s)
    and %(provider)s::text is null and %(capability)s::text is null
order by r.id desc limit %(limit)s
"""

_SELECT_OVERRIDES: Final = """
select o.at, o.tenant_id, o.provider_name, o.capability, o.action, o.until, o.calls, o.actor, o.reason
from ergon.provider_overrides o
where (%(tenant)s::text is null or o.tenant_id = %(tenant)s)
    and %(provider)s::text is null and %(capability)s::text is null
order by o.id desc limit %(limit)s
"""


def read_breakers_and_quotas(
    tenant: str, *, provider: str | None, capability: str | None
) -> Operation[tuple[list[BreakerRow], list[QuotaRow]]]:
    """Read what ``list_breakers`` and ``list_quotas`` return, on an existing connection."""
    parameters = {"tenant": tenant, "provider": provider, "capability": capability, "limit": _MAX_ROWS}
    breaker_rows = _to_breaker_rows((yield Query(_SELECT_BREAKERS, parameters)))
    return breaker_rows, _to_quota_rows((yield Query(_SELECT_QUOTAS, parameters)))


def _build_scope_query(sql: str, scope: ProviderScope, tenant: str) -> Query:
    parameters = {"tenant": tenant, "provider": scope.provider_name, "capability": scope.capability}
    return Query(sql, {**parameters, "limit": _MAX_ROWS})


def _to_breaker_rows(rows: Rows) -> list[BreakerRow]:
    return [
        BreakerRow(
            parse_scope_key(*scope_names),
            BreakerState(state),
            failures,
            open_until,
            generation,
            None if kind is None else OverrideKind(kind),
            until,
            updated_at,
        )
        for *scope_names, state, failures, open_until, generation, kind, until, updated_at in rows
    ]


def _to_quota_rows(rows: Rows) -> list[QuotaRow]:
    return [QuotaRow(parse_scope_key(*row[:3]), WindowKind(row[3]), row[4].astimezone(UTC), *row[5:]) for row in rows]


def _to_override_rows(rows: Rows) -> list[OverrideRow]:
    return [OverrideRow(row[0], parse_scope_key(*row[1:4]), *row[4:]) for row in rows]


def _read_rows(
    dsn: str,
    sql: str,
    convert: Callable[[Rows], list[R]],
    tenant: str | None,
    *,
    provider: str | None = None,
    limit: int,
) -> list[R]:
    if not 0 < limit <= _MAX_ROWS:
        raise ConfigurationError(f"1 to {_MAX_ROWS:,} rows are read at once, not {limit}")

    def read() -> Operation[list[R]]:
        rows = yield Query(sql, {"tenant": tenant, "provider": provider, "capability": None, "limit": limit})
        return convert(rows)

    return _run(dsn, read)


def _run(dsn: str, create_operation: Callable[[], Operation[R]]) -> R:
    pool = ConnectionPool(dsn, max_size=1)
    try:
        return pool.run(create_operation())
    finally:
        pool.close()


def _to_health_state(row: Sequence[Any]) -> ProviderHealthState:
    values = dict(zip(_HEALTH_FIELDS, row, strict=True))
    return ProviderHealthState(**values | {"breaker_state": BreakerState(values["breaker_state"])})
