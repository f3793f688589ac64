"""Orchestrators at work: real executors, a real database, and everything that happens to a job on its way."""

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
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.errors import Category, ConfigurationError
from ergon_framework.executor.jobs import desk, task
from ergon_framework.executor.jobs.client import AsyncJobClient, JobClient
from ergon_framework.executor.jobs.model import JobState, queue_name
from ergon_framework.executor.jobs.observe import tally_of
from ergon_framework.executor.jobs.orchestrator import Executors, Orchestrator
from ergon_framework.executor.process import Command
from ergon_framework.executor.verdict import Complete
from ergon_framework.telemetry import names
from ergon_framework.transaction import Transaction
from tests.integration.jobs import COMMAND, PATH, ROOT, STUBBORN, Store, orchestrator, policy, rows, running, until
from tests.integration.running import ERGON
from tests.log_events import event_of, events_of

RUNTIME = Command(
    words=(*ERGON, "executor", "run", "--handlers", "tests.integration.job_handlers:registry"),
    environment=PATH,
    folder=str(ROOT),
)


@pytest.fixture
def dsn(database):
    return database


def run(dsn, test, **options):
    """Run *test* with a client while an orchestrator runs."""

    async def main():
        made = orchestrator(dsn, **options)
        async with AsyncJobClient(dsn, executors=options.get("kinds", ("python",))) as client, running(made):
            return await test(client, made)

    return asyncio.run(main())


def letters(dsn, kind="python"):
    queue = PostgresQueue(queue_name(kind), dsn=dsn)
    try:
        return {one.envelope.id: one for one in queue.list_dead(DeadLetterQuery.load())}
    finally:
        queue.close()


def drained(dsn):
    """Whether no queue holds anything but dead letters."""
    tables = "ready", "content", "returned"
    return all(rows(dsn, f"select count(*) from ergon.{table}") == [(0,)] for table in tables)


# -- outcomes -------------------------------------------------------------------------------------


@pytest.mark.spec("EXE-05", "EXE-24")
def test_results_errors_types_and_tracebacks_of_sync_and_async_handlers_are_kept(dsn):
    async def test(client, _):
        done = [await client.submit(name, 21) for name in ("double", "double_later")]
        failed = [await client.submit(name, "no such order", max_attempts=1) for name in ("fail", "fail_later")]
        bad = await client.submit("double", "x", max_attempts=2)
        lucky = await client.submit("third_time_lucky")
        return [await client.wait(one.id, timeout=30) for one in (*done, *failed, bad, lucky)]

    *done, one, other, bad, lucky = run(dsn, test, command=RUNTIME)
    assert [(job.state, job.result, job.attempts) for job in done] == [("succeeded", 42, 1)] * 2
    for job in (one, other):
        assert (job.state, job.error.type, job.error.message) == ("failed", "LookupError", "no such order")
        assert "raise LookupError(words)" in job.error.traceback
    assert (bad.state, bad.attempts, bad.error.code, bad.error.category) == (
        "failed",
        2,
        "invalid_argument",
        Category.SYSTEM,
    )
    assert (lucky.state, lucky.attempts, lucky.result) == ("succeeded", 3, 3)


@pytest.mark.spec("EXE-14")
def test_the_trace_of_whoever_submits_reaches_the_executor(dsn):
    tracer = TracerProvider().get_tracer("test")

    async def test(client, _):
        with tracer.start_as_current_span("caller") as span:
            got = await client.submit("traced")
        job = await client.wait(got.id, timeout=30)
        return job.result, format(span.get_span_context().trace_id, "032x")

    carried, trace_id = run(dsn, test, command=RUNTIME)
    assert carried.split("-")[1] == trace_id


@pytest.mark.spec("EXE-11", "EXE-19")
def test_a_job_that_kills_its_executor_is_a_dead_letter_after_exactly_its_attempts(dsn):
    async def test(client, _):
        got = await client.submit("crash", max_attempts=3, tenant="acme")
        job = await client.wait(got.id, timeout=30)
        return job, (await until(lambda: letters(dsn)))[job.id]

    job, letter = run(dsn, test)
    assert (job.state, job.attempts, job.error.code) == ("failed", 3, "executor_died")
    failure = letter.failure
    assert (letter.reason, failure.attempts, failure.error_type) == ("executor_died", 3, "executor_died")
    assert (failure.task_name, failure.tenant_id, failure.transaction_id) == ("jobs.python", "acme", job.id)


@pytest.mark.spec("EXE-07", "EXE-18")
def test_a_job_that_takes_too_long_is_killed_and_tried_again_by_policy(dsn):
    async def test(client, _):
        got = await client.submit("spin", timeout=0.3, max_attempts=2)
        beside = await client.submit("sleep", 1.0)
        return await client.wait(got.id, timeout=30), await client.wait(beside.id, timeout=30)

    job, beside = run(dsn, test)
    assert (job.state, job.attempts, job.error.code, job.error.category) == (
        "failed",
        2,
        "hard_timeout",
        Category.TIMEOUT,
    )
    assert (beside.state, beside.attempts) == ("succeeded", 1)


@pytest.mark.spec("EXE-20")
def test_the_clock_of_a_job_starts_when_an_executor_is_free_for_it(dsn, monkeypatch):
    monkeypatch.setattr(task, "PATIENCE", 30.0)

    async def test(client, _):
        got = [await client.submit("sleep", 0.5, timeout=1.0, max_attempts=1) for _ in range(4)]
        return [await client.wait(one.id, timeout=30) for one in got]

    jobs = run(dsn, test, size=1)
    assert [(job.state, job.attempts) for job in jobs] == [("succeeded", 1)] * 4
    assert max(job.ended_at for job in jobs) - min(job.created_at for job in jobs) >= timedelta(seconds=2)


@pytest.mark.spec("EXE-18", "EXE-19")
def test_a_neighbour_of_a_killed_job_gets_its_attempt_back(dsn):
    async def test(client, made):
        beside = await client.submit("sleep", 1.0, max_attempts=1)
        await until(_is_running, client, beside.id)
        guilty = await client.submit("spin", timeout=0.2, max_attempts=1)
        return await client.wait(guilty.id, timeout=30), await client.wait(beside.id, timeout=30)

    guilty, beside = run(dsn, test, size=1, max_in_flight=2)
    assert (guilty.state, guilty.attempts) == ("failed", 1)
    assert (beside.state, beside.attempts) == ("succeeded", 1)


async def _is_running(client, job_id):
    return (await client.show(job_id)).state is JobState.RUNNING


# -- who takes what -------------------------------------------------------------------------------


@pytest.mark.spec("EXE-13")
def test_the_prefix_selects_the_executor_and_only_the_handler_is_sent(dsn):
    async def test(client, _):
        got = [await client.submit(name, 1) for name in ("rust#echo", "echo", "python#echo")]
        return [await client.wait(one.id, timeout=30) for one in got]

    jobs = run(dsn, test, kinds=("python", "rust"))
    assert [(job.kind, job.function_name, job.result) for job in jobs] == [
        ("rust", "echo", 1),
        ("python", "echo", 1),
        ("python", "echo", 1),
    ]


@pytest.mark.spec("EXE-13")
def test_an_executor_that_nobody_knows_is_a_dead_letter_that_says_so(dsn):
    async def test(client, _):
        got = await client.submit("go#echo", 1)
        job = await client.wait(got.id, timeout=30)
        return job, (await until(lambda: letters(dsn)))[job.id]

    job, letter = run(dsn, test)
    assert (job.state, job.error.code, job.attempts) == ("failed", "no_route", 1)
    assert "the executor 'go', which does not exist; known: python" in job.error.message
    assert (letter.reason, letter.failure.error_message) == ("no_route", job.error.message)


def test_a_message_that_is_no_job_is_a_dead_letter_that_says_so(dsn):
    async def test(client, _):
        stray = PostgresQueue(queue_name("python"), dsn=dsn)
        await stray.dispatch_async([Transaction("stray", {"hello": 1}), Transaction("other", "text")])
        await stray.close_async()
        return await until(lambda: found if len(found := letters(dsn)) == 2 else None)

    found = run(dsn, test)
    assert {one.reason for one in found.values()} == {"no_job"}
    assert "there is no job 'stray'" in found["stray"].failure.error_message


@pytest.mark.spec("EXE-13")
def test_a_job_whose_message_is_broken_is_a_dead_letter(dsn):
    async def test(client, _):
        got = await client.submit("echo", 1, delay=0.5)
        rows(dsn, "update ergon.content set body = '[]'")
        return await client.wait(got.id, timeout=30)

    job = run(dsn, test)
    assert (job.state, job.error.code) == ("failed", "no_job")


@pytest.mark.spec("EXE-26")
def test_a_slow_kind_delays_no_other(dsn):
    async def test(client, _):
        slow = [await client.submit("slow#sleep", 0.5) for _ in range(60)]
        await until(_is_running, client, slow[0].id)
        began = time.monotonic()
        fast = [await client.submit("fast#echo", n) for n in range(10)]
        for one in fast:
            await client.wait(one.id, timeout=10)
        took = time.monotonic() - began
        return took, len(await client.list(kind="slow", states=["succeeded"]))

    took, ended = run(dsn, test, kinds=("slow", "fast"), size=1)
    assert took < 3
    assert ended < 60


def test_a_job_that_waits_too_long_for_an_executor_is_left_to_another_orchestrator(dsn, monkeypatch):
    monkeypatch.setattr(task, "PATIENCE", 0.2)

    async def test(client, made):
        long = await client.submit("sleep", 60, timeout=90)
        await until(_is_running, client, long.id)
        got = await client.submit("echo", 1)
        # The first one has claimed it and has nobody for it.
        await until(lambda: sum(each._inside for each in made.tasks.values()) > 1)
        other = orchestrator(dsn, size=1)
        async with running(other):
            job = await client.wait(got.id, timeout=30)
        await client.kill(long.id)
        await client.wait(long.id, timeout=30)
        return job

    job = run(dsn, test, size=1)
    assert (job.state, job.attempts) == ("succeeded", 1)


def test_a_job_waits_for_the_first_executor_however_long_it_takes_to_start(dsn, monkeypatch, caplog):
    monkeypatch.setattr(task, "PATIENCE", 0.01)
    caplog.set_level(logging.INFO)

    async def test(client, _):
        return await client.wait((await client.submit("double", 21)).id, timeout=30)

    assert run(dsn, test, command=RUNTIME, size=1).result == 42
    assert [record for record in caplog.records if getattr(record, "code", None) == "no_executor"] == []


@pytest.mark.spec("EXE-20")
@pytest.mark.parametrize("brisk", [False, True], ids=["before it is begun", "begun and given back"])
def test_a_job_whose_executor_does_not_start_waits_at_no_cost_and_the_log_says_why(dsn, brisk, caplog):
    caplog.set_level(logging.INFO)
    wrong = Command(words=("sh", "-c", "echo no such token=abc >&2; exit 3"), environment=PATH)

    def deferred():
        return [one for one in caplog.records if getattr(one, "code", None) == "executor_not_started"]

    async def test(client, made):
        if brisk:
            made.tasks["python"]._usual = 0.0
        began = time.monotonic()
        got = await client.submit("echo", 1, max_attempts=1)
        await until(lambda: len(deferred()) >= 3)
        return await client.show(got.id), time.monotonic() - began

    job, took = run(dsn, test, command=wrong, size=1)
    assert (job.state, job.attempts, job.error) == ("pending", 0, None)
    # A second passes between two looks: a broken deployment does not keep the database busy.
    assert took > 2
    words = "with exit code 3: it wrote no such token=[hidden]; try it: ergon executor check -- "
    assert words in deferred()[0].error
    assert words in next(one for one in caplog.records if event_of(one) == "executor not started").error


# -- kill, cancel, replay, retention --------------------------------------------------------------


@pytest.mark.spec("EXE-12")
def test_a_running_job_is_killed_when_somebody_asks_and_never_tried_again(dsn, caplog):
    async def test(client, made):
        got = await client.submit("spin", max_attempts=5)
        beside = await client.submit("sleep", 1.5)
        await until(_is_running, client, got.id)
        began = time.monotonic()
        assert await client.kill(got.id) is JobState.RUNNING
        job = await client.wait(got.id, timeout=10)
        took = time.monotonic() - began
        after = await client.wait((await client.submit("echo", 1)).id, timeout=10)
        return job, took, await client.wait(beside.id, timeout=10), after

    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        job, took, beside, after = run(dsn, test)
    assert (job.state, job.attempts, job.error.code) == ("killed", 1, "killed")
    assert took < 2.0
    assert (beside.state, beside.attempts, after.state) == ("succeeded", 1, "succeeded")
    assert drained(dsn)
    assert letters(dsn) == {}
    assert [record.transaction_id for record in caplog.records if event_of(record) == "job killed"] == [job.id]


@pytest.mark.spec("DX-37", "EXE-12")
@pytest.mark.parametrize("look", ["before the look for kills", "after it"])
def test_a_job_that_succeeds_although_its_kill_is_asked_for_has_succeeded(dsn, tmp_path, caplog, look):
    done = tmp_path / "done"

    async def test(client, _):
        got = await client.submit("wait_for_file", str(done))
        await until(_is_running, client, got.id)
        assert await client.kill(got.id) is JobState.RUNNING
        if look == "after it":
            await until(lambda: "job killed" in events_of(caplog.records))
        done.touch()
        return await client.wait(got.id, timeout=30)

    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        # The executor has time to answer after SIGTERM.
        job = run(dsn, test, command=RUNTIME, grace=20.0)
    assert (job.state, job.result, job.attempts, job.error) == ("succeeded", "found", 1, None)
    assert drained(dsn)


@pytest.mark.spec("EXE-12")
def test_a_cancelled_job_never_runs_and_leaves_no_message(dsn):
    async def test(client, _):
        waiting = await client.submit("fail_always", max_attempts=1)
        got = await client.submit("echo", 1, delay=0.5)
        assert await client.cancel(got.id)
        await until(drained, dsn)
        return await client.show(got.id), await client.wait(waiting.id, timeout=10)

    job, _ = run(dsn, test)
    assert (job.state, job.attempts, job.started_at) == ("cancelled", 0, None)


@pytest.mark.parametrize("how", ["client", "dlq"])
def test_a_dead_job_is_replayed_by_the_client_and_by_dlq(dsn, how):
    async def test(client, made):
        got = await client.submit("nothing", max_attempts=3)
        first = await client.wait(got.id, timeout=10)
        letter = (await until(lambda: letters(dsn)))[got.id]
        if how == "client":
            await client.replay(got.id)
        else:
            await made.connector.replay_dead_async([letter.place])
        again = await until(_ended_after, client, first)
        return first, again, await until(lambda: letters(dsn))

    first, again, found = run(dsn, test)
    assert [(job.state, job.attempts, job.error.code) for job in (first, again)] == [
        ("failed", 1, "handler_not_found")
    ] * 2
    assert len(found) == 1


async def _ended_after(client, first):
    job = await client.show(first.id)
    return job if job.state is JobState.FAILED and job.ended_at > first.ended_at else None


def test_orchestrators_throw_away_what_has_expired(dsn, monkeypatch):
    monkeypatch.setattr(task, "SWEEP", 0.0)

    async def test(client, _):
        got = await client.submit("echo", 1, retention=0.2)
        kept = await client.submit("echo", 1)
        await client.wait(kept.id, timeout=10)

        async def gone():
            return got.id not in {job.id for job in await client.list()}

        await until(gone)
        return (await client.show(kept.id)).state

    assert run(dsn, test) == "succeeded"


@pytest.mark.parametrize("acked", [True, False])
def test_the_policy_may_ack_what_failed(dsn, acked):
    rules = policy().model_dump()
    rules["steps"]["settle"]["on_system"] = "ack" if acked else "dead_letter"

    async def test(client, _):
        job = await client.wait((await client.submit("nothing")).id, timeout=10)
        await until(drained, dsn)
        return job

    assert run(dsn, test, rules=ConsumerPolicy.load(rules)).state == "failed"
    assert len(letters(dsn)) == (0 if acked else 1)


# -- coming and going -----------------------------------------------------------------------------


def test_a_job_that_is_interrupted_by_a_stop_does_not_pay_for_it(dsn):
    rules = policy().model_dump()
    rules["loop"]["drain_timeout"] = 0.2

    async def test(client, made):
        got = await client.submit("sleep", 60, max_attempts=1)
        await until(_is_running, client, got.id)
        return got.id

    job_id = run(dsn, test, rules=ConsumerPolicy.load(rules))
    with JobClient(dsn) as client:
        job = client.show(job_id)
    assert (job.state, job.attempts) == ("pending", 0)


def test_a_stop_lets_running_jobs_end(dsn):
    async def test(client, made):
        got = await client.submit("sleep", 0.5)
        await until(_is_running, client, got.id)
        return got.id

    job_id = run(dsn, test)
    with JobClient(dsn) as client:
        assert client.show(job_id).state == "succeeded"


def test_one_guard_serves_all_kinds_and_nothing_is_left_behind(dsn):
    before = set(psutil.Process().children())

    async def test(client, made):
        jobs = [await client.submit(f"{kind}#echo", 1) for kind in ("a", "b", "c")]
        for one in jobs:
            await client.wait(one.id, timeout=20)
        pools = [each._pool for each in made.tasks.values()]
        assert len({id(pool._guard) for pool in pools}) == 1

    run(dsn, test, kinds=("a", "b", "c"), size=1)
    assert set(psutil.Process().children()) == before


def test_a_kind_that_cannot_go_on_stops_the_others(dsn, monkeypatch):
    made = orchestrator(dsn, kinds=("a", "b"), size=1)

    async def broken(*_, **__):
        raise OSError("no more")

    monkeypatch.setattr(made.tasks["b"], "consume_transactions", broken)
    with pytest.raises(OSError, match="no more"):
        asyncio.run(asyncio.wait_for(made.run(), 20))


def test_an_orchestrator_before_the_upgrade_says_what_to_run(dsn):
    rows(dsn, "drop table ergon.job")
    with pytest.raises(ConfigurationError, match="ergon db upgrade"):
        asyncio.run(asyncio.wait_for(orchestrator(dsn).run(), 20))


@pytest.mark.parametrize("kinds", [{}, {"a#b": None}, {"": None}])
def test_kinds_have_names_that_can_be_prefixes(kinds):
    executors = Executors(command=RUNTIME)
    with pytest.raises(ConfigurationError, match="at least one kind"):
        Orchestrator(dict.fromkeys(kinds, executors), dsn="postgresql://nobody@nowhere/x")


# -- claims that are lost -------------------------------------------------------------------------


def stolen(dsn, other):
    """Everything that other workers hold, taken away by *other*, which then has it."""
    mine = other.queue._home.tenure.worker
    rows(dsn, "update ergon.worker set alive_until = now() - interval '1 second' where id is distinct from %s", mine)
    other.queue._home._reaped = float("-inf")
    return other.fetched()[0]


@pytest.mark.spec("EXE-22")
def test_an_orchestrator_that_lost_its_claim_between_start_and_finish_changes_nothing(dsn, caplog):
    counted = _stale()

    async def test(client, made):
        got = await client.submit("sleep", 3.0)  # longer than a theft takes on a busy machine
        await until(_is_running, client, got.id)
        other = Store(dsn, lease=29.0)
        try:
            delivery = await asyncio.to_thread(stolen, dsn, other)
            assert other.start(delivery)[0].attempt_number == 2
            assert other.finish(delivery, Complete("new")) is JobState.SUCCEEDED
            await until(lambda: _stale() > counted)
            return await client.show(got.id)
        finally:
            other.close()

    job = run(dsn, test)
    assert (job.state, job.result, job.attempts) == ("succeeded", "new", 2)
    assert [record.transaction_id for record in caplog.records if event_of(record) == "job stale"] == [job.id]


@pytest.mark.spec("EXE-22")
def test_an_orchestrator_that_lost_its_claim_before_the_start_sends_nothing(dsn, monkeypatch, tmp_path):
    reached, go = asyncio.Event(), asyncio.Event()
    start = desk.Desk.start

    async def paused(self, claim):
        reached.set()
        await go.wait()
        return await start(self, claim)

    monkeypatch.setattr(desk.Desk, "start", paused)
    counted = _stale()

    async def test(client, made):
        got = await client.submit("kill_parent")  # whoever sends it is gone
        await reached.wait()
        other = Store(dsn, lease=29.0)
        try:
            delivery = await asyncio.to_thread(stolen, dsn, other)
            assert other.start(delivery)[0].attempt_number == 1
            go.set()
            await until(lambda: _stale() > counted)
            assert (await client.show(got.id)).attempts == 1
            assert other.finish(delivery, Complete("theirs")) is JobState.SUCCEEDED
            return await client.show(got.id)
        finally:
            other.close()

    assert run(dsn, test).result == "theirs"


def _stale():
    return tally_of("jobs.python").counted().get((names.JOBS.name, ("stale",)), 0)


APP = """
import sys
from ergon_framework import ConsumerPolicy
from ergon_framework.executor.jobs.orchestrator import Executors, Orchestrator
from ergon_framework.executor.pool import PoolPolicy
from ergon_framework.executor.process import Command

policy = ConsumerPolicy.load({{"loop": {{"streaming": True, "empty_queue": {{"backoff": 0.05, "cap": 0.2}}}}}})
command = Command(words=(sys.executable, "-S", {program!r}), environment={environment!r})
jobs = Orchestrator({{"python": Executors(command=command, pool=PoolPolicy(size=1))}}, lease=1.0, policy=policy)
"""


@pytest.mark.spec("EXE-19", "EXE-21")
def test_a_job_that_kills_its_orchestrator_is_a_dead_letter_after_exactly_its_attempts(dsn, tmp_path):
    (tmp_path / "app.py").write_text(APP.format(program=STUBBORN, environment=PATH), encoding="utf-8")
    environment = {**PATH, "ERGON_POSTGRES__DSN": dsn}
    with JobClient(dsn) as client:
        killer = client.submit("kill_parent", max_attempts=2).id
        codes = []
        for _ in range(2):
            process = subprocess.Popen([*ERGON, "run", "app:jobs"], cwd=tmp_path, env=environment)
            codes.append(process.wait(60))
            assert client.show(killer).state is JobState.RUNNING
        assert codes == [-signal.SIGKILL] * 2
        assert client.show(killer).attempts == 2
        process = subprocess.Popen([*ERGON, "run", "app:jobs"], cwd=tmp_path, env=environment)
        try:
            job = client.wait(killer, timeout=60)
            assert (job.state, job.attempts, job.error.code) == ("failed", 2, "orchestrator_died")
            ok = client.submit("echo", 1)
            assert client.wait(ok.id, timeout=60).state == "succeeded"
        finally:
            process.terminate()
            assert process.wait(60) == 0
        assert [one.reason for one in letters(dsn).values()] == ["orchestrator_died"]


# -- how long it runs -----------------------------------------------------------------------------

SERVICE = """
import os
from ergon_framework.executor.jobs.orchestrator import Executors, Orchestrator
from ergon_framework.executor.pool import PoolPolicy
from ergon_framework.executor.process import Command

command = Command(words={words!r}, environment={{"PATH": os.environ["PATH"]}})
orchestrator = Orchestrator({{"python": Executors(command=command, pool=PoolPolicy(size=1))}})
"""


@pytest.fixture
def service(dsn, tmp_path, monkeypatch):
    monkeypatch.setenv("ERGON_POSTGRES__DSN", dsn)
    (tmp_path / "jobs.py").write_text(SERVICE.format(words=COMMAND.words), encoding="utf-8")
    (tmp_path / "policy.toml").write_text("[loop]\ndrain_timeout = 5.0\n", encoding="utf-8")
    (tmp_path / "once.toml").write_text("[loop]\nstreaming = false\n", encoding="utf-8")
    return tmp_path


@pytest.mark.spec("DX-36")
@pytest.mark.parametrize("options", [[], ["--policy", "policy.toml"]], ids=["default", "policy without streaming"])
def test_an_orchestrator_goes_on_when_its_queue_is_empty(dsn, service, options):
    words = [*ERGON, "run", "jobs:orchestrator", *options]
    process = subprocess.Popen(words, cwd=service, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        with JobClient(dsn) as client:
            for number in range(2):
                # Each is over, and the queue empty, before the next is submitted.
                job = client.wait(client.submit("echo", number).id, timeout=60)
                assert job.result == number
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.spec("DX-36")
@pytest.mark.parametrize("options", [["--once"], ["--policy", "once.toml"]], ids=["once", "policy"])
def test_an_orchestrator_ends_at_an_empty_queue_if_it_is_asked_to(service, options):
    words = [*ERGON, "run", "jobs:orchestrator", *options]
    done = subprocess.run(words, cwd=service, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
