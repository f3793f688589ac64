"""The state of every provider of this process that was created without ``state_store=``.

The state is the quotas, circuit breakers, idempotency keys and recorded attempts. With a configured database it is in
PostgreSQL and shared by all processes; without one it is in the memory of this process, and a warning is logged.
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

from ergon_framework.database.extras import require_psycopg
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY

if TYPE_CHECKING:
    from ergon_framework.providers.postgres.state import PostgresProviderState

log: Final = logging.getLogger(f"{LIBRARY}.providers")

#: The variable that names the database.
DSN_VARIABLE: Final = "ERGON_POSTGRES__DSN"
_NOT_SHARED_REASON: Final = (
    "quotas, circuit breakers, idempotency keys and metrics of providers are per process; "
    f"set {DSN_VARIABLE} to share them, or pass state_store=MemoryProviderState() to keep them in this process"
)

ProcessState: TypeAlias = "MemoryProviderState | PostgresProviderState"

_lock = threading.Lock()
_dsn: str | None = None
_current: ProcessState | None = None


def process_state() -> ProcessState:
    """Return the state of every provider that was created without ``state_store=``; the first call decides its place.

    It opens no connection and starts no thread, so that a process may fork afterwards. Raises MissingExtraError if a
    database is configured and the extra ``postgres`` is not installed.
    """
    return _resolve() if _current is None else _current


def configure_database(dsn: str | None) -> None:
    """Set the database address for the providers of this process; None leaves it to the environment.

    It has an effect only before the first use of the state.
    """
    global _dsn  # noqa: PLW0603 - one process has one database
    _dsn = dsn


def close_process_state(timeout: float = 2.0) -> None:
    """Write pending metrics within *timeout* seconds and close connections; a later use opens them again."""
    if _current is not None and not isinstance(_current, MemoryProviderState):
        _current.close(timeout)


@contextmanager
def replace_process_state(state: ProcessState) -> Iterator[None]:
    """Use *state* as the state of the process inside the block; for tests."""
    global _current  # noqa: PLW0603 - restored below
    previous, _current = _current, state
    try:
        yield
    finally:
        _current = previous


def _resolve() -> ProcessState:
    global _current  # noqa: PLW0603 - decided once
    with _lock:
        if _current is None:
            _current = _create()
        return _current


def _create() -> ProcessState:
    dsn = _dsn or os.environ.get(DSN_VARIABLE)
    if not dsn:
        logs.log_event(logging.WARNING, "provider state not shared", {"reason": _NOT_SHARED_REASON}, to=log)
        return MemoryProviderState()
    require_psycopg()
    # Imported on use: the extra is optional.
    module = importlib.import_module("ergon_framework.providers.postgres.state")
    state: PostgresProviderState = module.PostgresProviderState(dsn)
    return state


def _renew_lock() -> None:
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global _lock  # noqa: PLW0603 - a lock held by a thread of the parent is never released
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
atexit.register(close_process_state)
