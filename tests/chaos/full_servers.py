"""A server that is full for two minutes under ``ergon run --processes 2``: nothing is lost, and the run continues.

Two scenarios run in parallel, each with a separate server at its defaults: the disk of PostgreSQL, with its data and
its WAL, is filled, and Redis exceeds its memory limit. Transactions are dispatched all the time; rejected ones are
dispatched again. The last line is JSON; exit code 1 where something was lost, the run ended, or readiness did not name
the cause. Needs the rights to mount.

    python tests/chaos/full_servers.py --outage 120
"""

from __future__ import annotations

import argparse
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from ergon_framework.connectors.postgres import PostgresQueue  # noqa: E402 - the tests are found by now
from ergon_framework.connectors.redis import RedisQueue  # noqa: E402
from ergon_framework.database.migrate import upgrade  # noqa: E402
from ergon_framework.errors import ConnectionLostError  # noqa: E402
from ergon_framework.transaction import Transaction  # noqa: E402
from tests.servers.postgres import PostgresServerError, PrivatePostgres, free_port  # noqa: E402
from tests.servers.redis import PrivateRedis  # noqa: E402
from tests.servers.small_disk import SmallDisk  # noqa: E402

ERGON = [sys.executable, "-P", "-c", "from ergon_framework.cli.main import main; main()"]
WORKER_PROGRAM = """
import time
from ergon_framework import Transaction, consumer
from ergon_framework.connectors.{module} import {queue}

@consumer({queue}("orders"))
def handle(order, transaction: Transaction):
    with open("done", "a") as file:
        file.write(transaction.id + chr(10))
    time.sleep(0.01)
"""
#: Seconds before the outage, and seconds after it within which everything has to be handled.
WARM_UP_SECONDS = 3.0
RECOVERY_SECONDS = 180.0
BATCH_SIZE = 20
#: Transactions in the queue at the start, so that workers claim during the whole outage.
BACKLOG = 20_000
PAUSE_SECONDS = 0.1
DISK_MEGABYTES = 160


class FullPostgres:
    """PostgreSQL with data and WAL on a small disk, which is filled."""

    name, cause = "postgres disk full", "the disk of the database is full"
    module, queue_class = "postgres", "PostgresQueue"

    def __init__(self) -> None:
        self._disk = SmallDisk(DISK_MEGABYTES)
        os.chown(self._disk.folder, *pwd.getpwnam("postgres")[2:4])
        settings = {"max_wal_size": "64MB", "min_wal_size": "32MB"}
        self._server = PrivatePostgres(self._disk.folder / "server", settings=settings)
        self._server.start()
        self.restarts = 0
        self.env = {"ERGON_POSTGRES__DSN": self._server.dsn()}
        upgrade(self._server.dsn())

    def open_queue(self) -> Any:
        return PostgresQueue("orders", dsn=self._server.dsn())

    def begin(self) -> None:
        self._disk.fill()

    def hold(self) -> None:
        """Take the space that was freed meanwhile, as logs and other tenants of a disk do."""
        self._disk.fill()

    def end(self) -> None:
        self._disk.empty()
        if not self._server.is_running:
            # Without free space for its WAL the server stops itself; an operator restarts it.
            self.restarts += 1
            try:
                self._server.start()
            except PostgresServerError as error:
                print(error, file=sys.stderr)
                raise

    def close(self) -> None:
        self._server.kill()
        self._disk.close()


class FullRedis:
    """Redis at its memory limit."""

    name, cause = "redis memory limit", "memory is full"
    module, queue_class = "redis", "RedisQueue"

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ergon-full-redis-")
        self._server = PrivateRedis(self._folder)
        self._server.start()
        self.restarts = 0
        self.env = {"ERGON_REDIS__URL": self._server.url}

    def open_queue(self) -> Any:
        return RedisQueue("orders", url=self._server.url)

    def begin(self) -> None:
        with self._server.client() as client:
            client.config_set("maxmemory", "1")

    def hold(self) -> None: ...

    def end(self) -> None:
        with self._server.client() as client:
            client.config_set("maxmemory", "0")

    def close(self) -> None:
        self._server.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


class BatchDispatcher:
    """Dispatches a batch every PAUSE_SECONDS; a rejected one is dispatched again, as a producer does."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._stopping = threading.Event()
        self.confirmed: set[str] = set()
        for first in range(0, BACKLOG, 1000):
            batch = [Transaction({"text": "x" * 200}, id=f"waiting-{first + part}") for part in range(1000)]
            queue.dispatch(batch)
            self.confirmed.update(each.id for each in batch)
        self.rejected: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            batch = [Transaction({"text": "x" * 200}, id=f"order-{number}-{part}") for part in range(BATCH_SIZE)]
            try:
                self._queue.dispatch(batch)
            except ConnectionLostError as error:
                self.rejected[str(error).partition(":")[0].partition(";")[0]] += 1
                self._stopping.wait(0.5)
                continue
            self.confirmed.update(each.id for each in batch)
            number += 1
            self._stopping.wait(PAUSE_SECONDS)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(60)


def probe(port: int, path: str) -> tuple[int, list[str]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)["reasons"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["reasons"]
    except OSError as error:
        return 0, [str(error)]


def run_scenario(kind: type[FullPostgres | FullRedis], outage: float) -> dict[str, Any]:
    """Run one scenario and return its figures."""
    server, folder, port = kind(), Path(tempfile.mkdtemp(prefix="ergon-full-run-")), free_port()
    (folder / "app.py").write_text(WORKER_PROGRAM.format(module=kind.module, queue=kind.queue_class), encoding="utf-8")
    queue = server.open_queue()
    options = ["--streaming", "--processes", "2", "--probe-port", str(port)]
    handled_path, readiness_counts = folder / "done", Counter[str]()
    not_live_count = 0
    dispatcher = BatchDispatcher(queue)
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [*ERGON, "run", "app:handle", *options], cwd=folder, env=os.environ | server.env, stdout=log, stderr=log
        )

    def read_handled() -> list[str]:
        return handled_path.read_text(encoding="utf-8").split() if handled_path.exists() else []

    try:
        deadline = time.monotonic() + 60
        while probe(port, "/ready")[0] != 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(WARM_UP_SECONDS)
        handled_before = len(set(read_handled()))
        server.begin()
        outage_end = time.monotonic() + outage
        while time.monotonic() < outage_end:
            server.hold()
            status, reasons = probe(port, "/ready")
            readiness_counts[f"{status} named" if any(kind.cause in reason for reason in reasons) else f"{status}"] += 1
            not_live_count += probe(port, "/live")[0] != 200
            time.sleep(0.5)
        handled_in_total, is_alive = len(set(read_handled())), worker.poll() is None
        server.end()
        recovery_start = time.monotonic()
        time.sleep(WARM_UP_SECONDS)
        dispatcher.stop()
        while not dispatcher.confirmed <= set(read_handled()) and time.monotonic() < recovery_start + RECOVERY_SECONDS:
            time.sleep(0.5)
        recovery_seconds = time.monotonic() - recovery_start
        handled_counts = Counter(read_handled())
        is_ready = probe(port, "/ready")[0] == 200
    finally:
        dispatcher.stop()
        if worker.poll() is None:
            worker.terminate()
        exit_code = worker.wait(90)
        queue.close()
        server.close()
    log_text = (folder / "worker.log").read_text(encoding="utf-8", errors="replace")
    lost = len(dispatcher.confirmed - set(handled_counts))
    figures = {
        "scenario": kind.name,
        "outage_s": outage,
        "confirmed": len(dispatcher.confirmed),
        "lost": lost,
        "handled_twice": sum(count > 1 for count in handled_counts.values()),
        "handled_before": handled_before,
        "handled_during": handled_in_total - handled_before,
        "refused_dispatches": dict(dispatcher.rejected),
        "ready_during": dict(readiness_counts),
        "not_live_during": not_live_count,
        "alive_after": is_alive,
        "ready_after": is_ready,
        "processes_died": log_text.count('event="process exited unexpectedly"'),
        "server_starts": server.restarts,
        "recovered_after_s": round(recovery_seconds, 1),
        "exit_code": exit_code,
    }
    if lost or not is_alive:
        figures["log"] = str(folder / "worker.log")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return figures


def is_successful(figures: dict[str, Any]) -> bool:
    is_cause_named = any("named" in status for status in figures["ready_during"])
    return (
        figures["confirmed"] > 0
        and not figures["lost"]
        and is_cause_named
        and figures["alive_after"]
        and figures["ready_after"]
        and not figures["processes_died"]
        and not figures["not_live_during"]
        and figures["exit_code"] == 0
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outage", type=float, default=120.0)
    parser.add_argument("--only", choices=["postgres", "redis"], default=None)
    options = parser.parse_args()
    kinds = [kind for kind in (FullPostgres, FullRedis) if options.only in (None, kind.module)]
    with ThreadPoolExecutor(len(kinds)) as pool:
        results = list(pool.map(run_scenario, kinds, [options.outage] * len(kinds)))
    has_passed = all(map(is_successful, results))
    print(json.dumps({"well": has_passed, "scenarios": results}))
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
