"""Commands of ``ergon dlq``, the dead-letter queue, and their options; ``dlq_commands`` and ``dlq_edit`` do the work.

A canary of a replay is a number of dead letters that are replayed first: if too many of them fail, the rest stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli.dlq_commands import MoveRequest, list_dead, move_dead, show_dead
from ergon_framework.cli.dlq_edit import EditRequest, PayloadEdit, edit_dead_letter
from ergon_framework.cli.dlq_view import DlqExit
from ergon_framework.cli.options import (
    Actor,
    Json,
    JsonLines,
    Reason,
    Yes,
    add_filter_options,
    duration_option,
    parse_rate,
    resolve_actor_name,
)
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.errors import ConfigurationError, error_message

dlq = typer.Typer(
    help="List, show, replay, edit and discard dead letters.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

TargetName = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:NAME",
        help="Connector, or a task that uses it, for example app:orders; or the name of a queue in ergon.toml.",
    ),
]
Payload = Annotated[bool, typer.Option("--payload", help="Show payloads and headers too; they may be confidential.")]
All = Annotated[bool, typer.Option("--all", help="Select all dead letters instead of using filters.")]
MaxLetters = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Maximum number of dead letters to select, oldest first.")
]
Batch = Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="Number of dead letters per batch.")]
Rate = Annotated[
    float | None,
    typer.Option(parser=parse_rate, metavar="RATE", help="Maximum rate, for example 50/s, 300/m or 1000/h."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the number of matches by dead-letter reason.")]


@dlq.command("list")
@add_filter_options
def list_(
    where: TargetName,
    *,
    query: DeadLetterQuery,
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, metavar="N", help="Maximum number of dead letters to show.")
    ] = 50,
    payload: Payload = False,
    json: JsonLines = False,
) -> None:
    """List dead letters, oldest first; if filters are given, only those that match all of them.

    Exit codes: 0 listed, 1 broker unavailable, 2 invalid option or configuration.

    Example: ergon dlq list app:orders --dead-letter-reason declined --since 2h
    """
    raise typer.Exit(list_dead(where, query, limit=limit, payload=payload, as_json=json))


@dlq.command()
def show(
    where: TargetName,
    transaction: Annotated[str, typer.Argument(metavar="ID", help="Transaction id.")],
    *,
    payload: Payload = False,
    json: JsonLines = False,
) -> None:
    """Show all details of the dead letters of one transaction.

    Exit codes: 0 shown, 1 not found, or broker unavailable, 2 invalid option or configuration.

    Example: ergon dlq show app:orders order-3 --payload
    """
    raise typer.Exit(show_dead(where, transaction, payload=payload, as_json=json))


@dlq.command()
@add_filter_options
def replay(
    where: TargetName,
    *,
    query: DeadLetterQuery,
    all_: All = False,
    limit: MaxLetters = None,
    batch: Batch = 100,
    rate: Rate = None,
    canary: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            metavar="N",
            help="Dead letters to replay first; the rest follow if all end in time and at most --max-failed fail.",
        ),
    ] = 0,
    max_failed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Maximum number of failed transactions of the canary.")
    ] = 0,
    canary_wait: Annotated[
        float,
        duration_option("Maximum time to wait until the canary's transactions have ended.", minimum=0, maximum=86_400),
    ] = "60s",  # type: ignore[assignment]  # typer parses the default too
    actor: Actor = "",
    reason: Reason = "",
    dry_run: DryRun = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one line of JSON.")] = False,
) -> None:
    """Replay dead letters into their queue with the same id and correlation and a reset attempt count.

    Pass either --all or at least one filter. The command selects the dead letters that exist at its start, oldest
    first, and ignores later ones. After Ctrl-C or a crash, each transaction is either in the dead-letter queue or in
    the queue: run the command again to continue.

    Exit codes: 0 all replayed, 1 some could not be replayed, or broker unavailable, 2 invalid option or configuration,
    3 stopped by the canary, 130 stopped by a signal.

    Example: ergon dlq replay app:orders --dead-letter-reason step_timeout --canary 5 --rate 50/s
    """
    request = MoveRequest(
        verb="replay",
        query=query,
        select_all=all_,
        limit=limit,
        batch=batch,
        rate=rate,
        canary=canary,
        max_failed=max_failed,
        canary_wait=canary_wait,
        actor=resolve_actor_name(actor),
        reason=reason,
        dry_run=dry_run,
        as_json=json,
    )
    raise typer.Exit(move_dead(where, request))


@dlq.command()
def edit(
    where: TargetName,
    transaction: Annotated[str, typer.Argument(metavar="ID", help="Transaction id.")],
    *,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default="open an editor", help="Corrected payload in JSON; not with --set."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="PATH=VALUE",
            help="Value to set instead of opening an editor: items.0.price=12.5 or /items/0/price=12.5; repeatable.",
        ),
    ] = None,
    allow_new_keys: Annotated[bool, typer.Option("--allow-new-keys", help="Allow --set to add missing keys.")] = False,
    entry: Annotated[
        str | None,
        typer.Option(
            metavar="ENTRY",
            help="Entry to edit, as shown by ergon dlq list; required if several dead letters have this id.",
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="MODULE:TASK", help="Validate the corrected payload against this task.")
    ] = None,
    actor: Actor = "",
    reason: Reason = "",
    show_values: Annotated[
        bool, typer.Option("--show-values", help="Record and show old and new values; they may be confidential.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would change.")] = False,
    json: Json = False,
) -> None:
    """Correct the payload of a dead letter and replay it with the same id and a reset attempt count.

    The history of the transaction records the operator, the time and the paths that changed; with --show-values also
    the values. Side effects of earlier attempts are not undone: if the handler repeats a provider call or a fact with
    changed values, a conflict error names that call or fact.

    A VALUE that is JSON is set as such: zip=10115 sets a number and zip='"10115"' a string. Any other VALUE is a
    string.

    After a crash the old dead letter may exist next to the corrected transaction; at least one of the two exists.

    Exit codes: 0 replayed, 1 not found, or broker unavailable, 2 invalid option or configuration, unchanged payload, or
    payload rejected by the task; nothing was changed.

    Example: ergon dlq edit app:charge order-3 --set customer.city=Berlin
    """
    try:
        payload_edit = PayloadEdit(file, set_ or (), new_keys=allow_new_keys)
    except ConfigurationError as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        raise typer.Exit(DlqExit.USAGE) from None
    request = EditRequest(
        id=transaction,
        handle=entry,
        payload_edit=payload_edit,
        actor=resolve_actor_name(actor),
        reason=reason,
        task=task,
        show_values=show_values,
        dry_run=dry_run,
        as_json=json,
    )
    raise typer.Exit(edit_dead_letter(where, request))


@dlq.command()
@add_filter_options
def discard(
    where: TargetName,
    *,
    query: DeadLetterQuery,
    all_: All = False,
    limit: MaxLetters = None,
    batch: Batch = 100,
    rate: Rate = None,
    yes: Yes = False,
    actor: Actor = "",
    reason: Reason = "",
    dry_run: DryRun = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as one line of JSON.")] = False,
) -> None:
    """Delete dead letters permanently.

    Pass either --all or at least one filter; if stdin is not a terminal, also --yes.

    Exit codes: 0 all discarded, 1 some could not be deleted, or broker unavailable, 2 invalid option or configuration,
    or confirmation declined, 130 stopped by a signal.

    Example: ergon dlq discard app:orders --type newsletter --until 30d --yes
    """
    request = MoveRequest(
        verb="discard",
        query=query,
        select_all=all_,
        limit=limit,
        batch=batch,
        rate=rate,
        yes=yes,
        actor=resolve_actor_name(actor),
        reason=reason,
        dry_run=dry_run,
        as_json=json,
    )
    raise typer.Exit(move_dead(where, request))
