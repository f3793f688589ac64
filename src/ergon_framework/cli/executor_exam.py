"""What ``ergon executor check`` does: have an executor take the exam, and tell the marks."""

from __future__ import annotations

import json
from collections.abc import Sequence

import typer

from ergon_framework.errors import ConfigurationError, text
from ergon_framework.finding import Page
from ergon_framework.runner.exits import ExitCode
from ergon_framework.testing.conformance.check import Result
from ergon_framework.testing.conformance.executor import QUESTIONS, Mark, report, take


class Exit(ExitCode):
    """Every exit code of ``ergon executor check`` with what it means."""

    PASSED = 0, "it passed every question"
    FAILED = 1, "it failed at least one question"
    USAGE = 2, "it cannot be started, or there is no such question"


def examine(command: Sequence[str], *, patience: float, only: Sequence[str] | None, as_json: bool) -> Exit:
    """Have the executor that *command* starts take the exam; the exit code."""
    try:
        marks = take(command, patience=patience, only=only, on_mark=None if as_json else _tell)
    except (ConfigurationError, ValueError) as error:
        typer.echo(f"ergon: {text(error)}", err=True)
        return Exit.USAGE
    found = report(command, marks)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        typer.echo(f"{found['passed']} passed, {found['failed']} failed, of {len(QUESTIONS)} questions")
        if any("handler_not_found: " in mark.reason for mark in marks):
            needs = "the exam needs handlers of its own, exam.echo and so on"
            typer.echo(f"ergon: {needs}; see {Page.EXECUTORS.named}", err=True)
    return Exit.FAILED if found["failed"] else Exit.PASSED


def _tell(mark: Mark) -> None:
    words = mark.question.replace("_", " ")
    if mark.result is Result.PASSED:
        typer.echo(f"passed  {words}")
    else:
        typer.echo(f"FAILED  {words}: {mark.reason}  [{', '.join(mark.ids)}]")
