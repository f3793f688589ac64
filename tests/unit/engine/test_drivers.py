"""What the drivers promise beyond what the twins show: tickets, parking, cancellation, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ergon_framework.engine.drivers.aio import Asyncio
from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.engine.effects import NEVER, Call, Script, call, gone, interrupt, sleep, spawn, wait
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.slots import Done, Freed, Slots


def drive(flavour: str, script: Callable[[Slots], Script[Any]]) -> Any:
    """Run ``script(driver)`` with the driver of *flavour*."""
    if flavour == "threads":
        threads = Threads(2)
        return threads.run(script(threads))

    async def main() -> Any:
        driver = Asyncio()
        return await driver.run(script(driver))

    return asyncio.run(main())


@pytest.fixture(params=["threads", "asyncio"])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def body(flavour: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """*fn* as the driver wants it."""
    if flavour == "threads":
        return fn

    async def coroutine(*args: Any) -> Any:
        return fn(*args)

    return coroutine


def test_a_call_is_answered_with_its_value_or_its_error(flavour: str) -> None:
    def script(_driver: Slots) -> Script[Any]:
        value = yield from call(Call("x", body(flavour, divmod), (7, 2)))
        error = yield from call(Call("x", body(flavour, divmod), (7, 0)))
        return value, error

    value, error = drive(flavour, script)
    assert isinstance(value, Ok)
    assert value.value == (3, 1)
    assert isinstance(error, Err)
    assert isinstance(error.error, ZeroDivisionError)


def test_an_expired_call_is_fenced_and_its_late_value_handed_over(flavour: str) -> None:
    late: list[Any] = []
    release = threading.Event()

    async def stubborn() -> str:
        while not release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                release.set()
        return "late"

    def slow() -> str:
        release.wait(5)
        return "late"

    def script(driver: Slots) -> Script[Any]:
        fn = slow if flavour == "threads" else stubborn
        answer = yield from call(Call("x", fn, (), driver.clock() + 0.02, None, None, late.append))
        assert isinstance(answer, Expired)
        in_time = yield from gone(answer.body, driver.clock())
        release.set()
        at_last = yield from gone(answer.body, driver.clock() + 5)
        again = yield from gone(answer.body, NEVER)
        return in_time, at_last, again, driver.fenced

    assert drive(flavour, script) == (False, True, True, 1)
    assert late == ["late"]


def test_a_mailbox_wakes_at_its_count_or_for_something_urgent_or_in_time(flavour: str) -> None:
    def script(driver: Slots) -> Script[Any]:
        box = driver.mailbox()
        threading.Timer(0.01, driver.signal, (box, "urgent")).start()
        urgent = yield from wait(box, count=9)
        nothing = yield from wait(box, until=driver.clock() + 0.01)
        box.put("a")
        box.put("b")
        two = yield from wait(box, count=2)
        box.put("c")
        partial = yield from wait(box, count=5, until=driver.clock() + 0.01)
        at_once = yield from wait(box, until=driver.clock())
        return urgent, nothing, two, partial, at_once

    assert drive(flavour, script) == (["urgent"], [], ["a", "b"], ["c"], [])


def test_an_interrupt_answers_the_present_effect_or_the_next(flavour: str) -> None:
    def sleeper(driver: Slots) -> Script[Any]:
        return (yield from sleep(driver.clock() + 60))

    def waiter(driver: Slots) -> Script[Any]:
        return (yield from wait(driver.mailbox()))

    def script(driver: Slots) -> Script[Any]:
        box = driver.mailbox()
        first = yield from spawn(sleeper(driver), told=box, counted=True)
        second = yield from spawn(waiter(driver), told=box, counted=True)
        slots = [first, second]
        for slot in slots:
            yield from interrupt(slot)
        ended: list[Any] = []
        while len(ended) < 2:
            events = yield from wait(box)
            assert isinstance(events, list)
            ended += events
        for slot in slots:
            yield from interrupt(slot)  # nobody is there any more
        return ended

    ended = drive(flavour, script)
    assert all(isinstance(event, Done) and isinstance(event.value, Stopped) and event.freed for event in ended)


def test_an_interrupted_call_leaves_its_body_behind_until_it_comes_back(flavour: str) -> None:
    entered, release = threading.Event(), threading.Event()

    async def ignoring() -> None:
        entered.set()
        # The release comes from a script, which knows nothing of this event loop.
        while not release.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def blocking() -> None:
        entered.set()
        release.wait(5)

    def child(_driver: Slots) -> Script[Any]:
        return (yield from call(Call("x", blocking if flavour == "threads" else ignoring, ())))

    def script(driver: Slots) -> Script[Any]:
        box = driver.mailbox()
        slot = yield from spawn(child(driver), told=box, counted=True)
        while not entered.is_set():
            yield from sleep(driver.clock() + 0.005)
        yield from interrupt(slot)
        (done,) = yield from wait(box)
        release.set()
        (freed,) = yield from wait(box)
        return done, freed

    done, freed = drive(flavour, script)
    assert (done.freed, type(done.value), type(freed)) == (False, Stopped, Freed)


def test_a_stop_that_comes_before_the_script_begins_is_not_lost(flavour: str) -> None:
    def script(driver: Slots) -> Script[Any]:
        return (yield from sleep(driver.clock() + 60))

    if flavour == "threads":
        threads = Threads(1)
        threads.stop()
        answer = threads.run(script(threads))
    else:

        async def main() -> Any:
            driver = Asyncio()
            driver.halt()
            return await driver.run(script(driver))

        answer = asyncio.run(main())
    assert isinstance(answer, Stopped)


def test_a_pending_interrupt_keeps_the_next_call_from_being_made(flavour: str) -> None:
    made: list[int] = []

    def script(driver: Slots) -> Script[Any]:
        return (yield from call(Call("x", body(flavour, made.append), (1,))))

    if flavour == "threads":
        threads = Threads(1)
        threads.stop()
        answer = threads.run(script(threads))
    else:

        async def main() -> Any:
            driver = Asyncio()
            driver.halt()
            return await driver.run(script(driver))

        answer = asyncio.run(main())
    assert isinstance(answer, Stopped)
    assert made == []


def test_a_script_that_breaks_ends_the_run_with_its_error(flavour: str) -> None:
    def broken() -> Script[None]:
        yield from ()
        raise LookupError("defect")

    def script(driver: Slots) -> Script[Any]:
        yield from spawn(broken(), told=driver.mailbox(), counted=True)
        yield from sleep(driver.clock() + 60)

    with pytest.raises(LookupError, match="defect"):
        drive(flavour, script)


def test_the_first_of_two_scripts_that_break_is_the_error(flavour: str) -> None:
    def broken(message: str) -> Script[None]:
        yield from ()
        raise LookupError(message)

    def script(driver: Slots) -> Script[Any]:
        box = driver.mailbox()
        driver._finish(None, LookupError("first"))
        yield from spawn(broken("second"), told=box, counted=True)
        yield from sleep(driver.clock() + 60)

    with pytest.raises(LookupError, match="first"):
        drive(flavour, script)


@pytest.mark.parametrize("go_on", [True, False])
def test_an_idle_worker_that_somebody_cancels_is_replaced(go_on: bool) -> None:
    async def body() -> str:
        await asyncio.sleep(0.01)
        return "made"

    def made() -> Script[Any]:
        answer = yield from call(Call("x", body, ()))
        assert isinstance(answer, Ok)
        return answer.value

    def cancel_the_others() -> None:
        main = next(task for task in asyncio.all_tasks() if "main" in repr(task.get_coro()))
        for task in asyncio.all_tasks() - {main, asyncio.current_task()}:
            task.cancel()

    def script(driver: Slots) -> Script[Any]:
        box = driver.mailbox()
        for _ in range(3):
            yield from spawn(made(), told=box, counted=True)
        yield from wait(box, count=3)
        cancel_the_others()
        yield from sleep(driver.clock() + 0.01)
        if not go_on:
            return "ended"
        for _ in range(3):
            yield from spawn(made(), told=box, counted=True)
        done = yield from wait(box, count=3)
        assert isinstance(done, list)
        return [event.value for event in done]

    assert drive("asyncio", script) == (["made"] * 3 if go_on else "ended")


def test_what_is_put_or_stopped_after_the_end_is_ignored(flavour: str) -> None:
    kept: list[Slots] = []

    def script(driver: Slots) -> Script[Any]:
        kept.append(driver)
        yield from ()
        return "end"

    assert drive(flavour, script) == "end"
    driver = kept[0]
    assert driver.closed
    driver.stop()
    driver.signal(driver.mailbox(), "x")
    driver.start(script(driver), told=driver.mailbox())


def test_bodies_do_not_see_each_others_context(flavour: str) -> None:
    variable = contextvars.ContextVar("variable", default="clean")

    def leave() -> str:
        seen = variable.get()
        variable.set("dirty")
        return seen

    async def leave_async() -> str:
        seen = leave()
        await asyncio.sleep(0)
        assert variable.get() == "dirty", "its own value survives a suspension"
        return seen

    def script(_driver: Slots) -> Script[Any]:
        seen = []
        for _ in range(3):
            answer = yield from call(Call("x", leave if flavour == "threads" else leave_async, ()))
            assert isinstance(answer, Ok)
            seen.append(answer.value)
        return seen

    assert drive(flavour, script) == ["clean"] * 3


def test_asyncio_takes_any_awaitable_and_plain_values() -> None:
    def script(_driver: Slots) -> Script[Any]:
        plain = yield from call(Call("x", int, ()))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[str] = loop.create_future()
        loop.call_soon(future.set_result, "set")
        awaited = yield from call(Call("x", lambda: future, ()))
        return plain.value, awaited.value  # type: ignore[union-attr]

    assert drive("asyncio", script) == (0, "set")


def test_asyncio_gives_others_a_turn_however_busy_it_is() -> None:
    async def main() -> int:
        driver, turns, over = Asyncio(), 0, False

        async def other() -> None:
            nonlocal turns
            while not over:
                turns += 1
                await asyncio.sleep(0)

        def script() -> Script[None]:
            until = driver.clock() + 0.1
            box = driver.mailbox()
            while driver.clock() < until:
                yield from spawn(quick(), told=box, counted=True)
                yield from wait(box)

        def quick() -> Script[None]:
            yield from call(Call("x", int, ()))

        task = asyncio.create_task(other())
        await driver.run(script())
        over = True
        await task
        return turns

    assert asyncio.run(main()) >= 5


def test_a_body_that_cancels_its_own_task_strikes_nobody_else() -> None:
    async def reckless() -> str:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return "returned all the same"

    async def next_one() -> str:
        await asyncio.sleep(0)
        return "unharmed"

    def script(_driver: Slots) -> Script[Any]:
        first = yield from call(Call("x", reckless, ()))
        second = yield from call(Call("x", next_one, ()))
        return first, second

    first, second = drive("asyncio", script)
    assert first.value == "returned all the same"
    assert second.value == "unharmed"


def test_cancelling_the_caller_stops_the_script_and_is_passed_on() -> None:
    seen: list[Any] = []

    def script(driver: Slots) -> Script[None]:
        seen.append((yield from sleep(driver.clock() + 60)))
        seen.append((yield from sleep(driver.clock() + 60)))

    async def main() -> None:
        async def run() -> None:
            driver = Asyncio()
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
    assert [type(answer) for answer in seen] == [Stopped, Stopped]


def test_the_workers_of_a_closed_event_loop_let_their_bodies_go() -> None:
    closed: list[str] = []

    async def hung() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            closed.append("cancelled")
            raise

    def script(driver: Slots) -> Script[Any]:
        return (yield from call(Call("x", hung, (), driver.clock() + 0.01)))

    assert isinstance(drive("asyncio", script), Expired)
    assert closed == ["cancelled"], "the end of the event loop cancelled what was left"


def test_a_coroutine_that_is_dropped_is_closed_in_its_own_context() -> None:
    variable = contextvars.ContextVar("variable", default="worker's")
    seen: list[str] = []

    async def hung() -> None:
        variable.set("body's")
        try:
            await asyncio.Event().wait()
        except GeneratorExit:
            seen.append(variable.get())
            raise

    loop = asyncio.new_event_loop()

    async def main() -> Any:
        driver = Asyncio()

        def script() -> Script[Any]:
            return (yield from call(Call("x", hung, (), driver.clock() + 0.01)))

        answer = await driver.run(script())
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.get_coro().close()  # type: ignore[union-attr]
        return answer

    try:
        assert isinstance(loop.run_until_complete(main()), Expired)
    finally:
        loop.run_until_complete(_cancelled(loop))
        loop.close()
    assert seen == ["body's"]


async def _cancelled(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
