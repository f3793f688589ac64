"""Work of ``ergon executor run``: take over stdin and stdout, load the handlers, answer requests, and exit."""

from __future__ import annotations

import time

import typer

from ergon_framework.cli.logs import configure_logging
from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.executor.runtime import Runtime
from ergon_framework.executor.streams import ProtocolStreams
from ergon_framework.executor.watch import SignalWatcher
from ergon_framework.runner import exporting
from ergon_framework.runner.exits import RunExit
from ergon_framework.runner.leaving import flush_telemetry, force_exit_at_deadline
from ergon_framework.runner.loading import load_registry
from ergon_framework.runner.process import RunResult
from ergon_framework.runner.settings import load_settings
from ergon_framework.task.report import Report

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
        exporting.configure_otlp(name)
        runtime = Runtime(registry)
    except ConfigurationError as error:
        typer.echo(f"ergon: {error_message(error)}", err=True)
        return RunExit.USAGE

    def stop(reason: str) -> None:
        runtime.stop(reason)
        streams.stop()

    signal_watcher = SignalWatcher(stop, grace=grace)
    runtime.serve(streams)
    result = RunResult(Report(), deadline=time.monotonic() + EXIT_GRACE_SECONDS)
    force_exit_at_deadline(result)
    runtime.close()
    streams.close()
    flush_telemetry(result)
    signal_watcher.stop()
    return RunExit.OK
