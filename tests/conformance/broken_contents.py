"""Content stores that each break the contract in one way: the conformance suite must detect every one of them."""

from __future__ import annotations

import contextlib
import hashlib
import uuid

from ergon_framework.facts.errors import ArtifactMismatch, InvalidFactError
from ergon_framework.facts.stores.memory_contents import MemoryContentStore


class CommitsAnything(MemoryContentStore):
    """The announced digest and size are not checked."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        with super().begin_upload(upload, begin=begin) as memory_upload:
            seal = memory_upload.commit
            memory_upload.commit = lambda expected=None: seal()
            yield memory_upload


class KeepsMismatches(MemoryContentStore):
    """Unexpected bytes are rejected and stored nevertheless."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        with super().begin_upload(upload, begin=begin) as memory_upload:
            seal = memory_upload.commit

            def commit_or_keep(expected=None):
                try:
                    return seal(expected)
                except ArtifactMismatch:
                    content = bytes(memory_upload.content)
                    self.contents[f"sha256:{hashlib.sha256(content).hexdigest()}"] = content
                    raise

            memory_upload.commit = commit_or_keep
            yield memory_upload


class ComparesOnlyTheDigest(MemoryContentStore):
    """Bytes with the right digest are accepted, whatever their size."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        with super().begin_upload(upload, begin=begin) as memory_upload:
            seal = memory_upload.commit
            memory_upload.commit = lambda expected=None: seal(expected and expected._replace(size=memory_upload.size))
            yield memory_upload


class ExposesUnfinishedUploads(MemoryContentStore):
    """Bytes of an unfinished upload can be read."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        with super().begin_upload(upload, begin=begin) as memory_upload:
            add = memory_upload.add

            def add_and_expose(chunk):
                add(chunk)
                content = bytes(memory_upload.content)
                self.contents[f"sha256:{hashlib.sha256(content).hexdigest()}"] = content

            memory_upload.add = add_and_expose
            yield memory_upload


class KeepsUnnamedUploads(MemoryContentStore):
    """An upload without a name gets one, and remains."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        if upload is None and begin == 0:
            upload = uuid.uuid4().hex
        with super().begin_upload(upload, begin=begin) as memory_upload:
            yield memory_upload


class ForgetsNamedUploads(MemoryContentStore):
    """Every interrupted upload is lost."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        with super().begin_upload(upload, begin=begin) as memory_upload:
            try:
                yield memory_upload
            finally:
                self._uploads.pop(upload, None)


class ResumesAtTheEnd(MemoryContentStore):
    """An upload continues after all received bytes, whatever its begin."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        previous = self._uploads.get(upload)
        with super().begin_upload(upload, begin=begin) as memory_upload:
            if begin:
                memory_upload.content[:] = previous.content
            yield memory_upload


class FillsUploadGaps(MemoryContentStore):
    """Gaps are filled with zeros."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        try:
            with super().begin_upload(upload, begin=begin) as memory_upload:
                yield memory_upload
        except InvalidFactError:
            if begin < 1 or upload is None:
                raise
            with super().begin_upload(upload) as memory_upload:
                memory_upload.content[:] = bytes(begin)
                yield memory_upload


class NeverStartsFromScratch(MemoryContentStore):
    """Bytes received under a name always stay in front."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        previous = self._uploads.get(upload)
        with super().begin_upload(upload, begin=begin) as memory_upload:
            if begin == 0 and previous is not None:
                memory_upload.content[:0] = previous.content
            yield memory_upload


class SharesUploads(MemoryContentStore):
    """Two callers may use the same upload at once."""

    def check_owner(self, upload):
        pass

    def delete_upload(self, upload):
        self._uploads.pop(upload.upload_id, None)


class KeepsDamagedContent(MemoryContentStore):
    """Stored bytes are assumed to be complete."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        previous_contents = dict(self.contents)
        with super().begin_upload(upload, begin=begin) as memory_upload:
            yield memory_upload
        self.contents.update(
            {digest: content for digest, content in previous_contents.items() if digest in self.contents}
        )


class CountsCopies(MemoryContentStore):
    """A content that was stored twice must be removed twice."""

    def __init__(self, **options):
        super().__init__(**options)
        self._copies = {}

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        with super().begin_upload(upload, begin=begin) as memory_upload:
            seal = memory_upload.commit

            def commit_and_count(expected=None):
                stored = seal(expected)
                self._copies[stored.digest] = self._copies.get(stored.digest, 0) + 1
                return stored

            memory_upload.commit = commit_and_count
            yield memory_upload

    def remove(self, digest):
        self._copies[digest] = self._copies.get(digest, 0) - 1
        return super().remove(digest) if self._copies[digest] < 1 else digest in self.contents


class RemovesNothing(MemoryContentStore):
    """A stored content cannot be removed."""

    def remove(self, digest):
        return digest in self.contents


class ReadsContentInOnePiece(MemoryContentStore):
    """A content comes in one piece, whatever its size."""

    def read(self, digest, *, begin=0):
        return iter([self.contents[digest][begin:]])


class IgnoresTheReadPosition(MemoryContentStore):
    """Reading always starts at the first byte."""

    def read(self, digest, *, begin=0):
        return super().read(digest)


class AcceptsMalformedDigests(MemoryContentStore):
    """A digest may be written in any way."""

    def _normalize_digest(self, digest):
        return f"sha256:{digest[-64:].lower()}"

    def size_of(self, digest):
        return super().size_of(self._normalize_digest(digest))

    def read(self, digest, *, begin=0):
        return super().read(self._normalize_digest(digest), begin=begin)


class CleansUpYoungUploads(MemoryContentStore):
    """Cleanup removes every uncommitted upload."""

    def delete_stale_uploads(self, before_unix_ms):
        return super().delete_stale_uploads(2**53)


class CleansUpNothing(MemoryContentStore):
    """Interrupted uploads remain forever."""

    def delete_stale_uploads(self, before_unix_ms):
        return 0


class TrustsUploadNames(MemoryContentStore):
    """An upload may have any name."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        hashed_name = None if upload is None else f"n{hashlib.sha256(upload.encode()).hexdigest()}"
        with super().begin_upload(hashed_name, begin=begin) as memory_upload:
            yield memory_upload

    def uploaded_bytes(self, upload):
        return super().uploaded_bytes(f"n{hashlib.sha256(upload.encode()).hexdigest()}")


class AcceptsStrings(MemoryContentStore):
    """A string is accepted as its bytes."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        with super().begin_upload(upload, begin=begin) as memory_upload:
            add = memory_upload.add
            memory_upload.add = lambda chunk: add(chunk.encode() if isinstance(chunk, str) else chunk)
            yield memory_upload


class SharesOneBuffer(MemoryContentStore):
    """All uploads without a name use the same buffer."""

    _buffer = None

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        with super().begin_upload(upload, begin=begin) as memory_upload:
            if upload is None:
                if self._buffer is None:
                    self._buffer = bytearray()
                self._open = getattr(self, "_open", 0) + 1
                memory_upload.content = self._buffer
            try:
                yield memory_upload
            finally:
                if upload is None:
                    self._open -= 1
                    if not self._open:
                        self._buffer = None


class IgnoresTheSizeLimit(MemoryContentStore):
    """It has no size limit."""

    def check_capacity(self, size):
        pass


class ReportsItselfDurable(MemoryContentStore):
    """It reports that it survives a power loss."""

    @property
    def durable(self):
        return True


class LosesTheFirstByte(MemoryContentStore):
    """The first byte is lost, and the stored bytes are not hashed."""

    @contextlib.contextmanager
    def begin_upload(self, upload=None, *, begin=0):
        with super().begin_upload(upload, begin=begin) as memory_upload:
            seal = memory_upload.commit

            def commit_and_truncate(expected=None):
                stored = seal(expected)
                if len(memory_upload.content) == 1:
                    self.contents[stored.digest] = b""
                return stored

            memory_upload.commit = commit_and_truncate
            yield memory_upload


class CountsNoUploads(MemoryContentStore):
    """Uncommitted uploads do not count."""

    def upload_bytes(self):
        return 0
