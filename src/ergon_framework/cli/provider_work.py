"""What ``ergon provider`` does: ask the database, and say what it answered."""

from __future__ import annotations

import importlib
import json as jsons
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from ergon_framework.cli import provider_view as view
from ergon_framework.cli.telling import explained
from ergon_framework.errors import ErgonError, text
from ergon_framework.providers.books import Account
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.settings import database
from ergon_framework.schema import libraries

#: The account that all tenants share.
ALL = "*"


class ProviderExit(ExitCode):
    """Every exit code of ``ergon provider`` with what it means."""

    OK = 0, "shown, or done"
    LEFT = 1, "`health --check`: something is held back; `retention`: something is left for the next time"
    FAILED = 2, "the database is out of reach or refuses, or the command line or the configuration is wrong"


@dataclass(frozen=True, slots=True)
class Word:
    """What an operator says, and who he is."""

    action: str
    tenant: str
    provider: str
    capability: str
    actor: str
    reason: str
    seconds: float | None = None
    calls: int | None = None


def health(tenant: str, *, check: bool, config: Path | None, as_json: bool) -> ProviderExit:
    """Show the summary of *tenant*."""

    def show(dsn: str) -> ProviderExit:
        with _needed("reaching").reached(dsn, patience=10.0) as line:
            found = _needed("summary").summary(line, tenant)
        _tell(found, view.show_health, as_json=as_json)
        held = any(one.breaker_state != "closed" or _spent(one) for one in found.providers)
        return ProviderExit.LEFT if check and held else ProviderExit.OK

    return _done(show, config=config, as_json=as_json)


def listed(
    what: str, tenant: str | None, provider: str | None = None, *, limit: int, config: Path | None, as_json: bool
) -> ProviderExit:
    """List *what* the operator may read."""

    def show(dsn: str) -> ProviderExit:
        only = {"provider": provider} if what in {"quotas", "breakers"} else {}
        found = getattr(_needed("operator"), what)(dsn, tenant, limit=limit, **only)
        _tell(found, lambda rows: view.show_rows(what, rows), as_json=as_json)
        return ProviderExit.OK

    return _done(show, config=config, as_json=as_json)


def said(word: Word, *, config: Path | None, as_json: bool) -> ProviderExit:
    """Pass on what an operator says, and show what is so now."""

    def say(dsn: str) -> ProviderExit:
        account = Account(None if word.tenant == ALL else word.tenant, word.provider, word.capability)
        given: dict[str, Any] = {"actor": word.actor, "reason": word.reason}
        given |= {} if word.seconds is None else {"seconds": word.seconds}
        given |= {} if word.calls is None else {"calls": word.calls}
        found = getattr(_needed("operator"), word.action)(dsn, account, **given)
        what, rows = ("quotas", found) if isinstance(found, list) else ("breakers", [found])
        _tell(rows, lambda rows: view.show_rows(what, rows), as_json=as_json)
        return ProviderExit.OK

    return _done(say, config=config, as_json=as_json)


def tidied(keep: dict[str, Any], *, config: Path | None, as_json: bool) -> ProviderExit:
    """Do what retention is for."""

    def tidy(dsn: str) -> ProviderExit:
        module = _needed("retention")
        done = module.run(dsn, module.Retention.load(keep))
        _tell(done, view.show_tidied, as_json=as_json)
        return ProviderExit.LEFT if done.left or done.others else ProviderExit.OK

    return _done(tidy, config=config, as_json=as_json)


def _spent(found: Any) -> bool:
    return found.quota is not None and found.quota.remaining_count <= 0


# -- around it --------------------------------------------------------------------------------------


def _done(work: Callable[[str], ProviderExit], *, config: Path | None, as_json: bool) -> ProviderExit:
    try:
        return work(database(config))
    except ErgonError as error:
        if as_json:
            typer.echo(jsons.dumps({"error": text(error), "exit_code": int(ProviderExit.FAILED)}))
        else:
            typer.echo(f"ergon: {explained(error)}", err=True)
        return ProviderExit.FAILED


def _needed(name: str) -> Any:
    # Loaded when it is needed: not everybody has its libraries, and no other command needs them.
    libraries.needed()
    return importlib.import_module(f"ergon_framework.providers.sql.{name}")


def _tell(found: Any, show: Callable[[Any], None], *, as_json: bool) -> None:
    if as_json:
        typer.echo(jsons.dumps(_plain(found)))
    else:
        show(found)


def _plain(value: Any) -> Any:
    """*value* as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(item) for name, item in asdict(value).items()}
    if isinstance(value, Account):
        return {**value._asdict(), "tenant_id": ALL if value.tenant_id is None else value.tenant_id}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else value
