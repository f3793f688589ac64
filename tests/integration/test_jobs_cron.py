"""Cron entries on a real database: declared, fired once over a fleet, missed, paused, and broken off in the middle."""

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
from ergon_framework.errors import ConfigurationError, ConnectionLost, MissingExtraError
from ergon_framework.executor.jobs import crontab
from ergon_framework.executor.jobs.client import AsyncJobClient, JobClient
from ergon_framework.executor.jobs.clockwork import Clockwork
from ergon_framework.executor.jobs.cron import Cron, CronNotFound, Misfire, job_key
from ergon_framework.executor.jobs.model import JobConflict, JobState
from ergon_framework.executor.jobs.observe import tally_of
from ergon_framework.schema.lines import Lines
from ergon_framework.telemetry import names
from tests.integration.jobs import ROOT, Client, Store, orchestrator, rows, running, until
from tests.log_events import event_of
from tests.servers.databases import migrated

DAILY = "0 3 * * *"
YEARLY = "0 0 1 1 *"
SECOND = "* * * * * *"


@pytest.fixture
def dsn(database):
    return database


@pytest.fixture(params=["sync", "async"])
def client(request, dsn):
    made = Client(request.param, dsn)
    yield made
    made.end()


@pytest.fixture
def lines(dsn):
    made = Lines(dsn)
    yield made
    made.close()


def fire(lines):
    """Fire what is due, as an orchestrator does it."""
    found, tried = [], set()
    while (fired := lines.run(crontab.fire(tried))) is not None:
        found.append(fired)
    return found


def late(dsn, name, interval):
    """Have the entry's next time be so long ago, to the minute; that time."""
    sql = "update ergon.cron set next_at = date_trunc('minute', now() - %s::interval) where name = %s returning next_at"
    return rows(dsn, sql, interval, name)[0][0]


def keys(dsn):
    return [key for (key,) in rows(dsn, "select unique_key from ergon.job order by number")]


# -- declaring --------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-27")
def test_an_entry_is_declared_listed_and_taken_away(client):
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
def test_declared_again_it_keeps_its_place_and_only_another_time_moves_it(client, dsn):
    client.schedule(Cron("nightly", DAILY, "report"))
    was = late(dsn, "nightly", "2 hours")
    client.schedule(Cron("nightly", DAILY, "report"))
    client.schedule(Cron("nightly", DAILY, "other", [1], misfire="all"))
    [entry] = client.schedules()
    assert (entry.next_at, entry.function_name, entry.misfire) == (was, "other", Misfire.ALL)
    for told in ({"expression": "0 4 * * *"}, {"expression": "0 4 * * *", "zone": "Asia/Tokyo"}):
        late(dsn, "nightly", "2 hours")
        client.schedule(Cron(**{"name": "nightly", "expression": DAILY, "function": "other", **told}))
        assert client.schedules()[0].next_at > datetime.now(UTC)


@pytest.mark.spec("EXE-27")
def test_what_is_wrong_is_refused_and_nothing_is_written(client):
    for argument in (object(), float("nan"), "\ud800"):
        with pytest.raises(UnencodableError):
            client.schedule(Cron("nightly", DAILY, "report", [argument]))
    with pytest.raises(ConfigurationError):
        client.schedule(Cron("nightly", DAILY, "rust#"))
    assert client.schedules() == []


def test_an_entry_for_executors_that_are_not_there_is_refused(dsn):
    with pytest.raises(ConfigurationError, match="'nightly' is for 'rust'; the executors here are python"):
        orchestrator(dsn, crons=[Cron("nightly", DAILY, "rust#report")])
    with pytest.raises(ConfigurationError, match="the same name"):
        orchestrator(dsn, crons=[Cron("nightly", DAILY, "a"), Cron("nightly", DAILY, "b")])
    with JobClient(dsn, executors=["go"]) as client, pytest.raises(ConfigurationError, match="is for 'python'"):
        client.schedule(Cron("nightly", DAILY, "report"))


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cronsim", None)
    with pytest.raises(MissingExtraError, match=r"ergon-framework\[cron\]"):
        Cron("nightly", DAILY, "report")


# -- firing -----------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-27")
def test_what_is_due_is_a_job_with_its_scheduled_time_as_its_id(client, dsn, lines):
    told = {"priority": 3, "max_attempts": 2, "timeout": 9.0, "tenant": "acme", "retention": 60.0}
    client.schedule(Cron("yearly", YEARLY, "rust#report", ["a"], {"b": 1}, grace=600.0, **told))
    assert fire(lines) == []
    moment = late(dsn, "yearly", "30 seconds")
    [fired] = fire(lines)
    assert (fired.name, fired.submitted, fired.repeated, fired.missed_since) == ("yearly", 1, 0, None)
    job = client.show(job_key("yearly", moment))
    assert job.id == job.unique_key == f"cron:yearly:{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
    assert (job.kind, job.function_name, job.priority, job.max_attempts) == ("rust", "report", 3, 2)
    assert (job.timeout, job.tenant, job.state) == (9.0, "acme", JobState.PENDING)
    store = Store(dsn, "rust")
    [delivery] = store.fetched()
    assert delivery.transaction.payload.body == {"function": "rust#report", "args": ["a"], "kwargs": {"b": 1}}
    store.close()
    [entry] = client.schedules()
    assert entry.last_at == moment
    assert entry.next_at > datetime.now(UTC)
    assert fire(lines) == []


@pytest.mark.spec("EXE-27")
@pytest.mark.parametrize("misfire", Misfire)
def test_after_an_outage_the_policy_says_what_is_made_up_for(client, dsn, lines, misfire):
    client.schedule(Cron("minutely", "* * * * *", "report", misfire=misfire))
    first = late(dsn, "minutely", "10 minutes")
    [fired] = fire(lines)
    [entry] = client.schedules()
    passed = (entry.next_at - first) // timedelta(minutes=1)
    assert passed in {11, 12}  # a minute may have begun meanwhile
    wanted = [job_key("minutely", first + timedelta(minutes=n)) for n in range(passed)]
    wanted = {"skip": [], "once": wanted[-1:], "all": wanted}[misfire]
    assert (fired.submitted, fired.missed_since) == (len(wanted), first)
    assert keys(dsn) == wanted
    assert entry.last_at == (None if misfire == "skip" else entry.next_at - timedelta(minutes=1))


@pytest.mark.spec("EXE-27")
def test_all_is_bounded_and_made_in_several_database_transactions(client, dsn, lines):
    client.schedule(Cron("minutely", "* * * * *", "report", misfire="all"))
    late(dsn, "minutely", "3 days")
    found = fire(lines)
    assert max(fired.submitted for fired in found) == crontab.GROUP
    assert len(set(keys(dsn))) in {crontab.MOST, crontab.MOST + 1}  # a minute may have begun meanwhile


@pytest.mark.spec("EXE-27")
def test_a_time_whose_key_has_another_payload_was_fired_and_holds_nobody_up(client, dsn, lines):
    client.schedule(Cron("minutely", "* * * * *", "report", ["new"], grace=600.0))
    moment = late(dsn, "minutely", "1 minute")
    client.submit("report", "old", unique_key=job_key("minutely", moment))
    with pytest.raises(JobConflict):
        client.submit("report", "other", unique_key=job_key("minutely", moment))
    [fired] = fire(lines)
    assert (fired.submitted in {1, 2}, fired.repeated) == (True, 1)
    assert keys(dsn) == [job_key("minutely", moment + timedelta(minutes=n)) for n in range(fired.submitted + 1)]
    assert client.schedules()[0].next_at > datetime.now(UTC)


@pytest.mark.spec("EXE-27")
def test_a_paused_entry_is_not_fired_and_what_passed_meanwhile_is_not_missed(client, dsn, lines):
    client.schedule(Cron("daily", DAILY, "report", misfire="all"))
    client.pause_schedule("daily")
    late(dsn, "daily", "10 days")
    client.schedule(Cron("daily", DAILY, "other", misfire="all"))
    assert fire(lines) == []
    assert not client.schedules()[0].enabled
    client.resume_schedule("daily")
    assert client.schedules()[0].next_at > datetime.now(UTC)
    assert fire(lines) == []
    for steer in (client.pause_schedule, client.resume_schedule):
        with pytest.raises(CronNotFound, match="no cron entry 'nobody'"):
            steer("nobody")


# -- dying, racing, breaking ------------------------------------------------------------------------


class Halted(Exception):
    pass


def halted(operation, statement):
    """The operation, until *statement* is about to be made."""
    try:
        query = next(operation)
        while query.sql != statement:
            query = operation.send((yield query))
    finally:
        operation.close()
    raise Halted


@pytest.mark.spec("EXE-27")
@pytest.mark.parametrize("statement", [crontab.MOVE, "commit"])
def test_who_dies_between_the_job_and_the_next_time_has_done_nothing(client, dsn, lines, statement):
    client.schedule(Cron("minutely", "* * * * *", "report", grace=600.0))
    moment = late(dsn, "minutely", "20 seconds")
    with pytest.raises(Halted):
        lines.run(halted(crontab.fire(set()), statement))
    assert keys(dsn) == []
    assert client.schedules()[0].next_at == moment
    [fired] = fire(lines)
    assert fired.submitted in {1, 2, 3}
    assert keys(dsn)[0] == job_key("minutely", moment)
    assert len(keys(dsn)) == fired.submitted


KILLED = """
import sys, time
from ergon_framework.executor.jobs import crontab
from ergon_framework.schema.lines import Lines

def stalled(operation):
    query = next(operation)
    while query.sql != crontab.MOVE:
        query = operation.send((yield query))
    print("submitted", flush=True)
    time.sleep(60)

Lines(sys.argv[1]).run(stalled(crontab.fire(set())))
"""


@pytest.mark.spec("EXE-27")
def test_a_process_that_is_killed_after_it_has_submitted_doubles_nothing(client, dsn, lines):
    client.schedule(Cron("yearly", YEARLY, "report"))
    moment = late(dsn, "yearly", "20 seconds")
    child = subprocess.Popen([sys.executable, "-c", KILLED, dsn], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert child.stdout.readline() == b"submitted\n"
        # While it lives nobody else has the entry.
        assert fire(lines) == []
    finally:
        child.kill()
        child.communicate()
    fired = asyncio.run(until(lambda: fire(lines)))
    assert [one.submitted for one in fired] == [1]
    assert keys(dsn) == [job_key("yearly", moment)]


@pytest.mark.spec("EXE-27")
def test_a_process_that_is_stopped_in_the_middle_keeps_the_entry_for_seconds_only(client, dsn, lines):
    client.schedule(Cron("yearly", YEARLY, "report"))
    moment = late(dsn, "yearly", "20 seconds")
    stopped, resumed = threading.Event(), threading.Event()

    def stalled(operation):
        query = next(operation)
        while query.sql != crontab.MOVE:
            query = operation.send((yield query))
        stopped.set()
        resumed.wait(30)
        operation.send((yield query))

    ended = []

    def work():
        try:
            lines.run(stalled(crontab.fire(set())))
        except ConnectionLost as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert stopped.wait(10)
        assert fire(lines) == []
        assert [one.submitted for one in asyncio.run(until(lambda: fire(lines)))] == [1]
    finally:
        resumed.set()
        thread.join()
    assert len(ended) == 1
    assert keys(dsn) == [job_key("yearly", moment)]


@pytest.mark.spec("EXE-27")
def test_many_who_race_fire_each_time_of_each_entry_once(dsn):
    entries = [Cron(f"minutely-{n}", "* * * * *", "report", [n], misfire="all", grace=5.0) for n in range(10)]
    with JobClient(dsn) as client:
        client.schedule(*entries)
    first = min(late(dsn, entry.name, "20 minutes") for entry in entries)
    # What is asked for in vain is noted too: it is the lock that sees to it, and not the key alone.
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(
            "create function note() returns trigger language plpgsql as "
            "'begin insert into effect values (new.unique_key); return new; end'; "
            "create trigger note before insert on ergon.job for each row execute function note()"
        )
    start = threading.Barrier(6)

    def work():
        lines = Lines(dsn)
        start.wait()
        for _ in range(5):
            fire(lines)
        lines.close()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = {job_key(entry.name, first + timedelta(minutes=n)) for entry in entries for n in range(21)}
    asked = [key for (key,) in rows(dsn, "select name from effect")]
    assert len(asked) == len(set(asked)) == len(keys(dsn))
    # A minute may have begun before all were late, or since.
    assert wanted - {job_key(entry.name, first) for entry in entries} <= set(asked)
    assert len(asked) <= len(wanted) + len(entries)


def looking(dsn, test):
    """Run *test* while somebody fires."""

    async def main():
        lines = Lines(dsn, most=2)
        work = asyncio.create_task(Clockwork(lines, task="clockwork-test").run())
        try:
            await test()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await lines.close_async()

    asyncio.run(main())


@pytest.mark.spec("EXE-27")
def test_an_entry_that_cannot_be_read_keeps_no_other_waiting(dsn, caplog):
    with JobClient(dsn) as client:
        client.schedule(Cron("broken", DAILY, "report"), Cron("sound", SECOND, "report"))
    rows(
        dsn, "update ergon.cron set expression = 'gibberish', next_at = now() - interval '1 day' where name = 'broken'"
    )
    counted = (names.CRON_TICKS.name, ("fired",))
    before = tally_of("clockwork-test").counted().get(counted, 0)

    async def test():
        await until(lambda: tally_of("clockwork-test").counted().get(counted, 0) >= before + 3)

    looking(dsn, test)
    assert len(keys(dsn)) >= 3
    assert all(key.startswith("cron:sound:") for key in keys(dsn))
    [told] = [record for record in caplog.records if event_of(record) == "cron unfired"]
    assert told.cron == "broken"
    assert "gibberish" in told.error


@pytest.mark.spec("EXE-27")
def test_firing_goes_on_after_the_database_was_away(new_postgres):
    server = new_postgres()
    dsn = migrated(server)
    with JobClient(dsn) as client:
        client.schedule(Cron("tick", SECOND, "report", grace=600.0))
        first = client.schedules()[0].next_at

    async def test():
        await until(lambda: len(keys(dsn)) >= 1)
        await asyncio.to_thread(server.restart, "immediate")
        count = len(keys(dsn))
        await until(lambda: len(keys(dsn)) >= count + 3)

    looking(dsn, test)
    found = keys(dsn)
    assert found == [job_key("tick", first + timedelta(seconds=n)) for n in range(len(found))]


# -- orchestrators ----------------------------------------------------------------------------------


@pytest.mark.spec("EXE-27")
def test_an_orchestrator_declares_its_entries_and_runs_their_jobs(dsn):
    async def main():
        crons = [Cron("tick", SECOND, "echo", ["x"])]
        async with AsyncJobClient(dsn) as client, running(orchestrator(dsn, crons=crons)):
            # Of others it fires too, and it is soon noticed that there is one.
            await client.schedule(Cron("other", SECOND, "echo", ["y"]))
            return await until(lambda: _succeeded(client))

    results = asyncio.run(main())
    assert results == {"x", "y"}


async def _succeeded(client):
    found = {job.result for job in await client.list(states=["succeeded"])}
    return found if len(found) > 1 else None


@pytest.mark.spec("EXE-27")
def test_two_orchestrators_one_of_them_killed_fire_every_second_once(postgres):
    dsn = postgres.create_database("cron_chaos")
    words = [sys.executable, "tests/chaos/cron.py", "--seconds", "20", "--kills", "1", "--dsn", dsn]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, found
    assert (found["missing"], found["asked_twice"], found["unplanned"]) == ([], [], [])
    assert found["jobs"] == found["ticks"] >= 19
