"""The telemetry of provider calls: spans, metrics and log events. None of it can fail a call or hold a payload.

A call makes one or more attempts. Calls are blocked while the provider's circuit breaker is open (it admits no calls,
because the provider fails) or while the tenant's quota of calls is exhausted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import Context, ContextVar
from typing import Any, Final

from ergon_framework import scope
from ergon_framework.failure import describe_error
from ergon_framework.providers.circuit_breaker import BreakerState
from ergon_framework.providers.errors import ProviderCircuitOpenError, ProviderError, ProviderQuotaExceededError
from ergon_framework.providers.models import AttemptRecord, ProviderExecutionResult, ProviderRequest
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import LabelLimiter, LoopMetrics, Numbers, get_registry
from ergon_framework.telemetry.names import LIBRARY, Attribute, Event, Field, Metric, Span
from ergon_framework.telemetry.spans import CallSpans, current_tracer

log: Final = logging.getLogger(f"{LIBRARY}.providers")


#: An additional listener for every attempt that is made in this context.
attempt_listener: Final[ContextVar[Callable[[ProviderRequest, AttemptRecord], object] | None]] = ContextVar(
    "ergon_attempts", default=None
)


def suppress_errors(function: Callable[..., object], *args: Any) -> Any:
    """Call *function* and return its result; log an error and return None, because telemetry must not fail a call."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 - telemetry is third-party code
        logs.log_telemetry_failure(error)
        return None


class ProviderTelemetry:
    """The observer of one call; *cooldown* is the number of seconds that an opened breaker stays open."""

    __slots__ = ("_cooldown", "_request", "_spans")

    def __init__(self, request: ProviderRequest, *, cooldown: float = 0.0) -> None:
        self._request = request
        self._cooldown = cooldown
        tracer = current_tracer()
        self._spans = None if tracer is None else CallSpans(tracer, Span.PROVIDER_CALL, _build_span_attributes(request))

    def on_attempt_start(self, number: int) -> Context | None:
        spans = self._spans
        if spans is None:
            return None
        return spans.start_attempt(
            Span.PROVIDER_CALL_ATTEMPT, _build_span_attributes(self._request) | {Attribute.ATTEMPT: number - 1}
        )

    def on_attempt_end(self, row: AttemptRecord, error: ProviderError | None) -> None:
        metrics = provider_metrics(row.provider_name)
        metrics.record_attempt(row)
        metric = _BLOCKED_METRICS.get(type(error))
        if metric is None:
            # A failed call had quota; only a success shows that the breaker is closed.
            cleared_metrics = (names.PROVIDER_EXHAUSTED,) if error is not None else _BLOCKED_METRICS.values()
            metrics.clear_blocked(row.capability, row.tenant_id, cleared_metrics)
        else:
            seconds = 0.0 if error is None or error.retry_after is None else error.retry_after
            metrics.set_blocked(metric, row.capability, row.tenant_id, seconds=seconds)
        if self._spans is not None:
            attributes = {Attribute.OUTCOME: row.outcome.value} | _build_error_attributes(error)
            if row.http_status is not None:
                attributes[Attribute.HTTP_STATUS] = row.http_status
            self._spans.end_attempt(attributes, _get_error_type(error))
        notify = attempt_listener.get()
        if notify is not None:
            suppress_errors(notify, self._request, row)

    def on_breaker_change(self, state: BreakerState) -> None:
        request = self._request
        metrics = provider_metrics(request.provider_name)
        metrics.record_breaker_state(request.capability, state)
        if state is BreakerState.OPEN:
            metrics.set_blocked(names.PROVIDER_OPEN, request.capability, request.tenant_id, seconds=self._cooldown)
        level = logging.WARNING if state is BreakerState.OPEN else logging.INFO
        logs.log_event(
            level, Event.BREAKER_CHANGED, self._build_log_fields() | {Field.BREAKER_STATE: state.value}, to=log
        )

    def on_state_error(self, error: BaseException) -> None:
        # The message may contain a statement with its values.
        logs.log_event(
            logging.WARNING,
            Event.PROVIDER_STATE_FAILED,
            self._build_log_fields() | {Field.ERROR_TYPE: type(error).__name__},
            to=log,
        )

    def on_success(self, result: ProviderExecutionResult) -> None:
        self._record_end("replayed" if result.replayed else "success", "", None)

    def on_failure(self, error: BaseException) -> None:
        if isinstance(error, ProviderError):
            self._log_failure(error)
            self._record_end("failed", error.reason_code.value, error)
        else:
            self._record_end("failed", type(error).__name__, error)

    def _record_end(self, outcome: str, code: str, error: BaseException | None) -> None:
        request = self._request
        provider_metrics(request.provider_name).record_call(request.capability, outcome, code)
        if self._spans is not None:
            attributes = {Attribute.OUTCOME: outcome, Attribute.REPLAYED: outcome == "replayed"}
            self._spans.end(attributes | _build_error_attributes(error), _get_error_type(error))

    def _log_failure(self, error: ProviderError) -> None:
        # Inside a handler the end of the transaction is logged instead, once.
        level = logging.DEBUG if scope.current() is not None else logging.WARNING
        if log.isEnabledFor(level):
            fields = {
                Field.ATTEMPT: len(error.attempts),
                Field.REASON_CODE: error.reason_code.value,
                Field.OUTCOME: "failed",
                Field.ERROR: describe_error(error),
                Field.ERROR_TYPE: type(error).__name__,
            }
            logs.log_event(level, Event.PROVIDER_CALL_FAILED, self._build_log_fields() | fields, to=log)

    def _build_log_fields(self) -> dict[str, Any]:
        request = self._request
        return {
            Field.TENANT_ID: request.tenant_id,
            Field.CAMPAIGN_ID: request.campaign_id,
            Field.PROVIDER_NAME: request.provider_name,
            Field.CAPABILITY: request.capability,
            Field.OPERATION: request.operation,
            Field.CORRELATION_ID: request.correlation_id,
            Field.IDEMPOTENCY_KEY: request.idempotency_key,
        }


def _build_span_attributes(request: ProviderRequest) -> dict[str, Any]:
    return {
        Attribute.PROVIDER: request.provider_name,
        Attribute.CAPABILITY: request.capability,
        Attribute.OPERATION: request.operation,
    }


def _build_error_attributes(error: BaseException | None) -> dict[str, Any]:
    """Return the span attributes of *error*; only messages of ProviderError are sanitized, so others are omitted."""
    if error is None:
        return {}
    attributes = {Attribute.EXCEPTION_TYPE: type(error).__name__}
    if isinstance(error, ProviderError):
        attributes |= {Attribute.CODE: error.reason_code.value, Attribute.EXCEPTION_MESSAGE: describe_error(error)}
    return attributes


def _get_error_type(error: BaseException | None) -> str | None:
    return None if error is None else type(error).__name__


# -- metrics --------------------------------------------------------------------------------------------


#: The metric that reports blocked calls, by the error that blocked them.
_BLOCKED_METRICS: Final[dict[type[object], Metric]] = {
    ProviderCircuitOpenError: names.PROVIDER_OPEN,
    ProviderQuotaExceededError: names.PROVIDER_EXHAUSTED,
}
#: Maximum number of blocked keys (metric, capability and tenant) that are kept.
_MAX_BLOCKED_KEYS: Final = 1_000


class ProviderMetrics(LoopMetrics):
    """The metrics of one provider, from all threads: plain numbers that get attributes only when they are read."""

    def __init__(self, provider_name: str, *, label_limiter: LabelLimiter) -> None:
        # The steps are those of a handler; a provider has none.
        super().__init__(provider_name, steps=(), success_steps=("", ""), label_limiter=label_limiter)
        self._lock = threading.Lock()
        #: By capability, outcome and reason: the number of attempts, and their total milliseconds.
        self._attempts: dict[tuple[str, str, str], list[float]] = {}
        self._calls: dict[tuple[str, str, str], int] = {}
        #: By metric, capability and tenant: until when calls are known to be blocked.
        self._blocked_until: dict[tuple[str, str, str], float] = {}

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def record_attempt(self, row: AttemptRecord) -> None:
        reason = "" if row.reason_code is None else row.reason_code.value
        key = row.capability, row.outcome.value, reason
        with self._lock:
            totals = self._attempts.get(key)
            if totals is None:
                totals = self._attempts[key] = [0, 0.0]
            totals[0] += 1
            totals[1] += row.duration_ms

    def record_call(self, capability: str, outcome: str, code: str) -> None:
        key = capability, outcome, code
        with self._lock:
            self._calls[key] = self._calls.get(key, 0) + 1

    def set_blocked(self, metric: Metric, capability: str, tenant_id: str, *, seconds: float) -> None:
        """Mark the calls of *tenant_id* as blocked for *seconds* seconds."""
        now = time.monotonic()
        with self._lock:
            # Removed first, so that the newest entry is the last one, and the oldest are evicted below.
            self._blocked_until.pop((metric.name, capability, tenant_id), None)
            self._blocked_until[metric.name, capability, tenant_id] = now + seconds
            if len(self._blocked_until) > _MAX_BLOCKED_KEYS:
                self._blocked_until = {key: until for key, until in self._blocked_until.items() if until > now}
            while len(self._blocked_until) > _MAX_BLOCKED_KEYS:
                del self._blocked_until[next(iter(self._blocked_until))]

    def clear_blocked(self, capability: str, tenant_id: str, metrics: Iterable[Metric]) -> None:
        """Mark the calls of *tenant_id* as not blocked by these metrics."""
        if self._blocked_until:
            with self._lock:
                for metric in metrics:
                    self._blocked_until.pop((metric.name, capability, tenant_id), None)

    def gauges(self) -> Numbers:
        now = time.monotonic()
        with self._lock:
            capabilities = {capability for capability, _, _ in self._attempts}
            numbers: Numbers = {
                (metric.name, (label,)): 0 for metric in _BLOCKED_METRICS.values() for label in capabilities
            }
            numbers |= {(name, (label,)): 1 for (name, label, _), until in self._blocked_until.items() if until > now}
        return numbers

    def record_breaker_state(self, capability: str, state: BreakerState) -> None:
        with self._lock:
            self.add(names.PROVIDER_BREAKERS, capability, state.value)

    def record_dropped(self, capability: str, reason: str, rows: int) -> None:
        with self._lock:
            self.add(names.PROVIDER_ROWS_DROPPED, capability, reason, amount=rows)

    def counters(self) -> Numbers:
        with self._lock:
            numbers = super().counters()
            numbers |= {(names.PROVIDER_CALLS.name, key): count for key, count in self._calls.items()}
            for (capability, outcome, reason), (count, spent_ms) in self._attempts.items():
                numbers[names.PROVIDER_ATTEMPTS.name, (capability, outcome, reason)] = count
                seconds = names.PROVIDER_SECONDS.name, (capability,)
                numbers[seconds] = numbers.get(seconds, 0.0) + spent_ms / 1000
        return numbers


_lock = threading.Lock()
_provider_metrics: Final[dict[str, ProviderMetrics]] = {}


def provider_metrics(provider_name: str) -> ProviderMetrics:
    """Return the metrics that all providers with this name share in this process."""
    metrics = _provider_metrics.get(provider_name)
    if metrics is None:
        with _lock:
            registry = get_registry()
            metrics = _provider_metrics.setdefault(provider_name, registry.register(ProviderMetrics, provider_name))
    return metrics


def _reset_locks() -> None:
    """Replace the locks in a forked child: the threads that held them do not exist there."""
    global _lock  # noqa: PLW0603 - a lock that a thread of the parent holds is never released
    _lock = threading.Lock()
    for metrics in _provider_metrics.values():
        metrics.after_fork()


os.register_at_fork(after_in_child=_reset_locks)
