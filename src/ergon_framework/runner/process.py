"""Process: one task in one process. It hears signals, has the loop drain, and is over in time.

The task runs on a thread of its own. The main thread does nothing but wait, so a signal is heard
whatever the task is doing, and a task that never ends cannot keep the process.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from signal import Signals
from threading import Thread
from typing import Any, TypeAlias

from ergon_framework.runner.exits import Exit, exit_of
from ergon_framework.runner.signals import heard
from ergon_framework.runner.stopping import Stopping
from ergon_framework.runner.tokens import Tokens
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.task.report import Report

#: How long after the grace settlements, connector and lifespan may still take; with LAST it stays below one second.
MARGIN = 0.7
#: What a process that leaves without its task has for its last words.
LAST = 0.1

Runnable: TypeAlias = Task | AsyncTask


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: with a report, an error, both, or by force. *deadline* is when the process must be gone."""

    report: Report | None
    error: BaseException | None = None
    forced: bool = False
    deadline: float = inf

    @property
    def exit(self) -> Exit:
        return exit_of(self.report, self.error, forced=self.forced)

    @property
    def left_behind(self) -> bool:
        """Whether something still runs that the interpreter must not wait for."""
        return self.forced or (self.report is not None and self.report.abandoned > 0)


@dataclass(frozen=True, slots=True)
class _Over:
    """The loop has ended; what was opened for it has not been closed yet."""

    report: Report | None


class Process:
    """Runs *task* until it ends, or until signals end it."""

    def __init__(
        self, task: Runnable, policy: ConsumerPolicy, *, on_signal: Callable[[Signals, int], None] | None = None
    ) -> None:
        consumer: Any = task
        self._task = consumer
        self._policy = policy
        self._on_signal = on_signal
        self._stopping = Stopping(consumer)
        self._tokens: Tokens[Signals | _Over | Ended] = Tokens()
        self._report: Report | None = None
        self._left = 0
        self._signals = 0
        self._deadline = inf

    def run(self) -> Ended:
        """Run the task; to be called in the main thread, because only that hears signals."""
        with heard(self._tokens):
            Thread(target=self._work, name="ergon-task", daemon=True).start()
            return self._watch()

    # -- the main thread ------------------------------------------------------------------------

    def _watch(self) -> Ended:
        while True:
            token = self._tokens.get(self._patience())
            if token is None:
                return Ended(self._report, forced=True, deadline=time.monotonic() + LAST)
            if isinstance(token, Ended):
                self._shorten(self._grace)
                return Ended(token.report or self._report, token.error, deadline=self._deadline)
            if isinstance(token, _Over):
                self._report = token.report
                self._shorten(self._grace)
            else:
                self._signalled(token)

    def _patience(self) -> float | None:
        return None if self._deadline == inf else max(0.0, self._deadline - time.monotonic())

    def _signalled(self, signal: Signals) -> None:
        self._signals += 1
        # A second signal ends the drain; what is left then is to settle and to close.
        self._shorten(self._grace if self._signals == 1 else 0.0)
        self._stopping.ask()
        if self._on_signal is not None:
            # Elsewhere: what it writes to may be blocked, and this thread keeps the time.
            Thread(target=self._on_signal, args=(signal, self._signals), daemon=True).start()

    @property
    def _grace(self) -> float:
        return self._policy.loop.drain_timeout

    def _shorten(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds + MARGIN)

    # -- the task's thread ----------------------------------------------------------------------

    def _work(self) -> None:
        try:
            report = self._work_async() if isinstance(self._task, AsyncTask) else self._consume()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread; it is handed on as data
            ended = Ended(getattr(error, "report", None), error)
        else:
            ended = Ended(report)
        self._tokens.put(ended)

    def _consume(self) -> Report:
        with self._task.opened():
            try:
                report: Report = self._task.consume_transactions(self._policy, gates=self._gates)
            except BaseException as error:
                self._over(getattr(error, "report", None))
                raise
            self._over(report)
            return report

    def _work_async(self) -> Report:
        runner = asyncio.Runner(loop_factory=_loop_factory())
        try:
            return runner.run(self._consume_async())
        finally:
            # Closing waits for every task; one that ignores its cancellation would be waited for in vain.
            if self._left == 0:
                runner.close()

    async def _consume_async(self) -> Report:
        async with self._task.opened():
            try:
                report: Report = await self._task.consume_transactions(self._policy, gates=self._gates)
            except BaseException as error:
                self._over(getattr(error, "report", None))
                raise
            self._over(report)
            return report

    def _over(self, report: Report | None) -> None:
        self._left = 0 if report is None else report.abandoned
        self._tokens.put(_Over(report))

    @property
    def _gates(self) -> tuple[Any, ...]:
        return self._stopping.gate, *self._task.gates


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The factory of uvloop if it is installed; None means asyncio's own."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return factory
