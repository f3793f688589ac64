"""The operator: what a person may say to the books, with a name and a reason, and what he may read there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.books import Account
from ergon_framework.providers.circuit_breaker import BreakerState, OverrideKind
from ergon_framework.providers.errors import ProviderBadRequestError
from ergon_framework.providers.health import ProviderHealthState
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.sql import statements
from ergon_framework.providers.sql.names import account_of, owner_of
from ergon_framework.providers.sql.sweeping import LostRow
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Operation, Query, Rows

R = TypeVar("R")

_ACTOR: Final = 200
_REASON: Final = 1000
#: The longest that an override may hold, in seconds: what is meant for ever belongs into the policy.
_LONGEST: Final = 31 * 86_400.0
_MOST: Final = 10_000
_CALLS: Final = 10**12


@dataclass(frozen=True, slots=True)
class BreakerRow:
    """A breaker as it is stored: an open one whose cooldown is over says so until somebody asks.

    An override that has ended is not shown.
    """

    account: Account
    state: BreakerState
    consecutive_failures: int
    open_until: datetime | None
    generation: int
    override: OverrideKind | None
    override_until: datetime | None
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class QuotaRow:
    """One window; an extension shows in its limit from the first call on that needs it."""

    account: Account
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
    """What somebody has said."""

    at: datetime
    account: Account
    action: str
    until: datetime | None
    calls: int | None
    actor: str
    reason: str


# -- to say ---------------------------------------------------------------------------------------------


def force_open(
    dsn: str,
    account: Account,
    *,
    actor: str,
    reason: str,
    until: datetime | None = None,
    seconds: float | None = None,
) -> BreakerRow:
    """Let nothing through to the provider of *account* for so long."""
    return _overridden(dsn, account, "force_open", actor=actor, reason=reason, ends=_ends(until, seconds))


def disable(
    dsn: str,
    account: Account,
    *,
    actor: str,
    reason: str,
    until: datetime | None = None,
    seconds: float | None = None,
) -> BreakerRow:
    """Let everything through for so long, whatever the breaker says."""
    return _overridden(dsn, account, "disable", actor=actor, reason=reason, ends=_ends(until, seconds))


def lift(dsn: str, account: Account, *, actor: str, reason: str) -> BreakerRow:
    """Let the breaker decide again."""
    return _overridden(dsn, account, "lift", actor=actor, reason=reason)


def extend_quota(
    dsn: str,
    account: Account,
    *,
    calls: int,
    actor: str,
    reason: str,
    until: datetime | None = None,
    seconds: float | None = None,
) -> list[QuotaRow]:
    """Allow so many *calls* more in every limited window while it holds; the last word counts, so that 0 ends it."""
    if not 0 <= calls <= _CALLS:
        raise ConfigurationError(f"a quota is extended by 0 to {_CALLS:,} calls, not {calls}")
    ends = _ends(until, seconds)

    def said(account_tenant: str) -> Operation[list[QuotaRow]]:
        yield _said(account, account_tenant, "extend_quota", actor=actor, reason=reason, ends=ends, calls=calls)
        rows = yield _one(_QUOTAS, account, account_tenant)
        return _quota_rows(rows)

    return _performed(dsn, lambda: said(_owner(account)))


def _overridden(
    dsn: str, account: Account, action: str, *, actor: str, reason: str, ends: dict[str, Any] | None = None
) -> BreakerRow:
    def said(tenant: str) -> Operation[BreakerRow]:
        yield _said(account, tenant, action, actor=actor, reason=reason, ends=ends)
        (row,) = _breaker_rows((yield _one(_BREAKERS, account, tenant)))
        return row

    return _performed(dsn, lambda: said(_owner(account)))


def _said(
    account: Account,
    tenant: str,
    action: str,
    *,
    actor: str,
    reason: str,
    ends: dict[str, Any] | None,
    calls: int | None = None,
) -> Query:
    """The word and its effect, in one statement and so in one transaction."""
    for what, given, longest in (("actor", actor, _ACTOR), ("reason", reason, _REASON)):
        if not 0 < len(given.strip()) <= longest or "\0" in given:
            raise ConfigurationError(f"an override needs its {what}: 1 to {longest} characters")
    parameters = {
        "tenant": tenant,
        "provider": account.provider_name,
        "capability": account.capability,
        "action": action,
        "calls": calls,
        "actor": actor.strip(),
        "reason": reason.strip(),
        **(ends or {"until": None, "seconds": None}),
    }
    return Query(statements.OVERRIDE, parameters)


def _ends(until: datetime | None, seconds: float | None) -> dict[str, Any]:
    """When an override ends by itself: at a moment, or after so many seconds of the server's clock."""
    if (until is None) == (seconds is None):
        raise ConfigurationError("an override ends by itself: say until when, or after how many seconds, not both")
    if until is not None and until.tzinfo is None:
        raise ConfigurationError(f"{until.isoformat()} names no zone, so it is no moment")
    left = seconds if until is None else (until - datetime.now(UTC)).total_seconds()
    if left is None or not 0 < left <= _LONGEST:
        raise ConfigurationError("an override holds for more than 0 seconds and at most for 31 days")
    return {"until": until, "seconds": seconds}


def _owner(account: Account) -> str:
    try:
        return owner_of(account)
    except ProviderBadRequestError as error:
        raise ConfigurationError(str(error)) from None


# -- to read --------------------------------------------------------------------------------------------


def breakers(
    dsn: str, tenant: str | None = None, *, provider: str | None = None, limit: int = 1000
) -> list[BreakerRow]:
    """The breakers of *tenant*, or of all; ``"*"`` is the account of all tenants together."""
    return _read(dsn, _BREAKERS, _breaker_rows, tenant, provider=provider, limit=limit)


def quotas(dsn: str, tenant: str | None = None, *, provider: str | None = None, limit: int = 1000) -> list[QuotaRow]:
    """The windows that last."""
    return _read(dsn, _QUOTAS, _quota_rows, tenant, provider=provider, limit=limit)


def health_states(dsn: str, tenant: str | None = None, *, limit: int = 1000) -> list[ProviderHealthState]:
    """Return the rows of ``provider_health_states``, of one tenant or of all."""
    return _read(dsn, _HEALTH_STATES, lambda rows: [_health_state(row) for row in rows], tenant, limit=limit)


def lost(dsn: str, tenant: str | None = None, *, limit: int = 1000) -> list[LostRow]:
    """Reservations whose owners let them lapse, the newest first; booked as used, whether they were or not."""
    return _read(dsn, _LOST, lambda rows: [LostRow.of(row) for row in rows], tenant, limit=limit)


def overrides(dsn: str, tenant: str | None = None, *, limit: int = 100) -> list[OverrideRow]:
    """What was said, the newest first."""
    return _read(dsn, _OVERRIDES, _override_rows, tenant, limit=limit)


_BREAKERS: Final = """
select b.tenant_id, b.provider_name, b.capability, b.state, b.consecutive_failures, b.open_until, b.generation,
    case when b.override_until > ergon.provider_clock() then b.override_kind end,
    case when b.override_until > ergon.provider_clock() then b.override_until end, b.updated_at
from ergon.provider_breakers b
where (%(tenant)s::text is null or b.tenant_id = %(tenant)s) and (%(provider)s::text is null or
    b.provider_name = %(provider)s) and (%(capability)s::text is null or b.capability = %(capability)s)
order by 1, 2, 3 limit %(limit)s
"""

_QUOTAS: Final = """
select q.tenant_id, q.provider_name, q.capability, q.window_kind, q.window_start, q.window_end, q.limit_count,
    q.used_count, q.remaining_count, q.last_exhausted_at, q.updated_at
from ergon.provider_quota_windows q
where q.window_end > ergon.provider_clock() and (%(tenant)s::text is null or q.tenant_id = %(tenant)s)
    and (%(provider)s::text is null or q.provider_name = %(provider)s)
    and (%(capability)s::text is null or q.capability = %(capability)s)
order by 1, 2, 3, 6 limit %(limit)s
"""

_HEALTH_FIELDS: Final = tuple(field.name for field in fields(ProviderHealthState))
_HEALTH_STATES: Final = """
select h.id, h.tenant_id, h.provider_name, h.capability, h.breaker_state, h.consecutive_failures, h.success_rate_1h,
    h.p95_latency_ms_1h, h.last_error_code, h.last_error_at, h.last_success_at, h.updated_at
from ergon.provider_health_states h
where %(tenant)s::text is null or h.tenant_id = %(tenant)s
order by h.tenant_id, h.provider_name, h.capability limit %(limit)s
"""

_LOST: Final = """
select r.id, r.tenant_id, r.provider_name, r.capability, r.window_starts, r.owner, r.calls, r.until, r.lost_at,
    r.created_at
from ergon.provider_reservations r
where (r.lost_at is not null or r.until < ergon.provider_clock())
    and (%(tenant)s::text is null or r.tenant_id = %(tenant)s)
    and %(provider)s::text is null and %(capability)s::text is null
order by r.id desc limit %(limit)s
"""

_OVERRIDES: Final = """
select o.at, o.tenant_id, o.provider_name, o.capability, o.action, o.until, o.calls, o.actor, o.reason
from ergon.provider_overrides o
where (%(tenant)s::text is null or o.tenant_id = %(tenant)s)
    and %(provider)s::text is null and %(capability)s::text is null
order by o.id desc limit %(limit)s
"""


def breakers_and_quotas(
    tenant: str, *, provider: str | None, capability: str | None
) -> Operation[tuple[list[BreakerRow], list[QuotaRow]]]:
    """What ``breakers`` and ``quotas`` read, for whoever has a line to the database already."""
    given = {"tenant": tenant, "provider": provider, "capability": capability, "limit": _MOST}
    held = _breaker_rows((yield Query(_BREAKERS, given)))
    return held, _quota_rows((yield Query(_QUOTAS, given)))


def _one(sql: str, account: Account, tenant: str) -> Query:
    named = {"tenant": tenant, "provider": account.provider_name, "capability": account.capability}
    return Query(sql, {**named, "limit": _MOST})


def _breaker_rows(rows: Rows) -> list[BreakerRow]:
    return [
        BreakerRow(
            account_of(*names),
            BreakerState(state),
            failures,
            open_until,
            generation,
            None if kind is None else OverrideKind(kind),
            until,
            updated_at,
        )
        for *names, state, failures, open_until, generation, kind, until, updated_at in rows
    ]


def _quota_rows(rows: Rows) -> list[QuotaRow]:
    return [QuotaRow(account_of(*row[:3]), WindowKind(row[3]), row[4].astimezone(UTC), *row[5:]) for row in rows]


def _override_rows(rows: Rows) -> list[OverrideRow]:
    return [OverrideRow(row[0], account_of(*row[1:4]), *row[4:]) for row in rows]


def _read(
    dsn: str,
    sql: str,
    shown: Callable[[Rows], list[R]],
    tenant: str | None,
    *,
    provider: str | None = None,
    limit: int,
) -> list[R]:
    if not 0 < limit <= _MOST:
        raise ConfigurationError(f"1 to {_MOST:,} rows are read at once, not {limit}")

    def read() -> Operation[list[R]]:
        rows = yield Query(sql, {"tenant": tenant, "provider": provider, "capability": None, "limit": limit})
        return shown(rows)

    return _performed(dsn, read)


def _performed(dsn: str, make: Callable[[], Operation[R]]) -> R:
    lines = Lines(dsn, most=1)
    try:
        return lines.run(make())
    finally:
        lines.close()


def _health_state(row: Sequence[Any]) -> ProviderHealthState:
    named = dict(zip(_HEALTH_FIELDS, row, strict=True))
    return ProviderHealthState(**named | {"breaker_state": BreakerState(named["breaker_state"])})
