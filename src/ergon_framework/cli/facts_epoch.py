"""``ergon facts epoch``: operator commands for a store restored from a backup, run against its own database.

A store keeps the facts that its zone, a site, sends to others, with offsets. Its epoch is a name that has to change
with each restore: facts may be lost then, and an offset may get another fact. Readers and replicators (which copy the
facts of another zone into the local store) stop at a new epoch until an operator accepts or adopts it.
"""

from __future__ import annotations

import importlib
import json as json_lib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ergon_framework.cli.facts_commands import FactsExit
from ergon_framework.cli.options import Actor, Config, Json, JsonLines, Reason, Yes, resolve_actor_name
from ergon_framework.database.extras import require_psycopg
from ergon_framework.errors import ConnectionLostError, ErgonError, error_message
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import BoundarySide, Cursor, ZonePair
from ergon_framework.runner.settings import database_dsn

epoch: Final = typer.Typer(
    help="""List, start, adopt and accept epochs of a store, in the store's own database; for operators.

An epoch names the history of a store. After a backup has been restored, an offset may refer to another fact, so a new
epoch begins, and readers stop until an operator lets them continue. The origin store is the one that facts are copied
from; the forward buffer of the other zone's store holds the copies.""",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

FromZone = Annotated[str, typer.Option("--from", metavar="ZONE", help="Sending zone.")]
ToZone = Annotated[str, typer.Option("--to", metavar="ZONE", help="Receiving zone.")]
SideOption = Annotated[
    BoundarySide,
    typer.Option(
        "--side",
        help="Side of the store's zone: inner, for example a plant, or outer, for example the headquarters.",
    ),
]
AcceptLoss = Annotated[
    bool, typer.Option("--accept-loss", help="Open the store even if its database may lose commits after a power loss.")
]


@epoch.command("list")
def list_(
    *,
    side: SideOption = BoundarySide.INNER,
    accept_loss: AcceptLoss = False,
    config: Config = None,
    json: JsonLines = False,
) -> None:
    """List the epochs known to the store, newest first, with operator, time and reason.

    Epochs of other zones are included: forwarded facts keep the epoch of their origin.

    Exit codes: 0 listed, 2 invalid option or configuration, 3 database unavailable.

    Example: ergon facts epoch list
    """

    def work(store: Any) -> FactsExit:
        for each in store.epochs():
            began_at = each.began_at.isoformat(timespec="seconds")
            if json:
                payload = {
                    "epoch": each.epoch,
                    "began_at": began_at,
                    "why": each.why,
                    "by": each.by,
                    "present": each.present,
                }
                typer.echo(json_lib.dumps(payload))
            else:
                actor_text = f", by {each.by}" if each.by else ""
                typer.echo(f"{'*' if each.present else ' '} {each.epoch}  {began_at}  {each.why}{actor_text}")
        return FactsExit.OK

    raise typer.Exit(_run_with_store(work, side=side, accept_loss=accept_loss, config=config, as_json=json))


@epoch.command()
def new(
    *,
    reason: Reason,
    actor: Actor = "",
    yes: Yes = False,
    side: SideOption = BoundarySide.INNER,
    accept_loss: AcceptLoss = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Start a new epoch after the store was restored from a disk snapshot.

    The store detects other kinds of restore automatically, but may not detect a restored disk snapshot. Run the command
    before anything is appended to the restored store. Every reader of the store stops until an operator has compared
    the stores and has adopted (replicators) or accepted (consumers) the epoch. Operator, time and reason are stored in
    ergon.fact_epochs.

    Exit codes: 0 started, 1 rejected, or confirmation declined or not answered, 2 invalid option or configuration, 3
    database unavailable.

    Example: ergon facts epoch new --reason "restored the snapshot of 2026-01-31" --actor ada
    """

    def work(store: Any) -> FactsExit:
        current_epoch = store.epoch
        prompt = (
            f"the store is in epoch {current_epoch}. After this, all its readers stop until an operator lets them "
            "continue. Start a new epoch?"
        )
        if not yes and not typer.confirm(prompt, err=True):
            return _report_unchanged()
        new_epoch = store.new_epoch(by=resolve_actor_name(actor), why=reason)
        typer.echo(
            json_lib.dumps({"epoch": new_epoch, "was": current_epoch})
            if json
            else f"the store is now in epoch {new_epoch}"
        )
        return FactsExit.OK

    raise typer.Exit(_run_with_store(work, side=side, accept_loss=accept_loss, config=config, as_json=json))


@epoch.command()
def adopt(
    name: Annotated[str, typer.Argument(metavar="EPOCH", help="Current epoch of the origin store.")],
    *,
    from_zone: FromZone,
    to_zone: ToZone,
    offset: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="OFFSET",
            help="Last offset of the forward buffer; both stores must have the same fact at this offset.",
        ),
    ],
    actor: Actor = "",
    yes: Yes = False,
    side: SideOption = BoundarySide.INNER,
    accept_loss: AcceptLoss = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Let replication continue in a new epoch of the origin store, after both stores have been compared.

    Run it against the database with the forward buffer, which holds the copied facts of the other zone. An --offset
    that is not the last offset of this buffer is rejected. Restart the replicator afterwards: it compares the last
    copied fact with the origin before it continues. Operator and time are stored in ergon.fact_epochs.

    Exit codes: 0 adopted, 1 rejected, or confirmation declined or not answered, 2 invalid option or configuration, 3
    database unavailable.

    Example: ergon facts epoch adopt 5f0c2d --from "Plant A" --to HQ --offset 4711 --side outer --actor ada
    """

    def work(store: Any) -> FactsExit:
        pair = ZonePair(from_zone, to_zone)
        end = store.last_offset(pair)
        end_text = "there are no facts" if end is None else f"the last fact here is {end.offset}, of epoch {end.epoch}"
        prompt = (
            f"from {from_zone!r} to {to_zone!r} {end_text}. Do both zones have the same facts up to {offset}? "
            f"Continue in epoch {name}?"
        )
        if not yes and not typer.confirm(prompt, err=True):
            return _report_unchanged()
        store.adopt_epoch(pair, Cursor(name, offset), by=resolve_actor_name(actor))
        payload = {"epoch": name, "was": None if end is None else end.epoch, "offset": offset}
        message = f"facts from {from_zone} continue in epoch {name} after {offset}"
        typer.echo(json_lib.dumps(payload) if json else message)
        return FactsExit.OK

    raise typer.Exit(_run_with_store(work, side=side, accept_loss=accept_loss, config=config, as_json=json))


@epoch.command()
def accept(
    *,
    from_zone: FromZone,
    to_zone: ToZone,
    reader: Annotated[str, typer.Option(metavar="NAME", help="Reader of the stopped consumer.")] = "default",
    yes: Yes = False,
    side: SideOption = BoundarySide.INNER,
    accept_loss: AcceptLoss = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Let a consumer continue in a new epoch of the store that it reads.

    First compare the facts that the consumer has handled with those in the store. The reader's cursor does not move.
    Deferred facts of the reader become dead letters with the reason epoch_changed, because offsets may refer to other
    facts now; some handled facts may be delivered again. Start the consumer afterwards.

    Exit codes: 0 accepted, 1 rejected, or confirmation declined or not answered, 2 invalid option or configuration, 3
    database unavailable.

    Example: ergon facts epoch accept --from "Plant A" --to HQ --reader ledger
    """

    def work(store: Any) -> FactsExit:
        prompt = f"continue {reader!r} with facts from {from_zone!r} to {to_zone!r} in epoch {store.epoch}?"
        if not yes and not typer.confirm(prompt, err=True):
            return _report_unchanged()
        dead_letters = store.consumer_store().forget_epoch(ZonePair(from_zone, to_zone), reader)
        payload = {"reader": reader, "epoch": store.epoch, "dead_letters": dead_letters}
        message = f"{reader} may continue in epoch {store.epoch}; deferred facts dead-lettered: {dead_letters}"
        typer.echo(json_lib.dumps(payload) if json else message)
        return FactsExit.OK

    raise typer.Exit(_run_with_store(work, side=side, accept_loss=accept_loss, config=config, as_json=json))


def _report_unchanged() -> FactsExit:
    typer.echo("ergon: nothing was changed", err=True)
    return FactsExit.REJECTED


def _run_with_store(
    work: Callable[[Any], FactsExit], *, side: BoundarySide, accept_loss: bool, config: Path | None, as_json: bool
) -> FactsExit:
    try:
        dsn = database_dsn(config)
        # Imported on demand: the libraries are an optional extra.
        require_psycopg()
        postgres = importlib.import_module("ergon_framework.facts.stores.postgres.store")
        with postgres.PostgresBoundary(dsn, side=side, accept_loss=accept_loss) as store:
            return work(store)
    except FactError as error:
        return _report_error(error, FactsExit.REJECTED, as_json=as_json)
    except ConnectionLostError as error:
        return _report_error(error, FactsExit.UNAVAILABLE, as_json=as_json)
    except ErgonError as error:
        return _report_error(error, FactsExit.FAILED, as_json=as_json)


def _report_error(error: ErgonError, code: FactsExit, *, as_json: bool) -> FactsExit:
    if as_json:
        typer.echo(json_lib.dumps({"error": error_message(error), "code": error.code, "exit_code": int(code)}))
    else:
        typer.echo(f"ergon: {error_message(error)}", err=True)
    return code
