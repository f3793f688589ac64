"""What the drivers promise beyond what the twins show: tickets, parking, cancellation, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ergon_framework.engine.aio import AsyncioDriver
from ergon_framework.engine.effects import (
    NEVER,
    Call,
    Err,
    Expired,
    Interrupted,
    Ok,
    Script,
    await_exit,
    call,
    interrupt,
    sleep,
    spawn,
    wait,
)
from ergon_framework.engine.scheduler import Scheduler, ScriptEnded, SlotFreed
from ergon_framework.engine.threads import ThreadDriver


def drive(variant: str, script: Callable[[Scheduler], Script[Any]]) -> Any:
    """Run ``script(driver)`` with the driver of *flavour*."""
    if variant == "threads":
        threads = ThreadDriver(2)
        return threads.run(script(threads))

    async def main() -> Any:
        driver = AsyncioDriver()
        return await driver.run(script(driver))

    return asyncio.run(main())


@pytest.fixture(params=["threads", "asyncio"])
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def adapt_handler(variant: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """*fn* as the driver wants it."""
    if variant == "threads":
        return fn

    async def coroutine(*args: Any) -> Any:
        return fn(*args)

    return coroutine


def test_a_call_gets_its_value_or_its_error(variant: str) -> None:
    def script(_driver: Scheduler) -> Script[Any]:
        value = yield from call(Call("x", adapt_handler(variant, divmod), (7, 2)))
        error = yield from call(Call("x", adapt_handler(variant, divmod), (7, 0)))
        return value, error

    value, error = drive(variant, script)
    assert isinstance(value, Ok)
    assert value.value == (3, 1)
    assert isinstance(error, Err)
    assert isinstance(error.error, ZeroDivisionError)


def test_a_late_value_of_an_expired_call_goes_to_its_callback(variant: str) -> None:
    late: list[Any] = []
    release = threading.Event()

    async def ignore_cancellation() -> str:
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                release.set()
        return "late"

    def block_until_released() -> str:
        release.wait(5)
        return "late"

    def script(driver: Scheduler) -> Script[Any]:
        fn = block_until_released if variant == "threads" else ignore_cancellation
        answer = yield from call(Call("x", fn, (), driver.monotonic() + 0.02, None, None, late.append))
        assert isinstance(answer, Expired)
        in_time = yield from await_exit(answer.call, driver.monotonic())
        release.set()
        at_last = yield from await_exit(answer.call, driver.monotonic() + 5)
        again = yield from await_exit(answer.call, NEVER)
        return in_time, at_last, again, driver.late_results

    assert drive(variant, script) == (False, True, True, 1)
    assert late == ["late"]


def test_a_mailbox_wakes_at_its_count_for_an_urgent_item_or_at_its_deadline(variant: str) -> None:
    def script(driver: Scheduler) -> Script[Any]:
        box = driver.create_mailbox()
        threading.Timer(0.01, driver.put_from_any_thread, (box, "urgent")).start()
        urgent = yield from wait(box, count=9)
        nothing = yield from wait(box, until=driver.monotonic() + 0.01)
        box.put("a")
        box.put("b")
        two = yield from wait(box, count=2)
        box.put("c")
        partial = yield from wait(box, count=5, until=driver.monotonic() + 0.01)
        at_once = yield from wait(box, until=driver.monotonic())
        return urgent, nothing, two, partial, at_once

    assert drive(variant, script) == (["urgent"], [], ["a", "b"], ["c"], [])


def test_an_interrupt_ends_the_pending_effect_or_the_next(variant: str) -> None:
    def sleeper(driver: Scheduler) -> Script[Any]:
        return (yield from sleep(driver.monotonic() + 60))

    def waiter(driver: Scheduler) -> Script[Any]:
        return (yield from wait(driver.create_mailbox()))

    def script(driver: Scheduler) -> Script[Any]:
        box = driver.create_mailbox()
        first = yield from spawn(sleeper(driver), notify=box, counted=True)
        second = yield from spawn(waiter(driver), notify=box, counted=True)
        slots = [first, second]
        for slot in slots:
            yield from interrupt(slot)
        ended: list[Any] = []
        while len(ended) < 2:
            events = yield from wait(box)
            assert isinstance(events, list)
            ended += events
        for slot in slots:
            yield from interrupt(slot)  # the script has ended
        return ended

    ended = drive(variant, script)
    assert all(
        isinstance(event, ScriptEnded) and isinstance(event.value, Interrupted) and event.freed for event in ended
    )


def test_an_interrupted_call_occupies_its_slot_until_it_exits(variant: str) -> None:
    entered, release = threading.Event(), threading.Event()

    async def ignore_cancellation() -> None:
        entered.set()
        # The release comes from a script, which knows nothing of this event loop.
        while not release.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def block() -> None:
        entered.set()
        release.wait(5)

    def child(_driver: Scheduler) -> Script[Any]:
        return (yield from call(Call("x", block if variant == "threads" else ignore_cancellation, ())))

    def script(driver: Scheduler) -> Script[Any]:
        box = driver.create_mailbox()
        slot = yield from spawn(child(driver), notify=box, counted=True)
        while not entered.is_set():
            yield from sleep(driver.monotonic() + 0.005)
        yield from interrupt(slot)
        (done,) = yield from wait(box)
        release.set()
        (freed,) = yield from wait(box)
        return done, freed

    done, freed = drive(variant, script)
    assert (done.freed, type(done.value), type(freed)) == (False, Interrupted, SlotFreed)


def test_a_stop_before_the_script_starts_is_not_lost(variant: str) -> None:
    def script(driver: Scheduler) -> Script[Any]:
        return (yield from sleep(driver.monotonic() + 60))

    if variant == "threads":
        threads = ThreadDriver(1)
        threads.stop()
        answer = threads.run(script(threads))
    else:

        async def main() -> Any:
            driver = AsyncioDriver()
            driver.interrupt_root()
            return await driver.run(script(driver))

        answer = asyncio.run(main())
    assert isinstance(answer, Interrupted)


def test_a_pending_interrupt_prevents_the_next_call(variant: str) -> None:
    calls: list[int] = []

    def script(driver: Scheduler) -> Script[Any]:
        return (yield from call(Call("x", adapt_handler(variant, calls.append), (1,))))

    if variant == "threads":
        threads = ThreadDriver(1)
        threads.stop()
        answer = threads.run(script(threads))
    else:

        async def main() -> Any:
            driver = AsyncioDriver()
            driver.interrupt_root()
            return await driver.run(script(driver))

        answer = asyncio.run(main())
    assert isinstance(answer, Interrupted)
    assert calls == []


def test_an_error_in_a_script_ends_the_run(variant: str) -> None:
    def fail() -> Script[None]:
        yield from ()
        raise LookupError("defect")

    def script(driver: Scheduler) -> Script[Any]:
        yield from spawn(fail(), notify=driver.create_mailbox(), counted=True)
        yield from sleep(driver.monotonic() + 60)

    with pytest.raises(LookupError, match="defect"):
        drive(variant, script)


def test_the_first_of_two_script_errors_is_raised(variant: str) -> None:
    def fail(message: str) -> Script[None]:
        yield from ()
        raise LookupError(message)

    def script(driver: Scheduler) -> Script[Any]:
        box = driver.create_mailbox()
        driver._finish(None, LookupError("first"))
        yield from spawn(fail("second"), notify=box, counted=True)
        yield from sleep(driver.monotonic() + 60)

    with pytest.raises(LookupError, match="first"):
        drive(variant, script)


@pytest.mark.parametrize("continues", [True, False])
def test_a_cancelled_idle_worker_is_replaced(continues: bool) -> None:
    async def handler() -> str:
        await asyncio.sleep(0.01)
        return "made"

    def call_handler() -> Script[Any]:
        answer = yield from call(Call("x", handler, ()))
        assert isinstance(answer, Ok)
        return answer.value

    def cancel_the_others() -> None:
        main = next(task for task in asyncio.all_tasks() if "main" in repr(task.get_coro()))
        for task in asyncio.all_tasks() - {main, asyncio.current_task()}:
            task.cancel()

    def script(driver: Scheduler) -> Script[Any]:
        box = driver.create_mailbox()
        for _ in range(3):
            yield from spawn(call_handler(), notify=box, counted=True)
        yield from wait(box, count=3)
        cancel_the_others()
        yield from sleep(driver.monotonic() + 0.01)
        if not continues:
            return "ended"
        for _ in range(3):
            yield from spawn(call_handler(), notify=box, counted=True)
        done = yield from wait(box, count=3)
        assert isinstance(done, list)
        return [event.value for event in done]

    assert drive("asyncio", script) == (["made"] * 3 if continues else "ended")


def test_stop_signal_and_start_after_the_end_are_ignored(variant: str) -> None:
    drivers: list[Scheduler] = []

    def script(driver: Scheduler) -> Script[Any]:
        drivers.append(driver)
        yield from ()
        return "end"

    assert drive(variant, script) == "end"
    driver = drivers[0]
    assert driver.closed
    driver.stop()
    driver.put_from_any_thread(driver.create_mailbox(), "x")
    driver.start(script(driver), notify=driver.create_mailbox())


def test_handlers_do_not_see_each_others_context(variant: str) -> None:
    variable = contextvars.ContextVar("variable", default="clean")

    def set_variable() -> str:
        seen = variable.get()
        variable.set("dirty")
        return seen

    async def set_variable_async() -> str:
        seen = set_variable()
        await asyncio.sleep(0)
        assert variable.get() == "dirty", "its own value survives a suspension"
        return seen

    def script(_driver: Scheduler) -> Script[Any]:
        seen = []
        for _ in range(3):
            answer = yield from call(Call("x", set_variable if variant == "threads" else set_variable_async, ()))
            assert isinstance(answer, Ok)
            seen.append(answer.value)
        return seen

    assert drive(variant, script) == ["clean"] * 3


def test_asyncio_takes_any_awaitable_and_plain_values() -> None:
    def script(_driver: Scheduler) -> Script[Any]:
        plain = yield from call(Call("x", int, ()))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        loop.call_soon(future.set_result, "set")
        awaited = yield from call(Call("x", lambda: future, ()))
        return plain.value, awaited.value  # type: ignore[union-attr]

    assert drive("asyncio", script) == (0, "set")


def test_a_busy_asyncio_driver_lets_other_tasks_run() -> None:
    async def main() -> int:
        driver, turns, is_over = AsyncioDriver(), 0, False

        async def count_turns() -> None:
            nonlocal turns
            while not is_over:
                turns += 1
                await asyncio.sleep(0)

        def script() -> Script[None]:
            until = driver.monotonic() + 0.1
            box = driver.create_mailbox()
            while driver.monotonic() < until:
                yield from spawn(run_quick_call(), notify=box, counted=True)
                yield from wait(box)

        def run_quick_call() -> Script[None]:
            yield from call(Call("x", int, ()))

        task = asyncio.create_task(count_turns())
        await driver.run(script())
        is_over = True
        await task
        return turns

    assert asyncio.run(main()) >= 5


def test_a_handler_that_cancels_its_own_task_affects_no_other() -> None:
    async def cancel_own_task() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "returned all the same"

    async def return_after_suspension() -> str:
        await asyncio.sleep(0)
        return "unharmed"

    def script(_driver: Scheduler) -> Script[Any]:
        first = yield from call(Call("x", cancel_own_task, ()))
        second = yield from call(Call("x", return_after_suspension, ()))
        return first, second

    first, second = drive("asyncio", script)
    assert first.value == "returned all the same"
    assert second.value == "unharmed"


def test_cancelling_the_caller_stops_the_script_and_is_raised() -> None:
    seen: list[Any] = []

    def script(driver: Scheduler) -> Script[None]:
        seen.append((yield from sleep(driver.monotonic() + 60)))
        seen.append((yield from sleep(driver.monotonic() + 60)))

    async def main() -> None:
        async def run() -> None:
            driver = AsyncioDriver()
            await driver.run(script(driver))

        task = asyncio.create_task(run())
        while not task.cancelling():
            await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert [type(answer) for answer in seen] == [Interrupted, Interrupted]


def test_closing_the_event_loop_cancels_abandoned_calls() -> None:
    closed: list[str] = []

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            closed.append("cancelled")
            raise

    def script(driver: Scheduler) -> Script[Any]:
        return (yield from call(Call("x", hang, (), driver.monotonic() + 0.01)))

    assert isinstance(drive("asyncio", script), Expired)
    assert closed == ["cancelled"], "the end of the event loop cancelled what was left"


def test_a_dropped_coroutine_is_closed_in_its_own_context() -> None:
    variable = contextvars.ContextVar("variable", default="worker's")
    seen: list[str] = []

    async def hang() -> None:
        variable.set("body's")
        try:
            await asyncio.Event().wait()
        except GeneratorExit:
            seen.append(variable.get())
            raise

    loop = asyncio.new_event_loop()

    async def main() -> Any:
        driver = AsyncioDriver()

        def script() -> Script[Any]:
            return (yield from call(Call("x", hang, (), driver.monotonic() + 0.01)))

        answer = await driver.run(script())
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.get_coro().close()  # type: ignore[union-attr]
        return answer

    try:
        assert isinstance(loop.run_until_complete(main()), Expired)
    finally:
        loop.run_until_complete(_cancel_all(loop))
        loop.close()
    assert seen == ["body's"]


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
