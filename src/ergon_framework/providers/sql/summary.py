"""The summary: how the providers of one tenant are, in one statement that is as fast for one tenant as for a thousand.

A tenant sees its own rows only. Where quota and breaker are shared by all tenants it sees the word on the breaker,
because its calls are held back by it, and no count: those are made of other tenants' calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from psycopg import AsyncConnection, Connection

from ergon_framework.providers import circuit_breaker as breakers
from ergon_framework.providers.circuit_breaker import BreakerState, Override, OverrideKind, Snapshot
from ergon_framework.providers.sql import minutes

#: More providers than this are not shown.
MOST: Final = 1_000


@dataclass(frozen=True, slots=True)
class Quota:
    """The window of now that has least left; of two alike the one that lasts longer."""

    limit_count: int
    used_count: int
    remaining_count: int
    window_end: datetime


@dataclass(frozen=True, slots=True)
class Health:
    """One provider and capability of a tenant."""

    provider_name: str
    capability: str
    breaker_state: BreakerState
    success_rate_1h: float | None
    p95_latency_ms_1h: float | None
    quota: Quota | None
    last_error_code: str | None
    last_error_at: datetime | None
    last_success_at: datetime | None


@dataclass(frozen=True, slots=True)
class Summary:
    """All of a tenant's providers; moments are the database's."""

    tenant_id: str
    generated_at: datetime
    providers: tuple[Health, ...]


# Every account of a minute is in provider_health_states, because they are written together; the minutes themselves are
# read for the last hour only.
_SUMMARY: Final = f"""
with known as (
    select provider_name, capability from ergon.provider_health_states where tenant_id = %(tenant)s
    union
    select provider_name, capability from ergon.provider_breakers where tenant_id = %(tenant)s
    union
    select provider_name, capability from ergon.provider_quota_states
    where tenant_id = %(tenant)s and window_end > now()
    order by provider_name, capability limit %(most)s
),
keys as materialized (select %(tenant)s::text as tenant_id, provider_name, capability from known),
{minutes.HOURS},
tightest as (
    select distinct on (provider_name, capability)
        provider_name, capability, limit_count, used_count, remaining_count, window_end
    from ergon.provider_quota_states
    where tenant_id = %(tenant)s and window_end > now() and window_start <= now()
    order by provider_name, capability, remaining_count, window_end desc
)
select clock.at, keys.provider_name, keys.capability, hours.success_rate_1h, hours.p95_latency_ms_1h,
    limit_count, used_count, remaining_count, window_end,
    health.last_error_code, health.last_error_at, health.last_success_at,
    own.state, own.open_until, own.override_kind, own.override_until,
    shared.state, shared.open_until, shared.override_kind, shared.override_until
from (select now() as at) as clock
left join keys on true
left join hours using (tenant_id, provider_name, capability)
left join tightest using (provider_name, capability)
left join ergon.provider_health_states as health using (tenant_id, provider_name, capability)
left join ergon.provider_breakers as own using (tenant_id, provider_name, capability)
left join ergon.provider_breakers as shared
    on shared.tenant_id = '*' and shared.provider_name = keys.provider_name and shared.capability = keys.capability
order by keys.provider_name, keys.capability
"""  # noqa: S608 - of constants


def summary(connection: Connection[Any], tenant_id: str) -> Summary:
    """How the providers of *tenant_id* are now; none where nobody has heard of it."""
    return _shaped(tenant_id, connection.execute(_SUMMARY, _values(tenant_id)).fetchall())


async def summary_async(connection: AsyncConnection[Any], tenant_id: str) -> Summary:
    """See summary."""
    return _shaped(tenant_id, await (await connection.execute(_SUMMARY, _values(tenant_id))).fetchall())


def _values(tenant_id: str) -> dict[str, Any]:
    return {"tenant": tenant_id, "most": MOST, "bounds": minutes.BOUNDS}


def _shaped(tenant_id: str, rows: list[tuple[Any, ...]]) -> Summary:
    at: datetime = rows[0][0]
    return Summary(tenant_id, at.astimezone(UTC), tuple(_health(row) for row in rows if row[1] is not None))


def _health(row: tuple[Any, ...]) -> Health:
    at, provider_name, capability, rate, p95, limit, used, remaining, window_end, code, error_at, success_at = row[:12]
    # Whichever lets less through is what the tenant's calls meet.
    states = (_state(at, *row[12:16]), _state(at, *row[16:20]))
    return Health(
        provider_name=provider_name,
        capability=capability,
        breaker_state=max(states, key=_LETS_THROUGH.index),
        success_rate_1h=rate,
        p95_latency_ms_1h=p95,
        quota=None if limit is None else Quota(limit, used, remaining, window_end.astimezone(UTC)),
        last_error_code=code,
        last_error_at=_utc(error_at),
        last_success_at=_utc(success_at),
    )


#: From everything to nothing.
_LETS_THROUGH: Final = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


def _state(
    at: datetime,
    state: str | None,
    open_until: datetime | None,
    override: str | None,
    override_until: datetime | None,
) -> BreakerState:
    """How a stored breaker is at *at*: an override counts as what it does, a cooldown that is over as half open."""
    if state is None:
        return BreakerState.CLOSED
    said = Override(OverrideKind(override), override_until.timestamp()) if override and override_until else None
    until = None if open_until is None else open_until.timestamp()
    return breakers.shown(Snapshot(BreakerState(state), open_until=until, override=said), at.timestamp())


def _utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.astimezone(UTC)
