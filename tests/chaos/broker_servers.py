"""Brokers under faults: a private server of each kind, the address of a queue in it, and its connector's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from ergon_framework.database.migrate import upgrade
from tests.servers.nats import PrivateNats
from tests.servers.packets import PacketDrop
from tests.servers.postgres import PrivatePostgres
from tests.servers.rabbitmq import PrivateRabbitMQ
from tests.servers.redis import PrivateRedis


class ServerProcess(Protocol):
    """A private server process."""

    port: int

    def start(self) -> None: ...
    def kill(self) -> None: ...


class FaultableBroker:
    """A broker that can be killed, restarted and disconnected."""

    def __init__(self, server: ServerProcess, url: Callable[[], str]) -> None:
        self._server = server
        self._url = url
        self._packet_drop = PacketDrop(server.port)

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def url(self) -> str:
        return self._url()

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def partition_network(self) -> None:
        self._packet_drop.partition_network()

    def heal_network(self) -> None:
        self._packet_drop.heal_network()


@dataclass(frozen=True)
class BrokerKind:
    """One kind of broker, and the guarantees that it gives."""

    create: Callable[[Path], FaultableBroker]
    #: The options of its connector for a lease in seconds.
    make_options: Callable[[float], Mapping[str, Any]]
    #: Whether a settlement is one confirmed operation of the broker: then only sending it twice can ack twice.
    confirms_settlements: bool
    prepare: Callable[[str], None] = field(default=lambda _url: None)


def _create_postgres(folder: Path) -> FaultableBroker:
    server = PrivatePostgres(folder, settings={"max_connections": 300, "log_min_messages": "fatal"})
    return FaultableBroker(server, server.dsn)


def _create_rabbitmq(folder: Path) -> FaultableBroker:
    server = PrivateRabbitMQ(folder)
    # The broker takes a worker that misses one or two heartbeats for dead, so a SIGSTOP lasts longer than that.
    return FaultableBroker(server, lambda: f"{server.url}?heartbeat=1")


def _create_nats(folder: Path) -> FaultableBroker:
    server = PrivateNats(folder)
    return FaultableBroker(server, lambda: server.url)


def _create_redis(folder: Path) -> FaultableBroker:
    server = PrivateRedis(folder)
    return FaultableBroker(server, lambda: server.url)


BROKER_KINDS: Final[Mapping[str, BrokerKind]] = {
    "postgres": BrokerKind(
        _create_postgres, lambda lease: {"lease": lease}, confirms_settlements=True, prepare=upgrade
    ),
    "rabbitmq": BrokerKind(_create_rabbitmq, lambda _lease: {}, confirms_settlements=False),
    "nats": BrokerKind(_create_nats, lambda lease: {"lease": lease}, confirms_settlements=False),
    "redis": BrokerKind(_create_redis, lambda lease: {"lease": lease}, confirms_settlements=True),
}
