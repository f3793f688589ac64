"""The asyncio driver in detail: how many tasks start, in which order, and what is left at the end."""

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
from ergon_framework.clock import Clock
from ergon_framework.engine.aio import (
    MAX_SLICE_SECONDS,
    AsyncioDriver,
    _run_to_suspension,
    _SuspendedCall,
    event_loop_clock,
)
from ergon_framework.engine.effects import (
    NEVER,
    AwaitExit,
    Call,
    Err,
    Expired,
    Interrupted,
    Ok,
    Script,
    Sleep,
    Spawn,
    Wait,
)
from ergon_framework.engine.scheduler import Slot
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction


class AsyncioHarness:
    """A driver whose clock the test moves, and all that its scripts are told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.driver = AsyncioDriver(Clock(monotonic=lambda: self.now))
        self.answers: list[Any] = []
        self.turns = 0

    def make_script(self, *effects: Any) -> Script[str]:
        for effect in effects:
            self.answers.append((yield effect))
        return "end"

    async def run(self, *effects: Any) -> Any:
        return await self.driver.run(self.make_script(*effects))

    def create_slot(self) -> Slot:
        return Slot(self.make_script(), notify=self.driver.create_mailbox(), counted=True)

    def count_turns(self) -> None:
        """Count the turns of the event loop from now on."""
        self.turns += 1
        asyncio.get_running_loop().call_soon(self.count_turns)


def run_with_timeout(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The result of ``main()`` on an event loop in a thread of its own: one that never ends is noticed."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(asyncio.run(main()))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(1.5)


def run_with_harness(test: Callable[[AsyncioHarness], Awaitable[None]]) -> None:
    """Run *test* on an event loop with a world of its own."""

    async def main() -> None:
        harness = AsyncioHarness()
        try:
            await test(harness)
        finally:
            harness.driver._close()
            await asyncio.sleep(0)

    run_with_timeout(main)


# -- workers ------------------------------------------------------------------------------------


def test_one_worker_starts_for_all_scripts_that_are_ready() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver = harness.driver
        driver.resume(harness.create_slot(), None)
        driver.resume(harness.create_slot(), None)
        assert (len(driver._tasks), len(driver._ready)) == (1, 2)
        await asyncio.sleep(0)
        assert len(driver._tasks) == 1
        assert not driver._ready
        assert len(driver._idle) == 1, "it rests until there is more"
        driver.resume(harness.create_slot(), None)
        driver.resume(harness.create_slot(), None)
        assert (len(driver._tasks), driver._idle) == (1, [])
        await asyncio.sleep(0)
        assert not driver._ready
        driver.resume(harness.create_slot(), None)
        await asyncio.sleep(0)
        assert not driver._ready, "the idle worker can be woken again"
        assert len(driver._tasks) == 1

    run_with_harness(test)


def test_one_idle_worker_is_woken_and_the_others_stay_idle() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver, loop = harness.driver, asyncio.get_running_loop()
        first, second, finished = (loop.create_future() for _ in range(3))
        finished.set_result(None)
        workers = [asyncio.create_task(asyncio.sleep(0)) for _ in range(3)]
        driver._idle = list(zip((first, second, finished), workers, strict=True))
        driver._wake()
        assert (first.done(), second.done(), driver._idle) == (False, True, [(first, workers[0])])
        assert (driver._tasks, driver._woken_worker) == (set(), workers[1]), "no new worker is needed"
        driver._wake()
        assert not first.done(), "one is on its way"

    run_with_harness(test)


def test_ended_idle_workers_are_replaced_by_a_new_one() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver, loop = harness.driver, asyncio.get_running_loop()
        finished = loop.create_future()
        finished.cancel()
        driver._idle = [(finished, asyncio.create_task(asyncio.sleep(0)))]
        driver._wake()
        assert (driver._idle, driver._tasks) == ([], {driver._woken_worker})

    run_with_harness(test)


def test_a_script_that_never_suspends_needs_one_worker() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver, seen = harness.driver, []
        box = driver.create_mailbox()

        def handler() -> None:
            seen.append(len(driver._tasks))

        child = harness.make_script(Call("x", handler, ()), Call("x", handler, ()))
        assert await harness.run(Call("x", handler, ()), Spawn(child, box, counted=True), Wait(box)) == "end"
        assert seen == [1, 1, 1]
        await asyncio.sleep(0)
        assert (driver._tasks, driver.closed) == (set(), True), "it has ended with the run"

    run_with_harness(test)


def test_a_suspended_call_does_not_block_other_calls() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver, order = harness.driver, []
        box, gate = driver.create_mailbox(), asyncio.Event()

        async def wait_for_gate() -> None:
            await gate.wait()
            order.append("held")

        async def open_gate() -> None:
            gate.set()
            order.append("opened")

        spawned = [
            Spawn(harness.make_script(Call("x", body, ())), box, counted=True) for body in (wait_for_gate, open_gate)
        ]
        await harness.run(*spawned, Wait(box, 2))
        assert order == ["opened", "held"]

    run_with_harness(test)


def test_a_retiring_worker_hands_its_script_over() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver, slot = harness.driver, harness.create_slot()
        driver._retire(slot, None)
        assert (list(driver._ready), driver._tasks) == ([], set()), "no script is ready"
        answer = Ok(1)
        driver._retire(slot, answer)
        assert (list(driver._ready), len(driver._tasks)) == ([(slot, answer)], 1)

    run_with_harness(test)


def test_a_retiring_worker_starts_another_for_ready_scripts() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver, slot = harness.driver, harness.create_slot()
        driver._ready.append((slot, None))
        driver._retire(harness.create_slot(), None)
        assert (list(driver._ready), len(driver._tasks)) == ([(slot, None)], 1)

    run_with_harness(test)


def test_a_worker_that_is_cancelled_before_it_starts_is_replaced() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver = harness.driver
        driver.resume(harness.create_slot(), None)
        (first,) = driver._tasks
        first.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        (second,) = driver._tasks
        assert second is not first
        await asyncio.sleep(0)
        assert (len(driver._ready), driver._woken_worker) == (0, None)

    run_with_harness(test)


@pytest.mark.parametrize("closed, ready, coming", [(True, True, True), (False, False, True), (False, True, False)])
def test_a_worker_that_ends_otherwise_is_not_replaced(closed: bool, ready: bool, coming: bool) -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver = harness.driver
        worker, other = (asyncio.create_task(asyncio.sleep(0)) for _ in range(2))
        driver._tasks.add(worker)
        driver._woken_worker = worker if coming else other
        driver._closed = closed
        if ready:
            driver._ready.append((harness.create_slot(), None))
        driver._on_worker_done(worker)
        assert driver._tasks == set()
        assert driver._woken_worker is (None if coming else other)

    run_with_harness(test)


CANCELLED_ERROR, LOOKUP_ERROR = asyncio.CancelledError(), LookupError("no")


@pytest.mark.parametrize(
    "answer, worker_cancelled, caller_cancelled, is_stop",
    [
        (Err(CANCELLED_ERROR), True, True, True),
        (Err(CANCELLED_ERROR), False, True, False),
        (Err(CANCELLED_ERROR), True, False, False),
        (Err(CANCELLED_ERROR), True, None, False),
        (Err(LOOKUP_ERROR), True, True, False),
    ],
)
def test_cancelling_caller_and_worker_is_a_stop(
    answer: Any, worker_cancelled: bool, caller_cancelled: bool | None, is_stop: bool
) -> None:
    async def test(harness: AsyncioHarness) -> None:
        worker, caller = (asyncio.create_task(asyncio.sleep(0)) for _ in range(2))
        if worker_cancelled:
            worker.cancel()
        if caller_cancelled:
            caller.cancel()
        harness.driver._caller = None if caller_cancelled is None else caller
        result = harness.driver._classify_cancellation(answer, worker)
        assert isinstance(result, Interrupted) if is_stop else result is answer

    run_with_harness(test)


def test_a_run_knows_its_caller() -> None:
    async def test(harness: AsyncioHarness) -> None:
        await harness.run()
        assert harness.driver._caller is asyncio.current_task()

    run_with_harness(test)


def test_stop_does_not_wait_for_the_lock_that_its_own_thread_holds() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver = harness.driver
        with driver.lock:
            driver.stop()
            assert not driver._early_interrupts
        await asyncio.sleep(0)
        assert driver._early_interrupts == 1

    run_with_harness(test)


def test_a_worker_does_not_inherit_the_context_that_starts_it() -> None:
    variable = contextvars.ContextVar("variable", default="driver's")

    async def test(harness: AsyncioHarness) -> None:
        variable.set("starter's")

        async def handler() -> str:
            await asyncio.sleep(0)
            return variable.get()

        await harness.run(Call("x", handler, ()), Call("x", variable.get, ()))
        seen = [answer.value for answer in harness.answers]
        assert seen == ["driver's", "driver's"]

    run_with_harness(test)


def test_a_handler_runs_in_its_scope_and_its_context() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    context = contextvars.copy_context()
    context.run(variable.set, "given")
    call_scope = Scope(Transaction(id="1"), "x", 0)

    async def handler(number: int) -> Any:
        await asyncio.sleep(0)
        return number, variable.get(), scope.current()

    async def test(harness: AsyncioHarness) -> None:
        await harness.run(Call("x", handler, (1,), NEVER, call_scope, context), Call("x", handler, (2,)))
        assert [answer.value for answer in harness.answers] == [(1, "given", call_scope), (2, "unset", None)]

    run_with_harness(test)


@pytest.mark.parametrize("suspends", [True, False])
def test_an_exception_of_a_handler_is_the_result_of_its_call(suspends: bool) -> None:
    async def handler() -> None:
        if suspends:
            await asyncio.sleep(0)
        raise SystemExit

    async def test(harness: AsyncioHarness) -> None:
        await harness.run(Call("x", handler, ()))
        (answer,) = harness.answers
        assert isinstance(answer, Err)
        assert isinstance(answer.error, SystemExit)

    run_with_harness(test)


def test_a_suspended_call_is_cancelled_when_it_has_to_exit() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver, seen = harness.driver, []

        async def handler() -> None:
            driver.interrupt_root()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        effect = Call("x", handler, ())
        await harness.run(effect, AwaitExit(effect, NEVER), Call("x", abs, (-1,)))
        stopped, left, after = harness.answers
        assert isinstance(stopped, Interrupted)
        assert (stopped.call, left, seen, driver.late_results, after.value) == (effect, True, ["cancelled"], 1, 1)

    run_with_harness(test)


def test_a_handler_that_cancels_its_own_task_ends_only_its_worker() -> None:
    async def test(harness: AsyncioHarness) -> None:
        workers: list[Any] = []

        async def cancel_own_task() -> str:
            await asyncio.sleep(0)
            workers.append(asyncio.current_task())
            workers[0].cancel()
            return "made"

        await harness.run(Call("x", cancel_own_task, ()), Call("x", lambda: workers.append(asyncio.current_task()), ()))
        assert harness.answers[0].value == "made"
        assert workers[0] is not workers[1]

    run_with_harness(test)


def test_the_result_of_an_abandoned_call_is_ignored() -> None:
    async def test(harness: AsyncioHarness) -> None:
        await harness.run(Call("x", harness.driver.interrupt_root, ()), Call("x", abs, (-1,)))
        stopped, after = harness.answers
        assert isinstance(stopped, Interrupted)
        assert (after.value, harness.driver.late_results) == (1, 1)

    run_with_harness(test)


def test_a_call_that_does_not_suspend_cannot_be_cancelled() -> None:
    async def test(harness: AsyncioHarness) -> None:
        effect = Call("x", abs, (-1,))
        await harness.run(effect)
        assert effect.cancel is None

    run_with_harness(test)


def test_a_coroutine_is_driven_directly_and_other_awaitables_through_one() -> None:
    async def handler() -> str:
        await asyncio.sleep(0)
        return "made"

    value, awaited = _run_to_suspension(Call("x", handler, ()))
    assert (value.cr_code, awaited) == (handler.__code__, None)
    with pytest.raises(StopIteration, match="made"):
        value.send(None)

    class Ready:
        def __await__(self) -> Any:
            yield "waits"
            return "made"

    value, awaited = _run_to_suspension(Call("x", Ready, ()))
    assert awaited == "waits"
    with pytest.raises(StopIteration, match="made"):
        value.send(None)


class EchoAwaitable:
    """Something to await that passes on what it is asked and answered."""

    def __await__(self) -> Any:
        return (yield "question")


def test_a_suspended_coroutine_gets_every_value_and_exception_of_its_awaiter() -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    context = contextvars.copy_context()
    context.run(variable.set, "inside")

    async def handler() -> Any:
        answer = await EchoAwaitable()
        try:
            await EchoAwaitable()
        except LookupError as error:
            return answer, str(error), variable.get()

    coroutine = handler()
    rest = _SuspendedCall(coroutine, context, context.run(coroutine.send, None)).__await__()
    assert next(rest) == "question"
    assert rest.send("answer") == "question"
    with pytest.raises(StopIteration) as stop:
        rest.throw(LookupError("no"))
    assert stop.value.value == ("answer", "no", "inside")


def test_a_dropped_coroutine_is_closed_whatever_it_returns() -> None:
    async def handler() -> str:
        try:
            await EchoAwaitable()
        except GeneratorExit:
            return "not yet"
        return "never"

    coroutine = handler()
    rest = _SuspendedCall(coroutine, contextvars.copy_context(), coroutine.send(None)).__await__()
    next(rest)
    with pytest.raises(GeneratorExit):
        rest.throw(GeneratorExit())
    assert coroutine.cr_frame is None


# -- turns --------------------------------------------------------------------------------------


def measure_turns(steps: list[float]) -> list[int]:
    """In which turn of the event loop one worker runs each of the bodies that take so many seconds."""
    seen: list[int] = []

    async def test(harness: AsyncioHarness) -> None:
        driver = harness.driver
        box = driver.create_mailbox()

        def handler(step: float) -> None:
            seen.append(harness.turns)
            harness.now += step

        def script() -> Script[None]:
            for step in steps:
                yield Spawn(harness.make_script(Call("x", handler, (step,))), box, counted=True)
            driver._woken_worker = asyncio.current_task()  # so that no other worker is called
            yield Wait(box, len(steps))

        harness.now = 0.0
        harness.count_turns()
        await driver.run(script())

    run_with_harness(test)
    return [turn - seen[0] for turn in seen]


def test_short_calls_share_a_turn_of_the_event_loop() -> None:
    assert MAX_SLICE_SECONDS == 0.005
    assert measure_turns([0.0, 0.0, 0.0]) == [0, 0, 0]


def test_a_worker_keeps_a_time_slice_that_is_exactly_used_up() -> None:
    assert measure_turns([MAX_SLICE_SECONDS, 0.0]) == [0, 0]


def test_after_a_time_slice_other_tasks_get_one_turn() -> None:
    assert measure_turns([0.006, 0.006, 0.006]) == [0, 1, 2]


def test_a_time_slice_starts_when_a_worker_gets_its_turn() -> None:
    assert measure_turns([0.003, 0.003, 0.003, 0.003, 0.003]) == [0, 0, 1, 1, 2]


def test_a_time_slice_starts_when_a_worker_starts() -> None:
    async def test(harness: AsyncioHarness) -> None:
        seen: list[int] = []
        for _ in range(2):
            slot = harness.create_slot()
            slot.script = harness.make_script(Call("x", int, ()))
            harness.driver.resume(slot, None)
            await asyncio.sleep(0)
            seen.append(len(harness.driver._idle))
            harness.now += 60.0
        assert seen == [1, 1], "it rests in the same turn"

    run_with_harness(test)


def test_a_time_slice_starts_when_a_suspended_call_continues() -> None:
    async def test(harness: AsyncioHarness) -> None:
        seen: list[str] = []
        driver = harness.driver

        async def run_long() -> None:
            await asyncio.sleep(0)
            harness.now += 60.0

        first = harness.create_slot()
        first.script = harness.make_script(Call("x", run_long, ()))
        driver.live_slots.add(first)
        driver.resume(first, None)
        await asyncio.sleep(0)
        assert not driver._idle
        driver._woken_worker = asyncio.current_task()  # so that the worker which goes on finds it
        second = harness.create_slot()
        second.script = harness.make_script(Call("x", seen.append, ("second",)))
        driver.resume(second, None)
        await asyncio.sleep(0)
        assert seen == ["second"], "in the turn in which the first went on"

    run_with_harness(test)


# -- time ---------------------------------------------------------------------------------------


def test_the_clock_is_that_of_the_event_loop() -> None:
    class ShiftedLoop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return super().time() + 1_000.0

    plain, shifted = asyncio.SelectorEventLoop(), ShiftedLoop()
    try:
        assert event_loop_clock(plain) is time.monotonic
        assert event_loop_clock(shifted) == shifted.time
    finally:
        plain.close()
        shifted.close()


def test_without_a_time_source_the_driver_uses_the_clock_of_the_event_loop() -> None:
    async def main() -> None:
        assert AsyncioDriver().monotonic is time.monotonic

    run_with_timeout(main)


def test_an_earlier_due_time_replaces_the_timer() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver, loop = harness.driver, asyncio.get_running_loop()
        far = loop.time() + 60
        driver._reschedule_timer(far)
        first = driver._timer
        assert first is not None
        assert (first.when(), driver.deadline_timer.wakes_at) == (far, far)
        driver._reschedule_timer(far - 10)
        second = driver._timer
        assert second is not None
        assert (first.cancelled(), second.when(), driver.deadline_timer.wakes_at) == (True, far - 10, far - 10)
        driver._close()
        assert second.cancelled()

    run_with_harness(test)


def test_the_timer_is_set_again_while_anything_is_due() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver = harness.driver
        driver._fire_due()
        assert driver._timer is None
        harness.now = asyncio.get_running_loop().time()
        slot = harness.create_slot()
        slot.pending_effect, slot.due = Sleep(harness.now + 60), harness.now + 60
        driver.live_slots.add(slot)
        driver._fire_due()
        assert driver._timer is not None
        assert driver._timer.when() == slot.due
        harness.now = slot.due
        driver._timer.cancel()
        driver._fire_due()
        assert driver._timer is None, "a timer that is over is not kept"
        assert list(driver._ready) == [(slot, None)]

    run_with_harness(test)


def test_a_deadline_expires_a_call_automatically() -> None:
    async def main() -> None:
        driver = AsyncioDriver()
        answers: list[Any] = []

        def script() -> Script[None]:
            effect = Call("x", asyncio.Event().wait, (), driver.monotonic() + 0.001)
            answers.append((yield effect))
            answers.append((yield AwaitExit(effect, NEVER)))

        await driver.run(script())
        assert isinstance(answers[0], Expired)
        assert answers[1] is True

    run_with_timeout(main)


# -- other threads ------------------------------------------------------------------------------


def test_on_its_own_thread_the_driver_acts_immediately() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver = harness.driver
        box = driver.create_mailbox()
        driver.put_from_any_thread(box, "x")
        assert (len(box), box.register_waiter(harness.create_slot(), 9)) == (1, False), "a signal is urgent"
        driver.stop()
        assert driver._early_interrupts
        await asyncio.sleep(0)
        assert len(box) == 1, "and does so once"

    run_with_harness(test)


def test_from_another_thread_the_driver_acts_on_its_event_loop() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver = harness.driver
        box = driver.create_mailbox()
        thread = threading.Thread(target=lambda: (driver.put_from_any_thread(box, "x"), driver.stop()))
        thread.start()
        thread.join(1)
        assert (len(box), driver._early_interrupts) == (0, 0)
        await asyncio.sleep(0)
        assert (len(box), driver._early_interrupts) == (1, 1)

    run_with_harness(test)


def test_stop_after_the_event_loop_ended_raises_nothing() -> None:
    async def main() -> AsyncioDriver:
        return AsyncioDriver()

    driver = run_with_timeout(main)
    errors: list[BaseException] = []

    def stop() -> None:
        try:
            driver.stop()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join(1)
    assert errors == []


# -- the end ------------------------------------------------------------------------------------


def test_the_first_result_of_a_run_is_kept() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver = harness.driver
        driver._finish("first", None)
        driver._finish("second", None)
        driver._finish(None, LookupError("third"))
        assert driver._result_future.result() == "first"

    run_with_harness(test)


def test_a_run_ends_within_a_few_turns_after_its_script() -> None:
    async def test(harness: AsyncioHarness) -> None:
        workers: list[asyncio.Task[Any] | None] = []
        harness.count_turns()
        effect = Call("x", lambda: workers.append(asyncio.current_task()), ())
        assert await harness.driver.run(harness.make_script(effect)) == "end"
        assert harness.turns < 9
        assert [worker is not None and worker.done() for worker in workers] == [True]

    run_with_harness(test)


def test_a_closed_driver_starts_nothing() -> None:
    async def test(harness: AsyncioHarness) -> None:
        driver = harness.driver
        idle, finished = (asyncio.get_running_loop().create_future() for _ in range(2))
        finished.set_result(None)
        worker = asyncio.create_task(asyncio.sleep(0))
        driver._idle = [(finished, worker), (idle, worker)]
        driver._close()
        assert (idle.done(), driver.closed) == (True, True)
        driver.resume(harness.create_slot(), None)
        assert (list(driver._ready), driver._tasks) == ([], set())

    run_with_harness(test)


@pytest.mark.parametrize("breaks", [True, False])
def test_a_cancelled_run_ends_its_script_first_and_reports_no_loop_error(breaks: bool) -> None:
    loop_errors: list[dict[str, Any]] = []

    async def main() -> list[Any]:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: loop_errors.append(context))
        harness = AsyncioHarness()

        def script() -> Script[str]:
            harness.answers.append((yield Sleep(NEVER)))
            if breaks:
                raise LookupError("defect")
            return "end"

        task = asyncio.create_task(harness.driver.run(script()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        assert harness.driver.closed
        return harness.answers

    answers = run_with_timeout(main)
    if breaks:
        gc.collect()  # a forgotten error complains when it goes
    assert [type(answer) for answer in answers] == [Interrupted]
    assert loop_errors == []
