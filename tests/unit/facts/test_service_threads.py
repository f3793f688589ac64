"""A store of threads can be served as well."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.errors import ArtifactUnknown
from ergon_framework.facts.service.threads import InThreads, as_async
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.testing.conformance.boundary import BoundaryCandidate, exam
from tests.conformance.boundaries import MemoryBoundaryCandidate


def only_threads(store):
    """*store* without its async flavour."""
    names = {name for name in dir(Boundary) if not name.startswith("_")}
    return type("OnlyThreads", (Boundary,), {name: _passed(store, name) for name in names})()


def _passed(store, name):
    if name in {"epoch", "capabilities"}:
        return property(lambda self: getattr(store, name))
    return lambda self, *args, **given: getattr(store, name)(*args, **given)


class Candidate(BoundaryCandidate):
    durable = False
    bounded = True

    def __init__(self):
        self._behind = MemoryBoundaryCandidate()
        self.backup, self.lose, self.damage = self._behind.backup, self._behind.lose, self._behind.damage

    def client(self, store, **given):
        return InThreads(only_threads(self._behind.client(store, **given)))


test_in_threads = exam(Candidate, variants=["async"], marks=lambda check: [pytest.mark.spec(*check.ids)])


def test_a_store_that_has_the_async_flavour_is_left_as_it_is():
    store = MemoryBoundary()
    assert as_async(store) is store
    assert isinstance(as_async(only_threads(store)), AsyncBoundary)


@pytest.mark.parametrize("late", [0.0, 0.1])
def test_an_upload_whose_caller_has_gone_stores_nothing(late, monkeypatch):
    """Also if the caller leaves before the thread that asks for the next piece knows what it has asked."""
    store = MemoryBoundary()
    ask = asyncio.run_coroutine_threadsafe

    def asked(*args):
        future = ask(*args)
        time.sleep(late)
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", asked)
    ended, seen = threading.Event(), []

    class Watched(type(only_threads(store))):
        def put_object(self, *args, **given):
            try:
                return store.put_object(*args, **given)
            except BaseException as error:
                seen.append(error)
                raise
            finally:
                ended.set()

    async def scene():
        begun = asyncio.Event()

        async def blob():
            yield b"first"
            begun.set()
            await asyncio.Event().wait()

        upload = asyncio.ensure_future(InThreads(Watched()).put_object_async("b", "k", blob()))
        await begun.wait()
        upload.cancel()
        with pytest.raises(asyncio.CancelledError):
            await upload
        assert await asyncio.to_thread(ended.wait, 20)

    asyncio.run(scene())
    assert isinstance(seen[0], ConnectionLost)
    with pytest.raises(ArtifactUnknown):
        list(store.get_object("b", "k"))
