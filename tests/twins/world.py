"""World: one description of a task and its queue, run by either variant, and everything that was seen of it.

A body is a function of one Call. What it returns or raises is what the handler returns or raises.
A body that takes time is a generator: it yields a number of seconds, or a Signal to wait for, and
wraps either into Stubborn where it is to ignore being cancelled. So one body serves both variants.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ergon_framework import scope
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.transaction import Transaction

FLAVOURS = ("threads", "asyncio")
#: Seconds after which a wait of a test has failed; nothing here takes nearly as long.
PATIENCE = 15.0


class Signal:
    """An event that threads and tasks can wait for alike."""

    def __init__(self):
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._waiting = []

    def set(self):
        with self._lock:
            self._event.set()
            waiting, self._waiting = self._waiting, []
        for tell in waiting:
            tell()

    def is_set(self):
        return self._event.is_set()

    def wait(self, seconds=PATIENCE):
        return self._event.wait(seconds)

    async def wait_async(self, seconds=PATIENCE):
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()

        def arrive():
            if not arrived.done():
                arrived.set_result(None)

        def tell():
            with suppress(RuntimeError):  # that loop is over, and so is whoever waited in it
                loop.call_soon_threadsafe(arrive)

        with self._lock:
            if self._event.is_set():
                return
            self._waiting.append(tell)
        alarm = loop.call_later(seconds, arrive)
        try:
            await arrived
        finally:
            alarm.cancel()


class Pulse:
    """How late this machine itself was while a test ran: a limit in real time holds only beyond that."""

    def __init__(self):
        self.late = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def _beat(self):
        due = time.monotonic() + 0.005
        while not self._over.wait(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            self.late = max(self.late, now - due)
            due = now + 0.005

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


@dataclass(frozen=True)
class Stubborn:
    """A pause that goes on although it was cancelled, as a thread's does."""

    pause: Any


@dataclass
class Call:
    """One call of user code, from its first to its last moment."""

    step: str
    transaction: Transaction
    given: Any
    number: int
    scope: scope.Scope | None
    thread: threading.Thread = field(default_factory=threading.current_thread)
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    #: When the body saw that nobody waits for it any more.
    told: float | None = None
    result: Any = None
    error: BaseException | None = None

    @property
    def id(self):
        return self.transaction.id


@dataclass
class Fetch:
    """One fetch; ``running`` is how many transactions had a body when it began."""

    queue: Queue
    number: int
    batch_size: int
    extra: dict
    running: int
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    brought: tuple = ()


@dataclass
class Settled:
    """One settlement as it was sent, and what was answered."""

    id: str
    settlement: Any
    answer: Any
    at: float = field(default_factory=time.monotonic)


class Queue(MemoryConnector):
    """A queue in memory that remembers what was asked of it, and first does what a test tells it to."""

    def __init__(self, world, fetches, settles, **options):
        super().__init__("queue", **options)
        self._world = world
        self._script = fetches
        self._answers = settles
        self.fetches = []
        self.settled = []
        self.extended = []
        self.listeners = []

    def claim(self, count):
        """What an honest fetch of *count* would have brought."""
        return super().fetch_transactions(count)

    def listen(self, listener):
        self.listeners.append(listener)
        return super().listen(listener)

    def _began(self, batch_size, extra):
        world = self._world
        with world.changed:
            fetch = Fetch(self, len(self.fetches), batch_size, extra, len(+world.running))
            self.fetches.append(fetch)
            world.changed.notify_all()
        body = self._script
        if isinstance(body, list):
            body = body[fetch.number] if fetch.number < len(body) else None
        return fetch, body

    def _ended(self, fetch, brought):
        brought = self.claim(fetch.batch_size) if brought is None else brought
        with self._world.changed:
            transactions = [getattr(delivery, "transaction", None) for delivery in brought]
            fetch.brought = tuple(getattr(transaction, "id", None) for transaction in transactions)
            fetch.ended = time.monotonic()
            self._world.changed.notify_all()
        return brought

    def fetch_transactions(self, batch_size, **extra):
        fetch, body = self._began(batch_size, extra)
        return self._ended(fetch, None if body is None else self._world.perform(body, fetch))

    async def fetch_transactions_async(self, batch_size, **extra):
        fetch, body = self._began(batch_size, extra)
        return self._ended(fetch, None if body is None else await self._world.perform_async(body, fetch))

    def answer(self, settlings):
        """What an honest settle would have answered."""
        return super().settle(settlings)

    def settle(self, settlings):
        body = self._answers or gives(None)
        return self._answered(settlings, self._world.perform(body, settlings))

    async def settle_async(self, settlings):
        body = self._answers or gives(None)
        return self._answered(settlings, await self._world.perform_async(body, settlings))

    def _answered(self, settlings, answers):
        answers = self.answer(settlings) if answers is None else answers
        with self._world.changed:
            for (delivery, settlement), answer in zip(settlings, answers, strict=True):
                self.settled.append(Settled(delivery.transaction.id, settlement, answer))
            self._world.changed.notify_all()
        return answers

    def extend(self, deliveries):
        self.extended.extend(delivery.transaction.id for delivery in deliveries)
        return super().extend(deliveries)


class ThreadsTask(ConsumerMixin):
    """The description as a threaded task."""

    def __init__(self, world):
        self.world = world
        self.connector = world.queue

    def process_transaction(self, transaction):
        return self.world.called("process", transaction)

    def handle_transaction_success(self, transaction, result):
        return self.world.called("success", transaction, result)

    def handle_transaction_exception(self, transaction, exc):
        return self.world.called("exception", transaction, exc)


class AsyncioTask(AsyncConsumerMixin):
    """The description as an asyncio task."""

    def __init__(self, world):
        self.world = world
        self.connector = world.queue

    async def process_transaction(self, transaction):
        return await self.world.called_async("process", transaction)

    async def handle_transaction_success(self, transaction, result):
        return await self.world.called_async("success", transaction, result)

    async def handle_transaction_exception(self, transaction, exc):
        return await self.world.called_async("exception", transaction, exc)


class World:
    """A task, its queue and one run of the loop, with all that happened in it."""

    def __init__(self, flavour, *, process=None, success=None, exception=None, fetches=None, settles=None, **queue):
        self.flavour = flavour
        self.bodies = {"process": process, "success": success, "exception": exception}
        self.changed = threading.Condition()
        self.calls = []
        self.outcomes = []
        self.running = Counter()
        #: The most transactions that had a running body at once, and the most bodies of one transaction.
        self.peak = 0
        self.overlap = 0
        self.over = Signal()
        self.signals = []
        self.queue = Queue(self, fetches, settles, **queue)
        self.task = ThreadsTask(self) if flavour == "threads" else AsyncioTask(self)
        self.report = None
        self.error = None
        self.began = self.ended = None
        self.loop = self.main = None
        self._finished = threading.Event()
        self._thread = None

    # -- before and while it runs ---------------------------------------------------------------

    def signal(self):
        """A signal that is set at the latest when the test is over."""
        self.signals.append(Signal())
        return self.signals[-1]

    def offer(self, *transactions):
        self.queue.dispatch([Transaction(t, source="queue") if isinstance(t, str) else t for t in transactions])
        return self

    def start(self, policy, **options):
        run = self._run_threads if self.flavour == "threads" else self._run_asyncio
        self._thread = threading.Thread(target=run, args=(policy, options), daemon=True)
        self.began = time.monotonic()
        self._thread.start()
        return self

    def run(self, policy, **options):
        return self.start(policy, **options).finish()

    def finish(self, seconds=PATIENCE):
        """Wait for the loop's end; what it returned or raised is in report and error."""
        assert self._finished.wait(seconds), f"the loop has not ended after {seconds} s; calls: {self.calls}"
        return self

    def until(self, predicate, seconds=PATIENCE):
        """Wait until *predicate* holds; it is asked at every call, fetch, settlement and outcome, and in between."""
        end = time.monotonic() + seconds
        with self.changed:
            while not predicate():
                assert time.monotonic() < end, f"it never came: {inspect.getsource(predicate).strip()}"
                self.changed.wait(0.005)
        return self

    def never(self, predicate, seconds=0.15):
        """Watch for *seconds* that *predicate* does not come true."""
        end = time.monotonic() + seconds
        with self.changed:
            while time.monotonic() < end:
                assert not predicate(), f"it came: {inspect.getsource(predicate).strip()}"
                self.changed.wait(0.005)
        return self

    def stop(self):
        self.task.stop()
        return self

    def close(self):
        self.over.set()
        for signal in self.signals:
            signal.set()
        if self._thread is not None:
            if not self._finished.is_set():
                self.task.stop()
                self.task.stop()
            self._thread.join(PATIENCE)
            assert not self._thread.is_alive(), "the loop's thread did not end"

    # -- what was seen --------------------------------------------------------------------------

    def steps(self, transaction_id=None):
        return [call.step for call in self.calls if transaction_id in (None, call.id)]

    def of(self, step, transaction_id=None):
        return [call for call in self.calls if call.step == step and transaction_id in (None, call.id)]

    def only(self, step):
        (call,) = self.of(step)
        return call

    def outcome(self, transaction_id=None):
        (outcome,) = [o for o in self.outcomes if transaction_id in (None, o.transaction.id)]
        return outcome

    def kinds(self):
        return {outcome.transaction.id: outcome.kind.value for outcome in self.outcomes}

    def settlements(self, transaction_id=None):
        return [sent.settlement for sent in self.queue.settled if transaction_id in (None, sent.id)]

    @property
    def fetches(self):
        return self.queue.fetches

    @property
    def took(self):
        return self.ended - self.began

    # -- the run itself -------------------------------------------------------------------------

    def _outcome(self, outcome):
        with self.changed:
            self.outcomes.append(outcome)
            self.changed.notify_all()

    def _ended(self):
        self.ended = time.monotonic()
        self.report = self.report or getattr(self.error, "report", None)
        self._finished.set()

    def _run_threads(self, policy, options):
        try:
            self.report = self.task.consume_transactions(policy, on_outcome=self._outcome, **options)
        except BaseException as error:
            self.error = error
        finally:
            self._ended()

    def _run_asyncio(self, policy, options):
        async def main():
            self.loop, self.main = asyncio.get_running_loop(), asyncio.current_task()
            try:
                self.report = await self.task.consume_transactions(policy, on_outcome=self._outcome, **options)
            except BaseException as error:
                self.error = error
            finally:
                self._ended()
            # The program goes on after its loop: leaving at once would cancel the bodies that stayed.
            await self.over.wait_async(2 * PATIENCE)

        asyncio.run(main())

    # -- bodies ---------------------------------------------------------------------------------

    def _enter(self, step, transaction, given):
        with self.changed:
            number = sum(call.step == step and call.id == transaction.id for call in self.calls)
            call = Call(step, transaction, given, number, scope.current())
            self.calls.append(call)
            self.running[call.id] += 1
            self.peak = max(self.peak, len(+self.running))
            self.overlap = max(self.overlap, self.running[call.id])
            self.changed.notify_all()
        body = self.bodies[step]
        if isinstance(body, dict):
            body = body.get(call.id)
        if isinstance(body, list):
            body = body[min(number, len(body) - 1)]
        return call, body or gives(None)

    def _leave(self, call):
        with self.changed:
            call.ended = time.monotonic()
            self.running[call.id] -= 1
            self.changed.notify_all()

    def called(self, step, transaction, given=None):
        call, body = self._enter(step, transaction, given)
        try:
            call.result = self.perform(body, call)
        except BaseException as error:
            call.error = error
            raise
        finally:
            self._leave(call)
        return call.result

    async def called_async(self, step, transaction, given=None):
        call, body = self._enter(step, transaction, given)
        try:
            call.result = await self.perform_async(body, call)
        except BaseException as error:
            call.error = error
            raise
        finally:
            self._leave(call)
        return call.result

    def perform(self, body, call):
        script = body(call)
        if not inspect.isgenerator(script):
            return script
        try:
            pause = next(script)
            while True:
                self._pause(pause)
                pause = script.send(None)
        except StopIteration as stop:
            return stop.value

    async def perform_async(self, body, call):
        script = body(call)
        if not inspect.isgenerator(script):
            return script
        try:
            pause = next(script)
            while True:
                try:
                    await self._pause_async(pause)
                except asyncio.CancelledError as cancelled:
                    pause = script.throw(cancelled)
                else:
                    pause = script.send(None)
        except StopIteration as stop:
            return stop.value

    def _pause(self, pause):
        pause = pause.pause if isinstance(pause, Stubborn) else pause
        if isinstance(pause, Signal):
            pause.wait()
        else:
            self.over.wait(pause)

    async def _pause_async(self, pause):
        if isinstance(pause, Stubborn):
            staying = asyncio.ensure_future(self._pause_async(pause.pause))
            while not staying.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([staying])
        elif isinstance(pause, Signal):
            await pause.wait_async()
        else:
            await self.over.wait_async(pause)


# -- the usual bodies ---------------------------------------------------------------------------


def gives(value):
    return lambda call: value


def fails(error):
    def body(call):
        raise error

    return body


def takes(pause, value=None):
    """A body that stays for some seconds, or until a signal, and then returns *value*."""

    def body(call):
        yield pause
        return value

    return body


def stays(seconds, value=None):
    """A body that stays for *seconds* whatever it is told, and notes when it is told that nobody waits."""

    def body(call):
        end = call.began + seconds
        while time.monotonic() < end:
            if call.told is None and call.scope.cancelled:
                call.told = time.monotonic()
            yield Stubborn(0.002 if call.told is None else max(0.0, end - time.monotonic()))
        return value

    return body


# -- policies -----------------------------------------------------------------------------------


def policy(
    *, concurrency=10, batch=10, process=None, success=None, exception=None, fetch=None, settle=None, extra=None, **loop
):
    """A policy whose waits are short unless a test says otherwise."""
    quick = {"backoff": 0.002, "multiplier": 1.0}
    steps = {
        "process": {"retry": quick | (process or {})},
        "success": {"retry": quick | (success or {})},
        "exception": {"retry": quick | (exception or {})},
        "fetch": {"retry": quick | (fetch or {}), "extra": extra or {}},
        "settle": {"retry": quick} | (settle or {}),
    }
    around = {"concurrency": {"value": concurrency}, "batch": {"size": batch}, "drain_timeout": 5.0}
    return ConsumerPolicy.load({"loop": around | loop, "steps": steps})
