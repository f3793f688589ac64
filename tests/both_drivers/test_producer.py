"""The outcome of one produced transaction: PRO-01 to PRO-04, 08, 09, 14, 19, 20, 22."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest
from opentelemetry import baggage
from opentelemetry import context as telemetry

from ergon_framework import scope
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.task.producer import AsyncProducerMixin, ProducerMixin
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError, Category, TransactionException
from ergon_framework.worker.report import OutcomeKind, StopReason
from tests.both_drivers.producer_harness import VARIANTS, make_producer_policy, make_transactions, run, run_in_turn

pytestmark = pytest.mark.parametrize("variant", VARIANTS)

BUSINESS, SYSTEM, TIMEOUT = Category.BUSINESS, Category.SYSTEM, Category.TIMEOUT


class CustomBaseException(BaseException):
    """A BaseException that is not an Exception."""


#: Errors of user code that must not reach the caller.
NON_FRAMEWORK_ERRORS = [
    ValueError("no"),
    TimeoutError("mine"),
    StopAsyncIteration("done"),
    asyncio.CancelledError("own"),
    SystemExit(3),
    KeyboardInterrupt("own"),
    GeneratorExit("own"),
    CustomBaseException("no"),
]


def type_name(error):
    return type(error).__name__


# -- produce ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-01")
def test_the_result_of_produce_goes_to_the_success_handler(variant):
    result = run(variant, make_transactions(1), produce=lambda transaction, _: {"confirmed": transaction.id})

    assert result.steps == [("produce", "t0"), ("success", "t0")]
    assert result.results == [("t0", {"confirmed": "t0"})]
    (outcome,) = result.report.outcomes
    assert (outcome.kind, outcome.attempts, outcome.error) == (OutcomeKind.SUCCEEDED, 1, None)
    assert outcome.result == {"confirmed": "t0"}


@pytest.mark.spec("PRO-01")
@pytest.mark.parametrize("value", [None, False, 0, "", []], ids=repr)
def test_a_falsy_result_is_a_success(variant, value):
    result = run(variant, make_transactions(1), produce=lambda *_: value)

    assert result.results == [("t0", value)]
    assert result.kinds == ["succeeded"]


@pytest.mark.spec("PRO-02", "DX-06")
@pytest.mark.parametrize(
    "error",
    [BusinessError("closed"), TransactionException("closed", BUSINESS), TransactionException(BUSINESS)],
    ids=type_name,
)
def test_a_business_failure_is_not_retried_and_goes_to_the_exception_handler(variant, error):
    result = run(variant, make_transactions(1), produce=run_in_turn(error))

    assert result.of("t0") == ["produce", "exception"]
    (outcome,) = result.report.outcomes
    assert (outcome.kind, outcome.category, outcome.attempts) == (OutcomeKind.FAILED, BUSINESS, 1)
    assert result.handler_errors == [("t0", error)]


@pytest.mark.spec("PRO-02")
@pytest.mark.parametrize("category", [SYSTEM, TIMEOUT])
def test_system_and_timeout_are_retried_until_the_budget_is_exhausted(variant, category):
    error = TransactionException("down", category)
    result = run(
        variant, make_transactions(1), make_producer_policy(produce={"max_attempts": 4}), produce=run_in_turn(error)
    )

    assert result.of("t0") == ["produce"] * 4 + ["exception"]
    assert [attempt for step, _, attempt in result.attempts if step == "produce"] == [0, 1, 2, 3]
    (outcome,) = result.report.outcomes
    assert (outcome.kind, outcome.category, outcome.attempts) == (OutcomeKind.FAILED, category, 4)
    assert result.handler_errors == [("t0", error)]


@pytest.mark.spec("PRO-02", "PRO-09")
@pytest.mark.parametrize("error", NON_FRAMEWORK_ERRORS, ids=type_name)
def test_any_other_error_of_produce_is_system_with_its_cause_and_retried(variant, error):
    result = run(
        variant, make_transactions(3), make_producer_policy(produce={"max_attempts": 2}), produce=run_in_turn(error)
    )

    assert result.raised is None
    assert result.of("t1") == ["produce", "produce", "exception"]
    assert result.kinds == ["failed"] * 3
    for _, handler_error in result.handler_errors:
        assert isinstance(handler_error, TransactionException)
        assert handler_error.category is SYSTEM
        assert handler_error.__cause__ is error


@pytest.mark.spec("PRO-02")
def test_a_successful_retry_makes_the_transaction_succeed(variant):
    result = run(
        variant, make_transactions(1), produce=run_in_turn(ValueError("once"), TransactionException("twice"), "third")
    )

    assert result.of("t0") == ["produce"] * 3 + ["success"]
    assert result.results == [("t0", "third")]
    (outcome,) = result.report.outcomes
    assert (outcome.kind, outcome.attempts) == (OutcomeKind.SUCCEEDED, 3)


@pytest.mark.spec("PRO-02")
def test_a_final_error_is_not_retried(variant):
    result = run(
        variant, make_transactions(1), produce=run_in_turn(TransactionException("given up", SYSTEM, final=True))
    )

    assert result.of("t0") == ["produce", "exception"]
    assert result.report.outcomes[0].category is SYSTEM


@pytest.mark.spec("PRO-02", "PRO-09")
def test_a_failed_transaction_does_not_affect_the_others(variant):
    def produce(transaction, _):
        if transaction.id == "t4":
            raise SystemExit(1)

    result = run(variant, make_transactions(9), produce=produce)

    assert result.kinds == ["succeeded"] * 4 + ["failed"] + ["succeeded"] * 4
    assert result.report.stop_reason is StopReason.DONE


# -- the success handler ---------------------------------------------------------------------------


@pytest.mark.spec("PRO-03")
@pytest.mark.parametrize(
    "error",
    [
        BusinessError("b"),
        TransactionException("b", BUSINESS),
        TransactionException("t", TIMEOUT),
        *NON_FRAMEWORK_ERRORS,
    ],
    ids=type_name,
)
def test_every_error_of_the_success_handler_is_system_and_retried_in_its_own_step(variant, error):
    policy = make_producer_policy(produce={"max_attempts": 5}, success={"max_attempts": 3})
    result = run(variant, make_transactions(1), policy, success=run_in_turn(error))

    assert result.of("t0") == ["produce"] + ["success"] * 3 + ["exception"]
    (outcome,) = result.report.outcomes
    assert (outcome.kind, outcome.category, outcome.processed) == (OutcomeKind.FAILED, SYSTEM, True)
    ((_, handler_error),) = result.handler_errors
    assert isinstance(handler_error, TransactionException)
    assert handler_error.category is SYSTEM
    assert error in (handler_error, handler_error.__cause__)


@pytest.mark.spec("PRO-03")
def test_a_success_handler_that_succeeds_on_retry_is_a_success(variant):
    result = run(
        variant, make_transactions(1), produce=lambda *_: "r", success=run_in_turn(BusinessError("not yet"), None)
    )

    assert result.of("t0") == ["produce", "success", "success"]
    assert result.results == [("t0", "r"), ("t0", "r")]
    assert result.kinds == ["succeeded"]


@pytest.mark.spec("PRO-03")
def test_a_final_error_of_the_success_handler_is_not_retried(variant):
    result = run(variant, make_transactions(1), success=run_in_turn(TransactionException("given up", final=True)))

    assert result.of("t0") == ["produce", "success", "exception"]


# -- the exception handler -------------------------------------------------------------------------


@pytest.mark.spec("PRO-04", "PRO-19")
@pytest.mark.parametrize(
    "error",
    [BusinessError("b"), TransactionException("t", TIMEOUT), *NON_FRAMEWORK_ERRORS],
    ids=lambda error: type(error).__name__,
)
def test_every_error_of_the_exception_handler_is_system_and_its_exhaustion_is_final(variant, error):
    policy = make_producer_policy(produce={"max_attempts": 1}, exception={"max_attempts": 3})
    first = BusinessError("closed")
    result = run(variant, make_transactions(2), policy, produce=run_in_turn(first), exception=run_in_turn(error))

    assert result.raised is None
    assert result.of("t0") == ["produce"] + ["exception"] * 3
    assert result.kinds == ["handler_failed"] * 2
    outcome = result.report.outcomes[0]
    assert outcome.error is first
    assert outcome.handler_error.category is SYSTEM
    assert error in (outcome.handler_error, outcome.handler_error.__cause__)


@pytest.mark.spec("PRO-04")
def test_an_exception_handler_that_succeeds_on_retry_ends_the_transaction_as_failed(variant):
    result = run(
        variant,
        make_transactions(1),
        produce=run_in_turn(BusinessError("closed")),
        exception=run_in_turn(ValueError("x"), None),
    )

    assert result.of("t0") == ["produce", "exception", "exception"]
    assert result.kinds == ["failed"]
    assert result.report.outcomes[0].handler_error is None


@pytest.mark.spec("PRO-04")
def test_every_step_has_its_own_retry_budget(variant):
    policy = make_producer_policy(
        produce={"max_attempts": 2}, success={"max_attempts": 3}, exception={"max_attempts": 4}
    )
    result = run(
        variant,
        make_transactions(1),
        policy,
        produce=run_in_turn(ValueError("p"), None),
        success=run_in_turn(ValueError("s")),
        exception=run_in_turn(ValueError("e")),
    )

    assert result.of("t0") == ["produce"] * 2 + ["success"] * 3 + ["exception"] * 4
    assert result.kinds == ["handler_failed"]


@pytest.mark.spec("PRO-14", "PRO-22")
def test_each_transaction_runs_exactly_one_of_the_two_handlers_once(variant):
    def produce(transaction, _):
        if int(transaction.id[1:]) % 3 == 0:
            raise BusinessError("every third")

    result = run(variant, make_transactions(60), make_producer_policy(concurrency=7, batch=25), produce=produce)

    for number in range(60):
        expected = ["produce", "exception"] if number % 3 == 0 else ["produce", "success"]
        assert result.of(f"t{number}") == expected


# -- waiting ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRO-08")
def test_waits_grow_by_the_multiplier_up_to_the_cap(variant):
    retry = {"max_attempts": 5, "backoff": 0.02, "multiplier": 3.0, "cap": 0.08}
    result = run(
        variant, make_transactions(1), make_producer_policy(produce=retry), produce=run_in_turn(ValueError("down"))
    )

    *waits, to_handler = result.list_gaps()
    expected = [0.02, 0.06, 0.08, 0.08]
    assert len(waits) == len(expected)
    assert all(wait >= minimum - 0.001 for wait, minimum in zip(waits, expected, strict=True))
    # Without the cap the waits would add up to 0.8 s; there is no wait after the last attempt.
    assert sum(waits) < 0.7
    assert to_handler < 0.08


@pytest.mark.spec("PRO-08")
def test_retry_after_is_the_minimum_wait_even_beyond_the_max_inline_delay(variant):
    error = TransactionException("busy", retry_after=0.06)
    policy = make_producer_policy(produce={"max_inline_delay": 0.01})
    result = run(variant, make_transactions(1), policy, produce=run_in_turn(error, "now"))

    assert result.list_gaps()[0] >= 0.059
    assert result.kinds == ["succeeded"]


# -- what user code may touch ----------------------------------------------------------------------


class PlainProducer(ProducerMixin):
    """Only what every producer has."""


class AsyncPlainProducer(AsyncProducerMixin):
    """Only what every producer has."""


@pytest.mark.spec("PRO-20")
def test_by_default_the_transaction_is_dispatched_unchanged_and_its_confirmation_is_the_result(variant):
    task = PlainProducer() if variant == "threads" else AsyncPlainProducer()
    task.connector = MemoryConnector("orders")
    transactions = [
        Transaction({"n": number}, id=f"t{number}", source="shop", tenant="acme", key="k") for number in range(25)
    ]

    result = task.produce_transactions(transactions)
    report = result if variant == "threads" else asyncio.run(result)

    fetched = [delivery.transaction for delivery in task.connector.fetch_transactions(100)]
    assert sorted(fetched, key=lambda transaction: transaction.payload["n"]) == transactions
    assert [outcome.result.transaction_id for outcome in report.outcomes] == [
        transaction.id for transaction in transactions
    ]
    assert {outcome.kind for outcome in report.outcomes} == {OutcomeKind.SUCCEEDED}


@pytest.mark.spec("PRO-22")
def test_context_variables_and_baggage_do_not_leak_between_transactions_or_to_the_caller(variant):
    owner: ContextVar[str | None] = ContextVar("owner", default=None)
    seen = []

    def produce(transaction, _):
        seen.append((owner.get(), baggage.get_baggage("owner")))
        owner.set(transaction.id)
        telemetry.attach(baggage.set_baggage("owner", transaction.id))
        assert scope.current().transaction_id == transaction.id

    result = run(variant, make_transactions(40), make_producer_policy(concurrency=3), produce=produce, success=produce)

    assert result.kinds == ["succeeded"] * 40
    assert set(seen) == {(None, None)}
    assert (owner.get(), baggage.get_baggage("owner"), scope.current()) == (None, None, None)


@pytest.mark.spec("PRO-22")
def test_the_context_of_a_failed_attempt_does_not_leak_to_other_transactions(variant):
    owner: ContextVar[str | None] = ContextVar("owner", default=None)
    leaks = []

    def move(transaction, argument):
        if owner.get() not in (None, transaction.id):
            leaks.append((owner.get(), transaction.id))
        owner.set(transaction.id)
        if not isinstance(argument, TransactionException):
            raise ValueError(transaction.id)

    result = run(variant, make_transactions(30), make_producer_policy(concurrency=4), produce=move, exception=move)

    assert result.kinds == ["failed"] * 30
    assert leaks == []
