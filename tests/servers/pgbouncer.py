"""PgBouncer: a private pooler in front of a private server, in transaction mode.

PgBouncer 1.18, which Debian 12 has, exits on its own when a query is cancelled at an unlucky moment ("server in bad
state"; fixed in 1.21). A service manager restarts it, and so does this one. Queries during that time fail without
a fault of the test: ``DEATHS`` records the exit, and the test is rerun.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import psycopg

from tests.servers.postgres import PostgresServerError, PrivatePostgres, free_port
from tests.servers.releases import find_program

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
_SERVER_TIMEOUT_SECONDS = 20.0

#: The last log lines of each pooler that exited unexpectedly in this process.
DEATHS: list[str] = []


class PrivatePgBouncer:
    """A pooler in *folder*, in front of *server*; few server connections, so that sessions really are shared."""

    def __init__(self, folder: Path | str, server: PrivatePostgres) -> None:
        program = find_program("pgbouncer")
        if program is None:
            raise PostgresServerError("these tests need pgbouncer and found none; install it (apt install pgbouncer)")
        self._program = program
        self._server = server
        self._folder = Path(folder)
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._restart_thread: threading.Thread | None = None
        self._should_run = threading.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def dsn(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self._port}/{database}"

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        text = _CONFIGURATION.format(server=self._server.port, port=self._port, folder=self._folder)
        (self._folder / "pgbouncer.ini").write_text(text, encoding="utf-8")
        if user := self._server.get_user_options():
            os.chown(self._folder, user["user"], user["group"])
        self._process = self._launch()
        self._wait_until_answering(self._process)
        self._should_run.set()
        self._restart_thread = threading.Thread(
            target=self._restart_on_exit, args=(self._process,), name="pgbouncer-keeper", daemon=True
        )
        self._restart_thread.start()

    def stop(self) -> None:
        self._should_run.clear()
        if self._process is not None:
            self._process.kill()
        if self._restart_thread is not None:
            self._restart_thread.join()
        self._process = self._restart_thread = None

    def _launch(self) -> subprocess.Popen[bytes]:
        command = self._server.in_release([self._program, str(self._folder / "pgbouncer.ini")])
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._server.get_process_options()
        )

    def _restart_on_exit(self, process: subprocess.Popen[bytes]) -> None:
        while True:
            code = process.wait()
            if not self._should_run.is_set():
                return
            DEATHS.append(f"pgbouncer ended by itself with {code}: {self._read_last_log_line()}")
            process = self._process = self._launch()
            if not self._should_run.is_set():
                process.kill()  # stop() may have missed the new one

    def _read_last_log_line(self) -> str:
        try:
            lines = (self._folder / "pgbouncer.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "it left no log"
        return next((line for line in reversed(lines) if "FATAL" in line), lines[-1] if lines else "nothing")

    def _wait_until_answering(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
        while True:
            try:
                psycopg.connect(self.dsn("postgres"), connect_timeout=2).close()
            except psycopg.OperationalError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise PostgresServerError(f"pgbouncer did not start; see {self._folder}/pgbouncer.log") from None
                time.sleep(0.05)
            else:
                return
