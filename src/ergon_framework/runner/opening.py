"""Retry the opening of a streaming worker whose server is unavailable at its start."""

from __future__ import annotations

import random
import time
from threading import Event
from typing import Any

from ergon_framework.connectors.outage import outage_log
from ergon_framework.errors import ConnectionLostError
from ergon_framework.failure import describe_error
from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy


class OpenRetry:
    """Decides whether an attempt to open *task* is repeated, and after which delay; stop() is thread-safe."""

    def __init__(self, task: Any, policy: ConsumerPolicy | ProducerPolicy) -> None:
        self._task = task
        self._retry = policy.steps.fetch.retry if isinstance(policy, ConsumerPolicy) and policy.loop.streaming else None
        self._attempts = 0
        self._is_open = False
        self._stopped = Event()
        #: Why the task is not open yet, for probes.
        self.not_open_reason: str | None = None

    def note_success(self) -> None:
        """Note that the task is open: later errors are not startup errors."""
        self._is_open = True
        self.not_open_reason = None

    def note_failure(self, error: ConnectionLostError) -> float:
        """Return the seconds until the next attempt; raise *error* if it is not a startup error that can be retried."""
        if self._retry is None or self._is_open:
            raise error
        connector = self._task.connector
        outage_log(connector.name, connector.server_address).note_failure(error, began=time.monotonic())
        self.not_open_reason = f"the connector cannot be opened: {type(error).__name__}: {describe_error(error)}"
        delay = max(self._retry.delay(self._attempts, random.random), error.retry_after or 0.0)
        self._attempts += 1
        return delay

    def wait(self, seconds: float) -> bool:
        """Wait *seconds*, or less where the process is stopped; return whether it is."""
        return self._stopped.wait(seconds)

    def stop(self) -> None:
        self._stopped.set()
