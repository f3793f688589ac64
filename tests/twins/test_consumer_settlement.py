"""What the broker is told, when, and what follows when it does not listen."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Later, Release, SettleResult
from ergon_framework.errors import Category, ConnectionLost, ErgonError
from ergon_framework.task.exceptions import BusinessError, TransactionException
from ergon_framework.task.report import Kind
from tests.twins.world import Stubborn, fails, gives, policy, takes


@pytest.mark.spec("CON-30", "CNN-02")
def test_a_success_is_acked_after_its_handler_has_returned(build):
    world = build(success=takes(0.03)).offer("a").run(policy())
    assert world.settlements() == [Ack()]
    assert world.queue.settled[0].at >= world.only("success").ended


@pytest.mark.parametrize("category", list(Category))
@pytest.mark.parametrize("verdict", ["dead_letter", "ack"])
def test_a_failure_is_settled_as_the_policy_says_for_its_category(build, category, verdict):
    world = build(process=fails(TransactionException("no", category))).offer("a")
    others = {"on_business": "dead_letter", "on_system": "dead_letter", "on_timeout": "dead_letter"}
    world.run(policy(settle=others | {f"on_{category.lower()}": verdict}))
    assert [type(sent) for sent in world.settlements()] == [Ack if verdict == "ack" else DeadLetter]
    assert world.outcome().kind is Kind.FAILED


def test_a_dead_letter_tells_what_happened(build):
    error = BusinessError("no such customer", code="unknown_customer")
    world = build(process=fails(error)).offer("a").run(policy())
    (record,) = world.queue.dead_letters
    assert record.failure.category is Category.BUSINESS
    assert record.failure.transaction_id == "a"
    assert record.failure.attempts == 1
    assert "no such customer" in record.failure.error_message
    assert record.failure.error_type.endswith("BusinessError")


def test_a_dead_letter_names_the_error_that_was_raised_and_not_its_wrapping(build):
    world = build(process=fails(OSError("down"))).offer("a").run(policy())
    (record,) = world.queue.dead_letters
    assert record.failure.error_type.endswith("OSError")
    assert record.failure.attempts == 3


@pytest.mark.spec("CON-06")
def test_an_exhausted_exception_handler_is_settled_by_the_error_it_was_told_of(build):
    world = build(process=fails(BusinessError("no")), exception=fails(OSError())).offer("a")
    world.run(policy(settle={"on_business": "ack"}))
    assert world.outcome().kind is Kind.HANDLER_FAILED
    assert world.settlements() == [Ack()]


@pytest.mark.parametrize("choice", [Ack(), Later(9.0), DeadLetter("by hand")])
@pytest.mark.parametrize("step", ["success", "exception"])
def test_a_settlement_that_a_handler_returns_is_what_is_sent(build, step, choice):
    process = fails(BusinessError("no")) if step == "exception" else gives(None)
    world = build(process=process, **{step: gives(choice)}).offer("a").run(policy())
    (sent,) = world.settlements()
    assert type(sent) is type(choice)
    assert getattr(sent, "delay", None) == getattr(choice, "delay", None)
    assert getattr(sent, "reason", None) == getattr(choice, "reason", None)
    assert world.outcome().kind is (Kind.FAILED if step == "exception" else Kind.SUCCEEDED)


@pytest.mark.parametrize("value", [None, 0, "ack", Release])
def test_any_other_value_of_a_handler_means_the_default(build, value):
    world = build(success=gives(value)).offer("a").run(policy())
    assert world.settlements() == [Ack()]


@pytest.mark.spec("CON-30")
def test_a_settlement_that_is_answered_lost_ends_as_released(build):
    world = build(settles=lambda settlings: [SettleResult.LOST] * len(settlings)).offer("a").run(policy())
    assert world.steps() == ["process", "success"]
    assert world.kinds() == {"a": "released"}
    assert world.report.counts[Kind.SUCCEEDED] == 0


@pytest.mark.spec("CON-30")
@pytest.mark.parametrize("how", ["answered", "raised"])
def test_a_failed_settlement_is_retried_and_no_handler_runs_again(build, how):
    left = [1, 1]

    def answer(settlings):
        if not left:
            return None
        left.pop()
        if how == "raised":
            raise ConnectionLost("the line is down")
        return [SettleResult.FAILED] * len(settlings)

    world = build(settles=answer).offer("a").run(policy())
    assert world.steps() == ["process", "success"]
    assert world.kinds() == {"a": "succeeded"}
    assert world.queue.settled[-1].answer is SettleResult.SETTLED


@pytest.mark.spec("CON-30")
def test_a_settlement_that_never_gets_through_ends_as_released(build):
    world = build(settles=lambda settlings: [SettleResult.FAILED] * len(settlings)).offer("a")
    world.run(policy(settle={"retry": {"max_attempts": 3, "backoff": 0.001}}))
    assert len(world.queue.settled) == 3
    assert world.kinds() == {"a": "released"}


@pytest.mark.spec("CON-30")
def test_a_settlement_that_is_not_answered_in_time_is_sent_again(build):
    sent = []

    def answer(settlings):
        sent.append(settlings)
        if len(sent) == 1:
            yield silence

    world = build(settles=answer)
    silence = world.signal()
    world.offer("a").start(policy(settle={"retry": {"timeout": 0.05, "abandon_grace": 0.05, "backoff": 0.001}}))
    world.until(lambda: world.outcomes, seconds=2.0)
    assert world.finish(2.0).kinds() == {"a": "succeeded"}
    assert len(sent) == 2


@pytest.mark.spec("CON-30")
def test_a_slow_answer_within_the_timeout_is_waited_for(build):
    sent = []

    def answer(settlings):
        sent.append(settlings)
        yield 0.1

    world = build(settles=answer).offer("a").run(policy(settle={"retry": {"timeout": 5.0, "backoff": 0.001}}))
    assert world.kinds() == {"a": "succeeded"}
    assert len(sent) == 1


@pytest.mark.spec("CON-30")
def test_one_settlement_that_fails_spoils_no_other(build):
    def answer(settlings):
        lost = [SettleResult.LOST if delivery.transaction.id == "b" else None for delivery, _ in settlings]
        rest = [pair for pair, result in zip(settlings, lost, strict=True) if result is None]
        answers = iter(world.queue.answer(rest))
        return [result or next(answers) for result in lost]

    world = build(settles=answer).offer("a", "b", "c")
    world.run(policy())
    assert world.kinds() == {"a": "succeeded", "b": "released", "c": "succeeded"}


def test_settlements_share_calls_up_to_the_group(build):
    groups = []
    world = build(settles=lambda settlings: groups.append(len(settlings))).offer(*"abcdefgh")
    world.run(policy(concurrency=8, settle={"group": 3, "linger": 0.05}))
    assert sum(groups) == 8
    assert max(groups) <= 3
    assert len(groups) < 8


def test_a_settlement_does_not_wait_longer_than_its_linger_for_company(build):
    world = build().offer("a").start(policy(streaming=True, settle={"linger": 0.02}))
    world.until(lambda: world.queue.settled)
    assert world.queue.settled[0].at - world.only("success").ended < 0.3


@pytest.mark.spec("CON-29", "CON-30")
def test_a_later_is_sent_only_once_the_body_has_left(build):
    world = build(exception=gives(Later(0.0)))
    leave = world.signal()
    world.bodies["process"] = [takes(Stubborn(leave)), gives(None)]
    retry = {"timeout": 0.03, "max_attempts": 1, "abandon_grace": 0.03}
    world.offer("a").start(policy(concurrency=2, process=retry, streaming=True))
    world.until(lambda: world.of("exception") and world.of("exception")[0].ended)
    world.never(lambda: world.queue.settled)
    leave.set()
    world.until(lambda: world.queue.settled)
    assert isinstance(world.settlements()[0], Later)
    assert world.queue.settled[0].at >= world.of("process")[0].ended


@pytest.mark.spec("CON-28", "CON-30")
def test_a_dead_letter_does_not_wait_for_the_abandoned_body(build):
    world = build()
    leave = world.signal()
    world.bodies["process"] = takes(Stubborn(leave))
    retry = {"timeout": 0.03, "max_attempts": 1, "abandon_grace": 0.03}
    world.offer("a").start(policy(concurrency=2, process=retry, streaming=True))
    world.until(lambda: world.queue.dead_letters)
    assert world.only("process").ended is None


@pytest.mark.spec("CON-30", "CNN-06")
def test_a_lost_claim_ends_as_released_without_a_handler(build):
    world = build()
    leave = world.signal()
    world.bodies["process"] = takes(Stubborn(leave), "too late")
    claimed = []
    world.queue._script = [lambda fetch: claimed.extend(fetch.queue.claim(1)) or list(claimed)]
    world.offer("a").start(policy(streaming=True))
    world.until(lambda: world.of("process"))
    world.queue.listeners[0].lost([claimed[0].receipt])
    world.until(lambda: world.only("process").scope.cancelled)
    leave.set()
    world.until(lambda: world.outcomes)
    world.stop().finish()
    assert world.kinds() == {"a": "released"}
    assert world.steps() == ["process"]
    assert Ack() not in world.settlements()


@pytest.mark.spec("CNN-06")
def test_a_held_delivery_is_renewed_until_it_is_settled(build):
    world = build(process=takes(0.5), lease=0.15).offer("a").run(policy())
    assert world.kinds() == {"a": "succeeded"}
    assert len(world.of("process")) == 1
    assert world.queue.settled[0].answer is SettleResult.SETTLED
    assert "a" in world.queue.extended


@pytest.mark.spec("CON-45")
def test_a_wait_longer_than_the_hold_is_deferred_and_no_handler_runs(build):
    world = build(process=fails(OSError("down"))).offer("a")
    world.run(policy(process={"backoff": 5.0, "hold": 1.0}))
    assert world.steps() == ["process"]
    assert world.kinds() == {"a": "deferred"}
    (sent,) = world.settlements()
    assert isinstance(sent, Later)
    assert (sent.delay, sent.attempts) == (5.0, 1)
    assert "down" in sent.history[0].error
    assert world.queue.depth().delayed == 1


@pytest.mark.spec("CON-45")
def test_a_wait_up_to_the_hold_is_slept(build):
    world = build(process=[fails(OSError()), gives(None)]).offer("a")
    world.run(policy(process={"backoff": 0.05, "hold": 0.05}))
    assert world.steps() == ["process", "process", "success"]


@pytest.mark.spec("CON-45")
def test_attempts_count_across_deliveries(build):
    world = build(process=fails(OSError("down"))).offer("a")
    empty = {"backoff": 0.01, "multiplier": 1.0}
    retry = {"max_attempts": 3, "backoff": 0.02, "hold": 0.01}
    world.run(policy(process=retry, streaming=True, limit=3, empty_queue=empty))
    assert [call.scope.attempt for call in world.of("process")] == [0, 1, 2]
    assert [outcome.kind.value for outcome in world.outcomes] == ["deferred", "deferred", "failed"]
    assert len(world.of("exception")) == 1
    assert world.outcomes[-1].attempts == 3


@pytest.mark.spec("CON-45")
def test_a_delivery_makes_at_least_one_attempt_however_many_were_counted(build):
    world = build(process=fails(OSError("down")))
    world.queue._script = [
        lambda fetch: [
            type(d)(d.transaction.replace(attempts=9), d.receipt, d.deliveries) for d in fetch.queue.claim(1)
        ]
    ]
    world.offer("a").run(policy(process={"max_attempts": 3}))
    assert [call.scope.attempt for call in world.of("process")] == [2]
    assert world.kinds() == {"a": "failed"}


@pytest.mark.spec("CON-45")
def test_a_last_attempt_is_not_deferred(build):
    world = build(process=fails(TransactionException("busy", retry_after=60.0))).offer("a")
    world.run(policy(process={"max_attempts": 1, "hold": 0.01}))
    assert world.steps() == ["process", "exception"]


@pytest.mark.spec("PRV-31")
def test_what_cannot_even_be_tried_comes_back_as_often_as_it_takes_and_is_never_dead(build):
    world = build(process=[*[fails(Closed("not now"))] * 6, gives(None)]).offer("a")
    retry = {"max_attempts": 2, "backoff": 0.01, "multiplier": 1.0, "hold": 30.0}
    empty = {"backoff": 0.01, "multiplier": 1.0}
    world.run(policy(process=retry, streaming=True, limit=7, empty_queue=empty, max_deliveries=2))
    assert [outcome.kind.value for outcome in world.outcomes] == ["deferred"] * 6 + ["succeeded"]
    assert {outcome.attempts for outcome in world.outcomes[:6]} == {0}
    assert {call.scope.attempt for call in world.of("process")} == {0}
    assert world.settlements()[0] == Later(0.03, attempts=0, history=())
    assert "exception" not in world.steps()


@pytest.mark.spec("PRV-31")
def test_later_is_carried_by_whatever_wraps_an_error_of_ours(build):
    world = build(process=fails(Closed("not now"))).offer("a").run(policy())
    assert world.outcome().error.later
    assert isinstance(world.outcome().error.__cause__, Closed)


@pytest.mark.spec("PRV-31")
def test_a_handler_that_could_not_try_is_tried_again_in_its_own_step(build):
    world = build(success=[fails(Closed("not now")), gives(None)]).offer("a").run(policy())
    assert world.steps() == ["process", "success", "success"]
    assert world.kinds() == {"a": "succeeded"}


class Closed(ErgonError):
    later = True
    retry_after = 0.03
