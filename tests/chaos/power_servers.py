"""Setups for the loss of power: each broker as safe as it can be, and as it is if nobody has thought of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ergon_framework.schema.migrate import upgrade
from tests.servers.nats import PrivateNats
from tests.servers.postgres import PrivatePostgres
from tests.servers.rabbitmq import PrivateRabbitMQ
from tests.servers.redis import PrivateRedis


class Served(Protocol):
    """A server process of our own, with all that it keeps in one folder."""

    @property
    def url(self) -> str: ...
    def start(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class Setup:
    """One broker with one setting."""

    setting: str
    server: Callable[[Path], Any]
    #: Whether a connector may call it durable, by what such rigs have shown.
    durable: bool
    options: Callable[[Any], Mapping[str, Any]] = lambda _server: {}


class _Postgres(PrivatePostgres):
    """With our tables; and it does not mind what a server before it has left behind."""

    def __init__(self, folder: Path, commit: str) -> None:
        # Slow to write by itself: what it has not synced is then surely not on the device.
        super().__init__(folder, settings={"synchronous_commit": commit, "wal_writer_delay": "10s"})

    @property
    def url(self) -> str:
        return self.dsn()

    def start(self) -> None:
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)
        super().start()
        upgrade(self.dsn())


def _monitored(server: PrivateNats) -> Mapping[str, Any]:
    return {"monitor": server.monitor}


def _every_second(folder: Path) -> PrivateRedis:
    return PrivateRedis(folder, settings={"appendfsync": "everysec"})


SETUPS: Final[Mapping[str, Sequence[Setup]]] = {
    "postgres": (
        Setup("synchronous_commit on", lambda folder: _Postgres(folder, "on"), durable=True),
        Setup("synchronous_commit off", lambda folder: _Postgres(folder, "off"), durable=False),
    ),
    "rabbitmq": (Setup("quorum queues", PrivateRabbitMQ, durable=True),),
    "nats": (
        Setup("sync_interval always", lambda folder: PrivateNats(folder, sync=True), durable=True, options=_monitored),
        Setup("sync_interval as it comes", PrivateNats, durable=False, options=_monitored),
    ),
    "redis": (
        Setup("appendfsync always", PrivateRedis, durable=True),
        Setup("appendfsync everysec", _every_second, durable=False),
    ),
}
