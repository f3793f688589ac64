"""What the store in memory has beyond the contract: bounds, ids that end, signals, and what it counts."""

from __future__ import annotations

import asyncio
import logging

import pytest

from ergon_framework.facts import metrics
from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.errors import (
    ArtifactConflict,
    ArtifactLost,
    BufferFull,
    FactConflict,
    InvalidFactError,
)
from ergon_framework.facts.model import BoundarySide, Buffer, Envelope, Fact, ZonePair
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.telemetry import names
from tests.log_events import get_event

PAIR = ZonePair("A", "B")
FAR_FUTURE_MS = 2**52


def make_envelope(message_id="m-1"):
    return Envelope(message_id=message_id, from_zone="A", to_zone="B", produced_at_unix_ms=0)


def read_all(store, reader="r"):
    facts = store.fetch_facts(reader, PAIR, 100)
    if facts:
        store.confirm_receipt(reader, PAIR, facts[-1].cursor)
    return facts


@pytest.mark.spec("FAC-03")
def test_ids_are_kept_for_their_retention_and_at_least_as_long_as_their_facts():
    now = [1000.0]
    store = MemoryBoundary(identity_retention=60.0, wall=lambda: now[0])
    fact = Fact.create("s", "p", 1)
    store.append_fact(make_envelope(), fact)
    store.fetch_facts("r", PAIR, 0)
    now[0] += 3600
    store.prune(FAR_FUTURE_MS)
    assert store.get_fact("A", "m-1") is not None  # its fact is retained: no reader has confirmed it
    read_all(store)
    now[0] += 30
    store.prune(FAR_FUTURE_MS)
    assert store.get_fact("A", "m-1") is None
    again = store.append_fact(make_envelope(), fact)
    assert (again.offset, again.duplicate) == (2, False)


@pytest.mark.spec("FAC-03")
def test_ids_are_kept_permanently_by_default():
    now = [1000.0]
    store = MemoryBoundary(wall=lambda: now[0])
    store.append_fact(make_envelope(), Fact.create("s", "p", 1))
    read_all(store)
    now[0] += 100 * 365 * 86_400
    assert store.prune(FAR_FUTURE_MS).facts == 1
    assert store.append_fact(make_envelope(), Fact.create("s", "p", 1)).duplicate


@pytest.mark.spec("FAC-16")
def test_bytes_are_bounded_too_and_artifacts_count():
    store = MemoryBoundary(max_bytes=20)
    store.put_object("b", "k", [b"x" * 12])
    store.append_fact(make_envelope(), Fact.create("s", "p", "12345"))  # 7 bytes
    with pytest.raises(BufferFull, match="19 bytes are retained, the limit is 20"):
        store.append_fact(make_envelope("m-2"), Fact.create("s", "p", 12))
    with pytest.raises(BufferFull):
        store.put_object("b", "other", [b"xx"])
    assert store.put_object("b", "k", [b"x" * 12]).size == 12
    read_all(store)
    assert store.prune(FAR_FUTURE_MS) == (1, 1)
    assert store.append_fact(make_envelope("m-2"), Fact.create("s", "p", "x" * 18)).offset == 2


def test_a_listener_is_notified_of_new_facts_until_it_unsubscribes():
    store, notifications = MemoryBoundary(), []
    unsubscribe = store.listen(lambda: notifications.append("woken"))
    store.append_fact(make_envelope(), Fact.create("s", "p", 1))
    store.append_fact(make_envelope(), Fact.create("s", "p", 1))
    assert notifications == ["woken"]
    unsubscribe()
    store.append_fact(make_envelope("m-2"), Fact.create("s", "p", 2))
    assert notifications == ["woken"]


def test_an_upload_may_come_from_a_coroutine():
    async def chunks():
        yield b"ab"
        await asyncio.sleep(0)
        yield b"c"

    async def failing_chunks():
        yield b"ab"
        raise OSError("reset")

    async def main():
        store = MemoryBoundary()
        assert (await store.put_object_async("b", "k", chunks())).size == 3
        with pytest.raises(OSError, match="reset"):
            await store.put_object_async("b", "other", failing_chunks())
        return [chunk async for chunk in store.get_object_async("b", "k")]

    assert asyncio.run(main()) == [b"abc"]


def test_bytes_that_were_only_compared_are_not_stored_if_the_artifact_is_removed_meanwhile():
    content = b"x" * 90
    store = MemoryBoundary(max_bytes=100)
    store.put_object("b", "k", [content])

    def yield_then_prune():
        yield content
        store.prune(FAR_FUTURE_MS)

    with pytest.raises(BufferFull, match="no space for the upload"):
        store.put_object("b", "k", yield_then_prune())
    assert store.stat_object("b", "k") is None
    assert store.put_object("b", "k", [content]).size == len(content)


def test_a_blob_yields_bytes():
    with pytest.raises(InvalidFactError, match="yields bytes, not str"):
        MemoryBoundary().put_object("b", "k", ["text"])


@pytest.mark.spec("FAC-24", "FAC-23")
def test_outcomes_are_counted_by_buffer(caplog):
    def read_counts(metric, buffer):
        counts = metrics.buffer_metrics(buffer).counters()
        return {values[0]: count for (name, values), count in counts.items() if name == metric.name}

    def diff_counts(before, after):
        return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}

    facts, artifacts = read_counts(names.FACTS, Buffer.ISB), read_counts(names.ARTIFACTS, Buffer.ISB)
    lost = read_counts(names.ARTIFACTS_LOST, Buffer.ISB)
    store = MemoryBoundary(side=BoundarySide.OUTER, max_facts=2)
    fact, other = Fact.create("s", "p", 1), Fact.create("s", "p", 2)
    missing = Fact.create("s", "p", {"bucket": "b", "key": "none", "digest": "sha256:" + "0" * 64, "size": 1})
    store.append_facts(
        [(make_envelope(), fact), (make_envelope(), fact), (make_envelope(), other), (make_envelope("m-2"), missing)]
    )
    stored = store.put_object("b", "k", [b"abc"])
    store.put_object("b", "k", [b"abc"])
    with pytest.raises(ArtifactConflict):
        store.put_object("b", "k", [b"abd"])
    with pytest.raises(ZeroDivisionError):
        store.put_object("b", "half", _yield_and_fail())
    reference = {"bucket": "b", "key": "k", "digest": stored.digest, "size": stored.size}
    store.append_fact(make_envelope("m-3"), Fact.create("s", "p", reference))
    with pytest.raises(BufferFull):
        store.append_fact(make_envelope("m-4"), fact)
    store._artifacts._contents.clear()
    with caplog.at_level(logging.ERROR), pytest.raises(ArtifactLost):
        list(store.get_object("b", "k"))
    assert diff_counts(facts, read_counts(names.FACTS, Buffer.ISB)) == {
        "stored": 2,
        "repeated": 1,
        "conflict": 1,
        "rejected": 1,
        "full": 1,
    }
    assert diff_counts(artifacts, read_counts(names.ARTIFACTS, Buffer.ISB)) == {
        "stored": 1,
        "repeated": 1,
        "conflict": 1,
        "interrupted": 1,
    }
    assert diff_counts(lost, read_counts(names.ARTIFACTS_LOST, Buffer.ISB)) == {"A": 1}
    (record,) = [record for record in caplog.records if get_event(record) == "artifact lost"]
    assert (record.zone, record.message_id, record.bucket, record.key) == ("A", "m-3", "b", "k")


def _yield_and_fail():
    yield b"x"
    raise ZeroDivisionError


@pytest.mark.spec("FAC-26")
def test_the_store_in_memory_is_never_strict():
    assert not MemoryBoundary().capabilities.is_strict


@pytest.mark.spec("FAC-13")
def test_a_conflict_reports_the_stored_fact_and_a_remedy():
    store = MemoryBoundary()
    store.append_fact(make_envelope(), Fact.create("s", "p", 1))
    (result,) = store.append_facts([(make_envelope(), Fact.create("s", "p", 2))])
    with pytest.raises(FactConflict, match=r"'m-1' of 'A' is stored at offset 1 .*build ids from everything"):
        raise_if_error(result)


def test_a_restored_store_is_independent():
    store = MemoryBoundary()
    store.append_fact(make_envelope(), Fact.create("s", "p", 1))
    restored = store.as_restored_backup()
    restored.append_fact(make_envelope("m-2"), Fact.create("s", "p", 2))
    assert store.get_fact("A", "m-2") is None
    assert {fact.epoch for fact in restored.fetch_facts("r", PAIR, 10)} == {restored.epoch}
    assert store.epoch != restored.epoch


def test_a_backup_excludes_an_upload_in_progress():
    store = MemoryBoundary()
    backups = []

    def chunks():
        yield b"ab"
        backups.append(store.as_restored_backup())
        yield b"c"

    store.put_object("files", "a", chunks())
    assert b"".join(store.get_object("files", "a")) == b"abc"
    assert backups[0].stat_object("files", "a") is None
    assert backups[0].put_object("files", "a", [b"other"]).size == 5


@pytest.mark.spec("FAC-21", "FAC-23")
@pytest.mark.parametrize("damage", [None, b"damaged"])
def test_a_lost_or_damaged_artifact_is_repaired_by_the_same_bytes(damage):
    store = MemoryBoundary()
    stored = store.put_object("files", "a", [b"bytes"])
    reference = {"bucket": "files", "key": "a", "digest": stored.digest, "size": stored.size}
    store.append_fact(make_envelope(), Fact.create("s", "p", reference))
    if damage is None:
        del store._artifacts._contents[stored.digest]
    else:
        store._artifacts._contents[stored.digest] = damage
    with pytest.raises(ArtifactLost):
        list(store.get_object("files", "a"))
    assert store.put_object("files", "a", [b"bytes"]) == stored
    assert b"".join(store.get_object("files", "a")) == b"bytes"
