"""Roll-ups equal a recomputation from their rows, however the rows are split, by several writers and after kills."""

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
from ergon_framework.providers.health import BUCKET_BOUNDS_MS, MINUTE_SECONDS, AttemptOutcome, HourStats, MinuteStats
from ergon_framework.providers.http.health_reader import read_summary
from ergon_framework.providers.postgres.attempt_batch import Sampler, prepare_batch, write_batch
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from ergon_framework.providers.postgres.connection import connect
from tests.integration.metering import (
    count_calls,
    count_rows,
    make_attempt,
    make_random_attempt,
    query,
    read_rollups,
    wait_until,
)
from tests.servers.databases import create_migrated_database

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dsn(postgres):
    return create_migrated_database(postgres)


TABLES = ("provider_execution_metrics", "provider_minute_rollups", "provider_batches", "provider_health_states")


def empty_tables(dsn):
    query(dsn, f"truncate {', '.join(f'ergon.{name}' for name in TABLES)}")


@st.composite
def attempt_fields(draw):
    code = draw(st.sampled_from([None, None, *ReasonCode]))
    failed_outcomes = st.sampled_from([AttemptOutcome.RETRY, AttemptOutcome.FAILED, AttemptOutcome.DEAD_LETTER])
    edges = st.sampled_from([0.0, *BUCKET_BOUNDS_MS, *(bound * (1 + 1e-12) for bound in BUCKET_BOUNDS_MS), 1e6])
    # In few minutes, so that batches share them; also at their exact edges, where rounding to the microsecond decides.
    age = st.one_of(
        st.floats(0, 100), st.sampled_from([0, 1, 59, 60, 61]).map(lambda n: n * MINUTE_SECONDS + 30 + 4e-7)
    )
    return {
        "tenant_id": draw(st.sampled_from(["a", "b"])),
        "capability": draw(st.sampled_from(["x", "y"])),
        "duration_ms": draw(st.one_of(edges, st.floats(0, 200_000))),
        "reason_code": code,
        "outcome": AttemptOutcome.SUCCESS if code is None else draw(failed_outcomes),
        "created_at": MINUTE_SECONDS * (time.time() // MINUTE_SECONDS) + 30 - draw(age),
    }


@pytest.mark.spec("PRV-10", "PRV-26")
@settings(max_examples=settings().max_examples // 6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(st.lists(attempt_fields(), min_size=1, max_size=12), min_size=1, max_size=6))
def test_minutes_match_their_rows_for_any_split_into_batches(dsn, batches):
    empty_tables(dsn)
    with connect(dsn, answer_timeout=20) as connection:
        for fields in batches:
            batch, rejected = prepare_batch([make_attempt(**one) for one in fields], Sampler(None))
            assert not rejected
            write_batch(connection, batch)
            # Twice is once.
            write_batch(connection, batch)
        stored, recomputed = read_rollups(dsn)
        assert stored == recomputed
        assert count_calls(stored) == sum(map(len, batches))
        for tenant in ("a", "b"):
            tenant_summary = read_summary(connection, tenant)
            for health in tenant_summary.providers:
                hour = HourStats.at(
                    tenant_summary.generated_at.timestamp(),
                    [
                        MinuteStats(int(minute_key.minute.timestamp()), stored_minute.calls)
                        for minute_key, stored_minute in stored.items()
                        if minute_key[:3] == (tenant, health.provider_name, health.capability)
                    ],
                )
                assert health.success_rate_1h == hour.success_rate_1h
                assert health.p95_latency_ms_1h == hour.p95_latency_ms_1h


WRITER_PROGRAM = """
import random, sys, time
sys.path.insert(0, {root!r})
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from tests.integration.metering import make_random_attempt
dice = random.Random({seed})
writer = MetricsWriter({dsn!r}, every=0.01)
print("on", flush=True)
while True:
    for _ in range(50):
        writer.record(make_random_attempt(dice, now=time.time()))
    time.sleep(0.005)
"""


@pytest.mark.spec("PRV-26")
def test_minutes_match_their_rows_when_writers_are_killed_or_lose_connections(postgres):
    dsn = create_migrated_database(postgres)
    rng = random.Random(11)
    commands = [[sys.executable, "-c", WRITER_PROGRAM.format(root=str(ROOT), seed=seed, dsn=dsn)] for seed in range(2)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    writers = [MetricsWriter(dsn, every=0.02, room=100_000) for _ in range(2)]
    rows_per_writer = 2_000
    stopped = threading.Event()

    def record_attempts(writer, seed):
        writer_rng = random.Random(seed)
        for number in range(rows_per_writer):
            writer.record(make_random_attempt(writer_rng, now=time.time()))
            if number % 50 == 0:
                stopped.wait(0.01)

    def terminate_sessions():
        """Terminate sessions, at any moment of a batch."""
        for _ in range(12):
            stopped.wait(rng.uniform(0.02, 0.2))
            query(
                dsn,
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'ergon' "
                "and datname = current_database() order by random() limit 1",
            )

    try:
        for child in children:
            assert child.stdout.readline() == b"on\n"
        threads = [threading.Thread(target=record_attempts, args=(writer, seed)) for seed, writer in enumerate(writers)]
        terminator = threading.Thread(target=terminate_sessions)
        for thread in (*threads, terminator):
            thread.start()
        for thread in threads:
            thread.join(60)
        terminator.join(30)
        wait_until(lambda: count_rows(dsn) > rows_per_writer)
        for child in children:
            child.send_signal(signal.SIGKILL)
        assert all(writer.close(30) for writer in writers)
    finally:
        stopped.set()
        for child in children:
            child.kill()
            child.wait()
            child.stdout.close()
    # Transactions of the killed writers end with their sessions.
    other_sessions_query = (
        "select count(*) from pg_stat_activity where application_name = 'ergon' and datname = current_database()"
    )
    wait_until(lambda: query(dsn, other_sessions_query) == [(0,)])
    stored, recomputed = read_rollups(dsn)
    assert stored == recomputed
    assert count_calls(stored) == count_rows(dsn) >= len(writers) * rows_per_writer
    assert all(writer.dropped == 0 for writer in writers)


def test_an_attempt_belongs_to_the_minute_of_its_row(dsn):
    """A minute starts at the table's time: an attempt just before it may be rounded into it."""
    empty_tables(dsn)
    at = MINUTE_SECONDS * (time.time() // MINUTE_SECONDS) - 2e-7
    with connect(dsn, answer_timeout=20) as writer_connection:
        batch, _ = prepare_batch([make_attempt(created_at=at)], Sampler(None))
        write_batch(writer_connection, batch)
    with psycopg.connect(dsn) as connection:
        (row,) = connection.execute("select minute, created_at from ergon.provider_minute_rollups, "
                                    "ergon.provider_execution_metrics").fetchall()  # fmt: skip
    assert row[0] <= row[1] < row[0] + timedelta(minutes=1)
