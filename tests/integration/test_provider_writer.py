"""Check the writer: recorded attempts are in the tables once, and no call is affected by the state of the tables."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg
import pytest

from ergon_framework.errors import ConfigurationError
from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import AttemptOutcome, HourStats, MinuteStats
from ergon_framework.providers.memory_state import MemoryProviderState
from ergon_framework.providers.postgres.attempt_batch import Sampler, SamplingPolicy, prepare_batch, write_batch
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from ergon_framework.providers.postgres.connection import connect
from ergon_framework.providers.postgres.rollups import attempt_time
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import get_registry
from tests.integration.metering import (
    count_calls,
    count_rows,
    cutting_proxy,
    make_attempt,
    make_random_attempt,
    query,
    read_rollups,
    wait_until,
)
from tests.log_events import get_event, list_events
from tests.servers.databases import create_migrated_database
from tests.servers.postgres import _list_children, free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dsn(database):
    return database


@pytest.fixture
def make_writer():
    """Return a function that makes writers; close them afterwards."""
    writers = []

    def make(dsn, **options):
        writers.append(MetricsWriter(dsn, **options))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close(0.5)


def record_all(writer, rows):
    for row in rows:
        writer.record(row)


# -- rows written -------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-11", "PRV-26")
def test_recorded_attempts_are_in_the_tables(dsn, make_writer):
    rng, now = random.Random(7), time.time()
    rows = [make_random_attempt(rng, now=now) for _ in range(2_500)]
    writer = make_writer(dsn)
    record_all(writer, rows)
    assert writer.close(20)
    assert writer.dropped == 0
    stored_rows = query(
        dsn,
        "select tenant_id, task_execution_id, provider_name, capability, operation, idempotency_key, correlation_id, "
        "attempt_number, max_attempts, duration_ms, timeout_budget_ms, outcome, reason_code, retryable, http_status, "
        "created_at from ergon.provider_execution_metrics order by correlation_id",
    )
    expected = [(*map(to_plain_value, row[:-1]), attempt_time(row.created_at)) for row in rows]
    assert stored_rows == sorted(expected, key=lambda row: row[6])
    stored, recomputed = read_rollups(dsn)
    assert stored == recomputed
    assert count_calls(stored) == len(rows)


def to_plain_value(value):
    return value.value if isinstance(value, AttemptOutcome | ReasonCode) else value


def test_attempts_are_written_automatically(dsn, make_writer):
    writer = make_writer(dsn, every=0.2)
    writer.record(make_attempt())
    wait_until(lambda: count_rows(dsn) == 1)
    # The thread sleeps by then and is woken.
    writer.record(make_attempt())
    wait_until(lambda: count_rows(dsn) == 2)


def test_there_is_no_thread_before_the_first_attempt(dsn, make_writer):
    writer = make_writer(dsn)
    assert writer._thread is None
    assert writer.close()


@pytest.mark.spec("PRV-10", "DX-26")
def test_the_health_state_covers_the_last_hour(dsn, make_writer):
    rng, now = random.Random(3), time.time()
    rows = [make_random_attempt(rng, now=now, tenants=2, span=7_000) for _ in range(900)]
    query(dsn, "insert into ergon.provider_health_states (tenant_id, provider_name, capability, breaker_state) values "
             "('t0', 'pay', 'a', 'open')")  # fmt: skip
    writer = make_writer(dsn)
    # Two batches within the minimum interval between two computations: the second one counts too.
    record_all(writer, rows[:100])
    wait_until(lambda: count_rows(dsn) == 100)
    record_all(writer, rows[100:])
    assert writer.close(20)
    stored, _ = read_rollups(dsn)
    states = query(
        dsn,
        "select tenant_id, provider_name, capability, success_rate_1h, p95_latency_ms_1h, breaker_state, "
        "last_error_code, last_error_at, last_success_at, updated_at from ergon.provider_health_states",
    )
    assert {row[:3] for row in states} == {key[:3] for key in stored}
    for *scope, rate, p95, breaker, code, error_at, success_at, at in states:
        minutes = {key: metrics for key, metrics in stored.items() if list(key[:3]) == scope}
        hour = HourStats.at(
            at.timestamp(),
            [MinuteStats(int(key.minute.timestamp()), metrics.calls) for key, metrics in minutes.items()],
        )
        assert (rate, p95) == (hour.success_rate_1h, hour.p95_latency_ms_1h), scope
        assert breaker == ("open" if scope == ["t0", "pay", "a"] else "closed"), "the breaker's columns are not ours"
        errors = [
            (metrics.last_error_at, metrics.last_error_code) for metrics in minutes.values() if metrics.last_error_at
        ]
        assert (error_at, code) == max(errors, default=(None, None))
        assert success_at == max((t.last_success_at for t in minutes.values() if t.last_success_at), default=None)


def test_rejections_by_the_framework_are_not_errors_of_the_provider(dsn, make_writer):
    writer = make_writer(dsn)
    for code in (ReasonCode.CIRCUIT_OPEN, ReasonCode.QUOTA_EXHAUSTED):
        writer.record(make_attempt(outcome=AttemptOutcome.FAILED, reason_code=code))
    assert writer.close(20)
    assert query(dsn, "select rejected, failed, last_error_code from ergon.provider_minute_rollups") == [(2, 0, None)]
    assert query(dsn, "select success_rate_1h, last_error_code from ergon.provider_health_states") == [(None, None)]


def test_above_the_rate_each_nth_success_has_a_row_and_each_failure_and_all_are_counted(dsn, make_writer):
    at = 60 * (time.time() // 60)
    writer = make_writer(dsn, sample=SamplingPolicy(above=10, every=5))
    for number in range(210):
        is_failure = number >= 200
        code = ReasonCode.TIMEOUT if is_failure else None
        writer.record(
            make_attempt(
                created_at=at, outcome=AttemptOutcome.FAILED if is_failure else AttemptOutcome.SUCCESS, reason_code=code
            )
        )
    writer.record(make_attempt(created_at=at + 1, tenant_id="next second"))
    assert writer.close(20)
    counts = dict(query(dsn, "select outcome, count(*) from ergon.provider_execution_metrics group by 1"))
    assert counts == {"success": 10 + 190 // 5 + 1, "failed": 10}
    assert query(dsn, "select sum(success), sum(failed) from ergon.provider_minute_rollups") == [(201, 10)]


def test_an_attempt_too_early_or_too_late_for_any_partition_is_written(dsn, make_writer):
    now = time.time()
    writer = make_writer(dsn)
    record_all(writer, [make_attempt(created_at=now + shift * 86_400) for shift in (-4_000, -40, 0, 2, 20, 4_000)])
    assert writer.close(20)
    assert count_rows(dsn) == 6
    assert query(dsn, "select count(*) from ergon.provider_execution_metrics_default") == [(4,)]
    assert read_rollups(dsn)[0] == read_rollups(dsn)[1]


# -- exactly once ---------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-26")
@pytest.mark.parametrize("before", [True, False], ids=["before it was heard", "after it was done"])
def test_a_batch_whose_commit_was_interrupted_is_written_once(postgres, dsn, make_writer, before, caplog):
    with cutting_proxy(dsn, postgres.port, word=b"commit", before=before, times=2) as (address, wire):
        writer = make_writer(address, every=0.05)
        record_all(writer, [make_attempt() for _ in range(50)])
        assert writer.close(20)
    # The completed batch is found and not tried again.
    assert wire.remaining_cuts == (0 if before else 1)
    stored, recomputed = read_rollups(dsn)
    assert count_rows(dsn) == count_calls(stored) == 50
    assert stored == recomputed
    assert list_events(caplog.records) == ["provider rows waiting"]


def test_a_batch_is_not_repeated_while_its_first_write_may_still_commit(dsn):
    batch, _ = prepare_batch([make_attempt()], Sampler(None))
    # Another session has claimed its id and has not finished yet.
    with psycopg.connect(dsn) as other, connect(dsn, answer_timeout=10) as connection:
        other.execute("insert into ergon.provider_batches (id) values (%s)", [batch.id])
        thread = threading.Thread(target=write_batch, args=(connection, batch))
        thread.start()
        waiting = (
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        )
        wait_until(lambda: query(dsn, waiting) == [(1,)])
        assert thread.is_alive()
        other.commit()
        thread.join(10)
    assert count_rows(dsn) == 0


def test_rows_that_the_server_rejects_are_dropped_and_the_rest_is_written(dsn, make_writer, caplog):
    invalid_rows = [
        make_attempt(tenant_id="nul \0 nul"),
        make_attempt(provider_name=random.Random(1).randbytes(10_000).hex()),
        make_attempt(capability="lone \ud800"),
        make_attempt(duration_ms=float("nan")),
        make_attempt(created_at=1e300),
        make_attempt(http_status=10**12),
    ]
    rows = [make_attempt() for _ in range(200)]
    for row in invalid_rows:
        rows.insert(random.randrange(len(rows)), row)
    rows.append(make_attempt(correlation_id="long " * 5_000, operation="nul \0 \ud800", idempotency_key="k" * 4_000))
    before = count_dropped("rejected")
    writer = make_writer(dsn)
    record_all(writer, rows)
    assert writer.close(30)
    assert writer.dropped == len(invalid_rows)
    assert count_dropped("rejected") - before == len(invalid_rows)
    stored, recomputed = read_rollups(dsn)
    assert count_rows(dsn) == count_calls(stored) == 201
    assert stored == recomputed
    (first,) = [row for row in caplog.records if get_event(row) == "provider rows dropped"]
    assert (first.levelno, first.reason) == (logging.WARNING, "rejected")
    assert "nul" not in str(vars(first))


def count_dropped(reason):
    samples = get_registry().read(names.PROVIDER_ROWS_DROPPED)
    return sum(value for labels, value in samples if labels["ergon.reason"] == reason)


# -- calls are not affected -----------------------------------------------------------------------------


def measure_slowest_record(writer, count):
    """Return the longest time in seconds that one of *count* records took."""
    longest = 0.0
    for _ in range(count):
        started_at = time.perf_counter()
        writer.record(make_attempt())
        longest = max(longest, time.perf_counter() - started_at)
    return longest


@pytest.mark.spec("PRV-26")
def test_without_a_server_the_writer_keeps_its_capacity_and_counts_the_rest(make_writer, caplog):
    before = count_dropped("full")
    writer = make_writer(f"postgresql://postgres@127.0.0.1:{free_port()}/none", room=100, every=0.01)
    wait_until(lambda: "provider rows waiting" in list_events(caplog.records) or writer.record(make_attempt()))
    record_count = 1_000
    assert measure_slowest_record(writer, record_count) < 0.1
    assert writer.waiting == 100
    assert writer.dropped >= record_count - 100
    assert count_dropped("full") - before == writer.dropped
    started_at, before, rejected_before = time.monotonic(), count_dropped("closed"), count_dropped("rejected")
    assert not writer.close(0.3)
    assert time.monotonic() - started_at < 2
    wait_until(lambda: count_dropped("closed") - before > 100, "those that waited, and the batch that was tried")
    assert count_dropped("rejected") == rejected_before
    writer.record(make_attempt())
    assert writer.waiting == 0
    assert list_events(caplog.records).count("provider rows waiting") == 1


class MeteredState(MemoryProviderState):
    """Provider state of this process whose attempts go to a writer."""

    def __init__(self, writer):
        super().__init__()
        self._writer = writer

    def record(self, row):
        self._writer.record(row)


class EchoProvider(ProviderBase):
    provider_name, capability = "plain", "echo"

    def _execute_impl(self, *, payload, **_):
        return payload


@pytest.mark.spec("PRV-26")
def test_calls_succeed_and_take_no_longer_while_no_row_can_be_written(make_writer):
    def measure_median(state):
        provider, times = EchoProvider(state_store=state), []
        for number in range(300):
            started_at = time.perf_counter()
            assert provider.call("say", {"n": number}) == {"n": number}
            times.append(time.perf_counter() - started_at)
        return statistics.median(times)

    writer = make_writer(f"postgresql://postgres@127.0.0.1:{free_port()}/none", room=50, every=0.01)
    # Alternately, and the best of each: other load of the machine affects both.
    plain_times, metered_times = zip(
        *((measure_median(MemoryProviderState()), measure_median(MeteredState(writer))) for _ in range(5)), strict=True
    )
    assert min(metered_times) < min(plain_times) + 0.0005
    assert writer.dropped > 1_000


@pytest.mark.spec("PRV-26")
def test_a_stopped_server_slows_no_call_and_gets_everything_afterwards(new_postgres, make_writer):
    server = new_postgres(fsync=False)
    dsn = create_migrated_database(server)
    writer = make_writer(dsn, every=0.05, room=500)
    writer.record(make_attempt())
    wait_until(lambda: count_rows(dsn) == 1 and writer._queue.is_asleep, "it has tidied up and sleeps")
    pids = stop_processes(server)
    try:
        assert measure_slowest_record(writer, 400) < 0.1
        wait_until(lambda: writer.waiting < 400, "the thread sits in front of the server that stands still")
        started_at = time.monotonic()
        assert measure_slowest_record(writer, 1_000) < 0.1
        assert time.monotonic() - started_at < 2
        dropped_count = writer.dropped
        assert dropped_count > 0
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert writer.close(20)
    stored, recomputed = read_rollups(dsn)
    assert count_rows(dsn) == count_calls(stored) == 1_401 - dropped_count
    assert stored == recomputed


def stop_processes(server):
    """Stop every process of *server*, the postmaster first so that no new one starts; return their ids."""
    pids = [server.pid]
    os.kill(server.pid, signal.SIGSTOP)
    for pid in _list_children(server.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            pids.append(pid)
    return pids


@pytest.mark.spec("PRV-26")
def test_a_disconnected_server_gets_everything_once_after_reconnection(new_postgres, make_writer, monkeypatch):
    server = new_postgres(fsync=False)
    dsn = create_migrated_database(server)
    monkeypatch.setattr("ergon_framework.providers.postgres.attempt_writer._ANSWER_TIMEOUT_SECONDS", 0.5)
    writer = make_writer(dsn + "?connect_timeout=2", every=0.05)
    writer.record(make_attempt())
    wait_until(lambda: count_rows(dsn) == 1)
    server.partition_network()
    try:
        assert measure_slowest_record(writer, 300) < 0.1
        wait_until(lambda: writer._loop._is_unavailable)
    finally:
        server.heal_network()
    assert writer.close(25)
    stored, recomputed = read_rollups(dsn)
    assert count_rows(dsn) == count_calls(stored) == 301
    assert stored == recomputed


@pytest.mark.spec("PRV-26")
def test_a_server_without_a_free_connection_gets_everything_when_there_is_one(new_postgres, make_writer):
    server = new_postgres(fsync=False, settings={"max_connections": 6, "superuser_reserved_connections": 0})
    dsn = create_migrated_database(server)
    connections = []
    try:
        repeat_until_error(psycopg.OperationalError, lambda: connections.append(psycopg.connect(dsn)))
        writer = make_writer(dsn, every=0.05)
        assert measure_slowest_record(writer, 100) < 0.1
        wait_until(lambda: writer._loop._is_unavailable)
    finally:
        for connection in connections:
            connection.close()
    assert writer.close(20)
    assert count_rows(dsn) == 100


@pytest.mark.spec("PRV-26")
def test_a_server_with_a_full_disk_gets_everything_when_there_is_space(new_postgres, make_writer, tmp_path):
    server = new_postgres(fsync=False)
    dsn = create_migrated_database(server)
    disk = server.folder / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], check=True)
    shutil.chown(disk, "postgres", "postgres")
    try:
        query(dsn, f"create tablespace small location '{disk}'")
        query(dsn, "alter table ergon.provider_batches set tablespace small")
        ballast = disk / "ballast"
        with ballast.open("wb", buffering=0) as file:
            repeat_until_error(OSError, lambda: file.write(b"x" * 4096))
        writer = make_writer(dsn, every=0.05)
        # Fill the existing pages, so that the next row needs the disk.
        insert_batch = "insert into ergon.provider_batches select gen_random_uuid()"
        with psycopg.connect(dsn, autocommit=True) as connection:
            repeat_until_error(psycopg.errors.DiskFull, lambda: connection.execute(insert_batch))
        assert measure_slowest_record(writer, 100) < 0.1
        wait_until(lambda: writer._loop._is_unavailable)
        ballast.unlink()
        assert writer.close(20)
        assert count_rows(dsn) == 100
    finally:
        server.kill()
        subprocess.run(["umount", disk], check=True)


def repeat_until_error(error, action):
    while True:
        try:
            action()
        except error:
            return


def test_an_unreadable_address_is_reported_immediately_and_not_repeated():
    with pytest.raises(ConfigurationError, match="expected something like") as caught:
        MetricsWriter("postgresql://me:open-sesame@[x/y")
    assert "open-sesame" not in str(caught.value)


def test_calls_succeed_when_the_writer_thread_cannot_start(dsn, make_writer, monkeypatch, caplog):
    writer = make_writer(dsn, every=0.05)

    def raise_error(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raise_error)
        writer.record(make_attempt())
    assert "telemetry failed" in list_events(caplog.records)
    writer.record(make_attempt())
    wait_until(lambda: count_rows(dsn) == 2)


def test_a_thread_that_ended_is_replaced(dsn, make_writer, monkeypatch):
    writer = make_writer(dsn, every=0.05)

    def raise_error(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(writer._loop, "_run_once", raise_error)
        patch.setattr(threading, "excepthook", lambda _: None)
        writer.record(make_attempt())
        wait_until(lambda: not writer._thread.is_alive())
    writer.record(make_attempt())
    wait_until(lambda: count_rows(dsn) == 1)


# -- processes ------------------------------------------------------------------------------------------


FORK_PROGRAM = """
import os, sys, time
sys.path.insert(0, {root!r})
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from tests.integration.metering import make_attempt, count_rows, wait_until
dsn = {dsn!r}
writer = MetricsWriter(dsn, every=0.05)
writer.record(make_attempt(tenant_id="parent"))
wait_until(lambda: count_rows(dsn) == 1)
slow = MetricsWriter(dsn, every=60)
slow.record(make_attempt(tenant_id="parent"))
child = os.fork()
if child == 0:
    assert slow.waiting == 0 and writer.waiting == 0
    for one in (writer, slow):
        one.record(make_attempt(tenant_id="child"))
        assert one.close(20)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
writer.record(make_attempt(tenant_id="parent"))
assert writer.close(20) and slow.close(20)
"""


def test_a_forked_child_has_a_separate_thread_and_attempts(dsn):
    script = FORK_PROGRAM.format(root=str(ROOT), dsn=dsn)
    result = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    counts = dict(query(dsn, "select tenant_id, count(*) from ergon.provider_execution_metrics group by 1"))
    assert counts == {"parent": 3, "child": 2}


def test_a_process_that_exits_without_closing_writes_what_it_has(dsn):
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from ergon_framework.providers.postgres.attempt_writer import MetricsWriter\n"
        "from tests.integration.metering import make_attempt\n"
        f"writer = MetricsWriter({dsn!r}, every=60)\nwriter.record(make_attempt())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert count_rows(dsn) == 1
