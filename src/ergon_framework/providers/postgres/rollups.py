"""Minute roll-ups, from which health is read: added up incrementally in the database, or recomputed from its rows.

A roll-up is the sum of the attempts (tries of provider calls) of one minute and scope: a tenant, a provider and a
capability.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from psycopg import Connection

from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import (
    BUCKET_BOUNDS_MS,
    NOT_CALLED_REASONS,
    AttemptOutcome,
    AttemptSample,
    CallStats,
    floor_to_minute,
)
from ergon_framework.providers.models import AttemptRecord


class RollupKey(NamedTuple):
    """The scope and the minute of a roll-up; all writers lock roll-ups in this order, so that they cannot deadlock."""

    tenant_id: str
    provider_name: str
    capability: str
    minute: datetime


@dataclass(frozen=True, slots=True)
class MinuteRollup:
    """One minute of one scope. Calls that the framework itself rejected are not errors of the provider."""

    calls: CallStats
    last_success_at: datetime | None = None
    last_error_at: datetime | None = None
    last_error_code: str | None = None


class RollupAttempt(NamedTuple):
    """The fields of an attempt that a roll-up uses; *at* has the precision of the table, one microsecond."""

    tenant_id: str
    provider_name: str
    capability: str
    at: datetime
    outcome: AttemptOutcome
    reason_code: ReasonCode | None
    duration_ms: float


def attempt_time(created_at: float) -> datetime:
    """Return the time of a row as the table stores it. Its minute follows from this value: rounding may change it."""
    return datetime.fromtimestamp(created_at, UTC)


def to_attempt(row: AttemptRecord) -> RollupAttempt:
    """Return the fields of *row* that a roll-up uses."""
    at = attempt_time(row.created_at)
    scope = row.tenant_id, row.provider_name, row.capability
    return RollupAttempt(*scope, at, row.outcome, row.reason_code, row.duration_ms)


def roll_up(attempts: Iterable[RollupAttempt]) -> dict[RollupKey, MinuteRollup]:
    """Return the roll-ups of *attempts*, in the order of their keys."""
    attempts_by_key: dict[RollupKey, list[RollupAttempt]] = {}
    for attempt in attempts:
        minute = datetime.fromtimestamp(floor_to_minute(attempt.at.timestamp()), UTC)
        key = RollupKey(attempt.tenant_id, attempt.provider_name, attempt.capability, minute)
        attempts_by_key.setdefault(key, []).append(attempt)
    return {key: _build_rollup(attempts_by_key[key]) for key in sorted(attempts_by_key)}


def _build_rollup(attempts: list[RollupAttempt]) -> MinuteRollup:
    calls = CallStats.from_rows(
        AttemptSample(attempt.at.timestamp(), attempt.outcome, attempt.duration_ms, attempt.reason_code)
        for attempt in attempts
    )
    # Of two errors at the same time the last code in sort order wins: the result must not depend on the row order.
    error = max(
        (
            (attempt.at, attempt.reason_code.value)
            for attempt in attempts
            if attempt.reason_code
            and attempt.reason_code not in NOT_CALLED_REASONS
            and attempt.outcome is not AttemptOutcome.DEAD_LETTER
        ),
        default=(None, None),
    )
    last_success_at = max(
        (attempt.at for attempt in attempts if attempt.outcome is AttemptOutcome.SUCCESS), default=None
    )
    return MinuteRollup(calls, last_success_at, *error)


# -- in the database --------------------------------------------------------------------------------

ADD_ROLLUPS: Final = """
insert into ergon.provider_minute_rollups as here (
    tenant_id, provider_name, capability, minute, success, retry, failed, dead_letter, rejected, buckets, max_ms,
    last_success_at, last_error_at, last_error_code
)
select tenant_id, provider_name, capability, minute, success, retry, failed, dead_letter, rejected, buckets::bigint[],
    max_ms, last_success_at, last_error_at, last_error_code
from unnest(
    %(tenants)s::text[], %(providers)s::text[], %(capabilities)s::text[], %(minutes)s::timestamptz[],
    %(success)s::bigint[], %(retry)s::bigint[], %(failed)s::bigint[], %(dead_letter)s::bigint[], %(rejected)s::bigint[],
    %(buckets)s::text[], %(max_ms)s::double precision[], %(last_success)s::timestamptz[],
    %(last_error)s::timestamptz[], %(last_code)s::text[]
) with ordinality as new (
    tenant_id, provider_name, capability, minute, success, retry, failed, dead_letter, rejected, buckets, max_ms,
    last_success_at, last_error_at, last_error_code, place
)
order by place
on conflict (tenant_id, provider_name, capability, minute) do update set
    success = here.success + excluded.success,
    retry = here.retry + excluded.retry,
    failed = here.failed + excluded.failed,
    dead_letter = here.dead_letter + excluded.dead_letter,
    rejected = here.rejected + excluded.rejected,
    buckets = (
        select array_agg(mine + its order by bucket)
        from unnest(here.buckets, excluded.buckets) with ordinality as both_of (mine, its, bucket)
    ),
    max_ms = greatest(here.max_ms, excluded.max_ms),
    last_success_at = greatest(here.last_success_at, excluded.last_success_at),
    (last_error_at, last_error_code) = (
        select at, code
        from (values (here.last_error_at, here.last_error_code), (excluded.last_error_at, excluded.last_error_code))
            as both_of (at, code)
        order by at desc nulls last, code collate "C" desc nulls last
        limit 1
    )
"""

# Element by element, which is several times as fast as unnesting the arrays of sixty minutes; as integers, whose sums
# are fast: no scope makes two thousand million calls in a minute.
_SUMS: Final = ", ".join(f"sum(buckets[{place}]::integer)" for place in range(1, len(BUCKET_BOUNDS_MS) + 2))

#: From a relation `keys` (tenant_id, provider_name, capability): the hour of each scope that had attempts, with the
#: rules of HourStats and CallStats: the current minute so far and the 59 before it; p95 by nearest rank.
HOUR_RATES: Final = f"""
minutes as materialized (
    select keys.tenant_id, keys.provider_name, keys.capability, success, made, max_ms, buckets
    from keys cross join lateral (
        select success, success + retry + failed as made, max_ms, buckets
        from ergon.provider_minute_rollups as here
        where here.tenant_id = keys.tenant_id
            and here.provider_name = keys.provider_name
            and here.capability = keys.capability
            and minute > date_trunc('minute', now(), 'UTC') - interval '1 hour'
            and minute <= date_trunc('minute', now(), 'UTC')
        -- Scope by scope through the index, whatever the planner believes of the table's size.
        offset 0
    ) as of_scope
),
counted as materialized (
    select tenant_id, provider_name, capability, sum(success)::bigint as success, sum(made)::bigint as made,
        max(max_ms) as max_ms, array[{_SUMS}] as buckets
    from minutes
    group by tenant_id, provider_name, capability
),
hours as (
    select tenant_id, provider_name, capability,
        success::double precision / nullif(made, 0) as success_rate_1h,
        (
            -- Above the last bound there is none, and the longest is what is left.
            select least((%(bounds)s::double precision[])[bucket], max_ms)
            from (
                select bucket, sum(calls) over (order by bucket) as reached
                from unnest(buckets) with ordinality as of_hour (calls, bucket)
            ) as ranked
            where made > 0 and reached >= (made * 95 + 99) / 100
            order by bucket limit 1
        ) as p95_latency_ms_1h
    from counted
)
"""  # noqa: S608 - of constants
BUCKET_BOUNDS: Final = list(BUCKET_BOUNDS_MS)


def rollup_columns(rollups: dict[RollupKey, MinuteRollup]) -> dict[str, Any]:
    """Return *rollups* as the parameters of ADD_ROLLUPS."""
    keys, values = list(rollups), list(rollups.values())
    calls = [rollup.calls for rollup in values]
    return {
        "tenants": [key.tenant_id for key in keys],
        "providers": [key.provider_name for key in keys],
        "capabilities": [key.capability for key in keys],
        "minutes": [key.minute for key in keys],
        "success": [counts.success for counts in calls],
        "retry": [counts.retry for counts in calls],
        "failed": [counts.failed for counts in calls],
        "dead_letter": [counts.dead_letter for counts in calls],
        "rejected": [counts.refused for counts in calls],
        # As text, because unnest would also unnest an array of arrays.
        "buckets": [f"{{{','.join(map(str, counts.buckets))}}}" for counts in calls],
        "max_ms": [counts.longest_ms for counts in calls],
        "last_success": [rollup.last_success_at for rollup in values],
        "last_error": [rollup.last_error_at for rollup in values],
        "last_code": [rollup.last_error_code for rollup in values],
    }


# -- comparison of roll-ups and rows ------------------------------------------------------------------

_SELECT_ROLLUPS: Final = """
select tenant_id, provider_name, capability, minute, success, retry, failed, dead_letter, rejected, buckets, max_ms,
    last_success_at, last_error_at, last_error_code
from ergon.provider_minute_rollups where minute >= %s and minute < %s
"""
_SELECT_ATTEMPTS: Final = """
select tenant_id, provider_name, capability, created_at, outcome, reason_code, duration_ms
from ergon.provider_execution_metrics where created_at >= %s and created_at < %s
"""


def load_rollups(connection: Connection[Any], since: datetime, until: datetime) -> dict[RollupKey, MinuteRollup]:
    """Load the stored roll-ups from *since* to just before *until*."""
    rollups = {}
    for row in connection.execute(_SELECT_ROLLUPS, [since, until]):
        tenant, provider, capability, minute, success, retry, failed, dead_letter, refused, buckets, longest_ms = row[
            :11
        ]
        calls = CallStats(success, retry, failed, dead_letter, refused, tuple(buckets), longest_ms)
        rollups[RollupKey(tenant, provider, capability, minute.astimezone(UTC))] = MinuteRollup(calls, *row[11:])
    return rollups


def recompute_rollups(connection: Connection[Any], since: datetime, until: datetime) -> dict[RollupKey, MinuteRollup]:
    """Recompute the same roll-ups from the attempts, which are complete without sampling and within their retention.

    It reads every row: for checks, not for dashboards.
    """
    return roll_up(_read_attempts(connection, since, until))


def _read_attempts(connection: Connection[Any], since: datetime, until: datetime) -> Iterator[RollupAttempt]:
    with connection.transaction(), connection.cursor("attempts") as cursor:
        cursor.itersize = 10_000
        for tenant, provider, capability, at, outcome, reason, duration_ms in cursor.execute(
            _SELECT_ATTEMPTS, [since, until]
        ):
            code = None if reason is None else ReasonCode(reason)
            yield RollupAttempt(
                tenant, provider, capability, at.astimezone(UTC), AttemptOutcome(outcome), code, duration_ms
            )
