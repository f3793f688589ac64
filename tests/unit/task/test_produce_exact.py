"""The produce call's script, answered by hand."""

from __future__ import annotations

from typing import Any

import pytest

from ergon_framework.engine.attempts import Step
from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.engine.effects import NEVER, Interrupt, Spawn, Wait
from ergon_framework.engine.outcome import Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.engine.slots import Done, Freed, Mailbox, Slot
from ergon_framework.task.exceptions import LoopStalled, LoopTimeout
from ergon_framework.task.lifecycle import Course, classify, classify_handler, expired
from ergon_framework.task.mixins.policies import ProducerPolicy, RetryPolicy
from ergon_framework.task.produce import Production
from ergon_framework.task.report import End, Kind, Outcome
from ergon_framework.task.watch import Onlooker
from ergon_framework.transaction import Transaction


def never_called(*_: Any) -> None:
    raise AssertionError("the driver is the test")


class Looking(Onlooker):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.slots: Any = None
        self.told: list[Any] = []

    def began(self, slots: Any) -> None:
        self.slots = slots

    def batch(self, size: int) -> None:
        self.told.append(size)

    def ended(self, outcome: Outcome) -> None:
        self.told.append(outcome.transaction.id)

    def over(self, end: End) -> None:
        self.told.append(end)


class Call:
    """A produce call whose driver is the test; its clock begins at 100."""

    def __init__(self, given: str | list[Transaction], **loop: Any) -> None:
        self.now = 100.0
        self.watch = Looking()
        self.slots: list[Slot] = []
        self.outcomes: list[Outcome] = []
        self.interrupted: list[Slot] = []
        self.effect: Any = None
        self.report: Any = None
        self.given = [Transaction(one, attempts=3) if isinstance(one, str) else one for one in given]
        retry = RetryPolicy()
        handler = {"classify": classify_handler, "expired": expired}
        self.production = Production(
            Course(
                Step("produce", never_called, retry, classify=classify, expired=expired),
                Step("success", never_called, retry, **handler),
                Step("exception", never_called, retry, **handler),
                senses=Senses(clock=lambda: self.now),
                plain=True,
            ),
            self.given,
            ProducerPolicy.load({"loop": loop}),
            mailbox=lambda: Mailbox(Threads(1)),
            fenced=lambda: 3,
            watch=self.watch,
        )
        self.script = self.production.run()
        self.on(None)

    def on(self, answer: Any, *, at: float | None = None) -> Call:
        self.now = self.now if at is None else at
        try:
            self.effect = self.script.send(answer)
            while isinstance(self.effect, Spawn | Interrupt):
                self.effect = self.script.send(self._at_once(self.effect))
        except StopIteration as stop:
            self.effect, self.report = None, stop.value
        return self

    def _at_once(self, effect: Spawn | Interrupt) -> Slot | None:
        if isinstance(effect, Interrupt):
            self.interrupted.append(effect.slot)
            return None
        assert (effect.counted, effect.told) == (True, self.production.mailbox)
        self.slots.append(slot := Slot(effect.script, told=effect.told, counted=True))
        self.outcomes.append(self._outcome(effect.script))
        return slot

    def _outcome(self, script: Any) -> Outcome:
        next(script)
        with pytest.raises(StopIteration) as stop:
            script.send(Ok(None))
        return stop.value.value

    def done(self, *numbers: int, freed: bool = True, at: float | None = None) -> Call:
        return self.hears(*(Done(self.slots[each], self.outcomes[each], freed=freed) for each in numbers), at=at)

    def hears(self, *events: Any, at: float | None = None) -> Call:
        assert isinstance(self.effect, Wait)
        return self.on(list(events), at=at)

    @property
    def started(self) -> str:
        return "".join(outcome.transaction.id for outcome in self.outcomes)

    @property
    def waits(self) -> tuple[int, float] | None:
        return (self.effect.count, self.effect.until) if isinstance(self.effect, Wait) else None


def slots(value: int, **more: Any) -> dict[str, Any]:
    return {"concurrency": {"value": value}, **more}


def test_one_batch_follows_the_other_and_the_same_id_runs_once() -> None:
    call = Call("abacd", **slots(5, batch={"size": 2}))
    assert (call.started, call.waits) == ("ab", (1, NEVER))
    call.done(0)
    assert call.started == "ab", "the next batch waits for the whole of this one"
    assert call.done(1).started == "abcd"
    report = call.done(2, 3).report
    assert [outcome.transaction.id for outcome in report.outcomes] == list("abacd")
    assert report.outcomes[0] is report.outcomes[2]
    assert {outcome.kind for outcome in report.outcomes} == {Kind.SUCCEEDED}
    assert (report.end, report.abandoned, report.fenced) == (End.DONE, 0, 3)
    assert call.watch.told == [2, "a", "b", 2, "c", "d", End.DONE]


def test_what_it_produces_it_has_not_fetched() -> None:
    call = Call("ab", **slots(2))
    assert (call.started, call.production.in_hand, call.production.trouble) == ("ab", 0, None)


def test_nothing_to_produce_is_done_at_once() -> None:
    report = Call("").report
    assert (report.end, report.outcomes) == (End.DONE, [])


def test_the_list_is_copied_when_the_call_is_made() -> None:
    call = Call("a")
    call.given.append(Transaction("b"))
    assert len(call.done(0).report.outcomes) == 1


def test_the_same_id_of_two_sources_is_two_transactions() -> None:
    call = Call([Transaction("a", source="x"), Transaction("a", source="y")])
    assert call.started == "aa"
    assert len(set(map(id, call.done(0, 1).report.outcomes))) == 2


def test_the_next_starts_when_a_slot_is_free() -> None:
    call = Call("abc", **slots(2))
    assert (call.started, call.watch.slots()) == ("ab", (2, 0, 0))
    call.done(1)
    assert (call.started, call.watch.slots()) == ("abc", (2, 0, 0))


def test_a_body_that_stays_holds_its_slot_until_it_leaves() -> None:
    call = Call("ab", **slots(1))
    call.done(0, freed=False, at=105.0)
    assert (call.started, call.watch.slots(), call.waits) == ("a", (0, 1, 0), (1, 135.0))
    assert call.hears(Freed(call.slots[0]), at=110.0).started == "ab"
    assert call.waits == (1, NEVER)


# -- the limit ------------------------------------------------------------------------------------


def test_a_limit_starts_no_more_and_lets_those_end() -> None:
    call = Call("abc", limit=2, timeout=50.0)
    assert (call.started, call.waits) == ("ab", (1, 150.0))
    call.done(0)
    report = call.done(1).report
    assert [outcome.kind for outcome in report.outcomes] == [Kind.SUCCEEDED, Kind.SUCCEEDED, Kind.RELEASED]
    left = report.outcomes[2]
    assert (report.end, left.reason, left.attempts) == (End.LIMIT, "limit", 0)
    assert call.watch.told[-1] is End.LIMIT


def test_a_limit_that_is_just_enough_is_none() -> None:
    assert Call("ab", limit=2).done(0, 1).report.end is End.DONE


def test_a_limit_counts_over_all_batches_and_is_seen_when_a_slot_is_free() -> None:
    call = Call("abcd", **slots(1, limit=3, batch={"size": 2}))
    for number in range(3):
        assert len(call.started) == number + 1
        call.done(number)
    assert call.report.end is End.LIMIT


def test_no_batch_begins_after_the_end() -> None:
    call = Call("abcd", limit=1, batch={"size": 2}).done(0)
    assert call.report.end is End.LIMIT
    assert call.watch.told == [2, "a", End.LIMIT]


def test_a_limit_of_nothing_starts_nothing() -> None:
    call = Call("ab", limit=0)
    assert (call.started, call.report.end) == ("", End.LIMIT)


# -- the call's own time --------------------------------------------------------------------------


def test_what_runs_is_given_the_time_of_a_drain_when_the_calls_time_is_over() -> None:
    call = Call("abc", **slots(2, timeout=10.0, timeout_drain=30.0))
    assert call.waits == (1, 110.0)
    call.hears(at=109.0)
    assert call.waits == (1, 110.0)
    call.hears(at=110.0)
    assert call.waits == (1, 140.0)
    call.done(0, at=139.0)
    assert (call.started, call.interrupted) == ("ab", []), "nobody starts any more"
    call.hears(at=140.0)
    assert (call.interrupted, call.waits) == ([call.slots[1]], (1, NEVER))
    with pytest.raises(LoopTimeout, match=r"the call's 10.0 s are over; 1 were released") as caught:
        call.done(1)
    kinds = [outcome.kind for outcome in caught.value.report.outcomes]
    assert kinds == [Kind.SUCCEEDED, Kind.SUCCEEDED, Kind.RELEASED]
    assert caught.value.report.outcomes[2].reason == "timeout"
    assert call.watch.told[-1] is End.TIMEOUT


def test_the_calls_time_bounds_the_wait_for_the_last_ones_too() -> None:
    call = Call("ab", limit=1, timeout=10.0, timeout_drain=30.0)
    assert call.waits == (1, 110.0)
    call.hears(at=110.0)
    assert call.waits == (1, 140.0)
    with pytest.raises(LoopTimeout):
        call.done(0)


def test_the_last_ones_without_a_time_limit_are_waited_for() -> None:
    call = Call("ab", limit=1)
    assert call.waits == (1, NEVER)
    call.hears(at=1e9)
    assert (call.waits, call.interrupted) == ((1, NEVER), [])


# -- slots that are lost --------------------------------------------------------------------------


def test_a_stalled_call_ends_after_its_patience() -> None:
    call = Call("ab", **slots(1, timeout=90.0))
    call.done(0, freed=False, at=105.0)
    assert call.waits == (1, 135.0)
    call.hears(at=134.0)
    assert (call.waits, call.production.live) == ((1, 135.0), True)
    with pytest.raises(LoopStalled, match=r"all 1 slots are held .* for 30.0 s") as caught:
        call.hears(at=135.0)
    report = caught.value.report
    assert (report.end, report.abandoned, report.outcomes[1].reason) == (End.STALLED, 1, "stalled")
    assert not call.production.live


def test_the_calls_time_may_be_over_before_its_patience_is() -> None:
    call = Call("ab", **slots(1, timeout=20.0)).done(0, freed=False, at=105.0)
    assert call.waits == (1, 120.0)


# -- stop -----------------------------------------------------------------------------------------


def test_a_stop_drains_and_a_second_one_does_not_wait() -> None:
    call = Call("abc", **slots(2)).on(Stopped())
    assert (call.waits, call.interrupted) == ((1, 130.0), [])
    call.on(Stopped(), at=101.0)
    assert call.interrupted == call.slots
    report = call.done(0, 1).report
    assert (report.end, report.outcomes[2].reason) == (End.STOP, "stop")


def test_what_is_stopped_may_end_by_itself() -> None:
    call = Call("a").on(Stopped())
    assert call.done(0).report.end is End.STOP
    assert call.interrupted == []


def test_a_drain_ends_when_its_time_is_over() -> None:
    call = Call("a", drain_timeout=5.0).on(Stopped())
    assert call.waits == (1, 105.0)
    call.hears(at=105.0)
    assert call.interrupted == call.slots


@pytest.mark.spec("DX-19")
def test_the_calls_time_bounds_the_drain_of_a_stop_too() -> None:
    call = Call("a", timeout=10.0).on(Stopped(), at=105.0)
    assert call.waits == (1, 110.0)
    call.hears(at=110.0)
    assert call.interrupted == call.slots
    assert call.done(0).report.end is End.STOP
    longer = Call("a", timeout=10.0, timeout_drain=60.0).on(Stopped(), at=105.0)
    assert longer.waits == (1, 135.0)
    longer.hears(at=112.0)
    assert (longer.waits, longer.interrupted) == ((1, 135.0), [])


@pytest.mark.spec("DX-19")
def test_by_default_nothing_is_waited_for_once_the_calls_time_is_over() -> None:
    call = Call("ab", **slots(1, timeout=10.0)).hears(at=110.0)
    assert (call.interrupted, call.waits) == (call.slots, (1, NEVER))


def test_the_first_stop_in_a_drain_for_another_reason_changes_nothing() -> None:
    call = Call("a", timeout=10.0, timeout_drain=30.0).hears(at=110.0).on(Stopped())
    assert (call.waits, call.interrupted) == ((1, 140.0), [])
    call.hears(at=111.0).on(Stopped())
    assert call.interrupted == call.slots


def test_a_stop_while_the_last_ones_run_begins_a_drain() -> None:
    call = Call("ab", limit=1).on(Stopped(), at=120.0)
    assert call.waits == (1, 150.0)
    call.on(Stopped(), at=121.0)
    assert call.interrupted == call.slots
    assert call.done(0).report.end is End.STOP
