"""Log, summary and dead letter of a failed job give the same attempt count and the same error type."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess

import pytest

from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.jobs.client import JobClient
from ergon_framework.jobs.model import JobState
from tests.integration.jobs import ROOT, make_orchestrator, make_policy, run_task
from tests.integration.running import ERGON
from tests.integration.test_jobs_orchestrator import RUNTIME

JOBS_TEMPLATE = """
import os
from ergon_framework import ConsumerPolicy
from ergon_framework.jobs.orchestrator import ExecutorGroup, Orchestrator
from ergon_framework.executors.process import ExecutorCommand
from ergon_framework.executors.pool import PoolPolicy

words = {words!r}
command = ExecutorCommand(words=words, environment={{"PATH": os.environ["PATH"]}}, folder={folder!r})
rules = ConsumerPolicy.load({{"steps": {{"process": {{"retry": {{"max_attempts": 3, "backoff": 0.0}}}}}}}})
orchestrator = Orchestrator({{"python": ExecutorGroup(command=command, pool=PoolPolicy(size=1))}}, policy=rules)
"""


@pytest.mark.spec("DX-35")
def test_the_log_of_a_failed_job_has_its_true_attempts_and_the_error_type_of_its_handler(database, caplog):
    async def main():
        with JobClient(database) as client:
            async with run_task(make_orchestrator(database, command=RUNTIME, rules=make_policy(max_attempts=3))):
                submitted = await asyncio.to_thread(client.submit, "fail", "no such order")
                return await asyncio.to_thread(client.wait, submitted.id, timeout=60)

    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        job = asyncio.run(main())
    assert (job.state, job.attempts, job.error.type) == (JobState.FAILED, 3, "LookupError")
    job_records = [record for record in caplog.records if getattr(record, "transaction_id", None) == job.id]
    outcomes = [
        (record.outcome, record.attempts, record.error_type) for record in job_records if hasattr(record, "outcome")
    ]
    assert outcomes == [
        ("deferred", 1, "LookupError"),
        ("deferred", 2, "LookupError"),
        ("failed", 3, "LookupError"),
    ]
    queue = PostgresQueue("jobs.python", dsn=database)
    [letter] = queue.list_dead(DeadLetterQuery.load())
    queue.close()
    assert (letter.failure.attempts, letter.failure.error_type) == (3, "LookupError")


@pytest.mark.spec("DX-35")
@pytest.mark.parametrize("function, error_type", [("fail", "LookupError"), ("missing", "handler_not_found")])
def test_the_summary_of_a_run_has_the_true_attempts(database, tmp_path, function, error_type):
    (tmp_path / "jobs.py").write_text(JOBS_TEMPLATE.format(words=RUNTIME.words, folder=str(ROOT)), encoding="utf-8")
    environment = os.environ | {"ERGON_POSTGRES__DSN": database}

    def run_once():
        return subprocess.run(
            [*ERGON, "run", "jobs:orchestrator", "--once", "--json"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    with JobClient(database) as client:
        args = ["no such order"] if function == "fail" else []
        submitted = client.submit(function, *args)
        # A run may end while the next attempt is not due yet.
        for _ in range(3):
            result = run_once()
            job = client.show(submitted.id)
            if job.state.is_final:
                break
    [failure] = json.loads(result.stdout.splitlines()[-1])["failures"]
    assert (failure["transaction_id"], failure["attempts"]) == (job.id, job.attempts)
    assert job.attempts == (3 if function == "fail" else 1)
    assert f"error_type={error_type}" in result.stderr or f'"error_type": "{error_type}"' in result.stderr
    assert "JobFailed" not in result.stdout + result.stderr
