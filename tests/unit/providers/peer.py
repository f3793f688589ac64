"""A misbehaving peer: enough of a server to make real clients raise."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

#: The peer's behaviour on a connection on which a request has arrived.
Behaviour: TypeAlias = Callable[[socket.socket], None]

_NO_LINGER = struct.pack("ii", 1, 0)


def reset_connection(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)


def close_connection(connection: socket.socket) -> None:
    """Close the connection without a response."""


def wait_for_disconnect(connection: socket.socket) -> None:
    """Wait until the client has disconnected."""
    try:
        while connection.recv(4096):
            pass
    except OSError:
        pass


def respond(status: str, *headers: str, body: bytes = b"{}", length: int | None = None) -> Behaviour:
    header_lines = [
        f"HTTP/1.1 {status}",
        "Connection: close",
        f"Content-Length: {len(body) if length is None else length}",
    ]
    data = "\r\n".join([*header_lines, *headers, "", ""]).encode() + body
    return lambda connection: connection.sendall(data)


@contextmanager
def serve_peer(behaviour: Behaviour, *, reads: bool = True) -> Iterator[int]:
    """Yield the port of a peer with the given behaviour."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threads: list[threading.Thread] = []

        def serve(connection: socket.socket) -> None:
            with connection:
                try:
                    if reads:
                        connection.recv(65_536)
                    behaviour(connection)
                except OSError:
                    pass

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=serve, args=(connection,), daemon=True))
                threads[-1].start()

        accept_thread = threading.Thread(target=accept, daemon=True)
        accept_thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            accept_thread.join(5)
            for thread in threads:
                thread.join(5)


def find_closed_port() -> int:
    """Return a port without a listener."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
