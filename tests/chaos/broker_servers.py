"""Brokers under torment: for each a private server, the address of a queue in it, and what its connector is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from ergon_framework.schema.migrate import upgrade
from tests.servers.nats import PrivateNats
from tests.servers.packets import PacketDrop
from tests.servers.postgres import PrivatePostgres
from tests.servers.rabbitmq import PrivateRabbitMQ
from tests.servers.redis import PrivateRedis


class Started(Protocol):
    """A server process of our own."""

    port: int

    def start(self) -> None: ...
    def kill(self) -> None: ...


class Victim:
    """A broker that can be killed, started again, and cut off."""

    def __init__(self, server: Started, url: Callable[[], str]) -> None:
        self._server = server
        self._url = url
        self._line = PacketDrop(server.port)

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

    def cut(self) -> None:
        self._line.cut()

    def mend(self) -> None:
        self._line.mend()


@dataclass(frozen=True)
class Broker:
    """One kind of broker, and what may be expected of it."""

    victim: Callable[[Path], Victim]
    #: What its connector is told, for a lease of so many seconds.
    options: Callable[[float], Mapping[str, Any]]
    #: A settlement is one step of the broker, and answered: only sending it twice can make two acks of one.
    exact: bool
    prepare: Callable[[str], None] = field(default=lambda _url: None)


def _postgres(folder: Path) -> Victim:
    server = PrivatePostgres(folder, settings={"max_connections": 300, "log_min_messages": "fatal"})
    return Victim(server, server.dsn)


def _rabbitmq(folder: Path) -> Victim:
    server = PrivateRabbitMQ(folder)
    # Silence of a heartbeat or two is a dead worker for it: a stop is then longer than that.
    return Victim(server, lambda: f"{server.url}?heartbeat=1")


def _nats(folder: Path) -> Victim:
    server = PrivateNats(folder)
    return Victim(server, lambda: server.url)


def _redis(folder: Path) -> Victim:
    server = PrivateRedis(folder)
    return Victim(server, lambda: server.url)


BROKERS: Final[Mapping[str, Broker]] = {
    "postgres": Broker(_postgres, lambda lease: {"lease": lease}, exact=True, prepare=upgrade),
    "rabbitmq": Broker(_rabbitmq, lambda _lease: {}, exact=False),
    "nats": Broker(_nats, lambda lease: {"lease": lease}, exact=False),
    "redis": Broker(_redis, lambda lease: {"lease": lease}, exact=True),
}
