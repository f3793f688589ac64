"""PrivateRabbitMQ: a private RabbitMQ server that a test may stop, kill and cut off."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import amqp

from tests.servers import releases
from tests.servers.packets import PacketDrop
from tests.servers.postgres import free_port

_SERVER_TIMEOUT_SECONDS = 90.0
#: The options of Erlang, as the server's own script sets them.
_ERLANG_OPTIONS = (
    *("-noshell", "-noinput", "-s", "rabbit", "boot", "-boot", "start_sasl", "+W", "w"),
    # Idle schedulers that spin take the processor from the tests.
    *("+sbwt", "none", "+sbwtdcpu", "none", "+sbwtdio", "none", "+S", "2:2"),
    *("-syslog", "logger", "[]", "-syslog", "syslog_error_logger", "false"),
    *("-kernel", "prevent_overlapping_partitions", "false"),
)
#: The default address of a running server, which its packages open to every user of this machine.
DEFAULT_URL = "amqp://guest:guest@127.0.0.1:5672//"


class RabbitMQServerError(RuntimeError):
    """The private server is missing, or does not do what it should."""


def find_binaries() -> Path:
    """Return the folder of RabbitMQ's own scripts; those on the PATH often require a certain user and folder."""
    folders = sorted(releases.find_folders("/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin"), reverse=True)
    if (root := releases.find_root()) is not None:
        if folders:
            return folders[0]
        raise RabbitMQServerError(f"the release in {root} has no RabbitMQ server")
    if on_path := shutil.which("rabbitmq-server", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        folders.append(Path(on_path).resolve().parent)
    for folder in folders:
        if (folder / "rabbitmq-server").exists():
            return folder
    raise RabbitMQServerError(
        "these tests need a RabbitMQ server's programs and found none in /usr/lib/rabbitmq or on the PATH; install the "
        "server (Debian: apt install rabbitmq-server)"
    )


def is_answering(url: str) -> bool:
    """Tell whether a server accepts connections at *url*, with its user."""
    address = url.removeprefix("amqp://guest:guest@").rstrip("/")
    connection = amqp.Connection(address, connect_timeout=5)
    try:
        connection.connect()
    except OSError:
        return False
    else:
        return True
    finally:
        connection.close()


class PrivateRabbitMQ:
    """A server in *folder*, with its own node name and ports, and the user ``guest``.

    It runs as the tests' own user. The port mapper that every Erlang node of a machine shares (epmd) gets its own port
    too, and is stopped with the server. The node is started without its usual script: that would stay as its parent and
    hide the exit of the node, and takes a third of the time that a start needs. *settings* are of its application
    ``rabbit``.
    """

    def __init__(self, folder: Path | str, *, settings: Mapping[str, int] | None = None) -> None:
        self.folder = Path(folder)
        self._settings = [part for name, value in (settings or {}).items() for part in ("-rabbit", name, str(value))]
        self.port = free_port()
        #: The port of TLS on every loopback address; 0 without TLS.
        self.tls_port = 0
        self._scripts = find_binaries()
        self._process: subprocess.Popen[bytes] | None = None
        self._epmd: subprocess.Popen[bytes] | None = None
        self._packet_drop = PacketDrop(self.port)
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
        """Its output since the start."""
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
                releases.in_release([self._find_erlang_program("erl"), *_ERLANG_OPTIONS, *self._settings]),
                stdout=log,
                stderr=log,
                env=self._env,
                cwd=self.folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
        while not is_answering(self.url):
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_tail = self.log[-4000:]
                self.kill()
                raise RabbitMQServerError(f"the server did not start: {log_tail}")
            time.sleep(0.05)

    def enable_tls(self, certificate: Path, key: Path) -> None:
        """Listen with TLS too, from the next start on."""
        self.tls_port = self.tls_port or free_port()
        options = f'[{{certfile,"{certificate}"}},{{keyfile,"{key}"}}]'
        listener = f'{{ssl_listeners,[{{"0.0.0.0",{self.tls_port}}}]}},{{ssl_options,{options}}}'
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "advanced.config"
        path.write_text(f"[{{rabbit,[{listener}]}}].", encoding="ascii")
        self._env["RABBITMQ_ADVANCED_CONFIG_FILE"] = str(path)

    def stop(self) -> None:
        """Stop the server cleanly; its data stays."""
        self._terminate(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the server and its port mapper."""
        self._terminate(signal.SIGKILL)
        if self._epmd is not None:
            self._epmd.kill()
            self._epmd.wait(_SERVER_TIMEOUT_SECONDS)
            self._epmd = None

    def partition_network(self) -> None:
        """Drop every packet from and to the server; connections stay open and receive nothing."""
        self._packet_drop.partition_network()

    def heal_network(self) -> None:
        """Undo ``partition_network``."""
        self._packet_drop.heal_network()

    def run_rabbitmqctl(self, *arguments: str) -> str:
        """Return the output of ``rabbitmqctl``; it takes a second or two."""
        program = [str(self._scripts / "rabbitmqctl"), "-q", "-n", self._env["RABBITMQ_NODENAME"]]
        command = releases.in_release([*program, *arguments])
        completed = subprocess.run(
            command, capture_output=True, text=True, check=False, env=self._env, timeout=_SERVER_TIMEOUT_SECONDS
        )
        if completed.returncode != 0:
            raise RabbitMQServerError(f"rabbitmqctl {arguments[0]} failed: {completed.stderr[-500:]}")
        return completed.stdout

    def restart(self, *, crash: bool = False) -> None:
        """Stop it, or crash it, and restart it with its data."""
        self._terminate(signal.SIGKILL if crash else signal.SIGTERM)
        self.start()

    def _start_epmd(self) -> None:
        if self._epmd is not None and self._epmd.poll() is None:
            return
        self._epmd = subprocess.Popen(
            releases.in_release(
                [self._find_erlang_program("epmd"), "-port", self._env["ERL_EPMD_PORT"], "-address", "127.0.0.1"]
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # A node without a port mapper starts one itself, which no test would stop.
        deadline = time.monotonic() + _SERVER_TIMEOUT_SECONDS
        while not _is_listening(int(self._env["ERL_EPMD_PORT"])):
            if self._epmd.poll() is not None or time.monotonic() > deadline:
                raise RabbitMQServerError("Erlang's port mapper, epmd, did not start")
            time.sleep(0.01)

    @staticmethod
    def _find_erlang_program(name: str) -> str:
        """Return the path of one of Erlang's own programs."""
        folders = releases.find_folders(f"/usr/lib/erlang/erts-*/bin/{name}")
        program = releases.find_program(name) or next(map(str, folders), None)
        if program is None:
            raise RabbitMQServerError(f"Erlang's {name} is missing; it comes with the server's package")
        return program

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


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
