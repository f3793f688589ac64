"""The retries of one step; the test sends the result of every effect itself and checks every boundary."""

from __future__ import annotations

from contextvars import Context, copy_context
from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.engine.effects import NEVER, AwaitExit, Call, Err, Expired, Interrupted, Ok, Script, Sleep
from ergon_framework.engine.retry import Deferred, Failed, FailedAttempt, Overrun, Step, run_step
from ergon_framework.errors import Category, ErgonError
from ergon_framework.failure import Deferral
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import RetryPolicy

TRANSACTION = Transaction(id="1")


def make_timeout_error(step: Step, overrun: Overrun, lifetime: float | None) -> ErgonError:
    return ErgonError(f"{step.name}: {overrun.value} of {lifetime}", category=Category.TIMEOUT)


def to_ergon_error(error: BaseException) -> ErgonError:
    assert isinstance(error, ErgonError)
    return error


def do_nothing(*_args: Any) -> None: ...


class StepHarness:
    """One step, the clock it looks at, and what it last asked for or came to."""

    def __init__(
        self, *, defers: bool | None = None, now: float = 0.0, transaction: Transaction = TRANSACTION, **options: Any
    ) -> None:
        run_options = {
            name: options.pop(name) for name in ("first", "limit", "lifetime", "observer") if name in options
        }
        step_limits = {name: options.pop(name) for name in ("max_deferral",) if name in options}
        transaction = transaction.replace(deferral=options.pop("deferral", None))
        callbacks = {name: options.pop(name) for name in ("on_retry",) if name in options}
        rules = RetryPolicy(**({"max_attempts": 5, "timeout": 60.0, "backoff": 4.0, "multiplier": 1.0} | options))
        self.now = now
        clock = Clock(monotonic=lambda: self.now, wall=lambda: 1_000.0 + self.now, random=lambda: 0.5)
        defer = {} if defers is None else {"defers": defers}
        self.step = Step(
            "process",
            do_nothing,
            rules,
            classify=to_ergon_error,
            timeout_error=make_timeout_error,
            **defer,
            **step_limits,
            **callbacks,
        )
        self.notes: list[FailedAttempt] = []
        self.script: Script[Any] = run_step(self.step, (7,), self.notes, transaction, clock, **run_options)
        self.effect: Any = None
        self.result: Any = None
        self.answer(None)

    def answer(self, answer: Any) -> StepHarness:
        try:
            self.effect = self.script.send(answer)
        except StopIteration as stop:
            self.effect, self.result = None, stop.value
        return self

    def fail(self, **classification: Any) -> StepHarness:
        return self.answer(Err(ErgonError("no", **classification)))

    @property
    def note(self) -> FailedAttempt:
        return self.notes[-1]


def test_an_attempt_is_a_call_within_its_own_scope() -> None:
    harness = StepHarness(now=3.0, timeout=60.0)
    call = harness.effect
    assert isinstance(call, Call)
    assert (call.step, call.fn, call.args, call.until, call.context) == (
        "process",
        do_nothing,
        (TRANSACTION, 7),
        63.0,
        None,
    )
    scope = call.scope
    assert scope is not None
    assert (scope.transaction, scope.step, scope.attempt, scope.deadline) == (TRANSACTION, "process", 0, 63.0)
    assert scope.clock() == 3.0


@pytest.mark.spec("DX-10")
def test_every_attempt_gets_the_payload_as_delivered() -> None:
    harness = StepHarness(transaction=(original := Transaction({"lines": [1]}, id="1")))
    for _ in range(3):
        (transaction, _), scope = harness.effect.args, harness.effect.scope
        assert transaction.payload == {"lines": [1]}
        assert scope.transaction is transaction, "what a handler finds in its scope is what it was given"
        transaction.payload["lines"].append(2)
        harness.fail().answer(None)
    assert original.payload == {"lines": [1]}


@pytest.mark.parametrize(
    "timeout, limit, until",
    [(60.0, 50.0, 50.0), (60.0, 63.0, 63.0), (60.0, 64.0, 63.0), (None, 50.0, 50.0), (None, NEVER, NEVER)],
)
def test_an_attempt_ends_at_its_own_limit_or_the_lifecycles(timeout: float | None, limit: float, until: float) -> None:
    call = StepHarness(now=3.0, timeout=timeout, limit=limit).effect
    assert (call.until, call.scope.deadline) == (until, None if until == NEVER else until)


def test_no_attempt_starts_when_the_lifecycle_ends() -> None:
    harness = StepHarness(now=5.0, limit=5.0, lifetime=4.0, first=2)
    assert isinstance(harness.result, Failed)
    assert (harness.result.attempt, harness.result.abandoned_call, harness.notes) == (2, None, [])
    assert str(harness.result.error) == "process: unstarted of 4.0"
    assert harness.result.error.category is Category.TIMEOUT
    assert StepHarness(now=4.0, limit=5.0).effect.until == 5.0, "a moment earlier it is"


@pytest.mark.parametrize("answer", [Ok("x"), Interrupted()])
def test_a_value_or_a_stop_is_the_result_of_the_step(answer: Any) -> None:
    harness = StepHarness().answer(answer)
    assert harness.result is answer
    assert harness.notes == []


def test_a_failed_attempt_is_recorded_with_its_number_and_delay() -> None:
    harness = StepHarness(now=10.0)
    error = ErgonError("no")
    harness.now = 12.0
    harness.answer(Err(error))
    note = harness.note
    assert (note.step, note.attempt, note.error, note.occurred_at, note.delay) == ("process", 0, error, 1_012.0, 4.0)
    assert isinstance(harness.effect, Sleep)
    assert harness.effect.until == 16.0
    harness.now = 16.0
    next_call = harness.answer(None).effect
    assert (next_call.until, next_call.scope.attempt, next_call.scope.deadline) == (76.0, 1, 76.0)
    harness.fail()
    assert [note.attempt for note in harness.notes] == [0, 1]
    assert harness.answer(None).effect.scope.attempt == 2


def test_attempt_numbers_continue_from_earlier_deliveries() -> None:
    harness = StepHarness(first=3)
    assert harness.effect.scope.attempt == 3
    harness.fail()
    assert harness.answer(None).effect.scope.attempt == 4
    harness.fail()
    assert isinstance(harness.result, Failed)
    assert (harness.result.attempt, [note.attempt for note in harness.notes]) == (4, [3, 4])


def test_no_wait_follows_the_last_attempt() -> None:
    harness = StepHarness(max_attempts=2)
    harness.fail()
    harness.answer(None)
    error = ErgonError("again")
    harness.answer(Err(error))
    failed = harness.result
    assert isinstance(failed, Failed)
    assert (failed.error, failed.attempt, failed.abandoned_call, harness.note.delay) == (error, 1, None, None)


@pytest.mark.parametrize("classification", [{"category": Category.BUSINESS}, {"final": True}])
def test_a_permanent_error_is_not_retried(classification: dict[str, Any]) -> None:
    harness = StepHarness().fail(**classification)
    assert isinstance(harness.result, Failed)
    assert (harness.result.attempt, harness.note.delay) == (0, None)


def test_a_stop_during_the_wait_ends_the_step() -> None:
    stopped, harness = Interrupted(), StepHarness().fail()
    assert harness.note.delay == 4.0
    assert harness.answer(stopped).result is stopped
    assert harness.note.delay is None, "a wait that was interrupted is none"


def test_a_delay_of_zero_does_not_sleep() -> None:
    harness = StepHarness(backoff=0.0).fail()
    assert isinstance(harness.effect, Call)
    assert (harness.effect.scope.attempt, harness.note.delay) == (1, 0.0)


def test_a_short_delay_sleeps() -> None:
    harness = StepHarness(backoff=0.25).fail()
    assert isinstance(harness.effect, Sleep)
    assert harness.effect.until == 0.25


@pytest.mark.parametrize("retry_after, expected_delay", [(None, 4.0), (3.0, 4.0), (9.0, 9.0)])
def test_the_delay_is_the_longer_of_backoff_and_retry_after(retry_after: float | None, expected_delay: float) -> None:
    harness = StepHarness().fail(retry_after=retry_after)
    assert (harness.effect.until, harness.note.delay) == (expected_delay, expected_delay)


def test_an_error_without_retry_after_adds_no_delay() -> None:
    assert StepHarness(backoff=0.5).fail().effect.until == 0.5


def test_jitter_changes_the_delay() -> None:
    harness = StepHarness(jitter=1.0)
    assert harness.fail().effect.until == 4.0, "a half is the middle"


@pytest.mark.parametrize("max_inline_delay, is_deferred", [(3.0, True), (4.0, False), (5.0, False)])
def test_a_delay_above_max_inline_delay_is_deferred_to_the_broker(max_inline_delay: float, is_deferred: bool) -> None:
    harness = StepHarness(defers=True, max_inline_delay=max_inline_delay, first=1)
    error = ErgonError("no")
    harness.answer(Err(error))
    assert harness.note.delay == 4.0
    if is_deferred:
        assert isinstance(harness.result, Deferred)
        assert (harness.result.error, harness.result.attempt, harness.result.delay) == (error, 1, 4.0)
    else:
        assert isinstance(harness.effect, Sleep)


@pytest.mark.spec("PRV-31")
@pytest.mark.parametrize("retry_after, expected_delay", [(None, 4.0), (3.0, 4.0), (9.0, 9.0)])
@pytest.mark.parametrize(
    "options", [{}, {"max_inline_delay": 30.0}, {"max_attempts": 1}, {"max_attempts": 3, "first": 2}]
)
def test_a_later_error_is_deferred_immediately_and_costs_no_attempt(
    options: dict[str, Any], retry_after: float | None, expected_delay: float
) -> None:
    harness = StepHarness(defers=True, **options)
    error = ErgonError("not now", not_attempted=True, retry_after=retry_after)
    harness.answer(Err(error))
    result = harness.result
    assert isinstance(result, Deferred)
    assert (result.error, result.attempt, result.delay) == (error, options.get("first", 0), expected_delay)
    assert harness.notes == []


@pytest.mark.spec("PRV-31")
def test_attempts_before_a_later_error_stay_recorded() -> None:
    harness = StepHarness(defers=True).fail()
    assert isinstance(harness.answer(None).fail(not_attempted=True).result, Deferred)
    assert [(note.attempt, note.delay) for note in harness.notes] == [(0, 4.0)]


@pytest.mark.spec("PRV-31")
@pytest.mark.parametrize("classification", [{"category": Category.BUSINESS}, {"final": True}])
def test_a_permanent_error_is_final_also_if_it_asks_for_later(classification: dict[str, Any]) -> None:
    assert isinstance(StepHarness(defers=True).fail(not_attempted=True, **classification).result, Failed)


def test_a_step_without_deferral_retries_a_later_error_like_any_other() -> None:
    harness = StepHarness(defers=False).fail(not_attempted=True, retry_after=9.0)
    assert (harness.effect.until, harness.note.delay) == (9.0, 9.0)


# -- deferred while a service is unavailable -------------------------------------------------------

#: The clock of a World that begins at 0 shows this time of day.
WALL_TIME_AT_START = 1_000.0


def make_deferral(count: int = 1, *, since: float = WALL_TIME_AT_START, exempt: float = 0.0) -> Deferral:
    return Deferral(count=count, since=since, at=since, until=since + exempt + 60.0, exempt=exempt, error="before")


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_attempts": 1}, {"max_attempts": 3, "first": 2}])
def test_a_temporary_failure_is_deferred_and_costs_no_attempt(options: dict[str, Any], final: bool) -> None:
    harness = StepHarness(defers=True, max_deferral=60.0, now=5.0, **options)
    error = ErgonError("the bank is down", temporary=True, final=final, code="down")
    harness.answer(Err(error))
    result = harness.result
    assert isinstance(result, Deferred)
    assert (result.error, result.attempt, result.delay) == (error, options.get("first", 0), 4.0)
    assert result.deferral == Deferral(
        count=1, since=1005.0, at=1005.0, until=1065.0, code="down", error="the bank is down"
    )
    assert harness.notes == []


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize(
    "count, retry_after, expected_delay", [(1, None, 4.0), (2, None, 8.0), (4, None, 20.0), (2, 9.0, 9.0)]
)
def test_each_deferral_waits_longer_up_to_the_cap_and_at_least_retry_after(
    count: int, retry_after: float | None, expected_delay: float
) -> None:
    rules = {"backoff": 2.0, "multiplier": 2.0, "cap": 20.0}
    harness = StepHarness(defers=True, max_deferral=60.0, now=30.0, deferral=make_deferral(count, exempt=7.0), **rules)
    result = harness.fail(temporary=True, retry_after=retry_after).result
    assert (result.delay, result.deferral.count) == (expected_delay, count + 1)
    assert (result.deferral.since, result.deferral.at, result.deferral.until) == (1000.0, 1030.0, 1067.0)
    assert result.deferral.exempt == 7.0


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize(
    "now, exempt, is_final", [(59.0, 0.0, False), (60.0, 0.0, True), (66.0, 7.0, False), (67.0, 7.0, True)]
)
def test_after_max_deferral_a_temporary_failure_is_a_failed_attempt(now: float, exempt: float, is_final: bool) -> None:
    harness = StepHarness(defers=True, max_deferral=60.0, now=now, deferral=make_deferral(exempt=exempt))
    result = harness.fail(temporary=True, final=True).result
    assert isinstance(result, Failed if is_final else Deferred)
    assert len(harness.notes) == is_final


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize("rules", [{"defers": True, "max_deferral": 0.0}, {"defers": True}, {"defers": False}])
def test_without_deferrals_a_temporary_failure_is_like_any_other(rules: dict[str, Any]) -> None:
    assert isinstance(StepHarness(**rules).fail(temporary=True, final=True).result, Failed)
    assert isinstance(StepHarness(**rules).fail(temporary=True).effect, Sleep)


@pytest.mark.spec("DX-27")
def test_a_business_failure_is_never_temporary() -> None:
    harness = StepHarness(defers=True, max_deferral=60.0).fail(temporary=True, category=Category.BUSINESS)
    assert isinstance(harness.result, Failed)


@pytest.mark.spec("DX-27", "PRV-31")
def test_the_wait_for_a_circuit_breaker_does_not_count_towards_max_deferral() -> None:
    harness = StepHarness(defers=True, max_deferral=60.0, now=500.0, deferral=make_deferral(3, exempt=7.0))
    result = harness.fail(not_attempted=True, temporary=True, retry_after=30.0).result
    assert (result.delay, result.deferral) == (30.0, make_deferral(3, exempt=37.0))
    assert StepHarness(defers=True, max_deferral=60.0).fail(not_attempted=True).result.deferral is None


@pytest.mark.spec("DX-27")
def test_a_long_wait_of_a_failed_attempt_keeps_the_deferrals() -> None:
    harness = StepHarness(defers=True, max_inline_delay=0.0, deferral=make_deferral(2))
    assert harness.fail().result.deferral == make_deferral(2)


@pytest.mark.parametrize("defers", [None, False])
def test_a_step_without_deferral_sleeps_for_any_delay(defers: bool | None) -> None:
    assert isinstance(StepHarness(defers=defers, max_inline_delay=0.0).fail().effect, Sleep)


@pytest.mark.parametrize("limit, is_retried", [(14.0, False), (14.5, True)])
def test_a_wait_that_reaches_the_end_of_the_lifecycle_is_not_started(limit: float, is_retried: bool) -> None:
    harness = StepHarness(limit=limit, first=1)
    harness.now = 10.0
    error = ErgonError("no")
    harness.answer(Err(error))
    if is_retried:
        assert (harness.effect.until, harness.note.delay) == (14.0, 4.0)
    else:
        assert isinstance(harness.result, Failed)
        assert (harness.result.error, harness.result.attempt, harness.result.abandoned_call) == (error, 1, None)
        assert harness.note.delay is None


@pytest.mark.parametrize("now, is_deferred", [(9.0, True), (10.0, False), (11.0, False)])
def test_nothing_is_deferred_after_the_end_of_the_lifecycle(now: float, is_deferred: bool) -> None:
    harness = StepHarness(defers=True, max_inline_delay=0.0, limit=10.0, first=1)
    harness.now = now
    harness.fail()
    assert isinstance(harness.result, Deferred if is_deferred else Failed)
    assert harness.result.attempt == 1
    assert harness.note.delay == (4.0 if is_deferred else None)


def test_a_timed_out_call_gets_its_grace_to_exit() -> None:
    harness = StepHarness(now=10.0, timeout=2.5, exit_grace=5.0)
    call = harness.effect
    harness.now = 13.0
    await_exit_effect = harness.answer(Expired(call)).effect
    assert isinstance(await_exit_effect, AwaitExit)
    assert (await_exit_effect.call, await_exit_effect.until) == (call, 18.0)
    assert str(harness.note.error) == "process: attempt of None"
    assert (harness.note.error.category, harness.note.occurred_at) == (Category.TIMEOUT, 1_013.0)
    harness.now = 15.0
    assert harness.answer(True).effect.until == 19.0, "the wait begins when it has left"


@pytest.mark.spec("DX-11")
@pytest.mark.parametrize(
    "timeout, limit, limit_name",
    [(2.5, NEVER, "attempt"), (2.5, 12.5, "attempt"), (2.5, 12.4, "lifecycle"), (None, 12.5, "lifecycle")],
)
def test_a_timeout_names_the_limit_that_passed(timeout: float | None, limit: float, limit_name: str) -> None:
    harness = StepHarness(now=10.0, timeout=timeout, limit=limit, lifetime=9.0)
    harness.answer(Expired(harness.effect))
    assert str(harness.note.error) == f"process: {limit_name} of 9.0"


def test_a_call_that_does_not_exit_ends_the_step_and_is_in_its_result() -> None:
    harness = StepHarness(first=1)
    call = harness.effect
    failed = harness.answer(Expired(call)).answer(False).result
    assert isinstance(failed, Failed)
    assert (failed.abandoned_call, failed.attempt, failed.error) == (call, 1, harness.note.error)
    assert harness.note.delay is None


def test_a_stop_during_the_wait_for_exit_has_the_abandoned_call() -> None:
    harness = StepHarness()
    call = harness.effect
    stopped = harness.answer(Expired(call)).answer(Interrupted()).result
    assert isinstance(stopped, Interrupted)
    assert stopped.call is call


class AttemptObserver:
    """A watch that gives every attempt a context of its own."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []
        self.events: list[Any] = []

    def on_attempt_start(self, number: int) -> Context:
        self.events.append(number)
        self.contexts.append(copy_context())
        return self.contexts[-1]

    def on_attempt_end(self, number: int, error: BaseException | None) -> None:
        self.events.append((number, error))


@pytest.mark.spec("DX-13")
def test_on_retry_is_called_before_each_wait_for_another_attempt() -> None:
    retries: list[tuple[Any, int, float | None]] = []
    harness = StepHarness(
        max_attempts=3, on_retry=lambda transaction, note: retries.append((transaction, note.attempt, note.delay))
    )
    harness.fail()
    assert retries == [(TRANSACTION, 0, 4.0)]
    harness.answer(None).fail()
    assert retries == [(TRANSACTION, 0, 4.0), (TRANSACTION, 1, 4.0)]
    harness.answer(None).fail()
    assert isinstance(harness.result, Failed)
    assert len(retries) == 2


@pytest.mark.spec("DX-13")
def test_on_retry_is_called_for_a_deferred_attempt_and_not_for_the_last() -> None:
    delays: list[float | None] = []

    def on_retry(_: object, note: FailedAttempt) -> None:
        delays.append(note.delay)

    assert isinstance(StepHarness(defers=True, max_inline_delay=1.0, on_retry=on_retry).fail().result, Deferred)
    assert delays == [4.0]
    assert isinstance(StepHarness(limit=3.0, on_retry=on_retry).fail().result, Failed)
    assert delays == [4.0]


def test_an_observer_supplies_the_context_and_gets_the_end_of_every_attempt() -> None:
    observer = AttemptObserver()
    harness = StepHarness(backoff=0.0, observer=observer)
    assert harness.effect.context is observer.contexts[0]
    error = ErgonError("no")
    harness.answer(Err(error))
    assert harness.effect.context is observer.contexts[1]
    harness.answer(Expired(harness.effect)).answer(True)
    harness.answer(Ok(None))
    overdue = observer.events[3][1]
    assert observer.events == [0, (0, error), 1, (1, overdue), 2, (2, None)]
    assert isinstance(overdue, TimeoutError)
