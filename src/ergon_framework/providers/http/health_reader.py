"""The reader of provider health: the summary of one tenant's providers, read without blocking the event loop.

A summary is read in one statement whose duration does not depend on other tenants, over a few separate connections.

A tenant sees only its own rows. Of a quota and breaker that all tenants share it sees the breaker's state, because
that blocks its calls, and no counts: those include other tenants' calls.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, Connection

from ergon_framework.database.address import connect_options, find_login
from ergon_framework.database.connection import open_connection_async
from ergon_framework.errors import ConnectionLostError
from ergon_framework.providers import circuit_breaker as breakers
from ergon_framework.providers.circuit_breaker import BreakerSnapshot, BreakerState, Override, OverrideKind
from ergon_framework.providers.postgres import rollups

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


# Every scope (tenant, provider, capability) with sums per minute is in provider_health_states, because both are written
# together; of the sums, only those of the last hour are read.
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
{rollups.HOUR_RATES},
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
    return {"tenant": tenant_id, "most": MAX_PROVIDERS, "bounds": rollups.BUCKET_BOUNDS}


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


# -- the reader -------------------------------------------------------------------------------------

_SET_LIMITS: Final = "select set_config('statement_timeout', %s, true), set_config('transaction_read_only', 'on', true)"


class DatabaseUnavailable(ConnectionLostError):
    """The database did not answer, or not in time."""


class HealthReader:
    """A reader with at most *max_connections* concurrent connections, and a *timeout* in seconds for each answer.

    Concurrent callers that ask for the same tenant share one read, so that no tenant uses more than one connection.
    It is small and not a pool with background workers: after an outage the very next read connects.
    It belongs to the event loop of its first use, and is closed there.
    """

    def __init__(self, dsn: str, *, max_connections: int = 4, timeout: float = 2.0) -> None:
        self._options: dict[str, Any] = {**connect_options(dsn), "autocommit": True, "prepare_threshold": None}
        self._login = find_login(self._options)
        self._timeout = timeout
        self._semaphore = asyncio.Semaphore(max_connections)
        self._idle: list[AsyncConnection[Any]] = []
        #: By tenant: the read that callers share; removed when it has ended or is too late.
        self._reads: dict[str, asyncio.Task[TenantSummary]] = {}
        #: Running reads, including those that took too long and are being cancelled.
        self._running: set[asyncio.Task[TenantSummary]] = set()

    async def read(self, tenant_id: str) -> TenantSummary:
        """Return the summary of *tenant_id*; raise DatabaseUnavailable if it cannot be read in time."""
        task = self._reads.get(tenant_id) or self._start_read(tenant_id)
        # A late read is not awaited: to cancel a statement the driver must ask the same server.
        await asyncio.wait({task}, timeout=self._timeout)
        if not task.done():
            task.cancel()
            self._discard_read(tenant_id, task)
        if not task.done() or task.cancelled():
            raise DatabaseUnavailable("the database did not respond within the timeout")
        try:
            return task.result()
        except psycopg.Error as error:
            raise DatabaseUnavailable("the database is unavailable") from error

    async def close(self) -> None:
        """Close all connections; the reader can be used again, and then connects again."""
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=self._timeout)
        while self._idle:
            await self._idle.pop().close()

    def _start_read(self, tenant_id: str) -> asyncio.Task[TenantSummary]:
        task = self._reads[tenant_id] = asyncio.create_task(self._read_with_connection(tenant_id))
        self._running.add(task)
        task.add_done_callback(self._handle_read_end)
        task.add_done_callback(lambda finished: self._discard_read(tenant_id, finished))
        return task

    def _discard_read(self, tenant_id: str, task: asyncio.Task[TenantSummary]) -> None:
        """Let the next caller start its own read."""
        if self._reads.get(tenant_id) is task:
            del self._reads[tenant_id]

    def _handle_read_end(self, task: asyncio.Task[TenantSummary]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved

    async def _read_with_connection(self, tenant_id: str) -> TenantSummary:
        async with self._semaphore:
            # Idle connections may be broken since a restart of the server; a new connection shows its true state.
            while self._idle:
                with suppress(psycopg.OperationalError):
                    return await self._read_summary(self._idle.pop(), tenant_id)
            connection = await open_connection_async(AsyncConnection.connect, self._options, self._login)
            return await self._read_summary(connection, tenant_id)

    async def _read_summary(self, connection: AsyncConnection[Any], tenant_id: str) -> TenantSummary:
        try:
            async with connection.pipeline(), connection.transaction():
                await connection.execute(_SET_LIMITS, [f"{round(1000 * self._timeout)}ms"])
                tenant_summary = await read_summary_async(connection, tenant_id)
        except BaseException:
            await connection.close()
            raise
        self._idle.append(connection)
        return tenant_summary
