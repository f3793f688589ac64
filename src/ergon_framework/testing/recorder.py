"""Recorder of the test harness: it records every call and raises the planned faults.

A place is a kind of call that can have a fault, such as ``fetch``, ``process`` or ``bank.charge``; a plan maps places
and call numbers to faults.
"""

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
from ergon_framework.engine.effects import Err, Ok
from ergon_framework.errors import ConnectionLostError
from ergon_framework.scope import current
from ergon_framework.testing.faults import Fault, FaultKind, Plan
from ergon_framework.testing.virtual_time import START_UNIX_SECONDS
from ergon_framework.transaction import Transaction

_FAULTS_BEFORE_CALL = frozenset({FaultKind.RAISES, FaultKind.RETURNS, FaultKind.WORKER_DIES_BEFORE})


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
        self.add_duration: Callable[[float], None] = _do_nothing
        #: Ends the loop of the worker that a fault kills; set by the harness. WorkerKilled ends the call in progress.
        self.kill: Callable[[], None] = _do_nothing
        #: Whether a fault has killed the running worker; the harness resets it when the next one starts.
        self.is_killed = False
        self.calls: list[RecordedCall] = []
        #: The number of calls so far, by place: the number of the next call, for its planned fault.
        self.counts: Counter[str] = Counter()
        self.settled: list[RecordedSettlement] = []
        self.dispatched: list[tuple[str, Transaction]] = []
        self.killed_workers = 0

    def time(self) -> float:
        """Return the virtual seconds of the current clock."""
        return self.clock()

    # -- one call ------------------------------------------------------------------------------------

    def call(self, place: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a plain function with the fault planned for it."""
        record, fault = self._begin_call(place, args, kwargs)
        with _record_error(record):
            if fault is None:
                record.result = inner(*args, **kwargs)
            elif fault.kind in _FAULTS_BEFORE_CALL:
                record.result = self._apply_before_call(fault)
            else:
                outcome = self._call_inner(inner, args, kwargs)
                record.result = getattr(outcome, "value", None)  # recorded even if the caller does not receive it
                self._apply_after_call(fault)
                if fault.seconds:
                    self.add_duration(fault.seconds)
                _raise_if_error(outcome)
        return record.result

    def _call_inner(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Ok | Err:
        """Call *inner* and return its result; an error is a result too, which may be delayed or lost."""
        try:
            return Ok(inner(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - passed on as data
            return Err(error)

    async def call_async(self, place: str, inner: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        """Call a coroutine function with the fault planned for it."""
        record, fault = self._begin_call(place, args, kwargs)
        with _record_error(record):
            if fault is None:
                record.result = await inner(*args, **kwargs)
            elif fault.kind in _FAULTS_BEFORE_CALL:
                record.result = self._apply_before_call(fault)
            else:
                # A cancellation propagates; it is not a result.
                outcome = await self._call_inner_async(inner, args, kwargs)
                record.result = getattr(outcome, "value", None)
                self._apply_after_call(fault)
                if fault.seconds:
                    await asyncio.sleep(fault.seconds)
                _raise_if_error(outcome)
        return record.result

    async def _call_inner_async(
        self, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Ok | Err:
        try:
            return Ok(await inner(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - passed on as data
            return Err(error)

    def _begin_call(
        self, place: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[RecordedCall, Fault | None]:
        """Record a call and return it with the fault planned for it; a killed worker makes no call."""
        current_scope = current()
        record = RecordedCall(
            place, self.clock(), args, kwargs, None if current_scope is None else current_scope.transaction_id
        )
        if self.is_killed:
            # Calls of a killed worker are not made and not counted.
            raise ConnectionLostError("planned: this worker was killed")
        self.calls.append(record)
        number = self.counts[place]
        self.counts[place] += 1
        planned = self.plan.get(place, {})
        return record, planned if isinstance(planned, Fault) else planned.get(number)

    def _apply_before_call(self, fault: Fault) -> Any:
        if fault.kind is FaultKind.WORKER_DIES_BEFORE:
            self._kill_worker()
        if fault.error is not None:
            raise fault.error
        return fault.value

    def _apply_after_call(self, fault: Fault) -> None:
        if fault.kind is FaultKind.WORKER_DIES_AFTER:
            self._kill_worker()
        if fault.error is not None:
            raise fault.error

    def _kill_worker(self) -> None:
        self.is_killed = True
        self.killed_workers += 1
        self.kill()
        raise WorkerKilled

    # -- wrapping ------------------------------------------------------------------------------------

    @contextmanager
    def wrap_object(self, target: Any, places: Mapping[str, str]) -> Iterator[None]:
        """Record the calls of *target* inside the context; *places* maps its method names to places."""
        if not places:
            yield
            return
        attributes = vars(target)
        originals = {method: attributes[method] for method in places if method in attributes}
        for method, place in places.items():
            attributes[method] = self.wrap(getattr(target, method), place)
        try:
            yield
        finally:
            for method in places:
                del attributes[method]
            attributes.update(originals)

    def wrap(self, inner: Callable[..., Any], place: str) -> Callable[..., Any]:
        """Return *inner* wrapped so that its calls are recorded."""
        if inspect.iscoroutinefunction(inner):

            @wraps(inner)
            async def wrapper_async(*args: Any, **kwargs: Any) -> Any:
                return await self.call_async(place, inner, *args, **kwargs)

            return wrapper_async

        @wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.call(place, inner, *args, **kwargs)

        return wrapper


class FakeQueue(MemoryConnector):
    """An in-memory queue in virtual time that records its calls and raises planned faults."""

    def __init__(self, name: str, recorder: CallRecorder, *, lease: float = 30.0) -> None:
        super().__init__(name, lease=lease, clock=recorder.time, wall=lambda: START_UNIX_SECONDS + recorder.time())
        self._recorder = recorder

    def send(self, transactions: Sequence[Transaction]) -> None:
        """Dispatch *transactions* from outside the harness: neither recorded nor affected by faults."""
        super().dispatch(transactions)

    def fetch_transactions(self, batch_size: int, **_extra: Any) -> Sequence[Delivery]:
        # Without waiting for arrivals: nothing else could run meanwhile.
        deliveries: Sequence[Delivery] = self._recorder.call("fetch", self._claim, batch_size)
        return deliveries

    async def fetch_transactions_async(self, batch_size: int, **_extra: Any) -> Sequence[Delivery]:
        deliveries: Sequence[Delivery] = await self._recorder.call_async("fetch", _to_async(self._claim), batch_size)
        return deliveries

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        results: Sequence[SettleResult] = self._recorder.call("settle", self._settle_all, requests)
        return results

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        results: Sequence[SettleResult] = await self._recorder.call_async(
            "settle", _to_async(self._settle_all), requests
        )
        return results

    def _settle_all(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        results = super().settle(requests)
        now = self._recorder.clock()
        for (delivery, settlement), result in zip(requests, results, strict=True):
            self._recorder.settled.append(RecordedSettlement(delivery.transaction.id, settlement, result, now))
        return results

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        lease_ends: Sequence[float | None] = self._recorder.call("extend", super().extend, deliveries)
        return lease_ends

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        lease_ends: Sequence[float | None] = await self._recorder.call_async(
            "extend", _to_async(super().extend), deliveries
        )
        return lease_ends

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        confirmations: Sequence[Confirmation] = self._recorder.call("dispatch", self._dispatch_all, transactions)
        return confirmations

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        confirmations: Sequence[Confirmation] = await self._recorder.call_async(
            "dispatch", _to_async(self._dispatch_all), transactions
        )
        return confirmations

    def _dispatch_all(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        prepared = [self.prepare(transaction) for transaction in transactions]
        confirmations = super().dispatch(prepared)
        self._recorder.dispatched += [(self.name, transaction) for transaction in prepared]
        return confirmations

    def list_ids(self) -> list[str]:
        """Return the ids of all ready, delayed and claimed transactions, with duplicates."""
        with self._lock:
            return [self._read_id(message) for message in self._iter_messages()]


def _raise_if_error(outcome: Ok | Err) -> None:
    if isinstance(outcome, Err):
        raise outcome.error


@contextmanager
def _record_error(record: RecordedCall) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        record.error = error
        raise


def _to_async(inner: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def wrapper(*args: Any) -> Any:
        return inner(*args)

    return wrapper


def _do_nothing(*_: Any) -> None:
    """Do nothing: the harness is not running."""
