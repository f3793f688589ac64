"""Dead letters as a person or a program reads them; the payload only for whoever asks for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.cli.summary import tell
from ergon_framework.connectors.deadletters import DeadLetterRecord
from ergon_framework.connectors.encryption import hidden, missing_key
from ergon_framework.errors import to_one_line
from ergon_framework.failure import EDITED, Failure

#: The longest text in a cell of a list; `show` has the whole one.
CELL = 60
#: The longest payload that is shown; JSON has the whole one.
LONGEST = 10_000
_CONTENT = {"payload", "raw", "headers"}


def as_line(record: DeadLetterRecord, *, payload: bool) -> str:
    """*record* as one line of JSON; bytes are written in base64."""
    line = record.model_dump(mode="json", exclude=_CONTENT)
    if payload:
        line["headers"] = record.headers
        try:
            content = record.model_dump(mode="json", include=_CONTENT, fallback=repr)
            return json.dumps(line | content, allow_nan=False)
        except ValueError:  # what JSON has no words for, in an object that never crossed a wire
            line["payload"] = repr(record.payload)
    return json.dumps(line)


def show_list(records: Sequence[DeadLetterRecord], *, payload: bool) -> None:
    """Print one line each."""
    heads = ["place", "died", "id", "reason", "type", "attempts", "error", *(["payload"] if payload else [])]
    rows = [list(_cells(record, payload=payload)) for record in records]
    if sys.stdout.isatty():
        table = Table(*heads)
        for row in rows:
            # Text, because what a message carries is no markup.
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_one(record: DeadLetterRecord, *, payload: bool) -> None:
    """Print everything about *record*."""
    rows = [(what, clean(str(how), LONGEST)) for what, how in _facts(record) if how not in (None, "", ())]
    if payload:
        rows += [("header", clean(f"{name}: {value}", LONGEST)) for name, value in record.headers.items()]
        rows.append(("payload", clean(_payload(record), LONGEST)))
    tell(clean(record.id, LONGEST), rows)
    if record.failure is not None:
        show_traceback("traceback", record.failure.traceback)
        handler_error = record.failure.handler_error
        show_traceback("traceback of the exception handler", None if handler_error is None else handler_error.traceback)


def show_traceback(title: str, trace: str | None) -> None:
    """Print *trace* below its title, if there is one."""
    if trace:
        typer.echo(f"  {title}:")
        typer.echo("\n".join(f"    {clean(line, LONGEST)}" for line in trace.splitlines()))


def clean(text: str, longest: int) -> str:
    """*text* on one line, no longer than that, and with nothing in it that a terminal would obey."""
    short = text if len(text) <= longest else text[: longest - 1] + "…"
    return to_one_line(short)


def told(at: float, timespec: str = "seconds") -> str:
    """A moment as people read it, in UTC."""
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec=timespec).replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):  # some other program wrote it
        return str(at)


def _cells(record: DeadLetterRecord, *, payload: bool) -> Iterator[str]:
    failure = record.failure
    # Whole where it may be wanted for a filter, short where it is only to be read.
    yield from (record.place, told(record.at), *(clean(cell, LONGEST) for cell in (record.id, record.reason)))
    yield clean(record.envelope.type, LONGEST)
    yield str(record.envelope.attempts if failure is None else failure.attempts)
    yield "" if failure is None else clean(_error(failure), CELL)
    if payload:
        yield clean(_payload(record), CELL)


def _facts(record: DeadLetterRecord) -> Iterator[tuple[str, Any]]:
    envelope, failure = record.envelope, record.failure
    yield from (("queue", record.queue), ("place", record.place), ("died", told(record.at)), ("reason", record.reason))
    if failure is not None:
        yield from (("task", failure.task_name), ("step", failure.step), ("category", failure.category))
        yield "error", _error(failure)
        if failure.handler_error is not None:
            yield "handler error", failure.handler_error.error_message
        yield "attempts", failure.attempts
    yield "deliveries", record.deliveries
    yield "body", None if record.size is None else _unread(record.size)
    yield from ((name, getattr(envelope, name)) for name in ("source", "type", "key", "tenant", "correlation"))
    yield "causation", envelope.causation
    yield "created", None if envelope.created_at is None else told(envelope.created_at)
    yield "expires", None if envelope.expires_at is None else told(envelope.expires_at)
    yield "trace", record.trace_id
    for past in envelope.history if failure is None else failure.history:
        if past.code == EDITED:
            yield "edited", f"{told(past.at)} {past.error}"
            continue
        # As people count, and as the row above and ergon why do: the first is 1.
        yield f"attempt {past.attempt + 1}", f"{told(past.at)} {past.category} {past.code or ''} {past.error}"


def _error(failure: Failure) -> str:
    """Type and message; what was raised by others has its type in its message already."""
    kind, message = failure.error_type, failure.error_message
    return message if message.startswith(f"{kind}: ") else f"{kind}: {message}"


def _unread(size: int) -> str:
    return f"{size} bytes, not loaded"


def _payload(record: DeadLetterRecord) -> str:
    key_id = missing_key(record)
    if key_id is not None:
        return hidden(key_id)
    if record.size is not None:
        return _unread(record.size)
    if record.raw is not None:
        return repr(record.raw[:LONGEST])
    return record.payload if isinstance(record.payload, str) else _dumped(record.payload)


def _dumped(payload: Any) -> str:
    try:
        return json.dumps(payload, default=repr, ensure_ascii=False)
    except (TypeError, ValueError):  # keys that are no text, or a circle
        return repr(payload)
