"""The watchdog: notices that something holds the event loop, and says what it is."""

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
from ergon_framework.telemetry.metrics import registry_of
from ergon_framework.telemetry.names import LIBRARY, Field
from ergon_framework.telemetry.names import Event as Said
from ergon_framework.telemetry.options import options_of

#: How many functions of a stack are named.
FRAMES = 5
#: How often it looks, at most.
LOOK = 1.0

_STEPS = {
    "process_transaction": "process",
    "handle_transaction_success": "success",
    "handle_transaction_exception": "exception",
    "produce_transaction": "produce",
    "handle_produce_success": "success",
    "handle_produce_exception": "exception",
}


@dataclass(frozen=True, slots=True)
class Block:
    """What holds the event loop: the step, if it is one of the task's, and the innermost functions. No values."""

    task: str
    step: str | None
    functions: tuple[str, ...]

    def __str__(self) -> str:
        what = f"{self.step} of {self.task}" if self.step else f"something below {self.task}"
        return f"{what}, in {' < '.join(self.functions)}" if self.functions else what


class Watchdog:
    """Asks the event loop for a sign of life, over and over; made on the loop's own thread.

    One that is held for longer than *limit* seconds is told once per time, in the log and in the
    metrics, and is seen in ``blocked`` for as long as it lasts.
    """

    def __init__(self, task: Any, limit: float) -> None:
        self._task = task
        self._limit = limit
        self._look = min(LOOK, limit / 4)
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._codes = _codes(task)
        self._over = Event()
        self._registry = registry_of(options_of(task).meter_provider)
        self._counts = self._registry.counts(task.name, steps=(), everyday=("process", "success"))
        self._since = 0.0
        self._block: Block | None = None

    def start(self) -> Watchdog:
        self._registry.open(self._counts)
        Thread(target=self._watch, name="ergon-watchdog", daemon=True).start()
        return self

    def stop(self) -> None:
        """The loop ends; what it does from now on is nobody's business."""
        self._over.set()
        self._registry.close(self._counts)

    @property
    def blocked(self) -> str | None:
        """What holds the event loop and for how long; None when nothing does."""
        block = self._block
        return (
            None if block is None else f"the event loop is held for {time.monotonic() - self._since:.0f} s by {block}"
        )

    def _watch(self) -> None:
        while not self._over.is_set():
            beat = Event()
            self._since = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(beat.set)
            except RuntimeError:
                return  # it is closed
            if not beat.wait(self._limit):
                self._held(beat)
            self._over.wait(self._look)

    def _held(self, beat: Event) -> None:
        self._block = block = self._seen()
        self._counts.add(names.BLOCKED, block.step or "")
        fields = {Field.TASK: block.task, Field.STEP: block.step}
        seconds = round(time.monotonic() - self._since, 3)
        said = {Field.FUNCTIONS: list(block.functions), Field.SECONDS: seconds}
        logs.say(logging.ERROR, Said.LOOP_BLOCKED, fields | said)
        while not beat.wait(self._look) and not self._over.is_set():
            self._block = self._seen()
        self._block = None
        if beat.is_set():
            logs.say(logging.INFO, Said.LOOP_FREE, fields | {Field.SECONDS: round(time.monotonic() - self._since, 3)})

    def _seen(self) -> Block:
        frame: FrameType | None = sys._current_frames().get(self._ident)  # noqa: SLF001 - the documented way to see another thread
        functions: list[str] = []
        step = None
        while frame is not None and step is None:
            step = self._codes.get(frame.f_code)
            module = str(frame.f_globals.get("__name__", "?"))
            if not f"{module}.".startswith(f"{LIBRARY}.") and len(functions) < FRAMES:
                functions.append(f"{module}.{frame.f_code.co_qualname}")
            frame = frame.f_back
        # Without a step of the task's the outer end of the stack is the event loop itself.
        return Block(self._task.name, step, tuple(functions))


def _codes(task: Any) -> dict[CodeType, str]:
    """The code of the task's own methods, by which they are known again in a stack."""
    found = {}
    for method, step in _STEPS.items():
        # A producer that reads an input runs inside a task of its own.
        written = getattr(type(getattr(task, "producer", task)), method, None)
        code = None if written is None else getattr(inspect.unwrap(written), "__code__", None)
        if code is not None:
            found[code] = step
    return found
