"""The asyncio driver: it runs scripts, and the handler calls that they request, on long-lived tasks.

A script is a generator that decides and yields effects (a call, a wait); the driver performs them. A slot is one script
in progress, and a mailbox is a queue of events for one script. The base class Scheduler decides when a script
continues; a timer of the event loop is its deadline timer. Its ``step`` sends an answer to the script of a slot and
returns the next call to make, None if the script waits. Its ``accept_result`` returns the result of a call for the
script, None if the script has stopped waiting for that call, because it timed out or was interrupted.
"""

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
from typing import Any, TypeVar

from ergon_framework import scope
from ergon_framework.clock import Clock
from ergon_framework.engine.effects import (
    NEVER,
    Call,
    CallResult,
    Err,
    Interrupted,
    Ok,
    R,
    Script,
    reject_unstarted_coroutine,
)
from ergon_framework.engine.scheduler import Mailbox, Scheduler, Slot

T = TypeVar("T")

#: The longest time that workers run before they yield to the event loop.
MAX_SLICE_SECONDS = 0.005


class AsyncioDriver(Scheduler):
    """Runs scripts on tasks of the running event loop.

    The tasks are workers that live as long as the driver: each takes a ready slot, makes its calls and takes the
    next. A call that is requested to exit is cancelled, once; a call that ignores the cancellation keeps its worker,
    as a hung call keeps its thread.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(clock or Clock(monotonic=event_loop_clock(self._loop)))
        self._thread = threading.get_ident()
        self._context = copy_context()
        self._ready: deque[tuple[Slot, Any]] = deque()
        self._idle: list[tuple[asyncio.Future[None], asyncio.Task[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._result_future: asyncio.Future[Any] = self._loop.create_future()
        #: A worker steps a script right now, and looks for more work before it waits.
        self._is_stepping = False
        #: The worker that was woken and has not run yet; it wakes the next one if there is more work.
        self._woken_worker: asyncio.Task[None] | None = None
        self._caller: asyncio.Task[Any] | None = None
        self._slice_start = 0.0

    async def run(self, script: Script[R]) -> R:
        """Run *script* to its end. Cancelling the caller stops the script, and is raised again when it has ended."""
        cancelled: asyncio.CancelledError | None = None
        self._caller = asyncio.current_task()
        self.start(script)
        while not self._result_future.done():
            try:
                await asyncio.wait((self._result_future,))
            except asyncio.CancelledError as error:
                cancelled = error
                self.interrupt_root()
        self._close()
        if cancelled is not None:
            self._result_future.exception()  # retrieved, so that asyncio does not report it as never retrieved
            raise cancelled
        await asyncio.sleep(0)  # the idle workers end in this iteration of the event loop
        result: R = self._result_future.result()
        return result

    def stop(self) -> None:
        self._call_on_loop(self.interrupt_root)

    def put_from_any_thread(self, mailbox: Mailbox, item: Any) -> None:
        self._call_on_loop(partial(mailbox.put, item, urgent=True))

    def _call_on_loop(self, callback: Callable[[], None]) -> None:
        """Run *callback* on the event loop's thread; do nothing if the loop is closed."""
        # Immediately where possible: a handler that stops its loop expects that. A signal handler
        # may have interrupted the holder of the lock, and must not wait for it.
        if threading.get_ident() == self._thread and self.lock.acquire(blocking=False):
            self.lock.release()
            callback()
            return
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    # -- workers --------------------------------------------------------------------------------

    def resume(self, slot: Slot, answer: Any) -> None:
        if self._closed:
            return
        self._ready.append((slot, answer))
        if not self._is_stepping:
            self._wake()

    def _wake(self) -> None:
        """Wake or start one more worker, unless one is already on its way."""
        if self._woken_worker is not None:
            return
        while self._idle:
            idle, worker = self._idle.pop()
            if not idle.done():
                idle.set_result(None)
                self._woken_worker = worker
                return
        # With a separate context: a worker must not inherit from the transaction that
        # runs where it is started.
        task = self._loop.create_task(self._work(), context=self._context.copy())
        self._woken_worker = task
        self._tasks.add(task)
        task.add_done_callback(self._on_worker_done)

    def _on_worker_done(self, task: asyncio.Task[None]) -> None:
        """Handle the end of a worker; if it was cancelled after it was woken and before it ran, wake another one."""
        self._tasks.discard(task)
        if self._woken_worker is task:
            self._woken_worker = None
            if self._ready and not self._closed:
                self._wake()

    async def _work(self) -> None:
        """Take one ready slot after the other and make the calls of its script; without a ready slot, wait."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - this is a task
        self._start_slice()
        while not self._closed:
            if not self._ready:
                await self._wait_for_work(task)
                continue
            slot, answer = self._ready.popleft()
            call = self._step_slot(slot, answer)
            while call is not None:
                answer = self._start_call(call, task)
                if type(answer) is _SuspendedCall:
                    answer = await self._finish_call(answer)
                if type(answer) is Err:
                    answer = self._classify_cancellation(answer, task)
                next_answer = self.accept_result(slot, call, answer)
                if task.cancelling():
                    self._retire(slot, next_answer)
                    return
                if self.monotonic() - self._slice_start > MAX_SLICE_SECONDS:
                    await asyncio.sleep(0)
                    self._slice_start = self.monotonic()
                call = None if next_answer is None else self._step_slot(slot, next_answer)

    def _classify_cancellation(self, answer: Err, task: asyncio.Task[None]) -> CallResult:
        """Return *answer*, or Interrupted if the event loop cancels all tasks: the call was stopped and has not failed.

        ``asyncio.run`` cancels all tasks when it ends: the caller of ``run`` as well as the workers.
        """
        is_cancelled = isinstance(answer.error, asyncio.CancelledError)
        if is_cancelled and task.cancelling() and self._caller is not None and self._caller.cancelling():
            return Interrupted()
        return answer

    async def _wait_for_work(self, task: asyncio.Task[None]) -> None:
        idle = self._loop.create_future()
        self._idle.append((idle, task))
        await idle
        self._start_slice()

    def _start_slice(self) -> None:
        self._woken_worker = None
        self._slice_start = self.monotonic()

    def _step_slot(self, slot: Slot, answer: Any) -> Call | None:
        self._is_stepping = True
        call = self.step(slot, answer)
        self._is_stepping = False
        # The call may occupy this worker; other ready slots must not wait for it.
        if call is not None and self._ready:
            self._wake()
        return call

    def _start_call(self, call: Call, task: asyncio.Task[None]) -> CallResult | _SuspendedCall:
        """Start *call*; return its result if it ends without waiting, else the suspended coroutine."""
        context = call.context or self._context.copy()
        try:
            value, awaited = context.run(_run_to_suspension, call)
        except BaseException as error:  # noqa: BLE001 - a result is data; the script classifies it
            return Err(error)
        if awaited is _NOT_SUSPENDED:
            return Ok(value)
        call.cancel = partial(_cancel, task)
        return _SuspendedCall(value, context, awaited)

    async def _finish_call(self, suspended: _SuspendedCall) -> CallResult:
        try:
            value = reject_unstarted_coroutine(await suspended)
        except BaseException as error:  # noqa: BLE001 - a result is data; the script classifies it
            return Err(error)
        finally:
            self._slice_start = self.monotonic()
        return Ok(value)

    def _retire(self, slot: Slot, next_answer: CallResult | None) -> None:
        """Pass on the work of a worker that the driver or its call has cancelled; the worker ends after this.

        A cancellation that was requested and not yet delivered cannot be withdrawn: in the next transaction on this
        task it would be raised in place of a result.
        """
        if next_answer is not None:
            self.resume(slot, next_answer)
        elif self._ready:
            self._wake()

    # -- time -----------------------------------------------------------------------------------

    def _fire_due(self) -> None:
        due = self.deadline_timer.fire_due(self)
        self._timer = None if due == NEVER else self._loop.call_at(due, self._fire_due)

    def _reschedule_timer(self, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.deadline_timer.wakes_at = until
        self._timer = self._loop.call_at(until, self._fire_due)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        if self._result_future.done():
            return
        if error is None:
            self._result_future.set_result(value)
        else:
            self._result_future.set_exception(error)

    def _close(self) -> None:
        self.close()
        if self._timer is not None:
            self._timer.cancel()
        for idle, _ in self._idle:
            if not idle.done():
                idle.set_result(None)


class _SuspendedCall:
    """The rest of a coroutine; every step of it runs inside *context*.

    The task of a worker lives longer than one transaction: without this, context variables that a handler sets
    would be visible to the next transaction.
    """

    __slots__ = ("_awaited", "_context", "_coroutine")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], context: Context, awaited: Any) -> None:
        self._coroutine = coroutine
        self._context = context
        self._awaited = awaited

    def __await__(self) -> Generator[Any, Any, Any]:
        """Pass on what the coroutine awaits, and what the event loop answers, with each step inside the context."""
        run, coroutine, awaited = self._context.run, self._coroutine, self._awaited
        resume: Callable[[Any], Any]
        while True:
            try:
                value = yield awaited
            except GeneratorExit:
                run(coroutine.close)
                raise
            except BaseException as error:  # noqa: BLE001 - passed to the coroutine, cancellation included
                resume, value = coroutine.throw, error
            else:
                resume = coroutine.send
            try:
                awaited = run(resume, value)
            except StopIteration as stop:
                return stop.value


async def await_in_context(context: Context, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Await ``fn(*args)`` with every step of it inside *context*, which no other code may use meanwhile."""

    async def run() -> T:
        return await fn(*args)

    coroutine = run()
    try:
        awaited = context.run(coroutine.send, None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    value: T = await _SuspendedCall(coroutine, context, awaited)
    return value


_NOT_SUSPENDED = object()


def _run_to_suspension(call: Call) -> tuple[Any, Any]:
    """Run the call up to its first suspension; return its value, or the coroutine and the object it awaits."""
    scope.set_scope(call.scope)
    value = call.fn(*call.args)
    if type(value) is not CoroutineType:
        if not inspect.isawaitable(value):
            return reject_unstarted_coroutine(value), _NOT_SUSPENDED
        value = _await(value)
    try:
        return value, value.send(None)
    except StopIteration as stop:
        return reject_unstarted_coroutine(stop.value), _NOT_SUSPENDED


def event_loop_clock(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return the loop's clock; the standard one directly, without the call through the loop: it is read often."""
    is_standard = type(loop).time is asyncio.BaseEventLoop.time
    return time.monotonic if is_standard else loop.time


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


async def _await(value: Awaitable[Any]) -> Any:
    return await value
