"""PostgresCluster: a primary and a synchronous standby, which takes over when the primary is killed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import psycopg
from psycopg import sql

from tests.servers.postgres import PostgresServerError, PrivatePostgres

_STANDBY_NAME = "standby"
_SYNC_TIMEOUT_SECONDS = 60.0


class PostgresCluster:
    """Two servers on two fixed ports; after a failover the old primary is rebuilt as the new standby.

    The standby is synchronous whenever it exists, so that its promotion loses no confirmed commit. While there is none,
    commits wait for nothing, as a cluster manager of two servers arranges it.
    """

    def __init__(self, folder: Path, *, settings: Mapping[str, str | int | float] | None = None) -> None:
        self._folder = folder
        self._copies = 0
        self.primary = PrivatePostgres(folder / "server-0", settings=settings)
        self.standby: PrivatePostgres | None = None

    def start(self) -> None:
        self.primary.start()
        self._build_standby(None)
        self._ports = [server.port for server in (self.primary, self.standby) if server is not None]

    def dsn(self, database: str = "postgres") -> str:
        """Return an address with both servers that connects to the primary."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"postgresql://postgres@{hosts}/{database}?target_session_attrs=read-write"

    def fail_over(self) -> float:
        """Kill the primary, and promote the standby; return when the primary was gone, in seconds since the epoch."""
        self.primary.kill()
        killed_at = time.time()
        self.promote_standby()
        return killed_at

    def promote_standby(self) -> None:
        """Make the standby of a killed primary the new primary."""
        assert self.standby is not None, "rebuild_standby() was not called"
        self._killed, self.primary, self.standby = self.primary, self.standby, None
        self.primary.promote()

    def rebuild_standby(self) -> None:
        """Replace the data of the killed server by a copy of the primary, and wait until it is synchronous."""
        shutil.rmtree(self._killed.folder)
        self._build_standby(self._killed.port)

    def kill(self) -> None:
        for server in (self.primary, self.standby):
            if server is not None:
                server.kill()

    def _build_standby(self, port: int | None) -> None:
        self._copies += 1
        folder = self._folder / f"server-{self._copies}"
        self.standby = self.primary.create_standby(folder, name=_STANDBY_NAME, port=port)
        with psycopg.connect(self.primary.dsn(), autocommit=True) as admin:
            admin.execute(sql.SQL("alter system set synchronous_standby_names = {}").format(_STANDBY_NAME))
        self.primary.reload()
        self._wait_until_synchronous()

    def _wait_until_synchronous(self) -> None:
        deadline = time.monotonic() + _SYNC_TIMEOUT_SECONDS
        with psycopg.connect(self.primary.dsn(), autocommit=True) as admin:
            while admin.execute("select sync_state from pg_stat_replication").fetchall() != [("sync",)]:
                if time.monotonic() > deadline:
                    raise PostgresServerError("the standby did not become synchronous")
                time.sleep(0.05)
