"""What is seen of provider calls: spans, metrics and log events. None of it can fail a call, or hold a payload."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, Final

from ergon_framework import scope
from ergon_framework.failure import describe
from ergon_framework.providers.circuit_breaker import BreakerState
from ergon_framework.providers.errors import ProviderError
from ergon_framework.providers.execution import AttemptRow, ProviderExecutionResult, Request
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import Bound, Counts, Numbers, registry_of
from ergon_framework.telemetry.names import LIBRARY, Attribute, Event, Field, Span
from ergon_framework.telemetry.outgoing import outgoing

log: Final = logging.getLogger(f"{LIBRARY}.providers")


#: Who else is to hear of every attempt that is made in this context.
listener: Final[ContextVar[Callable[[Request, AttemptRow], object] | None]] = ContextVar("ergon_attempts", default=None)


def safely(act: Callable[..., object], *args: Any) -> Any:
    """What *act* returns; None if it fails, which is logged: telemetry is foreign code and no part of the call."""
    try:
        return act(*args)
    except Exception as error:  # noqa: BLE001 - see above
        logs.telemetry_failed(error)
        return None


class Observer:
    """Looks on one call."""

    __slots__ = ("_request", "_spans")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._spans = outgoing(Span.PROVIDER_CALL, _which(request))

    def attempt(self, number: int) -> Context | None:
        spans = self._spans
        if spans is None:
            return None
        return spans.attempt(Span.PROVIDER_CALL_ATTEMPT, _which(self._request) | {Attribute.ATTEMPT: number - 1})

    def attempted(self, row: AttemptRow, error: ProviderError | None) -> None:
        tally_of(row.provider_name).attempted(row)
        if self._spans is not None:
            told = {Attribute.OUTCOME: row.outcome.value} | _blame(error)
            if row.http_status is not None:
                told[Attribute.HTTP_STATUS] = row.http_status
            self._spans.attempted(told, _name(error))
        hear = listener.get()
        if hear is not None:
            safely(hear, self._request, row)

    def breaker(self, state: BreakerState) -> None:
        request = self._request
        tally_of(request.provider_name).entered(request.capability, state)
        level = logging.WARNING if state is BreakerState.OPEN else logging.INFO
        logs.say(level, Event.BREAKER_CHANGED, self._who() | {Field.BREAKER_STATE: state.value}, to=log)

    def books_failed(self, error: BaseException) -> None:
        # The message may be a statement with its values.
        logs.say(logging.WARNING, Event.BOOKS_FAILED, self._who() | {Field.ERROR_TYPE: type(error).__name__}, to=log)

    def succeeded(self, result: ProviderExecutionResult) -> None:
        self._over("replayed" if result.replayed else "success", "", None)

    def failed(self, error: BaseException) -> None:
        if isinstance(error, ProviderError):
            self._say_failed(error)
            self._over("failed", error.reason_code.value, error)
        else:
            self._over("failed", type(error).__name__, error)

    def _over(self, outcome: str, code: str, error: BaseException | None) -> None:
        request = self._request
        tally_of(request.provider_name).called(request.capability, outcome, code)
        if self._spans is not None:
            told = {Attribute.OUTCOME: outcome, Attribute.REPLAYED: outcome == "replayed"}
            self._spans.over(told | _blame(error), _name(error))

    def _say_failed(self, error: ProviderError) -> None:
        # Below a handler the transaction's own end is what is logged, once.
        level = logging.DEBUG if scope.current() is not None else logging.WARNING
        if log.isEnabledFor(level):
            fields = {
                Field.ATTEMPT: len(error.attempts),
                Field.REASON_CODE: error.reason_code.value,
                Field.OUTCOME: "failed",
                Field.ERROR: describe(error),
                Field.ERROR_TYPE: type(error).__name__,
            }
            logs.say(level, Event.PROVIDER_CALL_FAILED, self._who() | fields, to=log)

    def _who(self) -> dict[str, Any]:
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


def _which(request: Request) -> dict[str, Any]:
    return {
        Attribute.PROVIDER: request.provider_name,
        Attribute.CAPABILITY: request.capability,
        Attribute.OPERATION: request.operation,
    }


def _blame(error: BaseException | None) -> dict[str, Any]:
    """What a span tells of *error*: the message of one of ours is clean, another's may hold anything."""
    if error is None:
        return {}
    told = {Attribute.EXCEPTION_TYPE: type(error).__name__}
    if isinstance(error, ProviderError):
        told |= {Attribute.CODE: error.reason_code.value, Attribute.EXCEPTION_MESSAGE: describe(error)}
    return told


def _name(error: BaseException | None) -> str | None:
    return None if error is None else type(error).__name__


# -- what is counted ------------------------------------------------------------------------------------


class Tally(Counts):
    """What one provider counts, from all threads: plain numbers, which are told apart only when somebody reads them."""

    def __init__(self, provider_name: str, *, bound: Bound) -> None:
        super().__init__(provider_name, steps=(), everyday=("", ""), bound=bound)
        self._lock = threading.Lock()
        #: By capability, outcome and reason: how many, and how many seconds they took.
        self._attempts: dict[tuple[str, str, str], list[float]] = {}
        self._calls: dict[tuple[str, str, str], int] = {}

    def renew(self) -> None:
        self._lock = threading.Lock()

    def attempted(self, row: AttemptRow) -> None:
        reason = "" if row.reason_code is None else row.reason_code.value
        key = row.capability, row.outcome.value, reason
        with self._lock:
            found = self._attempts.get(key)
            if found is None:
                found = self._attempts[key] = [0, 0.0]
            found[0] += 1
            found[1] += row.duration_ms

    def called(self, capability: str, outcome: str, code: str) -> None:
        key = capability, outcome, code
        with self._lock:
            self._calls[key] = self._calls.get(key, 0) + 1

    def entered(self, capability: str, state: BreakerState) -> None:
        with self._lock:
            self.add(names.PROVIDER_BREAKERS, capability, state.value)

    def dropped(self, capability: str, reason: str, rows: int) -> None:
        with self._lock:
            self.add(names.PROVIDER_ROWS_DROPPED, capability, reason, amount=rows)

    def counted(self) -> Numbers:
        with self._lock:
            found = super().counted()
            found |= {(names.PROVIDER_CALLS.name, key): made for key, made in self._calls.items()}
            for (capability, outcome, reason), (made, spent_ms) in self._attempts.items():
                found[names.PROVIDER_ATTEMPTS.name, (capability, outcome, reason)] = made
                seconds = names.PROVIDER_SECONDS.name, (capability,)
                found[seconds] = found.get(seconds, 0.0) + spent_ms / 1000
        return found


_lock = threading.Lock()
_tallies: Final[dict[str, Tally]] = {}


def tally_of(provider_name: str) -> Tally:
    """The one tally of all providers of that name in this process."""
    found = _tallies.get(provider_name)
    if found is None:
        with _lock:
            registry = registry_of()
            found = _tallies.setdefault(provider_name, registry.join(Tally, provider_name))
    return found


def _forked() -> None:
    """A child of a fork: whoever held one of these locks is not here."""
    global _lock  # noqa: PLW0603 - a lock that somebody else holds for ever has to be replaced
    _lock = threading.Lock()
    for tally in _tallies.values():
        tally.renew()


os.register_at_fork(after_in_child=_forked)
