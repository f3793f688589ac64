"""Exit codes and output of ``ergon dlq``, for people and programs; payloads only on request.

The handle of a dead letter, its identity in its store, is shown as its entry.
"""

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

from ergon_framework.cli.summary import print_rows
from ergon_framework.connectors.dead_letters import DeadLetterRecord
from ergon_framework.connectors.encryption import find_missing_key, format_placeholder
from ergon_framework.errors import to_one_line
from ergon_framework.failure import EDITED_CODE, Failure
from ergon_framework.runner.exit import ExitCode


class DlqExit(ExitCode):
    """Exit codes of ``ergon dlq`` and their meanings."""

    OK = 0, "done; letters that another operator moved count as done"
    FAILED = 1, "some moves failed, the dead letter was not found, or the broker did not answer"
    USAGE = 2, "the command line is invalid; nothing was moved"
    CANARY = 3, "the canary failed or timed out; the remaining letters were not moved"
    STOPPED = 130, "stopped by a signal; the remaining letters were not moved"


# -- output -----------------------------------------------------------------------------------------

#: Maximum length of the text in a cell of a list; `show` prints the whole text.
MAX_CELL_CHARS = 60
#: Maximum length of a payload in the output; JSON has the whole payload.
MAX_TEXT_CHARS = 10_000
_CONTENT_FIELDS = {"payload", "raw", "headers"}
#: Keys of a stored record that are printed under another name; a stored record has its handle as "place".
_JSON_KEYS = {"place": "entry", "at": "failed_at"}


def to_json_line(record: DeadLetterRecord, *, payload: bool) -> str:
    """Return *record* as one line of JSON; bytes are base64-encoded."""
    data = record.model_dump(mode="json", exclude=_CONTENT_FIELDS)
    data = {_JSON_KEYS.get(key, key): value for key, value in data.items()}
    if payload:
        data["headers"] = record.headers
        try:
            content = record.model_dump(mode="json", include=_CONTENT_FIELDS, fallback=repr)
            return json.dumps(data | content, allow_nan=False)
        except ValueError:  # not JSON-serializable: the object never went through a broker
            data["payload"] = repr(record.payload)
    return json.dumps(data)


def show_list(records: Sequence[DeadLetterRecord], *, payload: bool) -> None:
    """Print one line per record."""
    headings = ["entry", "failed at", "id", "reason", "type", "attempts", "error", *(["payload"] if payload else [])]
    rows = [list(_format_cells(record, payload=payload)) for record in records]
    if sys.stdout.isatty():
        table = Table(*headings)
        for row in rows:
            # Text, because message content may contain characters that rich reads as markup.
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_one(record: DeadLetterRecord, *, payload: bool) -> None:
    """Print all details of *record*."""
    rows = [
        (label, sanitize(str(detail), MAX_TEXT_CHARS))
        for label, detail in _list_details(record)
        if detail not in (None, "", ())
    ]
    if payload:
        rows += [("header", sanitize(f"{name}: {value}", MAX_TEXT_CHARS)) for name, value in record.headers.items()]
        rows.append(("payload", sanitize(_format_payload(record), MAX_TEXT_CHARS)))
    print_rows(sanitize(record.id, MAX_TEXT_CHARS), rows)
    if record.failure is not None:
        show_traceback("traceback", record.failure.traceback)
        handler_error = record.failure.handler_error
        show_traceback("traceback of the exception handler", None if handler_error is None else handler_error.traceback)


def show_traceback(title: str, trace: str | None) -> None:
    """Print *trace* below its title, if there is a trace."""
    if trace:
        typer.echo(f"  {title}:")
        typer.echo("\n".join(f"    {sanitize(line, MAX_TEXT_CHARS)}" for line in trace.splitlines()))


def sanitize(text: str, max_chars: int) -> str:
    """Return *text* on one line of at most *max_chars* characters, without terminal control characters."""
    truncated = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
    return to_one_line(truncated)


def format_time(timestamp: float, timespec: str = "seconds") -> str:
    """Format a timestamp as an ISO time in UTC."""
    try:
        return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec=timespec).replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):  # another program wrote an invalid timestamp
        return str(timestamp)


def _format_cells(record: DeadLetterRecord, *, payload: bool) -> Iterator[str]:
    failure = record.failure
    # Ids and reasons are not shortened, because they are copied into filters.
    yield from (
        record.handle,
        format_time(record.at),
        *(sanitize(cell, MAX_TEXT_CHARS) for cell in (record.id, record.reason)),
    )
    yield sanitize(record.envelope.type, MAX_TEXT_CHARS)
    yield str(record.envelope.attempts if failure is None else failure.attempts)
    yield "" if failure is None else sanitize(_format_error(failure), MAX_CELL_CHARS)
    if payload:
        yield sanitize(_format_payload(record), MAX_CELL_CHARS)


def _list_details(record: DeadLetterRecord) -> Iterator[tuple[str, Any]]:
    envelope, failure = record.envelope, record.failure
    yield from (
        ("queue", record.queue),
        ("entry", record.handle),
        ("failed at", format_time(record.at)),
        ("reason", record.reason),
    )
    if failure is not None:
        yield from (("task", failure.task_name), ("step", failure.step), ("category", failure.category))
        yield "error", _format_error(failure)
        if failure.handler_error is not None:
            yield "handler error", failure.handler_error.error_message
        yield "attempts", failure.attempts
    yield "deliveries", record.deliveries
    yield "size", None if record.size is None else _describe_unread(record.size)
    yield from ((name, getattr(envelope, name)) for name in ("source", "type", "key", "tenant", "correlation"))
    yield "causation", envelope.causation
    yield "created", None if envelope.created_at is None else format_time(envelope.created_at)
    yield "expires", None if envelope.expires_at is None else format_time(envelope.expires_at)
    yield "trace", record.trace_id
    for entry in envelope.history if failure is None else failure.history:
        if entry.code == EDITED_CODE:
            yield "edited", f"{format_time(entry.at)} {entry.error}"
            continue
        # Counted from 1, as in the attempts row and in ergon why.
        yield (
            f"attempt {entry.attempt + 1}",
            f"{format_time(entry.at)} {entry.category} {entry.code or ''} {entry.error}",
        )


def _format_error(failure: Failure) -> str:
    """Return type and message; the message of a third-party error already begins with its type."""
    type_name, message = failure.error_type, failure.error_message
    return message if message.startswith(f"{type_name}: ") else f"{type_name}: {message}"


def _describe_unread(size: int) -> str:
    return f"{size} bytes, not loaded"


def _format_payload(record: DeadLetterRecord) -> str:
    key_id = find_missing_key(record)
    if key_id is not None:
        return format_placeholder(key_id)
    if record.size is not None:
        return _describe_unread(record.size)
    if record.raw is not None:
        return repr(record.raw[:MAX_TEXT_CHARS])
    return record.payload if isinstance(record.payload, str) else _dump_json(record.payload)


def _dump_json(payload: Any) -> str:
    try:
        return json.dumps(payload, default=repr, ensure_ascii=False)
    except (TypeError, ValueError):  # non-text keys, or a circular reference
        return repr(payload)
