"""Metrics and logs of facts and artifacts: outcomes by buffer, never a payload.

A buffer is one of the logs of facts between two zones; a store holds one for its own facts and one for copied facts.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Final

from ergon_framework.facts.boundary import AppendResult
from ergon_framework.facts.errors import ArtifactConflict, ArtifactLost, BufferFull, FactConflict, FactError
from ergon_framework.facts.model import Buffer
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import LabelLimiter, LoopMetrics, Numbers, get_registry
from ergon_framework.telemetry.names import LIBRARY, Event, Field, Metric

log: Final = logging.getLogger(f"{LIBRARY}.facts")


class BufferMetrics(LoopMetrics):
    """The counters of one buffer, or of one call of the service, updated from all threads."""

    def __init__(self, buffer: str, *, label_limiter: LabelLimiter) -> None:
        super().__init__(buffer, steps=(), success_steps=("", ""), label_limiter=label_limiter)
        self._lock = threading.Lock()

    def replace_lock(self) -> None:
        self._lock = threading.Lock()

    def count(self, metric: Metric, value: str, amount: int = 1) -> None:
        with self._lock:
            self.add(metric, value, amount=amount)

    def counters(self) -> Numbers:
        with self._lock:
            return super().counters()


def record_append(buffer: Buffer, result: AppendResult) -> None:
    """Record the result of appending a fact to *buffer*."""
    buffer_metrics(buffer).count(names.FACTS, _classify_result(result))


def record_appends(buffer: Buffer, results: Iterable[AppendResult]) -> None:
    """Record many results, with fewer locks than one by one."""
    metrics = buffer_metrics(buffer)
    for outcome, amount in Counter(map(_classify_result, results)).items():
        metrics.count(names.FACTS, outcome, amount)


def _classify_result(result: AppendResult) -> str:
    if isinstance(result, FactError):
        return _classify_error(result)
    return "repeated" if result.duplicate else "stored"


def record_put(buffer: Buffer, outcome: str) -> None:
    """Record the outcome of storing an artifact in the store of *buffer*."""
    buffer_metrics(buffer).count(names.ARTIFACTS, outcome)


def record_put_failure(buffer: Buffer, error: BaseException) -> None:
    """Record an artifact that was not stored: rejected, or its upload was interrupted."""
    record_put(buffer, _classify_error(error) if isinstance(error, FactError) else "interrupted")


def record_lost_artifact(buffer: Buffer, error: ArtifactLost) -> None:
    """Record and log an artifact that a fact refers to and that is unreadable: its producer must be checked."""
    buffer_metrics(buffer).count(names.ARTIFACTS_LOST, error.from_zone)
    fields = {
        Field.ZONE: error.from_zone,
        Field.MESSAGE_ID: error.message_id,
        Field.BUCKET: error.bucket,
        Field.KEY: error.key,
    }
    logs.log_event(logging.ERROR, Event.ARTIFACT_LOST, fields, to=log)


def log_epoch_changed(epoch: str) -> None:
    """Log that the store has a new epoch; readers with cursors of the old one will receive an error."""
    logs.log_event(logging.WARNING, Event.EPOCH_CHANGED, {Field.EPOCH: epoch}, to=log)


def _classify_error(error: FactError) -> str:
    if isinstance(error, FactConflict | ArtifactConflict):
        return "conflict"
    return "full" if isinstance(error, BufferFull) else "rejected"


def record_call(method: str, outcome: str) -> None:
    """Record a finished call of the service."""
    _get_metrics(method).count(names.FACT_CALLS, outcome)


_lock = threading.Lock()
_metrics: Final[dict[str, BufferMetrics]] = {}


def buffer_metrics(buffer: Buffer) -> BufferMetrics:
    """Return the metrics of all buffers with that name in this process."""
    return _get_metrics(buffer.value)


def _get_metrics(name: str) -> BufferMetrics:
    metrics = _metrics.get(name)
    if metrics is None:
        with _lock:
            metrics = _metrics.get(name) or get_registry().register(BufferMetrics, name)
            _metrics[name] = metrics
    return metrics


def _replace_locks() -> None:
    """Replace the locks in a forked child: the threads that held them do not exist there."""
    global _lock  # noqa: PLW0603 - a lock held by a thread of the parent is never released
    _lock = threading.Lock()
    for metrics in _metrics.values():
        metrics.replace_lock()


os.register_at_fork(after_in_child=_replace_locks)
