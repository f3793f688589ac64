"""Room: an alert before a store is full, that does not come and go with every fact."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.facts.errors import BufferFull
from ergon_framework.facts.model import Buffer, Envelope, Fact, Pair
from ergon_framework.facts.room import Level, Room, RoomPolicy, of_disk, of_store
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import registry_of
from tests.log_events import events_of

pytestmark = pytest.mark.spec("FAC-16")


def steps(*used):
    """One level after the other, of 100."""
    left = iter(used)
    return lambda: [Level("facts", next(left), 100)]


def events(caplog):
    return events_of(caplog.records)


def test_an_alert_is_said_once_and_withdrawn_only_well_below(caplog):
    room = Room(steps(79, 80, 79, 85, 70, 69, 79, 90), buffer=Buffer.ESB)
    said = []
    with caplog.at_level(logging.INFO, logger="ergon_framework.facts"):
        for _ in range(8):
            caplog.clear()
            room.look()
            said.append((events(caplog), bool(room.troubles)))
    assert said == [
        ([], False),
        (["room ends"], True),
        ([], True),
        ([], True),
        ([], True),
        (["room again"], False),
        ([], False),
        (["room ends"], True),
    ]


@pytest.mark.spec("FAC-11")
def test_the_alert_comes_before_the_store_is_full_and_nothing_is_lost(caplog):
    store = MemoryBoundary(max_facts=10)
    room = Room(of_store(store, max_facts=10), buffer=Buffer.ESB)
    alerted = None

    def append(number):
        envelope = Envelope(message_id=f"m-{number}", from_zone="A", to_zone="B", produced_at_unix_ms=0)
        store.append_fact(envelope, Fact.of("s", "p"))

    with caplog.at_level(logging.WARNING, logger="ergon_framework.facts"):
        for number in range(1, 11):
            append(number)
            room.look()
            if alerted is None and room.troubles:
                alerted = number
    with pytest.raises(BufferFull):
        append(11)
    assert alerted == 8
    assert store.end_of(Pair("A", "B")).offset == 10
    assert "of 10 facts" in room.troubles[0]
    [record] = caplog.records
    assert (record.room, record.used, record.limit) == ("facts", 8, 10)


def test_bytes_are_those_of_the_facts_that_are_retained():
    store = MemoryBoundary()
    envelope = Envelope(message_id="m", from_zone="A", to_zone="B", produced_at_unix_ms=0)
    store.append_fact(envelope, Fact.of("s", "p", "12345678"))
    assert list(of_store(store, max_bytes=100)()) == [Level("bytes", 10, 100)]


def test_bytes_of_artifacts_count_each_content_once():
    store = MemoryBoundary()
    for key in ("a", "b"):
        store.put_object("files", key, [b"12345"])
    envelope = Envelope(message_id="m", from_zone="A", to_zone="B", produced_at_unix_ms=0)
    store.append_fact(envelope, Fact.of("s", "p", "12345678"))
    assert list(of_store(store, max_bytes=100)()) == [Level("bytes", 15, 100)]


def test_the_disk_is_what_whoever_runs_this_may_use(tmp_path):
    [level] = of_disk(tmp_path)()
    found = os.statvfs(tmp_path)
    assert level.name == "disk"
    assert 0 < level.used < level.limit
    assert abs(level.limit - level.used - found.f_bavail * found.f_frsize) < 1_000_000_000


def test_a_store_that_is_down_leaves_the_last_levels_standing():
    found = iter([[Level("facts", 90, 100)]])

    def measure():
        try:
            return next(found)
        except StopIteration:
            raise ConnectionLost("planned") from None

    room = Room(measure, buffer=Buffer.ESB)
    assert room.look() == room.look() == (Level("facts", 90, 100),)
    assert room.troubles


def test_it_looks_again_and_again_while_it_is_watched_and_is_seen_in_metrics():
    looked = threading.Semaphore(0)

    def measure():
        looked.release()
        return [Level("disk", 90, 100)]

    room = Room(measure, buffer=Buffer.IFB, policy=RoomPolicy(interval=0.001))
    with room.watched():
        assert all(looked.acquire(timeout=10) for _ in range(3))
        labels = {"ergon.fact.buffer": "IFB", "ergon.fact.room": "disk"}
        assert (labels, 0.9) in registry_of().read(names.ROOM)
        assert (labels, 1.0) in registry_of().read(names.ROOM_ALERTS)


def test_a_limit_of_nothing_is_reached():
    assert Level("facts", 0, 0).share == 1.0


def test_the_alert_ends_below_where_it_begins():
    with pytest.raises(ConfigurationError, match="clear is the lower one"):
        RoomPolicy.load({"alert": 0.5, "clear": 0.6})
