"""Scenarios that have caused lost or duplicated work in other systems, each in both variants."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ergon_framework.connectors.base import Defer, Release
from ergon_framework.errors import Category, ConnectionLostError
from ergon_framework.worker.exceptions import BusinessError, LoopTimeout, TransactionException
from ergon_framework.worker.policies import ConsumerPolicy, RetryPolicy
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

SYSTEM, TIMEOUT = Category.SYSTEM, Category.TIMEOUT


@pytest.mark.spec("CON-02", "CON-23")
def test_business_with_four_attempts_allowed_has_one(build):
    world = build(process=raise_error(BusinessError("no"))).offer("a").run(make_policy(process={"max_attempts": 4}))
    assert world.steps() == ["process", "exception"]


# -- timeouts -----------------------------------------------------------------------------------


@pytest.mark.spec("CON-15", "CON-21", "CON-28", "CON-29")
def test_three_timeouts_are_declared_in_time_and_their_calls_never_overlap(build):
    world = build(process=ignore_cancellation(1.0, "late")).offer("a")
    with WakeupDelayMeter() as wakeup_delay:
        world.run(make_policy(process={"timeout": 0.1, "max_attempts": 3, "exit_grace": 2.0}))
    calls = world.of("process")
    assert len(calls) == 3
    assert all(0.0 <= call.abandoned_at - call.scope.deadline <= 0.05 + wakeup_delay.late for call in calls)
    assert all(call.scope.deadline - call.began <= 0.1 for call in calls)
    assert world.overlap == 1
    assert [call.result for call in calls] == ["late"] * 3
    assert world.report.late_results == 3
    assert world.of("success") == []
    assert (world.outcome().kind, world.outcome().category) == (OutcomeKind.FAILED, TIMEOUT)
    assert not world.only("exception").argument.still_running


@pytest.mark.spec("CON-28", "CON-29")
def test_a_call_that_exceeds_a_short_grace_has_one_attempt_and_the_exception_handler_sees_it(build):
    still_running = []
    world = build(exception=lambda call: still_running.append(call.argument.still_running))
    release = world.signal()
    world.bodies["process"] = wait_then_return(Stubborn(release), "late")
    world.offer("a").start(make_policy(process={"timeout": 0.1, "max_attempts": 3, "exit_grace": 0.2}))
    world.until(lambda: world.of("exception"))
    assert still_running == [True]
    body, handler = world.only("process"), world.only("exception")
    assert body.ended is None
    assert handler.began - body.scope.deadline >= 0.2
    release.set()
    world.finish()
    world.until(lambda: world.only("process").ended)
    world.never(lambda: len(world.calls) > 2)
    assert world.kinds() == {"a": "failed"}
    assert world.report.counts[OutcomeKind.SUCCEEDED] == 0


@pytest.mark.spec("CON-12", "CON-23", "CON-30")
def test_a_lifecycle_timeout_in_the_success_handler_is_a_failure_after_a_processed_transaction(build):
    world = build(process=return_value("done"), success=wait_then_return(Stubborn(0.3))).offer("a")
    world.run(make_policy(transaction_timeout=0.1, success={"max_attempts": 3}))
    assert world.steps() == ["process", "success", "exception"]
    assert world.only("success").ended <= world.only("exception").began
    outcome = world.outcome()
    assert (outcome.kind, outcome.category) == (OutcomeKind.FAILED, TIMEOUT)
    assert outcome.processed
    assert outcome.succeeded_steps == ("process",)
    assert (world.report.counts[OutcomeKind.SUCCEEDED], world.report.counts[OutcomeKind.FAILED]) == (0, 1)
    assert world.queue.dead_letters[0].failure.succeeded_steps == ("process",)


@pytest.mark.spec("CON-12", "CON-23")
@pytest.mark.parametrize("first", ["business", "slow"])
def test_a_lifecycle_timeout_in_the_exception_handler_neither_cuts_nor_repeats_it(build, first):
    process = raise_error(BusinessError("no")) if first == "business" else wait_then_return(0.2)
    world = build(process=process, exception=wait_then_return(0.3, "complete")).offer("a")
    world.run(make_policy(transaction_timeout=0.1))
    assert world.only("exception").result == "complete"
    assert world.outcome().kind is OutcomeKind.FAILED
    assert world.outcome().category is (Category.BUSINESS if first == "business" else TIMEOUT)


@pytest.mark.spec("CON-20", "CON-29")
def test_hanging_calls_and_an_over_returning_connector_never_exceed_the_slots(build):
    world = build(process=wait_then_return(Stubborn(0.2)), fetches=lambda fetch: fetch.queue.claim(6)).offer(*"abcdef")
    retry = {"timeout": 0.05, "max_attempts": 3, "exit_grace": 0.05}
    world.run(make_policy(concurrency=2, batch=2, process=retry))
    assert world.peak <= 2
    assert world.kinds() == dict.fromkeys("abcdef", "failed")
    assert len(world.of("process")) == 6


@pytest.mark.spec("CON-37")
def test_a_timeout_error_of_user_code_is_system_and_retried(build):
    world = build(process=[raise_error(TimeoutError("theirs")), return_value(None)]).offer("a").run(make_policy())
    assert world.steps() == ["process", "process", "success"]
    world = build(process=raise_error(TimeoutError("theirs"))).offer("a").run(make_policy())
    assert world.outcome().category is SYSTEM


# -- the loop -----------------------------------------------------------------------------------


@pytest.mark.spec("CON-31")
def test_limit_three_with_batch_two_starts_three_and_leaves_none_unsettled(build):
    world = build().offer(*"abcde").run(make_policy(limit=3, batch=2))
    assert len(world.outcomes) == 3
    depth = world.queue.depth()
    assert (depth.in_flight, depth.ready) == (0, 2)


@pytest.mark.spec("CON-31")
def test_limit_zero_makes_no_fetch(build):
    assert build().offer("a").run(make_policy(limit=0)).fetches == []


SCENARIOS = {
    "an empty queue": {},
    "a blocked fetch": {"fetches": "blocked"},
    "a long wait": {"process": raise_error(OSError("down"))},
    "handlers of 2 s": {"process": wait_then_return(Stubborn(2.0))},
}


@pytest.mark.spec("CON-12", "CON-19", "CON-36", "DX-19")
@pytest.mark.parametrize("drain", [0.0, 0.3])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_loop_timeout_ends_the_loop_within_its_drain(build, scenario, drain):
    world = build(process=SCENARIOS[scenario].get("process"))
    if "fetches" in SCENARIOS[scenario]:
        world.queue._script = wait_then_return(world.signal(), [])
    if "process" in SCENARIOS[scenario]:
        world.offer("a")
    idle = {"backoff": 20.0, "cap": 20.0}
    with WakeupDelayMeter() as wakeup_delay:
        world.run(
            make_policy(streaming=True, timeout=0.3, timeout_drain=drain, process={"backoff": 20.0}, empty_queue=idle)
        )
    assert isinstance(world.error, LoopTimeout)
    assert world.error.report.stop_reason is StopReason.TIMEOUT
    has_work = "process" in SCENARIOS[scenario]
    # A blocked fetch has half a second to release its deliveries, or the drain if that is longer.
    extra_seconds = 0.5 if "fetches" in SCENARIOS[scenario] else drain if has_work else 0.0
    assert 0.3 <= world.duration_seconds < 0.3 + extra_seconds + 0.2 + wakeup_delay.late
    assert world.kinds() == ({"a": "released"} if has_work else {}), (world.fetches, world.calls, world.report)
    assert world.settlements() == ([Release()] if scenario == "a long wait" else [])


@pytest.mark.spec("CON-10", "CON-33")
def test_an_idle_loop_with_the_default_policy_polls_rarely_and_reacts_quickly(build):
    world = build().start(ConsumerPolicy.load({"loop": {"streaming": True}}))
    world.until(lambda: len(world.fetches) >= 3)
    started_at = [fetch.began for fetch in world.fetches]
    assert started_at[2] - started_at[0] >= 1.0
    if world.loop is not None:
        loop_turned = threading.Event()
        world.loop.call_soon_threadsafe(loop_turned.set)
        assert loop_turned.wait(0.2)
    world.offer("a").until(lambda: world.of("process"), seconds=0.3)


@pytest.mark.spec("CON-13")
def test_backoff_one_with_multiplier_three_and_cap_ten(build):
    retry = RetryPolicy(max_attempts=6, backoff=1.0, multiplier=3.0, cap=10.0)
    assert [retry.delay(attempt) for attempt in range(5)] == [1.0, 3.0, 9.0, 10.0, 10.0]
    scaled = {"max_attempts": 6, "backoff": 0.01, "multiplier": 3.0, "cap": 0.1}
    world = build(process=raise_error(OSError("down"))).offer("a").run(make_policy(process=scaled))
    history = world.queue.dead_letters[0].failure.history
    assert [attempt.delay for attempt in history[:-1]] == pytest.approx([0.01, 0.03, 0.09, 0.1, 0.1])
    calls = world.of("process")
    for earlier, later, attempt in zip(calls, calls[1:], history, strict=False):
        assert later.began - earlier.ended >= attempt.delay


@pytest.mark.spec("CON-32", "CNN-10")
def test_new_arrivals_start_alongside_a_slow_transaction_without_waiting(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = {"slow": wait_then_return(go)}
    world.offer("slow").start(make_policy(concurrency=3, streaming=True))
    world.until(lambda: world.of("process", "slow"))
    for name in "abcdefgh":
        fetch_count = len(world.fetches)
        world.offer(name).until(lambda name=name: world.of("process", name), seconds=1.0)
        assert next(fetch.number for fetch in world.fetches if name in fetch.transaction_ids) <= fetch_count
    assert all(fetch.batch_size <= 3 - fetch.running for fetch in world.fetches)
    go.set()
    world.until(lambda: len(world.outcomes) == 9)
    world.stop().finish()
    assert world.peak <= 3


@pytest.mark.spec("CON-34", "CON-21")
def test_a_repeated_id_in_a_batch_is_deferred_and_delays_no_other_transaction(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = {"a": wait_then_return(go)}
    world.offer("a", "a", "b", "c").start(make_policy(concurrency=3, batch=4, streaming=True, duplicate_delay=9.0))
    world.until(lambda: len(world.outcomes) == 3)
    assert world.kinds() == {"a": "deferred", "b": "succeeded", "c": "succeeded"}
    assert world.settlements("a") == [Defer(9.0)]
    go.set()
    world.until(lambda: len(world.outcomes) == 4)
    world.stop().finish()
    assert world.steps("a") == ["process", "success"]


@pytest.mark.spec("CON-35")
@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_handler_that_raises_a_base_exception_fails_its_transaction(build, raised):
    world = build(process={"bad": raise_error(raised())}).offer("bad", *"abc")
    world.run(make_policy(concurrency=1, batch=1, process={"max_attempts": 2}))
    assert world.error is None
    assert world.kinds() == {"bad": "failed", "a": "succeeded", "b": "succeeded", "c": "succeeded"}
    assert world.outcome("bad").category is SYSTEM
    assert world.steps("bad") == ["process", "process", "exception"]


@pytest.mark.spec("CON-44", "CON-45")
def test_a_retry_after_beyond_the_max_inline_delay_is_deferred_and_attempts_continue_to_count(build):
    scenario = TransactionException("busy", retry_after=0.1)
    world = build(process=[raise_error(scenario), return_value(None)]).offer("a")
    empty_queue = {"backoff": 0.02, "multiplier": 1.0}
    world.run(make_policy(process={"max_inline_delay": 0.05}, streaming=True, limit=2, empty_queue=empty_queue))
    assert [outcome.kind.value for outcome in world.outcomes] == ["deferred", "succeeded"]
    first, second = world.of("process")
    assert second.began - first.ended >= 0.1
    assert [first.scope.attempt, second.scope.attempt] == [0, 1]
    assert (second.transaction.attempts, world.outcomes[-1].attempts) == (1, 2)
    assert world.of("exception") == []


@pytest.mark.spec("CON-08", "CNN-07")
def test_a_long_connection_loss_does_not_end_a_streaming_loop(build):
    lost = raise_error(ConnectionLostError("the line is down"))
    other = raise_error(OSError("and one fault of another kind"))
    world = build(fetches=[None] + [lost] * 12 + [other] + [lost] * 12)
    world.offer("a").start(make_policy(concurrency=1, batch=1, fetch={"max_attempts": 2}, streaming=True))
    world.until(lambda: world.kinds().get("a") == "succeeded")
    world.offer("b").until(lambda: world.kinds().get("b") == "succeeded")
    assert len(world.fetches) > 26
    world.stop().finish()
    assert (world.error, world.report.stop_reason) == (None, StopReason.STOP)


# -- stop ---------------------------------------------------------------------------------------

GRACE_SECONDS = 0.3


def check_stop(world):
    """Stop the loop and check that it ends within the grace plus a second, without another fetch."""
    fetch_count = len(world.fetches)
    world.stop().finish(GRACE_SECONDS + 1.0)
    assert len(world.fetches) == fetch_count
    assert (world.error, world.report.stop_reason) == (None, StopReason.STOP)
    return world


def start_streaming(world, **options):
    idle = {"backoff": 20.0, "cap": 20.0}
    return world.start(make_policy(streaming=True, drain_timeout=GRACE_SECONDS, empty_queue=idle, **options))


@pytest.mark.spec("CON-36")
def test_stop_while_idle(build):
    world = start_streaming(build())
    world.until(lambda: world.fetches and world.fetches[0].ended)
    assert check_stop(world).kinds() == {}


@pytest.mark.spec("CON-36")
def test_stop_in_a_blocked_fetch(build):
    world = build()
    world.queue._script = wait_then_return(Stubborn(world.signal()), [])
    start_streaming(world).until(lambda: world.fetches)
    assert check_stop(world).kinds() == {}


@pytest.mark.spec("CON-36")
def test_stop_in_a_backoff(build):
    world = start_streaming(build(process=raise_error(OSError("down"))).offer("a"), process={"backoff": 20.0})
    world.until(lambda: world.calls and world.calls[0].ended and world.fetches[-1].ended)
    world.until(lambda: len(world.fetches) > 1)
    assert check_stop(world).kinds() == {"a": "released"}
    assert world.settlements() == [Release()]


@pytest.mark.spec("CON-36")
def test_stop_in_a_handler(build):
    world = start_streaming(build(process=wait_then_return(0.15, "done")).offer("a"))
    world.until(lambda: world.of("process") and len(world.fetches) > 1)
    assert check_stop(world).kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-36")
def test_stop_in_a_handler_that_never_returns(build):
    world = build()
    world.bodies["process"] = wait_then_return(Stubborn(world.signal()))
    start_streaming(world.offer("a")).until(lambda: world.of("process") and len(world.fetches) > 1)
    assert check_stop(world).kinds() == {"a": "released"}
    assert world.queue.settled == []


@pytest.mark.spec("CON-36")
def test_stopping_one_of_two_loops_in_a_process_does_not_affect_the_other(build):
    one, other = start_streaming(build()), build()
    go = other.signal()
    other.bodies["process"] = {"slow": wait_then_return(go)}
    start_streaming(other.offer("slow")).until(lambda: other.of("process", "slow"))
    one.until(lambda: one.fetches and one.fetches[0].ended)
    check_stop(one)
    other.offer("a").until(lambda: other.kinds() == {"a": "succeeded"}, seconds=1.0)
    go.set()
    other.until(lambda: len(other.outcomes) == 2)
    assert other.ended is None
    assert check_stop(other).kinds() == {"slow": "succeeded", "a": "succeeded"}
