"""PrivateRabbitMQ: a RabbitMQ server of a test's own, which may be stopped, killed and cut off."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import amqp

from tests.servers.packets import PacketDrop
from tests.servers.postgres import free_port

_PATIENCE = 90.0
#: What Erlang is told, as the server's own script does it.
_NODE = (
    *("-noshell", "-noinput", "-s", "rabbit", "boot", "-boot", "start_sasl", "+W", "w"),
    # Idle schedulers that spin take the processor from the tests.
    *("+sbwt", "none", "+sbwtdcpu", "none", "+sbwtdio", "none", "+S", "2:2"),
    *("-syslog", "logger", "[]", "-syslog", "syslog_error_logger", "false"),
    *("-kernel", "prevent_overlapping_partitions", "false"),
)
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
    its own too, and is stopped with the server. The node is started without the script that usually does: that stays
    above it, so that nobody sees when the node itself has ended, and takes a third of the time that a start needs.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.port = free_port()
        self._scripts = find_binaries()
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
            "RABBITMQ_HOME": str(self._scripts.parent),
            "RABBITMQ_PLUGINS_DIR": str(self._scripts.parent / "plugins"),
            "ERL_LIBS": str(self._scripts.parent / "plugins"),
        }

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    @property
    def log(self) -> str:
        """What it said while it started, and since."""
        logs = [self._log, *sorted((self.folder / "log").glob("*.log"))]
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs if log.exists())

    def start(self) -> None:
        """Start it, unless it runs, and wait until it answers."""
        if self._process is not None and self._process.poll() is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "plugins").write_text("[].", encoding="ascii")
        self._start_epmd()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._erlang("erl"), *_NODE],
                stdout=log,
                stderr=log,
                env=self._env,
                cwd=self.folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + _PATIENCE
        while not answers(self.url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                told = self.log[-4000:]
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
        command = [str(self._scripts / "rabbitmqctl"), "-q", "-n", self._env["RABBITMQ_NODENAME"], *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self._env, timeout=_PATIENCE)
        if done.returncode != 0:
            raise RabbitMQServerError(f"rabbitmqctl {words[0]} failed: {done.stderr[-500:]}")
        return done.stdout

    def restart(self, *, crash: bool = False) -> None:
        """Stop it, or crash it, and start it again with what it kept."""
        self._end(signal.SIGKILL if crash else signal.SIGTERM)
        self.start()

    def _start_epmd(self) -> None:
        if self._epmd is not None and self._epmd.poll() is None:
            return
        self._epmd = subprocess.Popen(
            [self._erlang("epmd"), "-port", self._env["ERL_EPMD_PORT"], "-address", "127.0.0.1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # A node that finds none starts one of its own, which nobody would end.
        end = time.monotonic() + _PATIENCE
        while not _listens(int(self._env["ERL_EPMD_PORT"])):
            if self._epmd.poll() is not None or time.monotonic() > end:
                raise RabbitMQServerError("Erlang's port mapper, epmd, did not start")
            time.sleep(0.01)

    @staticmethod
    def _erlang(name: str) -> str:
        """One of Erlang's own programs."""
        program = shutil.which(name) or next(map(str, Path("/usr/lib/erlang").glob(f"erts-*/bin/{name}")), None)
        if program is None:
            raise RabbitMQServerError(f"Erlang's {name} is missing; it comes with the server's package")
        return program

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


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
