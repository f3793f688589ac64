"""The request of a task in the parent of a pool: failures of a killed child are recorded here before they are reported.

They are recorded in the ledger, the store of the deliveries and the end of each task, which all workers share. Celery
itself reports first and calls on_failure afterwards. The parent forks, so this module keeps no connection; it
serves all children, so nothing here blocks for long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import Celery
from celery.app.task import Context
from celery.exceptions import TaskPredicate, Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.log import get_logger
from celery.worker.request import Request
from celery.worker.state import task_ready
from celery.worker.strategy import default
from kombu.asynchronous import get_event_loop

from ergon_framework.failure import describe_error
from ergon_framework.providers.celery.delivery import (
    LEDGER_ERRORS,
    REQUEUED,
    get_invocation,
    log_fields,
    log_task_event,
)
from ergon_framework.providers.celery.invocation import Invocation
from ergon_framework.providers.celery.ledger import TaskState
from ergon_framework.providers.celery.task import CeleryProviderTask
from ergon_framework.providers.dead_letter import build_dead_letter
from ergon_framework.providers.error_mapping import to_provider_error
from ergon_framework.providers.errors import ProviderBadRequestError, ProviderError
from ergon_framework.providers.health import AttemptOutcome
from ergon_framework.telemetry.names import Event, Field

_celery_log: Final = get_logger("celery.worker.request")
#: Seconds before a message is requeued whose end could not be recorded.
REQUEUE_DELAY_SECONDS: Final = 5.0
#: Exceptions that a provider task reports to the parent without a failure outside its body.
_EXPECTED_ERRORS: Final = (ProviderError, TaskPredicate, Terminated, WorkerLostError, SystemExit, KeyboardInterrupt)


class CeleryProviderRequest(Request):  # type: ignore[misc]  # Celery comes without types
    """A request that ends a task whose child was killed at the hard limit, and requeues failures outside the body.

    A lost child does not end the task: its message is redelivered, and deliveries are counted.
    """

    #: The failure at the hard limit: None before it, False if there is nothing to report (the task has succeeded, or is
    #: requeued), else the reported exception info. Set by on_failure, which Celery calls before on_timeout.
    _limit_failure: Any = None

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:  # noqa: FBT001, FBT002
        error = _unwrap_error(exc_info)
        if isinstance(error, TimeLimitExceeded):
            # Celery calls this before on_timeout.
            self._limit_failure = self._end_at_limit(error)
            return (
                super().on_failure(self._limit_failure, send_failed_event, return_ok) if self._limit_failure else None
            )
        if isinstance(error, _EXPECTED_ERRORS):
            return super().on_failure(exc_info, send_failed_event, return_ok)
        # Most likely the result backend failed: the task may have ended without a report.
        _celery_log.error("reporting %s[%s] failed (%s)", self.name, self.id, type(error).__name__)
        return self._requeue()

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: FBT001 - Celery's signature
        if soft or self._limit_failure is None:
            super().on_timeout(soft, timeout)
        elif self._limit_failure is not False:
            self.task.on_failure(
                _unwrap_error(self._limit_failure), self.id, self.args, self.kwargs, self._limit_failure
            )

    def _end_at_limit(self, error: BaseException) -> Any:
        provider_error = to_provider_error(error, now=time.time())
        provider_error.__cause__ = None
        state = record_dead_letter(self.task, get_invocation(self.task, self._context), provider_error)
        if state is TaskState.DEAD:
            return _to_exception_info(provider_error)
        if state is TaskState.SUCCEEDED:
            task_ready(self)
            self.acknowledge()
        else:
            self._requeue()
        return False

    def _requeue(self) -> None:
        task_ready(self)
        call_later(lambda: self.reject(requeue=True))


def record_dead_letter(task: CeleryProviderTask, invocation: Invocation, error: ProviderError) -> TaskState | None:
    """Record the dead letter from a parent process; return the state of the task, None if it is unknown."""
    letter = build_dead_letter(invocation, error, attempts=1, now=time.time())
    try:
        state = task.ledger.with_short_connections().fail(letter)
    except LEDGER_ERRORS as ledger_error:
        fields = log_fields(invocation, REQUEUED, error.reason_code, attempt=1)
        log_task_event(logging.WARNING, Event.LEDGER_FAILED, fields | {Field.ERROR: describe_error(ledger_error)})
        return None
    if state is TaskState.DEAD:
        fields = log_fields(invocation, AttemptOutcome.DEAD_LETTER, error.reason_code, attempt=letter.attempts)
        log_task_event(logging.WARNING, Event.PROVIDER_TASK_ENDED, fields)
    return state


def call_later(action: Callable[[], object]) -> None:
    """Call *action* after a delay without blocking the event loop; immediately in a pool without an event loop."""
    loop = get_event_loop()
    if loop is None:
        action()
    else:
        loop.call_later(REQUEUE_DELAY_SECONDS, action)


def json_only_strategy(task: CeleryProviderTask, app: Celery, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Wrap Celery's default strategy: a message that is not JSON is dead-lettered without being decoded."""
    default_handler = default(task, app, consumer, **options)

    def handle_message(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any) -> Any:
        if message.content_type == "application/json":
            return default_handler(message, body, ack, reject, callbacks)
        errors = consumer.connection_errors
        if not message.headers.get("id"):
            return reject(_celery_log, errors, False)  # noqa: FBT003 - Celery's signature; the message is not a task
        context = Context(message.headers, kwargs={}, reply_to=(message.properties or {}).get("reply_to"))
        error = ProviderBadRequestError("the message is not JSON: send the task with serializer='json'", sent=False)
        if record_dead_letter(task, get_invocation(task, context), error) is None:
            return call_later(lambda: reject(_celery_log, errors, True))  # noqa: FBT003 - Celery's signature
        try:
            task.backend.mark_as_failure(context.id, error, request=context, store_result=not task.ignore_result)
        except Exception:  # noqa: BLE001 - the result backend is third-party code; the dead letter is recorded
            _celery_log.warning("reporting %s[%s] failed", task.name, context.id)
        return ack(_celery_log, errors)

    return handle_message


def _unwrap_error(info: Any) -> BaseException:
    """Return the raised exception without billiard's wrapper."""
    exception: Any = info.exception
    return exception.exc if isinstance(exception, ExceptionWithTraceback) else exception  # type: ignore[no-any-return]


def _to_exception_info(error: ProviderError) -> ExceptionInfo:
    try:
        raise error
    except ProviderError:
        return ExceptionInfo()
