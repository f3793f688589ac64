"""Callers: they perform one script for whoever calls, in his own thread or task.

The loops' drivers run many scripts and own their threads. A caller is for code that is already
running somewhere and wants one script done before it goes on. It knows two effects, Call and Sleep,
and holds no decision. A call without a deadline is made in place. A call with one is made on a
thread, or in a task, of its own, in a copy of the present context: at the deadline it is abandoned,
its scope is cancelled, and whatever it still returns reaches nobody. A Visit keeps its deadline by
itself, so that it is made in place too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import Any, Final

from ergon_framework import scope
from ergon_framework.engine.drivers.aio import clock_of
from ergon_framework.engine.drivers.bodies import checked
from ergon_framework.engine.drivers.daemons import DaemonExecutor
from ergon_framework.engine.drivers.waiting import Alarm, RealTime, Waiting
from ergon_framework.engine.effects import NEVER, Call, R, Script, Sleep, Visit
from ergon_framework.engine.outcome import Answer, Err, Expired, NotBegunError, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.errors import ConfigurationError, ErgonError

#: The most bodies that run at once, abandoned ones included; more wait for a thread within their deadline.
THREADS: Final = 1_000


class Caller:
    """Performs scripts in the threads of those who call; one is enough for a process.

    An exception that strikes the calling thread while it waits (Ctrl-C, a signal handler's) is told to
    the script as Stopped, and raised when the script has ended. A forked child begins with threads of
    its own.
    """

    def __init__(self, waiting: Waiting | None = None, *, threads: int = THREADS) -> None:
        self._waiting = waiting or RealTime()
        self._threads = threads
        self._executor: DaemonExecutor | None = None
        self._pid = 0

    @property
    def senses(self) -> Senses:
        return self._waiting.senses

    def perform(self, script: Script[R]) -> R:
        """Perform *script* to its end."""
        answer: Any = None
        struck: BaseException | None = None
        while True:
            try:
                effect = script.send(answer)
            except StopIteration as stop:
                result: R = stop.value
                break
            try:
                answer = self._performed(effect)
            except BaseException as error:
                if struck is not None:
                    script.close()
                    raise
                struck, answer = error, Stopped(effect if isinstance(effect, Call) else None)
        if struck is None:
            return result
        try:
            raise struck
        finally:
            del struck  # a frame that holds the exception which holds the frame

    def _performed(self, effect: Any) -> Any:
        if type(effect) is Call:
            return _made(effect) if effect.until == NEVER else self._made_elsewhere(effect)
        if type(effect) is Visit:
            return _visited(effect)
        if type(effect) is Sleep:
            self._wait(self._waiting.alarm(), effect.until, lambda: False)
            return None
        raise _unknown(effect)

    def _made_elsewhere(self, call: Call) -> Answer:
        body = _Body(call, self._waiting.alarm())
        self._daemons().execute(self._run, body)
        try:
            self._wait(body.alarm, call.until, body.came)
        finally:
            # Asked once more: it may have come back in this very moment, and then it is known how it ended.
            if body.answer is None:
                self._abandon(body)
        # Taken out: the traceback of an error leads back to the body, and together they would keep each
        # other, and the client's sockets with them, until the garbage collector comes.
        answer, body.answer = body.answer, None
        if answer is not None:
            return answer
        return Expired(call) if body.begun else Err(NotBegunError("no thread was free in time"))

    def _wait(self, alarm: Alarm, until: float, over: Callable[[], bool]) -> None:
        clock = self._waiting.senses.clock
        while not over() and (left := until - clock()) > 0:
            alarm.wait(left)

    def _abandon(self, body: _Body) -> None:
        body.abandoned = True
        if body.call.scope is not None:
            body.call.scope.cancel()

    def _run(self, body: _Body) -> None:
        # Each side writes before it reads, so that one of them at least sees the other: a body that is
        # told to have been left unbegun will never begin.
        body.begun = True
        if not body.abandoned:
            body.answer = _made_within(body.context, body.call)
        body.alarm.ring()

    def _daemons(self) -> DaemonExecutor:
        executor = self._executor
        # Threads do not survive a fork, and the lock of the old executor may be held for ever.
        if executor is None or self._pid != os.getpid():
            executor = self._executor = DaemonExecutor(self._threads, name="ergon-call", waiting=self._waiting)
            self._pid = os.getpid()
        return executor


class AsyncCaller:
    """Performs scripts in the tasks of those who call.

    A cancellation of the calling task is told to the script as Stopped, and passed on when the script has
    ended. An abandoned body is cancelled and not awaited.
    """

    def __init__(self, senses: Senses | None = None) -> None:
        self._given = senses
        self._of: tuple[asyncio.AbstractEventLoop, Senses] | None = None
        self._left: set[asyncio.Task[Any]] = set()

    @property
    def senses(self) -> Senses:
        """Those it was given, or the running event loop's."""
        if self._given is not None:
            return self._given
        loop, known = asyncio.get_running_loop(), self._of
        if known is None or known[0] is not loop:
            known = self._of = loop, Senses(clock=clock_of(loop))
        return known[1]

    async def perform(self, script: Script[R]) -> R:
        """Perform *script* to its end."""
        answer: Any = None
        struck: asyncio.CancelledError | None = None
        while True:
            try:
                effect = script.send(answer)
            except StopIteration as stop:
                result: R = stop.value
                break
            try:
                if isinstance(effect, Call) and effect.until == NEVER:
                    answer = _made(effect)
                    # What does not wait need not be a coroutine.
                    if type(answer) is Ok and hasattr(answer.value, "__await__"):
                        answer = await _made_async(answer.value)
                elif type(effect) is Call:
                    answer = await self._made_elsewhere(effect)
                else:
                    answer = None
                    await _slept(effect)
            except asyncio.CancelledError as error:
                if struck is not None:
                    script.close()
                    raise
                struck, answer = error, Stopped(effect if isinstance(effect, Call) else None)
        if struck is None:
            return result
        try:
            raise struck
        finally:
            del struck  # a frame that holds the exception which holds the frame

    async def _made_elsewhere(self, call: Call) -> Answer:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[Answer] = loop.create_future()
        task = loop.create_task(_told(over, call), context=_context(call))
        timer = loop.call_at(call.until, _tell, over, Expired(call))
        try:
            answer = await over
        finally:
            timer.cancel()
            if not task.done():
                self._abandon(task, call)
        # Both at once: what was done was done.
        return task.result() if type(answer) is Expired and task.done() else answer

    def _abandon(self, task: asyncio.Task[Any], call: Call) -> None:
        if call.scope is not None:
            call.scope.cancel()
        # The event loop itself holds tasks only weakly.
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        task.cancel()


class _Body:
    """A call that somebody waits for, until he does not."""

    __slots__ = ("abandoned", "alarm", "answer", "begun", "call", "context")

    def __init__(self, call: Call, alarm: Alarm) -> None:
        self.call = call
        self.alarm = alarm
        self.context = _context(call)
        self.answer: Answer | None = None
        self.begun = False
        self.abandoned = False

    def came(self) -> bool:
        return self.answer is not None


def _context(call: Call) -> Context:
    return call.context or copy_context()


def _tell(over: asyncio.Future[Answer], answer: Answer) -> None:
    if not over.done():
        over.set_result(answer)


def _made(call: Call) -> Answer:
    try:
        return Ok(call.fn(*call.args))
    except BaseException as error:  # noqa: BLE001 - an answer is data; the script classifies it
        return Err(error)


def _visited(visit: Visit) -> Answer:
    try:
        return Ok(visit.fn(*visit.args))
    except ErgonError as error:
        return Err(error)


def _made_within(context: Context, call: Call) -> Answer:
    try:
        return Ok(context.run(_body, call))
    except BaseException as error:  # noqa: BLE001 - an answer is data; the script classifies it
        return Err(error)


async def _made_async(awaitable: Awaitable[Any]) -> Answer:
    """What *awaitable* came to. A cancellation of the task itself comes out; one that a body raises is an answer."""
    try:
        return Ok(checked(await awaitable))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return Err(error)
    except BaseException as error:  # noqa: BLE001 - an answer is data; the script classifies it
        return Err(error)


def _body(call: Call) -> Any:
    if call.scope is not None:
        scope.enter(call.scope)
    return checked(call.fn(*call.args))


async def _slept(effect: Any) -> None:
    if type(effect) is not Sleep:
        raise _unknown(effect)
    await asyncio.sleep(max(0.0, effect.until - asyncio.get_running_loop().time()))


async def _told(over: asyncio.Future[Answer], call: Call) -> Answer:
    """Make *call*, and say so from within: of the end of a task others learn a turn of the loop later."""
    if call.scope is not None:
        scope.enter(call.scope)
    answer = _made(call)
    try:
        if isinstance(answer, Ok):
            answer = await _made_async(answer.value)
    except BaseException:
        over.cancel()  # somebody else has cancelled this task
        raise
    try:
        _tell(over, answer)
        return answer
    finally:
        del over, answer  # both hold the exception, whose traceback holds this frame since Python 3.12


def _unknown(effect: object) -> ConfigurationError:
    return ConfigurationError(f"a caller makes calls and sleeps, and nothing else; it was asked for {effect!r}")
