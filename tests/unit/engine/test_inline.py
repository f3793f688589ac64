"""Inline runners: they run one script in the thread or task of the caller."""

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
from ergon_framework.engine import inline as module
from ergon_framework.engine.effects import (
    NEVER,
    AwaitExit,
    Call,
    Err,
    Expired,
    Interrupted,
    NotStartedError,
    Ok,
    SelfTimedCall,
    Sleep,
)
from ergon_framework.engine.inline import AsyncInlineRunner, InlineRunner
from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.scope import Scope
from ergon_framework.testing.virtual_time import VirtualLoop, VirtualTime, run_virtual
from ergon_framework.transaction import Transaction

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nothing")
VARIANTS = ("threads", "asyncio")


@pytest.fixture(params=VARIANTS)
def variant(request):
    return request.param


def run_script(variant, make_script):
    """What the script that *make* makes of a clock comes to, in virtual time, and when."""
    if variant == "threads":
        virtual = VirtualTime()
        return InlineRunner(virtual).run(make_script(virtual.clock, virtual.sleep)), virtual.clock()

    async def main():
        loop = asyncio.get_running_loop()
        return await AsyncInlineRunner().run(make_script(loop.time, asyncio.sleep)), loop.time()

    return run_virtual(main())


def make_handler(variant, sleep, function):
    """*act* after so many seconds, as that flavour has it."""

    def handle(seconds):
        if seconds:
            sleep(seconds)
        return function()

    async def handle_async(seconds):
        if seconds:
            await sleep(seconds)
        return function()

    return handle if variant == "threads" else handle_async


@pytest.mark.parametrize("until", [5.0, NEVER])
def test_a_call_gets_the_value_or_the_error_of_its_handler(variant, until):
    error = ValueError("no")

    def fail():
        raise error

    def script(clock, sleep):
        good = yield Call("x", make_handler(variant, sleep, lambda: 7), (0,), until)
        bad = yield Call("x", make_handler(variant, sleep, fail), (0,), until)
        return good, bad

    (good, bad), _ = run_script(variant, script)
    assert (type(good), good.value, type(bad), bad.error) == (Ok, 7, Err, error)


def test_a_self_timed_call_gets_its_value_or_a_framework_error(variant):
    error = ErgonError("no")

    def fail():
        raise error

    def script(clock, sleep):
        good = yield SelfTimedCall("x", make_handler(variant, sleep, lambda: (7, threading.get_ident())), (0,))
        bad = yield SelfTimedCall("x", make_handler(variant, sleep, fail), (0,))
        return good, bad

    (good, bad), _ = run_script(variant, script)
    assert (type(good), good.value, type(bad), bad.error) == (Ok, (7, threading.get_ident()), Err, error)


def test_a_timed_out_call_is_abandoned_and_its_scope_cancelled(variant):
    inner = Scope(Transaction(id="1"), "process", 0)
    seen = []

    def script(clock, sleep):
        call = Call("x", make_handler(variant, sleep, lambda: seen.append("late")), (50.0,), 2.0, inner)
        answer = yield call
        return answer, call, inner.cancelled, clock()

    (answer, call, cancelled, at), _ = run_script(variant, script)
    assert isinstance(answer, Expired)
    assert (answer.call, cancelled, at, seen) == (call, True, 2.0, [])


def test_a_sleep_lasts_until_its_time_and_a_past_one_does_not_wait(variant):
    def script(clock, sleep):
        first = yield Sleep(clock() + 3.0)
        second = yield Sleep(clock() - 1.0)
        return first, second

    answers, at = run_script(variant, script)
    assert (answers, at) == ((None, None), 3.0)


def test_a_handler_sees_the_callers_variables_and_its_scope_and_changes_neither(variant):
    inner = Scope(Transaction(id="1"), "process", 0)
    seen = []

    def record_state():
        seen.append((variable.get(), scope.current()))
        variable.set("changed")

    def script(clock, sleep):
        variable.set("the caller's")
        yield Call("x", make_handler(variant, sleep, record_state), (0,), 5.0, inner)
        seen.append((variable.get(), scope.current()))

    run_script(variant, script)
    assert seen == [("the caller's", inner), ("the caller's", None)]


def test_a_handler_without_its_own_scope_runs_in_that_of_the_caller(variant):
    outer, inner = (Scope(Transaction(id=name), "process", 0) for name in ("outer", "inner"))

    def script(clock, sleep):
        without_scope = yield Call("x", make_handler(variant, sleep, scope.current), (0,), clock() + 9)
        with_scope = yield Call("x", make_handler(variant, sleep, scope.current), (0,), clock() + 9, inner)
        return without_scope.value, with_scope.value

    def run_in_outer_scope():
        scope.set_scope(outer)
        return run_script(variant, script)

    scopes, _ = contextvars.copy_context().run(run_in_outer_scope)
    assert scopes == (outer, inner)
    assert not inner.cancelled, "it came back in time"


def test_a_handler_runs_in_the_context_of_its_call(variant):
    context = contextvars.copy_context()
    context.run(variable.set, "brought")
    seen = []

    def script(clock, sleep):
        yield Call("x", make_handler(variant, sleep, lambda: seen.append(variable.get())), (0,), 5.0, None, context)

    run_script(variant, script)
    assert seen == ["brought"]


def test_only_calls_and_sleeps_are_accepted(variant):
    def script(clock, sleep):
        yield AwaitExit(Call("x", abs, (1,)), 1.0)

    with pytest.raises(ConfigurationError, match="use a call or a sleep"):
        run_script(variant, script)


def test_an_unstarted_coroutine_is_not_a_result(variant):
    async def inner(): ...

    def script(clock, sleep):
        return (yield Call("x", make_handler(variant, sleep, inner), (0,), 5.0))

    answer, _ = run_script(variant, script)
    assert isinstance(answer.error, TypeError)


def test_an_error_in_the_script_is_raised(variant):
    def script(clock, sleep):
        yield Sleep(1.0)
        raise LookupError("a defect")

    with pytest.raises(LookupError):
        run_script(variant, script)


# -- threads --------------------------------------------------------------------------------------


def test_a_call_without_a_deadline_is_made_in_the_callers_own_thread():
    def script(until):
        return (yield Call("x", threading.get_ident, (), until))

    caller = InlineRunner()
    assert caller.run(script(NEVER)).value == threading.get_ident()
    assert caller.run(script(time.monotonic() + 9)).value != threading.get_ident()


@pytest.mark.parametrize("error_type", [KeyboardInterrupt, RuntimeError])
def test_another_exception_of_a_self_timed_call_interrupts_the_thread(error_type):
    answers = []

    def raise_error():
        raise error_type("called away")

    def script():
        answers.append((yield SelfTimedCall("record", raise_error, ())))
        answers.append((yield SelfTimedCall("record", lambda: "concluded", ())).value)

    with pytest.raises(error_type, match="called away"):
        InlineRunner().run(script())
    assert isinstance(answers[0], Interrupted)
    assert answers[0].call.step == "record"
    assert answers[1] == "concluded"


def test_handlers_run_in_reused_and_named_threads():
    caller = InlineRunner()
    answer = caller.run(yield_effect(Call("x", threading.current_thread, (), time.monotonic() + 9)))
    assert answer.value.name.startswith("ergon-call")
    assert caller._get_executor() is caller._get_executor()


def test_an_interrupted_wait_leaves_no_reference_cycle():
    """Not even until the garbage collector comes: what an exception holds may be sockets."""

    class WaitError(Exception):
        pass

    class RaisingWakeup:
        def set(self): ...

        def wait(self, seconds):
            raise WaitError

    def interrupt_wait(caller):
        with contextlib.suppress(WaitError):
            caller.run(yield_effect(Sleep(time.monotonic() + 9)))

    caller: Any = InlineRunner()
    caller._waiting.create_wakeup = RaisingWakeup
    try:
        assert not find_uncollected(WaitError, lambda: interrupt_wait(caller))
    finally:
        del caller._waiting.create_wakeup


def test_a_call_without_a_free_thread_never_runs():
    is_occupied, release, ran = threading.Event(), threading.Event(), []
    caller = InlineRunner(threads=1)

    def occupy():
        is_occupied.set()
        release.wait()

    def call(function, *args, seconds=60.0):
        return caller.run(yield_effect(Call("x", function, args, time.monotonic() + seconds)))

    other = threading.Thread(target=call, args=(occupy,))
    other.start()
    is_occupied.wait()
    answer = call(ran.append, 1, seconds=0.02)
    release.set()
    other.join()
    after = call(lambda: 3)
    assert isinstance(answer.error, NotStartedError)
    assert answer.error.code == "not_begun"
    assert (after.value, ran) == (3, [])


def test_a_result_that_arrives_at_the_deadline_is_used():
    """The alarm has not rung, the deadline is over, and yet the answer is there."""

    class TimerOnlyWakeup:
        def set(self): ...

        def wait(self, seconds):
            time.sleep(seconds)

    caller: Any = InlineRunner()
    caller._waiting.create_wakeup = TimerOnlyWakeup
    try:
        answer = caller.run(yield_effect(Call("x", lambda: 5, (), time.monotonic() + 0.05)))
    finally:
        del caller._waiting.create_wakeup
    assert answer.value == 5


def yield_effect(effect):
    return (yield effect)


def find_uncollected(kind, act):
    """The objects of *kind* that only the garbage collector would take away after *act*."""

    def list_instances():
        return [instance for instance in gc.get_objects() if type(instance) is kind]

    gc.collect()
    gc.disable()
    try:
        before = list_instances()
        act()
        return [instance for instance in list_instances() if not any(instance is earlier for earlier in before)]
    finally:
        gc.enable()


def test_an_exception_in_the_wait_stops_the_script_and_is_raised_at_its_end():
    answers = []
    inner = Scope(Transaction(id="1"), "process", 0)

    class WaitError(Exception):
        pass

    class RaisingWakeup:
        def set(self): ...

        def wait(self, seconds):
            raise WaitError

    def script():
        call = Call("x", time.sleep, (0.05,), time.monotonic() + 9, inner)
        answers.append((yield call))
        answers.append((yield Call("record", lambda: "concluded", ())).value)

    caller: Any = InlineRunner()
    caller._waiting.create_wakeup = RaisingWakeup
    try:
        with pytest.raises(WaitError):
            caller.run(script())
    finally:
        del caller._waiting.create_wakeup
    assert isinstance(answers[0], Interrupted)
    assert answers[0].call.step == "x"
    assert answers[1] == "concluded"
    assert inner.cancelled


def test_a_second_exception_in_the_wait_is_raised_immediately():
    errors, answers = iter([KeyboardInterrupt("first"), KeyboardInterrupt("second")]), []

    class RaisingWakeup:
        def set(self): ...

        def wait(self, seconds):
            raise next(errors)

    def script():
        try:
            answers.append((yield Sleep(time.monotonic() + 9)).call)
            yield Sleep(time.monotonic() + 9)
            answers.append("went on")
        finally:
            answers.append("closed")

    caller: Any = InlineRunner()
    caller._waiting.create_wakeup = RaisingWakeup
    try:
        with pytest.raises(KeyboardInterrupt, match="second"):
            caller.run(script())
    finally:
        del caller._waiting.create_wakeup
    assert answers == [None, "closed"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_its_own_threads():
    caller = InlineRunner()
    assert caller.run(yield_effect(Call("x", lambda: 1, (), time.monotonic() + 9))).value == 1
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        answer = caller.run(yield_effect(Call("x", lambda: 2, (), time.monotonic() + 5)))
        os.write(writer, b"2" if isinstance(answer, Ok) and answer.value == 2 else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"2"
    os.close(reader)
    os.close(writer)


# -- asyncio --------------------------------------------------------------------------------------


def test_a_cancellation_stops_the_script_and_is_raised_at_its_end():
    answers = []

    def script(loop):
        answers.append(
            (yield Call("x", asyncio.sleep, (50,), loop.time() + 99, Scope(Transaction(id="1"), "process", 0)))
        )
        answers.append((yield Call("record", asyncio.sleep, (0.1, "concluded"))).value)

    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(AsyncInlineRunner().run(script(loop)))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return loop.time()

    assert run_virtual(main()) == pytest.approx(1.1)
    assert isinstance(answers[0], Interrupted)
    assert answers[0].call.scope.cancelled
    assert answers[1] == "concluded"


def test_a_cancelled_task_leaves_no_reference_cycle():
    async def main():
        perform = AsyncInlineRunner().run(yield_effect(Sleep(asyncio.get_running_loop().time() + 50)))
        task = asyncio.create_task(perform)
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    assert not find_uncollected(asyncio.CancelledError, lambda: asyncio.run(main()))


def test_a_second_cancellation_ends_the_run_immediately():
    answers = []

    def script(loop):
        try:
            answers.append((yield Sleep(loop.time() + 50)).call)
            yield Call("record", asyncio.sleep, (50,))
            answers.append("went on")
        finally:
            answers.append("closed")

    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(AsyncInlineRunner().run(script(loop)))
        for message in ("first", "second"):
            await asyncio.sleep(1)
            task.cancel(message)
        with pytest.raises(asyncio.CancelledError, match="second"):
            await task
        return loop.time()

    assert run_virtual(main()) == 2.0
    assert answers == [None, "closed"]


def test_a_cancellation_during_a_call_without_a_deadline_stops_the_script():
    answers = []

    def script():
        answers.append((yield Call("record", asyncio.sleep, (50,))))

    async def main():
        task = asyncio.create_task(AsyncInlineRunner().run(script()))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
    assert isinstance(answers[0], Interrupted)
    assert answers[0].call.step == "record"


@pytest.mark.parametrize("until", [5.0, NEVER])
def test_a_cancellation_raised_by_a_handler_is_its_result(until):
    async def raise_cancelled():
        raise asyncio.CancelledError("its own")

    answer = run_virtual(AsyncInlineRunner().run(yield_effect(Call("x", raise_cancelled, (), until))))
    assert isinstance(answer.error, asyncio.CancelledError)


def test_an_abandoned_task_is_cancelled():
    events = []

    async def hang():
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            events.append(asyncio.get_running_loop().time())
            raise

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: events.append(context))
        answer = await AsyncInlineRunner().run(yield_effect(Call("body", hang, (), 2.0)))
        await asyncio.sleep(1.0)
        return answer

    assert isinstance(run_virtual(main()), Expired)
    assert events == [2.0]


def test_a_returned_call_leaves_no_timer():
    async def main():
        loop: Any = asyncio.get_running_loop()
        await AsyncInlineRunner().run(yield_effect(Call("body", asyncio.sleep, (0,), loop.time() + 50)))
        return [timer for timer in loop._scheduled if not timer.cancelled()]

    assert asyncio.run(main()) == []


def test_a_call_that_ignores_its_cancellation_is_not_awaited():
    async def ignore_cancellation():
        end = asyncio.get_running_loop().time() + 30
        while asyncio.get_running_loop().time() < end:
            try:
                await asyncio.sleep(end - asyncio.get_running_loop().time())
            except asyncio.CancelledError:
                continue

    async def main():
        caller = AsyncInlineRunner()
        answer = await caller.run(yield_effect(Call("x", ignore_cancellation, (), 2.0)))
        at, left = asyncio.get_running_loop().time(), len(caller._abandoned_tasks)
        await asyncio.sleep(60)
        return answer, at, left, len(caller._abandoned_tasks)

    answer, at, left, later = run_virtual(main())
    assert isinstance(answer, Expired)
    assert (at, left, later) == (2.0, 1, 0), "the runner keeps a reference until it has ended"


def test_a_late_result_is_ignored():
    loop_errors = []

    async def return_late():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)
        return "too late"

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
        answer = await AsyncInlineRunner().run(yield_effect(Call("body", return_late, (), 2.0)))
        await asyncio.sleep(1.0)
        gc.collect()
        return answer

    assert isinstance(run_virtual(main()), Expired)
    assert loop_errors == []


def test_an_externally_cancelled_call_is_not_awaited():
    async def get_cancelled():
        task = asyncio.current_task()
        asyncio.get_running_loop().call_soon(task.cancel)
        await asyncio.sleep(1000)

    async def main():
        with pytest.raises(asyncio.CancelledError):
            await AsyncInlineRunner().run(yield_effect(Call("body", get_cancelled, (), 500.0)))
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == 0.0


def test_a_result_in_the_turn_of_its_deadline_is_used():
    async def return_at_deadline():
        asyncio.get_running_loop().call_soon(time.sleep, 0.1)  # both moments pass meanwhile
        await asyncio.sleep(0.01)
        return "done"

    async def main():
        until = asyncio.get_running_loop().time() + 0.02
        return await AsyncInlineRunner().run(yield_effect(Call("body", return_at_deadline, (), until)))

    assert asyncio.run(main()).value == "done"


def test_an_error_before_the_first_await_is_a_result():
    def fail():
        raise LookupError("before it was a coroutine")

    answer = run_virtual(AsyncInlineRunner().run(yield_effect(Call("x", fail, (), 5.0))))
    assert isinstance(answer.error, LookupError)


def test_the_clock_is_that_of_the_running_event_loop_or_the_given_one():
    caller = AsyncInlineRunner()

    async def main():
        assert caller.clock is caller.clock
        return caller.clock.monotonic()

    assert run_virtual(main()) == 0.0
    assert asyncio.run(main()) > 0.0, "another loop, another clock"
    loop = VirtualLoop()
    assert AsyncInlineRunner(loop.time_source).clock is loop.time_source
    loop.close()
    assert module.MAX_THREADS >= 1


def test_a_handler_may_be_a_plain_function():
    answer = run_virtual(AsyncInlineRunner().run(yield_effect(Call("record", lambda: 7, ()))))
    assert answer.value == 7
    assert InlineRunner().clock.monotonic is time.monotonic
