"""Group commit: callers that arrive during a commit join the next batch; no caller waits for others to arrive.

A commit of many facts takes about as long as a commit of one, because both wait once for the disk.

The server may reject a batch because of one caller's facts; then each caller's facts are committed separately.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from ergon_framework.errors import ConnectionLostError, error_message
from ergon_framework.facts.boundary import AppendResult, raise_if_error
from ergon_framework.facts.model import FactConfirmation
from ergon_framework.facts.stores.postgres.append import FactRow

#: Limits of one commit. Others prepare while it runs, so a commit of all callers would not be faster.
MAX_BATCH_FACTS: Final = 128
MAX_BATCH_BYTES: Final = 4 * 1024 * 1024
#: The limit for one caller is higher: its facts belong together, and each further commit adds latency.
MAX_CALLER_FACTS: Final = 1000
#: Commits that one event loop runs concurrently.
_MAX_CONCURRENT_COMMITS: Final = 2


def split_batches(items: Sequence[FactRow]) -> list[Sequence[FactRow]]:
    """Split the *items* of one caller, so that no part exceeds one commit."""
    batches: list[Sequence[FactRow]] = []
    begin = size = 0
    for index, item in enumerate(items):
        if index > begin and (index - begin >= MAX_CALLER_FACTS or size + item.bytes > MAX_BATCH_BYTES):
            batches.append(items[begin:index])
            begin, size = index, 0
        size += item.bytes
    if begin < len(items):
        batches.append(items[begin:])
    return batches


_R = TypeVar("_R", bound="_AppendRequest")


class _AppendRequest:
    """The facts of one caller, and their result."""

    __slots__ = ("bytes", "done", "error", "items", "results")

    def __init__(self, items: Sequence[FactRow]) -> None:
        self.items = items
        self.bytes = items[0].bytes if len(items) == 1 else sum(item.bytes for item in items)
        self.results: Sequence[AppendResult] | None = None
        self.error: BaseException | None = None
        #: Set for callers on an event loop; threads wait for their turn instead.
        self.done: asyncio.Future[None] | None = None

    def get_results(self) -> Sequence[AppendResult]:
        if self.error is not None:
            raise self.error
        if self.results is None:
            raise _interrupted_error()
        return self.results


class _ThreadAppendRequest(_AppendRequest):
    """A request of a thread, which waits for its result or for its turn to commit the next batch."""

    __slots__ = ("is_leader", "wakeup")

    def __init__(self, items: Sequence[FactRow]) -> None:
        super().__init__(items)
        #: Whether this thread commits the next batch: the first one does, and then each leader chooses the next.
        self.is_leader = False
        # Held until the turn comes: a lock is the fastest primitive that a thread can wait for.
        self.wakeup = threading.Lock()
        self.wakeup.acquire()


def _interrupted_error() -> ConnectionLostError:
    return ConnectionLostError("commit interrupted, outcome unknown; append again with the same id")


def _copy_error(error: BaseException) -> BaseException:
    """Return a separate exception for one of several callers: a shared one would mix up their tracebacks."""
    return ConnectionLostError(error_message(error)) if isinstance(error, ConnectionLostError) else error


def _is_caller_specific(error: Exception) -> bool:
    """Tell whether the error may concern only one of several callers."""
    return not isinstance(error, ConnectionLostError)


class _AppendQueue(deque[_R]):
    @property
    def is_full(self) -> bool:
        """Whether enough requests wait to fill a commit with one fact each."""
        return len(self) >= MAX_BATCH_FACTS

    def pop_batch(self) -> list[_R]:
        """Remove and return the requests of the next batch; at least one."""
        batch = [self.popleft()]
        count, size = len(batch[0].items), batch[0].bytes
        while self and count + len(self[0].items) <= MAX_BATCH_FACTS and size + self[0].bytes <= MAX_BATCH_BYTES:
            batch.append(self.popleft())
            count, size = count + len(batch[-1].items), size + batch[-1].bytes
        return batch


class Coalescer:
    """Group commit for threads: one waiting thread commits for all, and then wakes the next one."""

    def __init__(self, commit: Callable[[Sequence[FactRow]], Sequence[AppendResult]]) -> None:
        self._commit = commit
        self._lock = threading.Lock()
        self._queue: _AppendQueue[_ThreadAppendRequest] = _AppendQueue()
        #: Whether there is a leader.
        self._is_busy = False

    def __call__(self, items: Sequence[FactRow]) -> Sequence[AppendResult]:
        """Return the results of *items*, in order."""
        request = _ThreadAppendRequest(items)
        with self._lock:
            self._queue.append(request)
            request.is_leader = not self._is_busy
            self._is_busy = True
        if not request.is_leader:
            self._wait(request)
        if request.is_leader:
            self._flush()
        return request.get_results()

    def _wait(self, request: _ThreadAppendRequest) -> None:
        try:
            request.wakeup.acquire()
        except BaseException:
            # A caller that was interrupted must not be chosen to commit the next batch.
            with self._lock, suppress(ValueError):
                self._queue.remove(request)
            if request.is_leader:
                self._wake_next()
            raise

    def _flush(self) -> None:
        with self._lock:
            batch = self._queue.pop_batch()
        try:
            self._commit_batch(batch)
        finally:
            self._wake_next()
            for request in batch:
                request.is_leader = False
                request.wakeup.release()

    def _wake_next(self) -> None:
        with self._lock:
            if not self._queue:
                self._is_busy = False
                return
            next_request = self._queue[0]
            next_request.is_leader = True
        next_request.wakeup.release()

    def _commit_batch(self, batch: list[_ThreadAppendRequest]) -> None:
        items = [item for request in batch for item in request.items]
        try:
            results = self._commit(items)
        except Exception as error:  # noqa: BLE001 - passed to every caller
            if len(batch) > 1 and _is_caller_specific(error):
                for request in batch:
                    self._commit_batch([request])
                return
            for request in batch:
                request.error = _copy_error(error)
            return
        _distribute_results(batch, results)


def _distribute_results(batch: Sequence[_AppendRequest], results: Sequence[AppendResult]) -> None:
    begin = 0
    for request in batch:
        request.results = results[begin : begin + len(request.items)]
        begin += len(request.items)


class AsyncCoalescer:
    """Group commit for the tasks of one event loop; a separate task commits, so that cancelled callers do not stop it.

    While enough requests wait to fill a commit, a second one is sent: the server can begin it as soon as it has
    finished the first.
    """

    def __init__(self, commit: Callable[[Sequence[FactRow]], Awaitable[Sequence[AppendResult]]]) -> None:
        self._commit = commit
        self._queue: _AppendQueue[_AppendRequest] = _AppendQueue()
        #: The number of running flush tasks. Counted here, because a task that has ended reports it only later.
        self._running_count = 0
        #: The event loop holds only weak references to tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, items: Sequence[FactRow]) -> Sequence[AppendResult]:
        """Return the results of *items*. Cancelling a caller does not undo it: its facts may be stored all the same."""
        request, done = self._enqueue(items)
        try:
            await done
        except asyncio.CancelledError:
            self._withdraw(request)
            raise
        return request.get_results()

    async def submit_one(self, item: FactRow) -> FactConfirmation:
        """Append a single fact; the most frequent call, with one coroutine less than ``__call__``."""
        request, done = self._enqueue([item])
        try:
            await done
        except asyncio.CancelledError:
            self._withdraw(request)
            raise
        return raise_if_error(request.get_results()[0])

    def _enqueue(self, items: Sequence[FactRow]) -> tuple[_AppendRequest, asyncio.Future[None]]:
        request = _AppendRequest(items)
        done = request.done = asyncio.get_running_loop().create_future()
        self._queue.append(request)
        # Runs for every fact, so the comparison replaces the property is_full.
        if self._running_count < _MAX_CONCURRENT_COMMITS and (
            self._running_count == 0 or len(self._queue) >= MAX_BATCH_FACTS
        ):
            self._running_count += 1
            task = asyncio.create_task(self._flush(), name="ergon-facts-shared")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return request, done

    def _withdraw(self, request: _AppendRequest) -> None:
        """Remove a request that is not part of a batch yet, because its caller was cancelled."""
        with suppress(ValueError):
            self._queue.remove(request)

    async def _flush(self) -> None:
        try:
            while self._queue and (self._queue.is_full or self._running_count == 1):
                batch = self._queue.pop_batch()
                try:
                    await self._commit_batch(batch)
                finally:
                    for request in batch:
                        if request.done is not None and not request.done.done():
                            request.done.set_result(None)
        finally:
            self._running_count -= 1

    async def _commit_batch(self, batch: list[_AppendRequest]) -> None:
        items = [item for request in batch for item in request.items]
        try:
            results = await self._commit(items)
        except Exception as error:  # noqa: BLE001 - passed to every caller
            if len(batch) > 1 and _is_caller_specific(error):
                for request in batch:
                    await self._commit_batch([request])
                return
            for request in batch:
                request.error = _copy_error(error)
            return
        _distribute_results(batch, results)
