"""The spans of one lifecycle: its steps, their attempts, and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Any, TypeAlias

from ergon_framework.engine.attempts import Deferred, Failed, Step, StepResult
from ergon_framework.engine.outcome import Interrupted, Ok
from ergon_framework.errors import ErgonError
from ergon_framework.task.outline import SpanNames, StepSpanNames
from ergon_framework.task.report import Outcome, OutcomeKind
from ergon_framework.telemetry import redaction
from ergon_framework.telemetry.names import Attribute, ExceptionEvent
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.telemetry.spans import SpanNode
from ergon_framework.telemetry.tracebacks import find_raised, format_traceback

#: Called with the outcome and its span.
OnSpanEnded: TypeAlias = Callable[[Outcome, SpanNode], None]


class UnsampledTransaction:
    """An unsampled transaction: its calls run in the context of its span, and nothing is recorded.

    It holds no state of one transaction, so one instance serves all that are unsampled for the same reason.
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
            if outcome.kind is OutcomeKind.FAILED or outcome.kind is OutcomeKind.HANDLER_FAILED:
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
    """Return the tracebacks of the error of *outcome* and of its handler, formatted once."""
    tracebacks = outcome.tracebacks
    if tracebacks is None:
        tracebacks = format_traceback(outcome.error, options), format_traceback(outcome.handler_error, options)
        outcome.tracebacks = tracebacks
    return tracebacks


def add_exception_event(node: SpanNode, error: BaseException, trace: str | None, options: TelemetryOptions) -> None:
    """Record *error* as an event of *node*, with the traceback *trace* if there is one."""
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
