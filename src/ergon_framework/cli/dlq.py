"""``ergon dlq``: its commands with their options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli.dlq_change import Change
from ergon_framework.cli.dlq_edit import Edit, edited
from ergon_framework.cli.dlq_exits import DlqExit
from ergon_framework.cli.dlq_filters import filtered, per_second
from ergon_framework.cli.dlq_work import Order, listed, moved, showed
from ergon_framework.cli.options import Actor, AuditReason, Reason, actor_name
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.errors import ConfigurationError, text

dlq = typer.Typer(
    help="Lists, shows, replays, corrects and discards dead letters.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Where = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:NAME",
        help="Where the connector is, or a task that has it, as app:orders; or just the name of a queue of ergon.toml.",
    ),
]
Payload = Annotated[bool, typer.Option("--payload", help="Show payloads and headers too; they may be confidential.")]
All = Annotated[bool, typer.Option("--all", help="Every dead letter there is, in place of filters.")]
Most = Annotated[int | None, typer.Option(min=1, help="The oldest so many of them, not all.")]
Batch = Annotated[int, typer.Option(min=1, max=1000, help="How many are moved at once.")]
Rate = Annotated[
    float | None, typer.Option(parser=per_second, metavar="N/s", help="At most so many; also 300/m or 1000/h.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say how many there are, by reason.")]


@dlq.command("list")
@filtered
def list_(
    where: Where,
    *,
    query: DeadLetterQuery,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="The most that are shown.")] = 50,
    payload: Payload = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """List dead letters, the oldest first; with filters those that fit all of them.

    Exit codes: 0 listed, 1 the broker did not answer, 2 the command line is wrong.

    Example: ergon dlq list app:orders --reason declined --since 2h
    """
    raise typer.Exit(listed(where, query, limit=limit, payload=payload, as_json=json))


@dlq.command()
def show(
    where: Where,
    transaction: Annotated[str, typer.Argument(metavar="ID", help="The transaction's id.")],
    *,
    payload: Payload = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Show everything about the dead letters of one transaction.

    Exit codes: 0 shown, 1 there is none or the broker did not answer, 2 the command line is wrong.

    Example: ergon dlq show app:orders order-3 --payload
    """
    raise typer.Exit(showed(where, transaction, payload=payload, as_json=json))


@dlq.command()
@filtered
def replay(
    where: Where,
    *,
    query: DeadLetterQuery,
    all_: All = False,
    limit: Most = None,
    batch: Batch = 100,
    rate: Rate = None,
    canary: Annotated[
        int, typer.Option(min=0, max=1000, help="Replay that many first, and the rest only if they end well.")
    ] = 0,
    max_failed: Annotated[int, typer.Option(min=0, help="Stop when more of the canary fail.")] = 0,
    canary_wait: Annotated[
        float, typer.Option(min=0, max=86400, metavar="SECONDS", help="How long the canary may take.")
    ] = 60.0,
    actor: Actor = "",
    audit_reason: AuditReason = "",
    dry_run: DryRun = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one line of JSON.")] = False,
) -> None:
    """Put dead letters back into their queue: the same id and correlation, attempts counted anew.

    What is dead when it starts is replayed, the oldest first; what dies again meanwhile is not. Ctrl-C or a crash
    leaves each dead letter in one place, here or in the queue: run it again to go on.

    Exit codes: 0 all replayed, 1 some could not be or the broker did not answer, 2 the command line is wrong, 3 stopped
    by the canary, 130 stopped by a signal.

    Example: ergon dlq replay app:orders --reason step_timeout --canary 5 --rate 50/s
    """
    order = Order(
        verb="replay",
        query=query,
        everything=all_,
        limit=limit,
        batch=batch,
        rate=rate,
        canary=canary,
        max_failed=max_failed,
        canary_wait=canary_wait,
        actor=actor_name(actor),
        audit_reason=audit_reason,
        dry_run=dry_run,
        as_json=json,
    )
    raise typer.Exit(moved(where, order))


@dlq.command()
def edit(
    where: Where,
    transaction: Annotated[str, typer.Argument(metavar="ID", help="The transaction's id.")],
    *,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The corrected payload, in JSON. Without: an editor opens.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH=VALUE", help="Set one value: items.0.price=12.5 or /items/0/price=12.5. May repeat."
        ),
    ] = None,
    new_keys: Annotated[bool, typer.Option("--new-keys", help="Let --set add keys that are not there.")] = False,
    place: Annotated[str | None, typer.Option(help="Which one, where several dead letters have this id.")] = None,
    task: Annotated[
        str | None, typer.Option(metavar="MODULE:TASK", help="Refuse what does not fit the payload of this task.")
    ] = None,
    actor: Actor = "",
    reason: Reason = "",
    values: Annotated[
        bool, typer.Option("--values", help="Keep and show old and new values too; they may be confidential.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be changed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Correct the payload of a dead letter and replay it: the same id and correlation, attempts counted anew.

    Who corrected what, and when, travels with it and is seen in its history. Effects that were made with the old
    values are not undone: a provider call or a fact whose payload is another now is a conflict that names it. A crash
    may leave the old dead letter beside the corrected one, never none of the two.

    Exit codes: 0 replayed, 1 there is none or the broker did not answer, 2 the command line is wrong, nothing was
    changed, or the payload does not fit.

    Example: ergon dlq edit app:charge order-3 --set customer.zip=10115
    """
    try:
        change = Change(file, set_ or (), new_keys=new_keys)
    except ConfigurationError as error:
        typer.echo(f"ergon: {text(error)}", err=True)
        raise typer.Exit(DlqExit.USAGE) from None
    order = Edit(
        id=transaction,
        place=place,
        change=change,
        actor=actor_name(actor),
        reason=reason,
        task=task,
        values=values,
        dry_run=dry_run,
        as_json=json,
    )
    raise typer.Exit(edited(where, order))


@dlq.command()
@filtered
def discard(
    where: Where,
    *,
    query: DeadLetterQuery,
    all_: All = False,
    limit: Most = None,
    batch: Batch = 100,
    rate: Rate = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    actor: Actor = "",
    audit_reason: AuditReason = "",
    dry_run: DryRun = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one line of JSON.")] = False,
) -> None:
    """Throw dead letters away, for good.

    Exit codes: 0 all discarded, 1 some could not be or the broker did not answer, 2 the command line is wrong or the
    question was answered with no, 130 stopped by a signal.

    Example: ergon dlq discard app:orders --type newsletter --until 30d --yes
    """
    order = Order(
        verb="discard",
        query=query,
        everything=all_,
        limit=limit,
        batch=batch,
        rate=rate,
        yes=yes,
        actor=actor_name(actor),
        audit_reason=audit_reason,
        dry_run=dry_run,
        as_json=json,
    )
    raise typer.Exit(moved(where, order))
