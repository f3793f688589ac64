"""The asyncio driver in detail: how many workers come, whose turn it is, and what is left at the end."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from ergon_framework import scope
from ergon_framework.engine.drivers.aio import SLICE, Asyncio, _first, _Within, clock_of
from ergon_framework.engine.effects import NEVER, Call, Gone, Script, Sleep, Spawn, Wait
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.engine.slots import Slot
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction


class World:
    """A driver whose clock the test moves, and all that its scripts are told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.driver = Asyncio(Senses(clock=lambda: self.now))
        self.heard: list[Any] = []
        self.turns = 0

    def script(self, *effects: Any) -> Script[str]:
        for effect in effects:
            self.heard.append((yield effect))
        return "end"

    async def run(self, *effects: Any) -> Any:
        return await self.driver.run(self.script(*effects))

    def slot(self) -> Slot:
        return Slot(self.script(), told=self.driver.mailbox(), counted=True)

    def tick(self) -> None:
        """Count the turns of the event loop from now on."""
        self.turns += 1
        asyncio.get_running_loop().call_soon(self.tick)


def bounded(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The result of ``main()`` on an event loop in a thread of its own: one that never ends is noticed."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(asyncio.run(main()))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(1.5)


def within(test: Callable[[World], Awaitable[None]]) -> None:
    """Run *test* on an event loop with a world of its own."""

    async def main() -> None:
        world = World()
        try:
            await test(world)
        finally:
            world.driver._close()
            await asyncio.sleep(0)

    bounded(main)


# -- workers ------------------------------------------------------------------------------------


def test_one_worker_comes_for_all_that_becomes_ready_at_once() -> None:
    async def test(world: World) -> None:
        driver = world.driver
        driver.resume(world.slot(), None)
        driver.resume(world.slot(), None)
        assert (len(driver._tasks), len(driver._ready)) == (1, 2)
        await asyncio.sleep(0)
        assert len(driver._tasks) == 1
        assert not driver._ready
        assert len(driver._idle) == 1, "it rests until there is more"
        driver.resume(world.slot(), None)
        driver.resume(world.slot(), None)
        assert (len(driver._tasks), driver._idle) == (1, [])
        await asyncio.sleep(0)
        assert not driver._ready
        driver.resume(world.slot(), None)
        await asyncio.sleep(0)
        assert not driver._ready, "whoever came can be called again"
        assert len(driver._tasks) == 1

    within(test)


def test_one_of_those_who_idle_is_woken_and_the_others_rest() -> None:
    async def test(world: World) -> None:
        driver, loop = world.driver, asyncio.get_running_loop()
        first, second, over = (loop.create_future() for _ in range(3))
        over.set_result(None)
        workers = [asyncio.create_task(asyncio.sleep(0)) for _ in range(3)]
        driver._idle = list(zip((first, second, over), workers, strict=True))
        driver._wake()
        assert (first.done(), second.done(), driver._idle) == (False, True, [(first, workers[0])])
        assert (driver._tasks, driver._coming) == (set(), workers[1]), "nobody new has to come"
        driver._wake()
        assert not first.done(), "one is on its way"

    within(test)


def test_idle_workers_that_are_over_are_replaced_by_a_new_one() -> None:
    async def test(world: World) -> None:
        driver, loop = world.driver, asyncio.get_running_loop()
        over = loop.create_future()
        over.cancel()
        driver._idle = [(over, asyncio.create_task(asyncio.sleep(0)))]
        driver._wake()
        assert (driver._idle, driver._tasks) == ([], {driver._coming})

    within(test)


def test_a_script_that_never_suspends_needs_one_worker() -> None:
    async def test(world: World) -> None:
        driver, seen = world.driver, []
        box = driver.mailbox()

        def body() -> None:
            seen.append(len(driver._tasks))

        child = world.script(Call("x", body, ()), Call("x", body, ()))
        assert await world.run(Call("x", body, ()), Spawn(child, box, counted=True), Wait(box)) == "end"
        assert seen == [1, 1, 1]
        await asyncio.sleep(0)
        assert (driver._tasks, driver.closed) == (set(), True), "it has ended with the run"

    within(test)


def test_a_body_that_suspends_does_not_keep_the_others_waiting() -> None:
    async def test(world: World) -> None:
        driver, order = world.driver, []
        box, gate = driver.mailbox(), asyncio.Event()

        async def holding() -> None:
            await gate.wait()
            order.append("held")

        async def opening() -> None:
            gate.set()
            order.append("opened")

        spawned = [Spawn(world.script(Call("x", body, ())), box, counted=True) for body in (holding, opening)]
        await world.run(*spawned, Wait(box, 2))
        assert order == ["opened", "held"]

    within(test)


def test_a_worker_that_retires_hands_its_script_on() -> None:
    async def test(world: World) -> None:
        driver, slot = world.driver, world.slot()
        driver._retire(slot, None)
        assert (list(driver._ready), driver._tasks) == ([], set()), "nobody has anything to do"
        answer = Ok(1)
        driver._retire(slot, answer)
        assert (list(driver._ready), len(driver._tasks)) == ([(slot, answer)], 1)

    within(test)


def test_a_worker_that_retires_calls_another_for_what_is_ready() -> None:
    async def test(world: World) -> None:
        driver, slot = world.driver, world.slot()
        driver._ready.append((slot, None))
        driver._retire(world.slot(), None)
        assert (list(driver._ready), len(driver._tasks)) == ([(slot, None)], 1)

    within(test)


def test_a_worker_that_is_cancelled_on_its_way_is_replaced() -> None:
    async def test(world: World) -> None:
        driver = world.driver
        driver.resume(world.slot(), None)
        (first,) = driver._tasks
        first.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (second,) = driver._tasks
        assert second is not first
        await asyncio.sleep(0)
        assert (len(driver._ready), driver._coming) == (0, None)

    within(test)


@pytest.mark.parametrize("closed, ready, coming", [(True, True, True), (False, False, True), (False, True, False)])
def test_a_worker_that_ends_otherwise_is_not_replaced(closed: bool, ready: bool, coming: bool) -> None:
    async def test(world: World) -> None:
        driver = world.driver
        worker, other = (asyncio.create_task(asyncio.sleep(0)) for _ in range(2))
        driver._tasks.add(worker)
        driver._coming = worker if coming else other
        driver._closed = closed
        if ready:
            driver._ready.append((world.slot(), None))
        driver._left_off(worker)
        assert driver._tasks == set()
        assert driver._coming is (None if coming else other)

    within(test)


CANCELLED, BROKEN = asyncio.CancelledError(), LookupError("no")


@pytest.mark.parametrize(
    "answer, mine, callers, stopped",
    [
        (Err(CANCELLED), True, True, True),
        (Err(CANCELLED), False, True, False),
        (Err(CANCELLED), True, False, False),
        (Err(CANCELLED), True, None, False),
        (Err(BROKEN), True, True, False),
    ],
)
def test_a_cancellation_of_everybody_is_a_stop(answer: Any, mine: bool, callers: bool | None, stopped: bool) -> None:
    async def test(world: World) -> None:
        worker, caller = (asyncio.create_task(asyncio.sleep(0)) for _ in range(2))
        if mine:
            worker.cancel()
        if callers:
            caller.cancel()
        world.driver._caller = None if callers is None else caller
        read = world.driver._read(answer, worker)
        assert isinstance(read, Stopped) if stopped else read is answer

    within(test)


def test_a_run_knows_its_caller() -> None:
    async def test(world: World) -> None:
        await world.run()
        assert world.driver._caller is asyncio.current_task()

    within(test)


def test_whoever_interrupted_the_holder_of_the_lock_does_not_wait_for_him() -> None:
    async def test(world: World) -> None:
        driver = world.driver
        with driver.lock:
            driver.stop()
            assert not driver._stopped_early
        await asyncio.sleep(0)
        assert driver._stopped_early == 1

    within(test)


def test_a_worker_inherits_nothing_of_the_context_it_is_started_in() -> None:
    variable = contextvars.ContextVar("variable", default="driver's")

    async def test(world: World) -> None:
        variable.set("starter's")

        async def body() -> str:
            await asyncio.sleep(0)
            return variable.get()

        await world.run(Call("x", body, ()), Call("x", variable.get, ()))
        seen = [answer.value for answer in world.heard]
        assert seen == ["driver's", "driver's"]

    within(test)


def test_a_body_runs_within_its_scope_and_its_context() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    given = contextvars.copy_context()
    given.run(variable.set, "given")
    inside = Scope(Transaction("1"), "x", 0)

    async def body(number: int) -> Any:
        await asyncio.sleep(0)
        return number, variable.get(), scope.current()

    async def test(world: World) -> None:
        await world.run(Call("x", body, (1,), NEVER, inside, given), Call("x", body, (2,)))
        assert [answer.value for answer in world.heard] == [(1, "given", inside), (2, "unset", None)]

    within(test)


@pytest.mark.parametrize("suspends", [True, False])
def test_what_a_body_raises_is_its_answer(suspends: bool) -> None:
    async def body() -> None:
        if suspends:
            await asyncio.sleep(0)
        raise SystemExit

    async def test(world: World) -> None:
        await world.run(Call("x", body, ()))
        (answer,) = world.heard
        assert isinstance(answer, Err)
        assert isinstance(answer.error, SystemExit)

    within(test)


def test_a_body_that_suspends_is_cancelled_when_it_is_asked_to_leave() -> None:
    async def test(world: World) -> None:
        driver, seen = world.driver, []

        async def body() -> None:
            driver.halt()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        effect = Call("x", body, ())
        await world.run(effect, Gone(effect, NEVER), Call("x", abs, (-1,)))
        stopped, left, after = world.heard
        assert isinstance(stopped, Stopped)
        assert (stopped.body, left, seen, driver.fenced, after.value) == (effect, True, ["cancelled"], 1, 1)

    within(test)


def test_a_body_that_cancels_its_own_task_takes_its_worker_along_and_nothing_else() -> None:
    async def test(world: World) -> None:
        workers: list[Any] = []

        async def reckless() -> str:
            await asyncio.sleep(0)
            workers.append(asyncio.current_task())
            workers[0].cancel()
            return "made"

        await world.run(Call("x", reckless, ()), Call("x", lambda: workers.append(asyncio.current_task()), ()))
        assert world.heard[0].value == "made"
        assert workers[0] is not workers[1]

    within(test)


def test_a_body_that_was_given_up_on_leads_nowhere() -> None:
    async def test(world: World) -> None:
        await world.run(Call("x", world.driver.halt, ()), Call("x", abs, (-1,)))
        stopped, after = world.heard
        assert isinstance(stopped, Stopped)
        assert (after.value, world.driver.fenced) == (1, 1)

    within(test)


def test_a_body_that_does_not_suspend_cannot_be_asked_to_leave() -> None:
    async def test(world: World) -> None:
        effect = Call("x", abs, (-1,))
        await world.run(effect)
        assert effect.cancel is None

    within(test)


def test_a_coroutine_is_driven_itself_and_other_awaitables_through_one() -> None:
    async def body() -> str:
        await asyncio.sleep(0)
        return "made"

    value, awaited = _first(Call("x", body, ()))
    assert (value.cr_code, awaited) == (body.__code__, None)
    with pytest.raises(StopIteration, match="made"):
        value.send(None)

    class Ready:
        def __await__(self) -> Any:
            yield "waits"
            return "made"

    value, awaited = _first(Call("x", Ready, ()))
    assert awaited == "waits"
    with pytest.raises(StopIteration, match="made"):
        value.send(None)


class Question:
    """Something to await that passes on what it is asked and answered."""

    def __await__(self) -> Any:
        return (yield "question")


def test_the_rest_of_a_coroutine_is_told_all_that_its_awaiter_is_told() -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    context = contextvars.copy_context()
    context.run(variable.set, "inside")

    async def body() -> Any:
        answer = await Question()
        try:
            await Question()
        except LookupError as error:
            return answer, str(error), variable.get()

    coroutine = body()
    rest = _Within(coroutine, context, context.run(coroutine.send, None)).__await__()
    assert next(rest) == "question"
    assert rest.send("answer") == "question"
    with pytest.raises(StopIteration) as stop:
        rest.throw(LookupError("no"))
    assert stop.value.value == ("answer", "no", "inside")


def test_the_rest_of_a_coroutine_that_is_dropped_is_closed_whatever_it_says() -> None:
    async def body() -> str:
        try:
            await Question()
        except GeneratorExit:
            return "not yet"
        return "never"

    coroutine = body()
    rest = _Within(coroutine, contextvars.copy_context(), coroutine.send(None)).__await__()
    next(rest)
    with pytest.raises(GeneratorExit):
        rest.throw(GeneratorExit())
    assert coroutine.cr_frame is None


# -- turns --------------------------------------------------------------------------------------


def turns(steps: list[float]) -> list[int]:
    """In which turn of the event loop one worker runs each of the bodies that take so many seconds."""
    seen: list[int] = []

    async def test(world: World) -> None:
        driver = world.driver
        box = driver.mailbox()

        def body(step: float) -> None:
            seen.append(world.turns)
            world.now += step

        def script() -> Script[None]:
            for step in steps:
                yield Spawn(world.script(Call("x", body, (step,))), box, counted=True)
            driver._coming = asyncio.current_task()  # so that no other worker is called
            yield Wait(box, len(steps))

        world.now = 0.0
        world.tick()
        await driver.run(script())

    within(test)
    return [turn - seen[0] for turn in seen]


def test_short_bodies_share_a_turn() -> None:
    assert SLICE == 0.005
    assert turns([0.0, 0.0, 0.0]) == [0, 0, 0]


def test_a_slice_that_is_just_used_up_is_still_the_workers_own() -> None:
    assert turns([SLICE, 0.0]) == [0, 0]


def test_after_a_slice_the_others_have_one_turn() -> None:
    assert turns([0.006, 0.006, 0.006]) == [0, 1, 2]


def test_a_slice_begins_when_a_worker_has_its_turn_again() -> None:
    assert turns([0.003, 0.003, 0.003, 0.003, 0.003]) == [0, 0, 1, 1, 2]


def test_a_slice_begins_when_a_worker_comes() -> None:
    async def test(world: World) -> None:
        seen: list[int] = []
        for _ in range(2):
            slot = world.slot()
            slot.script = world.script(Call("x", int, ()))
            world.driver.resume(slot, None)
            await asyncio.sleep(0)
            seen.append(len(world.driver._idle))
            world.now += 60.0
        assert seen == [1, 1], "it rests in the same turn"

    within(test)


def test_a_slice_begins_when_a_body_goes_on() -> None:
    async def test(world: World) -> None:
        seen: list[str] = []
        driver = world.driver

        async def long() -> None:
            await asyncio.sleep(0)
            world.now += 60.0

        first = world.slot()
        first.script = world.script(Call("x", long, ()))
        driver.live.add(first)
        driver.resume(first, None)
        await asyncio.sleep(0)
        assert not driver._idle
        driver._coming = asyncio.current_task()  # so that the worker which goes on finds it
        second = world.slot()
        second.script = world.script(Call("x", seen.append, ("second",)))
        driver.resume(second, None)
        await asyncio.sleep(0)
        assert seen == ["second"], "in the turn in which the first went on"

    within(test)


# -- time ---------------------------------------------------------------------------------------


def test_the_clock_is_the_loops_own() -> None:
    class Odd(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return super().time() + 1_000.0

    plain, odd = asyncio.SelectorEventLoop(), Odd()
    try:
        assert clock_of(plain) is time.monotonic
        assert clock_of(odd) == odd.time
    finally:
        plain.close()
        odd.close()


def test_without_senses_the_driver_looks_at_the_loops_clock() -> None:
    async def main() -> None:
        assert Asyncio().clock is time.monotonic

    bounded(main)


def test_an_earlier_due_time_replaces_the_timer() -> None:
    async def test(world: World) -> None:
        driver, loop = world.driver, asyncio.get_running_loop()
        far = loop.time() + 60
        driver._poke(far)
        first = driver._timer
        assert first is not None
        assert (first.when(), driver.watcher.wakes_at) == (far, far)
        driver._poke(far - 10)
        second = driver._timer
        assert second is not None
        assert (first.cancelled(), second.when(), driver.watcher.wakes_at) == (True, far - 10, far - 10)
        driver._close()
        assert second.cancelled()

    within(test)


def test_the_timer_is_set_again_while_anything_is_due() -> None:
    async def test(world: World) -> None:
        driver = world.driver
        driver._look()
        assert driver._timer is None
        world.now = asyncio.get_running_loop().time()
        slot = world.slot()
        slot.ticket, slot.due = Sleep(world.now + 60), world.now + 60
        driver.live.add(slot)
        driver._look()
        assert driver._timer is not None
        assert driver._timer.when() == slot.due
        world.now = slot.due
        driver._timer.cancel()
        driver._look()
        assert driver._timer is None, "a timer that is over is not kept"
        assert list(driver._ready) == [(slot, None)]

    within(test)


def test_a_deadline_expires_a_body_by_itself() -> None:
    async def main() -> None:
        driver = Asyncio()
        heard: list[Any] = []

        def script() -> Script[None]:
            effect = Call("x", asyncio.Event().wait, (), driver.clock() + 0.001)
            heard.append((yield effect))
            heard.append((yield Gone(effect, NEVER)))

        await driver.run(script())
        assert isinstance(heard[0], Expired)
        assert heard[1] is True

    bounded(main)


# -- other threads ------------------------------------------------------------------------------


def test_on_its_own_thread_the_driver_acts_at_once() -> None:
    async def test(world: World) -> None:
        driver = world.driver
        box = driver.mailbox()
        driver.signal(box, "x")
        assert (len(box), box.await_by(world.slot(), 9)) == (1, False), "a signal is urgent"
        driver.stop()
        assert driver._stopped_early
        await asyncio.sleep(0)
        assert len(box) == 1, "and does so once"

    within(test)


def test_from_another_thread_the_driver_acts_on_its_own() -> None:
    async def test(world: World) -> None:
        driver = world.driver
        box = driver.mailbox()
        thread = threading.Thread(target=lambda: (driver.signal(box, "x"), driver.stop()))
        thread.start()
        thread.join(1)
        assert (len(box), driver._stopped_early) == (0, 0)
        await asyncio.sleep(0)
        assert (len(box), driver._stopped_early) == (1, 1)

    within(test)


def test_after_the_end_of_its_loop_nobody_is_told() -> None:
    async def main() -> Asyncio:
        return Asyncio()

    driver = bounded(main)
    failed: list[BaseException] = []

    def stop() -> None:
        try:
            driver.stop()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join(1)
    assert failed == []


# -- the end ------------------------------------------------------------------------------------


def test_the_first_end_is_the_end() -> None:
    async def test(world: World) -> None:
        driver = world.driver
        driver._finish("first", None)
        driver._finish("second", None)
        driver._finish(None, LookupError("third"))
        assert driver._over.result() == "first"

    within(test)


def test_a_run_ends_in_one_turn_after_its_script() -> None:
    async def test(world: World) -> None:
        workers: list[asyncio.Task[Any] | None] = []
        world.tick()
        effect = Call("x", lambda: workers.append(asyncio.current_task()), ())
        assert await world.driver.run(world.script(effect)) == "end"
        assert world.turns < 9
        assert [worker is not None and worker.done() for worker in workers] == [True]

    within(test)


def test_a_closed_driver_begins_nothing() -> None:
    async def test(world: World) -> None:
        driver = world.driver
        idle, over = (asyncio.get_running_loop().create_future() for _ in range(2))
        over.set_result(None)
        worker = asyncio.create_task(asyncio.sleep(0))
        driver._idle = [(over, worker), (idle, worker)]
        driver._close()
        assert (idle.done(), driver.closed) == (True, True)
        driver.resume(world.slot(), None)
        assert (list(driver._ready), driver._tasks) == ([], set())

    within(test)


@pytest.mark.parametrize("breaks", [True, False])
def test_a_cancelled_run_ends_its_script_first_and_leaves_no_complaint(breaks: bool) -> None:
    complaints: list[dict[str, Any]] = []

    async def main() -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
        world = World()

        def script() -> Script[str]:
            world.heard.append((yield Sleep(NEVER)))
            if breaks:
                raise LookupError("defect")
            return "end"

        task = asyncio.create_task(world.driver.run(script()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        assert world.driver.closed
        return world.heard

    heard = bounded(main)
    if breaks:
        gc.collect()  # a forgotten error complains when it goes
    assert [type(answer) for answer in heard] == [Stopped]
    assert complaints == []
