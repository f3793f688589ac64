"""MemoryContents: contents in this process, for tests and as the measure for those that last."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ergon_framework.facts.boundary import CHUNK
from ergon_framework.facts.contents import (
    Contents,
    Receiving,
    check_piece,
    check_upload,
    lost,
    not_as_expected,
    not_so_far,
)
from ergon_framework.facts.errors import BufferFull
from ergon_framework.facts.model import Stored


class _Upload(Receiving):
    """Bytes that come in; whoever has it in hand is known by this object."""

    def __init__(self, home: MemoryContents, upload: str | None, content: bytes) -> None:
        self._home = home
        self.upload = upload
        self.sealed = False
        self.content = bytearray(content)
        self.touched = home.now()

    @property
    def size(self) -> int:
        return len(self.content)

    def add(self, piece: bytes) -> None:
        check_piece(piece)
        with self._home.lock:
            self._home.check(self)
            self._home.make_sure_of_room(self.size + len(piece))
            self.content += piece
            self.touched = self._home.now()

    def seal(self, expected: Stored | None = None) -> Stored:
        with self._home.lock:
            self._home.check(self)
            stored = Stored(f"sha256:{hashlib.sha256(self.content).hexdigest()}", len(self.content))
            self._home.forget(self)
            if expected is not None and stored != expected:
                raise not_as_expected(expected, stored)
            self._home.contents[stored.digest] = bytes(self.content)
            self.sealed = True
            return stored


class MemoryContents(Contents):
    """A place that lives as long as this process."""

    def __init__(self, *, max_bytes: int | None = None, wall: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._wall = wall
        self.lock = threading.Lock()
        self.contents: dict[str, bytes] = {}
        self._uploads: dict[str, _Upload] = {}
        self._arriving: set[_Upload] = set()

    @property
    def durable(self) -> bool | None:
        return False

    @contextmanager
    def receive(self, upload: str | None = None, *, begin: int = 0) -> Iterator[Receiving]:
        with self.lock:
            known = None if upload is None else self._uploads.get(check_upload(upload))
            here = 0 if known is None else known.size
            if not 0 <= begin <= here:
                raise not_so_far(upload, begin, here)
            taken = _Upload(self, upload, b"" if known is None else bytes(known.content[:begin]))
            if upload is not None:
                self._uploads[upload] = taken
            self._arriving.add(taken)
        try:
            yield taken
        finally:
            self._arriving.discard(taken)

    def received(self, upload: str) -> int:
        with self.lock:
            known = self._uploads.get(check_upload(upload))
            return 0 if known is None else known.size

    def size_of(self, digest: str) -> int | None:
        content = self.contents.get(digest)
        return None if content is None else len(content)

    def read(self, digest: str, *, begin: int = 0) -> Iterator[bytes]:
        content = self.contents[digest]
        return (content[start : start + CHUNK] for start in range(begin, len(content), CHUNK))

    def remove(self, digest: str) -> bool:
        return self.contents.pop(digest, None) is not None

    def sweep(self, before_unix_ms: int) -> int:
        with self.lock:
            gone = [name for name, upload in self._uploads.items() if upload.touched < before_unix_ms]
            for name in gone:
                del self._uploads[name]
            return len(gone)

    def upload_bytes(self) -> int:
        with self.lock:
            return sum(upload.size for upload in self._arriving.union(self._uploads.values()) if not upload.sealed)

    # -- for an upload, under the lock ----------------------------------------------------------------

    def now(self) -> int:
        return int(self._wall() * 1000)

    def make_sure_of_room(self, size: int) -> None:
        used = sum(map(len, self.contents.values()))
        if self._max_bytes is not None and used + size > self._max_bytes:
            raise BufferFull(f"{used} bytes are here and {self._max_bytes} is the most: nothing was stored")

    def check(self, upload: _Upload) -> None:
        """Whether it is still in the hands of whoever took it."""
        if upload.upload is not None and self._uploads.get(upload.upload) is not upload:
            raise lost(upload.upload)

    def forget(self, upload: _Upload) -> None:
        if upload.upload is not None:
            del self._uploads[upload.upload]
