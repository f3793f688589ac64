"""One step in its retry envelope, answered by hand: every boundary, and all that it hands on."""

from __future__ import annotations

from contextvars import Context, copy_context
from typing import Any

import pytest

from ergon_framework.engine.attempts import Deferred, Failed, Note, Overrun, Step, attempts
from ergon_framework.engine.effects import NEVER, Call, Gone, Script, Sleep
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.errors import Category, ErgonError
from ergon_framework.failure import Deferral
from ergon_framework.task.mixins.policies import RetryPolicy
from ergon_framework.transaction import Transaction

TX = Transaction("1")


def late(step: Step, overrun: Overrun, lifetime: float | None) -> ErgonError:
    return ErgonError(f"{step.name}: {overrun.value} of {lifetime}", category=Category.TIMEOUT)


def own(error: BaseException) -> ErgonError:
    assert isinstance(error, ErgonError)
    return error


def fn(*_args: Any) -> None: ...


class World:
    """One step, the clock it looks at, and what it last asked for or came to."""

    def __init__(
        self, *, defers: bool | None = None, now: float = 0.0, transaction: Transaction = TX, **given: Any
    ) -> None:
        chosen = {name: given.pop(name) for name in ("first", "limit", "lifetime", "watch") if name in given}
        limits = {name: given.pop(name) for name in ("max_deferral",) if name in given}
        transaction = transaction.replace(deferral=given.pop("deferral", None))
        told = {name: given.pop(name) for name in ("on_retry",) if name in given}
        rules = RetryPolicy(**({"max_attempts": 5, "timeout": 60.0, "backoff": 4.0, "multiplier": 1.0} | given))
        self.now = now
        senses = Senses(clock=lambda: self.now, wall=lambda: 1_000.0 + self.now, dice=lambda: 0.5)
        defer = {} if defers is None else {"defers": defers}
        self.step = Step("process", fn, rules, classify=own, expired=late, **defer, **limits, **told)
        self.notes: list[Note] = []
        self.script: Script[Any] = attempts(self.step, (7,), self.notes, transaction, senses, **chosen)
        self.effect: Any = None
        self.result: Any = None
        self.answer(None)

    def answer(self, answer: Any) -> World:
        try:
            self.effect = self.script.send(answer)
        except StopIteration as stop:
            self.effect, self.result = None, stop.value
        return self

    def fail(self, **verdict: Any) -> World:
        return self.answer(Err(ErgonError("no", **verdict)))

    @property
    def note(self) -> Note:
        return self.notes[-1]


def test_an_attempt_is_a_call_within_its_own_scope() -> None:
    world = World(now=3.0, timeout=60.0)
    call = world.effect
    assert isinstance(call, Call)
    assert (call.step, call.fn, call.args, call.until, call.context) == ("process", fn, (TX, 7), 63.0, None)
    scope = call.scope
    assert scope is not None
    assert (scope.transaction, scope.step, scope.attempt, scope.deadline) == (TX, "process", 0, 63.0)
    assert scope.clock() == 3.0


@pytest.mark.spec("DX-10")
def test_every_attempt_has_the_payload_as_it_was_delivered() -> None:
    world = World(transaction=(original := Transaction("1", {"lines": [1]})))
    for _ in range(3):
        (transaction, _), scope = world.effect.args, world.effect.scope
        assert transaction.payload == {"lines": [1]}
        assert scope.transaction is transaction, "what a handler finds in its scope is what it was given"
        transaction.payload["lines"].append(2)
        world.fail().answer(None)
    assert original.payload == {"lines": [1]}


@pytest.mark.parametrize(
    "timeout, limit, until",
    [(60.0, 50.0, 50.0), (60.0, 63.0, 63.0), (60.0, 64.0, 63.0), (None, 50.0, 50.0), (None, NEVER, NEVER)],
)
def test_an_attempt_ends_at_its_own_limit_or_the_lifecycles(timeout: float | None, limit: float, until: float) -> None:
    call = World(now=3.0, timeout=timeout, limit=limit).effect
    assert (call.until, call.scope.deadline) == (until, None if until == NEVER else until)


def test_nothing_is_begun_in_the_moment_the_lifecycle_ends() -> None:
    world = World(now=5.0, limit=5.0, lifetime=4.0, first=2)
    assert isinstance(world.result, Failed)
    assert (world.result.attempt, world.result.body, world.notes) == (2, None, [])
    assert str(world.result.error) == "process: unstarted of 4.0"
    assert world.result.error.category is Category.TIMEOUT
    assert World(now=4.0, limit=5.0).effect.until == 5.0, "a moment earlier it is"


@pytest.mark.parametrize("answer", [Ok("x"), Stopped()])
def test_a_value_and_a_stop_end_the_step_as_they_are(answer: Any) -> None:
    world = World().answer(answer)
    assert world.result is answer
    assert world.notes == []


def test_an_attempt_that_fails_is_noted_with_its_number_and_the_wait_after_it() -> None:
    world = World(now=10.0)
    error = ErgonError("no")
    world.now = 12.0
    world.answer(Err(error))
    note = world.note
    assert (note.step, note.attempt, note.error, note.at, note.delay) == ("process", 0, error, 1_012.0, 4.0)
    assert isinstance(world.effect, Sleep)
    assert world.effect.until == 16.0
    world.now = 16.0
    again = world.answer(None).effect
    assert (again.until, again.scope.attempt, again.scope.deadline) == (76.0, 1, 76.0)
    world.fail()
    assert [note.attempt for note in world.notes] == [0, 1]
    assert world.answer(None).effect.scope.attempt == 2


def test_the_numbers_go_on_from_those_of_earlier_deliveries() -> None:
    world = World(first=3)
    assert world.effect.scope.attempt == 3
    world.fail()
    assert world.answer(None).effect.scope.attempt == 4
    world.fail()
    assert isinstance(world.result, Failed)
    assert (world.result.attempt, [note.attempt for note in world.notes]) == (4, [3, 4])


def test_the_last_attempt_is_followed_by_no_wait() -> None:
    world = World(max_attempts=2)
    world.fail()
    world.answer(None)
    error = ErgonError("again")
    world.answer(Err(error))
    failed = world.result
    assert isinstance(failed, Failed)
    assert (failed.error, failed.attempt, failed.body, world.note.delay) == (error, 1, None, None)


@pytest.mark.parametrize("verdict", [{"category": Category.BUSINESS}, {"final": True}])
def test_what_cannot_get_better_is_not_tried_again(verdict: dict[str, Any]) -> None:
    world = World().fail(**verdict)
    assert isinstance(world.result, Failed)
    assert (world.result.attempt, world.note.delay) == (0, None)


def test_a_stop_within_the_wait_ends_the_step() -> None:
    stopped, world = Stopped(), World().fail()
    assert world.note.delay == 4.0
    assert world.answer(stopped).result is stopped
    assert world.note.delay is None, "a wait that was interrupted is none"


def test_no_wait_is_no_sleep() -> None:
    world = World(backoff=0.0).fail()
    assert isinstance(world.effect, Call)
    assert (world.effect.scope.attempt, world.note.delay) == (1, 0.0)


def test_the_shortest_wait_is_slept() -> None:
    world = World(backoff=0.25).fail()
    assert isinstance(world.effect, Sleep)
    assert world.effect.until == 0.25


@pytest.mark.parametrize("asked, waited", [(None, 4.0), (3.0, 4.0), (9.0, 9.0)])
def test_the_longer_of_the_policys_wait_and_the_errors_is_waited(asked: float | None, waited: float) -> None:
    world = World().fail(retry_after=asked)
    assert (world.effect.until, world.note.delay) == (waited, waited)


def test_an_error_that_asks_for_nothing_adds_no_wait() -> None:
    assert World(backoff=0.5).fail().effect.until == 0.5


def test_the_dice_move_the_wait() -> None:
    world = World(jitter=1.0)
    assert world.fail().effect.until == 4.0, "a half is the middle"


@pytest.mark.parametrize("hold, deferred", [(3.0, True), (4.0, False), (5.0, False)])
def test_a_wait_beyond_what_is_held_goes_back_to_the_broker(hold: float, deferred: bool) -> None:
    world = World(defers=True, hold=hold, first=1)
    error = ErgonError("no")
    world.answer(Err(error))
    assert world.note.delay == 4.0
    if deferred:
        assert isinstance(world.result, Deferred)
        assert (world.result.error, world.result.attempt, world.result.delay) == (error, 1, 4.0)
    else:
        assert isinstance(world.effect, Sleep)


@pytest.mark.spec("PRV-31")
@pytest.mark.parametrize("asked, waited", [(None, 4.0), (3.0, 4.0), (9.0, 9.0)])
@pytest.mark.parametrize("given", [{}, {"hold": 30.0}, {"max_attempts": 1}, {"max_attempts": 3, "first": 2}])
def test_what_could_not_even_be_tried_goes_back_at_once_and_costs_no_attempt(
    given: dict[str, Any], asked: float | None, waited: float
) -> None:
    world = World(defers=True, **given)
    error = ErgonError("not now", later=True, retry_after=asked)
    world.answer(Err(error))
    deferred = world.result
    assert isinstance(deferred, Deferred)
    assert (deferred.error, deferred.attempt, deferred.delay) == (error, given.get("first", 0), waited)
    assert world.notes == []


@pytest.mark.spec("PRV-31")
def test_the_attempts_before_it_keep_their_notes() -> None:
    world = World(defers=True).fail()
    assert isinstance(world.answer(None).fail(later=True).result, Deferred)
    assert [(note.attempt, note.delay) for note in world.notes] == [(0, 4.0)]


@pytest.mark.spec("PRV-31")
@pytest.mark.parametrize("verdict", [{"category": Category.BUSINESS}, {"final": True}])
def test_an_error_that_says_both_later_and_never_means_never(verdict: dict[str, Any]) -> None:
    assert isinstance(World(defers=True).fail(later=True, **verdict).result, Failed)


def test_a_step_that_does_not_defer_takes_later_for_any_other_failure() -> None:
    world = World(defers=False).fail(later=True, retry_after=9.0)
    assert (world.effect.until, world.note.delay) == (9.0, 9.0)


# -- deferred while a service is unavailable -------------------------------------------------------

#: The clock of a World that begins at 0 shows this time of day.
WALL = 1_000.0


def deferred(count: int = 1, *, since: float = WALL, exempt: float = 0.0) -> Deferral:
    return Deferral(count=count, since=since, at=since, until=since + exempt + 60.0, exempt=exempt, error="before")


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("given", [{}, {"max_attempts": 1}, {"max_attempts": 3, "first": 2}])
def test_a_temporary_failure_is_deferred_and_costs_no_attempt(given: dict[str, Any], final: bool) -> None:
    world = World(defers=True, max_deferral=60.0, now=5.0, **given)
    error = ErgonError("the bank is down", temporary=True, final=final, code="down")
    world.answer(Err(error))
    result = world.result
    assert isinstance(result, Deferred)
    assert (result.error, result.attempt, result.delay) == (error, given.get("first", 0), 4.0)
    assert result.deferral == Deferral(
        count=1, since=1005.0, at=1005.0, until=1065.0, code="down", error="the bank is down"
    )
    assert world.notes == []


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize("count, asked, waited", [(1, None, 4.0), (2, None, 8.0), (4, None, 20.0), (2, 9.0, 9.0)])
def test_each_deferral_waits_longer_up_to_the_cap_and_as_long_as_it_is_asked(
    count: int, asked: float | None, waited: float
) -> None:
    rules = {"backoff": 2.0, "multiplier": 2.0, "cap": 20.0}
    world = World(defers=True, max_deferral=60.0, now=30.0, deferral=deferred(count, exempt=7.0), **rules)
    result = world.fail(temporary=True, retry_after=asked).result
    assert (result.delay, result.deferral.count) == (waited, count + 1)
    assert (result.deferral.since, result.deferral.at, result.deferral.until) == (1000.0, 1030.0, 1067.0)
    assert result.deferral.exempt == 7.0


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize(
    "now, exempt, ends", [(59.0, 0.0, False), (60.0, 0.0, True), (66.0, 7.0, False), (67.0, 7.0, True)]
)
def test_after_max_deferral_a_temporary_failure_is_a_failed_attempt(now: float, exempt: float, ends: bool) -> None:
    world = World(defers=True, max_deferral=60.0, now=now, deferral=deferred(exempt=exempt))
    result = world.fail(temporary=True, final=True).result
    assert isinstance(result, Failed if ends else Deferred)
    assert len(world.notes) == ends


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize("rules", [{"defers": True, "max_deferral": 0.0}, {"defers": True}, {"defers": False}])
def test_without_deferrals_a_temporary_failure_is_like_any_other(rules: dict[str, Any]) -> None:
    assert isinstance(World(**rules).fail(temporary=True, final=True).result, Failed)
    assert isinstance(World(**rules).fail(temporary=True).effect, Sleep)


@pytest.mark.spec("DX-27")
def test_a_business_failure_is_never_temporary() -> None:
    world = World(defers=True, max_deferral=60.0).fail(temporary=True, category=Category.BUSINESS)
    assert isinstance(world.result, Failed)


@pytest.mark.spec("DX-27", "PRV-31")
def test_the_wait_for_a_circuit_breaker_does_not_count_towards_max_deferral() -> None:
    world = World(defers=True, max_deferral=60.0, now=500.0, deferral=deferred(3, exempt=7.0))
    result = world.fail(later=True, temporary=True, retry_after=30.0).result
    assert (result.delay, result.deferral) == (30.0, deferred(3, exempt=37.0))
    assert World(defers=True, max_deferral=60.0).fail(later=True).result.deferral is None


@pytest.mark.spec("DX-27")
def test_a_long_wait_of_a_failed_attempt_keeps_the_deferrals() -> None:
    world = World(defers=True, hold=0.0, deferral=deferred(2))
    assert world.fail().result.deferral == deferred(2)


@pytest.mark.parametrize("defers", [None, False])
def test_a_step_that_does_not_defer_sleeps_however_long_it_takes(defers: bool | None) -> None:
    assert isinstance(World(defers=defers, hold=0.0).fail().effect, Sleep)


@pytest.mark.parametrize("limit, goes_on", [(14.0, False), (14.5, True)])
def test_a_wait_that_reaches_the_lifecycles_end_is_not_begun(limit: float, goes_on: bool) -> None:
    world = World(limit=limit, first=1)
    world.now = 10.0
    error = ErgonError("no")
    world.answer(Err(error))
    if goes_on:
        assert (world.effect.until, world.note.delay) == (14.0, 4.0)
    else:
        assert isinstance(world.result, Failed)
        assert (world.result.error, world.result.attempt, world.result.body) == (error, 1, None)
        assert world.note.delay is None


@pytest.mark.parametrize("now, deferred", [(9.0, True), (10.0, False), (11.0, False)])
def test_after_the_lifecycles_end_nothing_is_deferred(now: float, deferred: bool) -> None:
    world = World(defers=True, hold=0.0, limit=10.0, first=1)
    world.now = now
    world.fail()
    assert isinstance(world.result, Deferred if deferred else Failed)
    assert world.result.attempt == 1
    assert world.note.delay == (4.0 if deferred else None)


def test_a_body_that_is_too_late_is_given_its_grace_to_leave() -> None:
    world = World(now=10.0, timeout=2.5, abandon_grace=5.0)
    body = world.effect
    world.now = 13.0
    gone = world.answer(Expired(body)).effect
    assert isinstance(gone, Gone)
    assert (gone.body, gone.until) == (body, 18.0)
    assert str(world.note.error) == "process: attempt of None"
    assert (world.note.error.category, world.note.at) == (Category.TIMEOUT, 1_013.0)
    world.now = 15.0
    assert world.answer(True).effect.until == 19.0, "the wait begins when it has left"


@pytest.mark.spec("DX-11")
@pytest.mark.parametrize(
    "timeout, limit, which",
    [(2.5, NEVER, "attempt"), (2.5, 12.5, "attempt"), (2.5, 12.4, "lifecycle"), (None, 12.5, "lifecycle")],
)
def test_a_timeout_says_which_limit_is_over(timeout: float | None, limit: float, which: str) -> None:
    world = World(now=10.0, timeout=timeout, limit=limit, lifetime=9.0)
    world.answer(Expired(world.effect))
    assert str(world.note.error) == f"process: {which} of 9.0"


def test_a_body_that_does_not_leave_ends_the_step_and_is_handed_on() -> None:
    world = World(first=1)
    body = world.effect
    failed = world.answer(Expired(body)).answer(False).result
    assert isinstance(failed, Failed)
    assert (failed.body, failed.attempt, failed.error) == (body, 1, world.note.error)
    assert world.note.delay is None


def test_a_stop_while_a_body_is_waited_for_hands_the_body_on() -> None:
    world = World()
    body = world.effect
    stopped = world.answer(Expired(body)).answer(Stopped()).result
    assert isinstance(stopped, Stopped)
    assert stopped.body is body


class Watching:
    """A watch that gives every attempt a context of its own."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []
        self.heard: list[Any] = []

    def attempt(self, number: int) -> Context:
        self.heard.append(number)
        self.contexts.append(copy_context())
        return self.contexts[-1]

    def attempted(self, number: int, error: BaseException | None) -> None:
        self.heard.append((number, error))


@pytest.mark.spec("DX-13")
def test_each_failed_attempt_that_another_follows_is_told_before_the_wait() -> None:
    told: list[tuple[Any, int, float | None]] = []
    world = World(
        max_attempts=3, on_retry=lambda transaction, note: told.append((transaction, note.attempt, note.delay))
    )
    world.fail()
    assert told == [(TX, 0, 4.0)]
    world.answer(None).fail()
    assert told == [(TX, 0, 4.0), (TX, 1, 4.0)]
    world.answer(None).fail()
    assert isinstance(world.result, Failed)
    assert len(told) == 2


@pytest.mark.spec("DX-13")
def test_an_attempt_whose_wait_goes_back_to_the_broker_is_told_and_one_that_no_other_follows_is_not() -> None:
    told: list[float | None] = []

    def on_retry(_: object, note: Note) -> None:
        told.append(note.delay)

    assert isinstance(World(defers=True, hold=1.0, on_retry=on_retry).fail().result, Deferred)
    assert told == [4.0]
    assert isinstance(World(limit=3.0, on_retry=on_retry).fail().result, Failed)
    assert told == [4.0]


def test_a_watch_supplies_the_context_and_hears_the_end_of_every_attempt() -> None:
    watch = Watching()
    world = World(backoff=0.0, watch=watch)
    assert world.effect.context is watch.contexts[0]
    error = ErgonError("no")
    world.answer(Err(error))
    assert world.effect.context is watch.contexts[1]
    world.answer(Expired(world.effect)).answer(True)
    world.answer(Ok(None))
    overdue = watch.heard[3][1]
    assert watch.heard == [0, (0, error), 1, (1, overdue), 2, (2, None)]
    assert isinstance(overdue, TimeoutError)
