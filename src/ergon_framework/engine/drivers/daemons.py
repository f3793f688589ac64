"""An executor whose threads never hold up the end of the process."""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from ergon_framework.engine.drivers.waiting import RealTime, Waiting
from ergon_framework.errors import ErgonError

P = ParamSpec("P")
T = TypeVar("T")

_numbers = itertools.count(1)


class ShutDownError(ErgonError, RuntimeError):
    """New work was offered after the shutdown."""


class DaemonExecutor(Executor):
    """``ThreadPoolExecutor``'s contract on daemon threads; it never joins them at interpreter exit.

    The standard one joins its threads when the interpreter ends, so that one hung handler keeps
    a process alive for ever. ``execute`` is ``submit`` without the price of a future.

    Threads wake each other: whoever is handed work wakes one that idles, and that one, if there is
    more, wakes the next before it begins. Many short jobs are then done by few threads, while
    jobs that block are still all begun at once.
    """

    def __init__(self, max_workers: int | None = None, *, name: str = "ergon", waiting: Waiting | None = None) -> None:
        if max_workers is not None and max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, not {max_workers}")
        self._max = max_workers
        self._name = f"{name}-{next(_numbers)}"
        self._waiting = waiting or RealTime()
        self._inbox = self._waiting.inbox()
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        #: A thread has been woken and has not come round yet.
        self._coming = False
        self._closed = False

    @property
    def threads(self) -> int:
        """How many threads were started."""
        return len(self._threads)

    def execute(self, fn: Callable[..., object], *args: Any) -> None:
        """Run ``fn(*args)`` on a thread; *fn* must not raise."""
        with self._lock:
            if self._closed:
                raise ShutDownError("cannot schedule new work after shutdown")
            self._jobs.append((fn, args))
            try:
                if not self._coming:
                    self._wake()
            except RuntimeError:
                self._jobs.pop()
                raise

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        context = contextvars.copy_context()
        self.execute(_fulfil, future, context, fn, args, kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - the standard signature
        """No new work; threads end when theirs is done. *wait* joins them all."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                for fn, args in self._jobs:
                    if fn is _fulfil:
                        args[0].cancel()
                self._jobs.clear()
            for _ in range(self._idle):
                self._inbox.put(None)
            self._idle = 0
        if wait:
            for thread in self._threads:
                thread.join()

    def _wake(self) -> None:
        """Have one more thread come, if there is one or may be one; the lock is held."""
        if self._idle:
            self._idle -= 1
            self._coming = True
            self._inbox.put(None)
        elif self._max is None or len(self._threads) < self._max:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            try:
                self._waiting.start(thread)
            except RuntimeError:
                # The machine has no thread left. Those that there are will do the work, one after the other.
                if not self._threads:
                    raise
                return
            self._coming = True
            self._threads.append(thread)

    def _work(self) -> None:
        while self._done():
            self._inbox.get()
        self._waiting.ended()

    def _done(self) -> bool:
        """Do all there is to do, as a thread that has just come; whether it is to stay for more."""
        came = True
        while True:
            with self._lock:
                if came:
                    self._coming = came = False
                if not self._jobs:
                    self._idle += not self._closed
                    return not self._closed
                fn, args = self._jobs.popleft()
                if self._jobs and not self._coming:
                    self._wake()
            fn(*args)


def _fulfil(
    future: Future[Any],
    context: contextvars.Context,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = context.run(fn, *args, **kwargs)
    except BaseException as error:  # noqa: BLE001 - it belongs to whoever waits for the future
        future.set_exception(error)
    else:
        future.set_result(result)
