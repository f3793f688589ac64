"""One delivery of a task in the process that runs it: the delivery is counted, run within its budget, and ended once.

The ledger is the store of the deliveries and the end of each task, shared by all workers. The end is written to the
ledger before Celery reports it. If the ledger is unavailable, nothing is reported and the message is requeued: a later
delivery settles the outcome.

``TaskState`` is the state in the ledger: RUNNING before the end; SUCCEEDING with a result that its process may not have
reported yet; SUCCEEDED once it is reported; DEAD with a dead letter. A process that was killed while SUCCEEDING has
lost the result: after REPORT_GRACE_SECONDS the next delivery reopens the task and runs it again.
"""

from __future__ import annotations

import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar, copy_context
from math import ceil
from typing import TYPE_CHECKING, Any, Final, NoReturn

from billiard.pool import SIG_SOFT_TIMEOUT, soft_timeout_sighandler
from celery import states
from celery.app.task import get_actual_ignore_result
from celery.backends.base import DisabledBackend
from celery.backends.rpc import RPCBackend
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_prerun, worker_process_shutdown
from kombu.exceptions import EncodeError
from kombu.serialization import dumps

from ergon_framework import scope
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.failure import describe_error
from ergon_framework.providers.celery.invocation import CAUSE_FIELD, HEADER, Invocation, read_invocation
from ergon_framework.providers.celery.ledger import TaskDelivery, TaskState
from ergon_framework.providers.dead_letter import build_dead_letter
from ergon_framework.providers.error_mapping import to_provider_error
from ergon_framework.providers.errors import (
    ERROR_BY_REASON,
    ProviderCircuitOpenError,
    ProviderError,
    ProviderInternalError,
    ProviderResponseFormatError,
    ReasonCode,
)
from ergon_framework.providers.execution import IN_FLIGHT, STATE_UNAVAILABLE
from ergon_framework.providers.health import AttemptOutcome
from ergon_framework.providers.models import AttemptRecord, ProviderRequest, current_task_execution
from ergon_framework.providers.postgres.attempt_writer import close_writers
from ergon_framework.providers.telemetry import attempt_listener
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.context import copy_with_otel_context, current_ids, extract_context
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.telemetry.options import get_options
from ergon_framework.telemetry.tracebacks import ExcInfo, format_traceback, to_exc_info

if TYPE_CHECKING:
    from ergon_framework.providers.celery.task import CeleryProviderTask

log: Final = logging.getLogger(f"{LIBRARY}.providers.celery")

#: Seconds to wait before a message is requeued, because the queue redelivers it immediately.
REQUEUE_DELAY_SECONDS: Final = 1.0
#: Seconds in which a process that wrote a result to the ledger is assumed to be still reporting it.
REPORT_GRACE_SECONDS: Final = 10.0
#: The errors of a ledger; the outcome of the failed operation is unknown.
LEDGER_ERRORS: Final = (ConnectionLostError, ConfigurationError)
#: Bounds in seconds of the countdown after an open breaker: whole seconds and at least one, as delayed delivery on
#: RabbitMQ requires, and far below the time after which Redis redelivers an unacknowledged message.
MIN_COUNTDOWN_SECONDS: Final = 1
MAX_COUNTDOWN_SECONDS: Final = 300
#: The outcome of a delivery that did not end the task.
REQUEUED: Final = "requeued"
#: Why a delivery is ignored.
ALREADY_ENDED: Final = "another delivery of this task has already ended it, so this one is ignored"

#: The delivery whose task body runs in this context.
current_delivery: Final[ContextVar[CeleryDelivery | None]] = ContextVar("ergon_delivery", default=None)


def get_invocation(task: CeleryProviderTask, request: Any) -> Invocation:
    """Read the invocation of *task* from *request*, a Celery context."""
    return read_invocation(
        task.call_spec, task_id=request.id, headers=request.headers, kwargs=request.kwargs, root_id=request.root_id
    )


class CeleryDelivery:
    """One delivery of a provider task."""

    def __init__(self, task: CeleryProviderTask, request: Any) -> None:
        self.invocation = get_invocation(task, request)
        self._task = task
        self._request = request
        self._ledger = task.ledger
        #: Whether Celery stores the task's result in a backend that can be queried.
        self._stores_result = _stores_result(task, request)
        #: The number of this delivery, counted from 1; 0 before the ledger has counted it.
        self._deliveries = 0
        #: The number of attempts of provider calls that the task body has made.
        self._attempts = 0

    def run(self, body: Callable[[], Any]) -> Any:
        """Run the task body and return its result.

        A failure raises the canonical error after its dead letter is written. Raises Ignore if the task has ended
        elsewhere, and Reject if it must be delivered again.
        """
        try:
            try:
                self._begin()
                value = self._run_in_context(body)
                self._check_result(value)
            finally:
                _disable_soft_limit()
        except (Ignore, Reject, Retry):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to third-party code; becomes a dead letter
            self._fail(error)
        return self._succeed(value)

    # -- before the body ----------------------------------------------------------------------------

    def _begin(self) -> None:
        invocation = self.invocation
        try:
            delivery = self._ledger.begin(invocation.task_id, invocation.task_name)
        except LEDGER_ERRORS as error:
            self._requeue(error)
        self._deliveries = delivery.deliveries
        if delivery.state is not TaskState.RUNNING:
            self._handle_ended_task(delivery)
        if delivery.deliveries > self._task.max_deliveries:
            raise ProviderInternalError(
                f"{self._task.max_deliveries} deliveries of the task ended without a result: its worker was lost",
                code="max_deliveries",
            )
        if invocation.rejection is not None:
            raise invocation.rejection

    def _handle_ended_task(self, delivery: TaskDelivery) -> None:
        """Handle a task that has ended before. Returns only if its result is known to be lost."""
        if delivery.state is TaskState.DEAD:
            self._report_failure_again()
        if delivery.state is TaskState.SUCCEEDED or not self._stores_result:
            raise Ignore(ALREADY_ENDED)
        try:
            stored_state = self._task.backend.get_task_meta(self._request.id, cache=False)["status"]
        except Exception as error:  # noqa: BLE001 - the result backend is third-party code
            self._requeue(error, is_counted=False)
        try:
            if stored_state != states.SUCCESS and (delivery.ended_ago or 0.0) >= REPORT_GRACE_SECONDS:
                self._ledger.reopen(self.invocation.task_id)
                return
            if stored_state == states.SUCCESS:
                self._ledger.confirm(self.invocation.task_id)
        except LEDGER_ERRORS as error:
            self._requeue(error)
        if stored_state != states.SUCCESS:
            self._requeue(None, is_counted=False)
        raise Ignore(ALREADY_ENDED)

    # -- the body -----------------------------------------------------------------------------------

    def _run_in_context(self, body: Callable[[], Any]) -> Any:
        invocation = self.invocation
        context = copy_context()
        # Instrumentation of Celery has already continued the trace.
        parent = extract_context(invocation.trace) if current_ids() is None else None
        if parent is not None:
            context = copy_with_otel_context(context, parent)
        return context.run(self._run_in_scope, body)

    def _run_in_scope(self, body: Callable[[], Any]) -> Any:
        invocation = self.invocation
        clock = time.monotonic
        scope.set_scope(
            scope.Scope(invocation.transaction, "task", self._deliveries - 1, clock() + invocation.budget, clock)
        )
        current_delivery.set(self)
        current_task_execution.set(invocation.task_execution_id)
        attempt_listener.set(self._log_attempt)
        return body()

    def _check_result(self, value: Any) -> None:
        """Check that the result is JSON; Celery would reject it only after the end is written to the ledger."""
        if not self._stores_result:
            return
        try:
            dumps(value, serializer="json")
        except EncodeError as error:
            raise ProviderResponseFormatError(
                f"the result of the Celery task, of type {type(value).__name__}, cannot be stored as JSON: return only "
                "values that Celery's JSON serializer supports",
                fault=False,
            ) from error

    # -- the end ------------------------------------------------------------------------------------

    def _succeed(self, value: Any) -> Any:
        invocation = self.invocation
        try:
            existing_state = self._ledger.complete(
                invocation.task_id, invocation.task_name, run=secrets.token_hex(8), is_reported=not self._stores_result
            )
        except LEDGER_ERRORS as error:
            self._requeue(error)
        if existing_state is TaskState.DEAD:
            self._report_failure_again()
        if existing_state is TaskState.SUCCEEDED:
            raise Ignore(ALREADY_ENDED)
        # Two deliveries that report the same result leave one; if the other worker was killed, this one reports it.
        self._log_end(logging.INFO, AttemptOutcome.SUCCESS, None)
        return value

    def _fail(self, error: Exception) -> NoReturn:
        """End the task with a dead letter and raise *error*, unless the task is requeued or sent again."""
        provider_error = _map_error(error)
        # A key held by a dead process says nothing about this delivery: its lease expires automatically.
        if provider_error.code == IN_FLIGHT:
            self._requeue(provider_error, is_counted=False)
        if isinstance(provider_error, ProviderCircuitOpenError):
            self._reschedule(provider_error)
            provider_error = _find_cause(provider_error, self.invocation.cause)
        if provider_error.code == STATE_UNAVAILABLE and self._deliveries < self._task.max_deliveries:
            self._requeue(provider_error)
        letter = build_dead_letter(self.invocation, provider_error, attempts=self._deliveries, now=time.time())
        try:
            state = self._ledger.fail(letter)
        except LEDGER_ERRORS as ledger_error:
            self._requeue(ledger_error)
        if state is TaskState.SUCCEEDED:
            raise Ignore(ALREADY_ENDED)
        if state is TaskState.SUCCEEDING:
            # Another delivery has a result. Whether its worker reports it shows at the next delivery.
            self._requeue(None, is_counted=False)
        self._log_end(
            logging.WARNING, AttemptOutcome.DEAD_LETTER, provider_error.reason_code, self._to_exception(provider_error)
        )
        _raise_clean(provider_error)

    def _reschedule(self, circuit_open: ProviderCircuitOpenError) -> None:
        """Send the task again for when the breaker may admit it and raise Retry; return if no retry is left."""
        task, request = self._task, self._request
        # An eager task would run again immediately, inside this call.
        if request.is_eager or (task.max_retries is not None and request.retries >= task.max_retries):
            return
        seconds = (circuit_open.open_until or 0.0) - time.time()
        countdown = max(MIN_COUNTDOWN_SECONDS, min(ceil(seconds), MAX_COUNTDOWN_SECONDS))
        headers = dict(request.as_execution_options()["headers"] or {})
        cause = circuit_open.__cause__ if isinstance(circuit_open.__cause__, ProviderError) else self.invocation.cause
        if cause is not None:
            headers[HEADER] = {**headers.get(HEADER, {}), CAUSE_FIELD: [cause.reason_code.value, describe_error(cause)]}
        with suppress(*LEDGER_ERRORS):
            self._ledger.release(self.invocation.task_id)
        try:
            retry = task.reschedule(countdown, headers=headers)
        except Reject:
            # The broker rejected the new message, so this one must stay.
            self._requeue(circuit_open)
        self._log_end(logging.INFO, AttemptOutcome.RETRY, circuit_open.reason_code)
        raise retry

    def _report_failure_again(self) -> NoReturn:
        """Report the recorded failure again: the process that recorded it may have been killed before reporting it."""
        try:
            dead_letter_info = self._ledger.get_dead_letter(self.invocation.task_id)
        except LEDGER_ERRORS as error:
            self._requeue(error)
        if dead_letter_info is None:
            raise Ignore(ALREADY_ENDED)
        error_type = ERROR_BY_REASON[ReasonCode(dead_letter_info.reason_code)]
        _raise_clean(error_type(dead_letter_info.error_message))

    def _requeue(self, error: Exception | None, *, is_counted: bool = True) -> NoReturn:
        """Requeue the message without reporting anything; with *is_counted* off, this delivery does not count."""
        if isinstance(error, LEDGER_ERRORS):
            log_task_event(
                logging.WARNING,
                Event.LEDGER_FAILED,
                self._build_log_fields(REQUEUED, None) | {Field.ERROR: describe_error(error)},
            )
        if not is_counted:
            with suppress(*LEDGER_ERRORS):
                self._ledger.release(self.invocation.task_id)
        reason = error.reason_code if isinstance(error, ProviderError) else None
        self._log_end(logging.INFO, REQUEUED, reason)
        time.sleep(REQUEUE_DELAY_SECONDS)
        raise Reject("the message is redelivered", requeue=True) from None

    # -- logging ------------------------------------------------------------------------------------

    def _log_attempt(self, request: ProviderRequest, row: AttemptRecord) -> None:
        self._attempts += 1
        has_failed = row.outcome is not AttemptOutcome.SUCCESS
        log_task_event(
            logging.WARNING if has_failed else logging.INFO,
            Event.PROVIDER_ATTEMPT,
            {
                Field.TENANT_ID: request.tenant_id,
                Field.CAMPAIGN_ID: request.campaign_id,
                Field.PROVIDER_NAME: request.provider_name,
                Field.CAPABILITY: request.capability,
                Field.OPERATION: request.operation,
                Field.CORRELATION_ID: request.correlation_id,
                Field.IDEMPOTENCY_KEY: request.idempotency_key,
                Field.ATTEMPT: row.attempt_number,
                Field.REASON_CODE: None if row.reason_code is None else row.reason_code.value,
                Field.OUTCOME: row.outcome.value,
            },
        )

    def _to_exception(self, error: ProviderError) -> tuple[ExcInfo, str] | None:
        """Return the error and traceback of the task's own code; None for failures that their reason code explains."""
        if error.reason_code is not ReasonCode.INTERNAL_ERROR:
            return None
        options = get_options(self._task)
        traceback = format_traceback(error, options)
        return None if traceback is None else (to_exc_info(error, options), traceback)

    def _log_end(
        self, level: int, outcome: str, reason: ReasonCode | None, exception: tuple[ExcInfo, str] | None = None
    ) -> None:
        log_task_event(level, Event.PROVIDER_TASK_ENDED, self._build_log_fields(outcome, reason), exception=exception)

    def _build_log_fields(self, outcome: str, reason: ReasonCode | None) -> dict[str, Any]:
        return log_fields(self.invocation, outcome, reason, attempt=self._attempts)


def log_fields(invocation: Invocation, outcome: str, reason: ReasonCode | None, *, attempt: int) -> dict[str, Any]:
    """Return the ten fields of every log record of a task."""
    return {
        Field.TENANT_ID: invocation.tenant_id,
        Field.CAMPAIGN_ID: invocation.campaign_id,
        Field.PROVIDER_NAME: invocation.provider_name,
        Field.CAPABILITY: invocation.capability,
        Field.OPERATION: invocation.operation,
        Field.CORRELATION_ID: invocation.correlation_id,
        Field.IDEMPOTENCY_KEY: invocation.key,
        Field.ATTEMPT: attempt,
        Field.REASON_CODE: None if reason is None else reason.value,
        Field.OUTCOME: str(outcome),
    }


def log_task_event(
    level: int, event: str, fields: Mapping[str, Any], *, exception: tuple[ExcInfo, str] | None = None
) -> None:
    """Log *event* of a task; fields that are None stay attributes of the record, so that all ten are present."""
    logs.log_event(level, event, fields, to=log, raised=exception, keep_none=True)


def _stores_result(task: CeleryProviderTask, request: Any) -> bool:
    if request.is_eager or get_actual_ignore_result(task, request):
        return False
    # A reply that is sent to the caller cannot be queried.
    return not isinstance(task.backend, DisabledBackend | RPCBackend)


def _map_error(error: Exception) -> ProviderError:
    try:
        return to_provider_error(error, now=time.time())
    except Exception:  # noqa: BLE001 - an exception that cannot be inspected still ends the task
        return ProviderInternalError("the task failed with an exception that cannot be read")


def _find_cause(circuit_open: ProviderCircuitOpenError, known_cause: ProviderError | None) -> ProviderError:
    """Return the failure that opened the breaker if this or an earlier delivery saw it, else *circuit_open*."""
    cause = circuit_open.__cause__ if isinstance(circuit_open.__cause__, ProviderError) else known_cause
    if cause is None:
        return circuit_open
    combined_error = ERROR_BY_REASON[cause.reason_code](
        f"{describe_error(cause)}; then {describe_error(circuit_open)}", http_status=cause.http_status
    )
    combined_error.details, combined_error.attempts = circuit_open.details, circuit_open.attempts
    return combined_error


def _raise_clean(error: ProviderError) -> NoReturn:
    """Raise *error* without its cause: Celery stores and logs the traceback, which may quote third-party messages."""
    clean_error = type(error).__new__(type(error))
    clean_error.args = error.args
    clean_error.__dict__.update(
        {name: value for name, value in vars(error).items() if name not in {"attempts", "result"}}
    )
    raise clean_error from None


# -- the soft time limit ----------------------------------------------------------------------------


def _disable_soft_limit() -> None:
    """Ignore the soft limit until the next task: it must not interrupt the recording and reporting of an end."""
    if _is_main() and signal.getsignal(SIG_SOFT_TIMEOUT) is soft_timeout_sighandler:
        signal.signal(SIG_SOFT_TIMEOUT, _ignore_signal)


def _restore_soft_limit(**_: Any) -> None:
    """Restore Celery's soft limit handler when any task starts."""
    if _is_main() and signal.getsignal(SIG_SOFT_TIMEOUT) is _ignore_signal:
        signal.signal(SIG_SOFT_TIMEOUT, soft_timeout_sighandler)


def _ignore_signal(_signal: int, _frame: object) -> None:
    """Ignore the signal; a separate handler, so that a handler installed by other code is not replaced."""


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


task_prerun.connect(_restore_soft_limit, weak=False, dispatch_uid="ergon-soft-limit")


# -- exit of a pool child ---------------------------------------------------------------------------


def _write_metrics(**_: Any) -> None:
    """Write the pending metrics: a child of the pool exits without the interpreter's exit handlers."""
    close_writers()


worker_process_shutdown.connect(_write_metrics, weak=False, dispatch_uid="ergon-provider-metrics")
