"""The names of a loop's spans, and the attributes that all spans of one kind share.

They are built once per loop, so that a transaction only adds its own attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ergon_framework.task.mixins.policies import ConsumerPolicy, ProducerPolicy, RetryPolicy
from ergon_framework.telemetry.names import Attribute, Span


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
    """Return the settings as one text, which traces have carried from the first release."""
    timeout = "none" if retry.timeout is None else f"{retry.timeout:g}"
    rest = f"backoff={retry.backoff:g} multiplier={retry.multiplier:g} cap={retry.cap:g} jitter={retry.jitter:g}"
    return f"timeout={timeout} {rest}"
