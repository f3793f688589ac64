"""AsyncCoalescer: one request to the server for all callers that need it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class AsyncCoalescer(Generic[T]):
    """A request that is sent after all earlier writes: callers that arrive while one waits share the next one."""

    def __init__(self, request: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._request = request
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._next is None:
            self._next = create_background_task(self._run_after(self._running))
        return await asyncio.shield(self._next)

    async def _run_after(self, previous: asyncio.Task[T] | None) -> T:
        if previous is not None:
            await asyncio.wait((previous,))
        self._running, self._next = self._next, None
        return await self._request()


def create_background_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run *work* as a task whose failure is consumed, because possibly no caller awaits it."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_consume_exception)
    return task


def _consume_exception(done: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()
