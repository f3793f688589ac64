"""Room: an alert before a store is full, that does not come and go with every fact."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.facts.capacity import CapacityMonitor, CapacityPolicy, Usage, disk_usage, store_usage
from ergon_framework.facts.errors import BufferFull
from ergon_framework.facts.model import Buffer, Envelope, Fact, ZonePair
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import get_registry
from tests.log_events import list_events

pytestmark = pytest.mark.spec("FAC-16")


def make_measure(*used):
    """One level after the other, of 100."""
    remaining = iter(used)
    return lambda: [Usage("facts", next(remaining), 100)]


def list_event_names(caplog):
    return list_events(caplog.records)


def test_an_alert_is_raised_once_and_cleared_only_well_below_its_limit(caplog):
    room = CapacityMonitor(make_measure(79, 80, 79, 85, 70, 69, 79, 90), buffer=Buffer.ESB)
    history = []
    with caplog.at_level(logging.INFO, logger="ergon_framework.facts"):
        for _ in range(8):
            caplog.clear()
            room.check()
            history.append((list_event_names(caplog), bool(room.warnings)))
    assert history == [
        ([], False),
        (["storage near limit"], True),
        ([], True),
        ([], True),
        ([], True),
        (["storage below limit"], False),
        ([], False),
        (["storage near limit"], True),
    ]


@pytest.mark.spec("FAC-11")
def test_the_alert_comes_before_the_store_is_full_and_nothing_is_lost(caplog):
    store = MemoryBoundary(max_facts=10)
    room = CapacityMonitor(store_usage(store, max_facts=10), buffer=Buffer.ESB)
    first_alert = None

    def append(number):
        envelope = Envelope(message_id=f"m-{number}", from_zone="A", to_zone="B", produced_at_unix_ms=0)
        store.append_fact(envelope, Fact.create("s", "p"))

    with caplog.at_level(logging.WARNING, logger="ergon_framework.facts"):
        for number in range(1, 11):
            append(number)
            room.check()
            if first_alert is None and room.warnings:
                first_alert = number
    with pytest.raises(BufferFull):
        append(11)
    assert first_alert == 8
    assert store.last_offset(ZonePair("A", "B")).offset == 10
    assert "of 10 facts" in room.warnings[0]
    [record] = caplog.records
    assert (record.capacity, record.used, record.limit) == ("facts", 8, 10)


def test_bytes_are_those_of_the_facts_that_are_retained():
    store = MemoryBoundary()
    envelope = Envelope(message_id="m", from_zone="A", to_zone="B", produced_at_unix_ms=0)
    store.append_fact(envelope, Fact.create("s", "p", "12345678"))
    assert list(store_usage(store, max_bytes=100)()) == [Usage("bytes", 10, 100)]


def test_bytes_of_artifacts_count_each_content_once():
    store = MemoryBoundary()
    for key in ("a", "b"):
        store.put_object("files", key, [b"12345"])
    envelope = Envelope(message_id="m", from_zone="A", to_zone="B", produced_at_unix_ms=0)
    store.append_fact(envelope, Fact.create("s", "p", "12345678"))
    assert list(store_usage(store, max_bytes=100)()) == [Usage("bytes", 15, 100)]


def test_the_disk_level_is_the_space_that_the_user_may_use(tmp_path):
    [level] = disk_usage(tmp_path)()
    disk = os.statvfs(tmp_path)
    assert level.name == "disk"
    assert 0 < level.used < level.limit
    assert abs(level.limit - level.used - disk.f_bavail * disk.f_frsize) < 1_000_000_000


def test_an_unavailable_store_keeps_the_last_levels():
    measurements = iter([[Usage("facts", 90, 100)]])

    def measure():
        try:
            return next(measurements)
        except StopIteration:
            raise ConnectionLostError("planned") from None

    room = CapacityMonitor(measure, buffer=Buffer.ESB)
    assert room.check() == room.check() == (Usage("facts", 90, 100),)
    assert room.warnings


def test_it_polls_while_it_is_watched_and_exports_metrics():
    polls = threading.Semaphore(0)

    def measure():
        polls.release()
        return [Usage("disk", 90, 100)]

    room = CapacityMonitor(measure, buffer=Buffer.IFB, policy=CapacityPolicy(interval=0.001))
    with room.run_in_background():
        assert all(polls.acquire(timeout=10) for _ in range(3))
        labels = {"ergon.fact.buffer": "IFB", "ergon.fact.capacity": "disk"}
        assert (labels, 0.9) in get_registry().read(names.CAPACITY_USED_RATIO)
        assert (labels, 1.0) in get_registry().read(names.CAPACITY_NEAR_LIMIT)


def test_a_limit_of_zero_is_reached():
    assert Usage("facts", 0, 0).share == 1.0


def test_the_alert_ends_below_where_it_begins():
    with pytest.raises(ConfigurationError, match="clear must be lower"):
        CapacityPolicy.load({"alert": 0.5, "clear": 0.6})
