"""Pausing: an operator's word for the whole fleet, as a gate of the loop that runs here."""

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
from ergon_framework.task.loops import loops_of
from ergon_framework.telemetry import logs

if TYPE_CHECKING:
    from ergon_framework.connectors.postgres.pauses import PauseWatch
    from ergon_framework.runner.process import Runnable

_log = logging.getLogger(__name__)

#: Seconds that a loop waits at its beginning to learn whether it is paused; of these it says nothing about the first.
PATIENCE: Final = 5.0
_QUIET: Final = 1.0
#: How often the loop asks while it is paused, and before anything is known.
_ASK: Final = 0.5
_SOON: Final = 0.05
#: Seconds that the watch is given to sign off; whoever waits for the end of this process waits for it too.
_LEAVE: Final = 0.2


@contextmanager
def pausable(task: Runnable, found: Settings) -> Iterator[tuple[Gate, ...]]:
    """The gates through which operators may hold *task* back; none where no database is named to hear them by."""
    dsn = found.postgres.dsn
    if not dsn or not found.run.pausable:
        yield ()
        return
    try:
        # Loaded when it is needed: who works on another broker may name a database without its library.
        pauses = importlib.import_module("ergon_framework.connectors.postgres.pauses")
    except MissingExtraError as error:
        logs.say(logging.WARNING, "pauses unheard", {"task": task.name, "error": str(error)}, to=_log)
        yield ()
        return
    loops = loops_of(task)
    watch: PauseWatch = pauses.PauseWatch(
        dsn, task=task.name, queue=task.connector.name, in_hand=lambda: loops.in_hand, changed=loops.wake
    )
    watch.start()
    try:
        # Nearly always known within milliseconds: not worth a warning about a pause that nobody asked for.
        watch.wait(_QUIET)
        yield (PauseGate(watch),)
    finally:
        watch.stop(_LEAVE)


class PauseGate:
    """Holds the loop while its task or queue is paused, and at first until that is known, or *patience* is over."""

    def __init__(self, watch: PauseWatch, patience: float = PATIENCE) -> None:
        self._watch = watch
        self._until = time.monotonic() + patience

    def __call__(self) -> Pause | None:
        reason = self._watch.reason
        # Asked before every fetch, and so never during one: from here on nothing new comes in.
        self._watch.held = reason is not None
        if reason is not None:
            return Pause(reason, _ASK)
        if not self._watch.known and time.monotonic() < self._until:
            return Pause("it is not known yet whether this task is paused", _SOON)
        return None
