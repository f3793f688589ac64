"""What is seen of provider calls: spans, metrics and log events. None of it can fail a call, or hold a payload."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import Context, ContextVar
from typing import Any, Final

from ergon_framework import scope
from ergon_framework.failure import describe
from ergon_framework.providers.circuit_breaker import BreakerState
from ergon_framework.providers.errors import ProviderCircuitOpenError, ProviderError, ProviderQuotaExceededError
from ergon_framework.providers.execution import AttemptRow, ProviderExecutionResult, Request
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import Bound, Counts, Numbers, registry_of
from ergon_framework.telemetry.names import LIBRARY, Attribute, Event, Field, Metric, Span
from ergon_framework.telemetry.outgoing import Outgoing, current_tracer

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
    """Looks on one call; *cooldown* is how long a breaker that opens stays so."""

    __slots__ = ("_cooldown", "_request", "_spans")

    def __init__(self, request: Request, *, cooldown: float = 0.0) -> None:
        self._request = request
        self._cooldown = cooldown
        tracer = current_tracer()
        self._spans = None if tracer is None else Outgoing(tracer, Span.PROVIDER_CALL, _which(request))

    def attempt(self, number: int) -> Context | None:
        spans = self._spans
        if spans is None:
            return None
        return spans.attempt(Span.PROVIDER_CALL_ATTEMPT, _which(self._request) | {Attribute.ATTEMPT: number - 1})

    def attempted(self, row: AttemptRow, error: ProviderError | None) -> None:
        tally = tally_of(row.provider_name)
        tally.attempted(row)
        metric = _HOLDING.get(type(error))
        if metric is None:
            # A call that failed had its quota; that the breaker is closed only a success says.
            freed = (names.PROVIDER_EXHAUSTED,) if error is not None else _HOLDING.values()
            tally.free(row.capability, row.tenant_id, freed)
        else:
            seconds = 0.0 if error is None or error.retry_after is None else error.retry_after
            tally.hold(metric, row.capability, row.tenant_id, seconds=seconds)
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
        tally = tally_of(request.provider_name)
        tally.entered(request.capability, state)
        if state is BreakerState.OPEN:
            tally.hold(names.PROVIDER_OPEN, request.capability, request.tenant_id, seconds=self._cooldown)
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


#: By the error that says so: that calls are held back, and by what.
_HOLDING: Final[dict[type[object], Metric]] = {
    ProviderCircuitOpenError: names.PROVIDER_OPEN,
    ProviderQuotaExceededError: names.PROVIDER_EXHAUSTED,
}
#: Of how many tenants it is remembered.
_REMEMBERED: Final = 1_000


class Tally(Counts):
    """What one provider counts, from all threads: plain numbers, which are told apart only when somebody reads them."""

    def __init__(self, provider_name: str, *, bound: Bound) -> None:
        super().__init__(provider_name, steps=(), everyday=("", ""), bound=bound)
        self._lock = threading.Lock()
        #: By capability, outcome and reason: how many, and how many seconds they took.
        self._attempts: dict[tuple[str, str, str], list[float]] = {}
        self._calls: dict[tuple[str, str, str], int] = {}
        #: By metric, capability and tenant: until when calls are known to be held back.
        self._held: dict[tuple[str, str, str], float] = {}

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

    def hold(self, metric: Metric, capability: str, tenant_id: str, *, seconds: float) -> None:
        """Calls of *tenant_id* are held back for so long."""
        now = time.monotonic()
        with self._lock:
            self._held.pop((metric.name, capability, tenant_id), None)
            self._held[metric.name, capability, tenant_id] = now + seconds
            if len(self._held) > _REMEMBERED:
                self._held = {key: until for key, until in self._held.items() if until > now}
            while len(self._held) > _REMEMBERED:
                del self._held[next(iter(self._held))]

    def free(self, capability: str, tenant_id: str, metrics: Iterable[Metric]) -> None:
        """These do not hold the calls of *tenant_id* back."""
        if self._held:
            with self._lock:
                for metric in metrics:
                    self._held.pop((metric.name, capability, tenant_id), None)

    def gauged(self) -> Numbers:
        now = time.monotonic()
        with self._lock:
            capabilities = {capability for capability, _, _ in self._attempts}
            found: Numbers = {(metric.name, (one,)): 0 for metric in _HOLDING.values() for one in capabilities}
            found |= {(name, (one,)): 1 for (name, one, _), until in self._held.items() if until > now}
        return found

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
