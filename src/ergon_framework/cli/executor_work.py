"""What ``ergon executor run`` does: take the pipes over, load the handlers, answer, and be gone in time."""

from __future__ import annotations

import time

import typer

from ergon_framework.cli.logs import configure
from ergon_framework.errors import ConfigurationError, text
from ergon_framework.executor.runtime import Runtime
from ergon_framework.executor.streams import Streams
from ergon_framework.executor.watch import Watch
from ergon_framework.runner import exporting
from ergon_framework.runner.exits import Exit
from ergon_framework.runner.leaving import flush, guard
from ergon_framework.runner.loading import load_registry
from ergon_framework.runner.process import Ended
from ergon_framework.runner.settings import settings
from ergon_framework.task.report import Report

#: What the interpreter has for its own end: threads of handlers are not waited for any longer.
LAST = 2.0


def run_handlers(name: str, *, grace: float, log_level: str | None) -> int:
    """Serve the registry called *name* until there is nobody to serve; the exit code."""
    try:
        # First of all: code of users runs when the registry is loaded.
        streams = Streams.seize()
        found = settings(None)
        configure((log_level or found.logging.level).upper(), found.logging.format)
        registry = load_registry(name)
        # After the handlers are in, which may have set telemetry up themselves, and before the runtime asks for it.
        exporting.export(name)
        runtime = Runtime(registry)
    except ConfigurationError as error:
        typer.echo(f"ergon: {text(error)}", err=True)
        return Exit.USAGE

    def stop(reason: str) -> None:
        runtime.stop(reason)
        streams.stop()

    watch = Watch(stop, grace=grace)
    runtime.serve(streams)
    ended = Ended(Report(), deadline=time.monotonic() + LAST)
    guard(ended)
    runtime.close()
    streams.close()
    flush(ended)
    watch.over()
    return Exit.OK
