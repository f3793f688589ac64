"""The three timeouts of a producer and what they leave behind: PRO-02, 07, 15, 18, 22."""

from __future__ import annotations

import threading

import pytest

from ergon_framework import scope
from ergon_framework.task.exceptions import Category, LoopStalled, LoopTimeout
from ergon_framework.task.report import End, Kind
from tests.twins.producing import FLAVOURS, Hang, in_turn, many, only, place, quick, run

pytestmark = pytest.mark.parametrize("flavour", FLAVOURS)

SYSTEM, TIMEOUT = Category.SYSTEM, Category.TIMEOUT


def stays(*_):
    return Hang(stubborn=True, then="late", late="late")


def hangs(*_):
    return Hang()


# -- an attempt ------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-02", "PRO-07")
def test_an_attempt_that_takes_too_long_is_timeout_and_retried(flavour):
    made = run(flavour, many(1), quick(produce={"timeout": 0.03}), produce=in_turn(Hang, "in time"))

    assert made.of("t0") == ["produce", "produce", "success"]
    assert made.results == [("t0", "in time")]
    assert (made.report.outcomes[0].kind, made.report.outcomes[0].attempts) == (Kind.SUCCEEDED, 2)


@pytest.mark.spec("PRO-02", "PRO-07")
def test_attempts_that_all_take_too_long_end_as_timeout(flavour):
    policy = quick(produce={"timeout": 0.03, "max_attempts": 2})
    made = run(flavour, many(1), policy, produce=hangs)

    assert made.of("t0") == ["produce", "produce", "exception"]
    ((_, told),) = made.told
    assert (told.category, told.still_running) == (TIMEOUT, False)
    assert (made.report.outcomes[0].kind, made.report.outcomes[0].category) == (Kind.FAILED, TIMEOUT)


@pytest.mark.spec("PRO-07")
def test_what_a_late_body_returns_changes_nothing(flavour):
    late = [Hang(late="late"), "in time"]
    made = run(flavour, many(1), quick(produce={"timeout": 0.03}), produce=in_turn(*late))

    assert made.results == [("t0", "in time")]
    assert made.of("t0") == ["produce", "produce", "success"]


@pytest.mark.spec("PRO-07")
def test_a_body_that_stays_beyond_its_grace_has_no_further_attempt_and_its_handler_knows(flavour):
    policy = quick(produce={"timeout": 0.03, "abandon_grace": 0.15, "max_attempts": 3})
    made = run(flavour, many(1), policy, produce=stays)

    assert made.of("t0") == ["produce", "exception"]
    # The clock of the attempt began before the body did, nobody knows by how much; without the grace it were 0.03.
    assert made.gaps()[0] >= 0.1
    ((_, told),) = made.told
    assert (told.category, told.still_running) == (TIMEOUT, True)
    # The call did not wait for the body, and what it returned afterwards made nothing of it.
    assert made.events.index(("leave", "exception", "t0")) < made.events.index(("leave", "produce", "t0"))
    assert made.kinds == ["failed"]
    assert made.report.outcomes[0].kind is Kind.FAILED
    assert (made.report.end, made.report.abandoned) == (End.DONE, 1)


@pytest.mark.spec("PRO-03", "PRO-07")
def test_a_success_handler_that_takes_too_long_is_retried_and_then_told_as_timeout(flavour):
    made = run(flavour, many(1), quick(success={"timeout": 0.03, "max_attempts": 2}), success=hangs)

    assert made.of("t0") == ["produce", "success", "success", "exception"]
    (outcome,) = made.report.outcomes
    assert (outcome.kind, outcome.category, outcome.processed) == (Kind.FAILED, TIMEOUT, True)


@pytest.mark.spec("PRO-04", "PRO-07")
def test_an_exception_handler_that_takes_too_long_is_retried_and_then_final(flavour):
    policy = quick(exception={"timeout": 0.03, "max_attempts": 2}, produce={"max_attempts": 1})
    made = run(flavour, many(1), policy, produce=in_turn(ValueError("x")), exception=hangs)

    assert made.of("t0") == ["produce", "exception", "exception"]
    (outcome,) = made.report.outcomes
    assert (outcome.kind, outcome.category, outcome.handler_error.category) == (Kind.HANDLER_FAILED, SYSTEM, TIMEOUT)


@pytest.mark.spec("PRO-04", "PRO-07")
def test_an_exception_handler_that_stays_has_no_further_attempt(flavour):
    policy = quick(exception={"timeout": 0.03, "abandon_grace": 0.03}, produce={"max_attempts": 1})
    made = run(flavour, many(1), policy, produce=in_turn(ValueError("x")), exception=stays)

    assert made.of("t0") == ["produce", "exception"]
    assert made.kinds == ["handler_failed"]
    assert made.report.abandoned == 1


# -- the lifecycle ---------------------------------------------------------------------------------


@pytest.mark.spec("PRO-07", "PRO-14", "PRO-18", "PRO-22")
def test_of_1000_with_10_that_expire_all_have_their_outcome_in_order_and_10_met_their_handler_once(flavour):
    slow = {number * 97 + 5 for number in range(10)}
    made = run(
        flavour,
        many(1_000),
        quick(batch=500, concurrency=20, transaction_timeout=0.5),
        produce=lambda transaction, _: Hang() if place(transaction) in slow else place(transaction),
    )

    outcomes = made.report.outcomes
    assert [outcome.transaction.id for outcome in outcomes] == [f"t{number}" for number in range(1_000)]
    assert {place(outcome.transaction) for outcome in outcomes if outcome.category is TIMEOUT} == slow
    assert made.report.count(Kind.SUCCEEDED) == 990
    assert made.report.count(Kind.FAILED) == 10
    assert sorted(place(outcome.transaction) for outcome in outcomes if outcome.kind is Kind.FAILED) == sorted(slow)
    assert sorted(identity for identity, _ in made.told) == sorted(f"t{number}" for number in slow)
    assert all(made.of(f"t{number}") == ["produce", "exception"] for number in slow)
    assert len(made.results) == 990
    assert made.peak <= 20


@pytest.mark.spec("PRO-07")
def test_an_expired_lifecycle_has_no_further_attempt_although_the_step_has_some_left(flavour):
    policy = quick(transaction_timeout=0.05, produce={"max_attempts": 5})
    made = run(flavour, many(1), policy, produce=hangs)

    assert made.of("t0") == ["produce", "exception"]
    assert made.report.outcomes[0].category is TIMEOUT


@pytest.mark.spec("PRO-07", "PRO-22")
def test_the_lifecycle_binds_the_success_handler_too(flavour):
    made = run(flavour, many(3), quick(transaction_timeout=0.05), success=hangs)

    for number, outcome in enumerate(made.report.outcomes):
        assert made.of(f"t{number}") == ["produce", "success", "exception"]
        assert (outcome.kind, outcome.category, outcome.processed) == (Kind.FAILED, TIMEOUT, True)


@pytest.mark.spec("PRO-07")
def test_the_lifecycle_does_not_bind_the_exception_handler(flavour):
    left = []

    def exception(*_):
        left.append(scope.current().remaining())
        raise ValueError("again")

    policy = quick(transaction_timeout=0.05, exception={"timeout": 20.0, "max_attempts": 3})
    made = run(flavour, many(1), policy, produce=hangs, exception=exception)

    assert made.of("t0") == ["produce"] + ["exception"] * 3
    assert all(seconds > 10 for seconds in left)
    assert made.kinds == ["handler_failed"]


@pytest.mark.spec("PRO-22", "PRO-07")
def test_every_worker_is_under_the_lifecycle_timeout_and_waiting_for_a_slot_does_not_count(flavour):
    left = []

    def produce(*_):
        left.append(scope.current().remaining())
        return Hang()

    made = run(flavour, many(6), quick(transaction_timeout=0.1, concurrency=2, batch=3), produce=produce)

    assert [outcome.category for outcome in made.report.outcomes] == [TIMEOUT] * 6
    assert len(left) == 6
    assert all(0.05 < seconds <= 0.1 for seconds in left)


@pytest.mark.spec("PRO-07", "PRO-08")
def test_a_wait_that_does_not_fit_the_lifecycle_ends_the_step_with_its_last_error(flavour):
    policy = quick(transaction_timeout=5.0, produce={"backoff": 10.0})
    made = run(flavour, many(1), policy, produce=in_turn(ValueError("down")))

    assert made.seconds < 3
    assert made.of("t0") == ["produce", "exception"]
    assert made.report.outcomes[0].category is SYSTEM


# -- the call --------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-07", "PRO-12", "PRO-18", "DX-19")
def test_by_default_the_loop_timeout_ends_the_call_at_once_with_the_report(flavour):
    def produce(transaction, _):
        return Hang(stubborn=True, late="late", then="late") if place(transaction) >= 2 else None

    policy = quick(timeout=0.15, concurrency=2, batch=4)
    made = run(flavour, many(7), policy, produce=produce)

    assert isinstance(made.raised, LoopTimeout)
    assert isinstance(made.raised, TimeoutError)
    assert 0.149 <= made.seconds < 2
    assert made.report.end is End.TIMEOUT
    assert made.kinds == ["succeeded"] * 2 + ["released"] * 5
    assert {(outcome.attempts, outcome.reason) for outcome in made.report.outcomes[4:]} == {(0, "timeout")}
    assert made.report.abandoned == 2
    # What the two returned once they were let go is nobody's success.
    assert [outcome.kind for outcome in made.report.outcomes[2:4]] == [Kind.RELEASED] * 2
    assert [identity for identity, _ in made.results] == ["t0", "t1"]
    assert made.told == []


@pytest.mark.spec("PRO-07")
def test_a_loop_timeout_lets_what_runs_end_within_the_drain(flavour):
    doors = []

    def produce(*_):
        hang = Hang(then="drained")
        # Opened after the loop's time is over, and long before the drain is.
        opener = threading.Timer(0.15, hang.latch.open)
        doors.append(opener)
        opener.start()
        return hang

    made = run(flavour, many(3), quick(timeout=0.05, timeout_drain=9, concurrency=1), produce=produce)
    for door in doors:
        door.join()

    assert isinstance(made.raised, LoopTimeout)
    assert made.seconds < 5
    assert made.kinds == ["succeeded", "released", "released"]
    assert made.results == [("t0", "drained")]


@pytest.mark.spec("PRO-07")
def test_the_call_is_over_by_its_timeout_plus_the_drain(flavour):
    policy = quick(timeout=0.05, timeout_drain=0.1)
    made = run(flavour, many(1), policy, produce=stays)

    assert isinstance(made.raised, LoopTimeout)
    assert 0.149 <= made.seconds < 2
    assert (made.kinds, made.report.abandoned) == (["released"], 1)


@pytest.mark.spec("PRO-07")
def test_a_call_that_ends_in_time_knows_nothing_of_its_timeout(flavour):
    made = run(flavour, many(20), quick(timeout=30, transaction_timeout=20))

    assert made.raised is None
    assert made.report.end is End.DONE


@pytest.mark.spec("PRO-15")
def test_a_call_whose_slots_are_all_held_by_abandoned_bodies_is_stalled(flavour):
    policy = quick(concurrency=2, drain_timeout=0.1, produce={"timeout": 0.03, "abandon_grace": 0.03})
    made = run(flavour, many(5), policy, produce=stays)

    assert isinstance(made.raised, LoopStalled)
    assert made.seconds < 5
    assert made.report.end is End.STALLED
    assert made.kinds == ["failed"] * 2 + ["released"] * 3
    assert [outcome.attempts for outcome in made.report.outcomes[2:]] == [0, 0, 0]
    assert made.report.abandoned == 2
    assert {identity for _, identity in made.steps} == {"t0", "t1"}
    assert all(told.still_running for _, told in made.told)


@pytest.mark.spec("PRO-15")
def test_abandoned_bodies_that_leave_in_time_give_their_slots_back(flavour):
    stubborn = Hang(stubborn=True)
    policy = quick(concurrency=1, drain_timeout=9, produce={"timeout": 0.03, "abandon_grace": 0.03})
    made = run(
        flavour,
        many(3),
        policy,
        produce=only("t0", lambda *_: stubborn),
        exception=lambda *_: threading.Timer(0.05, stubborn.latch.open).start(),
    )

    assert made.raised is None
    assert made.kinds == ["failed", "succeeded", "succeeded"]
    assert (made.report.abandoned, made.report.fenced) == (0, 1)
    assert made.peak == 1
