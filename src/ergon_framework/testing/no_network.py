"""Isolation of handlers: connections are injected, and a handler that opens its own socket fails."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ergon_framework import scope
from ergon_framework.errors import ErgonError


class SocketOpenedError(ErgonError, AssertionError):
    """A handler opened its own socket instead of using an injected client."""

    #: Not retried: the next attempt would open a socket again.
    final = True
    code = "not_isolated"


@contextmanager
def forbid_sockets() -> Iterator[None]:
    """Fail every handler that opens a socket in the context; raise at its end too if a handler hid the error.

    Loops, connectors and lifespans may open sockets. A socket is detected when Python's ``socket`` class creates it
    inside a handler; a client written in C, or a thread that the handler starts without its context, is not
    detected. As a fixture::

        @pytest.fixture(autouse=True)
        def no_connections():
            with forbid_sockets():
                yield
    """
    errors: list[SocketOpenedError] = []
    original_init = socket.socket.__init__

    def init(self: socket.socket, *args: Any, **kwargs: Any) -> None:
        handler_scope = scope.current()  # None outside a handler
        # A call with a descriptor opens no new socket: it is accepted, or one half of a pair.
        if handler_scope is not None and len(args) <= 3 and kwargs.get("fileno") is None:  # noqa: PLR2004 - fileno is the fourth
            error = SocketOpenedError(
                f"the {handler_scope.step} step of transaction {handler_scope.transaction_id!r} opened a socket; "
                "inject a client as a service instead"
            )
            errors.append(error)
            raise error
        original_init(self, *args, **kwargs)

    socket.socket.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        socket.socket.__init__ = original_init  # type: ignore[method-assign]
    if errors:
        raise errors[0]
