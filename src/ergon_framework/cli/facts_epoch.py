"""``ergon facts epoch``: operator commands for a store restored from a backup, run against its own database."""

from __future__ import annotations

import importlib
import json as jsons
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ergon_framework.cli.facts_commands import FactsExit
from ergon_framework.cli.options import Actor, Reason
from ergon_framework.database.extras import require_psycopg
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError, error_message
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import BoundarySide, Cursor, ZonePair
from ergon_framework.runner.settings import database_dsn

epoch: Final = typer.Typer(
    help="Show, begin and adopt the epochs of a store; for operators, run against the store's database.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

SideOption = Annotated[BoundarySide, typer.Option("--side", help="Side of the boundary.")]
AcceptLoss = Annotated[
    bool, typer.Option("--accept-loss", help="Continue even if a power loss may lose committed data.")
]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Configuration file. Default: ergon.toml if it exists.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Skip confirmation.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


@epoch.command("list")
def list_(
    *,
    side: SideOption = BoundarySide.INNER,
    accept_loss: AcceptLoss = False,
    config: Config = None,
    json: JsonLines = False,
) -> None:
    """Show the epochs known to the store, newest first, with operator, time and reason.

    Epochs of other zones are included: forwarded facts keep the epoch of their origin.

    Exit codes: 0 shown, 2 invalid option or configuration, 3 database unavailable.

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
                typer.echo(jsons.dumps(payload))
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
    """Begin a new epoch after the store was restored from a disk snapshot, which it cannot detect automatically.

    Run it before anything is appended. Every reader of this store stops until an operator of its zone has compared
    both stores and adopted the epoch. Operator, time and reason are stored in ergon.fact_epochs.

    Exit codes: 0 begun, 1 declined or rejected, 2 invalid option or configuration, 3 database unavailable.

    Example: ergon facts epoch new --reason "disk of Tuesday put back" --actor ada
    """

    def work(store: Any) -> FactsExit:
        _require_actor(actor)
        current_epoch = store.epoch
        prompt = (
            f"the store is in epoch {current_epoch}. After this, all its readers stop until an operator lets them "
            "continue. Begin a new epoch?"
        )
        if not yes and not typer.confirm(prompt, err=True):
            return _report_unchanged()
        new_epoch = store.new_epoch(by=actor, why=reason)
        typer.echo(
            jsons.dumps({"epoch": new_epoch, "was": current_epoch})
            if json
            else f"the store is now in epoch {new_epoch}"
        )
        return FactsExit.OK

    raise typer.Exit(_run_with_store(work, side=side, accept_loss=accept_loss, config=config, as_json=json))


@epoch.command()
def adopt(
    name: Annotated[str, typer.Argument(metavar="EPOCH", help="Current epoch of the origin.")],
    *,
    from_zone: Annotated[str, typer.Option("--from", metavar="ZONE", help="Zone that the facts come from.")],
    to_zone: Annotated[str, typer.Option("--to", metavar="ZONE", help="Zone that the facts are for.")],
    offset: Annotated[int, typer.Option(min=0, help="Last offset here; both zones have the same facts up to it.")],
    actor: Actor = "",
    yes: Yes = False,
    side: SideOption = BoundarySide.INNER,
    accept_loss: AcceptLoss = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Continue the facts of another zone in its new epoch, after checking that both zones have the same facts.

    Run it where the forward buffer is. An offset other than the last one here is rejected. Restart the replicator
    afterwards: it compares the last fact of the origin before it continues. ergon.fact_epochs stores the operator.

    Exit codes: 0 adopted, 1 declined or rejected, 2 invalid option or configuration, 3 database unavailable.

    Example: ergon facts epoch adopt 5f0c2d --from "Plant A" --to HQ --offset 4711 --side outer --actor ada
    """

    def work(store: Any) -> FactsExit:
        _require_actor(actor)
        pair = ZonePair(from_zone, to_zone)
        end = store.last_offset(pair)
        end_text = "there are no facts" if end is None else f"the last fact here is {end.offset}, of epoch {end.epoch}"
        prompt = (
            f"from {from_zone!r} to {to_zone!r} {end_text}. Do both zones have the same facts up to {offset}? "
            f"Continue in epoch {name}?"
        )
        if not yes and not typer.confirm(prompt, err=True):
            return _report_unchanged()
        store.adopt_epoch(pair, Cursor(name, offset), by=actor)
        payload = {"epoch": name, "was": None if end is None else end.epoch, "offset": offset}
        typer.echo(jsons.dumps(payload) if json else f"facts from {from_zone} continue in epoch {name} after {offset}")
        return FactsExit.OK

    raise typer.Exit(_run_with_store(work, side=side, accept_loss=accept_loss, config=config, as_json=json))


@epoch.command()
def accept(
    *,
    from_zone: Annotated[str, typer.Option("--from", metavar="ZONE", help="Zone that the facts come from.")],
    to_zone: Annotated[str, typer.Option("--to", metavar="ZONE", help="Zone that the facts are for.")],
    reader: Annotated[str, typer.Option(help="Consumer that is stopped.")] = "default",
    yes: Yes = False,
    side: SideOption = BoundarySide.INNER,
    accept_loss: AcceptLoss = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Let a consumer continue in a new epoch of this store, after checking what it has already handled.

    Its cursor does not move. Its deferred facts become dead letters with the reason epoch_changed, because offsets
    may refer to other facts now; some handled facts may be delivered again. Start the consumer afterwards.

    Exit codes: 0 accepted, 1 declined or rejected, 2 invalid option or configuration, 3 database unavailable.

    Example: ergon facts epoch accept --from "Plant A" --to HQ --reader ledger
    """

    def work(store: Any) -> FactsExit:
        prompt = f"continue {reader!r} with facts from {from_zone!r} to {to_zone!r} in epoch {store.epoch}?"
        if not yes and not typer.confirm(prompt, err=True):
            return _report_unchanged()
        dead_letters = store.consumer_store().forget_epoch(ZonePair(from_zone, to_zone), reader)
        payload = {"reader": reader, "epoch": store.epoch, "dead_letters": dead_letters}
        message = f"{reader} may continue in epoch {store.epoch}; deferred facts dead-lettered: {dead_letters}"
        typer.echo(jsons.dumps(payload) if json else message)
        return FactsExit.OK

    raise typer.Exit(_run_with_store(work, side=side, accept_loss=accept_loss, config=config, as_json=json))


def _require_actor(actor: str) -> None:
    if not actor.strip():
        raise ConfigurationError("an epoch change requires the name of the operator; pass --actor or set ERGON_ACTOR")


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
        typer.echo(jsons.dumps({"error": error_message(error), "code": error.code, "exit_code": int(code)}))
    else:
        typer.echo(f"ergon: {error_message(error)}", err=True)
    return code
