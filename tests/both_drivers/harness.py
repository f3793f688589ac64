"""World: one description of a task and its queue, run by either variant, and everything that was recorded of it.

A body is a function of one Call. Its return value or exception is that of the handler.
A body that takes time is a generator: it yields a number of seconds, or a Signal to wait for, and
wraps either into Stubborn to ignore a cancellation. So one body serves both variants.
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
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy

VARIANTS = ("threads", "asyncio")
#: Seconds after which a wait of a test fails; no wait here takes nearly as long.
WAIT_TIMEOUT_SECONDS = 15.0


class Signal:
    """An event for threads and tasks alike."""

    def __init__(self):
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks = []

    def set(self):
        with self._lock:
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for notify in callbacks:
            notify()

    def is_set(self):
        return self._event.is_set()

    def wait(self, seconds=WAIT_TIMEOUT_SECONDS):
        return self._event.wait(seconds)

    async def wait_async(self, seconds=WAIT_TIMEOUT_SECONDS):
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def resolve():
            if not future.done():
                future.set_result(None)

        def notify():
            with suppress(RuntimeError):  # that loop has ended, and so have its waiting tasks
                loop.call_soon_threadsafe(resolve)

        with self._lock:
            if self._event.is_set():
                return
            self._callbacks.append(notify)
        timer = loop.call_later(seconds, resolve)
        try:
            await future
        finally:
            timer.cancel()


class WakeupDelayMeter:
    """Measures how late this machine wakes a thread during a test: limits in real time are extended by that."""

    def __init__(self):
        self.late = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._measure, daemon=True)

    def _measure(self):
        due = time.monotonic() + 0.005
        while not self._stopped.wait(max(0.0, due - time.monotonic())):
            now = time.monotonic()
            self.late = max(self.late, now - due)
            due = now + 0.005

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stopped.set()
        self._thread.join()


@dataclass(frozen=True)
class Stubborn:
    """A pause that continues although it was cancelled, as a thread does."""

    pause: Any


@dataclass
class Call:
    """One call of user code, from its start to its end."""

    step: str
    transaction: Transaction
    argument: Any
    number: int
    scope: scope.Scope | None
    thread: threading.Thread = field(default_factory=threading.current_thread)
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    #: When the body saw that its call was abandoned.
    abandoned_at: float | None = None
    result: Any = None
    error: BaseException | None = None

    @property
    def id(self):
        return self.transaction.id


@dataclass
class Fetch:
    """One fetch; ``running`` is the number of transactions with a running call at its start."""

    queue: Queue
    number: int
    batch_size: int
    extra: dict
    running: int
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    transaction_ids: tuple = ()


@dataclass
class SentSettlement:
    """One settlement as it was sent, and its answer."""

    id: str
    settlement: Any
    answer: Any
    at: float = field(default_factory=time.monotonic)


class Queue(MemoryConnector):
    """A queue in memory that records its calls and first runs the script of the test."""

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
        """Return what an ordinary fetch of *count* would have returned."""
        return super().fetch_transactions(count)

    def listen(self, listener):
        self.listeners.append(listener)
        return super().listen(listener)

    def _start_fetch(self, batch_size, extra):
        world = self._world
        with world.changed:
            fetch = Fetch(self, len(self.fetches), batch_size, extra, len(+world.running))
            self.fetches.append(fetch)
            world.changed.notify_all()
        body = self._script
        if isinstance(body, list):
            body = body[fetch.number] if fetch.number < len(body) else None
        return fetch, body

    def _end_fetch(self, fetch, deliveries):
        deliveries = self.claim(fetch.batch_size) if deliveries is None else deliveries
        with self._world.changed:
            transactions = [getattr(delivery, "transaction", None) for delivery in deliveries]
            fetch.transaction_ids = tuple(getattr(transaction, "id", None) for transaction in transactions)
            fetch.ended = time.monotonic()
            self._world.changed.notify_all()
        return deliveries

    def fetch_transactions(self, batch_size, **extra):
        fetch, body = self._start_fetch(batch_size, extra)
        return self._end_fetch(fetch, None if body is None else self._world.perform(body, fetch))

    async def fetch_transactions_async(self, batch_size, **extra):
        fetch, body = self._start_fetch(batch_size, extra)
        return self._end_fetch(fetch, None if body is None else await self._world.perform_async(body, fetch))

    def answer_settlements(self, settlings):
        """Return what an ordinary settle would have answered."""
        return super().settle(settlings)

    def settle(self, requests):
        body = self._answers or return_value(None)
        return self._record_answers(requests, self._world.perform(body, requests))

    async def settle_async(self, requests):
        body = self._answers or return_value(None)
        return self._record_answers(requests, await self._world.perform_async(body, requests))

    def _record_answers(self, settlings, answers):
        answers = self.answer_settlements(settlings) if answers is None else answers
        with self._world.changed:
            for (delivery, settlement), answer in zip(settlings, answers, strict=True):
                self.settled.append(SentSettlement(delivery.transaction.id, settlement, answer))
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
        return self.world.call_handler("process", transaction)

    def handle_transaction_success(self, transaction, result):
        return self.world.call_handler("success", transaction, result)

    def handle_transaction_exception(self, transaction, exc):
        return self.world.call_handler("exception", transaction, exc)


class AsyncioTask(AsyncConsumerMixin):
    """The description as an asyncio task."""

    def __init__(self, world):
        self.world = world
        self.connector = world.queue

    async def process_transaction(self, transaction):
        return await self.world.call_handler_async("process", transaction)

    async def handle_transaction_success(self, transaction, result):
        return await self.world.call_handler_async("success", transaction, result)

    async def handle_transaction_exception(self, transaction, exc):
        return await self.world.call_handler_async("exception", transaction, exc)


class World:
    """A task, its queue and one run of the loop, with all its recorded events."""

    def __init__(
        self, variant, *, process=None, success=None, exception=None, fetches=None, settles=None, **queue_options
    ):
        self.variant = variant
        self.bodies = {"process": process, "success": success, "exception": exception}
        self.changed = threading.Condition()
        self.calls = []
        self.outcomes = []
        self.running = Counter()
        #: The most transactions with a running call at once, and the most concurrent calls of one transaction.
        self.peak = 0
        self.overlap = 0
        self.closing = Signal()
        self.signals = []
        self.queue = Queue(self, fetches, settles, **queue_options)
        self.task = ThreadsTask(self) if variant == "threads" else AsyncioTask(self)
        self.report = None
        self.error = None
        self.began = self.ended = None
        self.loop = self.main = None
        self._finished = threading.Event()
        self._thread = None

    # -- before and while it runs ---------------------------------------------------------------

    def signal(self):
        """Return a signal that is set at the latest at the end of the test."""
        self.signals.append(Signal())
        return self.signals[-1]

    def offer(self, *transactions):
        self.queue.dispatch([Transaction(id=t, source="queue") if isinstance(t, str) else t for t in transactions])
        return self

    def start(self, policy, **options):
        run = self._run_threads if self.variant == "threads" else self._run_asyncio
        self._thread = threading.Thread(target=run, args=(policy, options), daemon=True)
        self.began = time.monotonic()
        self._thread.start()
        return self

    def run(self, policy, **options):
        return self.start(policy, **options).finish()

    def finish(self, seconds=WAIT_TIMEOUT_SECONDS):
        """Wait for the end of the loop; its return value or exception is in report and error."""
        assert self._finished.wait(seconds), f"the loop has not ended after {seconds} s; calls: {self.calls}"
        return self

    def until(self, predicate, seconds=WAIT_TIMEOUT_SECONDS):
        """Wait until *predicate* holds; evaluate it at every call, fetch, settlement and outcome, and in between."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while not predicate():
                assert time.monotonic() < deadline, f"it never came: {inspect.getsource(predicate).strip()}"
                self.changed.wait(0.005)
        return self

    def never(self, predicate, seconds=0.15):
        """Check for *seconds* that *predicate* does not become true."""
        deadline = time.monotonic() + seconds
        with self.changed:
            while time.monotonic() < deadline:
                assert not predicate(), f"it came: {inspect.getsource(predicate).strip()}"
                self.changed.wait(0.005)
        return self

    def stop(self):
        self.task.stop()
        return self

    def close(self):
        self.closing.set()
        for signal in self.signals:
            signal.set()
        if self._thread is not None:
            if not self._finished.is_set():
                self.task.stop()
                self.task.stop()
            self._thread.join(WAIT_TIMEOUT_SECONDS)
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
        return [settlement.settlement for settlement in self.queue.settled if transaction_id in (None, settlement.id)]

    @property
    def fetches(self):
        return self.queue.fetches

    @property
    def duration_seconds(self):
        return self.ended - self.began

    # -- the run itself -------------------------------------------------------------------------

    def _record_outcome(self, outcome):
        with self.changed:
            self.outcomes.append(outcome)
            self.changed.notify_all()

    def _record_end(self):
        self.ended = time.monotonic()
        self.report = self.report or getattr(self.error, "report", None)
        self._finished.set()

    def _run_threads(self, policy, options):
        try:
            self.report = self.task.consume_transactions(policy, on_outcome=self._record_outcome, **options)
        except BaseException as error:
            self.error = error
        finally:
            self._record_end()

    def _run_asyncio(self, policy, options):
        async def main():
            self.loop, self.main = asyncio.get_running_loop(), asyncio.current_task()
            try:
                self.report = await self.task.consume_transactions(policy, on_outcome=self._record_outcome, **options)
            except BaseException as error:
                self.error = error
            finally:
                self._record_end()
            # The program continues after its loop: exiting immediately would cancel abandoned calls.
            await self.closing.wait_async(2 * WAIT_TIMEOUT_SECONDS)

        asyncio.run(main())

    # -- bodies ---------------------------------------------------------------------------------

    def _enter(self, step, transaction, argument):
        with self.changed:
            number = sum(call.step == step and call.id == transaction.id for call in self.calls)
            call = Call(step, transaction, argument, number, scope.current())
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
        return call, body or return_value(None)

    def _leave(self, call):
        with self.changed:
            call.ended = time.monotonic()
            self.running[call.id] -= 1
            self.changed.notify_all()

    def call_handler(self, step, transaction, argument=None):
        call, body = self._enter(step, transaction, argument)
        try:
            call.result = self.perform(body, call)
        except BaseException as error:
            call.error = error
            raise
        finally:
            self._leave(call)
        return call.result

    async def call_handler_async(self, step, transaction, argument=None):
        call, body = self._enter(step, transaction, argument)
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
            self.closing.wait(pause)

    async def _pause_async(self, pause):
        if isinstance(pause, Stubborn):
            pause_task = asyncio.ensure_future(self._pause_async(pause.pause))
            while not pause_task.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([pause_task])
        elif isinstance(pause, Signal):
            await pause.wait_async()
        else:
            await self.closing.wait_async(pause)


# -- the usual bodies ---------------------------------------------------------------------------


def return_value(value):
    return lambda call: value


def raise_error(error):
    def body(call):
        raise error

    return body


def wait_then_return(pause, value=None):
    """Return a body that waits for some seconds or for a signal, and then returns *value*."""

    def body(call):
        yield pause
        return value

    return body


def ignore_cancellation(seconds, value=None):
    """Return a body that runs for *seconds* regardless of cancellation, and notes when its call is abandoned."""

    def body(call):
        deadline = call.began + seconds
        while time.monotonic() < deadline:
            if call.abandoned_at is None and call.scope.cancelled:
                call.abandoned_at = time.monotonic()
            yield Stubborn(0.002 if call.abandoned_at is None else max(0.0, deadline - time.monotonic()))
        return value

    return body


# -- policies -----------------------------------------------------------------------------------


def make_policy(
    *, concurrency=10, batch=10, process=None, success=None, exception=None, fetch=None, settle=None, extra=None, **loop
):
    """Return a policy with short waits; arguments override its parts."""
    short_retry = {"backoff": 0.002, "multiplier": 1.0}
    steps = {
        "process": {"retry": short_retry | (process or {})},
        "success": {"retry": short_retry | (success or {})},
        "exception": {"retry": short_retry | (exception or {})},
        "fetch": {"retry": short_retry | (fetch or {}), "extra": extra or {}},
        "settle": {"retry": short_retry} | (settle or {}),
    }
    loop_defaults = {"concurrency": {"value": concurrency}, "batch": {"size": batch}, "drain_timeout": 5.0}
    return ConsumerPolicy.load({"loop": loop_defaults | loop, "steps": steps})
