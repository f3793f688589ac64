"""One delivery of a task, in the process that runs it: counted, run within its budget, and ended once.

The end is written to the ledger before Celery reports it. If the ledger cannot be reached, nothing
is reported, and the message goes back to its queue: whatever happened, a later delivery tells.
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
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.failure import describe
from ergon_framework.providers.calling import BOOKS_UNAVAILABLE, IN_FLIGHT
from ergon_framework.providers.deadletter import dead_letter
from ergon_framework.providers.errors import (
    BY_REASON,
    ProviderCircuitOpenError,
    ProviderError,
    ProviderInternalError,
    ProviderResponseFormatError,
    ReasonCode,
)
from ergon_framework.providers.execution import AttemptRow, Request, current_task_execution
from ergon_framework.providers.health import Outcome
from ergon_framework.providers.invocation import CAUSE, HEADER, Invocation, read
from ergon_framework.providers.mapping import canonical
from ergon_framework.providers.observe import listener
from ergon_framework.providers.sql.ledger import Begun, State
from ergon_framework.providers.sql.writer import close_writers
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.context import current_ids, inbound, within
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.telemetry.options import options_of
from ergon_framework.telemetry.tracebacks import ExcInfo, format_traceback, to_exc_info

if TYPE_CHECKING:
    from ergon_framework.providers.celery_task import CeleryProviderTask

log: Final = logging.getLogger(f"{LIBRARY}.providers.celery")

#: Seconds before a message goes back to its queue, which hands it out again at once.
PAUSE: Final = 1.0
#: Seconds within which whoever wrote a result down is taken to be reporting it.
GRACE: Final = 10.0
#: What a ledger raises: whatever it was asked to do may have been done, or not.
LEDGER_ERRORS: Final = (ConnectionLost, ConfigurationError)
#: Seconds after which a task is sent again that met an open breaker: whole ones and at least one, as delayed delivery
#: on RabbitMQ needs it, and far below the time after which Redis hands an unacknowledged message out again.
MIN_COUNTDOWN: Final = 1
MAX_COUNTDOWN: Final = 300
#: What became of a delivery that ended nothing.
REQUEUED: Final = "requeued"

#: The delivery whose body runs here.
current: Final[ContextVar[Delivery | None]] = ContextVar("ergon_delivery", default=None)


def invoked(task: CeleryProviderTask, request: Any) -> Invocation:
    """What *request*, a context of Celery's, asks of *task*."""
    return read(
        task.called, task_id=request.id, headers=request.headers, kwargs=request.kwargs, root_id=request.root_id
    )


class Delivery:
    """One delivery on its way to its end."""

    def __init__(self, task: CeleryProviderTask, request: Any) -> None:
        self.invocation = invoked(task, request)
        self._task = task
        self._request = request
        self._ledger = task.ledger
        #: Whether Celery stores what a task returns where it can be looked up.
        self._keeps = _keeps(task, request)
        self._deliveries = 0
        self._attempts = 0

    def run(self, body: Callable[[], Any]) -> Any:
        """What the task's body returned.

        A failure raises the canonical error, when its dead letter is written. Ignore is raised if the
        task has ended elsewhere, Reject if it has to be delivered again.
        """
        try:
            try:
                self._begin()
                value = self._run(body)
                self._check(value)
            finally:
                _deafen()
        except (Ignore, Reject, Retry):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to foreign code; becomes a dead letter
            self._failed(error)
        return self._succeeded(value)

    # -- before the body ----------------------------------------------------------------------------

    def _begin(self) -> None:
        invocation = self.invocation
        try:
            begun = self._ledger.begin(invocation.task_id, invocation.task_name)
        except LEDGER_ERRORS as error:
            self._come_again(error)
        self._deliveries = begun.deliveries
        if begun.state is not State.RUNNING:
            self._met(begun)
        if begun.deliveries > self._task.max_deliveries:
            raise ProviderInternalError(
                f"{self._task.max_deliveries} deliveries of the task have not come to an end: its worker was lost",
                code="max_deliveries",
            )
        if invocation.refused is not None:
            raise invocation.refused

    def _met(self, begun: Begun) -> None:
        """The task has ended before. Returns only if its result is known to have been lost."""
        if begun.state is State.DEAD:
            self._fail_again()
        if begun.state is State.SUCCEEDED or not self._keeps:
            raise Ignore("the task has ended")
        try:
            stored = self._task.backend.get_task_meta(self._request.id, cache=False)["status"]
        except Exception as error:  # noqa: BLE001 - the store of results is foreign code
            self._come_again(error, counted=False)
        try:
            if stored != states.SUCCESS and (begun.ended_ago or 0.0) >= GRACE:
                self._ledger.reopen(self.invocation.task_id)
                return
            if stored == states.SUCCESS:
                self._ledger.confirm(self.invocation.task_id)
        except LEDGER_ERRORS as error:
            self._come_again(error)
        if stored != states.SUCCESS:
            self._come_again(None, counted=False)
        raise Ignore("the task has ended")

    # -- the body -----------------------------------------------------------------------------------

    def _run(self, body: Callable[[], Any]) -> Any:
        invocation = self.invocation
        variables = copy_context()
        # Whoever instruments Celery has continued the trace already.
        parent = inbound(invocation.trace) if current_ids() is None else None
        if parent is not None:
            variables = within(variables, parent)
        return variables.run(self._within, body)

    def _within(self, body: Callable[[], Any]) -> Any:
        invocation = self.invocation
        clock = time.monotonic
        scope.enter(
            scope.Scope(invocation.transaction, "task", self._deliveries - 1, clock() + invocation.budget, clock)
        )
        current.set(self)
        current_task_execution.set(invocation.task_execution_id)
        listener.set(self._heard)
        return body()

    def _check(self, value: Any) -> None:
        """Celery would find it out when the end is already written down."""
        if not self._keeps:
            return
        try:
            dumps(value, serializer="json")
        except EncodeError as error:
            raise ProviderResponseFormatError(
                f"the result of the task is no JSON but {type(value).__name__}", fault=False
            ) from error

    # -- its end ------------------------------------------------------------------------------------

    def _succeeded(self, value: Any) -> Any:
        invocation = self.invocation
        try:
            known = self._ledger.succeed(
                invocation.task_id, invocation.task_name, run=secrets.token_hex(8), reported=not self._keeps
            )
        except LEDGER_ERRORS as error:
            self._come_again(error)
        if known is State.DEAD:
            self._fail_again()
        if known is State.SUCCEEDED:
            raise Ignore("the task has ended")
        # Two that both report the same result to a store leave one; if the other one died, this is it.
        self._over(logging.INFO, Outcome.SUCCESS, None)
        return value

    def _failed(self, error: Exception) -> NoReturn:
        found = _mapped(error)
        # No second delivery can be at fault for a key that a dead process holds: the lease ends by itself.
        if found.code == IN_FLIGHT:
            self._come_again(found, counted=False)
        if isinstance(found, ProviderCircuitOpenError):
            self._reschedule(found)
            found = _find_cause(found, self.invocation.cause)
        if found.code == BOOKS_UNAVAILABLE and self._deliveries < self._task.max_deliveries:
            self._come_again(found)
        letter = dead_letter(self.invocation, found, attempts=self._deliveries, now=time.time())
        try:
            state = self._ledger.bury(letter)
        except LEDGER_ERRORS as lost:
            self._come_again(lost)
        if state is State.SUCCEEDED:
            raise Ignore("the task has ended")
        if state is State.SUCCEEDING:
            # Another delivery has a result. Whether it lives to report it is seen at the next one.
            self._come_again(None, counted=False)
        self._over(logging.WARNING, Outcome.DEAD_LETTER, found.reason_code, self._to_exception(found))
        _raise_clean(found)

    def _reschedule(self, refused: ProviderCircuitOpenError) -> None:
        """Send the task again for when the breaker may admit it, and raise Retry; return if no retry is left."""
        task, request = self._task, self._request
        # An eager task would be run again at once, in this very call.
        if request.is_eager or (task.max_retries is not None and request.retries >= task.max_retries):
            return
        wait = (refused.open_until or 0.0) - time.time()
        countdown = max(MIN_COUNTDOWN, min(ceil(wait), MAX_COUNTDOWN))
        headers = dict(request.as_execution_options()["headers"] or {})
        cause = refused.__cause__ if isinstance(refused.__cause__, ProviderError) else self.invocation.cause
        if cause is not None:
            headers[HEADER] = {**headers.get(HEADER, {}), CAUSE: [cause.reason_code.value, describe(cause)]}
        with suppress(*LEDGER_ERRORS):
            self._ledger.give_back(self.invocation.task_id)
        try:
            again = task.reschedule(countdown, headers=headers)
        except Reject:
            # The broker did not accept it, so this message has to stay.
            self._come_again(refused)
        self._over(logging.INFO, Outcome.RETRY, refused.reason_code)
        raise again

    def _fail_again(self) -> NoReturn:
        """Report the failure that was written down: whoever did so may not have lived to report it."""
        try:
            buried = self._ledger.buried(self.invocation.task_id)
        except LEDGER_ERRORS as error:
            self._come_again(error)
        if buried is None:
            raise Ignore("the task has ended")
        kind = BY_REASON[ReasonCode(buried.reason_code)]
        _raise_clean(kind(buried.error_message))

    def _come_again(self, error: Exception | None, *, counted: bool = True) -> NoReturn:
        """Give the message back. Nothing is reported, and where nothing was tried, no delivery is counted."""
        if isinstance(error, LEDGER_ERRORS):
            log_envelope(
                logging.WARNING, Event.LEDGER_FAILED, self._envelope(REQUEUED, None) | {Field.ERROR: describe(error)}
            )
        if not counted:
            with suppress(*LEDGER_ERRORS):
                self._ledger.give_back(self.invocation.task_id)
        reason = error.reason_code if isinstance(error, ProviderError) else None
        self._over(logging.INFO, REQUEUED, reason)
        time.sleep(PAUSE)
        raise Reject("it comes again", requeue=True) from None

    # -- what is said of it -------------------------------------------------------------------------

    def _heard(self, request: Request, row: AttemptRow) -> None:
        self._attempts += 1
        failed = row.outcome is not Outcome.SUCCESS
        log_envelope(
            logging.WARNING if failed else logging.INFO,
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
        """Return the error and traceback of the task's own code; None for failures that their reason explains."""
        if error.reason_code is not ReasonCode.INTERNAL_ERROR:
            return None
        options = options_of(self._task)
        traceback = format_traceback(error, options)
        return None if traceback is None else (to_exc_info(error, options), traceback)

    def _over(
        self, level: int, outcome: str, reason: ReasonCode | None, raised: tuple[ExcInfo, str] | None = None
    ) -> None:
        log_envelope(level, Event.PROVIDER_TASK_ENDED, self._envelope(outcome, reason), raised=raised)

    def _envelope(self, outcome: str, reason: ReasonCode | None) -> dict[str, Any]:
        return envelope(self.invocation, outcome, reason, attempt=self._attempts)


def envelope(invocation: Invocation, outcome: str, reason: ReasonCode | None, *, attempt: int) -> dict[str, Any]:
    """The ten fields of every log record of a task."""
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


def log_envelope(
    level: int, event: str, fields: Mapping[str, Any], *, raised: tuple[ExcInfo, str] | None = None
) -> None:
    """Log *event* of a task; fields that are None stay attributes of the record, so that all ten are there."""
    logs.say(level, event, fields, to=log, raised=raised, keep_none=True)


def _keeps(task: CeleryProviderTask, request: Any) -> bool:
    if request.is_eager or get_actual_ignore_result(task, request):
        return False
    # A reply that is sent to the caller cannot be looked up.
    return not isinstance(task.backend, DisabledBackend | RPCBackend)


def _mapped(error: Exception) -> ProviderError:
    try:
        return canonical(error, now=time.time())
    except Exception:  # noqa: BLE001 - an exception that cannot be looked at still ends the task
        return ProviderInternalError("the task failed with an exception that cannot be read")


def _find_cause(refused: ProviderCircuitOpenError, known: ProviderError | None) -> ProviderError:
    """Return the failure that opened the breaker if this delivery or an earlier one saw it, else *refused*."""
    cause = refused.__cause__ if isinstance(refused.__cause__, ProviderError) else known
    if cause is None:
        return refused
    real = BY_REASON[cause.reason_code](f"{describe(cause)}; then {describe(refused)}", http_status=cause.http_status)
    real.particulars, real.attempts = refused.particulars, refused.attempts
    return real


def _raise_clean(error: ProviderError) -> NoReturn:
    """Raise it without its cause: Celery stores and logs the traceback, and foreign words are no business of theirs."""
    clean = type(error).__new__(type(error))
    clean.args = error.args
    clean.__dict__.update({name: value for name, value in vars(error).items() if name not in {"attempts", "result"}})
    raise clean from None


# -- the soft time limit ----------------------------------------------------------------------------


def _deafen() -> None:
    """Ignore the soft limit from here to the next task: it must not strike while an end is written and reported."""
    if _is_main() and signal.getsignal(SIG_SOFT_TIMEOUT) is soft_timeout_sighandler:
        signal.signal(SIG_SOFT_TIMEOUT, _ignore)


def _listen(**_: Any) -> None:
    """A task begins, whichever it is."""
    if _is_main() and signal.getsignal(SIG_SOFT_TIMEOUT) is _ignore:
        signal.signal(SIG_SOFT_TIMEOUT, soft_timeout_sighandler)


def _ignore(_signal: int, _frame: object) -> None:
    """A handler of our own, so that nobody else's choice is undone."""


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


task_prerun.connect(_listen, weak=False, dispatch_uid="ergon-soft-limit")


# -- the end of a child -----------------------------------------------------------------------------


def _write_metrics(**_: Any) -> None:
    """Write the metrics that wait: a child of the pool leaves without the interpreter's own end."""
    close_writers()


worker_process_shutdown.connect(_write_metrics, weak=False, dispatch_uid="ergon-provider-metrics")
