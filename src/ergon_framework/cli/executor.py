"""Commands of ``ergon executor`` and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from ergon_framework.cli.executor_exam import check_executor
from ergon_framework.cli.executor_work import run_handlers
from ergon_framework.cli.run import LogLevel

executor = typer.Typer(
    help="Runs handlers for an orchestrator, and examines executors of any language.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@executor.command()
def run(
    *,
    handlers: Annotated[
        str, typer.Option(metavar="MODULE:REGISTRY", help="Where the handlers are, for example app:registry.")
    ],
    grace: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds that a running handler has after SIGTERM.")
    ] = 5.0,
    log_level: Annotated[LogLevel | None, typer.Option(help="The least that is logged. Default: info.")] = None,
) -> None:
    """Read requests from stdin, one per line, and write an outcome for each to stdout.

    Exits after the last answer when stdin is closed, immediately when the parent process has ended, and after SIGTERM,
    which cancels the running handler. Output of handlers goes to stderr.

    Example: ergon executor run --handlers app:registry
    """
    raise typer.Exit(run_handlers(handlers, grace=grace, log_level=log_level))


@executor.command()
def check(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What starts the executor.")],
    *,
    patience: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds it has for whatever it is asked, its start included.")
    ] = 10.0,
    only: Annotated[list[str] | None, typer.Option(metavar="QUESTION", help="Ask only this; may be repeated.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the marks as one line of JSON.")] = False,
) -> None:
    """Start an executor of any language repeatedly, and check whether it implements the protocol.

    It needs the eight handlers exam.echo, exam.fail and so on, which the page "Executors in your language" of the
    documentation describes. Exit codes: 0 passed, 1 at least one check failed, 2 the executor cannot be started.

    Example: ergon executor check -- node executor.mjs
    """
    raise typer.Exit(check_executor(command, timeout=patience, only=only, as_json=json))
