"""Summaries: a table for a person, lines for a file, JSON for a program."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ergon_framework.errors import text, to_one_line
from ergon_framework.runner.process import Ended
from ergon_framework.runner.supervisor import Ran
from ergon_framework.task.report import End, Outcome, Report

#: The longest message that is repeated; the whole one is in the dead letter.
LONGEST = 500

WHY = {
    End.EMPTY: "the queue was empty",
    End.DONE: "the input was read to its end",
    End.LIMIT: "the limit was reached",
    End.STOP: "stopped by a signal",
    End.TIMEOUT: "the loop's time was over",
    End.STALLED: "every slot was held by a handler that timed out",
    End.FETCH: "the connector could not be read",
}


def show(name: str, ended: Ended) -> None:
    """Print the summary: as a table on a terminal, as plain lines elsewhere."""
    tell(name, list(_rows(ended)))


def show_all(name: str, ran: Ran) -> None:
    """Print the summary of several processes as one."""
    tell(name, list(_rows_of_all(summed(name, ran))))


def tell(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of two cells under a title: as a table on a terminal, as plain lines elsewhere.

    Line ends and control characters are escaped, so that a cell starts no line of its own.
    """
    title, rows = to_one_line(title), [(to_one_line(what), to_one_line(how)) for what, how in rows]
    if sys.stdout.isatty():
        table = Table("what", "how", title=title, title_justify="left", show_header=False)
        for row in rows:
            # Text, because what an error says is no markup.
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    width = max(len(what) for what, _ in rows)
    typer.echo("\n".join([title, *(f"  {what:<{width}}  {how}" for what, how in rows)]))


def as_line(name: str, ended: Ended) -> str:
    """The report as one line of JSON."""
    return json.dumps(told(name, ended))


def told(name: str, ended: Ended) -> dict[str, Any]:
    """The report as plain data."""
    report = ended.report
    line: dict[str, Any] = {"task": name, "exit_code": int(ended.exit)}
    if ended.error is not None:
        line["error"] = f"{type(ended.error).__name__}: {_said(ended.error)}"
    if report is not None:
        line |= {
            "end": report.end,
            "started": report.started,
            "fetches": report.fetches,
            "empty_fetches": report.empty_fetches,
            "counts": report.counts,
            "refused": report.refused,
            "settled": report.settled,
            "abandoned": report.abandoned,
            "fenced": report.fenced,
            "released_started": report.released_started,
            "failures": [_failure(outcome) for outcome in report.failures],
        }
    return line


#: What is added up over processes, and what is added up by name.
_SUMS = ("started", "fetches", "empty_fetches", "abandoned", "fenced", "released_started")
_TALLIES = ("counts", "refused", "settled")
#: How many failures of several processes are repeated.
FAILURES = 100


def summed(name: str, ran: Ran) -> dict[str, Any]:
    """The reports of several processes as one."""
    parts = ran.reports
    line: dict[str, Any] = {"task": name, "exit_code": int(ran.exit)}
    if ran.why is not None:
        line["error"] = ran.why
    line |= {"processes": len(parts), "restarts": ran.restarts}
    line["ends"] = dict(Counter(str(part.get("end") or "failed") for part in parts))
    line |= {key: sum(part.get(key, 0) for part in parts) for key in _SUMS}
    line |= {key: _added(part.get(key, {}) for part in parts) for key in _TALLIES}
    line["failures"] = [failure for part in parts for failure in part.get("failures", ())][:FAILURES]
    return line


def _added(tallies: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for tally in tallies:
        total.update(tally)
    return dict(total)


def _rows_of_all(line: dict[str, Any]) -> Iterator[tuple[str, str]]:
    words = {end.value: why for end, why in WHY.items()}
    yield "ended", line.get("error") or "; ".join(words.get(end, end) for end in line["ends"])
    yield "processes", f"{line['processes']}, replaced {line['restarts']}"
    yield from ((kind, str(count)) for kind, count in line["counts"].items() if count)
    yield from ((f"refused, {reason}", str(count)) for reason, count in line["refused"].items())
    if line["released_started"]:
        yield "released, started", str(line["released_started"])
    if line["abandoned"]:
        yield "still running", str(line["abandoned"])
    for failure in line["failures"]:
        tries = "1 attempt" if failure["attempts"] == 1 else f"{failure['attempts']} attempts"
        yield failure["transaction_id"], f"{failure['category']}: {failure['message']} ({tries})"
        if failure.get("handler_error"):
            yield "", f"its exception handler failed: {failure['handler_error']}"


def _rows(ended: Ended) -> Iterator[tuple[str, str]]:
    report = ended.report
    yield "ended", _why(ended)
    if report is None:
        return
    yield from ((kind.value, str(count)) for kind, count in report.counts.items() if count)
    yield from ((f"refused, {reason}", str(count)) for reason, count in report.refused.items())
    if report.released_started:
        yield "released, started", str(report.released_started)
    if report.abandoned:
        yield "still running", str(report.abandoned)
    yield from _failures(report)


def _why(ended: Ended) -> str:
    report = ended.report
    if report is not None and report.end is not None and report.end in WHY:
        return WHY[report.end]
    return "left without the task" if ended.forced else "failed"


def _failures(report: Report) -> Iterator[tuple[str, str]]:
    for outcome in report.failures:
        tries = "1 attempt" if outcome.attempts == 1 else f"{outcome.attempts} attempts"
        yield outcome.transaction.id, f"{outcome.category}: {_said(outcome.error)} ({tries})"
        if outcome.handler_error is not None:
            yield "", f"its exception handler failed: {_said(outcome.handler_error)}"


def _failure(outcome: Outcome) -> dict[str, Any]:
    return {
        "transaction_id": outcome.transaction.id,
        "kind": outcome.kind,
        "category": outcome.category,
        "code": None if outcome.error is None else outcome.error.code,
        "message": _said(outcome.error),
        "handler_error": None if outcome.handler_error is None else _said(outcome.handler_error),
        "attempts": outcome.attempts,
        "still_running": outcome.still_running,
    }


def _said(error: BaseException | None) -> str:
    return "" if error is None else text(error)[:LONGEST]
