"""The running loops of a task (consume loops and produce calls): registration, stopping and state.

The state is for probes, the health checks of a process. The module also computes the end of the drain, the time in
which a loop that ends waits for its running work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from ergon_framework.worker.report import StopReason
from ergon_framework.worker.solo import SoloRun


class DrainRules(Protocol):
    """The part of a loop's policy that ``drain_end`` reads, in seconds.

    ``drain_timeout`` is the time for running work after a stop, ``timeout_drain`` that after the loop's own timeout.
    """

    @property
    def drain_timeout(self) -> float: ...
    @property
    def timeout_drain(self) -> float: ...


def drain_end(loop: DrainRules, end: StopReason, *, now: float, deadline: float) -> float:
    """Return the end of the drain that begins at *now*; *end* is the reason why the loop ends.

    *deadline* is the end of the loop's timeout, which bounds the drain of a stop too.
    """
    bound = deadline + loop.timeout_drain
    return bound if end is StopReason.TIMEOUT else min(now + loop.drain_timeout, bound)


class RunningLoop(Protocol):
    """A running loop, as probes see it: whether it can start work, why it fetches nothing, and its transactions."""

    @property
    def live(self) -> bool: ...

    @property
    def not_fetching_reason(self) -> str | None: ...

    @property
    def in_flight(self) -> int: ...


class RunningLoops:
    """The running loops of one task; any thread may stop them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[object, tuple[RunningLoop, Callable[[], None]]] = {}
        self._wakes: dict[object, Callable[[], None]] = {}
        #: Coordinates the loops of all tasks of a process; None for a task that runs by itself.
        self.solo_run: SoloRun | None = None
        #: Called once, after the first fetch of a loop that returned transactions, and before the first one starts.
        self.on_first_fetch: Callable[[], None] | None = None

    def note_fetch(self) -> None:
        """Note that a loop has fetched transactions."""
        callback, self.on_first_fetch = self.on_first_fetch, None
        if callback is not None:
            callback()

    @contextmanager
    def track(
        self, running: RunningLoop, stop: Callable[[], None], *, wake: Callable[[], None] | None = None
    ) -> Iterator[None]:
        """Track *running* while the block runs; *wake* makes the loop poll again if it idles."""
        token = object()
        with self._lock:
            self._running[token] = running, stop
            if wake is not None:
                self._wakes[token] = wake
        try:
            yield
        finally:
            with self._lock:
                del self._running[token]
                self._wakes.pop(token, None)

    def stop(self) -> None:
        """Make every running loop drain and end; after a second call they end immediately."""
        with self._lock:
            stops = [stop for _, stop in self._running.values()]
        for stop in stops:
            stop()

    def wake(self) -> None:
        """Make every idle loop call its gates again."""
        with self._lock:
            wakes = list(self._wakes.values())
        for wake in wakes:
            # A closed event loop raises; then there is no loop left to wake.
            with suppress(RuntimeError):
                wake()

    @property
    def live(self) -> bool:
        """Whether every loop can still start work."""
        with self._lock:
            return all(running.live for running, _ in self._running.values())

    @property
    def not_fetching_reasons(self) -> list[str] | None:
        """Why loops fetch nothing, one reason each; None if no loop runs."""
        with self._lock:
            if not self._running:
                return None
            return [
                reason for running, _ in self._running.values() if (reason := running.not_fetching_reason) is not None
            ]

    @property
    def in_flight(self) -> int:
        """The number of transactions that the loops have fetched and that have no outcome yet."""
        with self._lock:
            return sum(running.in_flight for running, _ in self._running.values())


def share_running_loops(task: object, owner: object) -> None:
    """Count the loops of *task* as those of *owner*, so that a stop or a probe of *owner* covers them."""
    vars(task)["_ergon_loops"] = running_loops(owner)


def running_loops(task: object) -> RunningLoops:
    """Return the running loops of *task*. The task object holds them, because a mixin has no constructor.

    They belong to the object and not to its value: two equal tasks have separate loops.
    """
    loops: RunningLoops = vars(task).setdefault("_ergon_loops", RunningLoops())
    return loops
