"""Cancelling an asyncio produce call is a stop: PRO-09, PRO-12."""

from __future__ import annotations

import asyncio

import pytest

from tests.twins.producing import PATIENCE, Hang, Latch, Run, in_turn, many, quick


def scene(produce, **loop):
    made = Run("asyncio", many(4), quick(concurrency=1, **loop), produce=produce)
    return made, made.task.produce_transactions(many(4), quick(concurrency=1, **loop))


def act(story):
    async def bounded():
        async with asyncio.timeout(PATIENCE):
            await story()

    asyncio.run(bounded())


@pytest.mark.spec("PRO-12", "PRO-09")
def test_a_cancelled_call_drains_and_then_passes_the_cancellation_on():
    inside, door = Latch(), Latch()

    def produce(*_):
        inside.open()
        return Hang(door, then="drained")

    async def story():
        made, call = scene(produce)
        running = asyncio.create_task(call)
        await inside.wait_async()
        running.cancel()
        _, pending = await asyncio.wait([running], timeout=0.05)
        assert pending  # still draining
        door.open()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert made.results == [("t0", "drained")]
        assert {identity for _, identity in made.steps} == {"t0"}

    act(story)


@pytest.mark.spec("PRO-12")
def test_a_second_cancellation_ends_the_drain_at_once():
    inside, door = Latch(), Latch()

    def produce(*_):
        inside.open()
        return Hang(door, stubborn=True)

    async def story():
        made, call = scene(produce, drain_timeout=PATIENCE * 2)
        running = asyncio.create_task(call)
        await inside.wait_async()
        running.cancel()
        await asyncio.wait([running], timeout=0.05)
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=PATIENCE / 2)
        assert done
        assert running.cancelled()
        door.open()
        assert made.results == []

    act(story)


@pytest.mark.spec("PRO-12")
def test_the_drain_of_a_cancelled_call_is_bounded():
    inside, door = Latch(), Latch()

    def produce(*_):
        inside.open()
        return Hang(door, stubborn=True)

    async def story():
        _, call = scene(produce, drain_timeout=0.05)
        running = asyncio.create_task(call)
        await inside.wait_async()
        running.cancel()
        done, _ = await asyncio.wait([running], timeout=PATIENCE / 2)
        door.open()
        assert done
        assert running.cancelled()

    act(story)


@pytest.mark.spec("PRO-12", "PRO-07")
def test_a_timeout_around_the_call_is_the_callers_own():
    async def story():
        made, call = scene(lambda *_: Hang(then="never"), drain_timeout=0.05)
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.05):
                await call
        assert not hasattr(caught.value, "report")
        made.let_go()

    act(story)


@pytest.mark.spec("PRO-09")
def test_a_handler_that_raises_cancelled_does_not_cancel_the_call():
    async def story():
        _, call = scene(in_turn(asyncio.CancelledError()))
        report = await call
        assert [outcome.kind.value for outcome in report.outcomes] == ["failed"] * 4
        assert asyncio.current_task().cancelling() == 0

    act(story)
