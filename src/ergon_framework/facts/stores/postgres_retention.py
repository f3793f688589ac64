"""Retention: facts that are old and confirmed are let go of, and then what only they needed.

Letting go is one number in the row of the log. The rows of facts go with their week, as a whole; of weeks that hold
something still, of the present one and of the rest they are deleted one by one, in short database transactions.
"""

from __future__ import annotations

from typing import Final

from ergon_framework.facts.contents import Contents
from ergon_framework.facts.stores import postgres_statements as statements
from ergon_framework.facts.stores.postgres_partitions import REST, WEEK, dropped, made_ahead, weeks, within
from ergon_framework.facts.stores.postgres_store import Store
from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query

#: Rows that are removed in one go.
_PART: Final = 10_000
#: Ids that one statement reads.
_IDS_PART: Final = 1_000
_LARGEST: Final = 2**62


def drop_facts(store: Store, before_ms: int, now_ms: int) -> Operation[int]:
    """Let go of facts, and remove their rows; how many."""
    yield from store.opened()
    before = min(before_ms, _LARGEST)
    count = 0
    for (log,) in (yield Query(statements.LOGS)):
        count += (yield Query(statements.DROP, {"log": log, "before": before}))[0][0]
    yield from _swept(before, now_ms)
    yield from made_ahead(now_ms)
    return count


def _swept(before: int, now: int) -> Operation[None]:
    for week in (yield from weeks()):
        end = (week + 1) * WEEK
        # One that is over, but not old enough, will soon go as a whole.
        over = end <= now
        if over and end > before:
            continue
        if not (over and (yield from dropped(week))):
            # By way of the whole table: to a partition of its own nobody has granted anything.
            yield from _emptied("facts", within(week))
    yield from _emptied(REST, "true")


def _emptied(table: str, where: str) -> Operation[None]:
    """Delete the rows of facts that are let go of, in one partition: only there a place is of one row."""
    statement = (
        f"with gone as (delete from ergon.{table} f where {where} and f.ctid = any (array("  # noqa: S608 - our own words
        f"select f.ctid from ergon.fact_log l join ergon.{table} f on f.log = l.id and f.fact_offset <= l.dropped "
        f"where {where} limit %(part)s)) returning 1) select count(*) from gone"
    )
    part = _PART
    while part == _PART:
        ((part,),) = yield Query(statement, {"part": _PART})


def forget_ids(store: Store, latest_ms: int) -> Operation[None]:
    """Forget ids that were kept since before *latest_ms*, and whose facts are gone."""
    yield from store.opened()
    for (log,) in (yield Query(statements.LOGS)):
        deleted = read = _IDS_PART
        since = 0
        # Ids whose facts are retained are read once and end the log: they are the oldest when a reader is behind.
        while read == _IDS_PART and 2 * deleted >= read:
            asked = {"log": log, "since": since, "latest": latest_ms, "part": _IDS_PART}
            ((deleted, read, since),) = yield Query(statements.FORGET_IDS, asked)


def drop_objects(store: Store, before_ms: int) -> Operation[int]:
    """Forget names that were given before, and that no retained fact uses; how many."""
    yield from store.opened()
    count, behind = 0, 0
    while True:
        yield BEGIN
        asked = {"before": min(before_ms, _LARGEST), "behind": behind, "part": _PART}
        found = [number for (number,) in (yield Query(statements.LOCK_OBJECTS, asked))]
        if not found:
            yield ROLLBACK
            return count
        count += len((yield Query(statements.UNNAME, {"ids": found})))
        yield COMMIT
        behind = found[-1]


def drop_contents(store: Store, contents: Contents, before_ms: int) -> Operation[None]:
    """Remove contents that nobody names; it blocks, as contents do.

    Whoever is about to name one holds it until he has, so it is left alone, or gone before he stores it anew.
    """
    yield from store.opened()
    for (digest,) in (yield Query(statements.UNUSED, {"before": min(before_ms, _LARGEST)})):
        yield BEGIN
        free = (yield Query(statements.TAKE_CONTENT, {"digest": digest})) == [(True,)]
        if free and (yield Query(statements.STILL_UNUSED, {"digest": digest})):
            # The bytes first: a row without bytes is collected the next time, bytes without a row never.
            contents.remove(f"sha256:{digest}")
            yield Query(statements.FORGET_CONTENT, {"digest": digest})
        yield COMMIT
