"""Stating: one story about facts, told in virtual time by either variant, to a store that fails as it is told to."""

from __future__ import annotations

import asyncio

from ergon_framework import scope
from ergon_framework.engine.drivers.aio import Asyncio
from ergon_framework.engine.drivers.caller import AsyncCaller, Caller
from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.blob import to_pieces
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.facts import AsyncFacts, Facts
from ergon_framework.facts.producer import AsyncFactProducer, FactProducer
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.testing.virtual import VirtualTime, run_virtual

ZONES = {"from_zone": "Plant A", "to_zone": "Enterprise"}


class Dropped:
    """The call is carried out, and its answer gets lost."""


DOWN = ConnectionLost("the line is down")
LOST = Dropped()


class Troubled(MemoryBoundary):
    """A store whose n-th call of a kind meets the n-th of its troubles; it remembers each call, and when it came."""

    def __init__(self, clock, troubles):
        super().__init__()
        self._clock = clock
        self._troubles = {name: list(acts) for name, acts in troubles.items()}
        self.calls = []

    def times(self, name):
        return [round(at, 6) for called, at, _ in self.calls if called == name]

    def given(self, name):
        return [given for called, _, given in self.calls if called == name]

    @property
    def names(self):
        return [name for name, _, _ in self.calls]

    def _met(self, name, given, act):
        self.calls.append((name, self._clock(), given))
        left = self._troubles.get(name, [])
        trouble = left.pop(0) if left else None
        if isinstance(trouble, BaseException):
            raise trouble
        answer = act()
        if trouble is LOST:
            raise DOWN
        return answer

    def append_facts(self, facts):
        return self._met("append", list(facts), lambda: super(Troubled, self).append_facts(facts))

    def get_fact(self, from_zone, message_id):
        return self._met("get", message_id, lambda: super(Troubled, self).get_fact(from_zone, message_id))

    def put_object(self, bucket, key, blob, **how):
        content = b"".join(to_pieces(blob))
        return self._met(
            "put", (bucket, key, content), lambda: super(Troubled, self).put_object(bucket, key, [content], **how)
        )


def tell(flavour, story, *, max_retries=None, below=None, **troubles):
    """What *story* comes to, the store it was told to, and when it was over.

    A story is a generator: it yields what to append, and is sent what came of it, an error included.
    """
    return (_threads if flavour == "threads" else _asyncio)(story, max_retries, below, troubles)


def _threads(story, max_retries, below, troubles):
    time = VirtualTime()
    store = Troubled(time.clock, troubles)
    facts = Facts(store, zone="Plant A", max_retries=max_retries, caller=Caller(time))
    scope.enter(None if below is None else below(time.clock))
    try:
        return _go_on(story(store), lambda stated: facts.append("Enterprise", **stated)), store, time.clock()
    finally:
        scope.enter(None)


def _asyncio(story, max_retries, below, troubles):
    async def main():
        loop = asyncio.get_running_loop()
        store = Troubled(loop.time, troubles)
        facts = AsyncFacts(store, zone="Plant A", max_retries=max_retries, caller=AsyncCaller(loop.senses))
        scope.enter(None if below is None else below(loop.time))
        script, answer = story(store), None
        while True:
            try:
                stated = script.send(answer)
            except StopIteration as stop:
                return stop.value, store, loop.time()
            try:
                answer = await facts.append("Enterprise", **stated)
            except Exception as error:
                answer = error

    return run_virtual(main())


def _go_on(script, append):
    answer = None
    while True:
        try:
            stated = script.send(answer)
        except StopIteration as stop:
            return stop.value
        try:
            answer = append(stated)
        except Exception as error:
            answer = error


def once(flavour, *, stated=None, **given):
    """One append: what came of it, the store, and when it was over."""

    def story(store):
        return (yield {"subject": "order:7", "predicate": "paid", "message_id": "m-1"} | (stated or {}))

    return tell(flavour, story, **given)


def produce(flavour, transactions, *, policy=None, kind=None, store=None, **troubles):
    """What a producer of facts reports, in virtual time, and the store that it appended to."""
    if flavour == "threads":
        time = VirtualTime()
        store = store or Troubled(time.clock, troubles)
        task = (kind or FactProducer)(FactConnector(store, **ZONES))
        report = task.produce_transactions(transactions, policy, driver=lambda size: Threads(size, waiting=time))
        return report, store

    async def main():
        loop = asyncio.get_running_loop()
        made = store or Troubled(loop.time, troubles)
        task = (kind or AsyncFactProducer)(AsyncFactConnector(made, **ZONES))
        return await task.produce_transactions(transactions, policy, driver=lambda: Asyncio(loop.senses)), made

    return run_virtual(main())


def producer(flavour, **members):
    """A producer of facts of either variant, with *members* of its own."""
    return type("Own", (FactProducer if flavour == "threads" else AsyncFactProducer,), members)
