"""Services of a process that use the database: the journal of outcomes, and pauses by operators.

Both are optional. The journal records the outcome of each transaction; an operator's pause applies to all processes,
in each as a gate of its loop. A gate is a function that the loop calls before every fetch; while it returns a pause,
nothing is fetched. A PauseWatcher reads the pauses from the database on its own thread: ``reason`` is that of the
present pause, ``initialized`` becomes true when the state was read for the first time, and the watcher publishes
``is_applied``, so that operators see which processes have stopped fetching.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from ergon_framework.database.extras import require_psycopg
from ergon_framework.errors import ConfigurationError, ErgonError, MissingExtraError
from ergon_framework.gates import Gate, Pause
from ergon_framework.runner.settings import Settings
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import Field
from ergon_framework.telemetry.options import get_options
from ergon_framework.telemetry.redaction import redacted_message
from ergon_framework.worker.report import Outcome
from ergon_framework.worker.running import running_loops

if TYPE_CHECKING:
    from ergon_framework.connectors.postgres.journal import Journal
    from ergon_framework.connectors.postgres.pauses import PauseWatcher
    from ergon_framework.runner.task_runner import Runnable


_log = logging.getLogger(__name__)

#: Maximum number of failed attempts in one journal entry: as many as a message stores.
MAX_RECORDED_ATTEMPTS: Final = 10
#: Maximum seconds for the journal's last writes at the end of a process.
WRITE_TIMEOUT_SECONDS: Final = 5.0
#: Seconds before the deadline of the process that the last writes of the journal leave to the rest of its exit.
_EXIT_RESERVE_SECONDS: Final = 0.3


class JournalRecorder:
    """Passes outcomes to a journal; without one it does nothing."""

    def __init__(self, journal: Journal | None = None, to_entry: Callable[[Outcome], Any] | None = None) -> None:
        self._journal = journal
        self._to_entry = to_entry

    @property
    def on_outcome(self) -> Callable[[Outcome], None] | None:
        """The callback for the loop; None avoids the call."""
        return None if self._journal is None else self._record

    def finish(self, deadline: float) -> None:
        """Write the rest, within the time before the process must exit."""
        if self._journal is not None:
            self._journal.stop(min(WRITE_TIMEOUT_SECONDS, deadline - time.monotonic() - _EXIT_RESERVE_SECONDS))

    def _record(self, outcome: Outcome) -> None:
        if self._journal is not None and self._to_entry is not None:
            self._journal.record(self._to_entry(outcome))


def check_journal_settings(settings: Settings) -> None:
    """Raise ConfigurationError if a journal is enabled without a database."""
    if settings.run.journal.enabled and not settings.postgres.dsn:
        raise ConfigurationError("run.journal.enabled needs a database to write to; set ERGON_POSTGRES__DSN")


@contextmanager
def journals_for(tasks: Sequence[Runnable], settings: Settings) -> Iterator[list[JournalRecorder]]:
    """Open the journal of the outcomes of each task, if it is enabled."""
    with ExitStack() as stack:
        yield [stack.enter_context(_journal_for(task, settings)) for task in tasks]


@contextmanager
def _journal_for(task: Runnable, settings: Settings) -> Iterator[JournalRecorder]:
    """Open the journal of *task*'s outcomes, if it is enabled."""
    journal_settings = settings.run.journal
    if not journal_settings.enabled:
        yield JournalRecorder()
        return
    try:
        # Imported on demand: users of another broker may configure a database without its library.
        require_psycopg()
        module = importlib.import_module("ergon_framework.connectors.postgres.journal")
    except MissingExtraError as error:
        logs.log_event(logging.WARNING, "journal unavailable", {"task": task.name, "error": str(error)}, to=_log)
        yield JournalRecorder()
        return
    journal = module.Journal(
        settings.postgres.dsn,
        task=task.name,
        queue=task.connector.name,
        worker=f"{socket.gethostname()[:200]}:{os.getpid()}",
        retention_seconds=86_400 * journal_settings.days,
        capacity=journal_settings.max_buffered,
    ).start()
    hook = get_options(task).redact

    def redact(error: ErgonError | None) -> str | None:
        return None if error is None else redacted_message(hook, Field.ERROR, error)

    def to_entry(outcome: Outcome) -> Any:
        transaction, error = outcome.transaction, outcome.error
        return module.JournalEntry(
            at=time.time(),
            transaction_id=transaction.id,
            correlation=transaction.correlation,
            tenant=transaction.tenant,
            outcome=outcome.kind.value,
            category=None if error is None else error.category.value,
            code=None if error is None else error.code,
            reason=outcome.reason,
            error=redact(error),
            attempts=outcome.attempts,
            seconds=sum(outcome.durations.values()),
            tries=[
                {
                    "step": failed_attempt.step,
                    "attempt": failed_attempt.attempt,
                    "category": failed_attempt.error.category.value,
                    "code": failed_attempt.error.code,
                    "error": redact(failed_attempt.error),
                    "at": failed_attempt.occurred_at,
                    "delay": failed_attempt.delay,
                }
                for failed_attempt in outcome.failed_attempts[-MAX_RECORDED_ATTEMPTS:]
            ]
            or None,
        )

    try:
        yield JournalRecorder(journal, to_entry)
    finally:
        journal.stop(0.0)


# -- pauses -----------------------------------------------------------------------------------------

#: Maximum seconds that a loop waits at its start for its pause state; the first of them are not logged.
STATE_TIMEOUT_SECONDS: Final = 5.0
_QUIET_WAIT_SECONDS: Final = 1.0
#: Seconds between two checks while the loop is paused, and before the state is known.
_PAUSED_CHECK_SECONDS: Final = 0.5
_UNKNOWN_CHECK_SECONDS: Final = 0.05
#: Maximum seconds for the watcher to deregister; the exit of this process waits for it.
_STOP_TIMEOUT_SECONDS: Final = 0.2


@contextmanager
def pause_gates(tasks: Sequence[Runnable], settings: Settings) -> Iterator[list[tuple[Gate, ...]]]:
    """Open the gates through which operators pause *tasks*, for each task; none if no database is configured."""
    dsn = settings.postgres.dsn
    if not dsn or not settings.run.pausable:
        yield [()] * len(tasks)
        return
    try:
        # Imported on demand: users of another broker may configure a database without its library.
        require_psycopg()
        pauses = importlib.import_module("ergon_framework.connectors.postgres.pauses")
    except MissingExtraError as error:
        fields = {"task": _join_names(tasks), "error": str(error)}
        logs.log_event(logging.WARNING, "pause channel unavailable", fields, to=_log)
        yield [()] * len(tasks)
        return
    watchers = [_create_watcher(pauses, dsn, task).start() for task in tasks]
    try:
        # The state is nearly always known within milliseconds: no warning about a pause that does not exist.
        known_by = time.monotonic() + _QUIET_WAIT_SECONDS
        for watcher in watchers:
            watcher.wait(max(0.0, known_by - time.monotonic()))
        yield [(PauseGate(watcher),) for watcher in watchers]
    finally:
        # All are told first, so that they deregister at the same time.
        for watcher in watchers:
            watcher.stop(0.0)
        stopped_by = time.monotonic() + _STOP_TIMEOUT_SECONDS
        for watcher in watchers:
            watcher.stop(max(0.0, stopped_by - time.monotonic()))


def _create_watcher(pauses: Any, dsn: str, task: Runnable) -> PauseWatcher:
    loops = running_loops(task)
    watcher: PauseWatcher = pauses.PauseWatcher(
        dsn, task=task.name, queue=task.connector.name, in_flight=lambda: loops.in_flight, on_change=loops.wake
    )
    return watcher


def _join_names(tasks: Sequence[Runnable]) -> str:
    return ", ".join(task.name for task in tasks)


class PauseGate:
    """Pauses the loop while its task or queue is paused, and at first until that is known or *timeout* is over."""

    def __init__(self, watch: PauseWatcher, timeout: float = STATE_TIMEOUT_SECONDS) -> None:
        self._watch = watch
        self._deadline = time.monotonic() + timeout

    def __call__(self) -> Pause | None:
        reason = self._watch.reason
        # Called before every fetch, and so never during one: no work arrives from now on, and operators are told so.
        self._watch.is_applied = reason is not None
        if reason is not None:
            return Pause(reason, _PAUSED_CHECK_SECONDS)
        if not self._watch.initialized and time.monotonic() < self._deadline:
            return Pause("it is not known yet whether this task is paused", _UNKNOWN_CHECK_SECONDS)
        return None
