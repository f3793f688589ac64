"""Connections: the identity of each connection of a facts service, and which connections are closed.

An identity is the set of zones and the operator that a caller's certificate proves (``facts.service.access``).

gRPC accepts connections and completes handshakes without reporting either until a call arrives, so idle connections of
callers without rights could use up the capacity for all others. The open connections are therefore listed from the
sockets of this process, several times a second, and those beyond a limit are shut down; gRPC treats that as a
disconnect by the caller.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias
from urllib.parse import unquote

from ergon_framework.facts.errors import AccessDenied, LimitExceeded
from ergon_framework.facts.service.access import Identity, IdentityKey
from ergon_framework.facts.service.errors import RejectionHandler
from ergon_framework.facts.service.limits import Limits
from ergon_framework.telemetry.names import Event

#: The directory of the files that this process has open, on Linux and BSD.
OPEN_FILES_PATH: Final = "/dev/fd"
#: Seconds between two listings of the open connections.
SCAN_INTERVAL_SECONDS: Final = 0.2
#: Seconds for which a rejected connection stays open, so that the caller receives the reason.
LINGER_SECONDS: Final = 1.0
#: One in this many connections is reserved for callers with an identity.
FREE_SHARE: Final = 10

#: Descriptor and inode of a socket.
SocketName: TypeAlias = tuple[int, int]


class Peer(NamedTuple):
    """The remote end of a connection."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{'ipv6' if ':' in self.address else 'ipv4'}:{self.address}:{self.port}"


@dataclass(slots=True)
class _Connection:
    since: float
    #: None until it is listed.
    socket: SocketName | None = None
    #: None until a call shows an identity that is admitted.
    identity: Identity | None = None
    #: The time at which it is closed; None if it stays open.
    close_at: float | None = None
    #: Whether it was shut down; it is listed until gRPC has closed its descriptor.
    is_closed: bool = False


class Connections:
    """The open connections of one service. For one event loop.

    A connection gets its identity with its first call. One without an identity is closed after a time, and if an
    address has too many of them, the oldest are closed immediately, so that it can still open new connections.
    """

    def __init__(
        self, limits: Limits, rejections: RejectionHandler, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._rejections = rejections
        self._clock = clock
        self._open: dict[Peer, _Connection] = {}
        #: Connections by identity, counted again at each listing; between two listings, only new ones are added.
        self._counts: Counter[IdentityKey] = Counter()
        #: All sockets of this process; None for those that are not connections of the service.
        self._sockets: dict[SocketName, Peer | None] = {}

    # -- calls ----------------------------------------------------------------------------------------

    def identify(self, peer_name: str, identity: Identity) -> None:
        """Record the identity of this connection; raise LimitExceeded if the identity has too many connections."""
        peer = parse_peer(peer_name)
        if peer is None:
            return
        connection = self._open.setdefault(peer, _Connection(self._clock()))
        # The same object for the same certificate, because parse_certificate caches it.
        if connection.identity is identity:
            return
        key = identity.key
        if connection.identity is None or connection.identity.key != key:
            limit = self._limits.connections_per_identity
            if self._counts[key] >= limit:
                self._close_later(connection)
                raise LimitExceeded(
                    f"{identity.name} has {limit} concurrent connections, the limit of one identity "
                    "(connections_per_identity); share connections, or close unused ones"
                )
            self._counts[key] += 1
        connection.identity = identity

    def reject(self, peer_name: str) -> None:
        """Close this connection soon, because the identity of its caller was rejected."""
        peer = parse_peer(peer_name)
        if peer is not None:
            self._close_later(self._open.setdefault(peer, _Connection(self._clock())))

    def recheck(self, admit: Callable[[Identity], None]) -> None:
        """Close the connections whose identity *admit* rejects now."""
        is_rejected: dict[Identity, bool] = {}
        for connection in self._open.values():
            identity = connection.identity
            if identity is None:
                continue
            if identity not in is_rejected:
                try:
                    admit(identity)
                except AccessDenied:
                    is_rejected[identity] = True
                else:
                    is_rejected[identity] = False
            if is_rejected[identity]:
                self._close_later(connection)

    def _close_later(self, connection: _Connection) -> None:
        if connection.close_at is None:
            connection.close_at = self._clock() + LINGER_SECONDS

    # -- sockets --------------------------------------------------------------------------------------

    async def watch(self, port: int) -> None:
        """Enforce the limits of connections to *port* until cancelled."""
        while True:
            # Without a free descriptor nothing can be listed; the next pass may succeed.
            with suppress(OSError):
                self.enforce_limits(port)
            await asyncio.sleep(SCAN_INTERVAL_SECONDS)

    def enforce_limits(self, port: int) -> None:
        """List the open connections to *port*, and close those that exceed a limit."""
        self._sockets = {
            name: self._sockets[name] if name in self._sockets else _find_accepted_peer(name[0], port)
            for name in _list_sockets()
        }
        now = self._clock()
        previous, self._open = self._open, {}
        for name, peer in self._sockets.items():
            if peer is not None:
                connection = previous.get(peer)
                # A new connection may have the same remote port as a closed one; it has no identity yet.
                if connection is None or connection.socket not in (None, name):
                    connection = _Connection(now)
                connection.socket = name
                self._open[peer] = connection
        self._counts = Counter(each.identity.key for each in self._open.values() if each.identity is not None)
        for peer in self._find_excess(now):
            connection = self._open[peer]
            connection.is_closed = True
            if connection.socket is not None:
                _shut_down(connection.socket[0], peer)

    def _find_excess(self, now: float) -> Iterable[Peer]:
        """Yield the connections to close."""
        limits = self._limits
        unknown: list[Peer] = []
        total = 0
        for peer, connection in self._open.items():
            if connection.is_closed:
                continue
            is_late = connection.identity is None and now - connection.since >= limits.identification
            if is_late or (connection.close_at is not None and now >= connection.close_at):
                yield peer
                continue
            total += 1
            if connection.identity is None:
                unknown.append(peer)
        unknown.sort(key=lambda peer: self._open[peer].since)
        counts = Counter(peer.address for peer in unknown)
        max_total = limits.connections - limits.connections // FREE_SHARE
        for peer in unknown:
            if counts[peer.address] > limits.connections_per_address:
                reason = (
                    f"an address has more than {limits.connections_per_address} connections without an identity "
                    "(connections_per_address); the oldest are closed"
                )
            elif total > max_total:
                reason = (
                    f"more than {max_total} of {limits.connections} connections are open (connections); the oldest "
                    "without an identity are closed"
                )
            else:
                continue
            counts[peer.address] -= 1
            total -= 1
            self._rejections.record(Event.LIMIT_REACHED, "connect", reason, str(peer))
            yield peer


@lru_cache(maxsize=4096)
def parse_peer(name: str) -> Peer | None:
    """Parse gRPC's name of a peer, ``ipv4:127.0.0.1:80`` or ``ipv6:%5B::1%5D:80``; return None for other kinds."""
    kind, _, rest = name.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return Peer(_normalize_address(host.strip("[]")), int(port))


def _normalize_address(host: str) -> str:
    """Return an IP address without its scope; an IPv4-mapped IPv6 address becomes an IPv4 address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _list_sockets() -> Iterable[SocketName]:
    """Yield each socket of this process."""
    for name in os.listdir(OPEN_FILES_PATH):  # noqa: PTH208 - numbers, no paths
        # A descriptor may have been closed since the listing, as the descriptor of the listing itself.
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                yield int(name), status.st_ino


def _find_accepted_peer(file: int, port: int) -> Peer | None:
    """Return the peer if *file* is a connection that was accepted at *port*."""
    with suppress(OSError), _duplicate(file) as connection:
        if _is_ip(connection) and connection.getsockname()[1] == port:
            return _get_peer(connection)
    return None


def _shut_down(file: int, peer: Peer) -> None:
    """End the connection to *peer*; gRPC closes its descriptor when it reads the end."""
    # On a duplicate, after comparing its peer: the descriptor may have been closed and reused meanwhile.
    with suppress(OSError), _duplicate(file) as connection:
        if _is_ip(connection) and _get_peer(connection) == peer:
            connection.shutdown(socket.SHUT_RDWR)


def _duplicate(file: int) -> socket.socket:
    copy = os.dup(file)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _is_ip(connection: socket.socket) -> bool:
    return connection.family in (socket.AF_INET, socket.AF_INET6)


def _get_peer(connection: socket.socket) -> Peer:
    host, port, *_ = connection.getpeername()
    return Peer(_normalize_address(host), port)
