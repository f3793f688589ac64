"""What leads to which step, how often, and what each is told."""

from __future__ import annotations

import inspect
from copy import deepcopy
from itertools import pairwise

import pytest

from ergon_framework.connectors.base import Later
from ergon_framework.errors import Category, ErgonError
from ergon_framework.task.exceptions import BusinessError, TransactionException
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.report import Kind
from ergon_framework.transaction import Transaction
from tests.twins.world import Pulse, fails, gives, policy

BUSINESS, SYSTEM, TIMEOUT = Category.BUSINESS, Category.SYSTEM, Category.TIMEOUT


@pytest.mark.spec("CON-01")
@pytest.mark.parametrize("value", ["receipt", None, False, ValueError("returned, not raised")])
def test_what_process_returns_goes_to_the_success_handler(build, value):
    world = build(process=gives(value)).offer("a").run(policy())
    assert world.steps() == ["process", "success"]
    assert world.only("success").given is value
    assert world.only("success").transaction.id == "a"
    assert world.outcome().kind is Kind.SUCCEEDED
    assert world.outcome().result is value
    assert world.outcome().succeeded_steps == ("process", "success")


@pytest.mark.spec("CON-02", "DX-06")
@pytest.mark.parametrize(
    "error", [BusinessError("no such order"), TransactionException("no", BUSINESS), TransactionException(BUSINESS)]
)
def test_a_business_failure_has_had_its_only_attempt(build, error):
    world = build(process=fails(error)).offer("a").run(policy(process={"max_attempts": 4}))
    assert world.steps() == ["process", "exception"]
    assert world.only("exception").given is error
    assert world.outcome().kind is Kind.FAILED
    assert world.outcome().category is BUSINESS
    assert world.outcome().attempts == 1


@pytest.mark.spec("CON-03")
@pytest.mark.parametrize("category", [SYSTEM, TIMEOUT])
def test_system_and_timeout_are_retried_and_then_handled(build, category):
    error = TransactionException("down", category)
    world = build(process=fails(error)).offer("a").run(policy(process={"max_attempts": 3}))
    assert world.steps() == ["process"] * 3 + ["exception"]
    assert world.only("exception").given is error
    assert (world.outcome().kind, world.outcome().category, world.outcome().attempts) == (Kind.FAILED, category, 3)


@pytest.mark.spec("CON-03", "CON-22")
def test_a_retry_that_returns_is_a_success(build):
    world = build(process=[fails(TransactionException("down", SYSTEM)), fails(OSError("reset")), gives(7)])
    world.offer("a").run(policy(process={"max_attempts": 3}))
    assert world.steps() == ["process"] * 3 + ["success"]
    assert (world.outcome().kind, world.outcome().attempts) == (Kind.SUCCEEDED, 3)


@pytest.mark.spec("CON-04")
def test_any_other_exception_is_system_with_its_cause_and_is_retried(build):
    raised = KeyError("customer")
    world = build(process=fails(raised)).offer("a").run(policy(process={"max_attempts": 2}))
    assert world.steps() == ["process", "process", "exception"]
    told = world.only("exception").given
    assert isinstance(told, TransactionException)
    assert told.category is SYSTEM
    assert told.__cause__ is raised


@pytest.mark.spec("CON-05")
def test_the_success_handler_is_retried_under_its_own_budget(build):
    world = build(process=gives("done"), success=[fails(OSError()), fails(OSError()), gives(None)])
    world.offer("a").run(policy(process={"max_attempts": 1}, success={"max_attempts": 3}))
    assert world.steps() == ["process", "success", "success", "success"]
    assert [call.given for call in world.of("success")] == ["done"] * 3
    assert world.outcome().kind is Kind.SUCCEEDED


@pytest.mark.spec("CON-05", "CON-23")
def test_an_exhausted_success_handler_falls_back_to_the_exception_handler(build):
    raised = OSError("mail is down")
    world = build(process=gives("done"), success=fails(raised)).offer("a")
    world.run(policy(process={"max_attempts": 5}, success={"max_attempts": 2}))
    assert world.steps() == ["process", "success", "success", "exception"]
    assert world.only("exception").given.__cause__ is raised
    outcome = world.outcome()
    assert outcome.kind is Kind.FAILED
    assert outcome.processed
    assert outcome.succeeded_steps == ("process",)


@pytest.mark.spec("CON-06")
def test_a_failing_exception_handler_is_retried_until_it_returns(build):
    world = build(process=fails(BusinessError("no")), exception=[fails(OSError()), gives(None)])
    world.offer("a").run(policy(exception={"max_attempts": 3}))
    assert world.steps() == ["process", "exception", "exception"]
    assert world.outcome().kind is Kind.FAILED


@pytest.mark.spec("CON-06")
def test_an_exhausted_exception_handler_leaves_both_errors_in_the_outcome(build):
    first, second = BusinessError("no"), OSError("ticket system is down")
    world = build(process=fails(first), exception=fails(second)).offer("a")
    world.run(policy(process={"max_attempts": 7}, exception={"max_attempts": 3}))
    assert world.steps() == ["process"] + ["exception"] * 3
    outcome = world.outcome()
    assert outcome.kind is Kind.HANDLER_FAILED
    assert outcome.error is first
    assert outcome.handler_error.__cause__ is second
    assert list(world.report.failures) == [outcome]


WAYS_TO_FAIL = {
    "business": ({"process": fails(BusinessError("no"))}, ["process"]),
    "process exhausted": ({"process": fails(OSError())}, ["process", "process"]),
    "success exhausted": ({"success": fails(OSError())}, ["process", "success", "success"]),
}


@pytest.mark.spec("CON-22", "CON-23")
@pytest.mark.parametrize("way", WAYS_TO_FAIL)
def test_the_exception_handler_runs_once_for_each_failed_transaction(build, way):
    bodies, before = WAYS_TO_FAIL[way]
    world = build(**bodies).offer("a", "b", "c")
    world.run(policy(process={"max_attempts": 2}, success={"max_attempts": 2}))
    for transaction_id in "abc":
        assert world.steps(transaction_id) == [*before, "exception"]
    assert world.kinds() == dict.fromkeys("abc", "failed")


@pytest.mark.spec("CON-39")
@pytest.mark.parametrize("category", list(Category))
def test_whatever_a_handler_raises_is_system_and_is_retried(build, category):
    error = TransactionException("from a handler", category)
    world = build(success=fails(error), exception=fails(error)).offer("a")
    world.run(policy(success={"max_attempts": 2}, exception={"max_attempts": 3}))
    assert world.steps() == ["process"] + ["success"] * 2 + ["exception"] * 3
    assert world.of("exception")[0].given.category is SYSTEM
    assert world.outcome().category is SYSTEM
    assert world.outcome().handler_error.category is SYSTEM


@pytest.mark.spec("CON-39", "CON-44")
def test_a_final_error_of_a_handler_is_not_retried(build):
    final = TransactionException("gave up below", final=True)
    world = build(success=fails(final), exception=fails(final)).offer("a").run(policy())
    assert world.steps() == ["process", "success", "exception"]
    assert world.outcome().kind is Kind.HANDLER_FAILED


@pytest.mark.spec("CON-39", "CON-44", "CON-45")
@pytest.mark.parametrize("step", ["success", "exception"])
def test_a_handler_sleeps_its_retry_after_however_long_the_hold_is(build, step):
    later = TransactionException("busy", retry_after=0.1)
    bodies = {"process": fails(BusinessError("no"))} if step == "exception" else {}
    world = build(**bodies, **{step: [fails(later), gives(None)]}).offer("a")
    world.run(policy(**{step: {"hold": 0.01}}))
    first, second = world.of(step)
    assert second.began - first.ended >= 0.1
    assert world.outcome().kind is (Kind.SUCCEEDED if step == "success" else Kind.FAILED)


@pytest.mark.spec("CON-37")
def test_a_timeout_error_of_user_code_is_system_and_is_retried(build):
    raised = TimeoutError("the other side did not answer")
    world = build(process=fails(raised)).offer("a").run(policy(process={"max_attempts": 2}))
    assert world.steps() == ["process", "process", "exception"]
    assert world.only("exception").given.category is SYSTEM
    assert world.only("exception").given.__cause__ is raised


@pytest.mark.spec("CON-42")
def test_the_names_of_the_document_are_there():
    for mixin in (ConsumerMixin, AsyncConsumerMixin):
        assert list(inspect.signature(mixin.consume_transactions).parameters)[1] == "policy"
        assert list(inspect.signature(mixin.handle_transaction_exception).parameters)[1:] == ["transaction", "exc"]
        assert callable(mixin._consume_transactions)
        assert callable(mixin._start_processing)


@pytest.mark.spec("CON-42", "DX-19")
def test_each_worker_runs_start_processing(build):
    world = build().offer("a", "b")
    started, start = [], world.task._start_processing

    def counted(course, transaction, watch):
        started.append(transaction.id)
        return start(course, transaction, watch)

    world.task._start_processing = counted
    world.run(policy(concurrency=1))
    assert sorted(started) == ["a", "b"]
    assert world.kinds() == {"a": "succeeded", "b": "succeeded"}


class Refusal(ErgonError):
    category = BUSINESS
    code = "refused"


@pytest.mark.spec("CON-42", "CON-44")
@pytest.mark.parametrize("raised", [OSError("x"), SystemExit(1), Refusal("no"), TransactionException("own")])
def test_the_exception_handler_is_always_given_a_transaction_exception_with_its_cause(build, raised):
    world = build(process=fails(raised)).offer("a").run(policy(process={"max_attempts": 1}))
    told = world.only("exception").given
    assert isinstance(told, TransactionException)
    assert raised in (told, told.__cause__)


@pytest.mark.spec("CON-42")
def test_the_cause_that_user_code_gave_is_kept(build):
    cause = OSError("socket closed")

    def body(call):
        raise TransactionException("no answer", SYSTEM) from cause

    world = build(process=body).offer("a").run(policy(process={"max_attempts": 1}))
    assert world.only("exception").given.__cause__ is cause


@pytest.mark.spec("CON-44")
def test_an_error_of_ours_is_classified_by_its_own_verdict(build):
    world = build(process=fails(Refusal("bad request"))).offer("a").run(policy(process={"max_attempts": 4}))
    assert world.steps() == ["process", "exception"]
    assert world.only("exception").given.category is BUSINESS
    assert world.only("exception").given.code == "refused"


@pytest.mark.spec("DX-09")
def test_a_group_of_business_failures_has_had_its_only_attempt(build):
    group = ExceptionGroup("unhandled errors in a TaskGroup", [BusinessError("sold out"), BusinessError("no card")])
    world = build(process=fails(group)).offer("a").run(policy(process={"max_attempts": 4}))
    assert world.steps() == ["process", "exception"]
    assert (world.outcome().category, world.outcome().attempts) == (BUSINESS, 1)
    assert world.only("exception").given.__cause__ is group
    (dead,) = world.queue.dead_letters
    assert dead.failure.error_message.endswith("BusinessError: sold out; BusinessError: no card")


@pytest.mark.spec("DX-09")
def test_a_group_with_a_system_failure_is_retried(build):
    group = ExceptionGroup("two", [BusinessError("sold out"), OSError("reset")])
    world = build(process=[fails(group), gives(7)]).offer("a").run(policy(process={"max_attempts": 4}))
    assert world.steps() == ["process", "process", "success"]


@pytest.mark.spec("CON-44")
def test_a_final_error_is_not_retried(build):
    world = build(process=fails(TransactionException("exhausted below", SYSTEM, final=True)))
    world.offer("a").run(policy(process={"max_attempts": 4}))
    assert world.steps() == ["process", "exception"]
    assert world.outcome().category is SYSTEM


@pytest.mark.spec("CON-44")
def test_retry_after_is_the_least_wait(build):
    world = build(process=[fails(TransactionException("busy", retry_after=0.1)), gives(None)])
    world.offer("a").run(policy(process={"backoff": 0.001}))
    first, second = world.of("process")
    assert second.began - first.ended >= 0.1


@pytest.mark.spec("CON-44")
def test_a_backoff_longer_than_retry_after_is_waited_in_full(build):
    world = build(process=[fails(TransactionException("busy", retry_after=0.001)), gives(None)])
    world.offer("a").run(policy(process={"backoff": 0.1}))
    first, second = world.of("process")
    assert second.began - first.ended >= 0.1


@pytest.mark.spec("CON-13")
@pytest.mark.parametrize("most", [1, 2, 4])
def test_the_first_attempt_is_number_0_and_is_counted(build, most):
    world = build(process=fails(OSError())).offer("a").run(policy(process={"max_attempts": most}))
    assert [call.scope.attempt for call in world.of("process")] == list(range(most))
    assert world.outcome().attempts == most


@pytest.mark.spec("CON-13")
@pytest.mark.parametrize("cap, expected", [(0.1, [0.02, 0.06, 0.1, 0.1]), (0.0, [0.02, 0.06, 0.18])])
def test_every_retry_waits_as_the_backoff_says(build, cap, expected):
    retry = {"max_attempts": len(expected) + 1, "backoff": 0.02, "multiplier": 3.0, "cap": cap}
    with Pulse() as pulse:
        world = build(process=fails(OSError())).offer("a").run(policy(process=retry))
    calls = world.of("process")
    waits = [later.began - earlier.ended for earlier, later in pairwise(calls)]
    for wait, least in zip(waits, expected, strict=True):
        assert least <= wait < least + 0.05 + pulse.late
    history = world.queue.dead_letters[0].failure.history
    assert [attempt.delay for attempt in history[:-1]] == pytest.approx(expected)


@pytest.mark.spec("DX-10")
def test_a_changed_payload_reaches_no_other_attempt_no_handler_and_no_dead_letter(build):
    seen = []

    def body(call):
        seen.append((call.step, deepcopy(call.transaction.payload)))
        call.transaction.payload["lines"].clear()
        del call.transaction.payload["card"]
        raise OSError("bank down")

    def told(call):
        seen.append((call.step, deepcopy(call.transaction.payload)))
        call.transaction.payload.clear()

    order = {"card": "4711", "lines": [1, 2]}
    world = build(process=body, exception=told).offer(Transaction("a", order, source="queue"))
    world.run(policy(process={"max_attempts": 3}))
    assert seen == [(step, order) for step in ("process", "process", "process", "exception")]
    assert str(world.outcome().error) == "OSError: bank down"
    (dead,) = world.queue.dead_letters
    assert dead.payload == order == {"card": "4711", "lines": [1, 2]}


@pytest.mark.spec("DX-10")
def test_a_changed_payload_is_not_changed_for_the_success_handler_or_after_a_deferral(build):
    seen = []

    def body(call):
        seen.append((call.step, deepcopy(call.transaction.payload)))
        call.transaction.payload["lines"].append(3)
        return Later(0.01) if len(seen) == 1 else None

    world = build(process=body, success=body).offer(Transaction("a", {"lines": [1]}, source="queue"))
    world.start(policy(streaming=True)).until(lambda: len(seen) == 4).stop().finish()
    assert [payload for _, payload in seen] == [{"lines": [1]}] * 4
