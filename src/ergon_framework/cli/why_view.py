"""Output of ``ergon why``: a history, the current status, and the remedy.

A history has the recorded events and the state of one transaction, job, provider call or fact. It is a table on a
terminal, and plain columns elsewhere. A location has the state with its times: ``since`` when it holds or at which it
ended, ``until`` when it ends (a delay or a lease), as far as a source has recorded them.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.cli.dlq_view import format_time, sanitize, show_traceback
from ergon_framework.history import History, HistoryEvent, Location, WorkKind, WorkState
from ergon_framework.jobs.model import QUEUE_PREFIX


def describe_status(history: History, *, now: float) -> str:
    """Return the current state in a phrase without a subject."""
    describe = _DESCRIPTIONS.get((history.kind, history.location.state), _describe_default)
    return describe(history, history.location, now)


def suggest_remedy(history: History, names: Mapping[str, str]) -> str:
    """Return a command or what to check; empty if there is nothing to do.

    *names* maps each queue to the name of its connector on the command line.
    """
    suggest = _REMEDIES.get((history.kind, history.location.state))
    return "" if suggest is None else suggest(history, names.get(history.where))


# -- status -----------------------------------------------------------------------------------------

_FINAL_STATES: Final = frozenset({WorkState.SUCCEEDED, WorkState.FAILED, WorkState.CANCELLED, WorkState.KILLED})


def _describe_default(_history: History, location: Location, _now: float) -> str:
    time_text = _format_at(location) if location.state in _FINAL_STATES else _format_since(location)
    status = f"{location.state.value}{time_text}"
    return f"{status}: {location.details}" if location.details else status


def _describe_ready(history: History, location: Location, now: float) -> str:
    waited = "" if location.since is None else f" for {format_duration(now - location.since)}"
    return f"queued in {history.where}{waited}, waiting for a worker"


def _describe_delayed(history: History, location: Location, now: float) -> str:
    return f"delayed in {history.where} until {_format_moment(location.until)}{_format_remaining(location.until, now)}"


def _describe_blocked(history: History, _location: Location, _now: float) -> str:
    return f"waiting in {history.where} behind an older transaction of its key {history.attributes.get('key', '')!r}"


def _describe_claimed(history: History, location: Location, now: float) -> str:
    if location.until is None or location.until <= now:
        return (
            f"claimed by {location.holder}, whose lease has expired; another worker of {history.where} receives the "
            "redelivery"
        )
    return f"claimed by {location.holder} until {_format_moment(location.until)}, unless the lease is renewed"


def _describe_queued(history: History, _location: Location, _now: float) -> str:
    return f"in {history.where}: ready, delayed or claimed by a worker"


def _describe_dead(history: History, location: Location, _now: float) -> str:
    return f"dead letter of {history.where}{_format_since(location)}: {location.details}"


def _describe_done(history: History, location: Location, _now: float) -> str:
    return f"succeeded in {history.where}{_format_at(location)}, not run again"


def _describe_pending(history: History, location: Location, now: float) -> str:
    if orchestrator := history.attributes.get("orchestrator"):
        return f"waiting for an orchestrator: {orchestrator}"
    if location.until is None or location.until <= now:
        earlier_count = history.attributes.get("due before this job")
        ahead_text = f" behind {earlier_count} of its kind" if earlier_count else ""
        return f"waiting for its turn{ahead_text}, due since {_format_moment(location.until)}"
    return f"delayed until {_format_moment(location.until)}{_format_remaining(location.until, now)}"


def _describe_retrying(_history: History, location: Location, _now: float) -> str:
    return f"retry expected after the attempt at {_format_moment(location.since)} ({location.details}), none recorded"


def _describe_dropped(_history: History, location: Location, _now: float) -> str:
    return f"fact deleted by retention; id known since {_format_moment(location.since)}"


_DESCRIPTIONS: Final[dict[tuple[WorkKind, WorkState], Callable[[History, Location, float], str]]] = {
    (WorkKind.TRANSACTION, WorkState.READY): _describe_ready,
    (WorkKind.TRANSACTION, WorkState.DELAYED): _describe_delayed,
    (WorkKind.TRANSACTION, WorkState.BLOCKED_BY_KEY): _describe_blocked,
    (WorkKind.TRANSACTION, WorkState.CLAIMED): _describe_claimed,
    (WorkKind.TRANSACTION, WorkState.QUEUED): _describe_queued,
    (WorkKind.TRANSACTION, WorkState.DEAD): _describe_dead,
    (WorkKind.TRANSACTION, WorkState.DONE): _describe_done,
    (WorkKind.JOB, WorkState.PENDING): _describe_pending,
    (WorkKind.CALL, WorkState.RETRYING): _describe_retrying,
    (WorkKind.FACT, WorkState.DROPPED): _describe_dropped,
}


# -- remedies ---------------------------------------------------------------------------------------


def _suggest_replay(history: History, name: str | None) -> str:
    if history.where.startswith(QUEUE_PREFIX):
        return f"ergon job replay {_quote_id(history)}"
    # The option and its value are one argument, because an id may begin with a dash.
    return f"fix the cause, then run: ergon dlq replay {name or 'MODULE:NAME'} --id={_quote_id(history)}"


def _suggest_job_replay(history: History, _name: str | None) -> str:
    return f"fix the cause, then run: ergon job replay {_quote_id(history)}"


def _suggest_job_result(history: History, _name: str | None) -> str:
    return f"show the result: ergon job show {_quote_id(history)}"


def _suggest_worker(_history: History, name: str | None) -> str:
    # The name of a queue alone is not a task.
    task = name if name is not None and ":" in name else "MODULE:TASK"
    return f"nothing if a worker runs; otherwise: ergon run {task}"


def _suggest_orchestrator(history: History, _name: str | None) -> str:
    if "orchestrator" in history.attributes:
        return f"start an orchestrator that serves {history.where!r}, or run: ergon job cancel {_quote_id(history)}"
    if running := history.attributes.get("running of this kind"):
        return f"nothing; {running} jobs of this kind are running"
    return "nothing if an orchestrator runs and its executors start (see ergon doctor); otherwise run: ergon run"


def _suggest_outcome_check(history: History, _name: str | None) -> str:
    return f"check with the provider whether {history.where} was executed before any other action"


def _suggest_provider_check(history: History, _name: str | None) -> str:
    tenant = shlex.quote(str(history.attributes.get("tenant", "")))
    return f"check the provider: ergon provider health --tenant {tenant}"


_REMEDIES: Final[dict[tuple[WorkKind, WorkState], Callable[[History, str | None], str]]] = {
    (WorkKind.TRANSACTION, WorkState.DEAD): _suggest_replay,
    (WorkKind.TRANSACTION, WorkState.READY): _suggest_worker,
    (WorkKind.JOB, WorkState.FAILED): _suggest_job_replay,
    (WorkKind.JOB, WorkState.SUCCEEDED): _suggest_job_result,
    (WorkKind.JOB, WorkState.PENDING): _suggest_orchestrator,
    (WorkKind.CALL, WorkState.UNKNOWN): _suggest_outcome_check,
    (WorkKind.CALL, WorkState.FAILED): _suggest_provider_check,
    (WorkKind.CALL, WorkState.DEAD): _suggest_provider_check,
}


# -- formatting -------------------------------------------------------------------------------------


def _quote_id(history: History) -> str:
    return shlex.quote(history.id)


def _format_since(location: Location) -> str:
    return "" if location.since is None else f" since {_format_moment(location.since)}"


def _format_at(location: Location) -> str:
    return "" if location.since is None else f" at {_format_moment(location.since)}"


def _format_moment(timestamp: float | None) -> str:
    return "an unknown time" if timestamp is None else format_time(timestamp)


def _format_remaining(until: float | None, now: float) -> str:
    return "" if until is None or until <= now else f", {format_duration(until - now)} from now"


def format_duration(seconds: float) -> str:
    """Format an approximate duration in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


# -- output -----------------------------------------------------------------------------------------

#: Maximum length of the text in a cell, and of other texts.
_MAX_CELL_CHARS = 200
_MAX_TEXT_CHARS = 600
_HEADINGS = ("time", "event", "result", "details")
_POLICY_PREFIX = "policy."
_COLOURS: dict[str, str] = {
    **dict.fromkeys(("success", WorkState.SUCCEEDED, WorkState.DONE), "green"),
    **dict.fromkeys(
        ("failed", "dead_letter", "SYSTEM", "TIMEOUT", "BUSINESS", WorkState.DEAD, WorkState.FAILED), "red"
    ),
    **dict.fromkeys(
        ("retry", WorkState.DELAYED, WorkState.RETRYING, WorkState.UNKNOWN, WorkState.BLOCKED_BY_KEY), "yellow"
    ),
    **dict.fromkeys((WorkState.CLAIMED, WorkState.RUNNING), "cyan"),
}


def show(history: History, *, providers: Sequence[str], status: str, remedy: str) -> None:
    """Print one history, a line for each of its *providers*, its status, and the remedy."""
    title = f"{history.kind.value} {truncate(history.id)} in {truncate(history.where)}"
    details = list(_build_details(history))
    rows = [_format_cells(event) for event in history.events]
    provider_lines = [sanitize(line, _MAX_TEXT_CHARS) for line in providers]
    status = sanitize(status, _MAX_TEXT_CHARS)
    on_terminal = sys.stdout.isatty()
    (_print_table if on_terminal else _print_plain)(title, details, rows)
    for event in history.events:
        show_traceback(f"traceback, {sanitize(event.event, _MAX_CELL_CHARS)}", event.traceback)
    if on_terminal:
        _print_conclusion(provider_lines, state=history.location.state, status=status)
    else:
        for line in provider_lines:
            typer.echo(f"  provider: {line}")
        typer.echo(f"  status: {status}")
    if remedy:
        typer.echo(f"  next: {sanitize(remedy, _MAX_TEXT_CHARS)}")


def truncate(text: str) -> str:
    """Return *text* shortened to fit on one line."""
    return sanitize(text, _MAX_TEXT_CHARS)


def _print_plain(title: str, details: list[tuple[str, str]], rows: list[tuple[str, ...]]) -> None:
    typer.echo(title)
    width = max((len(label) for label, _ in details), default=0)
    for label, detail in details:
        typer.echo(f"  {label:<{width}}  {detail}")
    if rows:
        widths = [max(map(len, column)) for column in zip(_HEADINGS, *rows, strict=True)]
        for row in (_HEADINGS, *rows):
            cells = (cell.ljust(cell_width) for cell, cell_width in zip(row, widths, strict=True))
            typer.echo("  " + "  ".join(cells).rstrip())


def _print_table(title: str, details: list[tuple[str, str]], rows: list[tuple[str, ...]]) -> None:
    console = Console()
    console.print(Text(title, style="bold"))
    for label, detail in details:
        console.print(Text(f"  {label}: ", style="dim") + Text(detail))
    if rows:
        table = Table(*_HEADINGS)
        for row in rows:
            # Text, because an error message may contain characters that rich reads as markup.
            table.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
        console.print(table)


def _print_conclusion(provider_lines: list[str], *, state: WorkState, status: str) -> None:
    console = Console()
    for line in provider_lines:
        console.print(Text("  provider: ", style="bold") + Text(line))
    console.print(Text("  status: ", style="bold") + Text(status, style=_COLOURS.get(state, "")))


def _build_details(history: History) -> Iterator[tuple[str, str]]:
    policy_values = []
    for name, value in history.attributes.items():
        if name.startswith(_POLICY_PREFIX):
            policy_values.append(f"{name.removeprefix(_POLICY_PREFIX)} {_format_value(value)}")
        else:
            yield sanitize(name, _MAX_CELL_CHARS), sanitize(_format_value(value), _MAX_CELL_CHARS)
    if policy_values:
        yield "policy", ", ".join(policy_values)


def _format_cells(event: HistoryEvent) -> tuple[str, ...]:
    values = ", ".join(f"{name} {_format_value(value)}" for name, value in event.values.items())
    detail = sanitize(event.details, _MAX_TEXT_CHARS)
    if values:
        detail = f"{detail} ({sanitize(values, _MAX_CELL_CHARS)})" if detail else sanitize(values, _MAX_CELL_CHARS)
    time_text = "" if event.at is None else format_time(event.at, "milliseconds")
    return time_text, sanitize(event.event, _MAX_CELL_CHARS), sanitize(event.result, _MAX_CELL_CHARS), detail


def _format_value(value: str | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
