"""ThreadedBoundary: adapts a store that has only the sync variant to the async contract that a service needs.

A thread cannot be stopped: a call whose caller has disconnected runs to its end, and its result is discarded.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.boundary import (
    AppendResult,
    AsyncBlobSource,
    AsyncBoundary,
    Boundary,
    BoundaryCapabilities,
    LogState,
    NewFact,
    ObjectInfo,
    PruneResult,
    Unlisten,
)
from ergon_framework.facts.model import Cursor, FactConfirmation, StoredArtifact, StoredFact, ZonePair

T = TypeVar("T")


def as_async(store: Boundary | AsyncBoundary) -> AsyncBoundary:
    """Return *store* itself if it has the async variant, else an adapter with its own threads."""
    return store if isinstance(store, AsyncBoundary) else ThreadedBoundary(store)


class ThreadedBoundary(AsyncBoundary):
    """A sync store with a limited number of threads; further calls wait for a free one."""

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

    async def _run(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(call, *args, **kwargs))

    async def append_facts_async(self, facts: Sequence[NewFact]) -> Sequence[AppendResult]:
        return await self._run(self._store.append_facts, facts)

    async def forward_facts_async(self, facts: Sequence[StoredFact]) -> Sequence[AppendResult]:
        return await self._run(self._store.forward_facts, facts)

    async def get_fact_async(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return await self._run(self._store.get_fact, from_zone, message_id)

    async def fetch_facts_async(
        self, reader: str, pair: ZonePair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        return await self._run(self._store.fetch_facts, reader, pair, limit, after=after, max_readers=max_readers)

    async def confirm_receipt_async(self, reader: str, pair: ZonePair, cursor: Cursor) -> None:
        await self._run(self._store.confirm_receipt, reader, pair, cursor)

    async def get_cursor_async(self, reader: str, pair: ZonePair) -> Cursor | None:
        return await self._run(self._store.get_cursor, reader, pair)

    async def last_offset_async(self, pair: ZonePair) -> Cursor | None:
        return await self._run(self._store.last_offset, pair)

    async def cursor_at_time_async(self, pair: ZonePair, unix_ms: int) -> Cursor | None:
        return await self._run(self._store.cursor_at_time, pair, unix_ms)

    async def retire_reader_async(self, reader: str, pair: ZonePair, *, by: str = "") -> bool:
        return await self._run(self._store.retire_reader, reader, pair, by=by)

    async def list_logs_async(self) -> Sequence[LogState]:
        return await self._run(self._store.list_logs)

    async def uploaded_bytes_async(self, bucket: str, key: str, expected: StoredArtifact, *, zone: str = "") -> int:
        return await self._run(self._store.uploaded_bytes, bucket, key, expected, zone=zone)

    async def stat_object_async(self, bucket: str, key: str, *, zone: str = "") -> ObjectInfo | None:
        return await self._run(self._store.stat_object, bucket, key, zone=zone)

    async def prune_async(self, before_unix_ms: int) -> PruneResult:
        return await self._run(self._store.prune, before_unix_ms)

    async def put_object_async(
        self,
        bucket: str,
        key: str,
        blob: AsyncBlobSource,
        *,
        expected: StoredArtifact | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> StoredArtifact:
        pieces = _PullBlob(blob) if isinstance(blob, AsyncIterable) else blob
        try:
            put = partial(self._store.put_object, expected=expected, begin=begin, zone=zone)
            return await self._run(put, bucket, key, pieces)
        finally:
            if isinstance(pieces, _PullBlob):
                pieces.cancel()

    async def get_object_async(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> AsyncIterator[bytes]:
        pieces = self._store.get_object(bucket, key, begin=begin, zone=zone)
        while (piece := await self._run(next, pieces, None)) is not None:
            yield piece


class _PullBlob:
    """The chunks of an async blob, for a thread that requests them one by one from the event loop."""

    def __init__(self, blob: AsyncIterable[bytes]) -> None:
        self._pieces = aiter(blob)
        self._loop = asyncio.get_running_loop()
        self._future: Future[bytes | None] | None = None
        self._is_cancelled = False
        # Without the lock, a cancellation during a request would miss the new future, which would never end.
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[bytes]:
        while (future := self._request_next()) is not None:
            try:
                piece = future.result()
            except CancelledError:
                break
            if piece is None:
                return
            yield piece
        raise ConnectionLostError("whoever uploads it has gone")

    def _request_next(self) -> Future[bytes | None] | None:
        """Request the next chunk and return its future; None after the upload was cancelled."""
        with self._lock:
            if not self._is_cancelled:
                self._future = asyncio.run_coroutine_threadsafe(self._read_next(), self._loop)
                return self._future
            return None

    async def _read_next(self) -> bytes | None:
        return await anext(self._pieces, None)

    def cancel(self) -> None:
        """Cancel the upload: the thread gets no further chunk, and therefore stores nothing."""
        with self._lock:
            self._is_cancelled = True
            if self._future is not None:
                self._future.cancel()
