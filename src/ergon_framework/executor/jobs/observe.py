"""What is seen of jobs beside what is seen of every consumer: attempts, cron, and what could not be written."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final

from ergon_framework.failure import describe
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import Bound, Counts, registry_of
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.executor")


class Ended(StrEnum):
    """How an attempt at a job ended."""

    SUCCEEDED = "succeeded"
    RETRIED = "retried"
    FAILED = "failed"
    KILLED = "killed"
    #: It does not count: nothing was sent, or it was interrupted for somebody else's sake.
    GIVEN_BACK = "given_back"
    #: The claim was gone, so that nothing was written.
    STALE = "stale"


class Tick(StrEnum):
    """What became of a scheduled time of a cron entry."""

    FIRED = "fired"
    #: It had its job before.
    REPEATED = "repeated"


class Tally(Counts):
    """What the orchestrators of one kind count in this process; each of them on its own event loop."""

    def __init__(self, task: str, *, bound: Bound) -> None:
        super().__init__(task, steps=(), everyday=("", ""), bound=bound)

    def ended(self, how: Ended) -> None:
        self.add(names.JOBS, how.value)

    def ticked(self, what: Tick, amount: int) -> None:
        if amount:
            self.add(names.CRON_TICKS, what.value, amount=amount)


_lock: Final = threading.Lock()
_tallies: Final[dict[str, Tally]] = {}


def tally_of(task: str) -> Tally:
    """The one tally of all tasks of that name in this process."""
    with _lock:
        found = _tallies.get(task)
        if found is None:
            found = _tallies[task] = registry_of().join(Tally, task)
        return found


def stale(task: str, job_id: str) -> None:
    """Somebody else has the job by now."""
    logs.say(logging.WARNING, Event.JOB_STALE, {Field.TASK: task, Field.TRANSACTION_ID: job_id}, to=log)


def killed(task: str, job_id: str) -> None:
    """The executor of a job is being ended because somebody asked for it."""
    logs.say(logging.INFO, Event.JOB_KILLED, {Field.TASK: task, Field.TRANSACTION_ID: job_id}, to=log)


def unwritten(task: str, error: Exception) -> None:
    """The database cannot be asked or told about jobs; it is tried again."""
    told: dict[str, Any] = {Field.TASK: task, Field.ERROR_TYPE: type(error).__name__}
    logs.say(logging.WARNING, Event.JOBS_UNWRITTEN, told, to=log)


def log_unknown_executor(task: str, job_id: str, message: str) -> None:
    """Log that a job has become a dead letter because no orchestrator serves its executor."""
    fields: dict[str, Any] = {Field.TASK: task, Field.TRANSACTION_ID: job_id, Field.ERROR: message}
    tally_of(task).ended(Ended.FAILED)
    logs.say(logging.WARNING, Event.EXECUTOR_UNKNOWN, fields, to=log)


def log_registration_failed(task: str, error: Exception) -> None:
    """Log that the executors of an orchestrator cannot be registered at present; it tries again."""
    fields: dict[str, Any] = {Field.TASK: task, Field.ERROR: describe(error), Field.ERROR_TYPE: type(error).__name__}
    logs.say(logging.WARNING, Event.REGISTRATION_FAILED, fields, to=log)


def missed(task: str, name: str, *, submitted: int) -> None:
    """Times of a cron entry had passed for longer than its grace; its policy has said what to do about them."""
    logs.say(logging.WARNING, Event.CRON_MISSED, {Field.TASK: task, Field.CRON: name, Field.ROWS: submitted}, to=log)


def unfired(task: str, error: Exception, entries: Iterable[str]) -> None:
    """Cron entries that are due cannot be fired from here at present; it is tried again."""
    told: dict[str, Any] = {Field.TASK: task, Field.CRON: ", ".join(sorted(entries)), Field.ERROR: describe(error)}
    told[Field.ERROR_TYPE] = type(error).__name__
    logs.say(logging.WARNING, Event.CRON_UNFIRED, told, to=log)
