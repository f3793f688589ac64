"""File system access: open folders, durable directory entries, and detection of durable syncs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ergon_framework.facts.errors import BufferFull, FactError

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
            raise BufferFull(f"{message}: {error.strerror}; nothing was stored, make room on that disk") from error
        raise FactError(f"{message}: {error.strerror or error}; look at that disk, and try again") from error


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
