"""PrivatePostgres: a private PostgreSQL server that a test may stop, kill and cut off."""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import psycopg
from psycopg import sql

from tests.servers.packets import PacketDrop
from tests.servers.releases import find_folders, find_root, in_release

_STOP_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_SERVER_TIMEOUT_SECONDS = 60.0


class PostgresServerError(RuntimeError):
    """The private server is missing, or does not do what it should."""


def find_binaries() -> Path:
    """Return the folder of PostgreSQL's server programs, of the newest installed version."""
    folders = [path.parent for path in find_folders("/usr/lib/postgresql/*/bin/initdb")]
    folders.sort(key=lambda path: [int(part) for part in path.parent.name.split(".") if part.isdigit()], reverse=True)
    if find_root() is not None:
        if folders:
            return folders[0]
        raise PostgresServerError(f"the release in {find_root()} has no PostgreSQL server")
    if config := shutil.which("pg_config"):
        answer = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        folders.append(Path(answer.stdout.strip()))
    if on_path := shutil.which("initdb"):
        folders.append(Path(on_path).resolve().parent)
    for folder in folders:
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise PostgresServerError(
        "these tests need a PostgreSQL server's programs (initdb, postgres) and found none by pg_config, in "
        "/usr/lib/postgresql/*/bin or on the PATH; install the server (Debian: apt install postgresql)"
    )


def free_port() -> int:
    """Return a port without a listener, outside the range from which the kernel takes ports for clients.

    Otherwise a client that repeatedly tries to reach a stopped server would end up talking to itself.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    for _ in range(200):
        port = random.randrange(max(1024, min(15_000, low - 5_000)), low)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise PostgresServerError(f"found no free port below {low}")


def _list_children(parent: int) -> list[int]:
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name before the last bracket may contain anything, blanks included.
            if int(stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[1]) == parent:
                pids.append(int(stat.parent.name))
    return pids


def _is_running(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


class PrivatePostgres:
    """A server in *folder*, with its own port and socket; the superuser is ``postgres``, without a password.

    It runs as the OS user ``postgres`` when the tests run as root, which PostgreSQL refuses to be, and as the tests'
    own user otherwise. ``fsync=False`` makes it fast and unsuitable for every test of what a crash leaves behind.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        fsync: bool = True,
        settings: Mapping[str, str | int | float] | None = None,
        port: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.binaries = find_binaries()
        self.port = port or free_port()
        self._options: dict[str, Any] = {"fsync": fsync, "settings": settings}
        self._data = self.folder / "data"
        self._sockets = self.folder / "sockets"
        self._log = self.folder / "server.log"
        self._settings: dict[str, str | int | float] = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self._sockets),
            "max_connections": 200,
            "shared_buffers": "32MB",
            "fsync": "on" if fsync else "off",
            "log_min_messages": "warning",
            **(settings or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._packet_drop = PacketDrop(self.port)

    # -- status ---------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The postmaster's process id."""
        if self._process is None or self._process.poll() is not None:
            raise PostgresServerError(f"the server in {self.folder} is not running; start() it")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """The server's log so far."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def dsn(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def create_database(self, name: str, *, like: str = "template1") -> str:
        """Create a database, empty or as a copy of *like*; return its dsn.

        An existing database of that name is dropped: a rerun test starts from scratch, and so does a module whose tests
        reach one process in two portions.
        """
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(like))
            )
        return self.dsn(name)

    def require_passwords(self) -> None:
        """Require a password over TCP from every user but ``postgres``."""
        lines = ["local all all trust", "host replication postgres 127.0.0.1/32 trust"]
        lines += ["host all postgres 127.0.0.1/32 trust", "host all all 127.0.0.1/32 scram-sha-256", ""]
        self._write_file("pg_hba.conf", "\n".join(lines).encode())
        self.reload()

    def use_certificate(self, certificate: Path, key: Path) -> None:
        """Accept TLS connections, as a server with *certificate* and *key*."""
        with psycopg.connect(self.dsn(), autocommit=True) as admin:
            for name, path in (("ssl_cert_file", certificate), ("ssl_key_file", key)):
                copy = self._write_file(f"{name}.pem", path.read_bytes())
                admin.execute(sql.SQL("alter system set {} = {}").format(sql.Identifier(name), str(copy)))
            admin.execute("alter system set ssl = on")
        self.reload()

    def reload(self) -> None:
        """Make the server read its settings and files again, and wait until new sessions have them."""
        with psycopg.connect(self.dsn(), autocommit=True) as admin:
            before = admin.execute("select pg_conf_load_time()").fetchone()
            admin.execute("select pg_reload_conf()")
            deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
            while admin.execute("select pg_conf_load_time()").fetchone() == before:
                if time.monotonic() > deadline:
                    raise PostgresServerError("the server did not read its settings again")
                time.sleep(0.005)

    def _write_file(self, name: str, content: bytes) -> Path:
        """Write a file into the data folder that only the server's user can read."""
        path = self._data / name
        path.write_bytes(content)
        path.chmod(0o600)
        if os.geteuid() == 0:
            account = self._get_account()
            os.chown(path, account.pw_uid, account.pw_gid)
        return path

    # -- start and stop ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, the first time with an empty cluster, and wait until it answers."""
        if self.is_running:
            return
        if not (self._data / "PG_VERSION").exists():
            self._create_cluster()
        command = [str(self.binaries / "postgres"), "-D", str(self._data), "-p", str(self.port)]
        for name, value in self._settings.items():
            command += ["-c", f"{name}={value}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self.in_release(command), stdout=log, stderr=log, start_new_session=True, **self.get_process_options()
            )
        self._wait_until_answering()

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop it: ``fast`` cleanly, ``immediate`` as after a crash."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(_STOP_SIGNALS[mode])
        try:
            self._process.wait(_SERVER_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise PostgresServerError(
                f"the server did not stop within {_SERVER_TIMEOUT_SECONDS:g} s and was killed"
            ) from None
        self._process = None

    def kill(self) -> None:
        """SIGKILL the postmaster and every child of it, and wait until all are gone."""
        if self._process is None:
            return
        postmaster = self._process.pid
        if self._process.poll() is None:
            # Frozen first, or it would start new children while the old ones are counted.
            self._process.send_signal(signal.SIGSTOP)
            child_pids = _list_children(postmaster)
            self._process.kill()
            for child_pid in child_pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child_pid, signal.SIGKILL)
            self._process.wait(_SERVER_TIMEOUT_SECONDS)
            deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
            while any(_is_running(child_pid) for child_pid in child_pids):
                if time.monotonic() > deadline:
                    raise PostgresServerError(f"children of postmaster {postmaster} survived SIGKILL")
                time.sleep(0.005)
        self._process = None

    def restart(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        self.stop(mode)
        self.start()

    # -- a standby ----------------------------------------------------------------------------------

    def create_standby(self, folder: Path | str, *, name: str, port: int | None = None) -> PrivatePostgres:
        """Copy this server into *folder* as a standby called *name*, and start it."""
        standby = PrivatePostgres(folder, port=port, **self._options)
        for path in (standby.folder, standby._data, standby._sockets):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.geteuid() == 0:
                account = self._get_account()
                os.chown(path, account.pw_uid, account.pw_gid)
        command = [str(self.binaries / "pg_basebackup"), "-D", str(standby._data), "-R", "-X", "stream", "-c", "fast"]
        command += ["-d", f"host=127.0.0.1 port={self.port} user=postgres application_name={name}"]
        completed = self._run(command)
        if completed.returncode != 0:
            raise PostgresServerError(f"pg_basebackup failed: {completed.stderr.strip()[-2000:]}")
        standby.start()
        return standby

    def promote(self) -> None:
        """Promote a standby to a primary, and wait until it is one."""
        with psycopg.connect(self.dsn(), autocommit=True) as connection:
            connection.execute("select pg_promote(true, 60)")

    def list_pids(self, kind: str) -> list[int]:
        """Return the children of the server whose title begins with *kind*, for instance ``walreceiver``."""
        pids = []
        for pid in _list_children(self.pid):
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
                pids += [pid] if title.startswith(f"postgres: {kind}") else []
        return pids

    # -- the network --------------------------------------------------------------------------------

    def partition_network(self) -> None:
        """Drop every packet from and to the server; connections stay open and receive nothing."""
        self._packet_drop.partition_network()

    def heal_network(self) -> None:
        """Undo ``partition_network``."""
        self._packet_drop.heal_network()

    # -- the operating system -------------------------------------------------------------------------

    def get_user_options(self) -> dict[str, Any]:
        """Return the options that start a program which refuses to run as root."""
        if os.geteuid() != 0:
            return {}
        account = self._get_account()
        return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def in_release(self, command: list[str]) -> list[str]:
        """Return *command* for the selected release, as a user whom PostgreSQL accepts."""
        user = self.get_user_options()
        return in_release(command, user=(user["user"], user["group"]) if user else None)

    def get_process_options(self) -> dict[str, Any]:
        """Return the options of the process that runs ``in_release``."""
        # Only root can change the root folder, so there the command itself changes the user.
        return {} if find_root() is not None else self.get_user_options()

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.in_release(command),
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
            **self.get_process_options(),
        )

    def _get_account(self) -> pwd.struct_passwd:
        try:
            return pwd.getpwnam("postgres")
        except KeyError:
            raise PostgresServerError(
                "the tests run as root and PostgreSQL refuses to: add a user `postgres` (the server's package does), "
                "or run the tests as a plain user"
            ) from None

    def _create_cluster(self) -> None:
        for folder in (self.folder, self._data, self._sockets):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.geteuid() == 0:
                account = self._get_account()
                os.chown(folder, account.pw_uid, account.pw_gid)
        command = [str(self.binaries / "initdb"), "-D", str(self._data), "-U", "postgres", "-A", "trust"]
        command += ["-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        completed = self._run(command)
        if completed.returncode != 0:
            raise PostgresServerError(
                f"initdb failed in {self._data}: {completed.stderr.strip()[-2000:]} (the user postgres must be able to "
                "reach the folder; pytest's tmp_path is closed to others when root owns it)"
            )

    def _wait_until_answering(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
        while True:
            try:
                psycopg.connect(self.dsn(), connect_timeout=5).close()
            except psycopg.OperationalError as error:
                if self._process.poll() is not None:
                    self._process = None
                    raise PostgresServerError(f"the server did not start: {self.log[-2000:]}") from error
                if time.monotonic() > deadline:
                    self.kill()
                    raise PostgresServerError(
                        f"no answer within {_SERVER_TIMEOUT_SECONDS:g} s: {error}; {self.log[-2000:]}"
                    ) from error
                time.sleep(0.02)
            else:
                return
