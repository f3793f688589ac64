"""Uploads into a folder: written once, hashed while they are written, with one owner at a time.

An upload is two files. ``NAME`` records its owner: the boot id of the machine and a random token.
``NAME.part`` holds the bytes. A writer holds the lock of the first file and finds its own token there,
so that a previous owner, in this process or another, cannot write any more.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.contents import (
    ContentUpload,
    check_chunk,
    digest_mismatch_error,
    offset_error,
    upload_lost_error,
)
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.facts.stores.file_system import FILE_FLAGS, boot_id, translate_os_errors

#: A named upload is synced each time this number of bytes has arrived; the bytes before survive a power loss.
SYNC_INTERVAL_BYTES: Final = 8 * 1024 * 1024
#: Seconds to wait for the lock of another writer; a process that was stopped during a write may never continue.
_LOCK_TIMEOUT_SECONDS: Final = 30.0


def upload_path(name: str) -> str:
    """Return the name of the file that holds the bytes of an upload."""
    return f"{name}.part"


class UploadLock:
    """The ownership lock of an upload."""

    def __init__(self, uploads_fd: int, name: str, lock_fd: int) -> None:
        self._uploads_fd = uploads_fd
        self.name = name
        self._lock_fd = lock_fd
        self._token = f"{boot_id()} {uuid.uuid4().hex}".encode()

    @classmethod
    @contextmanager
    def acquire(cls, uploads_fd: int, name: str, *, create: bool = True) -> Iterator[tuple[UploadLock, bytes] | None]:
        """Yield the held lock and the token in the file, or None if the file is missing and *create* is false."""
        while True:
            try:
                lock_fd = os.open(
                    name, os.O_RDWR | FILE_FLAGS | (os.O_CREAT if create else 0), 0o600, dir_fd=uploads_fd
                )
            except FileNotFoundError:
                yield None
                return
            lock = cls(uploads_fd, name, lock_fd)
            try:
                _lock(lock_fd, name)
                # The file was committed or deleted between open and lock: the name now stands for another file.
                if os.fstat(lock_fd).st_nlink:
                    yield lock, os.pread(lock_fd, 128, 0)
                    return
            except BaseException:
                lock.close()
                raise
            lock.close()

    def take_ownership(self) -> None:
        """Make this object the owner of the upload; the caller holds the lock."""
        os.pwrite(self._lock_fd, self._token, 0)
        # The previous token may be longer: another machine has another form of boot id.
        os.ftruncate(self._lock_fd, len(self._token))

    def unlock(self) -> None:
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)

    @contextmanager
    def check_owned(self) -> Iterator[None]:
        """Hold the lock for a block, and raise an error if this object no longer owns the upload."""
        _lock(self._lock_fd, self.name)
        try:
            if not os.fstat(self._lock_fd).st_nlink or os.pread(self._lock_fd, 128, 0) != self._token:
                raise upload_lost_error(self.name)
            yield
        finally:
            self.unlock()

    def discard(self) -> None:
        """Delete the upload with its bytes; the caller holds the lock."""
        with suppress(FileNotFoundError):
            os.unlink(upload_path(self.name), dir_fd=self._uploads_fd)
        os.unlink(self.name, dir_fd=self._uploads_fd)

    def close(self) -> None:
        lock_fd, self._lock_fd = self._lock_fd, -1
        if lock_fd >= 0:
            os.close(lock_fd)


def _lock(lock_fd: int, name: str) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    while True:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise FactError(
                    f"the upload {name} is being written by a process that has not moved for {_LOCK_TIMEOUT_SECONDS:g} "
                    "s; look whether it was stopped, and try again"
                ) from None
            time.sleep(0.001)
        else:
            return


class FileUpload(ContentUpload):
    """An upload as a file that grows."""

    def __init__(
        self,
        uploads_fd: int,
        name: str,
        *,
        begin: int,
        resumable: bool,
        reserve: Callable[[int], None],
        store_content: Callable[[str], None],
    ) -> None:
        self._uploads_fd = uploads_fd
        self._resumable = resumable
        self._reserve = reserve
        self._store_content = store_content
        self._hash = hashlib.sha256()
        self._size = 0
        self._is_finished = False
        with translate_os_errors(f"cannot begin the upload {name}"):
            self._upload_lock, self._part_fd = self._open_part(name, begin)

    def _open_part(self, name: str, begin: int) -> tuple[UploadLock, int]:
        with UploadLock.acquire(self._uploads_fd, name) as acquired:
            assert acquired is not None  # noqa: S101 - create is true
            upload_lock, token = acquired
            stored_bytes = durable_bytes(self._uploads_fd, name, token) if begin else 0
            if not 0 <= begin <= stored_bytes:
                if not token:
                    upload_lock.discard()
                raise offset_error(name, begin, stored_bytes)
            part_fd = os.open(upload_path(name), os.O_RDWR | os.O_CREAT | FILE_FLAGS, 0o600, dir_fd=self._uploads_fd)
            try:
                upload_lock.take_ownership()
                os.ftruncate(part_fd, begin)
                if self._resumable:
                    os.fsync(self._uploads_fd)
            except BaseException:
                os.close(part_fd)
                raise
            upload_lock.unlock()
            return upload_lock, part_fd

    @property
    def size(self) -> int:
        return self._size

    def resume(self, begin: int) -> None:
        """Hash the existing bytes again, because a hash state cannot be saved."""
        while self._size < begin:
            chunk = os.pread(self._part_fd, min(CHUNK_BYTES, begin - self._size), self._size)
            if not chunk:
                raise upload_lost_error(self._upload_lock.name)
            self._hash.update(chunk)
            self._size += len(chunk)

    def add(self, piece: bytes) -> None:
        check_chunk(piece)
        remaining = memoryview(piece).cast("B")
        while remaining:
            # Writes stop at each sync point: a byte after it proves that the sync was done.
            block = remaining[: SYNC_INTERVAL_BYTES - self._size % SYNC_INTERVAL_BYTES]
            self._write(block)
            remaining = remaining[len(block) :]
            if self._resumable and self._size % SYNC_INTERVAL_BYTES == 0:
                self._sync()

    def _write(self, block: memoryview) -> None:
        self._reserve(len(block))
        with translate_os_errors(f"cannot write the upload {self._upload_lock.name}"), self._upload_lock.check_owned():
            try:
                written = 0
                while written < len(block):
                    written += os.pwrite(self._part_fd, block[written:], self._size + written)
            except OSError:
                os.ftruncate(self._part_fd, self._size)
                raise
        self._hash.update(block)
        self._size += len(block)

    def _sync(self) -> None:
        with translate_os_errors(f"cannot sync the upload {self._upload_lock.name}"):
            try:
                os.fsync(self._part_fd)
            except OSError:
                # The kernel no longer knows which bytes it failed to write: a second sync would succeed without them.
                self.discard()
                raise

    def commit(self, expected: StoredArtifact | None = None) -> StoredArtifact:
        stored = StoredArtifact(f"sha256:{self._hash.hexdigest()}", self._size)
        if expected is not None and stored != expected:
            self.discard()
            raise digest_mismatch_error(expected, stored)
        self._sync()
        with translate_os_errors(f"cannot keep the upload {self._upload_lock.name}"), self._upload_lock.check_owned():
            self._store_content(stored.digest)
            self._is_finished = True
            self._upload_lock.discard()
        return stored

    def discard(self) -> None:
        """Delete the upload, unless another owner has taken it over."""
        if not self._is_finished:
            self._is_finished = True
            with suppress(FactError, OSError), self._upload_lock.check_owned():
                self._upload_lock.discard()

    def close(self) -> None:
        """Close the upload: an unnamed upload is deleted, a named one can be resumed."""
        try:
            if not self._resumable:
                self.discard()
            elif not self._is_finished:
                with suppress(FactError):
                    self._sync()
        finally:
            os.close(self._part_fd)
            self._upload_lock.close()


def durable_bytes(uploads_fd: int, name: str, token: bytes) -> int:
    """Return the number of bytes of an upload that are stored durably."""
    try:
        part_fd = os.open(upload_path(name), os.O_RDONLY | FILE_FLAGS, dir_fd=uploads_fd)
    except FileNotFoundError:
        return 0
    try:
        size = os.fstat(part_fd).st_size
        if boot_id() and token.startswith(boot_id().encode()):
            os.fsync(part_fd)
            return size
        # The machine was restarted: in the last interval the length may have been written before the bytes.
        return max(0, size - 1) // SYNC_INTERVAL_BYTES * SYNC_INTERVAL_BYTES
    finally:
        os.close(part_fd)
