"""What a file system is asked for: folders held open, entries that last, and whether a sync reaches the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ergon_framework.facts.errors import BufferFull, FactError

#: Nothing is looked up through a link: whoever can plant one in the folder leads nowhere with it.
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
FILE: Final = os.O_CLOEXEC | os.O_NOFOLLOW

#: File systems that write on fsync what they have been given, and order the disk to keep it.
_KEEPING: Final = frozenset({"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "xfs", "zfs"})
#: File systems that are memory.
_FORGETTING: Final = frozenset({"devtmpfs", "ramfs", "tmpfs"})
#: Options of a mount with which a sync does not wait for the disk.
_CARELESS: Final = frozenset({"barrier=0", "nobarrier", "volatile"})


def open_folder(name: str, *, within: int | None = None) -> int:
    """A folder, held open; only the outermost may be a link, which is its owner's choice."""
    return os.open(name, _FOLDER if within is not None else _FOLDER & ~os.O_NOFOLLOW, dir_fd=within)


def make_folder(name: str, *, within: int) -> None:
    """Have a folder called *name*, whose entry is durable also if somebody else has just made it."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=within)
    os.fsync(within)


def make_path(path: Path) -> None:
    """Have *path*, with all above it; what was missing is durable."""
    if not path.is_dir():
        make_path(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    # Somebody else may have made it a moment ago; where that cannot be synced it is older than we are.
    with suppress(PermissionError):
        above = open_folder(str(path.parent))
        try:
            os.fsync(above)
        finally:
            os.close(above)


@contextmanager
def folder(name: str, *, within: int) -> Iterator[int]:
    """A folder, held open for a while."""
    opened = open_folder(name, within=within)
    try:
        yield opened
    finally:
        os.close(opened)


@contextmanager
def told(what: str) -> Iterator[None]:
    """Errors of the operating system as ours; a full disk is a full buffer."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BufferFull(f"{what}: {error.strerror}; nothing was stored, make room on that disk") from error
        raise FactError(f"{what}: {error.strerror or error}; look at that disk, and try again") from error


def boot() -> str:
    """Names this run of the machine; empty where nobody says."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def keeps_what_is_synced(path: str | Path) -> bool | None:
    """Whether a sync below *path* survives a loss of power; None where nobody can tell.

    The disk itself is believed: one that lies about its cache cannot be told from here.
    """
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    kind, options = _mount_of(os.path.realpath(path), mounts)
    if kind in _FORGETTING or options & _CARELESS:
        return False
    return True if kind in _KEEPING else None


def _mount_of(path: str, mounts: str) -> tuple[str, set[str]]:
    """The kind and the options of the mount that *path* is on: the longest that it begins with, the last of those."""
    found: tuple[int, str, set[str]] = (-1, "", set())
    for line in mounts.splitlines():
        before, _, behind = line.partition(" - ")
        words, kinds = before.split(), behind.split()
        place = words[4].replace("\\040", " ").rstrip("/")
        if (path == place or path.startswith(place + "/")) and len(place) >= found[0]:
            options = {*words[5].split(","), *(kinds[2].split(",") if len(kinds) > 2 else ())}  # noqa: PLR2004 - as proc(5) has it
            found = len(place), kinds[0], options
    return found[1], found[2]
