"""One producer in two variants: the same test runs with a task on threads and with one on asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ergon_framework import scope
from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.policies import ProducerPolicy
from ergon_framework.worker.report import ProduceReport

VARIANTS = ("threads", "asyncio")
#: Seconds after which a test that waits for a signal fails.
WAIT_TIMEOUT_SECONDS = 10.0

Move = Callable[[Transaction, Any], Any]


class Latch:
    """A one-time event for threads and coroutines alike."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        #: Set once a coroutine waits for the latch.
        self.waiter_arrived = threading.Event()

    def open(self) -> None:
        with self._lock:
            self._event.set()
            for loop, event in self._waiters:
                loop.call_soon_threadsafe(event.set)
            self._waiters.clear()

    @property
    def is_open(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout: float = WAIT_TIMEOUT_SECONDS) -> bool:
        return self._event.wait(timeout)

    async def wait_async(self) -> None:
        event = asyncio.Event()
        with self._lock:
            if self._event.is_set():
                return
            self._waiters.append((asyncio.get_running_loop(), event))
            self.waiter_arrived.set()
        async with asyncio.timeout(WAIT_TIMEOUT_SECONDS):
            await event.wait()


class Hang:
    """Returned by a move: wait until the latch opens or, unless *stubborn*, until the call is cancelled.

    The result of the call is *late* if the engine has abandoned it, and *then* otherwise.
    """

    def __init__(self, latch: Latch | None = None, *, stubborn: bool = False, then: Any = None, late: Any = None):
        self.latch = latch or Latch()
        self.stubborn = stubborn
        self.then = then
        self.late = late

    def wait(self) -> Any:
        own_scope = scope.current()
        deadline = time.monotonic() + WAIT_TIMEOUT_SECONDS
        while not self.latch.wait(0.001) and time.monotonic() < deadline:
            if own_scope.cancelled and not self.stubborn:
                break
        return self.late if own_scope.cancelled else self.then

    async def wait_async(self) -> Any:
        own_scope = scope.current()
        while True:
            try:
                await self.latch.wait_async()
            except asyncio.CancelledError:
                if self.stubborn and not self.latch.is_open:
                    continue
                return self.late
            return self.late if own_scope.cancelled else self.then


class ProducerWorld:
    """The recorded events, in order: steps entered and left, and the arguments of the handlers."""

    def __init__(self, moves: dict[str, Move]) -> None:
        self.moves = moves
        self.events: list[tuple[str, str, str]] = []
        self.attempts: list[tuple[str, str, int]] = []
        self.times: list[float] = []
        self.results: list[tuple[str, Any]] = []
        self.handler_errors: list[tuple[str, TransactionException]] = []
        self.workers: set[Any] = set()
        self.hanging_calls: list[Hang] = []
        self.peak = 0
        self._running_calls = 0
        self._running: dict[str, int] = {}
        self._lock = threading.Lock()

    def enter(self, step: str, transaction: Transaction, argument: Any) -> Any:
        with self._lock:
            self.events.append(("enter", step, transaction.id))
            self.attempts.append((step, transaction.id, scope.current().attempt))
            self.times.append(time.monotonic())
            self._running_calls += 1
            self._running[transaction.id] = self._running.get(transaction.id, 0) + 1
            self.peak = max(self.peak, len(self._running))
            if step == "success":
                self.results.append((transaction.id, argument))
            if step == "exception":
                self.handler_errors.append((transaction.id, argument))
        move = self.moves.get(step)
        result = None if move is None else move(transaction, argument)
        if isinstance(result, Hang):
            with self._lock:
                self.hanging_calls.append(result)
        return result

    def leave(self, step: str, transaction: Transaction) -> None:
        with self._lock:
            self.events.append(("leave", step, transaction.id))
            self._running_calls -= 1
            self._running[transaction.id] -= 1
            if not self._running[transaction.id]:
                del self._running[transaction.id]

    @property
    def is_busy(self) -> bool:
        with self._lock:
            return self._running_calls > 0

    @property
    def steps(self) -> list[tuple[str, str]]:
        return [(step, transaction_id) for kind, step, transaction_id in self.events if kind == "enter"]

    def of(self, transaction_id: str) -> list[str]:
        """Return the steps that were attempted for one transaction, one entry per attempt."""
        return [step for step, step_transaction_id in self.steps if step_transaction_id == transaction_id]

    def list_gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    def release_calls(self) -> None:
        with self._lock:
            calls = list(self.hanging_calls)
        for call in calls:
            call.latch.open()


class ThreadsProducer(ProducerMixin):
    def __init__(self, world: ProducerWorld) -> None:
        self.world = world

    def _perform(self, step: str, transaction: Transaction, argument: Any) -> Any:
        try:
            self.world.workers.add(threading.current_thread())
            result = self.world.enter(step, transaction, argument)
            return result.wait() if isinstance(result, Hang) else result
        finally:
            self.world.leave(step, transaction)

    def produce_transaction(self, transaction):
        return self._perform("produce", transaction, None)

    def handle_produce_success(self, transaction, result):
        return self._perform("success", transaction, result)

    def handle_produce_exception(self, transaction, exc):
        return self._perform("exception", transaction, exc)


class AsyncioProducer(AsyncProducerMixin):
    def __init__(self, world: ProducerWorld) -> None:
        self.world = world

    async def _perform(self, step: str, transaction: Transaction, argument: Any) -> Any:
        try:
            self.world.workers.add(asyncio.get_running_loop())
            result = self.world.enter(step, transaction, argument)
            return await result.wait_async() if isinstance(result, Hang) else result
        finally:
            self.world.leave(step, transaction)

    async def produce_transaction(self, transaction):
        return await self._perform("produce", transaction, None)

    async def handle_produce_success(self, transaction, result):
        return await self._perform("success", transaction, result)

    async def handle_produce_exception(self, transaction, exc):
        return await self._perform("exception", transaction, exc)


class ProduceRun:
    """One produce call and its results; abandoned handler calls have returned before the test reads them."""

    def __init__(
        self,
        variant: str,
        transactions: Sequence[Transaction],
        policy: ProducerPolicy | None = None,
        *,
        produce: Move | None = None,
        success: Move | None = None,
        exception: Move | None = None,
    ) -> None:
        moves = {"produce": produce, "success": success, "exception": exception}
        self.world = ProducerWorld({step: move for step, move in moves.items() if move is not None})
        self.raised: BaseException | None = None
        self.returned_report: ProduceReport | None = None
        self.seconds = 0.0
        # The outcomes at the end of the call, before abandoned handler calls are let go.
        self.kinds: list[str] = []
        self.task: Any = ThreadsProducer(self.world) if variant == "threads" else AsyncioProducer(self.world)
        self._variant = variant
        self._arguments = (transactions, policy)

    def execute(self) -> ProduceRun:
        if self._variant == "threads":
            self._run_on_threads()
        else:
            asyncio.run(self._run_on_asyncio())
        return self

    @property
    def report(self) -> ProduceReport:
        if self.returned_report is not None:
            return self.returned_report
        if self.raised is None:
            raise AssertionError("the call has not ended")
        return self.raised.report

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def _record_end(self, started_at: float) -> None:
        self.seconds = time.monotonic() - started_at
        if getattr(self.raised, "report", self.returned_report) is not None:
            self.kinds = [outcome.kind.value for outcome in self.report.outcomes]

    def _run_on_threads(self) -> None:
        started_at = time.monotonic()
        try:
            self.returned_report = self.task.produce_transactions(*self._arguments)
        except BaseException as error:
            self.raised = error
        self._record_end(started_at)
        self.world.release_calls()
        deadline = time.monotonic() + WAIT_TIMEOUT_SECONDS
        while self.world.is_busy and time.monotonic() < deadline:
            threading.Event().wait(0.001)

    async def _run_on_asyncio(self) -> None:
        started_at = time.monotonic()
        try:
            self.returned_report = await self.task.produce_transactions(*self._arguments)
        except BaseException as error:
            self.raised = error
        self._record_end(started_at)
        self.world.release_calls()
        async with asyncio.timeout(WAIT_TIMEOUT_SECONDS):
            while self.world.is_busy:  # noqa: ASYNC110 - handler calls return without a notification
                await asyncio.sleep(0.001)


def run(
    variant: str, transactions: Sequence[Transaction], policy: ProducerPolicy | None = None, **moves: Move
) -> ProduceRun:
    return ProduceRun(variant, transactions, policy or make_producer_policy(), **moves).execute()


def make_transactions(count: int) -> list[Transaction]:
    return [Transaction({"number": number}, id=f"t{number}") for number in range(count)]


def parse_number(transaction: Transaction) -> int:
    return int(transaction.id[1:])


def make_producer_policy(
    *, produce: dict[str, Any] | None = None, success: Any = None, exception: Any = None, **loop: Any
) -> ProducerPolicy:
    """Return a policy without waits; arguments override its parts."""
    retries = {"produce": produce, "success": success, "exception": exception}
    steps = {step: {"retry": {"backoff": 0.0} | (retry or {})} for step, retry in retries.items()}
    for name, inner in (("concurrency", "value"), ("batch", "size")):
        if name in loop:
            loop[name] = {inner: loop[name]}
    return ProducerPolicy.load({"loop": loop, "steps": steps})


def run_in_turn(*moves: Any) -> Move:
    """Run the first of *moves* in the first attempt, and so on; repeat the last; raise a move that is an exception."""

    def move(transaction: Transaction, argument: Any) -> Any:
        chosen = moves[min(scope.current().attempt, len(moves) - 1)]
        if isinstance(chosen, BaseException):
            raise chosen
        return chosen() if callable(chosen) else chosen

    return move


def run_for_one(transaction_id: str, move: Move, *, otherwise: Any = None) -> Move:
    """Run *move* for one transaction and return *otherwise* for the rest."""
    return lambda transaction, argument: move(transaction, argument) if transaction.id == transaction_id else otherwise
