"""PrivateRedis: a private Redis server that a test may stop, kill and cut off; and a cluster of three.

``ERGON_REDIS`` selects the server: ``redis`` (the default) or ``valkey``, each of the release that ``ERGON_SERVERS``
selects.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import redis

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
    """A server in *folder*, with its own port and no password unless *settings* have one."""

    def __init__(
        self, folder: Path | str, *, settings: Mapping[str, str] | None = None, port: int | None = None
    ) -> None:
        self.folder = Path(folder)
        self.port = port or free_port()
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
        options = [part for name, value in self.settings.items() for part in (f"--{name}", value)]
        command = [find_program(), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder), *options]
        with (self.folder / "server.log").open("ab") as log:
            command = releases.in_release(command)
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

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
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(64)[:5] in (b"+PONG", b"-NOAU")
        except OSError:
            return False

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
