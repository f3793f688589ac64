"""``ergon provider``: show provider health, quota and circuit breakers, and override quota and breakers.

A provider is a third-party API; its capability is the operation that is called. A scope (a tenant, or all tenants, with
a provider and a capability) has a quota and a circuit breaker of its own. The output has bars and colours on a
terminal, and plain columns elsewhere.
"""

from __future__ import annotations

import importlib
import json as json_lib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.cli.dlq_view import sanitize
from ergon_framework.cli.options import Actor, Config, Json, Reason, duration_option, resolve_actor_name
from ergon_framework.cli.output import explain_error
from ergon_framework.database import extras
from ergon_framework.errors import ErgonError, error_message
from ergon_framework.providers.state import ProviderScope
from ergon_framework.runner.exit import ExitCode
from ergon_framework.runner.settings import database_dsn

#: Cells of a bar, and the eighths of a cell.
_BAR_CELLS = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"
#: Maximum length of the text in a cell.
_MAX_CELL_CHARS = 60
_COLOURS = {"closed": "green", "half_open": "yellow", "open": "red"}
#: Thresholds of a share: success below the first is bad, below the second degraded.
_BAD_SHARE, _DEGRADED_SHARE = 0.9, 0.99


def show_health(summary: Any) -> None:
    """Print the health summary of a tenant."""
    now = summary.generated_at
    if not summary.providers:
        typer.echo(f"{sanitize(summary.tenant_id, _MAX_CELL_CHARS)} has called no provider yet")
        return
    headings = (
        "provider",
        "capability",
        "breaker",
        "success, last hour",
        "p95",
        "quota used",
        "last error",
        "last success",
    )
    _print_table(
        headings,
        [_format_provider(provider, now) for provider in summary.providers],
        title=f"{summary.tenant_id} at {_format_time(now)}",
    )


def _format_provider(provider: Any, now: datetime) -> list[Text]:
    error = (
        ""
        if provider.last_error_at is None
        else f"{provider.last_error_code} {_format_age(provider.last_error_at, now)}"
    )
    return [
        _to_text(provider.provider_name),
        _to_text(provider.capability),
        Text(f"● {provider.breaker_state}", style=_COLOURS.get(provider.breaker_state, "")),
        _format_success_rate(provider),
        _to_text("" if provider.p95_latency_ms_1h is None else _format_latency(provider.p95_latency_ms_1h)),
        _format_quota(provider.quota, now),
        _to_text(error),
        _to_text("" if provider.last_success_at is None else _format_age(provider.last_success_at, now)),
    ]


def _format_success_rate(provider: Any) -> Text:
    rate: float | None = provider.success_rate_1h
    if rate is None:
        # Quota and breaker may know calls for which no metrics were written.
        recorded = provider.last_success_at is not None or provider.last_error_at is not None
        return Text("none in the last hour" if recorded else "not recorded", style="dim")
    colour = "red" if rate < _BAD_SHARE else "yellow" if rate < _DEGRADED_SHARE else "green"
    return _draw_bar(rate, colour) + Text(f" {100 * rate:.1f} %")


def _format_quota(quota: Any, now: datetime) -> Text:
    if quota is None:
        return Text("no own limit", style="dim")
    share = quota.used_count / quota.limit_count if quota.limit_count else 1.0
    colour = "red" if quota.remaining_count <= 0 else "yellow" if share > _BAD_SHARE else "green"
    time_left = _format_duration((quota.window_end - now).total_seconds())
    return _draw_bar(share, colour) + Text(f" {quota.used_count:,}/{quota.limit_count:,}, {time_left} left")


def _draw_bar(share: float, colour: str) -> Text:
    eighths = round(8 * _BAR_CELLS * min(1.0, max(0.0, share)))
    full, remainder = divmod(eighths, 8)
    return Text(
        (_EIGHTHS[8] * full + _EIGHTHS[remainder] * (remainder > 0)).ljust(_BAR_CELLS), style=f"{colour} on grey23"
    )


_COLUMNS: dict[str, tuple[str, ...]] = {
    "breakers": ("state", "consecutive_failures", "open_until", "override", "override_until"),
    "quotas": ("kind", "used_count", "limit_count", "remaining_count", "window_end", "last_exhausted_at"),
    "lost": ("id", "calls", "owner", "until", "created_at"),
    "overrides": ("at", "action", "calls", "until", "actor", "reason"),
}


def show_rows(kind: str, rows: Sequence[Any]) -> None:
    """Print the rows that the operator listed; the account of a row is its scope: tenant, provider and capability."""
    if not rows:
        typer.echo(f"no {kind.replace('lost', 'lost reservations')}")
        return
    columns = _COLUMNS[kind]
    cells = [
        [
            _to_text("*" if row.account.tenant_id is None else row.account.tenant_id),
            _to_text(row.account.provider_name),
            _to_text(row.account.capability),
            *(_to_cell(getattr(row, column)) for column in columns),
        ]
        for row in rows
    ]
    _print_table(("tenant", "provider", "capability", *(column.replace("_", " ") for column in columns)), cells)


def show_retention(result: Any) -> None:
    """Print the result of retention; ``others``: another process runs it, ``left``: the partitions that are in use."""
    if result.others:
        typer.echo("another process is running retention")
    typer.echo(f"partitions created {len(result.made)}, dropped {len(result.dropped)}; rows deleted {result.removed}")
    for name in result.left:
        typer.echo(f"left for the next run because it is in use: {name}")


# -- layout -------------------------------------------------------------------------------------------


def _print_table(headings: Iterable[str], rows: Sequence[Sequence[Text]], *, title: str | None = None) -> None:
    if sys.stdout.isatty():
        table = Table(
            *headings, title=None if title is None else Text(sanitize(title, _MAX_CELL_CHARS)), title_justify="left"
        )
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    if title is not None:
        typer.echo(sanitize(title, 2 * _MAX_CELL_CHARS))
    # Bar characters carry no information in a file.
    plain = [[" ".join(cell.plain.translate(_BAR_CHARACTERS).split()) for cell in row] for row in rows]
    lines = [list(headings), *plain]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


_BAR_CHARACTERS = str.maketrans("", "", "●" + _EIGHTHS[1:])


def _to_text(value: str) -> Text:
    # Text, because a table cell may contain characters that rich reads as markup.
    return Text(sanitize(value, _MAX_CELL_CHARS))


def _to_cell(value: Any) -> Text:
    if value is None:
        return Text("")
    if isinstance(value, datetime):
        return Text(_format_time(value))
    return Text(str(value), style=_COLOURS[value]) if str(value) in _COLOURS else _to_text(str(value))


def _format_time(timestamp: datetime) -> str:
    return timestamp.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _format_age(timestamp: datetime, now: datetime) -> str:
    return f"{_format_duration((now - timestamp).total_seconds())} ago"


def _format_duration(seconds: float) -> str:
    """Format an approximate duration in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _format_latency(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms >= 10_000 else f"{ms:,.0f} ms"  # noqa: PLR2004 - seconds from ten seconds on


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
    INCOMPLETE = 1, "`health --check`: calls are blocked; `retention`: some work remains for the next run"
    FAILED = 2, "the database is unavailable or rejected the request, or an option or the configuration is invalid"


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
        with _import_module("postgres.connection").connection(dsn, answer_timeout=10.0) as connection:
            summary = _import_module("http.health_reader").read_summary(connection, tenant)
        _print_result(summary, show_health, as_json=as_json)
        is_blocked = any(one.breaker_state != "closed" or _is_quota_exhausted(one) for one in summary.providers)
        return ProviderExit.INCOMPLETE if check and is_blocked else ProviderExit.OK

    return _run_command(show, config=config, as_json=as_json)


def list_rows(
    kind: str, tenant: str | None, provider: str | None = None, *, limit: int, config: Path | None, as_json: bool
) -> ProviderExit:
    """List the rows of *kind* that the operator may read."""

    def show(dsn: str) -> ProviderExit:
        filters = {"provider": provider} if kind in {"quotas", "breakers"} else {}
        result = getattr(_import_module("postgres.admin"), _LIST_FUNCTIONS[kind])(dsn, tenant, limit=limit, **filters)
        _print_result(result, lambda rows: show_rows(kind, rows), as_json=as_json)
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
        result = getattr(_import_module("postgres.admin"), function_name)(dsn, scope, **options)
        kind, rows = ("quotas", result) if isinstance(result, list) else ("breakers", [result])
        _print_result(rows, lambda rows: show_rows(kind, rows), as_json=as_json)
        return ProviderExit.OK

    return _run_command(apply, config=config, as_json=as_json)


def run_retention(options: dict[str, Any], *, config: Path | None, as_json: bool) -> ProviderExit:
    """Run retention once and print the result."""

    def run_once(dsn: str) -> ProviderExit:
        module = _import_module("postgres.retention")
        result = module.run_retention(dsn, module.ProviderRetention.load(options))
        _print_result(result, show_retention, as_json=as_json)
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
            typer.echo(json_lib.dumps({"error": error_message(error), "exit_code": int(ProviderExit.FAILED)}))
        else:
            typer.echo(f"ergon: {explain_error(error)}", err=True)
        return ProviderExit.FAILED


def _import_module(name: str) -> Any:
    # Imported on demand: only these commands need the libraries, which are an optional extra.
    extras.require_psycopg()
    return importlib.import_module(f"ergon_framework.providers.{name}")


def _print_result(result: Any, show: Callable[[Any], None], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json_lib.dumps(_to_json_data(result)))
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


# -- commands ---------------------------------------------------------------------------------------

provider = typer.Typer(
    help="Show provider health, and override quota and breakers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
quota = typer.Typer(help="Show and extend quotas.", no_args_is_help=True, rich_markup_mode=None)
breaker = typer.Typer(help="Show and override breakers.", no_args_is_help=True, rich_markup_mode=None)
provider.add_typer(quota, name="quota")
provider.add_typer(breaker, name="breaker")

Name = Annotated[str, typer.Argument(metavar="PROVIDER", help="Name of the provider.")]
Capability = Annotated[
    str,
    typer.Argument(
        metavar="CAPABILITY",
        help="Capability of the provider, for example charging; its operations share quota and breaker.",
    ),
]
Tenant = Annotated[
    str | None,
    typer.Option(
        metavar="TENANT",
        show_default="all",
        help="Only this tenant; '*' for providers with scope=\"provider\" in the policy, which all tenants share.",
    ),
]
OneTenant = Annotated[
    str,
    typer.Option(
        metavar="TENANT",
        help="Tenant, or '*' for a provider with scope=\"provider\" in the policy, which all tenants share.",
    ),
]
ProviderFilter = Annotated[str | None, typer.Option("--provider", metavar="NAME", help="Only this provider.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, metavar="N", help="Maximum number of rows to show.")]
OverrideDuration = Annotated[float, duration_option("Duration, for example 90s, 15m or 2h.", "--for")]


@provider.command()
def health(
    *,
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="Tenant that calls the providers.")],
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 unless all breakers are closed and no quota is exhausted.")
    ] = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Show the availability of a tenant's providers: breaker, calls of the last hour, quota, last error.

    The database address is read from ERGON_POSTGRES__DSN or from postgres.dsn in ergon.toml.

    Exit codes: 0 shown, 1 a breaker is not closed or a quota is exhausted (only with --check), 2 invalid option or
    configuration, or the database is unavailable or rejected the request.

    Example: ergon provider health --tenant acme
    """
    raise typer.Exit(print_health(tenant, check=check, config=config, as_json=json))


@quota.command("list")
def list_quota(
    *,
    tenant: Tenant = None,
    provider: ProviderFilter = None,
    limit: Limit = 1000,
    config: Config = None,
    json: Json = False,
) -> None:
    """List the current quota windows with their remaining calls.

    Exit codes: 0 listed, 2 invalid option or configuration, or the database is unavailable or rejected the request.

    Example: ergon provider quota list --tenant acme
    """
    raise typer.Exit(list_rows("quotas", tenant, provider, limit=limit, config=config, as_json=json))


@quota.command()
def extend(
    name: Name,
    capability: Capability,
    *,
    calls: Annotated[
        int, typer.Option(min=0, metavar="N", help="Extra calls per window; 0 ends an extension, whatever --for is.")
    ],
    tenant: OneTenant,
    lasts: OverrideDuration,
    reason: Reason,
    actor: Actor = "",
    config: Config = None,
    json: Json = False,
) -> None:
    """Allow a tenant more calls to one capability in each quota window of a provider for a limited time.

    Exit codes: 0 done, 2 invalid option or configuration, or the database is unavailable or rejected the request;
    nothing was changed.

    Example: ergon provider quota extend payments charging --tenant acme --calls 500 --for 2h --reason "sale, INC-7"
    """
    action = OperatorAction(
        "extend_quota",
        tenant,
        name,
        capability,
        actor=resolve_actor_name(actor),
        reason=reason,
        seconds=lasts,
        calls=calls,
    )
    raise typer.Exit(apply_action(action, config=config, as_json=json))


@quota.command()
def lost(*, tenant: Tenant = None, limit: Limit = 100, config: Config = None, json: Json = False) -> None:
    """List quota that crashed processes had reserved, newest first; it counts as used until its window ends.

    Exit codes: 0 listed, 2 invalid option or configuration, or the database is unavailable or rejected the request.

    Example: ergon provider quota lost
    """
    raise typer.Exit(list_rows("lost", tenant, limit=limit, config=config, as_json=json))


@breaker.command("list")
def list_breakers(
    *,
    tenant: Tenant = None,
    provider: ProviderFilter = None,
    limit: Limit = 1000,
    config: Config = None,
    json: Json = False,
) -> None:
    """List breakers; a closed breaker without failures is not listed.

    Exit codes: 0 listed, 2 invalid option or configuration, or the database is unavailable or rejected the request.

    Example: ergon provider breaker list --provider payments
    """
    raise typer.Exit(list_rows("breakers", tenant, provider, limit=limit, config=config, as_json=json))


@breaker.command("force-open")
def force_open(
    name: Name,
    capability: Capability,
    *,
    tenant: OneTenant,
    lasts: OverrideDuration,
    reason: Reason,
    actor: Actor = "",
    config: Config = None,
    json: Json = False,
) -> None:
    """Block the calls of a tenant to one capability of a provider for a limited time.

    Exit codes: 0 done, 2 invalid option or configuration, or the database is unavailable or rejected the request;
    nothing was changed.

    Example: ergon provider breaker force-open payments charging --tenant '*' --for 30m --reason "provider maintenance"
    """
    action = OperatorAction(
        "force_open", tenant, name, capability, actor=resolve_actor_name(actor), reason=reason, seconds=lasts
    )
    raise typer.Exit(apply_action(action, config=config, as_json=json))


@breaker.command()
def disable(
    name: Name,
    capability: Capability,
    *,
    tenant: OneTenant,
    lasts: OverrideDuration,
    reason: Reason,
    actor: Actor = "",
    config: Config = None,
    json: Json = False,
) -> None:
    """Allow the calls of a tenant to one capability of a provider for a limited time, regardless of its breaker.

    Exit codes: 0 done, 2 invalid option or configuration, or the database is unavailable or rejected the request;
    nothing was changed.

    Example: ergon provider breaker disable payments charging --tenant acme --for 10m --reason "recovery confirmed"
    """
    action = OperatorAction(
        "disable", tenant, name, capability, actor=resolve_actor_name(actor), reason=reason, seconds=lasts
    )
    raise typer.Exit(apply_action(action, config=config, as_json=json))


@breaker.command()
def lift(
    name: Name,
    capability: Capability,
    *,
    tenant: OneTenant,
    reason: Reason,
    actor: Actor = "",
    config: Config = None,
    json: Json = False,
) -> None:
    """Clear the override of a breaker, so that normal operation resumes.

    Exit codes: 0 done, 2 invalid option or configuration, or the database is unavailable or rejected the request;
    nothing was changed.

    Example: ergon provider breaker lift payments charging --tenant acme --reason "incident closed"
    """
    action = OperatorAction("lift", tenant, name, capability, actor=resolve_actor_name(actor), reason=reason)
    raise typer.Exit(apply_action(action, config=config, as_json=json))


@provider.command()
def overrides(*, tenant: Tenant = None, limit: Limit = 100, config: Config = None, json: Json = False) -> None:
    """List operator overrides, newest first.

    Exit codes: 0 listed, 2 invalid option or configuration, or the database is unavailable or rejected the request.

    Example: ergon provider overrides --tenant acme
    """
    raise typer.Exit(list_rows("overrides", tenant, limit=limit, config=config, as_json=json))


@provider.command()
def retention(
    *,
    ahead_days: Annotated[
        int, typer.Option(min=1, max=366, metavar="N", help="Days of partitions to create in advance.")
    ] = 3,
    attempt_days: Annotated[
        int, typer.Option(min=1, max=36_500, metavar="N", help="Days to keep recorded calls.")
    ] = 30,
    minute_days: Annotated[
        int, typer.Option(min=1, max=36_500, metavar="N", help="Days to keep totals per minute.")
    ] = 8,
    quota_days: Annotated[
        int, typer.Option(min=1, max=36_500, metavar="N", help="Days to keep ended quota windows.")
    ] = 35,
    config: Config = None,
    json: Json = False,
) -> None:
    """Create partitions for the provider calls of the coming days, and delete old calls, totals and quota windows.

    Processes that record attempts do this automatically, if their database role has the permission.

    Exit codes: 0 done, 1 some work remains for the next run because another process ran retention or used a table,
    2 invalid option or configuration, or the database is unavailable or rejected the request.

    Example: ergon provider retention --attempt-days 90
    """
    options = {"ahead": ahead_days, "rows": attempt_days, "minutes": minute_days, "quotas": quota_days}
    raise typer.Exit(run_retention(options, config=config, as_json=json))
