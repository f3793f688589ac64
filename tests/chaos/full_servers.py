"""A server that is full for two minutes under ``ergon run --processes 2``: nothing is lost, and the run is still there.

Two scenarios side by side, each with a server of its own at its defaults: the disk of PostgreSQL, with its data and its
WAL, is filled, and Redis is set to a memory limit that it exceeds. Transactions are dispatched all the time; what is
refused is dispatched again. The last line is JSON; exit code 1 where something was lost, the run ended, or readiness
did not name the cause. Needs the rights to mount.

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
from ergon_framework.errors import ConnectionLost  # noqa: E402
from ergon_framework.schema.migrate import upgrade  # noqa: E402
from ergon_framework.transaction import Transaction  # noqa: E402
from tests.servers.postgres import PostgresServerError, PrivatePostgres, free_port  # noqa: E402
from tests.servers.redis import PrivateRedis  # noqa: E402
from tests.servers.small_disk import SmallDisk  # noqa: E402

ERGON = [sys.executable, "-P", "-c", "from ergon_framework.cli.main import main; main()"]
WORKER = """
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
BATCH = 20
#: What waits in the queue when the run begins, so that workers claim during the whole outage.
BACKLOG = 20_000
PAUSE_SECONDS = 0.1
MEGABYTES = 160


class Postgres:
    """PostgreSQL with data and WAL on a small disk, which is filled."""

    name, cause = "postgres disk full", "the disk of the database is full"
    module, queue_class = "postgres", "PostgresQueue"

    def __init__(self) -> None:
        self._disk = SmallDisk(MEGABYTES)
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
        """Take what was freed meanwhile, as logs and other tenants of a disk do."""
        self._disk.fill()

    def end(self) -> None:
        self._disk.empty()
        if not self._server.is_running:
            # Without room for its WAL the server stops itself; an operator starts it again.
            self.restarts += 1
            try:
                self._server.start()
            except PostgresServerError as error:
                print(error, file=sys.stderr)
                raise

    def close(self) -> None:
        self._server.kill()
        self._disk.close()


class Redis:
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


class Feeder:
    """Dispatches a batch every PAUSE_SECONDS; one that is refused is dispatched again, as a producer does."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._stop = threading.Event()
        self.confirmed: set[str] = set()
        for first in range(0, BACKLOG, 1000):
            batch = [Transaction(f"waiting-{first + part}", {"text": "x" * 200}) for part in range(1000)]
            queue.dispatch(batch)
            self.confirmed.update(each.id for each in batch)
        self.refused: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            batch = [Transaction(f"order-{number}-{part}", {"text": "x" * 200}) for part in range(BATCH)]
            try:
                self._queue.dispatch(batch)
            except ConnectionLost as error:
                self.refused[str(error).partition(":")[0].partition(";")[0]] += 1
                self._stop.wait(0.5)
                continue
            self.confirmed.update(each.id for each in batch)
            number += 1
            self._stop.wait(PAUSE_SECONDS)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(60)


def ask(port: int, path: str) -> tuple[int, list[str]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, json.load(answer)["reasons"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["reasons"]
    except OSError as error:
        return 0, [str(error)]


def run(kind: type[Postgres | Redis], outage: float) -> dict[str, Any]:
    """Run one scenario and return its figures."""
    server, folder, port = kind(), Path(tempfile.mkdtemp(prefix="ergon-full-run-")), free_port()
    (folder / "app.py").write_text(WORKER.format(module=kind.module, queue=kind.queue_class), encoding="utf-8")
    queue = server.open_queue()
    options = ["--streaming", "--processes", "2", "--probe-port", str(port)]
    done_path, seen = folder / "done", Counter[str]()
    not_live = 0
    feeder = Feeder(queue)
    with (folder / "worker.log").open("wb") as log:
        worker = subprocess.Popen(
            [*ERGON, "run", "app:handle", *options], cwd=folder, env=os.environ | server.env, stdout=log, stderr=log
        )

    def read_done() -> list[str]:
        return done_path.read_text(encoding="utf-8").split() if done_path.exists() else []

    try:
        until = time.monotonic() + 60
        while ask(port, "/ready")[0] != 200 and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(WARM_UP_SECONDS)
        before = len(set(read_done()))
        server.begin()
        end = time.monotonic() + outage
        while time.monotonic() < end:
            server.hold()
            status, reasons = ask(port, "/ready")
            seen[f"{status} named" if any(kind.cause in reason for reason in reasons) else f"{status}"] += 1
            not_live += ask(port, "/live")[0] != 200
            time.sleep(0.5)
        during, alive = len(set(read_done())), worker.poll() is None
        server.end()
        over = time.monotonic()
        time.sleep(WARM_UP_SECONDS)
        feeder.end()
        while not feeder.confirmed <= set(read_done()) and time.monotonic() < over + RECOVERY_SECONDS:
            time.sleep(0.5)
        recovered = time.monotonic() - over
        done = Counter(read_done())
        is_ready = ask(port, "/ready")[0] == 200
    finally:
        feeder.end()
        if worker.poll() is None:
            worker.terminate()
        code = worker.wait(90)
        queue.close()
        server.close()
    said = (folder / "worker.log").read_text(encoding="utf-8", errors="replace")
    lost = len(feeder.confirmed - set(done))
    figures = {
        "scenario": kind.name,
        "outage_s": outage,
        "confirmed": len(feeder.confirmed),
        "lost": lost,
        "handled_twice": sum(count > 1 for count in done.values()),
        "handled_before": before,
        "handled_during": during - before,
        "refused_dispatches": dict(feeder.refused),
        "ready_during": dict(seen),
        "not_live_during": not_live,
        "alive_after": alive,
        "ready_after": is_ready,
        "processes_died": said.count('event="process died"'),
        "server_starts": server.restarts,
        "recovered_after_s": round(recovered, 1),
        "exit_code": code,
    }
    if lost or not alive:
        figures["log"] = str(folder / "worker.log")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return figures


def is_well(figures: dict[str, Any]) -> bool:
    named = any("named" in status for status in figures["ready_during"])
    return (
        figures["confirmed"] > 0
        and not figures["lost"]
        and named
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
    wanted = [kind for kind in (Postgres, Redis) if options.only in (None, kind.module)]
    with ThreadPoolExecutor(len(wanted)) as pool:
        found = list(pool.map(run, wanted, [options.outage] * len(wanted)))
    well = all(map(is_well, found))
    print(json.dumps({"well": well, "scenarios": found}))
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
