"""Weekly partitions of facts, created in advance and dropped as a whole; without the rights, plain rows suffice."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import psycopg
from psycopg import errors

from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query

#: Milliseconds that one partition holds.
WEEK_MS: Final = 7 * 86_400_000
#: Weeks for which partitions are created in advance.
_WEEKS_AHEAD: Final = 2
#: The advisory lock under which one process at a time creates or drops a partition.
_PARTITION_LOCK_KEY: Final = 0x6572676F70
# A waiting lock request blocks all later requests: give up after half a second and retry later.
_TRY_LOCK: Final = """
select set_config('lock_timeout', '500ms', true), pg_try_advisory_xact_lock(%(turn)s)
"""
_LIST_PARTITIONS: Final = """
select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
where i.inhparent = 'ergon.facts'::regclass and c.relname ~ '^facts_w[0-9]+$' order by c.relname
"""
#: A role that does not own the tables creates and drops no partition; the check takes no blocking lock.
_IS_OWNER: Final = "select pg_has_role(relowner, 'usage') from pg_class where oid = 'ergon.facts'::regclass"
#: Lock timeout, missing right, or done by another process; each leaves the tables unchanged, to be retried later.
_RETRY_LATER_ERRORS: Final = (
    errors.LockNotAvailable,
    errors.QueryCanceled,
    errors.DeadlockDetected,
    errors.InsufficientPrivilege,
    errors.DuplicateTable,
    errors.UndefinedTable,
    errors.InvalidObjectDefinition,
)
DEFAULT_PARTITION: Final = "facts_rest"


def week_number(unix_ms: int) -> int:
    """Return the number of the week of a moment."""
    return unix_ms // WEEK_MS


def partition_name(week: int) -> str:
    """Return the name of the partition of a week."""
    return f"facts_w{week}"


def week_condition(week: int) -> str:
    """Return the condition that fact *f* is of that week; with it the server scans no other partition."""
    return f"f.stored_at >= {week * WEEK_MS} and f.stored_at < {(week + 1) * WEEK_MS}"


def list_weeks() -> Operation[list[int]]:
    """Return the weeks that have a partition."""
    return [int(name.removeprefix("facts_w")) for (name,) in (yield Query(_LIST_PARTITIONS))]


def create_future_partitions(now_ms: int) -> Operation[int]:
    """Create the missing partitions of this week and the next ones; return their number."""
    this_week = week_number(now_ms)
    existing = yield from list_weeks()
    missing = [week for week in range(max(0, this_week), this_week + _WEEKS_AHEAD + 1) if week not in existing]
    created_count = 0
    for week in missing:
        created_count += yield from _run_locked(_create_partition(week))
    return created_count


def drop_partition(week: int) -> Operation[bool]:
    """Drop the partition of *week* if nothing in it is retained; return False if something is, or if it has to wait."""
    return (yield from _run_locked(_drop_if_unused(week)))


def _run_locked(statements: Operation[bool]) -> Operation[bool]:
    """Run all statements or none, without waiting for other processes."""
    if (yield Query(_IS_OWNER)) != [(True,)]:
        return False
    try:
        yield BEGIN
        ((_, acquired),) = yield Query(_TRY_LOCK, {"turn": _PARTITION_LOCK_KEY})
        done = bool(acquired) and (yield from statements)
        yield COMMIT if done else ROLLBACK
    except _RETRY_LATER_ERRORS:
        with suppress(psycopg.Error):
            yield ROLLBACK
        return False
    return done


def _create_partition(week: int) -> Operation[bool]:
    # Created separately and attached, which lets others read and write meanwhile. Early facts of that week have to
    # move out of the default partition first; its lock prevents new ones until the attachment.
    name, since, until = partition_name(week), week * WEEK_MS, (week + 1) * WEEK_MS
    yield Query(f"create table ergon.{name} (like ergon.facts including defaults including constraints)")
    yield Query(f"lock table ergon.{DEFAULT_PARTITION} in access exclusive mode")
    yield Query(
        f"with early as (delete from ergon.{DEFAULT_PARTITION} "  # noqa: S608 - of numbers
        f"where stored_at >= {since} and stored_at < {until} returning *) "
        f"insert into ergon.{name} select * from early"
    )
    yield Query(f"alter table ergon.facts attach partition ergon.{name} for values from ({since}) to ({until})")
    return True


def _drop_if_unused(week: int) -> Operation[bool]:
    name = partition_name(week)
    # The parent is locked first, as by readers and writers: no old forwarded fact can be inserted meanwhile.
    yield Query("lock table ergon.facts in access exclusive mode")
    retained = yield Query(
        "select 1 from ergon.fact_log l where exists (select 1 from ergon.facts f "  # noqa: S608 - of numbers
        f"where f.log = l.id and f.fact_offset > l.dropped and {week_condition(week)}) limit 1"
    )
    if retained:
        return False
    yield Query(f"drop table ergon.{name}")
    return True
