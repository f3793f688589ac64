"""The service under bad input, broken lines, stops and kills: typed answers, and nothing half."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.facts.boundary import CHUNK
from ergon_framework.facts.errors import (
    ArtifactMismatch,
    ArtifactUnknown,
    FactConflict,
    InvalidFactError,
    NotOffered,
    ServiceFailed,
)
from ergon_framework.facts.model import Pair
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service import faults
from ergon_framework.facts.service.batches import write_facts
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.server import Limits
from tests.integration.facts_zones import KINDS, OUT, Zones, fact, stored
from tests.servers.postgres import free_port

MEBIBYTE = 1024 * 1024


@pytest.fixture(scope="module")
def zones(tmp_path_factory):
    made = Zones(tmp_path_factory.mktemp("zones"))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _served(zones, request):
    zones.port = free_port()
    # One of its own also for a test that is asked again: what was served before is served still.
    zones.store = f"{request.node.name}-{zones.port}"
    zones.serve(zones.store, listen=f"127.0.0.1:{zones.port}")


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture
def plant(zones, kind):
    return zones.client(zones.plant_files, kind=kind)


def restart(zones, meanwhile=lambda: None):
    """Stop the service at once, whatever it is doing, and start it again where it was."""
    zones.host.ask("stop", zones.store, 0)
    meanwhile()
    zones.serve(zones.store, listen=f"127.0.0.1:{zones.port}")


# -- input ----------------------------------------------------------------------------------------------


def refusal(zones, method, data):
    with pytest.raises(grpc.RpcError) as caught:
        zones.raw(zones.plant_files).unary_unary(SERVICE + method)(data, timeout=10)
    fault = dict(caught.value.trailing_metadata()).get(faults.KEY)
    return caught.value.code(), None if fault is None else faults.read(wire.Fault.FromString(fault))


def many(**columns):
    return wire.AppendFactsRequest(facts=wire.Facts(**columns)).SerializeToString()


@pytest.mark.parametrize(
    "method, data, words",
    [
        ("AppendFact", b"\xff\xff\xff", "is no Appending"),
        ("AppendFact", b"\x0a\x02\x0a\xff", "is no Appending"),
        ("AppendFact", b"", "has an envelope"),
        ("AppendFact", wire.Appending(envelope=wire.Envelope(), fact=wire.Fact()).SerializeToString(), "message_id"),
        ("AppendFacts", many(message_ids=["m"] * 1001), "at most 1,000"),
        ("AppendFacts", many(message_ids=["m"], subjects=["a", "b"]), "1 from_zones, and not 0"),
        ("FetchFacts", b"", "name of a reader"),
        ("FetchFacts", wire.FetchFactsRequest(reader="r", limit=-1).SerializeToString(), "limit"),
        ("ConfirmReceipt", wire.ConfirmReceiptRequest(reader="r").SerializeToString(), "a receipt has a cursor"),
        ("GetFact", wire.GetFactRequest(from_zone="Plant A", message_id="a b").SerializeToString(), "message_id"),
        ("CursorAt", wire.CursorAtRequest(unix_ms=-1).SerializeToString(), "unix_ms"),
        ("EndOf", b"", "from_zone"),
        ("Received", wire.ReceivedRequest(bucket="..", key="a").SerializeToString(), "bucket"),
        ("Received", wire.ReceivedRequest(bucket="b", key="../a").SerializeToString(), "lead out"),
        ("Received", wire.ReceivedRequest(bucket="b", key="a").SerializeToString(), "digest"),
    ],
)
def test_malformed_input_is_told_what_is_wrong_with_it(zones, method, data, words):
    code, error = refusal(zones, method, data)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert type(error) is InvalidFactError
    assert words in str(error)
    assert "Traceback" not in str(error)


def test_what_is_too_large_is_not_even_read(zones):
    code, _ = refusal(zones, "AppendFact", b"\x00" * (4 * MEBIBYTE + 1))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_one_that_is_malformed_spoils_no_other(zones):
    request = wire.AppendFactsRequest()
    write_facts([fact(1), fact(2), fact(3)], request.facts)
    request.facts.message_ids[0] = "a b"
    request.facts.objects_json[2] = "{"
    call = zones.raw(zones.plant_files).unary_unary(SERVICE + "AppendFacts")
    answer = wire.AppendFactsAnswer.FromString(call(request.SerializeToString(), timeout=10))
    assert list(answer.offsets) == [0, 1, 0]
    assert {place: other.fault.kind for place, other in answer.others.items()} == dict.fromkeys(
        (0, 2), "InvalidFactError"
    )


def test_an_unknown_call_is_not_offered(zones):
    code, _ = refusal(zones, "ForwardFacts", b"")
    assert code is grpc.StatusCode.UNIMPLEMENTED


def test_what_is_done_where_the_store_is_is_not_offered(plant):
    for call in (lambda: plant.forward_facts([]), lambda: plant.prune(1)):
        with pytest.raises(NotOffered):
            call()
    assert plant.known_object("b", "k") is None


@pytest.mark.parametrize(
    "parts, words",
    [
        ([], "broke off"),
        ([wire.PutObjectRequest(piece=b"x")], "begins with a header"),
        ([wire.PutObjectRequest()], "has none"),
        (["header", wire.PutObjectRequest(piece=b"x")], "broke off"),
        (["header", wire.PutObjectRequest(piece=b"x"), wire.PutObjectRequest(end=wire.PutObjectEnd(size=2))], "are 1"),
        (["header", "header"], "are 0"),
    ],
)
@pytest.mark.spec("FAC-21")
def test_an_upload_that_is_not_whole_leaves_nothing(zones, plant, parts, words):
    header = wire.PutObjectRequest(header=wire.PutObjectHeader(bucket="b", key="k"))
    messages = [(header if part == "header" else part).SerializeToString() for part in parts]
    with pytest.raises(grpc.RpcError) as caught:
        list(zones.raw(zones.plant_files).stream_stream(SERVICE + "PutObject")(iter(messages), timeout=10))
    assert words in caught.value.details()
    with pytest.raises(ArtifactUnknown):
        list(plant.get_object("b", "k"))


# -- sizes ----------------------------------------------------------------------------------------------


def test_a_call_of_many_is_cut_into_calls_that_fit(plant):
    facts = [fact(number) for number in range(1, 1501)]
    assert [each.offset for each in plant.append_facts(facts)] == list(range(1, 1501))
    large = [fact(number, value="x" * 900_000) for number in range(2001, 2011)]
    assert [each.offset for each in plant.append_facts(large)] == list(range(1501, 1511))


def test_an_answer_holds_what_fits_and_the_next_call_goes_on(zones, plant):
    plant.append_facts([fact(number, value="x" * 900_000) for number in range(1, 11)])
    peer, seen = zones.client(zones.peer_files), []
    while found := peer.fetch_facts("ledger", OUT, 10):
        assert len(found) <= 4
        seen += [each.offset for each in found]
        peer.confirm_receipt("ledger", OUT, found[-1].cursor)
    assert seen == list(range(1, 11))


def test_the_largest_fact_that_can_be_passes(zones, plant):
    envelope, _ = fact()
    labels = {f"{number:0128}": "ü" * 16_384 for number in range(32)}
    large = type(envelope)(
        message_id="m", from_zone=OUT.from_zone, to_zone=OUT.to_zone, produced_at_unix_ms=1, labels=labels
    )
    assert plant.append_fact(large, fact(value="x" * (MEBIBYTE - 2))[1]).offset == 1
    (found,) = zones.client(zones.peer_files).fetch_facts("ledger", OUT, 10)
    assert found.envelope == large


# -- failures -------------------------------------------------------------------------------------------


def test_a_conflict_arrives_with_what_it_is_about(plant):
    plant.append_fact(*fact(1))
    with pytest.raises(FactConflict) as caught:
        plant.append_fact(fact(1)[0], fact(2)[1])
    assert (caught.value.from_zone, caught.value.message_id) == ("Plant A", "m-1")


def test_a_defect_of_the_store_is_told_without_its_words(zones, plant):
    zones.host.ask("mood", zones.store, "secret payload")
    with pytest.raises(ServiceFailed, match="its log says more under") as caught:
        plant.end_of(OUT)
    assert "secret" not in str(caught.value)
    assert "secret" not in str(caught.value.__cause__)


def test_a_store_that_is_away_is_a_lost_connection(zones, plant):
    zones.host.ask("mood", zones.store, "lost")
    with pytest.raises(ConnectionLost, match="the database is away"):
        plant.end_of(OUT)


def test_a_call_has_a_deadline(zones, kind):
    zones.host.ask("mood", zones.store, "hang")
    with pytest.raises(ConnectionLost, match="DEADLINE_EXCEEDED"):
        zones.client(zones.plant_files, kind=kind, deadline=0.3).end_of(OUT)


def test_whoever_sets_no_deadline_is_given_one(zones):
    zones.serve("patient", limits=Limits(patience=0.3))
    zones.host.ask("mood", "patient", "hang")
    code, _ = refusal(
        zones, "EndOf", wire.EndOfRequest(pair=wire.Pair(from_zone="Plant A", to_zone="x")).SerializeToString()
    )
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_an_upload_that_stands_still_is_ended(zones):
    zones.serve("impatient", limits=Limits(patience=0.3))
    over = threading.Event()

    def blob():
        yield wire.PutObjectRequest(header=wire.PutObjectHeader(bucket="b", key="k")).SerializeToString()
        over.wait(30)

    with pytest.raises(grpc.RpcError) as caught:
        list(zones.raw(zones.plant_files).stream_stream(SERVICE + "PutObject")(blob()))
    over.set()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_killed_service_is_a_lost_connection(tmp_path):
    alone = Zones(tmp_path)
    alone.serve("killed")
    client = alone.client(alone.plant_files)
    client.append_fact(*fact(1))
    alone.host.kill()
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            client.append_fact(*fact(2))
    alone.close()


def test_a_service_that_comes_back_is_found_again(zones, plant):
    plant.append_fact(*fact(1))
    restart(zones)
    # The first call may meet the connection that is gone; nobody knows whether it was done, so it is made again.
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with suppress(ConnectionLost):
            assert plant.append_fact(*fact(2)).offset == 2
            return
    pytest.fail("the service was not found again")


# -- transfers ------------------------------------------------------------------------------------------


class Interrupted:
    """A blob that can be read again, and whose first reading is interrupted after *after* pieces."""

    def __init__(self, content, after, interrupt):
        self._content, self._after, self._interrupt = content, after, interrupt
        self.readings = 0

    def __iter__(self):
        self.readings += 1
        reading = self.readings
        for number, start in enumerate(range(0, len(self._content), CHUNK)):
            if reading == 1 and number == self._after:
                self._interrupt()
            yield self._content[start : start + CHUNK]


def content(size):
    return b"".join(number.to_bytes(8, "big") for number in range(size // 8))


@pytest.mark.spec("FAC-21")
def test_an_upload_goes_on_after_a_break(zones, plant):
    sent = content(8 * MEBIBYTE)
    here = []

    def received():
        return zones.host.call(zones.store, "received", "b", "k", stored(sent))

    def interrupt():
        patience = time.monotonic() + 20
        while not zones.host.ask("value", zones.store, "came") and time.monotonic() < patience:
            time.sleep(0.01)  # what was sent may not have come yet
        # Asked while nobody can go on: a second attempt may be over before the first one's thread has come back.
        restart(zones, lambda: here.append(received()))

    blob = Interrupted(sent, 24, interrupt)
    assert plant.put_object("b", "k", blob, expected=stored(sent)) == stored(sent)
    assert blob.readings == 2
    assert 0 < here[0] < len(sent)
    assert b"".join(plant.get_object("b", "k")) == sent


def test_an_upload_that_cannot_go_on_says_so(zones, plant):
    sent = content(8 * MEBIBYTE)
    back = threading.Event()
    blob = Interrupted(sent, 24, lambda: (restart(zones), back.set()))
    with pytest.raises(ConnectionLost):
        plant.put_object("b", "k", iter(blob), expected=stored(sent))
    assert back.wait(20)
    with pytest.raises(ArtifactUnknown):
        list(zones.client(zones.plant_files).get_object("b", "k"))


def test_what_is_not_expected_is_told_to_whoever_is_still_sending(plant):
    sent = content(4 * MEBIBYTE)
    with pytest.raises(ArtifactMismatch):
        plant.put_object("b", "k", [sent], expected=stored(b"other"))
    with pytest.raises(InvalidFactError, match="goes on at byte 5"):
        plant.put_object("b", "k", [sent] * 8, expected=stored(sent), begin=5)


def test_a_download_goes_on_after_a_break(zones, plant):
    sent = content(16 * MEBIBYTE)
    plant.put_object("b", "k", [sent])
    stream = plant.get_object("b", "k")
    got = [next(stream)]
    restart(zones)
    got += stream
    assert b"".join(got) == sent


def test_a_download_can_begin_later(plant):
    sent = content(3 * MEBIBYTE)
    plant.put_object("b", "k", [sent])
    assert b"".join(plant.get_object("b", "k", begin=MEBIBYTE + 3)) == sent[MEBIBYTE + 3 :]
    assert list(plant.get_object("b", "k", begin=len(sent))) == []


# -- the end --------------------------------------------------------------------------------------------


def test_a_stop_lets_what_runs_finish_and_takes_nothing_new(zones, plant):
    other, stopping = zones.client(zones.plant_files), []

    def refused():
        for _ in range(1000):
            try:
                other.end_of(OUT)
            except ConnectionLost:
                return
        pytest.fail("a service that is being stopped takes new calls")

    def blob():
        yield b"first"
        stopping.append(threading.Thread(target=zones.host.ask, args=("stop", zones.store, 20.0)))
        stopping[0].start()
        refused()
        yield b"second"

    assert plant.put_object("b", "k", blob()).size == 11
    stopping[0].join(20)
    assert not stopping[0].is_alive()


def test_whoever_listens_does_not_hold_up_a_stop(zones):
    listening = zones.raw(zones.plant_files).unary_stream(SERVICE + "Watch")(b"")
    next(listening)
    zones.host.ask("stop", zones.store, 20.0)
    with pytest.raises(grpc.RpcError) as caught:
        next(listening)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_facts_ring_a_bell(zones, plant, kind):
    peer, rung = zones.client(zones.peer_files, kind=kind), threading.Event()
    unlisten = peer.listen(rung.set)
    assert rung.wait(20)  # the line is there
    rung.clear()
    plant.append_fact(*fact())
    assert rung.wait(20)
    rung.clear()
    restart(zones)
    assert rung.wait(20)  # there again: something may have come meanwhile
    unlisten()


def test_health_says_whether_the_store_answers(zones):
    zones.serve("watched", limits=Limits(look=0.05))
    kinds = health_pb2.HealthCheckResponse
    stub = health_pb2_grpc.HealthStub(zones.raw(zones.plant_files))
    for name in ("", "ergon.facts.v1.Boundary"):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status == kinds.SERVING
    seen = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=30)
    assert next(seen).status == kinds.SERVING
    zones.host.ask("mood", "watched", "lost")
    assert next(seen).status == kinds.NOT_SERVING
    zones.host.ask("mood", "watched", None)
    assert next(seen).status == kinds.SERVING


def test_two_services_do_not_share_a_port(zones):
    with pytest.raises(ConfigurationError, match="is the port taken"):
        zones.serve("second", listen=f"127.0.0.1:{zones.port}")


def test_a_closed_client_says_so(zones, kind):
    client = zones.client(zones.plant_files, kind=kind)
    client.close()
    with pytest.raises(ConnectionLost, match="closed"):
        client.end_of(Pair("Plant A", "x"))
