"""The provider state for operators: actions, each with an actor and a reason, listings, and why calls are blocked.

The provider state is the quota, circuit breakers and idempotency keys that all processes share. A scope, or account, is
a tenant, or all tenants together, a provider and a capability, which is a group of the provider's operations.

Listings show the rows of any tenant. The availability for one tenant shows its own rows; of rows that all tenants
share it shows only whether and until when they block calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from ergon_framework.database.operation import Operation, Query, Rows, in_snapshot
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import ConfigurationError
from ergon_framework.providers import circuit_breaker as breakers
from ergon_framework.providers.circuit_breaker import (
    BlockCause,
    BlockReason,
    BreakerSnapshot,
    BreakerState,
    Override,
    OverrideKind,
    ProviderAvailability,
)
from ergon_framework.providers.errors import ProviderBadRequestError
from ergon_framework.providers.health import NOT_CALLED_REASONS, ProviderHealthState
from ergon_framework.providers.postgres import sql
from ergon_framework.providers.postgres.keys import ALL_TENANTS, parse_scope_key, scope_key
from ergon_framework.providers.postgres.retention import LostReservation
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.state import ProviderScope

R = TypeVar("R")

_MAX_ACTOR_CHARS: Final = 200
_MAX_REASON_CHARS: Final = 1000
#: Maximum duration of an override in seconds: permanent limits belong in the policy.
_MAX_OVERRIDE_SECONDS: Final = 31 * 86_400.0
_MAX_ROWS: Final = 10_000
#: Maximum number of extra calls of a quota extension; larger numbers are mistakes.
_MAX_EXTRA_CALLS: Final = 10**12


@dataclass(frozen=True, slots=True)
class BreakerRow:
    """A breaker as it is stored: after its cooldown it stays open until the next call, which makes it half-open.

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


# -- actions ----------------------------------------------------------------------------------------


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
        raise ConfigurationError(f"invalid quota extension {calls}: expected 0 to {_MAX_EXTRA_CALLS:,} calls")
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
            raise ConfigurationError(f"invalid {what} of an override: expected 1 to {max_chars} characters")
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
    return Query(sql.OVERRIDE, parameters)


def _parse_end(until: datetime | None, seconds: float | None) -> dict[str, Any]:
    """Return the end of an override: a time, or a number of seconds by the server's clock."""
    if (until is None) == (seconds is None):
        raise ConfigurationError("an override needs one end: pass either until= or seconds=")
    if until is not None and until.tzinfo is None:
        raise ConfigurationError(f"{until.isoformat()} has no time zone: pass tzinfo=UTC")
    remaining_seconds = seconds if until is None else (until - datetime.now(UTC)).total_seconds()
    if remaining_seconds is None or not 0 < remaining_seconds <= _MAX_OVERRIDE_SECONDS:
        raise ConfigurationError(
            f"invalid override duration: expected more than 0 seconds and at most 31 days, got {remaining_seconds} s"
        )
    return {"until": until, "seconds": seconds}


def _check_scope(scope: ProviderScope) -> str:
    try:
        return scope_key(scope)
    except ProviderBadRequestError as error:
        raise ConfigurationError(str(error)) from None


# -- listings ---------------------------------------------------------------------------------------


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


def _build_scope_query(statement: str, scope: ProviderScope, tenant: str) -> Query:
    parameters = {"tenant": tenant, "provider": scope.provider_name, "capability": scope.capability}
    return Query(statement, {**parameters, "limit": _MAX_ROWS})


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
    statement: str,
    convert: Callable[[Rows], list[R]],
    tenant: str | None,
    *,
    provider: str | None = None,
    limit: int,
) -> list[R]:
    if not 0 < limit <= _MAX_ROWS:
        raise ConfigurationError(f"invalid limit {limit}: expected 1 to {_MAX_ROWS:,} rows")

    def read() -> Operation[list[R]]:
        rows = yield Query(statement, {"tenant": tenant, "provider": provider, "capability": None, "limit": limit})
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


# -- overview of open breakers ----------------------------------------------------------------------

#: Maximum number of summaries that are returned.
MAX_OPEN_BREAKERS: Final = 200

_SELECT_OPEN_BREAKERS: Final = """
select b.provider_name, b.capability, b.state, count(*)::int, max(extract(epoch from now() - b.updated_at))::float8
from ergon.provider_breakers b where b.state <> 'closed' group by 1, 2, 3 order by 1, 2, 3 limit %(most)s
"""


@dataclass(frozen=True, slots=True)
class OpenBreakerSummary:
    """The breakers of one provider in one state, for *tenants* tenants; the oldest state is *seconds* old."""

    provider: str
    capability: str
    state: str
    tenants: int
    seconds: float


def open_breakers() -> Operation[list[OpenBreakerSummary]]:
    """Return all breakers that are not closed."""
    return [OpenBreakerSummary(*row) for row in (yield Query(_SELECT_OPEN_BREAKERS, {"most": MAX_OPEN_BREAKERS}))]


# -- availability for a tenant ----------------------------------------------------------------------

#: Maximum number of failures that are counted, the latest.
MAX_FAILURES: Final = 1_000

_SELECT_CLOCK: Final = "select extract(epoch from ergon.provider_clock())::float8"
SELECT_FAILURES: Final = """
select f.reason_code, count(*)::int from (
    select m.reason_code from ergon.provider_execution_metrics m
    where m.tenant_id = %(tenant)s and m.provider_name = %(provider)s and m.capability = %(capability)s
        and m.created_at > now() - interval '1 hour' and m.reason_code <> all(%(not_called)s::text[])
    order by m.created_at desc limit %(most)s
) f group by 1 order by 2 desc, 1
"""
_SELECT_LAST_ERROR: Final = """
select h.last_error_code, extract(epoch from h.last_error_at)::float8 from ergon.provider_health_states h
where h.tenant_id = %(tenant)s and h.provider_name = %(provider)s and h.capability = %(capability)s
"""


def provider_availability(tenant: str, scopes: Sequence[tuple[str, str]] = ()) -> Operation[list[ProviderAvailability]]:
    """Return the availability of *scopes* (provider, capability) for *tenant*; without any, of the blocked ones."""
    return (yield from in_snapshot(_read_named(tenant, scopes) if scopes else _read_blocked(tenant)))


def _read_named(tenant: str, scopes: Sequence[tuple[str, str]]) -> Operation[list[ProviderAvailability]]:
    availabilities = []
    for provider, capability in dict.fromkeys(scopes):
        reasons_by_scope = yield from _read_block_reasons(tenant, provider, capability)
        availabilities.append(
            (
                yield from _read_availability(
                    tenant, provider, capability, reasons_by_scope.get((provider, capability), [])
                )
            )
        )
    return availabilities


def _read_blocked(tenant: str) -> Operation[list[ProviderAvailability]]:
    reasons_by_scope = yield from _read_block_reasons(tenant)
    availabilities = []
    for (provider, capability), block_reasons in sorted(reasons_by_scope.items()):
        availabilities.append((yield from _read_availability(tenant, provider, capability, block_reasons)))
    return availabilities


def _read_block_reasons(
    tenant: str, provider: str | None = None, capability: str | None = None
) -> Operation[dict[tuple[str, str], list[BlockReason]]]:
    ((now,),) = yield Query(_SELECT_CLOCK)
    reasons_by_scope: dict[tuple[str, str], list[BlockReason]] = {}
    for stored_tenant in (tenant, ALL_TENANTS):
        rows = yield from read_breakers_and_quotas(stored_tenant, provider=provider, capability=capability)
        for scope, block_reason in (*_find_breaker_blocks(rows[0], now), *_find_quota_blocks(rows[1])):
            reasons_by_scope.setdefault((scope.provider_name, scope.capability), []).append(block_reason)
    return reasons_by_scope


def _find_breaker_blocks(rows: Sequence[BreakerRow], now: float) -> Iterator[tuple[ProviderScope, BlockReason]]:
    for row in rows:
        state, is_shared = breakers.advance(_to_snapshot(row), now), row.account.tenant_id is None
        visible = breakers.visible_state(state, now)
        if visible is BreakerState.CLOSED:
            continue
        cause = BlockCause.BREAKER if visible is BreakerState.OPEN else BlockCause.PROBING
        cause = cause if state.override is None else BlockCause.OPERATOR
        faults = None if is_shared or cause is BlockCause.OPERATOR else row.consecutive_failures
        yield (
            row.account,
            BlockReason(cause=cause, shared=is_shared, until=breakers.blocked_until(state), faults=faults),
        )


def _find_quota_blocks(rows: Sequence[QuotaRow]) -> Iterator[tuple[ProviderScope, BlockReason]]:
    for row in rows:
        if row.remaining_count > 0:
            continue
        is_shared = row.account.tenant_id is None
        counts: dict[str, Any] = {} if is_shared else {"used": row.used_count, "limit": row.limit_count}
        until = row.window_end.timestamp()
        yield (
            row.account,
            BlockReason(cause=BlockCause.QUOTA, shared=is_shared, until=until, window=row.kind.value, **counts),
        )


def _to_snapshot(row: BreakerRow) -> BreakerSnapshot:
    override = None
    if row.override is not None and row.override_until is not None:
        override = Override(row.override, row.override_until.timestamp())
    until = None if row.open_until is None else row.open_until.timestamp()
    return BreakerSnapshot(row.state, row.consecutive_failures, until, row.generation, override=override)


def _read_availability(
    tenant: str, provider: str, capability: str, block_reasons: Sequence[BlockReason]
) -> Operation[ProviderAvailability]:
    parameters = {"tenant": tenant, "provider": provider, "capability": capability}
    failures = yield Query(
        SELECT_FAILURES, {**parameters, "not_called": sorted(NOT_CALLED_REASONS), "most": MAX_FAILURES}
    )
    last_error = yield Query(_SELECT_LAST_ERROR, parameters)
    code, last_error_at = last_error[0] if last_error else (None, None)
    return ProviderAvailability(
        **parameters,
        # The reason that ends last comes first: no call is admitted before its end.
        block_reasons=tuple(sorted(block_reasons, key=lambda block_reason: block_reason.until or 0.0, reverse=True)),
        failures=dict(failures),
        last_error=code,
        last_error_at=last_error_at,
    )
