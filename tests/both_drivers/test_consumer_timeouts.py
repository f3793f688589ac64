"""The three timeouts, what an abandoned call can still do, and which slots and claims it keeps."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter
from ergon_framework.errors import Category
from ergon_framework.worker.exceptions import BusinessError, LoopStalled, LoopTimeout, TransactionException
from ergon_framework.worker.report import OutcomeKind, StopReason
from tests.both_drivers.harness import (
    Stubborn,
    WakeupDelayMeter,
    ignore_cancellation,
    make_policy,
    raise_error,
    return_value,
    wait_then_return,
)

TIMEOUT = Category.TIMEOUT
#: Maximum delay between a deadline and the declared timeout.
TOLERANCE_SECONDS = 0.05


@pytest.mark.spec("CON-12", "CON-28")
def test_a_step_timeout_is_declared_at_its_deadline_even_if_the_call_ignores_it(build):
    with WakeupDelayMeter() as wakeup_delay:
        world = (
            build(process=ignore_cancellation(0.2))
            .offer("a")
            .run(make_policy(process={"timeout": 0.1, "max_attempts": 1}))
        )
    call = world.only("process")
    assert 0.0 <= call.abandoned_at - call.scope.deadline <= TOLERANCE_SECONDS + wakeup_delay.late
    assert call.scope.deadline - call.began <= 0.1
    assert world.outcome().category is TIMEOUT


@pytest.mark.spec("CON-15", "CON-12")
def test_a_timeout_is_retried_until_the_budget_is_exhausted(build):
    world = build(process=wait_then_return(0.1)).offer("a")
    world.run(make_policy(process={"timeout": 0.03, "max_attempts": 3}))
    assert world.steps() == ["process"] * 3 + ["exception"]
    assert isinstance(world.only("exception").argument, TransactionException)
    assert world.only("exception").argument.category is TIMEOUT
    assert not world.only("exception").argument.still_running
    assert (world.outcome().category, world.outcome().attempts) == (TIMEOUT, 3)


@pytest.mark.spec("CON-15")
def test_an_attempt_after_a_timeout_may_succeed(build):
    world = build(process=[wait_then_return(0.1), return_value("second")]).offer("a")
    world.run(make_policy(process={"timeout": 0.03, "max_attempts": 3}))
    assert world.steps() == ["process", "process", "success"]
    assert world.outcome().result == "second"


@pytest.mark.spec("CON-12", "CON-39")
def test_the_success_handler_has_its_own_timeout(build):
    world = build(process=wait_then_return(0.1), success=wait_then_return(0.1)).offer("a")
    world.run(make_policy(success={"timeout": 0.03, "max_attempts": 2}))
    assert world.steps() == ["process", "success", "success", "exception"]
    assert world.only("exception").argument.category is TIMEOUT
    assert world.outcome().processed


@pytest.mark.spec("CON-12", "CON-39")
def test_the_exception_handler_has_its_own_timeout(build):
    world = build(process=raise_error(BusinessError("no")), exception=wait_then_return(0.1)).offer("a")
    world.run(make_policy(exception={"timeout": 0.03, "max_attempts": 2}))
    assert world.steps() == ["process", "exception", "exception"]
    assert world.outcome().kind is OutcomeKind.EXCEPTION_HANDLER_FAILED
    assert world.outcome().category is Category.BUSINESS
    assert world.outcome().handler_error.category is TIMEOUT


@pytest.mark.spec("CON-28")
def test_the_value_of_an_abandoned_call_causes_no_ack_no_handler_and_no_count(build):
    world = build(process=wait_then_return(Stubborn(0.15), "late")).offer("a")
    world.run(make_policy(process={"timeout": 0.03, "max_attempts": 1}))
    assert world.only("process").result == "late"
    assert world.steps() == ["process", "exception"]
    assert world.report.counts[OutcomeKind.SUCCEEDED] == 0
    assert not world.outcome().processed
    assert [type(sent) for sent in world.settlements()] == [DeadLetter]
    assert world.report.late_results == 1


@pytest.mark.spec("CON-28")
def test_a_late_business_error_does_not_change_the_category(build):
    def body(call):
        yield Stubborn(0.1)
        raise BusinessError("too late to matter")

    world = build(process=body).offer("a").run(make_policy(process={"timeout": 0.03, "max_attempts": 2}))
    assert world.steps() == ["process", "process", "exception"]
    assert world.outcome().category is TIMEOUT


@pytest.mark.spec("CON-29", "CON-21")
def test_no_call_of_a_transaction_starts_before_its_timed_out_call_has_returned(build):
    world = build(process=ignore_cancellation(0.15)).offer("a")
    world.run(make_policy(process={"timeout": 0.03, "max_attempts": 2, "exit_grace": 5.0}))
    first, second = world.of("process")
    assert first.ended <= second.began
    assert second.ended <= world.only("exception").began
    assert world.overlap == 1


@pytest.mark.spec("CON-29")
def test_after_the_grace_the_exception_handler_runs_without_another_attempt(build):
    world = build()
    release = world.signal()
    world.bodies["process"] = wait_then_return(Stubborn(release), "late")
    seen = []
    world.bodies["exception"] = lambda call: seen.append(call.argument.still_running)
    world.offer("a").start(make_policy(process={"timeout": 0.05, "max_attempts": 3, "exit_grace": 0.1}))
    world.until(lambda: world.outcomes)
    body, handler = world.only("process"), world.only("exception")
    assert handler.began - body.scope.deadline >= 0.1
    assert body.ended is None
    assert seen == [True]
    assert world.outcome().still_running
    release.set()
    world.finish()
    assert world.steps() == ["process", "exception"]
    assert (world.outcome().kind, world.outcome().category) == (OutcomeKind.FAILED, TIMEOUT)


@pytest.mark.spec("CON-29")
def test_a_success_handler_that_exceeds_its_grace_leads_to_the_exception_handler(build):
    world = build()
    release = world.signal()
    world.bodies["success"] = wait_then_return(Stubborn(release))
    world.offer("a").start(make_policy(success={"timeout": 0.03, "max_attempts": 3, "exit_grace": 0.05}))
    world.until(lambda: world.outcomes)
    assert world.only("exception").argument.still_running
    assert world.outcome().processed
    release.set()
    assert world.finish().steps() == ["process", "success", "exception"]


@pytest.mark.spec("CON-29")
def test_an_exception_handler_that_exceeds_its_grace_is_not_retried(build):
    world = build(process=raise_error(BusinessError("no")))
    release = world.signal()
    world.bodies["exception"] = wait_then_return(Stubborn(release))
    world.offer("a").start(make_policy(exception={"timeout": 0.03, "max_attempts": 3, "exit_grace": 0.05}))
    world.until(lambda: world.outcomes)
    assert world.outcome().still_running
    release.set()
    assert world.finish().steps() == ["process", "exception"]
    assert world.outcome().kind is OutcomeKind.EXCEPTION_HANDLER_FAILED


@pytest.mark.spec("CON-29")
def test_an_abandoned_call_is_recorded_even_if_the_exception_handler_fails(build):
    world = build(exception=raise_error(OSError("and that too")))
    release = world.signal()
    world.bodies["process"] = wait_then_return(Stubborn(release))
    world.offer("a").start(make_policy(process={"timeout": 0.03, "exit_grace": 0.03}))
    world.until(lambda: world.outcomes)
    assert world.outcome().kind is OutcomeKind.EXCEPTION_HANDLER_FAILED
    assert world.outcome().still_running
    release.set()
    world.until(lambda: not world.outcome().still_running)


@pytest.mark.spec("CON-29")
def test_a_slot_is_occupied_until_the_abandoned_call_has_returned(build):
    world = build()
    release = world.signal()
    world.bodies["process"] = {"a": wait_then_return(Stubborn(release))}
    retry = {"timeout": 0.03, "max_attempts": 1, "exit_grace": 0.03}
    world.offer("a", "b").start(make_policy(concurrency=1, process=retry))
    world.until(lambda: world.outcomes)
    assert world.steps("b") == []
    release.set()
    world.finish()
    assert world.only("exception").id == "a"
    assert world.of("process", "b")[0].began >= world.of("process", "a")[0].ended
    assert world.peak == 1


@pytest.mark.spec("CON-29")
def test_a_loop_whose_slots_are_all_occupied_by_abandoned_calls_ends_as_stalled(build):
    world = build()
    release = world.signal()
    world.bodies["process"] = wait_then_return(Stubborn(release))
    retry = {"timeout": 0.03, "max_attempts": 1, "exit_grace": 0.03}
    world.offer("a", "b", "c").run(make_policy(concurrency=2, process=retry, drain_timeout=0.1))
    assert isinstance(world.error, LoopStalled)
    assert world.report.stop_reason is StopReason.STALLED
    assert world.report.still_running == 2
    assert world.kinds() == {"a": "failed", "b": "failed"}
    assert world.steps("c") == []
    assert world.duration_seconds >= 0.15


def start_stalled_loop(world):
    """Start a streaming loop of one slot that an abandoned call occupies for too long; b still waits in the queue."""
    release = world.signal()
    world.bodies["process"] = wait_then_return(Stubborn(release))
    retry = {"timeout": 0.03, "max_attempts": 1, "exit_grace": 0.03}
    world.offer("a", "b").start(make_policy(concurrency=1, process=retry, drain_timeout=0.1, streaming=True))
    world.until(lambda: world.of("process"))
    assert world.task.live
    world.until(lambda: not world.task.live)
    return release


@pytest.mark.spec("CON-29")
def test_a_stalled_streaming_loop_does_not_end_and_is_not_live(build):
    world = build()
    start_stalled_loop(world)
    world.never(lambda: world.steps("b") or world.ended)
    assert world.kinds() == {"a": "failed"}


@pytest.mark.spec("CON-29")
def test_a_stalled_streaming_loop_starts_nothing_even_after_an_abandoned_call_returns(build):
    world = build()
    start_stalled_loop(world).set()
    world.until(lambda: not world.running["a"])
    world.never(lambda: world.steps("b"))


@pytest.mark.spec("CON-12")
def test_the_lifecycle_timeout_ends_process_and_leads_to_the_exception_handler_once(build):
    world = build(process=wait_then_return(0.25)).offer("a")
    world.run(make_policy(process={"max_attempts": 5, "exit_grace": 2.0}, transaction_timeout=0.1))
    assert world.steps() == ["process", "exception"]
    assert world.only("exception").argument.category is TIMEOUT
    assert world.outcome().category is TIMEOUT


@pytest.mark.spec("CON-12", "CON-43")
def test_the_deadline_of_an_attempt_never_exceeds_that_of_the_lifecycle(build):
    world = build(process=ignore_cancellation(0.2)).offer("a")
    with WakeupDelayMeter() as wakeup_delay:
        world.run(make_policy(process={"timeout": 10.0, "max_attempts": 3}, transaction_timeout=0.1))
    call = world.only("process")
    assert call.scope.deadline - call.began <= 0.1
    assert 0.0 <= call.abandoned_at - call.scope.deadline <= TOLERANCE_SECONDS + wakeup_delay.late


@pytest.mark.spec("CON-12")
def test_a_wait_that_does_not_fit_the_lifecycle_ends_the_step_immediately(build):
    raised = OSError("down")
    world = build(process=raise_error(raised)).offer("a")
    world.run(make_policy(process={"backoff": 3.0, "max_attempts": 5}, transaction_timeout=1.0))
    assert world.steps() == ["process", "exception"]
    assert world.only("exception").argument.__cause__ is raised
    assert world.outcome().category is Category.SYSTEM
    assert world.duration_seconds < 0.8


@pytest.mark.spec("CON-12")
def test_waits_and_attempts_share_the_lifecycle_timeout(build):
    world = build(process=raise_error(OSError())).offer("a")
    world.run(make_policy(process={"backoff": 0.04, "max_attempts": 100}, transaction_timeout=0.15))
    assert 2 <= len(world.of("process")) <= 4
    assert len(world.of("exception")) == 1
    assert world.of("process")[-1].began - world.of("process")[0].began < 0.15


@pytest.mark.spec("CON-12")
def test_the_lifecycle_timeout_does_not_apply_to_the_exception_handler(build):
    world = build(process=wait_then_return(0.25), exception=wait_then_return(0.2, "complete")).offer("a")
    world.run(make_policy(transaction_timeout=0.05, exception={"timeout": 5.0}))
    assert world.only("exception").result == "complete"
    assert world.outcome().kind is OutcomeKind.FAILED


@pytest.mark.spec("CON-12")
def test_the_loop_timeout_is_a_timeout_error_with_the_report(build):
    with WakeupDelayMeter() as wakeup_delay:
        world = build().offer("a").run(make_policy(streaming=True, timeout=0.2))
    assert isinstance(world.error, LoopTimeout)
    assert isinstance(world.error, TimeoutError)
    assert world.error.report.stop_reason is StopReason.TIMEOUT
    assert world.error.report.counts[OutcomeKind.SUCCEEDED] == 1
    assert 0.2 <= world.duration_seconds < 0.5 + wakeup_delay.late


@pytest.mark.spec("CON-38")
def test_waiting_for_a_slot_does_not_count_towards_the_lifecycle_timeout(build):
    world = build(process=wait_then_return(0.12), fetches=[lambda fetch: fetch.queue.claim(3)]).offer("a", "b", "c")
    world.run(make_policy(concurrency=1, batch=3, transaction_timeout=0.25))
    assert world.kinds() == dict.fromkeys("abc", "succeeded")
    assert world.peak == 1
    assert [type(sent) for sent in world.settlements()] == [Ack] * 3


@pytest.mark.spec("CON-38")
def test_a_prefetched_transaction_has_its_full_lifecycle_timeout(build):
    world = build(process=wait_then_return(0.12)).offer("a", "b", "c")
    world.run(make_policy(concurrency=1, prefetch=2, transaction_timeout=0.25))
    assert world.kinds() == dict.fromkeys("abc", "succeeded")
