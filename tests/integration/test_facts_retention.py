"""Retention of a store in PostgreSQL by concurrent services: each fact is pruned once, and no service fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.capacity import Usage, store_usage
from ergon_framework.facts.model import Envelope, Fact, ZonePair
from ergon_framework.facts.policy import RetentionPolicy
from ergon_framework.facts.retention import FactRetention
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.facts.stores.postgres.store import PostgresBoundary

PAIR = ZonePair("Plant A", "HQ")
WEEK_SECONDS = 7 * 24 * 3600.0
SERVICES = 4


@pytest.mark.spec("FAC-11")
def test_concurrent_services_of_one_store_prune_each_fact_once(database, tmp_path):
    now = [1_700_000_000.0]

    def open_store():
        contents = FileContentStore(tmp_path)
        return PostgresBoundary(database, contents=contents, accept_loss=True, wall=lambda: now[0])

    def prune(_):
        with open_store() as store:
            return FactRetention(store, RetentionPolicy(keep=24 * 3600.0), wall=lambda: now[0]).run_once()

    with open_store() as store, ThreadPoolExecutor(SERVICES) as services:
        store.fetch_facts("ledger", PAIR, 1)
        for week in range(1, 6):
            facts = [make_fact(f"{week}-{number}") for number in range(40)]
            assert [raise_if_error(confirmation).offset for confirmation in store.append_facts(facts)] == list(
                range(week * 40 - 39, week * 40 + 1)
            )
            store.put_object("files", f"{week}", [b"x" * week])
            assert list(store_usage(store, max_bytes=100)()) == [Usage("bytes", 40 + week, 100)]
            now[0] += WEEK_SECONDS
            store.confirm_receipt("ledger", PAIR, store.last_offset(PAIR))
            rounds = list(services.map(prune, range(SERVICES)))
            assert None not in rounds
            assert [sum(counts) for counts in zip(*rounds, strict=True)] == [40, 1]
            assert store.list_logs()[0].first == week * 40 + 1
            assert store.artifact_bytes() == 0


def make_fact(name):
    envelope = Envelope(message_id=name, from_zone=PAIR.from_zone, to_zone=PAIR.to_zone, produced_at_unix_ms=1)
    return envelope, Fact.create("s", "p", 1)
