"""PrivateRabbitMQ: a RabbitMQ server of a test's own, which may be stopped, killed and cut off."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import amqp

from tests.servers.packets import PacketDrop
from tests.servers.postgres import free_port

_PATIENCE = 90.0
#: Where one that is already running is looked for, and what its packages open to everybody on this machine.
RUNNING = "amqp://guest:guest@127.0.0.1:5672//"


class RabbitMQServerError(RuntimeError):
    """The private server is missing, or does not do what it was told."""


def find_binaries() -> Path:
    """The folder of RabbitMQ's own scripts; those on the PATH often insist on a user and a place."""
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin"), reverse=True)
    if on_path := shutil.which("rabbitmq-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        found.append(Path(on_path).resolve().parent)
    for folder in found:
        if (folder / "rabbitmq-server").exists():
            return folder
    raise RabbitMQServerError(
        "these tests need a RabbitMQ server's programs and found none in /usr/lib/rabbitmq or on the PATH; install the "
        "server (Debian: apt install rabbitmq-server)"
    )


def answers(url: str) -> bool:
    """Whether a server accepts connections at *url*, with its user."""
    place = url.removeprefix("amqp://guest:guest@").rstrip("/")
    line = amqp.Connection(place, connect_timeout=5)
    try:
        line.connect()
    except OSError:
        return False
    else:
        return True
    finally:
        line.close()


class PrivateRabbitMQ:
    """A server in *folder*, with its own node name and ports, and the user ``guest``.

    It runs as the tests' own user. The port mapper that every Erlang node of a machine shares (epmd) gets a port of
    its own too, and is stopped with the server.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.port = free_port()
        self._script = find_binaries() / "rabbitmq-server"
        self._process: subprocess.Popen[bytes] | None = None
        self._epmd: subprocess.Popen[bytes] | None = None
        self._line = PacketDrop(self.port)
        self._log = self.folder / "server.log"
        self._env = {
            **os.environ,
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(free_port()),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"ergon-{self.port}@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "none.conf"),
            # Idle schedulers that spin take the processor from the tests.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none +S 2:2",
        }

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def start(self) -> None:
        """Start it, unless it runs, and wait until it answers."""
        if self._process is not None and self._process.poll() is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "plugins").write_text("[].", encoding="ascii")
        self._start_epmd()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(self._script)], stdout=log, stderr=log, env=self._env, cwd=self.folder, start_new_session=True
            )
        deadline = time.monotonic() + _PATIENCE
        while not answers(self.url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                told = self.log[-2000:]
                self.kill()
                raise RabbitMQServerError(f"the server did not start: {told}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop the server in good order; what it keeps stays."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the server, and the port mapper that came with it."""
        self._end(signal.SIGKILL)
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(_PATIENCE)
            self._epmd = None

    def cut(self) -> None:
        """Drop every packet from and to the server; connections stay open and hear nothing."""
        self._line.cut()

    def mend(self) -> None:
        """Undo ``cut``."""
        self._line.mend()

    def control(self, *words: str) -> str:
        """What ``rabbitmqctl`` says; it takes a second or two."""
        command = [str(self._script.with_name("rabbitmqctl")), "-q", "-n", self._env["RABBITMQ_NODENAME"], *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self._env, timeout=_PATIENCE)
        if done.returncode != 0:
            raise RabbitMQServerError(f"rabbitmqctl {words[0]} failed: {done.stderr[-500:]}")
        return done.stdout

    def restart(self, *, crash: bool = False) -> None:
        """Stop it, or crash it, and start it again with what it kept."""
        self._end(signal.SIGKILL if crash else signal.SIGTERM)
        self.start()

    def _start_epmd(self) -> None:
        if self._epmd is not None:
            return
        program = shutil.which("epmd") or next(map(str, Path("/usr/lib/erlang").glob("erts-*/bin/epmd")), None)
        if program is None:
            raise RabbitMQServerError("Erlang's epmd is missing; it comes with the server's package")
        self._epmd = subprocess.Popen(
            [program, "-port", self._env["ERL_EPMD_PORT"], "-address", "127.0.0.1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _end(self, how: signal.Signals) -> None:
        if self._process is None:
            return
        # The script, the node below it and its helpers are a group of their own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, how)
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_PATIENCE)
        self._process = None
