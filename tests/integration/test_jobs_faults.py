"""EXE-23: each statement fails in turn, before or after it took effect, or is the last one that is executed."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import errors

from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import ErgonError
from ergon_framework.jobs import sql
from ergon_framework.jobs.client import JobClient
from tests.integration.jobs import make_orchestrator, make_policy, run_sql, run_task, wait_until

pytestmark = pytest.mark.invariant

RULES = make_policy(max_attempts=2, backoff=0.05)
#: No scenario has this many statements: once no fault occurs, every statement has been covered.
MAX_STATEMENTS = 300
#: Minimum number of statements in a scenario.
MIN_STATEMENTS = 20
#: Step between the statements at which an orchestrator is killed.
KILL_STEP = 4


@pytest.fixture
def dsn(database):
    return database


class StatementFault:
    """Make statement number *at* of the orchestrator fail; the client is sync and unaffected.

    Statements count from the registration on: before it, the orchestrator checks the tables and opens the queue, and an
    orchestrator that cannot do that reports the error and exits.
    """

    def __init__(self, at, *, when, error=errors.AdminShutdown):
        self.at = at
        self.when = when
        self.error = error
        self.statements = 0
        self.is_registered = False
        self.occurred, self.resumed = asyncio.Event(), asyncio.Event()
        #: The connections of the orchestrator that is killed.
        self.killed_pools = set()

    def install(self, monkeypatch, *, kills=False):
        original = ConnectionPool.run_async

        async def run_async(pool, operation, *, timeout_seconds=None):
            if not kills:
                return await original(pool, self._inject(operation), timeout_seconds=timeout_seconds)
            if pool not in self.killed_pools and self.occurred.is_set():
                return await original(pool, operation, timeout_seconds=timeout_seconds)
            self.killed_pools.add(pool)
            try:
                if self.occurred.is_set():
                    # A killed orchestrator executes nothing more; a suspended one resumes at the end.
                    await self.resumed.wait()
                return await original(pool, self._inject(operation), timeout_seconds=timeout_seconds)
            except ErgonError:
                if self.occurred.is_set():
                    await self.resumed.wait()
                raise

        monkeypatch.setattr(ConnectionPool, "run_async", run_async)
        return lambda: monkeypatch.setattr(ConnectionPool, "run_async", original)

    def _inject(self, operation):
        """Run *operation* with the error in place of one statement's answer, or of the statement itself."""
        try:
            query = next(operation)
            while True:
                number = self._next_number()
                try:
                    self._raise_at(number, "before")
                    result_rows = yield query
                    self._raise_at(number, "after")
                    self.is_registered |= getattr(query, "sql", None) == sql.REGISTER
                except BaseException as error:
                    query = operation.throw(error)
                else:
                    query = operation.send(result_rows)
        except StopIteration as stop:
            return stop.value

    def _next_number(self):
        """Return the number of the next statement; None before the registration."""
        if not self.is_registered:
            return None
        self.statements += 1
        return self.statements - 1

    def _raise_at(self, number, when):
        if number == self.at and when == self.when:
            self.occurred.set()
            raise self.error("broken on purpose")


def submit_jobs(client):
    """Submit one job that succeeds, one that always fails, one that is tried twice, and one that is not due yet."""
    return {
        "good": client.submit("echo", 7).id,
        "bad": client.submit("crash").id,
        "gone": client.submit("nothing").id,
        "delayed": client.submit("echo", 8, delay=0.1).id,
    }


def find_finished_jobs(client, ids):
    jobs = {name: client.show(job_id) for name, job_id in ids.items()}
    return jobs if all(job.state.is_final for job in jobs.values()) else None


def is_queue_empty(dsn):
    """Return whether no message is left in the queue."""
    remaining = sum(
        run_sql(dsn, f"select count(*) from ergon.{table}")[0][0] for table in ("ready", "content", "redelivery")
    )
    return remaining == 0


def is_scenario_over(fault, client, dsn, ids):
    return fault.occurred.is_set() or (find_finished_jobs(client, ids) and is_queue_empty(dsn))


def check_jobs(dsn, ids, jobs):
    assert {name: job.state.value for name, job in jobs.items()} == {
        "good": "succeeded",
        "bad": "failed",
        "gone": "failed",
        "delayed": "succeeded",
    }
    assert (jobs["good"].result, jobs["delayed"].result) == (7, 8)
    dead_letters = run_sql(dsn, "select transaction_id, count(*) from ergon.dead_letter group by 1 order by 1")
    assert dead_letters == sorted((ids[name], 1) for name in ("bad", "gone"))
    run_sql(dsn, "delete from ergon.dead_letter")


async def run_scenario(dsn, fault):
    """Return the attempts of the jobs after all have ended, run by an orchestrator that continues after the fault."""
    with JobClient(dsn) as client:
        ids = submit_jobs(client)
        jobs_orchestrator = make_orchestrator(dsn, rules=RULES)
        async with run_task(jobs_orchestrator):
            jobs = await wait_until(find_finished_jobs, client, ids)
            await wait_until(is_queue_empty, dsn)
        check_jobs(dsn, ids, jobs)
        return {name: job.attempts for name, job in jobs.items()}


@pytest.mark.spec("EXE-19", "EXE-23")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error, step", [(errors.AdminShutdown, 1), (errors.DiskFull, 3)])
def test_every_job_ends_with_its_correct_attempt_count_whichever_statement_fails(dsn, monkeypatch, when, error, step):
    async def main():
        fault_count = 0
        for at in range(0, MAX_STATEMENTS, step):
            fault = StatementFault(at, when=when, error=error)
            uninstall = fault.install(monkeypatch)
            try:
                attempts = await run_scenario(dsn, fault)
            finally:
                uninstall()
            assert attempts == {"good": 1, "bad": 2, "gone": 1, "delayed": 1}, (at, when)
            if not fault.occurred.is_set():
                break
            fault_count += 1
        assert fault_count * step > MIN_STATEMENTS

    asyncio.run(main())


@pytest.mark.spec("EXE-19", "EXE-22", "EXE-23")
@pytest.mark.parametrize("when", ["before", "after"])
def test_every_job_ends_at_another_orchestrator_whichever_statement_was_the_last(dsn, monkeypatch, when):
    async def main():
        kill_count = 0
        for at in range(0, MAX_STATEMENTS, KILL_STEP):
            fault = StatementFault(at, when=when)
            with JobClient(dsn) as client:
                ids = submit_jobs(client)
                uninstall = fault.install(monkeypatch, kills=True)
                killed_orchestrator = make_orchestrator(dsn, rules=RULES)
                killed_task = asyncio.create_task(killed_orchestrator.run())
                await wait_until(is_scenario_over, fault, client, dsn, ids)
                await asyncio.sleep(0.05)
                if fault.occurred.is_set():
                    kill_count += 1
                    # As if the process had exited: its lease is over, and it reports no result any more.
                    run_sql(dsn, "update ergon.worker set alive_until = now() - interval '1 second'")
                    async with run_task(make_orchestrator(dsn, rules=RULES, lease=29.0)):
                        await wait_until(find_finished_jobs, client, ids)
                        await wait_until(is_queue_empty, dsn)
                jobs_before = find_finished_jobs(client, ids)
                # It was only suspended: what it reports now changes nothing.
                fault.resumed.set()
                await asyncio.sleep(0.1)
                killed_task.cancel()
                await asyncio.gather(killed_task, return_exceptions=True)
                uninstall()
                jobs = find_finished_jobs(client, ids)
                assert jobs == jobs_before, (at, when)
                check_jobs(dsn, ids, jobs)
                # A kill between start and end costs one attempt, and no job has more attempts than allowed.
                assert all(1 <= job.attempts <= 2 for job in jobs.values()), (at, when)
                if not fault.occurred.is_set():
                    break
        assert kill_count * KILL_STEP > MIN_STATEMENTS

    asyncio.run(main())
