"""Access rights over the network: callers read and write only what their certificate allows, at every call."""

from __future__ import annotations

import ssl
import threading
from datetime import timedelta

import grpc
import pytest

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.errors import AccessDenied, ArtifactUnknown, InvalidFactError
from ergon_framework.facts.model import Cursor, Fact, ZonePair
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.tls import TlsFiles
from tests.integration.facts_zones import CLIENT_TYPES, INBOUND, OUTBOUND, ServiceZones, make_fact, to_stored
from tests.servers.certificates import (
    CertificateAuthority,
    compute_fingerprint,
    compute_public_key_digest,
    with_other_signature,
)

pytestmark = pytest.mark.spec("FAC-18")


@pytest.fixture(scope="module")
def zones(tmp_path_factory):
    zones = ServiceZones(tmp_path_factory.mktemp("zones"))
    yield zones
    zones.close()


@pytest.fixture(autouse=True)
def _serve_store(zones, request):
    zones.store = request.node.name
    zones.serve(zones.store)


def assert_store_is_empty(zones):
    assert zones.host.call(zones.store, "list_logs") == []


def test_a_zone_appends_as_itself_and_its_peer_reads(zones):
    plant, peer = zones.connect(zones.plant_files), zones.connect(zones.peer_files)
    assert plant.append_fact(*make_fact()).offset == 1
    (stored_fact,) = peer.fetch_facts("ledger", OUTBOUND, 10)
    assert stored_fact.envelope.message_id == "m-1"
    peer.confirm_receipt("ledger", OUTBOUND, stored_fact.cursor)
    assert plant.get_cursor("ledger", OUTBOUND) == stored_fact.cursor


@pytest.mark.parametrize("files_name", ["stranger_files", "peer_files", "operator_files"])
def test_a_zone_cannot_append_as_another_zone(zones, files_name):
    client = zones.connect(getattr(zones, files_name))
    with pytest.raises(AccessDenied, match="only 'Plant A' may append"):
        client.append_fact(*make_fact())
    # A valid fact before the forged one does not help, and nothing of the call is stored.
    with pytest.raises(AccessDenied):
        client.append_facts([make_fact(1, pair=INBOUND), make_fact(2)])
    with pytest.raises(AccessDenied):
        client.put_object("b", "k", [b"x"])
    assert_store_is_empty(zones)


def test_a_zone_cannot_read_what_belongs_to_other_zones(zones):
    plant, stranger = zones.connect(zones.plant_files), zones.connect(zones.stranger_files)
    content = b"confidential" * 10
    plant.put_object("b", "k", [content])
    reference = {"bucket": "b", "key": "k", "digest": to_stored(content).digest, "size": len(content)}
    envelope, _ = make_fact()
    plant.append_fact(envelope, Fact.create("order:7", "has_file", reference))
    for call in (
        lambda: stranger.fetch_facts("ledger", OUTBOUND, 10),
        lambda: stranger.fetch_facts("sender:x", OUTBOUND, 10, after=Cursor("", 0)),
        lambda: stranger.confirm_receipt("ledger", OUTBOUND, Cursor("", 0)),
        lambda: stranger.get_cursor("ledger", OUTBOUND),
        lambda: stranger.last_offset(OUTBOUND),
        lambda: stranger.cursor_at_time(OUTBOUND, 0),
        lambda: stranger.get_fact("Plant A", "m-1"),
        lambda: stranger.retire_reader("ledger", OUTBOUND),
        lambda: stranger.uploaded_bytes("b", "k", to_stored(content)),
    ):
        with pytest.raises(AccessDenied):
            call()
    with pytest.raises(ArtifactUnknown):
        list(stranger.get_object("b", "k"))
    assert stranger.list_logs() == []
    # The rejected calls have registered no reader.
    (log,) = plant.list_logs()
    assert dict(log.readers) == {}


def test_a_peer_reads_the_artifacts_that_its_facts_reference(zones):
    plant, peer = zones.connect(zones.plant_files), zones.connect(zones.peer_files)
    content = b"invoice" * 10
    for key in ("named", "unnamed"):
        plant.put_object("b", key, [content])
    reference = {"bucket": "b", "key": "named", "digest": to_stored(content).digest, "size": len(content)}
    plant.append_fact(make_fact()[0], Fact.create("order:7", "has_file", reference))
    assert b"".join(peer.get_object("b", "named")) == content
    with pytest.raises(ArtifactUnknown):
        list(peer.get_object("b", "unnamed"))


@pytest.mark.spec("FAC-16")
def test_operators_retire_readers_and_their_name_is_recorded(zones):
    plant, peer = zones.connect(zones.plant_files), zones.connect(zones.peer_files)
    operator = zones.connect(zones.operator_files)
    plant.append_fact(*make_fact())
    peer.fetch_facts("ledger", OUTBOUND, 1)
    with pytest.raises(AccessDenied, match="an operator certificate"):
        peer.retire_reader("ledger", OUTBOUND, by="ops")
    assert operator.retire_reader("ledger", OUTBOUND, by="jane")
    assert not operator.retire_reader("ledger", OUTBOUND)
    retired = zones.host.ask("value", zones.store, "retired")
    assert retired == [("ledger", OUTBOUND, "ops (jane)"), ("ledger", OUTBOUND, "ops")]
    assert [log.pair for log in operator.list_logs()] == [OUTBOUND]


def test_without_a_certificate_there_is_no_connection(zones):
    pem = zones.plant_files.read()
    with (
        grpc.secure_channel(zones.address, grpc.ssl_channel_credentials(pem.authorities)) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(SERVICE + "Describe")(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with grpc.insecure_channel(zones.address) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(SERVICE + "Describe")(b"", timeout=10)


def test_a_certificate_of_a_foreign_authority_is_rejected(zones, tmp_path):
    foreign = CertificateAuthority(tmp_path, "foreign").issue("plant", zones=["Plant A"])
    # It trusts the service's authority, so that the service is the side that rejects.
    client = zones.connect(TlsFiles(foreign.certificate, foreign.key, zones.plant_files.authorities))
    with pytest.raises(ConnectionLostError):
        client.append_fact(*make_fact())
    assert_store_is_empty(zones)


def test_a_service_of_a_foreign_authority_receives_nothing(zones, tmp_path):
    foreign = CertificateAuthority(tmp_path, "foreign")
    client = zones.connect(TlsFiles(zones.plant_files.certificate, zones.plant_files.key, foreign.path))
    with pytest.raises(ConnectionLostError):
        client.append_fact(*make_fact())
    assert_store_is_empty(zones)


def test_an_expired_certificate_is_rejected(zones):
    files = zones.host.authority.issue("old", zones=["Plant A"], lasts=timedelta(seconds=-60))
    with pytest.raises(ConnectionLostError):
        zones.connect(files).append_fact(*make_fact())
    assert_store_is_empty(zones)


@pytest.fixture
def shift_clock(zones):
    yield lambda seconds: zones.host.ask("shift", seconds)
    zones.host.ask("shift", 0.0)


def test_a_certificate_that_expires_while_connected_is_rejected(zones, shift_clock):
    files = zones.host.authority.issue("brief", zones=["Plant A"], lasts=timedelta(minutes=10))
    client = zones.connect(files)
    client.append_fact(*make_fact(1))
    listening = zones.open_channel(files).unary_stream(SERVICE + "Watch")(b"")
    next(listening)
    shift_clock(601)
    with pytest.raises(AccessDenied, match="not valid now") as caught:
        client.append_fact(*make_fact(2))
    assert caught.value.not_attempted
    # A caller that only listens is not exempt.
    with pytest.raises(grpc.RpcError) as ended:
        for _ in listening:
            pass
    assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert zones.host.call(zones.store, "last_offset", OUTBOUND).offset == 1


@pytest.mark.parametrize("variant", CLIENT_TYPES)
def test_an_upload_ends_when_its_certificate_does(zones, shift_clock, variant):
    files = zones.host.authority.issue("uploader", zones=["Plant A"], lasts=timedelta(minutes=10))

    def blob():
        yield b"x" * 1000
        shift_clock(601)
        yield b"y" * 1000

    with pytest.raises(AccessDenied):
        zones.connect(files, client_type=CLIENT_TYPES[variant]).put_object("b", "k", blob())
    shift_clock(0)
    with pytest.raises(ArtifactUnknown):
        list(zones.connect(zones.plant_files).get_object("b", "k"))


def test_a_certificate_that_is_revoked_while_connected_is_rejected(zones, tmp_path):
    path = tmp_path / "revoked"
    path.write_text("", encoding="utf-8")
    zones.serve("with a list", revoked=path)
    client = zones.connect(zones.plant_files)
    client.append_fact(*make_fact(1))
    path.write_text(compute_fingerprint(zones.plant_files) + "\n", encoding="utf-8")
    with pytest.raises(AccessDenied, match="was revoked"):
        client.append_fact(*make_fact(2))
    assert zones.host.call("with a list", "last_offset", OUTBOUND).offset == 1
    # The peer has another certificate.
    assert len(zones.connect(zones.peer_files).fetch_facts("ledger", OUTBOUND, 10)) == 1


@pytest.mark.spec("SEC-05")
@pytest.mark.parametrize("listed_as", ["fingerprint", "certificate", "public key", "crl"])
def test_a_revoked_certificate_stays_revoked_with_another_signature(zones, tmp_path, listed_as):
    path, crl = tmp_path / "revoked", tmp_path / "crl"
    path.write_text("", encoding="utf-8")
    crl.write_bytes(zones.host.authority.create_crl())
    files = zones.host.authority.issue("stolen", zones=["Plant A"])
    zones.serve(f"listed by {listed_as}", revoked=path, crl=crl)
    resigned_files = with_other_signature(files)
    assert compute_fingerprint(resigned_files) != compute_fingerprint(files)
    for number, each in enumerate((files, resigned_files), 1):
        assert zones.connect(each).append_fact(*make_fact(number)).offset == number
    if listed_as == "crl":
        crl.write_bytes(zones.host.authority.create_crl(files))
    else:
        lines = {
            "fingerprint": compute_fingerprint(files),
            "certificate": files.certificate.read_text(encoding="utf-8"),
            "public key": f"public-key={compute_public_key_digest(files)}",
        }
        path.write_text(lines[listed_as] + "\n", encoding="utf-8")
    for each in (files, resigned_files):
        with pytest.raises(AccessDenied, match="was revoked"):
            zones.connect(each).append_fact(*make_fact(3))
    # Another certificate of the same zone is not revoked.
    assert zones.connect(zones.plant_files).append_fact(*make_fact(3)).offset == 3


@pytest.mark.parametrize("variant", CLIENT_TYPES)
def test_a_client_takes_a_new_certificate_without_a_restart(zones, variant):
    files = zones.host.authority.issue("renewed", zones=["Plant A"])
    client = zones.connect(files, client_type=CLIENT_TYPES[variant])
    client.append_fact(*make_fact(1))
    zones.host.authority.issue("renewed", zones=["Plant B"], into=files)
    with pytest.raises(AccessDenied, match="zone Plant B"):
        client.append_fact(*make_fact(2))
    zones.host.authority.issue("renewed", zones=["Plant A"], into=files)
    assert client.append_fact(*make_fact(2)).offset == 2


@pytest.mark.parametrize("variant", CLIENT_TYPES)
def test_running_calls_continue_with_a_new_certificate(zones, variant):
    files = zones.host.authority.issue("switched", zones=["Plant A"])
    client = zones.connect(files, client_type=CLIENT_TYPES[variant])

    def blob():
        yield b"first"
        zones.host.authority.issue("switched", zones=["Plant A"], into=files)
        client.append_fact(*make_fact(1))
        yield b"second"

    async def async_blob():
        yield b"first"
        zones.host.authority.issue("switched", zones=["Plant A"], into=files)
        await client._client.append_fact_async(*make_fact(1))
        yield b"second"

    assert client.put_object("b", "k", blob() if variant == "threads" else async_blob()).size == 11


def test_a_service_shows_a_new_certificate_without_a_restart(zones):
    host, port = zones.address.split(":")
    client = zones.connect(zones.plant_files)
    client.append_fact(*make_fact(1))

    def read_certificate():
        return ssl.get_server_certificate((host, int(port))).split()

    assert read_certificate() == zones.host.files.certificate.read_text().split()
    zones.host.authority.issue("server", into=zones.host.files)
    assert read_certificate() == zones.host.files.certificate.read_text().split()
    assert client.append_fact(*make_fact(2)).offset == 2
    assert zones.connect(zones.plant_files).append_fact(*make_fact(3)).offset == 3


def test_half_a_new_certificate_is_not_used(zones):
    host, port = zones.address.split(":")
    key = zones.host.files.key.read_bytes()
    before = ssl.get_server_certificate((host, int(port))).split()
    zones.host.files.key.write_bytes(b"nonsense")
    assert ssl.get_server_certificate((host, int(port))).split() == before
    zones.host.files.key.write_bytes(key)
    assert zones.connect(zones.plant_files).append_fact(*make_fact()).offset == 1


def test_two_zones_in_one_program_share_no_connection(zones):
    zones.connect(zones.plant_files).append_fact(*make_fact())
    assert zones.connect(zones.stranger_files).list_logs() == []


def test_concurrent_calls_of_two_zones_stay_separate(zones):
    plant, stranger = zones.connect(zones.plant_files), zones.connect(zones.stranger_files)
    rejected = []

    def append(number):
        plant.append_fact(*make_fact(number))
        try:
            stranger.append_fact(*make_fact(number + 1000))
        except AccessDenied:
            rejected.append(number)

    threads = [threading.Thread(target=append, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(rejected) == 20
    assert zones.host.call(zones.store, "last_offset", OUTBOUND).offset == 20


def test_invalid_zone_names_are_rejected_before_rights_are_checked(zones):
    with pytest.raises(InvalidFactError, match="from_zone"):
        zones.connect(zones.plant_files).last_offset(ZonePair("", "x"))
