"""``ergon provider``: its commands with their options."""

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

_LASTS = re.compile(r"(\d{1,9})([smhd])")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def lasting(text: str) -> float:
    """Seconds, from 90s, 15m, 2h or 7d."""
    found = _LASTS.fullmatch(text)
    if found is None or not int(found[1]):
        raise typer.BadParameter(f"{text[:50]!r} is no length of time; write 90s, 15m, 2h or 7d")
    return int(found[1]) * _SECONDS[found[2]]


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
Only = Annotated[str | None, typer.Option("--provider", metavar="PROVIDER", help="Only of this provider.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="The most that are shown.")]
Lasts = Annotated[
    float, typer.Option("--for", parser=lasting, metavar="TIME", help="How long it holds: 90s, 15m, 2h, 7d.")
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
    """Show how the providers of a tenant are: breaker, last hour, quota, last error.

    The address of the database is ERGON_POSTGRES__DSN of the environment, or postgres.dsn of ergon.toml.

    Exit codes: 0 shown, 1 with --check: something is held back, 2 out of reach, refused, or wrongly configured.

    Example: ergon provider health --tenant acme
    """
    raise typer.Exit(work.health(tenant, check=check, config=config, as_json=json))


@quota.command("list")
def list_quota(
    *, tenant: Tenant = None, provider: Only = None, limit: Limit = 1000, config: Config = None, json: Json = False
) -> None:
    """List the windows that last, with what is left of them.

    Exit codes: 0 listed, 2 out of reach, refused, or wrongly configured.

    Example: ergon provider quota list --tenant acme
    """
    raise typer.Exit(work.listed("quotas", tenant, provider, limit=limit, config=config, as_json=json))


@quota.command()
def extend(
    name: Name,
    capability: Capability,
    *,
    calls: Annotated[int, typer.Option(min=0, help="So many calls more in each window; 0 ends it.")],
    tenant: OneTenant,
    lasts: Lasts,
    reason: Reason,
    actor: Actor,
    config: Config = None,
    json: Json = False,
) -> None:
    """Allow more calls in each window of a provider, for some time.

    Exit codes: 0 done, 2 out of reach, refused, or wrongly configured; then nothing was changed.

    Example: ergon provider quota extend payments charging --tenant acme --calls 500 --for 2h --reason "sale, INC-7"
    """
    done = work.Word("extend_quota", tenant, name, capability, actor=actor, reason=reason, seconds=lasts, calls=calls)
    raise typer.Exit(work.said(done, config=config, as_json=json))


@quota.command()
def lost(*, tenant: Tenant = None, limit: Limit = 100, config: Config = None, json: Json = False) -> None:
    """List reservations whose owners died, the newest first; they are booked as used.

    Exit codes: 0 listed, 2 out of reach, refused, or wrongly configured.

    Example: ergon provider quota lost
    """
    raise typer.Exit(work.listed("lost", tenant, limit=limit, config=config, as_json=json))


@breaker.command("list")
def list_breakers(
    *, tenant: Tenant = None, provider: Only = None, limit: Limit = 1000, config: Config = None, json: Json = False
) -> None:
    """List breakers; one that is closed and has seen no fault is not there.

    Exit codes: 0 listed, 2 out of reach, refused, or wrongly configured.

    Example: ergon provider breaker list --provider payments
    """
    raise typer.Exit(work.listed("breakers", tenant, provider, limit=limit, config=config, as_json=json))


@breaker.command("force-open")
def force_open(
    name: Name,
    capability: Capability,
    *,
    tenant: OneTenant,
    lasts: Lasts,
    reason: Reason,
    actor: Actor,
    config: Config = None,
    json: Json = False,
) -> None:
    """Let nothing through to a provider, for some time.

    Exit codes: 0 done, 2 out of reach, refused, or wrongly configured; then nothing was changed.

    Example: ergon provider breaker force-open payments charging --tenant '*' --for 30m --reason "their maintenance"
    """
    done = work.Word("force_open", tenant, name, capability, actor=actor, reason=reason, seconds=lasts)
    raise typer.Exit(work.said(done, config=config, as_json=json))


@breaker.command()
def disable(
    name: Name,
    capability: Capability,
    *,
    tenant: OneTenant,
    lasts: Lasts,
    reason: Reason,
    actor: Actor,
    config: Config = None,
    json: Json = False,
) -> None:
    """Let everything through to a provider, whatever its breaker says, for some time.

    Exit codes: 0 done, 2 out of reach, refused, or wrongly configured; then nothing was changed.

    Example: ergon provider breaker disable payments charging --tenant acme --for 10m --reason "they say it is up"
    """
    done = work.Word("disable", tenant, name, capability, actor=actor, reason=reason, seconds=lasts)
    raise typer.Exit(work.said(done, config=config, as_json=json))


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
    """Let the breaker decide again.

    Exit codes: 0 done, 2 out of reach, refused, or wrongly configured; then nothing was changed.

    Example: ergon provider breaker lift payments charging --tenant acme --reason "over"
    """
    done = work.Word("lift", tenant, name, capability, actor=actor, reason=reason)
    raise typer.Exit(work.said(done, config=config, as_json=json))


@provider.command()
def overrides(*, tenant: Tenant = None, limit: Limit = 100, config: Config = None, json: Json = False) -> None:
    """List what operators have said, the newest first.

    Exit codes: 0 listed, 2 out of reach, refused, or wrongly configured.

    Example: ergon provider overrides --tenant acme
    """
    raise typer.Exit(work.listed("overrides", tenant, limit=limit, config=config, as_json=json))


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
    """Make the partitions of the next days and remove what is old; writers do it too, where their role may.

    Exit codes: 0 done, 1 somebody else was at it or used a table, so that something is left for the next time, 2 out of
    reach, refused, or wrongly configured.

    Example: ergon provider retention --rows 90
    """
    keep = {"ahead": ahead, "rows": rows, "minutes": minutes, "quotas": quotas}
    raise typer.Exit(work.tidied(keep, config=config, as_json=json))
