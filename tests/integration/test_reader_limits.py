"""Readers and pairs of zones that a peer can add to a store over the service: so many, and no others."""

from __future__ import annotations

import grpc
import pytest

from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.errors import AccessDenied, TooManyReaders
from ergon_framework.facts.model import Pair, StoredFact, digest_of
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.server import Limits
from tests.integration.facts_zones import IN, KINDS, OUT, Zones, fact

pytestmark = pytest.mark.spec("SEC-11")


@pytest.fixture(scope="module")
def zones(tmp_path_factory):
    made = Zones(tmp_path_factory.mktemp("zones"))
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def kind(request, zones):
    zones.store = request.node.name
    zones.serve(zones.store)
    return KINDS[request.param]


def readers(zones):
    return sum(len(log.readers) for log in zones.host.call(zones.store, "survey"))


def test_a_peer_has_a_hundred_readers_and_no_more(zones, kind):
    plant, peer = zones.client(zones.plant_files, kind=kind), zones.client(zones.peer_files, kind=kind)
    plant.append_fact(*fact())
    for number in range(50):
        peer.fetch_facts(f"r{number}", OUT, 1)
        peer.fetch_facts(f"sender:{number}", IN, 1)
    for pair, reader in ((OUT, "more"), (IN, "sender:more")):
        with pytest.raises(TooManyReaders, match=r"zone 'Enterprise' has 100 readers .* ergon facts retire") as caught:
            peer.fetch_facts(reader, pair, 1)
        assert caught.value.final
    assert readers(zones) == 100
    # Its own readers go on, and so does everybody else.
    assert [stored.offset for stored in peer.fetch_facts("r7", OUT, 1)] == [1]
    plant.fetch_facts("ledger", IN, 1)
    zones.client(zones.stranger_files, kind=kind).fetch_facts("other", Pair("Plant A", "Plant B"), 1)
    operator = zones.client(zones.operator_files, kind=kind)
    assert operator.retire_reader("r7", OUT)
    assert [stored.offset for stored in peer.fetch_facts("more", OUT, 1)] == [1]


def test_a_caller_without_our_client_is_told_by_its_status(zones):
    zones.serve("one reader", limits=Limits(readers=1))
    fetch = zones.raw(zones.peer_files).unary_unary(SERVICE + "FetchFacts")

    def ask(reader):
        pair = wire.Pair(from_zone="Plant A", to_zone="Enterprise")
        return fetch(wire.FetchFactsRequest(reader=reader, pair=pair, limit=1).SerializeToString(), timeout=10)

    ask("one")
    with pytest.raises(grpc.RpcError) as caught:
        ask("two")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1 is the limit" in caught.value.details()


def test_a_peer_adds_no_pairs_of_zones_that_never_were(zones, kind):
    peer = zones.client(zones.peer_files, kind=kind)
    for number in range(3):
        for pair in (Pair(f"never {number}", "Enterprise"), Pair("Enterprise", f"never {number}")):
            with pytest.raises(AccessDenied, match=r"no facts from .* belongs to 'Plant A'"):
                peer.fetch_facts(f"sender:r{number}" if pair.from_zone == "Enterprise" else "r", pair, 1)
    assert zones.host.call(zones.store, "survey") == []


def test_a_pair_of_two_other_zones_is_read_where_it_has_facts(zones, kind):
    pair = Pair("Plant B", "Enterprise")
    envelope, stated = fact(1, pair=pair)
    passing = StoredFact(
        envelope=envelope,
        fact=stated,
        digest=digest_of(envelope, stated),
        offset=1,
        epoch="theirs",
        stored_at_unix_ms=1_700_000_000_000,
    )
    confirmed(zones.host.call(zones.store, "forward_facts", [passing])[0])
    (found,) = zones.client(zones.peer_files, kind=kind).fetch_facts("ledger", pair, 1)
    assert found.envelope.from_zone == "Plant B"
