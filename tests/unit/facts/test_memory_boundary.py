"""What the store in memory has beyond the contract: bounds, ids that end, signals, and what it counts."""

from __future__ import annotations

import asyncio
import logging

import pytest

from ergon_framework.facts import observe
from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.errors import (
    ArtifactConflict,
    ArtifactLost,
    BufferFull,
    FactConflict,
    InvalidFactError,
)
from ergon_framework.facts.model import Buffer, Envelope, Fact, Pair, Side
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.telemetry import names
from tests.log_events import event_of

PAIR = Pair("A", "B")
FAR = 2**52


def envelope(message_id="m-1"):
    return Envelope(message_id=message_id, from_zone="A", to_zone="B", produced_at_unix_ms=0)


def read_all(store, reader="r"):
    facts = store.fetch_facts(reader, PAIR, 100)
    if facts:
        store.confirm_receipt(reader, PAIR, facts[-1].cursor)
    return facts


@pytest.mark.spec("FAC-03")
def test_ids_are_kept_for_as_long_as_they_were_told_and_never_shorter_than_their_facts():
    now = [1000.0]
    store = MemoryBoundary(identity_retention=60.0, wall=lambda: now[0])
    fact = Fact.of("s", "p", 1)
    store.append_fact(envelope(), fact)
    store.fetch_facts("r", PAIR, 0)
    now[0] += 3600
    store.prune(FAR)
    assert store.get_fact("A", "m-1") is not None  # its fact is retained: nobody has confirmed it
    read_all(store)
    now[0] += 30
    store.prune(FAR)
    assert store.get_fact("A", "m-1") is None
    again = store.append_fact(envelope(), fact)
    assert (again.offset, again.duplicate) == (2, False)


@pytest.mark.spec("FAC-03")
def test_ids_are_kept_for_ever_by_default():
    now = [1000.0]
    store = MemoryBoundary(wall=lambda: now[0])
    store.append_fact(envelope(), Fact.of("s", "p", 1))
    read_all(store)
    now[0] += 100 * 365 * 86_400
    assert store.prune(FAR).facts == 1
    assert store.append_fact(envelope(), Fact.of("s", "p", 1)).duplicate


@pytest.mark.spec("FAC-16")
def test_bytes_are_bounded_too_and_artifacts_count():
    store = MemoryBoundary(max_bytes=20)
    store.put_object("b", "k", [b"x" * 12])
    store.append_fact(envelope(), Fact.of("s", "p", "12345"))  # 7 bytes
    with pytest.raises(BufferFull, match="19 bytes are retained and 20 is the most"):
        store.append_fact(envelope("m-2"), Fact.of("s", "p", 12))
    with pytest.raises(BufferFull):
        store.put_object("b", "other", [b"xx"])
    assert store.put_object("b", "k", [b"x" * 12]).size == 12
    read_all(store)
    assert store.prune(FAR) == (1, 1)
    assert store.append_fact(envelope("m-2"), Fact.of("s", "p", "x" * 18)).offset == 2


def test_a_listener_is_told_of_facts_that_are_new_and_no_longer_than_it_listens():
    store, heard = MemoryBoundary(), []
    unlisten = store.listen(lambda: heard.append("woken"))
    store.append_fact(envelope(), Fact.of("s", "p", 1))
    store.append_fact(envelope(), Fact.of("s", "p", 1))
    assert heard == ["woken"]
    unlisten()
    store.append_fact(envelope("m-2"), Fact.of("s", "p", 2))
    assert heard == ["woken"]


def test_an_upload_may_come_from_a_coroutine():
    async def pieces():
        yield b"ab"
        await asyncio.sleep(0)
        yield b"c"

    async def broken():
        yield b"ab"
        raise OSError("reset")

    async def main():
        store = MemoryBoundary()
        assert (await store.put_object_async("b", "k", pieces())).size == 3
        with pytest.raises(OSError, match="reset"):
            await store.put_object_async("b", "other", broken())
        return [piece async for piece in store.get_object_async("b", "k")]

    assert asyncio.run(main()) == [b"abc"]


def test_a_blob_yields_bytes():
    with pytest.raises(InvalidFactError, match="yields bytes, not str"):
        MemoryBoundary().put_object("b", "k", ["text"])


@pytest.mark.spec("FAC-24", "FAC-23")
def test_outcomes_are_counted_by_buffer(caplog):
    def counted(metric, buffer):
        found = observe.tally_of(buffer).counted()
        return {values[0]: count for (name, values), count in found.items() if name == metric.name}

    def grown(before, after):
        return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}

    facts, artifacts = counted(names.FACTS, Buffer.ISB), counted(names.ARTIFACTS, Buffer.ISB)
    lost = counted(names.ARTIFACTS_LOST, Buffer.ISB)
    store = MemoryBoundary(side=Side.OUTER, max_facts=2)
    fact, other = Fact.of("s", "p", 1), Fact.of("s", "p", 2)
    missing = Fact.of("s", "p", {"bucket": "b", "key": "none", "digest": "sha256:" + "0" * 64, "size": 1})
    store.append_facts([(envelope(), fact), (envelope(), fact), (envelope(), other), (envelope("m-2"), missing)])
    stored = store.put_object("b", "k", [b"abc"])
    store.put_object("b", "k", [b"abc"])
    with pytest.raises(ArtifactConflict):
        store.put_object("b", "k", [b"abd"])
    with pytest.raises(ZeroDivisionError):
        store.put_object("b", "half", _breaking())
    reference = {"bucket": "b", "key": "k", "digest": stored.digest, "size": stored.size}
    store.append_fact(envelope("m-3"), Fact.of("s", "p", reference))
    with pytest.raises(BufferFull):
        store.append_fact(envelope("m-4"), fact)
    store._artifacts._contents.clear()
    with caplog.at_level(logging.ERROR), pytest.raises(ArtifactLost):
        list(store.get_object("b", "k"))
    assert grown(facts, counted(names.FACTS, Buffer.ISB)) == {
        "stored": 2,
        "repeated": 1,
        "conflict": 1,
        "refused": 1,
        "full": 1,
    }
    assert grown(artifacts, counted(names.ARTIFACTS, Buffer.ISB)) == {
        "stored": 1,
        "repeated": 1,
        "conflict": 1,
        "broken": 1,
    }
    assert grown(lost, counted(names.ARTIFACTS_LOST, Buffer.ISB)) == {"A": 1}
    (record,) = [record for record in caplog.records if event_of(record) == "artifact lost"]
    assert (record.zone, record.message_id, record.bucket, record.key) == ("A", "m-3", "b", "k")


def _breaking():
    yield b"x"
    raise ZeroDivisionError


@pytest.mark.spec("FAC-26")
def test_the_store_in_memory_is_never_strict():
    assert not MemoryBoundary().capabilities.strict


@pytest.mark.spec("FAC-13")
def test_a_conflict_says_what_is_there_and_what_to_do():
    store = MemoryBoundary()
    store.append_fact(envelope(), Fact.of("s", "p", 1))
    (result,) = store.append_facts([(envelope(), Fact.of("s", "p", 2))])
    with pytest.raises(FactConflict, match=r"'m-1' of 'A' is stored at offset 1 .*make ids of all"):
        confirmed(result)


def test_a_restored_store_goes_its_own_way():
    store = MemoryBoundary()
    store.append_fact(envelope(), Fact.of("s", "p", 1))
    twin = store.restored()
    twin.append_fact(envelope("m-2"), Fact.of("s", "p", 2))
    assert store.get_fact("A", "m-2") is None
    assert {fact.epoch for fact in twin.fetch_facts("r", PAIR, 10)} == {twin.epoch}
    assert store.epoch != twin.epoch


def test_a_backup_holds_nothing_of_an_upload_that_is_coming_in():
    store = MemoryBoundary()
    backups = []

    def pieces():
        yield b"ab"
        backups.append(store.restored())
        yield b"c"

    store.put_object("files", "a", pieces())
    assert b"".join(store.get_object("files", "a")) == b"abc"
    assert backups[0].known_object("files", "a") is None
    assert backups[0].put_object("files", "a", [b"other"]).size == 5


@pytest.mark.spec("FAC-21", "FAC-23")
@pytest.mark.parametrize("damage", [None, b"damaged"])
def test_an_artifact_that_is_lost_or_damaged_is_right_again_when_the_same_bytes_are_put(damage):
    store = MemoryBoundary()
    stored = store.put_object("files", "a", [b"bytes"])
    reference = {"bucket": "files", "key": "a", "digest": stored.digest, "size": stored.size}
    store.append_fact(envelope(), Fact.of("s", "p", reference))
    if damage is None:
        del store._artifacts._contents[stored.digest]
    else:
        store._artifacts._contents[stored.digest] = damage
    with pytest.raises(ArtifactLost):
        list(store.get_object("files", "a"))
    assert store.put_object("files", "a", [b"bytes"]) == stored
    assert b"".join(store.get_object("files", "a")) == b"bytes"
