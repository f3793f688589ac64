"""Work of the ``ergon job`` commands: query the database, and print the result for people and programs.

A job is a stored call of a handler. Executors of its kind run it; an orchestrator is the process that sends them jobs.
A cron entry submits a job at scheduled times.
"""

from __future__ import annotations

import importlib
import json
import json as json_lib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.audit import act_as
from ergon_framework.cli.dlq_view import sanitize
from ergon_framework.cli.output import explain_error
from ergon_framework.cli.summary import print_rows
from ergon_framework.database.extras import require_psycopg
from ergon_framework.errors import ConfigurationError, ErgonError, error_message
from ergon_framework.runner.exit import ExitCode
from ergon_framework.runner.settings import database_dsn

#: Maximum length of the text in a cell of a list, and of a result; JSON has the whole text.
_MAX_CELL_CHARS = 60
_MAX_TEXT_CHARS = 10_000
_COLOURS = {"succeeded": "green", "failed": "red", "killed": "red", "running": "cyan", "cancelled": "dim"}
_JOB_HEADINGS = ("number", "id", "kind", "function", "state", "attempts", "submitted", "ended", "error")
_CRON_HEADINGS = ("name", "expression", "zone", "kind", "function", "misfire", "next", "last")


def to_json_line(item: Any) -> str:
    """Return one line of JSON; times are in UTC."""
    return json.dumps(
        asdict(item), default=lambda value: _format_time(value) if isinstance(value, datetime) else str(value)
    )


def show_list(jobs: Sequence[Any]) -> None:
    """Print one line for each job."""
    _print_table(_JOB_HEADINGS, [_format_job_cells(job) for job in jobs])


def show_crons(entries: Sequence[Any]) -> None:
    """Print one line for each cron entry."""
    _print_table(_CRON_HEADINGS, [_format_cron_cells(entry) for entry in entries])


def _print_table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    if sys.stdout.isatty():
        table = Table(*headings)
        for row in rows:
            # Text, because job data may contain characters that rich reads as markup.
            table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _format_job_cells(job: Any) -> tuple[str, ...]:
    error = "" if job.error is None else f"{job.error.code}: {job.error.message}"
    return (
        str(job.number),
        sanitize(job.id, _MAX_CELL_CHARS),
        sanitize(job.kind, _MAX_CELL_CHARS),
        sanitize(job.function_name, _MAX_CELL_CHARS),
        job.state.value,
        str(job.attempts),
        _format_time(job.created_at),
        "" if job.ended_at is None else _format_time(job.ended_at),
        sanitize(error, _MAX_CELL_CHARS),
    )


def _format_cron_cells(entry: Any) -> tuple[str, ...]:
    next_text = "never" if entry.next_at is None else _format_time(entry.next_at)
    return (
        sanitize(entry.name, _MAX_CELL_CHARS),
        sanitize(entry.expression, _MAX_CELL_CHARS),
        sanitize(entry.zone, _MAX_CELL_CHARS),
        sanitize(entry.kind, _MAX_CELL_CHARS),
        sanitize(entry.function_name, _MAX_CELL_CHARS),
        entry.misfire.value,
        next_text if entry.enabled else "paused",
        "" if entry.last_at is None else _format_time(entry.last_at),
    )


def show_one(job: Any, wait_text: str | None = None) -> None:
    """Print all details of one job; *wait_text* describes its wait for an orchestrator."""
    print_rows(sanitize(job.id, _MAX_CELL_CHARS), list(_build_rows(job, wait_text)))
    if job.error is not None and job.error.traceback:
        typer.echo("\n".join(sanitize(line, _MAX_TEXT_CHARS) for line in job.error.traceback.splitlines()))


def _build_rows(job: Any, wait_text: str | None) -> Iterator[tuple[str, str]]:
    yield "state", f"{job.state.value}{', to be killed' if job.kill_asked and not job.state.is_final else ''}"
    yield "function", sanitize(f"{job.kind}#{job.function_name}", _MAX_TEXT_CHARS)
    limit_text = "" if job.max_attempts is None else f" of {job.max_attempts}"
    yield "attempts", f"{job.attempts}{limit_text}"
    for name in ("tenant", "correlation", "unique_key"):
        if getattr(job, name) is not None:
            yield name.replace("_", " "), sanitize(getattr(job, name), _MAX_TEXT_CHARS)
    for name, label in _TIME_LABELS.items():
        if getattr(job, name) is not None:
            yield label, _format_time(getattr(job, name))
    if wait_text is not None:
        yield "waits for an orchestrator", sanitize(wait_text, _MAX_TEXT_CHARS)
    if job.state == "pending":
        yield "what it waits for", f"ergon why {shlex.quote(sanitize(job.id, _MAX_TEXT_CHARS))}"
    if job.state == "succeeded":
        yield "result", sanitize(json.dumps(job.result), _MAX_TEXT_CHARS)
    if job.error is not None:
        type_text = f" ({job.error.type})" if job.error.type not in {None, job.error.code} else ""
        yield "error", sanitize(f"{job.error.code}{type_text}: {job.error.message}", _MAX_TEXT_CHARS)


_TIME_LABELS = {
    "created_at": "submitted",
    "due_at": "due",
    "started_at": "started",
    "ended_at": "ended",
    "expires_at": "kept until",
}


def _format_time(timestamp: datetime) -> str:
    return timestamp.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- commands ---------------------------------------------------------------------------------------

#: Seconds between two status updates of a job that is waited for.
STATUS_INTERVAL_SECONDS = 0.5


class JobExit(ExitCode):
    """Exit codes of ``ergon job`` and their meanings."""

    OK = 0, "done; `wait`: the job succeeded"
    UNSUCCESSFUL = 1, "not found, key in use, or wrong state; `wait`: the job did not succeed"
    FAILED = 2, "the database is unavailable or rejected the request, or an option or the configuration is invalid"
    TIMED_OUT = 3, "`wait`: the job had not ended within the timeout"
    STOPPED = 130, "`wait`: stopped by Ctrl-C; the job continues"


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
    #: The executor kind of a function that names none.
    default_kind: str


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
            raise ConfigurationError('--kwargs must be a JSON object, such as \'{"currency": "EUR"}\'')
        submitted_job = client.submit(options.function, *args, kwargs=kwargs, at=options.due_at, **options.job_options)
        if as_json:
            typer.echo(
                json_lib.dumps({"id": submitted_job.id, "created": submitted_job.created, "state": submitted_job.state})
            )
        else:
            typer.echo(submitted_job.id)
            if not submitted_job.created:
                _print_stderr(f"the job already existed and is {submitted_job.state}")
            elif wait_text := _describe_wait(client, client.show(submitted_job.id)):
                _print_stderr(f"the job waits for an orchestrator: {wait_text}")
        return JobExit.OK

    return run_with_client(work, config=config, as_json=as_json, default_kind=options.default_kind)


def show(job_id: str, *, config: Path | None, as_json: bool) -> JobExit:
    """Print one job."""

    def work(client: Any) -> JobExit:
        job = client.show(job_id)
        if as_json:
            typer.echo(to_json_line(job))
        else:
            show_one(job, _describe_wait(client, job))
        return JobExit.OK

    return run_with_client(work, config=config, as_json=as_json)


def wait(job_id: str, *, timeout: float | None, config: Path | None, as_json: bool) -> JobExit:
    """Print the job after it has ended."""

    def work(client: Any) -> JobExit:
        try:
            job = _wait_for_end(client, job_id, timeout=timeout)
        except KeyboardInterrupt:
            _print_stderr("stopped waiting; the job continues")
            return JobExit.STOPPED
        _print_job(job, as_json=as_json)
        if not job.state.is_final:
            _print_stderr(f"the job had not ended after {timeout:g} s")
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
        # It fails only for a job that had ended before: one that is final now was cancelled, or ended meanwhile.
        return _report_action(
            client,
            job_id,
            succeeded=not was_final or not state.is_final,
            failure_text="was already {state}",
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
                typer.echo(to_json_line(job))
        elif jobs:
            show_list(jobs[:limit])
        else:
            typer.echo("no jobs match")
        if len(jobs) > limit:
            _print_stderr(f"there are more jobs; to continue, pass --before {jobs[limit - 1].number}")
        return JobExit.OK

    return run_with_client(work, config=config, as_json=as_json)


def _describe_wait(client: Any, job: Any) -> str | None:
    """Describe the wait of a pending job for an orchestrator; return None if an orchestrator runs."""
    if job.state != "pending":
        return None
    registrations = importlib.import_module("ergon_framework.jobs.registrations")
    wait_text: str | None = registrations.describe_wait(job, client.executors(), datetime.now(UTC))
    return wait_text


# -- helpers ----------------------------------------------------------------------------------------


def _report_action(client: Any, job_id: str, *, succeeded: bool, failure_text: str, as_json: bool) -> JobExit:
    job = client.show(job_id)
    if as_json:
        typer.echo(to_json_line(job))
    elif succeeded:
        typer.echo(f"{job.state.value}{', kill requested' if job.kill_asked else ''}")
    else:
        _print_stderr(f"the job {failure_text.format(state=job.state.value)}")
    return JobExit.OK if succeeded else JobExit.UNSUCCESSFUL


def run_with_client(
    work: Callable[[Any], JobExit],
    *,
    config: Path | None,
    as_json: bool,
    default_kind: str | None = None,
    operator: Operator = Operator(),  # noqa: B008 - it is immutable
) -> JobExit:
    """Call *work* with a client as *operator*; print errors and return the exit code."""
    try:
        dsn = database_dsn(config)
        # Imported on demand: the libraries are an optional extra.
        require_psycopg()
        module = importlib.import_module("ergon_framework.jobs.client")
        client_options = {} if default_kind is None else {"default": default_kind}
        with module.JobClient(dsn, **client_options) as client, act_as(operator.actor, reason=operator.reason):
            return work(client)
    except ErgonError as error:
        code = JobExit.UNSUCCESSFUL if error.code in _JOB_ERROR_CODES else JobExit.FAILED
        if as_json:
            typer.echo(json_lib.dumps({"error": error_message(error), "exit_code": int(code)}))
        else:
            _print_stderr(explain_error(error))
        return code


def _parse_json(source: str, label: str) -> Any:
    try:
        return json_lib.loads(source)
    except ValueError:
        raise ConfigurationError(
            f"{label} is not valid JSON: {source[:50]!r}; strings need their own quotes, as '\"so\"'"
        ) from None


def _print_job(job: Any, *, as_json: bool) -> None:
    if as_json:
        typer.echo(to_json_line(job))
    else:
        show_one(job)


def _print_stderr(message: str) -> None:
    typer.echo(f"ergon: {message}", err=True)
