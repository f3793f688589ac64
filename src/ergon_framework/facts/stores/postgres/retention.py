"""Retention: drop facts that are old and confirmed, then what only they needed.

A fact belongs to a log, the sequence of facts from one zone to another, and has an offset there. An artifact is a file
that facts reference.

Dropping facts sets one number in the row of the log. Their rows are deleted with the partition of their week. In weeks
that still hold retained facts, in the present week and in the default partition, rows are deleted in short
database transactions.

Weekly partitions are created in advance and dropped as a whole. A role without the right to do so works too: facts
without a partition are stored in the default one, and rows are deleted.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import psycopg
from psycopg import errors

from ergon_framework.database.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query
from ergon_framework.facts.content_store import ContentStore
from ergon_framework.facts.stores.postgres import sql as statements
from ergon_framework.facts.stores.postgres.session import DatabaseSession

#: Milliseconds that one partition holds.
WEEK_MS: Final = 7 * 86_400_000
#: Weeks for which partitions are created in advance.
_WEEKS_AHEAD: Final = 2
#: The advisory lock under which one process at a time creates or drops a partition.
_PARTITION_LOCK_KEY: Final = 0x6572676F70
# A waiting lock request blocks all later requests: give up after half a second and retry later.
_TRY_LOCK: Final = """
select set_config('lock_timeout', '500ms', true), pg_try_advisory_xact_lock(%(key)s)
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
DEFAULT_PARTITION: Final = "facts_default"


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
        ((_, acquired),) = yield Query(_TRY_LOCK, {"key": _PARTITION_LOCK_KEY})
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


# -- retention --------------------------------------------------------------------------------------

#: Rows that one statement deletes.
_MAX_BATCH_ROWS: Final = 10_000
#: Ids that one statement reads.
_MAX_BATCH_IDS: Final = 1_000
#: Larger than any time in milliseconds.
_MAX_INTEGER: Final = 2**62


def drop_facts(session: DatabaseSession, before_ms: int, now_ms: int) -> Operation[int]:
    """Drop facts and delete their rows; return how many were dropped."""
    yield from session.ensure_open()
    before = min(before_ms, _MAX_INTEGER)
    count = 0
    for (log_id,) in (yield Query(statements.LOG_IDS)):
        count += (yield Query(statements.DROP_FACTS, {"log": log_id, "before": before}))[0][0]
    yield from _delete_dropped_rows(before, now_ms)
    yield from create_future_partitions(now_ms)
    return count


def _delete_dropped_rows(before: int, now: int) -> Operation[None]:
    for week in (yield from list_weeks()):
        end = (week + 1) * WEEK_MS
        # A week that is over, but not old enough, can soon be dropped as a whole.
        is_over = end <= now
        if is_over and end > before:
            continue
        if not (is_over and (yield from drop_partition(week))):
            # Through the parent table: no rights are granted on single partitions.
            yield from _delete_partition_rows("facts", week_condition(week))
    yield from _delete_partition_rows(DEFAULT_PARTITION, "true")


def _delete_partition_rows(table: str, condition: str) -> Operation[None]:
    """Delete the rows of dropped facts in one partition; a ctid is unique only within one partition."""
    statement = (
        f"with deleted as (delete from ergon.{table} f where {condition} and f.ctid = any (array("  # noqa: S608 - constants
        f"select f.ctid from ergon.fact_log l join ergon.{table} f on f.log = l.id and f.fact_offset <= l.dropped "
        f"where {condition} limit %(part)s)) returning 1) select count(*) from deleted"
    )
    deleted = _MAX_BATCH_ROWS
    while deleted == _MAX_BATCH_ROWS:
        ((deleted,),) = yield Query(statement, {"part": _MAX_BATCH_ROWS})


def delete_ids(session: DatabaseSession, latest_ms: int) -> Operation[None]:
    """Delete ids that were stored before *latest_ms* and whose facts are dropped."""
    yield from session.ensure_open()
    for (log_id,) in (yield Query(statements.LOG_IDS)):
        deleted = read = _MAX_BATCH_IDS
        since = 0
        # Ids of retained facts end the loop: they are the oldest when a reader lags, and are read only once.
        while read == _MAX_BATCH_IDS and 2 * deleted >= read:
            parameters = {"log": log_id, "since": since, "latest": latest_ms, "part": _MAX_BATCH_IDS}
            ((deleted, read, since),) = yield Query(statements.DELETE_IDS, parameters)


def delete_artifacts(session: DatabaseSession, before_ms: int) -> Operation[int]:
    """Delete artifact names that were stored before and that no retained fact references; return how many."""
    yield from session.ensure_open()
    count, last_id = 0, 0
    while True:
        yield BEGIN
        parameters = {"before": min(before_ms, _MAX_INTEGER), "behind": last_id, "part": _MAX_BATCH_ROWS}
        artifact_ids = [
            artifact_id for (artifact_id,) in (yield Query(statements.LOCK_UNREFERENCED_ARTIFACTS, parameters))
        ]
        if not artifact_ids:
            yield ROLLBACK
            return count
        count += len((yield Query(statements.DELETE_ARTIFACTS, {"ids": artifact_ids})))
        yield COMMIT
        last_id = artifact_ids[-1]


def delete_contents(session: DatabaseSession, contents: ContentStore, before_ms: int) -> Operation[None]:
    """Remove contents that no artifact names; blocks, because content stores block.

    A call that is about to name a content holds its lock until the name is committed. So the content is either left
    alone, or removed before that call stores it again.
    """
    yield from session.ensure_open()
    for (digest,) in (yield Query(statements.UNUSED_CONTENTS, {"before": min(before_ms, _MAX_INTEGER)})):
        yield BEGIN
        is_locked = (yield Query(statements.TRY_LOCK_CONTENT, {"digest": digest})) == [(True,)]
        if is_locked and (yield Query(statements.IS_CONTENT_UNUSED, {"digest": digest})):
            # The bytes first: a row without bytes is deleted by the next run, bytes without a row are never found.
            contents.remove(f"sha256:{digest}")
            yield Query(statements.DELETE_CONTENT, {"digest": digest})
        yield COMMIT
