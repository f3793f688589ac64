"""Commands and options of ``ergon job``, and of ``ergon job cron`` for jobs submitted on a schedule."""

from __future__ import annotations

import json as json_lib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ergon_framework.cli import job_commands
from ergon_framework.cli.job_commands import JobExit, Operator, run_with_client
from ergon_framework.cli.options import Actor, Config, Json, JsonLines, Reason, duration_option

cron = typer.Typer(
    help="Show, pause, resume and run cron entries.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the cron entry.")]


@cron.command("list")
def list_entries(
    *,
    config: Config = None,
    json: JsonLines = False,
) -> None:
    """List cron entries by name, with their next and last scheduled times.

    Exit codes: 0 listed, 2 invalid option or configuration, or the database is unavailable or rejected the request.

    Example: ergon job cron list
    """

    def request(client: Any) -> JobExit:
        entries = client.schedules()
        if json:
            for entry in entries:
                typer.echo(job_commands.to_json_line(entry))
        elif entries:
            job_commands.show_crons(entries)
        else:
            typer.echo("there are no cron entries")
        return JobExit.OK

    raise typer.Exit(run_with_client(request, config=config, as_json=json))


@cron.command()
def pause(name: Name, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Stop submitting the jobs of a cron entry until it is resumed.

    Exit codes: 0 paused, 1 not found, 2 invalid option or configuration, or the database is unavailable or rejected the
    request.

    Example: ergon job cron pause nightly
    """
    request = _build_action("pause_schedule", name, as_json=json)
    raise typer.Exit(run_with_client(request, config=config, as_json=json, operator=Operator(actor, reason)))


@cron.command()
def resume(name: Name, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Resume a cron entry at its next scheduled time; times missed while paused are skipped.

    Exit codes: 0 resumed, 1 not found, 2 invalid option or configuration, or the database is unavailable or rejected
    the request.

    Example: ergon job cron resume nightly
    """
    request = _build_action("resume_schedule", name, as_json=json)
    raise typer.Exit(run_with_client(request, config=config, as_json=json, operator=Operator(actor, reason)))


@cron.command("run-now")
def run_now(name: Name, *, config: Config = None, json: Json = False) -> None:
    """Submit the job of a cron entry now, in addition to its schedule, and print the job's id.

    Exit codes: 0 submitted, 1 not found, 2 invalid option or configuration, or the database is unavailable or rejected
    the request.

    Example: ergon job cron run-now nightly
    """

    def request(client: Any) -> JobExit:
        submitted = client.run_schedule(name)
        typer.echo(
            json_lib.dumps({"id": submitted.id, "created": submitted.created, "state": submitted.state})
            if json
            else submitted.id
        )
        return JobExit.OK

    raise typer.Exit(run_with_client(request, config=config, as_json=json))


def _build_action(method: str, name: str, *, as_json: bool) -> Callable[[Any], JobExit]:
    """Return a request that calls *method* of the client for the cron entry *name*, and prints the entry."""

    def request(client: Any) -> JobExit:
        getattr(client, method)(name)
        entries = [entry for entry in client.schedules() if entry.name == name]
        if as_json:
            for entry in entries:
                typer.echo(job_commands.to_json_line(entry))
        else:
            job_commands.show_crons(entries)
        return JobExit.OK

    return request


# -- jobs -------------------------------------------------------------------------------------------


def parse_time(text: str) -> datetime:
    """Parse an ISO time (UTC unless it has an offset)."""
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"invalid time {text[:50]!r}; write 2026-01-31T08:00, or with an offset") from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


job = typer.Typer(
    help="""Submit, show, wait for, cancel, kill and replay jobs of executors; manage cron entries.

A job is a stored call of a function. An orchestrator, started with ergon run MODULE:ORCHESTRATOR, runs it in an
executor process.""",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
job.add_typer(cron, name="cron")

Id = Annotated[str, typer.Argument(metavar="ID", help="Job id.")]
Kind = Annotated[str | None, typer.Option(metavar="KIND", help="Only this executor kind.")]


@job.command()
def submit(
    function: Annotated[
        str,
        typer.Argument(
            metavar="FUNCTION", help="Function to call, for example charge or python#charge (KIND#FUNCTION)."
        ),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="Positional arguments, each as JSON.")
    ] = None,
    *,
    kwargs: Annotated[str, typer.Option(metavar="OBJECT", help="Keyword arguments, as a JSON object.")] = "{}",
    key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="Unique key; submitting the same job again with this key returns the existing job."
        ),
    ] = None,
    delay: Annotated[
        float | None, duration_option("Delay before the start, for example 90s, 15m or 2h; not with --at.")
    ] = None,
    at: Annotated[
        datetime | None,
        typer.Option(
            parser=parse_time,
            metavar="TIME",
            help="Start time: an ISO time (UTC unless it has an offset); not with --delay.",
        ),
    ] = None,
    priority: Annotated[int, typer.Option(min=-100, max=100, metavar="N", help="Priority; higher runs first.")] = 0,
    max_attempts: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", show_default="orchestrator's policy", help="Maximum number of attempts."),
    ] = None,
    timeout: Annotated[
        float | None, duration_option("Timeout of an attempt.", show_default="orchestrator's policy")
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="TENANT", help="Tenant of the job.")] = None,
    correlation: Annotated[str | None, typer.Option(metavar="ID", help="Correlation id of the job.")] = None,
    keep: Annotated[float, duration_option("Retention after the job's end.")] = "7d",  # type: ignore[assignment]  # typer parses the default too
    kind: Annotated[str, typer.Option(metavar="KIND", help="Executor kind, if FUNCTION does not name one.")] = "python",
    config: Config = None,
    json: Json = False,
) -> None:
    """Submit a job and print its id.

    The database address is read from ERGON_POSTGRES__DSN or from postgres.dsn in ergon.toml.

    Exit codes: 0 submitted, or the job already existed, 1 the key belongs to another job, 2 invalid option or
    configuration, or the database is unavailable or rejected the request.

    Example: ergon job submit python#charge '{"id": "o-1", "total": 5}' --key order-1 --delay 15m
    """
    job_options = {
        "unique_key": key,
        "delay": delay or 0.0,
        "priority": priority,
        "max_attempts": max_attempts,
        "timeout": timeout,
        "tenant": tenant,
        "correlation": correlation,
        "retention": keep,
    }
    options = job_commands.SubmitOptions(
        function, arguments or [], kwargs, job_options=job_options, due_at=at, default_kind=kind
    )
    raise typer.Exit(job_commands.submit(options, config=config, as_json=json))


@job.command()
def show(job_id: Id, *, config: Config = None, json: Json = False) -> None:
    """Show the state, the result and the errors of a job.

    Exit codes: 0 shown, 1 not found, 2 invalid option or configuration, or the database is unavailable or rejected the
    request.

    Example: ergon job show 4f0c2a
    """
    raise typer.Exit(job_commands.show(job_id, config=config, as_json=json))


@job.command()
def wait(
    job_id: Id,
    *,
    timeout: Annotated[
        float | None, duration_option("Maximum time to wait, for example 90s or 15m.", show_default="no limit")
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Wait until a job has ended, and show it.

    Exit codes: 0 succeeded, 1 failed, cancelled, killed or not found, 2 invalid option or configuration, or the
    database is unavailable or rejected the request, 3 not ended within the timeout, 130 stopped by Ctrl-C; the job
    continues.

    Example: ergon job wait 4f0c2a --timeout 5m
    """
    raise typer.Exit(job_commands.wait(job_id, timeout=timeout, config=config, as_json=json))


@job.command()
def cancel(job_id: Id, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Cancel a pending job, that is, one that waits for an executor, its start time or its next attempt.

    Exit codes: 0 cancelled, 1 started, ended or not found, 2 invalid option or configuration, or the database is
    unavailable or rejected the request.

    Example: ergon job cancel 4f0c2a
    """
    raise typer.Exit(job_commands.cancel(job_id, operator=Operator(actor, reason), config=config, as_json=json))


@job.command()
def kill(job_id: Id, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Cancel a pending job, or kill the executor of a running job; the job is not retried.

    The orchestrator kills the executor within about a second; ergon job wait shows the end of the job. Other jobs in
    that executor are interrupted and released: they run again without losing an attempt.

    Exit codes: 0 cancelled or kill requested, 1 ended or not found, 2 invalid option or configuration, or the database
    is unavailable or rejected the request.

    Example: ergon job kill 4f0c2a
    """
    raise typer.Exit(job_commands.kill(job_id, operator=Operator(actor, reason), config=config, as_json=json))


@job.command("list")
def list_(
    *,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE",
            help="Only this state: pending, running, succeeded, failed, cancelled or killed; repeatable.",
        ),
    ] = None,
    kind: Kind = None,
    function: Annotated[str | None, typer.Option(metavar="FUNCTION", help="Only this function, without KIND#.")] = None,
    tenant: Annotated[str | None, typer.Option(metavar="TENANT", help="Only this tenant.")] = None,
    before: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only jobs with a number below N (first column of this list), for paging."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Maximum number of jobs to show.")] = 50,
    config: Config = None,
    json: JsonLines = False,
) -> None:
    """List jobs, newest first; if filters are given, only those that match all of them.

    Exit codes: 0 listed, 2 invalid option or configuration, or the database is unavailable or rejected the request.

    Example: ergon job list --state failed --kind python
    """
    filters = {"states": state, "kind": kind, "function": function, "tenant": tenant, "before": before}
    raise typer.Exit(job_commands.list_jobs(filters, limit=limit, config=config, as_json=json))


@job.command()
def replay(job_id: Id, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Run a failed job again with a reset attempt count; to replay many, use ergon dlq replay MODULE:ORCHESTRATOR.

    Exit codes: 0 replayed, 1 not found, not failed, or its dead letter is missing, 2 invalid option or configuration,
    or the database is unavailable or rejected the request.

    Example: ergon job replay 4f0c2a
    """
    raise typer.Exit(job_commands.replay(job_id, operator=Operator(actor, reason), config=config, as_json=json))
