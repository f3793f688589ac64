"""What can be known below a handler."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from ergon_framework import scope
from ergon_framework.task.exceptions import BusinessError
from ergon_framework.task.mixins import utils
from ergon_framework.transaction import Transaction
from tests.twins.world import Stubborn, World, fails, policy, stays, takes


@pytest.mark.spec("CON-43")
def test_the_scope_says_what_is_being_done_for_whom(build):
    def body(call):
        now = scope.current()
        return (now.transaction_id, now.correlation, now.tenant, now.step, now.attempt, now.cancelled)

    world = build(process=body).offer(Transaction("a", source="queue", correlation="c", tenant="t")).run(policy())
    assert world.outcome().result == ("a", "c", "t", "process", 0, False)


@pytest.mark.spec("CON-43")
def test_every_step_and_every_attempt_has_its_own_scope(build):
    world = build(success=fails(OSError())).offer("a").run(policy(success={"max_attempts": 2}))
    seen = [(call.scope.step, call.scope.attempt) for call in world.calls]
    assert seen == [("process", 0), ("success", 0), ("success", 1), ("exception", 0)]


@pytest.mark.spec("CON-43")
def test_the_deadline_is_that_of_the_attempt(build):
    world = build(process=fails(BusinessError("no"))).offer("a")
    world.run(policy(process={"timeout": 7.0}, exception={"timeout": 3.0}))
    for step, timeout in (("process", 7.0), ("exception", 3.0)):
        call = world.only(step)
        assert call.scope.deadline - call.began == pytest.approx(timeout, abs=0.1)


@pytest.mark.spec("CON-43")
def test_an_attempt_without_any_limit_has_no_deadline(build):
    world = build().offer("a").run(policy(process={"timeout": None}))
    assert world.only("process").scope.deadline is None
    assert world.only("process").scope.remaining() is None


@pytest.mark.spec("CON-43")
def test_inner_layers_only_shorten_the_deadline(build):
    def body(call):
        outer = scope.current().deadline
        with scope.shorten(1.0) as nearer, scope.shorten(100.0) as not_farther:
            return outer, nearer.deadline, not_farther.deadline, scope.current() is not_farther

    outer, nearer, not_farther, current = build(process=body).offer("a").run(policy()).outcome().result
    assert nearer < outer
    assert not_farther == nearer
    assert current


@pytest.mark.spec("CON-43", "CON-28")
def test_a_body_that_nobody_waits_for_any_more_is_told_so(build):
    world = build(process=stays(0.2)).offer("a").run(policy(process={"timeout": 0.05, "max_attempts": 1}))
    assert world.only("process").told is not None
    assert not world.only("exception").scope.cancelled


@pytest.mark.spec("CON-43")
def test_there_is_no_scope_outside_a_handler(build):
    seen = []
    build(fetches=lambda fetch: seen.append(scope.current())).offer("a").run(policy())
    assert set(seen) == {None}
    assert scope.current() is None


@pytest.mark.spec("CON-18")
def test_the_scope_is_still_there_after_a_pause(build):
    def body(call):
        yield 0.01
        return scope.current().transaction_id

    world = build(process=body).offer(*"abc").run(policy(concurrency=3))
    assert {o.transaction.id: o.result for o in world.outcomes} == {"a": "a", "b": "b", "c": "c"}


@pytest.mark.spec("CON-18")
def test_the_context_crosses_threads_and_timeouts_of_user_code(build):
    def name():
        return scope.current().transaction_id

    def body(call):
        carried = utils.with_context(name)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(carried).result(), utils.run_with_timeout(utils.with_context(name), 5.0)

    assert build(process=body).offer("a").run(policy()).outcome().result == ("a", "a")


@pytest.mark.spec("CON-18")
def test_the_context_crosses_tasks_and_timeouts_of_user_code():
    async def name():
        await asyncio.sleep(0)
        return scope.current().transaction_id

    world = World("asyncio")

    async def process(transaction):
        carried = utils.with_context_async(name)
        return await carried(), await utils.run_with_timeout_async(name, 5.0)

    world.task.process_transaction = process
    try:
        assert world.offer("a").run(policy()).outcome().result == ("a", "a")
    finally:
        world.close()


@pytest.mark.spec("CON-18")
def test_run_with_timeout_carries_the_context_by_itself(build):
    body = lambda call: utils.run_with_timeout(lambda: scope.current().transaction_id, 5.0)  # noqa: E731
    assert build(process=body).offer("a").run(policy()).outcome().result == "a"


@pytest.mark.spec("CON-43")
def test_a_timed_out_attempt_does_not_cancel_the_scope_of_the_next(build):
    world = build(process=[takes(Stubborn(0.1)), stays(0.02, "second")]).offer("a")
    world.run(policy(process={"timeout": 0.05}))
    first, second = world.of("process")
    assert first.scope.cancelled
    assert second.told is None
    assert world.outcome().result == "second"
