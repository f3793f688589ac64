"""Event loops of a process: one that its async tasks share, and one for each isolated task.

Async tasks share an event loop on one thread, so that they can share clients. Each event loop has a watchdog, which
names the task whose handler blocks it.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from threading import Thread

from ergon_framework.runner.probes import Watchdog
from ergon_framework.runner.task_runner import TaskRunner


class EventLoopThread:
    """Runs async tasks on one event loop, on a thread of its own.

    *on_task_end* is called with each runner when its task has ended. *timeout* is the number of seconds that the event
    loop may be blocked before the process is not live; None disables the watchdog.
    """

    def __init__(
        self, runners: Sequence[TaskRunner], *, on_task_end: Callable[[TaskRunner], None], timeout: float | None
    ) -> None:
        self._runners = runners
        self._on_task_end = on_task_end
        self._timeout = timeout
        self._watchdog: Watchdog | None = None

    @property
    def blocked(self) -> str | None:
        """What blocks the event loop and for how long; None if nothing does."""
        return None if self._watchdog is None else self._watchdog.blocked

    def start(self) -> None:
        Thread(target=self._run, name="ergon-task", daemon=True).start()

    def _run(self) -> None:
        try:
            runner = asyncio.Runner(loop_factory=_loop_factory())
            runner.get_loop()  # before the coroutine exists, which would never run if this fails
            try:
                runner.run(self._run_tasks())
            finally:
                # Closing waits for every asyncio task; one that ignores its cancellation would block the exit.
                if not any(each.report is not None and each.report.still_running for each in self._runners):
                    runner.close()
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread; returned as data
            for each in self._runners:
                if each.result is None:
                    each.fail(error)
                    self._on_task_end(each)

    async def _run_tasks(self) -> None:
        if self._timeout is not None:
            self._watchdog = Watchdog([each.task for each in self._runners], self._timeout).start()
        try:
            await asyncio.gather(*map(self._run_task, self._runners))
        finally:
            if self._watchdog is not None:
                self._watchdog.stop()

    async def _run_task(self, runner: TaskRunner) -> None:
        await runner.run_async()
        self._on_task_end(runner)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop factory of uvloop if it is installed; None selects asyncio's own."""
    try:
        factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    except ImportError:
        return None
    return factory
