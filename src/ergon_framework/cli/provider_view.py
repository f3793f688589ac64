"""Providers as a person sees them: bars and colours on a terminal, plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.cli.dlq_view import clean

#: Cells of a bar, and the parts of a cell.
_WIDE = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"
#: The longest text in a cell.
_CELL = 60
_COLOURS = {"closed": "green", "half_open": "yellow", "open": "red"}
#: From these shares on something is bad, or no longer good.
_BAD, _WORSE = 0.9, 0.99


def show_health(found: Any) -> None:
    """Print a summary."""
    now = found.generated_at
    if not found.providers:
        typer.echo(f"{clean(found.tenant_id, _CELL)} has called no provider yet")
        return
    heads = (
        "provider",
        "capability",
        "breaker",
        "success, last hour",
        "p95",
        "quota used",
        "last error",
        "last success",
    )
    _show(heads, [_health(one, now) for one in found.providers], title=f"{found.tenant_id} at {_at(now)}")


def _health(one: Any, now: datetime) -> list[Text]:
    error = "" if one.last_error_at is None else f"{one.last_error_code} {_ago(one.last_error_at, now)}"
    return [
        _text(one.provider_name),
        _text(one.capability),
        Text(f"● {one.breaker_state}", style=_COLOURS.get(one.breaker_state, "")),
        _rate(one),
        _text("" if one.p95_latency_ms_1h is None else _latency(one.p95_latency_ms_1h)),
        _quota(one.quota, now),
        _text(error),
        _text("" if one.last_success_at is None else _ago(one.last_success_at, now)),
    ]


def _rate(one: Any) -> Text:
    rate: float | None = one.success_rate_1h
    if rate is None:
        # Quota and breaker may know of calls that no metrics were written for.
        recorded = one.last_success_at is not None or one.last_error_at is not None
        return Text("none in the last hour" if recorded else "not recorded", style="dim")
    colour = "red" if rate < _BAD else "yellow" if rate < _WORSE else "green"
    return _bar(rate, colour) + Text(f" {100 * rate:.1f} %")


def _quota(quota: Any, now: datetime) -> Text:
    if quota is None:
        return Text("no limit of its own", style="dim")
    share = quota.used_count / quota.limit_count if quota.limit_count else 1.0
    colour = "red" if quota.remaining_count <= 0 else "yellow" if share > _BAD else "green"
    left = _length((quota.window_end - now).total_seconds())
    return _bar(share, colour) + Text(f" {quota.used_count:,}/{quota.limit_count:,}, {left} to go")


def _bar(share: float, colour: str) -> Text:
    eighths = round(8 * _WIDE * min(1.0, max(0.0, share)))
    full, part = divmod(eighths, 8)
    return Text((_EIGHTHS[8] * full + _EIGHTHS[part] * (part > 0)).ljust(_WIDE), style=f"{colour} on grey23")


_COLUMNS: dict[str, tuple[str, ...]] = {
    "breakers": ("state", "consecutive_failures", "open_until", "override", "override_until"),
    "quotas": ("kind", "used_count", "limit_count", "remaining_count", "window_end", "last_exhausted_at"),
    "lost": ("id", "calls", "owner", "until", "created_at"),
    "overrides": ("at", "action", "calls", "until", "actor", "reason"),
}


def show_rows(what: str, rows: Sequence[Any]) -> None:
    """Print what the operator has read."""
    if not rows:
        typer.echo(f"no {what.replace('lost', 'lost reservations')}")
        return
    columns = _COLUMNS[what]
    cells = [
        [
            _text("*" if row.account.tenant_id is None else row.account.tenant_id),
            _text(row.account.provider_name),
            _text(row.account.capability),
            *(_cell(getattr(row, column)) for column in columns),
        ]
        for row in rows
    ]
    _show(("tenant", "provider", "capability", *(column.replace("_", " ") for column in columns)), cells)


def show_tidied(done: Any) -> None:
    """Print what retention did."""
    if done.others:
        typer.echo("somebody else is at it")
    typer.echo(f"partitions made {len(done.made)}, dropped {len(done.dropped)}; rows removed {done.removed}")
    for name in done.left:
        typer.echo(f"left for the next time, because somebody uses it: {name}")


# -- how it is laid out -------------------------------------------------------------------------------


def _show(heads: Iterable[str], rows: Sequence[Sequence[Text]], *, title: str | None = None) -> None:
    if sys.stdout.isatty():
        table = Table(*heads, title=None if title is None else Text(clean(title, _CELL)), title_justify="left")
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    if title is not None:
        typer.echo(clean(title, 2 * _CELL))
    # Blocks that are only drawn say nothing in a file.
    plain = [[" ".join(cell.plain.translate(_DRAWN).split()) for cell in row] for row in rows]
    lines = [list(heads), *plain]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


_DRAWN = str.maketrans("", "", "●" + _EIGHTHS[1:])


def _text(value: str) -> Text:
    # Text, because what a table holds is no markup.
    return Text(clean(value, _CELL))


def _cell(value: Any) -> Text:
    if value is None:
        return Text("")
    if isinstance(value, datetime):
        return Text(_at(value))
    return Text(str(value), style=_COLOURS[value]) if str(value) in _COLOURS else _text(str(value))


def _at(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _ago(moment: datetime, now: datetime) -> str:
    return f"{_length((now - moment).total_seconds())} ago"


def _length(seconds: float) -> str:
    """About how long, in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{max(0.0, seconds):.0f}s"


def _latency(ms: float) -> str:
    return f"{ms / 1000:.1f} s" if ms >= 10_000 else f"{ms:,.0f} ms"  # noqa: PLR2004 - from ten seconds on
