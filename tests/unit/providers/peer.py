"""A peer that behaves badly in one way: enough of a server to make real clients raise."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

#: What the peer does with a connection on which a request has arrived.
Habit: TypeAlias = Callable[[socket.socket], None]

_LINGER_NOT = struct.pack("ii", 1, 0)


def resets(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)


def leaves(line: socket.socket) -> None:
    """Closes without an answer."""


def waits(line: socket.socket) -> None:
    """Until the client has left."""
    try:
        while line.recv(4096):
            pass
    except OSError:
        pass


def answers(status: str, *headers: str, body: bytes = b"{}", length: int | None = None) -> Habit:
    head = [f"HTTP/1.1 {status}", "Connection: close", f"Content-Length: {len(body) if length is None else length}"]
    data = "\r\n".join([*head, *headers, "", ""]).encode() + body
    return lambda line: line.sendall(data)


@contextmanager
def peer(habit: Habit, *, reads: bool = True) -> Iterator[int]:
    """The port at which one with that habit listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        lines: list[threading.Thread] = []

        def serve(line: socket.socket) -> None:
            with line:
                try:
                    if reads:
                        line.recv(65_536)
                    habit(line)
                except OSError:
                    pass

        def accept() -> None:
            while True:
                try:
                    line, _ = server.accept()
                except OSError:
                    return
                lines.append(threading.Thread(target=serve, args=(line,), daemon=True))
                lines[-1].start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            accepting.join(5)
            for line in lines:
                line.join(5)


def closed_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
