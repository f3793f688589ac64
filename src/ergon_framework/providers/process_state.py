"""The state of every provider of this process that was created without ``books=``.

With a database configured it is in PostgreSQL and shared by all processes; without one it is in the memory of this
process, and a warning says so.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.schema.libraries import needed
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY

if TYPE_CHECKING:
    from ergon_framework.providers.sql.books import PostgresBooks

log: Final = logging.getLogger(f"{LIBRARY}.providers")

#: The variable that names the database.
DSN_VARIABLE: Final = "ERGON_POSTGRES__DSN"
_NOT_SHARED: Final = (
    "quotas, circuit breakers, idempotency keys and metrics of providers are per process; "
    f"set {DSN_VARIABLE} to share them, or pass books=MemoryBooks() to keep them in this process"
)

ProcessBooks: TypeAlias = "MemoryBooks | PostgresBooks"

_lock = threading.Lock()
_dsn: str | None = None
_current: ProcessBooks | None = None


def process_books() -> ProcessBooks:
    """Return the state of every provider that was created without ``books=``; the first call decides where it is.

    It opens no connection and starts no thread, so that a process may fork afterwards. MissingExtraError if a database
    is configured and the extra ``postgres`` is not installed.
    """
    return _resolve() if _current is None else _current


def configure_database(dsn: str | None) -> None:
    """Name the database for the providers of this process; None leaves it to the environment.

    It has an effect before the first use of the state only.
    """
    global _dsn  # noqa: PLW0603 - one process has one database
    _dsn = dsn


def close_process_books(timeout: float = 2.0) -> None:
    """Write the metrics that wait, within *timeout* seconds, and close connections; a later use opens them again."""
    if _current is not None and not isinstance(_current, MemoryBooks):
        _current.close(timeout)


@contextmanager
def replace_process_books(books: ProcessBooks) -> Iterator[None]:
    """Use *books* as the state of the process inside the block; for tests."""
    global _current  # noqa: PLW0603 - restored below
    before, _current = _current, books
    try:
        yield
    finally:
        _current = before


def _resolve() -> ProcessBooks:
    global _current  # noqa: PLW0603 - decided once
    with _lock:
        if _current is None:
            _current = _create()
        return _current


def _create() -> ProcessBooks:
    dsn = _dsn or os.environ.get(DSN_VARIABLE)
    if not dsn:
        logs.say(logging.WARNING, "provider state not shared", {"reason": _NOT_SHARED}, to=log)
        return MemoryBooks()
    needed()
    # Imported when it is needed: the extra is optional.
    module = importlib.import_module("ergon_framework.providers.sql.books")
    books: PostgresBooks = module.PostgresBooks(dsn)
    return books


def _renew_lock() -> None:
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global _lock  # noqa: PLW0603 - see above
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
atexit.register(close_process_books)
