"""Orchestrators at work: real executors, a real database, and everything that can happen to a job."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import time
from datetime import timedelta

import psutil
import pytest
from opentelemetry.sdk.trace import TracerProvider

from ergon_framework import ConsumerPolicy
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.executors.decision import Complete
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.jobs import batched_store
from ergon_framework.jobs import worker as task
from ergon_framework.jobs.client import AsyncJobClient, JobClient
from ergon_framework.jobs.metrics import job_metrics
from ergon_framework.jobs.model import JobState, queue_name
from ergon_framework.jobs.orchestrator import ExecutorGroup, Orchestrator
from ergon_framework.telemetry import names
from ergon_framework.transaction import Transaction
from tests.integration.jobs import (
    COMMAND,
    ENVIRONMENT,
    EXECUTOR_PROGRAM,
    ROOT,
    ManualWorker,
    make_orchestrator,
    make_policy,
    run_sql,
    run_task,
    wait_until,
)
from tests.integration.running import ERGON
from tests.log_events import get_event, list_events

RUNTIME = ExecutorCommand(
    words=(*ERGON, "executor", "run", "--handlers", "tests.integration.job_handlers:registry"),
    environment=ENVIRONMENT,
    folder=str(ROOT),
)


@pytest.fixture
def dsn(database):
    return database


def run(dsn, test, **options):
    """Run *test* with a client while an orchestrator runs."""

    async def main():
        jobs_orchestrator = make_orchestrator(dsn, **options)
        async with (
            AsyncJobClient(dsn, executors=options.get("kinds", ("python",))) as client,
            run_task(jobs_orchestrator),
        ):
            return await test(client, jobs_orchestrator)

    return asyncio.run(main())


def list_dead_letters(dsn, kind="python"):
    queue = PostgresQueue(queue_name(kind), dsn=dsn)
    try:
        return {letter.envelope.id: letter for letter in queue.list_dead(DeadLetterQuery.load())}
    finally:
        queue.close()


def is_drained(dsn):
    """Return whether the queues hold nothing but dead letters."""
    tables = "ready", "content", "redelivery"
    return all(run_sql(dsn, f"select count(*) from ergon.{table}") == [(0,)] for table in tables)


# -- outcomes -------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-05", "EXE-24")
def test_results_errors_types_and_tracebacks_of_sync_and_async_handlers_are_kept(dsn):
    async def test(client, _):
        done = [await client.submit(name, 21) for name in ("double", "double_later")]
        failed = [await client.submit(name, "no such order", max_attempts=1) for name in ("fail", "fail_later")]
        invalid = await client.submit("double", "x", max_attempts=2)
        retried = await client.submit("third_time_lucky")
        return [await client.wait(one.id, timeout=30) for one in (*done, *failed, invalid, retried)]

    *done, one, other, invalid, retried = run(dsn, test, command=RUNTIME)
    assert [(job.state, job.result, job.attempts) for job in done] == [("succeeded", 42, 1)] * 2
    for job in (one, other):
        assert (job.state, job.error.type, job.error.message) == ("failed", "LookupError", "no such order")
        assert "raise LookupError(words)" in job.error.traceback
    assert (invalid.state, invalid.attempts, invalid.error.code, invalid.error.category) == (
        "failed",
        2,
        "invalid_argument",
        Category.SYSTEM,
    )
    assert (retried.state, retried.attempts, retried.result) == ("succeeded", 3, 3)


@pytest.mark.spec("EXE-14")
def test_the_trace_of_the_submitter_reaches_the_executor(dsn):
    tracer = TracerProvider().get_tracer("test")

    async def test(client, _):
        with tracer.start_as_current_span("caller") as span:
            submitted = await client.submit("traced")
        job = await client.wait(submitted.id, timeout=30)
        return job.result, format(span.get_span_context().trace_id, "032x")

    traceparent, trace_id = run(dsn, test, command=RUNTIME)
    assert traceparent.split("-")[1] == trace_id


@pytest.mark.spec("EXE-11", "EXE-19")
def test_a_job_that_kills_its_executor_is_a_dead_letter_after_exactly_its_attempts(dsn):
    async def test(client, _):
        submitted = await client.submit("crash", max_attempts=3, tenant="acme")
        job = await client.wait(submitted.id, timeout=30)
        return job, (await wait_until(lambda: list_dead_letters(dsn)))[job.id]

    job, letter = run(dsn, test)
    assert (job.state, job.attempts, job.error.code) == ("failed", 3, "executor_died")
    failure = letter.failure
    assert (letter.reason, failure.attempts, failure.error_type) == ("executor_died", 3, "executor_died")
    assert (failure.task_name, failure.tenant_id, failure.transaction_id) == ("jobs.python", "acme", job.id)


@pytest.mark.spec("EXE-07", "EXE-18")
def test_a_job_that_times_out_is_killed_and_retried_by_policy(dsn):
    async def test(client, _):
        submitted = await client.submit("spin", timeout=0.3, max_attempts=2)
        neighbour = await client.submit("sleep", 1.0)
        return await client.wait(submitted.id, timeout=30), await client.wait(neighbour.id, timeout=30)

    job, neighbour = run(dsn, test)
    assert (job.state, job.attempts, job.error.code, job.error.category) == (
        "failed",
        2,
        "hard_timeout",
        Category.TIMEOUT,
    )
    assert (neighbour.state, neighbour.attempts) == ("succeeded", 1)


@pytest.mark.spec("EXE-20")
def test_the_timeout_of_a_job_starts_when_an_executor_is_free_for_it(dsn, monkeypatch):
    monkeypatch.setattr(task, "EXECUTOR_WAIT_SECONDS", 30.0)

    async def test(client, _):
        submitted = [await client.submit("sleep", 0.5, timeout=1.0, max_attempts=1) for _ in range(4)]
        return [await client.wait(one.id, timeout=30) for one in submitted]

    jobs = run(dsn, test, size=1)
    assert [(job.state, job.attempts) for job in jobs] == [("succeeded", 1)] * 4
    assert max(job.ended_at for job in jobs) - min(job.created_at for job in jobs) >= timedelta(seconds=2)


@pytest.mark.spec("EXE-18", "EXE-19")
def test_a_neighbour_of_a_killed_job_loses_no_attempt(dsn):
    async def test(client, jobs_orchestrator):
        neighbour = await client.submit("sleep", 1.0, max_attempts=1)
        await wait_until(_is_running, client, neighbour.id)
        timed_out = await client.submit("spin", timeout=0.2, max_attempts=1)
        return await client.wait(timed_out.id, timeout=30), await client.wait(neighbour.id, timeout=30)

    timed_out, neighbour = run(dsn, test, size=1, max_in_flight=2)
    assert (timed_out.state, timed_out.attempts) == ("failed", 1)
    assert (neighbour.state, neighbour.attempts) == ("succeeded", 1)


async def _is_running(client, job_id):
    return (await client.show(job_id)).state is JobState.RUNNING


# -- routing to executors -------------------------------------------------------------------------


@pytest.mark.spec("EXE-13")
def test_the_prefix_selects_the_executor_and_only_the_handler_is_sent(dsn):
    async def test(client, _):
        submitted = [await client.submit(name, 1) for name in ("rust#echo", "echo", "python#echo")]
        return [await client.wait(one.id, timeout=30) for one in submitted]

    jobs = run(dsn, test, kinds=("python", "rust"))
    assert [(job.kind, job.function_name, job.result) for job in jobs] == [
        ("rust", "echo", 1),
        ("python", "echo", 1),
        ("python", "echo", 1),
    ]


@pytest.mark.spec("EXE-13")
def test_a_job_for_an_unknown_executor_is_a_dead_letter_that_says_so(dsn):
    async def test(client, _):
        submitted = await client.submit("go#echo", 1)
        job = await client.wait(submitted.id, timeout=30)
        return job, (await wait_until(lambda: list_dead_letters(dsn)))[job.id]

    job, letter = run(dsn, test)
    assert (job.state, job.error.code, job.attempts) == ("failed", "no_route", 1)
    assert "the executor 'go', which does not exist; known: python" in job.error.message
    assert (letter.reason, letter.failure.error_message) == ("no_route", job.error.message)


def test_a_message_without_a_job_is_a_dead_letter_that_says_so(dsn):
    async def test(client, _):
        queue = PostgresQueue(queue_name("python"), dsn=dsn)
        await queue.dispatch_async([Transaction({"hello": 1}, id="stray"), Transaction("text", id="other")])
        await queue.close_async()
        return await wait_until(lambda: letters_found if len(letters_found := list_dead_letters(dsn)) == 2 else None)

    dead_letters = run(dsn, test)
    assert {letter.reason for letter in dead_letters.values()} == {"no_job"}
    assert "there is no job 'stray'" in dead_letters["stray"].failure.error_message


@pytest.mark.spec("EXE-13")
def test_a_job_with_an_invalid_message_is_a_dead_letter(dsn):
    async def test(client, _):
        submitted = await client.submit("echo", 1, delay=0.5)
        run_sql(dsn, "update ergon.content set body = '[]'")
        return await client.wait(submitted.id, timeout=30)

    job = run(dsn, test)
    assert (job.state, job.error.code) == ("failed", "no_job")


@pytest.mark.spec("EXE-26")
def test_a_slow_kind_delays_no_other(dsn):
    async def test(client, _):
        slow = [await client.submit("slow#sleep", 0.5) for _ in range(60)]
        await wait_until(_is_running, client, slow[0].id)
        began = time.monotonic()
        fast = [await client.submit("fast#echo", n) for n in range(10)]
        for one in fast:
            await client.wait(one.id, timeout=10)
        took = time.monotonic() - began
        return took, len(await client.list(kind="slow", states=["succeeded"]))

    took, slow_finished = run(dsn, test, kinds=("slow", "fast"), size=1)
    assert took < 3
    assert slow_finished < 60


def test_a_job_that_waits_too_long_for_an_executor_is_released_to_another_orchestrator(dsn, monkeypatch):
    monkeypatch.setattr(task, "EXECUTOR_WAIT_SECONDS", 0.2)

    async def test(client, jobs_orchestrator):
        long_job = await client.submit("sleep", 60, timeout=90)
        await wait_until(_is_running, client, long_job.id)
        submitted = await client.submit("echo", 1)
        # The first orchestrator has claimed it and has no executor for it.
        await wait_until(lambda: sum(each._active_jobs for each in jobs_orchestrator.tasks.values()) > 1)
        other = make_orchestrator(dsn, size=1)
        async with run_task(other):
            job = await client.wait(submitted.id, timeout=30)
        await client.kill(long_job.id)
        await client.wait(long_job.id, timeout=30)
        return job

    job = run(dsn, test, size=1)
    assert (job.state, job.attempts) == ("succeeded", 1)


def test_a_job_waits_for_the_first_executor_however_long_it_takes_to_start(dsn, monkeypatch, caplog):
    monkeypatch.setattr(task, "EXECUTOR_WAIT_SECONDS", 0.01)
    caplog.set_level(logging.INFO)

    async def test(client, _):
        return await client.wait((await client.submit("double", 21)).id, timeout=30)

    assert run(dsn, test, command=RUNTIME, size=1).result == 42
    assert [record for record in caplog.records if getattr(record, "code", None) == "no_executor"] == []


@pytest.mark.spec("EXE-20")
@pytest.mark.parametrize("is_short_job", [False, True], ids=["before the attempt starts", "started and released"])
def test_a_job_whose_executor_does_not_start_uses_no_attempt_and_the_log_says_why(dsn, is_short_job, caplog):
    caplog.set_level(logging.INFO)
    broken_command = ExecutorCommand(words=("sh", "-c", "echo no such token=abc >&2; exit 3"), environment=ENVIRONMENT)

    def list_deferrals():
        return [record for record in caplog.records if getattr(record, "code", None) == "executor_not_started"]

    async def test(client, jobs_orchestrator):
        if is_short_job:
            jobs_orchestrator.tasks["python"]._average_seconds = 0.0
        began = time.monotonic()
        submitted = await client.submit("echo", 1, max_attempts=1)
        await wait_until(lambda: len(list_deferrals()) >= 3)
        return await client.show(submitted.id), time.monotonic() - began

    job, took = run(dsn, test, command=broken_command, size=1)
    assert (job.state, job.attempts, job.error) == ("pending", 0, None)
    # A second passes between two polls: a broken deployment does not keep the database busy.
    assert took > 2
    message = "with exit code 3: it wrote no such token=[hidden]; run: ergon executor check -- "
    assert message in list_deferrals()[0].error
    assert message in next(record for record in caplog.records if get_event(record) == "executor not started").error


# -- kill, cancel, replay, retention --------------------------------------------------------------


@pytest.mark.spec("EXE-12")
def test_a_running_job_is_killed_on_request_and_never_retried(dsn, caplog):
    async def test(client, jobs_orchestrator):
        submitted = await client.submit("spin", max_attempts=5)
        neighbour = await client.submit("sleep", 1.5)
        await wait_until(_is_running, client, submitted.id)
        began = time.monotonic()
        assert await client.kill(submitted.id) is JobState.RUNNING
        job = await client.wait(submitted.id, timeout=10)
        took = time.monotonic() - began
        next_job = await client.wait((await client.submit("echo", 1)).id, timeout=10)
        return job, took, await client.wait(neighbour.id, timeout=10), next_job

    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        job, took, neighbour, next_job = run(dsn, test)
    assert (job.state, job.attempts, job.error.code) == ("killed", 1, "killed")
    assert took < 2.0
    assert (neighbour.state, neighbour.attempts, next_job.state) == ("succeeded", 1, "succeeded")
    assert is_drained(dsn)
    assert list_dead_letters(dsn) == {}
    assert [record.transaction_id for record in caplog.records if get_event(record) == "job killed"] == [job.id]


@pytest.mark.spec("DX-37", "EXE-12")
@pytest.mark.parametrize("finishes", ["before the look for kills", "after it"])
def test_a_job_that_succeeds_after_a_kill_request_has_succeeded(dsn, tmp_path, caplog, finishes):
    done_file = tmp_path / "done"

    async def test(client, _):
        submitted = await client.submit("wait_for_file", str(done_file))
        await wait_until(_is_running, client, submitted.id)
        assert await client.kill(submitted.id) is JobState.RUNNING
        if finishes == "after it":
            await wait_until(lambda: "job killed" in list_events(caplog.records))
        done_file.touch()
        return await client.wait(submitted.id, timeout=30)

    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        # The executor has time to answer after SIGTERM.
        job = run(dsn, test, command=RUNTIME, grace=20.0)
    assert (job.state, job.result, job.attempts, job.error) == ("succeeded", "found", 1, None)
    assert is_drained(dsn)


@pytest.mark.spec("EXE-12")
def test_a_cancelled_job_never_runs_and_leaves_no_message(dsn):
    async def test(client, _):
        waiting = await client.submit("fail_always", max_attempts=1)
        submitted = await client.submit("echo", 1, delay=0.5)
        assert await client.cancel(submitted.id)
        await wait_until(is_drained, dsn)
        return await client.show(submitted.id), await client.wait(waiting.id, timeout=10)

    job, _ = run(dsn, test)
    assert (job.state, job.attempts, job.started_at) == ("cancelled", 0, None)


@pytest.mark.parametrize("tool", ["client", "dlq"])
def test_a_failed_job_is_replayed_by_the_client_and_by_dlq(dsn, tool):
    async def test(client, jobs_orchestrator):
        submitted = await client.submit("nothing", max_attempts=3)
        first = await client.wait(submitted.id, timeout=10)
        letter = (await wait_until(lambda: list_dead_letters(dsn)))[submitted.id]
        if tool == "client":
            await client.replay(submitted.id)
        else:
            await jobs_orchestrator.connector.replay_dead_async([letter.handle])
        replayed = await wait_until(_find_later_failure, client, first)
        return first, replayed, await wait_until(lambda: list_dead_letters(dsn))

    first, replayed, dead_letters = run(dsn, test)
    assert [(job.state, job.attempts, job.error.code) for job in (first, replayed)] == [
        ("failed", 1, "handler_not_found")
    ] * 2
    assert len(dead_letters) == 1


async def _find_later_failure(client, first):
    job = await client.show(first.id)
    return job if job.state is JobState.FAILED and job.ended_at > first.ended_at else None


def test_orchestrators_delete_expired_jobs(dsn, monkeypatch):
    monkeypatch.setattr(task, "DELETE_INTERVAL_SECONDS", 0.0)

    async def test(client, _):
        expired = await client.submit("echo", 1, retention=0.2)
        kept = await client.submit("echo", 1)
        await client.wait(kept.id, timeout=10)

        async def is_deleted():
            return expired.id not in {job.id for job in await client.list()}

        await wait_until(is_deleted)
        return (await client.show(kept.id)).state

    assert run(dsn, test) == "succeeded"


@pytest.mark.parametrize("acks", [True, False])
def test_the_policy_may_ack_failed_jobs(dsn, acks):
    rules = make_policy().model_dump()
    rules["steps"]["settle"]["on_system"] = "ack" if acks else "dead_letter"

    async def test(client, _):
        job = await client.wait((await client.submit("nothing")).id, timeout=10)
        await wait_until(is_drained, dsn)
        return job

    assert run(dsn, test, rules=ConsumerPolicy.load(rules)).state == "failed"
    assert len(list_dead_letters(dsn)) == (0 if acks else 1)


# -- starting and stopping ------------------------------------------------------------------------


def test_a_job_that_is_interrupted_by_a_stop_loses_no_attempt(dsn):
    rules = make_policy().model_dump()
    rules["loop"]["drain_timeout"] = 0.2

    async def test(client, jobs_orchestrator):
        submitted = await client.submit("sleep", 60, max_attempts=1)
        await wait_until(_is_running, client, submitted.id)
        return submitted.id

    job_id = run(dsn, test, rules=ConsumerPolicy.load(rules))
    with JobClient(dsn) as client:
        job = client.show(job_id)
    assert (job.state, job.attempts) == ("pending", 0)


def test_a_stop_lets_running_jobs_finish(dsn):
    async def test(client, jobs_orchestrator):
        submitted = await client.submit("sleep", 0.5)
        await wait_until(_is_running, client, submitted.id)
        return submitted.id

    job_id = run(dsn, test)
    with JobClient(dsn) as client:
        assert client.show(job_id).state == "succeeded"


def test_one_reaper_serves_all_kinds_and_no_process_is_left(dsn):
    before = set(psutil.Process().children())

    async def test(client, jobs_orchestrator):
        jobs = [await client.submit(f"{kind}#echo", 1) for kind in ("a", "b", "c")]
        for one in jobs:
            await client.wait(one.id, timeout=20)
        pools = [each._pool for each in jobs_orchestrator.tasks.values()]
        assert len({id(pool._reaper) for pool in pools}) == 1

    run(dsn, test, kinds=("a", "b", "c"), size=1)
    assert set(psutil.Process().children()) == before


def test_a_kind_that_fails_stops_the_others(dsn, monkeypatch):
    jobs_orchestrator = make_orchestrator(dsn, kinds=("a", "b"), size=1)

    async def raise_error(*_, **__):
        raise OSError("no more")

    monkeypatch.setattr(jobs_orchestrator.tasks["b"], "consume_transactions", raise_error)
    with pytest.raises(OSError, match="no more"):
        asyncio.run(asyncio.wait_for(jobs_orchestrator.run(), 20))


def test_before_the_upgrade_an_orchestrator_names_the_command_to_run(dsn):
    run_sql(dsn, "drop table ergon.job")
    with pytest.raises(ConfigurationError, match="ergon db upgrade"):
        asyncio.run(asyncio.wait_for(make_orchestrator(dsn).run(), 20))


@pytest.mark.parametrize("kinds", [{}, {"a#b": None}, {"": None}])
def test_kinds_have_names_that_can_be_prefixes(kinds):
    executors = ExecutorGroup(command=RUNTIME)
    with pytest.raises(ConfigurationError, match="at least one executor kind"):
        Orchestrator(dict.fromkeys(kinds, executors), dsn="postgresql://unknown@nowhere/x")


# -- claims that are lost -------------------------------------------------------------------------


def take_over(dsn, worker):
    """Let another worker take over everything that other workers have claimed, and return its first delivery."""
    worker_id = worker.queue._client.worker_lease.worker
    run_sql(
        dsn, "update ergon.worker set alive_until = now() - interval '1 second' where id is distinct from %s", worker_id
    )
    worker.queue._client._last_reap = float("-inf")
    return worker.fetch()[0]


@pytest.mark.spec("EXE-22")
def test_an_orchestrator_that_lost_its_claim_between_start_and_finish_changes_nothing(dsn, caplog):
    stale_before = _count_stale()

    async def test(client, jobs_orchestrator):
        submitted = await client.submit("sleep", 3.0)  # longer than a takeover takes on a busy machine
        await wait_until(_is_running, client, submitted.id)
        other_worker = ManualWorker(dsn, lease=29.0)
        try:
            delivery = await asyncio.to_thread(take_over, dsn, other_worker)
            assert other_worker.start(delivery)[0].attempt_number == 2
            assert other_worker.finish(delivery, Complete("new")) is JobState.SUCCEEDED
            await wait_until(lambda: _count_stale() > stale_before)
            return await client.show(submitted.id)
        finally:
            other_worker.close()

    job = run(dsn, test)
    assert (job.state, job.result, job.attempts) == ("succeeded", "new", 2)
    assert [record.transaction_id for record in caplog.records if get_event(record) == "job stale"] == [job.id]


@pytest.mark.spec("EXE-22")
def test_an_orchestrator_that_lost_its_claim_before_the_start_sends_nothing(dsn, monkeypatch, tmp_path):
    start_reached, resume = asyncio.Event(), asyncio.Event()
    start = batched_store.BatchedJobStore.start

    async def start_after_resume(self, claim):
        start_reached.set()
        await resume.wait()
        return await start(self, claim)

    monkeypatch.setattr(batched_store.BatchedJobStore, "start", start_after_resume)
    stale_before = _count_stale()

    async def test(client, jobs_orchestrator):
        submitted = await client.submit("kill_parent")  # it kills the process that sends it
        await start_reached.wait()
        other_worker = ManualWorker(dsn, lease=29.0)
        try:
            delivery = await asyncio.to_thread(take_over, dsn, other_worker)
            assert other_worker.start(delivery)[0].attempt_number == 1
            resume.set()
            await wait_until(lambda: _count_stale() > stale_before)
            assert (await client.show(submitted.id)).attempts == 1
            assert other_worker.finish(delivery, Complete("theirs")) is JobState.SUCCEEDED
            return await client.show(submitted.id)
        finally:
            other_worker.close()

    assert run(dsn, test).result == "theirs"


def _count_stale():
    return job_metrics("jobs.python").counters().get((names.JOBS.name, ("stale",)), 0)


APP_TEMPLATE = """
import sys
from ergon_framework import ConsumerPolicy
from ergon_framework.jobs.orchestrator import ExecutorGroup, Orchestrator
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.executors.process import ExecutorCommand

policy = ConsumerPolicy.load({{"loop": {{"streaming": True, "empty_queue": {{"backoff": 0.05, "cap": 0.2}}}}}})
command = ExecutorCommand(words=(sys.executable, "-S", {program!r}), environment={environment!r})
jobs = Orchestrator({{"python": ExecutorGroup(command=command, pool=PoolPolicy(size=1))}}, lease=1.0, policy=policy)
"""


@pytest.mark.spec("EXE-19", "EXE-21")
def test_a_job_that_kills_its_orchestrator_is_a_dead_letter_after_exactly_its_attempts(dsn, tmp_path):
    (tmp_path / "app.py").write_text(
        APP_TEMPLATE.format(program=EXECUTOR_PROGRAM, environment=ENVIRONMENT), encoding="utf-8"
    )
    environment = {**ENVIRONMENT, "ERGON_POSTGRES__DSN": dsn}
    with JobClient(dsn) as client:
        killer_id = client.submit("kill_parent", max_attempts=2).id
        exit_codes = []
        for _ in range(2):
            process = subprocess.Popen([*ERGON, "run", "app:jobs"], cwd=tmp_path, env=environment)
            exit_codes.append(process.wait(60))
            assert client.show(killer_id).state is JobState.RUNNING
        assert exit_codes == [-signal.SIGKILL] * 2
        assert client.show(killer_id).attempts == 2
        process = subprocess.Popen([*ERGON, "run", "app:jobs"], cwd=tmp_path, env=environment)
        try:
            job = client.wait(killer_id, timeout=60)
            assert (job.state, job.attempts, job.error.code) == ("failed", 2, "orchestrator_died")
            next_job = client.submit("echo", 1)
            assert client.wait(next_job.id, timeout=60).state == "succeeded"
        finally:
            process.terminate()
            assert process.wait(60) == 0
        assert [one.reason for one in list_dead_letters(dsn).values()] == ["orchestrator_died"]


# -- how long it runs -----------------------------------------------------------------------------

SERVICE_TEMPLATE = """
import os
from ergon_framework.jobs.orchestrator import ExecutorGroup, Orchestrator
from ergon_framework.executors.pool import PoolPolicy
from ergon_framework.executors.process import ExecutorCommand

command = ExecutorCommand(words={words!r}, environment={{"PATH": os.environ["PATH"]}})
orchestrator = Orchestrator({{"python": ExecutorGroup(command=command, pool=PoolPolicy(size=1))}})
"""


@pytest.fixture
def service_folder(dsn, tmp_path, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    (tmp_path / "jobs.py").write_text(SERVICE_TEMPLATE.format(words=COMMAND.words), encoding="utf-8")
    (tmp_path / "policy.toml").write_text("[loop]\ndrain_timeout = 5.0\n", encoding="utf-8")
    (tmp_path / "once.toml").write_text("[loop]\nstreaming = false\n", encoding="utf-8")
    return tmp_path


@pytest.mark.spec("DX-36")
@pytest.mark.parametrize("options", [[], ["--policy", "policy.toml"]], ids=["default", "policy without streaming"])
def test_an_orchestrator_keeps_running_when_its_queue_is_empty(dsn, service_folder, options):
    command = [*ERGON, "run", "jobs:orchestrator", *options]
    process = subprocess.Popen(command, cwd=service_folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with JobClient(dsn) as client:
            for number in range(2):
                # Each job has ended, and the queue is empty, before the next is submitted.
                job = client.wait(client.submit("echo", number).id, timeout=60)
                assert job.result == number
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.spec("DX-36")
@pytest.mark.parametrize("options", [["--once"], ["--policy", "once.toml"]], ids=["once", "policy"])
def test_an_orchestrator_exits_at_an_empty_queue_if_configured(service_folder, options):
    command = [*ERGON, "run", "jobs:orchestrator", *options]
    result = subprocess.run(command, cwd=service_folder, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
