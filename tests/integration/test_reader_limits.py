"""Check the limits on readers and pairs of zones that a peer can add to a store through the service."""

from __future__ import annotations

import grpc
import pytest

from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.errors import AccessDenied, TooManyReaders
from ergon_framework.facts.model import StoredFact, ZonePair, fact_digest
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.server import Limits
from tests.integration.facts_zones import CLIENT_TYPES, INBOUND, OUTBOUND, ServiceZones, make_fact

pytestmark = pytest.mark.spec("SEC-11")


@pytest.fixture(scope="module")
def zones(tmp_path_factory):
    zones = ServiceZones(tmp_path_factory.mktemp("zones"))
    yield zones
    zones.close()


@pytest.fixture(params=CLIENT_TYPES)
def kind(request, zones):
    zones.store = request.node.name
    zones.serve(zones.store)
    return CLIENT_TYPES[request.param]


def count_readers(zones):
    return sum(len(log.readers) for log in zones.host.call(zones.store, "list_logs"))


def test_a_peer_has_at_most_a_hundred_readers(zones, kind):
    plant, peer = zones.connect(zones.plant_files, client_type=kind), zones.connect(zones.peer_files, client_type=kind)
    plant.append_fact(*make_fact())
    for number in range(50):
        peer.fetch_facts(f"r{number}", OUTBOUND, 1)
        peer.fetch_facts(f"sender:{number}", INBOUND, 1)
    for pair, reader in ((OUTBOUND, "more"), (INBOUND, "sender:more")):
        with pytest.raises(TooManyReaders, match=r"zone 'Enterprise' has 100 readers .* ergon facts retire") as caught:
            peer.fetch_facts(reader, pair, 1)
        assert caught.value.final
    assert count_readers(zones) == 100
    # Its own readers continue, and so do those of all other zones.
    assert [stored.offset for stored in peer.fetch_facts("r7", OUTBOUND, 1)] == [1]
    plant.fetch_facts("ledger", INBOUND, 1)
    zones.connect(zones.stranger_files, client_type=kind).fetch_facts("other", ZonePair("Plant A", "Plant B"), 1)
    operator = zones.connect(zones.operator_files, client_type=kind)
    assert operator.retire_reader("r7", OUTBOUND)
    assert [stored.offset for stored in peer.fetch_facts("more", OUTBOUND, 1)] == [1]


def test_a_caller_without_the_framework_client_gets_a_status_code(zones):
    zones.serve("one reader", limits=Limits(readers=1))
    fetch = zones.open_channel(zones.peer_files).unary_unary(SERVICE + "FetchFacts")

    def call_fetch(reader):
        pair = wire.Pair(from_zone="Plant A", to_zone="Enterprise")
        return fetch(wire.FetchFactsRequest(reader=reader, pair=pair, limit=1).SerializeToString(), timeout=10)

    call_fetch("one")
    with pytest.raises(grpc.RpcError) as caught:
        call_fetch("two")
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "1 is the limit" in caught.value.details()


def test_a_peer_cannot_add_unknown_pairs_of_zones(zones, kind):
    peer = zones.connect(zones.peer_files, client_type=kind)
    for number in range(3):
        for pair in (ZonePair(f"never {number}", "Enterprise"), ZonePair("Enterprise", f"never {number}")):
            with pytest.raises(AccessDenied, match=r"no facts from .* belongs to 'Plant A'"):
                peer.fetch_facts(f"sender:r{number}" if pair.from_zone == "Enterprise" else "r", pair, 1)
    assert zones.host.call(zones.store, "list_logs") == []


def test_a_pair_of_two_other_zones_is_readable_where_it_has_facts(zones, kind):
    pair = ZonePair("Plant B", "Enterprise")
    envelope, content = make_fact(1, pair=pair)
    forwarded = StoredFact(
        envelope=envelope,
        fact=content,
        digest=fact_digest(envelope, content),
        offset=1,
        epoch="theirs",
        stored_at_unix_ms=1_700_000_000_000,
    )
    raise_if_error(zones.host.call(zones.store, "forward_facts", [forwarded])[0])
    (stored,) = zones.connect(zones.peer_files, client_type=kind).fetch_facts("ledger", pair, 1)
    assert stored.envelope.from_zone == "Plant B"
