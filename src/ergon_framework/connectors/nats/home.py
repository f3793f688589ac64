"""ServerClient: the connection that all queues of one server share on one event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ergon_framework.connectors.nats.line import Connection, connect

_clients: dict[tuple[Any, ...], ServerClient] = {}
_registry_lock = threading.Lock()


class ServerClient:
    """The client of one server or cluster on this event loop."""

    def __init__(
        self, key: tuple[Any, ...], addresses: Sequence[str], *, timeout: float, options: Mapping[str, Any]
    ) -> None:
        self.key = key
        #: Kept alive, so that no other loop can get the same id.
        self.loop = asyncio.get_running_loop()
        self.users = 0
        self._addresses = addresses
        self._timeout = timeout
        self._options = options
        self._connection: Connection | None = None
        self._connect_lock = asyncio.Lock()

    async def connection(self) -> Connection:
        """Return the connection, reconnecting if it was lost."""
        connection = self._connection
        if connection is not None and not connection.is_lost:
            return connection
        async with self._connect_lock:
            if self._connection is None or self._connection.is_lost:
                self._connection = await connect(self._addresses, timeout=self._timeout, options=self._options)
            return self._connection

    async def close(self) -> None:
        if self.loop.is_closed():
            self.abandon()
            return
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def abandon(self) -> None:
        """Close the socket of a connection whose event loop was closed without closing it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()


def acquire_client(
    addresses: Sequence[str], *, timeout: float, options: Mapping[str, Any], owner: object = None
) -> ServerClient:
    """Return the client of *addresses* on the running event loop, shared by all queues there.

    Release it with ``release_client``. A queue with its own client options gets a separate client for its *owner*.
    """
    with _registry_lock:
        key = (tuple(addresses), timeout, id(owner) if options else None, id(asyncio.get_running_loop()), os.getpid())
        for stale in [stale for stale in _clients.values() if stale.loop.is_closed()]:
            _clients.pop(stale.key).abandon()
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = ServerClient(key, addresses, timeout=timeout, options=options)
        client.users += 1
        return client


def release_client(client: ServerClient) -> bool:
    """Decrement the reference count; return True for the last user, which closes the client."""
    with _registry_lock:
        client.users -= 1
        if client.users > 0:
            return False
        if _clients.get(client.key) is client:
            del _clients[client.key]
        return True
