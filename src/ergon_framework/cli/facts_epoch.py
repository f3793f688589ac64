"""``ergon facts epoch``: what an operator does after a store was put back from a backup, at its own database."""

from __future__ import annotations

import importlib
import json as jsons
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ergon_framework.cli.facts_work import FactsExit
from ergon_framework.cli.options import Actor, Reason
from ergon_framework.errors import ConfigurationError, ConnectionLost, ErgonError, text
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import Cursor, Pair, Side
from ergon_framework.runner.settings import database

epoch: Final = typer.Typer(
    help="Shows the epochs of a store, begins one, and takes one over; for operators, at the database of the store.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

SideOption = Annotated[Side, typer.Option("--side", help="On which side of the boundary the store is.")]
AcceptLoss = Annotated[
    bool, typer.Option("--accept-loss", help="Also if the database may lose what it has committed with the power.")
]
Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
Lines = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]


@epoch.command("list")
def list_(
    *, side: SideOption = Side.INNER, accept_loss: AcceptLoss = False, config: Config = None, json: Lines = False
) -> None:
    """Show the epochs that the store knows, the newest first, with who began them, when and why.

    Those of other zones are among them: facts that were forwarded keep the epoch of their origin.

    Exit codes: 0 shown, 2 wrong, 3 out of reach.

    Example: ergon facts epoch list
    """

    def work(store: Any) -> FactsExit:
        for each in store.epochs():
            began = each.began_at.isoformat(timespec="seconds")
            if json:
                told = {"epoch": each.epoch, "began_at": began, "why": each.why, "by": each.by, "present": each.present}
                typer.echo(jsons.dumps(told))
            else:
                who = f", by {each.by}" if each.by else ""
                typer.echo(f"{'*' if each.present else ' '} {each.epoch}  {began}  {each.why}{who}")
        return FactsExit.OK

    raise typer.Exit(_done(work, side=side, accept_loss=accept_loss, config=config, as_json=json))


@epoch.command()
def new(
    *,
    reason: Reason,
    actor: Actor = "",
    yes: Yes = False,
    side: SideOption = Side.INNER,
    accept_loss: AcceptLoss = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Begin a new epoch: for a store that was put back as a snapshot of its disk, which it cannot notice by itself.

    Do it before anything is appended. Whoever reads from this store stands still until an operator of his zone has
    compared both and taken the epoch over. Who began it, when and why is kept in ergon.fact_epochs.

    Exit codes: 0 begun, 1 you said no, or refused, 2 wrong, 3 out of reach.

    Example: ergon facts epoch new --reason "disk of Tuesday put back" --actor ada
    """

    def work(store: Any) -> FactsExit:
        _named(actor)
        present = store.epoch
        words = (
            f"the store is in epoch {present}. After this, all who read from it stand still until they have been told "
            "to go on. Begin a new one?"
        )
        if not yes and not typer.confirm(words, err=True):
            return _no()
        begun = store.new_epoch(by=actor, why=reason)
        typer.echo(jsons.dumps({"epoch": begun, "was": present}) if json else f"the store is in epoch {begun} now")
        return FactsExit.OK

    raise typer.Exit(_done(work, side=side, accept_loss=accept_loss, config=config, as_json=json))


@epoch.command()
def adopt(
    name: Annotated[str, typer.Argument(metavar="EPOCH", help="The epoch that the origin is in now.")],
    *,
    from_zone: Annotated[str, typer.Option("--from", metavar="ZONE", help="The zone that facts come from.")],
    to_zone: Annotated[str, typer.Option("--to", metavar="ZONE", help="The zone that they are for.")],
    offset: Annotated[
        int, typer.Option(min=0, help="The last offset that is here; up to it both have the same facts.")
    ],
    actor: Actor = "",
    yes: Yes = False,
    side: SideOption = Side.INNER,
    accept_loss: AcceptLoss = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Have facts of another zone go on in a new epoch of that zone, after you have seen that both have the same.

    It is done where the forward buffer is. An offset that is not the last one here is refused. Restart the replicator
    afterwards: it has the origin show its last fact before it goes on. Who did it is kept in ergon.fact_epochs.

    Exit codes: 0 adopted, 1 you said no, or refused, 2 wrong, 3 out of reach.

    Example: ergon facts epoch adopt 5f0c2d --from "Plant A" --to HQ --offset 4711 --side outer --actor ada
    """

    def work(store: Any) -> FactsExit:
        _named(actor)
        pair = Pair(from_zone, to_zone)
        end = store.end_of(pair)
        here = "there are no facts" if end is None else f"the last fact here is {end.offset}, of epoch {end.epoch}"
        words = (
            f"from {from_zone!r} to {to_zone!r} {here}. Do both zones have the same facts up to {offset}, and is it to "
            f"go on in epoch {name}?"
        )
        if not yes and not typer.confirm(words, err=True):
            return _no()
        store.adopt_epoch(pair, Cursor(name, offset), by=actor)
        told = {"epoch": name, "was": None if end is None else end.epoch, "offset": offset}
        typer.echo(jsons.dumps(told) if json else f"facts from {from_zone} go on in epoch {name} behind {offset}")
        return FactsExit.OK

    raise typer.Exit(_done(work, side=side, accept_loss=accept_loss, config=config, as_json=json))


@epoch.command()
def accept(
    *,
    from_zone: Annotated[str, typer.Option("--from", metavar="ZONE", help="The zone that facts come from.")],
    to_zone: Annotated[str, typer.Option("--to", metavar="ZONE", help="The zone that they are for.")],
    reader: Annotated[str, typer.Option(help="The consumer that stands still.")] = "default",
    yes: Yes = False,
    side: SideOption = Side.INNER,
    accept_loss: AcceptLoss = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Let a consumer go on in a new epoch of this store, after you have seen what it has already handled.

    Its cursor stays where it is. What it had put off becomes dead letters with the reason epoch_changed, because
    offsets may mean other facts now; of what it had handled some may come again. Start the consumer afterwards.

    Exit codes: 0 accepted, 1 you said no, or refused, 2 wrong, 3 out of reach.

    Example: ergon facts epoch accept --from "Plant A" --to HQ --reader ledger
    """

    def work(store: Any) -> FactsExit:
        words = f"is {reader!r} to go on with facts from {from_zone!r} to {to_zone!r} in epoch {store.epoch}?"
        if not yes and not typer.confirm(words, err=True):
            return _no()
        buried = store.fact_side().forget_epoch(Pair(from_zone, to_zone), reader)
        told = {"reader": reader, "epoch": store.epoch, "dead_letters": buried}
        plain = f"{reader} may go on in epoch {store.epoch}; dead letters of what it had put off: {buried}"
        typer.echo(jsons.dumps(told) if json else plain)
        return FactsExit.OK

    raise typer.Exit(_done(work, side=side, accept_loss=accept_loss, config=config, as_json=json))


def _named(actor: str) -> None:
    if not actor.strip():
        raise ConfigurationError("an epoch is kept with who began it or took it over; say --actor, or set ERGON_ACTOR")


def _no() -> FactsExit:
    typer.echo("ergon: nothing was changed", err=True)
    return FactsExit.NOT


def _done(
    work: Callable[[Any], FactsExit], *, side: Side, accept_loss: bool, config: Path | None, as_json: bool
) -> FactsExit:
    try:
        dsn = database(config)
        # Loaded when it is needed: not everybody has its libraries.
        postgres = importlib.import_module("ergon_framework.facts.stores.postgres")
        with postgres.PostgresBoundary(dsn, side=side, accept_loss=accept_loss) as store:
            return work(store)
    except FactError as error:
        return _failed(error, FactsExit.NOT, as_json=as_json)
    except ConnectionLost as error:
        return _failed(error, FactsExit.UNREACHED, as_json=as_json)
    except ErgonError as error:
        return _failed(error, FactsExit.FAILED, as_json=as_json)


def _failed(error: ErgonError, code: FactsExit, *, as_json: bool) -> FactsExit:
    if as_json:
        typer.echo(jsons.dumps({"error": text(error), "code": error.code, "exit_code": int(code)}))
    else:
        typer.echo(f"ergon: {text(error)}", err=True)
    return code
