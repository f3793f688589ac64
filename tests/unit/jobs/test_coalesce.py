"""Coalescing: one call for all that arrived meanwhile; an error affects only its own caller."""

from __future__ import annotations

import asyncio

import pytest

from ergon_framework.errors import ConnectionLostError, ErgonError
from ergon_framework.jobs.batched_store import MAX_BATCH_ITEMS, AsyncCoalescer


class RecordingCall:
    """What is called, one call at a time, each when it is let."""

    def __init__(self, *, free=False):
        self.batches = []
        self.go = asyncio.Semaphore(10**6 if free else 0)
        self.bad = {}

    async def __call__(self, items):
        self.batches.append(list(items))
        await self.go.acquire()
        for item in items:
            if item in self.bad:
                raise self.bad[item]
        return [-item for item in items]


def test_callers_that_arrive_during_a_call_join_the_next_batch():
    async def main():
        calls = RecordingCall()
        coalescer = AsyncCoalescer(calls)
        tasks = [asyncio.create_task(coalescer(1))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(coalescer(n)) for n in (2, 3, 4)]
        await asyncio.sleep(0)
        calls.go.release()
        await asyncio.wait(tasks[:1])
        calls.go.release()
        return await asyncio.gather(*tasks), calls.batches

    assert asyncio.run(main()) == ([-1, -2, -3, -4], [[1], [2, 3, 4]])


def test_simultaneous_callers_and_callers_within_the_linger_share_a_call():
    async def main():
        calls = RecordingCall(free=True)
        coalescer = AsyncCoalescer(calls, linger=lambda: 0.05)

        async def call_late(n):
            await asyncio.sleep(0.01)
            return await coalescer(n)

        return await asyncio.gather(coalescer(1), coalescer(2), call_late(3)), calls.batches

    assert asyncio.run(main()) == ([-1, -2, -3], [[1, 2, 3]])


def test_a_batch_has_a_maximum_size():
    async def main():
        calls = RecordingCall(free=True)
        await asyncio.gather(*map(AsyncCoalescer(calls), range(MAX_BATCH_ITEMS + 1)))
        return [len(batch) for batch in calls.batches]

    assert asyncio.run(main()) == [MAX_BATCH_ITEMS, 1]


def test_an_error_of_one_item_is_isolated():
    async def main():
        calls = RecordingCall(free=True)
        calls.bad = {2: ErgonError("two")}
        return await asyncio.gather(*map(AsyncCoalescer(calls), (1, 2, 3)), return_exceptions=True), calls.batches

    answers, batches = asyncio.run(main())
    assert (answers[0], str(answers[1]), answers[2]) == (-1, "two", -3)
    assert batches == [[1, 2, 3], [1], [2], [3]]


def test_a_lost_connection_fails_the_whole_batch():
    async def main():
        calls = RecordingCall(free=True)
        calls.bad = {2: ConnectionLostError("gone")}
        coalescer = AsyncCoalescer(calls)
        answers = await asyncio.gather(*map(coalescer, (1, 2, 3)), return_exceptions=True)
        return answers, calls.batches, await coalescer(4)

    answers, batches, after = asyncio.run(main())
    assert ([str(each) for each in answers], batches[0], after) == (["gone"] * 3, [1, 2, 3], -4)


def test_a_call_cancelled_while_waiting_is_not_started():
    async def main():
        calls = RecordingCall()
        coalescer = AsyncCoalescer(calls)
        first, second = asyncio.create_task(coalescer(1)), asyncio.create_task(coalescer(2))
        await asyncio.sleep(0)
        third = asyncio.create_task(coalescer(3))
        for _ in range(3):
            await asyncio.sleep(0)
        third.cancel()
        calls.go.release()
        answers = await asyncio.gather(first, second)
        with pytest.raises(asyncio.CancelledError):
            await third
        return answers, calls.batches

    answers, batches = asyncio.run(main())
    assert answers == [-1, -2]
    assert [3] not in batches
