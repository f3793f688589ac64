"""JobClient: submit, watch and steer jobs, in both variants."""

from __future__ import annotations

import asyncio
import builtins
import os
import time
from collections.abc import Collection, Iterable
from typing import Any, Final, Self, TypeVar

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.postgres import callers
from ergon_framework.connectors.postgres.queue import VARIABLE
from ergon_framework.errors import ConfigurationError
from ergon_framework.executor.jobs import crontab, reading
from ergon_framework.executor.jobs.cron import Cron, CronEntry, columns
from ergon_framework.executor.jobs.model import Job, JobState, JobWaitTimeout, Submitted
from ergon_framework.executor.jobs.registrations import ServedExecutor, list_executors
from ergon_framework.executor.jobs.request import DEFAULT, Request, parameters
from ergon_framework.executor.jobs.submitting import SUBMIT, submit, submit_many, submitted
from ergon_framework.executor.jobs.waiting import Waiting
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Operation

R = TypeVar("R")

#: Seconds that one question may take.
_WITHIN: Final = 30.0


class _Client:
    """What both variants share: everything but how the database is asked."""

    def __init__(
        self, dsn: str | None = None, *, default: str | None = DEFAULT, executors: Collection[str] | None = None
    ) -> None:
        address = dsn or os.environ.get(VARIABLE)
        if not address:
            raise ConfigurationError(f"jobs need a database: set {VARIABLE} in the environment or give dsn=…")
        self._lines = Lines(address, other=ConnectorError)
        self._default = default
        self._executors = None if executors is None else frozenset(executors)

    def parameters(self, function: str, /, *args: Any, **told: Any) -> dict[str, Any]:
        """What the database is given for a job: see ``Request`` for what may be *told* besides its arguments."""
        request = Request(function=function, args=args, **told)
        return parameters(request, default=self._default, executors=self._executors)

    def _all(self, requests: Iterable[Request]) -> Operation[list[Submitted]]:
        given = [parameters(one, default=self._default, executors=self._executors) for one in requests]
        return submit_many(given)

    def submitting(self, function: str, /, *args: Any, **told: Any) -> Operation[Submitted]:
        """Submitting as a script, to be one part of a larger database transaction."""
        return submit(self.parameters(function, *args, **told))

    def entry(self, cron: Cron) -> dict[str, Any]:
        """What the table of entries is given for *cron*."""
        return columns(cron, default=self._default, executors=self._executors)

    def statement(self, function: str, /, *args: Any, style: str = "psycopg", **told: Any) -> callers.Statement:
        """The statement that submits the job, for a library that is none of the known ones."""
        try:
            known = callers.Style(style)
        except ValueError:
            styles = ", ".join(callers.Style)
            raise ConfigurationError(f"there is no style {style!r}; the styles are {styles}") from None
        return callers.rendered(SUBMIT, self.parameters(function, *args, **told), known)


class JobClient(_Client):
    """Submits, shows and steers jobs, from threads.

    The address is *dsn*, or the environment's ``ERGON_POSTGRES__DSN``. A function without a prefix
    is for the *default* executors. A job for executors that no orchestrator serves becomes a dead
    letter ten minutes after it is due; with *executors*, one for any other does so at once.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, function: str, /, *args: Any, **told: Any) -> Submitted:
        """Submit a job; JobConflict if its id or unique key is taken by another one."""
        return self._run(self.submitting(function, *args, **told))

    def submit_many(self, requests: Iterable[Request]) -> builtins.list[Submitted]:
        """Submit many jobs in one database transaction, in their order: all of them, or on JobConflict none."""
        return self._run(self._all(requests))

    def submit_on(self, connection: Any, function: str, /, *args: Any, **told: Any) -> Submitted:
        """Submit inside the database transaction that is open on *connection*: it is there if that commits, only then.

        *connection* is one of psycopg, SQLAlchemy (a Session too) or Django.
        """
        given = self.parameters(function, *args, **told)
        return submitted(given, callers.run(connection, SUBMIT, given))

    def show(self, job_id: str) -> Job:
        """The job; JobNotFound if there is none."""
        return self._run(reading.show(job_id))

    def list(self, **filters: Any) -> list[Job]:
        """Jobs, the newest first: ``states``, ``kind``, ``function``, ``tenant``, ``before`` and ``limit``."""
        return self._run(reading.listed(**filters))

    def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        """The job once it is over; JobWaitTimeout after *timeout* seconds, which changes nothing about the job."""
        until = None if timeout is None else time.monotonic() + timeout
        for pause in reading.looks():
            state = self._run(reading.state(job_id))
            if state.over:
                break
            time.sleep(_left(job_id, state, pause=pause, until=until, timeout=timeout))
        return self.show(job_id)

    def wait_many(self, job_ids: Iterable[str], *, timeout: float | None = None) -> builtins.list[Job]:
        """All of these once the last is over, in the order of their ids; else as ``wait``."""
        waiting = Waiting(job_ids, timeout=timeout)
        while waiting:
            pause = self._run(waiting.look())
            if pause:
                time.sleep(pause)
        return waiting.jobs

    def executors(self) -> builtins.list[ServedExecutor]:
        """Return the executors that an orchestrator has served in the last 400 days, by name."""
        return self._run(list_executors())

    def cancel(self, job_id: str) -> bool:
        """Cancel the job if it waits; False if it has begun or is over."""
        return self._run(reading.cancel(job_id))

    def kill(self, job_id: str) -> JobState:
        """Cancel the job if it waits, have it killed if it runs; where it is now."""
        return self._run(reading.kill(job_id))

    def replay(self, job_id: str) -> None:
        """Have a job that has failed run anew."""
        self._run(reading.replay(job_id))

    def schedule(self, *crons: Cron) -> None:
        """Declare cron entries: those of the same name are changed, and what is the same stays as it is."""
        self._run(crontab.declare([self.entry(cron) for cron in crons]))

    def unschedule(self, name: str) -> bool:
        """Take a cron entry away; False if there is none. The jobs that it has submitted stay."""
        return self._run(crontab.remove(name))

    def schedules(self) -> builtins.list[CronEntry]:
        """All cron entries, by name."""
        return self._run(crontab.listed())

    def pause_schedule(self, name: str) -> None:
        """Have nothing submitted for a cron entry until it is resumed; CronNotFound if there is none."""
        self._run(crontab.pause(name))

    def resume_schedule(self, name: str) -> None:
        """Have a cron entry go on with the next time to come; what passed since was not missed."""
        self._run(crontab.resume(name))

    def run_schedule(self, name: str) -> Submitted:
        """Submit the job of a cron entry now, beside its scheduled times."""
        return self._run(crontab.run_now(name))

    def close(self) -> None:
        """Close its connections; used again, it connects anew."""
        self._lines.close()

    def _run(self, operation: Operation[R]) -> R:
        return self._lines.run(operation, within=_WITHIN)


class AsyncJobClient(_Client):
    """The same, from an event loop."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def submit(self, function: str, /, *args: Any, **told: Any) -> Submitted:
        return await self._run(self.submitting(function, *args, **told))

    async def submit_many(self, requests: Iterable[Request]) -> builtins.list[Submitted]:
        return await self._run(self._all(requests))

    async def submit_on(self, connection: Any, function: str, /, *args: Any, **told: Any) -> Submitted:
        """As its twin, on an async connection of psycopg, SQLAlchemy or asyncpg."""
        given = self.parameters(function, *args, **told)
        return submitted(given, await callers.run_async(connection, SUBMIT, given))

    async def show(self, job_id: str) -> Job:
        return await self._run(reading.show(job_id))

    async def list(self, **filters: Any) -> list[Job]:
        return await self._run(reading.listed(**filters))

    async def wait(self, job_id: str, *, timeout: float | None = None) -> Job:
        until = None if timeout is None else time.monotonic() + timeout
        for pause in reading.looks():
            state = await self._run(reading.state(job_id))
            if state.over:
                break
            await asyncio.sleep(_left(job_id, state, pause=pause, until=until, timeout=timeout))
        return await self.show(job_id)

    async def wait_many(self, job_ids: Iterable[str], *, timeout: float | None = None) -> builtins.list[Job]:
        waiting = Waiting(job_ids, timeout=timeout)
        while waiting:
            pause = await self._run(waiting.look())
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
        await self._run(crontab.declare([self.entry(cron) for cron in crons]))

    async def unschedule(self, name: str) -> bool:
        return await self._run(crontab.remove(name))

    async def schedules(self) -> builtins.list[CronEntry]:
        return await self._run(crontab.listed())

    async def pause_schedule(self, name: str) -> None:
        await self._run(crontab.pause(name))

    async def resume_schedule(self, name: str) -> None:
        await self._run(crontab.resume(name))

    async def run_schedule(self, name: str) -> Submitted:
        return await self._run(crontab.run_now(name))

    async def close(self) -> None:
        await self._lines.close_async()

    async def _run(self, operation: Operation[R]) -> R:
        return await self._lines.run_async(operation, within=_WITHIN)


def _left(job_id: str, state: JobState, *, pause: float, until: float | None, timeout: float | None) -> float:
    """Seconds until the next look; JobWaitTimeout if there is to be none."""
    left = pause if until is None else until - time.monotonic()
    if left <= 0:
        raise JobWaitTimeout(f"the job {job_id!r} is {state.value} after {timeout:g} s; it goes on", state)
    return min(pause, left)
