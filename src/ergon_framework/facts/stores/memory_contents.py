"""MemoryContentStore: contents in this process, for tests and as the reference for durable stores."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.contents import (
    ContentStore,
    ContentUpload,
    check_chunk,
    check_upload,
    digest_mismatch_error,
    offset_error,
    upload_lost_error,
)
from ergon_framework.facts.errors import BufferFull
from ergon_framework.facts.model import StoredArtifact


class _MemoryContentUpload(ContentUpload):
    """An upload in memory; the object itself identifies its owner."""

    def __init__(self, store: MemoryContentStore, upload: str | None, content: bytes) -> None:
        self._store = store
        self.upload = upload
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
            raise BufferFull(f"{used} bytes are here and {self._max_bytes} is the most: nothing was stored")

    def check_owner(self, upload: _MemoryContentUpload) -> None:
        """Raise an error if another upload object owns the upload."""
        if upload.upload is not None and self._uploads.get(upload.upload) is not upload:
            raise upload_lost_error(upload.upload)

    def delete_upload(self, upload: _MemoryContentUpload) -> None:
        if upload.upload is not None:
            del self._uploads[upload.upload]
