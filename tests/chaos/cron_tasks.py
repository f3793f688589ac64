"""Chaos with schedules of tasks: one with a tick every second and two processes, one of which is killed repeatedly.

Every scheduled time must be sent. At a queue in the same database it is sent exactly once; at another broker, a second
transaction for a time must have the same id.

The last line is JSON. The exit code is 1 if a time was not sent, or if something else was sent.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework.connectors import registry
from ergon_framework.database.migrate import upgrade
from ergon_framework.jobs.cron import tick_id
from tests.chaos.cron_schedule import QUEUE
from tests.integration.running import ERGON
from tests.servers.postgres import PrivatePostgres
from tests.servers.redis import PrivateRedis

ROOT = Path(__file__).parents[2]
#: Seconds of downtime after a kill, and of the wait for the first tick.
DOWNTIME_SECONDS, START_TIMEOUT_SECONDS = 3.0, 30.0
LAST_TICK = "select last_at from ergon.cron where name = 'tick'"


class Schedulers:
    """The processes that run the schedule."""

    def __init__(self, dsn: str, url: str, count: int) -> None:
        self._env = {**os.environ, "ERGON_POSTGRES__DSN": dsn, f"ERGON_QUEUES__{QUEUE.upper()}__URL": url}
        self.processes = [self._start_process() for _ in range(count)]

    def _start_process(self) -> subprocess.Popen[bytes]:
        command = [*ERGON, "run", "tests.chaos.cron_schedule:tick"]
        return subprocess.Popen(command, cwd=ROOT, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, number: int) -> None:
        process = self.processes[number]
        assert process.poll() is None, f"process {number} has ended by itself with {process.returncode}"
        process.kill()
        process.wait()

    def restart(self, number: int) -> None:
        self.processes[number] = self._start_process()

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(dsn: str, url: str, *, seconds: float, kills: int) -> dict[str, object]:
    """Run the schedule for some seconds, with some kills; return the findings."""
    upgrade(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection:
        schedulers = Schedulers(dsn, url, 2)
        try:
            first = _wait_for_first(connection)
            started_at = time.monotonic()
            for number in range(kills):
                time.sleep(max(0.0, started_at + seconds * (number + 1) / (kills + 1) - time.monotonic()))
                schedulers.kill(number % 2)
                time.sleep(DOWNTIME_SECONDS)
                schedulers.restart(number % 2)
            time.sleep(max(0.0, started_at + seconds - time.monotonic()))
        finally:
            schedulers.stop()
        ((last,),) = connection.execute(LAST_TICK).fetchall()
    return {**_summarize(_fetch_ids(url), first, last), "kills": kills}


def _wait_for_first(connection: psycopg.Connection) -> datetime:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        rows = connection.execute("select coalesce(last_at, next_at) from ergon.cron where name = 'tick'").fetchall()
        if rows:
            return rows[0][0]
        time.sleep(0.01)
    raise AssertionError("the schedule did not start")


def _fetch_ids(url: str) -> tuple[list[str], Counter[int]]:
    """Return the ids of the queue, and the number of ticks of each process."""
    connector = registry.create_connector(QUEUE, url, {})
    connector.open()
    ids, senders = [], Counter()
    while deliveries := connector.fetch_transactions(100):
        ids += [each.transaction.id for each in deliveries]
        senders.update(each.transaction.payload for each in deliveries)
    connector.close()
    return ids, senders


def _summarize(sent: tuple[list[str], Counter[int]], first: datetime, last: datetime) -> dict[str, object]:
    ids, senders = sent
    count = int((last - first).total_seconds()) + 1
    expected_ids = [tick_id("tick", first.astimezone(UTC) + timedelta(seconds=n)) for n in range(count)]
    copies = Counter(ids)
    return {
        "ticks": count,
        "sent": len(ids),
        "distinct": len(copies),
        "missing": [each for each in expected_ids if each not in copies],
        "unplanned": sorted(set(copies) - set(expected_ids)),
        "sent_twice": sorted(each for each, number in copies.items() if number > 1),
        "by_process": sorted(senders.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--kills", type=int, default=1, help="how often one of the two is killed, in turn")
    parser.add_argument("--queue", choices=["postgres", "redis"], default="redis")
    options = parser.parse_args()
    folders = [Path(tempfile.mkdtemp(prefix=f"ergon-cron-{part}-")) for part in ("postgres", "redis")]
    database, broker = PrivatePostgres(folders[0]), PrivateRedis(folders[1])
    try:
        database.start()
        broker.start()
        dsn = database.create_database("cron")
        url = dsn if options.queue == "postgres" else broker.url
        result = run(dsn, url, seconds=options.seconds, kills=options.kills)
    finally:
        broker.kill()
        database.kill()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    has_failures = any(result[name] for name in ("missing", "unplanned"))
    has_failures = has_failures or (options.queue == "postgres" and bool(result["sent_twice"]))
    has_enough_ticks = int(result["ticks"]) >= options.seconds - 1
    passed = not has_failures and has_enough_ticks
    print(json.dumps({"seconds": options.seconds, "queue": options.queue, **result, "passed": passed}))
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
