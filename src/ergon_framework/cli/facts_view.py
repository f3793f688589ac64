"""Facts, confirmations and lag as a person or a program reads them."""

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

from ergon_framework.cli.dlq_view import clean
from ergon_framework.facts.boundary import LogState
from ergon_framework.facts.model import FactConfirmation, StoredFact

#: The longest object that is shown; JSON has the whole one.
_LONGEST = 200
_HEADS = ("from", "to", "buffer", "retained", "last", "reader", "confirmed", "behind", "bytes", "oldest")


def confirmation(found: FactConfirmation) -> dict[str, Any]:
    """As plain data."""
    return {**asdict(found), "buffer": found.buffer.value}


def fact_line(stored: StoredFact) -> str:
    """All of a fact as one line of JSON."""
    envelope, fact = stored.envelope, stored.fact
    told = {
        "offset": stored.offset,
        "epoch": stored.epoch,
        "digest": stored.digest,
        "stored_at": at(stored.stored_at_unix_ms),
        "message_id": envelope.message_id,
        "from_zone": envelope.from_zone,
        "to_zone": envelope.to_zone,
        "produced_at": at(envelope.produced_at_unix_ms),
        "correlation_id": envelope.correlation_id,
        "causation_id": envelope.causation_id,
        "labels": dict(envelope.labels),
        "subject": fact.subject,
        "predicate": fact.predicate,
        "object_json": fact.object_json,
    }
    return json.dumps(told, ensure_ascii=False)


def fact_words(stored: StoredFact) -> str:
    """A fact as a line that a person reads."""
    fact = stored.fact
    words = clean(f"{fact.subject} {fact.predicate} {fact.object_json}", _LONGEST)
    return f"{stored.offset}  {at(stored.stored_at_unix_ms)}  {clean(stored.envelope.message_id, _LONGEST)}  {words}"


def log_lines(logs: Sequence[LogState]) -> Iterator[str]:
    """A line of JSON for each pair of zones."""
    for log in logs:
        told = asdict(log) | {"buffer": log.buffer.value, "pair": log.pair._asdict()}
        told["readers"] = {reader: behind._asdict() for reader, behind in log.readers.items()}
        yield json.dumps(told, ensure_ascii=False)


def show_lag(logs: Sequence[LogState], *, now: float | None = None) -> None:
    """Print a line for each reader of each pair."""
    moment = time.time() if now is None else now
    rows = [row for log in logs for row in _rows(log, moment)]
    if sys.stdout.isatty():
        table = Table(*_HEADS)
        for row in rows:
            # Text, because names are no markup.
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]
    for row in (_HEADS, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _rows(log: LogState, now: float) -> Iterator[tuple[str, ...]]:
    retained = max(0, log.last - log.first + 1)
    head = (
        clean(log.pair.from_zone, 64),
        clean(log.pair.to_zone, 64),
        log.buffer.value,
        f"{retained:,}",
        f"{log.last:,}",
    )
    if not log.readers:
        yield (*head, "nobody yet", "", "", "", "")
    for reader, behind in sorted(log.readers.items()):
        oldest = "" if behind.since_unix_ms is None else f"{max(0.0, now - behind.since_unix_ms / 1000):,.0f} s"
        yield (*head, clean(reader, 64), f"{behind.offset:,}", f"{behind.facts:,}", f"{behind.bytes:,}", oldest)


def at(unix_ms: int) -> str:
    """A moment in UTC."""
    try:
        moment = datetime.fromtimestamp(unix_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{unix_ms} ms"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
