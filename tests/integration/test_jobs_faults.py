"""EXE-23: every single statement fails in turn, before or after it took effect, or is the last that is ever made."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import errors

from ergon_framework.errors import ErgonError
from ergon_framework.executor.jobs import statements
from ergon_framework.executor.jobs.client import JobClient
from ergon_framework.schema.lines import Lines
from tests.integration.jobs import orchestrator, policy, rows, running, until

pytestmark = pytest.mark.invariant

RULES = policy(max_attempts=2, backoff=0.05)
#: No scenario has so many statements: where one is struck no more, all have been.
MOST = 300
#: And at least so many.
LEAST = 20
#: Of those that die, every so manieth statement is the last.
STEP = 4


@pytest.fixture
def dsn(database):
    return database


class Fault:
    """Has the statement number *at* of the orchestrator go wrong; the client is sync, and left alone.

    Counted from its registration on: before that it looks at the tables and opens the queue, and an orchestrator that
    cannot even do that says so and ends.
    """

    def __init__(self, at, *, when, error=errors.AdminShutdown):
        self.at = at
        self.when = when
        self.error = error
        self.statements = 0
        self.is_registered = False
        self.struck, self.resumed = asyncio.Event(), asyncio.Event()
        #: The connections of the one that dies.
        self.theirs = set()

    def install(self, monkeypatch, *, dies=False):
        honest = Lines.run_async

        async def run_async(lines, operation, *, within=None):
            if not dies:
                return await honest(lines, self._watched(operation), within=within)
            if lines not in self.theirs and self.struck.is_set():
                return await honest(lines, operation, within=within)
            self.theirs.add(lines)
            try:
                if self.struck.is_set():
                    # Nothing is done any more by one that is dead; what only slept wakes up in the end.
                    await self.resumed.wait()
                return await honest(lines, self._watched(operation), within=within)
            except ErgonError:
                if self.struck.is_set():
                    await self.resumed.wait()
                raise

        monkeypatch.setattr(Lines, "run_async", run_async)
        return lambda: monkeypatch.setattr(Lines, "run_async", honest)

    def _watched(self, operation):
        """*operation*, with the error in place of one statement's answer, or of the statement itself."""
        try:
            query = next(operation)
            while True:
                number = self._number()
                try:
                    self._strike(number, "before")
                    rows_of = yield query
                    self._strike(number, "after")
                    self.is_registered |= getattr(query, "sql", None) == statements.REGISTER
                except BaseException as error:
                    query = operation.throw(error)
                else:
                    query = operation.send(rows_of)
        except StopIteration as stop:
            return stop.value

    def _number(self):
        """The number of the next statement; None before the registration."""
        if not self.is_registered:
            return None
        self.statements += 1
        return self.statements - 1

    def _strike(self, number, when):
        if number == self.at and when == self.when:
            self.struck.set()
            raise self.error("broken on purpose")


def submitted(client):
    """A job that succeeds, one that always fails, one that is tried twice, and one that is not due yet."""
    return {
        "good": client.submit("echo", 7).id,
        "bad": client.submit("crash").id,
        "gone": client.submit("nothing").id,
        "delayed": client.submit("echo", 8, delay=0.1).id,
    }


def ended(client, ids):
    found = {name: client.show(job_id) for name, job_id in ids.items()}
    return found if all(job.state.over for job in found.values()) else None


def quiet(dsn):
    """Whether nothing is left in the queue, and how many dead letters each job has."""
    left = sum(rows(dsn, f"select count(*) from ergon.{table}")[0][0] for table in ("ready", "content", "returned"))
    return left == 0


def over(fault, client, dsn, ids):
    return fault.struck.is_set() or (ended(client, ids) and quiet(dsn))


def check(dsn, ids, jobs):
    assert {name: job.state.value for name, job in jobs.items()} == {
        "good": "succeeded",
        "bad": "failed",
        "gone": "failed",
        "delayed": "succeeded",
    }
    assert (jobs["good"].result, jobs["delayed"].result) == (7, 8)
    buried = rows(dsn, "select transaction_id, count(*) from ergon.dead_letter group by 1 order by 1")
    assert buried == sorted((ids[name], 1) for name in ("bad", "gone"))
    rows(dsn, "delete from ergon.dead_letter")


async def scenario(dsn, fault):
    """The attempts of the jobs after all have ended, of an orchestrator that goes on after the fault."""
    with JobClient(dsn) as client:
        ids = submitted(client)
        made = orchestrator(dsn, rules=RULES)
        async with running(made):
            jobs = await until(ended, client, ids)
            await until(quiet, dsn)
        check(dsn, ids, jobs)
        return {name: job.attempts for name, job in jobs.items()}


@pytest.mark.spec("EXE-19", "EXE-23")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error, step", [(errors.AdminShutdown, 1), (errors.DiskFull, 3)])
def test_whichever_statement_fails_every_job_comes_to_its_end_with_its_attempts_counted_right(
    dsn, monkeypatch, when, error, step
):
    async def main():
        struck = 0
        for at in range(0, MOST, step):
            fault = Fault(at, when=when, error=error)
            mend = fault.install(monkeypatch)
            try:
                made = await scenario(dsn, fault)
            finally:
                mend()
            assert made == {"good": 1, "bad": 2, "gone": 1, "delayed": 1}, (at, when)
            if not fault.struck.is_set():
                break
            struck += 1
        assert struck * step > LEAST

    asyncio.run(main())


@pytest.mark.spec("EXE-19", "EXE-22", "EXE-23")
@pytest.mark.parametrize("when", ["before", "after"])
def test_whichever_statement_is_an_orchestrators_last_another_one_brings_every_job_to_its_end(dsn, monkeypatch, when):
    async def main():
        struck = 0
        for at in range(0, MOST, STEP):
            fault = Fault(at, when=when)
            with JobClient(dsn) as client:
                ids = submitted(client)
                mend = fault.install(monkeypatch, dies=True)
                dying = orchestrator(dsn, rules=RULES)
                dead = asyncio.create_task(dying.run())
                await until(over, fault, client, dsn, ids)
                await asyncio.sleep(0.05)
                if fault.struck.is_set():
                    struck += 1
                    # As if the process were gone: its lease is over, and nothing that it has begun is told any more.
                    rows(dsn, "update ergon.worker set alive_until = now() - interval '1 second'")
                    async with running(orchestrator(dsn, rules=RULES, lease=29.0)):
                        await until(ended, client, ids)
                        await until(quiet, dsn)
                before = ended(client, ids)
                # It was only asleep: what it says now changes nothing.
                fault.resumed.set()
                await asyncio.sleep(0.1)
                dead.cancel()
                await asyncio.gather(dead, return_exceptions=True)
                mend()
                jobs = ended(client, ids)
                assert jobs == before, (at, when)
                check(dsn, ids, jobs)
                # What died between its start and its end has paid with an attempt, and nobody has more than there are.
                assert all(1 <= job.attempts <= 2 for job in jobs.values()), (at, when)
                if not fault.struck.is_set():
                    break
        assert struck * STEP > LEAST

    asyncio.run(main())
