"""Telemetry of executors: the span of each job, and the metrics of a pool.

An executor is a process that runs the handlers of jobs; a pool has the executors of one kind.

The span of a job belongs to the trace of its request, and is recorded in the executor. The metrics are recorded in the
orchestrator, which has the pool. They are numbers that the pool counts anyway, read when metrics are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any

from ergon_framework.executors.protocol import ExecutionOutcome, ExecutionRequest, Status
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.context import copy_with_otel_context, extract_context
from ergon_framework.telemetry.metrics import LabelLimiter, LoopMetrics, Numbers
from ergon_framework.telemetry.names import Attribute, Span
from ergon_framework.telemetry.options import DEFAULT_OPTIONS
from ergon_framework.telemetry.spans import SpanNode, create_tracing


class ExecutorTelemetry:
    """Records the jobs of this executor, one at a time; it cannot fail a job, and records no arguments or results."""

    def __init__(self) -> None:
        # Created once: a program that wants spans has set up telemetry when its handlers were imported.
        self._tracing = create_tracing(DEFAULT_OPTIONS)
        #: The span of the running job; None between jobs, and if nothing is recorded.
        self._span: SpanNode | None = None

    def begin(self, request: ExecutionRequest) -> Context:
        """Begin the span of *request* and return the context variables for its handler."""
        try:
            context = request.context
            if self._tracing is None:
                # An executor sees few environment variables, so it often records nothing while other processes do.
                # Messages that its handlers send still belong to the trace.
                inherited = extract_context(context.carrier)
                return copy_context() if inherited is None else copy_with_otel_context(copy_context(), inherited)
            attributes: dict[str, Any] = {
                Attribute.TRANSACTION_ID: request.job_id,
                Attribute.EXECUTOR_HANDLER: request.function_name,
                Attribute.EXECUTOR_QUEUE: context.queue_name,
                # Requests count attempts from 1, spans from 0.
                Attribute.ATTEMPT: context.attempt - 1,
            }
            # No root: an executor has no loop whose span could be the parent or be linked.
            self._span = self._tracing.start_transaction(
                Span.EXECUTOR, root=None, carrier=context.carrier, attributes=attributes
            )
            return self._span.new_context()
        except Exception as error:  # noqa: BLE001 - telemetry is third-party code and must not fail the job
            logs.log_telemetry_failure(error)
            return copy_context()

    def end(self, outcome: ExecutionOutcome, error: BaseException | None) -> None:
        """End the span with the outcome of the job."""
        span, self._span = self._span, None
        if span is None:
            return
        try:
            attributes = {Attribute.OUTCOME: outcome.status.value}
            if outcome.error_type is not None:
                attributes[Attribute.CODE] = outcome.error_type
            if error is not None:
                attributes[Attribute.EXCEPTION_TYPE] = type(error).__name__
            span.set_attributes(attributes)
            if outcome.status in {Status.ERROR, Status.TIMEOUT}:
                span.set_error(outcome.error_type or outcome.status.value)
        except Exception as failure:  # noqa: BLE001 - telemetry must not fail the job
            logs.log_telemetry_failure(failure)
        span.end()


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The state and the counters of a pool at one moment."""

    #: Number of running executors.
    running: int
    #: Number of their slots that are in use.
    in_flight: int
    #: Number of callers that wait for a free slot.
    waiting: int
    #: Number of slots that callers have got so far.
    served: int
    #: Seconds that all callers together have waited for a slot so far.
    wait_seconds: float
    #: Number of executors by what happened to them: a key of ``_METRIC_BY_EVENT``.
    events: Mapping[str, int]
    #: Numbers of stdout lines that are not the outcome of a job in flight, by kind.
    unexpected_lines: Mapping[str, int]


_METRIC_BY_EVENT = {
    "started": names.EXECUTORS_STARTED,
    "failed_starts": names.EXECUTORS_FAILED,
    "retired": names.EXECUTORS_RETIRED,
    "killed": names.EXECUTORS_KILLED,
    "died": names.EXECUTORS_DIED,
}


class PoolMetrics(LoopMetrics):
    """The metrics of one pool; thread-safe.

    A pool has no loop and no steps. The class is derived from LoopMetrics because the metrics registry collects those;
    its methods replace those of a loop, and return the numbers of the pool.
    """

    def __init__(self, name: str, *, label_limiter: LabelLimiter, get_stats: Callable[[], PoolStats]) -> None:
        # success_steps names the steps of the attempts that ``plain`` and ``single`` count, which stay 0 here.
        super().__init__(name, steps=(), success_steps=("", ""), label_limiter=label_limiter)
        self._get_stats = get_stats

    def counters(self) -> Numbers:
        stats = self._get_stats()
        # An event without a metric is left out.
        numbers: Numbers = {
            (_METRIC_BY_EVENT[event].name, ()): count
            for event, count in stats.events.items()
            if event in _METRIC_BY_EVENT
        }
        numbers |= {
            (names.EXECUTOR_UNEXPECTED_LINES.name, (kind,)): count for kind, count in stats.unexpected_lines.items()
        }
        numbers[names.EXECUTOR_ACQUISITIONS.name, ()] = stats.served
        numbers[names.EXECUTOR_ACQUISITION_SECONDS.name, ()] = stats.wait_seconds
        return numbers

    def gauges(self) -> Numbers:
        stats = self._get_stats()
        return {
            (names.EXECUTORS.name, ()): stats.running,
            (names.EXECUTOR_JOBS.name, ()): stats.in_flight,
            (names.EXECUTOR_QUEUE.name, ()): stats.waiting,
        }
