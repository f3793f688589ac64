"""The watchdog detects a blocked event loop and reports what blocks it."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import time
from dataclasses import dataclass
from threading import Event, Thread
from types import CodeType, FrameType
from typing import Any

from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.telemetry.names import LIBRARY, Field
from ergon_framework.telemetry.names import Event as Said
from ergon_framework.telemetry.options import get_options

#: Maximum number of functions of a stack that are reported.
MAX_FUNCTIONS = 5
#: Maximum seconds between two checks.
MAX_CHECK_INTERVAL_SECONDS = 1.0

_STEP_BY_METHOD = {
    "process_transaction": "process",
    "handle_transaction_success": "success",
    "handle_transaction_exception": "exception",
    "produce_transaction": "produce",
    "handle_produce_success": "success",
    "handle_produce_exception": "exception",
}


@dataclass(frozen=True, slots=True)
class EventLoopBlock:
    """What blocks the event loop: the step, if it is one of the task's, and the innermost functions. No values."""

    task: str
    step: str | None
    functions: tuple[str, ...]

    def __str__(self) -> str:
        subject = f"{self.step} of {self.task}" if self.step else f"something below {self.task}"
        return f"{subject}, in {' < '.join(self.functions)}" if self.functions else subject


class Watchdog:
    """Checks repeatedly whether the event loop responds; created on the loop's own thread.

    A loop that is blocked for longer than *limit* seconds is reported once per block in the log and in the metrics,
    and in ``blocked`` while the block lasts.
    """

    def __init__(self, task: Any, limit: float) -> None:
        self._task = task
        self._limit = limit
        self._check_interval = min(MAX_CHECK_INTERVAL_SECONDS, limit / 4)
        self._loop = asyncio.get_running_loop()
        self._thread_id = threading.get_ident()
        self._step_by_code = _find_step_codes(task)
        self._stopped = Event()
        self._registry = get_registry(get_options(task).meter_provider)
        self._counts = self._registry.new_loop_metrics(task.name, steps=(), success_steps=("process", "success"))
        self._since = 0.0
        self._block: EventLoopBlock | None = None

    def start(self) -> Watchdog:
        self._registry.open(self._counts)
        Thread(target=self._run_checks, name="ergon-watchdog", daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop the checks; the loop ends, and blocks from now on are not reported."""
        self._stopped.set()
        self._registry.close(self._counts)

    @property
    def blocked(self) -> str | None:
        """What blocks the event loop and for how long; None if nothing does."""
        block = self._block
        return (
            None if block is None else f"the event loop is held for {time.monotonic() - self._since:.0f} s by {block}"
        )

    def _run_checks(self) -> None:
        while not self._stopped.is_set():
            beat = Event()
            self._since = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(beat.set)
            except RuntimeError:
                return  # the loop is closed
            if not beat.wait(self._limit):
                self._report_block(beat)
            self._stopped.wait(self._check_interval)

    def _report_block(self, beat: Event) -> None:
        self._block = block = self._find_block()
        self._counts.add(names.BLOCKED, block.step or "")
        fields = {Field.TASK: block.task, Field.STEP: block.step}
        seconds = round(time.monotonic() - self._since, 3)
        details = {Field.FUNCTIONS: list(block.functions), Field.SECONDS: seconds}
        logs.log_event(logging.ERROR, Said.LOOP_BLOCKED, fields | details)
        while not beat.wait(self._check_interval) and not self._stopped.is_set():
            self._block = self._find_block()
        self._block = None
        if beat.is_set():
            logs.log_event(
                logging.INFO, Said.LOOP_FREE, fields | {Field.SECONDS: round(time.monotonic() - self._since, 3)}
            )

    def _find_block(self) -> EventLoopBlock:
        frame: FrameType | None = sys._current_frames().get(self._thread_id)  # noqa: SLF001 - the documented way to see another thread
        functions: list[str] = []
        step = None
        while frame is not None and step is None:
            step = self._step_by_code.get(frame.f_code)
            module = str(frame.f_globals.get("__name__", "?"))
            if not f"{module}.".startswith(f"{LIBRARY}.") and len(functions) < MAX_FUNCTIONS:
                functions.append(f"{module}.{frame.f_code.co_qualname}")
            frame = frame.f_back
        # Without a step of the task, the outer end of the stack is the event loop itself.
        return EventLoopBlock(self._task.name, step, tuple(functions))


def _find_step_codes(task: Any) -> dict[CodeType, str]:
    """Return the code objects of the task's own methods, which identify a step in a stack."""
    step_by_code = {}
    for method, step in _STEP_BY_METHOD.items():
        # A producer with a file input runs inside another task.
        function = getattr(type(getattr(task, "producer", task)), method, None)
        code = None if function is None else getattr(inspect.unwrap(function), "__code__", None)
        if code is not None:
            step_by_code[code] = step
    return step_by_code
