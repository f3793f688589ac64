"""Inline runners: they run one script in the thread or task of the caller.

A script is a generator that decides and yields effects (a call, a wait) for others to perform. The drivers of consume
loops and produce calls run many scripts and own their threads. An inline runner is for code that already runs somewhere
and needs the result of one script, such as the call of a provider or the append of a fact. It supports three effects,
Call, SelfTimedCall and Sleep, and makes no decision. A call without a deadline runs in place. A call with a deadline
runs on a separate thread or task, in a copy of the current context: at the deadline it is abandoned, its scope is
cancelled, and its result is discarded. A SelfTimedCall keeps its own deadline, so it runs in place too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import Any, Final

from ergon_framework import scope
from ergon_framework.clock import Clock, RealTime, ThreadClock, Wakeup
from ergon_framework.engine.aio import event_loop_clock
from ergon_framework.engine.daemon_executor import DaemonExecutor
from ergon_framework.engine.effects import (
    NEVER,
    Call,
    CallResult,
    Err,
    Expired,
    Interrupted,
    NotStartedError,
    Ok,
    R,
    Script,
    SelfTimedCall,
    Sleep,
    reject_unstarted_coroutine,
)
from ergon_framework.errors import ConfigurationError, ErgonError

#: Maximum number of calls that run at once, abandoned ones included; others wait for a thread until their deadline.
MAX_THREADS: Final = 1_000


class InlineRunner:
    """Runs scripts in the threads of its callers; one instance is enough for a process.

    An exception that is raised in the calling thread while it waits (Ctrl-C, from a signal handler) reaches the
    script as Interrupted, and is raised again when the script has ended. A forked child starts with new threads.
    """

    def __init__(self, waiting: ThreadClock | None = None, *, threads: int = MAX_THREADS) -> None:
        self._waiting = waiting or RealTime()
        self._threads = threads
        self._executor: DaemonExecutor | None = None
        self._pid = 0

    @property
    def clock(self) -> Clock:
        return self._waiting.time_source

    def run(self, script: Script[R]) -> R:
        """Run *script* to its end and return its result."""
        answer: Any = None
        interruption: BaseException | None = None
        while True:
            try:
                effect = script.send(answer)
            except StopIteration as stop:
                result: R = stop.value
                break
            try:
                answer = self._perform(effect)
            except BaseException as error:
                if interruption is not None:
                    script.close()
                    raise
                interruption, answer = error, Interrupted(effect if isinstance(effect, Call) else None)
        if interruption is None:
            return result
        try:
            raise interruption
        finally:
            del interruption  # breaks the reference cycle between the frame and the exception

    def _perform(self, effect: Any) -> Any:
        if type(effect) is Call:
            return _run_call(effect) if effect.until == NEVER else self._run_on_thread(effect)
        if type(effect) is SelfTimedCall:
            return _run_self_timed(effect)
        if type(effect) is Sleep:
            self._wait(self._waiting.create_wakeup(), effect.until, lambda: False)
            return None
        raise _unsupported_effect_error(effect)

    def _run_on_thread(self, call: Call) -> CallResult:
        """Run *call* on a thread until its deadline; if no thread is free before that, it never starts."""
        background = _BackgroundCall(call, self._waiting.create_wakeup())
        self._get_executor().submit_nowait(self._run_background, background)
        try:
            self._wait(background.wakeup, call.until, background.is_done)
        finally:
            # Checked again: the call may have ended at this moment, and then its result is known.
            if background.answer is None:
                self._abandon(background)
        # Removed from the pending call: the traceback of an error refers to it, and the cycle would keep
        # the client's sockets open until the garbage collector runs.
        answer, background.answer = background.answer, None
        if answer is not None:
            return answer
        return Expired(call) if background.started else Err(NotStartedError("call not started: no thread became free"))

    def _wait(self, wakeup: Wakeup, until: float, is_over: Callable[[], bool]) -> None:
        monotonic = self._waiting.time_source.monotonic
        while not is_over() and (remaining := until - monotonic()) > 0:
            wakeup.wait(remaining)

    def _abandon(self, background: _BackgroundCall) -> None:
        """Stop waiting for a call: it does not start any more, or it runs on with its scope cancelled."""
        background.abandoned = True
        if background.call.scope is not None:
            background.call.scope.cancel()

    def _run_background(self, background: _BackgroundCall) -> None:
        # Each side writes before it reads, so that at least one of them sees the other: a call that is
        # reported as not started never starts.
        background.started = True
        if not background.abandoned:
            background.answer = _run_in_context(background.context, background.call)
        background.wakeup.set()

    def _get_executor(self) -> DaemonExecutor:
        executor = self._executor
        # Threads do not survive a fork, and the lock of the old executor may never be released.
        if executor is None or self._pid != os.getpid():
            executor = self._executor = DaemonExecutor(self._threads, name="ergon-call", waiting=self._waiting)
            self._pid = os.getpid()
        return executor


class AsyncInlineRunner:
    """Runs scripts in the tasks of its callers.

    A cancellation of the calling task reaches the script as Interrupted, and is raised when the script has ended. An
    abandoned call is cancelled and not awaited.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock
        self._loop_clock: tuple[asyncio.AbstractEventLoop, Clock] | None = None
        self._abandoned_tasks: set[asyncio.Task[Any]] = set()

    @property
    def clock(self) -> Clock:
        """The clock that was passed, or that of the running event loop."""
        if self._clock is not None:
            return self._clock
        loop, cached = asyncio.get_running_loop(), self._loop_clock
        if cached is None or cached[0] is not loop:
            cached = self._loop_clock = loop, Clock(monotonic=event_loop_clock(loop))
        return cached[1]

    async def run(self, script: Script[R]) -> R:
        """Run *script* to its end and return its result."""
        answer: Any = None
        interruption: asyncio.CancelledError | None = None
        while True:
            try:
                effect = script.send(answer)
            except StopIteration as stop:
                result: R = stop.value
                break
            try:
                if isinstance(effect, Call) and effect.until == NEVER:
                    answer = _run_call(effect)
                    # A function that does not wait need not be a coroutine function.
                    if type(answer) is Ok and hasattr(answer.value, "__await__"):
                        answer = await _await_result(answer.value)
                elif type(effect) is Call:
                    answer = await self._run_on_task(effect)
                else:
                    answer = None
                    await _sleep(effect)  # raises for any effect that is not a Sleep
            except asyncio.CancelledError as error:
                if interruption is not None:
                    script.close()
                    raise
                interruption, answer = error, Interrupted(effect if isinstance(effect, Call) else None)
        if interruption is None:
            return result
        try:
            raise interruption
        finally:
            del interruption  # breaks the reference cycle between the frame and the exception

    async def _run_on_task(self, call: Call) -> CallResult:
        """Run *call* on a task until its deadline, then abandon it."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[CallResult] = loop.create_future()
        task = loop.create_task(_run_and_notify(ended, call), context=_get_context(call))
        timer = loop.call_at(call.until, _set_result, ended, Expired(call))
        try:
            answer = await ended
        finally:
            timer.cancel()
            if not task.done():
                self._abandon(task, call)
        # If deadline and result come together, the result counts: the work is done.
        return task.result() if type(answer) is Expired and task.done() else answer

    def _abandon(self, task: asyncio.Task[Any], call: Call) -> None:
        """Cancel a call whose caller no longer waits for it, and keep its task until it has ended."""
        if call.scope is not None:
            call.scope.cancel()
        # The event loop holds only weak references to tasks.
        self._abandoned_tasks.add(task)
        task.add_done_callback(self._abandoned_tasks.discard)
        task.cancel()


class _BackgroundCall:
    """A call on a separate thread, and whether its caller still waits for it.

    The thread sets ``started`` before it makes the call; the caller sets ``abandoned`` when it stops waiting.
    """

    __slots__ = ("abandoned", "answer", "call", "context", "started", "wakeup")

    def __init__(self, call: Call, wakeup: Wakeup) -> None:
        self.call = call
        self.wakeup = wakeup
        self.context = _get_context(call)
        self.answer: CallResult | None = None
        self.started = False
        self.abandoned = False

    def is_done(self) -> bool:
        return self.answer is not None


def _get_context(call: Call) -> Context:
    return call.context or copy_context()


def _set_result(ended: asyncio.Future[CallResult], answer: CallResult) -> None:
    if not ended.done():
        ended.set_result(answer)


def _run_call(call: Call) -> CallResult:
    try:
        return Ok(call.fn(*call.args))
    except BaseException as error:  # noqa: BLE001 - a result is data; the script classifies it
        return Err(error)


def _run_self_timed(call: SelfTimedCall) -> CallResult:
    try:
        return Ok(call.fn(*call.args))
    except ErgonError as error:
        return Err(error)


def _run_in_context(context: Context, call: Call) -> CallResult:
    try:
        return Ok(context.run(_run_scoped, call))
    except BaseException as error:  # noqa: BLE001 - a result is data; the script classifies it
        return Err(error)


async def _await_result(awaitable: Awaitable[Any]) -> CallResult:
    """Await *awaitable*. A cancellation of the task itself propagates; one that the handler raises is a result."""
    try:
        return Ok(reject_unstarted_coroutine(await awaitable))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return Err(error)
    except BaseException as error:  # noqa: BLE001 - a result is data; the script classifies it
        return Err(error)


def _run_scoped(call: Call) -> Any:
    if call.scope is not None:
        scope.set_scope(call.scope)
    return reject_unstarted_coroutine(call.fn(*call.args))


async def _sleep(effect: Any) -> None:
    if type(effect) is not Sleep:
        raise _unsupported_effect_error(effect)
    await asyncio.sleep(max(0.0, effect.until - asyncio.get_running_loop().time()))


async def _run_and_notify(ended: asyncio.Future[CallResult], call: Call) -> CallResult:
    """Make *call* and set *ended* from inside: others see the end of a task one loop iteration later."""
    if call.scope is not None:
        scope.set_scope(call.scope)
    answer = _run_call(call)
    try:
        if isinstance(answer, Ok):
            answer = await _await_result(answer.value)
    except BaseException:
        ended.cancel()  # other code has cancelled this task
        raise
    try:
        _set_result(ended, answer)
        return answer
    finally:
        del ended, answer  # both hold the exception, whose traceback holds this frame since Python 3.12


def _unsupported_effect_error(effect: object) -> ConfigurationError:
    return ConfigurationError(f"inline runner does not support effect {effect!r}; use a call or a sleep")
