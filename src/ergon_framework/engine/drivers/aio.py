"""The asyncio driver: bodies on long-lived tasks, a timer as the watcher."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from types import CoroutineType
from typing import Any

from ergon_framework import scope
from ergon_framework.engine.drivers.bodies import checked
from ergon_framework.engine.effects import NEVER, Call, R, Script
from ergon_framework.engine.outcome import Answer, Err, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.engine.slots import Mailbox, Slot, Slots

#: The longest that workers go on without letting the event loop see to others.
SLICE = 0.005


class Asyncio(Slots):
    """Runs scripts on tasks of the running event loop.

    The tasks are workers that live as long as the driver: each takes what is ready, makes its
    calls and takes the next. A body that is asked to leave is cancelled, once; one that ignores
    that keeps its worker, as a hung body keeps its thread.
    """

    def __init__(self, senses: Senses | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(senses or Senses(clock=clock_of(self._loop)))
        self._thread = threading.get_ident()
        self._context = copy_context()
        self._ready: deque[tuple[Slot, Any]] = deque()
        self._idle: list[tuple[asyncio.Future[None], asyncio.Task[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[Any] = self._loop.create_future()
        #: A worker is deciding right now, and will look for more work before it waits.
        self._deciding = False
        #: The worker that was woken and has not come round yet; it will wake the next one if need be.
        self._coming: asyncio.Task[None] | None = None
        self._caller: asyncio.Task[Any] | None = None
        self._since = 0.0

    async def run(self, script: Script[R]) -> R:
        """Perform *script* to its end. Cancelling the caller stops it, and is passed on when it has ended."""
        cancelled: asyncio.CancelledError | None = None
        self._caller = asyncio.current_task()
        self.start(script)
        while not self._over.done():
            try:
                await asyncio.wait((self._over,))
            except asyncio.CancelledError as error:
                cancelled = error
                self.halt()
        self._close()
        if cancelled is not None:
            self._over.exception()  # looked at, so that asyncio does not report it as forgotten
            raise cancelled
        await asyncio.sleep(0)  # the idle workers end in this turn of the event loop
        result: R = self._over.result()
        return result

    def stop(self) -> None:
        self._soon(self.halt)

    def signal(self, mailbox: Mailbox, item: Any) -> None:
        self._soon(partial(mailbox.put, item, urgent=True))

    def _soon(self, act: Callable[[], None]) -> None:
        """Have *act* done on the event loop's thread; after its end there is nobody left to tell."""
        # At once where that is possible: a handler that stops its loop means now. A signal handler
        # may have interrupted somebody who holds the lock, and must not wait for him.
        if threading.get_ident() == self._thread and self.lock.acquire(blocking=False):
            self.lock.release()
            act()
            return
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    # -- workers --------------------------------------------------------------------------------

    def resume(self, slot: Slot, answer: Any) -> None:
        if self._closed:
            return
        self._ready.append((slot, answer))
        if not self._deciding:
            self._wake()

    def _wake(self) -> None:
        """Have one more worker look for work, unless one is on its way."""
        if self._coming is not None:
            return
        while self._idle:
            idle, worker = self._idle.pop()
            if not idle.done():
                idle.set_result(None)
                self._coming = worker
                return
        # A context of its own, so that a worker inherits nothing of the transaction that
        # happens to be running where it is started.
        task = self._loop.create_task(self._work(), context=self._context.copy())
        self._coming = task
        self._tasks.add(task)
        task.add_done_callback(self._left_off)

    def _left_off(self, task: asyncio.Task[None]) -> None:
        """A worker has ended; if it was cancelled on its way to work, somebody else has to go."""
        self._tasks.discard(task)
        if self._coming is task:
            self._coming = None
            if self._ready and not self._closed:
                self._wake()

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a task
        self._came()
        while not self._closed:
            if not self._ready:
                await self._rest(task)
                continue
            slot, answer = self._ready.popleft()
            call = self._decide(slot, answer)
            while call is not None:
                answer = self._begun(call, task)
                if type(answer) is _Within:
                    answer = await self._rest_of(answer)
                if type(answer) is Err:
                    answer = self._read(answer, task)
                told = self.returned(slot, call, answer)
                if task.cancelling():
                    self._retire(slot, told)
                    return
                if self.clock() - self._since > SLICE:
                    await asyncio.sleep(0)
                    self._since = self.clock()
                call = None if told is None else self._decide(slot, told)

    def _read(self, answer: Err, task: asyncio.Task[None]) -> Answer:
        """*answer*, unless everybody is being cancelled: the end of the event loop is a stop, and no failure."""
        cancelled = isinstance(answer.error, asyncio.CancelledError)
        if cancelled and task.cancelling() and self._caller is not None and self._caller.cancelling():
            return Stopped()
        return answer

    async def _rest(self, task: asyncio.Task[None]) -> None:
        idle = self._loop.create_future()
        self._idle.append((idle, task))
        await idle
        self._came()

    def _came(self) -> None:
        self._coming = None
        self._since = self.clock()

    def _decide(self, slot: Slot, answer: Any) -> Call | None:
        self._deciding = True
        call = self.advance(slot, answer)
        self._deciding = False
        # The body may keep this worker; what else is ready must not wait for it.
        if call is not None and self._ready:
            self._wake()
        return call

    def _begun(self, call: Call, task: asyncio.Task[None]) -> Answer | _Within:
        """Make *call*: its answer, if it has one without waiting, or what is left to be awaited."""
        context = call.context or self._context.copy()
        try:
            value, awaited = context.run(_first, call)
        except BaseException as error:  # noqa: BLE001 - an answer is data; the script classifies it
            return Err(error)
        if awaited is _NOTHING:
            return Ok(value)
        call.cancel = partial(_cancel, task)
        return _Within(value, context, awaited)

    async def _rest_of(self, within: _Within) -> Answer:
        try:
            value = checked(await within)
        except BaseException as error:  # noqa: BLE001 - an answer is data; the script classifies it
            return Err(error)
        finally:
            self._since = self.clock()
        return Ok(value)

    def _retire(self, slot: Slot, told: Answer | None) -> None:
        """End a worker that was cancelled, by us or by its body.

        A cancellation that was requested and not yet delivered cannot be taken back; the next
        transaction on this task would be struck by it.
        """
        if told is not None:
            self.resume(slot, told)
        elif self._ready:
            self._wake()

    # -- time -----------------------------------------------------------------------------------

    def _look(self) -> None:
        due = self.watcher.look(self)
        self._timer = None if due == NEVER else self._loop.call_at(due, self._look)

    def _poke(self, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.watcher.wakes_at = until
        self._timer = self._loop.call_at(until, self._look)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(value)
        else:
            self._over.set_exception(error)

    def _close(self) -> None:
        self.close()
        if self._timer is not None:
            self._timer.cancel()
        for idle, _ in self._idle:
            if not idle.done():
                idle.set_result(None)


class _Within:
    """The rest of a coroutine, every step of it inside *context*.

    A worker's task lives longer than one transaction: without this, what a handler leaves in a
    context variable would be found by the next one.
    """

    __slots__ = ("_awaited", "_context", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: Context, awaited: Any) -> None:
        self._coroutine = coroutine
        self._context = context
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, Any]:
        run, coroutine, awaited = self._context.run, self._coroutine, self._awaited
        resume: Callable[[Any], Any]
        while True:
            try:
                value = yield awaited
            except GeneratorExit:
                run(coroutine.close)
                raise
            except BaseException as error:  # noqa: BLE001 - the coroutine's to handle, cancellation included
                resume, value = coroutine.throw, error
            else:
                resume = coroutine.send
            try:
                awaited = run(resume, value)
            except StopIteration as stop:
                return stop.value


_NOTHING = object()


def _first(call: Call) -> tuple[Any, Any]:
    """The call up to its first suspension: its value, or the coroutine and what it waits for."""
    scope.enter(call.scope)
    value = call.fn(*call.args)
    if type(value) is not CoroutineType:
        if not inspect.isawaitable(value):
            return checked(value), _NOTHING
        value = _awaited(value)
    try:
        return value, value.send(None)
    except StopIteration as stop:
        return checked(stop.value), _NOTHING


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The loop's own clock; asyncio's standard one is asked directly, because it is asked often."""
    plain = type(loop).time is asyncio.BaseEventLoop.time
    return time.monotonic if plain else loop.time


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
