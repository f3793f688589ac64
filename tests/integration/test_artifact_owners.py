"""Artifacts over the service and in a database from before: who may read them, and whose names they are."""

from __future__ import annotations

import uuid
from functools import partial

import psycopg
import pytest

from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.errors import AccessDenied, ArtifactRefused, ArtifactUnknown
from ergon_framework.facts.model import Fact, Pair, Side, StoredFact, digest_of
from ergon_framework.facts.stores import postgres_batch
from ergon_framework.facts.stores.files import FileContents
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.schema import migrate
from tests.integration.facts_zones import IN, KINDS, OUT, Zones, fact, stored
from tests.integration.test_provider_schema import move

pytestmark = pytest.mark.spec("SEC-10")

SECRET = b"the payroll of November"
HOME = ("Plant A", "Plant B")


def about(key, content):
    return {"bucket": "b", "key": key, "digest": stored(content).digest, "size": len(content)}


def arriving(key, content, *, offset=1, pair=IN):
    envelope, stated = fact(f"in-{offset}", pair=pair, value=about(key, content))
    return StoredFact(
        envelope=envelope,
        fact=stated,
        digest=digest_of(envelope, stated),
        offset=offset,
        epoch="theirs",
        stored_at_unix_ms=1_700_000_000_000,
    )


def read(client, key, **how):
    return b"".join(client.get_object("b", key, **how))


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


def test_a_fact_of_a_peer_opens_no_private_artifact(zones, kind):
    plant, peer = zones.client(zones.plant_files, kind=kind), zones.client(zones.peer_files, kind=kind)
    plant.put_object("b", "payroll", [SECRET])
    (answer,) = zones.host.call(zones.store, "forward_facts", [arriving("payroll", SECRET)])
    assert isinstance(answer, ArtifactRefused)
    for zone in ("", "Plant A", "Enterprise"):
        with pytest.raises(ArtifactUnknown, match="no retained fact of its owner"):
            read(peer, "payroll", zone=zone)
        with pytest.raises(AccessDenied):
            peer.received("b", "payroll", stored(SECRET), zone=zone)


def test_each_zone_reads_its_own_under_one_name(zones, kind):
    plant, peer = zones.client(zones.plant_files, kind=kind), zones.client(zones.peer_files, kind=kind)
    theirs, own = b"of the enterprise", b"of the plant"
    zones.host.call(zones.store, "put_object", "b", "k", [theirs], zone="Enterprise")
    with pytest.raises(ArtifactUnknown):
        read(plant, "k", zone="Enterprise")
    confirmed(zones.host.call(zones.store, "forward_facts", [arriving("k", theirs)])[0])
    plant.put_object("b", "k", [own])
    assert (read(plant, "k"), read(plant, "k", zone="Plant A"), read(plant, "k", zone="Enterprise")) == (
        own,
        own,
        theirs,
    )
    assert read(peer, "k", zone="Enterprise") == theirs
    with pytest.raises(ArtifactUnknown):
        read(peer, "k", zone="Plant A")
    plant.append_fact(fact(7)[0], Fact.of("order:7", "has_file", about("k", own)))
    assert read(peer, "k", zone="Plant A") == own
    with pytest.raises(ArtifactUnknown):
        read(zones.client(zones.stranger_files, kind=kind), "k", zone="Plant A")


def test_zones_that_share_a_store_have_names_of_their_own(zones, kind):
    zones.serve(f"{zones.store} of two", zones=HOME)
    first, second = zones.client(zones.plant_files, kind=kind), zones.client(zones.stranger_files, kind=kind)
    both = zones.client(zones.host.authority.issue(f"both-{uuid.uuid4().hex[:6]}", zones=HOME), kind=kind)
    first.put_object("b", "payroll", [SECRET])
    assert read(first, "payroll") == read(first, "payroll", zone="Plant A") == SECRET
    for zone in ("", "Plant A"):
        with pytest.raises(ArtifactUnknown):
            read(second, "payroll", zone=zone)
    assert second.received("b", "payroll", stored(SECRET)) == 0
    with pytest.raises(AccessDenied, match="by 'Plant A' only"):
        second.put_object("b", "payroll", [b"x"], zone="Plant A")
    second.put_object("b", "payroll", [b"of plant B"])
    assert (read(both, "payroll", zone="Plant A"), read(both, "payroll", zone="Plant B")) == (SECRET, b"of plant B")
    between = Pair("Plant A", "Plant B")
    first.append_fact(fact(1, pair=between)[0], Fact.of("order:7", "has_file", about("payroll", SECRET)))
    assert read(second, "payroll", zone="Plant A") == SECRET
    both.put_object("b", "common", [b"of both"])
    assert read(first, "common") == read(second, "common") == b"of both"


# -- a database from before -----------------------------------------------------------------------------


@pytest.fixture
def boundary(postgres, tmp_path):
    dsn = postgres.create_database(f"owners_{uuid.uuid4().hex[:8]}")
    migrate.upgrade(dsn)
    made = PostgresBoundary(dsn, side=Side.INNER, contents=FileContents(tmp_path), accept_loss=True)
    made.dsn = dsn
    yield made
    made.close()


def as_before(boundary, monkeypatch):
    """What a worker of the release before sends: no owner."""
    now = postgres_batch._columns
    monkeypatch.setattr(postgres_batch, "_columns", lambda place, item: _without_zone(now(place, item)))


def _without_zone(columns):
    columns.pop("zone", None)
    return columns


def test_artifacts_from_before_stay_readable_and_grant_nothing(boundary, monkeypatch):
    boundary.put_object("b", "own", [b"own"])
    boundary.put_object("b", "theirs", [b"theirs"])
    with monkeypatch.context() as before:
        as_before(boundary, before)
        boundary.append_fact(fact(1)[0], Fact.of("order:7", "has_file", about("own", b"own")))
        # In one namespace a fact that arrives names whatever is there.
        confirmed(boundary.forward_facts([arriving("theirs", b"theirs")])[0])
        confirmed(boundary.forward_facts([arriving("own", b"own", offset=2)])[0])
    boundary.close()
    move(boundary.dsn, "downgrade", "0012")
    migrate.upgrade(boundary.dsn)
    assert (read(boundary, "own"), read(boundary, "own", zone="Plant A")) == (b"own", b"own")
    assert (read(boundary, "theirs"), read(boundary, "theirs", zone="Enterprise")) == (b"theirs", b"theirs")
    assert boundary.known_object("b", "own", zone="Enterprise").zone == ""
    with pytest.raises(ArtifactUnknown):
        read(boundary, "own", zone="Plant B")
    # From now on each zone stores as itself.
    assert boundary.received("b", "theirs", stored(b"theirs"), zone="Enterprise") == 0
    boundary.put_object("b", "theirs", [b"new"], zone="Enterprise")
    confirmed(boundary.forward_facts([arriving("theirs", b"new", offset=3)])[0])
    assert (read(boundary, "theirs", zone="Enterprise"), read(boundary, "theirs")) == (b"new", b"theirs")


def test_a_worker_of_the_release_before_goes_on(boundary, monkeypatch):
    boundary.put_object("b", "k", [b"x"])
    as_before(boundary, monkeypatch)
    boundary.append_fact(fact(1)[0], Fact.of("order:7", "has_file", about("k", b"x")))
    confirmed(boundary.forward_facts([arriving("k", b"x")])[0])
    assert boundary.end_of(OUT).offset == boundary.end_of(IN).offset == 1


def test_one_name_of_three_owners_is_three_artifacts(boundary):
    boundary.put_object("b", "k", [b"x"], zone="Enterprise")
    put = partial(boundary.put_object, "b", "k")
    put([b"y"])
    put([b"z"], zone="Plant B")
    with psycopg.connect(boundary.dsn) as connection:
        zones = connection.execute("select zone from ergon.fact_objects order by zone").fetchall()
    assert zones == [("",), ("Enterprise",), ("Plant B",)]
