"""PostgresBoundary: facts in PostgreSQL, in both flavours; the bytes of artifacts are in contents beside it."""

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

from ergon_framework.connectors.postgres.queue import VARIABLE
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts import observe
from ergon_framework.facts.blob import to_pieces
from ergon_framework.facts.boundary import (
    Appended,
    Appending,
    AsyncBlobSource,
    AsyncBoundary,
    BlobSource,
    Boundary,
    BoundaryCapabilities,
    KnownObject,
    LogState,
    Pruned,
    Unlisten,
    confirmed,
)
from ergon_framework.facts.contents import Contents
from ergon_framework.facts.model import (
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    ObjectName,
    Pair,
    Side,
    Stored,
    StoredFact,
)
from ergon_framework.facts.stores import postgres_reading as reading
from ergon_framework.facts.stores import postgres_retention as retention
from ergon_framework.facts.stores import postgres_statements as statements
from ergon_framework.facts.stores import refusals
from ergon_framework.facts.stores.postgres_appending import Appending as Appender
from ergon_framework.facts.stores.postgres_batch import Item, appending, forwarding, plain
from ergon_framework.facts.stores.postgres_bell import Bell
from ergon_framework.facts.stores.postgres_objects import Objects, put_async
from ergon_framework.facts.stores.postgres_partitions import made_ahead
from ergon_framework.facts.stores.postgres_sharing import AsyncShared, Shared, portions
from ergon_framework.facts.stores.postgres_side import PostgresFactSide
from ergon_framework.facts.stores.postgres_store import Store
from ergon_framework.schema.operation import Operation, Query

R = TypeVar("R")

#: Seconds that a call may take, and that a round of retention may.
_WITHIN: Final = 30.0
_PRUNING: Final = 600.0


class EpochBegun(NamedTuple):
    """One epoch, of this store or of one that facts were forwarded from."""

    epoch: str
    began_at: datetime
    why: str
    by: str
    #: Whether the store is in it.
    present: bool


class _Premises:
    """What a boundary has in one process: a forked child has another."""

    def __init__(self, store: Store, appender: Appender) -> None:
        self.store = store
        self.bell = Bell(store.lines)
        self._appender = appender
        #: Facts that are appended and such that are forwarded never go together: they are different statements.
        self.shared = {kind: Shared(self._commit) for kind in (False, True)}
        self._per_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[bool, AsyncShared]] = WeakKeyDictionary()
        #: The loop that asked last, which mostly asks again, and its own; in one piece, for loops of several threads.
        self._last: tuple[ref[asyncio.AbstractEventLoop], dict[bool, AsyncShared]] | None = None

    def shared_here(self) -> dict[bool, AsyncShared]:
        """Those of the running event loop."""
        loop = asyncio.get_running_loop()
        last = self._last
        if last is not None and last[0]() is loop:
            return last[1]
        found = self._per_loop.get(loop)
        if found is None:
            found = self._per_loop[loop] = {kind: AsyncShared(self._commit_async) for kind in (False, True)}
        self._last = ref(loop), found
        return found

    def _commit(self, items: Sequence[Item]) -> Sequence[Appended]:
        return self._told(items, self.store.lines.run(self._appender.commit(self.store, items), within=_WITHIN))

    async def _commit_async(self, items: Sequence[Item]) -> Sequence[Appended]:
        commit = self._appender.commit(self.store, items)
        return self._told(items, await self.store.lines.run_async(commit, within=_WITHIN))

    def _told(self, items: Sequence[Item], results: Sequence[Appended]) -> Sequence[Appended]:
        """Count what has come of them, and wake whoever waits here for new ones."""
        side = self.store.side
        observe.appended_all(side.store_buffer if items[0].origin is None else side.forward_buffer, results)
        if any(isinstance(result, FactConfirmation) and not result.duplicate for result in results):
            self.bell.ring()
        return results


class PostgresBoundary(Boundary, AsyncBoundary):
    """A store in a database that ``ergon db upgrade`` has prepared; one database is one store.

    The address is *dsn*, or the environment's ``ERGON_POSTGRES__DSN``. *contents* keeps the bytes of artifacts; without
    it there are none. *max_facts* and *max_bytes* bound what is retained: beyond, appending is BufferFull and nothing
    is lost. Ids are kept for ever, or for *identity_retention* seconds and at least as long as their facts. A database
    that may lose what it has committed is refused, unless *accept_loss*.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        side: Side = Side.INNER,
        contents: Contents | None = None,
        max_facts: int | None = None,
        max_bytes: int | None = None,
        identity_retention: float | None = None,
        accept_loss: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._dsn = dsn
        self._side = Side(side)
        self._contents = contents
        self._identity_retention = identity_retention
        self._accept_loss = accept_loss
        self._wall = wall
        self._appender = Appender(self._side, max_facts=max_facts, max_bytes=max_bytes, wall=wall)
        self._objects: Objects | None = None
        if contents is not None:
            self._objects = Objects(
                contents, side=self._side, store=lambda: self._premises().store, max_bytes=max_bytes, now=self._now
            )
        self._lock = threading.Lock()
        self._here: _Premises | None = None
        self._inherited: _Premises | None = None

    def __repr__(self) -> str:
        return f"PostgresBoundary(side={self._side.value!r})"

    def _now(self) -> int:
        return int(self._wall() * 1000)

    # -- coming and going -----------------------------------------------------------------------------

    def _premises(self) -> _Premises:
        here = self._here
        if here is not None and here.store.owner == os.getpid():
            return here
        with self._lock:
            if self._here is not None and self._here.store.owner != os.getpid():
                # Kept, so that nobody collects connections that are the parent's.
                self._inherited, self._here = self._here, None
            if self._here is None:
                store = Store(self._address(), side=self._side, accept_loss=self._accept_loss)
                self._here = _Premises(store, self._appender)
            return self._here

    def _address(self) -> str:
        dsn = self._dsn or os.environ.get(VARIABLE)
        if not dsn:
            raise ConfigurationError(f"facts need a database: set {VARIABLE} in the environment or give dsn=…")
        return dsn

    def _run(self, work: Callable[..., Operation[R]], *args: Any, within: float = _WITHIN) -> R:
        store = self._premises().store
        return store.lines.run(work(store, *args), within=within)

    async def _run_async(self, work: Callable[..., Operation[R]], *args: Any, within: float = _WITHIN) -> R:
        store = self._premises().store
        return await store.lines.run_async(work(store, *args), within=within)

    def open(self) -> None:
        """Connect; refuse a database that is too old, of the other side, or may lose what it has committed."""
        try:
            self._run(self._opened)
        except BaseException:
            self.close()
            raise

    async def open_async(self) -> None:
        try:
            await self._run_async(self._opened)
        except BaseException:
            await self.close_async()
            raise

    def _opened(self, store: Store) -> Operation[None]:
        yield from store.opened()
        yield from made_ahead(self._now())

    def close(self) -> None:
        """Disconnect; another call connects again."""
        here = self._left()
        if here is not None:
            here.store.lines.close()

    async def close_async(self) -> None:
        here = self._left()
        if here is not None:
            await here.store.lines.close_async()

    def _left(self) -> _Premises | None:
        with self._lock:
            here, self._here = self._here, None
        if here is not None:
            here.bell.close()
        return here

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

    # -- what it is -----------------------------------------------------------------------------------

    @property
    def epoch(self) -> str:
        """The present epoch; of a store that was not opened yet it has to be asked for, which blocks."""
        known = self._premises().store.known
        return (known or self._run(Store.opened)).epoch

    @property
    def capabilities(self) -> BoundaryCapabilities:
        """What it can do; whether it is durable is known once it was opened."""
        store = self._premises().store
        worth = [None if store.durability is None else store.durability.durable]
        if self._contents is not None:
            worth.append(self._contents.durable)
        durable = False if False in worth else None if None in worth else True
        return BoundaryCapabilities(durable=durable, side=self._side, artifacts=self._contents is not None)

    @property
    def durability(self) -> str | None:
        """In words, what a power loss could cost; None before the store was opened."""
        durability = self._premises().store.durability
        return None if durability is None else durability.words

    def listen(self, wake: Callable[[], None]) -> Unlisten:
        return self._premises().bell.hang(wake)

    def fact_side(self) -> PostgresFactSide:
        """In the same database, so that what has succeeded costs no more than its receipt."""
        return PostgresFactSide.beside(self._run, self._run_async)

    def new_epoch(self, *, by: str, why: str = "") -> str:
        """Begin a new epoch, as somebody must who knows that an older state was put back; *by* is kept."""
        return self._run(_renewed, why or "an operator has begun it", by)

    async def new_epoch_async(self, *, by: str, why: str = "") -> str:
        return await self._run_async(_renewed, why or "an operator has begun it", by)

    def epochs(self) -> Sequence[EpochBegun]:
        """All epochs that are known here, the newest first: who began or adopted each of them, when and why."""
        return self._run(_epochs)

    async def epochs_async(self) -> Sequence[EpochBegun]:
        return await self._run_async(_epochs)

    # -- facts ----------------------------------------------------------------------------------------

    def append_fact(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        if fact.artifact is not None:
            return super().append_fact(envelope, fact)
        # The everyday case, by the shortest way.
        return confirmed(self._premises().shared[False]([plain(envelope, fact)])[0])

    def append_fact_async(self, envelope: Envelope, fact: Fact) -> Coroutine[Any, Any, FactConfirmation]:
        if fact.artifact is not None:
            return super().append_fact_async(envelope, fact)
        return self._premises().shared_here()[False].one(plain(envelope, fact))

    def append_facts(self, facts: Sequence[Appending]) -> Sequence[Appended]:
        items = appending(facts, self._absent(fact for _, fact in facts))
        return self._shared(items, forwarded=False)

    def forward_facts(self, facts: Sequence[StoredFact]) -> Sequence[Appended]:
        items = forwarding(facts, self._absent(stored.fact for stored in facts))
        return self._shared(items, forwarded=True)

    def _shared(self, items: Sequence[Item], *, forwarded: bool) -> Sequence[Appended]:
        shared = self._premises().shared[forwarded]
        return [result for portion in portions(items) for result in shared(portion)]

    async def append_facts_async(self, facts: Sequence[Appending]) -> Sequence[Appended]:
        items = appending(facts, await self._absent_async(fact for _, fact in facts))
        return await self._shared_async(items, forwarded=False)

    async def forward_facts_async(self, facts: Sequence[StoredFact]) -> Sequence[Appended]:
        items = forwarding(facts, await self._absent_async(stored.fact for stored in facts))
        return await self._shared_async(items, forwarded=True)

    async def _shared_async(self, items: Sequence[Item], *, forwarded: bool) -> Sequence[Appended]:
        shared = self._premises().shared_here()[forwarded]
        return [result for portion in portions(items) for result in await shared(portion)]

    def _absent(self, facts: Iterable[Fact]) -> frozenset[str]:
        """Digests of contents that facts name and that are not here."""
        named = frozenset(fact.artifact.digest for fact in facts if fact.artifact is not None)
        return self._objects.absent(named) if named and self._objects else named

    async def _absent_async(self, facts: Iterable[Fact]) -> frozenset[str]:
        named = frozenset(fact.artifact.digest for fact in facts if fact.artifact is not None)
        return await asyncio.to_thread(self._objects.absent, named) if named and self._objects else named

    def get_fact(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return self._run(self._appender.get, from_zone, message_id)

    async def get_fact_async(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return await self._run_async(self._appender.get, from_zone, message_id)

    # -- reading --------------------------------------------------------------------------------------

    def fetch_facts(
        self, reader: str, pair: Pair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        fetch = partial(reading.fetch, after=after, max_readers=max_readers)
        return self._run(fetch, reader, pair, limit)

    async def fetch_facts_async(
        self, reader: str, pair: Pair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        fetch = partial(reading.fetch, after=after, max_readers=max_readers)
        return await self._run_async(fetch, reader, pair, limit)

    def confirm_receipt(self, reader: str, pair: Pair, cursor: Cursor) -> None:
        self._run(reading.confirm, reader, pair, cursor)

    async def confirm_receipt_async(self, reader: str, pair: Pair, cursor: Cursor) -> None:
        await self._run_async(reading.confirm, reader, pair, cursor)

    def cursor_of(self, reader: str, pair: Pair) -> Cursor | None:
        return self._run(reading.cursor_of, reader, pair)

    async def cursor_of_async(self, reader: str, pair: Pair) -> Cursor | None:
        return await self._run_async(reading.cursor_of, reader, pair)

    def end_of(self, pair: Pair) -> Cursor | None:
        return self._run(reading.end_of, pair)

    async def end_of_async(self, pair: Pair) -> Cursor | None:
        return await self._run_async(reading.end_of, pair)

    def cursor_at(self, pair: Pair, unix_ms: int) -> Cursor | None:
        return self._run(reading.cursor_at, pair, unix_ms)

    async def cursor_at_async(self, pair: Pair, unix_ms: int) -> Cursor | None:
        return await self._run_async(reading.cursor_at, pair, unix_ms)

    def retire_reader(self, reader: str, pair: Pair, *, by: str = "") -> bool:
        return self._run(reading.retire, reader, pair, by)

    async def retire_reader_async(self, reader: str, pair: Pair, *, by: str = "") -> bool:
        return await self._run_async(reading.retire, reader, pair, by)

    def adopt_epoch(self, pair: Pair, cursor: Cursor, *, by: str) -> None:
        self._run(reading.adopt, pair, cursor, by)

    async def adopt_epoch_async(self, pair: Pair, cursor: Cursor, *, by: str) -> None:
        await self._run_async(reading.adopt, pair, cursor, by)

    def survey(self) -> Sequence[LogState]:
        return self._run(reading.survey)

    async def survey_async(self) -> Sequence[LogState]:
        return await self._run_async(reading.survey)

    # -- artifacts ------------------------------------------------------------------------------------

    def _kept(self) -> Objects:
        if self._objects is None:
            raise refusals.no_contents()
        return self._objects

    def put_object(
        self,
        bucket: str,
        key: str,
        blob: BlobSource,
        *,
        expected: Stored | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> Stored:
        return self._kept().put(ObjectName.check(bucket, key, zone), to_pieces(blob), expected, begin)

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
        objects, name = self._kept(), ObjectName.check(bucket, key, zone)
        if isinstance(blob, AsyncIterable):
            return await put_async(objects, name, blob, expected=expected, begin=begin)
        return await asyncio.to_thread(objects.put, name, to_pieces(blob), expected, begin)

    def received(self, bucket: str, key: str, expected: Stored, *, zone: str = "") -> int:
        return self._kept().received(ObjectName.check(bucket, key, zone), expected)

    async def received_async(self, bucket: str, key: str, expected: Stored, *, zone: str = "") -> int:
        return await asyncio.to_thread(self.received, bucket, key, expected, zone=zone)

    def get_object(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> Iterator[bytes]:
        return self._kept().read(ObjectName.check(bucket, key, zone), begin)

    async def get_object_async(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> AsyncIterator[bytes]:
        pieces = self.get_object(bucket, key, begin=begin, zone=zone)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    def known_object(self, bucket: str, key: str, *, zone: str = "") -> KnownObject | None:
        name = ObjectName.check(bucket, key, zone)
        return None if self._objects is None else self._objects.known(name)

    async def known_object_async(self, bucket: str, key: str, *, zone: str = "") -> KnownObject | None:
        return await asyncio.to_thread(self.known_object, bucket, key, zone=zone)

    def artifact_bytes(self) -> int | None:
        return self._run(_artifact_bytes)

    async def artifact_bytes_async(self) -> int | None:
        return await self._run_async(_artifact_bytes)

    # -- retention ------------------------------------------------------------------------------------

    def prune(self, before_unix_ms: int) -> Pruned:
        facts = self._run(retention.drop_facts, before_unix_ms, self._now(), within=_PRUNING)
        if self._identity_retention is not None:
            latest = self._now() - int(self._identity_retention * 1000)
            self._run(retention.forget_ids, latest, within=_PRUNING)
        artifacts = self._run(retention.drop_objects, before_unix_ms, within=_PRUNING)
        if self._contents is not None:
            self._contents.sweep(before_unix_ms)
            self._run(retention.drop_contents, self._contents, before_unix_ms, within=_PRUNING)
        return Pruned(facts, artifacts)

    async def prune_async(self, before_unix_ms: int) -> Pruned:
        # In a thread: contents block.
        return await asyncio.to_thread(self.prune, before_unix_ms)


def _artifact_bytes(store: Store) -> Operation[int]:
    yield from store.opened()
    found = yield Query(statements.CONTENT_BYTES)
    return found[0][0] if found else 0


def _epochs(store: Store) -> Operation[list[EpochBegun]]:
    yield from store.opened()
    return [EpochBegun(*row) for row in (yield Query(statements.EPOCHS))]


def _renewed(store: Store, why: str, by: str) -> Operation[str]:
    known = yield from store.opened()
    return (yield from store.renewed(known, why=why, by=by)).epoch
