"""``ergon job``: its commands with their options."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli import job_work as work
from ergon_framework.cli.job_cron import cron
from ergon_framework.cli.options import Actor, Reason
from ergon_framework.cli.provider import lasting


def moment(text: str) -> datetime:
    """A moment, from an ISO time; UTC unless it says otherwise."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text[:50]!r} is no time; write 2026-01-31T08:00, or that with an offset") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


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
        float | None, typer.Option(parser=lasting, metavar="TIME", help="When it is due: after 90s, 15m, 2h or 7d.")
    ] = None,
    at: Annotated[
        datetime | None,
        typer.Option(parser=moment, metavar="MOMENT", help="When it is due: an ISO time, UTC by default."),
    ] = None,
    priority: Annotated[int, typer.Option(min=-100, max=100, help="The larger the sooner.")] = 0,
    max_attempts: Annotated[int | None, typer.Option(min=1, help="Attempts in all. Default: by policy.")] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds that an attempt may take. Default: by policy.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Whose it is.")] = None,
    correlation: Annotated[str | None, typer.Option(help="The business process that it belongs to.")] = None,
    keep: Annotated[
        float, typer.Option(parser=lasting, metavar="TIME", help="How long it is kept after its end.")
    ] = "7d",  # type: ignore[assignment]  # the parser is given it as it is written
    default: Annotated[str, typer.Option(help="The executors of a function without a prefix.")] = "python",
    config: Config = None,
    json: Json = False,
) -> None:
    """Submit a job, and print its id.

    The address of the database is ERGON_POSTGRES__DSN of the environment, or postgres.dsn of ergon.toml.

    Exit codes: 0 submitted, or it was there; 1 the key is taken by another job; 2 out of reach, refused, or wrong.

    Example: ergon job submit python#charge '{"id": "o-1", "total": 5}' --key order-1 --delay 15m
    """
    told = {
        "unique_key": key,
        "delay": delay or 0.0,
        "priority": priority,
        "max_attempts": max_attempts,
        "timeout": timeout,
        "tenant": tenant,
        "correlation": correlation,
        "retention": keep,
    }
    order = work.Order(function, arguments or [], kwargs, told=told, at=at, default=default)
    raise typer.Exit(work.submitted(order, config=config, as_json=json))


@job.command()
def show(job_id: Id, *, config: Config = None, json: Json = False) -> None:
    """Show where a job is, its result, and what went wrong.

    Exit codes: 0 shown, 1 there is none, 2 out of reach, refused, or wrong.

    Example: ergon job show 4f0c2a
    """
    raise typer.Exit(work.shown(job_id, config=config, as_json=json))


@job.command()
def wait(
    job_id: Id,
    *,
    timeout: Annotated[
        float | None, typer.Option(parser=lasting, metavar="TIME", help="For how long: 90s, 15m. Default: for ever.")
    ] = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Wait until a job is over, and show it.

    Exit codes: 0 it succeeded, 1 it failed, was cancelled or killed, or is not there, 2 out of reach, refused, or
    wrong, 3 it was not over in time, 130 stopped by Ctrl-C; the job goes on.

    Example: ergon job wait 4f0c2a --timeout 5m
    """
    raise typer.Exit(work.waited(job_id, timeout=timeout, config=config, as_json=json))


@job.command()
def cancel(job_id: Id, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Cancel a job that waits: for its turn, its time, or its next attempt.

    Exit codes: 0 cancelled, 1 it has begun, is over, or is not there, 2 out of reach, refused, or wrong.

    Example: ergon job cancel 4f0c2a
    """
    raise typer.Exit(work.cancelled(job_id, operator=work.Operator(actor, reason), config=config, as_json=json))


@job.command()
def kill(job_id: Id, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Cancel a job that waits, or have the executor killed that runs it; it is not tried again.

    The orchestrator does it within a second or so: ergon job wait shows when.

    Exit codes: 0 cancelled, or its kill is asked for, 1 it is over or not there, 2 out of reach, refused, or wrong.

    Example: ergon job kill 4f0c2a
    """
    raise typer.Exit(work.killed(job_id, operator=work.Operator(actor, reason), config=config, as_json=json))


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
    """List jobs, the newest first; with filters those that fit all of them.

    Exit codes: 0 listed, 2 out of reach, refused, or wrong.

    Example: ergon job list --state failed --kind python
    """
    filters = {"states": state, "kind": kind, "function": function, "tenant": tenant, "before": before}
    raise typer.Exit(work.listed(filters, limit=limit, config=config, as_json=json))


@job.command()
def replay(job_id: Id, *, reason: Reason = "", actor: Actor = "", config: Config = None, json: Json = False) -> None:
    """Have a job that has failed run anew, its attempts counted from the beginning; many at once: ergon dlq replay.

    Exit codes: 0 replayed, 1 it has not failed, its dead letter is gone, or it is not there, 2 out of reach, refused,
    or wrong.

    Example: ergon job replay 4f0c2a
    """
    raise typer.Exit(work.replayed(job_id, operator=work.Operator(actor, reason), config=config, as_json=json))
