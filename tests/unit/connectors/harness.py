"""What the connector tests share: a clock that is moved by hand, a listener that remembers, half connectors."""

from __future__ import annotations

from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.transaction import Transaction


class ManualClock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


class RecordingListener:
    """A listener that remembers what it was told."""

    def __init__(self):
        self.wakes = 0
        self.gone = []

    def wake(self):
        self.wakes += 1

    def on_lost(self, receipts):
        self.gone.extend(receipts)


class _ConnectorWrapper:
    def __init__(self, inner):
        self.inner = inner

    @property
    def name(self):
        return self.inner.name

    @property
    def capabilities(self):
        return self.inner.capabilities

    def listen(self, listener):
        return self.inner.listen(listener)


class OnlySync(_ConnectorWrapper, Connector):
    """A connector that has the sync flavour alone."""

    def fetch_transactions(self, batch_size, **extra):
        return self.inner.fetch_transactions(batch_size, **extra)

    def settle(self, requests):
        return self.inner.settle(requests)

    def extend(self, deliveries):
        return self.inner.extend(deliveries)

    def dispatch(self, transactions):
        return self.inner.dispatch(transactions)

    def depth(self):
        return self.inner.depth()

    def find_queued(self, ids):
        return self.inner.find_queued(ids)

    def list_dead(self, query, *, after=None, limit=100):
        return self.inner.list_dead(query, after=after, limit=limit)

    def replay_dead(self, handles):
        return self.inner.replay_dead(handles)

    def discard_dead(self, handles):
        return self.inner.discard_dead(handles)

    def replace_dead(self, handle, transaction):
        return self.inner.replace_dead(handle, transaction)

    def open(self):
        self.inner.open()

    def close(self):
        self.inner.close()


class OnlyAsync(_ConnectorWrapper, AsyncConnector):
    """A connector that has the async flavour alone."""

    async def fetch_transactions_async(self, batch_size, **extra):
        return await self.inner.fetch_transactions_async(batch_size, **extra)

    async def settle_async(self, requests):
        return await self.inner.settle_async(requests)

    async def extend_async(self, deliveries):
        return await self.inner.extend_async(deliveries)

    async def dispatch_async(self, transactions):
        return await self.inner.dispatch_async(transactions)

    async def depth_async(self):
        return await self.inner.depth_async()

    async def find_queued_async(self, ids):
        return await self.inner.find_queued_async(ids)

    async def list_dead_async(self, query, *, after=None, limit=100):
        return await self.inner.list_dead_async(query, after=after, limit=limit)

    async def replay_dead_async(self, handles):
        return await self.inner.replay_dead_async(handles)

    async def discard_dead_async(self, handles):
        return await self.inner.discard_dead_async(handles)

    async def replace_dead_async(self, handle, transaction):
        return await self.inner.replace_dead_async(handle, transaction)

    async def open_async(self):
        await self.inner.open_async()

    async def close_async(self):
        await self.inner.close_async()


def make_orders(*ids, **fields):
    return [Transaction({"order": name}, id=name, **fields) for name in ids]


def ids_of(deliveries):
    return [delivery.transaction.id for delivery in deliveries]
