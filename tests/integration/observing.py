"""A test system to observe: workers of every kind in their own processes, and the load that keeps them busy."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event, Thread

from ergon_framework import Transaction
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.facts.model import Envelope, Fact
from ergon_framework.facts.service.channel import ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.jobs.client import JobClient
from tests.integration.running import ERGON
from tests.servers.certificates import CertificateAuthority
from tests.servers.postgres import free_port

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("observed")
EXECUTOR_PROGRAM = str(ROOT / "tests" / "unit" / "executors" / "stubborn.py")
TIMEOUT_SECONDS = 90.0


class ObservedSystem:
    """Workers of every kind in their own processes, and the load that keeps them busy."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder, self.dsn = folder, dsn
        self.ports = [free_port() for _ in range(4)]
        self._finished = Event()
        self._stack = ExitStack()
        self._processes = []
        shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
        (folder / "ergon.toml").write_text("[run.metrics]\ndepth = 0.5\n[run.probes]\ninterval = 0.5\n")
        self.authority = CertificateAuthority(folder)
        server = self.authority.issue("server")
        self.plant = self.authority.issue("plant", zones=["plant"])
        self.listen_address = f"127.0.0.1:{free_port()}"
        self.commands = (
            ("run", "charging:charge", "--processes", "2", "--log-level", "error"),
            ("run", "jobs:orchestrator", "--log-level", "error"),
            ("facts", "replicate", "zones:parts"),
            (
                *(
                    "facts",
                    "serve",
                    "--zone",
                    "plant",
                    "--listen",
                    self.listen_address,
                    "--store",
                    "memory",
                    "--accept-loss",
                ),
                *("--max-facts", "1000000", "--tls-cert", str(server.certificate), "--tls-key", str(server.key)),
                *("--tls-ca", str(self.authority.path)),
            ),
        )

    def __enter__(self):
        environment = {**os.environ, "ERGON_POSTGRES__DSN": self.dsn, "STUBBORN": EXECUTOR_PROGRAM}
        self._stack.callback(self._stop_processes)
        for number, (port, command) in enumerate(zip(self.ports, self.commands, strict=True)):
            log = self._stack.enter_context((self.folder / f"log-{number}").open("wb"))
            process = subprocess.Popen(
                [*ERGON, *command, "--probe-port", str(port)],
                cwd=self.folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            self._processes.append(process)
        for load in (self._send_orders, self._submit_jobs, self._append_facts):
            thread = Thread(target=load, daemon=True)
            thread.start()
            self._stack.callback(thread.join, TIMEOUT_SECONDS)
        self._stack.callback(self._finished.set)
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _stop_processes(self):
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def read_logs(self):
        return "\n".join(path.read_text(encoding="utf-8")[-1500:] for path in sorted(self.folder.glob("log-*")))

    def _send_orders(self):
        with closing(PostgresQueue("orders", dsn=self.dsn)) as queue:
            for number in itertools.count():
                now = time.time()
                orders = [Transaction({"number": n}, id=f"order-{number}-{n}", created_at=now) for n in range(10)]
                queue.dispatch([*orders, Transaction({}, id=f"late-{number}", created_at=now, expires_at=now - 1)])
                if self._finished.wait(0.3):
                    return

    def _submit_jobs(self):
        with JobClient(self.dsn) as jobs:
            for number in itertools.count():
                jobs.submit("crash" if number == 3 else "echo", *([] if number == 3 else [number]))
                if self._finished.wait(0.3):
                    return

    def _append_facts(self):
        """Append facts for the service as soon as it is running."""
        address = ServiceAddress(host=self.listen_address, files=self.plant)
        for number in itertools.count():
            try:
                with BoundaryClient(address) as client:
                    while not self._finished.wait(0.2):
                        envelope = Envelope(
                            message_id=f"s-{time.time_ns()}", from_zone="plant", to_zone="hub", produced_at_unix_ms=0
                        )
                        client.append_fact(envelope, Fact.create("order", "is", number))
                return
            except Exception:
                if self._finished.wait(0.2):
                    return
