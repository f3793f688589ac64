"""Work of the ``ergon job`` commands: query the database and print the result."""

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

from ergon_framework.audit import act_as
from ergon_framework.cli import job_view as view
from ergon_framework.cli.telling import explain_error
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.settings import database_dsn

#: Seconds between two status updates of a job that is waited for.
STATUS_INTERVAL_SECONDS = 0.5


class JobExit(ExitCode):
    """Exit codes of ``ergon job`` and their meanings."""

    OK = 0, "done; what `wait` waited for has succeeded"
    UNSUCCESSFUL = (
        1,
        "it is not there, is taken, or is not where it had to be; what `wait` waited for has not succeeded",
    )
    FAILED = 2, "the database is out of reach or refuses, or the command line or the configuration is wrong"
    TIMED_OUT = 3, "`wait`: it was not over in time"
    STOPPED = 130, "`wait`: Ctrl-C; the job goes on"


#: Codes of errors about the job itself, not about the command or the database.
_JOB_ERROR_CODES = {"job_conflict", "job_not_found", "not_replayable", "cron_not_found"}


@dataclass(frozen=True, slots=True)
class SubmitOptions:
    """A job to submit, from the command line."""

    function: str
    arguments: Sequence[str]
    kwargs: str
    job_options: dict[str, Any]
    due_at: datetime | None
    default: str


@dataclass(frozen=True, slots=True)
class Operator:
    """The operator who requests an action, and the reason."""

    actor: str = ""
    reason: str = ""


def submit(options: SubmitOptions, *, config: Path | None, as_json: bool) -> JobExit:
    """Submit a job and print its id."""

    def work(client: Any) -> JobExit:
        args = [_parse_json(argument, "an argument") for argument in options.arguments]
        kwargs = _parse_json(options.kwargs, "--kwargs")
        if not isinstance(kwargs, dict):
            raise ConfigurationError('--kwargs is a JSON object, such as \'{"currency": "EUR"}\'')
        submitted_job = client.submit(options.function, *args, kwargs=kwargs, at=options.due_at, **options.job_options)
        if as_json:
            typer.echo(
                jsons.dumps({"id": submitted_job.id, "created": submitted_job.created, "state": submitted_job.state})
            )
        else:
            typer.echo(submitted_job.id)
            if not submitted_job.created:
                _print_stderr(f"it was there before, and is {submitted_job.state}")
            elif wait_text := _describe_wait(client, client.show(submitted_job.id)):
                _print_stderr(f"the job waits for an orchestrator: {wait_text}")
        return JobExit.OK

    return run_with_client(work, config=config, as_json=as_json, default=options.default)


def show(job_id: str, *, config: Path | None, as_json: bool) -> JobExit:
    """Print one job."""

    def work(client: Any) -> JobExit:
        job = client.show(job_id)
        if as_json:
            typer.echo(view.to_json_line(job))
        else:
            view.show_one(job, _describe_wait(client, job))
        return JobExit.OK

    return run_with_client(work, config=config, as_json=as_json)


def wait(job_id: str, *, timeout: float | None, config: Path | None, as_json: bool) -> JobExit:
    """Print the job after it has ended."""

    def work(client: Any) -> JobExit:
        try:
            job = _wait_for_end(client, job_id, timeout=timeout)
        except KeyboardInterrupt:
            _print_stderr("stopped waiting; the job goes on")
            return JobExit.STOPPED
        _print_job(job, as_json=as_json)
        if not job.state.is_final:
            _print_stderr(f"it was not over after {timeout:g} s")
            return JobExit.TIMED_OUT
        return JobExit.OK if job.state == "succeeded" else JobExit.UNSUCCESSFUL

    return run_with_client(work, config=config, as_json=as_json)


def _wait_for_end(client: Any, job_id: str, *, timeout: float | None) -> Any:
    """Return the job when it is final or the timeout has passed; a terminal shows its state meanwhile."""
    started_at = time.monotonic()
    job = client.show(job_id)
    with Console(stderr=True).status("", spinner="dots") if sys.stderr.isatty() else _NullStatus() as status:
        while not job.state.is_final:
            wait_seconds = (
                STATUS_INTERVAL_SECONDS
                if timeout is None
                else min(STATUS_INTERVAL_SECONDS, started_at + timeout - time.monotonic())
            )
            if wait_seconds <= 0:
                break
            status.update(f"{job.state.value}, attempt {job.attempts}, {time.monotonic() - started_at:.0f} s")
            try:
                job = client.wait(job_id, timeout=wait_seconds)
            except TimeoutError:
                job = client.show(job_id)
    return job


class _NullStatus:
    """A status that is not shown."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self, _: str) -> None: ...


def cancel(job_id: str, *, operator: Operator, config: Path | None, as_json: bool) -> JobExit:
    """Cancel a job and print its state."""

    def work(client: Any) -> JobExit:
        is_cancelled = client.cancel(job_id)
        return _report_action(
            client, job_id, succeeded=is_cancelled, failure_text="is {state} and cannot be cancelled", as_json=as_json
        )

    return run_with_client(work, config=config, as_json=as_json, operator=operator)


def kill(job_id: str, *, operator: Operator, config: Path | None, as_json: bool) -> JobExit:
    """Request the kill of a job and print its state."""

    def work(client: Any) -> JobExit:
        was_final = client.show(job_id).state.is_final
        state = client.kill(job_id)
        return _report_action(
            client,
            job_id,
            succeeded=not was_final or not state.is_final,
            failure_text="was {state} already",
            as_json=as_json,
        )

    return run_with_client(work, config=config, as_json=as_json, operator=operator)


def replay(job_id: str, *, operator: Operator, config: Path | None, as_json: bool) -> JobExit:
    """Replay a job and print its state."""

    def work(client: Any) -> JobExit:
        client.replay(job_id)
        return _report_action(client, job_id, succeeded=True, failure_text="", as_json=as_json)

    return run_with_client(work, config=config, as_json=as_json, operator=operator)


def list_jobs(filters: dict[str, Any], *, limit: int, config: Path | None, as_json: bool) -> JobExit:
    """Print jobs, newest first."""

    def work(client: Any) -> JobExit:
        # Fetch one extra job to detect whether there are more.
        jobs = client.list(**filters, limit=min(limit + 1, 10_000))
        if as_json:
            for job in jobs[:limit]:
                typer.echo(view.to_json_line(job))
        elif jobs:
            view.show_list(jobs[:limit])
        else:
            typer.echo("there are no jobs of that kind")
        if len(jobs) > limit:
            _print_stderr(f"there are more; --before {jobs[limit - 1].number} goes on from here")
        return JobExit.OK

    return run_with_client(work, config=config, as_json=as_json)


def _describe_wait(client: Any, job: Any) -> str | None:
    """Describe the wait of a pending job for an orchestrator; return None if an orchestrator runs."""
    if job.state != "pending":
        return None
    registrations = importlib.import_module("ergon_framework.executor.jobs.registrations")
    wait_text: str | None = registrations.describe_wait(job, client.executors(), datetime.now(UTC))
    return wait_text


# -- helpers ----------------------------------------------------------------------------------------


def _report_action(client: Any, job_id: str, *, succeeded: bool, failure_text: str, as_json: bool) -> JobExit:
    job = client.show(job_id)
    if as_json:
        typer.echo(view.to_json_line(job))
    elif succeeded:
        typer.echo(f"{job.state.value}{', and its kill is asked for' if job.kill_asked else ''}")
    else:
        _print_stderr(f"the job {failure_text.format(state=job.state.value)}")
    return JobExit.OK if succeeded else JobExit.UNSUCCESSFUL


def run_with_client(
    work: Callable[[Any], JobExit],
    *,
    config: Path | None,
    as_json: bool,
    default: str | None = None,
    operator: Operator = Operator(),  # noqa: B008 - it is immutable
) -> JobExit:
    """Call *work* with a client as *operator*; print errors and return the exit code."""
    try:
        dsn = database_dsn(config)
        # Imported on demand: the libraries are an optional extra, and the error names the missing ones.
        module = importlib.import_module("ergon_framework.executor.jobs.client")
        client_options = {} if default is None else {"default": default}
        with module.JobClient(dsn, **client_options) as client, act_as(operator.actor, reason=operator.reason):
            return work(client)
    except ErgonError as error:
        code = JobExit.UNSUCCESSFUL if error.code in _JOB_ERROR_CODES else JobExit.FAILED
        if as_json:
            typer.echo(jsons.dumps({"error": error_message(error), "exit_code": int(code)}))
        else:
            _print_stderr(explain_error(error))
        return code


def _parse_json(source: str, label: str) -> Any:
    try:
        return jsons.loads(source)
    except ValueError:
        raise ConfigurationError(
            f"{label} is no JSON: {source[:50]!r}; texts have quotes of their own, as '\"so\"'"
        ) from None


def _print_job(job: Any, *, as_json: bool) -> None:
    if as_json:
        typer.echo(view.to_json_line(job))
    else:
        view.show_one(job)


def _print_stderr(message: str) -> None:
    typer.echo(f"ergon: {message}", err=True)
