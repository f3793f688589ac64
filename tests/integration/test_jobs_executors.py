"""Jobs for executors that no orchestrator serves: clients with default settings, real orchestrators and database."""

from __future__ import annotations

import asyncio

import pytest
from typer.testing import CliRunner

from ergon_framework.cli.app import app
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.jobs.client import JobClient
from ergon_framework.jobs.model import queue_name
from tests.integration.jobs import BlockingJobClient, ManualWorker, make_orchestrator, make_policy, run_sql, run_task

UNKNOWN_EXECUTOR_MESSAGE = "the executor 'typo' does not exist: no orchestrator serves it; known: python, rust"


@pytest.fixture(params=["sync", "async"])
def client(request, database):
    job_client = BlockingJobClient(request.param, database)
    yield job_client
    job_client.end()


@pytest.fixture
def dsn(database, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ERGON_POSTGRES__DSN", database)
    return database


def run_once(dsn, *kinds):
    """Run an orchestrator until its queues are empty."""
    asyncio.run(make_orchestrator(dsn, kinds=kinds, rules=make_policy(streaming=False)).run())


def age_job(dsn, job_id, minutes):
    run_sql(dsn, "update ergon.job set due_at = now() - %s * interval '1 minute' where id = %s", minutes, job_id)


def age_registrations(dsn, *, since, served=0):
    """Make the orchestrators have run for *since* minutes, and have stopped *served* minutes ago."""
    run_sql(
        dsn,
        "update ergon.executor set since = now() - %s * interval '1 minute', "
        "served_at = now() - %s * interval '1 minute'",
        since,
        served,
    )


def list_dead_letters(dsn, kind):
    queue = PostgresQueue(queue_name(kind), dsn=dsn)
    try:
        return {each.envelope.id: each for each in queue.list_dead(DeadLetterQuery.load())}
    finally:
        queue.close()


@pytest.mark.spec("DX-33", "EXE-13")
def test_a_job_for_an_unknown_executor_becomes_a_dead_letter_that_names_the_known_ones(dsn, client):
    run_once(dsn, "python", "rust")
    age_registrations(dsn, since=11)
    old_job, new_job = client.submit("typo#echo", 1), client.submit("typo#echo", 2)
    age_job(dsn, old_job.id, 11)
    run_once(dsn, "python")
    job = client.show(old_job.id)
    assert (job.state, job.error.code, job.error.message, job.attempts) == (
        "failed",
        "no_route",
        UNKNOWN_EXECUTOR_MESSAGE,
        0,
    )
    dead_letters = list_dead_letters(dsn, "typo")
    assert set(dead_letters) == {old_job.id}
    failure = dead_letters[old_job.id].failure
    assert (dead_letters[old_job.id].reason, failure.error_message, failure.attempts) == (
        "no_route",
        UNKNOWN_EXECUTOR_MESSAGE,
        0,
    )
    assert client.show(new_job.id).state == "pending"


@pytest.mark.spec("DX-33", "EXE-13")
def test_a_job_waits_for_the_first_orchestrator_of_its_executor_while_others_run(dsn, client):
    run_once(dsn, "rust")
    age_registrations(dsn, since=60)
    submitted = client.submit("python#echo", 1)
    age_job(dsn, submitted.id, 9)
    run_once(dsn, "rust")
    assert client.show(submitted.id).state == "pending"
    run_once(dsn, "python")
    assert client.show(submitted.id).result == 1


@pytest.mark.spec("DX-33", "EXE-13")
def test_after_an_outage_of_all_orchestrators_the_first_one_waits_for_the_others(dsn, client):
    run_once(dsn, "rust")
    age_registrations(dsn, since=600, served=300)
    submitted = client.submit("python#echo", 1)
    age_job(dsn, submitted.id, 200)
    run_once(dsn, "rust")
    assert client.show(submitted.id).state == "pending"
    run_once(dsn, "python")
    assert client.show(submitted.id).result == 1


@pytest.mark.spec("DX-33")
def test_an_executor_that_is_served_once_a_year_is_known(dsn, client):
    run_once(dsn, "python")
    run_sql(dsn, "update ergon.executor set served_at = now() - interval '370 days'")
    run_once(dsn, "rust")
    run_sql(dsn, "update ergon.executor set since = now() - interval '1 hour'")
    submitted = client.submit("echo", 1)
    age_job(dsn, submitted.id, 60)
    run_once(dsn, "rust")
    assert client.show(submitted.id).state == "pending"
    run_sql(dsn, "update ergon.executor set served_at = now() - interval '401 days' where kind = 'python'")
    run_once(dsn, "rust")
    assert client.show(submitted.id).state == "failed"


@pytest.mark.spec("DX-33")
def test_an_executor_whose_jobs_succeed_is_known_without_a_registration(dsn, client):
    first = client.submit("echo", 1)
    run_once(dsn, "python")
    assert client.show(first.id).state == "succeeded"
    run_once(dsn, "rust")
    run_sql(dsn, "delete from ergon.executor where kind = 'python'")
    age_registrations(dsn, since=60)
    second = client.submit("echo", 2)
    age_job(dsn, second.id, 60)
    run_once(dsn, "rust")
    assert client.show(second.id).state == "pending"
    assert [each.kind for each in client.executors()] == ["python", "rust"]


@pytest.mark.spec("DX-33")
def test_a_dead_letter_of_an_unknown_executor_is_replayed_once_an_orchestrator_serves_it(dsn, client):
    run_once(dsn, "rust")
    age_registrations(dsn, since=60)
    submitted = client.submit("python#echo", 7)
    age_job(dsn, submitted.id, 60)
    run_once(dsn, "rust")
    assert client.show(submitted.id).state == "failed"
    client.replay(submitted.id)
    run_once(dsn, "python")
    assert client.show(submitted.id).result == 7


@pytest.mark.spec("DX-33", "EXE-23")
def test_a_job_that_failed_before_its_message_was_settled_still_becomes_a_dead_letter(dsn, client):
    run_once(dsn, "rust")
    age_registrations(dsn, since=60)
    submitted, cancelled = client.submit("typo#echo", 1), client.submit("typo#echo", 2)
    client.cancel(cancelled.id)
    run_sql(dsn, "update ergon.job set state = 'failed' where id = %s", submitted.id)
    run_once(dsn, "rust")
    assert set(list_dead_letters(dsn, "typo")) == {submitted.id}
    assert run_sql(dsn, "select count(*) from ergon.ready") == [(0,)]


@pytest.mark.spec("DX-33")
def test_a_message_that_a_worker_has_claimed_is_not_dead_lettered(dsn, client):
    run_once(dsn, "rust")
    age_registrations(dsn, since=60)
    submitted = client.submit("python#echo", 1)
    age_job(dsn, submitted.id, 60)
    worker = ManualWorker(dsn)
    try:
        [delivery] = worker.fetch()
        run_once(dsn, "rust")
        assert client.show(submitted.id).state == "pending"
        [started] = worker.start(delivery)
        assert started.decision == "run"
    finally:
        worker.close()


@pytest.mark.spec("DX-33")
def test_a_running_orchestrator_renews_its_registration_and_polls_again(dsn):
    async def main():
        with JobClient(dsn) as client:
            async with run_task(make_orchestrator(dsn, kinds=("python", "rust"))):
                submitted = await asyncio.to_thread(client.submit, "typo#echo", 1)
                age_job(dsn, submitted.id, 11)
                age_registrations(dsn, since=11, served=0.2)
                job = await asyncio.to_thread(client.wait, submitted.id, timeout=60)
                renewal_rows = run_sql(
                    dsn, "select bool_and(served_at > now() - interval '10 seconds') from ergon.executor"
                )
        return job, renewal_rows

    job, renewal_rows = asyncio.run(main())
    assert (job.state, job.error.message) == ("failed", UNKNOWN_EXECUTOR_MESSAGE)
    assert renewal_rows == [(True,)]


@pytest.mark.spec("DX-33")
def test_the_commands_say_what_a_job_of_an_unknown_executor_waits_for(dsn):
    def run_ergon(*arguments):
        result = CliRunner().invoke(app, [*arguments])
        assert result.exit_code == 0, result.output
        return result

    run_once(dsn, "python", "rust")
    submitted = run_ergon("job", "submit", "typo#echo", "1")
    job_id = submitted.stdout.strip()
    assert UNKNOWN_EXECUTOR_MESSAGE in submitted.stderr
    assert UNKNOWN_EXECUTOR_MESSAGE in " ".join(run_ergon("job", "show", job_id).stdout.split())
    why = " ".join(run_ergon("why", job_id).stdout.split())
    assert f"status: waiting for an orchestrator: {UNKNOWN_EXECUTOR_MESSAGE}; it becomes a dead letter at " in why
    assert f"start an orchestrator that serves 'typo', or run: ergon job cancel {job_id}" in why
    assert run_ergon("job", "submit", "echo", "1").stderr == ""
    age_registrations(dsn, since=60, served=2)
    unserved_submit = run_ergon("job", "submit", "echo", "2")
    assert "no orchestrator of the executor 'python' has run since" in unserved_submit.stderr
