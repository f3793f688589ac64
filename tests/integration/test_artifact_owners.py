"""Artifacts over the service and in a database of an earlier release: who may read them, and who owns their names."""

from __future__ import annotations

import uuid
from functools import partial

import psycopg
import pytest

from ergon_framework.database import migrate
from ergon_framework.facts.boundary import raise_if_error
from ergon_framework.facts.errors import AccessDenied, ArtifactRefused, ArtifactUnknown
from ergon_framework.facts.model import BoundarySide, Fact, StoredFact, ZonePair, fact_digest
from ergon_framework.facts.stores.files import FileContentStore
from ergon_framework.facts.stores.postgres import append
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from tests.integration.facts_zones import CLIENT_TYPES, INBOUND, OUTBOUND, ServiceZones, make_fact, to_stored

pytestmark = pytest.mark.spec("SEC-10")

SECRET = b"the payroll of November"
LOCAL_ZONES = ("Plant A", "Plant B")


def make_reference(key, content):
    return {"bucket": "b", "key": key, "digest": to_stored(content).digest, "size": len(content)}


def make_forwarded_fact(key, content, *, offset=1, pair=INBOUND):
    envelope, new_fact = make_fact(f"in-{offset}", pair=pair, value=make_reference(key, content))
    return StoredFact(
        envelope=envelope,
        fact=new_fact,
        digest=fact_digest(envelope, new_fact),
        offset=offset,
        epoch="theirs",
        stored_at_unix_ms=1_700_000_000_000,
    )


def read(client, key, **options):
    return b"".join(client.get_object("b", key, **options))


@pytest.fixture(scope="module")
def zones(tmp_path_factory):
    zones = ServiceZones(tmp_path_factory.mktemp("zones"))
    yield zones
    zones.close()


@pytest.fixture(params=CLIENT_TYPES)
def client_type(request, zones):
    zones.store = request.node.name
    zones.serve(zones.store)
    return CLIENT_TYPES[request.param]


def test_a_fact_of_a_peer_gives_no_access_to_a_private_artifact(zones, client_type):
    plant, peer = (
        zones.connect(zones.plant_files, client_type=client_type),
        zones.connect(zones.peer_files, client_type=client_type),
    )
    plant.put_object("b", "payroll", [SECRET])
    (answer,) = zones.host.call(zones.store, "forward_facts", [make_forwarded_fact("payroll", SECRET)])
    assert isinstance(answer, ArtifactRefused)
    for zone in ("", "Plant A", "Enterprise"):
        with pytest.raises(ArtifactUnknown, match="no retained fact of its owner"):
            read(peer, "payroll", zone=zone)
        with pytest.raises(AccessDenied):
            peer.uploaded_bytes("b", "payroll", to_stored(SECRET), zone=zone)


def test_zones_read_their_own_artifacts_under_a_shared_name(zones, client_type):
    plant, peer = (
        zones.connect(zones.plant_files, client_type=client_type),
        zones.connect(zones.peer_files, client_type=client_type),
    )
    theirs, own = b"of the enterprise", b"of the plant"
    zones.host.call(zones.store, "put_object", "b", "k", [theirs], zone="Enterprise")
    with pytest.raises(ArtifactUnknown):
        read(plant, "k", zone="Enterprise")
    raise_if_error(zones.host.call(zones.store, "forward_facts", [make_forwarded_fact("k", theirs)])[0])
    plant.put_object("b", "k", [own])
    assert (read(plant, "k"), read(plant, "k", zone="Plant A"), read(plant, "k", zone="Enterprise")) == (
        own,
        own,
        theirs,
    )
    assert read(peer, "k", zone="Enterprise") == theirs
    with pytest.raises(ArtifactUnknown):
        read(peer, "k", zone="Plant A")
    plant.append_fact(make_fact(7)[0], Fact.create("order:7", "has_file", make_reference("k", own)))
    assert read(peer, "k", zone="Plant A") == own
    with pytest.raises(ArtifactUnknown):
        read(zones.connect(zones.stranger_files, client_type=client_type), "k", zone="Plant A")


def test_zones_that_share_a_store_have_separate_artifact_names(zones, client_type):
    zones.serve(f"{zones.store} of two", zones=LOCAL_ZONES)
    first, second = (
        zones.connect(zones.plant_files, client_type=client_type),
        zones.connect(zones.stranger_files, client_type=client_type),
    )
    both = zones.connect(
        zones.host.authority.issue(f"both-{uuid.uuid4().hex[:6]}", zones=LOCAL_ZONES), client_type=client_type
    )
    first.put_object("b", "payroll", [SECRET])
    assert read(first, "payroll") == read(first, "payroll", zone="Plant A") == SECRET
    for zone in ("", "Plant A"):
        with pytest.raises(ArtifactUnknown):
            read(second, "payroll", zone=zone)
    assert second.uploaded_bytes("b", "payroll", to_stored(SECRET)) == 0
    with pytest.raises(AccessDenied, match="only 'Plant A' may store artifacts here"):
        second.put_object("b", "payroll", [b"x"], zone="Plant A")
    second.put_object("b", "payroll", [b"of plant B"])
    assert (read(both, "payroll", zone="Plant A"), read(both, "payroll", zone="Plant B")) == (SECRET, b"of plant B")
    between = ZonePair("Plant A", "Plant B")
    first.append_fact(
        make_fact(1, pair=between)[0], Fact.create("order:7", "has_file", make_reference("payroll", SECRET))
    )
    assert read(second, "payroll", zone="Plant A") == SECRET
    both.put_object("b", "common", [b"of both"])
    assert read(first, "common") == read(second, "common") == b"of both"


# -- artifacts without an owner --------------------------------------------------------------------


@pytest.fixture
def boundary(postgres, tmp_path):
    dsn = postgres.create_database(f"owners_{uuid.uuid4().hex[:8]}")
    migrate.upgrade(dsn)
    boundary = PostgresBoundary(dsn, side=BoundarySide.INNER, contents=FileContentStore(tmp_path), accept_loss=True)
    boundary.dsn = dsn
    yield boundary
    boundary.close()


def send_without_owner(boundary, monkeypatch):
    """Send facts without an owner of their artifacts."""
    original = append._to_column_values
    monkeypatch.setattr(append, "_to_column_values", lambda place, item: _remove_zone(original(place, item)))


def _remove_zone(columns):
    columns.pop("zone", None)
    return columns


def test_artifacts_without_an_owner_are_readable_and_grant_no_access(boundary, monkeypatch):
    boundary.put_object("b", "own", [b"own"])
    boundary.put_object("b", "theirs", [b"theirs"])
    with monkeypatch.context() as patch:
        send_without_owner(boundary, patch)
        boundary.append_fact(make_fact(1)[0], Fact.create("order:7", "has_file", make_reference("own", b"own")))
        # In one shared namespace an incoming fact could name any artifact.
        raise_if_error(boundary.forward_facts([make_forwarded_fact("theirs", b"theirs")])[0])
        raise_if_error(boundary.forward_facts([make_forwarded_fact("own", b"own", offset=2)])[0])
    assert (read(boundary, "own"), read(boundary, "own", zone="Plant A")) == (b"own", b"own")
    assert (read(boundary, "theirs"), read(boundary, "theirs", zone="Enterprise")) == (b"theirs", b"theirs")
    assert boundary.stat_object("b", "own", zone="Enterprise").zone == ""
    with pytest.raises(ArtifactUnknown):
        read(boundary, "own", zone="Plant B")
    # From now on each zone stores under its own name.
    assert boundary.uploaded_bytes("b", "theirs", to_stored(b"theirs"), zone="Enterprise") == 0
    boundary.put_object("b", "theirs", [b"new"], zone="Enterprise")
    raise_if_error(boundary.forward_facts([make_forwarded_fact("theirs", b"new", offset=3)])[0])
    assert (read(boundary, "theirs", zone="Enterprise"), read(boundary, "theirs")) == (b"new", b"theirs")


def test_a_fact_without_an_owner_is_appended(boundary, monkeypatch):
    boundary.put_object("b", "k", [b"x"])
    send_without_owner(boundary, monkeypatch)
    boundary.append_fact(make_fact(1)[0], Fact.create("order:7", "has_file", make_reference("k", b"x")))
    raise_if_error(boundary.forward_facts([make_forwarded_fact("k", b"x")])[0])
    assert boundary.last_offset(OUTBOUND).offset == boundary.last_offset(INBOUND).offset == 1


def test_one_name_of_three_owners_is_three_artifacts(boundary):
    boundary.put_object("b", "k", [b"x"], zone="Enterprise")
    put = partial(boundary.put_object, "b", "k")
    put([b"y"])
    put([b"z"], zone="Plant B")
    with psycopg.connect(boundary.dsn) as connection:
        zones = connection.execute("select zone from ergon.fact_objects order by zone").fetchall()
    assert zones == [("",), ("Enterprise",), ("Plant B",)]
