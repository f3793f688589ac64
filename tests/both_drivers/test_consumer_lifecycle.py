"""Which result leads to which step, how often, and with which arguments."""

from __future__ import annotations

import inspect
from copy import deepcopy
from itertools import pairwise

import pytest

from ergon_framework.connectors.base import Defer
from ergon_framework.errors import Category, ErgonError
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError, TransactionException
from ergon_framework.worker.report import OutcomeKind
from tests.both_drivers.harness import WakeupDelayMeter, make_policy, raise_error, return_value

BUSINESS, SYSTEM, TIMEOUT = Category.BUSINESS, Category.SYSTEM, Category.TIMEOUT


@pytest.mark.spec("CON-01")
@pytest.mark.parametrize("value", ["receipt", None, False, ValueError("returned, not raised")])
def test_the_result_of_process_goes_to_the_success_handler(build, value):
    world = build(process=return_value(value)).offer("a").run(make_policy())
    assert world.steps() == ["process", "success"]
    assert world.only("success").argument is value
    assert world.only("success").transaction.id == "a"
    assert world.outcome().kind is OutcomeKind.SUCCEEDED
    assert world.outcome().result is value
    assert world.outcome().succeeded_steps == ("process", "success")


@pytest.mark.spec("CON-02", "DX-06")
@pytest.mark.parametrize(
    "error", [BusinessError("no such order"), TransactionException("no", BUSINESS), TransactionException(BUSINESS)]
)
def test_a_business_failure_is_not_retried(build, error):
    world = build(process=raise_error(error)).offer("a").run(make_policy(process={"max_attempts": 4}))
    assert world.steps() == ["process", "exception"]
    assert world.only("exception").argument is error
    assert world.outcome().kind is OutcomeKind.FAILED
    assert world.outcome().category is BUSINESS
    assert world.outcome().attempts == 1


@pytest.mark.spec("CON-03")
@pytest.mark.parametrize("category", [SYSTEM, TIMEOUT])
def test_system_and_timeout_are_retried_and_then_handled(build, category):
    error = TransactionException("down", category)
    world = build(process=raise_error(error)).offer("a").run(make_policy(process={"max_attempts": 3}))
    assert world.steps() == ["process"] * 3 + ["exception"]
    assert world.only("exception").argument is error
    assert (world.outcome().kind, world.outcome().category, world.outcome().attempts) == (
        OutcomeKind.FAILED,
        category,
        3,
    )


@pytest.mark.spec("CON-03", "CON-22")
def test_a_retry_that_returns_is_a_success(build):
    world = build(
        process=[raise_error(TransactionException("down", SYSTEM)), raise_error(OSError("reset")), return_value(7)]
    )
    world.offer("a").run(make_policy(process={"max_attempts": 3}))
    assert world.steps() == ["process"] * 3 + ["success"]
    assert (world.outcome().kind, world.outcome().attempts) == (OutcomeKind.SUCCEEDED, 3)


@pytest.mark.spec("CON-04")
def test_any_other_exception_is_system_with_its_cause_and_is_retried(build):
    raised = KeyError("customer")
    world = build(process=raise_error(raised)).offer("a").run(make_policy(process={"max_attempts": 2}))
    assert world.steps() == ["process", "process", "exception"]
    error = world.only("exception").argument
    assert isinstance(error, TransactionException)
    assert error.category is SYSTEM
    assert error.__cause__ is raised


@pytest.mark.spec("CON-05")
def test_the_success_handler_is_retried_under_its_own_budget(build):
    world = build(
        process=return_value("done"), success=[raise_error(OSError()), raise_error(OSError()), return_value(None)]
    )
    world.offer("a").run(make_policy(process={"max_attempts": 1}, success={"max_attempts": 3}))
    assert world.steps() == ["process", "success", "success", "success"]
    assert [call.argument for call in world.of("success")] == ["done"] * 3
    assert world.outcome().kind is OutcomeKind.SUCCEEDED


@pytest.mark.spec("CON-05", "CON-23")
def test_an_exhausted_success_handler_falls_back_to_the_exception_handler(build):
    raised = OSError("mail is down")
    world = build(process=return_value("done"), success=raise_error(raised)).offer("a")
    world.run(make_policy(process={"max_attempts": 5}, success={"max_attempts": 2}))
    assert world.steps() == ["process", "success", "success", "exception"]
    assert world.only("exception").argument.__cause__ is raised
    outcome = world.outcome()
    assert outcome.kind is OutcomeKind.FAILED
    assert outcome.processed
    assert outcome.succeeded_steps == ("process",)


@pytest.mark.spec("CON-06")
def test_a_failing_exception_handler_is_retried_until_it_returns(build):
    world = build(process=raise_error(BusinessError("no")), exception=[raise_error(OSError()), return_value(None)])
    world.offer("a").run(make_policy(exception={"max_attempts": 3}))
    assert world.steps() == ["process", "exception", "exception"]
    assert world.outcome().kind is OutcomeKind.FAILED


@pytest.mark.spec("CON-06")
def test_an_exhausted_exception_handler_leaves_both_errors_in_the_outcome(build):
    first, second = BusinessError("no"), OSError("ticket system is down")
    world = build(process=raise_error(first), exception=raise_error(second)).offer("a")
    world.run(make_policy(process={"max_attempts": 7}, exception={"max_attempts": 3}))
    assert world.steps() == ["process"] + ["exception"] * 3
    outcome = world.outcome()
    assert outcome.kind is OutcomeKind.EXCEPTION_HANDLER_FAILED
    assert outcome.error is first
    assert outcome.handler_error.__cause__ is second
    assert list(world.report.failures) == [outcome]


FAILURES = {
    "business": ({"process": raise_error(BusinessError("no"))}, ["process"]),
    "process exhausted": ({"process": raise_error(OSError())}, ["process", "process"]),
    "success exhausted": ({"success": raise_error(OSError())}, ["process", "success", "success"]),
}


@pytest.mark.spec("CON-22", "CON-23")
@pytest.mark.parametrize("failure", FAILURES)
def test_the_exception_handler_runs_once_for_each_failed_transaction(build, failure):
    bodies, steps = FAILURES[failure]
    world = build(**bodies).offer("a", "b", "c")
    world.run(make_policy(process={"max_attempts": 2}, success={"max_attempts": 2}))
    for transaction_id in "abc":
        assert world.steps(transaction_id) == [*steps, "exception"]
    assert world.kinds() == dict.fromkeys("abc", "failed")


@pytest.mark.spec("CON-39")
@pytest.mark.parametrize("category", list(Category))
def test_every_error_of_a_handler_is_system_and_is_retried(build, category):
    error = TransactionException("from a handler", category)
    world = build(success=raise_error(error), exception=raise_error(error)).offer("a")
    world.run(make_policy(success={"max_attempts": 2}, exception={"max_attempts": 3}))
    assert world.steps() == ["process"] + ["success"] * 2 + ["exception"] * 3
    assert world.of("exception")[0].argument.category is SYSTEM
    assert world.outcome().category is SYSTEM
    assert world.outcome().handler_error.category is SYSTEM


@pytest.mark.spec("CON-39", "CON-44")
def test_a_final_error_of_a_handler_is_not_retried(build):
    final = TransactionException("gave up below", final=True)
    world = build(success=raise_error(final), exception=raise_error(final)).offer("a").run(make_policy())
    assert world.steps() == ["process", "success", "exception"]
    assert world.outcome().kind is OutcomeKind.EXCEPTION_HANDLER_FAILED


@pytest.mark.spec("CON-39", "CON-44", "CON-45")
@pytest.mark.parametrize("step", ["success", "exception"])
def test_a_handler_waits_its_retry_after_even_beyond_the_max_inline_delay(build, step):
    later = TransactionException("busy", retry_after=0.1)
    bodies = {"process": raise_error(BusinessError("no"))} if step == "exception" else {}
    world = build(**bodies, **{step: [raise_error(later), return_value(None)]}).offer("a")
    world.run(make_policy(**{step: {"max_inline_delay": 0.01}}))
    first, second = world.of(step)
    assert second.began - first.ended >= 0.1
    assert world.outcome().kind is (OutcomeKind.SUCCEEDED if step == "success" else OutcomeKind.FAILED)


@pytest.mark.spec("CON-37")
def test_a_timeout_error_of_user_code_is_system_and_is_retried(build):
    raised = TimeoutError("the other side did not answer")
    world = build(process=raise_error(raised)).offer("a").run(make_policy(process={"max_attempts": 2}))
    assert world.steps() == ["process", "process", "exception"]
    assert world.only("exception").argument.category is SYSTEM
    assert world.only("exception").argument.__cause__ is raised


@pytest.mark.spec("CON-42")
def test_the_mixins_have_the_documented_names():
    for mixin in (ConsumerMixin, AsyncConsumerMixin):
        assert list(inspect.signature(mixin.consume_transactions).parameters)[1] == "policy"
        assert list(inspect.signature(mixin.handle_transaction_exception).parameters)[1:] == ["transaction", "exc"]
        assert callable(mixin._consume_transactions)
        assert callable(mixin._start_processing)


@pytest.mark.spec("CON-42", "DX-19")
def test_each_worker_runs_start_processing(build):
    world = build().offer("a", "b")
    started, start = [], world.task._start_processing

    def record_start(course, transaction, watch):
        started.append(transaction.id)
        return start(course, transaction, watch)

    world.task._start_processing = record_start
    world.run(make_policy(concurrency=1))
    assert sorted(started) == ["a", "b"]
    assert world.kinds() == {"a": "succeeded", "b": "succeeded"}


class RejectionError(ErgonError):
    category = BUSINESS
    code = "refused"


@pytest.mark.spec("CON-42", "CON-44")
@pytest.mark.parametrize("raised", [OSError("x"), SystemExit(1), RejectionError("no"), TransactionException("own")])
def test_the_exception_handler_always_gets_a_transaction_exception_with_its_cause(build, raised):
    world = build(process=raise_error(raised)).offer("a").run(make_policy(process={"max_attempts": 1}))
    error = world.only("exception").argument
    assert isinstance(error, TransactionException)
    assert raised in (error, error.__cause__)


@pytest.mark.spec("CON-42")
def test_the_cause_set_by_user_code_is_kept(build):
    cause = OSError("socket closed")

    def body(call):
        raise TransactionException("no answer", SYSTEM) from cause

    world = build(process=body).offer("a").run(make_policy(process={"max_attempts": 1}))
    assert world.only("exception").argument.__cause__ is cause


@pytest.mark.spec("CON-44")
def test_a_framework_error_is_classified_by_its_own_category(build):
    world = (
        build(process=raise_error(RejectionError("bad request")))
        .offer("a")
        .run(make_policy(process={"max_attempts": 4}))
    )
    assert world.steps() == ["process", "exception"]
    assert world.only("exception").argument.category is BUSINESS
    assert world.only("exception").argument.code == "refused"


@pytest.mark.spec("DX-09")
def test_a_group_of_business_failures_is_not_retried(build):
    group = ExceptionGroup("unhandled errors in a TaskGroup", [BusinessError("sold out"), BusinessError("no card")])
    world = build(process=raise_error(group)).offer("a").run(make_policy(process={"max_attempts": 4}))
    assert world.steps() == ["process", "exception"]
    assert (world.outcome().category, world.outcome().attempts) == (BUSINESS, 1)
    assert world.only("exception").argument.__cause__ is group
    (dead_letter,) = world.queue.dead_letters
    assert dead_letter.failure.error_message.endswith("BusinessError: sold out; BusinessError: no card")


@pytest.mark.spec("DX-09")
def test_a_group_with_a_system_failure_is_retried(build):
    group = ExceptionGroup("two", [BusinessError("sold out"), OSError("reset")])
    world = (
        build(process=[raise_error(group), return_value(7)]).offer("a").run(make_policy(process={"max_attempts": 4}))
    )
    assert world.steps() == ["process", "process", "success"]


@pytest.mark.spec("CON-44")
def test_a_final_error_is_not_retried(build):
    world = build(process=raise_error(TransactionException("exhausted below", SYSTEM, final=True)))
    world.offer("a").run(make_policy(process={"max_attempts": 4}))
    assert world.steps() == ["process", "exception"]
    assert world.outcome().category is SYSTEM


@pytest.mark.spec("CON-44")
def test_retry_after_is_the_minimum_wait(build):
    world = build(process=[raise_error(TransactionException("busy", retry_after=0.1)), return_value(None)])
    world.offer("a").run(make_policy(process={"backoff": 0.001}))
    first, second = world.of("process")
    assert second.began - first.ended >= 0.1


@pytest.mark.spec("CON-44")
def test_a_backoff_longer_than_retry_after_applies_in_full(build):
    world = build(process=[raise_error(TransactionException("busy", retry_after=0.001)), return_value(None)])
    world.offer("a").run(make_policy(process={"backoff": 0.1}))
    first, second = world.of("process")
    assert second.began - first.ended >= 0.1


@pytest.mark.spec("CON-13")
@pytest.mark.parametrize("max_attempts", [1, 2, 4])
def test_the_first_attempt_is_number_0_and_is_counted(build, max_attempts):
    world = build(process=raise_error(OSError())).offer("a").run(make_policy(process={"max_attempts": max_attempts}))
    assert [call.scope.attempt for call in world.of("process")] == list(range(max_attempts))
    assert world.outcome().attempts == max_attempts


@pytest.mark.spec("CON-13")
@pytest.mark.parametrize("cap, expected", [(0.1, [0.02, 0.06, 0.1, 0.1]), (0.0, [0.02, 0.06, 0.18])])
def test_every_retry_waits_for_its_backoff(build, cap, expected):
    retry = {"max_attempts": len(expected) + 1, "backoff": 0.02, "multiplier": 3.0, "cap": cap}
    with WakeupDelayMeter() as wakeup_delay:
        world = build(process=raise_error(OSError())).offer("a").run(make_policy(process=retry))
    calls = world.of("process")
    waits = [later.began - earlier.ended for earlier, later in pairwise(calls)]
    for wait, minimum in zip(waits, expected, strict=True):
        assert minimum <= wait < minimum + 0.05 + wakeup_delay.late
    history = world.queue.dead_letters[0].failure.history
    assert [attempt.delay for attempt in history[:-1]] == pytest.approx(expected)


@pytest.mark.spec("DX-10")
def test_a_payload_changed_by_an_attempt_does_not_reach_other_calls_or_the_dead_letter(build):
    seen = []

    def body(call):
        seen.append((call.step, deepcopy(call.transaction.payload)))
        call.transaction.payload["lines"].clear()
        del call.transaction.payload["card"]
        raise OSError("bank down")

    def handler(call):
        seen.append((call.step, deepcopy(call.transaction.payload)))
        call.transaction.payload.clear()

    order = {"card": "4711", "lines": [1, 2]}
    world = build(process=body, exception=handler).offer(Transaction(order, id="a", source="queue"))
    world.run(make_policy(process={"max_attempts": 3}))
    assert seen == [(step, order) for step in ("process", "process", "process", "exception")]
    assert str(world.outcome().error) == "OSError: bank down"
    (dead_letter,) = world.queue.dead_letters
    assert dead_letter.payload == order == {"card": "4711", "lines": [1, 2]}


@pytest.mark.spec("DX-10")
def test_a_payload_changed_by_a_handler_is_restored_for_the_success_handler_and_after_a_deferral(build):
    seen = []

    def body(call):
        seen.append((call.step, deepcopy(call.transaction.payload)))
        call.transaction.payload["lines"].append(3)
        return Defer(0.01) if len(seen) == 1 else None

    world = build(process=body, success=body).offer(Transaction({"lines": [1]}, id="a", source="queue"))
    world.start(make_policy(streaming=True)).until(lambda: len(seen) == 4).stop().finish()
    assert [payload for _, payload in seen] == [{"lines": [1]}] * 4
