"""Work of the ``ergon provider`` commands: query the database and print the result."""

from __future__ import annotations

import importlib
import json as jsons
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import typer

from ergon_framework.cli import provider_view as view
from ergon_framework.cli.telling import explain_error
from ergon_framework.errors import ErgonError, error_message
from ergon_framework.providers.books import ProviderScope
from ergon_framework.runner.exits import ExitCode
from ergon_framework.runner.settings import database_dsn
from ergon_framework.schema import libraries

#: The functions of the operator module that list rows, and that take an action under another name.
_LIST_FUNCTIONS: Final = {
    "quotas": "list_quotas",
    "breakers": "list_breakers",
    "overrides": "list_overrides",
    "lost": "list_lost_reservations",
}
_ACTION_FUNCTIONS: Final = {"lift": "clear_override"}

#: The tenant name of the scope that all tenants share.
ALL_TENANTS = "*"


class ProviderExit(ExitCode):
    """Exit codes of ``ergon provider`` and their meanings."""

    OK = 0, "shown, or done"
    INCOMPLETE = 1, "`health --check`: something is held back; `retention`: something is left for the next time"
    FAILED = 2, "the database is out of reach or refuses, or the command line or the configuration is wrong"


@dataclass(frozen=True, slots=True)
class OperatorAction:
    """An override requested by an operator."""

    action: str
    tenant: str
    provider: str
    capability: str
    actor: str
    reason: str
    seconds: float | None = None
    calls: int | None = None


def print_health(tenant: str, *, check: bool, config: Path | None, as_json: bool) -> ProviderExit:
    """Print the health summary of *tenant*."""

    def show(dsn: str) -> ProviderExit:
        with _import_sql_module("reaching").connection(dsn, answer_timeout=10.0) as connection:
            summary = _import_sql_module("summary").read_summary(connection, tenant)
        _print_result(summary, view.show_health, as_json=as_json)
        is_blocked = any(one.breaker_state != "closed" or _is_quota_exhausted(one) for one in summary.providers)
        return ProviderExit.INCOMPLETE if check and is_blocked else ProviderExit.OK

    return _run_command(show, config=config, as_json=as_json)


def list_rows(
    kind: str, tenant: str | None, provider: str | None = None, *, limit: int, config: Path | None, as_json: bool
) -> ProviderExit:
    """List the rows of *kind* that the operator may read."""

    def show(dsn: str) -> ProviderExit:
        filters = {"provider": provider} if kind in {"quotas", "breakers"} else {}
        result = getattr(_import_sql_module("operator"), _LIST_FUNCTIONS[kind])(dsn, tenant, limit=limit, **filters)
        _print_result(result, lambda rows: view.show_rows(kind, rows), as_json=as_json)
        return ProviderExit.OK

    return _run_command(show, config=config, as_json=as_json)


def apply_action(action: OperatorAction, *, config: Path | None, as_json: bool) -> ProviderExit:
    """Apply an operator's action, and print the new state."""

    def apply(dsn: str) -> ProviderExit:
        scope = ProviderScope(
            None if action.tenant == ALL_TENANTS else action.tenant, action.provider, action.capability
        )
        options: dict[str, Any] = {"actor": action.actor, "reason": action.reason}
        options |= {} if action.seconds is None else {"seconds": action.seconds}
        options |= {} if action.calls is None else {"calls": action.calls}
        function_name = _ACTION_FUNCTIONS.get(action.action, action.action)
        result = getattr(_import_sql_module("operator"), function_name)(dsn, scope, **options)
        kind, rows = ("quotas", result) if isinstance(result, list) else ("breakers", [result])
        _print_result(rows, lambda rows: view.show_rows(kind, rows), as_json=as_json)
        return ProviderExit.OK

    return _run_command(apply, config=config, as_json=as_json)


def run_retention(options: dict[str, Any], *, config: Path | None, as_json: bool) -> ProviderExit:
    """Run retention once and print the result."""

    def run_once(dsn: str) -> ProviderExit:
        module = _import_sql_module("retention")
        result = module.run_retention(dsn, module.ProviderRetention.load(options))
        _print_result(result, view.show_retention, as_json=as_json)
        return ProviderExit.INCOMPLETE if result.left or result.others else ProviderExit.OK

    return _run_command(run_once, config=config, as_json=as_json)


def _is_quota_exhausted(provider: Any) -> bool:
    return provider.quota is not None and provider.quota.remaining_count <= 0


# -- helpers ----------------------------------------------------------------------------------------


def _run_command(work: Callable[[str], ProviderExit], *, config: Path | None, as_json: bool) -> ProviderExit:
    try:
        return work(database_dsn(config))
    except ErgonError as error:
        if as_json:
            typer.echo(jsons.dumps({"error": error_message(error), "exit_code": int(ProviderExit.FAILED)}))
        else:
            typer.echo(f"ergon: {explain_error(error)}", err=True)
        return ProviderExit.FAILED


def _import_sql_module(name: str) -> Any:
    # Imported on demand: only these commands need the libraries, which are an optional extra.
    libraries.require_psycopg()
    return importlib.import_module(f"ergon_framework.providers.sql.{name}")


def _print_result(result: Any, show: Callable[[Any], None], *, as_json: bool) -> None:
    if as_json:
        typer.echo(jsons.dumps(_to_json_data(result)))
    else:
        show(result)


def _to_json_data(value: Any) -> Any:
    """Return *value* as JSON data."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _to_json_data(item) for name, item in asdict(value).items()}
    if isinstance(value, ProviderScope):
        return {**value._asdict(), "tenant_id": ALL_TENANTS if value.tenant_id is None else value.tenant_id}
    if isinstance(value, dict):
        return {name: _to_json_data(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_data(item) for item in value]
    return value.isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else value
