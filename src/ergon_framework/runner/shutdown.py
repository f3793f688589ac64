"""Exit of a process within its deadline, which nothing may extend."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

from ergon_framework.runner.process import RunResult

#: Maximum seconds for flushing telemetry, if the process has that long.
FLUSH_TIMEOUT_SECONDS = 5.0

#: The modules of OpenTelemetry's providers. Nothing is imported: a module that is not imported is not set up.
_PROVIDERS = {
    "opentelemetry.trace": "get_tracer_provider",
    "opentelemetry.metrics": "get_meter_provider",
    "opentelemetry._logs": "get_logger_provider",
}


def force_exit_at_deadline(result: RunResult, *, force_exit: Callable[[int], Any] = os._exit) -> Thread:
    """Exit the process at the deadline, even if other threads are still running."""

    def wait() -> None:
        time.sleep(max(0.0, result.deadline - time.monotonic()))
        force_exit(result.exit)

    thread = Thread(target=wait, name="ergon-guard", daemon=True)
    thread.start()
    return thread


def flush_telemetry(result: RunResult) -> None:
    """Flush telemetry within the remaining time."""
    seconds = min(FLUSH_TIMEOUT_SECONDS, result.deadline - time.monotonic())
    millis = max(1, int(seconds * 1000))
    _run_within(seconds, lambda: [force_flush(millis) for force_flush in _find_flush_calls()])


def exit_process(result: RunResult) -> int:
    """Return the exit code; exit the process instead if work still runs that the interpreter would wait for."""
    if result.has_abandoned_work:
        _run_within(result.deadline - time.monotonic(), _flush_output)
        os._exit(result.exit)
    return result.exit


def _find_flush_calls() -> Iterator[Callable[[int], Any]]:
    for module, getter in _PROVIDERS.items():
        provider = getattr(sys.modules.get(module), getter, lambda: None)()
        # Only an SDK's provider has it; the providers of the API have nothing to flush.
        force_flush = getattr(provider, "force_flush", None)
        if force_flush is not None:
            yield force_flush


def _flush_output() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _run_within(seconds: float, action: Callable[[], Any]) -> None:
    """Perform *action* for at most *seconds*; an exporter or a pipe may block, and may fail."""

    def perform() -> None:
        with suppress(Exception):
            action()

    thread = Thread(target=perform, name="ergon-last", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
