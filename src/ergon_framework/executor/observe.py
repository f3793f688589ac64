"""What is seen of an executor: one span for each job, in the trace that the job came with."""

from __future__ import annotations

from contextvars import Context, copy_context
from typing import Any

from ergon_framework.executor.protocol import ExecutionOutcome, ExecutionRequest, Status
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.context import inbound, within
from ergon_framework.telemetry.names import Attribute, Span
from ergon_framework.telemetry.options import DEFAULTS
from ergon_framework.telemetry.spans import Node, tracing


class Observer:
    """Looks on the jobs of one runtime; none of it can fail a job, or holds arguments and results."""

    def __init__(self) -> None:
        # Once: who wants spans has set telemetry up when the handlers were imported.
        self._tracing = tracing(DEFAULTS)
        self._node: Node | None = None

    def begin(self, request: ExecutionRequest) -> Context:
        """Begin the span of *request*; the variables that its handler is to run in."""
        try:
            context = request.context
            if self._tracing is None:
                # An executor sees little of the environment, so it often records nothing while all around it do: what
                # its handlers send belongs to the trace all the same.
                came_with = inbound(context.carrier)
                return copy_context() if came_with is None else within(copy_context(), came_with)
            told: dict[str, Any] = {
                Attribute.TRANSACTION_ID: request.job_id,
                Attribute.HANDLER: request.function_name,
                Attribute.QUEUE: context.queue_name,
                Attribute.ATTEMPT: context.attempt - 1,
            }
            self._node = self._tracing.transaction(Span.EXECUTOR, None, context.carrier, told)
            return self._node.body()
        except Exception as error:  # noqa: BLE001 - telemetry is foreign code and no part of the job
            logs.telemetry_failed(error)
            return copy_context()

    def end(self, outcome: ExecutionOutcome, error: BaseException | None) -> None:
        """End the span with what became of the job."""
        node, self._node = self._node, None
        if node is None:
            return
        try:
            told = {Attribute.OUTCOME: outcome.status.value}
            if outcome.error_type is not None:
                told[Attribute.CODE] = outcome.error_type
            if error is not None:
                told[Attribute.EXCEPTION_TYPE] = type(error).__name__
            node.tell(told)
            if outcome.status in {Status.ERROR, Status.TIMEOUT}:
                node.fail(outcome.error_type or outcome.status.value)
        except Exception as failure:  # noqa: BLE001 - as above
            logs.telemetry_failed(failure)
        node.end()
