"""Chaos with cron: an entry for every second and two orchestrators, one of which is killed repeatedly.

Every scheduled time must have exactly one job, which is submitted exactly once, and every job must succeed.

The last line is JSON. The exit code is 1 if a time was missed or submitted twice, or a job has not succeeded.
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

from ergon_framework.database.migrate import upgrade
from ergon_framework.jobs.client import JobClient
from ergon_framework.jobs.cron import tick_id
from tests.chaos.cron_fleet import TICK
from tests.integration.running import ERGON
from tests.servers.postgres import PrivatePostgres

ROOT = Path(__file__).parents[2]
#: Seconds of downtime after a kill, of allowed lateness at the end, and of waiting for all jobs to finish.
DOWNTIME_SECONDS, MAX_LATENESS_SECONDS, FINISH_TIMEOUT_SECONDS = 3.0, 3.0, 60.0
#: Counts rejected submissions too (the key is taken), if their database transaction was committed.
AUDIT = """
create table asked (key text);
create function note() returns trigger language plpgsql as
    'begin insert into asked values (new.unique_key); return new; end';
create trigger note before insert on ergon.job for each row execute function note();
"""


class CronOrchestrators:
    """The orchestrators."""

    def __init__(self, dsn: str, count: int) -> None:
        self._env = {**os.environ, "ERGON_POSTGRES__DSN": dsn}
        self.processes = [self._start_process() for _ in range(count)]

    def _start_process(self) -> subprocess.Popen[bytes]:
        command = [*ERGON, "run", "tests.chaos.cron_fleet:orchestrator"]
        return subprocess.Popen(command, cwd=ROOT, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, number: int) -> None:
        process = self.processes[number]
        assert process.poll() is None, f"orchestrator {number} has ended by itself with {process.returncode}"
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


def run(dsn: str, *, seconds: float, kills: int) -> dict[str, object]:
    """Run the schedule for some seconds, with some kills; return the findings."""
    upgrade(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection, JobClient(dsn) as client:
        connection.execute(AUDIT)
        client.schedule(TICK)
        first = client.schedules()[0].next_at
        orchestrators = CronOrchestrators(dsn, 2)
        try:
            started_at = time.monotonic()
            for number in range(kills):
                _sleep_until(started_at + seconds * (number + 1) / (kills + 1))
                orchestrators.kill(number % 2)
                time.sleep(DOWNTIME_SECONDS)
                orchestrators.restart(number % 2)
            _sleep_until(started_at + seconds)
            now = connection.execute("select now()").fetchone()[0]
            # No scheduled time may be later than this.
            _wait_until(lambda: _get_last_time(client) >= now - timedelta(seconds=1), MAX_LATENESS_SECONDS)
            client.unschedule(TICK.name)
            last = connection.execute("select max(unique_key) from ergon.job").fetchone()[0]
            open_jobs = "select count(*) from ergon.job where state <> 'succeeded'"
            _wait_until(lambda: connection.execute(open_jobs).fetchone() == (0,), FINISH_TIMEOUT_SECONDS)
        finally:
            orchestrators.stop()
        return _summarize(connection, first, last, kills=kills)


def _summarize(connection: psycopg.Connection, first: datetime, last: str, *, kills: int) -> dict[str, object]:
    submissions = Counter(key for (key,) in connection.execute("select key from asked"))
    jobs = Counter(dict(connection.execute("select unique_key, count(*) from ergon.job group by 1").fetchall()))
    expected, tick = [], first.astimezone(UTC)
    while not expected or expected[-1] < last:
        expected.append(tick_id(TICK.name, tick))
        tick += timedelta(seconds=1)
    latest_query = """
    select extract(epoch from right(unique_key, 20)::timestamptz - %s)::integer,
        extract(epoch from created_at - right(unique_key, 20)::timestamptz)::float8 as late
    from ergon.job order by late desc limit 3
    """
    open_jobs = "select count(*) from ergon.job where state <> 'succeeded'"
    return {
        "ticks": len(expected),
        "jobs": jobs.total(),
        "missing": [key for key in expected if key not in jobs],
        "asked_twice": sorted(key for key, count in submissions.items() if count > 1),
        "unplanned": sorted(set(jobs) - set(expected)),
        "not_succeeded": connection.execute(open_jobs).fetchone()[0],
        # The latest seconds of the run, and by how much: at the start no orchestrator runs yet.
        "latest": {second: round(lateness, 3) for second, lateness in connection.execute(latest_query, [first])},
        "kills": kills,
    }


def _get_last_time(client: JobClient) -> datetime:
    return client.schedules()[0].last_at or datetime.min.replace(tzinfo=UTC)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _wait_until(condition, timeout: float = FINISH_TIMEOUT_SECONDS):
    """Return what was found in time, or what was found last: the verdict comes from the tables."""
    deadline = time.monotonic() + timeout
    while not (result := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--kills", type=int, default=1, help="how often one of the two is killed, in turn")
    parser.add_argument("--dsn", help="an empty database; without it a server is started")
    options = parser.parse_args()
    if options.dsn:
        result = run(options.dsn, seconds=options.seconds, kills=options.kills)
    else:
        folder = Path(tempfile.mkdtemp(prefix="ergon-cron-"))
        server = PrivatePostgres(folder)
        try:
            server.start()
            result = run(server.create_database("cron"), seconds=options.seconds, kills=options.kills)
        finally:
            server.kill()
            shutil.rmtree(folder, ignore_errors=True)
    has_failures = any(result[name] for name in ("missing", "asked_twice", "unplanned", "not_succeeded"))
    has_enough_ticks = int(result["ticks"]) >= options.seconds - 1
    print(json.dumps({"seconds": options.seconds, **result, "passed": not has_failures and has_enough_ticks}))
    return int(has_failures or not has_enough_ticks)


if __name__ == "__main__":
    sys.exit(main())
