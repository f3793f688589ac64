"""Refusals: how a call ends that is not answered. The caller is told what he did, and never what we are made of."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import grpc

from ergon_framework.errors import ConnectionLost, text
from ergon_framework.facts import observe
from ergon_framework.facts.errors import AccessDenied, FactError, LimitExceeded, ServiceFailed
from ergon_framework.facts.service import faults
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts.service")
#: Seconds between two lines about the same kind of refusal, and how many kinds are told apart at once.
INTERVAL_SECONDS: Final = 60.0
MAX_KINDS: Final = 100


class Refusals:
    """Ends calls that fail, and logs refusals: the first of a kind at once, repeated ones as a count.

    A kind is what was refused, to which address and why. For one event loop.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kinds: dict[_Kind, _Repeated] = {}

    def note(self, event: str, method: str, reason: str, peer: str) -> None:
        """Log a refusal, or count it."""
        kind = _Kind(event, method, reason, peer.rpartition(":")[0])
        if kind not in self._kinds and len(self._kinds) >= MAX_KINDS:
            kind = _Kind(event, None, "further kinds of refusals are not told apart", None)
        known = self._kinds.get(kind)
        if known is None:
            self._kinds[kind] = _Repeated(self._clock() + INTERVAL_SECONDS)
            kind.log(None)
        else:
            known.count += 1

    def report(self, *, everything: bool = False) -> None:
        """Log the counts that are due; *everything* at the end of the service."""
        now = self._clock()
        for kind, repeated in list(self._kinds.items()):
            if everything or now >= repeated.due:
                if repeated.count:
                    kind.log(repeated.count)
                    self._kinds[kind] = _Repeated(now + INTERVAL_SECONDS)
                else:
                    del self._kinds[kind]

    @asynccontextmanager
    async def told(
        self, method: str, context: Any, *, first: Callable[[FactError], Awaitable[None]] | None = None
    ) -> AsyncIterator[None]:
        """End the call of *method* with a status if it fails; counted, and logged where somebody has to look at it.

        Before a refusal ends the call, *first* is awaited.
        """
        try:
            yield
        except FactError as error:
            if isinstance(error, AccessDenied | LimitExceeded):
                event = Event.ACCESS_DENIED if isinstance(error, AccessDenied) else Event.LIMIT_REACHED
                self.note(event, method, text(error), context.peer())
            await _end(method, context, faults.status(error), error, first=first)
        except ConnectionLost as error:
            await _end(method, context, grpc.StatusCode.UNAVAILABLE, error)
        except TimeoutError:
            late = ConnectionLost(f"{method} took longer than the service allows; ask again")
            await _end(method, context, grpc.StatusCode.DEADLINE_EXCEEDED, late)
        except grpc.aio.BaseError:
            # The connection is gone: no answer can reach the caller.
            observe.called(method, "left")
            raise
        except Exception as error:  # noqa: BLE001 - a defect of ours or of the store; the line must not learn what it is
            reference = uuid.uuid4().hex[:12]
            fields = {Field.OPERATION: method, Field.CODE: reference, Field.ERROR_TYPE: _place(error)}
            logs.say(logging.ERROR, Event.CALL_FAILED, fields, to=log)
            failed = ServiceFailed(f"{method} failed in the service; its log says more under {reference}")
            await _end(method, context, grpc.StatusCode.INTERNAL, failed)
        except BaseException:
            observe.called(method, "left")
            raise
        else:
            observe.called(method, "answered")


class BrokenConnections(logging.Filter):
    """Drop what gRPC logs as an error, with a traceback, when a caller closes its connection during a call."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


def ignore_broken_connections() -> None:
    """Keep broken connections out of the log; a caller could fill it with them. Once for each process."""
    core = logging.getLogger("grpc._cython.cygrpc")
    if not any(isinstance(each, BrokenConnections) for each in core.filters):
        core.addFilter(BrokenConnections())


class _Kind(NamedTuple):
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
        logs.say(logging.WARNING, self.event, fields, to=log)


@dataclass(slots=True)
class _Repeated:
    """How often a kind was refused since it was last logged, and when that is logged."""

    due: float
    count: int = 0


async def _end(method: str, context: Any, status: grpc.StatusCode, error: Any, *, first: Any = None) -> None:
    observe.called(method, status.name.lower())
    if first is not None:
        await first(error)
    fault = ((faults.KEY, faults.write(error).SerializeToString()),) if isinstance(error, FactError) else ()
    await context.abort(status, faults.details(error), trailing_metadata=fault)


def _place(error: BaseException) -> str:
    """The type of *error* and where it came from: words of foreign libraries may hold payloads."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = "" if trace is None else f" at {trace.tb_frame.f_globals.get('__name__')}:{trace.tb_lineno}"
    return f"{type(error).__qualname__}{where}"
