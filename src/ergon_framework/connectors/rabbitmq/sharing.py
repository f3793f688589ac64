"""Shared: one question to the server for all who ask it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """A question that is asked behind everything that was written: whoever comes while it waits shares the next one."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._ask = ask
        self._asked: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._next is None:
            self._next = heeded(self._after(self._asked))
        return await asyncio.shield(self._next)

    async def _after(self, before: asyncio.Task[T] | None) -> T:
        if before is not None:
            await asyncio.wait((before,))
        self._asked, self._next = self._next, None
        return await self._ask()


def heeded(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """*work* as a task whose failure nobody may be left to see."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_unseen)
    return task


def _unseen(done: asyncio.Future[Any]) -> None:
    """Nobody may look at it any more."""
    if not done.cancelled():
        done.exception()
