"""PgBouncer: a pooler of a test's own in front of a private server, in transaction mode.

PgBouncer 1.18, which Debian 12 has, exits by itself when a query is cancelled at an unlucky moment ("server in bad
state"; mended in 1.21). A service manager starts it again, and so does this one. What was asked while it was away
was asked of nobody: ``DEATHS`` tells of it, and the test is asked again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
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

#: The last words of each pooler that died unasked in this process.
DEATHS: list[str] = []


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
        self._keeper: threading.Thread | None = None
        self._wanted = threading.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def dsn(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/{database}"

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        text = _CONFIGURATION.format(server=self._server.port, port=self._port, folder=self._folder)
        (self._folder / "pgbouncer.ini").write_text(text, encoding="utf-8")
        if user := self._server.as_user():
            os.chown(self._folder, user["user"], user["group"])
        self._process = self._launch()
        self._await_answer(self._process)
        self._wanted.set()
        self._keeper = threading.Thread(target=self._keep, args=(self._process,), name="pgbouncer-keeper", daemon=True)
        self._keeper.start()

    def stop(self) -> None:
        self._wanted.clear()
        if self._process is not None:
            self._process.kill()
        if self._keeper is not None:
            self._keeper.join()
        self._process = self._keeper = None

    def _launch(self) -> subprocess.Popen[bytes]:
        command = [self._program, str(self._folder / "pgbouncer.ini")]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._server.as_user())

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        while True:
            code = process.wait()
            if not self._wanted.is_set():
                return
            DEATHS.append(f"pgbouncer ended by itself with {code}: {self._last_words()}")
            process = self._process = self._launch()
            if not self._wanted.is_set():
                process.kill()  # stop() may have missed the new one

    def _last_words(self) -> str:
        try:
            lines = (self._folder / "pgbouncer.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "it left no log"
        return next((line for line in reversed(lines) if "FATAL" in line), lines[-1] if lines else "nothing")

    def _await_answer(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                psycopg.connect(self.dsn("postgres"), connect_timeout=2).close()
            except psycopg.OperationalError:
                if process.poll() is not None or time.monotonic() > end:
                    raise PostgresServerError(f"pgbouncer did not start; see {self._folder}/pgbouncer.log") from None
                time.sleep(0.05)
            else:
                return
