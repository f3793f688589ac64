"""Output of ``ergon why``: a history, one sentence about the current state, and advice for the operator.

The history is a table on a terminal, and plain columns elsewhere.
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


def describe_state(history: History, *, now: float) -> str:
    """Return one sentence about the current state."""
    sentence = _SENTENCES.get((history.kind, history.place.state), _describe_default)
    return sentence(history, history.place, now)


def suggest_action(history: History, names: Mapping[str, str]) -> str:
    """Return a command or what to check; empty if there is nothing to do.

    *names* maps each queue to the name of its connector on the command line.
    """
    advice = _ADVICE.get((history.kind, history.place.state))
    return "" if advice is None else advice(history, names.get(history.where))


# -- sentences --------------------------------------------------------------------------------------


def _describe_default(_history: History, location: Location, _now: float) -> str:
    verb = "has" if location.state in (WorkState.SUCCEEDED, WorkState.FAILED) else "is"
    sentence = f"it {verb} {location.state.value}{_format_since(location)}"
    return f"{sentence}: {location.words}" if location.words else sentence


def _describe_ready(history: History, location: Location, now: float) -> str:
    waited = "" if location.since is None else f", for {format_duration(now - location.since)} now"
    return f"it is ready in {history.where} and waits for a worker{waited}"


def _describe_delayed(history: History, location: Location, now: float) -> str:
    return f"it waits in {history.where} until {_format_moment(location.until)}{_format_remaining(location.until, now)}"


def _describe_blocked(history: History, _location: Location, _now: float) -> str:
    return f"it waits in {history.where} behind an older transaction of its key {history.about.get('key', '')!r}"


def _describe_claimed(history: History, location: Location, now: float) -> str:
    if location.until is None or location.until <= now:
        return f"{location.holder} claimed it and is gone; another worker of {history.where} will redeliver it"
    return f"{location.holder} has claimed it until {_format_moment(location.until)} unless the lease is renewed"


def _describe_queued(history: History, _location: Location, _now: float) -> str:
    return f"it is in {history.where}: ready, delayed or claimed by a worker"


def _describe_dead(history: History, location: Location, _now: float) -> str:
    return f"it is a dead letter of {history.where}{_format_since(location)}: {location.words}"


def _describe_done(history: History, location: Location, _now: float) -> str:
    return f"it has succeeded in {history.where}{_format_since(location)}, and is not run again"


def _describe_pending(history: History, location: Location, now: float) -> str:
    if orchestrator := history.about.get("orchestrator"):
        return f"it waits for an orchestrator: {orchestrator}"
    if location.until is None or location.until <= now:
        earlier_count = history.about.get("due before it")
        ahead_text = f" behind {earlier_count} of its kind" if earlier_count else ""
        return f"it waits for its turn{ahead_text}; it has been due since {_format_moment(location.until)}"
    return f"it waits until {_format_moment(location.until)}{_format_remaining(location.until, now)}"


def _describe_retrying(_history: History, location: Location, _now: float) -> str:
    moment = _format_moment(location.since)
    return f"the attempt at {moment} is to be retried ({location.words}), no retry recorded"


def _describe_dropped(_history: History, location: Location, _now: float) -> str:
    return f"its id is known since {_format_moment(location.since)}; retention has dropped the fact itself"


_SENTENCES: Final[dict[tuple[WorkKind, WorkState], Callable[[History, Location, float], str]]] = {
    (WorkKind.TRANSACTION, WorkState.READY): _describe_ready,
    (WorkKind.TRANSACTION, WorkState.DELAYED): _describe_delayed,
    (WorkKind.TRANSACTION, WorkState.BLOCKED_BY_KEY): _describe_blocked,
    (WorkKind.TRANSACTION, WorkState.HELD): _describe_claimed,
    (WorkKind.TRANSACTION, WorkState.QUEUED): _describe_queued,
    (WorkKind.TRANSACTION, WorkState.DEAD): _describe_dead,
    (WorkKind.TRANSACTION, WorkState.DONE): _describe_done,
    (WorkKind.JOB, WorkState.PENDING): _describe_pending,
    (WorkKind.CALL, WorkState.RETRYING): _describe_retrying,
    (WorkKind.FACT, WorkState.DROPPED): _describe_dropped,
}


# -- advice -----------------------------------------------------------------------------------------


def _suggest_replay(history: History, name: str | None) -> str:
    if history.where.startswith(QUEUE_PREFIX):
        return f"ergon job replay {_quote_id(history)}"
    # The option and its value are one argument, because an id may begin with a dash.
    return f"fix the cause, then run: ergon dlq replay {name or 'MODULE:NAME'} --id={_quote_id(history)}"


def _suggest_job_replay(history: History, _name: str | None) -> str:
    return f"fix the cause, then run: ergon job replay {_quote_id(history)}"


def _suggest_job_result(history: History, _name: str | None) -> str:
    return f"its result: ergon job show {_quote_id(history)}"


def _suggest_worker(_history: History, name: str | None) -> str:
    # The name of a queue alone is not a task.
    task = name if name is not None and ":" in name else "MODULE:TASK"
    return f"nothing if a worker runs; otherwise: ergon run {task}"


def _suggest_orchestrator(history: History, _name: str | None) -> str:
    if "orchestrator" in history.about:
        return f"start an orchestrator that serves {history.where!r}, or run: ergon job cancel {_quote_id(history)}"
    if running := history.about.get("running of its kind"):
        return f"nothing; {running} jobs of its kind are running now"
    return "nothing if an orchestrator runs and its executors start (see ergon doctor); otherwise run: ergon run"


def _suggest_outcome_check(history: History, _name: str | None) -> str:
    return f"check with the provider whether {history.where} was executed before any other action"


def _suggest_provider_check(history: History, _name: str | None) -> str:
    tenant = shlex.quote(str(history.about.get("tenant", "")))
    return f"check the provider: ergon provider health --tenant {tenant}"


_ADVICE: Final[dict[tuple[WorkKind, WorkState], Callable[[History, str | None], str]]] = {
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


def _format_moment(timestamp: float | None) -> str:
    return "an unknown time" if timestamp is None else format_time(timestamp)


def _format_remaining(until: float | None, now: float) -> str:
    return "" if until is None or until <= now else f", {format_duration(until - now)} from now"


def format_duration(seconds: float) -> str:
    """Format an approximate duration in its largest unit."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} seconds"


# -- output -----------------------------------------------------------------------------------------

#: Maximum length of the text in a cell, and of other texts.
_MAX_CELL_CHARS = 200
_MAX_TEXT_CHARS = 600
_HEADINGS = ("time", "what", "verdict", "how")
_POLICY_PREFIX = "policy."
_COLOURS: dict[str, str] = {
    **dict.fromkeys(("success", WorkState.SUCCEEDED, WorkState.DONE), "green"),
    **dict.fromkeys(
        ("failed", "dead_letter", "SYSTEM", "TIMEOUT", "BUSINESS", WorkState.DEAD, WorkState.FAILED), "red"
    ),
    **dict.fromkeys(
        ("retry", WorkState.DELAYED, WorkState.RETRYING, WorkState.UNKNOWN, WorkState.BLOCKED_BY_KEY), "yellow"
    ),
    **dict.fromkeys((WorkState.HELD, WorkState.RUNNING), "cyan"),
}


def show(history: History, *, providers: Sequence[str], sentence: str, advice: str) -> None:
    """Print one history, a line for each of its *providers*, its current state, and the advice."""
    title = f"{history.kind.value} {truncate(history.id)} in {truncate(history.where)}"
    details = list(_build_details(history))
    rows = [_format_cells(event) for event in history.events]
    provider_lines = [sanitize(line, _MAX_TEXT_CHARS) for line in providers]
    sentence = sanitize(sentence, _MAX_TEXT_CHARS)
    on_terminal = sys.stdout.isatty()
    (_print_table if on_terminal else _print_plain)(title, details, rows)
    for event in history.events:
        show_traceback(f"traceback, {sanitize(event.what, _MAX_CELL_CHARS)}", event.traceback)
    if on_terminal:
        _print_conclusion(provider_lines, state=history.place.state, sentence=sentence)
    else:
        for line in provider_lines:
            typer.echo(f"  provider: {line}")
        typer.echo(f"  now: {sentence}")
    if advice:
        typer.echo(f"  next: {sanitize(advice, _MAX_TEXT_CHARS)}")


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


def _print_conclusion(provider_lines: list[str], *, state: WorkState, sentence: str) -> None:
    console = Console()
    for line in provider_lines:
        console.print(Text("  provider: ", style="bold") + Text(line))
    console.print(Text("  now: ", style="bold") + Text(sentence, style=_COLOURS.get(state, "")))


def _build_details(history: History) -> Iterator[tuple[str, str]]:
    policy_values = []
    for name, value in history.about.items():
        if name.startswith(_POLICY_PREFIX):
            policy_values.append(f"{name.removeprefix(_POLICY_PREFIX)} {_format_value(value)}")
        else:
            yield sanitize(name, _MAX_CELL_CHARS), sanitize(_format_value(value), _MAX_CELL_CHARS)
    if policy_values:
        yield "policy", ", ".join(policy_values)


def _format_cells(event: HistoryEvent) -> tuple[str, ...]:
    values = ", ".join(f"{name} {_format_value(value)}" for name, value in event.values.items())
    detail = sanitize(event.words, _MAX_TEXT_CHARS)
    if values:
        detail = f"{detail} ({sanitize(values, _MAX_CELL_CHARS)})" if detail else sanitize(values, _MAX_CELL_CHARS)
    time_text = "" if event.at is None else format_time(event.at, "milliseconds")
    return time_text, sanitize(event.what, _MAX_CELL_CHARS), sanitize(event.verdict, _MAX_CELL_CHARS), detail


def _format_value(value: str | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
