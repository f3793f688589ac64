"""Partitions: weeks of facts, made ahead and dropped as a whole; where nobody has the right to, rows do as well."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import psycopg
from psycopg import errors

from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query

#: Milliseconds that one partition holds.
WEEK: Final = 7 * 86_400_000
#: Weeks for which partitions are made ahead.
_AHEAD: Final = 2
#: One who makes or drops at a time.
_TURN: Final = 0x6572676F70
# Whoever waits for a lock makes all others wait behind him: half a second, then another time.
_LIMITS: Final = """
select set_config('lock_timeout', '500ms', true), pg_try_advisory_xact_lock(%(turn)s)
"""
_FOUND: Final = """
select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
where i.inhparent = 'ergon.facts'::regclass and c.relname ~ '^facts_w[0-9]+$' order by c.relname
"""
#: Whoever does not own the tables makes and drops none, and locks nobody out to find that out.
_OWNED: Final = "select pg_has_role(relowner, 'usage') from pg_class where oid = 'ergon.facts'::regclass"
#: Not to be had without waiting, not allowed, or done by somebody else; each of them leaves things as they were.
_PUT_OFF: Final = (
    errors.LockNotAvailable,
    errors.QueryCanceled,
    errors.DeadlockDetected,
    errors.InsufficientPrivilege,
    errors.DuplicateTable,
    errors.UndefinedTable,
    errors.InvalidObjectDefinition,
)
REST: Final = "facts_rest"


def week_of(unix_ms: int) -> int:
    """The number of the week that a moment is in."""
    return unix_ms // WEEK


def name_of(week: int) -> str:
    """What the partition of a week is called."""
    return f"facts_w{week}"


def within(week: int) -> str:
    """The condition that a fact *f* is of that week; with it the server looks into no other partition."""
    return f"f.stored_at >= {week * WEEK} and f.stored_at < {(week + 1) * WEEK}"


def weeks() -> Operation[list[int]]:
    """The weeks that have a partition."""
    return [int(name.removeprefix("facts_w")) for (name,) in (yield Query(_FOUND))]


def made_ahead(now_ms: int) -> Operation[int]:
    """Make those of this week and the next ones that are missing; how many."""
    present = week_of(now_ms)
    found = yield from weeks()
    missing = [week for week in range(max(0, present), present + _AHEAD + 1) if week not in found]
    made = 0
    for week in missing:
        made += yield from _done(_make(week))
    return made


def dropped(week: int) -> Operation[bool]:
    """Drop the partition of *week* if nothing in it is retained; False if something is, or it has to wait."""
    return (yield from _done(_drop(week)))


def _done(statements: Operation[bool]) -> Operation[bool]:
    """Have all of it or nothing, without waiting for anybody."""
    if (yield Query(_OWNED)) != [(True,)]:
        return False
    try:
        yield BEGIN
        ((_, turn),) = yield Query(_LIMITS, {"turn": _TURN})
        done = bool(turn) and (yield from statements)
        yield COMMIT if done else ROLLBACK
    except _PUT_OFF:
        with suppress(psycopg.Error):
            yield ROLLBACK
        return False
    return done


def _make(week: int) -> Operation[bool]:
    # Made aside and then attached, which lets everybody read and write meanwhile. Facts of that week that came too
    # early for it have to leave the rest first, where nobody may put another one until it is done.
    name, since, until = name_of(week), week * WEEK, (week + 1) * WEEK
    yield Query(f"create table ergon.{name} (like ergon.facts including defaults including constraints)")
    yield Query(f"lock table ergon.{REST} in access exclusive mode")
    yield Query(
        f"with early as (delete from ergon.{REST} where stored_at >= {since} and stored_at < {until} returning *) "  # noqa: S608 - of numbers
        f"insert into ergon.{name} select * from early"
    )
    yield Query(f"alter table ergon.facts attach partition ergon.{name} for values from ({since}) to ({until})")
    return True


def _drop(week: int) -> Operation[bool]:
    name = name_of(week)
    # The parent first, as those do who read and write: nobody puts a forwarded fact of long ago into it meanwhile.
    yield Query("lock table ergon.facts in access exclusive mode")
    retained = yield Query(
        "select 1 from ergon.fact_log l where exists (select 1 from ergon.facts f "  # noqa: S608 - of numbers
        f"where f.log = l.id and f.fact_offset > l.dropped and {within(week)}) limit 1"
    )
    if retained:
        return False
    yield Query(f"drop table ergon.{name}")
    return True
