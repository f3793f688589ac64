"""Clients that submit, query and control jobs, sync and async."""

from __future__ import annotations

import asyncio
import builtins
import os
import time
from collections.abc import Collection, Iterable
from typing import Any, Final, Self, TypeVar

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.postgres import callers
from ergon_framework.connectors.postgres.queue import DSN_VARIABLE
from ergon_framework.errors import ConfigurationError
from ergon_framework.executor.jobs import crontab, reading
from ergon_framework.executor.jobs.cron import Cron, CronEntry, cron_columns
from ergon_framework.executor.jobs.model import Job, JobState, JobWaitTimeout, Submitted
from ergon_framework.executor.jobs.registrations import ServedExecutor, list_executors
from ergon_framework.executor.jobs.request import DEFAULT_KIND, JobRequest, job_parameters
from ergon_framework.executor.jobs.submitting import SUBMIT, read_submission, submit, submit_many
from ergon_framework.executor.jobs.waiting import JobWaiter
from ergon_framework.schema.lines import ConnectionPool
from ergon_framework.schema.operation import Operation

R = TypeVar("R")

#: Timeout of one database operation in seconds.
_TIMEOUT_SECONDS: Final = 30.0


class _JobClientBase:
    """The shared part of both variants: everything except the call to the database."""

    def __init__(
        self, dsn: str | None = None, *, default: str | None = DEFAULT_KIND, executors: Collection[str] | None = None
    ) -> None:
        address = dsn or os.environ.get(DSN_VARIABLE)
        if not address:
            raise ConfigurationError(f"jobs need a database: set {DSN_VARIABLE} in the environment or give dsn=…")
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
        """Return a submission as a script, to be one part of a larger database transaction."""
        return submit(self.job_parameters(function, *args, **options))

    def to_cron_row(self, cron: Cron) -> dict[str, Any]:
        """Return the table row of *cron*."""
        return cron_columns(cron, default=self._default, executors=self._executors)

    def statement(self, function: str, /, *args: Any, style: str = "psycopg", **options: Any) -> callers.Statement:
        """Return the statement that submits the job, for a database library without built-in support."""
        try:
            param_style = callers.ParamStyle(style)
        except ValueError:
            styles = ", ".join(callers.ParamStyle)
            raise ConfigurationError(f"there is no style {style!r}; the styles are {styles}") from None
        return callers.render(SUBMIT, self.job_parameters(function, *args, **options), param_style)


class JobClient(_JobClientBase):
    """Submits, queries and controls jobs, from threads.

    The address is *dsn*, or ``ERGON_POSTGRES__DSN`` of the environment. A function without a prefix runs in the
    *default* executors. A job for executors that no orchestrator serves is dead-lettered ten minutes after it is due;
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
        return read_submission(values, callers.execute_on(connection, SUBMIT, values))

    def show(self, job_id: str) -> Job:
        """Return the job; raise JobNotFound if there is none."""
        return self._run(reading.get_job(job_id))

    def list(self, **filters: Any) -> list[Job]:
        """Return jobs, newest first: ``states``, ``kind``, ``function``, ``tenant``, ``before`` and ``limit``."""
        return self._run(reading.list_jobs(**filters))

    def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        """Wait for the job to be final and return it; JobWaitTimeout after *timeout* seconds leaves it unchanged."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for pause in reading.poll_intervals():
            state = self._run(reading.get_state(job_id))
            if state.is_final:
                break
            time.sleep(_next_pause(job_id, state, pause=pause, deadline=deadline, timeout=timeout))
        return self.show(job_id)

    def wait_many(self, job_ids: Iterable[str], *, timeout: float | None = None) -> builtins.list[Job]:
        """Wait until all of these jobs are final and return them in the order of their ids; else as ``wait``."""
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
        """Cancel the job if it is waiting; return False if it has begun or is final."""
        return self._run(reading.cancel(job_id))

    def kill(self, job_id: str) -> JobState:
        """Cancel the job if it is waiting, request its kill if it is running; return its state."""
        return self._run(reading.kill(job_id))

    def replay(self, job_id: str) -> None:
        """Run a failed job again."""
        self._run(reading.replay(job_id))

    def schedule(self, *crons: Cron) -> None:
        """Declare cron entries: an entry of the same name is changed, an equal one stays as it is."""
        self._run(crontab.declare([self.to_cron_row(cron) for cron in crons]))

    def unschedule(self, name: str) -> bool:
        """Remove a cron entry; return False if there is none. Jobs that it has submitted stay."""
        return self._run(crontab.remove(name))

    def schedules(self) -> builtins.list[CronEntry]:
        """Return all cron entries, by name."""
        return self._run(crontab.list_entries())

    def pause_schedule(self, name: str) -> None:
        """Stop submitting for a cron entry until it is resumed; raise CronNotFound if there is none."""
        self._run(crontab.pause(name))

    def resume_schedule(self, name: str) -> None:
        """Resume a cron entry with its next scheduled time; times that passed meanwhile are not misfires."""
        self._run(crontab.resume(name))

    def run_schedule(self, name: str) -> Submitted:
        """Submit the job of a cron entry now, in addition to its scheduled times."""
        return self._run(crontab.run_now(name))

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
        return read_submission(values, await callers.execute_on_async(connection, SUBMIT, values))

    async def show(self, job_id: str) -> Job:
        return await self._run(reading.get_job(job_id))

    async def list(self, **filters: Any) -> list[Job]:
        return await self._run(reading.list_jobs(**filters))

    async def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        deadline = None if timeout is None else time.monotonic() + timeout
        for pause in reading.poll_intervals():
            state = await self._run(reading.get_state(job_id))
            if state.is_final:
                break
            await asyncio.sleep(_next_pause(job_id, state, pause=pause, deadline=deadline, timeout=timeout))
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
        return await self._run(reading.cancel(job_id))

    async def kill(self, job_id: str) -> JobState:
        return await self._run(reading.kill(job_id))

    async def replay(self, job_id: str) -> None:
        await self._run(reading.replay(job_id))

    async def schedule(self, *crons: Cron) -> None:
        await self._run(crontab.declare([self.to_cron_row(cron) for cron in crons]))

    async def unschedule(self, name: str) -> bool:
        return await self._run(crontab.remove(name))

    async def schedules(self) -> builtins.list[CronEntry]:
        return await self._run(crontab.list_entries())

    async def pause_schedule(self, name: str) -> None:
        await self._run(crontab.pause(name))

    async def resume_schedule(self, name: str) -> None:
        await self._run(crontab.resume(name))

    async def run_schedule(self, name: str) -> Submitted:
        return await self._run(crontab.run_now(name))

    async def close(self) -> None:
        await self._connection_pool.close_async()

    async def _run(self, operation: Operation[R]) -> R:
        return await self._connection_pool.run_async(operation, timeout_seconds=_TIMEOUT_SECONDS)


def _next_pause(job_id: str, state: JobState, *, pause: float, deadline: float | None, timeout: float | None) -> float:
    """Return the seconds until the next poll; raise JobWaitTimeout if the time is over."""
    remaining = pause if deadline is None else deadline - time.monotonic()
    if remaining <= 0:
        raise JobWaitTimeout(f"the job {job_id!r} is {state.value} after {timeout:g} s; it goes on", state)
    return min(pause, remaining)
