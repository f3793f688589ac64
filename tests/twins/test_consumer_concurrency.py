"""How many run at once, on what, and that no slow one delays the others."""

from __future__ import annotations

import contextvars
import threading

import pytest

from ergon_framework.connectors.base import Release
from tests.twins.world import fails, gives, policy, takes


@pytest.mark.spec("CON-11", "CON-29")
@pytest.mark.parametrize("slots", [1, 3])
def test_as_many_run_at_once_as_there_are_slots_and_no_more(build, slots):
    world = build()
    go = world.signal()
    world.bodies["process"] = takes(go)
    world.offer(*"abcdef").start(policy(concurrency=slots))
    world.until(lambda: len(world.of("process")) == slots)
    world.never(lambda: len(world.of("process")) > slots)
    go.set()
    assert world.finish().kinds() == dict.fromkeys("abcdef", "succeeded")
    assert world.peak == slots


@pytest.mark.spec("CON-11", "CON-32")
def test_a_worker_that_finishes_takes_the_next_while_the_others_go_on(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = {"slow": takes(go)}
    world.offer("slow", *"abcdef").start(policy(concurrency=2, batch=2))
    world.until(lambda: len(world.outcomes) == 6)
    assert "slow" not in world.kinds()
    go.set()
    assert world.finish().kinds()["slow"] == "succeeded"


@pytest.mark.spec("CON-11")
def test_the_workers_are_few_and_hold_up_no_process(build, flavour):
    world = build(process=takes(0.002)).offer(*"abcdefghijklmnop").run(policy(concurrency=3))
    workers = {call.thread for call in world.of("process")}
    if flavour == "asyncio":
        assert workers == {world._thread}
        return
    assert 1 <= len(workers) <= 3
    assert all(worker.daemon for worker in workers)
    assert threading.main_thread() not in workers


@pytest.mark.spec("CON-11")
def test_no_worker_of_a_loop_outlives_it(build):
    world = build().offer("a", "b").run(policy(concurrency=2))
    workers = {call.thread for call in world.calls} - {world._thread}
    world.until(lambda: not any(worker.is_alive() for worker in workers))


@pytest.mark.spec("CON-32")
def test_a_transaction_starts_within_one_fetch_however_slow_its_neighbours_are(build):
    world = build()
    go = world.signal()
    world.bodies["process"] = {"slow": takes(go), "slower": takes(go)}
    world.offer("slow", "slower").start(policy(concurrency=3, streaming=True))
    world.until(lambda: len(world.of("process")) == 2)
    for name in "abcd":
        before = len(world.fetches)
        world.offer(name).until(lambda name=name: world.kinds().get(name) == "succeeded", seconds=1.0)
        bringing = next(fetch.number for fetch in world.fetches if name in fetch.brought)
        assert bringing <= before
    go.set()
    world.stop().finish()


@pytest.mark.spec("CON-32")
def test_a_transaction_in_a_backoff_delays_nobody_with_a_free_slot(build):
    world = build(process={"slow": [fails(OSError()), gives(None)]})
    world.offer("slow", "a", "b").run(policy(concurrency=2, batch=1, process={"backoff": 0.3}))
    assert [call.id for call in world.of("process")] == ["slow", "a", "b", "slow"]
    assert world.kinds()["slow"] == "succeeded"


@pytest.mark.spec("CNN-11")
def test_the_last_permitted_delivery_runs_alone_and_nothing_is_fetched_meanwhile(build):
    def fetch(fetch):
        found = fetch.queue.claim(fetch.batch_size)
        for delivery in found:
            delivery.deliveries = 3 if delivery.transaction.id == "poison" else 1
        return found

    world = build(fetches=fetch)
    go = world.signal()
    world.bodies["process"] = {"a": takes(0.05), "poison": takes(go)}
    world.offer("a", "poison", "b").start(policy(concurrency=4, batch=3, max_deliveries=3, streaming=True))
    world.until(lambda: world.of("process", "poison"))
    fetches = len(world.fetches)
    world.offer("c").never(lambda: len(world.fetches) > fetches or world.of("process", "c"))
    assert {call.id for call in world.calls if call.ended is None} == {"poison"}
    go.set()
    world.until(lambda: world.kinds() == dict.fromkeys(["a", "b", "c", "poison"], "succeeded"))


@pytest.mark.spec("CNN-11", "DX-05")
@pytest.mark.parametrize("behind", [1, 2, 5])
def test_the_last_permitted_delivery_starts_after_those_behind_it_are_released(build, behind):
    neighbours = [f"healthy-{number}" for number in range(behind)]
    settled = []

    def fetch(fetch):
        found = fetch.queue.claim(fetch.batch_size)
        for delivery in found if fetch.number == 0 else ():
            delivery.deliveries = 3
        return found

    def poison(call):
        settled.extend((sent.id, sent.settlement) for sent in world.queue.settled)

    # A real fetch takes a moment, and meanwhile the settler has begun to wait for work.
    def slow_fetch(call):
        yield 0.02
        return fetch(call)

    world = build(fetches=slow_fetch, settles=takes(0.02))
    world.bodies["process"] = {"poison": poison}
    world.offer("poison", *neighbours).run(policy(concurrency=10, batch=10, max_deliveries=3))
    assert settled == [(name, Release()) for name in neighbours]


@pytest.mark.spec("CON-21")
def test_no_transaction_has_two_bodies_at_once(build):
    world = build(process=[takes(0.5), fails(OSError()), takes(0.01)], success=[fails(OSError()), gives(None)])
    world.offer(*"abcdef").run(policy(concurrency=3, process={"timeout": 0.3, "max_attempts": 3}))
    assert world.overlap == 1
    assert world.kinds() == dict.fromkeys("abcdef", "succeeded")


token = contextvars.ContextVar("token", default="clean")


@pytest.mark.spec("CON-27")
def test_what_one_transaction_puts_into_its_context_no_other_one_sees(build):
    seen = []

    def body(call):
        seen.append(token.get())
        token.set(call.id)

    world = build(process=body, success=body).offer(*"abcdef").run(policy(concurrency=1))
    assert seen == ["clean"] * 12
    assert len(world.outcomes) == 6


@pytest.mark.spec("CON-27")
def test_no_scope_of_an_attempt_is_that_of_another(build):
    world = build(process=[fails(OSError()), gives(None)]).offer(*"abcd").run(policy(concurrency=2))
    scopes = [call.scope for call in world.calls]
    assert len({id(scope) for scope in scopes}) == len(scopes)
    assert all(call.scope.transaction_id == call.id for call in world.calls)
