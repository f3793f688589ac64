"""The in-memory connectors under the conformance suite, each behind a server that can be taken down."""

from __future__ import annotations

from collections import defaultdict

from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.log_consumer import MemoryLogConsumerStore
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.consumer_state import MemoryFactConsumerStore
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.testing.conformance.connector.suite import ConnectorUnderTest
from ergon_framework.testing.memory_log import LogRecords, MemoryLog

CONNECTOR_CALLS = (
    "fetch_transactions",
    "settle",
    "extend",
    "dispatch",
    "depth",
    "list_dead",
    "replay_dead",
    "discard_dead",
)


class PretendedServer:
    """A server that is up or down; callers that wait on it fail when it goes down."""

    def __init__(self):
        self.is_up = True
        self.connectors = []

    def stop(self):
        self.is_up = False
        for connector in self.connectors:
            connector.interrupt()

    kill = partition_network = stop

    def start(self):
        self.is_up = True

    heal_network = start

    def raise_if_down(self):
        if not self.is_up:
            raise ConnectionLostError("the pretended server is down")


def put_behind_server(server, connector):
    """Wrap *connector* so that every call needs *server*, which may be down at its begin or at its end."""

    def wrap(name):
        inner = getattr(connector, name, None)
        inner_async = getattr(connector, f"{name}_async", None)

        def call(*args, **options):
            server.raise_if_down()
            result = inner(*args, **options)
            if name == "fetch_transactions" and not result:
                server.raise_if_down()  # a wait that the outage ended
            return result

        async def call_async(*args, **options):
            server.raise_if_down()
            result = await inner_async(*args, **options)
            if name == "fetch_transactions" and not result:
                server.raise_if_down()
            return result

        # The bridge adds the other variant to a connector that has only one.
        if inner is not None:
            setattr(connector, name, call)
        if inner_async is not None:
            setattr(connector, f"{name}_async", call_async)

    for name in CONNECTOR_CALLS:
        wrap(name)
    server.connectors.append(connector)
    return connector


class MemoryUnderTest(ConnectorUnderTest):
    durable = False
    #: The pretended server can only be stopped.
    faults = ("stop",)
    outage_lease = 0.4

    def __init__(self, make=MemoryConnector, *, codec=None):
        self.server = PretendedServer()
        self.encodes = self.receives = codec is not None
        self._make = make
        self._codec = codec
        self._queues = {}

    def client(self, queue, *, lease):
        if queue not in self._queues:
            self._queues[queue] = put_behind_server(self.server, self._make(queue, lease=lease, codec=self._codec))
        return self._queues[queue]

    def receive(self, queue, body, headers):
        self._queues[queue].inject(body, headers)


def make_memory_with_codec():
    return MemoryUnderTest(codec=JsonCodec(max_bytes=4096))


class MemoryLogUnderTest(ConnectorUnderTest):
    durable = False
    #: The pretended server can only be stopped.
    faults = ("stop",)
    outage_lease = 0.4
    encodes = False

    def __init__(self, *, partitions=3):
        self.server = PretendedServer()
        self._partitions = partitions
        self._records = defaultdict(lambda: LogRecords(partitions))
        self._consumer_stores = defaultdict(MemoryLogConsumerStore)

    def client(self, queue, *, lease):
        return put_behind_server(
            self.server, MemoryLog(queue, records=self._records[queue], store=self._consumer_stores[queue])
        )


class FactsUnderTest(ConnectorUnderTest):
    """Facts in a boundary in memory; each queue is a pair of zones."""

    durable = False
    #: The pretended server can only be stopped.
    faults = ("stop",)
    outage_lease = 0.4

    def __init__(self, make=FactConnector, *, codec=None):
        self.server = PretendedServer()
        self._make = make
        self._codec = codec
        self._boundaries = defaultdict(MemoryBoundary)
        self._consumer_stores = defaultdict(MemoryFactConsumerStore)

    def client(self, queue, *, lease):
        connector = self._make(
            self._boundaries[queue],
            from_zone="conformance",
            to_zone="elsewhere",
            name=queue,
            side=self._consumer_stores[queue],
            codec=self._codec,
        )
        return put_behind_server(self.server, connector)


def make_async_facts():
    return FactsUnderTest(AsyncFactConnector, codec=JsonCodec(max_bytes=4096))


def make_sync_facts():
    return FactsUnderTest(codec=JsonCodec(max_bytes=4096))
