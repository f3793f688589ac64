"""What is settled, when, and what follows when the broker does not answer."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Release, SettleResult
from ergon_framework.errors import Category, ConnectionLostError, ErgonError
from ergon_framework.worker.exceptions import BusinessError, TransactionException
from ergon_framework.worker.report import OutcomeKind
from tests.both_drivers.harness import Stubborn, make_policy, raise_error, return_value, wait_then_return


@pytest.mark.spec("CON-30", "CNN-02")
def test_a_success_is_acked_after_its_handler_has_returned(build):
    world = build(success=wait_then_return(0.03)).offer("a").run(make_policy())
    assert world.settlements() == [Ack()]
    assert world.queue.settled[0].at >= world.only("success").ended


@pytest.mark.parametrize("category", list(Category))
@pytest.mark.parametrize("verdict", ["dead_letter", "ack"])
def test_a_failure_is_settled_by_the_policy_of_its_category(build, category, verdict):
    world = build(process=raise_error(TransactionException("no", category))).offer("a")
    verdicts = {"on_business": "dead_letter", "on_system": "dead_letter", "on_timeout": "dead_letter"}
    world.run(make_policy(settle=verdicts | {f"on_{category.lower()}": verdict}))
    assert [type(sent) for sent in world.settlements()] == [Ack if verdict == "ack" else DeadLetter]
    assert world.outcome().kind is OutcomeKind.FAILED


def test_a_dead_letter_describes_the_failure(build):
    error = BusinessError("no such customer", code="unknown_customer")
    world = build(process=raise_error(error)).offer("a").run(make_policy())
    (record,) = world.queue.dead_letters
    assert record.failure.category is Category.BUSINESS
    assert record.failure.transaction_id == "a"
    assert record.failure.attempts == 1
    assert "no such customer" in record.failure.error_message
    assert record.failure.error_type.endswith("BusinessError")


def test_a_dead_letter_names_the_original_error_and_not_its_wrapper(build):
    world = build(process=raise_error(OSError("down"))).offer("a").run(make_policy())
    (record,) = world.queue.dead_letters
    assert record.failure.error_type.endswith("OSError")
    assert record.failure.attempts == 3


@pytest.mark.spec("CON-06")
def test_an_exhausted_exception_handler_is_settled_by_the_category_of_the_first_error(build):
    world = build(process=raise_error(BusinessError("no")), exception=raise_error(OSError())).offer("a")
    world.run(make_policy(settle={"on_business": "ack"}))
    assert world.outcome().kind is OutcomeKind.EXCEPTION_HANDLER_FAILED
    assert world.settlements() == [Ack()]


@pytest.mark.parametrize("choice", [Ack(), Defer(9.0), DeadLetter("by hand")])
@pytest.mark.parametrize("step", ["success", "exception"])
def test_a_settlement_returned_by_a_handler_is_sent(build, step, choice):
    process = raise_error(BusinessError("no")) if step == "exception" else return_value(None)
    world = build(process=process, **{step: return_value(choice)}).offer("a").run(make_policy())
    (settlement,) = world.settlements()
    assert type(settlement) is type(choice)
    assert getattr(settlement, "delay", None) == getattr(choice, "delay", None)
    assert getattr(settlement, "reason", None) == getattr(choice, "reason", None)
    assert world.outcome().kind is (OutcomeKind.FAILED if step == "exception" else OutcomeKind.SUCCEEDED)


@pytest.mark.parametrize("value", [None, 0, "ack", Release])
def test_any_other_return_value_of_a_handler_means_the_default_settlement(build, value):
    world = build(success=return_value(value)).offer("a").run(make_policy())
    assert world.settlements() == [Ack()]


@pytest.mark.spec("CON-30")
def test_a_settlement_answered_with_lost_ends_as_released(build):
    world = build(settles=lambda settlements: [SettleResult.LOST] * len(settlements)).offer("a").run(make_policy())
    assert world.steps() == ["process", "success"]
    assert world.kinds() == {"a": "released"}
    assert world.report.counts[OutcomeKind.SUCCEEDED] == 0


@pytest.mark.spec("CON-30")
@pytest.mark.parametrize("failure", ["answered", "raised"])
def test_a_failed_settlement_is_retried_and_no_handler_runs_again(build, failure):
    failures = [1, 1]

    def answer(settlements):
        if not failures:
            return None
        failures.pop()
        if failure == "raised":
            raise ConnectionLostError("the line is down")
        return [SettleResult.FAILED] * len(settlements)

    world = build(settles=answer).offer("a").run(make_policy())
    assert world.steps() == ["process", "success"]
    assert world.kinds() == {"a": "succeeded"}
    assert world.queue.settled[-1].answer is SettleResult.SETTLED


@pytest.mark.spec("CON-30")
def test_a_settlement_that_fails_every_attempt_ends_as_released(build):
    world = build(settles=lambda settlements: [SettleResult.FAILED] * len(settlements)).offer("a")
    world.run(make_policy(settle={"retry": {"max_attempts": 3, "backoff": 0.001}}))
    assert len(world.queue.settled) == 3
    assert world.kinds() == {"a": "released"}


@pytest.mark.spec("CON-30")
def test_a_settlement_that_is_not_answered_in_time_is_sent_again(build):
    sent = []

    def answer(settlements):
        sent.append(settlements)
        if len(sent) == 1:
            yield answer_signal

    world = build(settles=answer)
    answer_signal = world.signal()
    world.offer("a").start(make_policy(settle={"retry": {"timeout": 0.05, "exit_grace": 0.05, "backoff": 0.001}}))
    world.until(lambda: world.outcomes, seconds=2.0)
    assert world.finish(2.0).kinds() == {"a": "succeeded"}
    assert len(sent) == 2


@pytest.mark.spec("CON-30")
def test_a_settlement_waits_for_a_slow_answer_within_the_timeout(build):
    sent = []

    def answer(settlements):
        sent.append(settlements)
        yield 0.1

    world = build(settles=answer).offer("a").run(make_policy(settle={"retry": {"timeout": 5.0, "backoff": 0.001}}))
    assert world.kinds() == {"a": "succeeded"}
    assert len(sent) == 1


@pytest.mark.spec("CON-30")
def test_a_lost_settlement_does_not_affect_the_others_of_its_call(build):
    def answer(settlements):
        lost = [SettleResult.LOST if delivery.transaction.id == "b" else None for delivery, _ in settlements]
        rest = [pair for pair, result in zip(settlements, lost, strict=True) if result is None]
        answers = iter(world.queue.answer_settlements(rest))
        return [result or next(answers) for result in lost]

    world = build(settles=answer).offer("a", "b", "c")
    world.run(make_policy())
    assert world.kinds() == {"a": "succeeded", "b": "released", "c": "succeeded"}


def test_settlements_are_batched_up_to_the_batch_size(build):
    groups = []
    world = build(settles=lambda settlements: groups.append(len(settlements))).offer(*"abcdefgh")
    world.run(make_policy(concurrency=8, settle={"batch_size": 3, "linger": 0.05}))
    assert sum(groups) == 8
    assert max(groups) <= 3
    assert len(groups) < 8


def test_a_settlement_waits_for_others_at_most_for_its_linger(build):
    world = build().offer("a").start(make_policy(streaming=True, settle={"linger": 0.02}))
    world.until(lambda: world.queue.settled)
    assert world.queue.settled[0].at - world.only("success").ended < 0.3


@pytest.mark.spec("CON-29", "CON-30")
def test_a_deferral_is_sent_only_after_the_abandoned_call_has_returned(build):
    world = build(exception=return_value(Defer(0.0)))
    release = world.signal()
    world.bodies["process"] = [wait_then_return(Stubborn(release)), return_value(None)]
    retry = {"timeout": 0.03, "max_attempts": 1, "exit_grace": 0.03}
    world.offer("a").start(make_policy(concurrency=2, process=retry, streaming=True))
    world.until(lambda: world.of("exception") and world.of("exception")[0].ended)
    world.never(lambda: world.queue.settled)
    release.set()
    world.until(lambda: world.queue.settled)
    assert isinstance(world.settlements()[0], Defer)
    assert world.queue.settled[0].at >= world.of("process")[0].ended


@pytest.mark.spec("CON-28", "CON-30")
def test_a_dead_letter_does_not_wait_for_the_abandoned_call(build):
    world = build()
    release = world.signal()
    world.bodies["process"] = wait_then_return(Stubborn(release))
    retry = {"timeout": 0.03, "max_attempts": 1, "exit_grace": 0.03}
    world.offer("a").start(make_policy(concurrency=2, process=retry, streaming=True))
    world.until(lambda: world.queue.dead_letters)
    assert world.only("process").ended is None


@pytest.mark.spec("CON-30", "CNN-06")
def test_a_lost_claim_ends_as_released_without_a_handler(build):
    world = build()
    release = world.signal()
    world.bodies["process"] = wait_then_return(Stubborn(release), "too late")
    claimed = []
    world.queue._script = [lambda fetch: claimed.extend(fetch.queue.claim(1)) or list(claimed)]
    world.offer("a").start(make_policy(streaming=True))
    world.until(lambda: world.of("process"))
    world.queue.listeners[0].on_lost([claimed[0].receipt])
    world.until(lambda: world.only("process").scope.cancelled)
    release.set()
    world.until(lambda: world.outcomes)
    world.stop().finish()
    assert world.kinds() == {"a": "released"}
    assert world.steps() == ["process"]
    assert Ack() not in world.settlements()


@pytest.mark.spec("CNN-06")
def test_a_claim_is_renewed_until_it_is_settled(build):
    world = build(process=wait_then_return(0.5), lease=0.15).offer("a").run(make_policy())
    assert world.kinds() == {"a": "succeeded"}
    assert len(world.of("process")) == 1
    assert world.queue.settled[0].answer is SettleResult.SETTLED
    assert "a" in world.queue.extended


@pytest.mark.spec("CON-45")
def test_a_wait_longer_than_the_max_inline_delay_is_deferred_and_no_handler_runs(build):
    world = build(process=raise_error(OSError("down"))).offer("a")
    world.run(make_policy(process={"backoff": 5.0, "max_inline_delay": 1.0}))
    assert world.steps() == ["process"]
    assert world.kinds() == {"a": "deferred"}
    (settlement,) = world.settlements()
    assert isinstance(settlement, Defer)
    assert (settlement.delay, settlement.attempts) == (5.0, 1)
    assert "down" in settlement.history[0].error
    assert world.queue.depth().delayed == 1


@pytest.mark.spec("CON-45")
def test_a_wait_up_to_the_max_inline_delay_stays_in_the_worker(build):
    world = build(process=[raise_error(OSError()), return_value(None)]).offer("a")
    world.run(make_policy(process={"backoff": 0.05, "max_inline_delay": 0.05}))
    assert world.steps() == ["process", "process", "success"]


@pytest.mark.spec("CON-45")
def test_attempts_count_across_deliveries(build):
    world = build(process=raise_error(OSError("down"))).offer("a")
    empty = {"backoff": 0.01, "multiplier": 1.0}
    retry = {"max_attempts": 3, "backoff": 0.02, "max_inline_delay": 0.01}
    world.run(make_policy(process=retry, streaming=True, limit=3, empty_queue=empty))
    assert [call.scope.attempt for call in world.of("process")] == [0, 1, 2]
    assert [outcome.kind.value for outcome in world.outcomes] == ["deferred", "deferred", "failed"]
    assert len(world.of("exception")) == 1
    assert world.outcomes[-1].attempts == 3


@pytest.mark.spec("CON-45")
def test_a_delivery_makes_at_least_one_attempt_after_any_number_of_earlier_attempts(build):
    world = build(process=raise_error(OSError("down")))
    world.queue._script = [
        lambda fetch: [
            type(d)(d.transaction.replace(attempts=9), d.receipt, d.deliveries) for d in fetch.queue.claim(1)
        ]
    ]
    world.offer("a").run(make_policy(process={"max_attempts": 3}))
    assert [call.scope.attempt for call in world.of("process")] == [2]
    assert world.kinds() == {"a": "failed"}


@pytest.mark.spec("CON-45")
def test_a_last_attempt_is_not_deferred(build):
    world = build(process=raise_error(TransactionException("busy", retry_after=60.0))).offer("a")
    world.run(make_policy(process={"max_attempts": 1, "max_inline_delay": 0.01}))
    assert world.steps() == ["process", "exception"]


@pytest.mark.spec("PRV-31")
def test_a_call_that_could_not_start_is_deferred_without_limit_and_never_dead_lettered(build):
    world = build(process=[*[raise_error(NotStartedError("not now"))] * 6, return_value(None)]).offer("a")
    retry = {"max_attempts": 2, "backoff": 0.01, "multiplier": 1.0, "max_inline_delay": 30.0}
    empty = {"backoff": 0.01, "multiplier": 1.0}
    world.run(make_policy(process=retry, streaming=True, limit=7, empty_queue=empty, max_deliveries=2))
    assert [outcome.kind.value for outcome in world.outcomes] == ["deferred"] * 6 + ["succeeded"]
    assert {outcome.attempts for outcome in world.outcomes[:6]} == {0}
    assert {call.scope.attempt for call in world.of("process")} == {0}
    assert world.settlements()[0] == Defer(0.03, attempts=0, history=())
    assert "exception" not in world.steps()


@pytest.mark.spec("PRV-31")
def test_the_wrapper_of_a_framework_error_keeps_its_later_flag(build):
    world = build(process=raise_error(NotStartedError("not now"))).offer("a").run(make_policy())
    assert world.outcome().error.not_attempted
    assert isinstance(world.outcome().error.__cause__, NotStartedError)


@pytest.mark.spec("PRV-31")
def test_a_handler_whose_call_could_not_start_is_retried_in_its_own_step(build):
    world = build(success=[raise_error(NotStartedError("not now")), return_value(None)]).offer("a").run(make_policy())
    assert world.steps() == ["process", "success", "success"]
    assert world.kinds() == {"a": "succeeded"}


class NotStartedError(ErgonError):
    not_attempted = True
    retry_after = 0.03
