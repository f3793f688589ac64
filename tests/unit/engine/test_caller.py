"""Callers: one script for whoever calls, in his own thread or task."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import os
import signal
import threading
import time
from typing import Any

import pytest

from ergon_framework import scope
from ergon_framework.engine.drivers import caller as module
from ergon_framework.engine.drivers.caller import AsyncCaller, Caller
from ergon_framework.engine.effects import NEVER, Call, Gone, Sleep, Visit
from ergon_framework.engine.outcome import Err, Expired, NotBegunError, Ok, Stopped
from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.scope import Scope
from ergon_framework.testing.virtual import VirtualLoop, VirtualTime, run_virtual
from ergon_framework.transaction import Transaction

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")
FLAVOURS = ("threads", "asyncio")


@pytest.fixture(params=FLAVOURS)
def flavour(request):
    return request.param


def perform(flavour, make):
    """What the script that *make* makes of a clock comes to, in virtual time, and when."""
    if flavour == "threads":
        virtual = VirtualTime()
        return Caller(virtual).perform(make(virtual.clock, virtual.sleep)), virtual.clock()

    async def main():
        loop = asyncio.get_running_loop()
        return await AsyncCaller().perform(make(loop.time, asyncio.sleep)), loop.time()

    return run_virtual(main())


def body(flavour, sleep, act):
    """*act* after so many seconds, as that flavour has it."""

    def threaded(seconds):
        if seconds:
            sleep(seconds)
        return act()

    async def tasked(seconds):
        if seconds:
            await sleep(seconds)
        return act()

    return threaded if flavour == "threads" else tasked


@pytest.mark.parametrize("until", [5.0, NEVER])
def test_a_call_is_answered_with_what_it_returned_or_raised(flavour, until):
    error = ValueError("no")

    def fail():
        raise error

    def make(clock, sleep):
        good = yield Call("x", body(flavour, sleep, lambda: 7), (0,), until)
        bad = yield Call("x", body(flavour, sleep, fail), (0,), until)
        return good, bad

    (good, bad), _ = perform(flavour, make)
    assert (type(good), good.value, type(bad), bad.error) == (Ok, 7, Err, error)


def test_a_visit_is_answered_with_what_it_returned_or_with_an_error_of_ours(flavour):
    error = ErgonError("no")

    def fail():
        raise error

    def make(clock, sleep):
        good = yield Visit("x", body(flavour, sleep, lambda: (7, threading.get_ident())), (0,))
        bad = yield Visit("x", body(flavour, sleep, fail), (0,))
        return good, bad

    (good, bad), _ = perform(flavour, make)
    assert (type(good), good.value, type(bad), bad.error) == (Ok, (7, threading.get_ident()), Err, error)


def test_a_call_that_does_not_come_back_is_abandoned_in_time_and_its_scope_cancelled(flavour):
    inner = Scope(Transaction("1"), "process", 0)
    seen = []

    def make(clock, sleep):
        call = Call("x", body(flavour, sleep, lambda: seen.append("late")), (50.0,), 2.0, inner)
        answer = yield call
        return answer, call, inner.cancelled, clock()

    (answer, call, cancelled, at), _ = perform(flavour, make)
    assert isinstance(answer, Expired)
    assert (answer.body, cancelled, at, seen) == (call, True, 2.0, [])


def test_a_sleep_takes_its_time_and_one_that_is_over_none(flavour):
    def make(clock, sleep):
        first = yield Sleep(clock() + 3.0)
        second = yield Sleep(clock() - 1.0)
        return first, second

    answers, at = perform(flavour, make)
    assert (answers, at) == ((None, None), 3.0)


def test_a_body_sees_the_callers_variables_and_its_own_scope_and_leaves_nothing_behind(flavour):
    inner = Scope(Transaction("1"), "process", 0)
    seen = []

    def act():
        seen.append((variable.get(), scope.current()))
        variable.set("changed")

    def make(clock, sleep):
        variable.set("the caller's")
        yield Call("x", body(flavour, sleep, act), (0,), 5.0, inner)
        seen.append((variable.get(), scope.current()))

    perform(flavour, make)
    assert seen == [("the caller's", inner), ("the caller's", None)]


def test_a_body_without_a_scope_of_its_own_is_in_the_callers(flavour):
    outer, inner = (Scope(Transaction(name), "process", 0) for name in ("outer", "inner"))

    def make(clock, sleep):
        mine = yield Call("x", body(flavour, sleep, scope.current), (0,), clock() + 9)
        own = yield Call("x", body(flavour, sleep, scope.current), (0,), clock() + 9, inner)
        return mine.value, own.value

    def within():
        scope.enter(outer)
        return perform(flavour, make)

    found, _ = contextvars.copy_context().run(within)
    assert found == (outer, inner)
    assert not inner.cancelled, "it came back in time"


def test_a_body_runs_in_the_context_that_its_call_brings(flavour):
    context = contextvars.copy_context()
    context.run(variable.set, "brought")
    seen = []

    def make(clock, sleep):
        yield Call("x", body(flavour, sleep, lambda: seen.append(variable.get())), (0,), 5.0, None, context)

    perform(flavour, make)
    assert seen == ["brought"]


def test_only_calls_and_sleeps_are_known(flavour):
    def make(clock, sleep):
        yield Gone(Call("x", abs, (1,)), 1.0)

    with pytest.raises(ConfigurationError, match="nothing else"):
        perform(flavour, make)


def test_a_body_that_has_not_even_begun_is_no_result(flavour):
    async def inner(): ...

    def make(clock, sleep):
        return (yield Call("x", body(flavour, sleep, inner), (0,), 5.0))

    answer, _ = perform(flavour, make)
    assert isinstance(answer.error, TypeError)


def test_an_error_of_the_script_itself_comes_out(flavour):
    def make(clock, sleep):
        yield Sleep(1.0)
        raise LookupError("a defect")

    with pytest.raises(LookupError):
        perform(flavour, make)


# -- threads --------------------------------------------------------------------------------------


def test_a_call_without_a_deadline_is_made_in_the_callers_own_thread():
    def script(until):
        return (yield Call("x", threading.get_ident, (), until))

    caller = Caller()
    assert caller.perform(script(NEVER)).value == threading.get_ident()
    assert caller.perform(script(time.monotonic() + 9)).value != threading.get_ident()


@pytest.mark.parametrize("blow", [KeyboardInterrupt, RuntimeError])
def test_what_else_a_visit_raises_has_struck_the_thread(blow):
    told = []

    def struck():
        raise blow("called away")

    def script():
        told.append((yield Visit("books", struck, ())))
        told.append((yield Visit("books", lambda: "concluded", ())).value)

    with pytest.raises(blow, match="called away"):
        Caller().perform(script())
    assert isinstance(told[0], Stopped)
    assert told[0].body.step == "books"
    assert told[1] == "concluded"


def test_bodies_run_in_threads_that_are_kept_and_named():
    caller = Caller()
    answer = caller.perform(one(Call("x", threading.current_thread, (), time.monotonic() + 9)))
    assert answer.value.name.startswith("ergon-call")
    assert caller._daemons() is caller._daemons()


def test_who_was_struck_leaves_nothing_behind():
    """Not even until the garbage collector comes: what an exception holds may be sockets."""

    class Struck(Exception):
        pass

    class Bell:
        def ring(self): ...

        def wait(self, seconds):
            raise Struck

    def strike(caller):
        with contextlib.suppress(Struck):
            caller.perform(one(Sleep(time.monotonic() + 9)))

    caller: Any = Caller()
    caller._waiting.alarm = Bell
    try:
        assert not left_by(Struck, lambda: strike(caller))
    finally:
        del caller._waiting.alarm


def test_a_call_for_which_no_thread_was_free_never_runs():
    inside, hold, ran = threading.Event(), threading.Event(), []
    caller = Caller(threads=1)

    def occupy():
        inside.set()
        hold.wait()

    def call(act, *args, seconds=60.0):
        return caller.perform(one(Call("x", act, args, time.monotonic() + seconds)))

    other = threading.Thread(target=call, args=(occupy,))
    other.start()
    inside.wait()
    answer = call(ran.append, 1, seconds=0.02)
    hold.set()
    other.join()
    after = call(lambda: 3)
    assert isinstance(answer.error, NotBegunError)
    assert answer.error.code == "not_begun"
    assert (after.value, ran) == (3, [])


def test_a_body_that_comes_back_in_the_moment_it_is_given_up_is_heard():
    """The alarm has not rung, the deadline is over, and yet the answer is there."""

    class Deaf:
        def ring(self): ...

        def wait(self, seconds):
            time.sleep(seconds)

    caller: Any = Caller()
    caller._waiting.alarm = Deaf
    try:
        answer = caller.perform(one(Call("x", lambda: 5, (), time.monotonic() + 0.05)))
    finally:
        del caller._waiting.alarm
    assert answer.value == 5


def one(effect):
    return (yield effect)


def left_by(kind, act):
    """The objects of *kind* that only the garbage collector would take away after *act*."""

    def there():
        return [found for found in gc.get_objects() if type(found) is kind]

    gc.collect()
    gc.disable()
    try:
        before = there()
        act()
        return [found for found in there() if not any(found is known for known in before)]
    finally:
        gc.enable()


def test_what_strikes_the_waiting_thread_is_told_to_the_script_and_raised_at_its_end():
    told = []
    inner = Scope(Transaction("1"), "process", 0)

    class Struck(Exception):
        pass

    class Bell:
        def ring(self): ...

        def wait(self, seconds):
            raise Struck

    def script():
        call = Call("x", time.sleep, (0.05,), time.monotonic() + 9, inner)
        told.append((yield call))
        told.append((yield Call("books", lambda: "concluded", ())).value)

    caller: Any = Caller()
    caller._waiting.alarm = Bell
    try:
        with pytest.raises(Struck):
            caller.perform(script())
    finally:
        del caller._waiting.alarm
    assert isinstance(told[0], Stopped)
    assert told[0].body.step == "x"
    assert told[1] == "concluded"
    assert inner.cancelled


def test_who_is_struck_twice_leaves_at_once():
    blows, told = iter([KeyboardInterrupt("first"), KeyboardInterrupt("second")]), []

    class Bell:
        def ring(self): ...

        def wait(self, seconds):
            raise next(blows)

    def script():
        try:
            told.append((yield Sleep(time.monotonic() + 9)).body)
            yield Sleep(time.monotonic() + 9)
            told.append("went on")
        finally:
            told.append("closed")

    caller: Any = Caller()
    caller._waiting.alarm = Bell
    try:
        with pytest.raises(KeyboardInterrupt, match="second"):
            caller.perform(script())
    finally:
        del caller._waiting.alarm
    assert told == [None, "closed"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own():
    caller = Caller()
    assert caller.perform(one(Call("x", lambda: 1, (), time.monotonic() + 9))).value == 1
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        answer = caller.perform(one(Call("x", lambda: 2, (), time.monotonic() + 5)))
        os.write(writer, b"2" if isinstance(answer, Ok) and answer.value == 2 else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"2"
    os.close(reader)
    os.close(writer)


# -- asyncio --------------------------------------------------------------------------------------


def test_a_cancellation_is_told_to_the_script_and_passed_on_at_its_end():
    told = []

    def script(loop):
        told.append((yield Call("x", asyncio.sleep, (50,), loop.time() + 99, Scope(Transaction("1"), "process", 0))))
        told.append((yield Call("books", asyncio.sleep, (0.1, "concluded"))).value)

    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(AsyncCaller().perform(script(loop)))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return loop.time()

    assert run_virtual(main()) == pytest.approx(1.1)
    assert isinstance(told[0], Stopped)
    assert told[0].body.scope.cancelled
    assert told[1] == "concluded"


def test_a_task_that_was_cancelled_leaves_nothing_behind():
    async def main():
        perform = AsyncCaller().perform(one(Sleep(asyncio.get_running_loop().time() + 50)))
        task = asyncio.create_task(perform)
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    assert not left_by(asyncio.CancelledError, lambda: asyncio.run(main()))


def test_a_second_cancellation_ends_it_at_once():
    told = []

    def script(loop):
        try:
            told.append((yield Sleep(loop.time() + 50)).body)
            yield Call("books", asyncio.sleep, (50,))
            told.append("went on")
        finally:
            told.append("closed")

    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(AsyncCaller().perform(script(loop)))
        for word in ("first", "second"):
            await asyncio.sleep(1)
            task.cancel(word)
        with pytest.raises(asyncio.CancelledError, match="second"):
            await task
        return loop.time()

    assert run_virtual(main()) == 2.0
    assert told == [None, "closed"]


def test_a_cancellation_in_a_call_without_a_deadline_is_told_as_one():
    told = []

    def script():
        told.append((yield Call("books", asyncio.sleep, (50,))))

    async def main():
        task = asyncio.create_task(AsyncCaller().perform(script()))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
    assert isinstance(told[0], Stopped)
    assert told[0].body.step == "books"


@pytest.mark.parametrize("until", [5.0, NEVER])
def test_a_cancellation_that_a_body_raises_is_an_answer(until):
    async def leaves():
        raise asyncio.CancelledError("its own")

    answer = run_virtual(AsyncCaller().perform(one(Call("x", leaves, (), until))))
    assert isinstance(answer.error, asyncio.CancelledError)


def test_an_abandoned_task_is_cancelled():
    left = []

    async def hangs():
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            left.append(asyncio.get_running_loop().time())
            raise

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context))
        answer = await AsyncCaller().perform(one(Call("body", hangs, (), 2.0)))
        await asyncio.sleep(1.0)
        return answer

    assert isinstance(run_virtual(main()), Expired)
    assert left == [2.0]


def test_a_call_that_came_back_leaves_no_timer_behind():
    async def main():
        loop: Any = asyncio.get_running_loop()
        await AsyncCaller().perform(one(Call("body", asyncio.sleep, (0,), loop.time() + 50)))
        return [timer for timer in loop._scheduled if not timer.cancelled()]

    assert asyncio.run(main()) == []


def test_a_body_that_ignores_its_cancellation_is_not_awaited():
    async def stubborn():
        end = asyncio.get_running_loop().time() + 30
        while asyncio.get_running_loop().time() < end:
            try:
                await asyncio.sleep(end - asyncio.get_running_loop().time())
            except asyncio.CancelledError:
                continue

    async def main():
        caller = AsyncCaller()
        answer = await caller.perform(one(Call("x", stubborn, (), 2.0)))
        at, left = asyncio.get_running_loop().time(), len(caller._left)
        await asyncio.sleep(60)
        return answer, at, left, len(caller._left)

    answer, at, left, later = run_virtual(main())
    assert isinstance(answer, Expired)
    assert (at, left, later) == (2.0, 1, 0), "somebody holds it until it has ended"


def test_a_body_that_comes_late_after_all_tells_nobody():
    told = []

    async def late():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)
        return "too late"

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        answer = await AsyncCaller().perform(one(Call("body", late, (), 2.0)))
        await asyncio.sleep(1.0)
        gc.collect()
        return answer

    assert isinstance(run_virtual(main()), Expired)
    assert told == []


def test_a_body_that_somebody_else_cancels_is_not_waited_for():
    async def cancelled():
        task = asyncio.current_task()
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.sleep(1000)

    async def main():
        with pytest.raises(asyncio.CancelledError):
            await AsyncCaller().perform(one(Call("body", cancelled, (), 500.0)))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0.0


def test_a_body_that_comes_back_in_the_turn_of_its_deadline_is_heard():
    async def just():
        asyncio.get_running_loop().call_soon(time.sleep, 0.1)  # both moments pass meanwhile
        await asyncio.sleep(0.01)
        return "done"

    async def main():
        until = asyncio.get_running_loop().time() + 0.02
        return await AsyncCaller().perform(one(Call("body", just, (), until)))

    assert asyncio.run(main()).value == "done"


def test_a_body_that_raises_at_once_is_an_answer():
    def broken():
        raise LookupError("before it was a coroutine")

    answer = run_virtual(AsyncCaller().perform(one(Call("x", broken, (), 5.0))))
    assert isinstance(answer.error, LookupError)


def test_the_clock_is_the_running_event_loops_or_the_one_that_was_given():
    caller = AsyncCaller()

    async def main():
        assert caller.senses is caller.senses
        return caller.senses.clock()

    assert run_virtual(main()) == 0.0
    assert asyncio.run(main()) > 0.0, "another loop, another clock"
    loop = VirtualLoop()
    assert AsyncCaller(loop.senses).senses is loop.senses
    loop.close()
    assert module.THREADS >= 1


def test_what_does_not_wait_need_not_be_a_coroutine():
    answer = run_virtual(AsyncCaller().perform(one(Call("books", lambda: 7, ()))))
    assert answer.value == 7
    assert Caller().senses.clock is time.monotonic
