"""Work of ``ergon executor check``: run the conformance suite against an executor, and print the results."""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer

from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.finding import DocPage
from ergon_framework.runner.exits import ExitCode
from ergon_framework.testing.conformance.check import Result
from ergon_framework.testing.conformance.executor import QUESTIONS, ExecutorCheckResult, report, take


class ExecutorExit(ExitCode):
    """Exit codes of ``ergon executor check`` and their meanings."""

    PASSED = 0, "it passed every question"
    FAILED = 1, "it failed at least one question"
    USAGE = 2, "it cannot be started, or there is no such question"


def check_executor(
    command: Sequence[str], *, timeout: float, only: Sequence[str] | None, as_json: bool
) -> ExecutorExit:
    """Run the conformance suite against the executor that *command* starts; return the exit code."""
    try:
        results = take(command, patience=timeout, only=only, on_mark=None if as_json else _print_result)
    except (ConfigurationError, ValueError) as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        return ExecutorExit.USAGE
    summary = report(command, results)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        typer.echo(f"{summary['passed']} passed, {summary['failed']} failed, of {len(QUESTIONS)} questions")
        if any("handler_not_found: " in result.reason for result in results):
            hint = "the exam needs handlers of its own, exam.echo and so on"
            typer.echo(f"ergon: {hint}; see {DocPage.EXECUTORS.label}", err=True)
    return ExecutorExit.FAILED if summary["failed"] else ExecutorExit.PASSED


def _print_result(result: ExecutorCheckResult) -> None:
    check_name = result.question.replace("_", " ")
    if result.result is Result.PASSED:
        typer.echo(f"passed  {check_name}")
    else:
        typer.echo(f"FAILED  {check_name}: {result.reason}  [{', '.join(result.ids)}]")
