"""What the scope shows inside a handler."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from ergon_framework import scope
from ergon_framework.task import context
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError
from tests.both_drivers.harness import (
    Stubborn,
    World,
    ignore_cancellation,
    make_policy,
    raise_error,
    wait_then_return,
)


@pytest.mark.spec("CON-43")
def test_the_scope_names_transaction_correlation_tenant_step_and_attempt(build):
    def body(call):
        current = scope.current()
        return (
            current.transaction_id,
            current.correlation,
            current.tenant,
            current.step,
            current.attempt,
            current.cancelled,
        )

    world = (
        build(process=body).offer(Transaction(id="a", source="queue", correlation="c", tenant="t")).run(make_policy())
    )
    assert world.outcome().result == ("a", "c", "t", "process", 0, False)


@pytest.mark.spec("CON-43")
def test_every_step_and_every_attempt_has_its_own_scope(build):
    world = build(success=raise_error(OSError())).offer("a").run(make_policy(success={"max_attempts": 2}))
    seen = [(call.scope.step, call.scope.attempt) for call in world.calls]
    assert seen == [("process", 0), ("success", 0), ("success", 1), ("exception", 0)]


@pytest.mark.spec("CON-43")
def test_the_scope_has_the_deadline_of_the_attempt(build):
    world = build(process=raise_error(BusinessError("no"))).offer("a")
    world.run(make_policy(process={"timeout": 7.0}, exception={"timeout": 3.0}))
    for step, timeout in (("process", 7.0), ("exception", 3.0)):
        call = world.only(step)
        assert call.scope.deadline - call.began == pytest.approx(timeout, abs=0.1)


@pytest.mark.spec("CON-43")
def test_an_attempt_without_a_timeout_has_no_deadline(build):
    world = build().offer("a").run(make_policy(process={"timeout": None}))
    assert world.only("process").scope.deadline is None
    assert world.only("process").scope.remaining() is None


@pytest.mark.spec("CON-43")
def test_inner_scopes_only_shorten_the_deadline(build):
    def body(call):
        outer = scope.current().deadline
        with scope.deadline_within(1.0) as nearer, scope.deadline_within(100.0) as not_farther:
            return outer, nearer.deadline, not_farther.deadline, scope.current() is not_farther

    outer, nearer, not_farther, current = build(process=body).offer("a").run(make_policy()).outcome().result
    assert nearer < outer
    assert not_farther == nearer
    assert current


@pytest.mark.spec("CON-43", "CON-28")
def test_the_scope_of_an_abandoned_call_is_cancelled(build):
    world = (
        build(process=ignore_cancellation(0.2))
        .offer("a")
        .run(make_policy(process={"timeout": 0.05, "max_attempts": 1}))
    )
    assert world.only("process").abandoned_at is not None
    assert not world.only("exception").scope.cancelled


@pytest.mark.spec("CON-43")
def test_there_is_no_scope_outside_a_handler(build):
    seen = []
    build(fetches=lambda fetch: seen.append(scope.current())).offer("a").run(make_policy())
    assert set(seen) == {None}
    assert scope.current() is None


@pytest.mark.spec("CON-18")
def test_the_scope_is_unchanged_after_a_pause(build):
    def body(call):
        yield 0.01
        return scope.current().transaction_id

    world = build(process=body).offer(*"abc").run(make_policy(concurrency=3))
    assert {o.transaction.id: o.result for o in world.outcomes} == {"a": "a", "b": "b", "c": "c"}


@pytest.mark.spec("CON-18")
def test_the_context_crosses_threads_and_timeouts_of_user_code(build):
    def get_transaction_id():
        return scope.current().transaction_id

    def body(call):
        with_context = context.with_context(get_transaction_id)
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(with_context).result(), context.run_with_timeout(
                context.with_context(get_transaction_id), 5.0
            )

    assert build(process=body).offer("a").run(make_policy()).outcome().result == ("a", "a")


@pytest.mark.spec("CON-18")
def test_the_context_crosses_tasks_and_timeouts_of_user_code():
    async def get_transaction_id():
        await asyncio.sleep(0)
        return scope.current().transaction_id

    world = World("asyncio")

    async def process(transaction):
        with_context = context.with_context_async(get_transaction_id)
        return await with_context(), await context.run_with_timeout_async(get_transaction_id, 5.0)

    world.task.process_transaction = process
    try:
        assert world.offer("a").run(make_policy()).outcome().result == ("a", "a")
    finally:
        world.close()


@pytest.mark.spec("CON-18")
def test_run_with_timeout_carries_the_context_automatically(build):
    body = lambda call: context.run_with_timeout(lambda: scope.current().transaction_id, 5.0)  # noqa: E731
    assert build(process=body).offer("a").run(make_policy()).outcome().result == "a"


@pytest.mark.spec("CON-43")
def test_a_timed_out_attempt_does_not_cancel_the_scope_of_the_next(build):
    world = build(process=[wait_then_return(Stubborn(0.1)), ignore_cancellation(0.02, "second")]).offer("a")
    world.run(make_policy(process={"timeout": 0.05}))
    first, second = world.of("process")
    assert first.scope.cancelled
    assert second.abandoned_at is None
    assert world.outcome().result == "second"
