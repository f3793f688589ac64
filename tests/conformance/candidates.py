"""The connectors in this process as candidates, each behind a server that can be taken away."""

from __future__ import annotations

from collections import defaultdict

from ergon_framework.connectors.codec import JsonCodec
from ergon_framework.connectors.memory import MemoryConnector
from ergon_framework.connectors.memory_log import MemoryLog, Records
from ergon_framework.connectors.side_store import MemorySideStore
from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.connector import AsyncFactConnector, FactConnector
from ergon_framework.facts.side import MemoryFactSide
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.testing.conformance.connector import Candidate

CALLS = ("fetch_transactions", "settle", "extend", "dispatch", "depth", "list_dead", "replay_dead", "discard_dead")


class PretendedServer:
    """A server that is up or down; whoever waits there is sent away when it goes down."""

    def __init__(self):
        self.up = True
        self.lines = []

    def stop(self):
        self.up = False
        for line in self.lines:
            line.interrupt()

    kill = cut = stop

    def start(self):
        self.up = True

    mend = start

    def check(self):
        if not self.up:
            raise ConnectionLost("the pretended server is down")


def behind(server, connector):
    """*connector* with every call of it going to *server*, down at the beginning or at the end of the call."""

    def wrap(name):
        inner = getattr(connector, name, None)
        inner_async = getattr(connector, f"{name}_async", None)

        def call(*args, **extra):
            server.check()
            answer = inner(*args, **extra)
            if name == "fetch_transactions" and not answer:
                server.check()  # a wait that the outage ended
            return answer

        async def call_async(*args, **extra):
            server.check()
            answer = await inner_async(*args, **extra)
            if name == "fetch_transactions" and not answer:
                server.check()
            return answer

        # A connector of one flavour has the other one from the bridge.
        if inner is not None:
            setattr(connector, name, call)
        if inner_async is not None:
            setattr(connector, f"{name}_async", call_async)

    for name in CALLS:
        wrap(name)
    server.lines.append(connector)
    return connector


class MemoryCandidate(Candidate):
    durable = False
    #: The pretended server has one way to be gone.
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
            self._queues[queue] = behind(self.server, self._make(queue, lease=lease, codec=self._codec))
        return self._queues[queue]

    def receive(self, queue, body, headers):
        self._queues[queue].receive(body, headers)


def with_codec():
    return MemoryCandidate(codec=JsonCodec(max_bytes=4096))


class LogCandidate(Candidate):
    durable = False
    #: The pretended server has one way to be gone.
    faults = ("stop",)
    outage_lease = 0.4
    encodes = False

    def __init__(self, *, partitions=3):
        self.server = PretendedServer()
        self._partitions = partitions
        self._records = defaultdict(lambda: Records(partitions))
        self._sides = defaultdict(MemorySideStore)

    def client(self, queue, *, lease):
        return behind(self.server, MemoryLog(queue, records=self._records[queue], side=self._sides[queue]))


class FactsCandidate(Candidate):
    """Facts in a boundary in memory; each queue is a pair of zones."""

    durable = False
    #: The pretended server has one way to be gone.
    faults = ("stop",)
    outage_lease = 0.4

    def __init__(self, make=FactConnector, *, codec=None):
        self.server = PretendedServer()
        self._make = make
        self._codec = codec
        self._boundaries = defaultdict(MemoryBoundary)
        self._sides = defaultdict(MemoryFactSide)

    def client(self, queue, *, lease):
        connector = self._make(
            self._boundaries[queue],
            from_zone="exam",
            to_zone="elsewhere",
            name=queue,
            side=self._sides[queue],
            codec=self._codec,
        )
        return behind(self.server, connector)


def facts_with_asyncio():
    return FactsCandidate(AsyncFactConnector, codec=JsonCodec(max_bytes=4096))


def facts_with_threads():
    return FactsCandidate(codec=JsonCodec(max_bytes=4096))
