"""InThreads: a store that has only the sync flavour, as a service needs it.

Nobody can stop a thread: a call whose caller has gone is finished, and its answer thrown away.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.boundary import (
    Appended,
    Appending,
    AsyncBlobSource,
    AsyncBoundary,
    Boundary,
    BoundaryCapabilities,
    KnownObject,
    LogState,
    Pruned,
    Unlisten,
)
from ergon_framework.facts.model import Cursor, FactConfirmation, Pair, Stored, StoredFact

T = TypeVar("T")


def as_async(store: Boundary | AsyncBoundary) -> AsyncBoundary:
    """*store* itself if it has the async flavour, else in threads of its own."""
    return store if isinstance(store, AsyncBoundary) else InThreads(store)


class InThreads(AsyncBoundary):
    """A sync store with so many threads; further calls wait for one."""

    def __init__(self, store: Boundary, *, threads: int = 32) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ergon-facts")

    @property
    def epoch(self) -> str:
        return self._store.epoch

    @property
    def capabilities(self) -> BoundaryCapabilities:
        return self._store.capabilities

    def listen(self, wake: Callable[[], None]) -> Unlisten:
        return self._store.listen(wake)

    async def _run(self, call: Callable[..., T], *args: Any, **given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *args, **given))

    async def append_facts_async(self, facts: Sequence[Appending]) -> Sequence[Appended]:
        return await self._run(self._store.append_facts, facts)

    async def forward_facts_async(self, facts: Sequence[StoredFact]) -> Sequence[Appended]:
        return await self._run(self._store.forward_facts, facts)

    async def get_fact_async(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return await self._run(self._store.get_fact, from_zone, message_id)

    async def fetch_facts_async(
        self, reader: str, pair: Pair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        return await self._run(self._store.fetch_facts, reader, pair, limit, after=after, max_readers=max_readers)

    async def confirm_receipt_async(self, reader: str, pair: Pair, cursor: Cursor) -> None:
        await self._run(self._store.confirm_receipt, reader, pair, cursor)

    async def cursor_of_async(self, reader: str, pair: Pair) -> Cursor | None:
        return await self._run(self._store.cursor_of, reader, pair)

    async def end_of_async(self, pair: Pair) -> Cursor | None:
        return await self._run(self._store.end_of, pair)

    async def cursor_at_async(self, pair: Pair, unix_ms: int) -> Cursor | None:
        return await self._run(self._store.cursor_at, pair, unix_ms)

    async def retire_reader_async(self, reader: str, pair: Pair, *, by: str = "") -> bool:
        return await self._run(self._store.retire_reader, reader, pair, by=by)

    async def survey_async(self) -> Sequence[LogState]:
        return await self._run(self._store.survey)

    async def received_async(self, bucket: str, key: str, expected: Stored, *, zone: str = "") -> int:
        return await self._run(self._store.received, bucket, key, expected, zone=zone)

    async def known_object_async(self, bucket: str, key: str, *, zone: str = "") -> KnownObject | None:
        return await self._run(self._store.known_object, bucket, key, zone=zone)

    async def prune_async(self, before_unix_ms: int) -> Pruned:
        return await self._run(self._store.prune, before_unix_ms)

    async def put_object_async(
        self,
        bucket: str,
        key: str,
        blob: AsyncBlobSource,
        *,
        expected: Stored | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> Stored:
        pieces = _Pulled(blob) if isinstance(blob, AsyncIterable) else blob
        try:
            put = partial(self._store.put_object, expected=expected, begin=begin, zone=zone)
            return await self._run(put, bucket, key, pieces)
        finally:
            if isinstance(pieces, _Pulled):
                pieces.leave()

    async def get_object_async(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> AsyncIterator[bytes]:
        pieces = self._store.get_object(bucket, key, begin=begin, zone=zone)
        while (piece := await self._run(next, pieces, None)) is not None:
            yield piece


class _Pulled:
    """What an async blob yields, for a thread that pulls it piece by piece from the event loop."""

    def __init__(self, blob: AsyncIterable[bytes]) -> None:
        self._pieces = aiter(blob)
        self._loop = asyncio.get_running_loop()
        self._waiting: Future[bytes | None] | None = None
        self._left = False
        # Whoever leaves while the next piece is being asked for would not see that question, and it would never end.
        self._asking = threading.Lock()

    def __iter__(self) -> Iterator[bytes]:
        while (waiting := self._ask()) is not None:
            try:
                piece = waiting.result()
            except CancelledError:
                break
            if piece is None:
                return
            yield piece
        raise ConnectionLost("whoever uploads it has gone")

    def _ask(self) -> Future[bytes | None] | None:
        """The next piece, as soon as it is there; None when nobody wants it any more."""
        with self._asking:
            if not self._left:
                self._waiting = asyncio.run_coroutine_threadsafe(self._next(), self._loop)
                return self._waiting
            return None

    async def _next(self) -> bytes | None:
        return await anext(self._pieces, None)

    def leave(self) -> None:
        """Nobody waits for the thread any more: it gets no further piece, and so stores nothing."""
        with self._asking:
            self._left = True
            if self._waiting is not None:
                self._waiting.cancel()
