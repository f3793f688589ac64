"""Fetching: the one call to a connector that may be slow, fail, hang or find the line down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ergon_framework.connectors.base import Delivery
from ergon_framework.engine.effects import Call, Script, call, gone, sleep
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.errors import Category, ConnectionLost, ErgonError, is_sound, text
from ergon_framework.failure import describe
from ergon_framework.task.exceptions import FetchException, FetchTimeoutException
from ergon_framework.task.report import End
from ergon_framework.transaction import Transaction

if TYPE_CHECKING:
    from ergon_framework.engine.attempts import StepWatch
    from ergon_framework.engine.senses import Senses
    from ergon_framework.task.mixins.policies import RetryPolicy

Fetched: TypeAlias = list[Delivery] | End | FetchException


class Fetcher:
    """Fetches under ``fetch.retry``; two fetches never overlap."""

    def __init__(
        self,
        fetch: Callable[[int], Any],
        retry: RetryPolicy,
        *,
        senses: Senses,
        deadline: float,
        patient: bool,
        give_back: Callable[[Delivery, str], None],
        on_retry: Callable[[int, BaseException, float], None] | None = None,
    ) -> None:
        self._fetch = fetch
        self._retry = retry
        self._senses = senses
        #: When the loop's own time is over.
        self._deadline = deadline
        #: A lost connection is waited out instead of spending the budget.
        self._patient = patient
        self._give_back = give_back
        #: Called for each failed attempt that another follows; a lost connection is an outage, and not counted.
        self._on_retry = on_retry
        #: How often the connector was called.
        self.calls = 0
        #: The call that nobody waits for any more, and that may still bring something.
        self.behind: Call | None = None
        #: Why the last attempt failed, for those who look; None when it did not.
        self.failing: str | None = None

    def run(self, room: int, watch: StepWatch | None) -> Script[Fetched]:
        """Deliveries; or why the loop ends instead."""
        clock, retry = self._senses.clock, self._retry
        number = lost = 0
        while True:
            now = clock()
            until = self._deadline if retry.timeout is None else min(self._deadline, now + retry.timeout)
            context = None if watch is None else watch.attempt(number)
            answer: Any = yield from call(Call("fetch", self._called, (room,), until, None, context, self._late))
            error = yield from self._error(answer)
            if watch is not None:
                watch.attempted(number, error if isinstance(error, BaseException) else None)
            if error is None:
                self.failing = None
                return list(answer.value)
            if isinstance(error, End):
                return error
            self.failing = _summarize(error.__cause__ or error)
            if self._patient and isinstance(error.__cause__, ConnectionLost):
                delay = retry.delay(lost, self._senses.dice)
                lost += 1
            elif error.final or number + 1 >= retry.max_attempts:
                return error
            else:
                delay = max(retry.delay(number, self._senses.dice), error.retry_after or 0.0)
                if self._on_retry is not None:
                    self._on_retry(number, error, delay)
                number += 1
            ended = yield from self._waited(max(delay, error.retry_after or 0.0))
            if ended is not None:
                return ended

    def left(self, until: float) -> Script[None]:
        """Wait for the call that was left behind, until then at most: what it brings is to go back in good order."""
        if self.behind is not None:
            yield from gone(self.behind, until)

    def _late(self, value: Any) -> None:
        """Give back what a fetch returned after the loop had stopped waiting for it."""
        self._release(value, "late")

    def _release(self, value: Any, reason: str) -> None:
        for each in value if _is_batch(value) else ():
            # A claim without a hashable receipt cannot be settled: it ends with its lease.
            if isinstance(each, Delivery) and _is_hashable(each.receipt):
                self._give_back(each, reason)

    def _called(self, room: int) -> Any:
        # Counted here and not where it is asked for: a stop may come between the two.
        self.calls += 1
        return self._fetch(room)

    def _error(self, answer: Ok | Err | Expired | Stopped) -> Script[FetchException | End | None]:
        """How a fetch failed, or why the loop ends; None if it did not fail."""
        if isinstance(answer, Ok):
            return self._check(answer.value)
        if isinstance(answer, Err):
            return _read(answer.error)
        now = self._senses.clock()
        over = isinstance(answer, Stopped) or now >= self._deadline
        left: bool | Stopped = True
        if answer.body is not None:
            left = yield from gone(answer.body, now if over else now + self._retry.abandon_grace)
            if left is not True:
                self.behind = answer.body
        if isinstance(answer, Stopped) or isinstance(left, Stopped):
            return End.STOP
        if over:
            return End.TIMEOUT
        error = FetchTimeoutException(f"the connector did not answer within {self._retry.timeout} s")
        if not left:
            # A second fetch beside one that still runs could hand out what nobody waits for.
            error.final = True
        return error

    def _check(self, value: Any) -> FetchException | None:
        """Return the error of an invalid batch, and release the deliveries in it; None if the batch is valid."""
        if not _is_batch(value):
            return _read(TypeError(f"a fetch must return a sequence of deliveries, not {type(value).__name__}"))
        for number, each in enumerate(value):
            mismatch = _find_mismatch(each)
            if mismatch is not None:
                self._release(value, End.FETCH.value)
                error = _read(TypeError(f"item {number + 1} of {len(value)} is {mismatch}"))
                # Another attempt would only claim more.
                error.final = True
                return error
        return None

    def _waited(self, delay: float) -> Script[End | None]:
        until = self._senses.clock() + delay
        if (yield from sleep(min(until, self._deadline))) is not None:
            return End.STOP
        return End.TIMEOUT if self._senses.clock() >= self._deadline else None


def _is_batch(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _find_mismatch(each: Any) -> str | None:
    """Say how *each* differs from a delivery that a loop can work with; None if it does not."""
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
    """Name *error* for probes; only a lost connection says more, because other messages may quote a payload."""
    name = type(error).__name__
    return f"{name}: {describe(error)}" if isinstance(error, ConnectionLost) else name


def _read(cause: BaseException) -> FetchException:
    error = FetchException(f"the connector could not be read: {type(cause).__name__}: {text(cause, raw=True)}")
    if isinstance(cause, ErgonError) and is_sound(cause):
        error.final = cause.final or cause.category is Category.BUSINESS
        error.retry_after = cause.retry_after
    error.__cause__ = cause
    return error
