"""Together: one call for all who came meanwhile, and nobody pays for another one's fault."""

from __future__ import annotations

import asyncio

import pytest

from ergon_framework.errors import ConnectionLost, ErgonError
from ergon_framework.executor.jobs.together import MOST, Together


class Calls:
    """What is called, one call at a time, each when it is let."""

    def __init__(self, *, free=False):
        self.made = []
        self.go = asyncio.Semaphore(10**6 if free else 0)
        self.bad = {}

    async def __call__(self, items):
        self.made.append(list(items))
        await self.go.acquire()
        for item in items:
            if item in self.bad:
                raise self.bad[item]
        return [-item for item in items]


def test_whoever_comes_while_a_call_is_under_way_goes_with_the_next():
    async def main():
        calls = Calls()
        together = Together(calls)
        asked = [asyncio.create_task(together(1))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asked += [asyncio.create_task(together(n)) for n in (2, 3, 4)]
        await asyncio.sleep(0)
        calls.go.release()
        await asyncio.wait(asked[:1])
        calls.go.release()
        return await asyncio.gather(*asked), calls.made

    assert asyncio.run(main()) == ([-1, -2, -3, -4], [[1], [2, 3, 4]])


def test_those_who_come_at_once_or_within_the_linger_share_a_call():
    async def main():
        calls = Calls(free=True)
        together = Together(calls, linger=lambda: 0.05)

        async def late(n):
            await asyncio.sleep(0.01)
            return await together(n)

        return await asyncio.gather(together(1), together(2), late(3)), calls.made

    assert asyncio.run(main()) == ([-1, -2, -3], [[1, 2, 3]])


def test_no_call_is_for_more_than_so_many():
    async def main():
        calls = Calls(free=True)
        await asyncio.gather(*map(Together(calls), range(MOST + 1)))
        return [len(made) for made in calls.made]

    assert asyncio.run(main()) == [MOST, 1]


def test_an_error_that_may_be_one_ones_fault_is_found_out():
    async def main():
        calls = Calls(free=True)
        calls.bad = {2: ErgonError("two")}
        return await asyncio.gather(*map(Together(calls), (1, 2, 3)), return_exceptions=True), calls.made

    answers, made = asyncio.run(main())
    assert (answers[0], str(answers[1]), answers[2]) == (-1, "two", -3)
    assert made == [[1, 2, 3], [1], [2], [3]]


def test_a_broken_line_is_everybodys():
    async def main():
        calls = Calls(free=True)
        calls.bad = {2: ConnectionLost("gone")}
        together = Together(calls)
        answers = await asyncio.gather(*map(together, (1, 2, 3)), return_exceptions=True)
        return answers, calls.made, await together(4)

    answers, made, after = asyncio.run(main())
    assert ([str(each) for each in answers], made[0], after) == (["gone"] * 3, [1, 2, 3], -4)


def test_what_nobody_waits_for_any_more_is_not_begun():
    async def main():
        calls = Calls()
        together = Together(calls)
        first, second = asyncio.create_task(together(1)), asyncio.create_task(together(2))
        await asyncio.sleep(0)
        third = asyncio.create_task(together(3))
        for _ in range(3):
            await asyncio.sleep(0)
        third.cancel()
        calls.go.release()
        answers = await asyncio.gather(first, second)
        with pytest.raises(asyncio.CancelledError):
            await third
        return answers, calls.made

    answers, made = asyncio.run(main())
    assert answers == [-1, -2]
    assert [3] not in made
