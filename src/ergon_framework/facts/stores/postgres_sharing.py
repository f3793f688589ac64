"""Shared commits: whoever comes while a commit is under way goes with the next one, and nobody waits for company.

What one caller sends may be refused by the server as a whole; then each of those who went with him goes alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from ergon_framework.errors import ConnectionLost, text
from ergon_framework.facts.boundary import Appended, confirmed
from ergon_framework.facts.model import FactConfirmation
from ergon_framework.facts.stores.postgres_batch import Item

#: The most that go into one commit. While it is under way others get ready, so one that takes everybody gains nothing.
MOST: Final = 128
MOST_BYTES: Final = 4 * 1024 * 1024
#: Of one caller more: he has said that they belong together, and each commit costs him a wait.
PORTION: Final = 1000
#: Commits that one event loop has under way.
_AT_ONCE: Final = 2


def portions(items: Sequence[Item]) -> list[Sequence[Item]]:
    """*items* of one caller, cut so that none is too much for one commit."""
    found: list[Sequence[Item]] = []
    begin = size = 0
    for place, item in enumerate(items):
        if place > begin and (place - begin >= PORTION or size + item.bytes > MOST_BYTES):
            found.append(items[begin:place])
            begin, size = place, 0
        size += item.bytes
    if begin < len(items):
        found.append(items[begin:])
    return found


_R = TypeVar("_R", bound="_Request")


class _Request:
    """What one caller wants, and what he is told."""

    __slots__ = ("answers", "bytes", "done", "error", "items")

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.bytes = items[0].bytes if len(items) == 1 else sum(item.bytes for item in items)
        self.answers: Sequence[Appended] | None = None
        self.error: BaseException | None = None
        #: Whom an event loop wakes; threads have their turn instead.
        self.done: asyncio.Future[None] | None = None

    def told(self) -> Sequence[Appended]:
        if self.error is not None:
            raise self.error
        if self.answers is None:
            raise _interrupted()
        return self.answers


class _Turn(_Request):
    """The same of a thread, which waits for its turn: to be told, or to do the work."""

    __slots__ = ("leads", "turn")

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__(items)
        self.leads = False
        # Taken until then: a lock is the cheapest thing that a thread can wait for.
        self.turn = threading.Lock()
        self.turn.acquire()


def _interrupted() -> ConnectionLost:
    return ConnectionLost("the commit was interrupted, and nobody knows whether it was done; append again")


def _of_his_own(error: BaseException) -> BaseException:
    """An error for one of several: an exception that is raised in two threads would mix up where it comes from."""
    return ConnectionLost(text(error)) if isinstance(error, ConnectionLost) else error


def _is_anyones(error: Exception) -> bool:
    """Whether it may be the fault of one of several."""
    return not isinstance(error, ConnectionLost)


class _Waiting(deque[_R]):
    @property
    def is_full(self) -> bool:
        """Whether so many wait that they would fill a commit, if each wants one."""
        return len(self) >= MOST

    def group(self) -> list[_R]:
        """The next ones that go together; at least one."""
        found = [self.popleft()]
        count, size = len(found[0].items), found[0].bytes
        while self and count + len(self[0].items) <= MOST and size + self[0].bytes <= MOST_BYTES:
            found.append(self.popleft())
            count, size = count + len(found[-1].items), size + found[-1].bytes
        return found


class Shared:
    """For threads: one of those who wait does the work for all, and hands it on to the next."""

    def __init__(self, commit: Callable[[Sequence[Item]], Sequence[Appended]]) -> None:
        self._commit = commit
        self._lock = threading.Lock()
        self._waiting: _Waiting[_Turn] = _Waiting()
        self._busy = False

    def __call__(self, items: Sequence[Item]) -> Sequence[Appended]:
        """The answers for *items*, in order."""
        request = _Turn(items)
        with self._lock:
            self._waiting.append(request)
            request.leads = not self._busy
            self._busy = True
        if not request.leads:
            self._wait(request)
        if request.leads:
            self._lead()
        return request.told()

    def _wait(self, request: _Turn) -> None:
        try:
            request.turn.acquire()
        except BaseException:
            # Whoever leaves must not be counted on.
            with self._lock, suppress(ValueError):
                self._waiting.remove(request)
            if request.leads:
                self._hand_on()
            raise

    def _lead(self) -> None:
        with self._lock:
            group = self._waiting.group()
        try:
            self._answer(group)
        finally:
            self._hand_on()
            for request in group:
                request.leads = False
                request.turn.release()

    def _hand_on(self) -> None:
        with self._lock:
            if not self._waiting:
                self._busy = False
                return
            heir = self._waiting[0]
            heir.leads = True
        heir.turn.release()

    def _answer(self, group: list[_Turn]) -> None:
        items = [item for request in group for item in request.items]
        try:
            answers = self._commit(items)
        except Exception as error:  # noqa: BLE001 - told to everybody who is concerned
            if len(group) > 1 and _is_anyones(error):
                for request in group:
                    self._answer([request])
                return
            for request in group:
                request.error = _of_his_own(error)
            return
        _deal(group, answers)


def _deal(group: Sequence[_Request], answers: Sequence[Appended]) -> None:
    begin = 0
    for request in group:
        request.answers = answers[begin : begin + len(request.items)]
        begin += len(request.items)


class AsyncShared:
    """The same for the tasks of one event loop: a task of its own does the work, so that nobody's end spoils it.

    While so many wait that they fill a commit by themselves, a second one is sent: the server has it at hand when it is
    done with the first.
    """

    def __init__(self, commit: Callable[[Sequence[Item]], Awaitable[Sequence[Appended]]]) -> None:
        self._commit = commit
        self._waiting: _Waiting[_Request] = _Waiting()
        #: How many do the work, counted by themselves: a task that has ended is not known to have ended at once.
        self._busy = 0
        #: The event loop itself holds tasks only weakly.
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, items: Sequence[Item]) -> Sequence[Appended]:
        """The answers for *items*. Whoever is cancelled leaves; what he asked for may be done all the same."""
        request, done = self._begun(items)
        try:
            await done
        except asyncio.CancelledError:
            self._left(request)
            raise
        return request.told()

    async def one(self, item: Item) -> FactConfirmation:
        """The same for a single fact, which is what most ask for: one step less, for each of them twice."""
        request, done = self._begun([item])
        try:
            await done
        except asyncio.CancelledError:
            self._left(request)
            raise
        return confirmed(request.told()[0])

    def _begun(self, items: Sequence[Item]) -> tuple[_Request, asyncio.Future[None]]:
        request = _Request(items)
        done = request.done = asyncio.get_running_loop().create_future()
        self._waiting.append(request)
        # Asked for every fact, and so without the way to is_full.
        if self._busy < _AT_ONCE and (self._busy == 0 or len(self._waiting) >= MOST):
            self._busy += 1
            task = asyncio.create_task(self._work(), name="ergon-facts-shared")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return request, done

    def _left(self, request: _Request) -> None:
        """What was not begun, and nobody waits for any more, is not begun."""
        with suppress(ValueError):
            self._waiting.remove(request)

    async def _work(self) -> None:
        try:
            while self._waiting and (self._waiting.is_full or self._busy == 1):
                group = self._waiting.group()
                try:
                    await self._answer(group)
                finally:
                    for request in group:
                        if request.done is not None and not request.done.done():
                            request.done.set_result(None)
        finally:
            self._busy -= 1

    async def _answer(self, group: list[_Request]) -> None:
        items = [item for request in group for item in request.items]
        try:
            answers = await self._commit(items)
        except Exception as error:  # noqa: BLE001 - told to everybody who is concerned
            if len(group) > 1 and _is_anyones(error):
                for request in group:
                    await self._answer([request])
                return
            for request in group:
                request.error = _of_his_own(error)
            return
        _deal(group, answers)
