"""Facts in PostgreSQL pass the connectors' conformance suite, with the durable consumer state in the same database.

The suite also runs with the consumer state in another database, as a consumer behind the service has it.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.postgres.consumer_state import PostgresFactConsumerStore
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from ergon_framework.testing.conformance.connector.suite import ConnectorUnderTest, pytest_suite
from tests.conformance.candidates import PretendedServer, put_behind_server

_SERVERS = {}


@pytest.fixture(autouse=True)
def share_databases(databases):
    _SERVERS.update(databases=databases)


class _FactsUnderTest(ConnectorUnderTest):
    """Each queue is a pair of zones. Each client has separate connections, as another process would have."""

    durable = False
    #: The pretended server can only be stopped.
    faults = ("stop",)
    outage_lease = 0.4
    make = FactConnector

    def __init__(self):
        self.server = PretendedServer()
        self._dsn = _SERVERS["databases"].borrow()
        self._exit_stack = ExitStack()

    def client(self, queue, *, lease):
        connector = self.make(
            from_zone="conformance",
            to_zone=queue[-64:],
            name=queue,
            codec=JsonCodec(max_bytes=4096),
            **self.make_stores(queue),
        )
        return put_behind_server(self.server, connector)

    def close(self):
        self._exit_stack.close()
        _SERVERS["databases"].release(self._dsn)


class SharedDatabaseUnderTest(_FactsUnderTest):
    def make_stores(self, queue):
        return {"boundary": self._exit_stack.enter_context(PostgresBoundary(self._dsn, accept_loss=True))}


class AsyncSharedDatabaseUnderTest(SharedDatabaseUnderTest):
    make = AsyncFactConnector


class SeparateDatabasesUnderTest(_FactsUnderTest):
    def __init__(self):
        super().__init__()
        self._boundary = MemoryBoundary()

    def make_stores(self, queue):
        consumer_store = self._exit_stack.enter_context(PostgresFactConsumerStore(self._dsn, accept_loss=True))
        return {"boundary": self._boundary, "side": consumer_store}


class AsyncSeparateDatabasesUnderTest(SeparateDatabasesUnderTest):
    make = AsyncFactConnector


def get_spec_marks(check):
    return [pytest.mark.spec(*check.ids)]


test_a_shared_database_with_threads = pytest_suite(SharedDatabaseUnderTest, variants=("sync",), marks=get_spec_marks)
test_a_shared_database_with_asyncio = pytest_suite(
    AsyncSharedDatabaseUnderTest, variants=("async",), marks=get_spec_marks
)
test_separate_databases_with_threads = pytest_suite(
    SeparateDatabasesUnderTest, variants=("sync",), marks=get_spec_marks
)
test_separate_databases_with_asyncio = pytest_suite(
    AsyncSeparateDatabasesUnderTest, variants=("async",), marks=get_spec_marks
)
