"""Fetching: the call to a connector that may be slow, fail, hang or lose its connection.

A fetch claims deliveries: until they are settled or released, no other worker gets them. The fetcher is a script, a
generator whose effects a driver performs. It retries under the policy of the step fetch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import Call, Err, Expired, Interrupted, Ok, Script, await_exit, call, sleep
from ergon_framework.errors import Category, ConnectionLostError, ErgonError, error_message, has_valid_verdict
from ergon_framework.failure import describe_error
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import FetchException, FetchTimeoutException
from ergon_framework.worker.report import StopReason

if TYPE_CHECKING:
    from ergon_framework.clock import Clock
    from ergon_framework.engine.retry import StepObserver
    from ergon_framework.worker.policies import RetryPolicy

FetchResult: TypeAlias = list[Delivery] | StopReason | FetchException


class Fetcher:
    """Fetches under the policy ``steps.fetch.retry``; two fetches never overlap."""

    def __init__(
        self,
        fetch: Callable[[int], Any],
        retry: RetryPolicy,
        *,
        clock: Clock,
        deadline: float,
        retries_lost_connections: bool,
        release: Callable[[Delivery, str], None],
        on_retry: Callable[[int, BaseException, float], None] | None = None,
    ) -> None:
        self._fetch = fetch
        self._retry = retry
        self._clock = clock
        #: The end of the loop's timeout.
        self._deadline = deadline
        #: Whether lost connections are retried without limit and use up no attempts: the loop is a streaming one.
        self._retries_lost_connections = retries_lost_connections
        self._release_delivery = release
        #: Called for each failed attempt that another follows; a lost connection is an outage, and does not count.
        self._on_retry = on_retry
        #: The number of calls to the connector.
        self.calls = 0
        #: The abandoned call that may still return deliveries.
        self.abandoned_call: Call | None = None
        #: The error of the last attempt, for probes; None if it succeeded.
        self.last_error: str | None = None

    def run(self, max_count: int, observer: StepObserver | None) -> Script[FetchResult]:
        """Return deliveries, or why the loop ends."""
        monotonic, retry = self._clock.monotonic, self._retry
        number = lost_connections = 0
        while True:
            now = monotonic()
            until = self._deadline if retry.timeout is None else min(self._deadline, now + retry.timeout)
            context = None if observer is None else observer.on_attempt_start(number)
            answer: Any = yield from call(
                Call("fetch", self._call_fetch, (max_count,), until, None, context, self._release_late)
            )
            error = yield from self._find_error(answer)
            if observer is not None:
                observer.on_attempt_end(number, error if isinstance(error, BaseException) else None)
            if error is None:
                self.last_error = None
                return list(answer.value)
            if isinstance(error, StopReason):
                return error
            self.last_error = _summarize(error.__cause__ or error)
            if self._retries_lost_connections and isinstance(error.__cause__, ConnectionLostError):
                delay = retry.delay(lost_connections, self._clock.random)
                lost_connections += 1
            elif error.final or number + 1 >= retry.max_attempts:
                return error
            else:
                delay = max(retry.delay(number, self._clock.random), error.retry_after or 0.0)
                if self._on_retry is not None:
                    self._on_retry(number, error, delay)
                number += 1
            end = yield from self._wait(max(delay, error.retry_after or 0.0))
            if end is not None:
                return end

    def await_abandoned_fetch(self, until: float) -> Script[None]:
        """Wait for the abandoned fetch, until *until* at most, so that its deliveries are released cleanly."""
        if self.abandoned_call is not None:
            yield from await_exit(self.abandoned_call, until)

    def _release_late(self, value: Any) -> None:
        """Release the deliveries of a fetch that returned after the loop had stopped waiting for it."""
        self._release(value, "late")

    def _release(self, value: Any, reason: str) -> None:
        for each in value if _is_batch(value) else ():
            # A claim without a hashable receipt cannot be settled: it ends with its lease.
            if isinstance(each, Delivery) and _is_hashable(each.receipt):
                self._release_delivery(each, reason)

    def _call_fetch(self, max_count: int) -> Any:
        # Counted when the call is made: after a stop, a call that was requested is never made.
        self.calls += 1
        return self._fetch(max_count)

    def _find_error(self, answer: Ok | Err | Expired | Interrupted) -> Script[FetchException | StopReason | None]:
        """Return the error of a fetch, or why the loop ends; None after a success."""
        if isinstance(answer, Ok):
            return self._check_batch(answer.value)
        if isinstance(answer, Err):
            return _to_fetch_error(answer.error)
        now = self._clock.monotonic()
        is_over = isinstance(answer, Interrupted) or now >= self._deadline
        # If the loop ends, await_exit() only cancels the call where the driver can, and does not wait for its exit.
        has_exited: bool | Interrupted = True
        if answer.call is not None:
            has_exited = yield from await_exit(answer.call, now if is_over else now + self._retry.exit_grace)
            if has_exited is not True:
                self.abandoned_call = answer.call
        if isinstance(answer, Interrupted) or isinstance(has_exited, Interrupted):
            return StopReason.STOP
        if is_over:
            return StopReason.TIMEOUT
        error = FetchTimeoutException(f"fetching from the connector timed out after {self._retry.timeout} s")
        if not has_exited:
            # A second fetch next to one that still runs could claim deliveries that are never used.
            error.final = True
        return error

    def _check_batch(self, value: Any) -> FetchException | None:
        """Return the error of an invalid batch, and release the deliveries in it; None if the batch is valid."""
        if not _is_batch(value):
            return _to_fetch_error(
                TypeError(f"a fetch must return a sequence of deliveries, not {type(value).__name__}")
            )
        for number, each in enumerate(value):
            mismatch = _find_mismatch(each)
            if mismatch is not None:
                self._release(value, StopReason.FETCH.value)
                error = _to_fetch_error(TypeError(f"item {number + 1} of {len(value)} is {mismatch}"))
                # Another attempt would claim more deliveries, and the connector has the same defect.
                error.final = True
                return error
        return None

    def _wait(self, delay: float) -> Script[StopReason | None]:
        """Wait *delay* seconds; return why the loop ends, None if another attempt may follow."""
        until = self._clock.monotonic() + delay
        if (yield from sleep(min(until, self._deadline))) is not None:
            return StopReason.STOP
        return StopReason.TIMEOUT if self._clock.monotonic() >= self._deadline else None


def _is_batch(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _find_mismatch(each: Any) -> str | None:
    """Describe how *each* differs from a valid delivery; return None if it is valid."""
    if not isinstance(each, Delivery):
        return (
            f"a {type(each).__name__}; expected Delivery(transaction, receipt), "
            "or a connector derived from SimpleConnector, whose fetch() returns transactions"
        )
    if not isinstance(each.transaction, Transaction):
        kind = type(each.transaction).__name__
        return f"a Delivery of a {kind}; expected Delivery(Transaction(id, payload), receipt)"
    if not _is_hashable(each.receipt):
        return f"a Delivery whose receipt is a {type(each.receipt).__name__}; expected a hashable receipt"
    if not isinstance(each.deliveries, int):
        return f"a Delivery whose deliveries is a {type(each.deliveries).__name__}; expected a count from 1"
    return None


def _is_hashable(receipt: Any) -> bool:
    try:
        hash(receipt)
    except TypeError:
        return False
    return True


def _summarize(error: BaseException) -> str:
    """Name *error* for probes; only a lost connection has its message, because others may quote a payload."""
    name = type(error).__name__
    return f"{name}: {describe_error(error)}" if isinstance(error, ConnectionLostError) else name


def _to_fetch_error(cause: BaseException) -> FetchException:
    error = FetchException(f"the connector could not be read: {type(cause).__name__}: {error_message(cause, raw=True)}")
    if isinstance(cause, ErgonError) and has_valid_verdict(cause):
        error.final = cause.final or cause.category is Category.BUSINESS
        error.retry_after = cause.retry_after
    error.__cause__ = cause
    return error
