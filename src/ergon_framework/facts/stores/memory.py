"""MemoryBoundary: facts and artifacts in this process, for tests and as the measure for the stores that last."""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Self

from ergon_framework.facts import observe
from ergon_framework.facts.blob import to_pieces
from ergon_framework.facts.boundary import (
    Appended,
    Appending,
    AsyncBlobSource,
    AsyncBoundary,
    Behind,
    BlobSource,
    Boundary,
    BoundaryCapabilities,
    KnownObject,
    LogState,
    Pruned,
    Unlisten,
)
from ergon_framework.facts.errors import (
    ArtifactLost,
    ArtifactMismatch,
    FactError,
)
from ergon_framework.facts.model import (
    Buffer,
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    ObjectName,
    Pair,
    Side,
    Stored,
    StoredFact,
    digest_of,
    zone_of_reader,
)
from ergon_framework.facts.stores import refusals
from ergon_framework.facts.stores.memory_artifacts import Artifacts, Upload

#: Seconds after which an upload that broke off is removed, if there is no room for another.
IDLE: Final = 60.0


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
            kept = {name: copy.deepcopy(getattr(self, name)) for name in ("_logs", "_ids", "_readers")}
            kept["_artifacts"] = self._artifacts.copy_stored()
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
            raise refusals.changed(stored.epoch, log.epoch)
        if stored.offset != log.end + 1:
            raise refusals.gap(stored.envelope.message_id, stored.offset, log.end)
        # Where it was appended: a confirmation is about a store buffer, here of the other side.
        origin = Side.OUTER if self._side is Side.INNER else Side.INNER
        return self._store(log, stored, origin.store_buffer)

    def _known(self, envelope: Envelope, digest: str) -> FactConfirmation | None:
        known = self._ids.get((envelope.from_zone, envelope.message_id))
        if known is None:
            return None
        if known[0].digest != digest:
            raise refusals.conflict(envelope, known[0], digest)
        return _again(known[0])

    def _log(self, pair: Pair, buffer: Buffer, epoch: str) -> _Log:
        log = self._logs.get(pair)
        if log is None:
            return _Log(epoch, buffer)
        if log.buffer is not buffer:
            raise refusals.misplaced(pair, log.buffer, buffer)
        return log

    def _store(self, log: _Log, stored: StoredFact, buffer: Buffer) -> FactConfirmation:
        envelope, reference = stored.envelope, stored.fact.artifact
        if reference is not None:
            # What the zones of this store have stored is no artifact of a zone whose facts arrive here.
            shared = ("",) if buffer is self._side.store_buffer else ()
            name = self._artifacts.check(reference, (envelope.from_zone, *shared))
        size = len(stored.fact.object_json)
        self._make_sure_of_room(facts=1, size=size)
        if reference is not None:
            self._artifacts.name(name, envelope)
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
                raise refusals.full("facts", retained, self._max_facts)
        if self._max_bytes is not None:
            used = self._used_bytes()
            if used + size > self._max_bytes:
                raise refusals.full("bytes", used, self._max_bytes)

    def _now(self) -> int:
        return int(self._wall() * 1000)

    # -- reading --------------------------------------------------------------------------------------

    def fetch_facts(
        self, reader: str, pair: Pair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        with self._lock:
            log = self._logs.get(pair)
            if max_readers is not None and (reader, pair) not in self._readers:
                self._check_readers(reader, pair, max_readers)
            begin = self._readers.setdefault((reader, pair), 0 if log is None else log.dropped)
            if after is not None:
                self._check(pair, after)
                begin = after.offset
            if log is None:
                return []
            if begin < log.dropped:
                raise refusals.gone(pair, begin, log.dropped)
            return log.behind(begin, limit)

    def _check_readers(self, reader: str, pair: Pair, most: int) -> None:
        zone = zone_of_reader(reader, pair)
        count = sum(zone_of_reader(*registered) == zone for registered in self._readers)
        if count >= most:
            raise refusals.too_many_readers(reader, zone, count, most)

    def confirm_receipt(self, reader: str, pair: Pair, cursor: Cursor) -> None:
        with self._lock:
            if (reader, pair) not in self._readers:
                raise refusals.unknown_reader(reader, pair)
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

    def cursor_at(self, pair: Pair, unix_ms: int) -> Cursor | None:
        with self._lock:
            log = self._logs.get(pair)
            if log is None:
                return None
            # A clock may be set back; what was stored before the first later one is before that moment.
            later = (place for place, stored in enumerate(log.facts) if stored.stored_at_unix_ms >= unix_ms)
            return Cursor(log.epoch, log.dropped + next(later, len(log.facts)))

    def retire_reader(self, reader: str, pair: Pair, *, by: str = "") -> bool:  # noqa: ARG002 - nothing here lasts
        with self._lock:
            return self._readers.pop((reader, pair), None) is not None

    def adopt_epoch(self, pair: Pair, cursor: Cursor, *, by: str) -> None:  # noqa: ARG002 - nothing here lasts
        with self._lock:
            log = self._logs.get(pair)
            if log is not None and log.buffer is not self._side.forward_buffer:
                log = None
            if log is None or log.end != cursor.offset:
                raise refusals.not_the_end(pair, cursor.offset, None if log is None else log.end)
            log.reborn(cursor.epoch)

    def survey(self) -> Sequence[LogState]:
        with self._lock:
            pairs = dict.fromkeys((*self._logs, *(pair for _, pair in self._readers)))
            return [self._state(pair) for pair in pairs]

    def _state(self, pair: Pair) -> LogState:
        # Nobody knows yet which of the two it will be: whoever waits here waits for facts that arrive.
        log = self._logs.get(pair) or _Log(self._epoch, self._side.forward_buffer)
        return LogState(
            pair=pair,
            buffer=log.buffer,
            epoch=log.epoch,
            first=log.dropped + 1,
            last=log.end,
            bytes=_bytes(log.facts),
            readers={reader: _behind(log, offset) for (reader, of), offset in self._readers.items() if of == pair},
        )

    def _epoch_of(self, pair: Pair) -> str:
        log = self._logs.get(pair)
        return self._epoch if log is None else log.epoch

    def _check(self, pair: Pair, cursor: Cursor) -> None:
        log = self._logs.get(pair)
        epoch = self._epoch_of(pair)
        # Whoever has read nothing has read it in no epoch.
        if cursor.epoch != epoch and cursor.offset:
            raise refusals.changed(cursor.epoch, epoch)
        end = 0 if log is None else log.end
        if not 0 <= cursor.offset <= end:
            raise refusals.never_given(pair, cursor.offset, end)

    # -- artifacts ------------------------------------------------------------------------------------

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
        name = ObjectName.check(bucket, key, zone)
        try:
            with self._receiving(name, expected, begin) as upload:
                for piece in to_pieces(blob):
                    self._add(name, upload, piece)
                return self._kept(name, upload, expected)
        except BaseException as error:
            observe.put_failed(self._side.store_buffer, error)
            raise

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
        if not isinstance(blob, AsyncIterable):
            return self.put_object(bucket, key, blob, expected=expected, begin=begin, zone=zone)
        name = ObjectName.check(bucket, key, zone)
        try:
            with self._receiving(name, expected, begin) as upload:
                async for piece in blob:
                    self._add(name, upload, piece)
                return self._kept(name, upload, expected)
        except BaseException as error:
            observe.put_failed(self._side.store_buffer, error)
            raise

    def received(self, bucket: str, key: str, expected: Stored, *, zone: str = "") -> int:
        name = ObjectName.check(bucket, key, zone)
        with self._lock:
            return self._artifacts.received(name, expected)

    @contextmanager
    def _receiving(self, name: ObjectName, expected: Stored | None, begin: int) -> Iterator[Upload]:
        with self._lock:
            if expected is not None:
                here = self._artifacts.received(name, expected)
                self._make_sure_of_upload(name, expected.size - here, expected)
            upload = self._artifacts.begin(name, expected, begin)
            self._artifacts.arriving.add(upload)
        try:
            yield upload
        except ArtifactMismatch:
            raise
        except BaseException:
            if expected is not None and upload.is_kept:
                with self._lock:
                    self._artifacts.interrupt(name, expected, upload, self._now())
            raise
        finally:
            with self._lock:
                self._artifacts.arriving.discard(upload)

    def _add(self, name: ObjectName, upload: Upload, piece: bytes) -> None:
        if self._max_bytes is not None and upload.is_kept:
            with self._lock:
                if self._artifacts.known(name) is None:
                    self._make_sure_of_upload(name, len(piece))
                else:
                    upload.is_kept = self._has_room(len(piece))
        upload.add(piece)

    def _make_sure_of_upload(self, name: ObjectName, size: int, announced: Stored | None = None) -> None:
        """Refuse bytes that there is no room for; an upload that broke off gives way to one that comes."""
        if self._max_bytes is None or self._has_room(size):
            return
        self._artifacts.sweep(self._now() - int(IDLE * 1000))
        if not self._has_room(size):
            used = self._used_bytes()
            raise refusals.no_room(name, None if announced is None else announced.size, used, self._max_bytes)

    def _has_room(self, size: int) -> bool:
        return self._max_bytes is None or self._used_bytes() + self._artifacts.upload_bytes + size <= self._max_bytes

    def _used_bytes(self) -> int:
        return self._bytes + self._artifacts.size

    def _kept(self, name: ObjectName, upload: Upload, expected: Stored | None = None) -> Stored:
        if expected is not None and upload.stored != expected:
            raise refusals.mismatch(name, expected, upload.stored)
        with self._lock:
            first = self._artifacts.found(name, upload.stored)
            if first is None:
                self._make_sure_of_room(facts=0, size=upload.size)
                stored = self._artifacts.keep(name, upload, self._now())
            elif upload.is_kept:
                self._artifacts.mend(upload)
        observe.put(self._side.store_buffer, "stored" if first is None else "repeated")
        return stored if first is None else first

    def get_object(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> Iterator[bytes]:
        name = ObjectName.check(bucket, key, zone)
        try:
            with self._lock:
                pieces = self._artifacts.read(self._artifacts.locate(name), begin)
            yield from pieces
        except ArtifactLost as error:
            observe.lost(self._side.store_buffer, error)
            raise

    async def get_object_async(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> AsyncIterator[bytes]:
        for piece in self.get_object(bucket, key, begin=begin, zone=zone):
            yield piece

    def known_object(self, bucket: str, key: str, *, zone: str = "") -> KnownObject | None:
        name = ObjectName.check(bucket, key, zone)
        with self._lock:
            name = self._artifacts.locate(name)
            stored = self._artifacts.known(name)
            if stored is None:
                return None
            namers = frozenset(self._ids[by][1] for by in self._artifacts.namers(name))
            return KnownObject(stored, namers, name.zone)

    def artifact_bytes(self) -> int | None:
        with self._lock:
            return self._artifacts.size

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
                self._artifacts.unname(stored.envelope)
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
        self, reader: str, pair: Pair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        return self.fetch_facts(reader, pair, limit, after=after, max_readers=max_readers)

    async def confirm_receipt_async(self, reader: str, pair: Pair, cursor: Cursor) -> None:
        self.confirm_receipt(reader, pair, cursor)

    async def cursor_of_async(self, reader: str, pair: Pair) -> Cursor | None:
        return self.cursor_of(reader, pair)

    async def end_of_async(self, pair: Pair) -> Cursor | None:
        return self.end_of(pair)

    async def cursor_at_async(self, pair: Pair, unix_ms: int) -> Cursor | None:
        return self.cursor_at(pair, unix_ms)

    async def retire_reader_async(self, reader: str, pair: Pair, *, by: str = "") -> bool:
        return self.retire_reader(reader, pair, by=by)

    async def adopt_epoch_async(self, pair: Pair, cursor: Cursor, *, by: str) -> None:
        self.adopt_epoch(pair, cursor, by=by)

    async def survey_async(self) -> Sequence[LogState]:
        return self.survey()

    async def received_async(self, bucket: str, key: str, expected: Stored, *, zone: str = "") -> int:
        return self.received(bucket, key, expected, zone=zone)

    async def known_object_async(self, bucket: str, key: str, *, zone: str = "") -> KnownObject | None:
        return self.known_object(bucket, key, zone=zone)

    async def artifact_bytes_async(self) -> int | None:
        return self.artifact_bytes()

    async def prune_async(self, before_unix_ms: int) -> Pruned:
        return self.prune(before_unix_ms)


def _bytes(facts: Iterable[StoredFact]) -> int:
    return sum(len(stored.fact.object_json.encode()) for stored in facts)


def _behind(log: _Log, offset: int) -> Behind:
    waiting = log.behind(offset, len(log.facts))
    since = waiting[0].stored_at_unix_ms if waiting else None
    return Behind(offset, len(waiting), _bytes(waiting), since)


def _again(confirmation: FactConfirmation) -> FactConfirmation:
    return FactConfirmation(
        message_id=confirmation.message_id,
        offset=confirmation.offset,
        epoch=confirmation.epoch,
        digest=confirmation.digest,
        buffer=confirmation.buffer,
        duplicate=True,
    )
