"""Summaries of a run: a table on a terminal, plain lines in a file, JSON for a program.

A run has one process, with its RunResult, or several under a supervisor, whose SupervisorResult has their reports as
plain data. In both, a report counts the transactions by outcome.
"""

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

from ergon_framework.errors import error_message, to_one_line
from ergon_framework.runner.exit import RunExit, exit_code_for
from ergon_framework.runner.process import RunResult
from ergon_framework.runner.supervisor import SupervisorResult
from ergon_framework.runner.task_runner import TaskResult
from ergon_framework.worker.report import Outcome, Report, StopReason

#: Maximum length of a message in the summary; the dead letter has the whole message.
MAX_MESSAGE_CHARS = 500

STOP_DESCRIPTIONS = {
    StopReason.EMPTY: "the queue was empty",
    StopReason.DONE: "the input was read to its end",
    StopReason.LIMIT: "the limit was reached",
    StopReason.STOP: "stopped by a signal",
    StopReason.TIMEOUT: "the loop timeout expired",
    StopReason.STALLED: "every slot was occupied by a handler that timed out",
    StopReason.FETCH: "fetching from the connector failed",
}


def show(result: RunResult) -> None:
    """Print the summary of each task: as a table on a terminal, as plain lines elsewhere."""
    for task in result.tasks:
        print_rows(task.name, list(_build_rows(task, forced=result.forced)))


def show_all(result: SupervisorResult) -> None:
    """Print the summary of several processes as one, for each task."""
    for data in _merge_tasks(result):
        print_rows(data["task"], list(_build_merged_rows(data)))


def print_rows(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print rows of two cells under a title: as a table on a terminal, as plain lines elsewhere.

    Line ends and control characters are escaped, so that every cell stays on one line.
    """
    title, rows = to_one_line(title), [(to_one_line(label), to_one_line(detail)) for label, detail in rows]
    if sys.stdout.isatty():
        table = Table("label", "detail", title=title, title_justify="left", show_header=False)
        for row in rows:
            # Text, because an error message may contain characters that rich reads as markup.
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    width = max(len(label) for label, _ in rows)
    typer.echo("\n".join([title, *(f"  {label:<{width}}  {detail}" for label, detail in rows)]))


def to_json_line(result: RunResult) -> str:
    """Return the report of one process as one line of JSON: that of its only task, or a list."""
    data = process_data(result)
    return json.dumps(data["tasks"][0] if len(result.tasks) == 1 else data)


def process_data(result: RunResult) -> dict[str, Any]:
    """Return the reports of all tasks of a process as plain data."""
    tasks = [report_data(task, forced=result.forced) for task in result.tasks]
    # Of all tasks together, so that a report never exceeds what a parent reads.
    remaining = MAX_MERGED_FAILURES
    for data in tasks:
        data["failures"] = data.get("failures", [])[:remaining]
        remaining -= len(data["failures"])
    return {"exit_code": int(result.exit), "tasks": tasks}


def report_data(task: TaskResult, *, forced: bool = False) -> dict[str, Any]:
    """Return the report of a task as plain data."""
    report = task.report
    exit_code = RunExit.FORCED if forced else exit_code_for(report, task.error)
    data: dict[str, Any] = {"task": task.name, "exit_code": int(exit_code)}
    if task.error is not None:
        data["error"] = f"{type(task.error).__name__}: {_format_error(task.error)}"
    if report is not None:
        data |= {
            "stop_reason": report.stop_reason,
            "started": report.started,
            "fetches": report.fetches,
            "empty_fetches": report.empty_fetches,
            "counts": report.counts,
            "rejected": report.rejected,
            "settled": report.settled,
            "still_running": report.still_running,
            "late_results": report.late_results,
            "released_started": report.released_started,
            "failures": [_failure_to_dict(outcome) for outcome in report.failures],
        }
    return data


#: Keys summed over processes, and keys whose counters are summed by name.
_SUMMED_KEYS = ("started", "fetches", "empty_fetches", "still_running", "late_results", "released_started")
_COUNTER_KEYS = ("counts", "rejected", "settled")
#: Maximum number of failures in the merged summary; the report of each process has at most 20.
MAX_MERGED_FAILURES = 100


def merge_reports(name: str, result: SupervisorResult) -> dict[str, Any]:
    """Merge the reports of several processes: into that of their only task, or a list; *name*: if there is none."""
    tasks = _merge_tasks(result) or [_merge_task(name, [], result)]
    if len(tasks) == 1:
        return tasks[0]
    data: dict[str, Any] = {"exit_code": int(result.exit)}
    if result.reason is not None:
        data["error"] = result.reason
    return data | {"processes": len(result.reports), "restarts": result.restarts, "tasks": tasks}


def _merge_tasks(result: SupervisorResult) -> list[dict[str, Any]]:
    reports_by_task: dict[str, list[dict[str, Any]]] = {}
    for process in result.reports:
        for report in process.get("tasks", ()):
            reports_by_task.setdefault(report["task"], []).append(report)
    return [_merge_task(name, reports, result) for name, reports in reports_by_task.items()]


def _merge_task(name: str, reports: Sequence[dict[str, Any]], result: SupervisorResult) -> dict[str, Any]:
    data: dict[str, Any] = {"task": name, "exit_code": int(result.exit)}
    if result.reason is not None:
        data["error"] = result.reason
    data |= {"processes": len(reports), "restarts": result.restarts}
    data["stop_reasons"] = dict(Counter(str(report.get("stop_reason") or "failed") for report in reports))
    data |= {key: sum(report.get(key, 0) for report in reports) for key in _SUMMED_KEYS}
    data |= {key: _sum_counters(report.get(key, {}) for report in reports) for key in _COUNTER_KEYS}
    data["failures"] = [failure for report in reports for failure in report.get("failures", ())][:MAX_MERGED_FAILURES]
    return data


def _sum_counters(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return dict(total)


def _build_merged_rows(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    descriptions = {stop_reason.value: description for stop_reason, description in STOP_DESCRIPTIONS.items()}
    yield "ended", data.get("error") or "; ".join(descriptions.get(reason, reason) for reason in data["stop_reasons"])
    yield "processes", f"{data['processes']}, restarts: {data['restarts']}"
    yield from ((kind, str(count)) for kind, count in data["counts"].items() if count)
    yield from ((f"rejected, {reason}", str(count)) for reason, count in data["rejected"].items())
    if data["released_started"]:
        yield "released after start", str(data["released_started"])
    if data["still_running"]:
        yield "still running", str(data["still_running"])
    for failure in data["failures"]:
        attempts_text = "1 attempt" if failure["attempts"] == 1 else f"{failure['attempts']} attempts"
        yield failure["transaction_id"], f"{failure['category']}: {failure['message']} ({attempts_text})"
        if failure.get("handler_error"):
            yield "", f"its exception handler failed: {failure['handler_error']}"


def _build_rows(task: TaskResult, *, forced: bool) -> Iterator[tuple[str, str]]:
    report = task.report
    yield "ended", _describe_stop(report, forced=forced)
    if report is None:
        return
    yield from ((kind.value, str(count)) for kind, count in report.counts.items() if count)
    yield from ((f"rejected, {reason}", str(count)) for reason, count in report.rejected.items())
    if report.released_started:
        yield "released after start", str(report.released_started)
    if report.still_running:
        yield "still running", str(report.still_running)
    yield from _build_failure_rows(report)


def _describe_stop(report: Report | None, *, forced: bool) -> str:
    if report is not None and report.stop_reason is not None and report.stop_reason in STOP_DESCRIPTIONS:
        return STOP_DESCRIPTIONS[report.stop_reason]
    # A forced exit does not wait for the task, so there is no complete report.
    return "exited while the task was still running" if forced else "failed"


def _build_failure_rows(report: Report) -> Iterator[tuple[str, str]]:
    for outcome in report.failures:
        attempts_text = "1 attempt" if outcome.attempts == 1 else f"{outcome.attempts} attempts"
        yield outcome.transaction.id, f"{outcome.category}: {_format_error(outcome.error)} ({attempts_text})"
        if outcome.handler_error is not None:
            yield "", f"its exception handler failed: {_format_error(outcome.handler_error)}"


def _failure_to_dict(outcome: Outcome) -> dict[str, Any]:
    return {
        "transaction_id": outcome.transaction.id,
        "kind": outcome.kind,
        "category": outcome.category,
        "code": None if outcome.error is None else outcome.error.code,
        "message": _format_error(outcome.error),
        "handler_error": None if outcome.handler_error is None else _format_error(outcome.handler_error),
        "attempts": outcome.attempts,
        "still_running": outcome.still_running,
    }


def _format_error(error: BaseException | None) -> str:
    return "" if error is None else error_message(error)[:MAX_MESSAGE_CHARS]
