"""Over the wire: nothing in and nothing out for those whose certificate does not allow it, now and not once."""

from __future__ import annotations

import ssl
import threading
from datetime import timedelta

import grpc
import pytest

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.errors import AccessDenied, ArtifactUnknown, InvalidFactError
from ergon_framework.facts.model import Cursor, Fact, Pair
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.files import TlsFiles
from tests.integration.facts_zones import IN, KINDS, OUT, Zones, fact, stored
from tests.servers.certificates import Authority, fingerprint, public_key_digest, with_other_signature

pytestmark = pytest.mark.spec("FAC-18")


@pytest.fixture(scope="module")
def zones(tmp_path_factory):
    made = Zones(tmp_path_factory.mktemp("zones"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _served(zones, request):
    zones.store = request.node.name
    zones.serve(zones.store)


def nothing_in(zones):
    assert zones.host.call(zones.store, "survey") == []


def test_a_zone_appends_as_itself_and_its_peer_reads(zones):
    plant, peer = zones.client(zones.plant_files), zones.client(zones.peer_files)
    assert plant.append_fact(*fact()).offset == 1
    (found,) = peer.fetch_facts("ledger", OUT, 10)
    assert found.envelope.message_id == "m-1"
    peer.confirm_receipt("ledger", OUT, found.cursor)
    assert plant.cursor_of("ledger", OUT) == found.cursor


@pytest.mark.parametrize("who", ["stranger_files", "peer_files", "operator_files"])
def test_nobody_appends_as_another_zone(zones, who):
    client = zones.client(getattr(zones, who))
    with pytest.raises(AccessDenied, match="appended by 'Plant A' only"):
        client.append_fact(*fact())
    # One honest fact in front makes the call no better, and nothing of it is kept.
    with pytest.raises(AccessDenied):
        client.append_facts([fact(1, pair=IN), fact(2)])
    with pytest.raises(AccessDenied):
        client.put_object("b", "k", [b"x"])
    nothing_in(zones)


def test_another_zone_reads_nothing_that_is_not_its_own(zones):
    plant, stranger = zones.client(zones.plant_files), zones.client(zones.stranger_files)
    content = b"confidential" * 10
    plant.put_object("b", "k", [content])
    reference = {"bucket": "b", "key": "k", "digest": stored(content).digest, "size": len(content)}
    envelope, _ = fact()
    plant.append_fact(envelope, Fact.of("order:7", "has_file", reference))
    for call in (
        lambda: stranger.fetch_facts("ledger", OUT, 10),
        lambda: stranger.fetch_facts("sender:x", OUT, 10, after=Cursor("", 0)),
        lambda: stranger.confirm_receipt("ledger", OUT, Cursor("", 0)),
        lambda: stranger.cursor_of("ledger", OUT),
        lambda: stranger.end_of(OUT),
        lambda: stranger.cursor_at(OUT, 0),
        lambda: stranger.get_fact("Plant A", "m-1"),
        lambda: stranger.retire_reader("ledger", OUT),
        lambda: stranger.received("b", "k", stored(content)),
    ):
        with pytest.raises(AccessDenied):
            call()
    with pytest.raises(ArtifactUnknown):
        list(stranger.get_object("b", "k"))
    assert stranger.survey() == []
    # Nobody was registered by trying.
    (log,) = plant.survey()
    assert dict(log.readers) == {}


def test_a_peer_reads_the_artifacts_that_facts_for_it_name(zones):
    plant, peer = zones.client(zones.plant_files), zones.client(zones.peer_files)
    content = b"invoice" * 10
    for key in ("named", "unnamed"):
        plant.put_object("b", key, [content])
    reference = {"bucket": "b", "key": "named", "digest": stored(content).digest, "size": len(content)}
    plant.append_fact(fact()[0], Fact.of("order:7", "has_file", reference))
    assert b"".join(peer.get_object("b", "named")) == content
    with pytest.raises(ArtifactUnknown):
        list(peer.get_object("b", "unnamed"))


@pytest.mark.spec("FAC-16")
def test_readers_are_retired_by_operators_and_their_name_is_kept(zones):
    plant, peer = zones.client(zones.plant_files), zones.client(zones.peer_files)
    operator = zones.client(zones.operator_files)
    plant.append_fact(*fact())
    peer.fetch_facts("ledger", OUT, 1)
    with pytest.raises(AccessDenied, match="certificate of an operator"):
        peer.retire_reader("ledger", OUT, by="ops")
    assert operator.retire_reader("ledger", OUT, by="jane")
    assert not operator.retire_reader("ledger", OUT)
    retired = zones.host.ask("value", zones.store, "retired")
    assert retired == [("ledger", OUT, "ops (jane)"), ("ledger", OUT, "ops")]
    assert [log.pair for log in operator.survey()] == [OUT]


def test_without_a_certificate_there_is_no_connection(zones):
    pem = zones.plant_files.read()
    with (
        grpc.secure_channel(zones.where, grpc.ssl_channel_credentials(pem.authorities)) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(SERVICE + "Describe")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(zones.where) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(SERVICE + "Describe")(b"", timeout=10)


def test_a_certificate_of_a_foreign_authority_is_none(zones, tmp_path):
    foreign = Authority(tmp_path, "foreign").issue("plant", zones=["Plant A"])
    # It trusts our authority, so that it is the service that refuses.
    client = zones.client(TlsFiles(foreign.certificate, foreign.key, zones.plant_files.authorities))
    with pytest.raises(ConnectionLost):
        client.append_fact(*fact())
    nothing_in(zones)


def test_a_service_of_a_foreign_authority_is_told_nothing(zones, tmp_path):
    foreign = Authority(tmp_path, "foreign")
    client = zones.client(TlsFiles(zones.plant_files.certificate, zones.plant_files.key, foreign.path))
    with pytest.raises(ConnectionLost):
        client.append_fact(*fact())
    nothing_in(zones)


def test_an_expired_certificate_is_none(zones):
    files = zones.host.authority.issue("old", zones=["Plant A"], lasts=timedelta(seconds=-60))
    with pytest.raises(ConnectionLost):
        zones.client(files).append_fact(*fact())
    nothing_in(zones)


@pytest.fixture
def later(zones):
    yield lambda seconds: zones.host.ask("shift", seconds)
    zones.host.ask("shift", 0.0)


def test_a_certificate_that_expires_while_connected_is_out(zones, later):
    files = zones.host.authority.issue("brief", zones=["Plant A"], lasts=timedelta(minutes=10))
    client = zones.client(files)
    client.append_fact(*fact(1))
    listening = zones.raw(files).unary_stream(SERVICE + "Watch")(b"")
    next(listening)
    later(601)
    with pytest.raises(AccessDenied, match="not valid now") as caught:
        client.append_fact(*fact(2))
    assert caught.value.later
    # Whoever only listens is not forgotten.
    with pytest.raises(grpc.RpcError) as ended:
        for _ in listening:
            pass
    assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert zones.host.call(zones.store, "end_of", OUT).offset == 1


@pytest.mark.parametrize("kind", KINDS)
def test_an_upload_ends_when_its_certificate_does(zones, later, kind):
    files = zones.host.authority.issue("uploader", zones=["Plant A"], lasts=timedelta(minutes=10))

    def blob():
        yield b"x" * 1000
        later(601)
        yield b"y" * 1000

    with pytest.raises(AccessDenied):
        zones.client(files, kind=KINDS[kind]).put_object("b", "k", blob())
    later(0)
    with pytest.raises(ArtifactUnknown):
        list(zones.client(zones.plant_files).get_object("b", "k"))


def test_a_certificate_that_is_revoked_while_connected_is_out(zones, tmp_path):
    path = tmp_path / "revoked"
    path.write_text("", encoding="utf-8")
    zones.serve("with a list", revoked=path)
    client = zones.client(zones.plant_files)
    client.append_fact(*fact(1))
    path.write_text(fingerprint(zones.plant_files) + "\n", encoding="utf-8")
    with pytest.raises(AccessDenied, match="was revoked"):
        client.append_fact(*fact(2))
    assert zones.host.call("with a list", "end_of", OUT).offset == 1
    # The peer is another one.
    assert len(zones.client(zones.peer_files).fetch_facts("ledger", OUT, 10)) == 1


@pytest.mark.spec("SEC-05")
@pytest.mark.parametrize("listed", ["fingerprint", "certificate", "public key", "crl"])
def test_a_revoked_certificate_stays_revoked_with_another_signature(zones, tmp_path, listed):
    path, crl = tmp_path / "revoked", tmp_path / "crl"
    path.write_text("", encoding="utf-8")
    crl.write_bytes(zones.host.authority.crl())
    files = zones.host.authority.issue("stolen", zones=["Plant A"])
    zones.serve(f"listed by {listed}", revoked=path, crl=crl)
    twin = with_other_signature(files)
    assert fingerprint(twin) != fingerprint(files)
    for number, each in enumerate((files, twin), 1):
        assert zones.client(each).append_fact(*fact(number)).offset == number
    if listed == "crl":
        crl.write_bytes(zones.host.authority.crl(files))
    else:
        lines = {
            "fingerprint": fingerprint(files),
            "certificate": files.certificate.read_text(encoding="utf-8"),
            "public key": f"public-key={public_key_digest(files)}",
        }
        path.write_text(lines[listed] + "\n", encoding="utf-8")
    for each in (files, twin):
        with pytest.raises(AccessDenied, match="was revoked"):
            zones.client(each).append_fact(*fact(3))
    # Another certificate of the same zone is another one.
    assert zones.client(zones.plant_files).append_fact(*fact(3)).offset == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_takes_a_new_certificate_without_a_restart(zones, kind):
    files = zones.host.authority.issue("renewed", zones=["Plant A"])
    client = zones.client(files, kind=KINDS[kind])
    client.append_fact(*fact(1))
    zones.host.authority.issue("renewed", zones=["Plant B"], into=files)
    with pytest.raises(AccessDenied, match="zone Plant B"):
        client.append_fact(*fact(2))
    zones.host.authority.issue("renewed", zones=["Plant A"], into=files)
    assert client.append_fact(*fact(2)).offset == 2


@pytest.mark.parametrize("kind", KINDS)
def test_calls_under_way_survive_a_new_certificate(zones, kind):
    files = zones.host.authority.issue("switched", zones=["Plant A"])
    client = zones.client(files, kind=KINDS[kind])

    def blob():
        yield b"first"
        zones.host.authority.issue("switched", zones=["Plant A"], into=files)
        client.append_fact(*fact(1))
        yield b"second"

    async def async_blob():
        yield b"first"
        zones.host.authority.issue("switched", zones=["Plant A"], into=files)
        await client._client.append_fact_async(*fact(1))
        yield b"second"

    assert client.put_object("b", "k", blob() if kind == "threads" else async_blob()).size == 11


def test_a_service_shows_a_new_certificate_without_a_restart(zones):
    host, port = zones.where.split(":")
    client = zones.client(zones.plant_files)
    client.append_fact(*fact(1))

    def shown():
        return ssl.get_server_certificate((host, int(port))).split()

    assert shown() == zones.host.files.certificate.read_text().split()
    zones.host.authority.issue("server", into=zones.host.files)
    assert shown() == zones.host.files.certificate.read_text().split()
    assert client.append_fact(*fact(2)).offset == 2
    assert zones.client(zones.plant_files).append_fact(*fact(3)).offset == 3


def test_half_a_new_certificate_is_not_used(zones):
    host, port = zones.where.split(":")
    key = zones.host.files.key.read_bytes()
    before = ssl.get_server_certificate((host, int(port))).split()
    zones.host.files.key.write_bytes(b"nonsense")
    assert ssl.get_server_certificate((host, int(port))).split() == before
    zones.host.files.key.write_bytes(key)
    assert zones.client(zones.plant_files).append_fact(*fact()).offset == 1


def test_two_zones_in_one_program_share_no_connection(zones):
    zones.client(zones.plant_files).append_fact(*fact())
    assert zones.client(zones.stranger_files).survey() == []


def test_many_at_once_from_both_sides_stay_apart(zones):
    plant, stranger = zones.client(zones.plant_files), zones.client(zones.stranger_files)
    refused = []

    def append(number):
        plant.append_fact(*fact(number))
        try:
            stranger.append_fact(*fact(number + 1000))
        except AccessDenied:
            refused.append(number)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(refused) == 20
    assert zones.host.call(zones.store, "end_of", OUT).offset == 20


def test_names_that_cannot_be_are_told_before_rights_are_looked_at(zones):
    with pytest.raises(InvalidFactError, match="from_zone"):
        zones.client(zones.plant_files).end_of(Pair("", "x"))
