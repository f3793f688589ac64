"""Fact stories: one story about facts, run in virtual time by either variant, against a store with planned faults."""

from __future__ import annotations

import asyncio

from ergon_framework import scope
from ergon_framework.engine.aio import AsyncioDriver
from ergon_framework.engine.inline import AsyncInlineRunner, InlineRunner
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.append import AsyncFacts, Facts, to_chunks
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.producer import AsyncFactProducer, FactProducer
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.testing.virtual_time import VirtualTime, run_virtual

ZONES = {"from_zone": "Plant A", "to_zone": "Enterprise"}


class LostAnswer:
    """The call takes effect, and its answer is lost."""


DOWN = ConnectionLostError("the line is down")
LOST = LostAnswer()


class FaultyBoundary(MemoryBoundary):
    """A store whose n-th call of a kind meets the n-th planned fault; it records each call and its time."""

    def __init__(self, clock, faults):
        super().__init__()
        self._clock = clock
        self._faults = {name: list(acts) for name, acts in faults.items()}
        self.calls = []

    def times(self, name):
        return [round(at, 6) for method, at, _ in self.calls if method == name]

    def list_arguments(self, name):
        return [argument for method, _, argument in self.calls if method == name]

    @property
    def names(self):
        return [name for name, _, _ in self.calls]

    def _call(self, name, argument, perform):
        self.calls.append((name, self._clock(), argument))
        remaining = self._faults.get(name, [])
        fault = remaining.pop(0) if remaining else None
        if isinstance(fault, BaseException):
            raise fault
        answer = perform()
        if fault is LOST:
            raise DOWN
        return answer

    def append_facts(self, facts):
        return self._call("append", list(facts), lambda: super(FaultyBoundary, self).append_facts(facts))

    def get_fact(self, from_zone, message_id):
        return self._call("get", message_id, lambda: super(FaultyBoundary, self).get_fact(from_zone, message_id))

    def put_object(self, bucket, key, blob, **options):
        content = b"".join(to_chunks(blob))
        return self._call(
            "put",
            (bucket, key, content),
            lambda: super(FaultyBoundary, self).put_object(bucket, key, [content], **options),
        )


def run_story(variant, story, *, max_retries=None, make_scope=None, **faults):
    """Run *story*; return its result, the store and the time at its end.

    A story is a generator: it yields what to append, and receives the result or the error.
    """
    return (_run_on_threads if variant == "threads" else _run_on_asyncio)(story, max_retries, make_scope, faults)


def _run_on_threads(story, max_retries, make_scope, faults):
    time = VirtualTime()
    store = FaultyBoundary(time.clock, faults)
    facts = Facts(store, zone="Plant A", max_retries=max_retries, caller=InlineRunner(time))
    scope.set_scope(None if make_scope is None else make_scope(time.clock))
    try:
        return _drive(story(store), lambda fields: facts.append("Enterprise", **fields)), store, time.clock()
    finally:
        scope.set_scope(None)


def _run_on_asyncio(story, max_retries, make_scope, faults):
    async def main():
        loop = asyncio.get_running_loop()
        store = FaultyBoundary(loop.time, faults)
        facts = AsyncFacts(store, zone="Plant A", max_retries=max_retries, caller=AsyncInlineRunner(loop.time_source))
        scope.set_scope(None if make_scope is None else make_scope(loop.time))
        script, result = story(store), None
        while True:
            try:
                fields = script.send(result)
            except StopIteration as stop:
                return stop.value, store, loop.time()
            try:
                result = await facts.append("Enterprise", **fields)
            except Exception as error:
                result = error

    return run_virtual(main())


def _drive(script, append):
    result = None
    while True:
        try:
            fields = script.send(result)
        except StopIteration as stop:
            return stop.value
        try:
            result = append(fields)
        except Exception as error:
            result = error


def append_once(variant, *, fields=None, **options):
    """Append one fact; return the result, the store and the time at the end."""

    def story(store):
        return (yield {"subject": "order:7", "predicate": "paid", "message_id": "m-1"} | (fields or {}))

    return run_story(variant, story, **options)


def produce(variant, transactions, *, policy=None, task_class=None, store=None, **faults):
    """Return the report of a producer of facts, in virtual time, and the store it appended to."""
    if variant == "threads":
        time = VirtualTime()
        store = store or FaultyBoundary(time.clock, faults)
        task = (task_class or FactProducer)(FactConnector(store, **ZONES))
        report = task.produce_transactions(transactions, policy, driver=lambda size: ThreadDriver(size, waiting=time))
        return report, store

    async def main():
        loop = asyncio.get_running_loop()
        boundary = store or FaultyBoundary(loop.time, faults)
        task = (task_class or AsyncFactProducer)(AsyncFactConnector(boundary, **ZONES))
        return await task.produce_transactions(
            transactions, policy, driver=lambda: AsyncioDriver(loop.time_source)
        ), boundary

    return run_virtual(main())


def make_producer_class(variant, **members):
    """Return a class of a producer of facts of either variant, with its own *members*."""
    return type("Own", (FactProducer if variant == "threads" else AsyncFactProducer,), members)
