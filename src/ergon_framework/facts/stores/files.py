"""Content store in a folder: one file per content (the bytes of an artifact), named by its digest.

``objects/ab/cd/HEX`` are the contents, ``uploads/`` holds uploads that are not committed. A content is written
and synced in ``uploads/``, renamed in one step, and its folder is synced: a file that can be read under a digest
was complete before it had that name, also after a power loss.
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
from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.content_store import (
    ByteBudget,
    ContentStore,
    ContentUpload,
    check_upload,
    digest_hex,
    is_upload,
)
from ergon_framework.facts.errors import BufferFull
from ergon_framework.facts.stores.file_uploads import (
    FILE_FLAGS,
    FileUpload,
    UploadLock,
    durable_bytes,
    folder,
    is_fsync_durable,
    make_folder,
    make_path,
    open_folder,
    translate_os_errors,
    upload_path,
)


class FileContentStore(ContentStore):
    """Contents below *folder*, which processes may share, also those of several zones.

    *max_bytes* bounds the stored bytes: beyond it, an upload raises BufferFull. Processes that share a folder do
    not see each other's running uploads, and may together exceed the bound by those.
    """

    def __init__(self, folder: str | Path, *, max_bytes: int | None = None) -> None:
        self._path = Path(folder)
        try:
            make_path(self._path)
            root_fd = open_folder(str(self._path))
        except OSError as error:
            raise ConfigurationError(f"cannot store artifacts in {folder}: {error.strerror}") from error
        try:
            for name in ("objects", "uploads"):
                make_folder(name, parent_fd=root_fd)
            self._objects_fd = open_folder("objects", parent_fd=root_fd)
            self._finalizers = [weakref.finalize(self, os.close, self._objects_fd)]
            self._uploads_fd = open_folder("uploads", parent_fd=root_fd)
            self._finalizers.append(weakref.finalize(self, os.close, self._uploads_fd))
        except OSError as error:
            raise ConfigurationError(f"cannot store artifacts in {folder}: {error.strerror}") from error
        finally:
            os.close(root_fd)
        self._durable = is_fsync_durable(self._path)
        self._max_bytes = max_bytes
        self._budget = ByteBudget(max_bytes)
        #: Folders whose entries this process has made durable.
        self._durable_folders: set[str] = set()

    @property
    def durable(self) -> bool | None:
        return self._durable

    def close(self) -> None:
        """Close the folder, so that its disk can be unmounted; the store cannot be used afterwards."""
        for finalizer in self._finalizers:
            finalizer()

    # -- uploads --------------------------------------------------------------------------------------

    @contextmanager
    def begin_upload(self, upload: str | None = None, *, begin: int = 0) -> Iterator[ContentUpload]:
        name = uuid.uuid4().hex if upload is None else check_upload(upload)
        file_upload = FileUpload(
            self._uploads_fd,
            name,
            begin=begin,
            resumable=upload is not None,
            reserve=self._reserve,
            store_content=lambda digest: self._store_content(upload_path(name), digest),
        )
        try:
            with translate_os_errors(f"cannot resume the upload {name}"):
                file_upload.resume(begin)
            yield file_upload
        finally:
            file_upload.close()

    def _reserve(self, size: int) -> None:
        used = self._budget.reserve(size, self._measure)
        if used is not None:
            raise BufferFull(f"artifact store is full: {used} of {self._max_bytes} bytes are used; nothing was stored")

    def _store_content(self, name: str, digest: str) -> None:
        digits = _require_digest_hex(digest)
        with self._content_folder(digits, create=True) as folder_fd:
            # A file that exists under that name has the same bytes or is damaged, so that replacing it loses nothing.
            os.rename(name, digits, src_dir_fd=self._uploads_fd, dst_dir_fd=folder_fd)
            os.fsync(folder_fd)

    def uploaded_bytes(self, upload: str) -> int:
        with (
            translate_os_errors(f"cannot read the upload {upload}"),
            UploadLock.acquire(self._uploads_fd, check_upload(upload), create=False) as acquired,
        ):
            if acquired is None:
                return 0
            upload_lock, token = acquired
            try:
                return durable_bytes(self._uploads_fd, upload, token)
            finally:
                upload_lock.close()

    def delete_stale_uploads(self, before_unix_ms: int) -> int:
        with translate_os_errors("cannot delete stale uploads"):
            names = {name.removesuffix(".part") for name in os.listdir(self._uploads_fd)}  # noqa: PTH208 - folder is open
            # Files that are not uploads belong to other programs and are not removed.
            return sum(self._delete_if_stale(name, before_unix_ms) for name in sorted(names) if is_upload(name))

    def _delete_if_stale(self, name: str, before_unix_ms: int) -> bool:
        if not self._is_older(name, before_unix_ms):
            return False
        with UploadLock.acquire(self._uploads_fd, name) as acquired:
            assert acquired is not None  # noqa: S101 - create is true
            upload_lock, _ = acquired
            try:
                # The upload may have been resumed while this call waited for the lock.
                if is_stale := self._is_older(name, before_unix_ms):
                    upload_lock.discard()
            finally:
                upload_lock.close()
            return is_stale

    def _is_older(self, name: str, before_unix_ms: int) -> bool:
        for file_name in (upload_path(name), name):
            with suppress(FileNotFoundError):
                status = os.stat(file_name, dir_fd=self._uploads_fd, follow_symlinks=False)
                return stat.S_ISREG(status.st_mode) and status.st_mtime * 1000 < before_unix_ms
        return False

    # -- contents -------------------------------------------------------------------------------------

    def size_of(self, digest: str) -> int | None:
        digits = digest_hex(digest)
        if digits is None:
            return None
        with translate_os_errors(f"cannot look up {digest}"):
            try:
                with self._content_folder(digits) as folder_fd:
                    status = os.stat(digits, dir_fd=folder_fd, follow_symlinks=False)
            except FileNotFoundError:
                return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, digest: str, *, begin: int = 0) -> Iterator[bytes]:
        if self.size_of(digest) is None:
            raise KeyError(digest)
        return self._read_chunks(digest, _require_digest_hex(digest), begin)

    def _read_chunks(self, digest: str, digits: str, begin: int) -> Iterator[bytes]:
        with translate_os_errors(f"cannot read {digest}"):
            try:
                with self._content_folder(digits) as folder_fd:
                    content_fd = os.open(digits, os.O_RDONLY | FILE_FLAGS, dir_fd=folder_fd)
            except FileNotFoundError:
                raise KeyError(digest) from None
        try:
            while True:
                with translate_os_errors(f"cannot read {digest}"):
                    chunk = os.pread(content_fd, CHUNK_BYTES, begin)
                if not chunk:
                    return
                begin += len(chunk)
                yield chunk
        finally:
            os.close(content_fd)

    def remove(self, digest: str) -> bool:
        digits = digest_hex(digest)
        if digits is None:
            return False
        with translate_os_errors(f"cannot remove {digest}"):
            try:
                with self._content_folder(digits) as folder_fd:
                    os.unlink(digits, dir_fd=folder_fd)
                    os.fsync(folder_fd)
            except FileNotFoundError:
                return False
        return True

    # -- folders --------------------------------------------------------------------------------------

    @contextmanager
    def _content_folder(self, digits: str, *, create: bool = False) -> Iterator[int]:
        """Open the folder of a content; each level is opened relative to the one before."""
        with ExitStack() as stack:
            folder_fd, relative_path = self._objects_fd, ""
            for name in (digits[:2], digits[2:4]):
                relative_path += name
                if create and relative_path not in self._durable_folders:
                    make_folder(name, parent_fd=folder_fd)
                    self._durable_folders.add(relative_path)
                folder_fd = stack.enter_context(folder(name, parent_fd=folder_fd))
            yield folder_fd

    def _measure(self) -> int:
        """Return the number of stored bytes, committed or not."""
        return _measure(self._objects_fd, "") + self.upload_bytes()

    def upload_bytes(self) -> int:
        with translate_os_errors("cannot measure uploads"):
            return _measure(self._uploads_fd, ".part")


def _measure(top: int, suffix: str) -> int:
    """Return the size of all files below the folder *top* whose names end with *suffix*."""
    size = 0
    for _, _, files, folder_fd in os.fwalk(".", dir_fd=top):
        for name in files:
            if name.endswith(suffix):
                with suppress(FileNotFoundError):
                    size += os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_size
    return size


def _require_digest_hex(digest: str) -> str:
    digits = digest_hex(digest)
    assert digits is not None  # noqa: S101 - computed by a hash, or checked before
    return digits
