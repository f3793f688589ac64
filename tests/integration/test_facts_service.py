"""The service under invalid input, lost connections, stops and kills: typed answers, and nothing partial."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.errors import (
    ArtifactMismatch,
    ArtifactUnknown,
    FactConflict,
    InvalidFactError,
    NotSupportedRemotely,
    ServiceError,
)
from ergon_framework.facts.model import ZonePair
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service import errors
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.server import Limits
from ergon_framework.facts.service.wire import fill_facts
from tests.integration.facts_zones import CLIENT_TYPES, OUTBOUND, ServiceZones, make_fact, to_stored
from tests.servers.postgres import free_port

MEBIBYTE = 1024 * 1024


@pytest.fixture(scope="module")
def zones(tmp_path_factory):
    zones = ServiceZones(tmp_path_factory.mktemp("zones"))
    yield zones
    zones.close()


@pytest.fixture(autouse=True)
def _serve_store(zones, request):
    zones.port = free_port()
    # A test that is rerun needs a new store too: the store of its first run is still served.
    zones.store = f"{request.node.name}-{zones.port}"
    zones.serve(zones.store, listen=f"127.0.0.1:{zones.port}")


@pytest.fixture(params=CLIENT_TYPES)
def client_type(request):
    return CLIENT_TYPES[request.param]


@pytest.fixture
def plant(zones, client_type):
    return zones.connect(zones.plant_files, client_type=client_type)


def restart(zones, meanwhile=lambda: None):
    """Stop the service immediately, whatever it is doing, and restart it at the same address."""
    zones.host.ask("stop", zones.store, 0)
    meanwhile()
    zones.serve(zones.store, listen=f"127.0.0.1:{zones.port}")


# -- input ----------------------------------------------------------------------------------------------


def read_rejection(zones, method, data):
    with pytest.raises(grpc.RpcError) as caught:
        zones.open_channel(zones.plant_files).unary_unary(SERVICE + method)(data, timeout=10)
    fault = dict(caught.value.trailing_metadata()).get(errors.METADATA_KEY)
    return caught.value.code(), None if fault is None else errors.from_wire(wire.Fault.FromString(fault))


def make_append_request(**columns):
    return wire.AppendFactsRequest(facts=wire.Facts(**columns)).SerializeToString()


@pytest.mark.parametrize(
    "method, data, message",
    [
        ("AppendFact", b"\xff\xff\xff", "is not a valid ergon.facts.v1.Appending message"),
        ("AppendFact", b"\x0a\x02\x0a\xff", "is not a valid ergon.facts.v1.Appending message"),
        ("AppendFact", b"", "must have its own envelope"),
        ("AppendFact", wire.Appending(envelope=wire.Envelope(), fact=wire.Fact()).SerializeToString(), "message_id"),
        ("AppendFacts", make_append_request(message_ids=["m"] * 1001), "at most 1,000"),
        ("AppendFacts", make_append_request(message_ids=["m"], subjects=["a", "b"]), "1 from_zones, and not 0"),
        ("FetchFacts", b"", "name of a reader"),
        ("FetchFacts", wire.FetchFactsRequest(reader="r", limit=-1).SerializeToString(), "limit"),
        ("ConfirmReceipt", wire.ConfirmReceiptRequest(reader="r").SerializeToString(), "a receipt must have a cursor"),
        ("GetFact", wire.GetFactRequest(from_zone="Plant A", message_id="a b").SerializeToString(), "message_id"),
        ("CursorAt", wire.CursorAtRequest(unix_ms=-1).SerializeToString(), "unix_ms"),
        ("EndOf", b"", "from_zone"),
        ("Received", wire.ReceivedRequest(bucket="..", key="a").SerializeToString(), "bucket"),
        ("Received", wire.ReceivedRequest(bucket="b", key="../a").SerializeToString(), "lead out"),
        ("Received", wire.ReceivedRequest(bucket="b", key="a").SerializeToString(), "digest"),
    ],
)
def test_malformed_input_is_rejected_with_the_reason(zones, method, data, message):
    code, error = read_rejection(zones, method, data)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert type(error) is InvalidFactError
    assert message in str(error)
    assert "Traceback" not in str(error)


def test_an_oversized_request_is_not_read(zones):
    code, _ = read_rejection(zones, "AppendFact", b"\x00" * (4 * MEBIBYTE + 1))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_malformed_fact_does_not_affect_other_facts(zones):
    request = wire.AppendFactsRequest()
    fill_facts([make_fact(1), make_fact(2), make_fact(3)], request.facts)
    request.facts.message_ids[0] = "a b"
    request.facts.objects_json[2] = "{"
    call = zones.open_channel(zones.plant_files).unary_unary(SERVICE + "AppendFacts")
    answer = wire.AppendFactsAnswer.FromString(call(request.SerializeToString(), timeout=10))
    assert list(answer.offsets) == [0, 1, 0]
    assert {index: other.fault.kind for index, other in answer.others.items()} == dict.fromkeys(
        (0, 2), "InvalidFactError"
    )


def test_an_unknown_call_is_not_offered(zones):
    code, _ = read_rejection(zones, "ForwardFacts", b"")
    assert code is grpc.StatusCode.UNIMPLEMENTED


def test_operations_local_to_the_store_are_not_offered(plant):
    for call in (lambda: plant.forward_facts([]), lambda: plant.prune(1)):
        with pytest.raises(NotSupportedRemotely):
            call()
    assert plant.stat_object("b", "k") is None


@pytest.mark.parametrize(
    "parts, message",
    [
        ([], "broke off"),
        ([wire.PutObjectRequest(piece=b"x")], "must begin with a header"),
        ([wire.PutObjectRequest()], "has none"),
        (["header", wire.PutObjectRequest(piece=b"x")], "broke off"),
        (
            ["header", wire.PutObjectRequest(piece=b"x"), wire.PutObjectRequest(end=wire.PutObjectEnd(size=2))],
            "1 bytes were received",
        ),
        (["header", "header"], "0 bytes were received"),
    ],
)
@pytest.mark.spec("FAC-21")
def test_an_incomplete_upload_leaves_nothing(zones, plant, parts, message):
    header = wire.PutObjectRequest(header=wire.PutObjectHeader(bucket="b", key="k"))
    messages = [(header if part == "header" else part).SerializeToString() for part in parts]
    with pytest.raises(grpc.RpcError) as caught:
        list(zones.open_channel(zones.plant_files).stream_stream(SERVICE + "PutObject")(iter(messages), timeout=10))
    assert message in caught.value.details()
    with pytest.raises(ArtifactUnknown):
        list(plant.get_object("b", "k"))


# -- sizes ----------------------------------------------------------------------------------------------


def test_a_large_call_is_split_into_calls_within_the_limits(plant):
    facts = [make_fact(number) for number in range(1, 1501)]
    assert [each.offset for each in plant.append_facts(facts)] == list(range(1, 1501))
    large = [make_fact(number, value="x" * 900_000) for number in range(2001, 2011)]
    assert [each.offset for each in plant.append_facts(large)] == list(range(1501, 1511))


def test_an_answer_is_cut_at_the_size_limit_and_the_next_call_continues(zones, plant):
    plant.append_facts([make_fact(number, value="x" * 900_000) for number in range(1, 11)])
    peer, seen = zones.connect(zones.peer_files), []
    while facts := peer.fetch_facts("ledger", OUTBOUND, 10):
        assert len(facts) <= 4
        seen += [each.offset for each in facts]
        peer.confirm_receipt("ledger", OUTBOUND, facts[-1].cursor)
    assert seen == list(range(1, 11))


def test_the_largest_valid_fact_is_accepted(zones, plant):
    envelope, _ = make_fact()
    labels = {f"{number:0128}": "ü" * 16_384 for number in range(32)}
    large = type(envelope)(
        message_id="m", from_zone=OUTBOUND.from_zone, to_zone=OUTBOUND.to_zone, produced_at_unix_ms=1, labels=labels
    )
    assert plant.append_fact(large, make_fact(value="x" * (MEBIBYTE - 2))[1]).offset == 1
    (stored_fact,) = zones.connect(zones.peer_files).fetch_facts("ledger", OUTBOUND, 10)
    assert stored_fact.envelope == large


# -- failures -------------------------------------------------------------------------------------------


def test_a_conflict_names_its_zone_and_message_id(plant):
    plant.append_fact(*make_fact(1))
    with pytest.raises(FactConflict) as caught:
        plant.append_fact(make_fact(1)[0], make_fact(2)[1])
    assert (caught.value.from_zone, caught.value.message_id) == ("Plant A", "m-1")


def test_a_store_defect_is_reported_without_its_message(zones, plant):
    zones.host.ask("mood", zones.store, "secret payload")
    with pytest.raises(ServiceError, match="its log says more under") as caught:
        plant.last_offset(OUTBOUND)
    assert "secret" not in str(caught.value)
    assert "secret" not in str(caught.value.__cause__)


def test_an_unavailable_store_is_a_lost_connection(zones, plant):
    zones.host.ask("mood", zones.store, "lost")
    with pytest.raises(ConnectionLostError, match="the database is away"):
        plant.last_offset(OUTBOUND)


def test_a_call_has_a_deadline(zones, client_type):
    zones.host.ask("mood", zones.store, "hang")
    with pytest.raises(ConnectionLostError, match="DEADLINE_EXCEEDED"):
        zones.connect(zones.plant_files, client_type=client_type, deadline=0.3).last_offset(OUTBOUND)


def test_a_call_without_a_deadline_gets_one(zones):
    zones.serve("patient", limits=Limits(call_timeout=0.3))
    zones.host.ask("mood", "patient", "hang")
    code, _ = read_rejection(
        zones, "EndOf", wire.EndOfRequest(pair=wire.Pair(from_zone="Plant A", to_zone="x")).SerializeToString()
    )
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_stalled_upload_times_out(zones):
    zones.serve("impatient", limits=Limits(call_timeout=0.3))
    finished = threading.Event()

    def blob():
        yield wire.PutObjectRequest(header=wire.PutObjectHeader(bucket="b", key="k")).SerializeToString()
        finished.wait(30)

    with pytest.raises(grpc.RpcError) as caught:
        list(zones.open_channel(zones.plant_files).stream_stream(SERVICE + "PutObject")(blob()))
    finished.set()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_killed_service_is_a_lost_connection(tmp_path):
    alone = ServiceZones(tmp_path)
    alone.serve("killed")
    client = alone.connect(alone.plant_files)
    client.append_fact(*make_fact(1))
    alone.host.kill()
    for _ in range(2):
        with pytest.raises(ConnectionLostError):
            client.append_fact(*make_fact(2))
    alone.close()


def test_a_client_reconnects_to_a_restarted_service(zones, plant):
    plant.append_fact(*make_fact(1))
    restart(zones)
    # The first call may use the lost connection; its outcome is unknown, so it is repeated.
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(ConnectionLostError):
            assert plant.append_fact(*make_fact(2)).offset == 2
            return
    pytest.fail("the service was not found again")


# -- transfers ------------------------------------------------------------------------------------------


class InterruptedBlob:
    """A blob that can be read again, and whose first read is interrupted after *after* chunks."""

    def __init__(self, content, after, interrupt):
        self._content, self._after, self._interrupt = content, after, interrupt
        self.read_count = 0

    def __iter__(self):
        self.read_count += 1
        reading = self.read_count
        for number, start in enumerate(range(0, len(self._content), CHUNK_BYTES)):
            if reading == 1 and number == self._after:
                self._interrupt()
            yield self._content[start : start + CHUNK_BYTES]


def make_content(size):
    return b"".join(number.to_bytes(8, "big") for number in range(size // 8))


@pytest.mark.spec("FAC-21")
def test_an_upload_resumes_after_a_restart(zones, plant):
    sent = make_content(8 * MEBIBYTE)
    received_bytes = []

    def count_received():
        return zones.host.call(zones.store, "uploaded_bytes", "b", "k", to_stored(sent))

    def interrupt():
        deadline = time.monotonic() + 20
        while not zones.host.ask("value", zones.store, "came") and time.monotonic() < deadline:
            time.sleep(0.01)  # what was sent may not have arrived yet
        # Checked while no client can continue: a second attempt may end before the first one's thread has returned.
        restart(zones, lambda: received_bytes.append(count_received()))

    blob = InterruptedBlob(sent, 24, interrupt)
    assert plant.put_object("b", "k", blob, expected=to_stored(sent)) == to_stored(sent)
    assert blob.read_count == 2
    assert 0 < received_bytes[0] < len(sent)
    assert b"".join(plant.get_object("b", "k")) == sent


def test_an_upload_that_cannot_resume_raises_an_error(zones, plant):
    sent = make_content(8 * MEBIBYTE)
    restarted = threading.Event()
    blob = InterruptedBlob(sent, 24, lambda: (restart(zones), restarted.set()))
    with pytest.raises(ConnectionLostError):
        plant.put_object("b", "k", iter(blob), expected=to_stored(sent))
    assert restarted.wait(20)
    with pytest.raises(ArtifactUnknown):
        list(zones.connect(zones.plant_files).get_object("b", "k"))


def test_a_mismatch_is_reported_while_the_client_still_sends(plant):
    sent = make_content(4 * MEBIBYTE)
    with pytest.raises(ArtifactMismatch):
        plant.put_object("b", "k", [sent], expected=to_stored(b"other"))
    with pytest.raises(InvalidFactError, match="resumes at byte 5"):
        plant.put_object("b", "k", [sent] * 8, expected=to_stored(sent), begin=5)


def test_a_download_resumes_after_a_restart(zones, plant):
    sent = make_content(16 * MEBIBYTE)
    plant.put_object("b", "k", [sent])
    stream = plant.get_object("b", "k")
    chunks = [next(stream)]
    restart(zones)
    chunks += stream
    assert b"".join(chunks) == sent


def test_a_download_can_start_at_an_offset(plant):
    sent = make_content(3 * MEBIBYTE)
    plant.put_object("b", "k", [sent])
    assert b"".join(plant.get_object("b", "k", begin=MEBIBYTE + 3)) == sent[MEBIBYTE + 3 :]
    assert list(plant.get_object("b", "k", begin=len(sent))) == []


# -- the end --------------------------------------------------------------------------------------------


def test_a_stop_finishes_running_calls_and_rejects_new_ones(zones, plant):
    other, stopping = zones.connect(zones.plant_files), []

    def wait_until_rejected():
        for _ in range(1000):
            try:
                other.last_offset(OUTBOUND)
            except ConnectionLostError:
                return
        pytest.fail("a service that is being stopped takes new calls")

    def blob():
        yield b"first"
        stopping.append(threading.Thread(target=zones.host.ask, args=("stop", zones.store, 20.0)))
        stopping[0].start()
        wait_until_rejected()
        yield b"second"

    assert plant.put_object("b", "k", blob()).size == 11
    stopping[0].join(20)
    assert not stopping[0].is_alive()


def test_a_listener_does_not_delay_a_stop(zones):
    listening = zones.open_channel(zones.plant_files).unary_stream(SERVICE + "Watch")(b"")
    next(listening)
    zones.host.ask("stop", zones.store, 20.0)
    with pytest.raises(grpc.RpcError) as caught:
        next(listening)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_new_facts_notify_listeners(zones, plant, client_type):
    peer, notified = zones.connect(zones.peer_files, client_type=client_type), threading.Event()
    unlisten = peer.listen(notified.set)
    assert notified.wait(20)  # connected
    notified.clear()
    plant.append_fact(*make_fact())
    assert notified.wait(20)
    notified.clear()
    restart(zones)
    assert notified.wait(20)  # reconnected: facts may have arrived meanwhile
    unlisten()


def test_health_reports_whether_the_store_responds(zones):
    zones.serve("watched", limits=Limits(check_interval=0.05))
    statuses = health_pb2.HealthCheckResponse
    stub = health_pb2_grpc.HealthStub(zones.open_channel(zones.plant_files))
    for name in ("", "ergon.facts.v1.Boundary"):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status == statuses.SERVING
    updates = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=30)
    assert next(updates).status == statuses.SERVING
    zones.host.ask("mood", "watched", "lost")
    assert next(updates).status == statuses.NOT_SERVING
    zones.host.ask("mood", "watched", None)
    assert next(updates).status == statuses.SERVING


def test_two_services_do_not_share_a_port(zones):
    with pytest.raises(ConfigurationError, match="check that the port is free"):
        zones.serve("second", listen=f"127.0.0.1:{zones.port}")


def test_a_closed_client_raises_an_error(zones, client_type):
    client = zones.connect(zones.plant_files, client_type=client_type)
    client.close()
    with pytest.raises(ConnectionLostError, match="closed"):
        client.last_offset(ZonePair("Plant A", "x"))
