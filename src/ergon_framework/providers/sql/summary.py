"""The health summary of one tenant's providers, in one statement whose duration does not depend on other tenants.

A tenant sees only its own rows. Of a quota and breaker that all tenants share it sees the breaker's state, because
that blocks its calls, and no counts: those include other tenants' calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from psycopg import AsyncConnection, Connection

from ergon_framework.providers import circuit_breaker as breakers
from ergon_framework.providers.circuit_breaker import BreakerSnapshot, BreakerState, Override, OverrideKind
from ergon_framework.providers.sql import minutes

#: Maximum number of providers in a summary.
MAX_PROVIDERS: Final = 1_000


@dataclass(frozen=True, slots=True)
class QuotaSummary:
    """The current window with the fewest remaining calls; of two equal ones the one that ends later."""

    limit_count: int
    used_count: int
    remaining_count: int
    window_end: datetime


@dataclass(frozen=True, slots=True)
class ProviderSummary:
    """The health of one provider and capability of a tenant."""

    provider_name: str
    capability: str
    breaker_state: BreakerState
    success_rate_1h: float | None
    p95_latency_ms_1h: float | None
    quota: QuotaSummary | None
    last_error_code: str | None
    last_error_at: datetime | None
    last_success_at: datetime | None


@dataclass(frozen=True, slots=True)
class TenantSummary:
    """The health of all of a tenant's providers; times are the database's."""

    tenant_id: str
    generated_at: datetime
    providers: tuple[ProviderSummary, ...]


# Every scope with minutes is in provider_health_states, because they are written together; the minutes themselves are
# read for the last hour only.
_SELECT_SUMMARY: Final = f"""
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
{minutes.HOUR_RATES},
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


def read_summary(connection: Connection[Any], tenant_id: str) -> TenantSummary:
    """Return the current health of the providers of *tenant_id*; without providers if the tenant is unknown."""
    return _to_summary(tenant_id, connection.execute(_SELECT_SUMMARY, _build_parameters(tenant_id)).fetchall())


async def read_summary_async(connection: AsyncConnection[Any], tenant_id: str) -> TenantSummary:
    """See read_summary."""
    return _to_summary(
        tenant_id, await (await connection.execute(_SELECT_SUMMARY, _build_parameters(tenant_id))).fetchall()
    )


def _build_parameters(tenant_id: str) -> dict[str, Any]:
    return {"tenant": tenant_id, "most": MAX_PROVIDERS, "bounds": minutes.BUCKET_BOUNDS}


def _to_summary(tenant_id: str, rows: list[tuple[Any, ...]]) -> TenantSummary:
    generated_at: datetime = rows[0][0]
    return TenantSummary(
        tenant_id, generated_at.astimezone(UTC), tuple(_to_provider_summary(row) for row in rows if row[1] is not None)
    )


def _to_provider_summary(row: tuple[Any, ...]) -> ProviderSummary:
    now, provider_name, capability, rate, p95, limit, used, remaining, window_end, code, error_at, success_at = row[:12]
    # The tenant's calls meet the more restrictive of the two breakers.
    states = (_get_visible_state(now, *row[12:16]), _get_visible_state(now, *row[16:20]))
    return ProviderSummary(
        provider_name=provider_name,
        capability=capability,
        breaker_state=max(states, key=_STATES_BY_SEVERITY.index),
        success_rate_1h=rate,
        p95_latency_ms_1h=p95,
        quota=None if limit is None else QuotaSummary(limit, used, remaining, window_end.astimezone(UTC)),
        last_error_code=code,
        last_error_at=_to_utc(error_at),
        last_success_at=_to_utc(success_at),
    )


#: From admitting all calls to admitting none.
_STATES_BY_SEVERITY: Final = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


def _get_visible_state(
    at: datetime,
    state: str | None,
    open_until: datetime | None,
    override: str | None,
    override_until: datetime | None,
) -> BreakerState:
    """Return a stored breaker's state at *at*: an override counts as its effect, an ended cooldown as half_open."""
    if state is None:
        return BreakerState.CLOSED
    breaker_override = (
        Override(OverrideKind(override), override_until.timestamp()) if override and override_until else None
    )
    until = None if open_until is None else open_until.timestamp()
    return breakers.visible_state(
        BreakerSnapshot(BreakerState(state), open_until=until, override=breaker_override), at.timestamp()
    )


def _to_utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.astimezone(UTC)
