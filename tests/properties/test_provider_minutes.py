"""Roll-ups equal a recomputation from their rows: however these were split, by however many, and whoever died."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import BOUNDS_MS, MINUTE, Hour, Minute, Outcome
from ergon_framework.providers.sql.batch import prepared
from ergon_framework.providers.sql.reaching import connect
from ergon_framework.providers.sql.sampling import Sampler
from ergon_framework.providers.sql.summary import summary
from ergon_framework.providers.sql.writer import MetricsWriter
from ergon_framework.providers.sql.writing import write
from tests.integration.metering import ask, attempt, both, chance, counted, rows_of, until
from tests.servers.databases import migrated

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dsn(postgres):
    return migrated(postgres)


TABLES = ("provider_execution_metrics", "provider_minutes", "provider_batches", "provider_health_states")


def emptied(dsn):
    ask(dsn, f"truncate {', '.join(f'ergon.{name}' for name in TABLES)}")


@st.composite
def attempts(draw):
    code = draw(st.sampled_from([None, None, *ReasonCode]))
    bad = st.sampled_from([Outcome.RETRY, Outcome.FAILED, Outcome.DEAD_LETTER])
    edges = st.sampled_from([0.0, *BOUNDS_MS, *(bound * (1 + 1e-12) for bound in BOUNDS_MS), 1e6])
    # In few minutes, so that batches meet in them; also at their very edges, where rounding to the microsecond decides.
    age = st.one_of(st.floats(0, 100), st.sampled_from([0, 1, 59, 60, 61]).map(lambda n: n * MINUTE + 30 + 4e-7))
    return {
        "tenant_id": draw(st.sampled_from(["a", "b"])),
        "capability": draw(st.sampled_from(["x", "y"])),
        "duration_ms": draw(st.one_of(edges, st.floats(0, 200_000))),
        "reason_code": code,
        "outcome": Outcome.SUCCESS if code is None else draw(bad),
        "created_at": MINUTE * (time.time() // MINUTE) + 30 - draw(age),
    }


@pytest.mark.spec("PRV-10", "PRV-26")
@settings(max_examples=settings().max_examples // 6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(attempts(), min_size=1, max_size=12), min_size=1, max_size=6))
def test_however_attempts_are_split_into_batches_the_minutes_are_those_of_their_rows(dsn, batches):
    emptied(dsn)
    with connect(dsn, patience=20) as line:
        for fields in batches:
            batch, refused = prepared([attempt(**one) for one in fields], Sampler(None))
            assert not refused
            write(line, batch)
            # Twice is once.
            write(line, batch)
        stored, recomputed = both(dsn)
        assert stored == recomputed
        assert counted(stored) == sum(map(len, batches))
        for tenant in ("a", "b"):
            found = summary(line, tenant)
            for health in found.providers:
                hour = Hour.at(
                    found.generated_at.timestamp(),
                    [
                        Minute(int(place.minute.timestamp()), tally.calls)
                        for place, tally in stored.items()
                        if place[:3] == (tenant, health.provider_name, health.capability)
                    ],
                )
                assert health.success_rate_1h == hour.success_rate_1h
                assert health.p95_latency_ms_1h == hour.p95_latency_ms_1h


WRITE = """
import random, sys, time
sys.path.insert(0, {root!r})
from ergon_framework.providers.sql.writer import MetricsWriter
from tests.integration.metering import chance
dice = random.Random({seed})
writer = MetricsWriter({dsn!r}, every=0.01)
print("on", flush=True)
while True:
    for _ in range(50):
        writer.record(chance(dice, now=time.time()))
    time.sleep(0.005)
"""


@pytest.mark.spec("PRV-26")
def test_several_writers_of_which_some_are_killed_and_some_lose_their_lines(postgres):
    dsn = migrated(postgres)
    dice = random.Random(11)
    commands = [[sys.executable, "-c", WRITE.format(root=str(ROOT), seed=seed, dsn=dsn)] for seed in range(2)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    writers = [MetricsWriter(dsn, every=0.02, room=100_000) for _ in range(2)]
    rows_each = 2_000
    over = threading.Event()

    def record(writer, seed):
        mine = random.Random(seed)
        for number in range(rows_each):
            writer.record(chance(mine, now=time.time()))
            if number % 50 == 0:
                over.wait(0.01)

    def cut():
        """Sessions end, at any moment of a batch."""
        for _ in range(12):
            over.wait(dice.uniform(0.02, 0.2))
            ask(
                dsn,
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'ergon' "
                "and datname = current_database() order by random() limit 1",
            )

    try:
        for child in children:
            assert child.stdout.readline() == b"on\n"
        threads = [threading.Thread(target=record, args=(writer, seed)) for seed, writer in enumerate(writers)]
        cutting = threading.Thread(target=cut)
        for thread in (*threads, cutting):
            thread.start()
        for thread in threads:
            thread.join(60)
        cutting.join(30)
        until(lambda: rows_of(dsn) > rows_each)
        for child in children:
            child.send_signal(signal.SIGKILL)
        assert all(writer.close(30) for writer in writers)
    finally:
        over.set()
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
    # What the killed ones had begun ends with their sessions.
    others = "select count(*) from pg_stat_activity where application_name = 'ergon' and datname = current_database()"
    until(lambda: ask(dsn, others) == [(0,)])
    stored, recomputed = both(dsn)
    assert stored == recomputed
    assert counted(stored) == rows_of(dsn) >= len(writers) * rows_each
    assert all(writer.dropped == 0 for writer in writers)


def test_the_clock_that_counts_is_that_of_the_row(dsn):
    """A minute begins where the table says so: an attempt just before it may be rounded into it."""
    emptied(dsn)
    at = MINUTE * (time.time() // MINUTE) - 2e-7
    with connect(dsn, patience=20) as line:
        batch, _ = prepared([attempt(created_at=at)], Sampler(None))
        write(line, batch)
    with psycopg.connect(dsn) as connection:
        (row,) = connection.execute("select minute, created_at from ergon.provider_minutes, "
                                    "ergon.provider_execution_metrics").fetchall()  # fmt: skip
    assert row[0] <= row[1] < row[0] + timedelta(minutes=1)
