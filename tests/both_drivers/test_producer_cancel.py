"""Cancelling an asyncio produce call is a stop: PRO-09, PRO-12."""

from __future__ import annotations

import asyncio

import pytest

from tests.both_drivers.producer_harness import (
    WAIT_TIMEOUT_SECONDS,
    Hang,
    Latch,
    ProduceRun,
    make_producer_policy,
    make_transactions,
    run_in_turn,
)


def start_call(produce, **loop):
    result = ProduceRun("asyncio", make_transactions(4), make_producer_policy(concurrency=1, **loop), produce=produce)
    return result, result.task.produce_transactions(make_transactions(4), make_producer_policy(concurrency=1, **loop))


def run_story(story):
    async def run_with_timeout():
        async with asyncio.timeout(WAIT_TIMEOUT_SECONDS):
            await story()

    asyncio.run(run_with_timeout())


@pytest.mark.spec("PRO-12", "PRO-09")
def test_a_cancelled_call_drains_and_then_raises_the_cancellation():
    entered, latch = Latch(), Latch()

    def produce(*_):
        entered.open()
        return Hang(latch, then="drained")

    async def story():
        result, call = start_call(produce)
        running = asyncio.create_task(call)
        await entered.wait_async()
        running.cancel()
        _, pending = await asyncio.wait([running], timeout=0.05)
        assert pending  # still draining
        latch.open()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert result.results == [("t0", "drained")]
        assert {transaction_id for _, transaction_id in result.steps} == {"t0"}

    run_story(story)


@pytest.mark.spec("PRO-12")
def test_a_second_cancellation_ends_the_drain_immediately():
    entered, latch = Latch(), Latch()

    def produce(*_):
        entered.open()
        return Hang(latch, stubborn=True)

    async def story():
        result, call = start_call(produce, drain_timeout=WAIT_TIMEOUT_SECONDS * 2)
        running = asyncio.create_task(call)
        await entered.wait_async()
        running.cancel()
        await asyncio.wait([running], timeout=0.05)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=WAIT_TIMEOUT_SECONDS / 2)
        assert done
        assert running.cancelled()
        latch.open()
        assert result.results == []

    run_story(story)


@pytest.mark.spec("PRO-12")
def test_the_drain_of_a_cancelled_call_is_bounded():
    entered, latch = Latch(), Latch()

    def produce(*_):
        entered.open()
        return Hang(latch, stubborn=True)

    async def story():
        _, call = start_call(produce, drain_timeout=0.05)
        running = asyncio.create_task(call)
        await entered.wait_async()
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=WAIT_TIMEOUT_SECONDS / 2)
        latch.open()
        assert done
        assert running.cancelled()

    run_story(story)


@pytest.mark.spec("PRO-12", "PRO-07")
def test_a_timeout_around_the_call_raises_a_plain_timeout_error():
    async def story():
        result, call = start_call(lambda *_: Hang(then="never"), drain_timeout=0.05)
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.05):
                await call
        assert not hasattr(caught.value, "report")
        result.release_calls()

    run_story(story)


@pytest.mark.spec("PRO-09")
def test_a_handler_that_raises_cancelled_does_not_cancel_the_call():
    async def story():
        _, call = start_call(run_in_turn(asyncio.CancelledError()))
        report = await call
        assert [outcome.kind.value for outcome in report.outcomes] == ["failed"] * 4
        assert asyncio.current_task().cancelling() == 0

    run_story(story)
