"""Chaos with cron: an entry for every second, two orchestrators, and SIGKILL for one of them, again and again.

Every scheduled time must have exactly one job, asked for exactly once, and every job must succeed.

The last line is JSON. The exit code is 1 if a time was missed or asked for twice, or a job has not succeeded.
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

from ergon_framework.executor.jobs.client import JobClient
from ergon_framework.executor.jobs.cron import job_key
from ergon_framework.schema.migrate import upgrade
from tests.chaos.cron_fleet import TICK
from tests.integration.running import ERGON
from tests.servers.postgres import PrivatePostgres

ROOT = Path(__file__).parents[2]
#: Seconds that one who was killed stays away, that nobody may be late by at the end, and that all may take to finish.
AWAY, LATE, PATIENCE = 3.0, 3.0, 60.0
#: Also what is asked for in vain, because a key is taken, if its database transaction was committed.
AUDIT = """
create table asked (key text);
create function note() returns trigger language plpgsql as
    'begin insert into asked values (new.unique_key); return new; end';
create trigger note before insert on ergon.job for each row execute function note();
"""


class Fleet:
    """The orchestrators."""

    def __init__(self, dsn: str, count: int) -> None:
        self._env = {**os.environ, "ERGON_POSTGRES__DSN": dsn}
        self.running = [self._started() for _ in range(count)]

    def _started(self) -> subprocess.Popen[bytes]:
        words = [*ERGON, "run", "tests.chaos.cron_fleet:orchestrator"]
        return subprocess.Popen(words, cwd=ROOT, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, number: int) -> None:
        victim = self.running[number]
        assert victim.poll() is None, f"orchestrator {number} has ended by itself with {victim.returncode}"
        victim.kill()
        victim.wait()

    def restart(self, number: int) -> None:
        self.running[number] = self._started()

    def end(self) -> None:
        for one in self.running:
            if one.poll() is None:
                one.send_signal(signal.SIGTERM)
        for one in self.running:
            try:
                one.wait(30)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()


def run(dsn: str, *, seconds: float, kills: int) -> dict[str, object]:
    """Tick for so long, with so many kills between; what was found."""
    upgrade(dsn)
    with psycopg.connect(dsn, autocommit=True) as connection, JobClient(dsn) as client:
        connection.execute(AUDIT)
        client.schedule(TICK)
        first = client.schedules()[0].next_at
        fleet = Fleet(dsn, 2)
        try:
            began = time.monotonic()
            for number in range(kills):
                _sleep_until(began + seconds * (number + 1) / (kills + 1))
                fleet.kill(number % 2)
                time.sleep(AWAY)
                fleet.restart(number % 2)
            _sleep_until(began + seconds)
            now = connection.execute("select now()").fetchone()[0]
            # Nobody may be late by more than this.
            _until(lambda: _fired(client) >= now - timedelta(seconds=1), LATE)
            client.unschedule(TICK.name)
            last = connection.execute("select max(unique_key) from ergon.job").fetchone()[0]
            open_jobs = "select count(*) from ergon.job where state <> 'succeeded'"
            _until(lambda: connection.execute(open_jobs).fetchone() == (0,), PATIENCE)
        finally:
            fleet.end()
        return _judged(connection, first, last, kills=kills)


def _judged(connection: psycopg.Connection, first: datetime, last: str, *, kills: int) -> dict[str, object]:
    asked = Counter(key for (key,) in connection.execute("select key from asked"))
    jobs = Counter(dict(connection.execute("select unique_key, count(*) from ergon.job group by 1").fetchall()))
    wanted, tick = [], first.astimezone(UTC)
    while not wanted or wanted[-1] < last:
        wanted.append(job_key(TICK.name, tick))
        tick += timedelta(seconds=1)
    late = """
    select extract(epoch from right(unique_key, 20)::timestamptz - %s)::integer,
        extract(epoch from created_at - right(unique_key, 20)::timestamptz)::float8 as late
    from ergon.job order by late desc limit 3
    """
    open_jobs = "select count(*) from ergon.job where state <> 'succeeded'"
    return {
        "ticks": len(wanted),
        "jobs": jobs.total(),
        "missing": [key for key in wanted if key not in jobs],
        "asked_twice": sorted(key for key, count in asked.items() if count > 1),
        "unplanned": sorted(set(jobs) - set(wanted)),
        "not_succeeded": connection.execute(open_jobs).fetchone()[0],
        # Which seconds of the run were the latest, and by how many: at the start nobody runs yet.
        "latest": {at: round(by, 3) for at, by in connection.execute(late, [first])},
        "kills": kills,
    }


def _fired(client: JobClient) -> datetime:
    return client.schedules()[0].last_at or datetime.min.replace(tzinfo=UTC)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _until(found, patience: float = PATIENCE):
    """What was found in time, or what was found last: whether that will do is judged from the tables."""
    end = time.monotonic() + patience
    while not (answer := found()) and time.monotonic() < end:
        time.sleep(0.1)
    return answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--kills", type=int, default=1, help="how often one of the two is killed, in turn")
    parser.add_argument("--dsn", help="an empty database; without it a server is started")
    given = parser.parse_args()
    if given.dsn:
        found = run(given.dsn, seconds=given.seconds, kills=given.kills)
    else:
        folder = Path(tempfile.mkdtemp(prefix="ergon-cron-"))
        server = PrivatePostgres(folder)
        try:
            server.start()
            found = run(server.create_database("cron"), seconds=given.seconds, kills=given.kills)
        finally:
            server.kill()
            shutil.rmtree(folder, ignore_errors=True)
    bad = any(found[name] for name in ("missing", "asked_twice", "unplanned", "not_succeeded"))
    enough = int(found["ticks"]) >= given.seconds - 1
    print(json.dumps({"seconds": given.seconds, **found, "passed": not bad and enough}))
    return int(bad or not enough)


if __name__ == "__main__":
    sys.exit(main())
