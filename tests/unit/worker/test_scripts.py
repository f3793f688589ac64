"""Scripts need no driver to be tested: effects come out, answers go in."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.connectors.base import Ack, Delivery, SettleResult
from ergon_framework.engine.effects import Call, Err, Expired, Interrupt, Interrupted, Ok, Wait
from ergon_framework.engine.retry import Failed, Step, run_step
from ergon_framework.engine.scheduler import ScriptEnded, Slot
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.errors import Category
from ergon_framework.transaction import Transaction
from ergon_framework.worker.consume import ConnectorCalls, ConsumeLoop, SlotTable
from ergon_framework.worker.events import LoopObserver
from ergon_framework.worker.lifecycle import (
    LifecycleSpec,
    classify,
    classify_handler,
    run_lifecycle,
    timeout_error,
)
from ergon_framework.worker.policies import ConsumerPolicy, ProducerPolicy, RetryPolicy, SettlePolicy
from ergon_framework.worker.produce import ProduceRun
from ergon_framework.worker.report import Outcome, OutcomeKind, Report
from ergon_framework.worker.settle import CLOSE_EVENT, PendingSettlement, Settler

TRANSACTION = Transaction(id="1")


class ManualClock:
    """A clock that the test moves, and no chance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = Clock(monotonic=lambda: self.now, wall=lambda: 1_000.0 + self.now, random=lambda: 0.5)


def make_spec(clock: Clock, timeout: float | None = None, **retry: Any) -> LifecycleSpec:
    retry_policy = RetryPolicy(**retry)
    return LifecycleSpec(
        Step("process", abs, retry_policy, classify=classify, timeout_error=timeout_error, defers=True),
        Step("success", abs, retry_policy, classify=classify_handler, timeout_error=timeout_error),
        Step("exception", abs, retry_policy, classify=classify_handler, timeout_error=timeout_error),
        clock=clock,
        timeout=timeout,
    )


def finish_script(script: Any, answer: Any) -> Any:
    with pytest.raises(StopIteration) as stop:
        script.send(answer)
    return stop.value.value


@pytest.mark.spec("CON-12", "CON-38")
def test_a_success_handler_does_not_start_after_the_transaction_timeout() -> None:
    manual_clock = ManualClock()
    script = run_lifecycle(make_spec(manual_clock.clock, timeout=10.0), TRANSACTION)
    assert next(script).step == "process"
    manual_clock.now = 10.0
    call = script.send(Ok("done"))
    assert call.step == "exception"
    assert (call.args[1].category, call.args[1].still_running) == (Category.TIMEOUT, False)
    outcome = finish_script(script, Ok(None))
    assert (outcome.kind, outcome.processed, outcome.succeeded_steps) == (OutcomeKind.FAILED, True, ("process",))


@pytest.mark.spec("CON-12")
def test_a_timed_out_lifecycle_neither_retries_nor_defers() -> None:
    manual_clock = ManualClock()
    script = run_lifecycle(make_spec(manual_clock.clock, timeout=10.0, max_inline_delay=0.0), TRANSACTION)
    call = next(script)
    assert call.until == 10.0, "the step's own 60 s are cut"
    manual_clock.now = 10.0
    script.send(Expired(call))
    assert script.send(True).step == "exception"


class AttemptRecorder:
    """A watch on one step."""

    def __init__(self) -> None:
        self.errors: list[Any] = []

    def on_attempt_start(self, number: int) -> None:
        return None

    def on_attempt_end(self, number: int, error: BaseException | None) -> None:
        self.errors.append((number, error))


@pytest.mark.spec("CON-16")
def test_an_observer_sees_every_attempt_and_its_result() -> None:
    manual_clock, recorder = ManualClock(), AttemptRecorder()
    step = Step(
        "process", abs, RetryPolicy(max_attempts=4, backoff=0.0), classify=classify, timeout_error=timeout_error
    )
    script = run_step(step, (1,), [], TRANSACTION, manual_clock.clock, observer=recorder)
    call = next(script)
    error = ValueError("no")
    call = script.send(Err(error))
    script.send(Expired(call))
    call = script.send(True)
    assert isinstance(call, Call)
    script.send(Err(error))
    assert isinstance(finish_script(script, Interrupted()), Interrupted)
    (first, late, third, stopped) = recorder.errors
    assert first == (0, error)
    assert (late[0], type(late[1])) == (1, TimeoutError)
    assert third == (2, error)
    assert stopped == (3, None)


@pytest.mark.spec("CON-44")
def test_a_failed_step_names_its_attempt() -> None:
    manual_clock = ManualClock()
    step = Step("process", abs, RetryPolicy(max_attempts=1), classify=classify, timeout_error=timeout_error)
    script = run_step(step, (1,), failed_attempts := [], TRANSACTION, manual_clock.clock)
    next(script)
    failed = finish_script(script, Err(ValueError("no")))
    assert isinstance(failed, Failed)
    assert (failed.attempt, failed.abandoned_call, len(failed_attempts)) == (0, None, 1)


def test_interrupted_slots_are_awaited_despite_further_interrupts() -> None:
    slot_table: SlotTable[str] = SlotTable(1, stall_timeout=1.0, clock=lambda: 0.0)
    slot = Slot(iter(()), notify=None, counted=True)  # type: ignore[arg-type]
    slot_table.running[slot] = "a"

    def handle_events(events: list[Any]) -> Any:
        for event in events:
            slot_table.handle_event(event)
        yield from ()

    script = slot_table.interrupt_all(ThreadDriver(1).create_mailbox(), handle_events)
    assert isinstance(next(script), Interrupt)
    assert isinstance(script.send(None), Wait)
    assert isinstance(script.send(Interrupted()), Wait), "it goes on listening"
    finish_script(script, [ScriptEnded(slot, None, freed=True)])
    assert not slot_table.running


def make_settler(manual_clock: ManualClock, report: Report) -> Settler:
    return Settler(
        lambda settlings: [SettleResult.SETTLED] * len(settlings),
        SettlePolicy.load({"linger": 0.0}),
        clock=manual_clock.clock,
        mailbox=ThreadDriver(1).create_mailbox(),
        report=report,
        observer=LoopObserver(),
    )


def test_a_settler_that_is_interrupted_while_idle_ends() -> None:
    script = make_settler(ManualClock(), Report()).run()
    assert isinstance(next(script), Wait)
    finish_script(script, Interrupted())


@pytest.mark.spec("CNN-13", "CON-36")
def test_a_settler_interrupted_during_the_grace_period_of_a_call_sends_nothing_more() -> None:
    manual_clock, report = ManualClock(), Report()
    settler = make_settler(manual_clock, report)
    script = settler.run()
    next(script)
    settler.enqueue(
        item := PendingSettlement(Delivery(TRANSACTION, 1), Ack(), Outcome(TRANSACTION, OutcomeKind.SUCCEEDED))
    )
    call = script.send([item, CLOSE_EVENT])
    assert isinstance(call, Call)
    manual_clock.now = call.until
    effect = script.send(Expired(call))
    assert (effect.call, effect.until) == (call, manual_clock.now + 5.0)
    finish_script(script, Interrupted())
    assert (item.outcome.kind, item.outcome.reason) == (OutcomeKind.RELEASED, "failed")
    assert report.settled == {"failed": 1}


# -- without anybody who looks on ---------------------------------------------------------------


def test_a_loop_needs_no_observer() -> None:
    driver = ThreadDriver(2)
    queue = [[Delivery(Transaction(id="1"), 1), Delivery(Transaction(id="2"), 2, deliveries=11)], []]
    connector_calls = ConnectorCalls(
        fetch=lambda _size: queue.pop(0),
        settle=lambda settlings: [SettleResult.SETTLED] * len(settlings),
        extend=lambda deliveries: deliveries,
    )

    def handle(*_args: Any) -> None: ...

    retry = RetryPolicy()
    spec = LifecycleSpec(
        Step("process", handle, retry, classify=classify, timeout_error=timeout_error, defers=True),
        Step("success", handle, retry, classify=classify_handler, timeout_error=timeout_error),
        Step("exception", handle, retry, classify=classify_handler, timeout_error=timeout_error),
        clock=driver.time_source,
    )
    loop = ConsumeLoop(
        spec,
        connector_calls,
        ConsumerPolicy(),
        name="task",
        create_mailbox=driver.create_mailbox,
        late_results=driver.late_result_count,
    )
    signals: list[Any] = []
    for _ in range(3):
        loop.wake(lambda _mailbox, item: signals.append(item))
    assert len(signals) == 1, "said once until it is heard"
    report = driver.run(loop.run())
    assert (report.counts[OutcomeKind.SUCCEEDED], report.rejected) == (1, {"max_deliveries": 1})


def test_a_produce_run_reports_its_slot_usage() -> None:
    class SlotObserver(LoopObserver):
        read_slots: Any = None

        def on_loop_start(self, slots: Any) -> None:
            self.read_slots = slots

    driver, observer, usage = ThreadDriver(1), SlotObserver(), []

    def handle(*_args: Any) -> None:
        usage.append((observer.read_slots(), produce_run.live))

    retry = RetryPolicy()
    spec = LifecycleSpec(
        Step("produce", handle, retry, classify=classify, timeout_error=timeout_error),
        Step("success", lambda *_: None, retry, classify=classify_handler, timeout_error=timeout_error),
        Step("exception", handle, retry, classify=classify_handler, timeout_error=timeout_error),
        clock=driver.time_source,
    )
    produce_run = ProduceRun(
        spec,
        [TRANSACTION],
        ProducerPolicy(),
        create_mailbox=driver.create_mailbox,
        late_results=driver.late_result_count,
        observer=observer,
    )
    report = driver.run(produce_run.run())
    assert report.count(OutcomeKind.SUCCEEDED) == 1
    assert usage == [((1, 0, 0), True)]
