"""The scene of a trial: every call is noted here, and meets what was planned for it."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from ergon_framework.connectors.base import Confirmation, Delivery, Settlement, SettleResult, Settling
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.engine.outcome import Err, Ok
from ergon_framework.errors import ConnectionLost
from ergon_framework.scope import current
from ergon_framework.testing.mishaps import Kind, Mishap, Plan
from ergon_framework.testing.virtual import DAWN
from ergon_framework.transaction import Transaction

_BEFORE = frozenset({Kind.RAISES, Kind.ANSWERS, Kind.DIES})


class Death(SystemExit):
    """The worker is gone: no handler catches it by accident, and an event loop lets it through; the trial does not."""


@dataclass(slots=True)
class Called:
    """One call: where, with what, when in virtual seconds, for which transaction, and what came of it."""

    place: str
    at: float
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    transaction: str | None = None
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """One settlement that the queue was given, and its answer."""

    id: str
    settlement: Settlement
    result: SettleResult
    at: float


class Scene:
    """Notes calls and has mishaps happen, in the time of whoever runs the trial."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock: Callable[[], float] = lambda: 0.0
        #: Has a plain function take so many virtual seconds; coroutines sleep.
        self.pass_by: Callable[[float], None] = _nobody_waits
        #: Ends the worker; what it raises ends the body that it is called in.
        self.kill: Callable[[], None] = _nobody_waits
        self.dead = False
        self.calls: list[Called] = []
        self.counts: Counter[str] = Counter()
        self.settled: list[Settled] = []
        self.dispatched: list[tuple[str, Transaction]] = []
        self.deaths = 0

    def time(self) -> float:
        """Virtual seconds, by the clock of whoever runs now."""
        return self.clock()

    # -- one call ------------------------------------------------------------------------------------

    def call(self, place: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call of a plain function, with what was planned for it."""
        called, mishap = self._begun(place, args, kwargs)
        with _noting(called):
            if mishap is None:
                called.result = inner(*args, **kwargs)
            elif mishap.kind in _BEFORE:
                called.result = self._before(mishap)
            else:
                answer = self._answered(inner, args, kwargs)
                called.result = getattr(answer, "value", None)  # known here, also if nobody hears of it
                self._after(mishap)
                if mishap.seconds:
                    self.pass_by(mishap.seconds)
                _raise(answer)
        return called.result

    def _answered(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Ok | Err:
        """What came of a call; an error is an answer too, which comes late, or is lost."""
        try:
            return Ok(inner(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - handed on as data
            return Err(error)

    async def call_async(self, place: str, inner: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """Make a call of a coroutine function, with what was planned for it."""
        called, mishap = self._begun(place, args, kwargs)
        with _noting(called):
            if mishap is None:
                called.result = await inner(*args, **kwargs)
            elif mishap.kind in _BEFORE:
                called.result = self._before(mishap)
            else:
                # Who is cancelled leaves: that is no answer.
                answer = await self._answered_async(inner, args, kwargs)
                called.result = getattr(answer, "value", None)
                self._after(mishap)
                if mishap.seconds:
                    await asyncio.sleep(mishap.seconds)
                _raise(answer)
        return called.result

    async def _answered_async(
        self, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Ok | Err:
        try:
            return Ok(await inner(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as above
            return Err(error)

    def _begun(self, place: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Called, Mishap | None]:
        where = current()
        called = Called(place, self.clock(), args, kwargs, None if where is None else where.transaction_id)
        if self.dead:
            # Whatever a dead worker still tries reaches nobody, and counts for nothing.
            raise ConnectionLost("planned: this worker is dead")
        self.calls.append(called)
        number = self.counts[place]
        self.counts[place] += 1
        planned = self.plan.get(place, {})
        return called, planned if isinstance(planned, Mishap) else planned.get(number)

    def _before(self, mishap: Mishap) -> Any:
        if mishap.kind is Kind.DIES:
            self._die()
        if mishap.error is not None:
            raise mishap.error
        return mishap.value

    def _after(self, mishap: Mishap) -> None:
        if mishap.kind is Kind.DIES_AFTER:
            self._die()
        if mishap.error is not None:
            raise mishap.error

    def _die(self) -> None:
        self.dead = True
        self.deaths += 1
        self.kill()
        raise Death

    # -- whom it watches -----------------------------------------------------------------------------

    @contextmanager
    def watching(self, target: Any, places: Mapping[str, str]) -> Iterator[None]:
        """Have the methods of *target* be called here for as long as this lasts: names of methods, and places."""
        if not places:
            yield
            return
        own = vars(target)
        before = {method: own[method] for method in places if method in own}
        for method, place in places.items():
            own[method] = self.watched(getattr(target, method), place)
        try:
            yield
        finally:
            for method in places:
                del own[method]
            own.update(before)

    def watched(self, inner: Callable[..., Any], place: str) -> Callable[..., Any]:
        """*inner*, called here."""
        if inspect.iscoroutinefunction(inner):

            @wraps(inner)
            async def called_async(*args: Any, **kwargs: Any) -> Any:
                return await self.call_async(place, inner, *args, **kwargs)

            return called_async

        @wraps(inner)
        def called(*args: Any, **kwargs: Any) -> Any:
            return self.call(place, inner, *args, **kwargs)

        return called


class FakeQueue(MemoryConnector):
    """A queue in memory and in virtual time, whose calls meet what was planned for them."""

    def __init__(self, name: str, scene: Scene, *, lease: float = 30.0) -> None:
        super().__init__(name, lease=lease, clock=scene.time, wall=lambda: DAWN + scene.time())
        self._scene = scene

    def send(self, transactions: Sequence[Transaction]) -> None:
        """Put them in, as somebody outside of the trial."""
        super().dispatch(transactions)

    def fetch_transactions(self, batch_size: int, **_extra: Any) -> Sequence[Delivery]:
        # Without waiting: nothing else could happen meanwhile.
        found: Sequence[Delivery] = self._scene.call("fetch", self._claim, batch_size)
        return found

    async def fetch_transactions_async(self, batch_size: int, **_extra: Any) -> Sequence[Delivery]:
        found: Sequence[Delivery] = await self._scene.call_async("fetch", _later(self._claim), batch_size)
        return found

    def settle(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        results: Sequence[SettleResult] = self._scene.call("settle", self._settle_all, settlings)
        return results

    async def settle_async(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        results: Sequence[SettleResult] = await self._scene.call_async("settle", _later(self._settle_all), settlings)
        return results

    def _settle_all(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        results = super().settle(settlings)
        now = self._scene.clock()
        for (delivery, settlement), result in zip(settlings, results, strict=True):
            self._scene.settled.append(Settled(delivery.transaction.id, settlement, result, now))
        return results

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        until: Sequence[float | None] = self._scene.call("extend", super().extend, deliveries)
        return until

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        until: Sequence[float | None] = await self._scene.call_async("extend", _later(super().extend), deliveries)
        return until

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        confirmed: Sequence[Confirmation] = self._scene.call("dispatch", self._dispatch_all, transactions)
        return confirmed

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        confirmed: Sequence[Confirmation] = await self._scene.call_async(
            "dispatch", _later(self._dispatch_all), transactions
        )
        return confirmed

    def _dispatch_all(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        stamped = [self.stamped(transaction) for transaction in transactions]
        confirmed = super().dispatch(stamped)
        self._scene.dispatched += [(self.name, transaction) for transaction in stamped]
        return confirmed

    def ids(self) -> list[str]:
        """Of everything that is ready, delayed or in flight; an id that is there twice, twice."""
        with self._lock:
            return [self._id(message) for message in self._alive()]


def _raise(answer: Ok | Err) -> None:
    if isinstance(answer, Err):
        raise answer.error


@contextmanager
def _noting(called: Called) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        called.error = error
        raise


def _later(inner: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def made(*args: Any) -> Any:
        return inner(*args)

    return made


def _nobody_waits(*_: Any) -> None:
    """No trial runs."""
