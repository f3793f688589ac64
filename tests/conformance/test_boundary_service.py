"""A store behind the service passes the same conformance suite: over mutual TLS, from another process."""

from __future__ import annotations

import asyncio
import atexit
import tempfile
from contextlib import closing
from functools import cache, partial
from pathlib import Path

import pytest

from ergon_framework.facts.service.channel import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.client_async import AsyncBoundaryClient
from ergon_framework.testing.conformance.boundary.suite import (
    CHECKS,
    BoundaryUnderTest,
    CheckOutcome,
    pytest_suite,
    run_suite,
)
from tests.servers.facts_host import Host

HOME_ZONES = ("Plant A", "Plant B", "Plant C", "Werk Süd 2")
#: The suite acts for all zones and inspects the store, so its certificate covers all of that.
CERTIFICATE_ZONES = (*HOME_ZONES, "Enterprise", "Elsewhere", "z" * 64)


@cache
def get_host():
    folder = tempfile.TemporaryDirectory(prefix="ergon-facts-")
    new_host = Host(Path(folder.name), zones=HOME_ZONES)
    atexit.register(folder.cleanup)
    atexit.register(new_host.close)
    return new_host


@cache
def get_certificate():
    return get_host().authority.issue("conformance", zones=CERTIFICATE_ZONES, operator="conformance")


class InspectedClient(BoundaryClient):
    """Sends operations that the service does not offer directly to the store."""

    def __init__(self, address, store):
        super().__init__(address)
        self._name = store

    def forward_facts(self, facts):
        return get_host().call(self._name, "forward_facts", list(facts))

    def put_object(self, bucket, key, blob, *, zone="", **options):
        if zone in ("", *HOME_ZONES):
            return super().put_object(bucket, key, blob, zone=zone, **options)
        return get_host().call(self._name, "put_object", bucket, key, list(blob), zone=zone, **options)

    def uploaded_bytes(self, bucket, key, expected, *, zone=""):
        if zone in ("", *HOME_ZONES):
            return super().uploaded_bytes(bucket, key, expected, zone=zone)
        return get_host().call(self._name, "uploaded_bytes", bucket, key, expected, zone=zone)

    def fetch_facts(self, reader, pair, limit, *, after=None, max_readers=None):
        if max_readers is None:
            return super().fetch_facts(reader, pair, limit, after=after)
        return get_host().call(self._name, "fetch_facts", reader, pair, limit, after=after, max_readers=max_readers)

    def prune(self, before_unix_ms):
        return get_host().call(self._name, "prune", before_unix_ms)


class AsyncInspectedClient(AsyncBoundaryClient):
    def __init__(self, address, store):
        super().__init__(address)
        self._name = store

    async def forward_facts_async(self, facts):
        return await asyncio.to_thread(get_host().call, self._name, "forward_facts", list(facts))

    async def put_object_async(self, bucket, key, blob, *, zone="", **options):
        if zone in ("", *HOME_ZONES):
            return await super().put_object_async(bucket, key, blob, zone=zone, **options)
        return await asyncio.to_thread(
            get_host().call, self._name, "put_object", bucket, key, list(blob), zone=zone, **options
        )

    async def uploaded_bytes_async(self, bucket, key, expected, *, zone=""):
        if zone in ("", *HOME_ZONES):
            return await super().uploaded_bytes_async(bucket, key, expected, zone=zone)
        return await asyncio.to_thread(get_host().call, self._name, "uploaded_bytes", bucket, key, expected, zone=zone)

    async def fetch_facts_async(self, reader, pair, limit, *, after=None, max_readers=None):
        if max_readers is None:
            return await super().fetch_facts_async(reader, pair, limit, after=after)
        fetch = partial(
            get_host().call, self._name, "fetch_facts", reader, pair, limit, after=after, max_readers=max_readers
        )
        return await asyncio.to_thread(fetch)

    async def prune_async(self, before_unix_ms):
        return await asyncio.to_thread(get_host().call, self._name, "prune", before_unix_ms)


class ServiceBoundaryUnderTest(BoundaryUnderTest):
    durable = False
    resumes = True
    bounded = True
    client_class = InspectedClient

    def __init__(self):
        self._clients = []
        self._stores = set()

    def client(self, store, *, side="inner", max_facts=None):
        self._stores.add(store)
        address = ServiceAddress(host=get_host().serve(store, side=side, max_facts=max_facts), files=get_certificate())
        self._clients.append(self.client_class(address, store))
        return self._clients[-1]

    def backup(self, store):
        number = get_host().ask("backup", store)
        return lambda: get_host().ask("restore", store, number)

    def lose(self, store, bucket, key):
        get_host().ask("lose", store, bucket, key)
        return True

    def damage(self, store, bucket, key):
        get_host().ask("damage", store, bucket, key)
        return True

    def close(self):
        for client in self._clients:
            client.close()
        self.drop_stores()

    def drop_stores(self):
        """Stop the services of this system: each of them lists all sockets of its process five times a second."""
        for store in self._stores:
            get_host().ask("drop", store)


class AsyncServiceBoundaryUnderTest(ServiceBoundaryUnderTest):
    client_class = AsyncInspectedClient

    def close(self):
        """Leave the clients: their event loop is closed, and their connections with it."""
        self.drop_stores()


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_threads = pytest_suite(ServiceBoundaryUnderTest, variants=["sync"], marks=get_spec_marks)
test_asyncio = pytest_suite(AsyncServiceBoundaryUnderTest, variants=["async"], marks=get_spec_marks)


@pytest.mark.parametrize(
    "system_class, variant", [(ServiceBoundaryUnderTest, "sync"), (AsyncServiceBoundaryUnderTest, "async")]
)
def test_every_check_applies(system_class, variant):
    results = []
    for check in CHECKS:
        with closing(system_class()) as system:
            results += run_suite(system, variant=variant, only=[check.name])
    assert {check_result.result for check_result in results} == {CheckOutcome.PASSED}, [
        str(check_result) for check_result in results
    ]
