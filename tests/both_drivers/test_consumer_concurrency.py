"""How many transactions run at once, on which workers, and that no slow one delays the others."""

from __future__ import annotations

import contextvars
import threading

import pytest

from ergon_framework.connectors.base import Release
from tests.both_drivers.harness import make_policy, raise_error, return_value, wait_then_return


@pytest.mark.spec("CON-11", "CON-29")
@pytest.mark.parametrize("slots", [1, 3])
def test_concurrent_calls_never_exceed_the_slots(build, slots):
    world = build()
    go = world.signal()
    world.bodies["process"] = wait_then_return(go)
    world.offer(*"abcdef").start(make_policy(concurrency=slots))
    world.until(lambda: len(world.of("process")) == slots)
    world.never(lambda: len(world.of("process")) > slots)
    go.set()
    assert world.finish().kinds() == dict.fromkeys("abcdef", "succeeded")
    assert world.peak == slots


@pytest.mark.spec("CON-11", "CON-32")
def test_a_finished_worker_takes_the_next_transaction_while_others_run(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = {"slow": wait_then_return(go)}
    world.offer("slow", *"abcdef").start(make_policy(concurrency=2, batch=2))
    world.until(lambda: len(world.outcomes) == 6)
    assert "slow" not in world.kinds()
    go.set()
    assert world.finish().kinds()["slow"] == "succeeded"


@pytest.mark.spec("CON-11")
def test_workers_are_daemon_threads_limited_by_the_concurrency(build, variant):
    world = build(process=wait_then_return(0.002)).offer(*"abcdefghijklmnop").run(make_policy(concurrency=3))
    workers = {call.thread for call in world.of("process")}
    if variant == "asyncio":
        assert workers == {world._thread}
        return
    assert 1 <= len(workers) <= 3
    assert all(worker.daemon for worker in workers)
    assert threading.main_thread() not in workers


@pytest.mark.spec("CON-11")
def test_workers_end_with_their_loop(build):
    world = build().offer("a", "b").run(make_policy(concurrency=2))
    workers = {call.thread for call in world.calls} - {world._thread}
    world.until(lambda: not any(worker.is_alive() for worker in workers))


@pytest.mark.spec("CON-32")
def test_slow_transactions_delay_a_new_one_by_at_most_one_fetch(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = {"slow": wait_then_return(go), "slower": wait_then_return(go)}
    world.offer("slow", "slower").start(make_policy(concurrency=3, streaming=True))
    world.until(lambda: len(world.of("process")) == 2)
    for name in "abcd":
        fetch_count = len(world.fetches)
        world.offer(name).until(lambda name=name: world.kinds().get(name) == "succeeded", seconds=1.0)
        fetch_number = next(fetch.number for fetch in world.fetches if name in fetch.transaction_ids)
        assert fetch_number <= fetch_count
    go.set()
    world.stop().finish()


@pytest.mark.spec("CON-32")
def test_a_transaction_in_backoff_does_not_delay_others(build):
    world = build(process={"slow": [raise_error(OSError()), return_value(None)]})
    world.offer("slow", "a", "b").run(make_policy(concurrency=2, batch=1, process={"backoff": 0.3}))
    assert [call.id for call in world.of("process")] == ["slow", "a", "b", "slow"]
    assert world.kinds()["slow"] == "succeeded"


@pytest.mark.spec("CNN-11")
def test_the_last_permitted_delivery_runs_alone_and_nothing_is_fetched_meanwhile(build):
    def fetch(fetch):
        deliveries = fetch.queue.claim(fetch.batch_size)
        for delivery in deliveries:
            delivery.deliveries = 3 if delivery.transaction.id == "poison" else 1
        return deliveries

    world = build(fetches=fetch)
    go = world.signal()
    world.bodies["process"] = {"a": wait_then_return(0.05), "poison": wait_then_return(go)}
    world.offer("a", "poison", "b").start(make_policy(concurrency=4, batch=3, max_deliveries=3, streaming=True))
    world.until(lambda: world.of("process", "poison"))
    fetch_count = len(world.fetches)
    world.offer("c").never(lambda: len(world.fetches) > fetch_count or world.of("process", "c"))
    assert {call.id for call in world.calls if call.ended is None} == {"poison"}
    go.set()
    world.until(lambda: world.kinds() == dict.fromkeys(["a", "b", "c", "poison"], "succeeded"))


@pytest.mark.spec("CNN-11", "DX-05")
@pytest.mark.parametrize("following", [1, 2, 5])
def test_the_last_permitted_delivery_starts_after_the_following_ones_are_released(build, following):
    neighbours = [f"healthy-{number}" for number in range(following)]
    settlements = []

    def fetch(fetch):
        deliveries = fetch.queue.claim(fetch.batch_size)
        for delivery in deliveries if fetch.number == 0 else ():
            delivery.deliveries = 3
        return deliveries

    def record_settlements(call):
        settlements.extend((sent.id, sent.settlement) for sent in world.queue.settled)

    # A real fetch takes a moment, and meanwhile the settler has begun to wait for work.
    def slow_fetch(call):
        yield 0.02
        return fetch(call)

    world = build(fetches=slow_fetch, settles=wait_then_return(0.02))
    world.bodies["process"] = {"poison": record_settlements}
    world.offer("poison", *neighbours).run(make_policy(concurrency=10, batch=10, max_deliveries=3))
    assert settlements == [(name, Release()) for name in neighbours]


@pytest.mark.spec("CON-21")
def test_a_transaction_never_has_two_concurrent_handler_calls(build):
    world = build(
        process=[wait_then_return(0.5), raise_error(OSError()), wait_then_return(0.01)],
        success=[raise_error(OSError()), return_value(None)],
    )
    world.offer(*"abcdef").run(make_policy(concurrency=3, process={"timeout": 0.3, "max_attempts": 3}))
    assert world.overlap == 1
    assert world.kinds() == dict.fromkeys("abcdef", "succeeded")


token = contextvars.ContextVar("token", default="clean")


@pytest.mark.spec("CON-27")
def test_context_variables_do_not_leak_between_transactions(build):
    seen = []

    def body(call):
        seen.append(token.get())
        token.set(call.id)

    world = build(process=body, success=body).offer(*"abcdef").run(make_policy(concurrency=1))
    assert seen == ["clean"] * 12
    assert len(world.outcomes) == 6


@pytest.mark.spec("CON-27")
def test_every_attempt_has_its_own_scope(build):
    world = build(process=[raise_error(OSError()), return_value(None)]).offer(*"abcd").run(make_policy(concurrency=2))
    scopes = [call.scope for call in world.calls]
    assert len({id(scope) for scope in scopes}) == len(scopes)
    assert all(call.scope.transaction_id == call.id for call in world.calls)
