"""A store behind the service takes the exam as it would without one: over mutual TLS, from another process."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
from functools import cache, partial
from pathlib import Path

import pytest

from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.client_aio import AsyncBoundaryClient
from ergon_framework.testing.conformance.boundary import BoundaryCandidate, Result, exam, take
from tests.servers.facts_host import Host

HOME = ("Plant A", "Plant B", "Plant C", "Werk Süd 2")
#: The exam speaks for all zones at once, and looks behind the curtain: it has a certificate for all of that.
ZONES = (*HOME, "Enterprise", "Elsewhere", "z" * 64)


@cache
def host():
    folder = tempfile.TemporaryDirectory(prefix="ergon-facts-")
    made = Host(Path(folder.name), zones=HOME)
    atexit.register(folder.cleanup)
    atexit.register(made.close)
    return made


@cache
def certificate():
    return host().authority.issue("exam", zones=ZONES, operator="exam")


class Examined(BoundaryClient):
    """What is not offered over the line is done where the store is."""

    def __init__(self, address, store):
        super().__init__(address)
        self._name = store

    def forward_facts(self, facts):
        return host().call(self._name, "forward_facts", list(facts))

    def put_object(self, bucket, key, blob, *, zone="", **how):
        if zone in ("", *HOME):
            return super().put_object(bucket, key, blob, zone=zone, **how)
        return host().call(self._name, "put_object", bucket, key, list(blob), zone=zone, **how)

    def received(self, bucket, key, expected, *, zone=""):
        if zone in ("", *HOME):
            return super().received(bucket, key, expected, zone=zone)
        return host().call(self._name, "received", bucket, key, expected, zone=zone)

    def fetch_facts(self, reader, pair, limit, *, after=None, max_readers=None):
        if max_readers is None:
            return super().fetch_facts(reader, pair, limit, after=after)
        return host().call(self._name, "fetch_facts", reader, pair, limit, after=after, max_readers=max_readers)

    def prune(self, before_unix_ms):
        return host().call(self._name, "prune", before_unix_ms)


class AsyncExamined(AsyncBoundaryClient):
    def __init__(self, address, store):
        super().__init__(address)
        self._name = store

    async def forward_facts_async(self, facts):
        return await asyncio.to_thread(host().call, self._name, "forward_facts", list(facts))

    async def put_object_async(self, bucket, key, blob, *, zone="", **how):
        if zone in ("", *HOME):
            return await super().put_object_async(bucket, key, blob, zone=zone, **how)
        return await asyncio.to_thread(host().call, self._name, "put_object", bucket, key, list(blob), zone=zone, **how)

    async def received_async(self, bucket, key, expected, *, zone=""):
        if zone in ("", *HOME):
            return await super().received_async(bucket, key, expected, zone=zone)
        return await asyncio.to_thread(host().call, self._name, "received", bucket, key, expected, zone=zone)

    async def fetch_facts_async(self, reader, pair, limit, *, after=None, max_readers=None):
        if max_readers is None:
            return await super().fetch_facts_async(reader, pair, limit, after=after)
        ask = partial(host().call, self._name, "fetch_facts", reader, pair, limit, after=after, max_readers=max_readers)
        return await asyncio.to_thread(ask)

    async def prune_async(self, before_unix_ms):
        return await asyncio.to_thread(host().call, self._name, "prune", before_unix_ms)


class ServiceCandidate(BoundaryCandidate):
    durable = False
    resumes = True
    bounded = True
    kind = Examined

    def __init__(self):
        self._made = []

    def client(self, store, *, side="inner", room=None):
        address = Address(host=host().serve(store, side=side, room=room), files=certificate())
        self._made.append(self.kind(address, store))
        return self._made[-1]

    def backup(self, store):
        number = host().ask("backup", store)
        return lambda: host().ask("restore", store, number)

    def lose(self, store, bucket, key):
        host().ask("lose", store, bucket, key)
        return True

    def damage(self, store, bucket, key):
        host().ask("damage", store, bucket, key)
        return True

    def close(self):
        for client in self._made:
            client.close()


class AsyncServiceCandidate(ServiceCandidate):
    kind = AsyncExamined

    def close(self):
        """Its event loop is gone, and its connections with it."""


def spec(check):
    return [pytest.mark.spec(*check.ids)]


test_threads = exam(ServiceCandidate, variants=["sync"], marks=spec)
test_asyncio = exam(AsyncServiceCandidate, variants=["async"], marks=spec)


@pytest.mark.parametrize("candidate, variant", [(ServiceCandidate, "sync"), (AsyncServiceCandidate, "async")])
def test_everything_applies(candidate, variant):
    marks = take(candidate(), variant=variant)
    assert {got.result for got in marks} == {Result.PASSED}, [str(got) for got in marks]
