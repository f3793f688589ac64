"""Shared commits: who goes with whom, who does the work, and what is left when somebody does not come back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import Envelope, Fact
from ergon_framework.facts.stores.postgres_batch import appending
from ergon_framework.facts.stores.postgres_sharing import MOST, MOST_BYTES, PORTION, AsyncShared, Shared, portions

PATIENCE = 10.0


def items(*names, size=2):
    made = []
    for name in names:
        envelope = Envelope(message_id=name, from_zone="A", to_zone="B", produced_at_unix_ms=1)
        made.append((envelope, Fact(subject="s", predicate="p", object_json=f'"{"x" * (size - 2)}"')))
    return appending(made, frozenset())


class Committed:
    """Notes what goes together; the first commit waits until it may end."""

    def __init__(self, fails=None):
        self.groups, self._fails = [], fails or {}
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, batch):
        names = [item.envelope.message_id for item in batch]
        self.groups.append(names)
        if len(self.groups) == 1:
            self.begun.set()
            assert self.may_end.wait(PATIENCE)
        for name in names:
            if name in self._fails:
                raise self._fails[name]
        return names

    async def asynchronously(self, batch):
        return await asyncio.to_thread(self, batch)


def threads_of(committed, *requests):
    """What each of several threads is told; the first one is under way before the others come."""
    shared, told = Shared(committed), {}

    def ask(names):
        try:
            told[names] = shared(items(*names))
        except BaseException as error:
            told[names] = error

    threads = [threading.Thread(target=ask, args=(names,), daemon=True) for names in requests]
    threads[0].start()
    assert committed.begun.wait(PATIENCE)
    for number, thread in enumerate(threads[1:], 1):
        thread.start()
        while len(shared._waiting) < number:
            assert thread.is_alive()
    committed.may_end.set()
    for thread in threads:
        thread.join(PATIENCE)
    assert not shared._busy
    return [told[names] for names in requests]


def tasks_of(committed, *requests):
    async def run():
        shared = AsyncShared(committed.asynchronously)
        tasks = [asyncio.create_task(shared(items(*requests[0])))]
        await asyncio.to_thread(committed.begun.wait, PATIENCE)
        tasks += [asyncio.create_task(shared(items(*names))) for names in requests[1:]]
        await asyncio.sleep(0)
        committed.may_end.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


@pytest.mark.parametrize("ask", [threads_of, tasks_of])
def test_whoever_comes_while_a_commit_is_under_way_goes_with_the_next(ask):
    committed = Committed()
    told = ask(committed, ("a",), ("b", "c"), ("d",), ("e",))
    assert committed.groups == [["a"], ["b", "c", "d", "e"]]
    assert told == [["a"], ["b", "c"], ["d"], ["e"]]


@pytest.mark.parametrize("ask", [threads_of, tasks_of])
def test_what_one_of_them_is_to_blame_for_is_his_alone(ask):
    committed = Committed({"c": FactError("not with this one")})
    told = ask(committed, ("a",), ("b",), ("c",), ("d",))
    assert committed.groups == [["a"], ["b", "c", "d"], ["b"], ["c"], ["d"]]
    assert isinstance(told.pop(2), FactError)
    assert told == [["a"], ["b"], ["d"]]


@pytest.mark.parametrize("ask", [threads_of, tasks_of])
def test_a_line_that_broke_is_told_to_each_of_them_and_nobody_goes_again(ask):
    committed = Committed({"c": ConnectionLost("gone")})
    told = ask(committed, ("a",), ("b",), ("c",))
    assert committed.groups == [["a"], ["b", "c"]]
    assert [type(each) for each in told[1:]] == [ConnectionLost, ConnectionLost]
    assert told[1] is not told[2], "each has an exception of his own"


def test_whoever_leads_and_is_interrupted_leaves_nobody_behind():
    committed = Committed({"a": KeyboardInterrupt()})
    told = threads_of(committed, ("a",), ("b",))
    assert isinstance(told[0], KeyboardInterrupt)
    assert told[1] == ["b"]


async def alone(shared, name):
    """As somebody asks who has a single fact."""
    return [await shared.one(items(name)[0])]


async def among_others(shared, name):
    return await shared(items(name))


@pytest.mark.parametrize("ask", [alone, among_others])
def test_whoever_waits_and_is_cancelled_is_not_committed(ask):
    committed = Committed()

    async def run():
        shared = AsyncShared(committed.asynchronously)
        first = asyncio.create_task(ask(shared, "a"))
        await asyncio.to_thread(committed.begun.wait, PATIENCE)
        leaves, stays = (asyncio.create_task(ask(shared, name)) for name in "bc")
        await asyncio.sleep(0)
        leaves.cancel()
        await asyncio.sleep(0)
        committed.may_end.set()
        assert (await first, await stays) == (["a"], ["c"])

    asyncio.run(run())
    assert committed.groups == [["a"], ["c"]]


def test_no_commit_takes_more_than_its_share():
    committed = Committed()
    names = [(f"n{number}",) for number in range(MOST + 10)]
    threads_of(committed, ("first",), *names)
    assert [len(group) for group in committed.groups] == [1, MOST, 10]


def test_what_one_caller_brings_is_cut_by_number_and_by_bytes():
    assert [len(part) for part in portions(items(*map(str, range(PORTION + 1))))] == [PORTION, 1]
    large = items("a", "b", "c", size=MOST_BYTES // 8)
    assert len(portions(large * 5)) == 2
    assert portions([]) == []


async def turns():
    """Let everybody go as far as he can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_second_commit_is_sent_only_when_it_would_be_full():
    begun, may_end = [], asyncio.Event()

    async def commit(batch):
        begun.append(len(batch))
        await may_end.wait()
        return [item.envelope.message_id for item in batch]

    async def run():
        shared = AsyncShared(commit)
        tasks = [asyncio.create_task(shared(items("first")))]
        await turns()
        tasks += [asyncio.create_task(shared(items(f"n{number}"))) for number in range(MOST - 1)]
        await turns()
        assert begun == [1], "one too few"
        tasks += [asyncio.create_task(shared(items(f"m{number}"))) for number in range(2 * MOST)]
        await turns()
        assert begun == [1, MOST], "never more than two"
        may_end.set()
        told = await asyncio.gather(*tasks)
        assert len({name for (name,) in told}) == len(tasks)
        assert shared._busy == 0
        # Whoever comes when all is done is served as well.
        assert await shared(items("late")) == ["late"]

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
