"""One producer, two flavours: what a test says once is done by a task on threads and by one on asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ergon_framework import scope
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.mixins.policies import ProducerPolicy
from ergon_framework.task.mixins.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.task.report import ProduceReport
from ergon_framework.transaction import Transaction

FLAVOURS = ("threads", "asyncio")
#: Seconds after which a test that waits for a signal has failed.
PATIENCE = 10.0

Move = Callable[[Transaction, Any], Any]


class Latch:
    """A door that opens once, for threads and coroutines alike."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        #: Set once a coroutine waits here.
        self.awaited = threading.Event()

    def open(self) -> None:
        with self._lock:
            self._event.set()
            for loop, event in self._sleepers:
                loop.call_soon_threadsafe(event.set)
            self._sleepers.clear()

    @property
    def opened(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float = PATIENCE) -> bool:
        return self._event.wait(seconds)

    async def wait_async(self) -> None:
        event = asyncio.Event()
        with self._lock:
            if self._event.is_set():
                return
            self._sleepers.append((asyncio.get_running_loop(), event))
            self.awaited.set()
        async with asyncio.timeout(PATIENCE):
            await event.wait()


class Hang:
    """Returned by a move: stay until the latch opens or, unless *stubborn*, until nobody waits any more.

    What comes of it is *late* if the engine had given up on the body, and *then* otherwise.
    """

    def __init__(self, latch: Latch | None = None, *, stubborn: bool = False, then: Any = None, late: Any = None):
        self.latch = latch or Latch()
        self.stubborn = stubborn
        self.then = then
        self.late = late

    def here(self) -> Any:
        mine = scope.current()
        end = time.monotonic() + PATIENCE
        while not self.latch.wait(0.001) and time.monotonic() < end:
            if mine.cancelled and not self.stubborn:
                break
        return self.late if mine.cancelled else self.then

    async def here_async(self) -> Any:
        mine = scope.current()
        while True:
            try:
                await self.latch.wait_async()
            except asyncio.CancelledError:
                if self.stubborn and not self.latch.opened:
                    continue
                return self.late
            return self.late if mine.cancelled else self.then


class World:
    """What happened, in order: steps entered and left, and what the handlers were given."""

    def __init__(self, moves: dict[str, Move]) -> None:
        self.moves = moves
        self.events: list[tuple[str, str, str]] = []
        self.attempts: list[tuple[str, str, int]] = []
        self.times: list[float] = []
        self.results: list[tuple[str, Any]] = []
        self.told: list[tuple[str, TransactionException]] = []
        self.workers: set[Any] = set()
        self.hangs: list[Hang] = []
        self.peak = 0
        self._bodies = 0
        self._running: dict[str, int] = {}
        self._lock = threading.Lock()

    def enter(self, step: str, transaction: Transaction, given: Any) -> Any:
        with self._lock:
            self.events.append(("enter", step, transaction.id))
            self.attempts.append((step, transaction.id, scope.current().attempt))
            self.times.append(time.monotonic())
            self._bodies += 1
            self._running[transaction.id] = self._running.get(transaction.id, 0) + 1
            self.peak = max(self.peak, len(self._running))
            if step == "success":
                self.results.append((transaction.id, given))
            if step == "exception":
                self.told.append((transaction.id, given))
        move = self.moves.get(step)
        came = None if move is None else move(transaction, given)
        if isinstance(came, Hang):
            with self._lock:
                self.hangs.append(came)
        return came

    def leave(self, step: str, transaction: Transaction) -> None:
        with self._lock:
            self.events.append(("leave", step, transaction.id))
            self._bodies -= 1
            self._running[transaction.id] -= 1
            if not self._running[transaction.id]:
                del self._running[transaction.id]

    @property
    def busy(self) -> bool:
        with self._lock:
            return self._bodies > 0

    @property
    def steps(self) -> list[tuple[str, str]]:
        return [(step, identity) for what, step, identity in self.events if what == "enter"]

    def of(self, identity: str) -> list[str]:
        """The steps that were tried for one transaction, one entry per attempt."""
        return [step for step, whose in self.steps if whose == identity]

    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    def let_go(self) -> None:
        with self._lock:
            hangs = list(self.hangs)
        for hang in hangs:
            hang.latch.open()


class OnThreads(ProducerMixin):
    def __init__(self, world: World) -> None:
        self.world = world

    def _perform(self, step: str, transaction: Transaction, given: Any) -> Any:
        try:
            self.world.workers.add(threading.current_thread())
            came = self.world.enter(step, transaction, given)
            return came.here() if isinstance(came, Hang) else came
        finally:
            self.world.leave(step, transaction)

    def produce_transaction(self, transaction):
        return self._perform("produce", transaction, None)

    def handle_produce_success(self, transaction, result):
        return self._perform("success", transaction, result)

    def handle_produce_exception(self, transaction, exc):
        return self._perform("exception", transaction, exc)


class OnAsyncio(AsyncProducerMixin):
    def __init__(self, world: World) -> None:
        self.world = world

    async def _perform(self, step: str, transaction: Transaction, given: Any) -> Any:
        try:
            self.world.workers.add(asyncio.get_running_loop())
            came = self.world.enter(step, transaction, given)
            return await came.here_async() if isinstance(came, Hang) else came
        finally:
            self.world.leave(step, transaction)

    async def produce_transaction(self, transaction):
        return await self._perform("produce", transaction, None)

    async def handle_produce_success(self, transaction, result):
        return await self._perform("success", transaction, result)

    async def handle_produce_exception(self, transaction, exc):
        return await self._perform("exception", transaction, exc)


class Run:
    """One produce call and all that came of it. Bodies that stayed have left by the time it is looked at."""

    def __init__(
        self,
        flavour: str,
        transactions: Sequence[Transaction],
        policy: ProducerPolicy | None = None,
        *,
        produce: Move | None = None,
        success: Move | None = None,
        exception: Move | None = None,
    ) -> None:
        moves = {"produce": produce, "success": success, "exception": exception}
        self.world = World({step: move for step, move in moves.items() if move is not None})
        self.raised: BaseException | None = None
        self.answer: ProduceReport | None = None
        self.seconds = 0.0
        # What the report said when the call ended, before the bodies that stayed were let go.
        self.kinds: list[str] = []
        self.task: Any = OnThreads(self.world) if flavour == "threads" else OnAsyncio(self.world)
        self._flavour = flavour
        self._given = (transactions, policy)

    def go(self) -> Run:
        if self._flavour == "threads":
            self._on_threads()
        else:
            asyncio.run(self._on_asyncio())
        return self

    @property
    def report(self) -> ProduceReport:
        if self.answer is not None:
            return self.answer
        if self.raised is None:
            raise AssertionError("the call has not ended")
        return self.raised.report

    def __getattr__(self, name: str) -> Any:
        return getattr(self.world, name)

    def _ended(self, began: float) -> None:
        self.seconds = time.monotonic() - began
        if getattr(self.raised, "report", self.answer) is not None:
            self.kinds = [outcome.kind.value for outcome in self.report.outcomes]

    def _on_threads(self) -> None:
        began = time.monotonic()
        try:
            self.answer = self.task.produce_transactions(*self._given)
        except BaseException as error:
            self.raised = error
        self._ended(began)
        self.world.let_go()
        end = time.monotonic() + PATIENCE
        while self.world.busy and time.monotonic() < end:
            threading.Event().wait(0.001)

    async def _on_asyncio(self) -> None:
        began = time.monotonic()
        try:
            self.answer = await self.task.produce_transactions(*self._given)
        except BaseException as error:
            self.raised = error
        self._ended(began)
        self.world.let_go()
        async with asyncio.timeout(PATIENCE):
            while self.world.busy:  # noqa: ASYNC110 - bodies leave without telling
                await asyncio.sleep(0.001)


def run(flavour: str, transactions: Sequence[Transaction], policy: ProducerPolicy | None = None, **moves: Move) -> Run:
    return Run(flavour, transactions, policy or quick(), **moves).go()


def many(count: int) -> list[Transaction]:
    return [Transaction(f"t{number}", {"number": number}) for number in range(count)]


def place(transaction: Transaction) -> int:
    return int(transaction.id[1:])


def quick(
    *, produce: dict[str, Any] | None = None, success: Any = None, exception: Any = None, **loop: Any
) -> ProducerPolicy:
    """A policy without waits, whose every part can be told otherwise."""
    given = {"produce": produce, "success": success, "exception": exception}
    steps = {step: {"retry": {"backoff": 0.0} | (retry or {})} for step, retry in given.items()}
    for name, inner in (("concurrency", "value"), ("batch", "size")):
        if name in loop:
            loop[name] = {inner: loop[name]}
    return ProducerPolicy.load({"loop": loop, "steps": steps})


def in_turn(*moves: Any) -> Move:
    """The first attempt does the first of *moves*, and so on; the last is repeated. An exception is raised."""

    def move(transaction: Transaction, given: Any) -> Any:
        chosen = moves[min(scope.current().attempt, len(moves) - 1)]
        if isinstance(chosen, BaseException):
            raise chosen
        return chosen() if callable(chosen) else chosen

    return move


def only(identity: str, move: Move, *, otherwise: Any = None) -> Move:
    """*move* for one transaction, *otherwise* for the rest."""
    return lambda transaction, given: move(transaction, given) if transaction.id == identity else otherwise
