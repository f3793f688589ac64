"""Isolation: a handler is given its connections; one that opens its own is found out here."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ergon_framework import scope
from ergon_framework.errors import ErgonError


class NotIsolatedError(ErgonError, AssertionError):
    """A handler opened a socket of its own instead of using what was injected."""

    final = True
    code = "not_isolated"


@contextmanager
def isolated() -> Iterator[None]:
    """Fail every handler that opens a socket in here, and raise at the end if one did, even if it hid the error.

    Loops, connectors and lifespans may open what they like. A socket is noticed when Python's
    ``socket`` class makes it below a handler; a client written in C, or a thread that the handler
    starts without its context, is not. As a fixture::

        @pytest.fixture(autouse=True)
        def no_connections():
            with isolated():
                yield
    """
    seen: list[NotIsolatedError] = []
    made = socket.socket.__init__

    def init(self: socket.socket, *args: Any, **kwargs: Any) -> None:
        where = scope.current()
        # With a descriptor it is no new one: accepted, or one half of a pair.
        if where is not None and len(args) <= 3 and kwargs.get("fileno") is None:  # noqa: PLR2004 - fileno is the fourth
            error = NotIsolatedError(
                f"the {where.step} step of transaction {where.transaction_id!r} opened a socket; "
                "inject a client as a service instead"
            )
            seen.append(error)
            raise error
        made(self, *args, **kwargs)

    socket.socket.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        socket.socket.__init__ = made  # type: ignore[method-assign]
    if seen:
        raise seen[0]
