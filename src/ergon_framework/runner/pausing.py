"""Pause by operators for all processes, as a gate of the local loop."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from ergon_framework.errors import MissingExtraError
from ergon_framework.runner.settings import Settings
from ergon_framework.task.gates import Gate, Pause
from ergon_framework.task.loops import running_loops
from ergon_framework.telemetry import logs

if TYPE_CHECKING:
    from ergon_framework.connectors.postgres.pauses import PauseWatcher
    from ergon_framework.runner.process import Runnable

_log = logging.getLogger(__name__)

#: Maximum seconds that a loop waits at its start for its pause state; the first of them are not logged.
STATE_TIMEOUT_SECONDS: Final = 5.0
_QUIET_WAIT_SECONDS: Final = 1.0
#: Seconds between two checks while the loop is paused, and before the state is known.
_PAUSED_CHECK_SECONDS: Final = 0.5
_UNKNOWN_CHECK_SECONDS: Final = 0.05
#: Maximum seconds for the watcher to deregister; the exit of this process waits for it.
_STOP_TIMEOUT_SECONDS: Final = 0.2


@contextmanager
def pause_gates(task: Runnable, settings: Settings) -> Iterator[tuple[Gate, ...]]:
    """Open the gates through which operators pause *task*; none if no database is configured."""
    dsn = settings.postgres.dsn
    if not dsn or not settings.run.pausable:
        yield ()
        return
    try:
        # Imported on demand: users of another broker may configure a database without its library.
        pauses = importlib.import_module("ergon_framework.connectors.postgres.pauses")
    except MissingExtraError as error:
        logs.log_event(logging.WARNING, "pauses unheard", {"task": task.name, "error": str(error)}, to=_log)
        yield ()
        return
    loops = running_loops(task)
    watch: PauseWatcher = pauses.PauseWatcher(
        dsn, task=task.name, queue=task.connector.name, in_flight=lambda: loops.in_flight, on_change=loops.wake
    )
    watch.start()
    try:
        # The state is nearly always known within milliseconds: no warning about a pause that does not exist.
        watch.wait(_QUIET_WAIT_SECONDS)
        yield (PauseGate(watch),)
    finally:
        watch.stop(_STOP_TIMEOUT_SECONDS)


class PauseGate:
    """Pauses the loop while its task or queue is paused, and at first until that is known or *timeout* is over."""

    def __init__(self, watch: PauseWatcher, timeout: float = STATE_TIMEOUT_SECONDS) -> None:
        self._watch = watch
        self._deadline = time.monotonic() + timeout

    def __call__(self) -> Pause | None:
        reason = self._watch.reason
        # Called before every fetch, and so never during one: no new work arrives after this.
        self._watch.is_applied = reason is not None
        if reason is not None:
            return Pause(reason, _PAUSED_CHECK_SECONDS)
        if not self._watch.initialized and time.monotonic() < self._deadline:
            return Pause("it is not known yet whether this task is paused", _UNKNOWN_CHECK_SECONDS)
        return None
