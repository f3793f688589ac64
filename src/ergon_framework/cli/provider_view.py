"""Output of ``ergon provider``: bars and colours on a terminal, plain columns elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.cli.dlq_view import sanitize

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
        return Text("no limit of its own", style="dim")
    share = quota.used_count / quota.limit_count if quota.limit_count else 1.0
    colour = "red" if quota.remaining_count <= 0 else "yellow" if share > _BAD_SHARE else "green"
    time_left = _format_duration((quota.window_end - now).total_seconds())
    return _draw_bar(share, colour) + Text(f" {quota.used_count:,}/{quota.limit_count:,}, {time_left} to go")


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
    """Print the rows that the operator listed."""
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
    """Print the result of retention."""
    if result.others:
        typer.echo("somebody else is at it")
    typer.echo(f"partitions made {len(result.made)}, dropped {len(result.dropped)}; rows removed {result.removed}")
    for name in result.left:
        typer.echo(f"left for the next time, because somebody uses it: {name}")


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
