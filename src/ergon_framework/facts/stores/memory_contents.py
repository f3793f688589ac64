"""Keep artifacts and their contents in this process, for tests and as the reference for durable stores.

An artifact is a file that facts may reference, under a name. A name keeps its content forever; contents are stored once
per digest. The facts that reference an artifact are recorded, so that unused artifacts can be removed.

Two classes are independent of each other. ``Artifacts`` is the part of ``MemoryBoundary`` with names, references and
contents. ``MemoryContentStore`` keeps contents only, for a store that has the names and references in a database; its
uploads have ids, which ``Artifacts`` replaces by the name and the expected content.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.content_store import (
    ContentStore,
    ContentUpload,
    check_chunk,
    check_upload,
    digest_mismatch_error,
    offset_error,
    upload_lost_error,
)
from ergon_framework.facts.errors import (
    ArtifactLost,
    ArtifactUnknown,
    BufferFull,
    InvalidFactError,
)
from ergon_framework.facts.model import ArtifactReference, Envelope, ObjectName, StoredArtifact
from ergon_framework.facts.stores import errors


class MemoryUpload:
    """The bytes of an incomplete artifact; they cannot be read before the upload is complete."""

    def __init__(self, content: bytes = b"") -> None:
        self._chunks = [content]
        self._hash = hashlib.sha256(content)
        self.size = len(content)
        #: Set to False by the store when it has no space and the name is stored already: further bytes are only hashed,
        #: so that a repeated upload of the same bytes still succeeds. ``to_bytes`` is incomplete then.
        self.is_buffered = True

    def add(self, chunk: bytes) -> None:
        if not isinstance(chunk, bytes | bytearray | memoryview):
            raise InvalidFactError(f"a blob yields bytes, not {type(chunk).__name__}")
        if self.is_buffered:
            self._chunks.append(bytes(chunk))
        self._hash.update(chunk)
        self.size += len(chunk)

    @property
    def stored(self) -> StoredArtifact:
        return StoredArtifact(f"sha256:{self._hash.hexdigest()}", self.size)

    def to_bytes(self) -> bytes:
        return b"".join(self._chunks)


class Artifacts:
    """All artifacts of one store, which calls every method under its lock."""

    def __init__(self) -> None:
        #: By name: what was confirmed, and when it was stored.
        self._names: dict[ObjectName, tuple[StoredArtifact, int]] = {}
        self._contents: dict[str, bytes] = {}
        #: Interrupted uploads, by name and expected content, with the time of the interruption.
        self._interrupted: dict[tuple[ObjectName, StoredArtifact], tuple[bytes, int]] = {}
        #: By artifact: the retained facts that reference it, oldest first. By fact: the artifact that it references.
        self._facts_by_artifact: dict[ObjectName, dict[tuple[str, str], None]] = {}
        self._artifact_by_fact: dict[tuple[str, str], ObjectName] = {}
        #: Running uploads.
        self.running_uploads: set[MemoryUpload] = set()

    def copy_stored(self) -> Artifacts:
        """Return a copy without the running uploads, for a pickled or copied store."""
        clone = copy.copy(self)
        clone.running_uploads = set()
        return copy.deepcopy(clone)

    def begin(self, name: ObjectName, expected: StoredArtifact | None, begin: int) -> MemoryUpload:
        """Begin an upload, or resume an interrupted one after its first *begin* bytes."""
        if begin == 0:
            if expected is not None:
                self._interrupted.pop((name, expected), None)
            return MemoryUpload()
        stored_bytes = 0 if expected is None else self.uploaded_bytes(name, expected)
        if expected is None or not 0 < begin <= stored_bytes:
            raise errors.upload_offset_error(name, begin, stored_bytes)
        partial = self._interrupted.pop((name, expected), None)
        content = self._contents[expected.digest] if partial is None else partial[0]
        return MemoryUpload(content[:begin])

    def interrupt(self, name: ObjectName, expected: StoredArtifact, upload: MemoryUpload, now: int) -> None:
        """Record an interrupted upload, which may be resumed."""
        self._interrupted[name, expected] = upload.to_bytes(), now

    def uploaded_bytes(self, name: ObjectName, expected: StoredArtifact) -> int:
        entry = self._names.get(name)
        if entry is not None and entry[0] == expected and expected.digest in self._contents:
            return expected.size
        partial = self._interrupted.get((name, expected))
        return 0 if partial is None else len(partial[0])

    def locate(self, name: ObjectName) -> ObjectName:
        """Return the name under which the artifact is stored: *name* itself, or the same name without a zone.

        The zones of the store's own side share the names without a zone. A reference by a fact of the zone in *name*
        shows that it is one of them, because only facts of these zones may reference such a name.
        """
        shared_name = name._replace(zone="")
        if name not in self._names and any(zone == name.zone for zone, _ in self.referencing_facts(shared_name)):
            return shared_name
        return name

    def stat(self, name: ObjectName) -> StoredArtifact | None:
        """Return what was confirmed for that name, or None."""
        entry = self._names.get(name)
        return None if entry is None else entry[0]

    def referencing_facts(self, name: ObjectName) -> Collection[tuple[str, str]]:
        """Return the retained facts that reference the artifact, each as zone and message_id."""
        return self._facts_by_artifact.get(name, {})

    def match(self, name: ObjectName, stored: StoredArtifact) -> StoredArtifact | None:
        """Return what was confirmed for the same bytes before, or None; raise a conflict for other bytes."""
        entry = self._names.get(name)
        if entry is None:
            return None
        if entry[0] != stored:
            raise errors.artifact_conflict_error(name, entry[0], stored)
        return entry[0]

    def store(self, name: ObjectName, upload: MemoryUpload, now: int) -> StoredArtifact:
        stored = upload.stored
        self._names[name] = stored, now
        self._contents.setdefault(stored.digest, upload.to_bytes())
        return stored

    def repair(self, upload: MemoryUpload) -> None:
        """Replace the content of a stored artifact by the same bytes, which repairs a missing or damaged one."""
        self._contents[upload.stored.digest] = upload.to_bytes()

    def resolve_reference(self, reference: ArtifactReference, owners: Iterable[str]) -> ObjectName:
        """Return the referenced artifact of the first of *owners* that has it; raise if it is missing or differs.

        *owners* are the fact's zone, and the empty text for the shared names if the fact is appended here.
        """
        names = (ObjectName(zone, reference.bucket, reference.key) for zone in owners)
        name = next((name for name in names if name in self._names), None)
        stored = None if name is None else self._names[name][0]
        if name is None or stored is None or stored.digest not in self._contents:
            raise errors.artifact_missing_error(reference)
        if stored != (reference.digest, reference.size):
            raise errors.artifact_differs_error(reference, stored)
        return name

    def add_reference(self, name: ObjectName, envelope: Envelope) -> None:
        """Record that a retained fact references the artifact."""
        fact_key = envelope.from_zone, envelope.message_id
        self._facts_by_artifact.setdefault(name, {})[fact_key] = None
        self._artifact_by_fact[fact_key] = name

    def remove_reference(self, envelope: Envelope) -> None:
        """Remove the reference of a fact that is no longer retained."""
        fact_key = envelope.from_zone, envelope.message_id
        name = self._artifact_by_fact.pop(fact_key)
        self._facts_by_artifact[name].pop(fact_key)
        if not self._facts_by_artifact[name]:
            del self._facts_by_artifact[name]

    def prune(self, before_unix_ms: int) -> int:
        """Remove artifacts that were stored before the given time and that no retained fact references."""
        unused = [
            name
            for name, (_, stored_at_unix_ms) in self._names.items()
            if stored_at_unix_ms < before_unix_ms and name not in self._facts_by_artifact
        ]
        for name in unused:
            del self._names[name]
        self.delete_stale_uploads(before_unix_ms)
        used = Counter(stored.digest for stored, _ in self._names.values())
        for digest in [digest for digest in self._contents if not used[digest]]:
            del self._contents[digest]
        return len(unused)

    def read(self, name: ObjectName, begin: int = 0) -> Iterator[bytes]:
        """Return the content in chunks; raise an error at the end if it is not what was stored."""
        entry = self._names.get(name)
        content = None if entry is None else self._contents.get(entry[0].digest)
        if entry is None or content is None:
            raise self._lost_error(name, "is missing")
        return self._read_chunks(name, content, entry[0].digest, begin)

    def _read_chunks(self, name: ObjectName, content: bytes, digest: str, begin: int) -> Iterator[bytes]:
        hasher = hashlib.sha256(content[:begin])
        for start in range(begin, len(content), CHUNK_BYTES):
            chunk = content[start : start + CHUNK_BYTES]
            hasher.update(chunk)
            yield chunk
        if f"sha256:{hasher.hexdigest()}" != digest:
            raise self._lost_error(name, "is damaged")

    def _lost_error(self, name: ObjectName, problem: str) -> ArtifactLost | ArtifactUnknown:
        return errors.artifact_lost_error(name, problem, next(iter(self.referencing_facts(name)), None))

    def delete_stale_uploads(self, before_unix_ms: int) -> None:
        """Remove uploads that were interrupted before the given time."""
        self._interrupted = {
            upload: partial for upload, partial in self._interrupted.items() if partial[1] >= before_unix_ms
        }

    @property
    def size(self) -> int:
        return sum(map(len, self._contents.values()))

    @property
    def upload_bytes(self) -> int:
        """The number of bytes of incomplete uploads."""
        interrupted_bytes = sum(len(content) for content, _ in self._interrupted.values())
        return interrupted_bytes + sum(upload.size for upload in self.running_uploads if upload.is_buffered)


class _MemoryContentUpload(ContentUpload):
    """An upload in memory; the object itself identifies its owner."""

    def __init__(self, store: MemoryContentStore, upload_id: str | None, content: bytes) -> None:
        self._store = store
        #: None for an upload that cannot be resumed.
        self.upload_id = upload_id
        self.is_committed = False
        self.content = bytearray(content)
        self.updated_at_unix_ms = store.now()

    @property
    def size(self) -> int:
        return len(self.content)

    def add(self, piece: bytes) -> None:
        check_chunk(piece)
        with self._store.lock:
            self._store.check_owner(self)
            self._store.check_capacity(self.size + len(piece))
            self.content += piece
            self.updated_at_unix_ms = self._store.now()

    def commit(self, expected: StoredArtifact | None = None) -> StoredArtifact:
        with self._store.lock:
            self._store.check_owner(self)
            stored = StoredArtifact(f"sha256:{hashlib.sha256(self.content).hexdigest()}", len(self.content))
            self._store.delete_upload(self)
            if expected is not None and stored != expected:
                raise digest_mismatch_error(expected, stored)
            self._store.contents[stored.digest] = bytes(self.content)
            self.is_committed = True
            return stored


class MemoryContentStore(ContentStore):
    """A content store that lives as long as this process."""

    def __init__(self, *, max_bytes: int | None = None, wall: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._wall = wall
        self.lock = threading.Lock()
        self.contents: dict[str, bytes] = {}
        self._uploads: dict[str, _MemoryContentUpload] = {}
        self._running_uploads: set[_MemoryContentUpload] = set()

    @property
    def durable(self) -> bool | None:
        return False

    @contextmanager
    def begin_upload(self, upload: str | None = None, *, begin: int = 0) -> Iterator[ContentUpload]:
        with self.lock:
            previous = None if upload is None else self._uploads.get(check_upload(upload))
            stored_bytes = 0 if previous is None else previous.size
            if not 0 <= begin <= stored_bytes:
                raise offset_error(upload, begin, stored_bytes)
            memory_upload = _MemoryContentUpload(
                self, upload, b"" if previous is None else bytes(previous.content[:begin])
            )
            if upload is not None:
                self._uploads[upload] = memory_upload
            self._running_uploads.add(memory_upload)
        try:
            yield memory_upload
        finally:
            self._running_uploads.discard(memory_upload)

    def uploaded_bytes(self, upload: str) -> int:
        with self.lock:
            current = self._uploads.get(check_upload(upload))
            return 0 if current is None else current.size

    def size_of(self, digest: str) -> int | None:
        content = self.contents.get(digest)
        return None if content is None else len(content)

    def read(self, digest: str, *, begin: int = 0) -> Iterator[bytes]:
        content = self.contents[digest]
        return (content[start : start + CHUNK_BYTES] for start in range(begin, len(content), CHUNK_BYTES))

    def remove(self, digest: str) -> bool:
        return self.contents.pop(digest, None) is not None

    def delete_stale_uploads(self, before_unix_ms: int) -> int:
        with self.lock:
            stale = [name for name, upload in self._uploads.items() if upload.updated_at_unix_ms < before_unix_ms]
            for name in stale:
                del self._uploads[name]
            return len(stale)

    def upload_bytes(self) -> int:
        with self.lock:
            return sum(
                upload.size for upload in self._running_uploads.union(self._uploads.values()) if not upload.is_committed
            )

    # -- called by an upload, under the lock ----------------------------------------------------------

    def now(self) -> int:
        return int(self._wall() * 1000)

    def check_capacity(self, size: int) -> None:
        used = sum(map(len, self.contents.values()))
        if self._max_bytes is not None and used + size > self._max_bytes:
            raise BufferFull(f"content store is full: {used} of {self._max_bytes} bytes are used; nothing was stored")

    def check_owner(self, upload: _MemoryContentUpload) -> None:
        """Raise an error if another upload object owns the upload."""
        if upload.upload_id is not None and self._uploads.get(upload.upload_id) is not upload:
            raise upload_lost_error(upload.upload_id)

    def delete_upload(self, upload: _MemoryContentUpload) -> None:
        if upload.upload_id is not None:
            del self._uploads[upload.upload_id]
