"""Output of facts, confirmations and lag for people and programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.cli.dlq_view import sanitize
from ergon_framework.facts.boundary import LogState
from ergon_framework.facts.model import FactConfirmation, StoredFact

#: Maximum length of an object in the output; JSON has the whole object.
_MAX_OBJECT_CHARS = 200
_HEADINGS = ("from", "to", "buffer", "retained", "last", "reader", "confirmed", "behind", "bytes", "oldest")


def confirmation_data(confirmation: FactConfirmation) -> dict[str, Any]:
    """Return a confirmation as plain data."""
    return {**asdict(confirmation), "buffer": confirmation.buffer.value}


def fact_to_json(stored: StoredFact) -> str:
    """Return all fields of a fact as one line of JSON."""
    envelope, fact = stored.envelope, stored.fact
    payload = {
        "offset": stored.offset,
        "epoch": stored.epoch,
        "digest": stored.digest,
        "stored_at": format_time(stored.stored_at_unix_ms),
        "message_id": envelope.message_id,
        "from_zone": envelope.from_zone,
        "to_zone": envelope.to_zone,
        "produced_at": format_time(envelope.produced_at_unix_ms),
        "correlation_id": envelope.correlation_id,
        "causation_id": envelope.causation_id,
        "labels": dict(envelope.labels),
        "subject": fact.subject,
        "predicate": fact.predicate,
        "object_json": fact.object_json,
    }
    return json.dumps(payload, ensure_ascii=False)


def format_fact(stored: StoredFact) -> str:
    """Format a fact as one readable line."""
    fact = stored.fact
    content = sanitize(f"{fact.subject} {fact.predicate} {fact.object_json}", _MAX_OBJECT_CHARS)
    message_id = sanitize(stored.envelope.message_id, _MAX_OBJECT_CHARS)
    return f"{stored.offset}  {format_time(stored.stored_at_unix_ms)}  {message_id}  {content}"


def logs_to_json_lines(logs: Sequence[LogState]) -> Iterator[str]:
    """Yield a line of JSON for each pair of zones."""
    for log in logs:
        payload = asdict(log) | {"buffer": log.buffer.value, "pair": log.pair._asdict()}
        payload["readers"] = {reader: reader_lag._asdict() for reader, reader_lag in log.readers.items()}
        yield json.dumps(payload, ensure_ascii=False)


def print_lag(logs: Sequence[LogState], *, now: float | None = None) -> None:
    """Print a line for each reader of each pair."""
    current_time = time.time() if now is None else now
    rows = [row for log in logs for row in _build_rows(log, current_time)]
    if sys.stdout.isatty():
        table = Table(*_HEADINGS)
        for row in rows:
            # Text, because names may contain characters that rich reads as markup.
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
    for row in (_HEADINGS, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _build_rows(log: LogState, now: float) -> Iterator[tuple[str, ...]]:
    retained = max(0, log.last - log.first + 1)
    prefix = (
        sanitize(log.pair.from_zone, 64),
        sanitize(log.pair.to_zone, 64),
        log.buffer.value,
        f"{retained:,}",
        f"{log.last:,}",
    )
    if not log.readers:
        yield (*prefix, "nobody yet", "", "", "", "")
    for reader, reader_lag in sorted(log.readers.items()):
        oldest = "" if reader_lag.since_unix_ms is None else f"{max(0.0, now - reader_lag.since_unix_ms / 1000):,.0f} s"
        yield (
            *prefix,
            sanitize(reader, 64),
            f"{reader_lag.offset:,}",
            f"{reader_lag.facts:,}",
            f"{reader_lag.bytes:,}",
            oldest,
        )


def format_time(unix_ms: int) -> str:
    """Format a timestamp in milliseconds as an ISO time in UTC."""
    try:
        timestamp = datetime.fromtimestamp(unix_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{unix_ms} ms"
    return timestamp.isoformat(timespec="milliseconds").replace("+00:00", "Z")
