"""Restart a streaming loop that ends with an error: whether it is restarted, and after which delay."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import Any

from ergon_framework.connectors.outage import ConnectorOutage
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.failure import describe_error
from ergon_framework.runner.settings import RestartSettings
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.telemetry.options import get_options
from ergon_framework.telemetry.redaction import mask_credentials
from ergon_framework.worker.exceptions import LoopTimeout
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
from ergon_framework.worker.report import Report

log = logging.getLogger(f"{LIBRARY}.runner")


class LoopRestart:
    """Decides whether a task is opened again after an error, and after which delay.

    Only a streaming consumer is. A lost connection while it opens is retried under its policy for fetches, without a
    limit: a worker that is started while its server is down begins when the server is back. Another error ends the
    loop, which is restarted with the backoff of *settings*, also without a limit, unless no other task of the process
    runs (*is_last*): then its quick ends are limited as those of a process are. Any other task fails at once, so that
    its caller sees the error.
    """

    def __init__(
        self,
        task: Any,
        policy: ConsumerPolicy | ProducerPolicy,
        settings: RestartSettings,
        *,
        is_last: Callable[[], bool],
    ) -> None:
        self._task = task
        self._settings = settings
        self._is_last = is_last
        self._open_retry = (
            policy.steps.fetch.retry if isinstance(policy, ConsumerPolicy) and policy.loop.streaming else None
        )
        self._open_attempts = 0
        #: Whether the task was opened, so that an error is one of its loop.
        self.is_open = False
        self._opened_at = 0.0
        self._quick_ends = 0
        #: Why the loop does not run, for probes.
        self.reason: str | None = None

    def note_start(self) -> None:
        """Note that the task begins to open."""
        self.is_open = False
        self._opened_at = time.monotonic()

    def note_open(self) -> None:
        """Note that the task is open and its loop begins."""
        self.is_open = True
        self._open_attempts = 0
        self.reason = None

    def can_follow(self, error: BaseException) -> bool:
        """Return whether the task may be opened again after *error*."""
        return (
            self._open_retry is not None
            and isinstance(error, Exception)
            and not isinstance(error, ConfigurationError | LoopTimeout)
        )

    def delay(self, error: Exception, report: Report | None) -> float:
        """Return the seconds until the task is opened again; raise *error* if it is not."""
        if self._open_retry is None or not self.can_follow(error):
            raise error
        if isinstance(error, ConnectionLostError) and not self.is_open:
            ConnectorOutage(self._task.connector).note_failure(error, began=time.monotonic())
            self.reason = f"the connector cannot be opened: {type(error).__name__}: {describe_error(error)}"
            seconds = max(self._open_retry.delay(self._open_attempts, random.random), error.retry_after or 0.0)
            self._open_attempts += 1
            return seconds
        has_worked = report is not None and report.started > 0
        is_quick = time.monotonic() - self._opened_at < self._settings.stable_after and not has_worked
        self._quick_ends = self._quick_ends + 1 if is_quick else 0
        if self._quick_ends >= self._settings.attempts and self._is_last():
            raise error
        seconds = self._settings.delay(max(0, self._quick_ends - 1))
        self.reason = f"the loop ended and is restarted: {type(error).__name__}: {describe_error(error)}"
        self._record(error, seconds)
        return seconds

    def _record(self, error: Exception, seconds: float) -> None:
        registry = get_registry(get_options(self._task).meter_provider)
        # Closing metrics adds their counters to the totals of the process.
        counts = registry.new_loop_metrics(self._task.name, steps=(), success_steps=("", ""))
        counts.add(names.LOOPS_RESTARTED)
        registry.open(counts)
        registry.close(counts)
        fields = {
            Field.TASK: self._task.name,
            Field.DELAY: seconds,
            Field.ERROR: mask_credentials(describe_error(error)),
            Field.ERROR_TYPE: type(error).__name__,
        }
        logs.log_event(logging.ERROR, Event.LOOP_RESTARTED, fields, to=log)
