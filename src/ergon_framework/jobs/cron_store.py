"""The table of cron entries, and how due entries are fired; operations for either variant.

To fire an entry is to submit a job for its scheduled time (a tick). An entry's ``next_at`` is its first tick that was
not fired. A tick that is later than the entry's grace is missed, and the entry's misfire policy decides: skip the
missed ticks, fire one job for them, or one for each. An operation is a generator that yields queries and receives their
rows; a thread or an event loop runs it.

Firing is one database transaction for each entry: it locks the row, submits jobs and moves ``next_at``. If a process
is killed before the commit, nothing has changed; of two processes that race, one finds the row locked. The clock is the
database's.

An entry of a queue is fired in the same way, one tick in each database transaction. Its caller sends the tick before
the commit: as a statement of that transaction, if the queue is in the same database, or to another broker, where a
crash before the commit leads to a second transaction with the same id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from ergon_framework.audit import create_entry
from ergon_framework.connectors.postgres import audit
from ergon_framework.database.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query
from ergon_framework.errors import ConfigurationError
from ergon_framework.executors.decision import EXECUTOR_SEPARATOR
from ergon_framework.jobs.cron import QUEUE_KIND, Cron, CronEntry, CronNotFound, CronSchedule, CronTiming, Misfire
from ergon_framework.jobs.model import JobConflict, Submitted, job_parameters
from ergon_framework.jobs.store import submit

#: Maximum number of jobs that are submitted for an entry after an outage.
MAX_CATCH_UP_JOBS: Final = 1000
#: Maximum number of jobs in one database transaction, so that it is short; the rest is in the next transactions.
MAX_TRANSACTION_JOBS: Final = 100

SELECT_NOW: Final = "select now()"

#: An unchanged entry stays as it is, including its next scheduled time. A paused entry stays paused.
DECLARE_ENTRY: Final = """
insert into ergon.cron as c (
    name, expression, zone, kind, function_name, arguments, priority, max_attempts, timeout, tenant, retention, misfire,
    grace, digest, next_at
)
values (
    %(name)s, %(expression)s, %(zone)s, %(kind)s, %(function)s, %(arguments)s, %(priority)s, %(max_attempts)s,
    %(timeout)s, %(tenant)s, %(retention)s, %(misfire)s, %(grace)s, %(digest)s, %(next_at)s
)
on conflict (name) do update set
    expression = excluded.expression, zone = excluded.zone, kind = excluded.kind,
    function_name = excluded.function_name, arguments = excluded.arguments, priority = excluded.priority,
    max_attempts = excluded.max_attempts, timeout = excluded.timeout, tenant = excluded.tenant,
    retention = excluded.retention, misfire = excluded.misfire, grace = excluded.grace, digest = excluded.digest,
    next_at = case
        when (c.expression, c.zone) = (excluded.expression, excluded.zone) then c.next_at else excluded.next_at
    end
where c.digest <> excluded.digest
"""
SELECT_KIND: Final = "select kind from ergon.cron where name = %(name)s"

#: Seconds until the next entry is due; negative if it is overdue.
SELECT_SECONDS_UNTIL_DUE: Final = """
select extract(epoch from min(next_at) - clock_timestamp())::float8 from ergon.cron
where enabled and kind <> %(queue_kind)s
"""

#: A process that stalls in its transaction must not keep the row from others for longer than this.
LIMIT_IDLE_TIME: Final = "select set_config('idle_in_transaction_session_timeout', '5000', true)"

_DECLARED_COLUMNS: Final = """
    name, expression, zone, kind, function_name, arguments, priority, max_attempts, timeout, tenant, retention, misfire,
    grace
"""
LOCK_DUE_ENTRY: Final = f"""
select now(), next_at, {_DECLARED_COLUMNS} from ergon.cron
where enabled and next_at <= now() and name <> all(%(but)s::text[]) and kind <> %(queue_kind)s
order by next_at limit 1 for update skip locked
"""
READ_ENTRY: Final = f"select {_DECLARED_COLUMNS} from ergon.cron where name = %(name)s"

MOVE_NEXT_AT: Final = """
update ergon.cron set next_at = %(next_at)s, last_at = coalesce(%(last_at)s, last_at) where name = %(name)s
"""

LOCK_ENTRY: Final = "select now(), expression, zone from ergon.cron where name = %(name)s for update"

_LISTED_COLUMNS: Final = tuple(each.name for each in fields(CronEntry))
LIST_ENTRIES: Final = f"select {', '.join(_LISTED_COLUMNS)} from ergon.cron order by name"


@dataclass(frozen=True, slots=True)
class FiredEntry:
    """The result of firing one due entry."""

    name: str
    #: The number of submitted jobs, and of scheduled times whose job existed before this call.
    submitted: int = 0
    repeated: int = 0
    #: The first of the scheduled times that exceeded the grace, if there are any.
    missed_since: datetime | None = None


def declare(crons: Sequence[dict[str, Any]]) -> Operation[None]:
    """Create or change the entries of these ``cron_columns``; an entry that was declared the same stays as it is."""
    ((now,),) = yield Query(SELECT_NOW)
    # One order in all processes, although each entry is its own statement: many processes start together.
    for row in sorted(crons, key=lambda each: str(each["name"])):
        kinds = yield Query(SELECT_KIND, {"name": row["name"]})
        if kinds and (kinds[0][0] == QUEUE_KIND) != (row["kind"] == QUEUE_KIND):
            other = "sends to a queue" if kinds[0][0] == QUEUE_KIND else "submits a job"
            raise ConfigurationError(
                f"the cron entry {row['name']!r} exists already and {other}; choose another name, or remove it with "
                "JobClient.unschedule"
            )
        next_at = CronSchedule(row["expression"], row["zone"]).after(now)
        yield Query(DECLARE_ENTRY, {**row, "next_at": next_at})


def remove(name: str) -> Operation[bool]:
    """Remove the entry; return False if there is none. Jobs that it has submitted stay."""
    yield BEGIN
    rows = yield Query("delete from ergon.cron where name = %(name)s returning name", {"name": name})
    if rows:
        yield from _record_audit("cron.remove", name)
    yield COMMIT
    return bool(rows)


def list_entries() -> Operation[list[CronEntry]]:
    """Return all entries, by name."""
    rows = yield Query(LIST_ENTRIES)
    return [CronEntry(**dict(zip(_LISTED_COLUMNS, row, strict=True))) for row in rows]


def pause(name: str) -> Operation[None]:
    """Submit nothing for the entry until it is resumed."""
    yield BEGIN
    rows = yield Query("update ergon.cron set enabled = false where name = %(name)s returning name", {"name": name})
    if not rows:
        yield ROLLBACK
        raise _not_found_error(name)
    yield from _record_audit("cron.pause", name)
    yield COMMIT


def resume(name: str) -> Operation[None]:
    """Resume with the next scheduled time; times that passed during the pause are skipped."""
    yield BEGIN
    now, schedule = yield from _lock_entry(name)
    values = {"name": name, "next_at": schedule.after(now)}
    yield Query("update ergon.cron set enabled = true, next_at = %(next_at)s where name = %(name)s", values)
    yield from _record_audit("cron.resume", name)
    yield COMMIT


def _record_audit(action: str, name: str) -> Operation[None]:
    entry = create_entry(action, name)
    yield from audit.write_entry(None if entry is None else entry.end(count=1))


def run_now(name: str) -> Operation[Submitted]:
    """Submit the entry's job now, in addition to its scheduled times, even if the entry is paused."""
    rows = yield Query(READ_ENTRY, {"name": name})
    if not rows:
        raise _not_found_error(name)
    if rows[0][3] == QUEUE_KIND:
        raise ConfigurationError(
            f"the cron entry {name!r} sends to a queue, and its payload is made by its function; send it with the task"
        )
    return (yield from submit(job_parameters(_row_to_cron(*rows[0]).to_request(), default=None, executors=None)))


def _lock_entry(name: str) -> Operation[tuple[datetime, CronSchedule]]:
    rows = yield Query(LOCK_ENTRY, {"name": name})
    if not rows:
        yield ROLLBACK
        raise _not_found_error(name)
    now, expression, zone = rows[0]
    return now, CronSchedule(expression, zone)


def seconds_until_due() -> Operation[float | None]:
    """Return the seconds until the next entry is due, 0 or less if one is; None if there is none."""
    ((seconds,),) = yield Query(SELECT_SECONDS_UNTIL_DUE, {"queue_kind": QUEUE_KIND})
    return None if seconds is None else float(seconds)


def fire_next(tried: set[str]) -> Operation[FiredEntry | None]:
    """Fire the entry that has been due for longest and that no other process has locked; None if there is none.

    Its name is in *tried* from the lock until success: an entry that cannot be fired must not delay the others.
    """
    yield BEGIN
    yield Query(LIMIT_IDLE_TIME)
    rows = yield Query(LOCK_DUE_ENTRY, {"but": sorted(tried), "queue_kind": QUEUE_KIND})
    if not rows:
        yield ROLLBACK
        return None
    now, next_at, *columns = rows[0]
    tried.add(columns[0])
    cron = _row_to_cron(*columns)
    plan = plan_ticks(cron.timing, next_at=next_at, now=now)
    submitted = repeated = 0
    for tick in plan.ticks:
        is_created = yield from _submit_tick(cron, tick)
        submitted += is_created
        repeated += not is_created
    last = plan.ticks[-1] if plan.ticks else None
    yield Query(MOVE_NEXT_AT, {"name": cron.name, "next_at": plan.next_at, "last_at": last})
    yield COMMIT
    tried.discard(cron.name)
    return FiredEntry(cron.name, submitted, repeated, next_at if plan.missed else None)


@dataclass(frozen=True, slots=True)
class TickPlan:
    """The scheduled times to submit now, the first one after them, and whether the grace was exceeded."""

    ticks: list[datetime]
    next_at: datetime | None
    missed: bool


def plan_ticks(timing: CronTiming, *, next_at: datetime, now: datetime) -> TickPlan:
    """Plan, at *now*, an entry that was due at *next_at*; beyond the grace, its misfire policy decides.

    Within the grace, each of the scheduled times that have passed is fired.
    """
    schedule = timing.schedule
    missed = now - next_at > timedelta(seconds=timing.grace)
    if missed and timing.misfire == Misfire.SKIP:
        return TickPlan([], schedule.after(now), missed)
    limit = 1 if missed and timing.misfire == Misfire.ONCE else MAX_CATCH_UP_JOBS
    # The limit selects the last ticks. Of these, the oldest are fired now, and the rest in the next transactions.
    ticks = schedule.between(next_at, now, limit=limit)[:MAX_TRANSACTION_JOBS]
    return TickPlan(ticks, schedule.after(ticks[-1]), missed)


def _submit_tick(cron: Cron, tick: datetime) -> Operation[bool]:
    """Submit the job of one scheduled time; return False if its job existed."""
    try:
        submission: Submitted = yield from submit(job_parameters(cron.to_request(tick), default=None, executors=None))
    except JobConflict:
        # A job for this tick exists with another function or other arguments: the entry was changed after it was fired.
        return False
    return submission.created


# -- entries of queues ------------------------------------------------------------------------------

#: Seconds for which the function of an entry may run while its row is locked; then another process may fire the tick.
MAX_SEND_SECONDS: Final = 30.0
LIMIT_SEND_TIME: Final = "select set_config('idle_in_transaction_session_timeout', %(milliseconds)s, true)"

#: The first tick that was not fired, and the seconds until then.
SELECT_NEXT_TICK: Final = """
select next_at, extract(epoch from next_at - clock_timestamp())::float8 from ergon.cron
where name = %(name)s and kind = %(queue_kind)s and enabled and next_at is not null
"""
LOCK_QUEUE_ENTRY: Final = """
select now(), next_at, name, expression, zone, misfire, grace from ergon.cron
where name = %(name)s and kind = %(queue_kind)s and enabled and next_at <= now() for update skip locked
"""

#: Sends the transaction of one tick; or returns the statement that does, if its queue is in the same database.
SendTick: TypeAlias = Callable[[datetime], Query | None]


def find_next_tick(name: str) -> Operation[tuple[datetime, float] | None]:
    """Return the next tick of an entry of a queue and the seconds until then; None if it is paused, or has no more."""
    rows = yield Query(SELECT_NEXT_TICK, {"name": name, "queue_kind": QUEUE_KIND})
    return None if not rows else (rows[0][0], float(rows[0][1]))


def is_locked(name: str) -> Operation[bool]:
    """Return whether another process fires the due entry at present."""
    rows = yield Query(LOCK_QUEUE_ENTRY, {"name": name, "queue_kind": QUEUE_KIND})
    return not rows


def fire_tick(name: str, due_at: datetime, send: SendTick) -> Operation[FiredEntry | None]:
    """Fire one tick of the entry of a queue that was due at *due_at*; None if another process has fired it, or does.

    The row is locked first. Then the tick is sent, and the next time is written in the same database transaction.
    """
    yield BEGIN
    yield Query(LIMIT_SEND_TIME, {"milliseconds": str(int(MAX_SEND_SECONDS * 1000))})
    rows = yield Query(LOCK_QUEUE_ENTRY, {"name": name, "queue_kind": QUEUE_KIND})
    if not rows or rows[0][1] != due_at:
        yield ROLLBACK
        return None
    now, next_at, *columns = rows[0]
    timing = CronTiming(*columns)
    plan = plan_ticks(timing, next_at=next_at, now=now)
    tick = plan.ticks[0] if plan.ticks else None
    if tick is not None:
        statement = send(tick)
        if statement is not None:
            yield statement
    following = plan.next_at if tick is None else timing.schedule.after(tick)
    yield Query(MOVE_NEXT_AT, {"name": name, "next_at": following, "last_at": tick})
    yield COMMIT
    return FiredEntry(name, submitted=int(tick is not None), missed_since=next_at if plan.missed else None)


def _row_to_cron(  # noqa: PLR0917 - the columns of a row
    name: str, expression: str, zone: str, kind: str, function: str, arguments: str, *rest: Any
) -> Cron:
    args, kwargs = json.loads(arguments)
    priority, max_attempts, timeout, tenant, retention, misfire, grace = rest
    return Cron(
        name,
        expression,
        f"{kind}{EXECUTOR_SEPARATOR}{function}",
        args,
        kwargs,
        zone=zone,
        misfire=misfire,
        grace=grace,
        priority=priority,
        max_attempts=max_attempts,
        timeout=timeout,
        tenant=tenant,
        retention=retention,
    )


def _not_found_error(name: str) -> CronNotFound:
    return CronNotFound(f"there is no cron entry {name!r}; list the entries with: ergon job cron list")
