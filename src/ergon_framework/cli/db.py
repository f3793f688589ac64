"""``ergon db``: upgrade the database to the schema of this release, check its revision, or print the statements.

A revision is one step of the schema's history. A release works with every revision from its required one on, so
"compatible" and "up to date" differ.
"""

from __future__ import annotations

import json as json_lib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ergon_framework.cli.options import Config, Json
from ergon_framework.cli.output import explain_error
from ergon_framework.database.revisions import REQUIRED_REVISION, REVISIONS
from ergon_framework.errors import ErgonError, error_message, require_extra
from ergon_framework.runner.exit import ExitCode
from ergon_framework.runner.settings import database_dsn, load_settings

db = typer.Typer(
    help="Upgrade, check and print the database schema.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class DbExit(ExitCode):
    """Exit codes of ``ergon db`` and their meanings."""

    OK = 0, "the database is up to date, or the statements were printed"
    OUTDATED = 1, "`ergon db check`: the database needs an upgrade"
    FAILED = 2, "the database is unavailable or rejected the request, or an option or the configuration is invalid"


@db.command()
def upgrade(*, config: Config = None, json: Json = False) -> None:
    """Upgrade the database to the schema of this release, completely or not at all.

    The address is read from ERGON_POSTGRES__DSN or from postgres.dsn in ergon.toml. A second run changes nothing; a
    concurrent run waits for the first. Workers of the previous release keep running meanwhile. If providers.task_table
    is set, the recorded attempts of provider calls get a foreign key to that table, in a second database transaction.

    Exit codes: 0 up to date, 2 invalid option or configuration, or the database is unavailable or rejected the request;
    the schema is unchanged, unless the message says that only the foreign key failed.

    Example: ERGON_POSTGRES__DSN=postgresql://owner@db.example/shop ergon db upgrade
    """
    raise typer.Exit(_run_command(partial(_upgrade, config=config), config=config, as_json=json))


@db.command()
def check(*, config: Config = None, json: Json = False) -> None:
    """Show the schema revision of the database without changing it.

    Exit codes: 0 up to date, 1 upgrade needed, 2 invalid option or configuration, or the database is unavailable or
    rejected the request.

    Example: ergon db check --json
    """
    raise typer.Exit(_run_command(_check, config=config, as_json=json))


@db.command()
def sql(
    *,
    from_revision: Annotated[
        str | None,
        typer.Option(metavar="REVISION", show_default="empty database", help="Current revision of the database."),
    ] = None,
) -> None:
    """Print the SQL statements of an upgrade, for manual execution; no database is queried.

    Exit codes: 0 printed, 2 unknown revision.

    Example: ergon db sql | psql --set ON_ERROR_STOP=1 postgresql://owner@db.example/shop
    """
    try:
        typer.echo(_import_migrate().sql(from_revision), nl=False)
    except ErgonError as error:
        raise typer.Exit(_report_error(error, as_json=False)) from None


# -- work of the commands ---------------------------------------------------------------------------


def _upgrade(dsn: str, *, config: Path | None) -> tuple[DbExit, str, dict[str, Any]]:
    task_table = load_settings(config).providers.task_table
    before = _import_migrate().upgrade(dsn)
    message = _describe_upgrade(before)
    if task_table:
        from ergon_framework.providers.postgres.task_table import use_task_table  # noqa: PLC0415 - imported on demand

        try:
            is_changed = use_task_table(dsn, task_table)
        except ErgonError as error:
            # The upgrade is committed, and the operator must know that.
            text = f"{message}; but setting providers.task_table failed: {explain_error(error)}"
            raise ErgonError(text) from error
        if is_changed:
            message += f"; provider attempts now refer to the table {task_table}"
    return DbExit.OK, message, {"found": before.revision, "applied": list(before.missing), "newer": before.is_newer}


def _describe_upgrade(before: Any) -> str:
    """Describe an upgrade that has succeeded; *before* is the schema's state before it."""
    if before.is_newer:
        return f"{_describe_newer_revision(before.revision)}; the schema was not changed"
    if not before.missing:
        return f"the database is up to date, at revision {before.revision}"
    newest = before.missing[-1]
    if before.revision is None:
        return f"database schema created (revision {newest})"
    return f"database schema upgraded from revision {before.revision} to {newest}"


def _check(dsn: str) -> tuple[DbExit, str, dict[str, Any]]:
    state = _import_migrate().check(dsn)
    payload = {
        "found": state.revision,
        "missing": list(state.missing),
        "needed": REQUIRED_REVISION,
        "newest": REVISIONS[-1],
        "suffices": state.is_compatible,
        "newer": state.is_newer,
    }
    if state.is_newer:
        return DbExit.OK, f"{_describe_newer_revision(state.revision)}; this release is compatible with it", payload
    if not state.missing:
        return DbExit.OK, f"the database is up to date, at revision {state.revision}", payload
    revision_text = "has no Ergon tables" if state.revision is None else f"is at revision {state.revision}"
    compatibility_text = "this release is compatible with it, but " if state.is_compatible else ""
    message = (
        f"the database {revision_text}; {compatibility_text}missing: {', '.join(state.missing)}; run: ergon db upgrade"
    )
    return DbExit.OUTDATED, message, payload


def _describe_newer_revision(revision: str | None) -> str:
    return f"the database is at revision {revision}, created by a later release"


# -- helpers ----------------------------------------------------------------------------------------


def _run_command(
    work: Callable[[str], tuple[DbExit, str, dict[str, Any]]], *, config: Path | None, as_json: bool
) -> DbExit:
    try:
        code, message, payload = work(database_dsn(config))
    except ErgonError as error:
        return _report_error(error, as_json=as_json)
    if as_json:
        _print_json(payload, code)
    else:
        typer.echo(message)
    return code


def _import_migrate() -> Any:
    # Imported on demand: only this command needs these libraries, and they are an optional extra.
    for library in ("psycopg", "sqlalchemy", "alembic"):
        require_extra("postgres", library)
    from ergon_framework.database import migrate  # noqa: PLC0415 - imported on demand

    return migrate


def _report_error(error: ErgonError, *, as_json: bool) -> DbExit:
    if as_json:
        _print_json({"error": error_message(error)}, DbExit.FAILED)
    else:
        typer.echo(f"ergon: {explain_error(error)}", err=True)
    return DbExit.FAILED


def _print_json(payload: Mapping[str, Any], code: DbExit) -> None:
    typer.echo(json_lib.dumps({**payload, "exit_code": int(code)}))
