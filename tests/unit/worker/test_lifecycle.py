"""The script of a lifecycle; the test sends every result and checks what each step receives, and the outcome."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest

from ergon_framework.clock import Clock
from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Release
from ergon_framework.engine.effects import AwaitExit, Call, Err, Expired, Interrupted, Ok, Sleep
from ergon_framework.engine.retry import FailedAttempt, Overrun, Step
from ergon_framework.errors import Category, ConnectionLostError, ErgonError
from ergon_framework.failure import Attempt, describe_error
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError, TransactionException
from ergon_framework.worker.lifecycle import (
    LifecycleSpec,
    classify,
    classify_handler,
    run_lifecycle,
    timeout_error,
)
from ergon_framework.worker.policies import RetryPolicy
from ergon_framework.worker.report import Outcome, OutcomeKind, attempt_history


def process(*_: Any) -> None: ...
def success(*_: Any) -> None: ...
def exception(*_: Any) -> None: ...


class LifecycleHarness:
    """One lifecycle and its clock, which begins at 100."""

    def __init__(
        self,
        transaction: Transaction | None = None,
        *,
        timeout: float | None = None,
        plain: bool = False,
        defers: bool = True,
        observer: Any = None,
        **retry: Any,
    ) -> None:
        self.now = 100.0
        self.transaction = transaction or Transaction(id="1")
        retry_policy = RetryPolicy(**({"max_attempts": 1} | retry))
        handler = {"classify": classify_handler, "timeout_error": timeout_error}
        spec = LifecycleSpec(
            Step("process", process, retry_policy, classify=classify, timeout_error=timeout_error, defers=defers),
            Step("success", success, retry_policy, **handler),
            Step("exception", exception, retry_policy, **handler),
            clock=Clock(monotonic=lambda: self.now, wall=lambda: 1_000.0 + self.now, random=lambda: 0.5),
            timeout=timeout,
            skips_success=plain,
        )
        self.script = run_lifecycle(spec, self.transaction, observer)
        self.effect: Any = next(self.script)
        self.outcome: Any = None

    def answer(self, answer: Any, *, after: float = 0.0) -> LifecycleHarness:
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


def test_a_classified_failure_keeps_its_classification() -> None:
    error = BusinessError("no")
    assert classify(error) is error


def test_the_classification_of_other_framework_errors_is_kept() -> None:
    cause = ConnectionLostError("down", category=Category.TIMEOUT, retry_after=7.0, final=True)
    error = classify(cause)
    assert (type(error), str(error), error.__cause__) == (TransactionException, "down", cause)
    classification = (error.category, error.retry_after, error.final, error.code)
    assert classification == (Category.TIMEOUT, 7.0, True, "connection_lost")


def test_a_failure_of_third_party_code_is_a_system_failure_that_names_its_type() -> None:
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
    third_party = classify_handler(ValueError("no"))
    assert (str(third_party), third_party.category, third_party.code) == ("ValueError: no", Category.SYSTEM, None)


def test_an_error_with_an_invalid_classification_is_treated_as_third_party() -> None:
    for kind in (TransactionException, ErgonError):
        cause = kind("no", code="c")
        cause.retry_after = "soon"  # type: ignore[assignment]
        for error in (classify(cause), classify_handler(cause)):
            assert (str(error), error.__cause__) == (f"{kind.__name__}: no", cause)
            assert (error.category, error.retry_after, error.code) == (Category.SYSTEM, None, None)


@pytest.mark.spec("DX-09")
def test_a_group_of_business_failures_is_a_business_failure() -> None:
    group = ExceptionGroup(
        "two orders", [BusinessError("sold out"), ExceptionGroup("inner", [BusinessError("no card")])]
    )
    error = classify(group)
    assert (error.category, error.final, error.not_attempted, error.__cause__) == (
        Category.BUSINESS,
        False,
        False,
        group,
    )
    assert str(error) == "two orders (2 sub-exceptions): BusinessError: sold out; BusinessError: no card"
    handled = classify_handler(group)
    assert (handled.category, str(handled), handled.__cause__) == (Category.SYSTEM, str(error), group)


@pytest.mark.spec("DX-09")
@pytest.mark.parametrize("other", [ValueError("broken"), TransactionException("late", Category.TIMEOUT), SystemExit(3)])
def test_a_group_with_another_failure_is_a_system_failure(other: BaseException) -> None:
    group = BaseExceptionGroup("mixed", [BusinessError("sold out"), BaseExceptionGroup("inner", [other])])
    error = classify(group)
    assert (error.category, error.final, error.not_attempted) == (Category.SYSTEM, False, False)
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
        (
            [{"not_attempted": True, "retry_after": 3.0}, {"not_attempted": True, "retry_after": 7.0}],
            False,
            True,
            7.0,
            None,
        ),
        ([{"not_attempted": True, "retry_after": 3.0}, {"code": "busy"}], False, False, 3.0, None),
        ([{"code": "a"}, {"code": "b"}], False, False, None, None),
    ],
)
def test_a_group_is_retried_as_its_members_permit(
    members: list[dict[str, Any]], final: bool, later: bool, retry_after: float | None, code: str | None
) -> None:
    error = classify(ExceptionGroup("g", [TransactionException("x", **member) for member in members]))
    assert (error.final, error.not_attempted, error.retry_after, error.code) == (final, later, retry_after, code)


@pytest.mark.spec("DX-09", "DX-27")
@pytest.mark.parametrize(
    "members, temporary",
    [
        ([{"temporary": True}], True),
        ([{"temporary": True, "final": True}, {"not_attempted": True}], True),
        ([{"temporary": True}, {}], False),
        ([{}], False),
    ],
)
def test_a_group_may_be_deferred_if_each_member_may(members: list[dict[str, Any]], temporary: bool) -> None:
    error = classify(ExceptionGroup("calls", [ErgonError("no", **fields) for fields in members]))
    assert error.temporary is temporary


@pytest.mark.spec("DX-27")
@pytest.mark.parametrize("temporary", [True, False])
def test_a_framework_error_keeps_whether_it_is_temporary(temporary: bool) -> None:
    assert classify(ErgonError("away", temporary=temporary)).temporary is temporary


@pytest.mark.spec("DX-09")
def test_a_member_with_an_invalid_classification_is_a_system_failure() -> None:
    invalid = BusinessError("no")
    invalid.retry_after = "soon"  # type: ignore[assignment]
    error = classify(ExceptionGroup("g", [invalid, BusinessError("no")]))
    assert (error.category, error.retry_after) == (Category.SYSTEM, None)


@pytest.mark.spec("DX-09")
def test_the_texts_of_a_large_group_are_bounded() -> None:
    text = str(classify(ExceptionGroup("g" * 900, [ValueError("v" * 900)])))
    assert text == f"{'g' * 79}…: ValueError: {'v' * 387}…"
    assert describe_error(classify(ExceptionGroup("g" * 900, [ValueError("v" * 900)]))) == text, (
        "a record keeps all of it"
    )
    exact = ExceptionGroup("g", [ValueError("v" * 388)])
    assert str(classify(exact)) == f"g (1 sub-exception): ValueError: {'v' * 388}"
    five = ExceptionGroup("g", [ValueError(str(number)) for number in range(5)])
    assert str(classify(five)).endswith("; ValueError: 4")
    seven = ExceptionGroup("g", [ValueError(str(number) * 900) for number in range(7)])
    assert str(classify(seven)).endswith(f"; ValueError: {'4' * 67}…; and 2 more")


@pytest.mark.spec("DX-09")
def test_a_group_may_be_nested_deeper_than_the_recursion_limit() -> None:
    group = ExceptionGroup("inner", [BusinessError("no")])
    for _ in range(5_000):
        group = ExceptionGroup("outer", [group])
    assert classify(group).category is Category.BUSINESS


@pytest.mark.spec("DX-11")
def test_a_timeout_names_its_limit_and_the_key_of_the_policy() -> None:
    step = Step("success", abs, RetryPolicy(timeout=1.5), classify=classify_handler, timeout_error=timeout_error)
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
        error = timeout_error(step, overrun, 5.0)
        assert (error.category, error.code, str(error)) == (Category.TIMEOUT, code, message)


# -- success --------------------------------------------------------------------------------------


def test_the_success_handler_gets_the_result_and_both_steps_are_measured() -> None:
    harness = LifecycleHarness()
    assert (harness.effect.fn, harness.effect.args, harness.effect.until) == (process, (harness.transaction,), 160.0)
    harness.answer(Ok("made"), after=2.0)
    assert (harness.effect.fn, harness.effect.args, harness.effect.until) == (
        success,
        (harness.transaction, "made"),
        162.0,
    )
    outcome = harness.answer(Ok("ignored"), after=3.0).outcome
    assert (outcome.kind, outcome.processed, outcome.result) == (OutcomeKind.SUCCEEDED, True, "made")
    assert outcome.durations == {"process": 2.0, "success": 3.0}
    assert (outcome.attempts, outcome.error, outcome.settlement, outcome.reason) == (1, None, None, None)


@pytest.mark.parametrize(
    "processed, handled, settled",
    [
        (None, None, None),
        (Defer(3.0), None, Defer(3.0)),
        (Defer(3.0), "text", Defer(3.0)),
        (Defer(3.0), DeadLetter("odd"), DeadLetter("odd")),
        ("text", Ack(), Ack()),
        ("text", Release(), None),
    ],
)
def test_the_settlement_of_the_success_handler_takes_precedence(processed: Any, handled: Any, settled: Any) -> None:
    assert LifecycleHarness().answer(Ok(processed)).answer(Ok(handled)).outcome.settlement == settled


def test_without_a_success_handler_the_success_step_is_skipped() -> None:
    outcome = LifecycleHarness(plain=True).answer(Ok(Defer(3.0)), after=2.0).outcome
    assert (outcome.kind, outcome.settlement) == (OutcomeKind.SUCCEEDED, Defer(3.0))
    assert outcome.durations == {"process": 2.0}


def test_the_transaction_timeout_counts_from_the_start() -> None:
    harness = LifecycleHarness(timeout=10.0)
    assert harness.effect.until == 110.0
    harness.answer(Ok(None), after=4.0)
    assert harness.effect.until == 110.0


class StepRecorder:
    """An observer that records its events."""

    def __init__(self, *, recording: bool = True) -> None:
        self.recording = recording
        self.events: list[Any] = []
        self.context = contextvars.Context()

    def on_step_start(self, step: Step) -> StepRecorder:
        self.events.append(step.name)
        return self

    def on_attempt_start(self, number: int) -> contextvars.Context:
        return self.context

    def on_attempt_end(self, number: int, error: BaseException | None) -> None:
        self.events.append(number)

    def on_step_end(self, done: Any) -> None:
        self.events.append(type(done).__name__)

    def on_end(self, outcome: Outcome) -> None:
        self.events.append(outcome)


def test_an_observer_sees_every_step_and_the_end() -> None:
    observer = StepRecorder()
    harness = LifecycleHarness(observer=observer)
    assert harness.effect.context is observer.context
    harness.answer(Ok(None))
    assert harness.effect.context is observer.context
    outcome = harness.answer(Err(ValueError())).answer(Ok(None)).outcome
    assert observer.events == ["process", 0, "Ok", "success", 0, "Failed", "exception", 0, "Ok", outcome]


@pytest.mark.parametrize("recording", [True, False])
def test_a_default_success_handler_is_called_only_when_it_is_recorded(recording: bool) -> None:
    harness = LifecycleHarness(plain=True, observer=StepRecorder(recording=recording)).answer(Ok(None))
    assert harness.step == ("success" if recording else None)


# -- failure --------------------------------------------------------------------------------------


def test_the_exception_handler_gets_the_error_and_its_own_timeout() -> None:
    harness = LifecycleHarness(timeout=10.0)
    harness.answer(Err(cause := ValueError("no")), after=10.0)
    error = harness.effect.args[1]
    assert (harness.effect.fn, harness.effect.args[0], harness.effect.until) == (exception, harness.transaction, 170.0)
    assert (error.__cause__, error.still_running) == (cause, False)
    outcome = harness.answer(Ok(Defer(2.0)), after=1.0).outcome
    assert (outcome.kind, outcome.error, outcome.processed) == (OutcomeKind.FAILED, error, False)
    assert (outcome.settlement, outcome.attempts, outcome.abandoned_calls) == (Defer(2.0), 1, ())
    assert outcome.durations == {"process": 10.0, "exception": 1.0}


def test_a_success_handler_that_fails_does_not_undo_the_process() -> None:
    outcome = LifecycleHarness().answer(Ok("made")).answer(Err(ValueError())).answer(Ok(None)).outcome
    assert (outcome.kind, outcome.processed, outcome.attempts, outcome.result) == (OutcomeKind.FAILED, True, 1, "made")


def test_a_failing_exception_handler_keeps_both_errors() -> None:
    harness = LifecycleHarness().answer(Err(ValueError("first")))
    outcome = harness.answer(Err(ValueError("second"))).outcome
    assert outcome.kind is OutcomeKind.EXCEPTION_HANDLER_FAILED
    assert (str(outcome.error), str(outcome.handler_error)) == ("ValueError: first", "ValueError: second")
    assert outcome.settlement is None


def test_an_abandoned_call_is_reported_to_the_handler_and_kept() -> None:
    harness = LifecycleHarness()
    call = harness.effect
    harness.answer(Expired(call), after=60.0)
    assert isinstance(harness.effect, AwaitExit)
    harness.answer(False)
    assert harness.effect.args[1].still_running
    outcome = harness.answer(Ok(None)).outcome
    assert (outcome.kind, outcome.abandoned_calls, outcome.still_running) == (OutcomeKind.FAILED, (call,), True)


def test_the_calls_of_two_steps_may_still_run() -> None:
    harness = LifecycleHarness()
    first = harness.effect
    second = harness.answer(Expired(first), after=60.0).answer(False).effect
    outcome = harness.answer(Expired(second), after=60.0).answer(False).outcome
    assert (outcome.kind, outcome.abandoned_calls) == (OutcomeKind.EXCEPTION_HANDLER_FAILED, (first, second))
    second.exited = True
    assert outcome.still_running
    first.exited = True
    assert not outcome.still_running
    harness = LifecycleHarness()
    first = harness.effect
    outcome = harness.answer(Expired(first), after=60.0).answer(False).answer(Err(ValueError())).outcome
    assert (outcome.kind, outcome.abandoned_calls) == (OutcomeKind.EXCEPTION_HANDLER_FAILED, (first,))


# -- attempts of earlier deliveries ---------------------------------------------------------------


@pytest.mark.parametrize("earlier_attempts, number", [(0, 0), (1, 1), (2, 2), (3, 2), (9, 2)])
def test_attempts_of_earlier_deliveries_count_but_one_is_always_made(earlier_attempts: int, number: int) -> None:
    harness = LifecycleHarness(Transaction(id="1", attempts=earlier_attempts), max_attempts=3)
    assert harness.effect.scope.attempt == number
    assert harness.answer(Ok(None)).answer(Ok(None)).outcome.attempts == earlier_attempts + 1


def test_produce_starts_at_attempt_0_whatever_the_transaction_has_had() -> None:
    harness = LifecycleHarness(Transaction(id="1", attempts=2), max_attempts=3, defers=False, backoff=0.0)
    assert harness.effect.scope.attempt == 0
    harness.answer(Err(ValueError()))
    assert harness.answer(Ok(None)).answer(Ok(None)).outcome.attempts == 2


def test_every_failed_attempt_counts() -> None:
    harness = LifecycleHarness(Transaction(id="1", attempts=1), max_attempts=3, backoff=0.0).answer(Err(ValueError()))
    outcome = harness.answer(Err(ValueError())).answer(Ok(None)).outcome
    assert (outcome.kind, outcome.attempts, len(outcome.failed_attempts)) == (OutcomeKind.FAILED, 3, 2)


def test_a_long_wait_is_deferred_to_the_broker_with_all_attempts() -> None:
    earlier = Attempt(attempt=0, category=Category.SYSTEM)
    harness = LifecycleHarness(
        Transaction(id="1", attempts=1, history=(earlier,)), max_attempts=5, backoff=40.0, cap=0.0
    )
    outcome = harness.answer(Err(ErgonError("busy", code="b")), after=1.0).outcome
    assert outcome.kind is OutcomeKind.DEFERRED
    assert (str(outcome.error), outcome.attempts) == ("busy", 2)
    now = Attempt(attempt=1, category=Category.SYSTEM, code="b", error="busy", at=1_101.0, delay=80.0)
    assert outcome.settlement == Defer(80.0, attempts=2, history=(earlier, now))


# -- stopped --------------------------------------------------------------------------------------


def test_a_stopped_lifecycle_releases_its_transaction_unchanged() -> None:
    harness = LifecycleHarness(Transaction(id="1", attempts=1), max_attempts=4, backoff=1.0).answer(Err(ValueError()))
    assert isinstance(harness.effect, Sleep)
    outcome = harness.answer(Interrupted()).outcome
    assert (outcome.kind, outcome.reason, outcome.attempts) == (OutcomeKind.RELEASED, "stop", 1)
    assert (outcome.error, outcome.abandoned_calls, outcome.settlement) == (None, (), None)


def test_a_stopped_call_is_the_one_to_wait_for() -> None:
    harness = LifecycleHarness()
    call = harness.effect
    outcome = harness.answer(Interrupted(call)).outcome
    assert (outcome.kind, outcome.abandoned_calls) == (OutcomeKind.RELEASED, (call,))


def test_a_stopped_exception_handler_keeps_all_abandoned_calls_but_no_error() -> None:
    harness = LifecycleHarness()
    first = harness.effect
    second = harness.answer(Expired(first), after=60.0).answer(False).effect
    outcome = harness.answer(Interrupted(second)).outcome
    assert (outcome.kind, outcome.error, outcome.abandoned_calls) == (OutcomeKind.RELEASED, None, (first, second))
    harness = LifecycleHarness()
    first = harness.effect
    outcome = harness.answer(Expired(first), after=60.0).answer(False).answer(Interrupted()).outcome
    assert outcome.abandoned_calls == (first,)


def test_a_stopped_success_handler_releases_the_processed_transaction() -> None:
    outcome = LifecycleHarness().answer(Ok("made")).answer(Interrupted()).outcome
    assert (outcome.kind, outcome.processed, outcome.attempts) == (OutcomeKind.RELEASED, True, 0)


# -- history --------------------------------------------------------------------------------------


def test_the_history_is_the_last_ten_attempts_of_the_process_step() -> None:
    earlier = tuple(Attempt(attempt=number, category=Category.SYSTEM) for number in range(9))
    outcome = Outcome(Transaction(id="1", history=earlier))
    error = BusinessError("no", code="c")
    steps = ("process", "success", "process", "exception")
    outcome.failed_attempts = [
        FailedAttempt(step, number, error, occurred_at=float(number)) for number, step in enumerate(steps)
    ]
    outcome.failed_attempts[2].delay = 4.0
    attempts = attempt_history(outcome)
    assert attempts[:8] == earlier[1:]
    fields = {"category": Category.BUSINESS, "code": "c", "error": "no"}
    assert attempts[8:] == (Attempt(attempt=0, at=0.0, **fields), Attempt(attempt=2, at=2.0, delay=4.0, **fields))


# -- whether the work had begun ---------------------------------------------------------------------


@pytest.mark.spec("DX-02")
def test_a_stop_before_the_call_leaves_it_unstarted_and_one_during_the_call_does_not() -> None:
    before = LifecycleHarness().answer(Interrupted()).outcome
    assert (before.kind, before.started) == (OutcomeKind.RELEASED, False)
    during = LifecycleHarness()
    outcome = during.answer(Interrupted(during.effect)).outcome
    assert (outcome.kind, outcome.started) == (OutcomeKind.RELEASED, True)


@pytest.mark.spec("DX-02")
def test_a_stop_between_two_attempts_leaves_it_started() -> None:
    harness = LifecycleHarness(max_attempts=2).answer(Err(ValueError("down")))
    assert isinstance(harness.effect, Sleep)
    assert harness.answer(Interrupted()).outcome.started


@pytest.mark.spec("DX-02")
def test_a_deferred_transaction_has_started() -> None:
    outcome = LifecycleHarness().answer(Err(ErgonError("closed", not_attempted=True))).outcome
    assert (outcome.kind, outcome.started) == (OutcomeKind.DEFERRED, True)


@pytest.mark.spec("DX-02")
def test_a_stop_during_a_handler_leaves_it_started() -> None:
    assert LifecycleHarness().answer(Ok(1)).answer(Interrupted()).outcome.started
    assert LifecycleHarness().answer(Err(ValueError("no"))).answer(Interrupted()).outcome.started
