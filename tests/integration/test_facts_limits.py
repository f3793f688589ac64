"""What one caller can take from a facts service: not the places, the time or the memory of the others."""

from __future__ import annotations

import json
import resource
import socket
import ssl
import threading
import time
from contextlib import ExitStack, closing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ergon_framework.facts.errors import LimitExceeded
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service import faults
from ergon_framework.facts.service.batches import write_facts
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.limits import OWN_FILES
from ergon_framework.facts.service.server import Limits
from tests.integration.facts_zones import OUT, Zones, fact
from tests.servers.certificates import fingerprint

MEBIBYTE = 1024 * 1024
HEALTH = "/grpc.health.v1.Health/"
END_OF = wire.EndOfRequest(pair=wire.Pair(from_zone=OUT.from_zone, to_zone=OUT.to_zone)).SerializeToString()


@pytest.fixture(scope="module")
def zones(tmp_path_factory):
    made = Zones(tmp_path_factory.mktemp("zones"))
    made.unnamed_files = made.host.authority.issue("unnamed")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _served(zones, request):
    zones.store = request.node.name


@pytest.fixture
def never():
    """Requests of a caller that sends none, until the test is over."""
    over = threading.Event()

    def requests():
        over.wait(60)
        yield from ()

    yield requests
    over.set()


def refusal(call):
    """The status of a call that is refused, and the error that came with it."""
    with pytest.raises(grpc.RpcError) as caught:
        call.result(20)
    fault = dict(caught.value.trailing_metadata()).get(faults.KEY)
    return caught.value.code(), None if fault is None else faults.read(wire.Fault.FromString(fault))


def describe(zones, files):
    """Whether the service answers the holder of *files*."""
    return bool(zones.raw(files).unary_unary(SERVICE + "Describe")(b"", timeout=10))


def large(number, *, from_zone="Plant A"):
    """An AppendFacts of about 3 MB that takes about a second to bring into canonical form."""
    keys = json.dumps({f"{(place * 7919) % 100_003:x}": 0 for place in range(75_000)}, separators=(",", ":"))
    request = wire.AppendFactsRequest()
    write_facts([fact(f"{number}-{place}") for place in range(4)], request.facts)
    request.facts.from_zones[:] = [from_zone]
    request.facts.objects_json[:] = [keys] * 4
    return request.SerializeToString()


# -- before a request is read ---------------------------------------------------------------------------


@pytest.mark.spec("SEC-06")
@pytest.mark.parametrize(
    "method, who",
    [
        ("AppendFact", "peer_files"),
        ("AppendFacts", "peer_files"),
        ("AppendFacts", "unnamed_files"),
        ("FetchFacts", "unnamed_files"),
        ("Received", "peer_files"),
        ("RetireReader", "plant_files"),
    ],
)
def test_a_caller_without_rights_is_refused_before_its_request_is_received(zones, never, method, who):
    zones.serve(zones.store)
    call = zones.raw(getattr(zones, who)).stream_unary(SERVICE + method).future(never(), timeout=20)
    assert refusal(call)[0] is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.spec("SEC-06")
def test_a_large_request_without_rights_is_told_why(zones):
    zones.serve(zones.store)
    call = zones.raw(zones.peer_files).unary_unary(SERVICE + "AppendFacts")
    # No message of the protocol: it would be refused for that if it were parsed first.
    data = b"\xff" * 3 * MEBIBYTE
    for _ in range(20):
        assert refusal(call.future(data, timeout=20))[0] is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.spec("SEC-06")
def test_the_zones_of_a_request_are_compared_before_its_facts_are_read(zones):
    zones.serve(zones.store)
    request = wire.AppendFactsRequest()
    write_facts([fact(1)], request.facts)
    request.facts.from_zones[:] = ["Plant B"]
    # Columns that do not fit are refused when the facts are read.
    request.facts.objects_json[:] = []
    call = zones.raw(zones.plant_files).unary_unary(SERVICE + "AppendFacts")
    code, error = refusal(call.future(request.SerializeToString(), timeout=20))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "'Plant B'" in str(error)


@pytest.mark.spec("SEC-06")
def test_a_request_that_takes_long_does_not_hold_up_other_callers(zones):
    zones.serve(zones.store)
    other = zones.raw(zones.peer_files).unary_unary(SERVICE + "Describe")
    other(b"", timeout=20)
    began = time.monotonic()
    appending = zones.raw(zones.plant_files).unary_unary(SERVICE + "AppendFacts").future(large(1), timeout=60)
    slowest = 0.0
    while not appending.done():
        asked = time.monotonic()
        other(b"", timeout=60)
        slowest = max(slowest, time.monotonic() - asked)
    appending.result()
    assert slowest < (time.monotonic() - began) / 2


@pytest.mark.spec("SEC-06")
def test_an_identity_has_so_many_bytes_in_flight(zones):
    zones.serve(zones.store, limits=Limits(bytes_per_identity=4 * MEBIBYTE))
    call = zones.raw(zones.plant_files).unary_unary(SERVICE + "AppendFacts")
    calls = [call.future(large(number), timeout=60) for number in range(3)]
    codes = [each.code() for each in calls]
    assert grpc.StatusCode.OK in codes
    refused = next(each for each in calls if each.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
    _, error = refusal(refused)
    assert isinstance(error, LimitExceeded)
    assert "bytes_per_identity" in str(error)
    assert error.later
    # Nothing is held any more.
    assert zones.client(zones.plant_files).append_fact(*fact("small"))


# -- places ---------------------------------------------------------------------------------------------


@pytest.mark.spec("SEC-07")
def test_one_identity_cannot_take_the_streams_of_others(zones):
    zones.serve(zones.store, limits=Limits(streams_per_identity=4))
    opened = [zones.raw(zones.peer_files).unary_stream(SERVICE + "Watch")(b"") for _ in range(6)]
    for each in opened[:4]:
        next(each)
    for each in opened[4:]:
        with pytest.raises(grpc.RpcError) as caught:
            next(each)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "streams_per_identity" in caught.value.details()
    # A second certificate of the same zone is the same identity.
    renewed = zones.host.authority.issue("renewed peer", zones=["Enterprise"])
    with pytest.raises(grpc.RpcError, match="streams_per_identity"):
        next(zones.raw(renewed).unary_stream(SERVICE + "Watch")(b""))
    next(zones.raw(zones.plant_files).unary_stream(SERVICE + "Watch")(b""))
    assert describe(zones, zones.peer_files)
    for each in opened:
        each.cancel()


@pytest.mark.spec("SEC-07")
def test_one_identity_cannot_take_the_calls_of_others(zones):
    zones.serve(zones.store, limits=Limits(calls_per_identity=3))
    zones.host.ask("mood", zones.store, "hang")
    peer = zones.raw(zones.peer_files)
    hanging = [peer.unary_unary(SERVICE + "EndOf").future(END_OF, timeout=60) for _ in range(5)]
    refused = [each for each in hanging if _is_refused(each, hanging, 2)]
    for each in refused:
        code, error = refusal(each)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "calls_per_identity" in str(error)
    assert describe(zones, zones.plant_files)
    for each in hanging:
        each.cancel()


def _is_refused(call, calls, count):
    """Whether *call* is one of the *count* of *calls* that are over; waits until so many are."""
    until = time.monotonic() + 20
    while sum(each.done() for each in calls) < count and time.monotonic() < until:
        time.sleep(0.01)
    return call.done()


@pytest.mark.spec("SEC-07")
def test_health_is_answered_while_all_calls_are_taken(zones):
    zones.serve(zones.store, limits=Limits(calls=3, look=600))
    opened = [zones.raw(zones.peer_files).unary_stream(SERVICE + "Watch")(b"") for _ in range(3)]
    for each in opened:
        next(each)
    code, error = refusal(zones.raw(zones.plant_files).unary_unary(SERVICE + "Describe").future(b"", timeout=20))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "(calls)" in str(error)
    for files in (zones.plant_files, zones.unnamed_files):
        answer = health_pb2_grpc.HealthStub(zones.raw(files)).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for each in opened:
        each.cancel()


@pytest.mark.spec("SEC-07")
def test_the_health_is_watched_by_identities_only(zones, tmp_path):
    path = tmp_path / "revoked"
    path.write_text(fingerprint(zones.stranger_files), encoding="utf-8")
    zones.serve(zones.store, revoked=path, limits=Limits(streams_per_identity=2))
    for files in (zones.unnamed_files, zones.stranger_files):
        with pytest.raises(grpc.RpcError) as caught:
            next(zones.raw(files).unary_stream(HEALTH + "Watch")(b"", timeout=20))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    watching = [zones.raw(zones.peer_files).unary_stream(HEALTH + "Watch")(b"", timeout=20) for _ in range(2)]
    for each in watching:
        next(each)
    with pytest.raises(grpc.RpcError, match="streams_per_identity"):
        next(zones.raw(zones.peer_files).unary_stream(HEALTH + "Watch")(b"", timeout=20))
    # It ends with the certificate.
    path.write_text(fingerprint(zones.peer_files), encoding="utf-8")
    with pytest.raises(grpc.RpcError) as ended:
        next(watching[0])
    assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.spec("SEC-07")
def test_checks_that_send_no_request_are_limited_and_end(zones, never):
    zones.serve(zones.store)
    check = zones.raw(zones.unnamed_files).stream_unary(HEALTH + "Check")
    waiting = [check.future(never()) for _ in range(9)]
    codes = [each.code() for each in waiting]
    assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 1
    assert codes.count(grpc.StatusCode.DEADLINE_EXCEEDED) == 8


@pytest.mark.spec("SEC-07")
@pytest.mark.parametrize(
    "data, code",
    [
        (health_pb2.HealthCheckRequest(service="other").SerializeToString(), grpc.StatusCode.NOT_FOUND),
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (health_pb2.HealthCheckRequest(service="x" * 2000).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_a_check_of_something_else_is_refused(zones, data, code):
    zones.serve(zones.store)
    assert refusal(zones.raw(zones.plant_files).unary_unary(HEALTH + "Check").future(data, timeout=20))[0] is code


# -- connections ----------------------------------------------------------------------------------------


def connected(zones):
    host, _, port = zones.where.partition(":")
    line = socket.create_connection((host, int(port)), timeout=20)
    line.settimeout(20)
    return line


def is_closed(line):
    try:
        return line.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.spec("SEC-08")
def test_a_handshake_that_is_not_completed_is_closed(zones):
    zones.serve(zones.store, limits=Limits(handshake=0.3))
    with connected(zones) as silent:
        assert is_closed(silent)
    assert describe(zones, zones.plant_files)


@pytest.mark.spec("SEC-08")
def test_connections_are_limited_and_free_again_after_a_handshake_that_was_none(zones):
    zones.serve(zones.store, limits=Limits(connections=3, handshake=2.0))
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(zones)) for _ in range(4)]
        began = time.monotonic()
        assert is_closed(silent[3])
        assert time.monotonic() - began < 1.5
        for each in silent[:3]:
            assert is_closed(each)
        assert describe(zones, zones.plant_files)


def hold(zones, files, stack):
    """Open a connection with a complete handshake, which makes no call."""
    context = ssl.create_default_context(cafile=str(files.authorities))
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    line = context.wrap_socket(connected(zones), server_hostname="localhost")
    stack.enter_context(line)
    line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    return line


def is_open(line):
    """Whether the service has not closed *line*; what it has sent is read."""
    line.setblocking(False)
    try:
        while data := line.recv(1000):
            assert data
    except (ssl.SSLWantReadError, BlockingIOError):
        return True
    except OSError:
        return False
    return False


def separate(zones, files, stack):
    """A channel whose connection is shared with no other channel, and the signal that its connection was lost."""
    pem = files.read()
    credentials = grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = stack.enter_context(grpc.secure_channel(zones.where, credentials, options=options))
    states, lost = [], threading.Event()

    def changed(state):
        states.append(state)
        if state is not grpc.ChannelConnectivity.READY and grpc.ChannelConnectivity.READY in states:
            lost.set()

    channel.subscribe(changed)
    return channel, lost


@pytest.mark.spec("SEC-08")
@pytest.mark.parametrize("who", ["unnamed_files", "peer_files"])
def test_idle_connections_do_not_keep_a_zone_out(zones, who):
    zones.serve(zones.store, limits=Limits(connections=40))
    with ExitStack() as stack:
        for _ in range(40):
            hold(zones, getattr(zones, who), stack)
        channel, _ = separate(zones, zones.plant_files, stack)
        assert channel.unary_unary(SERVICE + "Describe")(b"", timeout=5, wait_for_ready=True)


@pytest.mark.spec("SEC-08")
def test_an_address_has_so_many_connections_without_an_identity(zones):
    zones.serve(zones.store, limits=Limits(connections_per_address=3))
    with ExitStack() as stack:
        channel, lost = separate(zones, zones.plant_files, stack)
        assert channel.unary_unary(SERVICE + "Describe")(b"", timeout=20)
        held = [hold(zones, zones.unnamed_files, stack) for _ in range(6)]
        until = time.monotonic() + 5
        while sum(map(is_open, held)) > 3 and time.monotonic() < until:
            time.sleep(0.02)
        assert sum(map(is_open, held)) == 3
        assert not lost.is_set()


@pytest.mark.spec("SEC-08")
def test_a_connection_that_shows_no_identity_is_closed(zones):
    zones.serve(zones.store, limits=Limits(identification=0.5))
    with ExitStack() as stack:
        channel, lost = separate(zones, zones.plant_files, stack)
        assert channel.unary_unary(HEALTH + "Check")(b"", timeout=20)
        idle = hold(zones, zones.plant_files, stack)
        idle.settimeout(5)
        while idle.recv(1000):
            pass
        assert not lost.is_set(), "a check by a zone shows its identity"


@pytest.mark.spec("SEC-08")
def test_a_connection_whose_identity_is_refused_is_closed(zones):
    zones.serve(zones.store)
    with ExitStack() as stack:
        channel, lost = separate(zones, zones.unnamed_files, stack)
        assert refusal(channel.unary_unary(SERVICE + "Describe").future(b"", timeout=20))[0].name == "PERMISSION_DENIED"
        assert lost.wait(5)


@pytest.mark.spec("SEC-05", "SEC-08")
def test_an_idle_connection_is_closed_when_its_certificate_is_revoked(zones, tmp_path):
    path = tmp_path / "revoked.txt"
    path.write_text("", encoding="utf-8")
    zones.serve(zones.store, revoked=path, limits=Limits(look=0.2))
    with ExitStack() as stack:
        channel, lost = separate(zones, zones.peer_files, stack)
        assert channel.unary_unary(SERVICE + "Describe")(b"", timeout=20)
        path.write_text(zones.peer_files.certificate.read_text(encoding="utf-8"), encoding="utf-8")
        assert lost.wait(5)


@pytest.mark.spec("SEC-08")
def test_an_identity_has_so_many_connections(zones):
    zones.serve(zones.store, limits=Limits(connections_per_identity=3))
    with ExitStack() as stack:
        opened = [separate(zones, zones.peer_files, stack) for _ in range(4)]
        calls = [channel.unary_unary(SERVICE + "Describe") for channel, _ in opened]
        for call in calls[:3]:
            assert call(b"", timeout=20)
        code, error = refusal(calls[3].future(b"", timeout=20))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error, LimitExceeded)
        assert "connections_per_identity" in str(error)
        assert describe(zones, zones.plant_files)
        assert opened[3][1].wait(5), "it is closed"
        opened[0][0].close()
        until = time.monotonic() + 10
        while (code := calls[3].future(b"", timeout=20).code()) is not grpc.StatusCode.OK:
            assert time.monotonic() < until, code
            time.sleep(0.05)


@pytest.mark.spec("SEC-08")
@pytest.mark.parametrize("compression, code", [(False, "UNIMPLEMENTED"), (True, "OK")])
def test_compression_is_off_unless_it_is_configured(zones, compression, code):
    zones.serve(zones.store, limits=Limits(compression=compression))
    end_of = zones.raw(zones.plant_files).unary_unary(SERVICE + "EndOf")
    assert end_of.future(END_OF, timeout=20, compression=grpc.Compression.Gzip).code().name == code


@pytest.mark.spec("SEC-08")
def test_the_connections_of_a_service_fit_into_the_files_that_it_may_open(tmp_path):
    with closing(Zones(tmp_path)) as alone:
        resource.prlimit(alone.host.pid, resource.RLIMIT_NOFILE, (OWN_FILES + 3, OWN_FILES + 3))
        alone.serve("store", limits=Limits(handshake=4.0))
        with ExitStack() as stack:
            silent = [stack.enter_context(connected(alone)) for _ in range(4)]
            began = time.monotonic()
            assert is_closed(silent[3])
            assert time.monotonic() - began < 3


@pytest.mark.spec("SEC-08")
def test_a_service_logs_repeated_refusals_as_a_count(tmp_path, capfd):
    with closing(Zones(tmp_path)) as alone:
        alone.serve("store")
        call = alone.raw(alone.peer_files).unary_unary(SERVICE + "AppendFacts")
        for _ in range(50):
            assert refusal(call.future(b"", timeout=20))[0] is grpc.StatusCode.PERMISSION_DENIED
        alone.host.ask("stop", "store")
    first, repeated = [line for line in capfd.readouterr().err.splitlines() if "access denied" in line]
    assert "count=" not in first
    assert "count=49" in repeated
