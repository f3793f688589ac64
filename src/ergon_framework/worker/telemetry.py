"""Telemetry of a loop: spans, metrics and log events.

A consume loop or a produce call reports what happens (a fetch, a step, an outcome) to an observer, which never decides
anything. The observer of this module makes telemetry of it; a task with telemetry options chooses what is recorded.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, Any

from ergon_framework.connectors.base import Defer, MissingKeyError
from ergon_framework.connectors.outage import ConnectorOutage
from ergon_framework.engine.retry import FailedAttempt
from ergon_framework.errors import Category, ConnectionLostError
from ergon_framework.failure import get_error_type
from ergon_framework.telemetry import logs, names, redaction
from ergon_framework.telemetry.metrics import LoopMetrics, get_registry
from ergon_framework.telemetry.names import Attribute, Event, Field
from ergon_framework.telemetry.options import TelemetryOptions, get_options
from ergon_framework.telemetry.spans import SpanNode, create_tracing
from ergon_framework.telemetry.tracebacks import ExcInfo, to_exc_info
from ergon_framework.worker.events import LoopObserver
from ergon_framework.worker.report import Outcome, OutcomeKind
from ergon_framework.worker.spans import (
    AttemptSpans,
    BatchSpans,
    RecordedTransaction,
    SpanNames,
    StepSpanNames,
    UnsampledTransaction,
    consumer_span_names,
    get_tracebacks,
    ignore_outcome,
    producer_span_names,
    record_exception,
)

if TYPE_CHECKING:
    from ergon_framework.connectors.base import Delivery, SettleResult
    from ergon_framework.engine.retry import StepObserver
    from ergon_framework.transaction import Transaction
    from ergon_framework.worker.events import TransactionObserver
    from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy
    from ergon_framework.worker.report import StopReason
    from ergon_framework.worker.solo import SoloPause, SoloStart


def count_outcome(metrics: LoopMetrics, outcome: Outcome) -> None:
    """Add *outcome*; the common case takes about a microsecond, because it runs for every transaction."""
    durations, step_durations = metrics.durations, outcome.durations
    for step, seconds in step_durations.items():
        durations[step].add(seconds)
    if outcome.kind is OutcomeKind.SUCCEEDED and not outcome.failed_attempts:
        # ``single``: the task has no success handler, so only one step ran; ``plain``: both steps ran.
        if len(step_durations) == 1:
            metrics.single += 1
        else:
            metrics.plain += 1
        return
    category = "" if outcome.error is None else outcome.error.category.value
    metrics.add(names.TRANSACTIONS, outcome.kind.value, category)
    if outcome.abandoned_calls:
        metrics.add(names.ABANDONED_CALLS)
    for step in outcome.durations:
        _count_attempts(metrics, step, outcome)


def _count_attempts(metrics: LoopMetrics, step: str, outcome: Outcome) -> None:
    """Count the attempts of *step*, its retries and the delays between them.

    An outcome records only failed attempts. If the last of them has no delay, or the transaction was deferred after it,
    it was the last attempt of the step; otherwise one more followed, which succeeded or was interrupted.
    """
    failed_attempts = [failed_attempt for failed_attempt in outcome.failed_attempts if failed_attempt.step == step]
    deferred = isinstance(outcome.settlement, Defer) and not outcome.processed and outcome.error is not None
    has_given_up = bool(failed_attempts) and (failed_attempts[-1].delay is None or deferred)
    attempt_count = len(failed_attempts) + (not has_given_up and _was_attempted(step, outcome))
    if attempt_count:
        metrics.add(names.ATTEMPTS, step, amount=attempt_count)
    if attempt_count > 1:
        metrics.add(names.RETRIES, step, amount=attempt_count - 1)
    delays = _list_delays(failed_attempts[: attempt_count - 1])
    if delays:
        metrics.add(names.RETRY_BACKOFFS, step, amount=len(delays))
        metrics.add(names.RETRY_BACKOFF_SECONDS, step, amount=sum(delays))


def _list_delays(failed_attempts: list[FailedAttempt]) -> list[float]:
    return [failed_attempt.delay for failed_attempt in failed_attempts if failed_attempt.delay]


def _was_attempted(step: str, outcome: Outcome) -> bool:
    """Return whether *step* made one more attempt than its recorded ones, which are those that failed.

    It did not if the step ended with an error that no attempt has: the lifecycle expired before the attempt, or the
    error says that nothing was attempted.
    """
    error = outcome.error
    has_unrecorded_failure = error is not None and all(
        failed_attempt.error is not error for failed_attempt in outcome.failed_attempts
    )
    last_step = next((name for name in reversed(outcome.durations) if name != "exception"), step)
    return not (has_unrecorded_failure and step == last_step)


# -- the observer -----------------------------------------------------------------------------------

log = logging.getLogger(__name__)

#: Maximum length of the reason of a pause.
MAX_REASON_CHARS = 100
#: Seconds between two error log records about one missing key.
MISSING_KEY_INTERVAL_SECONDS = 60.0
#: Maximum number of keys in error logs per interval: ids come from messages, and a producer can invent any number.
MAX_MISSING_KEYS = 100

#: Log level and event for each outcome; a success is not logged.
_EVENTS = {
    OutcomeKind.FAILED: (logging.WARNING, Event.TRANSACTION_FAILED),
    OutcomeKind.EXCEPTION_HANDLER_FAILED: (logging.ERROR, Event.TRANSACTION_FAILED),
    OutcomeKind.DEFERRED: (logging.INFO, Event.TRANSACTION_DEFERRED),
    OutcomeKind.RELEASED: (logging.INFO, Event.TRANSACTION_RELEASED),
}


def consumer_observer(
    task: object, policy: ConsumerPolicy, *, late_results: Callable[[], int] | None = None
) -> LoopObserver:
    """Return the observer of a consume loop of *task*; *late_results* returns the number of late results."""
    span_names = consumer_span_names(_get_task_name(task), policy)
    return TelemetryObserver(
        span_names,
        get_options(task),
        streaming=policy.loop.streaming,
        late_results=late_results,
        outage=_get_outage_log(task),
    )


def producer_observer(
    task: object, policy: ProducerPolicy, *, late_results: Callable[[], int] | None = None
) -> LoopObserver:
    """Return the observer of a produce call of *task*."""
    return TelemetryObserver(
        producer_span_names(_get_task_name(task), policy), get_options(task), streaming=False, late_results=late_results
    )


def log_exceptions(callback: Callable[[Outcome], None]) -> Callable[[Outcome], None]:
    """Wrap *callback* so that its exceptions are logged: they must not end the loop that calls it."""

    def call_logged(outcome: Outcome) -> None:
        try:
            callback(outcome)
        except BaseException as error:  # noqa: BLE001 - the callback is third-party code
            logs.log_event(
                logging.ERROR,
                Event.CALLBACK_FAILED,
                _build_identity_fields(outcome.transaction),
                to=log,
                exc_info=error,
            )

    return call_logged


class TelemetryObserver(LoopObserver):
    """Writes the telemetry of one loop."""

    def __init__(
        self,
        span_names: SpanNames,
        options: TelemetryOptions,
        *,
        streaming: bool,
        late_results: Callable[[], int] | None,
        outage: ConnectorOutage | None = None,
    ) -> None:
        self._span_names = span_names
        self.options = options
        #: Logs once when the server of the queue becomes unreachable and once when it answers again, from the results
        #: of fetches; None if the task has no connector.
        self._outage = outage
        self._tracing = create_tracing(options, consumer=span_names.kind == "consumer")
        # A transaction to produce may carry a trace already, but its span belongs to this call.
        self._continues = span_names.kind == "consumer"
        self._batch_spans = (
            None if self._tracing is None else BatchSpans(self._tracing, span_names, streaming=streaming)
        )
        self._registry = get_registry(options.meter_provider)
        self._metrics = self._registry.new_loop_metrics(
            span_names.task, steps=(*span_names.steps, "settle"), success_steps=span_names.success_steps
        )
        self._metrics.late_results = late_results
        self._unsampled: UnsampledTransaction | None = None
        #: Spans of transactions that have ended and are not settled, by the identity of their outcome.
        self._nodes: dict[int, SpanNode] = {}
        self._has_warned = False
        #: Time of the last error log record, by the id of the missing key.
        self._missing_key_times: dict[str, float] = {}

    # -- the loop -------------------------------------------------------------------------------

    def on_loop_start(self, slots: Callable[[], tuple[int, int, int]]) -> None:
        self._metrics.usage = slots
        self._registry.open(self._metrics)

    def on_batch(self, size: int) -> None:
        if self._batch_spans is not None:
            self._batch_spans.begin(size)

    def on_fetch_start(self) -> StepObserver:
        root = None if self._batch_spans is None else self._batch_spans.current
        span_names = self._span_names.steps["fetch"]
        self._fetch_telemetry = FetchTelemetry(
            root, span_names, metrics=self._metrics, options=self.options, outage=self._outage
        )
        return self._fetch_telemetry

    def on_fetch_retry(self, number: int, error: BaseException, delay: float) -> None:
        self._log_failed_attempt({Field.STEP: "fetch"}, number, error, delay=delay)

    def on_fetch_end(self, deliveries: Sequence[Delivery] | None, error: BaseException | None) -> None:
        metrics = self._metrics
        self._fetch_telemetry.end(None if deliveries is None else len(deliveries), error)
        if self._batch_spans is not None:
            self._batch_spans.assign(deliveries or ())
        if error is not None:
            metrics.add(names.FAILED_FETCHES)
            self._log_event(logging.ERROR, Event.FETCH_FAILED, self._build_error_fields(error))
        elif deliveries is not None:
            metrics.add(names.FETCHES)
            if not deliveries:
                metrics.add(names.EMPTY_FETCHES)
            self._observe_ages(deliveries)

    def _observe_ages(self, deliveries: Sequence[Delivery]) -> None:
        created_times = [
            created_at for delivery in deliveries if (created_at := delivery.transaction.created_at) is not None
        ]
        if created_times:
            self._metrics.observe_age(max(0.0, time.time() - min(created_times)))

    def on_oversized_batch(self, requested: int, received: int) -> None:
        self._metrics.add(names.OVERSIZED_FETCHES)
        if not self._has_warned:
            self._has_warned = True
            self._log_event(
                logging.WARNING, Event.FETCH_OVERSIZED, {Field.REQUESTED: requested, Field.RETURNED: received}
            )

    def on_pause(self, reason: str | None) -> None:
        if reason is None:
            self._metrics.paused = None
            self._log_event(logging.INFO, Event.LOOP_RESUMED, {})
            return
        self._metrics.paused = redaction.redacted_repr(self.options.redact, Attribute.REASON, reason)[:MAX_REASON_CHARS]
        self._log_event(logging.WARNING, Event.LOOP_PAUSED, {Field.REASON: self._metrics.paused})

    def on_solo_start(self, delivery: Delivery, start: SoloStart) -> None:
        self._metrics.add(names.SOLO_RUNS)
        fields = _build_identity_fields(delivery.transaction) | {
            Field.DELIVERIES: delivery.deliveries,
            Field.SECONDS: round(start.waited, 3),
        }
        if start.alone:
            self._log_event(logging.INFO, Event.SOLO_RUN_STARTED, fields)
        else:
            self._metrics.add(names.SOLO_TIMEOUTS)
            self._log_event(logging.WARNING, Event.SOLO_RUN_TIMED_OUT, fields)

    def on_solo_pause_end(self, pause: SoloPause) -> None:
        self._metrics.add(names.SOLO_PAUSES)
        self._metrics.add(names.SOLO_PAUSE_SECONDS, amount=pause.seconds)
        if pause.timed_out:
            self._metrics.add(names.SOLO_TIMEOUTS)
            self._log_event(logging.WARNING, Event.SOLO_RUN_TIMED_OUT, {Field.SECONDS: round(pause.seconds, 3)})

    def on_loop_end(self, end: StopReason) -> None:
        if self._batch_spans is not None:
            self._batch_spans.close({Attribute.STOP_REASON: end.value})
        self._registry.close(self._metrics)
        self._nodes.clear()
        self._log_event(logging.INFO, Event.LOOP_ENDED, {Field.STOP_REASON: end.value})

    # -- a transaction --------------------------------------------------------------------------

    def on_transaction_start(self, transaction: Transaction, delivery: Delivery | None) -> TransactionObserver | None:  # noqa: ARG002 - spans do not show it
        if self._tracing is None or self._batch_spans is None:
            return None
        span_names = self._span_names
        root = self._batch_spans.for_transaction(transaction)
        carrier = transaction.trace if self._continues else None
        if root is not None and not root.recording and not carrier:
            return self._get_unsampled(root)
        own_attributes = {Attribute.TRANSACTION_ID: transaction.id}
        attributes = {Attribute.TASK: span_names.task, Attribute.TRANSACTION_ID: transaction.id}
        node = self._tracing.start_transaction(span_names.transaction, root, carrier, attributes)
        if not node.recording:
            return UnsampledTransaction(node, self._store_node)
        if self.options.record_payloads:
            payload_text = redaction.redacted_repr(self.options.redact, Attribute.PAYLOAD, transaction.payload)
            node.set_attributes({Attribute.PAYLOAD: payload_text})
        return RecordedTransaction(
            node, span_names, own_attributes, options=self.options, on_span_ended=self._store_node
        )

    def _get_unsampled(self, root: SpanNode) -> UnsampledTransaction:
        """Return one observer for all transactions of an unsampled root: creating a span for each costs the most."""
        observer = self._unsampled
        if observer is None or observer.node is not root:
            self._unsampled = observer = UnsampledTransaction(root, self._store_node)
        return observer

    def _store_node(self, outcome: Outcome, node: SpanNode) -> None:
        self._nodes[id(outcome)] = node

    def on_retry(self, transaction: Transaction, failed_attempt: FailedAttempt) -> None:
        self._log_failed_attempt(
            _build_identity_fields(transaction) | {Field.STEP: failed_attempt.step},
            failed_attempt.attempt,
            failed_attempt.error,
            delay=failed_attempt.delay,
        )

    def trace_id(self, outcome: Outcome) -> str | None:
        node = self._nodes.get(id(outcome))
        span_ids = None if node is None else node.ids
        return None if span_ids is None else span_ids[0]

    def on_rejected(self, delivery: Delivery, reason: str) -> None:
        self._metrics.add(names.REJECTED_DELIVERIES, reason)
        if self._batch_spans is not None:
            self._batch_spans.end_transaction(delivery.transaction)
        fields = {Field.REASON: reason, Field.DELIVERIES: delivery.deliveries}
        self._log_event(
            logging.WARNING, Event.TRANSACTION_REJECTED, _build_identity_fields(delivery.transaction) | fields
        )

    def on_settled(self, results: list[SettleResult], seconds: float) -> None:
        metrics = self._metrics
        metrics.durations["settle"].add(seconds)
        for result in set(results):
            metrics.add(names.SETTLED, result.value, amount=results.count(result))

    def on_transaction_end(self, outcome: Outcome) -> None:
        count_outcome(self._metrics, outcome)
        node = None
        if self._batch_spans is not None:
            node = self._nodes.pop(id(outcome), None)
            self._batch_spans.end_transaction(outcome.transaction)
        if outcome.kind is not OutcomeKind.SUCCEEDED:
            level, event = _EVENTS[outcome.kind]
            if isinstance(outcome.error, MissingKeyError):
                level = self._choose_missing_key_level(outcome.error.key_id)
            if logs.log.isEnabledFor(level):
                self._log_event(level, event, self._build_fields(outcome, node), self._to_exception(outcome))

    def _choose_missing_key_level(self, key_id: str) -> int:
        """Return ERROR once a minute for each key: operators must see it, and every message with the key reports it."""
        now = time.monotonic()
        if now < self._missing_key_times.get(key_id, -math.inf) + MISSING_KEY_INTERVAL_SECONDS:
            return logging.INFO
        if len(self._missing_key_times) >= MAX_MISSING_KEYS:
            threshold = now - MISSING_KEY_INTERVAL_SECONDS
            self._missing_key_times = {
                known_id: logged_at for known_id, logged_at in self._missing_key_times.items() if logged_at > threshold
            }
            if len(self._missing_key_times) >= MAX_MISSING_KEYS:
                return logging.INFO
        self._missing_key_times[key_id] = now
        return logging.ERROR

    # -- log records ----------------------------------------------------------------------------

    def _log_failed_attempt(
        self, identity: dict[str, Any], number: int, error: BaseException, *, delay: float | None
    ) -> None:
        if logs.log.isEnabledFor(logging.INFO):
            # Log records count attempts from 1.
            fields = {Field.ATTEMPT: number + 1, Field.DELAY: delay}
            self._log_event(logging.INFO, Event.ATTEMPT_FAILED, identity | fields | self._build_error_fields(error))

    def _log_event(
        self, level: int, event: str, fields: dict[str, Any], raised: tuple[ExcInfo, str] | None = None
    ) -> None:
        logs.log_event(level, event, {Field.TASK: self._span_names.task, **fields}, raised=raised)

    def _to_exception(self, outcome: Outcome) -> tuple[ExcInfo, str] | None:
        """Return the error of a failed transaction with its traceback.

        None for a BUSINESS failure: user code raised it on purpose, so its traceback shows no defect.
        """
        error, handler_error = outcome.error, outcome.handler_error
        if error is None or outcome.kind not in (OutcomeKind.FAILED, OutcomeKind.EXCEPTION_HANDLER_FAILED):
            return None
        if handler_error is None and error.category is Category.BUSINESS:
            return None
        first, second = get_tracebacks(outcome, self.options)
        texts = [] if first is None else [first]
        if handler_error is not None and second is not None:
            error = handler_error
            texts.append(f"the exception handler failed too:\n{second}")
        return (to_exc_info(error, self.options), "\n\n".join(texts)) if texts else None

    def _build_fields(self, outcome: Outcome, node: SpanNode | None) -> dict[str, Any]:
        transaction, settlement = outcome.transaction, outcome.settlement
        trace_id, span_id = (node.ids if node is not None else None) or (None, None)
        return (
            _build_identity_fields(transaction)
            | {
                Field.OUTCOME: outcome.kind.value,
                Field.ATTEMPTS: outcome.attempts,
                Field.REASON: outcome.reason,
                Field.STEP: outcome.failed_step,
                Field.STARTED: outcome.started if outcome.kind is OutcomeKind.RELEASED else None,
                Field.STILL_RUNNING: outcome.still_running or None,
                Field.DELAY: settlement.delay if isinstance(settlement, Defer) else None,
                Field.TRACE_ID: trace_id,
                Field.SPAN_ID: span_id,
            }
            | self._build_error_fields(outcome.error)
            | self._build_handler_error_fields(outcome.handler_error)
        )

    def _build_error_fields(self, error: BaseException | None) -> dict[str, Any]:
        if error is None:
            return {}
        category = getattr(error, "category", None)
        return {
            Field.ERROR: self._redact_message(error),
            Field.ERROR_TYPE: get_error_type(error),
            Field.CATEGORY: None if category is None else category.value,
            Field.CODE: getattr(error, "code", None),
        }

    def _build_handler_error_fields(self, error: BaseException | None) -> dict[str, Any]:
        if error is None:
            return {}
        return {
            Field.HANDLER_ERROR: self._redact_message(error),
            Field.HANDLER_ERROR_TYPE: type(error.__cause__ or error).__name__,
        }

    def _redact_message(self, error: BaseException) -> str:
        hook, values = self.options.redact, self.options.record_payloads
        return redaction.redacted_message(hook, Attribute.EXCEPTION_MESSAGE, error, values=values)


class FetchTelemetry:
    """One fetch: its attempts are always counted, and are spans if the root span of the loop is recorded."""

    def __init__(
        self,
        root: SpanNode | None,
        span_names: StepSpanNames,
        *,
        metrics: LoopMetrics,
        options: TelemetryOptions,
        outage: ConnectorOutage | None,
    ) -> None:
        self._metrics = metrics
        self._outage = outage
        self._called_at = 0.0
        self._options = options
        self._started_at = time.perf_counter()
        self._attempt_count = 0
        self._node: SpanNode | None = None
        self._spans: AttemptSpans | UnsampledTransaction | None = None
        if root is None:
            return
        if root.recording:
            self._node = root.start_child(span_names.name)
        if self._node is not None and self._node.recording:
            self._spans = AttemptSpans(self._node, span_names, {}, options)
        else:
            self._spans = UnsampledTransaction(self._node or root, ignore_outcome)

    def on_attempt_start(self, number: int) -> Context | None:
        self._attempt_count += 1
        self._called_at = time.monotonic()
        return None if self._spans is None else self._spans.on_attempt_start(number)

    def on_attempt_end(self, number: int, error: BaseException | None) -> None:
        if self._spans is not None:
            self._spans.on_attempt_end(number, error)
        if self._outage is None:
            return
        if error is None:
            self._outage.note_answer(began=self._called_at)
        elif isinstance(error.__cause__, ConnectionLostError):
            self._outage.note_failure(error.__cause__, began=self._called_at)

    def end(self, fetched_count: int | None, error: BaseException | None) -> None:
        metrics = self._metrics
        metrics.durations["fetch"].add(time.perf_counter() - self._started_at)
        metrics.add(names.ATTEMPTS, "fetch", amount=self._attempt_count)
        if self._attempt_count > 1:
            metrics.add(names.RETRIES, "fetch", amount=self._attempt_count - 1)
        if self._node is not None:
            if fetched_count is not None:
                self._node.set_attributes({Attribute.BATCH_FETCHED: fetched_count})
            if error is not None:
                record_exception(self._node, error, self._options)
            self._node.end()


def _get_outage_log(task: object) -> ConnectorOutage | None:
    connector = getattr(task, "connector", None)
    return None if connector is None else ConnectorOutage(connector)


def _build_identity_fields(transaction: Transaction) -> dict[str, Any]:
    """Return the fields that identify the transaction of a record."""
    return {
        Field.TRANSACTION_ID: transaction.id,
        Field.SOURCE: transaction.source,
        Field.CORRELATION_ID: transaction.correlation,
        Field.TENANT_ID: transaction.tenant,
    }


def _get_task_name(task: object) -> str:
    return str(getattr(task, "name", type(task).__name__))
