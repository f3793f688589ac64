"""A peer that lies gets no artifact of this zone, and no name of it: shown with the replicator and the access rules."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace

import pytest

from ergon_framework.facts.errors import AccessDenied, ArtifactUnknown
from ergon_framework.facts.model import BoundarySide, Envelope, Fact, ZonePair, fact_digest
from ergon_framework.facts.replica_state import ReplicaStatus
from ergon_framework.facts.replicator import Replicator
from ergon_framework.facts.service.access import AccessPolicy, Identity
from ergon_framework.facts.stores.memory import MemoryBoundary

pytestmark = pytest.mark.spec("SEC-10")

PAIR = ZonePair("HQ", "Plant A")
HQ = Identity(frozenset({"HQ"}), None, 0, 2**40, "00" * 32)
SECRET = b"the payroll of November"


def reference(bucket, key, content):
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return {"bucket": bucket, "key": key, "digest": digest, "size": len(content)}


class LyingPeer(MemoryBoundary):
    """The store of a peer, which sends a fact about an artifact of which it knows the digest only."""

    lie = Fact.create("payroll", "has_file", reference("private", "payroll.csv", SECRET))

    def fetch_facts(self, reader, pair, limit, *, after=None, **options):
        return [
            replace(stored, fact=self.lie, digest=fact_digest(stored.envelope, self.lie))
            for stored in super().fetch_facts(reader, pair, limit, after=after, **options)
        ]


def append(store, message_id, value=None):
    envelope = Envelope(message_id=message_id, from_zone="HQ", to_zone="Plant A", produced_at_unix_ms=1)
    store.append_fact(envelope, Fact.create("x", "y", value))


def replicate(source, destination):
    """The status after the fact has arrived, or the pair has stopped."""
    finished = threading.Event()

    def on_change(state):
        if state.status not in {ReplicaStatus.STARTING, ReplicaStatus.FOLLOWING}:
            finished.set()

    unlisten = destination.listen(finished.set)
    replicator = Replicator(source, destination, PAIR, on_change=on_change)
    running = threading.Thread(target=replicator.run)
    running.start()
    assert finished.wait(10)
    status = replicator.state().status
    replicator.stop()
    running.join()
    unlisten()
    return status


def may_read(store, bucket, key):
    try:
        AccessPolicy({"Plant A"}).check_get(HQ, bucket, key, store.stat_object(bucket, key))
    except (AccessDenied, ArtifactUnknown):
        return False
    return True


def test_a_fact_that_names_a_digest_gives_its_sender_no_access():
    plant, hq = MemoryBoundary(side=BoundarySide.INNER), LyingPeer(side=BoundarySide.OUTER)
    plant.put_object("private", "payroll.csv", [SECRET])
    append(hq, "probe")
    status = replicate(hq, plant)
    assert not may_read(plant, "private", "payroll.csv")
    # The bytes have to come from the sender, who has none.
    assert status is ReplicaStatus.ARTIFACT_LOST
    assert plant.last_offset(PAIR) is None


def test_a_peer_cannot_claim_an_artifact_name():
    plant, hq = MemoryBoundary(side=BoundarySide.INNER), MemoryBoundary(side=BoundarySide.OUTER)
    theirs, own = b"IBAN of the attacker", b"the plant's own invoice"
    hq.put_object("invoices", "2026/18.txt", [theirs])
    append(hq, "first", reference("invoices", "2026/18.txt", theirs))
    replicate(hq, plant)
    plant.put_object("invoices", "2026/18.txt", [own])
    assert b"".join(plant.get_object("invoices", "2026/18.txt")) == own
    assert b"".join(plant.get_object("invoices", "2026/18.txt", zone="HQ")) == theirs
