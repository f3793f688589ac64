"""Refusals: how a call ends that is not answered. The caller is told what he did, and never what we are made of."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from ergon_framework.errors import ConnectionLost, text
from ergon_framework.facts import observe
from ergon_framework.facts.errors import AccessDenied, FactError, ServiceFailed
from ergon_framework.facts.service import faults
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.facts.service")


@asynccontextmanager
async def told(
    method: str, context: Any, *, first: Callable[[FactError], Awaitable[None]] | None = None
) -> AsyncIterator[None]:
    """End the call of *method* with a status if it fails; counted, and logged where somebody has to look at it.

    Before a refusal ends the call, *first* is awaited.
    """
    try:
        yield
    except FactError as error:
        if isinstance(error, AccessDenied):
            fields = {Field.OPERATION: method, Field.REASON: text(error), Field.SOURCE: context.peer()}
            logs.say(logging.WARNING, Event.ACCESS_DENIED, fields, to=log)
        await _end(method, context, faults.status(error), error, first=first)
    except ConnectionLost as error:
        await _end(method, context, grpc.StatusCode.UNAVAILABLE, error)
    except TimeoutError:
        late = ConnectionLost(f"{method} took longer than the service allows; ask again")
        await _end(method, context, grpc.StatusCode.DEADLINE_EXCEEDED, late)
    except grpc.aio.UsageError:
        # The connection is gone, and nobody is left to be told.
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
