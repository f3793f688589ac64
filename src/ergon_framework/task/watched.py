"""One lifecycle as spans: its steps, their attempts, and how each of them ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import Context
from typing import Any, TypeAlias

from ergon_framework.engine.attempts import Deferred, Ended, Failed, Step
from ergon_framework.engine.outcome import Ok, Stopped
from ergon_framework.errors import ErgonError
from ergon_framework.task.outline import Outline, StepOutline
from ergon_framework.task.report import Kind, Outcome
from ergon_framework.telemetry import redaction
from ergon_framework.telemetry.names import Attribute, ExceptionEvent
from ergon_framework.telemetry.options import TelemetryOptions
from ergon_framework.telemetry.spans import Node
from ergon_framework.telemetry.tracebacks import find_raised, format_traceback

#: Is told where an outcome can be found.
Remember: TypeAlias = Callable[[Outcome, Node], None]


class Unrecorded:
    """A transaction that was sampled out: its bodies run in its context, and nothing else is done.

    It holds nothing of one transaction, so one serves all that nobody sees for the same reason.
    """

    __slots__ = ("_body", "_remember", "node")

    recording = False

    def __init__(self, node: Node, remember: Remember) -> None:
        self.node = node
        self._remember = remember
        self._body = node.body()

    def step(self, step: Step) -> Unrecorded:  # noqa: ARG002 - all steps are alike here
        return self

    def attempt(self, number: int) -> Context:  # noqa: ARG002 - and all attempts
        return self._body.copy()

    def attempted(self, number: int, error: BaseException | None) -> None: ...

    def stepped(self, ended: Ended) -> None: ...

    def ended(self, outcome: Outcome) -> None:
        self._remember(outcome, self.node)


class Attempts:
    """The attempts of one step."""

    __slots__ = ("_attempt", "_node", "_options", "_outline", "_own", "count")

    def __init__(self, node: Node, outline: StepOutline, own: Mapping[str, Any], options: TelemetryOptions) -> None:
        self._node = node
        self._outline = outline
        self._own = own
        self._options = options
        #: How many have begun.
        self.count = 0
        #: The present attempt; before the first there is none, and nobody asks for it.
        self._attempt = node

    def attempt(self, number: int) -> Context:
        outline = self._outline
        self.count += 1
        attributes = {**outline.attempt_attributes, **self._own, Attribute.ATTEMPT: number}
        self._attempt = node = self._node.child(outline.attempt_name, attributes)
        return node.body()

    def attempted(self, number: int, error: BaseException | None) -> None:  # noqa: ARG002 - there is one at a time
        node = self._attempt
        if error is not None:
            record(node, error, format_traceback(error, self._options), self._options)
            blame(node, error, self._options)
        node.end()


class Watched:
    """A transaction that is recorded."""

    recording = True

    __slots__ = ("_attempts", "_node", "_options", "_outline", "_own", "_remember", "_step", "_step_name")

    def __init__(
        self, node: Node, outline: Outline, own: Mapping[str, Any], *, options: TelemetryOptions, remember: Remember
    ) -> None:
        self._node = node
        self._outline = outline
        self._own = own
        self._options = options
        self._remember = remember
        #: The present step; before the first there is none, and nobody asks for it.
        self._step = node
        self._step_name = ""
        #: Its attempts; None if the step is not recorded.
        self._attempts: Attempts | None = None

    def step(self, step: Step) -> Attempts | Unrecorded:
        outline = self._outline.steps[step.name]
        self._step_name = step.name
        self._step = node = self._node.child(outline.name, self._own)
        self._attempts = Attempts(node, outline, self._own, self._options) if node.recording else None
        return self._attempts or Unrecorded(node, forget)

    def stepped(self, ended: Ended) -> None:
        node = self._step
        if self._attempts is not None:
            node.tell({Attribute.ATTEMPTS: self._attempts.count})
        if isinstance(ended, Failed | Deferred):
            blame(node, ended.error, self._options)
            node.tell({Attribute.OUTCOME: "failed" if isinstance(ended, Failed) else "deferred"})
        elif isinstance(ended, Stopped):
            node.tell({Attribute.OUTCOME: "stopped"})
        elif self._step_name == "produce":
            node.tell(_result(ended, self._options))
        node.end()

    def ended(self, outcome: Outcome) -> None:
        node = self._node
        told = {Attribute.OUTCOME: outcome.kind.value, Attribute.ATTEMPTS: outcome.attempts}
        if outcome.reason is not None:
            told[Attribute.REASON] = outcome.reason
        node.tell(told)
        if outcome.error is not None:
            if outcome.kind is Kind.FAILED or outcome.kind is Kind.HANDLER_FAILED:
                self._record(outcome)
            blame(node, outcome.error, self._options)
        node.end()
        self._remember(outcome, node)

    def _record(self, outcome: Outcome) -> None:
        """Record the error, and that of the exception handler."""
        tracebacks = tracebacks_of(outcome, self._options)
        for error, trace in zip((outcome.error, outcome.handler_error), tracebacks, strict=True):
            if error is not None:
                record(self._node, error, trace, self._options)


def tracebacks_of(outcome: Outcome, options: TelemetryOptions) -> tuple[str | None, str | None]:
    """Return the tracebacks of the error of *outcome* and of its handler, formatted once."""
    tracebacks = outcome.tracebacks
    if tracebacks is None:
        tracebacks = format_traceback(outcome.error, options), format_traceback(outcome.handler_error, options)
        outcome.tracebacks = tracebacks
    return tracebacks


def record(node: Node, error: BaseException, trace: str | None, options: TelemetryOptions) -> None:
    """Record *error* as an event of *node*, with the traceback *trace* if there is one."""
    raised = find_raised(error)
    attributes = {
        ExceptionEvent.TYPE: type(raised).__qualname__,
        ExceptionEvent.MESSAGE: _message(raised, options),
    }
    node.record(attributes if trace is None else attributes | {ExceptionEvent.STACKTRACE: trace})


def blame(node: Node, error: BaseException, options: TelemetryOptions) -> None:
    """Say in *node* what went wrong."""
    cause = error.__cause__ if isinstance(error, ErgonError) and error.__cause__ is not None else error
    text = _message(error, options)
    attributes: dict[str, Any] = {Attribute.EXCEPTION_TYPE: type(cause).__name__, Attribute.EXCEPTION_MESSAGE: text}
    if isinstance(error, ErgonError):
        attributes[Attribute.CATEGORY] = error.category.value
        if error.code is not None:
            attributes[Attribute.CODE] = error.code
    node.tell(attributes)
    node.fail(text)


def _message(error: BaseException, options: TelemetryOptions) -> str:
    return redaction.message(options.redact, Attribute.EXCEPTION_MESSAGE, error, values=options.record_payloads)


def _result(ended: Ok, options: TelemetryOptions) -> dict[str, Any]:
    """Type and size of a result; its value only if that was asked for."""
    value = ended.value
    attributes: dict[str, Any] = {Attribute.RESULT_TYPE: type(value).__name__}
    # Only what is known to answer at once: the length of something else may be anything.
    if isinstance(value, str | bytes | bytearray | list | tuple | dict | set | frozenset):
        attributes[Attribute.RESULT_SIZE] = len(value)
    if options.record_results:
        attributes[Attribute.RESULT_VALUE] = redaction.shown(options.redact, Attribute.RESULT_VALUE, value)
    return attributes


def forget(outcome: Outcome, node: Node) -> None:
    """For what is no transaction: nobody will ask where it can be found."""
