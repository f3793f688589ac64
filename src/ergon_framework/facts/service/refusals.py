"""RejectionHandler: ends failed calls. Callers get the reason, but no internal details of the service."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import grpc

from ergon_framework.errors import ConnectionLostError, error_message
from ergon_framework.facts import observe
from ergon_framework.facts.errors import AccessDenied, FactError, LimitExceeded, ServiceError
from ergon_framework.facts.service import faults
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts.service")
#: Seconds between two log entries about the same kind of rejection, and maximum number of kinds counted separately.
LOG_INTERVAL_SECONDS: Final = 60.0
MAX_KINDS: Final = 100


class RejectionHandler:
    """Ends calls that fail, and logs rejections: the first of a kind immediately, repeated ones as a count.

    A kind is the combination of method, address and reason. For one event loop.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[_RejectionKind, _RepeatedRejection] = {}

    def record(self, event: str, method: str, reason: str, peer: str) -> None:
        """Log a rejection, or count it."""
        kind = _RejectionKind(event, method, reason, peer.rpartition(":")[0])
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = _RejectionKind(event, None, "further kinds of refusals are not told apart", None)
        repeated = self._kinds.get(kind)
        if repeated is None:
            self._kinds[kind] = _RepeatedRejection(self._clock() + LOG_INTERVAL_SECONDS)
            kind.log(None)
        else:
            repeated.count += 1

    def report(self, *, everything: bool = False) -> None:
        """Log the counts that are due; with *everything*, at the end of the service, all of them."""
        now = self._clock()
        for kind, repeated in list(self._kinds.items()):
            if everything or now >= repeated.due:
                if repeated.count:
                    kind.log(repeated.count)
                    self._kinds[kind] = _RepeatedRejection(now + LOG_INTERVAL_SECONDS)
                else:
                    del self._kinds[kind]

    @asynccontextmanager
    async def abort_on_error(
        self, method: str, context: Any, *, before_abort: Callable[[FactError], Awaitable[None]] | None = None
    ) -> AsyncIterator[None]:
        """End the call of *method* with a status if it fails; count it, and log it if an operator must act.

        *before_abort* is awaited before a rejection ends the call.
        """
        try:
            yield
        except FactError as error:
            if isinstance(error, AccessDenied | LimitExceeded):
                event = Event.ACCESS_DENIED if isinstance(error, AccessDenied) else Event.LIMIT_REACHED
                self.record(event, method, error_message(error), context.peer())
            await _abort(method, context, faults.to_status_code(error), error, before_abort=before_abort)
        except ConnectionLostError as error:
            await _abort(method, context, grpc.StatusCode.UNAVAILABLE, error)
        except TimeoutError:
            timeout_error = ConnectionLostError(f"{method} took longer than the service allows; ask again")
            await _abort(method, context, grpc.StatusCode.DEADLINE_EXCEEDED, timeout_error)
        except grpc.aio.BaseError:
            # The connection is lost: no answer can reach the caller.
            observe.record_call(method, "left")
            raise
        except Exception as error:  # noqa: BLE001 - a defect of the service or store; its details are not sent
            reference = uuid.uuid4().hex[:12]
            fields = {Field.OPERATION: method, Field.CODE: reference, Field.ERROR_TYPE: _describe_origin(error)}
            logs.log_event(logging.ERROR, Event.CALL_FAILED, fields, to=log)
            service_error = ServiceError(f"{method} failed in the service; its log says more under {reference}")
            await _abort(method, context, grpc.StatusCode.INTERNAL, service_error)
        except BaseException:
            observe.record_call(method, "left")
            raise
        else:
            observe.record_call(method, "answered")


class BrokenConnectionFilter(logging.Filter):
    """Drops what gRPC logs as an error, with a traceback, when a caller closes its connection during a call."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def ignore_broken_connections() -> None:
    """Keep broken connections out of the log, because a caller could fill it with them. Call once per process."""
    core = logging.getLogger("grpc._cython.cygrpc")
    if not any(isinstance(each, BrokenConnectionFilter) for each in core.filters):
        core.addFilter(BrokenConnectionFilter())


class _RejectionKind(NamedTuple):
    event: str
    method: str | None
    reason: str
    address: str | None

    def log(self, count: int | None) -> None:
        fields = {
            Field.OPERATION: self.method,
            Field.REASON: self.reason,
            Field.SOURCE: self.address,
            Field.COUNT: count,
        }
        logs.log_event(logging.WARNING, self.event, fields, to=log)


@dataclass(slots=True)
class _RepeatedRejection:
    """How often a kind was rejected since it was last logged, and when the count is logged."""

    due: float
    count: int = 0


async def _abort(method: str, context: Any, status: grpc.StatusCode, error: Any, *, before_abort: Any = None) -> None:
    observe.record_call(method, status.name.lower())
    if before_abort is not None:
        await before_abort(error)
    fault = ((faults.METADATA_KEY, faults.to_wire(error).SerializeToString()),) if isinstance(error, FactError) else ()
    await context.abort(status, faults.to_status_message(error), trailing_metadata=fault)


def _describe_origin(error: BaseException) -> str:
    """Return the type of *error* and its origin; messages of third-party libraries may contain payloads."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" at {trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}"
    return f"{type(error).__qualname__}{where}"
