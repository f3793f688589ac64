"""Leaving: the last second of a process, which nothing may make longer."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from threading import Thread
from typing import Any

from ergon_framework.runner.process import Ended

#: The longest that telemetry is waited for, if the process has that long.
FLUSH = 5.0

#: Where OpenTelemetry's providers are found. Nothing is imported: what nobody imported, nobody set up.
_PROVIDERS = {
    "opentelemetry.trace": "get_tracer_provider",
    "opentelemetry.metrics": "get_meter_provider",
    "opentelemetry._logs": "get_logger_provider",
}


def guard(ended: Ended, *, leave: Callable[[int], Any] = os._exit) -> Thread:
    """Have the process gone by the deadline, whatever else still holds it."""

    def wait() -> None:
        time.sleep(max(0.0, ended.deadline - time.monotonic()))
        leave(ended.exit)

    thread = Thread(target=wait, name="ergon-guard", daemon=True)
    thread.start()
    return thread


def flush(ended: Ended) -> None:
    """Send what telemetry holds, as far as there is time."""
    seconds = min(FLUSH, ended.deadline - time.monotonic())
    millis = max(1, int(seconds * 1000))
    _within(seconds, lambda: [flushing(millis) for flushing in _flushings()])


def leave(ended: Ended) -> int:
    """The exit code; does not return if something still runs that the interpreter would wait for."""
    if ended.left_behind:
        _within(ended.deadline - time.monotonic(), _say)
        os._exit(ended.exit)
    return ended.exit


def _flushings() -> Iterator[Callable[[int], Any]]:
    for module, getter in _PROVIDERS.items():
        provider = getattr(sys.modules.get(module), getter, lambda: None)()
        # Only an SDK's provider has it; the API's own have nothing to flush.
        flushing = getattr(provider, "force_flush", None)
        if flushing is not None:
            yield flushing


def _say() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _within(seconds: float, action: Callable[[], Any]) -> None:
    """Perform *action* for at most *seconds*; an exporter or a pipe may block, and may fail."""

    def perform() -> None:
        with suppress(Exception):
            action()

    thread = Thread(target=perform, name="ergon-last", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
