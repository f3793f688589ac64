"""Crontab: the table of cron entries, and how those that are due are fired; operations for either variant.

Firing is one database transaction for each entry: it holds the lock on the row, submits the jobs and moves ``next_at``.
Whoever dies in between has done nothing, and of two who race one finds the row locked. The clock is the database's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Final

from ergon_framework.audit import new_entry
from ergon_framework.connectors.postgres import audit
from ergon_framework.executor.jobs.cron import Cron, CronEntry, CronNotFound, Misfire
from ergon_framework.executor.jobs.model import JobConflict, Submitted
from ergon_framework.executor.jobs.request import parameters
from ergon_framework.executor.jobs.submitting import submit
from ergon_framework.executor.jobs.timetable import Timetable
from ergon_framework.executor.routing import MARK
from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query

#: The most that are submitted for an entry after an outage.
MOST: Final = 1000
#: The most in one database transaction, so that it is short; the rest goes with the next one.
GROUP: Final = 100

NOW: Final = "select now()"

#: What is not changed stays as it is, its place included. One that was paused stays so.
DECLARE: Final = """
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

#: Seconds until the next entry is due, below 0 if it has been.
DUE: Final = """
select extract(epoch from min(next_at) - clock_timestamp())::float8 from ergon.cron where enabled
"""

#: A process that is stopped in the middle must not keep the row from others for longer than this.
LIMIT: Final = "select set_config('idle_in_transaction_session_timeout', '5000', true)"

_DECLARED: Final = """
    name, expression, zone, kind, function_name, arguments, priority, max_attempts, timeout, tenant, retention, misfire,
    grace
"""
TAKE: Final = f"""
select now(), next_at, {_DECLARED} from ergon.cron
where enabled and next_at <= now() and name <> all(%(but)s::text[])
order by next_at limit 1 for update skip locked
"""
READ: Final = f"select {_DECLARED} from ergon.cron where name = %(name)s"

MOVE: Final = """
update ergon.cron set next_at = %(next_at)s, last_at = coalesce(%(last_at)s, last_at) where name = %(name)s
"""

FOUND: Final = "select now(), expression, zone from ergon.cron where name = %(name)s for update"

_LISTED: Final = tuple(each.name for each in fields(CronEntry))
LIST: Final = f"select {', '.join(_LISTED)} from ergon.cron order by name"


@dataclass(frozen=True, slots=True)
class Fired:
    """What was done about one entry that was due."""

    name: str
    #: How many jobs were submitted, and how many of those times had their job before.
    submitted: int = 0
    repeated: int = 0
    #: The first of the times that had passed for too long, if there were any.
    missed_since: datetime | None = None


def declare(crons: Sequence[dict[str, Any]]) -> Operation[None]:
    """Make or change the entries of these ``columns``; what was declared the same before stays as it is."""
    ((now,),) = yield Query(NOW)
    # In one order for everybody, though each is a statement of its own: a fleet starts at once.
    for row in sorted(crons, key=lambda each: str(each["name"])):
        next_at = Timetable(row["expression"], row["zone"]).after(now)
        yield Query(DECLARE, {**row, "next_at": next_at})


def remove(name: str) -> Operation[bool]:
    """Take the entry away; False if there is none. The jobs that it has submitted stay."""
    yield BEGIN
    rows = yield Query("delete from ergon.cron where name = %(name)s returning name", {"name": name})
    if rows:
        yield from _note("cron.remove", name)
    yield COMMIT
    return bool(rows)


def listed() -> Operation[list[CronEntry]]:
    """All entries, by name."""
    rows = yield Query(LIST)
    return [CronEntry(**dict(zip(_LISTED, row, strict=True))) for row in rows]


def pause(name: str) -> Operation[None]:
    """Submit nothing for the entry until it is resumed."""
    yield BEGIN
    rows = yield Query("update ergon.cron set enabled = false where name = %(name)s returning name", {"name": name})
    if not rows:
        yield ROLLBACK
        raise _missing(name)
    yield from _note("cron.pause", name)
    yield COMMIT


def resume(name: str) -> Operation[None]:
    """Go on with the next time to come; what passed while it was paused was not missed."""
    yield BEGIN
    now, timetable = yield from _found(name)
    given = {"name": name, "next_at": timetable.after(now)}
    yield Query("update ergon.cron set enabled = true, next_at = %(next_at)s where name = %(name)s", given)
    yield from _note("cron.resume", name)
    yield COMMIT


def _note(action: str, name: str) -> Operation[None]:
    entry = new_entry(action, name)
    yield from audit.note(None if entry is None else entry.end(count=1))


def run_now(name: str) -> Operation[Submitted]:
    """Submit the entry's job now, beside its scheduled times; also if it is paused."""
    rows = yield Query(READ, {"name": name})
    if not rows:
        raise _missing(name)
    return (yield from submit(parameters(_cron(*rows[0]).request(), default=None, executors=None)))


def _found(name: str) -> Operation[tuple[datetime, Timetable]]:
    rows = yield Query(FOUND, {"name": name})
    if not rows:
        yield ROLLBACK
        raise _missing(name)
    now, expression, zone = rows[0]
    return now, Timetable(expression, zone)


def due() -> Operation[float | None]:
    """Seconds until the next entry is due, 0 or less if one is; None if there is none."""
    ((seconds,),) = yield Query(DUE)
    return None if seconds is None else float(seconds)


def fire(tried: set[str]) -> Operation[Fired | None]:
    """Fire the entry that has been due for longest and that nobody else has; None if there is none.

    Its name is in *tried* from the moment that it is taken until all went well: what cannot be fired
    must not keep the others waiting.
    """
    yield BEGIN
    yield Query(LIMIT)
    rows = yield Query(TAKE, {"but": sorted(tried)})
    if not rows:
        yield ROLLBACK
        return None
    now, next_at, *plain = rows[0]
    tried.add(plain[0])
    cron = _cron(*plain)
    plan = planned(cron, next_at=next_at, now=now)
    submitted = repeated = 0
    for tick in plan.ticks:
        made = yield from _submitted(cron, tick)
        submitted += made
        repeated += not made
    last = plan.ticks[-1] if plan.ticks else None
    yield Query(MOVE, {"name": cron.name, "next_at": plan.next_at, "last_at": last})
    yield COMMIT
    tried.discard(cron.name)
    return Fired(cron.name, submitted, repeated, next_at if plan.missed else None)


@dataclass(frozen=True, slots=True)
class Plan:
    """The scheduled times to submit now, the first one after them, and whether any had passed for too long."""

    ticks: list[datetime]
    next_at: datetime | None
    missed: bool


def planned(cron: Cron, *, next_at: datetime, now: datetime) -> Plan:
    """What is to be done, at *now*, about an entry that was due at *next_at*: if that is too long ago, its policy says.

    Otherwise each of the times that have passed since is fired, by whoever looks a little late.
    """
    timetable = cron.timetable
    missed = now - next_at > timedelta(seconds=cron.grace)
    if missed and cron.misfire == Misfire.SKIP:
        return Plan([], timetable.after(now), missed)
    most = 1 if missed and cron.misfire == Misfire.ONCE else MOST
    ticks = timetable.passed(next_at, now, most=most)[:GROUP]
    return Plan(ticks, timetable.after(ticks[-1]), missed)


def _submitted(cron: Cron, tick: datetime) -> Operation[bool]:
    """Submit the job of one scheduled time; False if that had one."""
    try:
        done: Submitted = yield from submit(parameters(cron.request(tick), default=None, executors=None))
    except JobConflict:
        # The entry was another one then, and it was fired.
        return False
    return done.created


def _cron(  # noqa: PLR0917 - the columns of a row
    name: str, expression: str, zone: str, kind: str, function: str, arguments: str, *rest: Any
) -> Cron:
    args, kwargs = json.loads(arguments)
    priority, max_attempts, timeout, tenant, retention, misfire, grace = rest
    return Cron(
        name,
        expression,
        f"{kind}{MARK}{function}",
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


def _missing(name: str) -> CronNotFound:
    return CronNotFound(f"there is no cron entry {name!r}; ergon job cron list has those that there are")
