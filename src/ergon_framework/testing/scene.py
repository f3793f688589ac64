"""Recorder of the test harness: it records every call and raises the planned faults."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from ergon_framework.connectors.base import Confirmation, Delivery, Settlement, SettlementRequest, SettleResult
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.engine.outcome import Err, Ok
from ergon_framework.errors import ConnectionLostError
from ergon_framework.scope import current
from ergon_framework.testing.mishaps import Fault, Kind, Plan
from ergon_framework.testing.virtual import DAWN
from ergon_framework.transaction import Transaction

_BEFORE = frozenset({Kind.RAISES, Kind.ANSWERS, Kind.DIES})


class WorkerKilled(SystemExit):
    """The worker is killed: an exit that handlers do not catch by accident and an event loop passes on."""


@dataclass(slots=True)
class RecordedCall:
    """One call: place, arguments, virtual time, transaction, and result or error."""

    place: str
    at: float
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    transaction: str | None = None
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class RecordedSettlement:
    """One settlement received by the queue, and its result."""

    id: str
    settlement: Settlement
    result: SettleResult
    at: float


class CallRecorder:
    """Records calls and raises planned faults, in the virtual time of the harness."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clock: Callable[[], float] = lambda: 0.0
        #: Adds virtual seconds to the duration of a plain function; coroutines sleep instead.
        self.pass_by: Callable[[float], None] = _nobody_waits
        #: Kills the worker; the error that it raises ends the handler call in progress.
        self.kill: Callable[[], None] = _nobody_waits
        self.dead = False
        self.calls: list[RecordedCall] = []
        self.counts: Counter[str] = Counter()
        self.settled: list[RecordedSettlement] = []
        self.dispatched: list[tuple[str, Transaction]] = []
        self.deaths = 0

    def time(self) -> float:
        """Return the virtual seconds of the current clock."""
        return self.clock()

    # -- one call ------------------------------------------------------------------------------------

    def call(self, place: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a plain function with the fault planned for it."""
        called, mishap = self._begun(place, args, kwargs)
        with _noting(called):
            if mishap is None:
                called.result = inner(*args, **kwargs)
            elif mishap.kind in _BEFORE:
                called.result = self._before(mishap)
            else:
                answer = self._answered(inner, args, kwargs)
                called.result = getattr(answer, "value", None)  # recorded even if the caller does not receive it
                self._after(mishap)
                if mishap.seconds:
                    self.pass_by(mishap.seconds)
                _raise(answer)
        return called.result

    def _answered(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Ok | Err:
        """Call *inner* and return its result; an error is a result too, which may be delayed or lost."""
        try:
            return Ok(inner(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - passed on as data
            return Err(error)

    async def call_async(self, place: str, inner: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """Call a coroutine function with the fault planned for it."""
        called, mishap = self._begun(place, args, kwargs)
        with _noting(called):
            if mishap is None:
                called.result = await inner(*args, **kwargs)
            elif mishap.kind in _BEFORE:
                called.result = self._before(mishap)
            else:
                # A cancellation propagates; it is not a result.
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

    def _begun(self, place: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[RecordedCall, Fault | None]:
        where = current()
        called = RecordedCall(place, self.clock(), args, kwargs, None if where is None else where.transaction_id)
        if self.dead:
            # Calls of a killed worker are not made and not counted.
            raise ConnectionLostError("planned: this worker is dead")
        self.calls.append(called)
        number = self.counts[place]
        self.counts[place] += 1
        planned = self.plan.get(place, {})
        return called, planned if isinstance(planned, Fault) else planned.get(number)

    def _before(self, mishap: Fault) -> Any:
        if mishap.kind is Kind.DIES:
            self._die()
        if mishap.error is not None:
            raise mishap.error
        return mishap.value

    def _after(self, mishap: Fault) -> None:
        if mishap.kind is Kind.DIES_AFTER:
            self._die()
        if mishap.error is not None:
            raise mishap.error

    def _die(self) -> None:
        self.dead = True
        self.deaths += 1
        self.kill()
        raise WorkerKilled

    # -- wrapping ------------------------------------------------------------------------------------

    @contextmanager
    def wrap_object(self, target: Any, places: Mapping[str, str]) -> Iterator[None]:
        """Record the calls of *target* inside the context; *places* maps its method names to places."""
        if not places:
            yield
            return
        own = vars(target)
        before = {method: own[method] for method in places if method in own}
        for method, place in places.items():
            own[method] = self.wrap(getattr(target, method), place)
        try:
            yield
        finally:
            for method in places:
                del own[method]
            own.update(before)

    def wrap(self, inner: Callable[..., Any], place: str) -> Callable[..., Any]:
        """Return *inner* wrapped so that its calls are recorded."""
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
    """An in-memory queue in virtual time that records its calls and raises planned faults."""

    def __init__(self, name: str, scene: CallRecorder, *, lease: float = 30.0) -> None:
        super().__init__(name, lease=lease, clock=scene.time, wall=lambda: DAWN + scene.time())
        self._scene = scene

    def send(self, transactions: Sequence[Transaction]) -> None:
        """Dispatch *transactions* from outside the harness: neither recorded nor affected by faults."""
        super().dispatch(transactions)

    def fetch_transactions(self, batch_size: int, **_extra: Any) -> Sequence[Delivery]:
        # Without waiting: nothing else could run meanwhile.
        found: Sequence[Delivery] = self._scene.call("fetch", self._claim, batch_size)
        return found

    async def fetch_transactions_async(self, batch_size: int, **_extra: Any) -> Sequence[Delivery]:
        found: Sequence[Delivery] = await self._scene.call_async("fetch", _later(self._claim), batch_size)
        return found

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        results: Sequence[SettleResult] = self._scene.call("settle", self._settle_all, requests)
        return results

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        results: Sequence[SettleResult] = await self._scene.call_async("settle", _later(self._settle_all), requests)
        return results

    def _settle_all(self, settlings: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        results = super().settle(settlings)
        now = self._scene.clock()
        for (delivery, settlement), result in zip(settlings, results, strict=True):
            self._scene.settled.append(RecordedSettlement(delivery.transaction.id, settlement, result, now))
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
        stamped = [self.prepare(transaction) for transaction in transactions]
        confirmed = super().dispatch(stamped)
        self._scene.dispatched += [(self.name, transaction) for transaction in stamped]
        return confirmed

    def ids(self) -> list[str]:
        """Return the ids of all ready, delayed and claimed transactions, with duplicates."""
        with self._lock:
            return [self._read_id(message) for message in self._iter_messages()]


def _raise(answer: Ok | Err) -> None:
    if isinstance(answer, Err):
        raise answer.error


@contextmanager
def _noting(called: RecordedCall) -> Iterator[None]:
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
    """Do nothing: the harness is not running."""
