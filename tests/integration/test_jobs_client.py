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
from ergon_framework.connectors.base import Ack, DeadLetter, Defer
from ergon_framework.connectors.codec import UnencodableError
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.executors.decision import Complete, Fail, FailureCause, Retry
from ergon_framework.jobs import store
from ergon_framework.jobs.client import AsyncJobClient, JobClient
from ergon_framework.jobs.model import JobConflict, JobNotFound, JobRequest, JobState, JobWaitTimeout, NotReplayable
from ergon_framework.scope import Scope
from ergon_framework.transaction import Transaction
from tests.integration.jobs import BlockingJobClient, ManualWorker, run_sql
from tests.integration.libraries import ASYNC_LIBRARIES, SYNC_LIBRARIES

CAUSE = FailureCause(Category.SYSTEM, "executor_error", "no", "ValueError", "Traceback")


@pytest.fixture
def dsn(database):
    return database


@pytest.fixture(params=["sync", "async"])
def client(request, dsn):
    job_client = BlockingJobClient(request.param, dsn)
    yield job_client
    job_client.end()


@pytest.fixture
def worker(dsn):
    manual_worker = ManualWorker(dsn)
    yield manual_worker
    manual_worker.close()


# -- submit ---------------------------------------------------------------------------------------


def test_a_job_is_a_row_and_a_message_with_its_arguments(client, worker):
    submitted = client.submit(
        "rust#send", 1, {"a": [2]}, kwargs={"flag": True}, tenant="acme", correlation="c", priority=3
    )
    job = client.show(submitted.id)
    assert (submitted.created, job.state, job.kind, job.function_name) == (True, JobState.PENDING, "rust", "send")
    assert (job.tenant, job.correlation, job.priority, job.attempts, job.result) == ("acme", "c", 3, 0, None)
    rust_worker = ManualWorker(worker.queue.dsn, "rust")
    [delivery] = rust_worker.fetch()
    assert delivery.transaction.id == submitted.id
    assert delivery.transaction.payload.body == {
        "function": "rust#send",
        "args": [1, {"a": [2]}],
        "kwargs": {"flag": True},
    }
    rust_worker.close()


@pytest.mark.parametrize("parameter", ["delay", "at"])
def test_a_delayed_job_is_not_claimed_before_its_time(client, worker, parameter):
    options = {"delay": 0.6} if parameter == "delay" else {"at": datetime.now(UTC) + timedelta(seconds=0.6)}
    delayed = client.submit("echo", 1, **options)
    immediate = client.submit("echo", 2)
    assert [each.transaction.id for each in worker.queue.fetch_transactions(10)] == [immediate.id]
    assert worker.queue.fetch_transactions(10) == []
    [delivery] = worker.fetch()
    assert delivery.transaction.id == delayed.id
    job = client.show(delayed.id)
    assert 0.4 < (job.due_at - job.created_at).total_seconds() < 0.7


def test_a_job_scheduled_in_the_past_is_due_immediately(client, worker):
    submitted = client.submit("echo", at=datetime.now(UTC) - timedelta(days=1))
    assert [delivery.transaction.id for delivery in worker.queue.fetch_transactions(10)] == [submitted.id]


def test_a_job_with_a_higher_priority_is_claimed_first(client, worker):
    ids = [client.submit("echo", n, priority=n).id for n in (0, -1, 5)]
    # One at a time: deliveries of one fetch have no defined order.
    claimed_ids = [worker.queue.fetch_transactions(1)[0].transaction.id for _ in ids]
    assert claimed_ids == [ids[2], ids[0], ids[1]]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"delay": -1}, "a delay is between"),
        ({"delay": float("nan")}, "a delay is between"),
        ({"at": datetime(2026, 1, 1)}, "a time with a time zone"),  # noqa: DTZ001 - that is the point
        ({"priority": 101}, "between -100 and 100"),
        ({"max_attempts": 0}, "at least 1 attempt"),
        ({"timeout": 0}, "a timeout is"),
        ({"retention": -1}, "a retention is"),
        ({"unique_key": ""}, "a unique key must have"),
    ],
)
def test_invalid_options_are_rejected_with_the_reason(client, options, message):
    with pytest.raises(ConfigurationError, match=message):
        client.submit("echo", **options)


@pytest.mark.parametrize("name", ["", "rust#", "x" * 1025])
def test_an_invalid_function_name_is_a_configuration_error(client, name):
    with pytest.raises(ConfigurationError):
        client.submit(name)


def test_arguments_that_are_not_json_are_rejected_and_nothing_is_written(client):
    for argument in (object(), float("nan"), "\ud800"):
        with pytest.raises(UnencodableError):
            client.submit("echo", argument)
    assert client.list() == []


def test_without_a_database_address_the_error_names_the_variable(monkeypatch):
    monkeypatch.delenv("ERGON_POSTGRES__DSN", raising=False)
    with pytest.raises(ConfigurationError, match="ERGON_POSTGRES__DSN"):
        JobClient()


def test_before_the_upgrade_the_error_names_the_command(postgres):
    with (
        JobClient(postgres.create_database("jobs_unmade")) as client,
        pytest.raises(ConfigurationError, match="upgrade"),
    ):
        client.submit("echo")


# -- one key, one job -----------------------------------------------------------------------------


@pytest.mark.spec("EXE-27")
def test_the_same_job_under_the_same_key_is_the_existing_job(client, worker):
    first = client.submit("charge", {"b": 1, "a": 2}, unique_key="order-7")
    repeated = client.submit("python#charge", {"a": 2, "b": 1}, unique_key="order-7")
    assert (repeated.id, first.created, repeated.created) == (first.id, True, False)
    assert len(worker.queue.fetch_transactions(10)) == 1


@pytest.mark.spec("EXE-27")
@pytest.mark.parametrize(
    "function, args", [("charge", [{"n": 2}]), ("refund", [{"n": 1}]), ("rust#charge", [{"n": 1}]), ("charge", [])]
)
def test_another_job_under_the_same_key_is_a_conflict_that_names_both(client, function, args):
    first = client.submit("charge", {"n": 1}, unique_key="order-7")
    with pytest.raises(JobConflict) as conflict:
        client.submit(function, *args, unique_key="order-7", id="second")
    assert all(word in str(conflict.value) for word in ("order-7", first.id, "second", "pending"))
    assert [job.id for job in client.list()] == [first.id]


@pytest.mark.spec("EXE-27")
def test_a_unique_key_belongs_to_one_tenant(client):
    ids = {
        client.submit("charge", tenant, unique_key="order-7", tenant=tenant).id for tenant in ("acme", "rival", None)
    }
    assert len(ids) == 3
    assert client.submit("charge", "acme", unique_key="order-7", tenant="acme").id in ids
    with pytest.raises(JobConflict, match="order-7"):
        client.submit("charge", "other", unique_key="order-7", tenant="rival")


@pytest.mark.spec("EXE-27")
def test_concurrent_submissions_of_one_key_create_one_job(dsn):
    with JobClient(dsn) as client, ThreadPoolExecutor(8) as pool:
        for key in range(10):
            submissions = list(
                pool.map(lambda _, key=key: client.submit("charge", key, unique_key=f"k-{key}"), range(8))
            )
            assert sum(submission.created for submission in submissions) == 1
            assert len({submission.id for submission in submissions}) == 1
    assert run_sql(dsn, "select count(*) from ergon.ready") == [(10,)]


@pytest.mark.spec("EXE-27")
def test_a_second_submission_of_a_key_waits_until_the_first_commits_or_rolls_back(dsn):
    with JobClient(dsn) as client, ThreadPoolExecutor(1) as pool:
        for commits in (False, True):
            with psycopg.connect(dsn) as connection:
                first = client.submit_on(connection, "charge", 1, unique_key="k")
                second = pool.submit(client.submit, "charge", 1, unique_key="k")
                count_waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
                while run_sql(dsn, count_waiting) == [(0,)]:
                    assert not second.done()
                connection.commit() if commits else connection.rollback()
            submitted = second.result(20)
            assert submitted.created is (not commits)
            if not commits:
                run_sql(dsn, "delete from ergon.job")
            else:
                assert submitted.id == first.id


@pytest.mark.spec("EXE-27")
def test_inside_a_handler_a_second_run_submits_the_same_job(client):
    def handle():
        scope.set_scope(Scope(Transaction(id="order-7", source="shop"), "process", 0))
        try:
            submission = client.submit("charge", 7)
            with pytest.raises(ConfigurationError, match="name="):
                client.submit("charge", 8)
            return [submission, client.submit("charge", 8, name="second")]
        finally:
            scope.set_scope(None)

    first, repeated = handle(), handle()
    assert [submission.id for submission in first] == [submission.id for submission in repeated]
    assert [submission.created for submission in first + repeated] == [True, True, False, False]
    job = client.show(first[0].id)
    assert job.correlation == "order-7"


# -- many at once ---------------------------------------------------------------------------------


def test_many_jobs_are_submitted_in_order_and_awaited_together(client, worker):
    requests = [JobRequest(function="echo", args=(n,), id=f"n{n}") for n in range(6)]
    assert [each.id for each in client.submit_many(requests)] == [f"n{n}" for n in range(6)]
    repeated = client.submit_many([JobRequest(function="echo", args=(6,), id="n6"), requests[2]])
    assert [(each.id, each.created) for each in repeated] == [("n6", True), ("n2", False)]
    deliveries = worker.fetch(7)
    assert [each.transaction.id for each in deliveries] == [f"n{n}" for n in range(7)]
    assert deliveries[3].transaction.payload.body == {"function": "echo", "args": [3], "kwargs": {}}
    worker.start(*deliveries)
    for delivery in deliveries[:-1]:
        worker.finish(delivery, Complete(delivery.transaction.payload.body["args"][0]))
    with pytest.raises(JobWaitTimeout, match=r"1 of 7 jobs are not final after 0\.1 s"):
        client.wait_many([f"n{n}" for n in range(7)], timeout=0.1)
    worker.finish(deliveries[-1], Fail(CAUSE, fatal=True))
    jobs = client.wait_many([f"n{n}" for n in range(7)])
    assert [(job.id, job.result) for job in jobs] == [(f"n{n}", n if n < 6 else None) for n in range(7)]
    assert jobs[-1].state is JobState.FAILED
    with pytest.raises(JobNotFound, match="'missing'"):
        client.wait_many(["missing"])
    assert (client.submit_many([]), client.wait_many([])) == ([], [])


@pytest.mark.spec("EXE-27")
def test_no_job_of_a_batch_is_submitted_if_one_is_in_conflict(client, dsn):
    first = client.submit("charge", 1, unique_key="k")
    with pytest.raises(JobConflict, match="the unique key 'k' is taken"):
        client.submit_many(
            [JobRequest(function="charge", args=(2,)), JobRequest(function="charge", args=(2,), unique_key="k")]
        )
    assert [job.id for job in client.list()] == [first.id]
    assert run_sql(dsn, "select count(*) from ergon.ready") == [(1,)]


@pytest.mark.parametrize("count, size", [(2_001, 1), (3, 9 * 1024 * 1024)])
def test_a_batch_too_large_for_one_statement_is_submitted_completely(dsn, count, size):
    with JobClient(dsn) as client:
        submissions = client.submit_many(JobRequest(function="echo", args=("x" * size,)) for _ in range(count))
    assert len({submission.id for submission in submissions}) == count
    assert run_sql(dsn, "select count(*), min(length(body)) >= %s from ergon.ready", size) == [(count, True)]


# -- in the caller's database transaction ---------------------------------------------------------


class SubmissionRollback(Exception):
    """The exception with which the caller rolls everything back."""


@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize("library", SYNC_LIBRARIES)
def test_a_job_exists_if_the_callers_database_transaction_commits(library, commits, dsn):
    effect = "insert into effect values ('x')"
    with JobClient(dsn) as client:
        try:
            with SYNC_LIBRARIES[library](dsn) as (connection, savepoint):
                submitted = client.submit_on(connection, "echo", {"text": "Käse %s :x"}, unique_key="k")
                connection.execute(sa.text(effect) if "SQLAlchemy" in library else effect)
                assert client.submit_on(connection, "echo", {"text": "Käse %s :x"}, unique_key="k").id == submitted.id
                # A conflict does not abort what the caller has done.
                with pytest.raises(JobConflict):
                    client.submit_on(connection, "echo", 2, unique_key="k")
                with savepoint():
                    client.submit_on(connection, "echo", 3, delay=60)
                assert client.list() == []
                if not commits:
                    raise SubmissionRollback
        except SubmissionRollback:
            pass
        assert len(client.list()) == (2 if commits else 0)
    assert run_sql(dsn, "select count(*) from effect") == [(1 if commits else 0,)]
    assert run_sql(dsn, "select count(*) from ergon.ready") == [(1 if commits else 0,)]
    assert run_sql(dsn, "select count(*) from ergon.redelivery") == [(1 if commits else 0,)]


@pytest.mark.parametrize("library", ASYNC_LIBRARIES)
def test_a_job_exists_if_the_callers_async_database_transaction_commits(library, dsn):
    async def main():
        async with AsyncJobClient(dsn) as client:
            for commits in (False, True):
                try:
                    async with ASYNC_LIBRARIES[library](dsn) as (connection, _):
                        submitted = await client.submit_on(connection, "echo", 1, unique_key="k")
                        assert await client.list() == []
                        if not commits:
                            raise SubmissionRollback
                except SubmissionRollback:
                    pass
            assert [job.id for job in await client.list()] == [submitted.id]

    asyncio.run(main())


DJANGO_PROGRAM = """
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
    from ergon_framework.jobs.client import JobClient

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
            assert "begin a transaction first" in str(error), error
        else:
            raise AssertionError
        print(*[job.id for job in client.list()])
"""


def test_django_submits_in_its_own_atomic_block(dsn):
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(DJANGO_PROGRAM), dsn]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (result.stdout, result.stderr, result.returncode) == ("kept\n", "", 0)


def test_any_other_library_can_execute_the_statement(dsn, client):
    sql, values = client.statement("echo", 1, style="psycopg")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(sql, values)
    assert len(client.list()) == 1
    with pytest.raises(ConfigurationError, match="the styles are"):
        client.statement("echo", style="missing")


# -- cancel and kill ------------------------------------------------------------------------------


@pytest.mark.spec("EXE-12")
@pytest.mark.parametrize("method", ["cancel", "kill"])
@pytest.mark.parametrize("waits_for", ["for its turn", "for its time", "for its next attempt"])
def test_a_waiting_job_is_cancelled_and_its_message_starts_no_attempt(client, worker, method, waits_for):
    job_id = client.submit("echo", 1, delay=0.3 if waits_for == "for its time" else 0).id
    if waits_for == "for its next attempt":
        [first] = worker.fetch()
        worker.start(first)
        assert worker.finish(first, Retry(0.0, CAUSE)) is JobState.PENDING
        worker.queue.settle([(first, Defer(0.0))])
    assert getattr(client, method)(job_id) == (True if method == "cancel" else JobState.CANCELLED)
    job = client.show(job_id)
    assert (job.state, job.kill_asked, job.ended_at is not None) == (JobState.CANCELLED, False, True)
    assert client.cancel(job_id) is True
    [delivery] = worker.fetch()
    assert worker.start(delivery)[0].decision == "over"


@pytest.mark.spec("EXE-12")
def test_a_started_job_is_not_cancelled_and_its_outcome_is_applied(client, worker):
    job_id = client.submit("echo", 1).id
    [delivery] = worker.fetch()
    worker.start(delivery)
    assert client.cancel(job_id) is False
    assert worker.finish(delivery, Complete("done")) is JobState.SUCCEEDED
    assert client.cancel(job_id) is False
    assert client.kill(job_id) is JobState.SUCCEEDED
    assert (client.show(job_id).state, client.show(job_id).result) == (JobState.SUCCEEDED, "done")


@pytest.mark.spec("DX-37", "EXE-12")
@pytest.mark.parametrize(
    "verdict, state, code",
    [
        (Complete(1), JobState.SUCCEEDED, None),
        (Fail(CAUSE), JobState.FAILED, CAUSE.code),
        # No further attempt is made.
        (Retry(5.0, CAUSE), JobState.KILLED, CAUSE.code),
        (store.ReleaseAttempt(), JobState.KILLED, "killed"),
        (store.KillAttempt(), JobState.KILLED, "killed"),
    ],
)
def test_an_outcome_is_applied_although_a_kill_was_requested(client, worker, verdict, state, code):
    job_id = client.submit("echo", 1).id
    [delivery] = worker.fetch()
    worker.start(delivery)
    assert client.kill(job_id) is JobState.RUNNING
    assert client.show(job_id).kill_asked
    assert worker.finish(delivery, verdict) is state
    job = client.show(job_id)
    assert (job.state, job.error and job.error.code) == (state, code)
    assert job.result == (1 if state is JobState.SUCCEEDED else None)
    assert client.kill(job_id) is state


# -- show and list --------------------------------------------------------------------------------


def test_a_missing_job_is_named_in_the_error(client):
    for call in (client.show, client.cancel, client.kill, client.replay, client.wait):
        with pytest.raises(JobNotFound, match="'missing'"):
            call("missing")


def test_waiting_ends_with_the_job(client, worker):
    job_id = client.submit("echo", 1).id
    [delivery] = worker.fetch()
    worker.start(delivery)
    finish_timer = threading.Timer(0.3, lambda: worker.finish(delivery, Complete({"a": [1, None, "ä\0"]})))
    finish_timer.start()
    job = client.wait(job_id, timeout=20)
    assert (job.state, job.result) == (JobState.SUCCEEDED, {"a": [1, None, "ä\0"]})
    finish_timer.join()


def test_a_wait_that_times_out_reports_the_state_of_the_job(client):
    job_id = client.submit("echo", 1).id
    with pytest.raises(JobWaitTimeout, match=r"pending after 0\.1 s") as timed_out:
        client.wait(job_id, timeout=0.1)
    assert (timed_out.value.state, isinstance(timed_out.value, TimeoutError)) == (JobState.PENDING, True)


def test_jobs_are_listed_by_filter_newest_first_and_in_pages(client, worker):
    ids = [client.submit(f"{kind}#{name}", tenant=tenant).id for kind, name, tenant in LISTED_JOBS]
    cancelled_ids = [ids[1], ids[4]]
    for job_id in cancelled_ids:
        client.cancel(job_id)
    newest = ids[::-1]
    assert [job.id for job in client.list()] == newest
    assert [job.id for job in client.list(states=["cancelled"])] == cancelled_ids[::-1]
    assert [job.id for job in client.list(kind="rust")] == [ids[3], ids[2]]
    assert [job.id for job in client.list(kind="rust", states=["cancelled"])] == []
    assert [job.id for job in client.list(function="send")] == [ids[4], ids[2], ids[0]]
    assert [job.id for job in client.list(tenant="acme", function="send")] == [ids[0]]
    pages, before = [], None
    while page := client.list(limit=2, before=before):
        pages.append([job.id for job in page])
        before = page[-1].number
    assert pages == [newest[:2], newest[2:4], newest[4:]]
    assert client.list(kind="missing") == []
    with pytest.raises(ConfigurationError, match="invalid job state 'done'"):
        client.list(states=["done"])
    with pytest.raises(ConfigurationError, match="limit must be 1 to 10,000 jobs"):
        client.list(limit=0)


LISTED_JOBS = [
    ("python", "send", "acme"),
    ("python", "mail", "acme"),
    ("rust", "send", None),
    ("rust", "mail", "acme"),
    ("python", "send", "other"),
]


def test_a_list_does_not_read_the_whole_table(dsn, client):
    client.submit("echo")
    run_sql(
        dsn,
        """insert into ergon.job (id, queue, function_name, digest, retention, state)
        select 'x' || n, (select id from ergon.queue limit 1), 'f', '', 1, 'succeeded'
        from generate_series(1, 20000) n""",
    )
    run_sql(dsn, "analyze ergon.job")
    rows_before = _count_rows_read(dsn)
    assert len(client.list(limit=5)) == 5
    assert len(client.list(limit=5, states=["pending"])) == 1
    assert _count_rows_read(dsn) - rows_before < 500


def _count_rows_read(dsn):
    run_sql(dsn, "select pg_stat_force_next_flush()")
    [(row_count,)] = run_sql(dsn, "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relname = 'job'")
    return row_count


# -- replay and retention -------------------------------------------------------------------------


def fail_job(client, worker, *, attempts_made=2):
    job_id = client.submit("echo", 1).id
    [delivery] = worker.fetch()
    worker.start(delivery)
    assert worker.finish(delivery, Fail(CAUSE)) is JobState.FAILED
    return job_id, delivery


def test_a_failed_job_is_replayed_with_its_attempts_reset(client, worker):
    job_id, delivery = fail_job(client, worker)
    with pytest.raises(NotReplayable, match="is still being written"):
        client.replay(job_id)
    worker.queue.settle([(delivery, DeadLetter("executor_error"))])
    client.replay(job_id)
    job = client.show(job_id)
    assert (job.state, job.attempts, job.error, job.ended_at, job.expires_at) == (JobState.PENDING, 0, None, None, None)
    assert worker.queue.depth().dead == 0
    [replayed] = worker.fetch()
    [started] = worker.start(replayed)
    assert (replayed.transaction.id, started.decision, started.attempt_number) == (job_id, "run", 1)
    with pytest.raises(NotReplayable, match="is running; only a failed job"):
        client.replay(job_id)


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_an_expired_job_is_deleted_unless_its_dead_letter_can_be_replayed(client, worker, dsn, state):
    expired = client.submit("echo", 1, retention=0).id
    kept = client.submit("echo", 1).id
    if state == "cancelled":
        client.cancel(expired)
        client.cancel(kept)
    else:
        for delivery in worker.fetch(2):
            worker.start(delivery)
            worker.finish(delivery, Complete(1) if state == "succeeded" else Fail(CAUSE))
            worker.queue.settle([(delivery, Ack() if state == "succeeded" else DeadLetter("x"))])
    client.submit("echo", 1)
    remaining = 2 if state != "failed" else 3
    worker.pool.run(store.delete_expired(10))
    assert len(client.list()) == remaining
    if state == "failed":
        run_sql(dsn, "delete from ergon.dead_letter")
        run_sql(dsn, "update ergon.job set expires_at = now() - interval '1 second' where id = %s", expired)
        worker.pool.run(store.delete_expired(10))
    assert expired not in {job.id for job in client.list()}
    assert client.show(kept).expires_at > datetime.now(UTC) + timedelta(days=6)


def test_a_cancelled_job_with_a_long_delay_is_kept_until_its_message_is_delivered(client):
    job_id = client.submit("echo", 1, delay=30 * 86_400, retention=60).id
    client.cancel(job_id)
    assert client.show(job_id).expires_at > datetime.now(UTC) + timedelta(days=30)
