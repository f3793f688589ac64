"""Queues by name: a task names its queue, and the settings define the broker of that queue."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from threading import Lock
from typing import Any

from ergon_framework.connectors import registry
from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    Delivery,
    Depth,
    Listener,
    SettlementRequest,
    SettleResult,
    Unlisten,
)
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.runner.settings import Settings, load_settings
from ergon_framework.transaction import Transaction


class NamedQueue(Connector, AsyncConnector):
    """The queue *name* of the settings, at whatever broker they define.

    The settings are read at the first use, not at construction: a module that names its queues can be imported where
    there are no settings. Methods that only some connectors have, such as ``record_processed_on``, are the connector's.
    """

    # Its connector does, so the base class must not wrap the methods of this class to write audit rows.
    writes_audit = True

    def __init__(self, name: str, **options: Any) -> None:
        self._name = name
        self._options = options
        self._lock = Lock()
        self._connector: Connector | AsyncConnector | None = None

    def __repr__(self) -> str:
        return f"queue({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def connector(self) -> Connector | AsyncConnector:
        """The connector of the queue, created at the first access; ConfigurationError if it is not configured."""
        with self._lock:
            if self._connector is None:
                url, options = _current_settings().queue(self._name)
                self._connector = registry.create_connector(self._name, url, {**self._options, **options})
            return self._connector

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        connector = self.connector
        try:
            return getattr(connector, attribute)
        except AttributeError:
            raise AttributeError(
                f"the queue {self._name!r} is a {type(connector).__name__} in the settings, which has no {attribute!r}"
            ) from None

    @property
    def server_address(self) -> str | None:
        return self.connector.server_address

    @property
    def server_host(self) -> str | None:
        return self.connector.server_host

    @property
    def write_refusal(self) -> str | None:
        return self.connector.write_refusal

    @property
    def capabilities(self) -> Capabilities:
        return self.connector.capabilities

    def listen(self, listener: Listener) -> Unlisten:
        return self.connector.listen(listener)

    def limit_deliveries(self, max_deliveries: int) -> None:
        self.connector.limit_deliveries(max_deliveries)

    def prepare(self, transaction: Transaction) -> Transaction:
        return self.connector.prepare(transaction)

    # -- on threads ---------------------------------------------------------------------------------

    def open(self) -> None:
        as_sync(self.connector).open()

    def close(self) -> None:
        as_sync(self.connector).close()

    def fetch_transactions(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return as_sync(self.connector).fetch_transactions(batch_size, **extra)

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        return as_sync(self.connector).settle(requests)

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return as_sync(self.connector).extend(deliveries)

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return as_sync(self.connector).dispatch(transactions)

    def depth(self) -> Depth | None:
        return as_sync(self.connector).depth()

    def find_queued(self, ids: Collection[str]) -> Collection[str] | None:
        return as_sync(self.connector).find_queued(ids)

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return as_sync(self.connector).list_dead(query, after=after, limit=limit)

    def replay_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return as_sync(self.connector).replay_dead(handles)

    def discard_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return as_sync(self.connector).discard_dead(handles)

    def replace_dead(self, handle: str, transaction: Transaction) -> ReplayResult:
        return as_sync(self.connector).replace_dead(handle, transaction)

    # -- on an event loop ---------------------------------------------------------------------------

    async def open_async(self) -> None:
        await as_async(self.connector).open_async()

    async def close_async(self) -> None:
        await as_async(self.connector).close_async()

    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return await as_async(self.connector).fetch_transactions_async(batch_size, **extra)

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        return await as_async(self.connector).settle_async(requests)

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return await as_async(self.connector).extend_async(deliveries)

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return await as_async(self.connector).dispatch_async(transactions)

    async def depth_async(self) -> Depth | None:
        return await as_async(self.connector).depth_async()

    async def find_queued_async(self, ids: Collection[str]) -> Collection[str] | None:
        return await as_async(self.connector).find_queued_async(ids)

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return await as_async(self.connector).list_dead_async(query, after=after, limit=limit)

    async def replay_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return await as_async(self.connector).replay_dead_async(handles)

    async def discard_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return await as_async(self.connector).discard_dead_async(handles)

    async def replace_dead_async(self, handle: str, transaction: Transaction) -> ReplayResult:
        return await as_async(self.connector).replace_dead_async(handle, transaction)


def queue(name: str, **options: Any) -> NamedQueue:
    """Return the queue *name* of the settings: ``url`` of ``[queues.NAME]`` in ``ergon.toml`` is its address.

    *options* are passed to the connector; those of the settings take precedence.
    """
    return NamedQueue(name, **options)


_chosen: list[Settings] = []


def set_settings(loaded: Settings) -> None:
    """Use these settings for queues of this process that are first used from now on, not the current folder's file."""
    _chosen[:] = [loaded]


def _current_settings() -> Settings:
    return _chosen[0] if _chosen else load_settings()
