"""Facts in PostgreSQL take the exam of connectors, with the side that lasts: what they keep is in the same database.

And once more with a side in another database than the facts, as a consumer behind the service has it.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.facts.stores.postgres_side import PostgresFactSide
from ergon_framework.testing.conformance.connector import Candidate, exam
from tests.conformance.candidates import PretendedServer, behind

_SERVER = {}


@pytest.fixture(autouse=True)
def server(databases):
    _SERVER.update(databases=databases)


class _Candidate(Candidate):
    """Each queue is a pair of zones. Each client has lines of its own, as another process would have."""

    durable = False
    #: The pretended server has one way to be gone.
    faults = ("stop",)
    outage_lease = 0.4
    make = FactConnector

    def __init__(self):
        self.server = PretendedServer()
        self._dsn = _SERVER["databases"].borrow()
        self._opened = ExitStack()

    def client(self, queue, *, lease):
        connector = self.make(
            from_zone="exam", to_zone=queue[-64:], name=queue, codec=JsonCodec(max_bytes=4096), **self.given(queue)
        )
        return behind(self.server, connector)

    def close(self):
        self._opened.close()
        _SERVER["databases"].give_back(self._dsn)


class TogetherCandidate(_Candidate):
    def given(self, queue):
        return {"boundary": self._opened.enter_context(PostgresBoundary(self._dsn, accept_loss=True))}


class AsyncTogetherCandidate(TogetherCandidate):
    make = AsyncFactConnector


class ApartCandidate(_Candidate):
    def __init__(self):
        super().__init__()
        self._boundary = MemoryBoundary()

    def given(self, queue):
        side = self._opened.enter_context(PostgresFactSide(self._dsn, accept_loss=True))
        return {"boundary": self._boundary, "side": side}


class AsyncApartCandidate(ApartCandidate):
    make = AsyncFactConnector


def spec(check):
    return [pytest.mark.spec(*check.ids)]


test_together_with_threads = exam(TogetherCandidate, variants=("sync",), marks=spec)
test_together_with_asyncio = exam(AsyncTogetherCandidate, variants=("async",), marks=spec)
test_apart_with_threads = exam(ApartCandidate, variants=("sync",), marks=spec)
test_apart_with_asyncio = exam(AsyncApartCandidate, variants=("async",), marks=spec)
