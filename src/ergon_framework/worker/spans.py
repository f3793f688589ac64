"""The spans of a loop: its root spans, and those of each lifecycle with its steps, attempts and results.

A lifecycle is the processing of one transaction: its steps are process, then success or exception, and each step has
attempts. A loop has one root span for the whole call, or one per batch if it streams. Span names, and the attributes
that all spans of one kind share, are built once per loop, so that a transaction only adds its own attributes.

A SpanNode is one span; its ``recording`` is false if the sampler of the tracing library has not selected the trace. Its
``new_context`` returns a context in which the span is the current one, for the call of a handler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import Interrupted, Ok
from ergon_framework.engine.retry import Deferred, Failed, Step, StepResult
from ergon_framework.errors import ErgonError
from ergon_framework.telemetry import redaction
from ergon_framework.telemetry.names import Attribute, ExceptionEvent, Span
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.telemetry.spans import SpanNode, Tracing
from ergon_framework.telemetry.tracebacks import find_raised, format_traceback
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy, RetryPolicy
from ergon_framework.worker.report import Outcome, OutcomeKind


@dataclass(frozen=True, slots=True)
class StepSpanNames:
    """The span names of a step and its attempts."""

    name: str
    attempt_name: str
    attempt_attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SpanNames:
    """The span names of one loop."""

    task: str
    kind: Literal["consumer", "producer"]
    root: str
    transaction: str
    #: Attributes of the root span.
    attributes: Mapping[str, Any]
    steps: Mapping[str, StepSpanNames]

    @property
    def success_steps(self) -> tuple[str, str]:
        """The steps of a transaction that succeeds."""
        return ("process" if self.kind == "consumer" else "produce"), "success"


def consumer_span_names(task: str, policy: ConsumerPolicy) -> SpanNames:
    """Return the span names of a consume loop."""
    steps = policy.steps
    return SpanNames(
        task,
        "consumer",
        Span.CONSUME_TRANSACTIONS,
        Span.START_PROCESSING,
        _build_root_attributes(task, policy),
        dict(
            (
                _build_step(task, "fetch", steps.fetch.retry, Span.FETCH_TRANSACTIONS, Span.FETCH_TRANSACTIONS_ATTEMPT),
                _build_step(task, "process", steps.process.retry, Span.PROCESS, Span.PROCESS_ATTEMPT),
                _build_step(task, "success", steps.success.retry, Span.HANDLE_SUCCESS, Span.HANDLE_SUCCESS_ATTEMPT),
                _build_step(
                    task, "exception", steps.exception.retry, Span.HANDLE_EXCEPTION, Span.HANDLE_EXCEPTION_ATTEMPT
                ),
            )
        ),
    )


def producer_span_names(task: str, policy: ProducerPolicy) -> SpanNames:
    """Return the span names of a produce call."""
    success = Span.HANDLE_PRODUCE_SUCCESS, Span.HANDLE_PRODUCE_SUCCESS_ATTEMPT
    exception = Span.HANDLE_PRODUCE_EXCEPTION, Span.HANDLE_PRODUCE_EXCEPTION_ATTEMPT
    return SpanNames(
        task,
        "producer",
        Span.PRODUCE_TRANSACTIONS,
        Span.START_PRODUCING,
        _build_root_attributes(task, policy),
        dict(
            (
                _build_step(task, "produce", policy.steps.produce.retry, Span.PRODUCE, Span.PRODUCE_ATTEMPT),
                _build_step(task, "success", policy.steps.success.retry, *success),
                _build_step(task, "exception", policy.steps.exception.retry, *exception),
            )
        ),
    )


def _build_root_attributes(task: str, policy: ConsumerPolicy | ProducerPolicy) -> Mapping[str, Any]:
    return {
        Attribute.TASK: task,
        Attribute.CONCURRENCY: policy.loop.concurrency.value,
        Attribute.BATCH_SIZE: policy.loop.batch.size,
    }


def _build_step(task: str, step: str, retry: RetryPolicy, name: str, attempt: str) -> tuple[str, StepSpanNames]:
    # All attempts of a step share one mapping: only a recorded span copies it.
    attributes = {
        Attribute.TASK: task,
        Attribute.STEP: step,
        Attribute.MAX_ATTEMPTS: retry.max_attempts,
        Attribute.RETRY: _format_settings(retry),
        Attribute.RETRY_BACKOFF: retry.backoff,
        Attribute.RETRY_MULTIPLIER: retry.multiplier,
        Attribute.RETRY_CAP: retry.cap,
        Attribute.RETRY_JITTER: retry.jitter,
    }
    if retry.timeout is not None:
        attributes[Attribute.RETRY_TIMEOUT] = retry.timeout
    return step, StepSpanNames(name, attempt, attributes)


def _format_settings(retry: RetryPolicy) -> str:
    """Return the settings as one text, for people; the numeric attributes have the same values."""
    timeout = "none" if retry.timeout is None else f"{retry.timeout:g}"
    rest = f"backoff={retry.backoff:g} multiplier={retry.multiplier:g} cap={retry.cap:g} jitter={retry.jitter:g}"
    return f"timeout={timeout} {rest}"


# -- root spans -------------------------------------------------------------------------------------


class BatchSpan:
    """One root span, and the number of its transactions that have not ended."""

    __slots__ = ("node", "unfinished")

    def __init__(self, node: SpanNode) -> None:
        self.node = node
        self.unfinished = 0


class BatchSpans:
    """Maps each transaction to its root span.

    A streaming loop would never end a span of the whole loop, so there each fetch starts a root span, which ends when
    the last transaction of that fetch has ended, however many are fetched in the meantime.
    """

    def __init__(self, tracing: Tracing, span_names: SpanNames, *, streaming: bool) -> None:
        self._tracing = tracing
        self._span_names = span_names
        self._streaming = streaming
        self._lock = threading.Lock()
        self._current: BatchSpan | None = None
        self._open: set[BatchSpan] = set()
        #: By the identity of the object: one id may be delivered twice; the second delivery is deferred immediately.
        self._by_transaction: dict[int, BatchSpan] = {}

    def begin(self, size: int) -> None:
        if self._current is not None and not self._streaming:
            return
        extra_attributes = {Attribute.BATCH_REQUESTED: size} if self._streaming else {}
        self._current = BatchSpan(
            self._tracing.start_root(self._span_names.root, {**self._span_names.attributes, **extra_attributes})
        )
        self._open.add(self._current)

    @property
    def current(self) -> SpanNode | None:
        return None if self._current is None else self._current.node

    def for_transaction(self, transaction: Transaction) -> SpanNode | None:
        """Return the root span of *transaction*; None outside any loop."""
        batch_span = self._by_transaction.get(id(transaction)) or self._current
        return None if batch_span is None else batch_span.node

    def assign(self, deliveries: Sequence[Delivery]) -> None:
        """Assign the transactions of *deliveries*, and no others, to the current root span."""
        current = self._current
        if not self._streaming or current is None:
            return
        current.node.set_attributes({Attribute.BATCH_FETCHED: len(deliveries)})
        with self._lock:
            for delivery in deliveries:
                if self._by_transaction.setdefault(id(delivery.transaction), current) is current:
                    current.unfinished += 1
            is_complete = current.unfinished == 0
        if is_complete:
            self._end(current)

    def end_transaction(self, transaction: Transaction) -> None:
        if not self._streaming:
            return
        with self._lock:
            batch_span = self._by_transaction.pop(id(transaction), None)
            if batch_span is None:
                return
            batch_span.unfinished -= 1
            is_complete = batch_span.unfinished == 0
        if is_complete:
            self._end(batch_span)

    def close(self, attributes: Mapping[str, Any]) -> None:
        """End all root spans that are still open, at the end of the loop."""
        if self._current in self._open:
            self._current.node.set_attributes(attributes)
        for batch_span in list(self._open):
            self._end(batch_span)
        self._by_transaction.clear()

    def _end(self, batch_span: BatchSpan) -> None:
        self._open.discard(batch_span)
        batch_span.node.end()


# -- spans of one lifecycle -------------------------------------------------------------------------

#: Called with the outcome and its span.
OnSpanEnded: TypeAlias = Callable[[Outcome, SpanNode], None]


class UnsampledTransaction:
    """An unsampled transaction: its calls run in the context of its span, and nothing is recorded.

    It holds no state of one transaction, so one instance serves all transactions that share the span *node*.
    """

    __slots__ = ("_context", "_on_span_ended", "node")

    recording = False

    def __init__(self, node: SpanNode, on_span_ended: OnSpanEnded) -> None:
        self.node = node
        self._on_span_ended = on_span_ended
        self._context = node.new_context()

    def on_step_start(self, step: Step) -> UnsampledTransaction:  # noqa: ARG002 - the same for all steps
        return self

    def on_attempt_start(self, number: int) -> Context:  # noqa: ARG002 - the same for all attempts
        return self._context.copy()

    def on_attempt_end(self, number: int, error: BaseException | None) -> None: ...

    def on_step_end(self, result: StepResult) -> None: ...

    def on_end(self, outcome: Outcome) -> None:
        self._on_span_ended(outcome, self.node)


class AttemptSpans:
    """The spans of the attempts of one step."""

    __slots__ = ("_attempt_node", "_node", "_options", "_own_attributes", "_span_names", "count")

    def __init__(
        self, node: SpanNode, span_names: StepSpanNames, own_attributes: Mapping[str, Any], options: TelemetryOptions
    ) -> None:
        self._node = node
        self._span_names = span_names
        self._own_attributes = own_attributes
        self._options = options
        #: The number of attempts that have started.
        self.count = 0
        #: The span of the current attempt; not used before the first one.
        self._attempt_node = node

    def on_attempt_start(self, number: int) -> Context:
        span_names = self._span_names
        self.count += 1
        attributes = {**span_names.attempt_attributes, **self._own_attributes, Attribute.ATTEMPT: number}
        self._attempt_node = node = self._node.start_child(span_names.attempt_name, attributes)
        return node.new_context()

    def on_attempt_end(self, number: int, error: BaseException | None) -> None:  # noqa: ARG002 - there is one at a time
        node = self._attempt_node
        if error is not None:
            add_exception_event(node, error, format_traceback(error, self._options), self._options)
            record_exception(node, error, self._options)
        node.end()


class RecordedTransaction:
    """A recorded transaction."""

    recording = True

    __slots__ = (
        "_attempts",
        "_node",
        "_on_span_ended",
        "_options",
        "_own_attributes",
        "_span_names",
        "_step_name",
        "_step_node",
    )

    def __init__(
        self,
        node: SpanNode,
        span_names: SpanNames,
        own_attributes: Mapping[str, Any],
        *,
        options: TelemetryOptions,
        on_span_ended: OnSpanEnded,
    ) -> None:
        self._node = node
        self._span_names = span_names
        self._own_attributes = own_attributes
        self._options = options
        self._on_span_ended = on_span_ended
        #: The span of the current step; not used before the first one.
        self._step_node = node
        self._step_name = ""
        #: The attempts of the current step; None if the step is not recorded.
        self._attempts: AttemptSpans | None = None

    def on_step_start(self, step: Step) -> AttemptSpans | UnsampledTransaction:
        span_names = self._span_names.steps[step.name]
        self._step_name = step.name
        self._step_node = node = self._node.start_child(span_names.name, self._own_attributes)
        self._attempts = AttemptSpans(node, span_names, self._own_attributes, self._options) if node.recording else None
        return self._attempts or UnsampledTransaction(node, ignore_outcome)

    def on_step_end(self, result: StepResult) -> None:
        node = self._step_node
        if self._attempts is not None:
            node.set_attributes({Attribute.ATTEMPTS: self._attempts.count})
        if isinstance(result, Failed | Deferred):
            record_exception(node, result.error, self._options)
            node.set_attributes({Attribute.OUTCOME: "failed" if isinstance(result, Failed) else "deferred"})
        elif isinstance(result, Interrupted):
            node.set_attributes({Attribute.OUTCOME: "stopped"})
        elif self._step_name == "produce":
            node.set_attributes(_build_result_attributes(result, self._options))
        node.end()

    def on_end(self, outcome: Outcome) -> None:
        node = self._node
        attributes = {Attribute.OUTCOME: outcome.kind.value, Attribute.ATTEMPTS: outcome.attempts}
        if outcome.reason is not None:
            attributes[Attribute.REASON] = outcome.reason
        node.set_attributes(attributes)
        if outcome.error is not None:
            if outcome.kind is OutcomeKind.FAILED or outcome.kind is OutcomeKind.EXCEPTION_HANDLER_FAILED:
                self._record_errors(outcome)
            record_exception(node, outcome.error, self._options)
        node.end()
        self._on_span_ended(outcome, node)

    def _record_errors(self, outcome: Outcome) -> None:
        """Record the error, and that of the exception handler."""
        tracebacks = get_tracebacks(outcome, self._options)
        for error, trace in zip((outcome.error, outcome.handler_error), tracebacks, strict=True):
            if error is not None:
                add_exception_event(self._node, error, trace, self._options)


def get_tracebacks(outcome: Outcome, options: TelemetryOptions) -> tuple[str | None, str | None]:
    """Return the tracebacks of the error of *outcome* and of the exception handler's own error, formatted once."""
    tracebacks = outcome.tracebacks
    if tracebacks is None:
        tracebacks = format_traceback(outcome.error, options), format_traceback(outcome.handler_error, options)
        outcome.tracebacks = tracebacks
    return tracebacks


def add_exception_event(node: SpanNode, error: BaseException, trace: str | None, options: TelemetryOptions) -> None:
    """Record *error* as an event of *node*, with the traceback *trace* if there is one.

    ``find_raised`` returns the error that was raised first: the framework wraps an error of user code in its own.
    """
    raised = find_raised(error)
    attributes = {
        ExceptionEvent.TYPE: type(raised).__qualname__,
        ExceptionEvent.MESSAGE: _redact_message(raised, options),
    }
    node.add_exception_event(attributes if trace is None else attributes | {ExceptionEvent.STACKTRACE: trace})


def record_exception(node: SpanNode, error: BaseException, options: TelemetryOptions) -> None:
    """Set the error attributes and the error status of *node*."""
    cause = error.__cause__ if isinstance(error, ErgonError) and error.__cause__ is not None else error
    message = _redact_message(error, options)
    attributes: dict[str, Any] = {Attribute.EXCEPTION_TYPE: type(cause).__name__, Attribute.EXCEPTION_MESSAGE: message}
    if isinstance(error, ErgonError):
        attributes[Attribute.CATEGORY] = error.category.value
        if error.code is not None:
            attributes[Attribute.CODE] = error.code
    node.set_attributes(attributes)
    node.set_error(message)


def _redact_message(error: BaseException, options: TelemetryOptions) -> str:
    return redaction.redacted_message(
        options.redact, Attribute.EXCEPTION_MESSAGE, error, values=options.record_payloads
    )


def _build_result_attributes(result: Ok, options: TelemetryOptions) -> dict[str, Any]:
    """Return type and size of a result, and its value if the options request it."""
    value = result.value
    attributes: dict[str, Any] = {Attribute.RESULT_TYPE: type(value).__name__}
    # Only types with a fast len(): that of a third-party type may take any time.
    if isinstance(value, str | bytes | bytearray | list | tuple | dict | set | frozenset):
        attributes[Attribute.RESULT_SIZE] = len(value)
    if options.record_results:
        attributes[Attribute.RESULT_VALUE] = redaction.redacted_repr(options.redact, Attribute.RESULT_VALUE, value)
    return attributes


def ignore_outcome(outcome: Outcome, node: SpanNode) -> None:
    """Ignore the end of a span that belongs to no transaction."""
