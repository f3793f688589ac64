"""PrivateRedis: a private Redis server that a test may stop, kill and cut off; a cluster of three; and sentinels.

``ERGON_REDIS`` selects the server: ``redis`` (the default) or ``valkey``, each of the release that ``ERGON_SERVERS``
selects.
"""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import redis

from ergon_framework.facts.service.tls import TlsFiles
from tests.servers import releases
from tests.servers.packets import PacketDrop
from tests.servers.postgres import free_port

_SERVER_TIMEOUT_SECONDS = 30.0
#: Settings that lose no confirmed write.
DURABLE_SETTINGS = {"appendonly": "yes", "appendfsync": "always"}


#: The servers that speak the protocol, by the prefix of their programs.
KINDS = ("redis", "valkey")


class RedisServerError(RuntimeError):
    """The private server is missing, or does not do what it should."""


def find_program(part: str = "server") -> str:
    """Return the path of the selected server's program: its ``server``, or its ``cli``."""
    kind = os.environ.get("ERGON_REDIS", "redis")
    if kind not in KINDS:
        raise RedisServerError(f"ERGON_REDIS is {kind!r}: set one of {', '.join(KINDS)}")
    name = f"{kind}-{part}"
    program = releases.find_program(name)
    if program is None:
        raise RedisServerError(
            f"these tests need {name}, and the selected release has none: install it "
            f"(Debian: apt install {kind}-server), or select another release with ERGON_SERVERS"
        )
    return program


class PrivateRedis:
    """A server in *folder*, with its own port and no password unless *settings* have one; *tls* are its certificate."""

    def __init__(
        self,
        folder: Path | str,
        *,
        settings: Mapping[str, str] | None = None,
        port: int | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.port = port or free_port()
        self._tls = tls
        self.settings: dict[str, str] = {**DURABLE_SETTINGS, "save": "", "loglevel": "warning", **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._packet_drop = PacketDrop(self.port)

    @property
    def url(self) -> str:
        secret = self.settings.get("requirepass")
        return f"redis://{f':{secret}@' if secret else ''}127.0.0.1:{self.port}/0"

    @property
    def log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def client(self) -> redis.Redis:
        """Open a separate client; the test closes it."""
        return redis.Redis.from_url(self.url)

    def spawn(self) -> None:
        """Start it with its data; it may still be loading that."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {"bind": "127.0.0.1", "dir": str(self.folder), **self._port_settings, **self.settings}
        options = [part for name, value in settings.items() for part in (f"--{name}", value)]
        command = [find_program(), *options]
        with (self.folder / "server.log").open("ab") as log:
            command = releases.in_release(command)
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    @property
    def _port_settings(self) -> dict[str, str]:
        if self._tls is None:
            return {"port": str(self.port)}
        return {
            "port": "0",
            "tls-port": str(self.port),
            "tls-cert-file": str(self._tls.certificate),
            "tls-key-file": str(self._tls.key),
            "tls-ca-cert-file": str(self._tls.authorities),
            "tls-auth-clients": "no",
        }

    def start(self) -> None:
        """Start it with its data, and wait until it answers."""
        if self._process is not None and self._process.poll() is None:
            return
        self.spawn()
        deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
        while not self._is_answering():
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                log_tail = self.log[-2000:]
                self.kill()
                raise RedisServerError(f"the server did not start: {log_tail}")
            time.sleep(0.01)

    def _is_answering(self) -> bool:
        try:
            with self._open_socket() as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64)[:5] in (b"+PONG", b"-NOAU")
        except OSError:
            return False

    def _open_socket(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=1)
        if self._tls is None:
            return connection
        # The certificate may be one that clients refuse.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context.wrap_socket(connection)

    def stop(self) -> None:
        """Stop it cleanly; its data stays."""
        self._terminate(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL it."""
        self._terminate(signal.SIGKILL)

    def _terminate(self, signal_number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal_number)
        try:
            self._process.wait(_SERVER_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_SERVER_TIMEOUT_SECONDS)
        self._process = None

    def pause(self) -> None:
        """Stop the process: connections stay open and nothing is answered."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def partition_network(self) -> None:
        """Drop every packet to and from it; connections stay open."""
        self._packet_drop.partition_network()

    def heal_network(self) -> None:
        self._packet_drop.heal_network()


class PrivateCluster:
    """Three nodes, each with a third of the slots and no replica."""

    def __init__(self, folder: Path | str, *, nodes: int = 3) -> None:
        settings = {"cluster-enabled": "yes", "cluster-node-timeout": "2000"}
        self.nodes = [
            # 10,000 above a node's port, where its bus would be, the kernel takes ports for clients.
            PrivateRedis(Path(folder) / str(number), settings={**settings, "cluster-port": str(free_port())})
            for number in range(nodes)
        ]

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        addresses = [f"127.0.0.1:{node.port}" for node in self.nodes]
        completed = subprocess.run(
            releases.in_release([find_program("cli"), "--cluster", "create", *addresses, "--cluster-yes"]),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if completed.returncode != 0:
            raise RedisServerError(f"the cluster was not made: {completed.stdout[-1000:]}{completed.stderr[-1000:]}")
        deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
        while not all(self._is_ready(node) for node in self.nodes):
            if time.monotonic() > deadline:
                raise RedisServerError("the nodes of the cluster do not agree")
            time.sleep(0.05)

    @staticmethod
    def _is_ready(node: PrivateRedis) -> bool:
        with node.client() as client:
            cluster_info: dict[str, str] = client.execute_command("CLUSTER INFO")
            return cluster_info["cluster_state"] == "ok"

    def stop(self) -> None:
        for node in self.nodes:
            node.kill()


class PrivateSentinels:
    """A primary and a replica of it, which sentinels watch; a failover takes about a second."""

    service = "orders"

    def __init__(
        self,
        folder: Path | str,
        *,
        sentinels: int = 3,
        settings: Mapping[str, str] | None = None,
        replica_settings: Mapping[str, str] | None = None,
    ) -> None:
        folder = Path(folder)
        self.primary = PrivateRedis(folder / "primary", settings=settings)
        primary = f"127.0.0.1 {self.primary.port}"
        self.replica = PrivateRedis(
            folder / "replica", settings={**(settings or {}), "replicaof": primary, **(replica_settings or {})}
        )
        self.sentinels = [
            _Sentinel(folder / f"sentinel-{number}", self.service, primary, quorum=sentinels // 2 + 1)
            for number in range(sentinels)
        ]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{self.service}/0?socket_timeout=2&socket_connect_timeout=2"

    def start(self) -> None:
        """Start all, and wait until the replica follows and each sentinel knows the others."""
        for server in (self.primary, self.replica):
            server.start()
        _wait_until(self._is_replicated, "the replica follows the primary")
        for sentinel in self.sentinels:
            sentinel.start()
        for sentinel in self.sentinels:
            _wait_until(lambda one=sentinel: one.is_ready(len(self.sentinels)), "the sentinels know each other")

    def _is_replicated(self) -> bool:
        with self.primary.client() as client:
            role, _, replicas = client.execute_command("ROLE")
            return role == b"master" and len(replicas) == 1

    def wait_for_replication(self) -> None:
        """Wait until the replica has everything that the primary has confirmed."""
        with self.primary.client() as client:
            assert client.wait(1, 20_000) == 1

    def stop(self) -> None:
        for process in (*self.sentinels, self.primary, self.replica):
            process.kill()


class _Sentinel:
    """One sentinel process."""

    def __init__(self, folder: Path, service: str, primary: str, *, quorum: int) -> None:
        self.folder = folder
        self.port = free_port()
        self._service = service
        self._process: subprocess.Popen[bytes] | None = None
        self._settings = f"""
port {self.port}
bind 127.0.0.1
dir {folder}
sentinel monitor {service} {primary} {quorum}
sentinel down-after-milliseconds {service} 500
sentinel failover-timeout {service} 3000
"""

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port)

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "sentinel.conf"
        path.write_text(self._settings, encoding="utf-8")
        command = releases.in_release([find_program(), str(path), "--sentinel"])
        with (self.folder / "sentinel.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def is_ready(self, sentinel_count: int) -> bool:
        try:
            with self.client() as client:
                replicas = client.execute_command("SENTINEL", "REPLICAS", self._service)
                others = client.execute_command("SENTINEL", "SENTINELS", self._service)
                return len(replicas) == 1 and len(others) == sentinel_count - 1
        except redis.RedisError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(_SERVER_TIMEOUT_SECONDS)
            self._process = None


def _wait_until(condition: Callable[[], object], description: str) -> None:
    deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise RedisServerError(f"{description}: not within {_SERVER_TIMEOUT_SECONDS:g} s")
        time.sleep(0.02)
