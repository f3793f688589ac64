"""Journalling: what became of each transaction, for the journal of the database, where it is switched on."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ergon_framework.errors import ConfigurationError, ErgonError, MissingExtraError
from ergon_framework.runner.settings import Settings
from ergon_framework.task.report import Outcome
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import Field
from ergon_framework.telemetry.options import options_of
from ergon_framework.telemetry.redaction import message

if TYPE_CHECKING:
    from ergon_framework.connectors.postgres.journal import Journal
    from ergon_framework.runner.process import Runnable

_log = logging.getLogger(__name__)

#: How many failed attempts of one stay are kept: as many as travel with a transaction.
TRIES: Final = 10
#: Seconds that the journal is given at the end of a process, if it has that long.
LAST: Final = 5.0
#: What of the process's last second is left for the rest of it.
_REST: Final = 0.3


class Journalling:
    """Hands outcomes to a journal; without one it does nothing."""

    def __init__(self, journal: Journal | None = None, entry: Callable[[Outcome], Any] | None = None) -> None:
        self._journal = journal
        self._entry = entry

    @property
    def on_outcome(self) -> Callable[[Outcome], None] | None:
        """What the loop is to call; None saves it the call."""
        return None if self._journal is None else self._note

    def finish(self, deadline: float) -> None:
        """Write the rest, as far as there is time before the process must be gone."""
        if self._journal is not None:
            self._journal.stop(min(LAST, deadline - time.monotonic() - _REST))

    def _note(self, outcome: Outcome) -> None:
        if self._journal is not None and self._entry is not None:
            self._journal.note(self._entry(outcome))


def check(found: Settings) -> None:
    """ConfigurationError where a journal is switched on and no database is named to write it to."""
    if found.run.journal.on and not found.postgres.dsn:
        raise ConfigurationError("run.journal.on needs a database to write to; set ERGON_POSTGRES__DSN")


@contextmanager
def journalled(task: Runnable, found: Settings) -> Iterator[Journalling]:
    """The journal of *task*'s outcomes, if it is switched on."""
    rules = found.run.journal
    if not rules.on:
        yield Journalling()
        return
    try:
        # Loaded when it is needed: who works on another broker may name a database without its library.
        module = importlib.import_module("ergon_framework.connectors.postgres.journal")
    except MissingExtraError as error:
        logs.say(logging.WARNING, "journal unwritten", {"task": task.name, "error": str(error)}, to=_log)
        yield Journalling()
        return
    journal = module.Journal(
        found.postgres.dsn,
        task=task.name,
        queue=task.connector.name,
        worker=f"{socket.gethostname()[:200]}:{os.getpid()}",
        keep=86_400 * rules.days,
        room=rules.room,
    ).start()
    hook = options_of(task).redact

    def said(error: ErgonError | None) -> str | None:
        return None if error is None else message(hook, Field.ERROR, error)

    def entry(outcome: Outcome) -> Any:
        transaction, error = outcome.transaction, outcome.error
        return module.Entry(
            at=time.time(),
            transaction_id=transaction.id,
            correlation=transaction.correlation,
            tenant=transaction.tenant,
            outcome=outcome.kind.value,
            category=None if error is None else error.category.value,
            code=None if error is None else error.code,
            reason=outcome.reason,
            error=said(error),
            attempts=outcome.attempts,
            seconds=sum(outcome.durations.values()),
            tries=[
                {
                    "step": past.step,
                    "attempt": past.attempt,
                    "category": past.error.category.value,
                    "code": past.error.code,
                    "error": said(past.error),
                    "at": past.at,
                    "delay": past.delay,
                }
                for past in outcome.notes[-TRIES:]
            ]
            or None,
        )

    try:
        yield Journalling(journal, entry)
    finally:
        journal.stop(0.0)
