"""Minutes: the roll-ups that health is read from, as the database adds them up, and as its rows give them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from psycopg import Connection

from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.execution import AttemptRow
from ergon_framework.providers.health import BOUNDS_MS, NOT_CALLED, Calls, Outcome, Row, minute_of


class Place(NamedTuple):
    """Whose attempts, and in which minute; in this order everybody locks them, so that nobody waits in a circle."""

    tenant_id: str
    provider_name: str
    capability: str
    minute: datetime


@dataclass(frozen=True, slots=True)
class Tally:
    """One minute of one account. What was refused by ourselves is no error of the provider's."""

    calls: Calls
    last_success_at: datetime | None = None
    last_error_at: datetime | None = None
    last_error_code: str | None = None


class Attempt(NamedTuple):
    """What a tally reads of an attempt; *at* is the moment as the table keeps it, to the microsecond."""

    tenant_id: str
    provider_name: str
    capability: str
    at: datetime
    outcome: Outcome
    reason_code: ReasonCode | None
    duration_ms: float


def moment(created_at: float) -> datetime:
    """The moment of a row, as the table keeps it. Its minute is taken from this: rounding may move it into the next."""
    return datetime.fromtimestamp(created_at, UTC)


def attempt_of(row: AttemptRow) -> Attempt:
    """What a tally reads of *row*."""
    at = moment(row.created_at)
    who = row.tenant_id, row.provider_name, row.capability
    return Attempt(*who, at, row.outcome, row.reason_code, row.duration_ms)


def tallied(attempts: Iterable[Attempt]) -> dict[Place, Tally]:
    """The minutes that *attempts* make up, in the order of their places."""
    sorted_out: dict[Place, list[Attempt]] = {}
    for attempt in attempts:
        minute = datetime.fromtimestamp(minute_of(attempt.at.timestamp()), UTC)
        place = Place(attempt.tenant_id, attempt.provider_name, attempt.capability, minute)
        sorted_out.setdefault(place, []).append(attempt)
    return {place: _tally(sorted_out[place]) for place in sorted(sorted_out)}


def _tally(attempts: list[Attempt]) -> Tally:
    calls = Calls.of(Row(one.at.timestamp(), one.outcome, one.duration_ms, one.reason_code) for one in attempts)
    # Of two errors at the same moment the word that sorts last: any rule will do that does not depend on an order.
    error = max(
        (
            (one.at, one.reason_code.value)
            for one in attempts
            if one.reason_code and one.reason_code not in NOT_CALLED and one.outcome is not Outcome.DEAD_LETTER
        ),
        default=(None, None),
    )
    succeeded = max((one.at for one in attempts if one.outcome is Outcome.SUCCESS), default=None)
    return Tally(calls, succeeded, *error)


# -- in the database --------------------------------------------------------------------------------

ADD: Final = """
insert into ergon.provider_minutes as here (
    tenant_id, provider_name, capability, minute, success, retry, failed, dead_letter, refused, buckets, longest_ms,
    last_success_at, last_error_at, last_error_code
)
select tenant_id, provider_name, capability, minute, success, retry, failed, dead_letter, refused, buckets::bigint[],
    longest_ms, last_success_at, last_error_at, last_error_code
from unnest(
    %(tenants)s::text[], %(providers)s::text[], %(capabilities)s::text[], %(minutes)s::timestamptz[],
    %(success)s::bigint[], %(retry)s::bigint[], %(failed)s::bigint[], %(dead_letter)s::bigint[], %(refused)s::bigint[],
    %(buckets)s::text[], %(longest)s::double precision[], %(last_success)s::timestamptz[],
    %(last_error)s::timestamptz[], %(last_code)s::text[]
) with ordinality as new (
    tenant_id, provider_name, capability, minute, success, retry, failed, dead_letter, refused, buckets, longest_ms,
    last_success_at, last_error_at, last_error_code, place
)
order by place
on conflict (tenant_id, provider_name, capability, minute) do update set
    success = here.success + excluded.success,
    retry = here.retry + excluded.retry,
    failed = here.failed + excluded.failed,
    dead_letter = here.dead_letter + excluded.dead_letter,
    refused = here.refused + excluded.refused,
    buckets = (
        select array_agg(mine + its order by bucket)
        from unnest(here.buckets, excluded.buckets) with ordinality as both_of (mine, its, bucket)
    ),
    longest_ms = greatest(here.longest_ms, excluded.longest_ms),
    last_success_at = greatest(here.last_success_at, excluded.last_success_at),
    (last_error_at, last_error_code) = (
        select at, code
        from (values (here.last_error_at, here.last_error_code), (excluded.last_error_at, excluded.last_error_code))
            as both_of (at, code)
        order by at desc nulls last, code collate "C" desc nulls last
        limit 1
    )
"""

# One by one, which is several times as fast as taking the arrays of sixty minutes apart; as integers, whose sums are
# cheap: nobody makes two thousand million calls in a minute.
_SUMS: Final = ", ".join(f"sum(buckets[{place}]::integer)" for place in range(1, len(BOUNDS_MS) + 2))

#: From a relation `keys` (tenant_id, provider_name, capability): the hour of each that had attempts, as Hour and Calls
#: tell it. The current minute as far as it has come, and the 59 before it; p95 by nearest rank within the buckets.
HOURS: Final = f"""
minutes as materialized (
    select keys.tenant_id, keys.provider_name, keys.capability, success, made, longest_ms, buckets
    from keys cross join lateral (
        select success, success + retry + failed as made, longest_ms, buckets
        from ergon.provider_minutes as here
        where here.tenant_id = keys.tenant_id
            and here.provider_name = keys.provider_name
            and here.capability = keys.capability
            and minute > date_trunc('minute', now(), 'UTC') - interval '1 hour'
            and minute <= date_trunc('minute', now(), 'UTC')
        -- Account by account through the index, whatever the planner believes of the table's size.
        offset 0
    ) as of_account
),
counted as materialized (
    select tenant_id, provider_name, capability, sum(success)::bigint as success, sum(made)::bigint as made,
        max(longest_ms) as longest_ms, array[{_SUMS}] as buckets
    from minutes
    group by tenant_id, provider_name, capability
),
hours as (
    select tenant_id, provider_name, capability,
        success::double precision / nullif(made, 0) as success_rate_1h,
        (
            -- Above the last bound there is none, and the longest is what is left.
            select least((%(bounds)s::double precision[])[bucket], longest_ms)
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
BOUNDS: Final = list(BOUNDS_MS)


def columns(tallies: dict[Place, Tally]) -> dict[str, Any]:
    """*tallies* as the parameters of ADD."""
    places, told = list(tallies), list(tallies.values())
    calls = [tally.calls for tally in told]
    return {
        "tenants": [place.tenant_id for place in places],
        "providers": [place.provider_name for place in places],
        "capabilities": [place.capability for place in places],
        "minutes": [place.minute for place in places],
        "success": [one.success for one in calls],
        "retry": [one.retry for one in calls],
        "failed": [one.failed for one in calls],
        "dead_letter": [one.dead_letter for one in calls],
        "refused": [one.refused for one in calls],
        # As text, because an array of arrays would be taken apart with the rest.
        "buckets": [f"{{{','.join(map(str, one.buckets))}}}" for one in calls],
        "longest": [one.longest_ms for one in calls],
        "last_success": [tally.last_success_at for tally in told],
        "last_error": [tally.last_error_at for tally in told],
        "last_code": [tally.last_error_code for tally in told],
    }


# -- to hold one against the other ------------------------------------------------------------------

_STORED: Final = """
select tenant_id, provider_name, capability, minute, success, retry, failed, dead_letter, refused, buckets, longest_ms,
    last_success_at, last_error_at, last_error_code
from ergon.provider_minutes where minute >= %s and minute < %s
"""
_ROWS: Final = """
select tenant_id, provider_name, capability, created_at, outcome, reason_code, duration_ms
from ergon.provider_execution_metrics where created_at >= %s and created_at < %s
"""


def stored(connection: Connection[Any], since: datetime, until: datetime) -> dict[Place, Tally]:
    """The minutes from *since* to just before *until*, as they were added up on the way."""
    found = {}
    for row in connection.execute(_STORED, [since, until]):
        tenant, provider, capability, minute, success, retry, failed, dead_letter, refused, buckets, longest_ms = row[
            :11
        ]
        calls = Calls(success, retry, failed, dead_letter, refused, tuple(buckets), longest_ms)
        found[Place(tenant, provider, capability, minute.astimezone(UTC))] = Tally(calls, *row[11:])
    return found


def recomputed(connection: Connection[Any], since: datetime, until: datetime) -> dict[Place, Tally]:
    """The same from the attempts' own rows, which are all there as long as nothing is sampled and retention is longer.

    It reads every row: for checks, not for dashboards.
    """
    return tallied(_attempts(connection, since, until))


def _attempts(connection: Connection[Any], since: datetime, until: datetime) -> Iterator[Attempt]:
    with connection.transaction(), connection.cursor("attempts") as cursor:
        cursor.itersize = 10_000
        for tenant, provider, capability, at, outcome, reason, duration_ms in cursor.execute(_ROWS, [since, until]):
            code = None if reason is None else ReasonCode(reason)
            yield Attempt(tenant, provider, capability, at.astimezone(UTC), Outcome(outcome), code, duration_ms)
