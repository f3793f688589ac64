"""MemoryBoundary: facts and artifacts in this process, for tests and as the measure for the stores that last."""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Self

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts import observe
from ergon_framework.facts.boundary import (
    Appended,
    Appending,
    AsyncBoundary,
    Boundary,
    BoundaryCapabilities,
    Pruned,
    Unlisten,
)
from ergon_framework.facts.errors import (
    ArtifactLost,
    BufferFull,
    EpochChanged,
    FactConflict,
    FactError,
    OffsetAhead,
    OffsetGone,
    ReaderUnknown,
)
from ergon_framework.facts.model import (
    Buffer,
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    Pair,
    Side,
    Stored,
    StoredFact,
    check_place,
    digest_of,
)
from ergon_framework.facts.stores.memory_artifacts import Artifacts, Upload


class _Log:
    """The facts of one pair of zones: ``dropped`` are gone, and the next offset is one behind the last."""

    def __init__(self, epoch: str, buffer: Buffer) -> None:
        self.epoch = epoch
        self.buffer = buffer
        self.dropped = 0
        self.facts: list[StoredFact] = []

    @property
    def end(self) -> int:
        return self.dropped + len(self.facts)

    def reborn(self, epoch: str) -> None:
        """Offsets are given anew from here on, and whoever has read some of the old ones must notice."""
        self.epoch = epoch
        self.facts = [replace(stored, epoch=epoch) for stored in self.facts]

    def behind(self, offset: int, limit: int) -> list[StoredFact]:
        start = offset - self.dropped
        return self.facts[start : start + max(0, limit)]


class MemoryBoundary(Boundary, AsyncBoundary):
    """A store that lives as long as this process, and so is never strict; safe from any thread and event loop.

    *max_facts* and *max_bytes* bound what is retained: beyond, appending is BufferFull and nothing is lost.
    Ids are kept for ever, or for *identity_retention* seconds and at least as long as their facts.
    """

    def __init__(
        self,
        *,
        side: Side = Side.INNER,
        max_facts: int | None = None,
        max_bytes: int | None = None,
        identity_retention: float | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._side = side
        self._max_facts = max_facts
        self._max_bytes = max_bytes
        self._identity_retention = identity_retention
        self._wall = wall
        self._epoch = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._logs: dict[Pair, _Log] = {}
        #: By zone and id: what was confirmed first, to which zone, and when it was stored.
        self._ids: dict[tuple[str, str], tuple[FactConfirmation, Pair, int]] = {}
        self._readers: dict[tuple[str, Pair], int] = {}
        self._artifacts = Artifacts()
        self._bytes = 0
        self._listeners: tuple[Callable[[], None], ...] = ()

    @property
    def epoch(self) -> str:
        return self._epoch

    @property
    def capabilities(self) -> BoundaryCapabilities:
        return BoundaryCapabilities(durable=False, side=self._side)

    def listen(self, wake: Callable[[], None]) -> Unlisten:
        with self._lock:
            self._listeners = (*self._listeners, wake)

        def unlisten() -> None:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not wake)

        return unlisten

    def restored(self) -> Self:
        """A store as it would be if this one's state of now were a backup that is put back: of another epoch."""
        epoch = uuid.uuid4().hex
        twin = copy.copy(self)
        with self._lock:
            kept = {name: copy.deepcopy(getattr(self, name)) for name in ("_logs", "_ids", "_readers", "_artifacts")}
        for log in kept["_logs"].values():
            if log.buffer is self._side.store_buffer:
                log.reborn(epoch)
        # Not shared with the one that goes on: its lock, and those who listen to it.
        for name, value in {**kept, "_epoch": epoch, "_lock": threading.Lock(), "_listeners": ()}.items():
            setattr(twin, name, value)
        return twin

    # -- facts ----------------------------------------------------------------------------------------

    def append_facts(self, facts: Sequence[Appending]) -> Sequence[Appended]:
        with self._lock:
            results = [self._one(self._append, envelope, fact) for envelope, fact in facts]
        return self._told(results, self._side.store_buffer)

    def forward_facts(self, facts: Sequence[StoredFact]) -> Sequence[Appended]:
        with self._lock:
            results = [self._one(self._forward, stored) for stored in facts]
        return self._told(results, self._side.forward_buffer)

    def get_fact(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        with self._lock:
            known = self._ids.get((from_zone, message_id))
            return None if known is None else _again(known[0])

    def _one(self, act: Callable[..., FactConfirmation], *args: object) -> Appended:
        try:
            return act(*args)
        except FactError as error:  # that fact's alone: its neighbours are stored
            return error

    def _told(self, results: list[Appended], buffer: Buffer) -> list[Appended]:
        for result in results:
            observe.appended(buffer, result)
        if any(isinstance(result, FactConfirmation) and not result.duplicate for result in results):
            for wake in self._listeners:
                wake()
        return results

    def _append(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        digest = digest_of(envelope, fact)
        known = self._known(envelope, digest)
        if known is not None:
            return known
        log = self._log(envelope.pair, self._side.store_buffer, self._epoch)
        stored = StoredFact(
            envelope=envelope,
            fact=fact,
            digest=digest,
            offset=log.end + 1,
            epoch=log.epoch,
            stored_at_unix_ms=self._now(),
        )
        return self._store(log, stored, self._side.store_buffer)

    def _forward(self, stored: StoredFact) -> FactConfirmation:
        known = self._known(stored.envelope, stored.digest)
        if known is not None:
            return known
        log = self._log(stored.envelope.pair, self._side.forward_buffer, stored.epoch)
        if stored.epoch != log.epoch:
            raise _changed(stored.epoch, log.epoch)
        if stored.offset != log.end + 1:
            raise OffsetAhead(
                f"the fact {stored.envelope.message_id!r} has offset {stored.offset}, and the last one here is "
                f"{log.end}; forward those in between first"
            )
        # Where it was appended: a confirmation is about a store buffer, here of the other side.
        origin = Side.OUTER if self._side is Side.INNER else Side.INNER
        return self._store(log, stored, origin.store_buffer)

    def _known(self, envelope: Envelope, digest: str) -> FactConfirmation | None:
        known = self._ids.get((envelope.from_zone, envelope.message_id))
        if known is None:
            return None
        if known[0].digest != digest:
            raise FactConflict(
                f"the fact {envelope.message_id!r} of {envelope.from_zone!r} is stored at offset {known[0].offset} "
                f"with {known[0].digest}, and this one has {digest}; make ids of all that tells two facts apart",
                from_zone=envelope.from_zone,
                message_id=envelope.message_id,
            )
        return _again(known[0])

    def _log(self, pair: Pair, buffer: Buffer, epoch: str) -> _Log:
        log = self._logs.get(pair)
        if log is None:
            return _Log(epoch, buffer)
        if log.buffer is not buffer:
            raise _Misplaced(
                f"facts from {pair.from_zone!r} to {pair.to_zone!r} are in the {log.buffer} of this store, and cannot "
                f"be put into its {buffer} too: append where they come from, and forward to where they go"
            )
        return log

    def _store(self, log: _Log, stored: StoredFact, buffer: Buffer) -> FactConfirmation:
        envelope, reference = stored.envelope, stored.fact.artifact
        if reference is not None:
            self._artifacts.check(reference)
        size = len(stored.fact.object_json)
        self._make_sure_of_room(facts=1, size=size)
        if reference is not None:
            self._artifacts.name(reference, envelope)
        self._logs[envelope.pair] = log
        log.facts.append(stored)
        self._bytes += size
        confirmation = FactConfirmation(
            message_id=envelope.message_id,
            offset=stored.offset,
            epoch=stored.epoch,
            digest=stored.digest,
            buffer=buffer,
        )
        self._ids[envelope.from_zone, envelope.message_id] = confirmation, envelope.pair, self._now()
        return confirmation

    def _make_sure_of_room(self, *, facts: int, size: int) -> None:
        if self._max_facts is not None:
            retained = sum(len(log.facts) for log in self._logs.values())
            if retained + facts > self._max_facts:
                raise BufferFull(f"{retained} facts are retained and {self._max_facts} is the most: nothing was stored")
        if self._max_bytes is not None:
            used = self._bytes + self._artifacts.size
            if used + size > self._max_bytes:
                raise BufferFull(f"{used} bytes are retained and {self._max_bytes} is the most: nothing was stored")

    def _now(self) -> int:
        return int(self._wall() * 1000)

    # -- reading --------------------------------------------------------------------------------------

    def fetch_facts(self, reader: str, pair: Pair, limit: int, *, after: Cursor | None = None) -> Sequence[StoredFact]:
        with self._lock:
            log = self._logs.get(pair)
            begin = self._readers.setdefault((reader, pair), 0 if log is None else log.dropped)
            if after is not None:
                self._check(pair, after)
                begin = after.offset
            if log is None:
                return []
            if begin < log.dropped:
                raise OffsetGone(
                    f"facts up to offset {log.dropped} from {pair.from_zone!r} to {pair.to_zone!r} are no longer "
                    f"retained, and {begin + 1} was asked for; begin behind {log.dropped}"
                )
            return log.behind(begin, limit)

    def confirm_receipt(self, reader: str, pair: Pair, cursor: Cursor) -> None:
        with self._lock:
            if (reader, pair) not in self._readers:
                raise ReaderUnknown(
                    f"{reader!r} is not registered for facts from {pair.from_zone!r} to {pair.to_zone!r}; fetching "
                    "registers a reader"
                )
            self._check(pair, cursor)
            self._readers[reader, pair] = max(self._readers[reader, pair], cursor.offset)

    def cursor_of(self, reader: str, pair: Pair) -> Cursor | None:
        with self._lock:
            offset = self._readers.get((reader, pair))
            return None if offset is None else Cursor(self._epoch_of(pair), offset)

    def end_of(self, pair: Pair) -> Cursor | None:
        with self._lock:
            log = self._logs.get(pair)
            return None if log is None else Cursor(log.epoch, log.end)

    def retire_reader(self, reader: str, pair: Pair) -> bool:
        with self._lock:
            return self._readers.pop((reader, pair), None) is not None

    def _epoch_of(self, pair: Pair) -> str:
        log = self._logs.get(pair)
        return self._epoch if log is None else log.epoch

    def _check(self, pair: Pair, cursor: Cursor) -> None:
        log = self._logs.get(pair)
        epoch = self._epoch_of(pair)
        # Whoever has read nothing has read it in no epoch.
        if cursor.epoch != epoch and cursor.offset:
            raise _changed(cursor.epoch, epoch)
        end = 0 if log is None else log.end
        if not 0 <= cursor.offset <= end:
            raise OffsetAhead(
                f"offset {cursor.offset} from {pair.from_zone!r} to {pair.to_zone!r} was never given; the last is {end}"
            )

    # -- artifacts ------------------------------------------------------------------------------------

    def put_object(self, bucket: str, key: str, blob: Iterable[bytes]) -> Stored:
        check_place(bucket, key)
        upload = Upload()
        try:
            for piece in blob:
                upload.add(piece)
            return self._kept(bucket, key, upload)
        except BaseException as error:
            observe.put_failed(self._side.store_buffer, error)
            raise

    async def put_object_async(self, bucket: str, key: str, blob: Iterable[bytes] | AsyncIterable[bytes]) -> Stored:
        if not isinstance(blob, AsyncIterable):
            return self.put_object(bucket, key, blob)
        check_place(bucket, key)
        upload = Upload()
        try:
            async for piece in blob:
                upload.add(piece)
            return self._kept(bucket, key, upload)
        except BaseException as error:
            observe.put_failed(self._side.store_buffer, error)
            raise

    def _kept(self, bucket: str, key: str, upload: Upload) -> Stored:
        with self._lock:
            first = self._artifacts.found(bucket, key, upload.stored)
            if first is None:
                self._make_sure_of_room(facts=0, size=upload.size)
                stored = self._artifacts.keep(bucket, key, upload, self._now())
        observe.put(self._side.store_buffer, "stored" if first is None else "repeated")
        return stored if first is None else first

    def get_object(self, bucket: str, key: str) -> Iterator[bytes]:
        check_place(bucket, key)
        try:
            with self._lock:
                pieces = self._artifacts.read(bucket, key)
            yield from pieces
        except ArtifactLost as error:
            observe.lost(self._side.store_buffer, error)
            raise

    async def get_object_async(self, bucket: str, key: str) -> AsyncIterator[bytes]:
        for piece in self.get_object(bucket, key):
            yield piece

    # -- retention ------------------------------------------------------------------------------------

    def prune(self, before_unix_ms: int) -> Pruned:
        with self._lock:
            facts = sum(self._prune(pair, log, before_unix_ms) for pair, log in self._logs.items())
            self._forget_ids()
            return Pruned(facts, self._artifacts.prune(before_unix_ms))

    def _prune(self, pair: Pair, log: _Log, before: int) -> int:
        confirmed = [offset for (_, of), offset in self._readers.items() if of == pair]
        # Nobody has come yet who would read it: that is no reason to throw it away.
        done = min(confirmed, default=0) - log.dropped
        count = 0
        while count < min(done, len(log.facts)) and log.facts[count].stored_at_unix_ms < before:
            stored = log.facts[count]
            self._bytes -= len(stored.fact.object_json)
            if stored.fact.artifact is not None:
                self._artifacts.unname(stored.fact.artifact, stored.envelope)
            count += 1
        del log.facts[:count]
        log.dropped += count
        return count

    def _forget_ids(self) -> None:
        if self._identity_retention is None:
            return
        latest = self._now() - int(self._identity_retention * 1000)
        gone = [
            known
            for known, (confirmation, pair, at) in self._ids.items()
            if at < latest and confirmation.offset <= self._logs[pair].dropped
        ]
        for known in gone:
            del self._ids[known]

    # -- the async flavour: nothing below waits, so it is the same code ---------------------------------

    async def append_facts_async(self, facts: Sequence[Appending]) -> Sequence[Appended]:
        return self.append_facts(facts)

    async def forward_facts_async(self, facts: Sequence[StoredFact]) -> Sequence[Appended]:
        return self.forward_facts(facts)

    async def get_fact_async(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return self.get_fact(from_zone, message_id)

    async def fetch_facts_async(
        self, reader: str, pair: Pair, limit: int, *, after: Cursor | None = None
    ) -> Sequence[StoredFact]:
        return self.fetch_facts(reader, pair, limit, after=after)

    async def confirm_receipt_async(self, reader: str, pair: Pair, cursor: Cursor) -> None:
        self.confirm_receipt(reader, pair, cursor)

    async def cursor_of_async(self, reader: str, pair: Pair) -> Cursor | None:
        return self.cursor_of(reader, pair)

    async def end_of_async(self, pair: Pair) -> Cursor | None:
        return self.end_of(pair)

    async def retire_reader_async(self, reader: str, pair: Pair) -> bool:
        return self.retire_reader(reader, pair)

    async def prune_async(self, before_unix_ms: int) -> Pruned:
        return self.prune(before_unix_ms)


class _Misplaced(FactError, ConfigurationError):
    """Facts of one pair of zones are to go into two buffers of one store."""

    final = True
    code = "misplaced"


def _again(confirmation: FactConfirmation) -> FactConfirmation:
    return FactConfirmation(
        message_id=confirmation.message_id,
        offset=confirmation.offset,
        epoch=confirmation.epoch,
        digest=confirmation.digest,
        buffer=confirmation.buffer,
        duplicate=True,
    )


def _changed(given: str, now: str) -> EpochChanged:
    return EpochChanged(
        f"the cursor is of epoch {given!r} and the store is in {now!r}: it was put back from a backup, and offsets "
        "may mean other facts; compare the two before you go on"
    )
