"""Coalesce calls: callers that arrive during a statement join the next batch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from ergon_framework.errors import ConnectionLostError

T = TypeVar("T")
R = TypeVar("R")

#: Maximum number of items in one statement.
MAX_BATCH_ITEMS: Final = 200


class AsyncCoalescer(Generic[T, R]):
    """Calls *call* with batches of items, one batch after the other; belongs to one event loop.

    An error other than a lost connection may be caused by one item, so each item of the batch is then called alone.
    """

    def __init__(
        self, call: Callable[[Sequence[T]], Awaitable[Sequence[R]]], *, linger: Callable[[], float] = float
    ) -> None:
        self._call = call
        #: Returns the seconds that the first item waits for others.
        self._linger = linger
        self._pending: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._worker_task: asyncio.Task[None] | None = None

    async def __call__(self, item: T) -> R:
        """Return the answer for *item*. Cancellation ends only the wait; the call may still be made."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending.append((item, answer))
        if self._worker_task is None or self._worker_task.done():
            self._worker_task = asyncio.create_task(self._run_batches(), name="ergon-jobs-together")
        return await answer

    def close(self) -> None:
        """Cancel the batch that is under way; it has no waiting caller any more."""
        if self._worker_task is not None:
            self._worker_task.cancel()

    async def _run_batches(self) -> None:
        while self._pending:
            linger = self._linger()
            if linger > 0:
                await asyncio.sleep(linger)
            batch = [self._pending.popleft() for _ in range(min(MAX_BATCH_ITEMS, len(self._pending)))]
            # Items whose callers were cancelled before the batch began are dropped.
            batch = [(item, answer) for item, answer in batch if not answer.done()]
            if batch:
                await self._run_batch(batch)

    async def _run_batch(self, batch: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._call([item for item, _ in batch])
        except BaseException as error:
            if len(batch) > 1 and isinstance(error, Exception) and not isinstance(error, ConnectionLostError):
                for pending in batch:
                    await self._run_batch([pending])
                return
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error if isinstance(error, Exception) else ConnectionLostError("interrupted"))
            if not isinstance(error, Exception):
                raise
            return
        for (_, answer), result in zip(batch, results, strict=True):
            if not answer.done():
                answer.set_result(result)
