"""Stores that each break the contract in one way: the conformance suite must detect every one of them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from ergon_framework.facts.append import to_chunks
from ergon_framework.facts.boundary import BoundaryCapabilities
from ergon_framework.facts.errors import ArtifactConflict, BufferFull, FactConflict, FactError, InvalidFactError
from ergon_framework.facts.model import Buffer, ObjectName
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.memory_contents import Artifacts, MemoryUpload


class ForgetsIds(MemoryBoundary):
    """An id is known only while its fact is retained, like a broker's deduplication window."""

    def prune(self, before_unix_ms):
        pruned = super().prune(before_unix_ms)
        self._ids = {
            key: value for key, value in self._ids.items() if value[0].offset > self._logs[value[1]].pruned_count
        }
        return pruned


class SwallowsConflicts(MemoryBoundary):
    """Another payload for a known id is confirmed as if it were the first."""

    def _find_confirmation(self, envelope, digest):
        try:
            return super()._find_confirmation(envelope, digest)
        except FactConflict:
            return self._ids[envelope.from_zone, envelope.message_id][0]


class FailsTheWholeCall(MemoryBoundary):
    """One rejected fact fails the whole call."""

    def append_facts(self, facts):
        results = super().append_facts(facts)
        for result in results:
            if isinstance(result, FactError):
                raise result
        return results


class LeavesGaps(MemoryBoundary):
    """A rejected fact uses up an offset, as a database sequence does."""

    def _append(self, envelope, fact):
        try:
            return super()._append(envelope, fact)
        except FactError:
            if (log := self._logs.get(envelope.pair)) is not None:
                log.pruned_count += 1
            raise


class KeepsTheLastEnvelope(MemoryBoundary):
    """A repeat replaces the envelope of the first append."""

    def _append(self, envelope, fact):
        confirmation = super()._append(envelope, fact)
        log = self._logs[envelope.pair]
        if confirmation.duplicate and confirmation.offset > log.pruned_count:
            index = confirmation.offset - log.pruned_count - 1
            log.facts[index] = replace(log.facts[index], envelope=envelope)
        return confirmation


class MixesZones(MemoryBoundary):
    """Ids are known without their zone."""

    def _find_confirmation(self, envelope, digest):
        return super()._find_confirmation(replace(envelope, from_zone="Plant A"), digest)


class DigestsTheLabels(MemoryBoundary):
    """Labels are part of the digest."""

    def _find_confirmation(self, envelope, digest):
        existing = super()._find_confirmation(envelope, digest)
        if existing is not None:
            log = self._logs[envelope.pair]
            if (
                existing.offset > log.pruned_count
                and log.facts[existing.offset - log.pruned_count - 1].envelope.labels != envelope.labels
            ):
                raise FactConflict("the labels differ", from_zone=envelope.from_zone, message_id=envelope.message_id)
        return existing


class TrustsReferences(MemoryBoundary):
    """A fact may name an artifact that does not exist."""

    def _store(self, log, stored, buffer):
        check, self._artifacts.resolve_reference = self._artifacts.resolve_reference, _to_object_name
        try:
            return super()._store(log, stored, buffer)
        finally:
            self._artifacts.resolve_reference = check


def _to_object_name(reference, owners):
    return ObjectName([*owners][-1], reference.bucket, reference.key)


class ComparesNoSize(MemoryBoundary):
    """Artifacts with the same name are equal."""

    def __init__(self, **options):
        super().__init__(**options)
        self._artifacts = _SizelessArtifacts()


class _SizelessArtifacts(Artifacts):
    def resolve_reference(self, reference, owners):
        owners = tuple(owners)
        entries = [self._names.get((zone, reference.bucket, reference.key)) for zone in owners]
        for stored, _ in filter(None, entries):
            if stored.digest in self._contents:
                reference = replace(reference, digest=stored.digest, size=stored.size)
        return super().resolve_reference(reference, owners)


class ReplacesArtifacts(MemoryBoundary):
    """Other bytes under the same name replace the first."""

    def _commit_upload(self, name, upload, expected=None):
        with self._lock:
            existing = self._artifacts._names.get(name)
            if existing is not None and existing[0] != upload.stored and expected is None:
                del self._artifacts._names[name]
        return super()._commit_upload(name, upload, expected)


class KeepsInterruptedUploads(MemoryBoundary):
    """An interrupted upload is stored as far as it came."""

    def put_object(self, bucket, key, blob, **options):
        def read_and_keep():
            upload = MemoryUpload()
            try:
                for chunk in to_chunks(blob):
                    upload.add(chunk)
                    yield chunk
            except FactError:
                with contextlib.suppress(FactError):
                    self._commit_upload(ObjectName.check(bucket, key), upload)
                raise

        return super().put_object(bucket, key, read_and_keep(), **options)


class RemovesArtifacts(MemoryBoundary):
    """Retention considers only the age of an artifact."""

    def prune(self, before_unix_ms):
        facts_by_name, self._artifacts._facts_by_artifact = self._artifacts._facts_by_artifact, {}
        try:
            with self._lock:
                artifacts = self._artifacts.prune(before_unix_ms)
        finally:
            self._artifacts._facts_by_artifact = facts_by_name
        return super().prune(before_unix_ms)._replace(artifacts=artifacts)


class ReadsWithoutChecking(MemoryBoundary):
    """Bytes that are read are not compared with the stored digest."""

    def __init__(self, **options):
        super().__init__(**options)
        self._artifacts = _UncheckedArtifacts()


class _UncheckedArtifacts(Artifacts):
    def _read_chunks(self, name, content, digest, begin):
        for start in range(begin, len(content), 256 * 1024):
            yield content[start : start + 256 * 1024]


class OmitsTheFact(MemoryBoundary):
    """A lost artifact is reported as unknown, although a fact names it."""

    def __init__(self, **options):
        super().__init__(**options)
        self._artifacts = _FactlessArtifacts()


class _FactlessArtifacts(Artifacts):
    def _lost_error(self, name, problem):
        facts_by_name, self._facts_by_artifact = self._facts_by_artifact, {}
        try:
            return super()._lost_error(name, problem)
        finally:
            self._facts_by_artifact = facts_by_name


class DropsUnconfirmed(MemoryBoundary):
    """Retention follows the reader that is farthest ahead."""

    def _prune_log(self, pair, log, before_unix_ms):
        cursors = dict(self._readers)
        confirmed_offsets = [offset for (_, reader_pair), offset in cursors.items() if reader_pair == pair]
        for reader in cursors:
            if reader[1] == pair:
                self._readers[reader] = max(confirmed_offsets)
        try:
            return super()._prune_log(pair, log, before_unix_ms)
        finally:
            self._readers = cursors


class DropsUnreadFacts(MemoryBoundary):
    """Facts without a reader are removed."""

    def _prune_log(self, pair, log, before_unix_ms):
        if not any(reader_pair == pair for _, reader_pair in self._readers):
            self._readers["placeholder", pair] = log.end
            try:
                return super()._prune_log(pair, log, before_unix_ms)
            finally:
                del self._readers["placeholder", pair]
        return super()._prune_log(pair, log, before_unix_ms)


class ConfirmsByFetching(MemoryBoundary):
    """Fetched facts count as confirmed."""

    def fetch_facts(self, reader, pair, limit, *, after=None, **options):
        facts = super().fetch_facts(reader, pair, limit, after=after, **options)
        if facts and after is None:
            self._readers[reader, pair] = facts[-1].offset
        return facts


class MovesCursorsBack(MemoryBoundary):
    """The last receipt wins, whatever its offset."""

    def confirm_receipt(self, reader, pair, cursor):
        super().confirm_receipt(reader, pair, cursor)
        self._readers[reader, pair] = cursor.offset


class ConfirmsBeyondTheEnd(MemoryBoundary):
    """A receipt may have any offset."""

    def _check_cursor(self, pair, cursor):
        log = self._logs.get(pair)
        if log is not None and cursor.epoch == log.epoch:
            return
        super()._check_cursor(pair, cursor)


class AssignsNewOffsets(MemoryBoundary):
    """A forwarded fact gets the next offset of this store."""

    def _forward(self, stored):
        log = self._logs.get(stored.envelope.pair)
        return super()._forward(replace(stored, offset=1 if log is None else log.end + 1))


class ForwardsWithGaps(MemoryBoundary):
    """A forward buffer accepts facts with gaps."""

    def _forward(self, stored):
        log = self._logs.get(stored.envelope.pair)
        if log is not None and log.buffer is self._side.forward_buffer and stored.offset > log.end + 1:
            log.pruned_count = stored.offset - 1 - len(log.facts)
        elif log is None and stored.offset > 1:
            new_log = self._get_log(stored.envelope.pair, self._side.forward_buffer, stored.epoch)
            new_log.pruned_count = stored.offset - 1
            self._logs[stored.envelope.pair] = new_log
        return super()._forward(stored)


class KeepsItsEpoch(MemoryBoundary):
    """A restored backup has the epoch of the former store."""

    def as_restored_backup(self):
        clone = super().as_restored_backup()
        clone._epoch = self._epoch
        for log in clone._logs.values():
            log.restart_epoch(self._epoch)
        return clone


class ConfirmsForTheForwardBuffer(MemoryBoundary):
    """An append is confirmed for the forward buffer."""

    def _append(self, envelope, fact):
        confirmation = super()._append(envelope, fact)
        return replace(confirmation, buffer=Buffer.IFB if confirmation.buffer is Buffer.ESB else Buffer.EFB)


class LosesWhenFull(MemoryBoundary):
    """A full buffer discards its oldest facts."""

    def _check_capacity(self, *, facts, size):
        if self._max_facts is not None:
            for log in self._logs.values():
                while len(log.facts) + facts > self._max_facts:
                    del log.facts[0]
                    log.pruned_count += 1


class ReportsItselfStrict(MemoryBoundary):
    """The store does not know whether it survives a power loss, and reports that it does."""

    @property
    def capabilities(self):
        return _AlwaysStrictCapabilities(durable=None, side=self._side)


class _AlwaysStrictCapabilities(BoundaryCapabilities):
    @property
    def is_strict(self):
        return True


class CanonicalizesTheText(MemoryBoundary):
    """Facts are stored in canonical form instead of as given."""

    def _append(self, envelope, fact):
        return super()._append(envelope, replace(fact, object_json=fact._canonical_text))


class CannotLookUpIds(MemoryBoundary):
    """Known ids cannot be looked up."""

    def get_fact(self, from_zone, message_id):
        return None


class HidesRepeats(MemoryBoundary):
    """A repeated append is not distinguished from the first."""

    def _find_confirmation(self, envelope, digest):
        existing = super()._find_confirmation(envelope, digest)
        return None if existing is None else replace(existing, duplicate=False)


class RacesForIds(MemoryBoundary):
    """Checks whether an id exists, and stores it later without checking again."""

    async def append_facts_async(self, facts):
        known_ids = set(self._ids)
        await asyncio.sleep(0)
        for envelope, _ in facts:
            if (envelope.from_zone, envelope.message_id) not in known_ids:
                self._ids.pop((envelope.from_zone, envelope.message_id), None)
        return self.append_facts(facts)


class WaitsForReaders(MemoryBoundary):
    """Nothing is appended while a reader is far behind."""

    def _append(self, envelope, fact):
        log = self._logs.get(envelope.pair)
        lags = [
            log.end - offset
            for (_, reader_pair), offset in self._readers.items()
            if log and reader_pair == envelope.pair
        ]
        if max(lags, default=0) > 20:
            raise BufferFull("a reader is far behind")
        return super()._append(envelope, fact)


class DeletesCorrectedArtifacts(MemoryBoundary):
    """Corrected facts are discarded."""

    def _append(self, envelope, fact):
        confirmation = super()._append(envelope, fact)
        if isinstance(fact.object, dict) and "old" in fact.object:
            self._artifacts._contents.pop(fact.object["old"]["digest"], None)
        return confirmation


class ReadsForwardOnly(MemoryBoundary):
    """Confirmed facts cannot be read again."""

    def fetch_facts(self, reader, pair, limit, *, after=None, **options):
        cursor = self.get_cursor(reader, pair)
        if after is not None and cursor is not None and cursor.epoch == after.epoch:
            after = max(after, cursor)
        return super().fetch_facts(reader, pair, limit, after=after, **options)


class IgnoresAge(MemoryBoundary):
    """Retention removes every confirmed fact."""

    def prune(self, before_unix_ms):
        return super().prune(2**53)


class StampsItsOwnEpoch(MemoryBoundary):
    """A forwarded fact is given the epoch of this store."""

    def _forward(self, stored):
        return super()._forward(replace(stored, epoch=self._epoch))


class ReadsArtifactsInOnePiece(MemoryBoundary):
    """An artifact comes in one piece, whatever its size."""

    def get_object(self, bucket, key, **options):
        yield b"".join(super().get_object(bucket, key, **options))


class RejectsStoredNames(MemoryBoundary):
    """A stored name is a conflict, whatever the bytes."""

    def _commit_upload(self, name, upload, expected=None):
        if name in self._artifacts._names:
            raise ArtifactConflict(f"{name} is stored")
        return super()._commit_upload(name, upload, expected)


class TrustsObjectNames(MemoryBoundary):
    """A name may lead anywhere."""

    def put_object(self, bucket, key, blob, *, expected=None, begin=0, zone=""):
        name = ObjectName(zone, bucket, key)
        with self._open_upload(name, expected, begin) as upload:
            for chunk in to_chunks(blob):
                upload.add(chunk)
            return self._commit_upload(name, upload, expected)


class RejectsWholeBytes(MemoryBoundary):
    """An artifact must come in pieces."""

    def put_object(self, bucket, key, blob, **options):
        return super().put_object(bucket, key, iter(blob), **options)


class IgnoresExpectations(MemoryBoundary):
    """An upload is not compared with what was announced."""

    def _commit_upload(self, name, upload, expected=None):
        return super()._commit_upload(name, upload)


class ForgetsUploads(MemoryBoundary):
    """An interrupted upload must be sent again completely."""

    def uploaded_bytes(self, bucket, key, expected, *, zone=""):
        return 0


class MixesUploads(MemoryBoundary):
    """Bytes received under a name count, whatever they were announced as."""

    def uploaded_bytes(self, bucket, key, expected, *, zone=""):
        byte_counts = [
            len(partial_upload[0])
            for (name, _), partial_upload in self._artifacts._interrupted.items()
            if name == (zone, bucket, key)
        ]
        return max(byte_counts, default=super().uploaded_bytes(bucket, key, expected, zone=zone))


class PromisesTooMuch(MemoryBoundary):
    """Reports more received bytes than it has."""

    def uploaded_bytes(self, bucket, key, expected, *, zone=""):
        received_bytes = super().uploaded_bytes(bucket, key, expected, zone=zone)
        return received_bytes and expected.size


class FillsArtifactGaps(MemoryBoundary):
    """Gaps are filled with zeros."""

    def __init__(self, **options):
        super().__init__(**options)
        self._artifacts = _GapFillingArtifacts()


class _GapFillingArtifacts(Artifacts):
    def begin(self, name, expected, begin):
        try:
            return super().begin(name, expected, begin)
        except InvalidFactError:
            return MemoryUpload(bytes(begin))


class ReadsFromTheStart(MemoryBoundary):
    """Reading always starts at the first byte."""

    def get_object(self, bucket, key, *, begin=0, zone=""):
        return super().get_object(bucket, key, zone=zone)


class ForgetsTimes(MemoryBoundary):
    """Every time is the end of the log."""

    def cursor_at_time(self, pair, unix_ms):
        return self.last_offset(pair)


class OmitsEmptyPairs(MemoryBoundary):
    """Pairs without facts are not reported, although a reader waits for some."""

    def list_logs(self):
        return [state for state in super().list_logs() if state.last]


class CountsFromTheStart(MemoryBoundary):
    """Every reader lags by the length of the log."""

    def list_logs(self):
        return [
            replace(
                state,
                readers={
                    reader: lag._replace(facts=state.last - state.first + 1, bytes=state.bytes)
                    for reader, lag in state.readers.items()
                },
            )
            for state in super().list_logs()
        ]


class KeepsRetiredReaders(MemoryBoundary):
    """A retired reader still exists."""

    def retire_reader(self, reader, pair, *, by=""):
        return (reader, pair) in self._readers


class SharesNames(MemoryBoundary):
    """All zones share one namespace."""

    def put_object(self, bucket, key, blob, *, zone="", **options):
        return super().put_object(bucket, key, blob, **options)

    def uploaded_bytes(self, bucket, key, expected, *, zone=""):
        return super().uploaded_bytes(bucket, key, expected)

    def get_object(self, bucket, key, *, zone="", **options):
        return super().get_object(bucket, key, **options)

    def _store(self, log, stored, buffer):
        check = self._artifacts.resolve_reference
        self._artifacts.resolve_reference = lambda reference, owners: check(reference, ("",))
        try:
            return super()._store(log, stored, buffer)
        finally:
            self._artifacts.resolve_reference = check


class TrustsDigests(MemoryBoundary):
    """A known digest counts as sent, by any zone."""

    def uploaded_bytes(self, bucket, key, expected, *, zone=""):
        get_received = super().uploaded_bytes
        return max(get_received(bucket, key, expected, zone=each) for each in ("", "Enterprise"))


class NamesArtifactsOfAnyZone(MemoryBoundary):
    """A fact may name an artifact of any zone."""

    def _store(self, log, stored, buffer):
        check = self._artifacts.resolve_reference
        self._artifacts.resolve_reference = lambda reference, owners: check(reference, (*owners, "", "Enterprise"))
        try:
            return super()._store(log, stored, buffer)
        finally:
            self._artifacts.resolve_reference = check


class ReadsArtifactsOfAnyZone(MemoryBoundary):
    """Without a zone, an artifact of any zone is read."""

    def get_object(self, bucket, key, *, zone="", **options):
        names = [name for name in sorted(self._artifacts._names) if name[1:] == (bucket, key)]
        return super().get_object(bucket, key, zone=zone or (names[0].zone if names else ""), **options)


class CountsNoReaders(MemoryBoundary):
    """A zone may register any number of readers."""

    def _check_readers(self, reader, pair, limit):
        pass


class CountsReadersPerPair(MemoryBoundary):
    """Readers are counted for each pair of zones, and the number of pairs is unlimited."""

    def _check_readers(self, reader, pair, limit):
        readers = self._readers
        self._readers = {reader_key: offset for reader_key, offset in readers.items() if reader_key[1] == pair}
        try:
            super()._check_readers(reader, pair, limit)
        finally:
            self._readers = readers
