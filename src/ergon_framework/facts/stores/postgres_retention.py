"""Retention: drop facts that are old and confirmed, then what only they needed.

Dropping facts sets one number in the row of the log. Their rows are deleted with the partition of their week. In weeks
that still hold retained facts, in the present week and in the default partition, rows are deleted in short
database transactions.
"""

from __future__ import annotations

from typing import Final

from ergon_framework.facts.contents import ContentStore
from ergon_framework.facts.stores import postgres_statements as statements
from ergon_framework.facts.stores.postgres_partitions import (
    DEFAULT_PARTITION,
    WEEK_MS,
    create_future_partitions,
    drop_partition,
    list_weeks,
    week_condition,
)
from ergon_framework.facts.stores.postgres_store import DatabaseSession
from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query

#: Rows that one statement deletes.
_MAX_BATCH_ROWS: Final = 10_000
#: Ids that one statement reads.
_MAX_BATCH_IDS: Final = 1_000
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
        f"with gone as (delete from ergon.{table} f where {condition} and f.ctid = any (array("  # noqa: S608 - constants
        f"select f.ctid from ergon.fact_log l join ergon.{table} f on f.log = l.id and f.fact_offset <= l.dropped "
        f"where {condition} limit %(part)s)) returning 1) select count(*) from gone"
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
