"""Together: whoever comes while a statement is under way goes with the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, TypeVar

from ergon_framework.errors import ConnectionLost

T = TypeVar("T")
R = TypeVar("R")

#: The most that go with one statement.
MOST: Final = 200


class Together(Generic[T, R]):
    """Calls *call* for many at once, one call after the other; it belongs to one event loop.

    An error that is no broken line may be the fault of one of them, so each is then called for by itself.
    """

    def __init__(
        self, call: Callable[[Sequence[T]], Awaitable[Sequence[R]]], *, linger: Callable[[], float] = float
    ) -> None:
        self._call = call
        #: Says how many seconds the first one is to wait for others.
        self._linger = linger
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._working: asyncio.Task[None] | None = None

    async def __call__(self, item: T) -> R:
        """The answer for *item*. Whoever is cancelled leaves; what he asked for may be done all the same."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work(), name="ergon-jobs-together")
        return await answer

    def close(self) -> None:
        """Leave whatever is under way; nobody waits for it any more."""
        if self._working is not None:
            self._working.cancel()

    async def _work(self) -> None:
        while self._waiting:
            linger = self._linger()
            if linger > 0:
                await asyncio.sleep(linger)
            group = [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
            # What nobody waits for any more, and was not begun, is not begun.
            group = [(item, answer) for item, answer in group if not answer.done()]
            if group:
                await self._answer(group)

    async def _answer(self, group: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._call([item for item, _ in group])
        except BaseException as error:
            if len(group) > 1 and isinstance(error, Exception) and not isinstance(error, ConnectionLost):
                for one in group:
                    await self._answer([one])
                return
            for _, answer in group:
                if not answer.done():
                    answer.set_exception(error if isinstance(error, Exception) else ConnectionLost("interrupted"))
            if not isinstance(error, Exception):
                raise
            return
        for (_, answer), result in zip(group, results, strict=True):
            if not answer.done():
                answer.set_result(result)
