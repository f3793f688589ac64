"""The state of the providers that a task uses, at the start and at the end of a process that ``ergon run`` runs."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from ergon_framework.errors import ConnectionLost
from ergon_framework.providers.base import Provider
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.process_state import close_process_books, configure_database, process_books
from ergon_framework.runner.settings import Settings
from ergon_framework.telemetry import logs

if TYPE_CHECKING:
    from ergon_framework.runner.process import Runnable

_log = logging.getLogger(__name__)

#: Seconds that the metrics of providers are given at the end of a process, if it has that long.
CLOSE_SECONDS: Final = 2.0
#: Seconds of the process's last second that are left for the rest of it.
_REST_SECONDS: Final = 0.3


def open_provider_state(task: Runnable, found: Settings) -> None:
    """Prepare the state that the providers of *task* share.

    ConfigurationError if *task* uses a provider whose state is in a database without the tables of this release.
    A database that is out of reach is an error in the log only: it may come back.
    """
    configure_database(found.postgres.dsn)
    owners = [getattr(gate, "__self__", None) for gate in task.gates]
    if not any(isinstance(owner, Provider) and owner.uses_process_books for owner in owners):
        return
    books = process_books()
    if isinstance(books, MemoryBooks):
        return
    try:
        books.open()
    except ConnectionLost as error:
        logs.say(logging.ERROR, "provider state unavailable", {"task": task.name, "error": str(error)}, to=_log)


def close_provider_state(deadline: float) -> None:
    """Write the metrics that wait, as far as there is time before the process must be gone."""
    seconds = min(CLOSE_SECONDS, deadline - time.monotonic() - _REST_SECONDS)
    if seconds > 0:
        close_process_books(seconds)
