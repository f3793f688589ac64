"""FileContents: contents as files in a folder, each under its digest.

``objects/ab/cd/HEX`` are the contents, ``uploads/`` is what has not been sealed. What is to be kept is written
and synced beside, moved to its place in one step, and the folder synced: whatever can be read under a digest
was complete before it had that name, also after a loss of power.
"""

from __future__ import annotations

import os
import stat
import uuid
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.boundary import CHUNK
from ergon_framework.facts.contents import ByteBudget, Contents, Receiving, check_upload, hexadecimal, is_upload
from ergon_framework.facts.errors import BufferFull
from ergon_framework.facts.stores.file_system import (
    FILE,
    folder,
    keeps_what_is_synced,
    make_folder,
    make_path,
    open_folder,
    told,
)
from ergon_framework.facts.stores.file_uploads import Claim, FileUpload, kept, part


class FileContents(Contents):
    """Contents below *folder*, which may be shared by processes, also of several zones.

    *max_bytes* bounds what is there: beyond, adding is BufferFull. Processes that share a folder do not
    tell each other what they are just writing, and may together overshoot it by that.
    """

    def __init__(self, folder: str | Path, *, max_bytes: int | None = None) -> None:
        self._path = Path(folder)
        try:
            make_path(self._path)
            root = open_folder(str(self._path))
        except OSError as error:
            raise ConfigurationError(f"cannot keep artifacts in {folder}: {error.strerror}") from error
        try:
            for name in ("objects", "uploads"):
                make_folder(name, within=root)
            self._objects = open_folder("objects", within=root)
            self._closing = [weakref.finalize(self, os.close, self._objects)]
            self._uploads = open_folder("uploads", within=root)
            self._closing.append(weakref.finalize(self, os.close, self._uploads))
        except OSError as error:
            raise ConfigurationError(f"cannot keep artifacts in {folder}: {error.strerror}") from error
        finally:
            os.close(root)
        self._durable = keeps_what_is_synced(self._path)
        self._max_bytes = max_bytes
        self._budget = ByteBudget(max_bytes)
        #: Folders of which this process has seen to it that they last.
        self._lasting: set[str] = set()

    @property
    def durable(self) -> bool | None:
        return self._durable

    def close(self) -> None:
        """Let go of the folder, so that its disk can be taken away; nothing is asked of it afterwards."""
        for close in self._closing:
            close()

    # -- uploads --------------------------------------------------------------------------------------

    @contextmanager
    def receive(self, upload: str | None = None, *, begin: int = 0) -> Iterator[Receiving]:
        name = uuid.uuid4().hex if upload is None else check_upload(upload)
        taken = FileUpload(
            self._uploads,
            name,
            begin=begin,
            resumable=upload is not None,
            room=self._take,
            place=lambda digest: self._place(part(name), digest),
        )
        try:
            with told(f"cannot go on with the upload {name}"):
                taken.recall(begin)
            yield taken
        finally:
            taken.close()

    def _take(self, size: int) -> None:
        used = self._budget.take(size, self._measure)
        if used is not None:
            raise BufferFull(
                f"{used} bytes of artifacts are here and {self._max_bytes} is the most: nothing was stored"
            )

    def _place(self, name: str, digest: str) -> None:
        digits = _digits(digest)
        with self._leaf(digits, make=True) as leaf:
            # What is there under that name has the same bytes or is damaged, so that taking its place is no loss.
            os.rename(name, digits, src_dir_fd=self._uploads, dst_dir_fd=leaf)
            os.fsync(leaf)

    def received(self, upload: str) -> int:
        with (
            told(f"cannot look after the upload {upload}"),
            Claim.locked(self._uploads, check_upload(upload), make=False) as found,
        ):
            if found is None:
                return 0
            claim, mark = found
            try:
                return kept(self._uploads, upload, mark)
            finally:
                claim.close()

    def sweep(self, before_unix_ms: int) -> int:
        with told("cannot sweep uploads"):
            found = {name.removesuffix(".part") for name in os.listdir(self._uploads)}  # noqa: PTH208 - held open
            # What somebody else has put there is not ours to remove.
            return sum(self._swept(name, before_unix_ms) for name in sorted(found) if is_upload(name))

    def _swept(self, name: str, before_unix_ms: int) -> bool:
        if not self._older(name, before_unix_ms):
            return False
        with Claim.locked(self._uploads, name) as found:
            assert found is not None  # noqa: S101 - it is made
            claim, _ = found
            try:
                # Somebody may have come back to it while the lock was waited for.
                if gone := self._older(name, before_unix_ms):
                    claim.discard()
            finally:
                claim.close()
            return gone

    def _older(self, name: str, before_unix_ms: int) -> bool:
        for file in (part(name), name):
            with suppress(FileNotFoundError):
                found = os.stat(file, dir_fd=self._uploads, follow_symlinks=False)
                return stat.S_ISREG(found.st_mode) and found.st_mtime * 1000 < before_unix_ms
        return False

    # -- contents -------------------------------------------------------------------------------------

    def size_of(self, digest: str) -> int | None:
        digits = hexadecimal(digest)
        if digits is None:
            return None
        with told(f"cannot look for {digest}"):
            try:
                with self._leaf(digits) as leaf:
                    found = os.stat(digits, dir_fd=leaf, follow_symlinks=False)
            except FileNotFoundError:
                return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def read(self, digest: str, *, begin: int = 0) -> Iterator[bytes]:
        if self.size_of(digest) is None:
            raise KeyError(digest)
        return self._pieces(digest, _digits(digest), begin)

    def _pieces(self, digest: str, digits: str, begin: int) -> Iterator[bytes]:
        with told(f"cannot read {digest}"):
            try:
                with self._leaf(digits) as leaf:
                    file = os.open(digits, os.O_RDONLY | FILE, dir_fd=leaf)
            except FileNotFoundError:
                raise KeyError(digest) from None
        try:
            while True:
                with told(f"cannot read {digest}"):
                    piece = os.pread(file, CHUNK, begin)
                if not piece:
                    return
                begin += len(piece)
                yield piece
        finally:
            os.close(file)

    def remove(self, digest: str) -> bool:
        digits = hexadecimal(digest)
        if digits is None:
            return False
        with told(f"cannot remove {digest}"):
            try:
                with self._leaf(digits) as leaf:
                    os.unlink(digits, dir_fd=leaf)
                    os.fsync(leaf)
            except FileNotFoundError:
                return False
        return True

    # -- folders --------------------------------------------------------------------------------------

    @contextmanager
    def _leaf(self, digits: str, *, make: bool = False) -> Iterator[int]:
        """The folder of a content, held open; each step of the way is looked up in the one before."""
        with ExitStack() as opened:
            at, way = self._objects, ""
            for name in (digits[:2], digits[2:4]):
                way += name
                if make and way not in self._lasting:
                    make_folder(name, within=at)
                    self._lasting.add(way)
                at = opened.enter_context(folder(name, within=at))
            yield at

    def _measure(self) -> int:
        """Bytes that are here, sealed or not."""
        return _measure(self._objects, "") + self.upload_bytes()

    def upload_bytes(self) -> int:
        with told("cannot measure uploads"):
            return _measure(self._uploads, ".part")


def _measure(top: int, ending: str) -> int:
    """Bytes of all files below the folder *top* whose name ends so."""
    size = 0
    for _, _, files, at in os.fwalk(".", dir_fd=top):
        for name in files:
            if name.endswith(ending):
                with suppress(FileNotFoundError):
                    size += os.stat(name, dir_fd=at, follow_symlinks=False).st_size
    return size


def _digits(digest: str) -> str:
    digits = hexadecimal(digest)
    assert digits is not None  # noqa: S101 - made by a hash, or looked at before
    return digits
