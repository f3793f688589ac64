"""The three timeouts, what a body that does not leave can still do, and what it holds."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter
from ergon_framework.errors import Category
from ergon_framework.task.exceptions import BusinessError, LoopStalled, LoopTimeout, TransactionException
from ergon_framework.task.report import End, Kind
from tests.twins.world import Pulse, Stubborn, fails, gives, policy, stays, takes

TIMEOUT = Category.TIMEOUT
#: By how much a timeout may be declared after its deadline.
TOLERANCE = 0.05


@pytest.mark.spec("CON-12", "CON-28")
def test_a_step_timeout_is_declared_by_its_deadline_whatever_the_body_does(build):
    with Pulse() as pulse:
        world = build(process=stays(0.2)).offer("a").run(policy(process={"timeout": 0.1, "max_attempts": 1}))
    call = world.only("process")
    assert 0.0 <= call.told - call.scope.deadline <= TOLERANCE + pulse.late
    assert call.scope.deadline - call.began <= 0.1
    assert world.outcome().category is TIMEOUT


@pytest.mark.spec("CON-15", "CON-12")
def test_a_timeout_is_retried_until_the_budget_is_spent(build):
    world = build(process=takes(0.1)).offer("a")
    world.run(policy(process={"timeout": 0.03, "max_attempts": 3}))
    assert world.steps() == ["process"] * 3 + ["exception"]
    assert isinstance(world.only("exception").given, TransactionException)
    assert world.only("exception").given.category is TIMEOUT
    assert not world.only("exception").given.still_running
    assert (world.outcome().category, world.outcome().attempts) == (TIMEOUT, 3)


@pytest.mark.spec("CON-15")
def test_an_attempt_after_a_timeout_may_succeed(build):
    world = build(process=[takes(0.1), gives("second")]).offer("a")
    world.run(policy(process={"timeout": 0.03, "max_attempts": 3}))
    assert world.steps() == ["process", "process", "success"]
    assert world.outcome().result == "second"


@pytest.mark.spec("CON-12", "CON-39")
def test_the_success_handler_has_a_timeout_of_its_own(build):
    world = build(process=takes(0.1), success=takes(0.1)).offer("a")
    world.run(policy(success={"timeout": 0.03, "max_attempts": 2}))
    assert world.steps() == ["process", "success", "success", "exception"]
    assert world.only("exception").given.category is TIMEOUT
    assert world.outcome().processed


@pytest.mark.spec("CON-12", "CON-39")
def test_the_exception_handler_has_a_timeout_of_its_own(build):
    world = build(process=fails(BusinessError("no")), exception=takes(0.1)).offer("a")
    world.run(policy(exception={"timeout": 0.03, "max_attempts": 2}))
    assert world.steps() == ["process", "exception", "exception"]
    assert world.outcome().kind is Kind.HANDLER_FAILED
    assert world.outcome().category is Category.BUSINESS
    assert world.outcome().handler_error.category is TIMEOUT


@pytest.mark.spec("CON-28")
def test_a_late_value_causes_no_ack_no_handler_and_no_count(build):
    world = build(process=takes(Stubborn(0.15), "late")).offer("a")
    world.run(policy(process={"timeout": 0.03, "max_attempts": 1}))
    assert world.only("process").result == "late"
    assert world.steps() == ["process", "exception"]
    assert world.report.counts[Kind.SUCCEEDED] == 0
    assert not world.outcome().processed
    assert [type(sent) for sent in world.settlements()] == [DeadLetter]
    assert world.report.fenced == 1


@pytest.mark.spec("CON-28")
def test_a_late_business_error_does_not_change_the_verdict(build):
    def body(call):
        yield Stubborn(0.1)
        raise BusinessError("too late to matter")

    world = build(process=body).offer("a").run(policy(process={"timeout": 0.03, "max_attempts": 2}))
    assert world.steps() == ["process", "process", "exception"]
    assert world.outcome().category is TIMEOUT


@pytest.mark.spec("CON-29", "CON-21")
def test_nothing_of_a_transaction_runs_until_its_timed_out_body_has_left(build):
    world = build(process=stays(0.15)).offer("a")
    world.run(policy(process={"timeout": 0.03, "max_attempts": 2, "abandon_grace": 5.0}))
    first, second = world.of("process")
    assert first.ended <= second.began
    assert second.ended <= world.only("exception").began
    assert world.overlap == 1


@pytest.mark.spec("CON-29")
def test_after_the_grace_there_is_no_attempt_and_the_exception_handler_is_told(build):
    world = build()
    leave = world.signal()
    world.bodies["process"] = takes(Stubborn(leave), "late")
    seen = []
    world.bodies["exception"] = lambda call: seen.append(call.given.still_running)
    world.offer("a").start(policy(process={"timeout": 0.05, "max_attempts": 3, "abandon_grace": 0.1}))
    world.until(lambda: world.outcomes)
    body, handler = world.only("process"), world.only("exception")
    assert handler.began - body.scope.deadline >= 0.1
    assert body.ended is None
    assert seen == [True]
    assert world.outcome().still_running
    leave.set()
    world.finish()
    assert world.steps() == ["process", "exception"]
    assert (world.outcome().kind, world.outcome().category) == (Kind.FAILED, TIMEOUT)


@pytest.mark.spec("CON-29")
def test_a_success_handler_beyond_its_grace_leads_to_the_exception_handler_too(build):
    world = build()
    leave = world.signal()
    world.bodies["success"] = takes(Stubborn(leave))
    world.offer("a").start(policy(success={"timeout": 0.03, "max_attempts": 3, "abandon_grace": 0.05}))
    world.until(lambda: world.outcomes)
    assert world.only("exception").given.still_running
    assert world.outcome().processed
    leave.set()
    assert world.finish().steps() == ["process", "success", "exception"]


@pytest.mark.spec("CON-29")
def test_an_exception_handler_beyond_its_grace_is_not_run_again(build):
    world = build(process=fails(BusinessError("no")))
    leave = world.signal()
    world.bodies["exception"] = takes(Stubborn(leave))
    world.offer("a").start(policy(exception={"timeout": 0.03, "max_attempts": 3, "abandon_grace": 0.05}))
    world.until(lambda: world.outcomes)
    assert world.outcome().still_running
    leave.set()
    assert world.finish().steps() == ["process", "exception"]
    assert world.outcome().kind is Kind.HANDLER_FAILED


@pytest.mark.spec("CON-29")
def test_a_body_that_stays_is_in_the_record_whatever_the_exception_handler_does(build):
    world = build(exception=fails(OSError("and that too")))
    leave = world.signal()
    world.bodies["process"] = takes(Stubborn(leave))
    world.offer("a").start(policy(process={"timeout": 0.03, "abandon_grace": 0.03}))
    world.until(lambda: world.outcomes)
    assert world.outcome().kind is Kind.HANDLER_FAILED
    assert world.outcome().still_running
    leave.set()
    world.until(lambda: not world.outcome().still_running)


@pytest.mark.spec("CON-29")
def test_a_slot_is_kept_until_the_abandoned_body_has_left(build):
    world = build()
    leave = world.signal()
    world.bodies["process"] = {"a": takes(Stubborn(leave))}
    retry = {"timeout": 0.03, "max_attempts": 1, "abandon_grace": 0.03}
    world.offer("a", "b").start(policy(concurrency=1, process=retry))
    world.until(lambda: world.outcomes)
    assert world.steps("b") == []
    leave.set()
    world.finish()
    assert world.only("exception").id == "a"
    assert world.of("process", "b")[0].began >= world.of("process", "a")[0].ended
    assert world.peak == 1


@pytest.mark.spec("CON-29")
def test_a_loop_whose_slots_are_all_held_by_abandoned_bodies_ends_as_stalled(build):
    world = build()
    leave = world.signal()
    world.bodies["process"] = takes(Stubborn(leave))
    retry = {"timeout": 0.03, "max_attempts": 1, "abandon_grace": 0.03}
    world.offer("a", "b", "c").run(policy(concurrency=2, process=retry, drain_timeout=0.1))
    assert isinstance(world.error, LoopStalled)
    assert world.report.end is End.STALLED
    assert world.report.abandoned == 2
    assert world.kinds() == {"a": "failed", "b": "failed"}
    assert world.steps("c") == []
    assert world.took >= 0.15


def stalled(world):
    """A streaming loop of one slot that an abandoned body has held for too long; b still waits in the queue."""
    leave = world.signal()
    world.bodies["process"] = takes(Stubborn(leave))
    retry = {"timeout": 0.03, "max_attempts": 1, "abandon_grace": 0.03}
    world.offer("a", "b").start(policy(concurrency=1, process=retry, drain_timeout=0.1, streaming=True))
    world.until(lambda: world.of("process"))
    assert world.task.live
    world.until(lambda: not world.task.live)
    return leave


@pytest.mark.spec("CON-29")
def test_a_stalled_streaming_loop_stays_and_is_not_live(build):
    world = build()
    stalled(world)
    world.never(lambda: world.steps("b") or world.ended)
    assert world.kinds() == {"a": "failed"}


@pytest.mark.spec("CON-29")
def test_a_stalled_streaming_loop_starts_nothing_more_also_when_a_body_leaves(build):
    world = build()
    stalled(world).set()
    world.until(lambda: not world.running["a"])
    world.never(lambda: world.steps("b"))


@pytest.mark.spec("CON-12")
def test_the_lifecycle_timeout_ends_process_and_leads_to_the_exception_handler_once(build):
    world = build(process=takes(0.25)).offer("a")
    world.run(policy(process={"max_attempts": 5, "abandon_grace": 2.0}, transaction_timeout=0.1))
    assert world.steps() == ["process", "exception"]
    assert world.only("exception").given.category is TIMEOUT
    assert world.outcome().category is TIMEOUT


@pytest.mark.spec("CON-12", "CON-43")
def test_the_deadline_of_an_attempt_is_cut_to_that_of_the_lifecycle(build):
    world = build(process=stays(0.2)).offer("a")
    with Pulse() as pulse:
        world.run(policy(process={"timeout": 10.0, "max_attempts": 3}, transaction_timeout=0.1))
    call = world.only("process")
    assert call.scope.deadline - call.began <= 0.1
    assert 0.0 <= call.told - call.scope.deadline <= TOLERANCE + pulse.late


@pytest.mark.spec("CON-12")
def test_a_wait_that_does_not_fit_the_lifecycle_ends_the_step_at_once(build):
    raised = OSError("down")
    world = build(process=fails(raised)).offer("a")
    world.run(policy(process={"backoff": 3.0, "max_attempts": 5}, transaction_timeout=1.0))
    assert world.steps() == ["process", "exception"]
    assert world.only("exception").given.__cause__ is raised
    assert world.outcome().category is Category.SYSTEM
    assert world.took < 0.8


@pytest.mark.spec("CON-12")
def test_waits_and_attempts_share_the_lifecycle(build):
    world = build(process=fails(OSError())).offer("a")
    world.run(policy(process={"backoff": 0.04, "max_attempts": 100}, transaction_timeout=0.15))
    assert 2 <= len(world.of("process")) <= 4
    assert len(world.of("exception")) == 1
    assert world.of("process")[-1].began - world.of("process")[0].began < 0.15


@pytest.mark.spec("CON-12")
def test_the_lifecycle_timeout_does_not_bind_the_exception_handler(build):
    world = build(process=takes(0.25), exception=takes(0.2, "complete")).offer("a")
    world.run(policy(transaction_timeout=0.05, exception={"timeout": 5.0}))
    assert world.only("exception").result == "complete"
    assert world.outcome().kind is Kind.FAILED


@pytest.mark.spec("CON-12")
def test_the_loop_timeout_is_a_timeout_error_with_the_report(build):
    with Pulse() as pulse:
        world = build().offer("a").run(policy(streaming=True, timeout=0.2))
    assert isinstance(world.error, LoopTimeout)
    assert isinstance(world.error, TimeoutError)
    assert world.error.report.end is End.TIMEOUT
    assert world.error.report.counts[Kind.SUCCEEDED] == 1
    assert 0.2 <= world.took < 0.5 + pulse.late


@pytest.mark.spec("CON-38")
def test_waiting_for_a_slot_does_not_count_in_the_lifecycle(build):
    world = build(process=takes(0.12), fetches=[lambda fetch: fetch.queue.claim(3)]).offer("a", "b", "c")
    world.run(policy(concurrency=1, batch=3, transaction_timeout=0.25))
    assert world.kinds() == dict.fromkeys("abc", "succeeded")
    assert world.peak == 1
    assert [type(sent) for sent in world.settlements()] == [Ack] * 3


@pytest.mark.spec("CON-38")
def test_what_was_prefetched_has_its_whole_lifecycle(build):
    world = build(process=takes(0.12)).offer("a", "b", "c")
    world.run(policy(concurrency=1, prefetch=2, transaction_timeout=0.25))
    assert world.kinds() == dict.fromkeys("abc", "succeeded")
