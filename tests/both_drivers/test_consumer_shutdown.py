"""How a loop is ended from outside, and that a handler cannot end it."""

from __future__ import annotations

import asyncio

import pytest

from ergon_framework.connectors.base import Ack, Release
from ergon_framework.errors import Category
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.report import OutcomeKind, StopReason
from tests.both_drivers.harness import (
    Stubborn,
    World,
    make_policy,
    raise_error,
    return_value,
    wait_then_return,
)


@pytest.mark.spec("CON-36")
def test_after_a_stop_nothing_is_fetched_and_running_calls_finish(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = wait_then_return(go)
    world.offer("a").start(make_policy(concurrency=1, streaming=True))
    world.until(lambda: world.of("process"))
    world.offer("b").stop()
    fetch_count = len(world.fetches)
    world.never(lambda: len(world.fetches) > fetch_count or world.ended)
    go.set()
    world.finish()
    assert world.error is None
    assert world.report.stop_reason is StopReason.STOP
    assert world.kinds() == {"a": "succeeded"}
    assert world.settlements() == [Ack()]
    assert len(world.fetches) == fetch_count
    assert world.queue.depth().ready == 1


@pytest.mark.spec("CON-36")
def test_retries_and_handlers_continue_during_the_drain(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = [wait_then_return(go), return_value(None)]

    def wait_then_fail(call):
        yield go
        raise OSError("once")

    world.bodies["process"][0] = wait_then_fail
    world.offer("a").start(make_policy(streaming=True, process={"backoff": 0.05}))
    world.until(lambda: world.of("process"))
    world.stop()
    go.set()
    assert world.finish().steps() == ["process", "process", "success"]
    assert world.kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-36")
def test_a_transaction_in_backoff_at_the_end_of_the_drain_is_released_without_counting_the_attempt(build):
    world = build(process=raise_error(OSError("down"))).offer("a")
    world.start(make_policy(streaming=True, process={"backoff": 20.0}, drain_timeout=0.1))
    world.until(lambda: world.calls and world.calls[0].ended)
    world.stop().finish(1.5)
    assert world.steps() == ["process"]
    assert world.kinds() == {"a": "released"}
    assert world.settlements() == [Release()]
    (redelivery,) = world.queue.claim(1)
    assert (redelivery.transaction.attempts, redelivery.deliveries) == (0, 1)


@pytest.mark.spec("CON-36")
def test_a_call_still_running_at_the_end_of_the_drain_keeps_its_claim(build):
    world = build()
    release = world.signal()
    world.bodies["process"] = wait_then_return(Stubborn(release), "late")
    world.offer("a").start(make_policy(streaming=True, drain_timeout=0.1))
    world.until(lambda: world.of("process"))
    world.stop().finish(1.5)
    assert world.kinds() == {"a": "released"}
    assert world.queue.settled == []
    assert world.queue.depth().in_flight == 1
    assert world.report.still_running == 1
    release.set()
    world.until(lambda: world.only("process").ended)
    world.never(lambda: len(world.calls) > 1 or world.queue.settled)


@pytest.mark.spec("CON-36")
def test_the_drain_lasts_for_its_timeout(build):
    world = build()
    release = world.signal()
    world.bodies["process"] = wait_then_return(Stubborn(release))
    world.offer("a").start(make_policy(streaming=True, drain_timeout=0.3))
    world.until(lambda: world.of("process"))
    world.stop().never(lambda: world.ended, seconds=0.2)
    world.finish(1.5)


@pytest.mark.spec("CON-36")
def test_a_second_stop_ends_the_drain_immediately(build):
    world = build()
    release = world.signal()
    world.bodies["process"] = wait_then_return(Stubborn(release))
    world.offer("a").start(make_policy(streaming=True, drain_timeout=30.0))
    world.until(lambda: world.of("process"))
    world.stop().never(lambda: world.ended, seconds=0.05)
    world.stop().finish(1.0)
    assert world.kinds() == {"a": "released"}


@pytest.mark.spec("CON-36")
def test_a_stop_does_not_wait_for_a_blocked_fetch(build):
    world = build()
    world.queue._script = wait_then_return(world.signal(), [])
    world.start(make_policy(streaming=True, drain_timeout=30.0))
    world.until(lambda: world.fetches)
    world.stop().finish(1.0)
    assert world.report.stop_reason is StopReason.STOP


@pytest.mark.spec("CON-36", "CON-30")
def test_deliveries_fetched_after_a_stop_are_released_and_never_processed(build):
    world = build()
    go, arrive = world.signal(), world.signal()
    world.bodies["process"] = wait_then_return(go)

    def late(fetch):
        deliveries = fetch.queue.claim(1)
        yield Stubborn(arrive)
        return deliveries

    world.queue._script = [lambda fetch: fetch.queue.claim(1), late]
    world.offer("a", "b").start(make_policy(concurrency=2, batch=1, streaming=True))
    world.until(lambda: len(world.fetches) == 2 and world.of("process"))
    world.stop()
    arrive.set()
    world.until(lambda: world.settlements("b"))
    go.set()
    world.finish()
    assert world.settlements("b") == [Release()]
    assert world.steps("b") == []
    assert world.kinds()["a"] == "succeeded"


@pytest.mark.spec("CON-36", "CON-30")
def test_deliveries_that_have_not_started_are_released_by_a_stop(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = wait_then_return(go)
    world.offer("a", "b", "c").start(make_policy(concurrency=1, prefetch=2, streaming=True))
    world.until(lambda: world.of("process") and sum(len(fetch.transaction_ids) for fetch in world.fetches) == 3)
    world.stop()
    go.set()
    world.finish()
    assert world.kinds() == {"a": "succeeded", "b": "released", "c": "released"}
    assert len(world.of("process")) == 1
    assert world.queue.depth().in_flight == 0


@pytest.mark.spec("CON-36")
def test_a_loop_can_be_stopped_while_it_is_idle(build):
    idle = {"backoff": 20.0, "cap": 20.0}
    world = build().start(make_policy(streaming=True, empty_queue=idle))
    world.until(lambda: world.fetches and world.fetches[0].ended)
    world.stop().finish(1.0)
    assert len(world.fetches) == 1


@pytest.mark.spec("CON-36")
def test_a_task_can_run_again_after_a_stop(build):
    world = build().start(make_policy(streaming=True))
    world.until(lambda: world.fetches)
    world.stop().finish()
    second_world = build().offer("a")
    second_world.task = world.task
    second_world.task.world, second_world.task.connector = second_world, second_world.queue
    assert second_world.run(make_policy()).kinds() == {"a": "succeeded"}


@pytest.mark.spec("CON-35", "CON-36")
def test_cancelling_the_loop_stops_it():
    world = World("asyncio")
    try:
        go = world.signal()
        world.bodies["process"] = wait_then_return(go)
        world.offer("a").start(make_policy(concurrency=1, streaming=True))
        world.until(lambda: world.of("process"))
        world.offer("b")
        world.loop.call_soon_threadsafe(world.main.cancel)
        world.never(lambda: world.ended)
        go.set()
        world.finish()
        assert world.kinds() == {"a": "succeeded"}
        assert world.settlements() == [Ack()]
        assert world.steps("b") == []
        assert world.error is None or isinstance(world.error, asyncio.CancelledError)
    finally:
        world.close()


EXITS = [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()]


@pytest.mark.spec("CON-35")
@pytest.mark.parametrize("raised", EXITS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("step", ["process", "success", "exception"])
def test_a_base_exception_of_a_handler_fails_its_own_transaction_only(build, step, raised):
    bodies = {"process": {"bad": raise_error(OSError("down"))}} if step == "exception" else {}
    world = build(**bodies | {step: {"bad": raise_error(raised)}}).offer("bad", "good", "fine")
    world.run(make_policy(concurrency=1, batch=1))
    assert world.error is None
    expected_kind = OutcomeKind.EXCEPTION_HANDLER_FAILED if step == "exception" else OutcomeKind.FAILED
    assert world.kinds() == {"bad": expected_kind.value, "good": "succeeded", "fine": "succeeded"}
    assert len(world.of(step, "bad")) == 3
    error = world.outcome("bad").handler_error if step == "exception" else world.outcome("bad").error
    assert isinstance(error, TransactionException)
    assert error.category is Category.SYSTEM
    assert error.__cause__ is raised


@pytest.mark.spec("CON-35")
def test_cancelling_a_task_in_a_handler_fails_the_transaction_and_not_the_loop():
    world = World("asyncio")

    async def process(transaction):
        if transaction.id == "bad":
            inner = asyncio.ensure_future(asyncio.sleep(60))
            asyncio.get_running_loop().call_soon(inner.cancel)
            await inner

    world.task.process_transaction = process
    try:
        world.offer("bad", "good").run(make_policy(process={"max_attempts": 2}))
        assert world.error is None
        assert world.kinds() == {"bad": "failed", "good": "succeeded"}
        assert world.outcome("bad").category is Category.SYSTEM
    finally:
        world.close()
