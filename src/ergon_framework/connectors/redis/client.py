"""The client that all queues of an address in this process share, with a connection pool for each cluster node."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from redis.exceptions import ResponseError

from ergon_framework.connectors.credentials import CredentialsSource
from ergon_framework.connectors.login import BrokerLogin
from ergon_framework.connectors.redis.address import ServerNode, parse_address
from ergon_framework.connectors.redis.connection import Operation
from ergon_framework.connectors.redis.durability import (
    DURABILITY_SETTINGS,
    UNKNOWN_DURABILITY,
    RedisDurability,
    assess_durability,
    reject_evicting_server,
)
from ergon_framework.connectors.redis.pool import ConnectionPool
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)
_clients: dict[tuple[str, CredentialsSource | None, int], ServerClient] = {}
_registry_lock = threading.Lock()


class ServerClient:
    """The per-process state of one address."""

    def __init__(self, url: str, credentials: CredentialsSource | None) -> None:
        self.owner_pid = os.getpid()
        self._address = parse_address(url)
        self._login = BrokerLogin(credentials)
        self._lock = threading.Lock()
        #: By node; None is the node that the address names.
        self._pools: dict[ServerNode | None, ConnectionPool] = {None: ConnectionPool(self._address, login=self._login)}
        self._durabilities: dict[ServerNode | None, RedisDurability] = {}
        self.users = 0

    def pool(self, node: ServerNode | None) -> ConnectionPool:
        """Return the connection pool of *node*."""
        with self._lock:
            pool = self._pools.get(node)
            if pool is None:
                pool = self._pools[node] = ConnectionPool(self._address, node, login=self._login)
            return pool

    def follow_redirect(self, node: ServerNode | None) -> ServerNode | None:
        """Return the node to ask next because *node* does not answer: another one may know where its queues moved."""
        nodes = list(self._pools)
        return nodes[(nodes.index(node) + 1) % len(nodes)] if node in nodes else None

    def check_durability(self, node: ServerNode | None) -> Operation[RedisDurability]:
        """Read once per server how durable confirmed writes are; raise ConfigurationError if it may evict a queue."""
        server = self.pool(node).primary or node
        durability = self._durabilities.get(server)
        if durability is None:
            settings: dict[str, str] = {}
            # Hosted servers often forbid CONFIG GET.
            with suppress(ResponseError):
                for name in DURABILITY_SETTINGS:
                    answer: Sequence[bytes] = yield ("CONFIG", "GET", name)
                    if answer:
                        settings[name] = answer[1].decode()
            reject_evicting_server(settings)
            durability = self._durabilities[server] = assess_durability(settings) if settings else UNKNOWN_DURABILITY
            level = logging.INFO if durability.durable else logging.WARNING
            logs.log_event(
                level, "redis durability", {"durable": durability.durable, "summary": durability.message}, to=_log
            )
            if node is not None:
                yield from self._discover_nodes()
        return durability

    def _discover_nodes(self) -> Operation[None]:
        """Discover the cluster's other nodes, so that they are known when this one fails."""
        with suppress(ResponseError):
            slots = yield ("CLUSTER", "SLOTS")
            for _, _, *nodes in slots:
                for host, port, *_ in nodes:
                    if host:
                        self.pool(ServerNode(host.decode(), int(port)))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    async def close_async(self) -> None:
        for pool in self._pools.values():
            await pool.close_async()


def acquire_client(url: str, credentials: CredentialsSource | None = None) -> ServerClient:
    """Return the client of *url*, one per process and source; end its use with ``release_client``."""
    with _registry_lock:
        key = url, credentials, os.getpid()
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = ServerClient(url, credentials)
        client.users += 1
        return client


def release_client(client: ServerClient) -> bool:
    """Decrement the reference count; return True for the last user, which closes the client."""
    with _registry_lock:
        client.users -= 1
        if client.users > 0:
            return False
        for key, other in list(_clients.items()):
            if other is client:
                del _clients[key]
        return True
