"""Uploads into a folder: written once, hashed while they are written, with one owner at a time; and file system access.

An upload is two files. ``NAME`` records its owner: the boot id of the machine and a random token.
``NAME.part`` holds the bytes. A writer holds the lock of the first file and finds its own token there,
so that a previous owner, in this process or another, cannot write any more.

File system access opens folders without following links, makes directory entries durable, and detects whether a sync
is durable.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.content_store import (
    ContentUpload,
    check_chunk,
    digest_mismatch_error,
    offset_error,
    upload_lost_error,
)
from ergon_framework.facts.errors import BufferFull, FactError
from ergon_framework.facts.model import StoredArtifact

#: Links are not followed: a link planted in the folder cannot redirect a lookup.
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
FILE_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW

#: File systems that write the data on fsync and order the disk to flush it.
_DURABLE_FILE_SYSTEMS: Final = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "xfs", "zfs"})
#: File systems that are held in memory.
_MEMORY_FILE_SYSTEMS: Final = frozenset({"devtmpfs", "ramfs", "tmpfs"})
#: Mount options with which a sync does not wait for the disk.
_UNSAFE_MOUNT_OPTIONS: Final = frozenset({"barrier=0", "nobarrier", "volatile"})


def open_folder(name: str, *, parent_fd: int | None = None) -> int:
    """Open a folder; only the outermost folder may be a link, because its owner chose it."""
    return os.open(name, _FOLDER_FLAGS if parent_fd is not None else _FOLDER_FLAGS & ~os.O_NOFOLLOW, dir_fd=parent_fd)


def make_folder(name: str, *, parent_fd: int) -> None:
    """Create the folder *name* if it is missing, and make its entry durable even if another process created it."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=parent_fd)
    os.fsync(parent_fd)


def make_path(path: Path) -> None:
    """Create *path* with its missing parents, and make the new entries durable."""
    if not path.is_dir():
        make_path(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    # Another process may have created it a moment ago. A parent that cannot be synced is older than this process.
    with suppress(PermissionError):
        parent_fd = open_folder(str(path.parent))
        try:
            os.fsync(parent_fd)
        finally:
            os.close(parent_fd)


@contextmanager
def folder(name: str, *, parent_fd: int) -> Iterator[int]:
    """Open a folder and close it on exit."""
    folder_fd = open_folder(name, parent_fd=parent_fd)
    try:
        yield folder_fd
    finally:
        os.close(folder_fd)


@contextmanager
def translate_os_errors(message: str) -> Iterator[None]:
    """Translate operating system errors to framework errors; a full disk raises BufferFull."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BufferFull(f"{message}: {error.strerror}; nothing was stored; free space on that disk") from error
        raise FactError(f"{message}: {error.strerror or error}; check that disk and try again") from error


def boot_id() -> str:
    """Return the boot id of the machine, or an empty string where it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def is_fsync_durable(path: str | Path) -> bool | None:
    """Tell whether a sync below *path* survives a power loss; return None where this is unknown.

    The disk itself is trusted: a disk that reports flushed data too early cannot be detected here.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    file_system, options = _find_mount(os.path.realpath(path), mounts)
    if file_system in _MEMORY_FILE_SYSTEMS or options & _UNSAFE_MOUNT_OPTIONS:
        return False
    return True if file_system in _DURABLE_FILE_SYSTEMS else None


def _find_mount(path: str, mounts: str) -> tuple[str, set[str]]:
    """Return type and options of the mount of *path*: the longest matching mount point, the last of equal ones."""
    best: tuple[int, str, set[str]] = (-1, "", set())
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, file_system_fields = left.split(), right.split()
        mount_point = fields[4].replace("\\040", " ").rstrip("/")
        if (path == mount_point or path.startswith(mount_point + "/")) and len(mount_point) >= best[0]:
            options = {
                *fields[5].split(","),
                *(file_system_fields[2].split(",") if len(file_system_fields) > 2 else ()),  # noqa: PLR2004 - as proc(5) has it
            }
            best = len(mount_point), file_system_fields[0], options
    return best[1], best[2]


# -- uploads ----------------------------------------------------------------------------------------

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
                    f"upload {name} is locked by another process, waited {_LOCK_TIMEOUT_SECONDS:g} s; check "
                    "whether that process is suspended, and try again"
                ) from None
            time.sleep(0.001)
        else:
            return


class FileUpload(ContentUpload):
    """An upload as a file that grows.

    *reserve* is called with the number of bytes before they are written; it raises BufferFull if there is no space.
    *store_content* is called at the commit, and moves the file to the place of the given digest.
    """

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
        """Become the owner of the upload, and keep its first *begin* bytes."""
        with UploadLock.acquire(self._uploads_fd, name) as acquired:
            assert acquired is not None  # noqa: S101 - create is true
            upload_lock, token = acquired
            stored_bytes = durable_bytes(self._uploads_fd, name, token) if begin else 0
            if not 0 <= begin <= stored_bytes:
                if not token:
                    # No owner has written its token: this call has created the file.
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
        with translate_os_errors(f"cannot commit the upload {self._upload_lock.name}"), self._upload_lock.check_owned():
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
    """Return the number of bytes of an upload that are stored durably; *token* is that of its last owner."""
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
