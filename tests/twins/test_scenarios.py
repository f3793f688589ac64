"""The scenarios that have cost others lost or doubled work, each in both variants."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ergon_framework.connectors.base import Later, Release
from ergon_framework.errors import Category, ConnectionLost
from ergon_framework.task.exceptions import BusinessError, LoopTimeout, TransactionException
from ergon_framework.task.mixins.policies import ConsumerPolicy, RetryPolicy
from ergon_framework.task.report import End, Kind
from tests.twins.world import Pulse, Stubborn, fails, gives, policy, stays, takes

SYSTEM, TIMEOUT = Category.SYSTEM, Category.TIMEOUT


@pytest.mark.spec("CON-02", "CON-23")
def test_business_with_four_attempts_allowed_has_one(build):
    world = build(process=fails(BusinessError("no"))).offer("a").run(policy(process={"max_attempts": 4}))
    assert world.steps() == ["process", "exception"]


# -- timeouts -----------------------------------------------------------------------------------


@pytest.mark.spec("CON-15", "CON-21", "CON-28", "CON-29")
def test_three_timeouts_are_declared_in_time_and_their_bodies_never_overlap(build):
    world = build(process=stays(1.0, "late")).offer("a")
    with Pulse() as pulse:
        world.run(policy(process={"timeout": 0.1, "max_attempts": 3, "abandon_grace": 2.0}))
    calls = world.of("process")
    assert len(calls) == 3
    assert all(0.0 <= call.told - call.scope.deadline <= 0.05 + pulse.late for call in calls)
    assert all(call.scope.deadline - call.began <= 0.1 for call in calls)
    assert world.overlap == 1
    assert [call.result for call in calls] == ["late"] * 3
    assert world.report.fenced == 3
    assert world.of("success") == []
    assert (world.outcome().kind, world.outcome().category) == (Kind.FAILED, TIMEOUT)
    assert not world.only("exception").given.still_running


@pytest.mark.spec("CON-28", "CON-29")
def test_a_body_that_outstays_a_short_grace_has_one_attempt_and_a_handler_that_knows(build):
    told = []
    world = build(exception=lambda call: told.append(call.given.still_running))
    leave = world.signal()
    world.bodies["process"] = takes(Stubborn(leave), "late")
    world.offer("a").start(policy(process={"timeout": 0.1, "max_attempts": 3, "abandon_grace": 0.2}))
    world.until(lambda: world.of("exception"))
    assert told == [True]
    body, handler = world.only("process"), world.only("exception")
    assert body.ended is None
    assert handler.began - body.scope.deadline >= 0.2
    leave.set()
    world.finish()
    world.until(lambda: world.only("process").ended)
    world.never(lambda: len(world.calls) > 2)
    assert world.kinds() == {"a": "failed"}
    assert world.report.counts[Kind.SUCCEEDED] == 0


@pytest.mark.spec("CON-12", "CON-23", "CON-30")
def test_a_lifecycle_timeout_in_the_success_handler_is_a_failure_after_a_processed_transaction(build):
    world = build(process=gives("done"), success=takes(Stubborn(0.3))).offer("a")
    world.run(policy(transaction_timeout=0.1, success={"max_attempts": 3}))
    assert world.steps() == ["process", "success", "exception"]
    assert world.only("success").ended <= world.only("exception").began
    outcome = world.outcome()
    assert (outcome.kind, outcome.category) == (Kind.FAILED, TIMEOUT)
    assert outcome.processed
    assert outcome.succeeded_steps == ("process",)
    assert (world.report.counts[Kind.SUCCEEDED], world.report.counts[Kind.FAILED]) == (0, 1)
    assert world.queue.dead_letters[0].failure.succeeded_steps == ("process",)


@pytest.mark.spec("CON-12", "CON-23")
@pytest.mark.parametrize("first", ["business", "slow"])
def test_a_lifecycle_timeout_in_the_exception_handler_neither_cuts_nor_repeats_it(build, first):
    process = fails(BusinessError("no")) if first == "business" else takes(0.2)
    world = build(process=process, exception=takes(0.3, "complete")).offer("a")
    world.run(policy(transaction_timeout=0.1))
    assert world.only("exception").result == "complete"
    assert world.outcome().kind is Kind.FAILED
    assert world.outcome().category is (Category.BUSINESS if first == "business" else TIMEOUT)


@pytest.mark.spec("CON-20", "CON-29")
def test_hung_bodies_and_an_over_returning_connector_never_exceed_the_slots(build):
    world = build(process=takes(Stubborn(0.2)), fetches=lambda fetch: fetch.queue.claim(6)).offer(*"abcdef")
    retry = {"timeout": 0.05, "max_attempts": 3, "abandon_grace": 0.05}
    world.run(policy(concurrency=2, batch=2, process=retry))
    assert world.peak <= 2
    assert world.kinds() == dict.fromkeys("abcdef", "failed")
    assert len(world.of("process")) == 6


@pytest.mark.spec("CON-37")
def test_a_timeout_error_of_user_code_is_system_and_retried(build):
    world = build(process=[fails(TimeoutError("theirs")), gives(None)]).offer("a").run(policy())
    assert world.steps() == ["process", "process", "success"]
    world = build(process=fails(TimeoutError("theirs"))).offer("a").run(policy())
    assert world.outcome().category is SYSTEM


# -- the loop -----------------------------------------------------------------------------------


@pytest.mark.spec("CON-31")
def test_limit_three_with_batch_two_starts_three_and_leaves_none_unsettled(build):
    world = build().offer(*"abcde").run(policy(limit=3, batch=2))
    assert len(world.outcomes) == 3
    depth = world.queue.depth()
    assert (depth.in_flight, depth.ready) == (0, 2)


@pytest.mark.spec("CON-31")
def test_limit_zero_makes_no_fetch(build):
    assert build().offer("a").run(policy(limit=0)).fetches == []


TIMED = {
    "an empty queue": {},
    "a blocked fetch": {"fetches": "blocked"},
    "a long wait": {"process": fails(OSError("down"))},
    "handlers of 2 s": {"process": takes(Stubborn(2.0))},
}


@pytest.mark.spec("CON-12", "CON-19", "CON-36", "DX-19")
@pytest.mark.parametrize("drain", [0.0, 0.3])
@pytest.mark.parametrize("busy", TIMED)
def test_a_loop_timeout_ends_the_loop_by_then_plus_its_drain(build, busy, drain):
    world = build(process=TIMED[busy].get("process"))
    if "fetches" in TIMED[busy]:
        world.queue._script = takes(world.signal(), [])
    if "process" in TIMED[busy]:
        world.offer("a")
    idle = {"backoff": 20.0, "cap": 20.0}
    with Pulse() as pulse:
        world.run(policy(streaming=True, timeout=0.3, timeout_drain=drain, process={"backoff": 20.0}, empty_queue=idle))
    assert isinstance(world.error, LoopTimeout)
    assert world.error.report.end is End.TIMEOUT
    work = "process" in TIMED[busy]
    # A blocked fetch has half a second to give back what it brings, or the drain if that is longer.
    more = 0.5 if "fetches" in TIMED[busy] else drain if work else 0.0
    assert 0.3 <= world.took < 0.3 + more + 0.2 + pulse.late
    assert world.kinds() == ({"a": "released"} if work else {}), (world.fetches, world.calls, world.report)
    assert world.settlements() == ([Release()] if busy == "a long wait" else [])


@pytest.mark.spec("CON-10", "CON-33")
def test_an_idle_loop_of_the_default_policy_is_quiet_free_and_awake(build):
    world = build().start(ConsumerPolicy.load({"loop": {"streaming": True}}))
    world.until(lambda: len(world.fetches) >= 3)
    begun = [fetch.began for fetch in world.fetches]
    assert begun[2] - begun[0] >= 1.0
    if world.loop is not None:
        turned = threading.Event()
        world.loop.call_soon_threadsafe(turned.set)
        assert turned.wait(0.2)
    world.offer("a").until(lambda: world.of("process"), seconds=0.3)


@pytest.mark.spec("CON-13")
def test_backoff_one_with_multiplier_three_and_cap_ten(build):
    retry = RetryPolicy(max_attempts=6, backoff=1.0, multiplier=3.0, cap=10.0)
    assert [retry.delay(attempt) for attempt in range(5)] == [1.0, 3.0, 9.0, 10.0, 10.0]
    scaled = {"max_attempts": 6, "backoff": 0.01, "multiplier": 3.0, "cap": 0.1}
    world = build(process=fails(OSError("down"))).offer("a").run(policy(process=scaled))
    history = world.queue.dead_letters[0].failure.history
    assert [attempt.delay for attempt in history[:-1]] == pytest.approx([0.01, 0.03, 0.09, 0.1, 0.1])
    calls = world.of("process")
    for earlier, later, attempt in zip(calls, calls[1:], history, strict=False):
        assert later.began - earlier.ended >= attempt.delay


@pytest.mark.spec("CON-32", "CNN-10")
def test_new_arrivals_start_beside_a_slow_one_and_nothing_fetched_waits(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = {"slow": takes(go)}
    world.offer("slow").start(policy(concurrency=3, streaming=True))
    world.until(lambda: world.of("process", "slow"))
    for name in "abcdefgh":
        before = len(world.fetches)
        world.offer(name).until(lambda name=name: world.of("process", name), seconds=1.0)
        assert next(fetch.number for fetch in world.fetches if name in fetch.brought) <= before
    assert all(fetch.batch_size <= 3 - fetch.running for fetch in world.fetches)
    go.set()
    world.until(lambda: len(world.outcomes) == 9)
    world.stop().finish()
    assert world.peak <= 3


@pytest.mark.spec("CON-34", "CON-21")
def test_the_second_of_one_id_in_a_batch_is_deferred_and_nobody_waits(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = {"a": takes(go)}
    world.offer("a", "a", "b", "c").start(policy(concurrency=3, batch=4, streaming=True, identity_delay=9.0))
    world.until(lambda: len(world.outcomes) == 3)
    assert world.kinds() == {"a": "deferred", "b": "succeeded", "c": "succeeded"}
    assert world.settlements("a") == [Later(9.0)]
    go.set()
    world.until(lambda: len(world.outcomes) == 4)
    world.stop().finish()
    assert world.steps("a") == ["process", "success"]


@pytest.mark.spec("CON-35")
@pytest.mark.parametrize("raised", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_handler_that_tries_to_end_everything_fails_its_transaction(build, raised):
    world = build(process={"bad": fails(raised())}).offer("bad", *"abc")
    world.run(policy(concurrency=1, batch=1, process={"max_attempts": 2}))
    assert world.error is None
    assert world.kinds() == {"bad": "failed", "a": "succeeded", "b": "succeeded", "c": "succeeded"}
    assert world.outcome("bad").category is SYSTEM
    assert world.steps("bad") == ["process", "process", "exception"]


@pytest.mark.spec("CON-44", "CON-45")
def test_a_retry_after_beyond_the_hold_is_deferred_and_attempts_go_on_counting(build):
    busy = TransactionException("busy", retry_after=0.1)
    world = build(process=[fails(busy), gives(None)]).offer("a")
    world.run(policy(process={"hold": 0.05}, streaming=True, limit=2, empty_queue={"backoff": 0.02, "multiplier": 1.0}))
    assert [outcome.kind.value for outcome in world.outcomes] == ["deferred", "succeeded"]
    first, second = world.of("process")
    assert second.began - first.ended >= 0.1
    assert [first.scope.attempt, second.scope.attempt] == [0, 1]
    assert (second.transaction.attempts, world.outcomes[-1].attempts) == (1, 2)
    assert world.of("exception") == []


@pytest.mark.spec("CON-08", "CNN-07")
def test_a_connection_lost_for_long_costs_a_streaming_loop_nothing(build):
    lost = fails(ConnectionLost("the line is down"))
    other = fails(OSError("and one fault of another kind"))
    world = build(fetches=[None] + [lost] * 12 + [other] + [lost] * 12)
    world.offer("a").start(policy(concurrency=1, batch=1, fetch={"max_attempts": 2}, streaming=True))
    world.until(lambda: world.kinds().get("a") == "succeeded")
    world.offer("b").until(lambda: world.kinds().get("b") == "succeeded")
    assert len(world.fetches) > 26
    world.stop().finish()
    assert (world.error, world.report.end) == (None, End.STOP)


# -- stop ---------------------------------------------------------------------------------------

GRACE = 0.3


def stopped(world):
    """Stop it; it has ended within the grace plus a second, and without another fetch."""
    fetches = len(world.fetches)
    world.stop().finish(GRACE + 1.0)
    assert len(world.fetches) == fetches
    assert (world.error, world.report.end) == (None, End.STOP)
    return world


def waiting(world, **options):
    idle = {"backoff": 20.0, "cap": 20.0}
    return world.start(policy(streaming=True, drain_timeout=GRACE, empty_queue=idle, **options))


@pytest.mark.spec("CON-36")
def test_stop_while_idle(build):
    world = waiting(build())
    world.until(lambda: world.fetches and world.fetches[0].ended)
    assert stopped(world).kinds() == {}


@pytest.mark.spec("CON-36")
def test_stop_in_a_blocked_fetch(build):
    world = build()
    world.queue._script = takes(Stubborn(world.signal()), [])
    waiting(world).until(lambda: world.fetches)
    assert stopped(world).kinds() == {}


@pytest.mark.spec("CON-36")
def test_stop_in_a_backoff(build):
    world = waiting(build(process=fails(OSError("down"))).offer("a"), process={"backoff": 20.0})
    world.until(lambda: world.calls and world.calls[0].ended and world.fetches[-1].ended)
    world.until(lambda: len(world.fetches) > 1)
    assert stopped(world).kinds() == {"a": "released"}
    assert world.settlements() == [Release()]


@pytest.mark.spec("CON-36")
def test_stop_in_a_handler(build):
    world = waiting(build(process=takes(0.15, "done")).offer("a"))
    world.until(lambda: world.of("process") and len(world.fetches) > 1)
    assert stopped(world).kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-36")
def test_stop_in_a_handler_that_never_returns(build):
    world = build()
    world.bodies["process"] = takes(Stubborn(world.signal()))
    waiting(world.offer("a")).until(lambda: world.of("process") and len(world.fetches) > 1)
    assert stopped(world).kinds() == {"a": "released"}
    assert world.queue.settled == []


@pytest.mark.spec("CON-36")
def test_of_two_loops_in_one_process_the_one_that_is_stopped_does_not_disturb_the_other(build):
    one, other = waiting(build()), build()
    go = other.signal()
    other.bodies["process"] = {"slow": takes(go)}
    waiting(other.offer("slow")).until(lambda: other.of("process", "slow"))
    one.until(lambda: one.fetches and one.fetches[0].ended)
    stopped(one)
    other.offer("a").until(lambda: other.kinds() == {"a": "succeeded"}, seconds=1.0)
    go.set()
    other.until(lambda: len(other.outcomes) == 2)
    assert other.ended is None
    assert stopped(other).kinds() == {"slow": "succeeded", "a": "succeeded"}
