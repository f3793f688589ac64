"""Database connections on which no wait for an answer of the server exceeds a timeout.

The timeout applies to each wait after connecting. Connecting has the timeout of the address, or that of
``connect_options``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from ergon_framework.database.address import connect_options, find_login
from ergon_framework.database.connection import DeadlineConnection, open_connection
from ergon_framework.database.errors import ServerTimeout, translate_error


class TimeoutConnection(DeadlineConnection):
    """A connection that stops waiting for an answer after *answer_timeout* seconds, and is closed then."""

    answer_timeout: float = 30.0

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        self.deadline = time.monotonic() + self.answer_timeout
        try:
            return super().wait(gen, *args, **options)
        except ServerTimeout:
            self.close()
            raise


def connect(dsn: str, *, answer_timeout: float) -> TimeoutConnection:
    """Open a connection to *dsn* without prepared statements, because a pooler may be in between."""
    options = connect_options(dsn)
    settings = {**options, "autocommit": True, "prepare_threshold": None}
    conn = open_connection(TimeoutConnection.connect, settings, find_login(options))
    conn.answer_timeout = answer_timeout
    return conn


@contextmanager
def connection(dsn: str, *, answer_timeout: float) -> Iterator[TimeoutConnection]:
    """Open a connection for one block; the driver's errors are translated."""
    try:
        with connect(dsn, answer_timeout=answer_timeout) as conn:
            yield conn
    except psycopg.Error as error:
        # Without the cause, which quotes the statement. is_broken classifies the error as temporary: a server that
        # starts, stops or lacks resources rejects statements that it accepts later.
        raise translate_error(error, is_broken=True) from None
