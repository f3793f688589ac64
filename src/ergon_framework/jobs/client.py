"""Clients that submit, query and control jobs, sync and async.

A job is a stored call of a handler, which an executor process runs later; its row in the database has its state. An
orchestrator starts executors of a kind and gives them jobs; ``KIND#HANDLER`` as a function names both.

A client that waits for many jobs polls them in batches until all are final.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import time
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Any, Final, Self, TypeVar

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.postgres import outbox
from ergon_framework.connectors.postgres.queue import DSN_VARIABLE
from ergon_framework.database.operation import Operation
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.errors import ConfigurationError
from ergon_framework.jobs import cron_store, store
from ergon_framework.jobs.cron import Cron, CronEntry, cron_columns
from ergon_framework.jobs.model import (
    DEFAULT_KIND,
    Job,
    JobRequest,
    JobState,
    JobWaitTimeout,
    Submitted,
    job_parameters,
)
from ergon_framework.jobs.registrations import ServedExecutor, list_executors
from ergon_framework.jobs.store import SUBMIT, read_submission, submit, submit_many

#: Maximum and minimum number of jobs in one poll.
_MAX_POLLED_JOBS: Final = 500
_MIN_POLLED_JOBS: Final = 50


class JobWaiter:
    """Waits for *job_ids*; the caller polls and pauses in turn until all jobs are final."""

    def __init__(self, job_ids: Iterable[str], *, timeout: float | None) -> None:
        self._ids = list(job_ids)
        self._unfinished = dict.fromkeys(self._ids)
        self._finished: dict[str, Job] = {}
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._intervals = store.poll_intervals()
        self._poll_size = _MAX_POLLED_JOBS

    def __bool__(self) -> bool:
        """Return whether some jobs are not final yet."""
        return bool(self._unfinished)

    def poll(self) -> Operation[float]:
        """Poll once; return the seconds until the next poll. Raise JobWaitTimeout if the time is over."""
        # The first ids are polled first, because they are likely to end first.
        job_ids = list(islice(self._unfinished, self._poll_size))
        finished = yield from store.find_finished(job_ids)
        # Polling a running job is useless, so the size follows the number of jobs that were final.
        self._poll_size = min(_MAX_POLLED_JOBS, max(_MIN_POLLED_JOBS, 2 * len(finished)))
        for job in finished:
            self._finished[job.id] = job
            self._unfinished.pop(job.id, None)
        if finished:
            self._intervals = store.poll_intervals()
        if not self._unfinished or len(finished) == len(job_ids):
            return 0.0
        return self._limit_pause(next(self._intervals))

    def _limit_pause(self, pause: float) -> float:
        """Return *pause*, shortened to the remaining time; raise JobWaitTimeout if that is over."""
        remaining = pause if self._deadline is None else self._deadline - time.monotonic()
        if remaining <= 0:
            raise JobWaitTimeout(
                f"{len(self._unfinished):,} of {len(self._ids):,} jobs are not final after {self._timeout:g} s; they "
                "continue"
            )
        return min(pause, remaining)

    @property
    def jobs(self) -> list[Job]:
        """All jobs, in the order of the given ids."""
        return [self._finished[job_id] for job_id in self._ids]


# -- clients ----------------------------------------------------------------------------------------

R = TypeVar("R")
# The clients have a method named list, so that annotations after it write builtins.list.

#: Timeout of one database operation in seconds.
_TIMEOUT_SECONDS: Final = 30.0


class _JobClientBase:
    """The shared part of both variants: everything except the call to the database."""

    def __init__(
        self, dsn: str | None = None, *, default: str | None = DEFAULT_KIND, executors: Collection[str] | None = None
    ) -> None:
        address = dsn or os.environ.get(DSN_VARIABLE)
        if not address:
            raise ConfigurationError(f"jobs need a database address: set {DSN_VARIABLE} or pass dsn=…")
        self._connection_pool = ConnectionPool(address, error_type=ConnectorError)
        self._default = default
        self._executors = None if executors is None else frozenset(executors)

    def job_parameters(self, function: str, /, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the database parameters of a job; ``JobRequest`` documents the *options* next to its arguments."""
        request = JobRequest(function=function, args=args, **options)
        return job_parameters(request, default=self._default, executors=self._executors)

    def _build_submissions(self, requests: Iterable[JobRequest]) -> Operation[list[Submitted]]:
        jobs = [job_parameters(one, default=self._default, executors=self._executors) for one in requests]
        return submit_many(jobs)

    def build_submission(self, function: str, /, *args: Any, **options: Any) -> Operation[Submitted]:
        """Return a submission as an operation, to be one part of a larger database transaction."""
        return submit(self.job_parameters(function, *args, **options))

    def to_cron_row(self, cron: Cron) -> dict[str, Any]:
        """Return the table row of *cron*."""
        return cron_columns(cron, default=self._default, executors=self._executors)

    def statement(self, function: str, /, *args: Any, style: str = "psycopg", **options: Any) -> outbox.Statement:
        """Return the statement that submits the job, for a database library without built-in support."""
        try:
            param_style = outbox.ParamStyle(style)
        except ValueError:
            styles = ", ".join(outbox.ParamStyle)
            raise ConfigurationError(f"there is no style {style!r}; the styles are {styles}") from None
        return outbox.render(SUBMIT, self.job_parameters(function, *args, **options), param_style)


class JobClient(_JobClientBase):
    """Submits, queries and controls jobs, from threads.

    The address is *dsn*, or ``ERGON_POSTGRES__DSN`` of the environment. A function without ``KIND#`` runs in executors
    of the kind *default*. A job for executors that no orchestrator serves is dead-lettered ten minutes after it is due;
    with *executors*, a job for any other executor is dead-lettered immediately.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, function: str, /, *args: Any, **options: Any) -> Submitted:
        """Submit a job; raise JobConflict if its id or unique key belongs to a different job."""
        return self._run(self.build_submission(function, *args, **options))

    def submit_many(self, requests: Iterable[JobRequest]) -> builtins.list[Submitted]:
        """Submit many jobs in one database transaction, in order: all of them, or none on JobConflict."""
        return self._run(self._build_submissions(requests))

    def submit_on(self, connection: Any, function: str, /, *args: Any, **options: Any) -> Submitted:
        """Submit inside the open database transaction of *connection*: the job exists only if that commits.

        *connection* is a connection of psycopg, SQLAlchemy (also a Session) or Django.
        """
        values = self.job_parameters(function, *args, **options)
        return read_submission(values, outbox.execute_on(connection, SUBMIT, values))

    def show(self, job_id: str) -> Job:
        """Return the job; raise JobNotFound if there is none."""
        return self._run(store.get_job(job_id))

    def list(self, **filters: Any) -> list[Job]:
        """Return jobs, newest first: ``states``, ``kind``, ``function``, ``tenant``, ``before`` and ``limit``."""
        return self._run(store.list_jobs(**filters))

    def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        """Wait for the job to be final and return it; JobWaitTimeout after *timeout* seconds leaves it unchanged."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for pause in store.poll_intervals():
            state = self._run(store.get_state(job_id))
            if state.is_final:
                break
            time.sleep(_limit_pause(pause, job_id, state, deadline=deadline, timeout=timeout))
        return self.show(job_id)

    def wait_many(self, job_ids: Iterable[str], *, timeout: float | None = None) -> builtins.list[Job]:
        """Wait until all of these jobs are final and return them in the order of *job_ids*.

        JobWaitTimeout after *timeout* seconds leaves the jobs unchanged.
        """
        waiting = JobWaiter(job_ids, timeout=timeout)
        while waiting:
            pause = self._run(waiting.poll())
            if pause:
                time.sleep(pause)
        return waiting.jobs

    def executors(self) -> builtins.list[ServedExecutor]:
        """Return the executors that an orchestrator has served in the last 400 days, by name."""
        return self._run(list_executors())

    def cancel(self, job_id: str) -> bool:
        """Cancel the job if it is waiting; return whether its state is cancelled now, also if it was so before."""
        return self._run(store.cancel(job_id))

    def kill(self, job_id: str) -> JobState:
        """Cancel the job if it is waiting, request its kill if it is running; return its state."""
        return self._run(store.kill(job_id))

    def replay(self, job_id: str) -> None:
        """Run a failed job again."""
        self._run(store.replay(job_id))

    def schedule(self, *crons: Cron) -> None:
        """Declare cron entries: an entry of the same name is changed, an equal one stays as it is."""
        self._run(cron_store.declare([self.to_cron_row(cron) for cron in crons]))

    def unschedule(self, name: str) -> bool:
        """Remove a cron entry; return False if there is none. Jobs that it has submitted stay."""
        return self._run(cron_store.remove(name))

    def schedules(self) -> builtins.list[CronEntry]:
        """Return all cron entries, by name."""
        return self._run(cron_store.list_entries())

    def pause_schedule(self, name: str) -> None:
        """Stop submitting for a cron entry until it is resumed; raise CronNotFound if there is none."""
        self._run(cron_store.pause(name))

    def resume_schedule(self, name: str) -> None:
        """Resume a cron entry with its next scheduled time; times that passed meanwhile are skipped."""
        self._run(cron_store.resume(name))

    def run_schedule(self, name: str) -> Submitted:
        """Submit the job of a cron entry now, in addition to its scheduled times."""
        return self._run(cron_store.run_now(name))

    def close(self) -> None:
        """Close the connections; the next use connects again."""
        self._connection_pool.close()

    def _run(self, operation: Operation[R]) -> R:
        return self._connection_pool.run(operation, timeout_seconds=_TIMEOUT_SECONDS)


class AsyncJobClient(_JobClientBase):
    """The async variant of JobClient."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def submit(self, function: str, /, *args: Any, **options: Any) -> Submitted:
        return await self._run(self.build_submission(function, *args, **options))

    async def submit_many(self, requests: Iterable[JobRequest]) -> builtins.list[Submitted]:
        return await self._run(self._build_submissions(requests))

    async def submit_on(self, connection: Any, function: str, /, *args: Any, **options: Any) -> Submitted:
        """Submit as JobClient does, on an async connection of psycopg, SQLAlchemy or asyncpg."""
        values = self.job_parameters(function, *args, **options)
        return read_submission(values, await outbox.execute_on_async(connection, SUBMIT, values))

    async def show(self, job_id: str) -> Job:
        return await self._run(store.get_job(job_id))

    async def list(self, **filters: Any) -> list[Job]:
        return await self._run(store.list_jobs(**filters))

    async def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        deadline = None if timeout is None else time.monotonic() + timeout
        for pause in store.poll_intervals():
            state = await self._run(store.get_state(job_id))
            if state.is_final:
                break
            await asyncio.sleep(_limit_pause(pause, job_id, state, deadline=deadline, timeout=timeout))
        return await self.show(job_id)

    async def wait_many(self, job_ids: Iterable[str], *, timeout: float | None = None) -> builtins.list[Job]:
        waiting = JobWaiter(job_ids, timeout=timeout)
        while waiting:
            pause = await self._run(waiting.poll())
            if pause:
                await asyncio.sleep(pause)
        return waiting.jobs

    async def executors(self) -> builtins.list[ServedExecutor]:
        return await self._run(list_executors())

    async def cancel(self, job_id: str) -> bool:
        return await self._run(store.cancel(job_id))

    async def kill(self, job_id: str) -> JobState:
        return await self._run(store.kill(job_id))

    async def replay(self, job_id: str) -> None:
        await self._run(store.replay(job_id))

    async def schedule(self, *crons: Cron) -> None:
        await self._run(cron_store.declare([self.to_cron_row(cron) for cron in crons]))

    async def unschedule(self, name: str) -> bool:
        return await self._run(cron_store.remove(name))

    async def schedules(self) -> builtins.list[CronEntry]:
        return await self._run(cron_store.list_entries())

    async def pause_schedule(self, name: str) -> None:
        await self._run(cron_store.pause(name))

    async def resume_schedule(self, name: str) -> None:
        await self._run(cron_store.resume(name))

    async def run_schedule(self, name: str) -> Submitted:
        return await self._run(cron_store.run_now(name))

    async def close(self) -> None:
        await self._connection_pool.close_async()

    async def _run(self, operation: Operation[R]) -> R:
        return await self._connection_pool.run_async(operation, timeout_seconds=_TIMEOUT_SECONDS)


def _limit_pause(pause: float, job_id: str, state: JobState, *, deadline: float | None, timeout: float | None) -> float:
    """Return *pause*, shortened to the remaining time; raise JobWaitTimeout if that is over."""
    remaining = pause if deadline is None else deadline - time.monotonic()
    if remaining <= 0:
        raise JobWaitTimeout(f"the job {job_id!r} is still {state.value} after {timeout:g} s; it continues", state)
    return min(pause, remaining)
