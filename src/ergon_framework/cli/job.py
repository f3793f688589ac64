"""Commands of ``ergon job`` and their options."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli import job_work as work
from ergon_framework.cli.job_cron import cron
from ergon_framework.cli.options import Actor, Reason
from ergon_framework.cli.provider import parse_duration


def parse_time(text: str) -> datetime:
    """Parse an ISO time; UTC unless it has an offset."""
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text[:50]!r} is no time; write 2026-01-31T08:00, or that with an offset") from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


job = typer.Typer(
    help="Submits jobs for executors, and shows, waits for, cancels, kills and replays them; cron entries too.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
job.add_typer(cron, name="cron")

Id = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
Kind = Annotated[str | None, typer.Option(help="Only jobs for the executors of this name.")]


@job.command()
def submit(
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="A handler, or EXECUTOR#HANDLER.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT...", help="Positional arguments, each as JSON.")
    ] = None,
    *,
    kwargs: Annotated[str, typer.Option(metavar="OBJECT", help="Keyword arguments, as a JSON object.")] = "{}",
    key: Annotated[str | None, typer.Option(help="A unique key: the same job under it is the one that exists.")] = None,
    delay: Annotated[
        float | None,
        typer.Option(parser=parse_duration, metavar="TIME", help="When it is due: after 90s, 15m, 2h or 7d."),
    ] = None,
    at: Annotated[
        datetime | None,
        typer.Option(parser=parse_time, metavar="MOMENT", help="When it is due: an ISO time, UTC by default."),
    ] = None,
    priority: Annotated[int, typer.Option(min=-100, max=100, help="The larger the sooner.")] = 0,
    max_attempts: Annotated[int | None, typer.Option(min=1, help="Attempts in all. Default: by policy.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds that an attempt may take. Default: by policy.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose it is.")] = None,
    correlation: Annotated[str | None, typer.Option(help="The business process that it belongs to.")] = None,
    keep: Annotated[
        float, typer.Option(parser=parse_duration, metavar="TIME", help="How long it is kept after its end.")
    ] = "7d",  # type: ignore[assignment]  # typer parses the default too
    default: Annotated[str, typer.Option(help="The executors of a function without a prefix.")] = "python",
    config: Config = None,
    json: Json = False,
) -> None:
    """Submit a job and print its id.

    The database address is read from ERGON_POSTGRES__DSN or from postgres.dsn of ergon.toml.

    Exit codes: 0 submitted or existing, 1 the key belongs to another job, 2 database unavailable, request rejected,
    or invalid option or configuration.

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
    options = work.SubmitOptions(function, arguments or [], kwargs, job_options=job_options, due_at=at, default=default)
    raise typer.Exit(work.submit(options, config=config, as_json=json))


@job.command()
def show(job_id: Id, *, config: Config = None, json: Json = False) -> None:
    """Show the state, the result and the errors of a job.

    Exit codes: 0 shown, 1 not found, 2 database unavailable, request rejected, or invalid option or configuration.

    Example: ergon job show 4f0c2a
    """
    raise typer.Exit(work.show(job_id, config=config, as_json=json))


@job.command()
def wait(
    job_id: Id,
    *,
    timeout: Annotated[
        float | None,
        typer.Option(parser=parse_duration, metavar="TIME", help="For how long: 90s, 15m. Default: for ever."),
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Wait until a job has ended, and show it.

    Exit codes: 0 succeeded, 1 failed, cancelled, killed or not found, 2 database unavailable, request rejected, or
    invalid option or configuration, 3 not ended within the timeout, 130 stopped by Ctrl-C; the job continues.

    Example: ergon job wait 4f0c2a --timeout 5m
    """
    raise typer.Exit(work.wait(job_id, timeout=timeout, config=config, as_json=json))


@job.command()
def cancel(job_id: Id, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Cancel a job that waits for an executor, its start time, or its next attempt.

    Exit codes: 0 cancelled, 1 started, ended or not found, 2 database unavailable, request rejected, or invalid option
    or configuration.

    Example: ergon job cancel 4f0c2a
    """
    raise typer.Exit(work.cancel(job_id, operator=work.Operator(actor, reason), config=config, as_json=json))


@job.command()
def kill(job_id: Id, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Cancel a waiting job, or kill the executor that runs it; the job is not retried.

    The orchestrator kills it within about a second; ergon job wait shows when.

    Exit codes: 0 cancelled or kill requested, 1 ended or not found, 2 database unavailable, request rejected, or
    invalid option or configuration.

    Example: ergon job kill 4f0c2a
    """
    raise typer.Exit(work.kill(job_id, operator=work.Operator(actor, reason), config=config, as_json=json))


@job.command("list")
def list_(
    *,
    state: Annotated[
        list[str] | None,
        typer.Option(help="pending, running, succeeded, failed, cancelled or killed; may be repeated."),
    ] = None,
    kind: Kind = None,
    function: Annotated[str | None, typer.Option(help="Only this handler, without a prefix.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only jobs of this tenant.")] = None,
    before: Annotated[int | None, typer.Option(metavar="NUMBER", help="Go on after the job of this number.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The most that are shown.")] = 50,
    config: Config = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List jobs, newest first; with filters, those that match all filters.

    Exit codes: 0 listed, 2 database unavailable, request rejected, or invalid option or configuration.

    Example: ergon job list --state failed --kind python
    """
    filters = {"states": state, "kind": kind, "function": function, "tenant": tenant, "before": before}
    raise typer.Exit(work.list_jobs(filters, limit=limit, config=config, as_json=json))


@job.command()
def replay(job_id: Id, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Run a failed job again with a new attempt count; for many jobs use ergon dlq replay.

    Exit codes: 0 replayed, 1 not failed, dead letter missing, or job not found, 2 database unavailable, request
    rejected, or invalid option or configuration.

    Example: ergon job replay 4f0c2a
    """
    raise typer.Exit(work.replay(job_id, operator=work.Operator(actor, reason), config=config, as_json=json))
