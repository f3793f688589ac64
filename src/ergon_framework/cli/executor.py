"""``ergon executor``: answer requests on stdin and stdout, or run the conformance suite against an executor.

An executor is a process, in any language, that runs handlers for an orchestrator: it reads requests from stdin, one per
line, and writes an outcome for each to stdout. A registry has the handlers of a Python executor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from ergon_framework.cli.options import duration_option
from ergon_framework.cli.output import configure_logging
from ergon_framework.cli.run import LogLevelOption
from ergon_framework.diagnostics import DocPage
from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.executors.runtime import Runtime
from ergon_framework.executors.runtime_io import ProtocolStreams, SignalWatcher
from ergon_framework.runner import otlp
from ergon_framework.runner.exit import ExitCode, RunExit
from ergon_framework.runner.loading import load_registry
from ergon_framework.runner.process import RunResult
from ergon_framework.runner.settings import load_settings
from ergon_framework.runner.shutdown import flush_telemetry, force_exit_at_deadline
from ergon_framework.runner.task_runner import TaskResult
from ergon_framework.testing.conformance.check import CheckOutcome
from ergon_framework.testing.conformance.executor.suite import CHECKS, ExecutorCheckResult, report, run_suite
from ergon_framework.worker.report import Report


class ExecutorExit(ExitCode):
    """Exit codes of ``ergon executor check`` and their meanings."""

    PASSED = 0, "all checks passed"
    FAILED = 1, "at least one check failed"
    USAGE = 2, "the executor cannot be started, or the check does not exist"


def check_executor(
    command: Sequence[str], *, timeout: float, only: Sequence[str] | None, as_json: bool
) -> ExecutorExit:
    """Run the conformance suite against the executor that *command* starts; return the exit code."""
    try:
        results = run_suite(command, timeout=timeout, only=only, on_check_end=None if as_json else _print_result)
    except (ConfigurationError, ValueError) as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        return ExecutorExit.USAGE
    summary = report(command, results)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        typer.echo(f"{summary['passed']} passed, {summary['failed']} failed, of {len(CHECKS)} checks")
        if any("handler_not_found: " in result.reason for result in results):
            hint = "the conformance suite needs the test handlers conformance.echo and so on"
            typer.echo(f"ergon: {hint}; see {DocPage.EXECUTORS.label}", err=True)
    return ExecutorExit.FAILED if summary["failed"] else ExecutorExit.PASSED


def _print_result(result: ExecutorCheckResult) -> None:
    check_name = result.check.replace("_", " ")
    if result.result is CheckOutcome.PASSED:
        typer.echo(f"passed  {check_name}")
    else:
        typer.echo(f"FAILED  {check_name}: {result.reason}  [{', '.join(result.ids)}]")


# -- run --------------------------------------------------------------------------------------------

#: Seconds for the interpreter's exit; handler threads that are still running then are abandoned.
EXIT_GRACE_SECONDS = 2.0


def run_handlers(name: str, *, grace: float, log_level: str | None) -> int:
    """Serve the registry called *name* until stdin is closed or a signal arrives; return the exit code."""
    try:
        # First, because loading the registry runs user code, which may print.
        streams = ProtocolStreams.take_over_stdio()
        settings = load_settings(None)
        configure_logging((log_level or settings.logging.level).upper(), settings.logging.format)
        registry = load_registry(name)
        # After loading the handlers, which may configure telemetry, and before the runtime uses it.
        otlp.configure_otlp(name)
        runtime = Runtime(registry)
    except ConfigurationError as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        return RunExit.USAGE

    def stop(reason: str) -> None:
        runtime.stop(reason)
        streams.stop()

    signal_watcher = SignalWatcher(stop, grace=grace)
    runtime.serve(streams)
    # The functions that end a process take the result of a run; here it has only a deadline.
    result = RunResult((TaskResult("executor", Report()),), deadline=time.monotonic() + EXIT_GRACE_SECONDS)
    force_exit_at_deadline(result)
    runtime.close()
    streams.close()
    flush_telemetry(result)
    signal_watcher.stop()
    return RunExit.OK


# -- commands ---------------------------------------------------------------------------------------

executor = typer.Typer(
    help="""Run handlers for an orchestrator, and check executors in any language.

An orchestrator, started with ergon run MODULE:ORCHESTRATOR, starts executors by a command such as ergon executor run,
and sends them jobs.""",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@executor.command()
def run(
    *,
    handlers: Annotated[
        str, typer.Option(metavar="MODULE:REGISTRY", help="Registry of handlers, for example app:registry.")
    ],
    grace: Annotated[
        float, duration_option("Time for the running handler after SIGTERM.", minimum=0, maximum=3600)
    ] = "5s",  # type: ignore[assignment]  # typer parses the default too
    log_level: LogLevelOption = None,
) -> None:
    """Read requests from stdin, one per line, and write an outcome for each to stdout.

    The executor exits after the last outcome when stdin is closed, and immediately when the parent process has ended.
    SIGTERM asks the running handler to stop; after --grace the executor exits anyway. Output of handlers goes to
    stderr.

    Exit codes: 0 ended cleanly, 2 invalid option, configuration or registry, 70 exited while a handler was still
    running: --grace expired, a second signal arrived, or the parent process ended.

    Example: ergon executor run --handlers app:registry
    """
    raise typer.Exit(run_handlers(handlers, grace=grace, log_level=log_level))


@executor.command()
def check(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Command that starts the executor.")],
    *,
    timeout: Annotated[
        float,
        duration_option("Timeout of each check, including the executor's start.", minimum=0.1, maximum=600),
    ] = "10s",  # type: ignore[assignment]  # typer parses the default too
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Only this check; repeatable.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the results as one line of JSON.")] = False,
) -> None:
    """Run the conformance suite against an executor in any language.

    The suite starts the executor repeatedly. The executor must have the eight conformance.* handlers that the
    documentation page "Executors in your language" describes.

    Exit codes: 0 passed, 1 at least one check failed, 2 invalid option, or executor not started.

    Example: ergon executor check -- node executor.mjs
    """
    raise typer.Exit(check_executor(command, timeout=timeout, only=only, as_json=json))
