"""Retention: rounds under a policy, which remove what is old and confirmed, and nothing else."""

from __future__ import annotations

import logging
import threading

import pytest

from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.facts.boundary import PruneResult
from ergon_framework.facts.model import Envelope, Fact, ZonePair
from ergon_framework.facts.policy import RetentionPolicy
from ergon_framework.facts.retention import FactRetention
from ergon_framework.facts.stores.memory import MemoryBoundary

pytestmark = pytest.mark.spec("FAC-11")

PAIR = ZonePair("Plant A", "HQ")


class Clock:
    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now


def append(store, number):
    envelope = Envelope(message_id=f"m-{number}", from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=0)
    store.append_fact(envelope, Fact.create("s", "p", number))


def list_offsets(store):
    return [each.offset for each in store.fetch_facts("ledger", PAIR, 100, after=None)]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store(clock):
    boundary = MemoryBoundary(wall=clock)
    boundary.fetch_facts("ledger", PAIR, 1)
    for number in (1, 2):
        append(boundary, number)
    clock.now += 3600
    append(boundary, 3)
    return boundary


def test_old_confirmed_facts_are_pruned_and_the_rest_stays(store, clock):
    retention = FactRetention(store, RetentionPolicy(keep=1800.0), wall=clock)
    assert retention.run_once() == PruneResult(0, 0)  # no reader has confirmed anything
    first = store.fetch_facts("ledger", PAIR, 1)[0]
    store.confirm_receipt("ledger", PAIR, first.cursor)
    assert retention.run_once() == PruneResult(1, 0)
    store.confirm_receipt("ledger", PAIR, store.last_offset(PAIR))
    assert retention.run_once() == PruneResult(1, 0)  # the third is confirmed, and too young
    assert store.list_logs()[0].first == 3


def test_a_policy_computes_the_time_before_which_facts_are_pruned():
    assert RetentionPolicy(keep=10.0).before_unix_ms(1000.0) == 990_000
    assert RetentionPolicy().before_unix_ms(1.0) == 0
    assert RetentionPolicy(interval=100.0, jitter=0.1).next_delay(lambda: 0.0) == pytest.approx(90.0)
    with pytest.raises(ConfigurationError):
        RetentionPolicy.load({"interval": 0})


class FlakyStore(MemoryBoundary):
    """Cannot be asked the first time; tells when it was asked."""

    def __init__(self):
        super().__init__()
        self.asked = threading.Semaphore(0)
        self.errors = [ConnectionLostError("the database is away"), OSError("the disk is away")]

    def prune(self, before_unix_ms):
        self.asked.release()
        if self.errors:
            raise self.errors.pop(0)
        return PruneResult(7, 2)


def test_a_failed_round_is_logged_and_the_next_one_prunes(caplog):
    store = FlakyStore()
    retention = FactRetention(store)
    with caplog.at_level(logging.INFO, logger="ergon_framework.facts"):
        assert [retention.run_once() for _ in range(3)] == [None, None, PruneResult(7, 2)]
    assert [(record.event, record.levelname) for record in caplog.records] == [
        ("pruning failed", "WARNING"),
        ("pruning failed", "WARNING"),
        ("facts pruned", "INFO"),
    ]
    assert "the database is away" in caplog.records[0].error
    assert (caplog.records[2].facts, caplog.records[2].artifacts) == (7, 2)


def test_rounds_repeat_until_the_end():
    store = FlakyStore()
    with FactRetention(store, RetentionPolicy(interval=0.001)).run_in_background():
        for _ in range(4):
            assert store.asked.acquire(timeout=20)
    assert "ergon-retention" not in {thread.name for thread in threading.enumerate()}


def test_the_end_does_not_wait_for_the_next_round():
    store = FlakyStore()
    with FactRetention(store, RetentionPolicy(interval=3600.0)).run_in_background():
        assert store.asked.acquire(timeout=20)
    assert "ergon-retention" not in {thread.name for thread in threading.enumerate()}
