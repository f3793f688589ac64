"""Uploads into a folder: written once, hashed on the way, and in the hands of one at a time.

An upload is two files. ``NAME`` says who has it in hand: a mark, and the run of the machine in which it was
made. ``NAME.part`` holds the bytes. Whoever writes holds the lock of the first and finds his own mark there,
so that somebody from whom the upload was taken, in this process or another, writes nothing any more.
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

from ergon_framework.facts.boundary import CHUNK
from ergon_framework.facts.contents import Receiving, check_piece, lost, not_as_expected, not_so_far
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import Stored
from ergon_framework.facts.stores.file_system import FILE, boot, told

#: A named upload is synced each time that many bytes have come: what lies before is there after a loss of power.
SYNC: Final = 8 * 1024 * 1024
#: Seconds to wait for somebody who is just writing; a process that was stopped in the middle may never go on.
_PATIENCE: Final = 30.0


def part(name: str) -> str:
    """Where the bytes of an upload are."""
    return f"{name}.part"


class Claim:
    """Who has an upload in hand."""

    def __init__(self, uploads: int, name: str, opened: int) -> None:
        self._uploads = uploads
        self.name = name
        self._opened = opened
        self._mark = f"{boot()} {uuid.uuid4().hex}".encode()

    @classmethod
    @contextmanager
    def locked(cls, uploads: int, name: str, *, make: bool = True) -> Iterator[tuple[Claim, bytes] | None]:
        """The claim with its lock held, and the mark that is found there; None if there is none and none is made."""
        while True:
            try:
                opened = os.open(name, os.O_RDWR | FILE | (os.O_CREAT if make else 0), 0o600, dir_fd=uploads)
            except FileNotFoundError:
                yield None
                return
            claim = cls(uploads, name, opened)
            try:
                _lock(opened, name)
                # Sealed or swept between the opening and the lock: what is there now is another file.
                if os.fstat(opened).st_nlink:
                    yield claim, os.pread(opened, 128, 0)
                    return
            except BaseException:
                claim.close()
                raise
            claim.close()

    def take(self) -> None:
        """From now on the upload is in these hands; the lock is held."""
        os.pwrite(self._opened, self._mark, 0)
        # The one before may have been longer: another machine names its runs otherwise.
        os.ftruncate(self._opened, len(self._mark))

    def unlock(self) -> None:
        fcntl.flock(self._opened, fcntl.LOCK_UN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else writes in here, and the upload is still in these hands."""
        _lock(self._opened, self.name)
        try:
            if not os.fstat(self._opened).st_nlink or os.pread(self._opened, 128, 0) != self._mark:
                raise lost(self.name)
            yield
        finally:
            self.unlock()

    def discard(self) -> None:
        """The upload is over; the lock is held, and of its bytes nothing is left."""
        with suppress(FileNotFoundError):
            os.unlink(part(self.name), dir_fd=self._uploads)
        os.unlink(self.name, dir_fd=self._uploads)

    def close(self) -> None:
        opened, self._opened = self._opened, -1
        if opened >= 0:
            os.close(opened)


def _lock(opened: int, name: str) -> None:
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise FactError(
                    f"the upload {name} is being written by a process that has not moved for {_PATIENCE:g} s; look "
                    "whether it was stopped, and try again"
                ) from None
            time.sleep(0.001)
        else:
            return


class FileUpload(Receiving):
    """An upload as a file that grows."""

    def __init__(
        self,
        uploads: int,
        name: str,
        *,
        begin: int,
        resumable: bool,
        room: Callable[[int], None],
        place: Callable[[str], None],
    ) -> None:
        self._uploads = uploads
        self._resumable = resumable
        self._room = room
        self._place = place
        self._hash = hashlib.sha256()
        self._size = 0
        self._over = False
        with told(f"cannot begin the upload {name}"):
            self._claim, self._file = self._taken(name, begin)

    def _taken(self, name: str, begin: int) -> tuple[Claim, int]:
        with Claim.locked(self._uploads, name) as found:
            assert found is not None  # noqa: S101 - it is made
            claim, mark = found
            here = kept(self._uploads, name, mark) if begin else 0
            if not 0 <= begin <= here:
                if not mark:
                    claim.discard()
                raise not_so_far(name, begin, here)
            file = os.open(part(name), os.O_RDWR | os.O_CREAT | FILE, 0o600, dir_fd=self._uploads)
            try:
                claim.take()
                os.ftruncate(file, begin)
                if self._resumable:
                    os.fsync(self._uploads)
            except BaseException:
                os.close(file)
                raise
            claim.unlock()
            return claim, file

    @property
    def size(self) -> int:
        return self._size

    def recall(self, begin: int) -> None:
        """Read again what came before: a hash cannot be put down and taken up."""
        while self._size < begin:
            piece = os.pread(self._file, min(CHUNK, begin - self._size), self._size)
            if not piece:
                raise lost(self._claim.name)
            self._hash.update(piece)
            self._size += len(piece)

    def add(self, piece: bytes) -> None:
        check_piece(piece)
        rest = memoryview(piece).cast("B")
        while rest:
            # Never beyond a point of syncing: a byte behind it proves that the sync was done.
            now = rest[: SYNC - self._size % SYNC]
            self._write(now)
            rest = rest[len(now) :]
            if self._resumable and self._size % SYNC == 0:
                self._sync()

    def _write(self, piece: memoryview) -> None:
        self._room(len(piece))
        with told(f"cannot write the upload {self._claim.name}"), self._claim.held():
            try:
                written = 0
                while written < len(piece):
                    written += os.pwrite(self._file, piece[written:], self._size + written)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        self._hash.update(piece)
        self._size += len(piece)

    def _sync(self) -> None:
        with told(f"cannot sync the upload {self._claim.name}"):
            try:
                os.fsync(self._file)
            except OSError:
                # The kernel has forgotten which bytes it could not write: a second sync would lie about them.
                self.discard()
                raise

    def seal(self, expected: Stored | None = None) -> Stored:
        stored = Stored(f"sha256:{self._hash.hexdigest()}", self._size)
        if expected is not None and stored != expected:
            self.discard()
            raise not_as_expected(expected, stored)
        self._sync()
        with told(f"cannot keep the upload {self._claim.name}"), self._claim.held():
            self._place(stored.digest)
            self._over = True
            self._claim.discard()
        return stored

    def discard(self) -> None:
        """Nothing of it is kept; if it is in other hands now, that is theirs."""
        if not self._over:
            self._over = True
            with suppress(FactError, OSError), self._claim.held():
                self._claim.discard()

    def close(self) -> None:
        """Let go of it: one without a name is gone, another can be gone on with."""
        try:
            if not self._resumable:
                self.discard()
            elif not self._over:
                with suppress(FactError):
                    self._sync()
        finally:
            os.close(self._file)
            self._claim.close()


def kept(uploads: int, name: str, mark: bytes) -> int:
    """Bytes of an upload that are here and stay here."""
    try:
        file = os.open(part(name), os.O_RDONLY | FILE, dir_fd=uploads)
    except FileNotFoundError:
        return 0
    try:
        size = os.fstat(file).st_size
        if boot() and mark.startswith(boot().encode()):
            os.fsync(file)
            return size
        # The machine was off since: of the last stretch nobody knows whether its bytes came before its length.
        return max(0, size - 1) // SYNC * SYNC
    finally:
        os.close(file)
