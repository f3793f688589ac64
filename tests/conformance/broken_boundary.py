"""Stores that break the contract on purpose, each in one way: the exam must find every one of them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from ergon_framework.facts.blob import to_pieces
from ergon_framework.facts.boundary import BoundaryCapabilities
from ergon_framework.facts.errors import ArtifactConflict, BufferFull, FactConflict, FactError, InvalidFactError
from ergon_framework.facts.model import Buffer, ObjectName
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.facts.stores.memory_artifacts import Artifacts, Upload


class ForgetsIds(MemoryBoundary):
    """An id is known for as long as its fact is retained, like a broker's window of duplicates."""

    def prune(self, before_unix_ms):
        pruned = super().prune(before_unix_ms)
        self._ids = {
            known: value for known, value in self._ids.items() if value[0].offset > self._logs[value[1]].dropped
        }
        return pruned


class SwallowsConflicts(MemoryBoundary):
    """Another payload for a known id is confirmed as if it were the first."""

    def _known(self, envelope, digest):
        try:
            return super()._known(envelope, digest)
        except FactConflict:
            return self._ids[envelope.from_zone, envelope.message_id][0]


class SpoilsNeighbours(MemoryBoundary):
    """One fact that is refused fails the whole call."""

    def append_facts(self, facts):
        results = super().append_facts(facts)
        for result in results:
            if isinstance(result, FactError):
                raise result
        return results


class LeavesGaps(MemoryBoundary):
    """What is refused has used an offset up, as a sequence of a database does."""

    def _append(self, envelope, fact):
        try:
            return super()._append(envelope, fact)
        except FactError:
            if (log := self._logs.get(envelope.pair)) is not None:
                log.dropped += 1
            raise


class KeepsTheLastEnvelope(MemoryBoundary):
    """A repeat replaces the envelope of the first append."""

    def _append(self, envelope, fact):
        told = super()._append(envelope, fact)
        log = self._logs[envelope.pair]
        if told.duplicate and told.offset > log.dropped:
            place = told.offset - log.dropped - 1
            log.facts[place] = replace(log.facts[place], envelope=envelope)
        return told


class MixesZones(MemoryBoundary):
    """Ids are known by themselves, whatever zone they come from."""

    def _known(self, envelope, digest):
        return super()._known(replace(envelope, from_zone="Plant A"), digest)


class DigestsTheLabels(MemoryBoundary):
    """Labels are part of what must be the same."""

    def _known(self, envelope, digest):
        known = super()._known(envelope, digest)
        if known is not None:
            log = self._logs[envelope.pair]
            if (
                known.offset > log.dropped
                and log.facts[known.offset - log.dropped - 1].envelope.labels != envelope.labels
            ):
                raise FactConflict("the labels differ", from_zone=envelope.from_zone, message_id=envelope.message_id)
        return known


class TrustsReferences(MemoryBoundary):
    """Nobody looks whether an artifact is there that a fact names."""

    def _store(self, log, stored, buffer):
        check, self._artifacts.check = self._artifacts.check, _named
        try:
            return super()._store(log, stored, buffer)
        finally:
            self._artifacts.check = check


def _named(reference, owners):
    return ObjectName([*owners][-1], reference.bucket, reference.key)


class ComparesNoSize(MemoryBoundary):
    """An artifact is the same if its name is."""

    def __init__(self, **given):
        super().__init__(**given)
        self._artifacts = _Careless()


class _Careless(Artifacts):
    def check(self, reference, owners):
        owners = tuple(owners)
        known = [self._names.get((zone, reference.bucket, reference.key)) for zone in owners]
        for stored, _ in filter(None, known):
            if stored.digest in self._contents:
                reference = replace(reference, digest=stored.digest, size=stored.size)
        return super().check(reference, owners)


class ReplacesArtifacts(MemoryBoundary):
    """Other bytes under the same name take the place of the first."""

    def _kept(self, name, upload, expected=None):
        with self._lock:
            known = self._artifacts._names.get(name)
            if known is not None and known[0] != upload.stored and expected is None:
                del self._artifacts._names[name]
        return super()._kept(name, upload, expected)


class KeepsHalves(MemoryBoundary):
    """An upload that breaks off is kept as far as it came."""

    def put_object(self, bucket, key, blob, **how):
        def watched():
            upload = Upload()
            try:
                for piece in to_pieces(blob):
                    upload.add(piece)
                    yield piece
            except FactError:
                with contextlib.suppress(FactError):
                    self._kept(ObjectName.check(bucket, key), upload)
                raise

        return super().put_object(bucket, key, watched(), **how)


class RemovesArtifacts(MemoryBoundary):
    """Retention looks at the age of an artifact only."""

    def prune(self, before_unix_ms):
        named, self._artifacts._named_by = self._artifacts._named_by, {}
        try:
            with self._lock:
                artifacts = self._artifacts.prune(before_unix_ms)
        finally:
            self._artifacts._named_by = named
        return super().prune(before_unix_ms)._replace(artifacts=artifacts)


class ReadsWithoutLooking(MemoryBoundary):
    """What is read is not compared with what was stored."""

    def __init__(self, **given):
        super().__init__(**given)
        self._artifacts = _Blind()


class _Blind(Artifacts):
    def _pieces(self, name, content, digest, begin):
        for start in range(begin, len(content), 256 * 1024):
            yield content[start : start + 256 * 1024]


class BlamesNobody(MemoryBoundary):
    """A lost artifact is unknown, whoever names it."""

    def __init__(self, **given):
        super().__init__(**given)
        self._artifacts = _Mute()


class _Mute(Artifacts):
    def _missing(self, name, what):
        named, self._named_by = self._named_by, {}
        try:
            return super()._missing(name, what)
        finally:
            self._named_by = named


class DropsUnconfirmed(MemoryBoundary):
    """Retention goes by the reader who has come farthest."""

    def _prune(self, pair, log, before):
        kept = dict(self._readers)
        confirmed = [offset for (_, of), offset in kept.items() if of == pair]
        for reader in kept:
            if reader[1] == pair:
                self._readers[reader] = max(confirmed)
        try:
            return super()._prune(pair, log, before)
        finally:
            self._readers = kept


class DropsTheUnread(MemoryBoundary):
    """What nobody has come to read is removed."""

    def _prune(self, pair, log, before):
        if not any(of == pair for _, of in self._readers):
            self._readers["nobody", pair] = log.end
            try:
                return super()._prune(pair, log, before)
            finally:
                del self._readers["nobody", pair]
        return super()._prune(pair, log, before)


class ConfirmsByFetching(MemoryBoundary):
    """What was fetched counts as confirmed."""

    def fetch_facts(self, reader, pair, limit, *, after=None, **how):
        found = super().fetch_facts(reader, pair, limit, after=after, **how)
        if found and after is None:
            self._readers[reader, pair] = found[-1].offset
        return found


class MovesCursorsBack(MemoryBoundary):
    """The last receipt wins, whatever it is for."""

    def confirm_receipt(self, reader, pair, cursor):
        super().confirm_receipt(reader, pair, cursor)
        self._readers[reader, pair] = cursor.offset


class ConfirmsWhatIsNotThere(MemoryBoundary):
    """A receipt may be for anything."""

    def _check(self, pair, cursor):
        log = self._logs.get(pair)
        if log is not None and cursor.epoch == log.epoch:
            return
        super()._check(pair, cursor)


class GivesOffsetsAnew(MemoryBoundary):
    """A forwarded fact gets the next offset of this store."""

    def _forward(self, stored):
        log = self._logs.get(stored.envelope.pair)
        return super()._forward(replace(stored, offset=1 if log is None else log.end + 1))


class ForwardsWithGaps(MemoryBoundary):
    """A forward buffer takes whatever comes."""

    def _forward(self, stored):
        log = self._logs.get(stored.envelope.pair)
        if log is not None and log.buffer is self._side.forward_buffer and stored.offset > log.end + 1:
            log.dropped = stored.offset - 1 - len(log.facts)
        elif log is None and stored.offset > 1:
            made = self._log(stored.envelope.pair, self._side.forward_buffer, stored.epoch)
            made.dropped = stored.offset - 1
            self._logs[stored.envelope.pair] = made
        return super()._forward(stored)


class KeepsItsEpoch(MemoryBoundary):
    """A backup that is put back looks like the store of before."""

    def restored(self):
        twin = super().restored()
        twin._epoch = self._epoch
        for log in twin._logs.values():
            log.reborn(self._epoch)
        return twin


class SpeaksOfForwarding(MemoryBoundary):
    """An append is confirmed for the forward buffer."""

    def _append(self, envelope, fact):
        told = super()._append(envelope, fact)
        return replace(told, buffer=Buffer.IFB if told.buffer is Buffer.ESB else Buffer.EFB)


class LosesWhenFull(MemoryBoundary):
    """A full buffer makes room by throwing the oldest away."""

    def _make_sure_of_room(self, *, facts, size):
        if self._max_facts is not None:
            for log in self._logs.values():
                while len(log.facts) + facts > self._max_facts:
                    del log.facts[0]
                    log.dropped += 1


class CallsItselfStrict(MemoryBoundary):
    """Nobody knows whether it survives a loss of power, and it says that it does."""

    @property
    def capabilities(self):
        return _Boasting(durable=None, side=self._side)


class _Boasting(BoundaryCapabilities):
    @property
    def strict(self):
        return True


class ChangesTheText(MemoryBoundary):
    """Facts are kept in canonical form, and not as they were given."""

    def _append(self, envelope, fact):
        return super()._append(envelope, replace(fact, object_json=fact._canonical))


class CannotBeAsked(MemoryBoundary):
    """Nobody remembers ids for those who ask."""

    def get_fact(self, from_zone, message_id):
        return None


class HidesRepeats(MemoryBoundary):
    """A repeat is not told from a first append."""

    def _known(self, envelope, digest):
        known = super()._known(envelope, digest)
        return None if known is None else replace(known, duplicate=False)


class RacesForIds(MemoryBoundary):
    """Looks whether an id is there, and stores it later without looking again."""

    async def append_facts_async(self, facts):
        before = set(self._ids)
        await asyncio.sleep(0)
        for envelope, _ in facts:
            if (envelope.from_zone, envelope.message_id) not in before:
                self._ids.pop((envelope.from_zone, envelope.message_id), None)
        return self.append_facts(facts)


class WaitsForReaders(MemoryBoundary):
    """Nothing is appended while a reader is far behind."""

    def _append(self, envelope, fact):
        log = self._logs.get(envelope.pair)
        behind = [log.end - offset for (_, of), offset in self._readers.items() if log and of == envelope.pair]
        if max(behind, default=0) > 20:
            raise BufferFull("a reader is far behind")
        return super()._append(envelope, fact)


class CleansUpAfterCorrections(MemoryBoundary):
    """What was corrected is thrown away."""

    def _append(self, envelope, fact):
        told = super()._append(envelope, fact)
        if isinstance(fact.object, dict) and "old" in fact.object:
            self._artifacts._contents.pop(fact.object["old"]["digest"], None)
        return told


class ReadsForwardOnly(MemoryBoundary):
    """What a reader has confirmed cannot be read again."""

    def fetch_facts(self, reader, pair, limit, *, after=None, **how):
        cursor = self.cursor_of(reader, pair)
        if after is not None and cursor is not None and cursor.epoch == after.epoch:
            after = max(after, cursor)
        return super().fetch_facts(reader, pair, limit, after=after, **how)


class IgnoresAge(MemoryBoundary):
    """Retention removes whatever is confirmed."""

    def prune(self, before_unix_ms):
        return super().prune(2**53)


class StampsItsOwnEpoch(MemoryBoundary):
    """A forwarded fact is given the epoch of this store."""

    def _forward(self, stored):
        return super()._forward(replace(stored, epoch=self._epoch))


class ReadsAtOnce(MemoryBoundary):
    """An artifact comes in one piece, as large as it is."""

    def get_object(self, bucket, key, **how):
        yield b"".join(super().get_object(bucket, key, **how))


class StoresOnce(MemoryBoundary):
    """A name that is taken is a conflict, whatever the bytes."""

    def _kept(self, name, upload, expected=None):
        if name in self._artifacts._names:
            raise ArtifactConflict(f"{name} is stored")
        return super()._kept(name, upload, expected)


class TrustsNames(MemoryBoundary):
    """A name may lead anywhere."""

    def put_object(self, bucket, key, blob, *, expected=None, begin=0, zone=""):
        name = ObjectName(zone, bucket, key)
        with self._receiving(name, expected, begin) as upload:
            for piece in to_pieces(blob):
                upload.add(piece)
            return self._kept(name, upload, expected)


class TakesNoBytes(MemoryBoundary):
    """An artifact has to come in pieces."""

    def put_object(self, bucket, key, blob, **how):
        return super().put_object(bucket, key, iter(blob), **how)


class ExpectsNothing(MemoryBoundary):
    """Nobody looks whether an upload is what it was said to be."""

    def _kept(self, name, upload, expected=None):
        return super()._kept(name, upload)


class ForgetsUploads(MemoryBoundary):
    """What broke off has to be sent again, all of it."""

    def received(self, bucket, key, expected, *, zone=""):
        return 0


class MixesUploads(MemoryBoundary):
    """What came under a name counts, whatever it was to be."""

    def received(self, bucket, key, expected, *, zone=""):
        here = [len(kept[0]) for (name, _), kept in self._artifacts._partial.items() if name == (zone, bucket, key)]
        return max(here, default=super().received(bucket, key, expected, zone=zone))


class PromisesTooMuch(MemoryBoundary):
    """More is said to be here than came."""

    def received(self, bucket, key, expected, *, zone=""):
        here = super().received(bucket, key, expected, zone=zone)
        return here and expected.size


class GoesOnAnywhere(MemoryBoundary):
    """Where nothing came, there are zeros."""

    def __init__(self, **given):
        super().__init__(**given)
        self._artifacts = _Filling()


class _Filling(Artifacts):
    def begin(self, name, expected, begin):
        try:
            return super().begin(name, expected, begin)
        except InvalidFactError:
            return Upload(bytes(begin))


class ReadsFromTheStart(MemoryBoundary):
    """Wherever one begins, all of an artifact comes."""

    def get_object(self, bucket, key, *, begin=0, zone=""):
        return super().get_object(bucket, key, zone=zone)


class ForgetsWhen(MemoryBoundary):
    """Any moment is the end of the line."""

    def cursor_at(self, pair, unix_ms):
        return self.end_of(pair)


class LeavesTheWaitingOut(MemoryBoundary):
    """Pairs without facts are not told of, although somebody waits for some."""

    def survey(self):
        return [state for state in super().survey() if state.last]


class CountsFromTheStart(MemoryBoundary):
    """Everybody is as far behind as the line is long."""

    def survey(self):
        return [
            replace(
                state,
                readers={
                    reader: behind._replace(facts=state.last - state.first + 1, bytes=state.bytes)
                    for reader, behind in state.readers.items()
                },
            )
            for state in super().survey()
        ]


class RemembersTheRetired(MemoryBoundary):
    """A reader that was retired is there as before."""

    def retire_reader(self, reader, pair, *, by=""):
        return (reader, pair) in self._readers


class SharesNames(MemoryBoundary):
    """All zones have one namespace."""

    def put_object(self, bucket, key, blob, *, zone="", **how):
        return super().put_object(bucket, key, blob, **how)

    def received(self, bucket, key, expected, *, zone=""):
        return super().received(bucket, key, expected)

    def get_object(self, bucket, key, *, zone="", **how):
        return super().get_object(bucket, key, **how)

    def _store(self, log, stored, buffer):
        check = self._artifacts.check
        self._artifacts.check = lambda reference, owners: check(reference, ("",))
        try:
            return super()._store(log, stored, buffer)
        finally:
            self._artifacts.check = check


class TrustsDigests(MemoryBoundary):
    """A digest that is known counts as sent, whoever sent it."""

    def received(self, bucket, key, expected, *, zone=""):
        received = super().received
        return max(received(bucket, key, expected, zone=each) for each in ("", "Enterprise"))


class NamesAnything(MemoryBoundary):
    """A fact may name an artifact of any zone."""

    def _store(self, log, stored, buffer):
        check = self._artifacts.check
        self._artifacts.check = lambda reference, owners: check(reference, (*owners, "", "Enterprise"))
        try:
            return super()._store(log, stored, buffer)
        finally:
            self._artifacts.check = check


class ReadsAnybodys(MemoryBoundary):
    """Without a zone, an artifact of any zone is read."""

    def get_object(self, bucket, key, *, zone="", **how):
        names = [name for name in sorted(self._artifacts._names) if name[1:] == (bucket, key)]
        return super().get_object(bucket, key, zone=zone or (names[0].zone if names else ""), **how)


class CountsNoReaders(MemoryBoundary):
    """A zone registers as many readers as it likes."""

    def _check_readers(self, reader, pair, most):
        pass


class CountsReadersOfAPair(MemoryBoundary):
    """Readers are counted for each pair of zones, and there is no end of pairs."""

    def _check_readers(self, reader, pair, most):
        readers = self._readers
        self._readers = {registered: at for registered, at in readers.items() if registered[1] == pair}
        try:
            super()._check_readers(reader, pair, most)
        finally:
            self._readers = readers
