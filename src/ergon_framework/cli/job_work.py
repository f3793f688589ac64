"""What ``ergon job`` does: ask the database, and say what it answered."""

from __future__ import annotations

import importlib
import json as jsons
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import typer
from rich.console import Console

from ergon_framework.audit import acting
from ergon_framework.cli import job_view as view
from ergon_framework.cli.telling import explained
from ergon_framework.errors import ConfigurationError, ErgonError, text
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.settings import database

#: Seconds between two words about a job that is waited for.
LOOK = 0.5


class JobExit(ExitCode):
    """Every exit code of ``ergon job`` with what it means."""

    OK = 0, "done; what `wait` waited for has succeeded"
    NOT = 1, "it is not there, is taken, or is not where it had to be; what `wait` waited for has not succeeded"
    FAILED = 2, "the database is out of reach or refuses, or the command line or the configuration is wrong"
    LATE = 3, "`wait`: it was not over in time"
    STOPPED = 130, "`wait`: Ctrl-C; the job goes on"


#: Codes of errors that say something about the job, and not about the command or the database.
_ABOUT_THE_JOB = {"job_conflict", "job_not_found", "not_replayable", "cron_not_found"}


@dataclass(frozen=True, slots=True)
class Order:
    """A job that is to be submitted, as the command line has it."""

    function: str
    arguments: Sequence[str]
    kwargs: str
    told: dict[str, Any]
    at: datetime | None
    default: str


@dataclass(frozen=True, slots=True)
class Operator:
    """Who asks for an action, and why."""

    actor: str = ""
    reason: str = ""


def submitted(order: Order, *, config: Path | None, as_json: bool) -> JobExit:
    """Submit, and print the id."""

    def work(client: Any) -> JobExit:
        args = [_read(argument, "an argument") for argument in order.arguments]
        kwargs = _read(order.kwargs, "--kwargs")
        if not isinstance(kwargs, dict):
            raise ConfigurationError('--kwargs is a JSON object, such as \'{"currency": "EUR"}\'')
        made = client.submit(order.function, *args, kwargs=kwargs, at=order.at, **order.told)
        if as_json:
            typer.echo(jsons.dumps({"id": made.id, "created": made.created, "state": made.state}))
        else:
            typer.echo(made.id)
            if not made.created:
                _say(f"it was there before, and is {made.state}")
            elif waits := _describe_wait(client, client.show(made.id)):
                _say(f"the job waits for an orchestrator: {waits}")
        return JobExit.OK

    return done(work, config=config, as_json=as_json, default=order.default)


def shown(job_id: str, *, config: Path | None, as_json: bool) -> JobExit:
    """Print one job."""

    def work(client: Any) -> JobExit:
        found = client.show(job_id)
        if as_json:
            typer.echo(view.as_line(found))
        else:
            view.show_one(found, _describe_wait(client, found))
        return JobExit.OK

    return done(work, config=config, as_json=as_json)


def waited(job_id: str, *, timeout: float | None, config: Path | None, as_json: bool) -> JobExit:
    """Print the job once it is over."""

    def work(client: Any) -> JobExit:
        try:
            found = _ended(client, job_id, timeout=timeout)
        except KeyboardInterrupt:
            _say("stopped waiting; the job goes on")
            return JobExit.STOPPED
        _tell(found, as_json=as_json)
        if not found.state.over:
            _say(f"it was not over after {timeout:g} s")
            return JobExit.LATE
        return JobExit.OK if found.state == "succeeded" else JobExit.NOT

    return done(work, config=config, as_json=as_json)


def _ended(client: Any, job_id: str, *, timeout: float | None) -> Any:
    """The job once it is over, or once the time is; on a terminal one sees where it is."""
    began = time.monotonic()
    found = client.show(job_id)
    with Console(stderr=True).status("", spinner="dots") if sys.stderr.isatty() else _Silent() as status:
        while not found.state.over:
            left = LOOK if timeout is None else min(LOOK, began + timeout - time.monotonic())
            if left <= 0:
                break
            status.update(f"{found.state.value}, attempt {found.attempts}, {time.monotonic() - began:.0f} s")
            try:
                found = client.wait(job_id, timeout=left)
            except TimeoutError:
                found = client.show(job_id)
    return found


class _Silent:
    """A status that nobody looks at."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, _: str) -> None: ...


def cancelled(job_id: str, *, operator: Operator, config: Path | None, as_json: bool) -> JobExit:
    """Cancel, and say where the job is."""

    def work(client: Any) -> JobExit:
        gone = client.cancel(job_id)
        return _steered(client, job_id, done=gone, words="is {state} and cannot be cancelled", as_json=as_json)

    return done(work, config=config, as_json=as_json, operator=operator)


def killed(job_id: str, *, operator: Operator, config: Path | None, as_json: bool) -> JobExit:
    """Ask for the kill, and say where the job is."""

    def work(client: Any) -> JobExit:
        over = client.show(job_id).state.over
        state = client.kill(job_id)
        return _steered(client, job_id, done=not over or not state.over, words="was {state} already", as_json=as_json)

    return done(work, config=config, as_json=as_json, operator=operator)


def replayed(job_id: str, *, operator: Operator, config: Path | None, as_json: bool) -> JobExit:
    """Replay, and say where the job is."""

    def work(client: Any) -> JobExit:
        client.replay(job_id)
        return _steered(client, job_id, done=True, words="", as_json=as_json)

    return done(work, config=config, as_json=as_json, operator=operator)


def listed(filters: dict[str, Any], *, limit: int, config: Path | None, as_json: bool) -> JobExit:
    """Print jobs, the newest first."""

    def work(client: Any) -> JobExit:
        # One more than is shown tells whether there are more.
        found = client.list(**filters, limit=min(limit + 1, 10_000))
        if as_json:
            for one in found[:limit]:
                typer.echo(view.as_line(one))
        elif found:
            view.show_list(found[:limit])
        else:
            typer.echo("there are no jobs of that kind")
        if len(found) > limit:
            _say(f"there are more; --before {found[limit - 1].number} goes on from here")
        return JobExit.OK

    return done(work, config=config, as_json=as_json)


def _describe_wait(client: Any, found: Any) -> str | None:
    """Describe the wait of a pending job for an orchestrator; None if an orchestrator runs."""
    if found.state != "pending":
        return None
    registrations = importlib.import_module("ergon_framework.executor.jobs.registrations")
    waits: str | None = registrations.describe_wait(found, client.executors(), datetime.now(UTC))
    return waits


# -- around it --------------------------------------------------------------------------------------


def _steered(client: Any, job_id: str, *, done: bool, words: str, as_json: bool) -> JobExit:
    found = client.show(job_id)
    if as_json:
        typer.echo(view.as_line(found))
    elif done:
        typer.echo(f"{found.state.value}{', and its kill is asked for' if found.kill_asked else ''}")
    else:
        _say(f"the job {words.format(state=found.state.value)}")
    return JobExit.OK if done else JobExit.NOT


def done(
    work: Callable[[Any], JobExit],
    *,
    config: Path | None,
    as_json: bool,
    default: str | None = None,
    operator: Operator = Operator(),  # noqa: B008 - it cannot change
) -> JobExit:
    """Do *work* with a client as *operator*, and say what went wrong."""
    try:
        dsn = database(config)
        # Loaded when it is needed: not everybody has its libraries, and it says which are missing.
        module = importlib.import_module("ergon_framework.executor.jobs.client")
        given = {} if default is None else {"default": default}
        with module.JobClient(dsn, **given) as client, acting(operator.actor, reason=operator.reason):
            return work(client)
    except ErgonError as error:
        code = JobExit.NOT if error.code in _ABOUT_THE_JOB else JobExit.FAILED
        if as_json:
            typer.echo(jsons.dumps({"error": text(error), "exit_code": int(code)}))
        else:
            _say(explained(error))
        return code


def _read(words: str, what: str) -> Any:
    try:
        return jsons.loads(words)
    except ValueError:
        raise ConfigurationError(
            f"{what} is no JSON: {words[:50]!r}; texts have quotes of their own, as '\"so\"'"
        ) from None


def _tell(found: Any, *, as_json: bool) -> None:
    if as_json:
        typer.echo(view.as_line(found))
    else:
        view.show_one(found)


def _say(words: str) -> None:
    typer.echo(f"ergon: {words}", err=True)
