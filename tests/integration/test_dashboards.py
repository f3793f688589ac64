"""Every query of every dashboard and alert, asked of a real Prometheus that looks at real workers under load."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import time
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event, Thread

import pytest

from ergon_framework import Transaction
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.executor.jobs.client import JobClient
from ergon_framework.facts.model import Envelope, Fact
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.client import BoundaryClient
from tests.integration.running import ERGON
from tests.servers.certificates import Authority
from tests.servers.postgres import free_port
from tests.servers.prometheus import PrivatePrometheus
from tests.unit.tools.queries import ALERTS, alerts, boards, panels, selectors

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("observed")
STUBBORN = str(ROOT / "tests" / "unit" / "executor" / "stubborn.py")
PATIENCE = 90.0

#: What no healthy system shows: an artifact that a fact names and that is gone, and a replica that stands still.
NEVER = {
    "ergon_artifacts_lost_total",
    'ergon_replica_status{ergon_fact_status!~"starting|following|stopped"}',
}


class World:
    """Workers of every kind, in processes of their own, and the load that keeps them busy."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder, self.dsn = folder, dsn
        self.ports = [free_port() for _ in range(4)]
        self._over = Event()
        self._stack = ExitStack()
        self._processes = []
        shutil.copytree(PROGRAMS, folder, dirs_exist_ok=True)
        (folder / "ergon.toml").write_text("[run.metrics]\ndepth = 0.5\n[run.probes]\ninterval = 0.5\n")
        self.authority = Authority(folder)
        server = self.authority.issue("server")
        self.plant = self.authority.issue("plant", zones=["plant"])
        self.listen = f"127.0.0.1:{free_port()}"
        self.commands = (
            ("run", "charging:charge", "--processes", "2", "--log-level", "error"),
            ("run", "jobs:orchestrator", "--log-level", "error"),
            ("facts", "replicate", "zones:parts"),
            (
                *("facts", "serve", "--zone", "plant", "--listen", self.listen, "--store", "memory", "--accept-loss"),
                *("--max-facts", "1000000", "--tls-cert", str(server.certificate), "--tls-key", str(server.key)),
                *("--tls-ca", str(self.authority.path)),
            ),
        )

    def __enter__(self):
        environment = {**os.environ, "ERGON_POSTGRES__DSN": self.dsn, "STUBBORN": STUBBORN}
        self._stack.callback(self._end)
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
        for work in (self._order, self._submit, self._append):
            thread = Thread(target=work, daemon=True)
            thread.start()
            self._stack.callback(thread.join, PATIENCE)
        self._stack.callback(self._over.set)
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _end(self):
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def said(self):
        return "\n".join(path.read_text(encoding="utf-8")[-1500:] for path in sorted(self.folder.glob("log-*")))

    def _order(self):
        with closing(PostgresQueue("orders", dsn=self.dsn)) as queue:
            for number in itertools.count():
                now = time.time()
                orders = [Transaction(f"order-{number}-{n}", {"number": n}, created_at=now) for n in range(10)]
                queue.dispatch([*orders, Transaction(f"late-{number}", {}, created_at=now, expires_at=now - 1)])
                if self._over.wait(0.3):
                    return

    def _submit(self):
        with JobClient(self.dsn) as jobs:
            for number in itertools.count():
                jobs.submit("crash" if number == 3 else "echo", *([] if number == 3 else [number]))
                if self._over.wait(0.3):
                    return

    def _append(self):
        """Facts for the service, from the moment on that it is there."""
        address = Address(host=self.listen, files=self.plant)
        for number in itertools.count():
            try:
                with BoundaryClient(address) as client:
                    while not self._over.wait(0.2):
                        envelope = Envelope(
                            message_id=f"s-{time.time_ns()}", from_zone="plant", to_zone="hub", produced_at_unix_ms=0
                        )
                        client.append_fact(envelope, Fact.of("order", "is", number))
                return
            except Exception:
                if self._over.wait(0.2):
                    return


@pytest.fixture
def observed(tmp_path, databases):
    """A Prometheus that looks at the world, and the world."""
    dsn = databases.borrow()
    folder = tmp_path / "world"
    with World(folder, dsn) as world:
        server = PrivatePrometheus(folder / "prometheus", [f"127.0.0.1:{port}" for port in world.ports], rules=ALERTS)
        try:
            server.start()
            yield server, world
        finally:
            server.stop()
    databases.give_back(dsn)


def unanswered(server, queries):
    """What of *queries* has had no data, each asked again and again until it has."""
    waiting, end = dict(queries), time.monotonic() + PATIENCE
    while waiting and time.monotonic() < end:
        for name, expression in list(waiting.items()):
            if any(one["value"][1] != "NaN" for one in server.ask(expression)):
                del waiting[name]
        if waiting:
            time.sleep(0.2)
    return waiting


@pytest.mark.spec("RUN-04")
def test_every_query_of_every_dashboard_and_alert_finds_data_of_workers_under_load(observed):
    server, world = observed
    queries = {(name, expression): expression for name, expression in panels()}
    for board in boards().values():
        for variable in board["templating"]["list"][1:]:
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
            queries[board["title"], variable["name"]] = f'{metric}{{{label}!=""}}'
    looked_at = {selector for rule in alerts() for selector in selectors(rule["expr"])}
    assert looked_at >= NEVER
    queries |= {("alerts", one): one for one in looked_at - NEVER}
    assert unanswered(server, queries) == {}, world.said()
    rules = server.rules()
    assert len(rules) == len(alerts())
    assert [rule for rule in rules if rule.get("lastError")] == []
