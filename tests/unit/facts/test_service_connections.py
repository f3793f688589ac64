"""Connections of a facts service: which of them are closed, and which stay."""

from __future__ import annotations

import logging
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from ergon_framework.facts.errors import AccessDenied, LimitExceeded
from ergon_framework.facts.service.access import Identity
from ergon_framework.facts.service.connections import LINGER_SECONDS, Connections, Peer, parse_peer
from ergon_framework.facts.service.errors import RejectionHandler
from ergon_framework.facts.service.limits import Limits

pytestmark = pytest.mark.spec("SEC-08")


def make_identity(zone, *, fingerprint="f"):
    return Identity(frozenset([zone]), None, since=0.0, until=2.0**40, fingerprint=fingerprint)


class Service:
    """A listener whose connections are swept, at a time that the test sets."""

    def __init__(self, stack, **limits):
        self._stack = stack
        self._listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))
        self.port = self._listener.getsockname()[1]
        self.now = 0.0
        self.connections = Connections(Limits(**limits), RejectionHandler(), clock=lambda: self.now)

    def connect(self, address="127.0.0.1", *, port=0):
        """The caller's end and the service's end of a new connection."""
        near = socket.create_connection(("127.0.0.1", self.port), source_address=(address, port), timeout=10)
        far, _ = self._listener.accept()
        return self._stack.enter_context(near), self._stack.enter_context(far)

    def sweep(self, seconds=0.0):
        self.now += seconds
        self.connections.enforce_limits(self.port)


@pytest.fixture
def serve():
    with ExitStack() as stack:
        yield lambda **limits: Service(stack, **limits)


def peer_name(connection):
    address, port = connection.getsockname()
    return f"ipv4:{address}:{port}"


def is_open(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


def test_a_connection_without_an_identity_is_closed_after_its_timeout(serve):
    service = serve(identification=10.0)
    anonymous, _ = service.connect()
    identified, _ = service.connect()
    service.sweep()
    service.connections.identify(peer_name(identified), make_identity("Plant A"))
    service.sweep(9.9)
    assert is_open(anonymous)
    service.sweep(0.1)
    assert [is_open(anonymous), is_open(identified)] == [False, True]
    service.sweep(1000)
    assert is_open(identified)


def test_a_connection_that_shows_its_identity_before_it_is_listed_keeps_it(serve):
    service = serve(identification=10.0)
    identified, _ = service.connect()
    service.connections.identify(peer_name(identified), make_identity("Plant A"))
    service.sweep()
    service.sweep(1000)
    assert is_open(identified)


def test_a_rejected_connection_is_closed_after_the_linger(serve):
    service = serve()
    refused, _ = service.connect()
    service.connections.reject(peer_name(refused))
    service.sweep(LINGER_SECONDS - 0.01)
    assert is_open(refused)
    # A second refusal does not prolong it.
    service.connections.reject(peer_name(refused))
    service.sweep(0.01)
    assert not is_open(refused)


def test_the_oldest_connections_of_an_address_are_closed_first(serve, caplog):
    caplog.set_level(logging.WARNING)
    service = serve(connections_per_address=2)
    connections = []
    for _ in range(4):
        connections.append(service.connect()[0])
        service.now += 1
        service.sweep()
    elsewhere, _ = service.connect("127.0.0.2")
    service.sweep()
    assert [is_open(connection) for connection in connections] == [False, False, True, True]
    assert is_open(elsewhere)
    assert "connections_per_address" in caplog.text
    assert "source=ipv4:127.0.0.1" in caplog.text


def test_a_tenth_of_the_slots_is_reserved_for_identified_connections(serve, caplog):
    caplog.set_level(logging.WARNING)
    service = serve(connections=20)
    identified, _ = service.connect()
    service.connections.identify(peer_name(identified), make_identity("Plant A"))
    service.sweep()
    connections = []
    for number in range(20):
        connections.append(service.connect(f"127.0.0.{number + 2}")[0])
        service.now += 0.1
        service.sweep()
    assert [is_open(connection) for connection in connections] == [False] * 3 + [True] * 17
    assert is_open(identified)
    assert "more than 18 of 20" in caplog.text


def test_an_identity_has_a_connection_limit_across_its_certificates(serve):
    service = serve(connections_per_identity=2)
    (one, far), (two, _), (three, _) = (service.connect() for _ in range(3))
    service.connections.identify(peer_name(one), make_identity("Plant A"))
    service.connections.identify(peer_name(two), make_identity("Plant A", fingerprint="renewed"))
    # A further call of a connection does not count as a further connection.
    service.connections.identify(peer_name(one), make_identity("Plant A", fingerprint="renewed"))
    with pytest.raises(LimitExceeded, match=r"zone Plant A has 2 concurrent connections.*connections_per_identity"):
        service.connections.identify(peer_name(three), make_identity("Plant A"))
    service.sweep(LINGER_SECONDS)
    assert [is_open(one), is_open(two), is_open(three)] == [True, True, False]
    one.close()
    far.close()
    service.sweep()
    service.connections.identify(peer_name(service.connect()[0]), make_identity("Plant A"))
    with pytest.raises(LimitExceeded):
        service.connections.identify(peer_name(service.connect()[0]), make_identity("Plant A"))
    service.connections.identify(peer_name(service.connect()[0]), make_identity("Plant B"))


def test_a_connection_whose_identity_is_no_longer_accepted_is_closed(serve):
    service = serve()
    connections = [service.connect()[0] for _ in range(4)]
    for connection, zone in zip(connections, ["Plant A", "Plant B", "Plant A"], strict=False):
        service.connections.identify(peer_name(connection), make_identity(zone))
    service.sweep()
    checked = []

    def admit(identity):
        checked.append(identity.name)
        if "Plant A" in identity.zones:
            raise AccessDenied("revoked")

    service.connections.recheck(admit)
    service.sweep(LINGER_SECONDS)
    assert [is_open(connection) for connection in connections] == [False, True, False, True]
    assert sorted(checked) == ["zone Plant A", "zone Plant B"]


def test_a_connection_from_the_port_of_a_closed_one_is_a_new_one(serve):
    service = serve(identification=10.0)
    first, far = service.connect("127.0.0.3")
    address, port = first.getsockname()
    service.connections.identify(peer_name(first), make_identity("Plant A"))
    service.sweep()
    # Reset, so that the port is free at once.
    first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    first.close()
    far.close()
    second, _ = service.connect(address, port=port)
    service.sweep()
    service.sweep(9.9)
    assert is_open(second)
    service.sweep(0.1)
    assert not is_open(second)


def test_other_sockets_and_files_of_the_process_stay_open(serve, tmp_path):
    service = serve(identification=0.0)
    other = serve()
    elsewhere, _ = other.connect()
    left, right = socket.socketpair()
    with left, right, (tmp_path / "file").open("wb") as file:
        anonymous, _ = service.connect()
        before = len(list(Path("/dev/fd").iterdir()))
        service.sweep()
        service.sweep(1)
        assert not is_open(anonymous)
        assert [is_open(elsewhere), is_open(left)] == [True, True]
        file.write(b"x")
        assert len(list(Path("/dev/fd").iterdir())) == before


@pytest.mark.parametrize(
    "text, peer",
    [
        ("ipv4:10.0.0.1:4321", Peer("10.0.0.1", 4321)),
        ("ipv6:%5B::1%5D:80", Peer("::1", 80)),
        ("ipv6:[fe80::1%25eth0]:80", Peer("fe80::1", 80)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:80", Peer("10.0.0.1", 80)),
        ("unix:/run/ergon.sock", None),
        ("unix:", None),
    ],
)
def test_the_far_end_of_a_connection_is_read_from_its_name(text, peer):
    assert parse_peer(text) == peer


def test_connections_without_an_address_are_not_counted(serve):
    service = serve(connections_per_identity=1)
    for _ in range(3):
        service.connections.identify("unix:", make_identity("Plant A"))
    service.connections.reject("unix:")
    service.sweep(1000)
