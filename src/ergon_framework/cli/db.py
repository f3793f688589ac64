"""``ergon db``: brings the database to the schema of this release, says how far it is, prints the statements."""

from __future__ import annotations

import json as jsons
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ergon_framework.cli.telling import explained
from ergon_framework.errors import ErgonError, extra, text
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.settings import database, settings
from ergon_framework.schema.revisions import CHAIN, NEEDED

db = typer.Typer(
    help="Upgrades, checks and prints the schema of the database.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


class DbExit(ExitCode):
    """Every exit code of ``ergon db`` with what it means."""

    OK = 0, "the database is up to date, or the statements were printed"
    BEHIND = 1, "`ergon db check`: the database needs an upgrade"
    FAILED = 2, "the database is out of reach or refuses, or the command line or the configuration is wrong"


@db.command()
def upgrade(*, config: Config = None, json: Json = False) -> None:
    """Bring the database to the schema of this release, all of it or nothing.

    The address is ERGON_POSTGRES__DSN of the environment, or postgres.dsn of ergon.toml. Running it again changes
    nothing, and of two who run it at once the second waits. Workers of the release before go on meanwhile. If
    providers.task_table is set, attempts of providers refer to that table afterwards.

    Exit codes: 0 up to date, 2 out of reach, refused, or wrongly configured; then nothing was changed.

    Example: ERGON_POSTGRES__DSN=postgresql://owner@db.example/shop ergon db upgrade
    """
    raise typer.Exit(_done(partial(_upgraded, config=config), config=config, as_json=json))


@db.command()
def check(*, config: Config = None, json: Json = False) -> None:
    """Say how far the database is, and change nothing.

    Exit codes: 0 up to date, 1 an upgrade is needed, 2 out of reach, refused, or wrongly configured.

    Example: ergon db check || ergon db upgrade
    """
    raise typer.Exit(_done(_checked, config=config, as_json=json))


@db.command()
def sql(
    *,
    since: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Where the database is. Default: it has nothing yet.")
    ] = None,
) -> None:
    """Print the statements of an upgrade, for those who run them by hand; no database is asked.

    Exit codes: 0 printed, 2 there is no such revision.

    Example: ergon db sql | psql --set ON_ERROR_STOP=1 postgresql://owner@db.example/shop
    """
    try:
        typer.echo(_migrate().sql(since), nl=False)
    except ErgonError as error:
        raise typer.Exit(_failed(error, as_json=False)) from None


# -- what they do -----------------------------------------------------------------------------------


def _upgraded(dsn: str, *, config: Path | None) -> tuple[DbExit, str, dict[str, Any]]:
    before = _migrate().upgrade(dsn)
    if task_table := settings(config).providers.task_table:
        from ergon_framework.providers.sql.task_table import use_task_table  # noqa: PLC0415 - as in _migrate

        use_task_table(dsn, task_table)
    told = {"found": before.found, "applied": list(before.missing), "newer": before.newer}
    if before.newer:
        return DbExit.OK, f"{_newer(before.found)}; nothing was changed", told
    if not before.missing:
        return DbExit.OK, f"the database is up to date, at revision {before.found}", told
    origin = "from nothing" if before.found is None else f"from revision {before.found}"
    return DbExit.OK, f"upgraded {origin} to {before.missing[-1]}", told


def _checked(dsn: str) -> tuple[DbExit, str, dict[str, Any]]:
    state = _migrate().check(dsn)
    told = {
        "found": state.found,
        "missing": list(state.missing),
        "needed": NEEDED,
        "newest": CHAIN[-1],
        "suffices": state.suffices,
        "newer": state.newer,
    }
    if state.newer:
        return DbExit.OK, f"{_newer(state.found)}; this release works on it", told
    if not state.missing:
        return DbExit.OK, f"the database is up to date, at revision {state.found}", told
    found = "has no tables of Ergon yet" if state.found is None else f"is at revision {state.found}"
    works = "this release works on it, but " if state.suffices else ""
    words = f"the database {found}; {works}missing: {', '.join(state.missing)}; run: ergon db upgrade"
    return DbExit.BEHIND, words, told


def _newer(found: str | None) -> str:
    return f"the database is at revision {found}, which a later release has made"


# -- around it --------------------------------------------------------------------------------------


def _done(work: Callable[[str], tuple[DbExit, str, dict[str, Any]]], *, config: Path | None, as_json: bool) -> DbExit:
    try:
        code, words, told = work(database(config))
    except ErgonError as error:
        return _failed(error, as_json=as_json)
    if as_json:
        _print(told, code)
    else:
        typer.echo(words)
    return code


def _migrate() -> Any:
    # Loaded when it is needed: no other command needs these libraries, and not everybody has them.
    for library in ("psycopg", "sqlalchemy", "alembic"):
        extra("postgres", library)
    from ergon_framework.schema import migrate  # noqa: PLC0415 - as above

    return migrate


def _failed(error: ErgonError, *, as_json: bool) -> DbExit:
    if as_json:
        _print({"error": text(error)}, DbExit.FAILED)
    else:
        typer.echo(f"ergon: {explained(error)}", err=True)
    return DbExit.FAILED


def _print(told: Mapping[str, Any], code: DbExit) -> None:
    typer.echo(jsons.dumps({**told, "exit_code": int(code)}))
