"""The writer: what was recorded is in the tables once, and whatever happens to them, no call notices."""

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
from ergon_framework.providers.health import Hour, Minute, Outcome
from ergon_framework.providers.memory import MemoryBooks
from ergon_framework.providers.sql.batch import prepared
from ergon_framework.providers.sql.minutes import moment
from ergon_framework.providers.sql.reaching import connect
from ergon_framework.providers.sql.sampling import Sample, Sampler
from ergon_framework.providers.sql.writer import MetricsWriter
from ergon_framework.providers.sql.writing import write
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import registry_of
from tests.integration.metering import ask, attempt, both, chance, counted, rows_of, until, wired
from tests.log_events import event_of, events_of
from tests.servers.databases import migrated
from tests.servers.postgres import _children, free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dsn(database):
    return database


@pytest.fixture
def writer_of():
    """Makes writers, and closes them."""
    made = []

    def make(dsn, **options):
        made.append(MetricsWriter(dsn, **options))
        return made[-1]

    yield make
    for writer in made:
        writer.close(0.5)


def filled(writer, rows):
    for row in rows:
        writer.record(row)


# -- what is written ----------------------------------------------------------------------------------


@pytest.mark.spec("PRV-11", "PRV-26")
def test_what_was_recorded_is_in_the_tables(dsn, writer_of):
    dice, now = random.Random(7), time.time()
    rows = [chance(dice, now=now) for _ in range(2_500)]
    writer = writer_of(dsn)
    filled(writer, rows)
    assert writer.close(20)
    assert writer.dropped == 0
    found = ask(
        dsn,
        "select tenant_id, task_execution_id, provider_name, capability, operation, idempotency_key, correlation_id, "
        "attempt_number, max_attempts, duration_ms, timeout_budget_ms, outcome, reason_code, retryable, http_status, "
        "created_at from ergon.provider_execution_metrics order by correlation_id",
    )
    wanted = [(*map(plain, row[:-1]), moment(row.created_at)) for row in rows]
    assert found == sorted(wanted, key=lambda row: row[6])
    stored, recomputed = both(dsn)
    assert stored == recomputed
    assert counted(stored) == len(rows)


def plain(value):
    return value.value if isinstance(value, Outcome | ReasonCode) else value


def test_it_is_written_without_being_told_to(dsn, writer_of):
    writer = writer_of(dsn, every=0.2)
    writer.record(attempt())
    until(lambda: rows_of(dsn) == 1)
    # The thread sleeps by then, and is woken.
    writer.record(attempt())
    until(lambda: rows_of(dsn) == 2)


def test_before_the_first_attempt_there_is_no_thread(dsn, writer_of):
    writer = writer_of(dsn)
    assert writer._thread is None
    assert writer.close()


@pytest.mark.spec("PRV-10", "DX-26")
def test_the_health_state_is_that_of_the_last_hour(dsn, writer_of):
    dice, now = random.Random(3), time.time()
    rows = [chance(dice, now=now, tenants=2, span=7_000) for _ in range(900)]
    ask(dsn, "insert into ergon.provider_health_states (tenant_id, provider_name, capability, breaker_state) values "
             "('t0', 'pay', 'a', 'open')")  # fmt: skip
    writer = writer_of(dsn)
    # Two batches within the shortest time between two computations: the second one counts too.
    filled(writer, rows[:100])
    until(lambda: rows_of(dsn) == 100)
    filled(writer, rows[100:])
    assert writer.close(20)
    stored, _ = both(dsn)
    found = ask(
        dsn,
        "select tenant_id, provider_name, capability, success_rate_1h, p95_latency_ms_1h, breaker_state, "
        "last_error_code, last_error_at, last_success_at, updated_at from ergon.provider_health_states",
    )
    assert {row[:3] for row in found} == {place[:3] for place in stored}
    for *who, rate, p95, breaker, code, error_at, success_at, at in found:
        mine = {place: tally for place, tally in stored.items() if list(place[:3]) == who}
        hour = Hour.at(
            at.timestamp(),
            [Minute(int(place.minute.timestamp()), tally.calls) for place, tally in mine.items()],
        )
        assert (rate, p95) == (hour.success_rate_1h, hour.p95_latency_ms_1h), who
        assert breaker == ("open" if who == ["t0", "pay", "a"] else "closed"), "the breaker's columns are not ours"
        errors = [(tally.last_error_at, tally.last_error_code) for tally in mine.values() if tally.last_error_at]
        assert (error_at, code) == max(errors, default=(None, None))
        assert success_at == max((t.last_success_at for t in mine.values() if t.last_success_at), default=None)


def test_what_we_refused_ourselves_is_no_error_of_the_provider(dsn, writer_of):
    writer = writer_of(dsn)
    for code in (ReasonCode.CIRCUIT_OPEN, ReasonCode.QUOTA_EXHAUSTED):
        writer.record(attempt(outcome=Outcome.FAILED, reason_code=code))
    assert writer.close(20)
    assert ask(dsn, "select refused, failed, last_error_code from ergon.provider_minutes") == [(2, 0, None)]
    assert ask(dsn, "select success_rate_1h, last_error_code from ergon.provider_health_states") == [(None, None)]


def test_above_the_rate_each_nth_success_has_a_row_and_each_failure_and_all_are_counted(dsn, writer_of):
    at = 60 * (time.time() // 60)
    writer = writer_of(dsn, sample=Sample(above=10, every=5))
    for number in range(210):
        bad = number >= 200
        code = ReasonCode.TIMEOUT if bad else None
        writer.record(attempt(created_at=at, outcome=Outcome.FAILED if bad else Outcome.SUCCESS, reason_code=code))
    writer.record(attempt(created_at=at + 1, tenant_id="next second"))
    assert writer.close(20)
    found = dict(ask(dsn, "select outcome, count(*) from ergon.provider_execution_metrics group by 1"))
    assert found == {"success": 10 + 190 // 5 + 1, "failed": 10}
    assert ask(dsn, "select sum(success), sum(failed) from ergon.provider_minutes") == [(201, 10)]


def test_an_attempt_too_early_or_too_late_for_any_partition_fails_nobody(dsn, writer_of):
    now = time.time()
    writer = writer_of(dsn)
    filled(writer, [attempt(created_at=now + shift * 86_400) for shift in (-4_000, -40, 0, 2, 20, 4_000)])
    assert writer.close(20)
    assert rows_of(dsn) == 6
    assert ask(dsn, "select count(*) from ergon.provider_execution_metrics_rest") == [(4,)]
    assert both(dsn)[0] == both(dsn)[1]


# -- once -----------------------------------------------------------------------------------------------


@pytest.mark.spec("PRV-26")
@pytest.mark.parametrize("before", [True, False], ids=["before it was heard", "after it was done"])
def test_a_batch_whose_commit_was_cut_off_is_written_once(postgres, dsn, writer_of, before, caplog):
    with wired(dsn, postgres.port, word=b"commit", before=before, times=2) as (address, wire):
        writer = writer_of(address, every=0.05)
        filled(writer, [attempt() for _ in range(50)])
        assert writer.close(20)
    # What was done is found to be, and not tried again.
    assert wire.left == (0 if before else 1)
    stored, recomputed = both(dsn)
    assert rows_of(dsn) == counted(stored) == 50
    assert stored == recomputed
    assert events_of(caplog.records) == ["provider rows wait"]


def test_a_batch_is_not_repeated_while_its_first_self_may_still_commit(dsn):
    batch, _ = prepared([attempt()], Sampler(None))
    # Its id is claimed by somebody who has not said yet how it ends.
    with psycopg.connect(dsn) as other, connect(dsn, patience=10) as line:
        other.execute("insert into ergon.provider_batches (id) values (%s)", [batch.id])
        thread = threading.Thread(target=write, args=(line, batch))
        thread.start()
        waiting = (
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        )
        until(lambda: ask(dsn, waiting) == [(1,)])
        assert thread.is_alive()
        other.commit()
        thread.join(10)
    assert rows_of(dsn) == 0


def test_what_the_server_will_never_take_is_dropped_and_the_rest_is_written(dsn, writer_of, caplog):
    bad = [
        attempt(tenant_id="nul \0 nul"),
        attempt(provider_name=random.Random(1).randbytes(10_000).hex()),
        attempt(capability="lone \ud800"),
        attempt(duration_ms=float("nan")),
        attempt(created_at=1e300),
        attempt(http_status=10**12),
    ]
    rows = [attempt() for _ in range(200)]
    for one in bad:
        rows.insert(random.randrange(len(rows)), one)
    rows.append(attempt(correlation_id="long " * 5_000, operation="nul \0 \ud800", idempotency_key="k" * 4_000))
    before = dropped("refused")
    writer = writer_of(dsn)
    filled(writer, rows)
    assert writer.close(30)
    assert writer.dropped == len(bad)
    assert dropped("refused") - before == len(bad)
    stored, recomputed = both(dsn)
    assert rows_of(dsn) == counted(stored) == 201
    assert stored == recomputed
    (first,) = [one for one in caplog.records if event_of(one) == "provider rows dropped"]
    assert (first.levelno, first.reason) == (logging.WARNING, "refused")
    assert "nul" not in str(vars(first))


def dropped(reason):
    found = registry_of().read(names.PROVIDER_ROWS_DROPPED)
    return sum(value for labels, value in found if labels["ergon.reason"] == reason)


# -- no call notices ------------------------------------------------------------------------------------


def hurried(writer, count):
    """The longest that one of *count* records took."""
    longest = 0.0
    for _ in range(count):
        began = time.perf_counter()
        writer.record(attempt())
        longest = max(longest, time.perf_counter() - began)
    return longest


@pytest.mark.spec("PRV-26")
def test_with_no_server_it_keeps_what_there_is_room_for_and_counts_the_rest(writer_of, caplog):
    before = dropped("full")
    writer = writer_of(f"postgresql://postgres@127.0.0.1:{free_port()}/none", room=100, every=0.01)
    until(lambda: "provider rows wait" in events_of(caplog.records) or writer.record(attempt()))
    taken = 1_000
    assert hurried(writer, taken) < 0.1
    assert writer.waiting == 100
    assert writer.dropped >= taken - 100
    assert dropped("full") - before == writer.dropped
    began, before, refused = time.monotonic(), dropped("closed"), dropped("refused")
    assert not writer.close(0.3)
    assert time.monotonic() - began < 2
    until(lambda: dropped("closed") - before > 100, "those that waited, and the batch that was tried")
    assert dropped("refused") == refused
    writer.record(attempt())
    assert writer.waiting == 0
    assert events_of(caplog.records).count("provider rows wait") == 1


class Metered(MemoryBooks):
    """Books of this process whose attempts go to a writer."""

    def __init__(self, writer):
        super().__init__()
        self._writer = writer

    def record(self, row):
        self._writer.record(row)


class Plain(ProviderBase):
    provider_name, capability = "plain", "echo"

    def _execute_impl(self, *, payload, **_):
        return payload


@pytest.mark.spec("PRV-26")
def test_calls_succeed_and_take_no_longer_while_nothing_can_be_written(writer_of):
    def took(books):
        provider, times = Plain(books=books), []
        for number in range(300):
            began = time.perf_counter()
            assert provider.call("say", {"n": number}) == {"n": number}
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    writer = writer_of(f"postgresql://postgres@127.0.0.1:{free_port()}/none", room=50, every=0.01)
    # In turn, and the best of each: what else the machine does counts for both.
    plain, metered = zip(*((took(MemoryBooks()), took(Metered(writer))) for _ in range(5)), strict=True)
    assert min(metered) < min(plain) + 0.0005
    assert writer.dropped > 1_000


@pytest.mark.spec("PRV-26")
def test_a_server_that_stands_still_slows_nobody_and_gets_everything_afterwards(new_postgres, writer_of):
    server = new_postgres(fsync=False)
    dsn = migrated(server)
    writer = writer_of(dsn, every=0.05, room=500)
    writer.record(attempt())
    until(lambda: rows_of(dsn) == 1 and writer._tray.asleep, "it has tidied up and sleeps")
    pids = stopped(server)
    try:
        assert hurried(writer, 400) < 0.1
        until(lambda: writer.waiting < 400, "the thread sits in front of the server that stands still")
        began = time.monotonic()
        assert hurried(writer, 1_000) < 0.1
        assert time.monotonic() - began < 2
        lost = writer.dropped
        assert lost > 0
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert writer.close(20)
    stored, recomputed = both(dsn)
    assert rows_of(dsn) == counted(stored) == 1_401 - lost
    assert stored == recomputed


def stopped(server):
    """Every process of *server*, which stands still now; the postmaster first, so that there is no new one."""
    pids = [server.pid]
    os.kill(server.pid, signal.SIGSTOP)
    for pid in _children(server.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            pids.append(pid)
    return pids


@pytest.mark.spec("PRV-26")
def test_a_server_that_is_cut_off_and_mended_gets_everything_once(new_postgres, writer_of, monkeypatch):
    server = new_postgres(fsync=False)
    dsn = migrated(server)
    monkeypatch.setattr("ergon_framework.providers.sql.desk._PATIENCE", 0.5)
    writer = writer_of(dsn + "?connect_timeout=2", every=0.05)
    writer.record(attempt())
    until(lambda: rows_of(dsn) == 1)
    server.cut()
    try:
        assert hurried(writer, 300) < 0.1
        until(lambda: writer._desk._away)
    finally:
        server.mend()
    assert writer.close(25)
    stored, recomputed = both(dsn)
    assert rows_of(dsn) == counted(stored) == 301
    assert stored == recomputed


@pytest.mark.spec("PRV-26")
def test_a_server_without_a_connection_to_spare_gets_everything_when_there_is_one(new_postgres, writer_of):
    server = new_postgres(fsync=False, settings={"max_connections": 6, "superuser_reserved_connections": 0})
    dsn = migrated(server)
    held = []
    try:
        again_until(psycopg.OperationalError, lambda: held.append(psycopg.connect(dsn)))
        writer = writer_of(dsn, every=0.05)
        assert hurried(writer, 100) < 0.1
        until(lambda: writer._desk._away)
    finally:
        for connection in held:
            connection.close()
    assert writer.close(20)
    assert rows_of(dsn) == 100


@pytest.mark.spec("PRV-26")
def test_a_server_whose_disk_is_full_gets_everything_when_there_is_room(new_postgres, writer_of, tmp_path):
    server = new_postgres(fsync=False)
    dsn = migrated(server)
    disk = server.folder / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], check=True)
    shutil.chown(disk, "postgres", "postgres")
    try:
        ask(dsn, f"create tablespace small location '{disk}'")
        ask(dsn, "alter table ergon.provider_batches set tablespace small")
        ballast = disk / "ballast"
        with ballast.open("wb", buffering=0) as file:
            again_until(OSError, lambda: file.write(b"x" * 4096))
        writer = writer_of(dsn, every=0.05)
        # Fill the pages that are there, so that the next row needs the disk.
        more = "insert into ergon.provider_batches select gen_random_uuid()"
        with psycopg.connect(dsn, autocommit=True) as connection:
            again_until(psycopg.errors.DiskFull, lambda: connection.execute(more))
        assert hurried(writer, 100) < 0.1
        until(lambda: writer._desk._away)
        ballast.unlink()
        assert writer.close(20)
        assert rows_of(dsn) == 100
    finally:
        server.kill()
        subprocess.run(["umount", disk], check=True)


def again_until(error, act):
    while True:
        try:
            act()
        except error:
            return


def test_an_address_that_cannot_be_read_is_told_at_once_and_not_repeated():
    with pytest.raises(ConfigurationError, match="it looks like") as caught:
        MetricsWriter("postgresql://me:open-sesame@[x/y")
    assert "open-sesame" not in str(caught.value)


def test_where_no_thread_can_be_had_no_call_fails(dsn, writer_of, monkeypatch, caplog):
    writer = writer_of(dsn, every=0.05)

    def refused(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        writer.record(attempt())
    assert "telemetry failed" in events_of(caplog.records)
    writer.record(attempt())
    until(lambda: rows_of(dsn) == 2)


def test_a_thread_that_came_to_an_end_is_replaced(dsn, writer_of, monkeypatch):
    writer = writer_of(dsn, every=0.05)

    def broken(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(writer._desk, "_turn", broken)
        patch.setattr(threading, "excepthook", lambda _: None)
        writer.record(attempt())
        until(lambda: not writer._thread.is_alive())
    writer.record(attempt())
    until(lambda: rows_of(dsn) == 1)


# -- processes ------------------------------------------------------------------------------------------


FORK = """
import os, sys, time
sys.path.insert(0, {root!r})
from ergon_framework.providers.sql.writer import MetricsWriter
from tests.integration.metering import attempt, rows_of, until
dsn = {dsn!r}
writer = MetricsWriter(dsn, every=0.05)
writer.record(attempt(tenant_id="parent"))
until(lambda: rows_of(dsn) == 1)
slow = MetricsWriter(dsn, every=60)
slow.record(attempt(tenant_id="parent"))
child = os.fork()
if child == 0:
    assert slow.waiting == 0 and writer.waiting == 0
    for one in (writer, slow):
        one.record(attempt(tenant_id="child"))
        assert one.close(20)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
writer.record(attempt(tenant_id="parent"))
assert writer.close(20) and slow.close(20)
"""


def test_a_forked_child_has_a_thread_and_attempts_of_its_own(dsn):
    script = FORK.format(root=str(ROOT), dsn=dsn)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = dict(ask(dsn, "select tenant_id, count(*) from ergon.provider_execution_metrics group by 1"))
    assert found == {"parent": 3, "child": 2}


def test_a_process_that_ends_without_closing_writes_what_it_has(dsn):
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from ergon_framework.providers.sql.writer import MetricsWriter\n"
        "from tests.integration.metering import attempt\n"
        f"writer = MetricsWriter({dsn!r}, every=60)\nwriter.record(attempt())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert rows_of(dsn) == 1
