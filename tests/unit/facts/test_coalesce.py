"""Group commits: which calls share a batch, which caller flushes it, and what remains when a caller does not return."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import Envelope, Fact
from ergon_framework.facts.stores.postgres.append import rows_to_append
from ergon_framework.facts.stores.postgres.coalesce import (
    MAX_BATCH_BYTES,
    MAX_BATCH_FACTS,
    MAX_CALLER_FACTS,
    AsyncCoalescer,
    Coalescer,
    split_batches,
)

TIMEOUT_SECONDS = 10.0


def make_items(*names, size=2):
    facts = []
    for name in names:
        envelope = Envelope(message_id=name, from_zone="A", to_zone="B", produced_at_unix_ms=1)
        facts.append((envelope, Fact(subject="s", predicate="p", object_json=f'"{"x" * (size - 2)}"')))
    return rows_to_append(facts, frozenset())


class RecordingCommit:
    """Notes what goes together; the first commit waits until it may end."""

    def __init__(self, fails=None):
        self.groups, self._fails = [], fails or {}
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, batch):
        names = [item.envelope.message_id for item in batch]
        self.groups.append(names)
        if len(self.groups) == 1:
            self.begun.set()
            assert self.may_end.wait(TIMEOUT_SECONDS)
        for name in names:
            if name in self._fails:
                raise self._fails[name]
        return names

    async def asynchronously(self, batch):
        return await asyncio.to_thread(self, batch)


def run_in_threads(commit, *requests):
    """Return the result of each of several threads; the first commit has started before the others arrive."""
    coalescer, results = Coalescer(commit), {}

    def submit(names):
        try:
            results[names] = coalescer(make_items(*names))
        except BaseException as error:
            results[names] = error

    threads = [threading.Thread(target=submit, args=(names,), daemon=True) for names in requests]
    threads[0].start()
    assert commit.begun.wait(TIMEOUT_SECONDS)
    for number, thread in enumerate(threads[1:], 1):
        thread.start()
        while len(coalescer._queue) < number:
            assert thread.is_alive()
    commit.may_end.set()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS)
    assert not coalescer._is_busy
    return [results[names] for names in requests]


def run_in_tasks(commit, *requests):
    async def run():
        coalescer = AsyncCoalescer(commit.asynchronously)
        tasks = [asyncio.create_task(coalescer(make_items(*requests[0])))]
        await asyncio.to_thread(commit.begun.wait, TIMEOUT_SECONDS)
        tasks += [asyncio.create_task(coalescer(make_items(*names))) for names in requests[1:]]
        await asyncio.sleep(0)
        commit.may_end.set()
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


@pytest.mark.parametrize("submit", [run_in_threads, run_in_tasks])
def test_callers_that_arrive_during_a_commit_join_the_next_batch(submit):
    commit = RecordingCommit()
    results = submit(commit, ("a",), ("b", "c"), ("d",), ("e",))
    assert commit.groups == [["a"], ["b", "c", "d", "e"]]
    assert results == [["a"], ["b", "c"], ["d"], ["e"]]


@pytest.mark.parametrize("submit", [run_in_threads, run_in_tasks])
def test_an_error_of_one_request_fails_only_that_request(submit):
    commit = RecordingCommit({"c": FactError("not with this one")})
    results = submit(commit, ("a",), ("b",), ("c",), ("d",))
    assert commit.groups == [["a"], ["b", "c", "d"], ["b"], ["c"], ["d"]]
    assert isinstance(results.pop(2), FactError)
    assert results == [["a"], ["b"], ["d"]]


@pytest.mark.parametrize("submit", [run_in_threads, run_in_tasks])
def test_a_lost_connection_fails_the_whole_batch_without_a_retry(submit):
    commit = RecordingCommit({"c": ConnectionLostError("gone")})
    results = submit(commit, ("a",), ("b",), ("c",))
    assert commit.groups == [["a"], ["b", "c"]]
    assert [type(each) for each in results[1:]] == [ConnectionLostError, ConnectionLostError]
    assert results[1] is not results[2], "each has an exception of his own"


def test_an_interrupted_flush_does_not_block_other_callers():
    commit = RecordingCommit({"a": KeyboardInterrupt()})
    results = run_in_threads(commit, ("a",), ("b",))
    assert isinstance(results[0], KeyboardInterrupt)
    assert results[1] == ["b"]


async def submit_one(coalescer, name):
    """Submit a single fact."""
    return [await coalescer.submit_one(make_items(name)[0])]


async def submit_batch(coalescer, name):
    return await coalescer(make_items(name))


@pytest.mark.parametrize("submit", [submit_one, submit_batch])
def test_a_waiting_caller_that_is_cancelled_is_not_committed(submit):
    commit = RecordingCommit()

    async def run():
        coalescer = AsyncCoalescer(commit.asynchronously)
        first = asyncio.create_task(submit(coalescer, "a"))
        await asyncio.to_thread(commit.begun.wait, TIMEOUT_SECONDS)
        cancelled, kept = (asyncio.create_task(submit(coalescer, name)) for name in "bc")
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        commit.may_end.set()
        assert (await first, await kept) == (["a"], ["c"])

    asyncio.run(run())
    assert commit.groups == [["a"], ["c"]]


def test_a_commit_has_a_maximum_size():
    commit = RecordingCommit()
    names = [(f"n{number}",) for number in range(MAX_BATCH_FACTS + 10)]
    run_in_threads(commit, ("first",), *names)
    assert [len(group) for group in commit.groups] == [1, MAX_BATCH_FACTS, 10]


def test_a_request_is_split_by_count_and_by_bytes():
    assert [len(part) for part in split_batches(make_items(*map(str, range(MAX_CALLER_FACTS + 1))))] == [
        MAX_CALLER_FACTS,
        1,
    ]
    large = make_items("a", "b", "c", size=MAX_BATCH_BYTES // 8)
    assert len(split_batches(large * 5)) == 2
    assert split_batches([]) == []


async def yield_repeatedly():
    """Let everybody go as far as he can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_second_commit_is_sent_only_when_it_would_be_full():
    started_sizes, may_end = [], asyncio.Event()

    async def commit(batch):
        started_sizes.append(len(batch))
        await may_end.wait()
        return [item.envelope.message_id for item in batch]

    async def run():
        coalescer = AsyncCoalescer(commit)
        tasks = [asyncio.create_task(coalescer(make_items("first")))]
        await yield_repeatedly()
        tasks += [asyncio.create_task(coalescer(make_items(f"n{number}"))) for number in range(MAX_BATCH_FACTS - 1)]
        await yield_repeatedly()
        assert started_sizes == [1], "one too few"
        tasks += [asyncio.create_task(coalescer(make_items(f"m{number}"))) for number in range(2 * MAX_BATCH_FACTS)]
        await yield_repeatedly()
        assert started_sizes == [1, MAX_BATCH_FACTS], "never more than two"
        may_end.set()
        results = await asyncio.gather(*tasks)
        assert len({name for (name,) in results}) == len(tasks)
        assert coalescer._running_count == 0
        # A caller that arrives when all is done gets its result as well.
        assert await coalescer(make_items("late")) == ["late"]

    asyncio.run(asyncio.wait_for(run(), TIMEOUT_SECONDS))
