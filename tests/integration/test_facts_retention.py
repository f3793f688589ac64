"""Retention of a store in PostgreSQL by several services at once: each fact goes once, and nobody fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.model import Envelope, Fact, Pair
from ergon_framework.facts.policy import RetentionPolicy
from ergon_framework.facts.retention import Retention
from ergon_framework.facts.room import Level, of_store
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.facts.stores.postgres import PostgresBoundary

PAIR = Pair("Plant A", "HQ")
WEEK = 7 * 24 * 3600.0
SERVICES = 4


@pytest.mark.spec("FAC-11")
def test_services_of_one_store_may_all_let_go_of_the_same(database, tmp_path):
    now = [1_700_000_000.0]

    def made():
        contents = FileContents(tmp_path)
        return PostgresBoundary(database, contents=contents, accept_loss=True, wall=lambda: now[0])

    def prune(_):
        with made() as store:
            return Retention(store, RetentionPolicy(keep=24 * 3600.0), wall=lambda: now[0]).round()

    with made() as store, ThreadPoolExecutor(SERVICES) as services:
        store.fetch_facts("ledger", PAIR, 1)
        for week in range(1, 6):
            facts = [fact(f"{week}-{number}") for number in range(40)]
            assert [confirmed(told).offset for told in store.append_facts(facts)] == list(
                range(week * 40 - 39, week * 40 + 1)
            )
            store.put_object("files", f"{week}", [b"x" * week])
            assert list(of_store(store, max_bytes=100)()) == [Level("bytes", 40 + week, 100)]
            now[0] += WEEK
            store.confirm_receipt("ledger", PAIR, store.end_of(PAIR))
            rounds = list(services.map(prune, range(SERVICES)))
            assert None not in rounds
            assert [sum(counts) for counts in zip(*rounds, strict=True)] == [40, 1]
            assert store.survey()[0].first == week * 40 + 1
            assert store.artifact_bytes() == 0


def fact(name):
    envelope = Envelope(message_id=name, from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.of("s", "p", 1)
