"""What one caller can take from a facts service: not the slots, time or memory of the others."""

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
from ergon_framework.facts.service import errors
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.limits import RESERVED_FILES
from ergon_framework.facts.service.server import Limits
from ergon_framework.facts.service.wire import fill_facts
from tests.integration.facts_zones import OUTBOUND, ServiceZones, make_fact
from tests.servers.certificates import compute_fingerprint

MEBIBYTE = 1024 * 1024
HEALTH = "/grpc.health.v1.Health/"
END_OF = wire.EndOfRequest(pair=wire.Pair(from_zone=OUTBOUND.from_zone, to_zone=OUTBOUND.to_zone)).SerializeToString()


@pytest.fixture(scope="module")
def zones(tmp_path_factory):
    zones = ServiceZones(tmp_path_factory.mktemp("zones"))
    zones.unnamed_files = zones.host.authority.issue("unnamed")
    yield zones
    zones.close()


@pytest.fixture(autouse=True)
def _set_store_name(zones, request):
    zones.store = request.node.name


@pytest.fixture
def silent_requests():
    """The requests of a caller that sends none until the test is over."""
    finished = threading.Event()

    def requests():
        finished.wait(60)
        yield from ()

    yield requests
    finished.set()


def read_rejection(call):
    """Return the status of a rejected call, and the error that came with it."""
    with pytest.raises(grpc.RpcError) as caught:
        call.result(20)
    fault = dict(caught.value.trailing_metadata()).get(errors.METADATA_KEY)
    return caught.value.code(), None if fault is None else errors.from_wire(wire.Fault.FromString(fault))


def is_answered(zones, files):
    """Return whether the service answers the holder of *files*."""
    return bool(zones.open_channel(files).unary_unary(SERVICE + "Describe")(b"", timeout=10))


def make_large_request(number, *, from_zone="Plant A"):
    """Return an AppendFacts of about 3 MB that takes about a second to convert to canonical form."""
    keys = json.dumps({f"{(index * 7919) % 100_003:x}": 0 for index in range(75_000)}, separators=(",", ":"))
    request = wire.AppendFactsRequest()
    fill_facts([make_fact(f"{number}-{index}") for index in range(4)], request.facts)
    request.facts.from_zones[:] = [from_zone]
    request.facts.objects_json[:] = [keys] * 4
    return request.SerializeToString()


# -- before a request is read ---------------------------------------------------------------------------


@pytest.mark.spec("SEC-06")
@pytest.mark.parametrize(
    "method, files_name",
    [
        ("AppendFact", "peer_files"),
        ("AppendFacts", "peer_files"),
        ("AppendFacts", "unnamed_files"),
        ("FetchFacts", "unnamed_files"),
        ("Received", "peer_files"),
        ("RetireReader", "plant_files"),
    ],
)
def test_a_caller_without_rights_is_refused_before_its_request_is_received(zones, silent_requests, method, files_name):
    zones.serve(zones.store)
    call = (
        zones.open_channel(getattr(zones, files_name))
        .stream_unary(SERVICE + method)
        .future(silent_requests(), timeout=20)
    )
    assert read_rejection(call)[0] is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.spec("SEC-06")
def test_a_large_request_without_rights_gets_the_reason(zones):
    zones.serve(zones.store)
    call = zones.open_channel(zones.peer_files).unary_unary(SERVICE + "AppendFacts")
    # Not a message of the protocol: parsed before the access check, it would be rejected for that reason.
    data = b"\xff" * 3 * MEBIBYTE
    for _ in range(20):
        assert read_rejection(call.future(data, timeout=20))[0] is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.spec("SEC-06")
def test_the_zones_of_a_request_are_compared_before_its_facts_are_read(zones):
    zones.serve(zones.store)
    request = wire.AppendFactsRequest()
    fill_facts([make_fact(1)], request.facts)
    request.facts.from_zones[:] = ["Plant B"]
    # Mismatched columns are rejected when the facts are read.
    request.facts.objects_json[:] = []
    call = zones.open_channel(zones.plant_files).unary_unary(SERVICE + "AppendFacts")
    code, error = read_rejection(call.future(request.SerializeToString(), timeout=20))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "'Plant B'" in str(error)


@pytest.mark.spec("SEC-06")
def test_a_slow_request_does_not_delay_other_callers(zones):
    zones.serve(zones.store)
    other = zones.open_channel(zones.peer_files).unary_unary(SERVICE + "Describe")
    other(b"", timeout=20)
    began = time.monotonic()
    appending = (
        zones.open_channel(zones.plant_files)
        .unary_unary(SERVICE + "AppendFacts")
        .future(make_large_request(1), timeout=60)
    )
    slowest = 0.0
    while not appending.done():
        call_started = time.monotonic()
        other(b"", timeout=60)
        slowest = max(slowest, time.monotonic() - call_started)
    appending.result()
    assert slowest < (time.monotonic() - began) / 2


@pytest.mark.spec("SEC-06")
def test_bytes_in_flight_are_limited_per_identity(zones):
    zones.serve(zones.store, limits=Limits(bytes_per_identity=4 * MEBIBYTE))
    call = zones.open_channel(zones.plant_files).unary_unary(SERVICE + "AppendFacts")
    calls = [call.future(make_large_request(number), timeout=60) for number in range(3)]
    codes = [each.code() for each in calls]
    assert grpc.StatusCode.OK in codes
    refused = next(each for each in calls if each.code() is grpc.StatusCode.RESOURCE_EXHAUSTED)
    _, error = read_rejection(refused)
    assert isinstance(error, LimitExceeded)
    assert "bytes_per_identity" in str(error)
    assert error.not_attempted
    # All bytes are released.
    assert zones.connect(zones.plant_files).append_fact(*make_fact("small"))


# -- slots ----------------------------------------------------------------------------------------------


@pytest.mark.spec("SEC-07")
def test_one_identity_cannot_take_the_streams_of_others(zones):
    zones.serve(zones.store, limits=Limits(streams_per_identity=4))
    opened = [zones.open_channel(zones.peer_files).unary_stream(SERVICE + "Watch")(b"") for _ in range(6)]
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
        next(zones.open_channel(renewed).unary_stream(SERVICE + "Watch")(b""))
    next(zones.open_channel(zones.plant_files).unary_stream(SERVICE + "Watch")(b""))
    assert is_answered(zones, zones.peer_files)
    for each in opened:
        each.cancel()


@pytest.mark.spec("SEC-07")
def test_one_identity_cannot_take_the_calls_of_others(zones):
    zones.serve(zones.store, limits=Limits(calls_per_identity=3))
    zones.host.ask("mood", zones.store, "hang")
    peer = zones.open_channel(zones.peer_files)
    hanging = [peer.unary_unary(SERVICE + "EndOf").future(END_OF, timeout=60) for _ in range(5)]
    refused = [each for each in hanging if _is_finished(each, hanging, 2)]
    for each in refused:
        code, error = read_rejection(each)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "calls_per_identity" in str(error)
    assert is_answered(zones, zones.plant_files)
    for each in hanging:
        each.cancel()


def _is_finished(call, calls, count):
    """Return whether *call* is one of the *count* finished calls; wait until so many have finished."""
    deadline = time.monotonic() + 20
    while sum(each.done() for each in calls) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return call.done()


@pytest.mark.spec("SEC-07")
def test_health_checks_are_answered_while_all_calls_are_in_use(zones):
    zones.serve(zones.store, limits=Limits(calls=3, check_interval=600))
    opened = [zones.open_channel(zones.peer_files).unary_stream(SERVICE + "Watch")(b"") for _ in range(3)]
    for each in opened:
        next(each)
    code, error = read_rejection(
        zones.open_channel(zones.plant_files).unary_unary(SERVICE + "Describe").future(b"", timeout=20)
    )
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "(calls)" in str(error)
    for files in (zones.plant_files, zones.unnamed_files):
        answer = health_pb2_grpc.HealthStub(zones.open_channel(files)).Check(
            health_pb2.HealthCheckRequest(), timeout=20
        )
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for each in opened:
        each.cancel()


@pytest.mark.spec("SEC-07")
def test_only_identities_can_watch_the_health(zones, tmp_path):
    path = tmp_path / "revoked"
    path.write_text(compute_fingerprint(zones.stranger_files), encoding="utf-8")
    zones.serve(zones.store, revoked=path, limits=Limits(streams_per_identity=2))
    for files in (zones.unnamed_files, zones.stranger_files):
        with pytest.raises(grpc.RpcError) as caught:
            next(zones.open_channel(files).unary_stream(HEALTH + "Watch")(b"", timeout=20))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    watching = [zones.open_channel(zones.peer_files).unary_stream(HEALTH + "Watch")(b"", timeout=20) for _ in range(2)]
    for each in watching:
        next(each)
    with pytest.raises(grpc.RpcError, match="streams_per_identity"):
        next(zones.open_channel(zones.peer_files).unary_stream(HEALTH + "Watch")(b"", timeout=20))
    # It ends when the certificate does.
    path.write_text(compute_fingerprint(zones.peer_files), encoding="utf-8")
    with pytest.raises(grpc.RpcError) as ended:
        next(watching[0])
    assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.spec("SEC-07")
def test_health_checks_without_a_request_are_limited_and_time_out(zones, silent_requests):
    zones.serve(zones.store)
    check = zones.open_channel(zones.unnamed_files).stream_unary(HEALTH + "Check")
    waiting = [check.future(silent_requests()) for _ in range(9)]
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
def test_an_invalid_health_check_is_rejected(zones, data, code):
    zones.serve(zones.store)
    assert (
        read_rejection(zones.open_channel(zones.plant_files).unary_unary(HEALTH + "Check").future(data, timeout=20))[0]
        is code
    )


# -- connections ----------------------------------------------------------------------------------------


def open_socket(zones):
    host, _, port = zones.address.partition(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    sock.settimeout(20)
    return sock


def is_closed(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.spec("SEC-08")
def test_a_handshake_that_is_not_completed_is_closed(zones):
    zones.serve(zones.store, limits=Limits(handshake=0.3))
    with open_socket(zones) as silent:
        assert is_closed(silent)
    assert is_answered(zones, zones.plant_files)


@pytest.mark.spec("SEC-08")
def test_connections_are_limited_and_released_after_an_incomplete_handshake(zones):
    zones.serve(zones.store, limits=Limits(connections=3, handshake=2.0))
    with ExitStack() as stack:
        silent = [stack.enter_context(open_socket(zones)) for _ in range(4)]
        began = time.monotonic()
        assert is_closed(silent[3])
        assert time.monotonic() - began < 1.5
        for each in silent[:3]:
            assert is_closed(each)
        assert is_answered(zones, zones.plant_files)


def open_idle_connection(zones, files, stack):
    """Open a connection with a complete handshake that makes no call."""
    context = ssl.create_default_context(cafile=str(files.authorities))
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])
    sock = context.wrap_socket(open_socket(zones), server_hostname="localhost")
    stack.enter_context(sock)
    sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    return sock


def is_open(line):
    """Return whether the service has kept *line* open; read what it has sent."""
    line.setblocking(False)
    try:
        while data := line.recv(1000):
            assert data
    except (ssl.SSLWantReadError, BlockingIOError):
        return True
    except OSError:
        return False
    return False


def open_separate_channel(zones, files, stack):
    """Return a channel with its own connection, and an event that is set when the connection is lost."""
    pem = files.read()
    credentials = grpc.ssl_channel_credentials(pem.authorities, pem.key, pem.certificate)
    options = [("grpc.use_local_subchannel_pool", 1)]
    channel = stack.enter_context(grpc.secure_channel(zones.address, credentials, options=options))
    states, lost = [], threading.Event()

    def on_state_change(state):
        states.append(state)
        if state is not grpc.ChannelConnectivity.READY and grpc.ChannelConnectivity.READY in states:
            lost.set()

    channel.subscribe(on_state_change)
    return channel, lost


@pytest.mark.spec("SEC-08")
@pytest.mark.parametrize("files_name", ["unnamed_files", "peer_files"])
def test_idle_connections_do_not_keep_a_zone_out(zones, files_name):
    zones.serve(zones.store, limits=Limits(connections=40))
    with ExitStack() as stack:
        for _ in range(40):
            open_idle_connection(zones, getattr(zones, files_name), stack)
        channel, _ = open_separate_channel(zones, zones.plant_files, stack)
        assert channel.unary_unary(SERVICE + "Describe")(b"", timeout=5, wait_for_ready=True)


@pytest.mark.spec("SEC-08")
def test_connections_without_an_identity_are_limited_per_address(zones):
    zones.serve(zones.store, limits=Limits(connections_per_address=3))
    with ExitStack() as stack:
        channel, lost = open_separate_channel(zones, zones.plant_files, stack)
        assert channel.unary_unary(SERVICE + "Describe")(b"", timeout=20)
        idle = [open_idle_connection(zones, zones.unnamed_files, stack) for _ in range(6)]
        deadline = time.monotonic() + 5
        while sum(map(is_open, idle)) > 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert sum(map(is_open, idle)) == 3
        assert not lost.is_set()


@pytest.mark.spec("SEC-08")
def test_a_connection_that_shows_no_identity_is_closed(zones):
    zones.serve(zones.store, limits=Limits(identification=0.5))
    with ExitStack() as stack:
        channel, lost = open_separate_channel(zones, zones.plant_files, stack)
        assert channel.unary_unary(HEALTH + "Check")(b"", timeout=20)
        idle = open_idle_connection(zones, zones.plant_files, stack)
        idle.settimeout(5)
        while idle.recv(1000):
            pass
        assert not lost.is_set(), "a check by a zone shows its identity"


@pytest.mark.spec("SEC-08")
def test_a_connection_whose_identity_is_refused_is_closed(zones):
    zones.serve(zones.store)
    with ExitStack() as stack:
        channel, lost = open_separate_channel(zones, zones.unnamed_files, stack)
        assert (
            read_rejection(channel.unary_unary(SERVICE + "Describe").future(b"", timeout=20))[0].name
            == "PERMISSION_DENIED"
        )
        assert lost.wait(5)


@pytest.mark.spec("SEC-05", "SEC-08")
def test_an_idle_connection_is_closed_when_its_certificate_is_revoked(zones, tmp_path):
    path = tmp_path / "revoked.txt"
    path.write_text("", encoding="utf-8")
    zones.serve(zones.store, revoked=path, limits=Limits(check_interval=0.2))
    with ExitStack() as stack:
        channel, lost = open_separate_channel(zones, zones.peer_files, stack)
        assert channel.unary_unary(SERVICE + "Describe")(b"", timeout=20)
        path.write_text(zones.peer_files.certificate.read_text(encoding="utf-8"), encoding="utf-8")
        assert lost.wait(5)


@pytest.mark.spec("SEC-08")
def test_connections_are_limited_per_identity(zones):
    zones.serve(zones.store, limits=Limits(connections_per_identity=3))
    with ExitStack() as stack:
        opened = [open_separate_channel(zones, zones.peer_files, stack) for _ in range(4)]
        calls = [channel.unary_unary(SERVICE + "Describe") for channel, _ in opened]
        for call in calls[:3]:
            assert call(b"", timeout=20)
        code, error = read_rejection(calls[3].future(b"", timeout=20))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(error, LimitExceeded)
        assert "connections_per_identity" in str(error)
        assert is_answered(zones, zones.plant_files)
        assert opened[3][1].wait(5), "it is closed"
        opened[0][0].close()
        deadline = time.monotonic() + 10
        while (code := calls[3].future(b"", timeout=20).code()) is not grpc.StatusCode.OK:
            assert time.monotonic() < deadline, code
            time.sleep(0.05)


@pytest.mark.spec("SEC-08")
@pytest.mark.parametrize("compression, code", [(False, "UNIMPLEMENTED"), (True, "OK")])
def test_compression_is_off_unless_it_is_configured(zones, compression, code):
    zones.serve(zones.store, limits=Limits(compression=compression))
    end_of = zones.open_channel(zones.plant_files).unary_unary(SERVICE + "EndOf")
    assert end_of.future(END_OF, timeout=20, compression=grpc.Compression.Gzip).code().name == code


@pytest.mark.spec("SEC-08")
def test_connections_are_limited_by_the_open_files_limit(tmp_path):
    with closing(ServiceZones(tmp_path)) as alone:
        resource.prlimit(alone.host.pid, resource.RLIMIT_NOFILE, (RESERVED_FILES + 3, RESERVED_FILES + 3))
        alone.serve("store", limits=Limits(handshake=4.0))
        with ExitStack() as stack:
            silent = [stack.enter_context(open_socket(alone)) for _ in range(4)]
            began = time.monotonic()
            assert is_closed(silent[3])
            assert time.monotonic() - began < 3


@pytest.mark.spec("SEC-08")
def test_a_service_logs_repeated_refusals_as_a_count(tmp_path, capfd):
    with closing(ServiceZones(tmp_path)) as alone:
        alone.serve("store")
        call = alone.open_channel(alone.peer_files).unary_unary(SERVICE + "AppendFacts")
        for _ in range(50):
            assert read_rejection(call.future(b"", timeout=20))[0] is grpc.StatusCode.PERMISSION_DENIED
        alone.host.ask("stop", "store")
    first, repeated = [line for line in capfd.readouterr().err.splitlines() if "access denied" in line]
    assert "count=" not in first
    assert "count=49" in repeated
