"""The state of the providers that a task uses, opened and closed with a process of ``ergon run``.

A provider is a third-party API; its state (quotas, circuit breakers, idempotency keys) is shared by all processes if it
is in a database.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

from ergon_framework.errors import ConnectionLostError
from ergon_framework.providers.base import Provider
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.process_state import close_process_state, configure_database, process_state
from ergon_framework.runner.settings import Settings
from ergon_framework.telemetry import logs

if TYPE_CHECKING:
    from ergon_framework.runner.task_runner import Runnable

_log = logging.getLogger(__name__)

#: Maximum seconds for writing the metrics of providers at the end of a process.
CLOSE_SECONDS: Final = 2.0
#: Seconds of the process's last second that are reserved for the rest of its exit.
_REST_SECONDS: Final = 0.3


def open_provider_state(task: Runnable, settings: Settings) -> None:
    """Prepare the state that the providers of *task* share.

    Raises ConfigurationError if *task* uses a provider whose state is in a database without the tables of this release.
    An unavailable database is only logged as an error: it may become available again.
    """
    configure_database(settings.postgres.dsn)
    owners = [getattr(gate, "__self__", None) for gate in task.gates]
    if not any(isinstance(owner, Provider) and owner.uses_process_state for owner in owners):
        return
    provider_state = process_state()
    if isinstance(provider_state, MemoryProviderState):
        return
    try:
        provider_state.open()
    except ConnectionLostError as error:
        logs.log_event(logging.ERROR, "provider state unavailable", {"task": task.name, "error": str(error)}, to=_log)


def close_provider_state(deadline: float) -> None:
    """Write pending metrics, within the time before the process must exit."""
    seconds = min(CLOSE_SECONDS, deadline - time.monotonic() - _REST_SECONDS)
    if seconds > 0:
        close_process_state(seconds)
