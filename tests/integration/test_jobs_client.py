"""The client of jobs: submit, unique keys, the caller's database transaction, cancel, kill, wait, list, replay."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
import sqlalchemy as sa

from ergon_framework import scope
from ergon_framework.connectors.base import Ack, DeadLetter, Later
from ergon_framework.connectors.codec import UnencodableError
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.executor.jobs import attempts
from ergon_framework.executor.jobs.client import AsyncJobClient, JobClient
from ergon_framework.executor.jobs.model import JobConflict, JobNotFound, JobState, JobWaitTimeout, NotReplayable
from ergon_framework.executor.jobs.request import Request
from ergon_framework.executor.verdict import Again, Blame, Bury, Complete
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction
from tests.integration.jobs import Client, Store, rows
from tests.integration.libraries import ASYNC, SYNC

BLAME = Blame(Category.SYSTEM, "executor_error", "no", "ValueError", "Traceback")


@pytest.fixture
def dsn(database):
    return database


@pytest.fixture(params=["sync", "async"])
def client(request, dsn):
    made = Client(request.param, dsn)
    yield made
    made.end()


@pytest.fixture
def store(dsn):
    made = Store(dsn)
    yield made
    made.close()


# -- submit ---------------------------------------------------------------------------------------


def test_a_job_is_a_row_and_a_message_with_its_arguments(client, store):
    got = client.submit("rust#send", 1, {"a": [2]}, kwargs={"flag": True}, tenant="acme", correlation="c", priority=3)
    job = client.show(got.id)
    assert (got.created, job.state, job.kind, job.function_name) == (True, JobState.PENDING, "rust", "send")
    assert (job.tenant, job.correlation, job.priority, job.attempts, job.result) == ("acme", "c", 3, 0, None)
    other = Store(store.queue.address, "rust")
    [delivery] = other.fetched()
    assert delivery.transaction.id == got.id
    assert delivery.transaction.payload.body == {
        "function": "rust#send",
        "args": [1, {"a": [2]}],
        "kwargs": {"flag": True},
    }
    other.close()


@pytest.mark.parametrize("how", ["delay", "at"])
def test_a_delayed_job_is_not_claimed_before_its_time(client, store, how):
    told = {"delay": 0.6} if how == "delay" else {"at": datetime.now(UTC) + timedelta(seconds=0.6)}
    later = client.submit("echo", 1, **told)
    now = client.submit("echo", 2)
    assert [one.transaction.id for one in store.queue.fetch_transactions(10)] == [now.id]
    assert store.queue.fetch_transactions(10) == []
    [delivery] = store.fetched()
    assert delivery.transaction.id == later.id
    job = client.show(later.id)
    assert 0.4 < (job.due_at - job.created_at).total_seconds() < 0.7


def test_a_moment_that_has_passed_is_now(client, store):
    got = client.submit("echo", at=datetime.now(UTC) - timedelta(days=1))
    assert [one.transaction.id for one in store.queue.fetch_transactions(10)] == [got.id]


def test_the_more_urgent_is_sooner(client, store):
    ids = [client.submit("echo", n, priority=n).id for n in (0, -1, 5)]
    # One at a time: what is claimed together comes in no order.
    taken = [store.queue.fetch_transactions(1)[0].transaction.id for _ in ids]
    assert taken == [ids[2], ids[0], ids[1]]


@pytest.mark.parametrize(
    "told, words",
    [
        ({"delay": -1}, "a delay is between"),
        ({"delay": float("nan")}, "a delay is between"),
        ({"at": datetime(2026, 1, 1)}, "names its zone"),  # noqa: DTZ001 - that is the point
        ({"priority": 101}, "between -100 and 100"),
        ({"max_attempts": 0}, "at least 1 attempt"),
        ({"timeout": 0}, "a timeout is"),
        ({"retention": -1}, "a retention is"),
        ({"unique_key": ""}, "a unique key has"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_value(client, told, words):
    with pytest.raises(ConfigurationError, match=words):
        client.submit("echo", **told)


@pytest.mark.parametrize("name", ["", "rust#", "x" * 1025])
def test_a_name_that_no_route_can_have_is_the_callers_slip(client, name):
    with pytest.raises(ConfigurationError):
        client.submit(name)


def test_arguments_that_are_no_json_are_refused_and_nothing_is_written(client):
    for argument in (object(), float("nan"), "\ud800"):
        with pytest.raises(UnencodableError):
            client.submit("echo", argument)
    assert client.list() == []


def test_without_a_database_it_says_what_to_set(monkeypatch):
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    with pytest.raises(ConfigurationError, match="ERGON_POSTGRES__DSN"):
        JobClient()


def test_before_the_upgrade_it_says_what_to_run(postgres):
    with (
        JobClient(postgres.create_database("jobs_unmade")) as client,
        pytest.raises(ConfigurationError, match="upgrade"),
    ):
        client.submit("echo")


# -- one key, one job -----------------------------------------------------------------------------


@pytest.mark.spec("EXE-27")
def test_the_same_job_under_one_key_is_the_job_that_exists(client, store):
    first = client.submit("charge", {"b": 1, "a": 2}, unique_key="order-7")
    again = client.submit("python#charge", {"a": 2, "b": 1}, unique_key="order-7")
    assert (again.id, first.created, again.created) == (first.id, True, False)
    assert len(store.queue.fetch_transactions(10)) == 1


@pytest.mark.spec("EXE-27")
@pytest.mark.parametrize(
    "function, args", [("charge", [{"n": 2}]), ("refund", [{"n": 1}]), ("rust#charge", [{"n": 1}]), ("charge", [])]
)
def test_another_job_under_the_same_key_is_a_conflict_that_names_both(client, function, args):
    first = client.submit("charge", {"n": 1}, unique_key="order-7")
    with pytest.raises(JobConflict) as refused:
        client.submit(function, *args, unique_key="order-7", id="second")
    assert all(word in str(refused.value) for word in ("order-7", first.id, "second", "pending"))
    assert [job.id for job in client.list()] == [first.id]


@pytest.mark.spec("EXE-27")
def test_a_unique_key_is_one_tenants_own(client):
    ids = {
        client.submit("charge", tenant, unique_key="order-7", tenant=tenant).id for tenant in ("acme", "rival", None)
    }
    assert len(ids) == 3
    assert client.submit("charge", "acme", unique_key="order-7", tenant="acme").id in ids
    with pytest.raises(JobConflict, match="order-7"):
        client.submit("charge", "other", unique_key="order-7", tenant="rival")


@pytest.mark.spec("EXE-27")
def test_of_many_who_submit_one_key_at_once_one_makes_the_job(dsn):
    with JobClient(dsn) as client, ThreadPoolExecutor(8) as pool:
        for key in range(10):
            got = list(pool.map(lambda _, key=key: client.submit("charge", key, unique_key=f"k-{key}"), range(8)))
            assert sum(one.created for one in got) == 1
            assert len({one.id for one in got}) == 1
    assert rows(dsn, "select count(*) from ergon.ready") == [(10,)]


@pytest.mark.spec("EXE-27")
def test_whoever_comes_second_waits_until_the_first_has_committed_or_not(dsn):
    with JobClient(dsn) as client, ThreadPoolExecutor(1) as pool:
        for commits in (False, True):
            with psycopg.connect(dsn) as first:
                made = client.submit_on(first, "charge", 1, unique_key="k")
                second = pool.submit(client.submit, "charge", 1, unique_key="k")
                waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
                while rows(dsn, waiting) == [(0,)]:
                    assert not second.done()
                first.commit() if commits else first.rollback()
            got = second.result(20)
            assert got.created is (not commits)
            if not commits:
                rows(dsn, "delete from ergon.job")
            else:
                assert got.id == made.id


@pytest.mark.spec("EXE-27")
def test_below_a_handler_a_second_run_submits_the_same_job(client):
    def handle():
        scope.enter(Scope(Transaction("order-7", source="shop"), "process", 0))
        try:
            one = client.submit("charge", 7)
            with pytest.raises(ConfigurationError, match="name="):
                client.submit("charge", 8)
            return [one, client.submit("charge", 8, name="second")]
        finally:
            scope.enter(None)

    first, again = handle(), handle()
    assert [one.id for one in first] == [one.id for one in again]
    assert [one.created for one in first + again] == [True, True, False, False]
    job = client.show(first[0].id)
    assert job.correlation == "order-7"


# -- many at once ---------------------------------------------------------------------------------


def test_many_are_submitted_in_their_order_and_waited_for_together(client, store):
    wanted = [Request(function="echo", args=(n,), id=f"n{n}") for n in range(6)]
    assert [one.id for one in client.submit_many(wanted)] == [f"n{n}" for n in range(6)]
    again = client.submit_many([Request(function="echo", args=(6,), id="n6"), wanted[2]])
    assert [(one.id, one.created) for one in again] == [("n6", True), ("n2", False)]
    found = store.fetched(7)
    assert [one.transaction.id for one in found] == [f"n{n}" for n in range(7)]
    assert found[3].transaction.payload.body == {"function": "echo", "args": [3], "kwargs": {}}
    store.start(*found)
    for delivery in found[:-1]:
        store.finish(delivery, Complete(delivery.transaction.payload.body["args"][0]))
    with pytest.raises(JobWaitTimeout, match=r"1 of 7 jobs are not over after 0\.1 s"):
        client.wait_many([f"n{n}" for n in range(7)], timeout=0.1)
    store.finish(found[-1], Bury(BLAME, fatal=True))
    jobs = client.wait_many([f"n{n}" for n in range(7)])
    assert [(job.id, job.result) for job in jobs] == [(f"n{n}", n if n < 6 else None) for n in range(7)]
    assert jobs[-1].state is JobState.FAILED
    with pytest.raises(JobNotFound, match="'nobody'"):
        client.wait_many(["nobody"])
    assert (client.submit_many([]), client.wait_many([])) == ([], [])


@pytest.mark.spec("EXE-27")
def test_of_many_none_is_submitted_if_one_is_in_conflict(client, dsn):
    first = client.submit("charge", 1, unique_key="k")
    with pytest.raises(JobConflict, match="the unique key 'k' is taken"):
        client.submit_many(
            [Request(function="charge", args=(2,)), Request(function="charge", args=(2,), unique_key="k")]
        )
    assert [job.id for job in client.list()] == [first.id]
    assert rows(dsn, "select count(*) from ergon.ready") == [(1,)]


@pytest.mark.parametrize("count, size", [(2_001, 1), (3, 9 * 1024 * 1024)])
def test_what_is_too_much_for_one_statement_is_submitted_all_the_same(dsn, count, size):
    with JobClient(dsn) as client:
        made = client.submit_many(Request(function="echo", args=("x" * size,)) for _ in range(count))
    assert len({one.id for one in made}) == count
    assert rows(dsn, "select count(*), min(length(body)) >= %s from ergon.ready", size) == [(count, True)]


# -- in the caller's database transaction ---------------------------------------------------------


class Undone(Exception):
    """What the caller raises to have everything taken back."""


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("library", SYNC)
def test_it_is_there_if_the_callers_database_transaction_commits(library, commits, dsn):
    effect = "insert into effect values ('x')"
    with JobClient(dsn) as client:
        try:
            with SYNC[library](dsn) as (connection, savepoint):
                got = client.submit_on(connection, "echo", {"text": "Käse %s :x"}, unique_key="k")
                connection.execute(sa.text(effect) if "SQLAlchemy" in library else effect)
                assert client.submit_on(connection, "echo", {"text": "Käse %s :x"}, unique_key="k").id == got.id
                # A conflict spoils nothing of what the caller has done.
                with pytest.raises(JobConflict):
                    client.submit_on(connection, "echo", 2, unique_key="k")
                with savepoint():
                    client.submit_on(connection, "echo", 3, delay=60)
                assert client.list() == []
                if not commits:
                    raise Undone
        except Undone:
            pass
        assert len(client.list()) == (2 if commits else 0)
    assert rows(dsn, "select count(*) from effect") == [(1 if commits else 0,)]
    assert rows(dsn, "select count(*) from ergon.ready") == [(1 if commits else 0,)]
    assert rows(dsn, "select count(*) from ergon.returned") == [(1 if commits else 0,)]


@pytest.mark.parametrize("library", ASYNC)
def test_the_same_on_async_connections(library, dsn):
    async def main():
        async with AsyncJobClient(dsn) as client:
            for commits in (False, True):
                try:
                    async with ASYNC[library](dsn) as (connection, _):
                        got = await client.submit_on(connection, "echo", 1, unique_key="k")
                        assert await client.list() == []
                        if not commits:
                            raise Undone
                except Undone:
                    pass
            assert [job.id for job in await client.list()] == [got.id]

    asyncio.run(main())


DJANGO = """
    import sys
    import django
    from django.conf import settings

    dsn = sys.argv[1]
    port, database = dsn.rpartition(":")[2].split("/")
    settings.configure(DATABASES={"default": {
        "ENGINE": "django.db.backends.postgresql", "HOST": "127.0.0.1", "PORT": port, "USER": "postgres",
        "NAME": database,
    }}, USE_TZ=True)
    django.setup()
    from django.db import connection, transaction
    from ergon_framework.errors import ConfigurationError
    from ergon_framework.executor.jobs.client import JobClient

    with JobClient(dsn) as client:
        with transaction.atomic():
            client.submit_on(connection, "echo", {"percent": "%s"}, id="kept")
            try:
                with transaction.atomic():
                    client.submit_on(connection, "echo", id="rolled-back")
                    raise LookupError
            except LookupError:
                pass
            assert client.list() == []
        try:
            client.submit_on(connection, "echo")
        except ConfigurationError as error:
            assert "begin one first" in str(error)
        else:
            raise AssertionError
        print(*[job.id for job in client.list()])
"""


def test_django_submits_in_its_own_atomic_block(dsn):
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(DJANGO), dsn]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("kept\n", "", 0)


def test_a_statement_for_any_other_library(dsn, client):
    sql, values = client.statement("echo", 1, style="psycopg")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql, values)
    assert len(client.list()) == 1
    with pytest.raises(ConfigurationError, match="the styles are"):
        client.statement("echo", style="nobody")


# -- cancel and kill ------------------------------------------------------------------------------


@pytest.mark.spec("EXE-12")
@pytest.mark.parametrize("how", ["cancel", "kill"])
@pytest.mark.parametrize("waits", ["for its turn", "for its time", "for its next attempt"])
def test_whatever_waits_is_cancelled_and_its_message_goes_when_it_comes(client, store, how, waits):
    job_id = client.submit("echo", 1, delay=0.3 if waits == "for its time" else 0).id
    if waits == "for its next attempt":
        [first] = store.fetched()
        store.start(first)
        assert store.finish(first, Again(0.0, BLAME)) is JobState.PENDING
        store.queue.settle([(first, Later(0.0))])
    assert getattr(client, how)(job_id) == (True if how == "cancel" else JobState.CANCELLED)
    job = client.show(job_id)
    assert (job.state, job.kill_asked, job.ended_at is not None) == (JobState.CANCELLED, False, True)
    assert client.cancel(job_id) is True
    [delivery] = store.fetched()
    assert store.start(delivery)[0].decision == "over"


@pytest.mark.spec("EXE-12")
def test_once_begun_it_is_not_cancelled_and_its_outcome_is_applied(client, store):
    job_id = client.submit("echo", 1).id
    [delivery] = store.fetched()
    store.start(delivery)
    assert client.cancel(job_id) is False
    assert store.finish(delivery, Complete("done")) is JobState.SUCCEEDED
    assert client.cancel(job_id) is False
    assert client.kill(job_id) is JobState.SUCCEEDED
    assert (client.show(job_id).state, client.show(job_id).result) == (JobState.SUCCEEDED, "done")


@pytest.mark.spec("DX-37", "EXE-12")
@pytest.mark.parametrize(
    "verdict, state, code",
    [
        (Complete(1), JobState.SUCCEEDED, None),
        (Bury(BLAME), JobState.FAILED, BLAME.code),
        # A further attempt is not made.
        (Again(5.0, BLAME), JobState.KILLED, BLAME.code),
        (attempts.GiveBack(), JobState.KILLED, "killed"),
        (attempts.Kill(), JobState.KILLED, "killed"),
    ],
)
def test_an_outcome_is_applied_also_if_a_kill_was_asked_for(client, store, verdict, state, code):
    job_id = client.submit("echo", 1).id
    [delivery] = store.fetched()
    store.start(delivery)
    assert client.kill(job_id) is JobState.RUNNING
    assert client.show(job_id).kill_asked
    assert store.finish(delivery, verdict) is state
    job = client.show(job_id)
    assert (job.state, job.error and job.error.code) == (state, code)
    assert job.result == (1 if state is JobState.SUCCEEDED else None)
    assert client.kill(job_id) is state


# -- to look --------------------------------------------------------------------------------------


def test_who_is_not_there_is_named(client):
    for ask in (client.show, client.cancel, client.kill, client.replay, client.wait):
        with pytest.raises(JobNotFound, match="'nobody'"):
            ask("nobody")


def test_waiting_ends_with_the_job(client, store):
    job_id = client.submit("echo", 1).id
    [delivery] = store.fetched()
    store.start(delivery)
    ending = threading.Timer(0.3, lambda: store.finish(delivery, Complete({"a": [1, None, "ä\0"]})))
    ending.start()
    job = client.wait(job_id, timeout=20)
    assert (job.state, job.result) == (JobState.SUCCEEDED, {"a": [1, None, "ä\0"]})
    ending.join()


def test_who_waits_in_vain_is_told_where_the_job_is(client):
    job_id = client.submit("echo", 1).id
    with pytest.raises(JobWaitTimeout, match=r"pending after 0\.1 s") as late:
        client.wait(job_id, timeout=0.1)
    assert (late.value.state, isinstance(late.value, TimeoutError)) == (JobState.PENDING, True)


def test_jobs_are_listed_by_what_they_are_the_newest_first_and_page_by_page(client, store):
    ids = [client.submit(f"{kind}#{name}", tenant=who).id for kind, name, who in LISTED]
    cancelled = [ids[1], ids[4]]
    for job_id in cancelled:
        client.cancel(job_id)
    newest = ids[::-1]
    assert [job.id for job in client.list()] == newest
    assert [job.id for job in client.list(states=["cancelled"])] == cancelled[::-1]
    assert [job.id for job in client.list(kind="rust")] == [ids[3], ids[2]]
    assert [job.id for job in client.list(kind="rust", states=["cancelled"])] == []
    assert [job.id for job in client.list(function="send")] == [ids[4], ids[2], ids[0]]
    assert [job.id for job in client.list(tenant="acme", function="send")] == [ids[0]]
    pages, before = [], None
    while page := client.list(limit=2, before=before):
        pages.append([job.id for job in page])
        before = page[-1].number
    assert pages == [newest[:2], newest[2:4], newest[4:]]
    assert client.list(kind="nobody") == []
    with pytest.raises(ConfigurationError, match="no state of a job"):
        client.list(states=["done"])
    with pytest.raises(ConfigurationError, match="at once"):
        client.list(limit=0)


LISTED = [
    ("python", "send", "acme"),
    ("python", "mail", "acme"),
    ("rust", "send", None),
    ("rust", "mail", "acme"),
    ("python", "send", "other"),
]


def test_a_list_reads_no_more_than_it_shows(dsn, client):
    client.submit("echo")
    rows(
        dsn,
        """insert into ergon.job (id, queue, function_name, digest, retention, state)
        select 'x' || n, (select id from ergon.queue limit 1), 'f', '', 1, 'succeeded'
        from generate_series(1, 20000) n""",
    )
    rows(dsn, "analyze ergon.job")
    began = _read(dsn)
    assert len(client.list(limit=5)) == 5
    assert len(client.list(limit=5, states=["pending"])) == 1
    assert _read(dsn) - began < 500


def _read(dsn):
    rows(dsn, "select pg_stat_force_next_flush()")
    [(found,)] = rows(dsn, "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relname = 'job'")
    return found


# -- replay and retention -------------------------------------------------------------------------


def buried(client, store, *, attempts_made=2):
    job_id = client.submit("echo", 1).id
    [delivery] = store.fetched()
    store.start(delivery)
    assert store.finish(delivery, Bury(BLAME)) is JobState.FAILED
    return job_id, delivery


def test_a_dead_job_is_replayed_with_its_attempts_counted_anew(client, store):
    job_id, delivery = buried(client, store)
    with pytest.raises(NotReplayable, match="being written just now"):
        client.replay(job_id)
    store.queue.settle([(delivery, DeadLetter("executor_error"))])
    client.replay(job_id)
    job = client.show(job_id)
    assert (job.state, job.attempts, job.error, job.ended_at, job.expires_at) == (JobState.PENDING, 0, None, None, None)
    assert store.queue.depth().dead == 0
    [again] = store.fetched()
    [started] = store.start(again)
    assert (again.transaction.id, started.decision, started.attempt_number) == (job_id, "run", 1)
    with pytest.raises(NotReplayable, match="is running; only one that has failed"):
        client.replay(job_id)


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_what_has_expired_is_thrown_away_but_not_while_its_dead_letter_can_be_replayed(client, store, dsn, state):
    old = client.submit("echo", 1, retention=0).id
    kept = client.submit("echo", 1).id
    if state == "cancelled":
        client.cancel(old)
        client.cancel(kept)
    else:
        for delivery in store.fetched(2):
            store.start(delivery)
            store.finish(delivery, Complete(1) if state == "succeeded" else Bury(BLAME))
            store.queue.settle([(delivery, Ack() if state == "succeeded" else DeadLetter("x"))])
    client.submit("echo", 1)
    left = 2 if state != "failed" else 3
    store.lines.run(attempts.swept(10))
    assert len(client.list()) == left
    if state == "failed":
        rows(dsn, "delete from ergon.dead_letter")
        rows(dsn, "update ergon.job set expires_at = now() - interval '1 second' where id = %s", old)
        store.lines.run(attempts.swept(10))
    assert old not in {job.id for job in client.list()}
    assert client.show(kept).expires_at > datetime.now(UTC) + timedelta(days=6)


def test_a_cancelled_job_that_was_to_wait_long_is_there_when_its_message_comes(client):
    job_id = client.submit("echo", 1, delay=30 * 86_400, retention=60).id
    client.cancel(job_id)
    assert client.show(job_id).expires_at > datetime.now(UTC) + timedelta(days=30)
