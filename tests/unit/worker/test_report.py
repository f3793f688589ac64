"""Reports, slot tables, gates and loops: every result and count."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.engine.effects import NEVER, Call, Interrupt, Wait
from ergon_framework.engine.scheduler import Mailbox, ScriptEnded, Slot, SlotFreed
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.errors import Category
from ergon_framework.gates import Pause, first_pause
from ergon_framework.transaction import Transaction
from ergon_framework.worker.consume import SlotTable, process_events_until
from ergon_framework.worker.exceptions import BusinessError
from ergon_framework.worker.report import Outcome, OutcomeKind, ProduceReport, Report, StopReason
from ergon_framework.worker.running import RunningLoops, running_loops

TRANSACTION = Transaction(id="1", attempts=3)


def test_outcome_kinds_and_stop_reasons_have_stable_values() -> None:
    assert [kind.value for kind in OutcomeKind] == ["succeeded", "failed", "handler_failed", "deferred", "released"]
    assert [end.value for end in StopReason] == ["empty", "done", "limit", "stop", "timeout", "stalled", "fetch"]


def test_a_new_outcome_is_released() -> None:
    outcome = Outcome(TRANSACTION)
    assert (outcome.kind, outcome.attempts, outcome.processed, outcome.reason) == (OutcomeKind.RELEASED, 3, False, None)
    values = (outcome.result, outcome.error, outcome.handler_error, outcome.settlement)
    assert (values, outcome.abandoned_calls) == ((None,) * 4, ())
    assert (outcome.durations, outcome.failed_attempts) == ({}, [])
    assert (outcome.category, outcome.still_running, outcome.succeeded_steps) == (None, False, ())


def test_an_outcome_has_its_category_its_steps_and_whether_its_call_still_runs() -> None:
    outcome = Outcome(TRANSACTION, OutcomeKind.FAILED)
    outcome.error = BusinessError("no")
    outcome.abandoned_calls = (Call("process", abs, ()),)
    assert (outcome.category, outcome.still_running) == (Category.BUSINESS, True)
    outcome.abandoned_calls[0].exited = True
    assert not outcome.still_running
    outcome.processed = True
    assert outcome.succeeded_steps == ("process",)
    outcome.kind = OutcomeKind.SUCCEEDED
    assert outcome.succeeded_steps == ("process", "success")


def test_the_repr_of_an_outcome_shows_its_id_and_result_but_no_payload() -> None:
    outcome = Outcome(Transaction({"card": "4111"}, id="7", attempts=2), OutcomeKind.FAILED)
    outcome.error = BusinessError("no")
    assert repr(outcome) == "Outcome('7', failed, attempts=2, error=BusinessError('no'))"


def test_a_report_counts_every_kind_and_keeps_the_last_failures() -> None:
    report = Report()
    assert report.counts == dict.fromkeys(OutcomeKind, 0)
    assert (report.stop_reason, report.started, report.fetches, report.empty_fetches) == (None, 0, 0, 0)
    assert (report.still_running, report.late_results, report.paused) == (0, 0, None)
    for kind in OutcomeKind:
        report.add(Outcome(TRANSACTION, kind))
    assert report.counts == dict.fromkeys(OutcomeKind, 1)
    assert [outcome.kind for outcome in report.failures] == [OutcomeKind.FAILED, OutcomeKind.EXCEPTION_HANDLER_FAILED]
    assert report.finished == 5
    last = [Outcome(TRANSACTION, OutcomeKind.FAILED) for _ in range(20)]
    for outcome in last:
        report.add(outcome)
    assert list(report.failures) == last


def test_a_produce_report_counts_by_kind() -> None:
    report = ProduceReport([Outcome(TRANSACTION, OutcomeKind.FAILED), Outcome(TRANSACTION), Outcome(TRANSACTION)])
    assert [report.count(kind) for kind in (OutcomeKind.FAILED, OutcomeKind.RELEASED, OutcomeKind.SUCCEEDED)] == [
        1,
        2,
        0,
    ]
    assert (report.stop_reason, report.still_running, report.late_results) == (StopReason.DONE, 0, 0)


def test_a_pause_lasts_one_second_by_default() -> None:
    assert Pause("full") == Pause("full", 1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_pause_needs_a_positive_finite_duration(seconds: float) -> None:
    with pytest.raises(ValueError, match="a pause must be a finite number of seconds > 0"):
        Pause("full", seconds)


def test_a_gate_that_returns_another_type_pauses_the_loop() -> None:
    pause: Any = first_pause((lambda: "full",))  # type: ignore[arg-type, return-value]
    assert pause == Pause("gate returned a str, not a Pause")


# -- the crew -------------------------------------------------------------------------------------


def make_slot() -> Slot:
    return Slot(iter(()), notify=None, counted=True)  # type: ignore[arg-type]


def test_a_slot_table_is_stalled_only_while_abandoned_calls_occupy_every_slot() -> None:
    now = 10.0
    slot_table: SlotTable[str] = SlotTable(2, stall_timeout=5.0, clock=lambda: now)
    a, b = make_slot(), make_slot()
    slot_table.running.update({a: "a", b: "b"})
    slot_table.handle_event(ScriptEnded(a, None, freed=False))
    assert (slot_table.free, slot_table.stall_deadline) == (0, NEVER)
    slot_table.handle_event(ScriptEnded(b, None, freed=False))
    assert (slot_table.free, slot_table.stall_deadline, slot_table.live) == (0, 15.0, True)
    assert slot_table.handle_event(SlotFreed(a)) == "a"
    assert (slot_table.free, slot_table.stall_deadline) == (1, NEVER)
    now = 12.0
    c = make_slot()
    slot_table.running[c] = "c"
    slot_table.handle_event(ScriptEnded(c, None, freed=False))
    assert slot_table.stall_deadline == 17.0, "the stall timeout restarts"
    now = 16.9
    assert slot_table.live
    now = 17.0
    assert not slot_table.live


def test_a_call_that_ends_next_to_an_abandoned_call_frees_its_slot() -> None:
    slot_table: SlotTable[str] = SlotTable(3, stall_timeout=5.0, clock=lambda: 0.0)
    a, b = make_slot(), make_slot()
    slot_table.running.update({a: "a", b: "b"})
    slot_table.handle_event(ScriptEnded(a, None, freed=False))
    assert slot_table.handle_event(ScriptEnded(b, None, freed=True)) == "b"
    assert (slot_table.free, list(slot_table.running), list(slot_table.abandoned)) == (2, [], [a])


def test_a_slot_table_stalled_for_too_long_still_reports_exited_calls() -> None:
    now = 10.0
    slot_table: SlotTable[str] = SlotTable(1, stall_timeout=5.0, clock=lambda: now)
    a = make_slot()
    slot_table.running[a] = "a"
    slot_table.handle_event(ScriptEnded(a, None, freed=False))
    now = 15.0
    assert slot_table.handle_event(SlotFreed(a)) == "a"


def test_every_running_slot_is_interrupted_and_its_end_is_processed() -> None:
    slot_table: SlotTable[str] = SlotTable(2, stall_timeout=5.0, clock=lambda: 0.0)
    a, b = make_slot(), make_slot()
    slot_table.running.update({a: "a", b: "b"})
    mailbox = Mailbox(ThreadDriver(1))

    def handle_events(events: list[Any]) -> Any:
        for event in events:
            slot_table.handle_event(event)
        yield from ()

    script = slot_table.interrupt_all(mailbox, handle_events)
    first, second = next(script), script.send(None)
    assert [(type(each), each.slot) for each in (first, second)] == [(Interrupt, a), (Interrupt, b)]
    wait = script.send(None)
    assert (type(wait), wait.mailbox, wait.count, wait.until) == (Wait, mailbox, 1, NEVER)
    assert isinstance(script.send([ScriptEnded(a, None, freed=True)]), Wait)
    with pytest.raises(StopIteration):
        script.send([ScriptEnded(b, None, freed=True)])


def test_no_events_are_processed_if_the_condition_already_holds() -> None:
    assert list(process_events_until(lambda: True, Mailbox(ThreadDriver(1)), lambda events: iter(()))) == []  # type: ignore[arg-type]


# -- loops ----------------------------------------------------------------------------------------


class LoopStub:
    def __init__(self, *, live: bool) -> None:
        self.live = live


def test_all_loops_of_a_task_are_stopped_and_must_be_live() -> None:
    loops, stopped = RunningLoops(), []
    assert loops.live
    with loops.track(LoopStub(live=True), lambda: stopped.append("a")):
        assert loops.live
        with loops.track(LoopStub(live=False), lambda: stopped.append("b")):
            assert not loops.live
            loops.stop()
            assert stopped == ["a", "b"]
        assert loops.live
        loops.stop()
    loops.stop()
    assert stopped == ["a", "b", "a"]


def test_a_loop_that_fails_is_no_longer_tracked() -> None:
    loops = RunningLoops()
    with pytest.raises(ZeroDivisionError), loops.track(LoopStub(live=False), lambda: None):
        raise ZeroDivisionError
    assert loops.live


def test_equal_tasks_have_their_own_loops() -> None:
    class Task:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    one, other = Task(), Task()
    assert running_loops(one) is running_loops(one)
    assert running_loops(one) is not running_loops(other)
