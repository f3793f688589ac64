"""A task in the parent of a pool: what dies with its child is written down here, before it is reported.

Celery's own order is to report first and to call on_failure afterwards. The parent forks, so that
nothing here keeps a connection, and it serves all children, so that nothing here waits for long.
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

from ergon_framework.failure import describe
from ergon_framework.providers.celery_delivery import LEDGER_ERRORS, REQUEUED, envelope, invoked, log_envelope
from ergon_framework.providers.celery_task import CeleryProviderTask
from ergon_framework.providers.deadletter import dead_letter
from ergon_framework.providers.errors import ProviderBadRequestError, ProviderError
from ergon_framework.providers.health import Outcome
from ergon_framework.providers.invocation import Invocation
from ergon_framework.providers.mapping import canonical
from ergon_framework.providers.sql.ledger import State
from ergon_framework.telemetry.names import Event, Field

_celery_log: Final = get_logger("celery.worker.request")
#: Seconds before a message goes back whose end could not be written down.
LATER: Final = 5.0
#: What reaches the parent of a task of ours without having gone wrong outside of its body.
_EXPECTED: Final = (ProviderError, TaskPredicate, Terminated, WorkerLostError, SystemExit, KeyboardInterrupt)


class ProviderRequest(Request):  # type: ignore[misc]  # Celery comes without types
    """Ends a task whose child was killed at the hard limit, and gives back what went wrong around a body.

    A child that was lost is not the end: its message comes again, and deliveries are counted.
    """

    #: The end at the hard limit: None before, False if there was none, else what is reported.
    _ended: Any = None

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:  # noqa: FBT001, FBT002
        error = _error(exc_info)
        if isinstance(error, TimeLimitExceeded):
            # Reached before on_timeout is.
            self._ended = self._end_at_limit(error)
            return super().on_failure(self._ended, send_failed_event, return_ok) if self._ended else None
        if isinstance(error, _EXPECTED):
            return super().on_failure(exc_info, send_failed_event, return_ok)
        # The store of results, most likely: the task may have ended, and nobody was told.
        _celery_log.error("%s[%s] could not be reported (%s)", self.name, self.id, type(error).__name__)
        return self._give_back()

    def on_timeout(self, soft: bool, timeout: float) -> None:  # noqa: FBT001 - Celery's signature
        if soft or self._ended is None:
            super().on_timeout(soft, timeout)
        elif self._ended is not False:
            self.task.on_failure(_error(self._ended), self.id, self.args, self.kwargs, self._ended)

    def _end_at_limit(self, error: BaseException) -> Any:
        found = canonical(error, now=time.time())
        found.__cause__ = None
        state = bury(self.task, invoked(self.task, self._context), found)
        if state is State.DEAD:
            return _info(found)
        if state is State.SUCCEEDED:
            task_ready(self)
            self.acknowledge()
        else:
            self._give_back()
        return False

    def _give_back(self) -> None:
        task_ready(self)
        later(lambda: self.reject(requeue=True))


def bury(task: CeleryProviderTask, invocation: Invocation, error: ProviderError) -> State | None:
    """Write the dead letter, from a parent; the state of the task, None where nobody knows."""
    letter = dead_letter(invocation, error, attempts=1, now=time.time())
    try:
        state = task.ledger.brief().bury(letter)
    except LEDGER_ERRORS as failure:
        told = envelope(invocation, REQUEUED, error.reason_code, attempt=1)
        log_envelope(logging.WARNING, Event.LEDGER_FAILED, told | {Field.ERROR: describe(failure)})
        return None
    if state is State.DEAD:
        told = envelope(invocation, Outcome.DEAD_LETTER, error.reason_code, attempt=letter.attempts)
        log_envelope(logging.WARNING, Event.PROVIDER_TASK_ENDED, told)
    return state


def later(act: Callable[[], object]) -> None:
    """Do *act* in a while, without holding up the loop; at once in a pool that has none."""
    loop = get_event_loop()
    if loop is None:
        act()
    else:
        loop.call_later(LATER, act)


def json_only(task: CeleryProviderTask, app: Celery, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Celery's own strategy for messages in JSON. Any other is never decoded, and is dead."""
    usual = default(task, app, consumer, **options)

    def received(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any) -> Any:
        if message.content_type == "application/json":
            return usual(message, body, ack, reject, callbacks)
        errors = consumer.connection_errors
        if not message.headers.get("id"):
            return reject(_celery_log, errors, False)  # noqa: FBT003 - Celery's signature; it is no task at all
        context = Context(message.headers, kwargs={}, reply_to=(message.properties or {}).get("reply_to"))
        error = ProviderBadRequestError("the message is no JSON; send the task with serializer='json'", sent=False)
        if bury(task, invoked(task, context), error) is None:
            return later(lambda: reject(_celery_log, errors, True))  # noqa: FBT003 - Celery's signature
        try:
            task.backend.mark_as_failure(context.id, error, request=context, store_result=not task.ignore_result)
        except Exception:  # noqa: BLE001 - the store of results is foreign code; the dead letter is written
            _celery_log.warning("%s[%s] could not be reported", task.name, context.id)
        return ack(_celery_log, errors)

    return received


def _error(info: Any) -> BaseException:
    """What was raised, out of what billiard wraps it in."""
    found: Any = info.exception
    return found.exc if isinstance(found, ExceptionWithTraceback) else found  # type: ignore[no-any-return]


def _info(error: ProviderError) -> ExceptionInfo:
    try:
        raise error
    except ProviderError:
        return ExceptionInfo()
