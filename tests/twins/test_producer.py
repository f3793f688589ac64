"""What becomes of one produced transaction: PRO-01 to PRO-04, 08, 09, 14, 19, 20, 22."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest
from opentelemetry import baggage
from opentelemetry import context as telemetry

from ergon_framework import scope
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.task.exceptions import BusinessError, Category, TransactionException
from ergon_framework.task.mixins.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.task.report import End, Kind
from ergon_framework.transaction import Transaction
from tests.twins.producing import FLAVOURS, in_turn, many, quick, run

pytestmark = pytest.mark.parametrize("flavour", FLAVOURS)

BUSINESS, SYSTEM, TIMEOUT = Category.BUSINESS, Category.SYSTEM, Category.TIMEOUT


class Unruly(BaseException):
    """Nobody's Exception."""


#: What user code may raise without anybody outside seeing it.
ANYTHING = [
    ValueError("no"),
    TimeoutError("mine"),
    StopAsyncIteration("done"),
    asyncio.CancelledError("own"),
    SystemExit(3),
    KeyboardInterrupt("own"),
    GeneratorExit("own"),
    Unruly("no"),
]


def named(error):
    return type(error).__name__


# -- produce ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-01")
def test_what_produce_returned_is_what_the_success_handler_gets(flavour):
    made = run(flavour, many(1), produce=lambda transaction, _: {"confirmed": transaction.id})

    assert made.steps == [("produce", "t0"), ("success", "t0")]
    assert made.results == [("t0", {"confirmed": "t0"})]
    (outcome,) = made.report.outcomes
    assert (outcome.kind, outcome.attempts, outcome.error) == (Kind.SUCCEEDED, 1, None)
    assert outcome.result == {"confirmed": "t0"}


@pytest.mark.spec("PRO-01")
@pytest.mark.parametrize("value", [None, False, 0, "", []], ids=repr)
def test_a_value_that_is_false_is_success_too(flavour, value):
    made = run(flavour, many(1), produce=lambda *_: value)

    assert made.results == [("t0", value)]
    assert made.kinds == ["succeeded"]


@pytest.mark.spec("PRO-02", "DX-06")
@pytest.mark.parametrize(
    "error",
    [BusinessError("closed"), TransactionException("closed", BUSINESS), TransactionException(BUSINESS)],
    ids=named,
)
def test_a_business_failure_has_one_attempt_and_then_the_exception_handler(flavour, error):
    made = run(flavour, many(1), produce=in_turn(error))

    assert made.of("t0") == ["produce", "exception"]
    (outcome,) = made.report.outcomes
    assert (outcome.kind, outcome.category, outcome.attempts) == (Kind.FAILED, BUSINESS, 1)
    assert made.told == [("t0", error)]


@pytest.mark.spec("PRO-02")
@pytest.mark.parametrize("category", [SYSTEM, TIMEOUT])
def test_system_and_timeout_are_tried_until_the_budget_is_spent(flavour, category):
    error = TransactionException("down", category)
    made = run(flavour, many(1), quick(produce={"max_attempts": 4}), produce=in_turn(error))

    assert made.of("t0") == ["produce"] * 4 + ["exception"]
    assert [attempt for step, _, attempt in made.attempts if step == "produce"] == [0, 1, 2, 3]
    (outcome,) = made.report.outcomes
    assert (outcome.kind, outcome.category, outcome.attempts) == (Kind.FAILED, category, 4)
    assert made.told == [("t0", error)]


@pytest.mark.spec("PRO-02", "PRO-09")
@pytest.mark.parametrize("error", ANYTHING, ids=named)
def test_anything_else_from_produce_is_system_with_its_cause_and_retried(flavour, error):
    made = run(flavour, many(3), quick(produce={"max_attempts": 2}), produce=in_turn(error))

    assert made.raised is None
    assert made.of("t1") == ["produce", "produce", "exception"]
    assert made.kinds == ["failed"] * 3
    for _, told in made.told:
        assert isinstance(told, TransactionException)
        assert told.category is SYSTEM
        assert told.__cause__ is error


@pytest.mark.spec("PRO-02")
def test_a_retry_that_succeeds_makes_the_transaction_succeed(flavour):
    made = run(flavour, many(1), produce=in_turn(ValueError("once"), TransactionException("twice"), "third"))

    assert made.of("t0") == ["produce"] * 3 + ["success"]
    assert made.results == [("t0", "third")]
    (outcome,) = made.report.outcomes
    assert (outcome.kind, outcome.attempts) == (Kind.SUCCEEDED, 3)


@pytest.mark.spec("PRO-02")
def test_a_final_error_is_not_retried(flavour):
    made = run(flavour, many(1), produce=in_turn(TransactionException("given up", SYSTEM, final=True)))

    assert made.of("t0") == ["produce", "exception"]
    assert made.report.outcomes[0].category is SYSTEM


@pytest.mark.spec("PRO-02", "PRO-09")
def test_a_failing_neighbour_fails_nobody_else(flavour):
    def produce(transaction, _):
        if transaction.id == "t4":
            raise SystemExit(1)

    made = run(flavour, many(9), produce=produce)

    assert made.kinds == ["succeeded"] * 4 + ["failed"] + ["succeeded"] * 4
    assert made.report.end is End.DONE


# -- the success handler ---------------------------------------------------------------------------


@pytest.mark.spec("PRO-03")
@pytest.mark.parametrize(
    "error",
    [BusinessError("b"), TransactionException("b", BUSINESS), TransactionException("t", TIMEOUT), *ANYTHING],
    ids=named,
)
def test_whatever_the_success_handler_raises_is_system_and_retried_under_its_own_step(flavour, error):
    policy = quick(produce={"max_attempts": 5}, success={"max_attempts": 3})
    made = run(flavour, many(1), policy, success=in_turn(error))

    assert made.of("t0") == ["produce"] + ["success"] * 3 + ["exception"]
    (outcome,) = made.report.outcomes
    assert (outcome.kind, outcome.category, outcome.processed) == (Kind.FAILED, SYSTEM, True)
    ((_, told),) = made.told
    assert isinstance(told, TransactionException)
    assert told.category is SYSTEM
    assert error in (told, told.__cause__)


@pytest.mark.spec("PRO-03")
def test_a_success_handler_that_recovers_is_success(flavour):
    made = run(flavour, many(1), produce=lambda *_: "r", success=in_turn(BusinessError("not yet"), None))

    assert made.of("t0") == ["produce", "success", "success"]
    assert made.results == [("t0", "r"), ("t0", "r")]
    assert made.kinds == ["succeeded"]


@pytest.mark.spec("PRO-03")
def test_a_final_error_of_the_success_handler_is_not_retried(flavour):
    made = run(flavour, many(1), success=in_turn(TransactionException("given up", final=True)))

    assert made.of("t0") == ["produce", "success", "exception"]


# -- the exception handler -------------------------------------------------------------------------


@pytest.mark.spec("PRO-04", "PRO-19")
@pytest.mark.parametrize(
    "error", [BusinessError("b"), TransactionException("t", TIMEOUT), *ANYTHING], ids=lambda error: type(error).__name__
)
def test_whatever_the_exception_handler_raises_is_system_and_its_exhaustion_is_final(flavour, error):
    policy = quick(produce={"max_attempts": 1}, exception={"max_attempts": 3})
    first = BusinessError("closed")
    made = run(flavour, many(2), policy, produce=in_turn(first), exception=in_turn(error))

    assert made.raised is None
    assert made.of("t0") == ["produce"] + ["exception"] * 3
    assert made.kinds == ["handler_failed"] * 2
    outcome = made.report.outcomes[0]
    assert outcome.error is first
    assert outcome.handler_error.category is SYSTEM
    assert error in (outcome.handler_error, outcome.handler_error.__cause__)


@pytest.mark.spec("PRO-04")
def test_an_exception_handler_that_recovers_has_failed_the_transaction_properly(flavour):
    made = run(flavour, many(1), produce=in_turn(BusinessError("closed")), exception=in_turn(ValueError("x"), None))

    assert made.of("t0") == ["produce", "exception", "exception"]
    assert made.kinds == ["failed"]
    assert made.report.outcomes[0].handler_error is None


@pytest.mark.spec("PRO-04")
def test_every_step_has_a_budget_of_its_own(flavour):
    policy = quick(produce={"max_attempts": 2}, success={"max_attempts": 3}, exception={"max_attempts": 4})
    made = run(
        flavour,
        many(1),
        policy,
        produce=in_turn(ValueError("p"), None),
        success=in_turn(ValueError("s")),
        exception=in_turn(ValueError("e")),
    )

    assert made.of("t0") == ["produce"] * 2 + ["success"] * 3 + ["exception"] * 4
    assert made.kinds == ["handler_failed"]


@pytest.mark.spec("PRO-14", "PRO-22")
def test_success_follows_every_success_and_exception_every_final_failure_exactly_once(flavour):
    def produce(transaction, _):
        if int(transaction.id[1:]) % 3 == 0:
            raise BusinessError("every third")

    made = run(flavour, many(60), quick(concurrency=7, batch=25), produce=produce)

    for number in range(60):
        expected = ["produce", "exception"] if number % 3 == 0 else ["produce", "success"]
        assert made.of(f"t{number}") == expected


# -- waiting ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-08")
def test_waits_grow_by_the_multiplier_up_to_the_cap(flavour):
    retry = {"max_attempts": 5, "backoff": 0.02, "multiplier": 3.0, "cap": 0.08}
    made = run(flavour, many(1), quick(produce=retry), produce=in_turn(ValueError("down")))

    *waits, to_handler = made.gaps()
    expected = [0.02, 0.06, 0.08, 0.08]
    assert len(waits) == len(expected)
    assert all(wait >= least - 0.001 for wait, least in zip(waits, expected, strict=True))
    # The cap held: without it the waits would add up to 0.8 s. And nobody waits after the last attempt.
    assert sum(waits) < 0.7
    assert to_handler < 0.08


@pytest.mark.spec("PRO-08")
def test_retry_after_is_the_least_wait_and_is_slept_however_long_hold_is(flavour):
    error = TransactionException("busy", retry_after=0.06)
    made = run(flavour, many(1), quick(produce={"hold": 0.01}), produce=in_turn(error, "now"))

    assert made.gaps()[0] >= 0.059
    assert made.kinds == ["succeeded"]


# -- what user code may touch ----------------------------------------------------------------------


class Plain(ProducerMixin):
    """Only what every producer has."""


class AsyncPlain(AsyncProducerMixin):
    """Only what every producer has."""


@pytest.mark.spec("PRO-20")
def test_by_default_the_transaction_is_dispatched_as_it_is_and_its_confirmation_is_the_result(flavour):
    task = Plain() if flavour == "threads" else AsyncPlain()
    task.connector = MemoryConnector("orders")
    given = [Transaction(f"t{number}", {"n": number}, source="shop", tenant="acme", key="k") for number in range(25)]

    made = task.produce_transactions(given)
    report = made if flavour == "threads" else asyncio.run(made)

    fetched = [delivery.transaction for delivery in task.connector.fetch_transactions(100)]
    assert sorted(fetched, key=lambda transaction: transaction.payload["n"]) == given
    assert [outcome.result.transaction_id for outcome in report.outcomes] == [transaction.id for transaction in given]
    assert {outcome.kind for outcome in report.outcomes} == {Kind.SUCCEEDED}


@pytest.mark.spec("PRO-22")
def test_neither_context_variable_nor_baggage_crosses_transactions_or_reaches_the_caller(flavour):
    owner: ContextVar[str | None] = ContextVar("owner", default=None)
    seen = []

    def produce(transaction, _):
        seen.append((owner.get(), baggage.get_baggage("owner")))
        owner.set(transaction.id)
        telemetry.attach(baggage.set_baggage("owner", transaction.id))
        assert scope.current().transaction_id == transaction.id

    made = run(flavour, many(40), quick(concurrency=3), produce=produce, success=produce)

    assert made.kinds == ["succeeded"] * 40
    assert set(seen) == {(None, None)}
    assert (owner.get(), baggage.get_baggage("owner"), scope.current()) == (None, None, None)


@pytest.mark.spec("PRO-22")
def test_what_a_failed_attempt_left_in_its_context_reaches_no_other_transaction(flavour):
    owner: ContextVar[str | None] = ContextVar("owner", default=None)
    strangers = []

    def move(transaction, given):
        if owner.get() not in (None, transaction.id):
            strangers.append((owner.get(), transaction.id))
        owner.set(transaction.id)
        if not isinstance(given, TransactionException):
            raise ValueError(transaction.id)

    made = run(flavour, many(30), quick(concurrency=4), produce=move, exception=move)

    assert made.kinds == ["failed"] * 30
    assert strangers == []
