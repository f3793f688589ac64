"""The lifecycle's script, answered by hand: what each step is given, and what the outcome says in the end."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Later, Release
from ergon_framework.engine.attempts import Note, Overrun, Step
from ergon_framework.engine.effects import Call, Gone, Sleep
from ergon_framework.engine.outcome import Err, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.errors import Category, ConnectionLost, ErgonError
from ergon_framework.failure import Attempt, describe
from ergon_framework.task.exceptions import BusinessError, TransactionException
from ergon_framework.task.lifecycle import Course, classify, classify_handler, expired, history, lifecycle
from ergon_framework.task.mixins.policies import RetryPolicy
from ergon_framework.task.report import Kind, Outcome
from ergon_framework.transaction import Transaction


def process(*_: Any) -> None: ...
def success(*_: Any) -> None: ...
def exception(*_: Any) -> None: ...


class Run:
    """One lifecycle and its clock, which begins at 100."""

    def __init__(
        self,
        transaction: Transaction | None = None,
        *,
        timeout: float | None = None,
        plain: bool = False,
        defers: bool = True,
        watch: Any = None,
        **retry: Any,
    ) -> None:
        self.now = 100.0
        self.transaction = transaction or Transaction("1")
        rules = RetryPolicy(**({"max_attempts": 1} | retry))
        handler = {"classify": classify_handler, "expired": expired}
        course = Course(
            Step("process", process, rules, classify=classify, expired=expired, defers=defers),
            Step("success", success, rules, **handler),
            Step("exception", exception, rules, **handler),
            senses=Senses(clock=lambda: self.now, wall=lambda: 1_000.0 + self.now, dice=lambda: 0.5),
            timeout=timeout,
            plain=plain,
        )
        self.script = lifecycle(course, self.transaction, watch)
        self.effect: Any = next(self.script)
        self.outcome: Any = None

    def on(self, answer: Any, *, after: float = 0.0) -> Run:
        self.now += after
        try:
            self.effect = self.script.send(answer)
        except StopIteration as stop:
            self.effect, self.outcome = None, stop.value
        return self

    @property
    def step(self) -> str | None:
        return self.effect.step if isinstance(self.effect, Call) else None


# -- verdicts -------------------------------------------------------------------------------------


def test_a_failure_that_has_its_verdict_keeps_it() -> None:
    error = BusinessError("no")
    assert classify(error) is error


def test_the_verdict_of_our_other_errors_is_carried_over() -> None:
    cause = ConnectionLost("down", category=Category.TIMEOUT, retry_after=7.0, final=True)
    error = classify(cause)
    assert (type(error), str(error), error.__cause__) == (TransactionException, "down", cause)
    verdict = (error.category, error.retry_after, error.final, error.code)
    assert verdict == (Category.TIMEOUT, 7.0, True, "connection_lost")


def test_a_failure_of_foreign_code_is_a_system_failure_that_names_its_type() -> None:
    cause = ValueError("no")
    error = classify(cause)
    assert (str(error), error.category, error.__cause__) == ("ValueError: no", Category.SYSTEM, cause)
    assert (error.retry_after, error.final, error.code) == (None, False, None)


def test_a_handlers_failure_is_always_a_system_failure() -> None:
    own = TransactionException("no")
    assert classify_handler(own) is own
    cause = TransactionException("no", Category.BUSINESS, retry_after=7.0, final=True, code="odd")
    error = classify_handler(cause)
    assert (str(error), error.category, error.__cause__) == ("no", Category.SYSTEM, cause)
    assert (error.retry_after, error.final, error.code) == (7.0, True, "odd")
    assert classify_handler(ErgonError("lost", code="c")).code == "c"
    foreign = classify_handler(ValueError("no"))
    assert (str(foreign), foreign.category, foreign.code) == ("ValueError: no", Category.SYSTEM, None)


def test_a_verdict_that_makes_no_sense_is_that_of_foreign_code() -> None:
    for kind in (TransactionException, ErgonError):
        cause = kind("no", code="c")
        cause.retry_after = "soon"  # type: ignore[assignment]
        for error in (classify(cause), classify_handler(cause)):
            assert (str(error), error.__cause__) == (f"{kind.__name__}: no", cause)
            assert (error.category, error.retry_after, error.code) == (Category.SYSTEM, None, None)


@pytest.mark.spec("DX-09")
def test_a_group_of_business_failures_is_one() -> None:
    group = ExceptionGroup(
        "two orders", [BusinessError("sold out"), ExceptionGroup("inner", [BusinessError("no card")])]
    )
    error = classify(group)
    assert (error.category, error.final, error.later, error.__cause__) == (Category.BUSINESS, False, False, group)
    assert str(error) == "two orders (2 sub-exceptions): BusinessError: sold out; BusinessError: no card"
    handled = classify_handler(group)
    assert (handled.category, str(handled), handled.__cause__) == (Category.SYSTEM, str(error), group)


@pytest.mark.spec("DX-09")
@pytest.mark.parametrize("other", [ValueError("broken"), TransactionException("late", Category.TIMEOUT), SystemExit(3)])
def test_a_group_with_another_failure_is_a_system_failure(other: BaseException) -> None:
    group = BaseExceptionGroup("mixed", [BusinessError("sold out"), BaseExceptionGroup("inner", [other])])
    error = classify(group)
    assert (error.category, error.final, error.later) == (Category.SYSTEM, False, False)
    assert str(error) == f"mixed (2 sub-exceptions): BusinessError: sold out; {type(other).__name__}: {other}"
    assert classify_handler(group).category is Category.SYSTEM


@pytest.mark.spec("DX-09")
def test_a_group_of_timeouts_is_a_system_failure() -> None:
    assert classify(ExceptionGroup("late", [TransactionException(Category.TIMEOUT)])).category is Category.SYSTEM


@pytest.mark.spec("DX-09")
@pytest.mark.parametrize(
    "members, final, later, retry_after, code",
    [
        ([{"final": True, "code": "down"}, {"final": True, "code": "down"}], True, False, None, "down"),
        ([{"final": True}, {}], False, False, None, None),
        ([{"final": True}, {"category": Category.BUSINESS}], True, False, None, None),
        ([{"final": True, "category": Category.BUSINESS}], True, False, None, None),
        ([{"later": True, "retry_after": 3.0}, {"later": True, "retry_after": 7.0}], False, True, 7.0, None),
        ([{"later": True, "retry_after": 3.0}, {"code": "busy"}], False, False, 3.0, None),
        ([{"code": "a"}, {"code": "b"}], False, False, None, None),
    ],
)
def test_a_group_is_tried_again_as_its_members_permit(
    members: list[dict[str, Any]], final: bool, later: bool, retry_after: float | None, code: str | None
) -> None:
    error = classify(ExceptionGroup("g", [TransactionException("x", **member) for member in members]))
    assert (error.final, error.later, error.retry_after, error.code) == (final, later, retry_after, code)


@pytest.mark.spec("DX-09", "DX-27")
@pytest.mark.parametrize(
    "members, temporary",
    [
        ([{"temporary": True}], True),
        ([{"temporary": True, "final": True}, {"later": True}], True),
        ([{"temporary": True}, {}], False),
        ([{}], False),
    ],
)
def test_a_group_may_be_deferred_if_each_member_may(members: list[dict[str, Any]], temporary: bool) -> None:
    error = classify(ExceptionGroup("calls", [ErgonError("no", **verdict) for verdict in members]))
    assert error.temporary is temporary


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize("temporary", [True, False])
def test_an_error_of_ours_keeps_whether_it_is_temporary(temporary: bool) -> None:
    assert classify(ErgonError("away", temporary=temporary)).temporary is temporary


@pytest.mark.spec("DX-09")
def test_a_member_whose_verdict_makes_no_sense_is_a_system_failure() -> None:
    odd = BusinessError("no")
    odd.retry_after = "soon"  # type: ignore[assignment]
    error = classify(ExceptionGroup("g", [odd, BusinessError("no")]))
    assert (error.category, error.retry_after) == (Category.SYSTEM, None)


@pytest.mark.spec("DX-09")
def test_the_texts_of_a_large_group_are_bounded() -> None:
    one = str(classify(ExceptionGroup("g" * 900, [ValueError("v" * 900)])))
    assert one == f"{'g' * 79}…: ValueError: {'v' * 387}…"
    assert describe(classify(ExceptionGroup("g" * 900, [ValueError("v" * 900)]))) == one, "a record keeps all of it"
    exact = ExceptionGroup("g", [ValueError("v" * 388)])
    assert str(classify(exact)) == f"g (1 sub-exception): ValueError: {'v' * 388}"
    five = ExceptionGroup("g", [ValueError(str(number)) for number in range(5)])
    assert str(classify(five)).endswith("; ValueError: 4")
    seven = ExceptionGroup("g", [ValueError(str(number) * 900) for number in range(7)])
    assert str(classify(seven)).endswith(f"; ValueError: {'4' * 67}…; and 2 more")


@pytest.mark.spec("DX-09")
def test_a_group_may_be_nested_deeper_than_functions_call() -> None:
    group = ExceptionGroup("inner", [BusinessError("no")])
    for _ in range(5_000):
        group = ExceptionGroup("outer", [group])
    assert classify(group).category is Category.BUSINESS


@pytest.mark.spec("DX-11")
def test_a_timeout_names_its_limit_and_the_key_of_the_policy() -> None:
    step = Step("success", abs, RetryPolicy(timeout=1.5), classify=classify_handler, expired=expired)
    finish = "did not finish within"
    for overrun, code, message in (
        (Overrun.ATTEMPT, "step_timeout", f"success {finish} 1.5 s (steps.success.retry.timeout)"),
        (
            Overrun.LIFECYCLE,
            "lifecycle_timeout",
            f"success {finish} the 5 s of its transaction (loop.transaction_timeout)",
        ),
        (
            Overrun.UNSTARTED,
            "lifecycle_timeout",
            "success did not start within the 5 s of its transaction (loop.transaction_timeout)",
        ),
    ):
        error = expired(step, overrun, 5.0)
        assert (error.category, error.code, str(error)) == (Category.TIMEOUT, code, message)


# -- success --------------------------------------------------------------------------------------


def test_the_success_handler_is_given_the_result_and_both_are_measured() -> None:
    run = Run()
    assert (run.effect.fn, run.effect.args, run.effect.until) == (process, (run.transaction,), 160.0)
    run.on(Ok("made"), after=2.0)
    assert (run.effect.fn, run.effect.args, run.effect.until) == (success, (run.transaction, "made"), 162.0)
    outcome = run.on(Ok("ignored"), after=3.0).outcome
    assert (outcome.kind, outcome.processed, outcome.result) == (Kind.SUCCEEDED, True, "made")
    assert outcome.durations == {"process": 2.0, "success": 3.0}
    assert (outcome.attempts, outcome.error, outcome.settlement, outcome.reason) == (1, None, None, None)


@pytest.mark.parametrize(
    "processed, handled, settled",
    [
        (None, None, None),
        (Later(3.0), None, Later(3.0)),
        (Later(3.0), "text", Later(3.0)),
        (Later(3.0), DeadLetter("odd"), DeadLetter("odd")),
        ("text", Ack(), Ack()),
        ("text", Release(), None),
    ],
)
def test_the_success_handler_has_the_last_word_on_the_settlement(processed: Any, handled: Any, settled: Any) -> None:
    assert Run().on(Ok(processed)).on(Ok(handled)).outcome.settlement == settled


def test_without_a_success_handler_none_is_called() -> None:
    outcome = Run(plain=True).on(Ok(Later(3.0)), after=2.0).outcome
    assert (outcome.kind, outcome.settlement) == (Kind.SUCCEEDED, Later(3.0))
    assert outcome.durations == {"process": 2.0}


def test_the_lifecycles_time_counts_from_its_start() -> None:
    run = Run(timeout=10.0)
    assert run.effect.until == 110.0
    run.on(Ok(None), after=4.0)
    assert run.effect.until == 110.0


class Watching:
    """A watch that writes down what it is told."""

    def __init__(self, *, recording: bool = True) -> None:
        self.recording = recording
        self.told: list[Any] = []
        self.context = contextvars.Context()

    def step(self, step: Step) -> Watching:
        self.told.append(step.name)
        return self

    def attempt(self, number: int) -> contextvars.Context:
        return self.context

    def attempted(self, number: int, error: BaseException | None) -> None:
        self.told.append(number)

    def stepped(self, done: Any) -> None:
        self.told.append(type(done).__name__)

    def ended(self, outcome: Outcome) -> None:
        self.told.append(outcome)


def test_a_watch_is_told_of_every_step_and_of_the_end() -> None:
    watch = Watching()
    run = Run(watch=watch)
    assert run.effect.context is watch.context
    run.on(Ok(None))
    assert run.effect.context is watch.context
    outcome = run.on(Err(ValueError())).on(Ok(None)).outcome
    assert watch.told == ["process", 0, "Ok", "success", 0, "Failed", "exception", 0, "Ok", outcome]


@pytest.mark.parametrize("recording", [True, False])
def test_a_success_handler_that_does_nothing_is_called_only_where_it_is_recorded(recording: bool) -> None:
    run = Run(plain=True, watch=Watching(recording=recording)).on(Ok(None))
    assert run.step == ("success" if recording else None)


# -- failure --------------------------------------------------------------------------------------


def test_the_exception_handler_is_given_the_error_and_its_time_is_its_own() -> None:
    run = Run(timeout=10.0)
    run.on(Err(cause := ValueError("no")), after=10.0)
    error = run.effect.args[1]
    assert (run.effect.fn, run.effect.args[0], run.effect.until) == (exception, run.transaction, 170.0)
    assert (error.__cause__, error.still_running) == (cause, False)
    outcome = run.on(Ok(Later(2.0)), after=1.0).outcome
    assert (outcome.kind, outcome.error, outcome.processed) == (Kind.FAILED, error, False)
    assert (outcome.settlement, outcome.attempts, outcome.body) == (Later(2.0), 1, None)
    assert outcome.durations == {"process": 10.0, "exception": 1.0}


def test_a_success_handler_that_fails_does_not_undo_the_process() -> None:
    outcome = Run().on(Ok("made")).on(Err(ValueError())).on(Ok(None)).outcome
    assert (outcome.kind, outcome.processed, outcome.attempts, outcome.result) == (Kind.FAILED, True, 1, "made")


def test_an_exception_handler_that_fails_leaves_both_errors() -> None:
    run = Run().on(Err(ValueError("first")))
    outcome = run.on(Err(ValueError("second"))).outcome
    assert outcome.kind is Kind.HANDLER_FAILED
    assert (str(outcome.error), str(outcome.handler_error)) == ("ValueError: first", "ValueError: second")
    assert outcome.settlement is None


def test_a_body_that_stays_is_told_to_the_handler_and_kept() -> None:
    run = Run()
    body = run.effect
    run.on(Expired(body), after=60.0)
    assert isinstance(run.effect, Gone)
    run.on(False)
    assert run.effect.args[1].still_running
    outcome = run.on(Ok(None)).outcome
    assert (outcome.kind, outcome.body, outcome.still_running) == (Kind.FAILED, body, True)


def test_the_last_body_that_stays_is_the_one_to_wait_for() -> None:
    run = Run()
    first = run.effect
    second = run.on(Expired(first), after=60.0).on(False).effect
    outcome = run.on(Expired(second), after=60.0).on(False).outcome
    assert (outcome.kind, outcome.body) == (Kind.HANDLER_FAILED, second)
    run = Run()
    first = run.effect
    outcome = run.on(Expired(first), after=60.0).on(False).on(Err(ValueError())).outcome
    assert (outcome.kind, outcome.body) == (Kind.HANDLER_FAILED, first)


# -- attempts of earlier deliveries ---------------------------------------------------------------


@pytest.mark.parametrize("carried, number", [(0, 0), (1, 1), (2, 2), (3, 2), (9, 2)])
def test_attempts_of_earlier_deliveries_count_but_one_is_always_made(carried: int, number: int) -> None:
    run = Run(Transaction("1", attempts=carried), max_attempts=3)
    assert run.effect.scope.attempt == number
    assert run.on(Ok(None)).on(Ok(None)).outcome.attempts == carried + 1


def test_what_is_produced_has_no_earlier_attempts() -> None:
    run = Run(Transaction("1", attempts=2), max_attempts=3, defers=False, backoff=0.0)
    assert run.effect.scope.attempt == 0
    run.on(Err(ValueError()))
    assert run.on(Ok(None)).on(Ok(None)).outcome.attempts == 2


def test_every_failed_attempt_counts() -> None:
    run = Run(Transaction("1", attempts=1), max_attempts=3, backoff=0.0).on(Err(ValueError()))
    outcome = run.on(Err(ValueError())).on(Ok(None)).outcome
    assert (outcome.kind, outcome.attempts, len(outcome.notes)) == (Kind.FAILED, 3, 2)


def test_a_long_wait_goes_back_to_the_broker_with_all_that_was_tried() -> None:
    past = Attempt(attempt=0, category=Category.SYSTEM)
    run = Run(Transaction("1", attempts=1, history=(past,)), max_attempts=5, backoff=40.0, cap=0.0)
    outcome = run.on(Err(ErgonError("busy", code="b")), after=1.0).outcome
    assert outcome.kind is Kind.DEFERRED
    assert (str(outcome.error), outcome.attempts) == ("busy", 2)
    now = Attempt(attempt=1, category=Category.SYSTEM, code="b", error="busy", at=1_101.0, delay=80.0)
    assert outcome.settlement == Later(80.0, attempts=2, history=(past, now))


# -- stopped --------------------------------------------------------------------------------------


def test_a_stopped_lifecycle_gives_back_what_it_got() -> None:
    run = Run(Transaction("1", attempts=1), max_attempts=4, backoff=1.0).on(Err(ValueError()))
    assert isinstance(run.effect, Sleep)
    outcome = run.on(Stopped()).outcome
    assert (outcome.kind, outcome.reason, outcome.attempts) == (Kind.RELEASED, "stop", 1)
    assert (outcome.error, outcome.body, outcome.settlement) == (None, None, None)


def test_a_stopped_body_is_the_one_to_wait_for() -> None:
    run = Run()
    body = run.effect
    outcome = run.on(Stopped(body)).outcome
    assert (outcome.kind, outcome.body) == (Kind.RELEASED, body)


def test_a_stopped_exception_handler_leaves_no_error_but_every_body() -> None:
    run = Run()
    first = run.effect
    second = run.on(Expired(first), after=60.0).on(False).effect
    outcome = run.on(Stopped(second)).outcome
    assert (outcome.kind, outcome.error, outcome.body) == (Kind.RELEASED, None, second)
    run = Run()
    first = run.effect
    outcome = run.on(Expired(first), after=60.0).on(False).on(Stopped()).outcome
    assert outcome.body is first


def test_a_stopped_success_handler_gives_it_back_though_it_was_processed() -> None:
    outcome = Run().on(Ok("made")).on(Stopped()).outcome
    assert (outcome.kind, outcome.processed, outcome.attempts) == (Kind.RELEASED, True, 0)


# -- history --------------------------------------------------------------------------------------


def test_the_history_is_the_last_ten_attempts_at_the_work_itself() -> None:
    past = tuple(Attempt(attempt=number, category=Category.SYSTEM) for number in range(9))
    outcome = Outcome(Transaction("1", history=past))
    error = BusinessError("no", code="c")
    steps = ("process", "success", "process", "exception")
    outcome.notes = [Note(step, number, error, at=float(number)) for number, step in enumerate(steps)]
    outcome.notes[2].delay = 4.0
    made = history(outcome)
    assert made[:8] == past[1:]
    new = {"category": Category.BUSINESS, "code": "c", "error": "no"}
    assert made[8:] == (Attempt(attempt=0, at=0.0, **new), Attempt(attempt=2, at=2.0, delay=4.0, **new))


# -- whether the work had begun ---------------------------------------------------------------------


@pytest.mark.spec("DX-02")
def test_a_stop_before_the_call_leaves_it_unstarted_and_one_during_the_call_does_not() -> None:
    before = Run().on(Stopped()).outcome
    assert (before.kind, before.started) == (Kind.RELEASED, False)
    during = Run()
    outcome = during.on(Stopped(during.effect)).outcome
    assert (outcome.kind, outcome.started) == (Kind.RELEASED, True)


@pytest.mark.spec("DX-02")
def test_a_stop_between_two_attempts_leaves_it_started() -> None:
    run = Run(max_attempts=2).on(Err(ValueError("down")))
    assert isinstance(run.effect, Sleep)
    assert run.on(Stopped()).outcome.started


@pytest.mark.spec("DX-02")
def test_a_deferred_transaction_was_called() -> None:
    outcome = Run().on(Err(ErgonError("closed", later=True))).outcome
    assert (outcome.kind, outcome.started) == (Kind.DEFERRED, True)


@pytest.mark.spec("DX-02")
def test_a_stop_during_a_handler_leaves_it_started() -> None:
    assert Run().on(Ok(1)).on(Stopped()).outcome.started
    assert Run().on(Err(ValueError("no"))).on(Stopped()).outcome.started
