"""PostgresBoundary: facts in PostgreSQL, sync and async; artifact bytes are in a separate content store.

A fact is durable when append returns its confirmation: its offset in the log of a pair of zones. A reader fetches facts
after its cursor and confirms them. An epoch names the history of the store, and changes when a backup is restored.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple, Self, TypeVar
from weakref import WeakKeyDictionary, ref

from ergon_framework.connectors.postgres.queue import DSN_VARIABLE
from ergon_framework.database.operation import Operation, Query
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts import metrics
from ergon_framework.facts.append import to_chunks
from ergon_framework.facts.boundary import (
    AppendResult,
    AsyncBlobSource,
    AsyncBoundary,
    BlobSource,
    Boundary,
    BoundaryCapabilities,
    LogState,
    NewFact,
    ObjectInfo,
    PruneResult,
    Unlisten,
    raise_if_error,
)
from ergon_framework.facts.content_store import ContentStore
from ergon_framework.facts.model import (
    BoundarySide,
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    ObjectName,
    StoredArtifact,
    StoredFact,
    ZonePair,
)
from ergon_framework.facts.stores import errors
from ergon_framework.facts.stores.postgres import read as reading
from ergon_framework.facts.stores.postgres import retention
from ergon_framework.facts.stores.postgres import sql as statements
from ergon_framework.facts.stores.postgres.append import FactAppender as Appender
from ergon_framework.facts.stores.postgres.append import FactRow, row_to_append, rows_to_append, rows_to_forward
from ergon_framework.facts.stores.postgres.artifacts import PostgresArtifacts, put_async
from ergon_framework.facts.stores.postgres.coalesce import AsyncCoalescer, Coalescer, split_batches
from ergon_framework.facts.stores.postgres.consumer_state import PostgresFactConsumerStore
from ergon_framework.facts.stores.postgres.retention import create_future_partitions
from ergon_framework.facts.stores.postgres.session import DatabaseSession, FactListener

R = TypeVar("R")

#: Timeouts of a call and of a retention run.
_CALL_TIMEOUT_SECONDS: Final = 30.0
_PRUNE_TIMEOUT_SECONDS: Final = 600.0


class EpochRecord(NamedTuple):
    """One epoch, of this store or of a store that facts were forwarded from."""

    epoch: str
    began_at: datetime
    why: str
    by: str
    #: Whether this is the store's current epoch.
    present: bool


class _ProcessState:
    """The connections, listener and coalescers of a boundary in one process; a forked child creates its own."""

    def __init__(self, session: DatabaseSession, appender: Appender) -> None:
        self.session = session
        self.listener = FactListener(session.pool)
        self._appender = appender
        #: Appends and forwards use different statements, so they are never in one batch.
        self.coalescers = {forwarded: Coalescer(self._commit) for forwarded in (False, True)}
        self._per_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, AsyncCoalescer]] = WeakKeyDictionary()
        #: The last loop with its coalescers: the common case. One tuple, so that loops of several threads see both.
        self._last_used: tuple[ref[asyncio.AbstractEventLoop], dict[bool, AsyncCoalescer]] | None = None

    def coalescer_for_loop(self) -> dict[bool, AsyncCoalescer]:
        """Return the coalescers of the running event loop."""
        loop = asyncio.get_running_loop()
        last = self._last_used
        if last is not None and last[0]() is loop:
            return last[1]
        coalescers = self._per_loop.get(loop)
        if coalescers is None:
            coalescers = self._per_loop[loop] = {
                forwarded: AsyncCoalescer(self._commit_async) for forwarded in (False, True)
            }
        self._last_used = ref(loop), coalescers
        return coalescers

    def _commit(self, items: Sequence[FactRow]) -> Sequence[AppendResult]:
        return self._record_results(
            items,
            self.session.pool.run(self._appender.append(self.session, items), timeout_seconds=_CALL_TIMEOUT_SECONDS),
        )

    async def _commit_async(self, items: Sequence[FactRow]) -> Sequence[AppendResult]:
        commit = self._appender.append(self.session, items)
        return self._record_results(
            items, await self.session.pool.run_async(commit, timeout_seconds=_CALL_TIMEOUT_SECONDS)
        )

    def _record_results(self, items: Sequence[FactRow], results: Sequence[AppendResult]) -> Sequence[AppendResult]:
        """Count the results, and notify the listeners of this process if there are new facts."""
        side = self.session.side
        metrics.record_appends(side.store_buffer if items[0].origin is None else side.forward_buffer, results)
        if any(isinstance(result, FactConfirmation) and not result.duplicate for result in results):
            self.listener.notify()
        return results


class PostgresBoundary(Boundary, AsyncBoundary):
    """A store in a database that ``ergon db upgrade`` has prepared; one database is one store.

    The address is *dsn*, or the environment's ``ERGON_POSTGRES__DSN``. *side* is the side of the boundary between two
    zones that the store is on. *contents* stores the bytes of artifacts; without it artifacts are not supported.
    *max_facts* and *max_bytes* bound what is retained: beyond them, an append raises BufferFull and nothing is lost.
    Ids are kept without limit, or for *identity_retention* seconds and at least as long as their facts. A database that
    may lose committed data is rejected, unless *accept_loss*.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        side: BoundarySide = BoundarySide.INNER,
        contents: ContentStore | None = None,
        max_facts: int | None = None,
        max_bytes: int | None = None,
        identity_retention: float | None = None,
        accept_loss: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._dsn = dsn
        self._side = BoundarySide(side)
        self._contents = contents
        self._identity_retention = identity_retention
        self._accept_loss = accept_loss
        self._wall = wall
        self._appender = Appender(self._side, max_facts=max_facts, max_bytes=max_bytes, wall=wall)
        self._artifacts: PostgresArtifacts | None = None
        if contents is not None:
            self._artifacts = PostgresArtifacts(
                contents,
                side=self._side,
                get_session=lambda: self._get_process_state().session,
                max_bytes=max_bytes,
                now=self._now,
            )
        self._lock = threading.Lock()
        self._process_state: _ProcessState | None = None
        #: The state of the parent, in a forked child.
        self._inherited: _ProcessState | None = None

    def __repr__(self) -> str:
        return f"PostgresBoundary(side={self._side.value!r})"

    def _now(self) -> int:
        return int(self._wall() * 1000)

    # -- lifecycle ------------------------------------------------------------------------------------

    def _get_process_state(self) -> _ProcessState:
        state = self._process_state
        if state is not None and state.session.owner_pid == os.getpid():
            return state
        with self._lock:
            if self._process_state is not None and self._process_state.session.owner_pid != os.getpid():
                # Referenced, so that garbage collection in the child does not close the parent's connections.
                self._inherited, self._process_state = self._process_state, None
            if self._process_state is None:
                session = DatabaseSession(self._resolve_dsn(), side=self._side, accept_loss=self._accept_loss)
                self._process_state = _ProcessState(session, self._appender)
            return self._process_state

    def _resolve_dsn(self) -> str:
        dsn = self._dsn or os.environ.get(DSN_VARIABLE)
        if not dsn:
            raise ConfigurationError(f"facts have no database address: set {DSN_VARIABLE} or pass dsn=…")
        return dsn

    def _run(
        self, make_operation: Callable[..., Operation[R]], *args: Any, timeout_seconds: float = _CALL_TIMEOUT_SECONDS
    ) -> R:
        session = self._get_process_state().session
        return session.pool.run(make_operation(session, *args), timeout_seconds=timeout_seconds)

    async def _run_async(
        self, make_operation: Callable[..., Operation[R]], *args: Any, timeout_seconds: float = _CALL_TIMEOUT_SECONDS
    ) -> R:
        session = self._get_process_state().session
        return await session.pool.run_async(make_operation(session, *args), timeout_seconds=timeout_seconds)

    def open(self) -> None:
        """Connect; reject a database that is outdated, of the other side, or may lose committed data."""
        try:
            self._run(self._open_session)
        except BaseException:
            self.close()
            raise

    async def open_async(self) -> None:
        try:
            await self._run_async(self._open_session)
        except BaseException:
            await self.close_async()
            raise

    def _open_session(self, session: DatabaseSession) -> Operation[None]:
        yield from session.ensure_open()
        yield from create_future_partitions(self._now())

    def close(self) -> None:
        """Disconnect; the next call connects again."""
        state = self._detach_process_state()
        if state is not None:
            state.session.pool.close()

    async def close_async(self) -> None:
        state = self._detach_process_state()
        if state is not None:
            await state.session.pool.close_async()

    def _detach_process_state(self) -> _ProcessState | None:
        with self._lock:
            state, self._process_state = self._process_state, None
        if state is not None:
            state.listener.close()
        return state

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await self.open_async()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    # -- properties -----------------------------------------------------------------------------------

    @property
    def epoch(self) -> str:
        """The present epoch; before the store was opened, reading it queries the database, which blocks."""
        identity = self._get_process_state().session.identity
        return (identity or self._run(DatabaseSession.ensure_open)).epoch

    @property
    def capabilities(self) -> BoundaryCapabilities:
        """The capabilities; durability is unknown (None) before the store was opened."""
        session = self._get_process_state().session
        durabilities = [None if session.durability is None else session.durability.durable]
        if self._contents is not None:
            durabilities.append(self._contents.durable)
        durable = False if False in durabilities else None if None in durabilities else True
        return BoundaryCapabilities(durable=durable, side=self._side, artifacts=self._contents is not None)

    @property
    def durability(self) -> str | None:
        """A description of what a power loss could lose; None before the store was opened."""
        durability = self._get_process_state().session.durability
        return None if durability is None else durability.message

    def listen(self, wake: Callable[[], None]) -> Unlisten:
        return self._get_process_state().listener.subscribe(wake)

    def consumer_store(self) -> PostgresFactConsumerStore:
        """Return the consumer store in the same database; a handled fact then needs only its confirmation."""
        return PostgresFactConsumerStore.for_boundary(self._run, self._run_async)

    def new_epoch(self, *, by: str, why: str = "") -> str:
        """Begin a new epoch after an older state was restored; *by* is recorded."""
        return self._run(_begin_epoch, why or "begun by an operator", by)

    async def new_epoch_async(self, *, by: str, why: str = "") -> str:
        return await self._run_async(_begin_epoch, why or "begun by an operator", by)

    def epochs(self) -> Sequence[EpochRecord]:
        """Return all known epochs, newest first: who began or adopted each of them, when and why."""
        return self._run(_list_epochs)

    async def epochs_async(self) -> Sequence[EpochRecord]:
        return await self._run_async(_list_epochs)

    # -- facts ----------------------------------------------------------------------------------------

    def append_fact(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        if fact.artifact is not None:
            return super().append_fact(envelope, fact)
        # The common case, a fact without an artifact, skips the batch logic.
        return raise_if_error(self._get_process_state().coalescers[False]([row_to_append(envelope, fact)])[0])

    def append_fact_async(self, envelope: Envelope, fact: Fact) -> Coroutine[Any, Any, FactConfirmation]:
        if fact.artifact is not None:
            return super().append_fact_async(envelope, fact)
        return self._get_process_state().coalescer_for_loop()[False].submit_one(row_to_append(envelope, fact))

    def append_facts(self, facts: Sequence[NewFact]) -> Sequence[AppendResult]:
        items = rows_to_append(facts, self._missing_digests(fact for _, fact in facts))
        return self._submit(items, forwarded=False)

    def forward_facts(self, facts: Sequence[StoredFact]) -> Sequence[AppendResult]:
        items = rows_to_forward(facts, self._missing_digests(stored.fact for stored in facts))
        return self._submit(items, forwarded=True)

    def _submit(self, items: Sequence[FactRow], *, forwarded: bool) -> Sequence[AppendResult]:
        coalescer = self._get_process_state().coalescers[forwarded]
        return [result for batch in split_batches(items) for result in coalescer(batch)]

    async def append_facts_async(self, facts: Sequence[NewFact]) -> Sequence[AppendResult]:
        items = rows_to_append(facts, await self._missing_digests_async(fact for _, fact in facts))
        return await self._submit_async(items, forwarded=False)

    async def forward_facts_async(self, facts: Sequence[StoredFact]) -> Sequence[AppendResult]:
        items = rows_to_forward(facts, await self._missing_digests_async(stored.fact for stored in facts))
        return await self._submit_async(items, forwarded=True)

    async def _submit_async(self, items: Sequence[FactRow], *, forwarded: bool) -> Sequence[AppendResult]:
        coalescer = self._get_process_state().coalescer_for_loop()[forwarded]
        return [result for batch in split_batches(items) for result in await coalescer(batch)]

    def _missing_digests(self, facts: Iterable[Fact]) -> frozenset[str]:
        """Return the digests that facts reference and whose contents are not stored."""
        digests = frozenset(fact.artifact.digest for fact in facts if fact.artifact is not None)
        return self._artifacts.missing_digests(digests) if digests and self._artifacts else digests

    async def _missing_digests_async(self, facts: Iterable[Fact]) -> frozenset[str]:
        digests = frozenset(fact.artifact.digest for fact in facts if fact.artifact is not None)
        return (
            await asyncio.to_thread(self._artifacts.missing_digests, digests)
            if digests and self._artifacts
            else digests
        )

    def get_fact(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return self._run(self._appender.get, from_zone, message_id)

    async def get_fact_async(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return await self._run_async(self._appender.get, from_zone, message_id)

    # -- reading --------------------------------------------------------------------------------------

    def fetch_facts(
        self, reader: str, pair: ZonePair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        fetch = partial(reading.fetch, after=after, max_readers=max_readers)
        return self._run(fetch, reader, pair, limit)

    async def fetch_facts_async(
        self, reader: str, pair: ZonePair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        fetch = partial(reading.fetch, after=after, max_readers=max_readers)
        return await self._run_async(fetch, reader, pair, limit)

    def confirm_receipt(self, reader: str, pair: ZonePair, cursor: Cursor) -> None:
        self._run(reading.confirm, reader, pair, cursor)

    async def confirm_receipt_async(self, reader: str, pair: ZonePair, cursor: Cursor) -> None:
        await self._run_async(reading.confirm, reader, pair, cursor)

    def get_cursor(self, reader: str, pair: ZonePair) -> Cursor | None:
        return self._run(reading.get_cursor, reader, pair)

    async def get_cursor_async(self, reader: str, pair: ZonePair) -> Cursor | None:
        return await self._run_async(reading.get_cursor, reader, pair)

    def last_offset(self, pair: ZonePair) -> Cursor | None:
        return self._run(reading.last_offset, pair)

    async def last_offset_async(self, pair: ZonePair) -> Cursor | None:
        return await self._run_async(reading.last_offset, pair)

    def cursor_at_time(self, pair: ZonePair, unix_ms: int) -> Cursor | None:
        return self._run(reading.get_cursor_at_time, pair, unix_ms)

    async def cursor_at_time_async(self, pair: ZonePair, unix_ms: int) -> Cursor | None:
        return await self._run_async(reading.get_cursor_at_time, pair, unix_ms)

    def retire_reader(self, reader: str, pair: ZonePair, *, by: str = "") -> bool:
        return self._run(reading.retire_reader, reader, pair, by)

    async def retire_reader_async(self, reader: str, pair: ZonePair, *, by: str = "") -> bool:
        return await self._run_async(reading.retire_reader, reader, pair, by)

    def adopt_epoch(self, pair: ZonePair, cursor: Cursor, *, by: str) -> None:
        self._run(reading.adopt_epoch, pair, cursor, by)

    async def adopt_epoch_async(self, pair: ZonePair, cursor: Cursor, *, by: str) -> None:
        await self._run_async(reading.adopt_epoch, pair, cursor, by)

    def list_logs(self) -> Sequence[LogState]:
        return self._run(reading.list_logs)

    async def list_logs_async(self) -> Sequence[LogState]:
        return await self._run_async(reading.list_logs)

    # -- artifacts ------------------------------------------------------------------------------------

    def _require_artifacts(self) -> PostgresArtifacts:
        if self._artifacts is None:
            raise errors.no_content_store_error()
        return self._artifacts

    def put_object(
        self,
        bucket: str,
        key: str,
        blob: BlobSource,
        *,
        expected: StoredArtifact | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> StoredArtifact:
        return self._require_artifacts().put(ObjectName.check(bucket, key, zone), to_chunks(blob), expected, begin)

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
        artifacts, name = self._require_artifacts(), ObjectName.check(bucket, key, zone)
        if isinstance(blob, AsyncIterable):
            return await put_async(artifacts, name, blob, expected=expected, begin=begin)
        return await asyncio.to_thread(artifacts.put, name, to_chunks(blob), expected, begin)

    def uploaded_bytes(self, bucket: str, key: str, expected: StoredArtifact, *, zone: str = "") -> int:
        return self._require_artifacts().uploaded_bytes(ObjectName.check(bucket, key, zone), expected)

    async def uploaded_bytes_async(self, bucket: str, key: str, expected: StoredArtifact, *, zone: str = "") -> int:
        return await asyncio.to_thread(self.uploaded_bytes, bucket, key, expected, zone=zone)

    def get_object(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> Iterator[bytes]:
        return self._require_artifacts().read(ObjectName.check(bucket, key, zone), begin)

    async def get_object_async(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> AsyncIterator[bytes]:
        chunks = self.get_object(bucket, key, begin=begin, zone=zone)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk

    def stat_object(self, bucket: str, key: str, *, zone: str = "") -> ObjectInfo | None:
        name = ObjectName.check(bucket, key, zone)
        return None if self._artifacts is None else self._artifacts.stat(name)

    async def stat_object_async(self, bucket: str, key: str, *, zone: str = "") -> ObjectInfo | None:
        return await asyncio.to_thread(self.stat_object, bucket, key, zone=zone)

    def artifact_bytes(self) -> int | None:
        return self._run(_read_artifact_bytes)

    async def artifact_bytes_async(self) -> int | None:
        return await self._run_async(_read_artifact_bytes)

    # -- retention ------------------------------------------------------------------------------------

    def prune(self, before_unix_ms: int) -> PruneResult:
        facts = self._run(retention.drop_facts, before_unix_ms, self._now(), timeout_seconds=_PRUNE_TIMEOUT_SECONDS)
        if self._identity_retention is not None:
            latest = self._now() - int(self._identity_retention * 1000)
            self._run(retention.delete_ids, latest, timeout_seconds=_PRUNE_TIMEOUT_SECONDS)
        artifacts = self._run(retention.delete_artifacts, before_unix_ms, timeout_seconds=_PRUNE_TIMEOUT_SECONDS)
        if self._contents is not None:
            self._contents.delete_stale_uploads(before_unix_ms)
            self._run(retention.delete_contents, self._contents, before_unix_ms, timeout_seconds=_PRUNE_TIMEOUT_SECONDS)
        return PruneResult(facts, artifacts)

    async def prune_async(self, before_unix_ms: int) -> PruneResult:
        # In a thread, because content stores block.
        return await asyncio.to_thread(self.prune, before_unix_ms)


def _read_artifact_bytes(session: DatabaseSession) -> Operation[int]:
    yield from session.ensure_open()
    rows = yield Query(statements.CONTENT_BYTES)
    return rows[0][0] if rows else 0


def _list_epochs(session: DatabaseSession) -> Operation[list[EpochRecord]]:
    yield from session.ensure_open()
    return [EpochRecord(*row) for row in (yield Query(statements.EPOCHS))]


def _begin_epoch(session: DatabaseSession, why: str, by: str) -> Operation[str]:
    identity = yield from session.ensure_open()
    return (yield from session.begin_epoch(identity, why=why, by=by)).epoch
