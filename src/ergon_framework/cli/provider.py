"""Commands of ``ergon provider`` and their options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ergon_framework.cli import provider_work as work
from ergon_framework.cli.options import Actor, Reason

provider = typer.Typer(
    help="Shows how providers are, and lets operators overrule quota and breakers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
quota = typer.Typer(help="Shows and extends quota.", no_args_is_help=True, rich_markup_mode=None)
breaker = typer.Typer(help="Shows and overrules breakers.", no_args_is_help=True, rich_markup_mode=None)
provider.add_typer(quota, name="quota")
provider.add_typer(breaker, name="breaker")

_DURATION_PATTERN = re.compile(r"(\d{1,9})([smhd])")
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def parse_duration(text: str) -> float:
    """Parse a duration such as 90s, 15m, 2h or 7d into seconds."""
    match = _DURATION_PATTERN.fullmatch(text)
    if match is None or not int(match[1]):
        raise typer.BadParameter(f"{text[:50]!r} is no length of time; write 90s, 15m, 2h or 7d")
    return int(match[1]) * _UNIT_SECONDS[match[2]]


Config = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The configuration. Default: ergon.toml, if it is there.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
Name = Annotated[str, typer.Argument(metavar="PROVIDER", help="The provider's name.")]
Capability = Annotated[str, typer.Argument(metavar="CAPABILITY", help="What of it is called.")]
Tenant = Annotated[
    str | None, typer.Option(help="Whose: a tenant's own; '*' is the one that all tenants share. Default: all.")
]
OneTenant = Annotated[str, typer.Option(help="Whose: a tenant's own; '*' is the one that all tenants share.")]
ProviderFilter = Annotated[str | None, typer.Option("--provider", metavar="PROVIDER", help="Only of this provider.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="The most that are shown.")]
OverrideDuration = Annotated[
    float, typer.Option("--for", parser=parse_duration, metavar="TIME", help="How long it holds: 90s, 15m, 2h, 7d.")
]


@provider.command()
def health(
    *,
    tenant: Annotated[str, typer.Option(help="Whose providers.")],
    check: Annotated[
        bool, typer.Option("--check", help="Exit with 1 unless all breakers are closed and no quota is spent.")
    ] = False,
    config: Config = None,
    json: Json = False,
) -> None:
    """Show the availability of a tenant's providers: breaker, last hour, quota, last error.

    The database address is read from ERGON_POSTGRES__DSN or from postgres.dsn of ergon.toml.

    Exit codes: 0 shown, 1 with --check: calls are blocked, 2 database unavailable, request rejected, or configuration
    invalid.

    Example: ergon provider health --tenant acme
    """
    raise typer.Exit(work.print_health(tenant, check=check, config=config, as_json=json))


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

    Exit codes: 0 listed, 2 database unavailable, request rejected, or configuration invalid.

    Example: ergon provider quota list --tenant acme
    """
    raise typer.Exit(work.list_rows("quotas", tenant, provider, limit=limit, config=config, as_json=json))


@quota.command()
def extend(
    name: Name,
    capability: Capability,
    *,
    calls: Annotated[int, typer.Option(min=0, help="So many calls more in each window; 0 ends it.")],
    tenant: OneTenant,
    lasts: OverrideDuration,
    reason: Reason,
    actor: Actor,
    config: Config = None,
    json: Json = False,
) -> None:
    """Allow more calls in each quota window of a provider for a limited time.

    Exit codes: 0 done, 2 database unavailable, request rejected, or configuration invalid; nothing was changed.

    Example: ergon provider quota extend payments charging --tenant acme --calls 500 --for 2h --reason "sale, INC-7"
    """
    action = work.OperatorAction(
        "extend_quota", tenant, name, capability, actor=actor, reason=reason, seconds=lasts, calls=calls
    )
    raise typer.Exit(work.apply_action(action, config=config, as_json=json))


@quota.command()
def lost(*, tenant: Tenant = None, limit: Limit = 100, config: Config = None, json: Json = False) -> None:
    """List quota reservations whose owners were killed, newest first; they count as used.

    Exit codes: 0 listed, 2 database unavailable, request rejected, or configuration invalid.

    Example: ergon provider quota lost
    """
    raise typer.Exit(work.list_rows("lost", tenant, limit=limit, config=config, as_json=json))


@breaker.command("list")
def list_breakers(
    *,
    tenant: Tenant = None,
    provider: ProviderFilter = None,
    limit: Limit = 1000,
    config: Config = None,
    json: Json = False,
) -> None:
    """List breakers; a closed breaker without faults is not listed.

    Exit codes: 0 listed, 2 database unavailable, request rejected, or configuration invalid.

    Example: ergon provider breaker list --provider payments
    """
    raise typer.Exit(work.list_rows("breakers", tenant, provider, limit=limit, config=config, as_json=json))


@breaker.command("force-open")
def force_open(
    name: Name,
    capability: Capability,
    *,
    tenant: OneTenant,
    lasts: OverrideDuration,
    reason: Reason,
    actor: Actor,
    config: Config = None,
    json: Json = False,
) -> None:
    """Block all calls to a provider for a limited time.

    Exit codes: 0 done, 2 database unavailable, request rejected, or configuration invalid; nothing was changed.

    Example: ergon provider breaker force-open payments charging --tenant '*' --for 30m --reason "their maintenance"
    """
    action = work.OperatorAction("force_open", tenant, name, capability, actor=actor, reason=reason, seconds=lasts)
    raise typer.Exit(work.apply_action(action, config=config, as_json=json))


@breaker.command()
def disable(
    name: Name,
    capability: Capability,
    *,
    tenant: OneTenant,
    lasts: OverrideDuration,
    reason: Reason,
    actor: Actor,
    config: Config = None,
    json: Json = False,
) -> None:
    """Allow all calls to a provider for a limited time, whatever the state of its breaker.

    Exit codes: 0 done, 2 database unavailable, request rejected, or configuration invalid; nothing was changed.

    Example: ergon provider breaker disable payments charging --tenant acme --for 10m --reason "they say it is up"
    """
    action = work.OperatorAction("disable", tenant, name, capability, actor=actor, reason=reason, seconds=lasts)
    raise typer.Exit(work.apply_action(action, config=config, as_json=json))


@breaker.command()
def lift(
    name: Name,
    capability: Capability,
    *,
    tenant: OneTenant,
    reason: Reason,
    actor: Actor,
    config: Config = None,
    json: Json = False,
) -> None:
    """Clear the override of a breaker, so that the breaker decides again.

    Exit codes: 0 done, 2 database unavailable, request rejected, or configuration invalid; nothing was changed.

    Example: ergon provider breaker lift payments charging --tenant acme --reason "over"
    """
    action = work.OperatorAction("lift", tenant, name, capability, actor=actor, reason=reason)
    raise typer.Exit(work.apply_action(action, config=config, as_json=json))


@provider.command()
def overrides(*, tenant: Tenant = None, limit: Limit = 100, config: Config = None, json: Json = False) -> None:
    """List operator overrides, newest first.

    Exit codes: 0 listed, 2 database unavailable, request rejected, or configuration invalid.

    Example: ergon provider overrides --tenant acme
    """
    raise typer.Exit(work.list_rows("overrides", tenant, limit=limit, config=config, as_json=json))


@provider.command()
def retention(
    *,
    ahead: Annotated[int, typer.Option(min=1, max=366, help="Days for which partitions are made ahead.")] = 3,
    rows: Annotated[int, typer.Option(min=1, max=36_500, help="Days for which attempts are kept.")] = 30,
    minutes: Annotated[int, typer.Option(min=1, max=36_500, help="Days for which roll-ups are kept.")] = 8,
    quotas: Annotated[int, typer.Option(min=1, max=36_500, help="Days for which ended windows are kept.")] = 35,
    config: Config = None,
    json: Json = False,
) -> None:
    """Create the partitions of the next days and delete old data; writers do it too if their role permits.

    Exit codes: 0 done, 1 another process ran retention or used a table, so some work remains for the next run,
    2 database unavailable, request rejected, or configuration invalid.

    Example: ergon provider retention --rows 90
    """
    options = {"ahead": ahead, "rows": rows, "minutes": minutes, "quotas": quotas}
    raise typer.Exit(work.run_retention(options, config=config, as_json=json))
