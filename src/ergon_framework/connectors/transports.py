"""Transports: letting go of a socket that no event loop is left to close."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def drop(transport: Any) -> None:
    """Close the socket of a transport whose loop is closed; nobody else is left to do it, and no public call can."""
    below = getattr(transport, "_ssl_protocol", None)
    transport = transport if below is None else getattr(below, "_transport", None)
    with suppress(RuntimeError):  # it has noted that it is closing by then
        transport.abort()
    sock = getattr(transport, "_sock", None)
    if sock is not None:
        sock.close()
        transport._sock = None  # noqa: SLF001 - see above
