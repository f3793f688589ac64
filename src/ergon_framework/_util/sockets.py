"""Close a socket whose event loop is already closed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def close_socket(transport: Any) -> None:
    """Close the socket of a transport whose loop is closed, which no public call can do."""
    ssl_protocol = getattr(transport, "_ssl_protocol", None)
    transport = transport if ssl_protocol is None else getattr(ssl_protocol, "_transport", None)
    with suppress(RuntimeError):  # the transport has noted that it is closing before this is raised
        transport.abort()
    sock = getattr(transport, "_sock", None)
    if sock is not None:
        sock.close()
        transport._sock = None  # noqa: SLF001 - see above
