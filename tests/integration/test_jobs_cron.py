"""Cron entries on a real database: declared, fired once across a fleet, missed, paused, and interrupted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from ergon_framework.connectors.codec import UnencodableError
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import ConfigurationError, ConnectionLostError, MissingExtraError
from ergon_framework.jobs import cron_store
from ergon_framework.jobs.client import AsyncJobClient, JobClient
from ergon_framework.jobs.cron import Cron, CronNotFound, Misfire, tick_id
from ergon_framework.jobs.metrics import job_metrics
from ergon_framework.jobs.model import JobConflict, JobState
from ergon_framework.jobs.orchestrator import CronScheduler
from ergon_framework.telemetry import names
from tests.integration.jobs import (
    ROOT,
    BlockingJobClient,
    ManualWorker,
    make_orchestrator,
    run_sql,
    run_task,
    wait_until,
)
from tests.log_events import get_event
from tests.servers.databases import create_migrated_database

DAILY = "0 3 * * *"
YEARLY = "0 0 1 1 *"
EVERY_SECOND = "* * * * * *"


@pytest.fixture
def dsn(database):
    return database


@pytest.fixture(params=["sync", "async"])
def client(request, dsn):
    job_client = BlockingJobClient(request.param, dsn)
    yield job_client
    job_client.end()


@pytest.fixture
def pool(dsn):
    connection_pool = ConnectionPool(dsn)
    yield connection_pool
    connection_pool.close()


def fire_due(pool):
    """Fire all due entries, as an orchestrator does."""
    batches, tried = [], set()
    while (fired := pool.run(cron_store.fire_next(tried))) is not None:
        batches.append(fired)
    return batches


def make_overdue(dsn, name, interval):
    """Set the entry's next time to *interval* ago, rounded down to the minute, and return it."""
    sql = "update ergon.cron set next_at = date_trunc('minute', now() - %s::interval) where name = %s returning next_at"
    return run_sql(dsn, sql, interval, name)[0][0]


def list_job_keys(dsn):
    return [key for (key,) in run_sql(dsn, "select unique_key from ergon.job order by number")]


# -- declaring --------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-27")
def test_an_entry_is_declared_listed_and_removed(client):
    client.schedule(Cron("nightly", DAILY, "rust#report", [1], zone="Europe/Berlin", misfire="skip", grace=5.0))
    [entry] = client.schedules()
    assert (entry.name, entry.expression, entry.zone) == ("nightly", DAILY, "Europe/Berlin")
    assert (entry.kind, entry.function_name, entry.misfire, entry.grace) == ("rust", "report", Misfire.SKIP, 5.0)
    assert (entry.enabled, entry.last_at) == (True, None)
    assert entry.next_at.astimezone(UTC).hour in {1, 2}
    assert timedelta() < entry.next_at - datetime.now(UTC) < timedelta(hours=25)
    assert client.unschedule("nightly")
    assert not client.unschedule("nightly")
    assert client.schedules() == []


@pytest.mark.spec("EXE-27")
def test_a_redeclared_entry_keeps_its_next_time_unless_its_schedule_changes(client, dsn):
    client.schedule(Cron("nightly", DAILY, "report"))
    next_at = make_overdue(dsn, "nightly", "2 hours")
    client.schedule(Cron("nightly", DAILY, "report"))
    client.schedule(Cron("nightly", DAILY, "other", [1], misfire="all"))
    [entry] = client.schedules()
    assert (entry.next_at, entry.function_name, entry.misfire) == (next_at, "other", Misfire.ALL)
    for change in ({"expression": "0 4 * * *"}, {"expression": "0 4 * * *", "zone": "Asia/Tokyo"}):
        make_overdue(dsn, "nightly", "2 hours")
        client.schedule(Cron(**{"name": "nightly", "expression": DAILY, "function": "other", **change}))
        assert client.schedules()[0].next_at > datetime.now(UTC)


@pytest.mark.spec("EXE-27")
def test_an_invalid_entry_is_rejected_and_nothing_is_written(client):
    for argument in (object(), float("nan"), "\ud800"):
        with pytest.raises(UnencodableError):
            client.schedule(Cron("nightly", DAILY, "report", [argument]))
    with pytest.raises(ConfigurationError):
        client.schedule(Cron("nightly", DAILY, "rust#"))
    assert client.schedules() == []


def test_an_entry_for_an_executor_that_is_not_served_is_rejected(dsn):
    with pytest.raises(ConfigurationError, match="'nightly' is for 'rust'; known executors: python"):
        make_orchestrator(dsn, crons=[Cron("nightly", DAILY, "rust#report")])
    with pytest.raises(ConfigurationError, match="the same name"):
        make_orchestrator(dsn, crons=[Cron("nightly", DAILY, "a"), Cron("nightly", DAILY, "b")])
    with JobClient(dsn, executors=["go"]) as client, pytest.raises(ConfigurationError, match="is for 'python'"):
        client.schedule(Cron("nightly", DAILY, "report"))


def test_without_cronsim_the_error_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(MissingExtraError, match=r"ergon-framework\[cron\]"):
        Cron("nightly", DAILY, "report")


# -- firing -----------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-27")
def test_a_due_entry_becomes_a_job_with_its_scheduled_time_as_its_id(client, dsn, pool):
    options = {"priority": 3, "max_attempts": 2, "timeout": 9.0, "tenant": "acme", "retention": 60.0}
    client.schedule(Cron("yearly", YEARLY, "rust#report", ["a"], {"b": 1}, grace=600.0, **options))
    assert fire_due(pool) == []
    scheduled_at = make_overdue(dsn, "yearly", "30 seconds")
    [fired] = fire_due(pool)
    assert (fired.name, fired.submitted, fired.repeated, fired.missed_since) == ("yearly", 1, 0, None)
    job = client.show(tick_id("yearly", scheduled_at))
    assert job.id == job.unique_key == f"cron:yearly:{scheduled_at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    assert (job.kind, job.function_name, job.priority, job.max_attempts) == ("rust", "report", 3, 2)
    assert (job.timeout, job.tenant, job.state) == (9.0, "acme", JobState.PENDING)
    worker = ManualWorker(dsn, "rust")
    [delivery] = worker.fetch()
    assert delivery.transaction.payload.body == {"function": "rust#report", "args": ["a"], "kwargs": {"b": 1}}
    worker.close()
    [entry] = client.schedules()
    assert entry.last_at == scheduled_at
    assert entry.next_at > datetime.now(UTC)
    assert fire_due(pool) == []


@pytest.mark.spec("EXE-27")
@pytest.mark.parametrize("misfire", Misfire)
def test_after_an_outage_the_misfire_policy_decides_which_times_are_caught_up(client, dsn, pool, misfire):
    client.schedule(Cron("minutely", "* * * * *", "report", misfire=misfire))
    first = make_overdue(dsn, "minutely", "10 minutes")
    [fired] = fire_due(pool)
    [entry] = client.schedules()
    missed_count = (entry.next_at - first) // timedelta(minutes=1)
    assert missed_count in {11, 12}  # a minute may have begun meanwhile
    expected_keys = [tick_id("minutely", first + timedelta(minutes=n)) for n in range(missed_count)]
    expected_keys = {"skip": [], "once": expected_keys[-1:], "all": expected_keys}[misfire]
    assert (fired.submitted, fired.missed_since) == (len(expected_keys), first)
    assert list_job_keys(dsn) == expected_keys
    assert entry.last_at == (None if misfire == "skip" else entry.next_at - timedelta(minutes=1))


@pytest.mark.spec("EXE-27")
def test_misfire_all_is_bounded_and_split_into_several_database_transactions(client, dsn, pool):
    client.schedule(Cron("minutely", "* * * * *", "report", misfire="all"))
    make_overdue(dsn, "minutely", "3 days")
    batches = fire_due(pool)
    assert max(fired.submitted for fired in batches) == cron_store.MAX_TRANSACTION_JOBS
    assert len(set(list_job_keys(dsn))) in {
        cron_store.MAX_CATCH_UP_JOBS,
        cron_store.MAX_CATCH_UP_JOBS + 1,
    }  # a minute may have begun meanwhile


@pytest.mark.spec("EXE-27")
def test_a_time_whose_key_exists_with_another_payload_counts_as_fired(client, dsn, pool):
    client.schedule(Cron("minutely", "* * * * *", "report", ["new"], grace=600.0))
    scheduled_at = make_overdue(dsn, "minutely", "1 minute")
    client.submit("report", "old", unique_key=tick_id("minutely", scheduled_at))
    with pytest.raises(JobConflict):
        client.submit("report", "other", unique_key=tick_id("minutely", scheduled_at))
    [fired] = fire_due(pool)
    assert (fired.submitted in {1, 2}, fired.repeated) == (True, 1)
    assert list_job_keys(dsn) == [
        tick_id("minutely", scheduled_at + timedelta(minutes=n)) for n in range(fired.submitted + 1)
    ]
    assert client.schedules()[0].next_at > datetime.now(UTC)


@pytest.mark.spec("EXE-27")
def test_a_paused_entry_is_not_fired_and_times_in_the_pause_are_not_misfires(client, dsn, pool):
    client.schedule(Cron("daily", DAILY, "report", misfire="all"))
    client.pause_schedule("daily")
    make_overdue(dsn, "daily", "10 days")
    client.schedule(Cron("daily", DAILY, "other", misfire="all"))
    assert fire_due(pool) == []
    assert not client.schedules()[0].enabled
    client.resume_schedule("daily")
    assert client.schedules()[0].next_at > datetime.now(UTC)
    assert fire_due(pool) == []
    for change_state in (client.pause_schedule, client.resume_schedule):
        with pytest.raises(CronNotFound, match="no cron entry 'missing'"):
            change_state("missing")


# -- kills, races, interruptions --------------------------------------------------------------------


class StatementReached(Exception):
    pass


def run_until(operation, statement):
    """Run the operation until *statement* would be executed."""
    try:
        query = next(operation)
        while query.sql != statement:
            query = operation.send((yield query))
    finally:
        operation.close()
    raise StatementReached


@pytest.mark.spec("EXE-27")
@pytest.mark.parametrize("statement", [cron_store.MOVE_NEXT_AT, "commit"])
def test_a_process_killed_before_it_commits_the_next_time_has_submitted_nothing(client, dsn, pool, statement):
    client.schedule(Cron("minutely", "* * * * *", "report", grace=600.0))
    scheduled_at = make_overdue(dsn, "minutely", "20 seconds")
    with pytest.raises(StatementReached):
        pool.run(run_until(cron_store.fire_next(set()), statement))
    assert list_job_keys(dsn) == []
    assert client.schedules()[0].next_at == scheduled_at
    [fired] = fire_due(pool)
    assert fired.submitted in {1, 2, 3}
    assert list_job_keys(dsn)[0] == tick_id("minutely", scheduled_at)
    assert len(list_job_keys(dsn)) == fired.submitted


STALLING_PROGRAM = """
import sys, time
from ergon_framework.jobs import cron_store
from ergon_framework.database.pool import ConnectionPool

def stalled(operation):
    query = next(operation)
    while query.sql != cron_store.MOVE_NEXT_AT:
        query = operation.send((yield query))
    print("submitted", flush=True)
    time.sleep(60)

ConnectionPool(sys.argv[1]).run(stalled(cron_store.fire_next(set())))
"""


@pytest.mark.spec("EXE-27")
def test_a_process_killed_after_a_submission_duplicates_no_job(client, dsn, pool):
    client.schedule(Cron("yearly", YEARLY, "report"))
    scheduled_at = make_overdue(dsn, "yearly", "20 seconds")
    child = subprocess.Popen([sys.executable, "-c", STALLING_PROGRAM, dsn], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout.readline() == b"submitted\n"
        # While the process lives, no other process can lock the entry.
        assert fire_due(pool) == []
    finally:
        child.kill()
        child.communicate()
    fired = asyncio.run(wait_until(lambda: fire_due(pool)))
    assert [each.submitted for each in fired] == [1]
    assert list_job_keys(dsn) == [tick_id("yearly", scheduled_at)]


@pytest.mark.spec("EXE-27")
def test_a_process_suspended_while_it_fires_locks_the_entry_for_seconds_only(client, dsn, pool):
    client.schedule(Cron("yearly", YEARLY, "report"))
    scheduled_at = make_overdue(dsn, "yearly", "20 seconds")
    stopped, resumed = threading.Event(), threading.Event()

    def stall(operation):
        query = next(operation)
        while query.sql != cron_store.MOVE_NEXT_AT:
            query = operation.send((yield query))
        stopped.set()
        resumed.wait(30)
        operation.send((yield query))

    errors = []

    def fire_stalling():
        try:
            pool.run(stall(cron_store.fire_next(set())))
        except ConnectionLostError as error:
            errors.append(error)

    thread = threading.Thread(target=fire_stalling)
    thread.start()
    try:
        assert stopped.wait(10)
        assert fire_due(pool) == []
        assert [each.submitted for each in asyncio.run(wait_until(lambda: fire_due(pool)))] == [1]
    finally:
        resumed.set()
        thread.join()
    assert len(errors) == 1
    assert list_job_keys(dsn) == [tick_id("yearly", scheduled_at)]


@pytest.mark.spec("EXE-27")
def test_racing_schedulers_fire_each_time_of_each_entry_once(dsn):
    entries = [Cron(f"minutely-{n}", "* * * * *", "report", [n], misfire="all", grace=5.0) for n in range(10)]
    with JobClient(dsn) as client:
        client.schedule(*entries)
    first = min(make_overdue(dsn, entry.name, "20 minutes") for entry in entries)
    # Unneeded submissions are recorded too: the lock must prevent them, not the key alone.
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "create function note() returns trigger language plpgsql as "
            "'begin insert into effect values (new.unique_key); return new; end'; "
            "create trigger note before insert on ergon.job for each row execute function note()"
        )
    barrier = threading.Barrier(6)

    def fire_repeatedly():
        pool = ConnectionPool(dsn)
        barrier.wait()
        for _ in range(5):
            fire_due(pool)
        pool.close()

    threads = [threading.Thread(target=fire_repeatedly) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected_keys = {tick_id(entry.name, first + timedelta(minutes=n)) for entry in entries for n in range(21)}
    submitted_keys = [key for (key,) in run_sql(dsn, "select name from effect")]
    assert len(submitted_keys) == len(set(submitted_keys)) == len(list_job_keys(dsn))
    # A minute may have started before all entries were overdue, or since.
    assert expected_keys - {tick_id(entry.name, first) for entry in entries} <= set(submitted_keys)
    assert len(submitted_keys) <= len(expected_keys) + len(entries)


def run_with_scheduler(dsn, test):
    """Run *test* while a cron scheduler fires entries."""

    async def main():
        pool = ConnectionPool(dsn, max_size=2)
        scheduler_task = asyncio.create_task(CronScheduler(pool, task="clockwork-test").run())
        try:
            await test()
        finally:
            scheduler_task.cancel()
            await asyncio.gather(scheduler_task, return_exceptions=True)
            await pool.close_async()

    asyncio.run(main())


@pytest.mark.spec("EXE-27")
def test_an_unreadable_entry_delays_no_other_entry(dsn, caplog):
    with JobClient(dsn) as client:
        client.schedule(Cron("broken", DAILY, "report"), Cron("sound", EVERY_SECOND, "report"))
    run_sql(
        dsn, "update ergon.cron set expression = 'gibberish', next_at = now() - interval '1 day' where name = 'broken'"
    )
    metric_key = (names.CRON_TICKS.name, ("fired",))
    fired_before = job_metrics("clockwork-test").counters().get(metric_key, 0)

    async def test():
        await wait_until(lambda: job_metrics("clockwork-test").counters().get(metric_key, 0) >= fired_before + 3)

    run_with_scheduler(dsn, test)
    assert len(list_job_keys(dsn)) >= 3
    assert all(key.startswith("cron:sound:") for key in list_job_keys(dsn))
    [warning] = [record for record in caplog.records if get_event(record) == "cron schedule not fired"]
    assert warning.cron == "broken"
    assert "gibberish" in warning.error


@pytest.mark.spec("EXE-27")
def test_firing_resumes_after_a_database_outage(new_postgres):
    server = new_postgres()
    dsn = create_migrated_database(server)
    with JobClient(dsn) as client:
        client.schedule(Cron("tick", EVERY_SECOND, "report", grace=600.0))
        first = client.schedules()[0].next_at

    async def test():
        await wait_until(lambda: len(list_job_keys(dsn)) >= 1)
        await asyncio.to_thread(server.restart, "immediate")
        count = len(list_job_keys(dsn))
        await wait_until(lambda: len(list_job_keys(dsn)) >= count + 3)

    run_with_scheduler(dsn, test)
    fired_keys = list_job_keys(dsn)
    assert fired_keys == [tick_id("tick", first + timedelta(seconds=n)) for n in range(len(fired_keys))]


# -- orchestrators ----------------------------------------------------------------------------------


@pytest.mark.spec("EXE-27")
def test_an_orchestrator_declares_its_entries_and_runs_their_jobs(dsn):
    async def main():
        crons = [Cron("tick", EVERY_SECOND, "echo", ["x"])]
        async with AsyncJobClient(dsn) as client, run_task(make_orchestrator(dsn, crons=crons)):
            # The orchestrator also fires entries of others, and soon detects a new one.
            await client.schedule(Cron("other", EVERY_SECOND, "echo", ["y"]))
            return await wait_until(lambda: _list_results(client))

    results = asyncio.run(main())
    assert results == {"x", "y"}


async def _list_results(client):
    results = {job.result for job in await client.list(states=["succeeded"])}
    return results if len(results) > 1 else None


@pytest.mark.spec("EXE-27")
def test_two_orchestrators_one_of_them_killed_fire_every_second_once(postgres):
    dsn = postgres.create_database("cron_chaos")
    command = [sys.executable, "tests/chaos/cron.py", "--seconds", "20", "--kills", "1", "--dsn", dsn]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    report = json.loads(result.stdout.splitlines()[-1])
    assert result.returncode == 0, report
    assert (report["missing"], report["asked_twice"], report["unplanned"]) == ([], [], [])
    assert report["jobs"] == report["ticks"] >= 19
