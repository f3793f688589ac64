"""PgBouncer: a pooler of a test's own in front of a private server, in transaction mode."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import psycopg

from tests.servers.postgres import PostgresServerError, PrivatePostgres, free_port

_CONFIGURATION = """
[databases]
* = host=127.0.0.1 port={server} user=postgres

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 6
logfile = {folder}/pgbouncer.log
"""
_PATIENCE = 20.0


class PrivatePgBouncer:
    """A pooler in *folder*, in front of *server*; few server connections, so that sessions really are shared."""

    def __init__(self, folder: Path | str, server: PrivatePostgres) -> None:
        program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
        if program is None:
            raise PostgresServerError("these tests need pgbouncer and found none; install it (apt install pgbouncer)")
        self._program = program
        self._server = server
        self._folder = Path(folder)
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def dsn(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/{database}"

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        text = _CONFIGURATION.format(server=self._server.port, port=self._port, folder=self._folder)
        (self._folder / "pgbouncer.ini").write_text(text, encoding="utf-8")
        command = [self._program, str(self._folder / "pgbouncer.ini")]
        user = self._server.as_user()
        if user:
            os.chown(self._folder, user["user"], user["group"])
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **user)
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                psycopg.connect(self.dsn("postgres"), connect_timeout=2).close()
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise PostgresServerError(f"pgbouncer did not start; see {self._folder}/pgbouncer.log") from None
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
