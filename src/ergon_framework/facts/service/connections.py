"""Connections: which identity each connection of a facts service has, and which connections are closed.

gRPC accepts connections, completes handshakes and says nothing about either until a call comes, so idle connections of
callers without rights would take the places of all others. The open connections are therefore listed from the sockets
of this process, several times a second, and those beyond a limit are shut down; gRPC takes that as the caller's end.
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
from ergon_framework.facts.service.identity import Identity, IdentityKey
from ergon_framework.facts.service.limits import Limits
from ergon_framework.facts.service.refusals import Refusals
from ergon_framework.telemetry.names import Event

#: The files that this process has open, on Linux and BSD.
OPEN_FILES: Final = "/dev/fd"
#: Seconds between two looks at the open connections.
INTERVAL_SECONDS: Final = 0.2
#: Seconds for which a refused connection stays open, so that the caller receives the reason.
LINGER_SECONDS: Final = 1.0
#: One of so many places stays free of connections without an identity, for callers that have one.
FREE_SHARE: Final = 10

#: Descriptor and inode of a socket.
SocketName: TypeAlias = tuple[int, int]


class Peer(NamedTuple):
    """The far end of a connection."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{'ipv6' if ':' in self.address else 'ipv4'}:{self.address}:{self.port}"


@dataclass(slots=True)
class _Connection:
    since: float
    #: None until it is listed.
    socket: SocketName | None = None
    #: None until a call shows an identity that is let in.
    who: Identity | None = None
    #: When it is closed; None if it stays.
    close_at: float | None = None
    is_closed: bool = False


class Connections:
    """The open connections of one service. For one event loop.

    A connection gets its identity with its first call. One without an identity is closed after a time, and the oldest
    ones of an address that has too many are closed at once, so that a new caller from the same address still comes in.
    """

    def __init__(self, limits: Limits, refusals: Refusals, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._refusals = refusals
        self._clock = clock
        self._open: dict[Peer, _Connection] = {}
        self._counts: Counter[IdentityKey] = Counter()
        #: All sockets of this process; None for those that are no connection of the service.
        self._sockets: dict[SocketName, Peer | None] = {}

    # -- calls ----------------------------------------------------------------------------------------

    def identify(self, peer_name: str, who: Identity) -> None:
        """Note that *who* calls on this connection; LimitExceeded if that identity has too many of them."""
        peer = parse_peer(peer_name)
        if peer is None:
            return
        connection = self._open.setdefault(peer, _Connection(self._clock()))
        if connection.who is who:
            return
        key = who.key
        if connection.who is None or connection.who.key != key:
            limit = self._limits.connections_per_identity
            if self._counts[key] >= limit:
                self._close_later(connection)
                raise LimitExceeded(
                    f"{who.name} has {limit} connections at once, which is the limit of one identity "
                    "(connections_per_identity); share connections, or close those that are not used"
                )
            self._counts[key] += 1
        connection.who = who

    def refuse(self, peer_name: str) -> None:
        """Close this connection soon: the identity of its caller was refused."""
        peer = parse_peer(peer_name)
        if peer is not None:
            self._close_later(self._open.setdefault(peer, _Connection(self._clock())))

    def recheck(self, admit: Callable[[Identity], None]) -> None:
        """Refuse the connections whose identity *admit* refuses now."""
        refused: dict[Identity, bool] = {}
        for connection in self._open.values():
            who = connection.who
            if who is None:
                continue
            if who not in refused:
                try:
                    admit(who)
                except AccessDenied:
                    refused[who] = True
                else:
                    refused[who] = False
            if refused[who]:
                self._close_later(connection)

    def _close_later(self, connection: _Connection) -> None:
        if connection.close_at is None:
            connection.close_at = self._clock() + LINGER_SECONDS

    # -- sockets --------------------------------------------------------------------------------------

    async def watch(self, port: int) -> None:
        """Look after the connections to *port* until this is cancelled."""
        while True:
            # Without a free descriptor nothing can be listed; the next time there may be one.
            with suppress(OSError):
                self.sweep(port)
            await asyncio.sleep(INTERVAL_SECONDS)

    def sweep(self, port: int) -> None:
        """List the open connections to *port*, and close those that are beyond a limit."""
        self._sockets = {
            name: self._sockets[name] if name in self._sockets else _accepted(name[0], port) for name in _list_sockets()
        }
        now = self._clock()
        known, self._open = self._open, {}
        for name, peer in self._sockets.items():
            if peer is not None:
                connection = known.get(peer)
                # Another connection from the same port as one that was closed: nothing is known of it.
                if connection is None or connection.socket not in (None, name):
                    connection = _Connection(now)
                connection.socket = name
                self._open[peer] = connection
        self._counts = Counter(each.who.key for each in self._open.values() if each.who is not None)
        for peer in self._excess(now):
            connection = self._open[peer]
            connection.is_closed = True
            if connection.socket is not None:
                _shut_down(connection.socket[0], peer)

    def _excess(self, now: float) -> Iterable[Peer]:
        """Choose the connections to close."""
        limits = self._limits
        unknown: list[Peer] = []
        total = 0
        for peer, connection in self._open.items():
            if connection.is_closed:
                continue
            is_late = connection.who is None and now - connection.since >= limits.identification
            if is_late or (connection.close_at is not None and now >= connection.close_at):
                yield peer
                continue
            total += 1
            if connection.who is None:
                unknown.append(peer)
        unknown.sort(key=lambda peer: self._open[peer].since)
        counts = Counter(peer.address for peer in unknown)
        places = limits.connections - limits.connections // FREE_SHARE
        for peer in unknown:
            if counts[peer.address] > limits.connections_per_address:
                reason = (
                    f"an address has more than {limits.connections_per_address} connections without an identity "
                    "(connections_per_address); the oldest are closed"
                )
            elif total > places:
                reason = (
                    f"more than {places} of {limits.connections} connections are open (connections); the oldest "
                    "without an identity are closed"
                )
            else:
                continue
            counts[peer.address] -= 1
            total -= 1
            self._refusals.note(Event.LIMIT_REACHED, "connect", reason, str(peer))
            yield peer


@lru_cache(maxsize=4096)
def parse_peer(name: str) -> Peer | None:
    """Parse gRPC's name of a far end, ``ipv4:127.0.0.1:80`` or ``ipv6:%5B::1%5D:80``; None for other kinds."""
    kind, _, rest = name.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return Peer(_address(host.strip("[]")), int(port))


def _address(host: str) -> str:
    """Return an IP address without its scope; one of IPv4 within IPv6 as one of IPv4."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _list_sockets() -> Iterable[SocketName]:
    """Yield each socket of this process."""
    for name in os.listdir(OPEN_FILES):  # noqa: PTH208 - numbers, no paths
        # Closed since it was listed, as the descriptor of the listing itself.
        with suppress(OSError):
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield int(name), found.st_ino


def _accepted(file: int, port: int) -> Peer | None:
    """Return the far end if *file* is a connection that was accepted at *port*."""
    with suppress(OSError), _duplicate(file) as connection:
        if _is_ip(connection) and connection.getsockname()[1] == port:
            return _peer(connection)
    return None


def _shut_down(file: int, peer: Peer) -> None:
    """End the connection to *peer*; gRPC closes its descriptor when it reads the end."""
    # Of a duplicate, whose far end is compared: the descriptor may have been closed, and opened for something else.
    with suppress(OSError), _duplicate(file) as connection:
        if _is_ip(connection) and _peer(connection) == peer:
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


def _peer(connection: socket.socket) -> Peer:
    host, port, *_ = connection.getpeername()
    return Peer(_address(host), port)
