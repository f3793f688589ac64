"""Metrics and log records of jobs in addition to those of every consumer: attempts, cron, and failed writes.

A job is a stored call of a handler. An orchestrator is the task that sends the jobs of one kind, that is of one
language, to its executors, which are processes; and submits the jobs of cron entries at their scheduled times. All
orchestrators of one task name in a process share one JobMetrics.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final

from ergon_framework.failure import describe_error
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import LabelLimiter, LoopMetrics, get_registry
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.jobs")


class AttemptOutcome(StrEnum):
    """How an attempt at a job ended."""

    SUCCEEDED = "succeeded"
    RETRIED = "retried"
    FAILED = "failed"
    KILLED = "killed"
    #: It does not count: nothing was sent to an executor, or another job made its executor exit.
    RELEASED = "released"
    #: Another worker had taken over the job, so the store rejected the outcome.
    STALE = "stale"


class CronTickResult(StrEnum):
    """The result of a scheduled time of a cron entry."""

    FIRED = "fired"
    #: Its job was already submitted, for example by another process.
    REPEATED = "repeated"


class JobMetrics(LoopMetrics):
    """The metrics of the orchestrators of one task name in this process."""

    def __init__(self, task: str, *, label_limiter: LabelLimiter) -> None:
        # A job has no steps; those of its delivery are in the metrics of the consume loop.
        super().__init__(task, steps=(), success_steps=("", ""), label_limiter=label_limiter)

    def record_attempt(self, outcome: AttemptOutcome) -> None:
        self.add(names.JOBS, outcome.value)

    def record_tick(self, result: CronTickResult, amount: int) -> None:
        if amount:
            self.add(names.CRON_TICKS, result.value, amount=amount)


_lock: Final = threading.Lock()
_metrics_by_task: Final[dict[str, JobMetrics]] = {}


def job_metrics(task: str) -> JobMetrics:
    """Return the metrics that all tasks of this name share in this process."""
    with _lock:
        metrics = _metrics_by_task.get(task)
        if metrics is None:
            metrics = _metrics_by_task[task] = get_registry().register(JobMetrics, task)
        return metrics


def log_stale_claim(task: str, job_id: str) -> None:
    """Log that the claim on a job is lost and another worker has the job."""
    logs.log_event(logging.WARNING, Event.JOB_STALE, {Field.TASK: task, Field.TRANSACTION_ID: job_id}, to=log)


def log_killed(task: str, job_id: str) -> None:
    """Log that the executor of a job is being ended by a kill request."""
    logs.log_event(logging.INFO, Event.JOB_KILLED, {Field.TASK: task, Field.TRANSACTION_ID: job_id}, to=log)


def log_write_failed(task: str, error: Exception) -> None:
    """Log that the database is unavailable for jobs or rejects a write; the call is retried."""
    fields: dict[str, Any] = {
        Field.TASK: task,
        Field.ERROR: describe_error(error),
        Field.ERROR_TYPE: type(error).__name__,
    }
    logs.log_event(logging.WARNING, Event.JOB_STORE_UNAVAILABLE, fields, to=log)


def record_unknown_executor(task: str, job_id: str, message: str) -> None:
    """Count and log a job that has become a dead letter because no orchestrator serves its executor."""
    fields: dict[str, Any] = {Field.TASK: task, Field.TRANSACTION_ID: job_id, Field.ERROR: message}
    job_metrics(task).record_attempt(AttemptOutcome.FAILED)
    logs.log_event(logging.WARNING, Event.EXECUTOR_UNKNOWN, fields, to=log)


def log_registration_failed(task: str, error: Exception) -> None:
    """Log that the executors of an orchestrator cannot be registered at present; it tries again."""
    fields: dict[str, Any] = {
        Field.TASK: task,
        Field.ERROR: describe_error(error),
        Field.ERROR_TYPE: type(error).__name__,
    }
    logs.log_event(logging.WARNING, Event.REGISTRATION_FAILED, fields, to=log)


def log_misfire(task: str, name: str, *, submitted: int) -> None:
    """Log that scheduled times of a cron entry exceeded its grace; its misfire policy *submitted* that many jobs."""
    logs.log_event(
        logging.WARNING, Event.CRON_MISSED, {Field.TASK: task, Field.CRON: name, Field.ROWS: submitted}, to=log
    )


def log_cron_failed(task: str, error: Exception, entries: Iterable[str]) -> None:
    """Log that due cron entries cannot be fired by this process at present; it retries."""
    fields: dict[str, Any] = {
        Field.TASK: task,
        Field.CRON: ", ".join(sorted(entries)),
        Field.ERROR: describe_error(error),
    }
    fields[Field.ERROR_TYPE] = type(error).__name__
    logs.log_event(logging.WARNING, Event.CRON_NOT_FIRED, fields, to=log)
