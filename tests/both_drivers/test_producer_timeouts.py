"""The three timeouts of a producer and their effects: PRO-02, 07, 15, 18, 22."""

from __future__ import annotations

import threading

import pytest

from ergon_framework import scope
from ergon_framework.worker.exceptions import Category, LoopStalled, LoopTimeout
from ergon_framework.worker.report import OutcomeKind, StopReason
from tests.both_drivers.producer_harness import (
    VARIANTS,
    Hang,
    make_producer_policy,
    make_transactions,
    parse_number,
    run,
    run_for_one,
    run_in_turn,
)

pytestmark = pytest.mark.parametrize("variant", VARIANTS)

SYSTEM, TIMEOUT = Category.SYSTEM, Category.TIMEOUT


def hang_ignoring_cancellation(*_):
    return Hang(stubborn=True, then="late", late="late")


def hang_until_cancelled(*_):
    return Hang()


# -- an attempt ------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-02", "PRO-07")
def test_an_attempt_that_exceeds_its_timeout_is_retried(variant):
    result = run(
        variant,
        make_transactions(1),
        make_producer_policy(produce={"timeout": 0.03}),
        produce=run_in_turn(Hang, "in time"),
    )

    assert result.of("t0") == ["produce", "produce", "success"]
    assert result.results == [("t0", "in time")]
    assert (result.report.outcomes[0].kind, result.report.outcomes[0].attempts) == (OutcomeKind.SUCCEEDED, 2)


@pytest.mark.spec("PRO-02", "PRO-07")
def test_attempts_that_all_exceed_their_timeout_end_as_timeout(variant):
    policy = make_producer_policy(produce={"timeout": 0.03, "max_attempts": 2})
    result = run(variant, make_transactions(1), policy, produce=hang_until_cancelled)

    assert result.of("t0") == ["produce", "produce", "exception"]
    ((_, error),) = result.handler_errors
    assert (error.category, error.still_running) == (TIMEOUT, False)
    assert (result.report.outcomes[0].kind, result.report.outcomes[0].category) == (OutcomeKind.FAILED, TIMEOUT)


@pytest.mark.spec("PRO-07")
def test_the_result_of_an_abandoned_call_is_ignored(variant):
    moves = [Hang(late="late"), "in time"]
    result = run(
        variant, make_transactions(1), make_producer_policy(produce={"timeout": 0.03}), produce=run_in_turn(*moves)
    )

    assert result.results == [("t0", "in time")]
    assert result.of("t0") == ["produce", "produce", "success"]


@pytest.mark.spec("PRO-07")
def test_a_call_that_exceeds_its_grace_is_not_retried_and_the_exception_handler_sees_it(variant):
    policy = make_producer_policy(produce={"timeout": 0.03, "exit_grace": 0.15, "max_attempts": 3})
    result = run(variant, make_transactions(1), policy, produce=hang_ignoring_cancellation)

    assert result.of("t0") == ["produce", "exception"]
    # The attempt's clock starts an unknown time before the handler; without the grace it would be 0.03.
    assert result.list_gaps()[0] >= 0.1
    ((_, error),) = result.handler_errors
    assert (error.category, error.still_running) == (TIMEOUT, True)
    # The call did not wait for the handler, and ignored its later return value.
    assert result.events.index(("leave", "exception", "t0")) < result.events.index(("leave", "produce", "t0"))
    assert result.kinds == ["failed"]
    assert result.report.outcomes[0].kind is OutcomeKind.FAILED
    assert (result.report.stop_reason, result.report.still_running) == (StopReason.DONE, 1)


@pytest.mark.spec("PRO-03", "PRO-07")
def test_a_success_handler_that_exceeds_its_timeout_is_retried_and_ends_as_timeout(variant):
    result = run(
        variant,
        make_transactions(1),
        make_producer_policy(success={"timeout": 0.03, "max_attempts": 2}),
        success=hang_until_cancelled,
    )

    assert result.of("t0") == ["produce", "success", "success", "exception"]
    (outcome,) = result.report.outcomes
    assert (outcome.kind, outcome.category, outcome.processed) == (OutcomeKind.FAILED, TIMEOUT, True)


@pytest.mark.spec("PRO-04", "PRO-07")
def test_an_exception_handler_that_exceeds_its_timeout_is_retried_and_then_final(variant):
    policy = make_producer_policy(exception={"timeout": 0.03, "max_attempts": 2}, produce={"max_attempts": 1})
    result = run(
        variant, make_transactions(1), policy, produce=run_in_turn(ValueError("x")), exception=hang_until_cancelled
    )

    assert result.of("t0") == ["produce", "exception", "exception"]
    (outcome,) = result.report.outcomes
    assert (outcome.kind, outcome.category, outcome.handler_error.category) == (
        OutcomeKind.EXCEPTION_HANDLER_FAILED,
        SYSTEM,
        TIMEOUT,
    )


@pytest.mark.spec("PRO-04", "PRO-07")
def test_an_exception_handler_that_exceeds_its_grace_is_not_retried(variant):
    policy = make_producer_policy(exception={"timeout": 0.03, "exit_grace": 0.03}, produce={"max_attempts": 1})
    result = run(
        variant,
        make_transactions(1),
        policy,
        produce=run_in_turn(ValueError("x")),
        exception=hang_ignoring_cancellation,
    )

    assert result.of("t0") == ["produce", "exception"]
    assert result.kinds == ["handler_failed"]
    assert result.report.still_running == 1


# -- the lifecycle ---------------------------------------------------------------------------------


@pytest.mark.spec("PRO-07", "PRO-14", "PRO-18", "PRO-22")
def test_1000_transactions_of_which_10_expire_have_their_outcomes_in_order(variant):
    slow = {number * 97 + 5 for number in range(10)}
    result = run(
        variant,
        make_transactions(1_000),
        make_producer_policy(batch=500, concurrency=20, transaction_timeout=0.5),
        produce=lambda transaction, _: Hang() if parse_number(transaction) in slow else parse_number(transaction),
    )

    outcomes = result.report.outcomes
    assert [outcome.transaction.id for outcome in outcomes] == [f"t{number}" for number in range(1_000)]
    assert {parse_number(outcome.transaction) for outcome in outcomes if outcome.category is TIMEOUT} == slow
    assert result.report.count(OutcomeKind.SUCCEEDED) == 990
    assert result.report.count(OutcomeKind.FAILED) == 10
    assert sorted(
        parse_number(outcome.transaction) for outcome in outcomes if outcome.kind is OutcomeKind.FAILED
    ) == sorted(slow)
    assert sorted(transaction_id for transaction_id, _ in result.handler_errors) == sorted(
        f"t{number}" for number in slow
    )
    assert all(result.of(f"t{number}") == ["produce", "exception"] for number in slow)
    assert len(result.results) == 990
    assert result.peak <= 20


@pytest.mark.spec("PRO-07")
def test_an_expired_lifecycle_is_not_retried_although_the_step_has_attempts_left(variant):
    policy = make_producer_policy(transaction_timeout=0.05, produce={"max_attempts": 5})
    result = run(variant, make_transactions(1), policy, produce=hang_until_cancelled)

    assert result.of("t0") == ["produce", "exception"]
    assert result.report.outcomes[0].category is TIMEOUT


@pytest.mark.spec("PRO-07", "PRO-22")
def test_the_lifecycle_timeout_applies_to_the_success_handler(variant):
    result = run(
        variant, make_transactions(3), make_producer_policy(transaction_timeout=0.05), success=hang_until_cancelled
    )

    for number, outcome in enumerate(result.report.outcomes):
        assert result.of(f"t{number}") == ["produce", "success", "exception"]
        assert (outcome.kind, outcome.category, outcome.processed) == (OutcomeKind.FAILED, TIMEOUT, True)


@pytest.mark.spec("PRO-07")
def test_the_lifecycle_timeout_does_not_apply_to_the_exception_handler(variant):
    remaining_seconds = []

    def exception(*_):
        remaining_seconds.append(scope.current().remaining())
        raise ValueError("again")

    policy = make_producer_policy(transaction_timeout=0.05, exception={"timeout": 20.0, "max_attempts": 3})
    result = run(variant, make_transactions(1), policy, produce=hang_until_cancelled, exception=exception)

    assert result.of("t0") == ["produce"] + ["exception"] * 3
    assert all(seconds > 10 for seconds in remaining_seconds)
    assert result.kinds == ["handler_failed"]


@pytest.mark.spec("PRO-22", "PRO-07")
def test_the_lifecycle_timeout_applies_to_every_worker_without_the_wait_for_a_slot(variant):
    remaining_seconds = []

    def produce(*_):
        remaining_seconds.append(scope.current().remaining())
        return Hang()

    result = run(
        variant,
        make_transactions(6),
        make_producer_policy(transaction_timeout=0.1, concurrency=2, batch=3),
        produce=produce,
    )

    assert [outcome.category for outcome in result.report.outcomes] == [TIMEOUT] * 6
    assert len(remaining_seconds) == 6
    assert all(0.05 < seconds <= 0.1 for seconds in remaining_seconds)


@pytest.mark.spec("PRO-07", "PRO-08")
def test_a_wait_that_does_not_fit_the_lifecycle_ends_the_step_with_its_last_error(variant):
    policy = make_producer_policy(transaction_timeout=5.0, produce={"backoff": 10.0})
    result = run(variant, make_transactions(1), policy, produce=run_in_turn(ValueError("down")))

    assert result.seconds < 3
    assert result.of("t0") == ["produce", "exception"]
    assert result.report.outcomes[0].category is SYSTEM


# -- the call --------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-07", "PRO-12", "PRO-18", "DX-19")
def test_by_default_the_loop_timeout_ends_the_call_immediately_with_the_report(variant):
    def produce(transaction, _):
        return Hang(stubborn=True, late="late", then="late") if parse_number(transaction) >= 2 else None

    policy = make_producer_policy(timeout=0.15, concurrency=2, batch=4)
    result = run(variant, make_transactions(7), policy, produce=produce)

    assert isinstance(result.raised, LoopTimeout)
    assert isinstance(result.raised, TimeoutError)
    assert 0.149 <= result.seconds < 2
    assert result.report.stop_reason is StopReason.TIMEOUT
    assert result.kinds == ["succeeded"] * 2 + ["released"] * 5
    assert {(outcome.attempts, outcome.reason) for outcome in result.report.outcomes[4:]} == {(0, "timeout")}
    assert result.report.still_running == 2
    # The return values of the two handlers, once they were let go, do not count as a success.
    assert [outcome.kind for outcome in result.report.outcomes[2:4]] == [OutcomeKind.RELEASED] * 2
    assert [transaction_id for transaction_id, _ in result.results] == ["t0", "t1"]
    assert result.handler_errors == []


@pytest.mark.spec("PRO-07")
def test_a_loop_timeout_lets_running_calls_finish_within_the_drain(variant):
    timers = []

    def produce(*_):
        hang = Hang(then="drained")
        # Opened after the loop timeout, and long before the end of the drain.
        opener = threading.Timer(0.15, hang.latch.open)
        timers.append(opener)
        opener.start()
        return hang

    result = run(
        variant,
        make_transactions(3),
        make_producer_policy(timeout=0.05, timeout_drain=9, concurrency=1),
        produce=produce,
    )
    for timer in timers:
        timer.join()

    assert isinstance(result.raised, LoopTimeout)
    assert result.seconds < 5
    assert result.kinds == ["succeeded", "released", "released"]
    assert result.results == [("t0", "drained")]


@pytest.mark.spec("PRO-07")
def test_the_call_ends_within_its_timeout_plus_the_drain(variant):
    policy = make_producer_policy(timeout=0.05, timeout_drain=0.1)
    result = run(variant, make_transactions(1), policy, produce=hang_ignoring_cancellation)

    assert isinstance(result.raised, LoopTimeout)
    assert 0.149 <= result.seconds < 2
    assert (result.kinds, result.report.still_running) == (["released"], 1)


@pytest.mark.spec("PRO-07")
def test_a_timeout_does_not_affect_a_call_that_ends_in_time(variant):
    result = run(variant, make_transactions(20), make_producer_policy(timeout=30, transaction_timeout=20))

    assert result.raised is None
    assert result.report.stop_reason is StopReason.DONE


@pytest.mark.spec("PRO-15")
def test_a_call_whose_slots_are_all_occupied_by_abandoned_calls_is_stalled(variant):
    policy = make_producer_policy(concurrency=2, drain_timeout=0.1, produce={"timeout": 0.03, "exit_grace": 0.03})
    result = run(variant, make_transactions(5), policy, produce=hang_ignoring_cancellation)

    assert isinstance(result.raised, LoopStalled)
    assert result.seconds < 5
    assert result.report.stop_reason is StopReason.STALLED
    assert result.kinds == ["failed"] * 2 + ["released"] * 3
    assert [outcome.attempts for outcome in result.report.outcomes[2:]] == [0, 0, 0]
    assert result.report.still_running == 2
    assert {transaction_id for _, transaction_id in result.steps} == {"t0", "t1"}
    assert all(error.still_running for _, error in result.handler_errors)


@pytest.mark.spec("PRO-15")
def test_abandoned_calls_that_return_in_time_free_their_slots(variant):
    stubborn = Hang(stubborn=True)
    policy = make_producer_policy(concurrency=1, drain_timeout=9, produce={"timeout": 0.03, "exit_grace": 0.03})
    result = run(
        variant,
        make_transactions(3),
        policy,
        produce=run_for_one("t0", lambda *_: stubborn),
        exception=lambda *_: threading.Timer(0.05, stubborn.latch.open).start(),
    )

    assert result.raised is None
    assert result.kinds == ["failed", "succeeded", "succeeded"]
    assert (result.report.still_running, result.report.late_results) == (0, 1)
    assert result.peak == 1
