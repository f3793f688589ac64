"""DaemonExecutor: a thread pool whose threads never delay the end of the process.

The pools of the standard library join their threads at exit, and a call of user code may hang without limit.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from ergon_framework.clock import RealTime, ThreadClock
from ergon_framework.errors import ErgonError

P = ParamSpec("P")
T = TypeVar("T")

_executor_numbers = itertools.count(1)


class ShutDownError(ErgonError, RuntimeError):
    """Work was submitted after the shutdown."""


class DaemonExecutor(Executor):
    """``ThreadPoolExecutor``'s contract on daemon threads, which are never joined at interpreter exit.

    The standard executor joins its threads when the interpreter ends, so that one hung handler keeps the process
    alive without limit. ``submit_nowait`` is ``submit`` without the cost of a future.

    Threads wake each other: a caller that submits work wakes one idle thread, and that thread wakes the next, if
    there is more work, before it starts. Few threads then run many short jobs, while jobs that block still all
    start immediately.

    *waiting* starts the threads and creates the queue on which they wait; tests pass one that runs in virtual time.
    """

    def __init__(
        self, max_workers: int | None = None, *, name: str = "ergon", waiting: ThreadClock | None = None
    ) -> None:
        if max_workers is not None and max_workers < 1:
            raise ValueError(f"max_workers must be at least 1, not {max_workers}")
        self._max_workers = max_workers
        self._name = f"{name}-{next(_executor_numbers)}"
        self._waiting = waiting or RealTime()
        self._inbox = self._waiting.create_inbox()
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        #: A thread has been woken and does not run yet.
        self._has_woken_thread = False
        self._closed = False

    @property
    def thread_count(self) -> int:
        """The number of threads that were started."""
        return len(self._threads)

    def submit_nowait(self, fn: Callable[..., object], *args: Any) -> None:
        """Run ``fn(*args)`` on a thread; *fn* must not raise."""
        with self._lock:
            if self._closed:
                raise ShutDownError("cannot schedule new work after shutdown")
            self._jobs.append((fn, args))
            try:
                if not self._has_woken_thread:
                    self._wake()
            except RuntimeError:
                self._jobs.pop()
                raise

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        context = contextvars.copy_context()
        self.submit_nowait(_fulfil, future, context, fn, args, kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - the standard signature
        """Accept no new work; threads end when their work is done. *wait* joins them all."""
        with self._lock:
            self._closed = True
            if cancel_futures:
                for fn, args in self._jobs:
                    # Only the jobs of submit() have a future, as the first argument.
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
        """Wake an idle thread, or start one if the limit allows it; the caller holds the lock."""
        if self._idle:
            self._idle -= 1
            self._has_woken_thread = True
            self._inbox.put(None)
        elif self._max_workers is None or len(self._threads) < self._max_workers:
            thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
            try:
                self._waiting.start(thread)
            except RuntimeError:
                # The system cannot start another thread. The existing threads do the work in turn.
                if not self._threads:
                    raise
                return
            self._has_woken_thread = True
            self._threads.append(thread)

    def _work(self) -> None:
        while self._run_jobs():
            self._inbox.get()
        self._waiting.thread_ended()

    def _run_jobs(self) -> bool:
        """Run all queued jobs; return whether the thread is to wait for more."""
        # True until the flag is cleared below: a thread comes here because it was woken or has just been started.
        was_woken = True
        while True:
            with self._lock:
                if was_woken:
                    self._has_woken_thread = was_woken = False
                if not self._jobs:
                    self._idle += not self._closed
                    return not self._closed
                fn, args = self._jobs.popleft()
                if self._jobs and not self._has_woken_thread:
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
    except BaseException as error:  # noqa: BLE001 - raised to the caller that waits for the future
        future.set_exception(error)
    else:
        future.set_result(result)
