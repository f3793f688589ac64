"""A store of threads can be served as well."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.errors import ArtifactUnknown
from ergon_framework.facts.service.server import ThreadedBoundary, as_async
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.testing.conformance.boundary.suite import BoundaryUnderTest, pytest_suite
from tests.conformance.boundaries import MemoryBoundaryUnderTest


def make_sync_only(store):
    """*store* without its async flavour."""
    names = {name for name in dir(Boundary) if not name.startswith("_")}
    return type("OnlyThreads", (Boundary,), {name: _delegate(store, name) for name in names})()


def _delegate(store, name):
    if name in {"epoch", "capabilities"}:
        return property(lambda self: getattr(store, name))
    return lambda self, *args, **given: getattr(store, name)(*args, **given)


class ThreadedStoreUnderTest(BoundaryUnderTest):
    durable = False
    bounded = True

    def __init__(self):
        self._behind = MemoryBoundaryUnderTest()
        self.backup, self.lose, self.damage = self._behind.backup, self._behind.lose, self._behind.damage

    def client(self, store, **given):
        return ThreadedBoundary(make_sync_only(self._behind.client(store, **given)))


test_in_threads = pytest_suite(
    ThreadedStoreUnderTest, variants=["async"], marks=lambda check: [pytest.mark.spec(*check.ids)]
)


def test_a_store_with_an_async_variant_is_not_wrapped():
    store = MemoryBoundary()
    assert as_async(store) is store
    assert isinstance(as_async(make_sync_only(store)), AsyncBoundary)


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_an_upload_of_a_cancelled_caller_stores_nothing(delay, monkeypatch):
    """Also if the caller leaves before the thread that asks for the next piece knows what it has asked."""
    store = MemoryBoundary()
    original = asyncio.run_coroutine_threadsafe

    def submit_delayed(*args):
        future = original(*args)
        time.sleep(delay)
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", submit_delayed)
    ended, errors = threading.Event(), []

    class RecordingBoundary(type(make_sync_only(store))):
        def put_object(self, *args, **options):
            try:
                return store.put_object(*args, **options)
            except BaseException as error:
                errors.append(error)
                raise
            finally:
                ended.set()

    async def scenario():
        started = asyncio.Event()

        async def chunks():
            yield b"first"
            started.set()
            await asyncio.Event().wait()

        upload = asyncio.ensure_future(ThreadedBoundary(RecordingBoundary()).put_object_async("b", "k", chunks()))
        await started.wait()
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert await asyncio.to_thread(ended.wait, 20)

    asyncio.run(scenario())
    assert isinstance(errors[0], ConnectionLostError)
    with pytest.raises(ArtifactUnknown):
        list(store.get_object("b", "k"))
