"""Outages of a provider and of the facts boundary, with the default settings: no dead letter, every order paid once.

While the bank answers 503, or hangs, orders arrive one a second, or there is a single one; while the facts boundary is
unavailable, orders arrive that are reported as facts. Each scenario has its own database and worker (``ergon run``),
and all run in parallel. The last line is JSON; exit code 1 where something was lost, doubled or dead-lettered.

    python tests/chaos/provider_outage.py --outage 60 --orders 60 --facts-outage 300
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from ergon_framework.connectors.postgres import PostgresQueue  # noqa: E402 - the tests are found by now
from ergon_framework.database.migrate import upgrade  # noqa: E402
from ergon_framework.facts.model import ZonePair  # noqa: E402
from ergon_framework.transaction import Transaction  # noqa: E402
from tests.servers.facts_host import Host  # noqa: E402
from tests.servers.postgres import PrivatePostgres  # noqa: E402

#: Source and destination of facts, as in outage_shop.
ZONES = ("Plant A", "Enterprise")
#: Seconds after the outage within which every order has to be paid.
RECOVERY_SECONDS = 240.0
ERGON = [sys.executable, "-c", "from ergon_framework.cli.main import main; main()"]


class BankServer(ThreadingHTTPServer):
    """Takes charges, by idempotency key; *mode* is ``up``, ``down`` (503) or ``hang``."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, mode: str) -> None:
        super().__init__(("127.0.0.1", 0), _BankHandler)
        self.mode = mode
        self.requests = 0
        self.paid: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.recovered = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def recover(self) -> None:
        self.mode = "up"
        self.recovered.set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client that timed out has closed its connection."""


class _BankHandler(BaseHTTPRequestHandler):
    server: BankServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        mode = self.server.mode
        with self.server.lock:
            self.server.requests += 1
            if mode == "up":
                self.server.paid[self.headers["Idempotency-Key"]] += 1
        if mode == "hang":
            self.server.recovered.wait()
            self.close_connection = True
            return
        self.send_response(200 if mode == "up" else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@dataclass(frozen=True)
class Scenario:
    name: str
    task: str
    mode: str
    orders: int
    outage: float


class OutageRun:
    """One scenario with its database, its worker and the service that is unavailable."""

    def __init__(self, scenario: Scenario, server: PrivatePostgres, folder: Path) -> None:
        self.scenario = scenario
        self.dsn = server.create_database(re.sub(r"\W", "_", scenario.name))
        upgrade(self.dsn)
        self.folder = folder / scenario.name
        self.folder.mkdir()
        self.bank = BankServer(scenario.mode) if scenario.task == "pay" else None
        self.host = Host(self.folder, zones=[ZONES[0]]) if scenario.task == "tell" else None
        self.queue = PostgresQueue("orders", dsn=self.dsn)
        self.worker: subprocess.Popen[bytes] | None = None
        self.facts_address = ""

    # -- the service that is unavailable ------------------------------------------------------------

    def start(self) -> None:
        env = {**os.environ, "ERGON_POSTGRES__DSN": self.dsn}
        if self.bank is not None:
            env["OUTAGE_BANK"] = self.bank.address
        else:
            assert self.host is not None
            self.facts_address = self.host.serve("facts")
            files = self.host.authority.issue("plant", zones=[ZONES[0]])
            settings = {
                "host": self.facts_address,
                "files": [str(files.certificate), str(files.key), str(files.authorities)],
            }
            env["OUTAGE_FACTS"] = json.dumps(settings)
            self.host.ask("stop", "facts", 0.0)
        command = [*ERGON, "run", f"tests.chaos.outage_shop:{self.scenario.task}", "--streaming", "--log-level", "info"]
        with (self.folder / "worker.log").open("wb") as log:
            self.worker = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)

    def recover(self) -> None:
        if self.bank is not None:
            self.bank.recover()
        else:
            assert self.host is not None
            self.host.serve("facts", listen=self.facts_address)

    def count_done(self) -> dict[str, int]:
        """Count how often each order was paid, or reported."""
        if self.bank is not None:
            with self.bank.lock:
                return dict(self.bank.paid)
        assert self.host is not None
        facts = self.host.call("facts", "fetch_facts", "outage", ZonePair(*ZONES), 10_000)
        return dict(Counter(fact.fact.subject for fact in facts))

    # -- what happens -------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        scenario = self.scenario
        self.start()
        started_at = time.monotonic()
        explanation = ""
        for number in range(scenario.orders):
            self._sleep_until(started_at + number * scenario.outage / max(scenario.orders, 60))
            self.queue.dispatch([Transaction({"amount": number}, id=f"order-{number}")])
        self._sleep_until(started_at + 0.9 * scenario.outage)
        explanation = self._explain("order-0")
        self._sleep_until(started_at + scenario.outage)
        paid_early = len(self.count_done())
        self.recover()
        recovery_start = time.monotonic()
        while len(self.count_done()) < scenario.orders and time.monotonic() < recovery_start + RECOVERY_SECONDS:
            time.sleep(0.2)
        recovery_seconds = time.monotonic() - recovery_start
        self._wait_until_settled()
        depth = self.queue.depth()
        paid = self.count_done()
        log = (self.folder / "worker.log").read_text(encoding="utf-8", errors="replace")
        return {
            "scenario": scenario.name,
            "outage_s": scenario.outage,
            "orders": scenario.orders,
            "paid": len(paid),
            "paid_more_than_once": sum(count > 1 for count in paid.values()),
            "paid_during_outage": paid_early,
            "dead_letters": depth.dead,
            "left_in_queue": depth.ready + depth.delayed + depth.in_flight,
            "requests": None if self.bank is None else self.bank.requests,
            "deferred": log.count("transaction deferred"),
            "why_shows_deferrals": "deferred" in explanation and "times" in explanation,
            "recovered_after_s": round(recovery_seconds, 1),
        }

    def _wait_until_settled(self) -> None:
        """Wait until the worker has acknowledged what it has done."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            depth = self.queue.depth()
            if not depth.ready + depth.delayed + depth.in_flight:
                return
            time.sleep(0.1)

    def _explain(self, transaction_id: str) -> str:
        env = {**os.environ, "ERGON_POSTGRES__DSN": self.dsn}
        command = [*ERGON, "why", transaction_id]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False).stdout

    def _sleep_until(self, moment: float) -> None:
        while (remaining := moment - time.monotonic()) > 0:
            time.sleep(min(remaining, 1.0))
            if self.worker is not None and self.worker.poll() is not None:
                raise RuntimeError(f"the worker of {self.scenario.name} has ended: see {self.folder}/worker.log")

    def close(self) -> None:
        if self.worker is not None and self.worker.poll() is None:
            self.worker.terminate()
            try:
                self.worker.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.worker.pid, 9)
                self.worker.wait()
        self.queue.close()
        if self.bank is not None:
            self.bank.shutdown()
            self.bank.server_close()
        if self.host is not None:
            self.host.close()


def make_scenarios(outage: float, orders: int, facts_outage: float) -> list[Scenario]:
    return [
        Scenario("down", "pay", "down", orders, outage),
        Scenario("down-one", "pay", "down", 1, outage),
        Scenario("hang", "pay", "hang", orders, outage),
        Scenario("hang-one", "pay", "hang", 1, outage),
        Scenario("facts", "tell", "down", orders, facts_outage),
    ]


def is_successful(figures: dict[str, Any]) -> bool:
    return (
        figures["paid"] == figures["orders"]
        and not figures["paid_more_than_once"]
        and not figures["paid_during_outage"]
        and not figures["dead_letters"]
        and not figures["left_in_queue"]
    )


def run_outages(selected: list[Scenario], folder: Path) -> list[dict[str, Any]]:
    """Run the scenarios in parallel and return the figures of each."""
    with ExitStack() as stack:
        server = PrivatePostgres(tempfile.mkdtemp(prefix="ergon-outage-"), fsync=False)
        stack.callback(shutil.rmtree, server.folder, ignore_errors=True)
        stack.callback(server.kill)
        server.start()
        runs = []
        for scenario in selected:
            runs.append(OutageRun(scenario, server, folder))
            stack.callback(runs[-1].close)
        with ThreadPoolExecutor(len(runs)) as pool:
            return list(pool.map(OutageRun.run, runs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outage", type=float, default=60.0)
    parser.add_argument("--orders", type=int, default=60)
    parser.add_argument("--facts-outage", type=float, default=300.0)
    parser.add_argument("--only", nargs="*", default=None)
    options = parser.parse_args()
    selected = [
        scenario
        for scenario in make_scenarios(options.outage, options.orders, options.facts_outage)
        if options.only is None or scenario.name in options.only
    ]
    folder = Path(tempfile.mkdtemp(prefix="ergon-outage-logs-"))
    results = run_outages(selected, folder)
    for figures in results:
        print(json.dumps(figures), file=sys.stderr)
    has_passed = all(map(is_successful, results))
    if has_passed:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"well": has_passed, "scenarios": results}))
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
