"""Output of commands on stderr: progress, log records, and the explanation of an error that ends a command.

Progress is a bar on a terminal, and periodic lines elsewhere. Log records are written as logfmt or as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ergon_framework.errors import ConnectionLostError, ErgonError, error_message, to_one_line
from ergon_framework.facts.replica_state import ReplicaState
from ergon_framework.redaction import redact_text
from ergon_framework.telemetry.logs import TransactionFilter, format_logfmt, get_event, get_fields, is_own
from ergon_framework.telemetry.redaction import redact

#: Seconds between two lines, and between two updates of a bar.
CATCHUP_LINE_SECONDS, CATCHUP_BAR_SECONDS = 5.0, 0.5
#: Maximum seconds to wait for the last update, which may be writing to a slow terminal.
CATCHUP_JOIN_SECONDS = 5.0
#: Lag in facts from which progress is shown; usually the lag is 0.
MIN_CATCHUP_FACTS = 1_000

#: Returns the current state of each replicated pair of zones.
States = Callable[[], Sequence[ReplicaState]]


@contextmanager
def catchup_progress(states: States) -> Iterator[None]:
    """Show the progress of fact replication, for each pair of zones while its lag is large."""
    stopped = threading.Event()
    render = _draw_catchup_bars if sys.stderr.isatty() else _print_catchup_lines
    thread = threading.Thread(target=render, args=(states, stopped), name="ergon-catchup", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(CATCHUP_JOIN_SECONDS)


def progress_of(state: ReplicaState) -> tuple[int, int] | None:
    """Return the number of copied facts and the total; return None if the lag is small."""
    if state.lag is None or state.lag.facts < MIN_CATCHUP_FACTS:
        return None
    return state.offset, state.offset + state.lag.facts


def _print_catchup_lines(states: States, stopped: threading.Event) -> None:
    while not stopped.wait(CATCHUP_LINE_SECONDS):
        for state in states():
            if (counts := progress_of(state)) is not None:
                typer.echo(f"ergon: {_format_pair(state)}: {counts[0]:,} of {counts[1]:,} facts", err=True)


def _draw_catchup_bars(states: States, stopped: threading.Event) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bars: dict[str, TaskID] = {}
        while not stopped.wait(CATCHUP_BAR_SECONDS):
            for state in states():
                name, counts = _format_pair(state), progress_of(state)
                if counts is None:
                    if name in bars:
                        progress.remove_task(bars.pop(name))
                    continue
                if name not in bars:
                    bars[name] = progress.add_task(name)
                progress.update(bars[name], completed=counts[0], total=counts[1])


def _format_pair(state: ReplicaState) -> str:
    return f"{state.pair.from_zone} to {state.pair.to_zone}"


# -- progress of uploads, downloads and reads -------------------------------------------------------

#: Seconds between two lines.
PROGRESS_LINE_SECONDS = 5.0


@contextmanager
def transfer_progress(
    label: str, total: int | None, *, unit: str = "bytes", clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the completed amount, in *unit*."""
    if not sys.stderr.isatty():
        yield _make_line_printer(label, total, unit, clock=clock)
        return
    count_columns = (DownloadColumn(), TransferSpeedColumn()) if unit == "bytes" else (MofNCompleteColumn(),)
    columns = TextColumn("{task.description}"), BarColumn(), *count_columns, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as display:
        bar = display.add_task(label, total=total)
        yield lambda completed: display.update(bar, completed=completed)


def _make_line_printer(
    label: str, total: int | None, unit: str, *, clock: Callable[[], float]
) -> Callable[[int], None]:
    last_printed_at = clock()

    def print_line(completed: int) -> None:
        nonlocal last_printed_at
        if clock() - last_printed_at >= PROGRESS_LINE_SECONDS:
            last_printed_at = clock()
            total_text = "" if total is None else f" of {total:,}"
            typer.echo(f"ergon: {label} {completed:,}{total_text} {unit}", err=True)

    return print_line


# -- logging ----------------------------------------------------------------------------------------

#: Libraries that log every connection step, and log as errors what the framework reports anyway.
_NOISY_LIBRARIES = ("pika",)


class KeyValueFormatter(logging.Formatter):
    """Format a record as one line of logfmt; a traceback follows in indented lines.

    Only the first line of a record begins without a space, so a log collector can tell records apart.
    """

    def format(self, record: logging.LogRecord) -> str:
        line, traceback = _split_record(record, self)
        return "\n".join([format_logfmt(line), *("  " + _to_line(each) for each in traceback.splitlines())])


def _to_line(text: str) -> str:
    """Return one line of a traceback with terminal control characters escaped."""
    return to_one_line(text.expandtabs(4))


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON, with a traceback as the field ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        line, traceback = _split_record(record, self)
        return json.dumps(line | {"traceback": traceback} if traceback else line, default=str)


def _split_record(record: logging.LogRecord, formatter: logging.Formatter) -> tuple[dict[str, Any], str]:
    """Return time, level, logger, event and fields of *record*, and its traceback and stack as text."""
    line: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": get_event(record),
    }
    traceback = record.exc_text or (formatter.formatException(record.exc_info) if record.exc_info else "")
    stack = formatter.formatStack(record.stack_info) if record.stack_info else ""
    fields = get_fields(record)
    if not is_own(record):  # the framework's events are redacted where they are logged
        line["event"] = redact_text(line["event"])
        fields = {name: redact(name, value) for name, value in fields.items()}
    # The first operand keeps the order; the last prevents a field from replacing time, level, logger or event.
    return line | fields | line, redact_text("\n".join(filter(None, [traceback, stack])))


def configure_logging(level: str, log_format: str = "text") -> None:
    """Log *level* and above to stderr, unless the program has already configured logging.

    Noisy libraries are logged at the level debug only.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else KeyValueFormatter())
    # It drops no record: it adds the current transaction to records that handlers log.
    handler.addFilter(TransactionFilter())
    logging.basicConfig(level=level, handlers=[handler])
    for library in map(logging.getLogger, _NOISY_LIBRARIES):
        if level != "DEBUG" and library.level == logging.NOTSET:
            library.setLevel(logging.CRITICAL)


# -- errors -----------------------------------------------------------------------------------------


def explain_error(error: ErgonError) -> str:
    """Return the message of *error*; if a server is unavailable, add a hint to run ``ergon doctor``."""
    message = error_message(error)
    return (
        f"{message} -- to find its setting and the remedy, run: ergon doctor" if _needs_doctor_hint(error) else message
    )


def _needs_doctor_hint(error: ErgonError) -> bool:
    # A message that already names a command of ergon needs no hint.
    return isinstance(error, ConnectionLostError) and "ergon " not in error_message(error)
