"""MemoryBoundary: facts and artifacts in this process, for tests and as the reference for durable stores.

The facts that one zone sends to another, a pair, are a log, numbered by offsets. A store is on one side of the boundary
between two zones: its own zones append facts to its store buffer, and facts of the other side are forwarded to its
forward buffer. An epoch is the incarnation of the store that assigned the offsets; a restored backup begins a new one.
"""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Self

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
    ReaderLag,
    Unlisten,
)
from ergon_framework.facts.errors import (
    ArtifactLost,
    ArtifactMismatch,
    FactError,
)
from ergon_framework.facts.model import (
    BoundarySide,
    Buffer,
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    ObjectName,
    StoredArtifact,
    StoredFact,
    ZonePair,
    fact_digest,
    zone_of_reader,
)
from ergon_framework.facts.stores import errors
from ergon_framework.facts.stores.memory_contents import Artifacts, MemoryUpload

#: Seconds after which an interrupted upload may be removed to free space for another.
IDLE_UPLOAD_SECONDS: Final = 60.0


class _Log:
    """The facts of one pair of zones; ``pruned_count`` facts were removed from its beginning."""

    def __init__(self, epoch: str, buffer: Buffer) -> None:
        self.epoch = epoch
        self.buffer = buffer
        self.pruned_count = 0
        self.facts: list[StoredFact] = []

    @property
    def end(self) -> int:
        return self.pruned_count + len(self.facts)

    def restart_epoch(self, epoch: str) -> None:
        """Start a new epoch: offsets are assigned again from here, and readers of old offsets must detect it."""
        self.epoch = epoch
        self.facts = [replace(stored, epoch=epoch) for stored in self.facts]

    def list_after(self, offset: int, limit: int) -> list[StoredFact]:
        start = offset - self.pruned_count
        return self.facts[start : start + max(0, limit)]


class MemoryBoundary(Boundary, AsyncBoundary):
    """A store that lives as long as this process and so is never durable; safe from any thread and event loop.

    *max_facts* and *max_bytes* bound what is retained: beyond them, an append raises BufferFull and nothing is lost.
    Ids are kept without limit, or for *identity_retention* seconds and at least as long as their facts.
    """

    def __init__(
        self,
        *,
        side: BoundarySide = BoundarySide.INNER,
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
        self._logs: dict[ZonePair, _Log] = {}
        #: By zone and id: the first confirmation, its pair of zones, and when it was stored.
        self._ids: dict[tuple[str, str], tuple[FactConfirmation, ZonePair, int]] = {}
        #: By reader and pair: the offset that the reader has confirmed.
        self._readers: dict[tuple[str, ZonePair], int] = {}
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

    def as_restored_backup(self) -> Self:
        """Return a store with this one's present state in a new epoch, as if restored from a backup."""
        epoch = uuid.uuid4().hex
        clone = copy.copy(self)
        with self._lock:
            state = {name: copy.deepcopy(getattr(self, name)) for name in ("_logs", "_ids", "_readers")}
            state["_artifacts"] = self._artifacts.copy_stored()
        for log in state["_logs"].values():
            # Forwarded facts keep the epoch of the store that they come from.
            if log.buffer is self._side.store_buffer:
                log.restart_epoch(epoch)
        # The lock and the listeners are not shared with the original store.
        for name, value in {**state, "_epoch": epoch, "_lock": threading.Lock(), "_listeners": ()}.items():
            setattr(clone, name, value)
        return clone

    # -- facts ----------------------------------------------------------------------------------------

    def append_facts(self, facts: Sequence[NewFact]) -> Sequence[AppendResult]:
        with self._lock:
            results = [self._apply_one(self._append, envelope, fact) for envelope, fact in facts]
        return self._record_results(results, self._side.store_buffer)

    def forward_facts(self, facts: Sequence[StoredFact]) -> Sequence[AppendResult]:
        with self._lock:
            results = [self._apply_one(self._forward, stored) for stored in facts]
        return self._record_results(results, self._side.forward_buffer)

    def get_fact(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        with self._lock:
            entry = self._ids.get((from_zone, message_id))
            return None if entry is None else _to_duplicate(entry[0])

    def _apply_one(self, operation: Callable[..., FactConfirmation], *args: object) -> AppendResult:
        try:
            return operation(*args)
        except FactError as error:  # only this fact fails: the others of the batch are stored
            return error

    def _record_results(self, results: list[AppendResult], buffer: Buffer) -> list[AppendResult]:
        for result in results:
            metrics.record_append(buffer, result)
        if any(isinstance(result, FactConfirmation) and not result.duplicate for result in results):
            for wake in self._listeners:
                wake()
        return results

    def _append(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        digest = fact_digest(envelope, fact)
        existing = self._find_confirmation(envelope, digest)
        if existing is not None:
            return existing
        log = self._get_log(envelope.pair, self._side.store_buffer, self._epoch)
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
        existing = self._find_confirmation(stored.envelope, stored.digest)
        if existing is not None:
            return existing
        log = self._get_log(stored.envelope.pair, self._side.forward_buffer, stored.epoch)
        if stored.epoch != log.epoch:
            raise errors.epoch_changed_error(stored.epoch, log.epoch)
        if stored.offset != log.end + 1:
            raise errors.offset_gap_error(stored.envelope.message_id, stored.offset, log.end)
        # A confirmation names the store buffer that the fact was appended to, here the one of the other side.
        origin = BoundarySide.OUTER if self._side is BoundarySide.INNER else BoundarySide.INNER
        return self._store(log, stored, origin.store_buffer)

    def _find_confirmation(self, envelope: Envelope, digest: str) -> FactConfirmation | None:
        entry = self._ids.get((envelope.from_zone, envelope.message_id))
        if entry is None:
            return None
        if entry[0].digest != digest:
            raise errors.fact_conflict_error(envelope, entry[0], digest)
        return _to_duplicate(entry[0])

    def _get_log(self, pair: ZonePair, buffer: Buffer, epoch: str) -> _Log:
        log = self._logs.get(pair)
        if log is None:
            # Added to the logs by _store, so that a rejected fact leaves none behind.
            return _Log(epoch, buffer)
        if log.buffer is not buffer:
            raise errors.wrong_buffer_error(pair, log.buffer, buffer)
        return log

    def _store(self, log: _Log, stored: StoredFact, buffer: Buffer) -> FactConfirmation:
        """Append *stored* to *log*; *buffer* is the store buffer that its confirmation names."""
        envelope, reference = stored.envelope, stored.fact.artifact
        if reference is not None:
            # Artifacts of this store's own zones are not artifacts of a zone whose facts arrive here.
            shared_owners = ("",) if buffer is self._side.store_buffer else ()
            name = self._artifacts.resolve_reference(reference, (envelope.from_zone, *shared_owners))
        size = len(stored.fact.object_json)
        self._check_capacity(facts=1, size=size)
        if reference is not None:
            self._artifacts.add_reference(name, envelope)
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

    def _check_capacity(self, *, facts: int, size: int) -> None:
        if self._max_facts is not None:
            retained = sum(len(log.facts) for log in self._logs.values())
            if retained + facts > self._max_facts:
                raise errors.buffer_full_error("facts", retained, self._max_facts)
        if self._max_bytes is not None:
            used = self._count_used_bytes()
            if used + size > self._max_bytes:
                raise errors.buffer_full_error("bytes", used, self._max_bytes)

    def _now(self) -> int:
        return int(self._wall() * 1000)

    # -- reading --------------------------------------------------------------------------------------

    def fetch_facts(
        self, reader: str, pair: ZonePair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        with self._lock:
            log = self._logs.get(pair)
            if max_readers is not None and (reader, pair) not in self._readers:
                self._check_readers(reader, pair, max_readers)
            begin = self._readers.setdefault((reader, pair), 0 if log is None else log.pruned_count)
            if after is not None:
                self._check_cursor(pair, after)
                begin = after.offset
            if log is None:
                return []
            if begin < log.pruned_count:
                raise errors.offset_gone_error(pair, begin, log.pruned_count)
            return log.list_after(begin, limit)

    def _check_readers(self, reader: str, pair: ZonePair, limit: int) -> None:
        zone = zone_of_reader(reader, pair)
        count = sum(zone_of_reader(*registered) == zone for registered in self._readers)
        if count >= limit:
            raise errors.too_many_readers_error(reader, zone, count, limit)

    def confirm_receipt(self, reader: str, pair: ZonePair, cursor: Cursor) -> None:
        with self._lock:
            if (reader, pair) not in self._readers:
                raise errors.unknown_reader_error(reader, pair)
            self._check_cursor(pair, cursor)
            self._readers[reader, pair] = max(self._readers[reader, pair], cursor.offset)

    def get_cursor(self, reader: str, pair: ZonePair) -> Cursor | None:
        with self._lock:
            offset = self._readers.get((reader, pair))
            return None if offset is None else Cursor(self._get_epoch(pair), offset)

    def last_offset(self, pair: ZonePair) -> Cursor | None:
        with self._lock:
            log = self._logs.get(pair)
            return None if log is None else Cursor(log.epoch, log.end)

    def cursor_at_time(self, pair: ZonePair, unix_ms: int) -> Cursor | None:
        with self._lock:
            log = self._logs.get(pair)
            if log is None:
                return None
            # A clock may be set back; facts stored before the first later fact count as before that moment.
            later_indexes = (index for index, stored in enumerate(log.facts) if stored.stored_at_unix_ms >= unix_ms)
            return Cursor(log.epoch, log.pruned_count + next(later_indexes, len(log.facts)))

    def retire_reader(self, reader: str, pair: ZonePair, *, by: str = "") -> bool:  # noqa: ARG002 - nothing here is durable
        with self._lock:
            return self._readers.pop((reader, pair), None) is not None

    def adopt_epoch(self, pair: ZonePair, cursor: Cursor, *, by: str) -> None:  # noqa: ARG002 - nothing here is durable
        with self._lock:
            log = self._logs.get(pair)
            if log is not None and log.buffer is not self._side.forward_buffer:
                log = None
            if log is None or log.end != cursor.offset:
                raise errors.not_at_end_error(pair, cursor.offset, None if log is None else log.end)
            log.restart_epoch(cursor.epoch)

    def list_logs(self) -> Sequence[LogState]:
        with self._lock:
            pairs = dict.fromkeys((*self._logs, *(pair for _, pair in self._readers)))
            return [self._build_log_state(pair) for pair in pairs]

    def _build_log_state(self, pair: ZonePair) -> LogState:
        # The buffer is unknown before the first fact: a waiting reader expects facts that are forwarded to this store.
        log = self._logs.get(pair) or _Log(self._epoch, self._side.forward_buffer)
        return LogState(
            pair=pair,
            buffer=log.buffer,
            epoch=log.epoch,
            first=log.pruned_count + 1,
            last=log.end,
            bytes=_count_object_bytes(log.facts),
            readers={
                reader: _measure_lag(log, offset)
                for (reader, reader_pair), offset in self._readers.items()
                if reader_pair == pair
            },
        )

    def _get_epoch(self, pair: ZonePair) -> str:
        log = self._logs.get(pair)
        return self._epoch if log is None else log.epoch

    def _check_cursor(self, pair: ZonePair, cursor: Cursor) -> None:
        log = self._logs.get(pair)
        epoch = self._get_epoch(pair)
        # A reader at offset 0 has read nothing and so belongs to no epoch.
        if cursor.epoch != epoch and cursor.offset:
            raise errors.epoch_changed_error(cursor.epoch, epoch)
        end = 0 if log is None else log.end
        if not 0 <= cursor.offset <= end:
            raise errors.offset_ahead_error(pair, cursor.offset, end)

    # -- artifacts ------------------------------------------------------------------------------------

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
        name = ObjectName.check(bucket, key, zone)
        try:
            with self._open_upload(name, expected, begin) as upload:
                for chunk in to_chunks(blob):
                    self._add_chunk(name, upload, chunk)
                return self._commit_upload(name, upload, expected)
        except BaseException as error:
            metrics.record_put_failure(self._side.store_buffer, error)
            raise

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
        if not isinstance(blob, AsyncIterable):
            return self.put_object(bucket, key, blob, expected=expected, begin=begin, zone=zone)
        name = ObjectName.check(bucket, key, zone)
        try:
            with self._open_upload(name, expected, begin) as upload:
                async for chunk in blob:
                    self._add_chunk(name, upload, chunk)
                return self._commit_upload(name, upload, expected)
        except BaseException as error:
            metrics.record_put_failure(self._side.store_buffer, error)
            raise

    def uploaded_bytes(self, bucket: str, key: str, expected: StoredArtifact, *, zone: str = "") -> int:
        name = ObjectName.check(bucket, key, zone)
        with self._lock:
            return self._artifacts.uploaded_bytes(name, expected)

    @contextmanager
    def _open_upload(self, name: ObjectName, expected: StoredArtifact | None, begin: int) -> Iterator[MemoryUpload]:
        with self._lock:
            if expected is not None:
                stored_bytes = self._artifacts.uploaded_bytes(name, expected)
                self._check_upload_capacity(name, expected.size - stored_bytes, expected)
            upload = self._artifacts.begin(name, expected, begin)
            self._artifacts.running_uploads.add(upload)
        try:
            yield upload
        except ArtifactMismatch:
            raise
        except BaseException:
            if expected is not None and upload.is_buffered:
                with self._lock:
                    self._artifacts.interrupt(name, expected, upload, self._now())
            raise
        finally:
            with self._lock:
                self._artifacts.running_uploads.discard(upload)

    def _add_chunk(self, name: ObjectName, upload: MemoryUpload, chunk: bytes) -> None:
        if self._max_bytes is not None and upload.is_buffered:
            with self._lock:
                if self._artifacts.stat(name) is None:
                    self._check_upload_capacity(name, len(chunk))
                else:
                    upload.is_buffered = self._has_capacity(len(chunk))
        upload.add(chunk)

    def _check_upload_capacity(self, name: ObjectName, size: int, announced: StoredArtifact | None = None) -> None:
        """Reject bytes that exceed the capacity; interrupted uploads that are idle are removed first."""
        if self._max_bytes is None or self._has_capacity(size):
            return
        self._artifacts.delete_stale_uploads(self._now() - int(IDLE_UPLOAD_SECONDS * 1000))
        if not self._has_capacity(size):
            used = self._count_used_bytes()
            raise errors.no_capacity_error(name, None if announced is None else announced.size, used, self._max_bytes)

    def _has_capacity(self, size: int) -> bool:
        return (
            self._max_bytes is None or self._count_used_bytes() + self._artifacts.upload_bytes + size <= self._max_bytes
        )

    def _count_used_bytes(self) -> int:
        return self._bytes + self._artifacts.size

    def _commit_upload(
        self, name: ObjectName, upload: MemoryUpload, expected: StoredArtifact | None = None
    ) -> StoredArtifact:
        if expected is not None and upload.stored != expected:
            raise errors.artifact_mismatch_error(name, expected, upload.stored)
        with self._lock:
            existing = self._artifacts.match(name, upload.stored)
            if existing is None:
                self._check_capacity(facts=0, size=upload.size)
                if not upload.is_buffered and self._max_bytes is not None:
                    # The artifact was removed during the upload, whose bytes were only compared with it.
                    raise errors.no_capacity_error(name, upload.size, self._count_used_bytes(), self._max_bytes)
                stored = self._artifacts.store(name, upload, self._now())
            elif upload.is_buffered:
                self._artifacts.repair(upload)
        metrics.record_put(self._side.store_buffer, "stored" if existing is None else "repeated")
        return stored if existing is None else existing

    def get_object(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> Iterator[bytes]:
        name = ObjectName.check(bucket, key, zone)
        try:
            with self._lock:
                chunks = self._artifacts.read(self._artifacts.locate(name), begin)
            yield from chunks
        except ArtifactLost as error:
            metrics.record_lost_artifact(self._side.store_buffer, error)
            raise

    async def get_object_async(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> AsyncIterator[bytes]:
        for chunk in self.get_object(bucket, key, begin=begin, zone=zone):
            yield chunk

    def stat_object(self, bucket: str, key: str, *, zone: str = "") -> ObjectInfo | None:
        name = ObjectName.check(bucket, key, zone)
        with self._lock:
            name = self._artifacts.locate(name)
            stored = self._artifacts.stat(name)
            if stored is None:
                return None
            pairs = frozenset(self._ids[fact_key][1] for fact_key in self._artifacts.referencing_facts(name))
            return ObjectInfo(stored, pairs, name.zone)

    def artifact_bytes(self) -> int | None:
        with self._lock:
            return self._artifacts.size

    # -- retention ------------------------------------------------------------------------------------

    def prune(self, before_unix_ms: int) -> PruneResult:
        with self._lock:
            facts = sum(self._prune_log(pair, log, before_unix_ms) for pair, log in self._logs.items())
            self._delete_expired_ids()
            return PruneResult(facts, self._artifacts.prune(before_unix_ms))

    def _prune_log(self, pair: ZonePair, log: _Log, before_unix_ms: int) -> int:
        confirmed_offsets = [offset for (_, reader_pair), offset in self._readers.items() if reader_pair == pair]
        # Without a confirmed reader nothing is removed: a reader may register later.
        removable_count = min(confirmed_offsets, default=0) - log.pruned_count
        count = 0
        while count < min(removable_count, len(log.facts)) and log.facts[count].stored_at_unix_ms < before_unix_ms:
            stored = log.facts[count]
            self._bytes -= len(stored.fact.object_json)
            if stored.fact.artifact is not None:
                self._artifacts.remove_reference(stored.envelope)
            count += 1
        del log.facts[:count]
        log.pruned_count += count
        return count

    def _delete_expired_ids(self) -> None:
        if self._identity_retention is None:
            return
        latest = self._now() - int(self._identity_retention * 1000)
        expired = [
            key
            for key, (confirmation, pair, stored_at_unix_ms) in self._ids.items()
            if stored_at_unix_ms < latest and confirmation.offset <= self._logs[pair].pruned_count
        ]
        for key in expired:
            del self._ids[key]

    # -- async variants: nothing below waits, so they call the sync methods -----------------------------

    async def append_facts_async(self, facts: Sequence[NewFact]) -> Sequence[AppendResult]:
        return self.append_facts(facts)

    async def forward_facts_async(self, facts: Sequence[StoredFact]) -> Sequence[AppendResult]:
        return self.forward_facts(facts)

    async def get_fact_async(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return self.get_fact(from_zone, message_id)

    async def fetch_facts_async(
        self, reader: str, pair: ZonePair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        return self.fetch_facts(reader, pair, limit, after=after, max_readers=max_readers)

    async def confirm_receipt_async(self, reader: str, pair: ZonePair, cursor: Cursor) -> None:
        self.confirm_receipt(reader, pair, cursor)

    async def get_cursor_async(self, reader: str, pair: ZonePair) -> Cursor | None:
        return self.get_cursor(reader, pair)

    async def last_offset_async(self, pair: ZonePair) -> Cursor | None:
        return self.last_offset(pair)

    async def cursor_at_time_async(self, pair: ZonePair, unix_ms: int) -> Cursor | None:
        return self.cursor_at_time(pair, unix_ms)

    async def retire_reader_async(self, reader: str, pair: ZonePair, *, by: str = "") -> bool:
        return self.retire_reader(reader, pair, by=by)

    async def adopt_epoch_async(self, pair: ZonePair, cursor: Cursor, *, by: str) -> None:
        self.adopt_epoch(pair, cursor, by=by)

    async def list_logs_async(self) -> Sequence[LogState]:
        return self.list_logs()

    async def uploaded_bytes_async(self, bucket: str, key: str, expected: StoredArtifact, *, zone: str = "") -> int:
        return self.uploaded_bytes(bucket, key, expected, zone=zone)

    async def stat_object_async(self, bucket: str, key: str, *, zone: str = "") -> ObjectInfo | None:
        return self.stat_object(bucket, key, zone=zone)

    async def artifact_bytes_async(self) -> int | None:
        return self.artifact_bytes()

    async def prune_async(self, before_unix_ms: int) -> PruneResult:
        return self.prune(before_unix_ms)


def _count_object_bytes(facts: Iterable[StoredFact]) -> int:
    return sum(len(stored.fact.object_json.encode()) for stored in facts)


def _measure_lag(log: _Log, offset: int) -> ReaderLag:
    pending = log.list_after(offset, len(log.facts))
    since = pending[0].stored_at_unix_ms if pending else None
    return ReaderLag(offset, len(pending), _count_object_bytes(pending), since)


def _to_duplicate(confirmation: FactConfirmation) -> FactConfirmation:
    return FactConfirmation(
        message_id=confirmation.message_id,
        offset=confirmation.offset,
        epoch=confirmation.epoch,
        digest=confirmation.digest,
        buffer=confirmation.buffer,
        duplicate=True,
    )
