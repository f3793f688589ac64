"""Setups for the loss of power: each broker with its most durable settings, and with its defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ergon_framework.database.migrate import upgrade
from tests.servers.nats import PrivateNats
from tests.servers.postgres import PrivatePostgres
from tests.servers.rabbitmq import PrivateRabbitMQ
from tests.servers.redis import PrivateRedis


class DataServer(Protocol):
    """A private server process that keeps all data in one folder."""

    @property
    def url(self) -> str: ...
    def start(self) -> None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True)
class Setup:
    """One broker with one setting."""

    setting: str
    create_server: Callable[[Path], Any]
    #: Whether a connector may call it durable, as such runs have shown.
    durable: bool
    make_options: Callable[[Any], Mapping[str, Any]] = lambda _server: {}


class _Postgres(PrivatePostgres):
    """A server with our tables that tolerates the leftovers of its predecessor."""

    def __init__(self, folder: Path, commit: str) -> None:
        # The WAL writer is slow, so unsynced data is certainly not on the device.
        super().__init__(folder, settings={"synchronous_commit": commit, "wal_writer_delay": "10s"})

    @property
    def url(self) -> str:
        return self.dsn()

    def start(self) -> None:
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)
        super().start()
        upgrade(self.dsn())


def _make_monitor_options(server: PrivateNats) -> Mapping[str, Any]:
    return {"monitor": server.monitor}


def _create_everysec_redis(folder: Path) -> PrivateRedis:
    return PrivateRedis(folder, settings={"appendfsync": "everysec"})


SETUPS: Final[Mapping[str, Sequence[Setup]]] = {
    "postgres": (
        Setup("synchronous_commit on", lambda folder: _Postgres(folder, "on"), durable=True),
        Setup("synchronous_commit off", lambda folder: _Postgres(folder, "off"), durable=False),
    ),
    "rabbitmq": (Setup("quorum queues", PrivateRabbitMQ, durable=True),),
    "nats": (
        Setup(
            "sync_interval always",
            lambda folder: PrivateNats(folder, sync=True),
            durable=True,
            make_options=_make_monitor_options,
        ),
        Setup("sync_interval as it comes", PrivateNats, durable=False, make_options=_make_monitor_options),
    ),
    "redis": (
        Setup("appendfsync always", PrivateRedis, durable=True),
        Setup("appendfsync everysec", _create_everysec_redis, durable=False),
    ),
}
