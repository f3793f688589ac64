"""The script of a produce call; the test sends the result of every effect."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.engine.effects import NEVER, Interrupt, Interrupted, Ok, Spawn, Wait
from ergon_framework.engine.retry import Step
from ergon_framework.engine.scheduler import Mailbox, ScriptEnded, Slot, SlotFreed
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.transaction import Transaction
from ergon_framework.worker.events import LoopObserver
from ergon_framework.worker.exceptions import LoopStalled, LoopTimeout
from ergon_framework.worker.lifecycle import LifecycleSpec, classify, classify_handler, timeout_error
from ergon_framework.worker.policies import ProducerPolicy, RetryPolicy
from ergon_framework.worker.produce import ProduceRun
from ergon_framework.worker.report import Outcome, OutcomeKind, StopReason


def fail_if_called(*_: Any) -> None:
    raise AssertionError("the driver is the test")


class ProduceObserver(LoopObserver):
    """Record the events of the loop."""

    def __init__(self) -> None:
        self.read_slots: Any = None
        self.events: list[Any] = []

    def on_loop_start(self, slots: Any) -> None:
        self.read_slots = slots

    def on_batch(self, size: int) -> None:
        self.events.append(size)

    def on_transaction_end(self, outcome: Outcome) -> None:
        self.events.append(outcome.transaction.id)

    def on_loop_end(self, end: StopReason) -> None:
        self.events.append(end)


class ProduceHarness:
    """A produce call whose driver is the test; its clock begins at 100."""

    def __init__(self, transactions: str | list[Transaction], **loop: Any) -> None:
        self.now = 100.0
        self.observer = ProduceObserver()
        self.slots: list[Slot] = []
        self.outcomes: list[Outcome] = []
        self.interrupted: list[Slot] = []
        self.effect: Any = None
        self.report: Any = None
        self.transactions = [Transaction(id=one, attempts=3) if isinstance(one, str) else one for one in transactions]
        retry = RetryPolicy()
        handler = {"classify": classify_handler, "timeout_error": timeout_error}
        self.produce_run = ProduceRun(
            LifecycleSpec(
                Step("produce", fail_if_called, retry, classify=classify, timeout_error=timeout_error),
                Step("success", fail_if_called, retry, **handler),
                Step("exception", fail_if_called, retry, **handler),
                clock=Clock(monotonic=lambda: self.now),
                skips_success=True,
            ),
            self.transactions,
            ProducerPolicy.load({"loop": loop}),
            create_mailbox=lambda: Mailbox(ThreadDriver(1)),
            late_results=lambda: 3,
            observer=self.observer,
        )
        self.script = self.produce_run.run()
        self.answer(None)

    def answer(self, answer: Any, *, at: float | None = None) -> ProduceHarness:
        self.now = self.now if at is None else at
        try:
            self.effect = self.script.send(answer)
            while isinstance(self.effect, Spawn | Interrupt):
                self.effect = self.script.send(self._answer_immediately(self.effect))
        except StopIteration as stop:
            self.effect, self.report = None, stop.value
        return self

    def _answer_immediately(self, effect: Spawn | Interrupt) -> Slot | None:
        if isinstance(effect, Interrupt):
            self.interrupted.append(effect.slot)
            return None
        assert (effect.counted, effect.notify) == (True, self.produce_run.mailbox)
        self.slots.append(slot := Slot(effect.script, notify=effect.notify, counted=True))
        self.outcomes.append(self._run_lifecycle(effect.script))
        return slot

    def _run_lifecycle(self, script: Any) -> Outcome:
        next(script)
        with pytest.raises(StopIteration) as stop:
            script.send(Ok(None))
        return stop.value.value

    def end_slots(self, *numbers: int, freed: bool = True, at: float | None = None) -> ProduceHarness:
        return self.deliver(
            *(ScriptEnded(self.slots[each], self.outcomes[each], freed=freed) for each in numbers), at=at
        )

    def deliver(self, *events: Any, at: float | None = None) -> ProduceHarness:
        assert isinstance(self.effect, Wait)
        return self.answer(list(events), at=at)

    @property
    def started_ids(self) -> str:
        return "".join(outcome.transaction.id for outcome in self.outcomes)

    @property
    def pending_wait(self) -> tuple[int, float] | None:
        return (self.effect.count, self.effect.until) if isinstance(self.effect, Wait) else None


def make_loop_settings(value: int, **more: Any) -> dict[str, Any]:
    return {"concurrency": {"value": value}, **more}


def test_one_batch_follows_the_other_and_the_same_id_runs_once() -> None:
    harness = ProduceHarness("abacd", **make_loop_settings(5, batch={"size": 2}))
    assert (harness.started_ids, harness.pending_wait) == ("ab", (1, NEVER))
    harness.end_slots(0)
    assert harness.started_ids == "ab", "the next batch waits for the whole of this one"
    assert harness.end_slots(1).started_ids == "abcd"
    report = harness.end_slots(2, 3).report
    assert [outcome.transaction.id for outcome in report.outcomes] == list("abacd")
    assert report.outcomes[0] is report.outcomes[2]
    assert {outcome.kind for outcome in report.outcomes} == {OutcomeKind.SUCCEEDED}
    assert (report.stop_reason, report.still_running, report.late_results) == (StopReason.DONE, 0, 3)
    assert harness.observer.events == [2, "a", "b", 2, "c", "d", StopReason.DONE]


def test_a_produced_transaction_is_not_in_flight() -> None:
    harness = ProduceHarness("ab", **make_loop_settings(2))
    assert (harness.started_ids, harness.produce_run.in_flight, harness.produce_run.not_fetching_reason) == (
        "ab",
        0,
        None,
    )


def test_an_empty_list_is_done_immediately() -> None:
    report = ProduceHarness("").report
    assert (report.stop_reason, report.outcomes) == (StopReason.DONE, [])


def test_changing_the_list_after_the_call_to_produce_changes_nothing() -> None:
    harness = ProduceHarness("a")
    harness.transactions.append(Transaction(id="b"))
    assert len(harness.end_slots(0).report.outcomes) == 1


def test_the_same_id_of_two_sources_is_two_transactions() -> None:
    harness = ProduceHarness([Transaction(id="a", source="x"), Transaction(id="a", source="y")])
    assert harness.started_ids == "aa"
    assert len(set(map(id, harness.end_slots(0, 1).report.outcomes))) == 2


def test_the_next_starts_when_a_slot_is_free() -> None:
    harness = ProduceHarness("abc", **make_loop_settings(2))
    assert (harness.started_ids, harness.observer.read_slots()) == ("ab", (2, 0, 0))
    harness.end_slots(1)
    assert (harness.started_ids, harness.observer.read_slots()) == ("abc", (2, 0, 0))


def test_an_abandoned_call_occupies_its_slot_until_it_exits() -> None:
    harness = ProduceHarness("ab", **make_loop_settings(1))
    harness.end_slots(0, freed=False, at=105.0)
    assert (harness.started_ids, harness.observer.read_slots(), harness.pending_wait) == ("a", (0, 1, 0), (1, 135.0))
    assert harness.deliver(SlotFreed(harness.slots[0]), at=110.0).started_ids == "ab"
    assert harness.pending_wait == (1, NEVER)


# -- the limit ------------------------------------------------------------------------------------


def test_a_limit_starts_no_more_and_running_calls_end() -> None:
    harness = ProduceHarness("abc", limit=2, timeout=50.0)
    assert (harness.started_ids, harness.pending_wait) == ("ab", (1, 150.0))
    harness.end_slots(0)
    report = harness.end_slots(1).report
    assert [outcome.kind for outcome in report.outcomes] == [
        OutcomeKind.SUCCEEDED,
        OutcomeKind.SUCCEEDED,
        OutcomeKind.RELEASED,
    ]
    released = report.outcomes[2]
    assert (report.stop_reason, released.reason, released.attempts) == (StopReason.LIMIT, "limit", 0)
    assert harness.observer.events[-1] is StopReason.LIMIT


def test_a_limit_equal_to_the_number_of_transactions_is_not_reached() -> None:
    assert ProduceHarness("ab", limit=2).end_slots(0, 1).report.stop_reason is StopReason.DONE


def test_a_limit_counts_over_all_batches_and_is_checked_when_a_slot_is_free() -> None:
    harness = ProduceHarness("abcd", **make_loop_settings(1, limit=3, batch={"size": 2}))
    for number in range(3):
        assert len(harness.started_ids) == number + 1
        harness.end_slots(number)
    assert harness.report.stop_reason is StopReason.LIMIT


def test_no_batch_starts_after_the_end() -> None:
    harness = ProduceHarness("abcd", limit=1, batch={"size": 2}).end_slots(0)
    assert harness.report.stop_reason is StopReason.LIMIT
    assert harness.observer.events == [2, "a", StopReason.LIMIT]


def test_a_limit_of_zero_starts_nothing() -> None:
    harness = ProduceHarness("ab", limit=0)
    assert (harness.started_ids, harness.report.stop_reason) == ("", StopReason.LIMIT)


# -- the call's own time --------------------------------------------------------------------------


def test_running_calls_get_a_drain_after_the_timeout() -> None:
    harness = ProduceHarness("abc", **make_loop_settings(2, timeout=10.0, timeout_drain=30.0))
    assert harness.pending_wait == (1, 110.0)
    harness.deliver(at=109.0)
    assert harness.pending_wait == (1, 110.0)
    harness.deliver(at=110.0)
    assert harness.pending_wait == (1, 140.0)
    harness.end_slots(0, at=139.0)
    assert (harness.started_ids, harness.interrupted) == ("ab", []), "no call starts any more"
    harness.deliver(at=140.0)
    assert (harness.interrupted, harness.pending_wait) == ([harness.slots[1]], (1, NEVER))
    with pytest.raises(LoopTimeout, match=r"call timed out after 10.0 s; 1 were released") as caught:
        harness.end_slots(1)
    kinds = [outcome.kind for outcome in caught.value.report.outcomes]
    assert kinds == [OutcomeKind.SUCCEEDED, OutcomeKind.SUCCEEDED, OutcomeKind.RELEASED]
    assert caught.value.report.outcomes[2].reason == "timeout"
    assert harness.observer.events[-1] is StopReason.TIMEOUT


def test_the_timeout_bounds_the_wait_for_the_last_calls() -> None:
    harness = ProduceHarness("ab", limit=1, timeout=10.0, timeout_drain=30.0)
    assert harness.pending_wait == (1, 110.0)
    harness.deliver(at=110.0)
    assert harness.pending_wait == (1, 140.0)
    with pytest.raises(LoopTimeout):
        harness.end_slots(0)


def test_the_last_calls_are_awaited_without_a_timeout() -> None:
    harness = ProduceHarness("ab", limit=1)
    assert harness.pending_wait == (1, NEVER)
    harness.deliver(at=1e9)
    assert (harness.pending_wait, harness.interrupted) == ((1, NEVER), [])


# -- slots that are lost --------------------------------------------------------------------------


def test_a_stalled_run_ends_after_the_stall_timeout() -> None:
    harness = ProduceHarness("ab", **make_loop_settings(1, timeout=90.0))
    harness.end_slots(0, freed=False, at=105.0)
    assert harness.pending_wait == (1, 135.0)
    harness.deliver(at=134.0)
    assert (harness.pending_wait, harness.produce_run.live) == ((1, 135.0), True)
    with pytest.raises(LoopStalled, match=r"all 1 slots are occupied .* for 30.0 s") as caught:
        harness.deliver(at=135.0)
    report = caught.value.report
    assert (report.stop_reason, report.still_running, report.outcomes[1].reason) == (StopReason.STALLED, 1, "stalled")
    assert not harness.produce_run.live


def test_the_timeout_may_expire_before_the_stall_timeout() -> None:
    harness = ProduceHarness("ab", **make_loop_settings(1, timeout=20.0)).end_slots(0, freed=False, at=105.0)
    assert harness.pending_wait == (1, 120.0)


# -- stop -----------------------------------------------------------------------------------------


def test_a_stop_drains_and_a_second_one_does_not_wait() -> None:
    harness = ProduceHarness("abc", **make_loop_settings(2)).answer(Interrupted())
    assert (harness.pending_wait, harness.interrupted) == ((1, 130.0), [])
    harness.answer(Interrupted(), at=101.0)
    assert harness.interrupted == harness.slots
    report = harness.end_slots(0, 1).report
    assert (report.stop_reason, report.outcomes[2].reason) == (StopReason.STOP, "stop")


def test_a_call_may_end_during_the_drain_of_a_stop() -> None:
    harness = ProduceHarness("a").answer(Interrupted())
    assert harness.end_slots(0).report.stop_reason is StopReason.STOP
    assert harness.interrupted == []


def test_a_drain_ends_after_its_timeout() -> None:
    harness = ProduceHarness("a", drain_timeout=5.0).answer(Interrupted())
    assert harness.pending_wait == (1, 105.0)
    harness.deliver(at=105.0)
    assert harness.interrupted == harness.slots


@pytest.mark.spec("DX-19")
def test_the_timeout_bounds_the_drain_of_a_stop() -> None:
    harness = ProduceHarness("a", timeout=10.0).answer(Interrupted(), at=105.0)
    assert harness.pending_wait == (1, 110.0)
    harness.deliver(at=110.0)
    assert harness.interrupted == harness.slots
    assert harness.end_slots(0).report.stop_reason is StopReason.STOP
    longer_drain = ProduceHarness("a", timeout=10.0, timeout_drain=60.0).answer(Interrupted(), at=105.0)
    assert longer_drain.pending_wait == (1, 135.0)
    longer_drain.deliver(at=112.0)
    assert (longer_drain.pending_wait, longer_drain.interrupted) == ((1, 135.0), [])


@pytest.mark.spec("DX-19")
def test_by_default_there_is_no_drain_after_the_timeout() -> None:
    harness = ProduceHarness("ab", **make_loop_settings(1, timeout=10.0)).deliver(at=110.0)
    assert (harness.interrupted, harness.pending_wait) == (harness.slots, (1, NEVER))


def test_the_first_stop_in_a_drain_for_another_reason_changes_nothing() -> None:
    harness = ProduceHarness("a", timeout=10.0, timeout_drain=30.0).deliver(at=110.0).answer(Interrupted())
    assert (harness.pending_wait, harness.interrupted) == ((1, 140.0), [])
    harness.deliver(at=111.0).answer(Interrupted())
    assert harness.interrupted == harness.slots


def test_a_stop_while_the_last_calls_run_starts_a_drain() -> None:
    harness = ProduceHarness("ab", limit=1).answer(Interrupted(), at=120.0)
    assert harness.pending_wait == (1, 150.0)
    harness.answer(Interrupted(), at=121.0)
    assert harness.interrupted == harness.slots
    assert harness.end_slots(0).report.stop_reason is StopReason.STOP
