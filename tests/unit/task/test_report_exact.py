"""Reports, crews, gates and loops: results and counts to the last one."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.engine.effects import NEVER, Call, Interrupt, Wait
from ergon_framework.engine.slots import Done, Freed, Mailbox, Slot
from ergon_framework.errors import Category
from ergon_framework.task.crew import Crew, hear_until
from ergon_framework.task.exceptions import BusinessError
from ergon_framework.task.gates import Pause, ask
from ergon_framework.task.loops import Loops, loops_of
from ergon_framework.task.report import End, Kind, Outcome, ProduceReport, Report
from ergon_framework.transaction import Transaction

TX = Transaction("1", attempts=3)


def test_the_words_of_a_report_are_those_of_its_readers() -> None:
    assert [kind.value for kind in Kind] == ["succeeded", "failed", "handler_failed", "deferred", "released"]
    assert [end.value for end in End] == ["empty", "done", "limit", "stop", "timeout", "stalled", "fetch"]


def test_an_outcome_begins_as_one_that_was_given_back() -> None:
    outcome = Outcome(TX)
    assert (outcome.kind, outcome.attempts, outcome.processed, outcome.reason) == (Kind.RELEASED, 3, False, None)
    nothing = (outcome.result, outcome.error, outcome.handler_error, outcome.settlement, outcome.body)
    assert nothing == (None,) * 5
    assert (outcome.durations, outcome.notes) == ({}, [])
    assert (outcome.category, outcome.still_running, outcome.succeeded_steps) == (None, False, ())


def test_an_outcome_knows_its_category_its_steps_and_whether_its_body_is_still_there() -> None:
    outcome = Outcome(TX, Kind.FAILED)
    outcome.error = BusinessError("no")
    outcome.body = Call("process", abs, ())
    assert (outcome.category, outcome.still_running) == (Category.BUSINESS, True)
    outcome.body.left = True
    assert not outcome.still_running
    outcome.processed = True
    assert outcome.succeeded_steps == ("process",)
    outcome.kind = Kind.SUCCEEDED
    assert outcome.succeeded_steps == ("process", "success")


def test_an_outcome_shows_whose_it_is_and_how_it_ended_and_no_payload() -> None:
    outcome = Outcome(Transaction("7", {"card": "4111"}, attempts=2), Kind.FAILED)
    outcome.error = BusinessError("no")
    assert repr(outcome) == "Outcome('7', failed, attempts=2, error=BusinessError('no'))"


def test_a_report_counts_every_kind_and_keeps_the_last_failures() -> None:
    report = Report()
    assert report.counts == dict.fromkeys(Kind, 0)
    assert (report.end, report.started, report.fetches, report.empty_fetches) == (None, 0, 0, 0)
    assert (report.abandoned, report.fenced, report.paused) == (0, 0, None)
    for kind in Kind:
        report.add(Outcome(TX, kind))
    assert report.counts == dict.fromkeys(Kind, 1)
    assert [outcome.kind for outcome in report.failures] == [Kind.FAILED, Kind.HANDLER_FAILED]
    assert report.finished == 5
    last = [Outcome(TX, Kind.FAILED) for _ in range(20)]
    for outcome in last:
        report.add(outcome)
    assert list(report.failures) == last


def test_a_produce_report_counts_by_kind() -> None:
    report = ProduceReport([Outcome(TX, Kind.FAILED), Outcome(TX), Outcome(TX)])
    assert [report.count(kind) for kind in (Kind.FAILED, Kind.RELEASED, Kind.SUCCEEDED)] == [1, 2, 0]
    assert (report.end, report.abandoned, report.fenced) == (End.DONE, 0, 0)


def test_a_pause_is_a_second_unless_it_says_otherwise() -> None:
    assert Pause("full") == Pause("full", 1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_pause_has_a_length(seconds: float) -> None:
    with pytest.raises(ValueError, match="a pause must be a finite number of seconds > 0"):
        Pause("full", seconds)


def test_a_gate_that_answers_with_something_else_holds_the_loop() -> None:
    held: Any = ask((lambda: "full",))  # type: ignore[arg-type, return-value]
    assert held == Pause("a gate answered with a str")


# -- the crew -------------------------------------------------------------------------------------


def slot() -> Slot:
    return Slot(iter(()), told=None, counted=True)  # type: ignore[arg-type]


def test_a_crew_is_stalled_only_while_bodies_hold_every_slot() -> None:
    now = 10.0
    crew: Crew[str] = Crew(2, patience=5.0, clock=lambda: now)
    a, b = slot(), slot()
    crew.flights.update({a: "a", b: "b"})
    crew.hear(Done(a, None, freed=False))
    assert (crew.free, crew.stall_ends) == (0, NEVER)
    crew.hear(Done(b, None, freed=False))
    assert (crew.free, crew.stall_ends, crew.live) == (0, 15.0, True)
    assert crew.hear(Freed(a)) == "a"
    assert (crew.free, crew.stall_ends) == (1, NEVER)
    now = 12.0
    c = slot()
    crew.flights[c] = "c"
    crew.hear(Done(c, None, freed=False))
    assert crew.stall_ends == 17.0, "its patience begins anew"
    now = 16.9
    assert crew.live
    now = 17.0
    assert not crew.live


def test_one_that_ends_beside_a_body_that_stays_leaves_its_slot() -> None:
    crew: Crew[str] = Crew(3, patience=5.0, clock=lambda: 0.0)
    a, b = slot(), slot()
    crew.flights.update({a: "a", b: "b"})
    crew.hear(Done(a, None, freed=False))
    assert crew.hear(Done(b, None, freed=True)) == "b"
    assert (crew.free, list(crew.flights), list(crew.bodies)) == (2, [], [a])


def test_who_was_stalled_for_too_long_still_learns_who_left() -> None:
    now = 10.0
    crew: Crew[str] = Crew(1, patience=5.0, clock=lambda: now)
    a = slot()
    crew.flights[a] = "a"
    crew.hear(Done(a, None, freed=False))
    now = 15.0
    assert crew.hear(Freed(a)) == "a"


def test_everybody_who_runs_is_dismissed_and_heard() -> None:
    crew: Crew[str] = Crew(2, patience=5.0, clock=lambda: 0.0)
    a, b = slot(), slot()
    crew.flights.update({a: "a", b: "b"})
    box = Mailbox(Threads(1))

    def hear(events: list[Any]) -> Any:
        for event in events:
            crew.hear(event)
        yield from ()

    script = crew.dismiss(box, hear)
    first, second = next(script), script.send(None)
    assert [(type(each), each.slot) for each in (first, second)] == [(Interrupt, a), (Interrupt, b)]
    waits = script.send(None)
    assert (type(waits), waits.mailbox, waits.count, waits.until) == (Wait, box, 1, NEVER)
    assert isinstance(script.send([Done(a, None, freed=True)]), Wait)
    with pytest.raises(StopIteration):
        script.send([Done(b, None, freed=True)])


def test_who_hears_until_something_is_true_does_not_begin_when_it_is() -> None:
    assert list(hear_until(lambda: True, Mailbox(Threads(1)), lambda events: iter(()))) == []  # type: ignore[arg-type]


# -- loops ----------------------------------------------------------------------------------------


class Alive:
    def __init__(self, *, live: bool) -> None:
        self.live = live


def test_the_loops_of_a_task_are_stopped_together_and_each_is_asked_how_it_is() -> None:
    loops, stopped = Loops(), []
    assert loops.live
    with loops.entered(Alive(live=True), lambda: stopped.append("a")):
        assert loops.live
        with loops.entered(Alive(live=False), lambda: stopped.append("b")):
            assert not loops.live
            loops.stop()
            assert stopped == ["a", "b"]
        assert loops.live
        loops.stop()
    loops.stop()
    assert stopped == ["a", "b", "a"]


def test_a_loop_that_fails_is_known_no_longer() -> None:
    loops = Loops()
    with pytest.raises(ZeroDivisionError), loops.entered(Alive(live=False), lambda: None):
        raise ZeroDivisionError
    assert loops.live


def test_every_task_has_loops_of_its_own() -> None:
    class Task:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    one, other = Task(), Task()
    assert loops_of(one) is loops_of(one)
    assert loops_of(one) is not loops_of(other)
