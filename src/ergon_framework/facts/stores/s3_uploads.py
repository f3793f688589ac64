"""Uploads to S3: parts as separate objects, joined into one object by the commit.

S3 has no locks. The owner of an upload writes its token into a claim object, and checks it before each part. A part
that is written after another process has taken the upload over has the old token in its name, and the new owner
does not use it. A commit reads all parts again and checks the digest, so that concurrent writers cannot corrupt it.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from ergon_framework.errors import ErgonError
from ergon_framework.facts.contents import (
    ContentUpload,
    check_chunk,
    digest_mismatch_error,
    offset_error,
    upload_lost_error,
)
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.facts.stores.s3_bucket import READ_BYTES, Bucket


class UploadPart(NamedTuple):
    """A part of an upload; its path contains the offset of its first byte."""

    begin: int
    size: int
    path: str


def list_parts(bucket: Bucket, upload: str) -> list[UploadPart]:
    """Return all parts of an upload, of all owners."""
    parts = []
    for entry in bucket.list(f"uploads/{upload}/"):
        begin = entry["path"].rpartition("/")[2].partition("-")[0]
        if begin.isdigit():
            parts.append(UploadPart(int(begin), entry["size"], entry["path"]))
    return parts


def contiguous_parts(parts: Iterable[UploadPart]) -> list[tuple[str, int]]:
    """Return path and size of the parts that follow each other without a gap from the first byte."""
    largest: dict[int, UploadPart] = {}
    for each in sorted(parts):
        largest[each.begin] = each
    contiguous, end = [], 0
    while (part := largest.get(end)) is not None and part.size:
        contiguous.append((part.path, part.size))
        end += part.size
    return contiguous


def content_path(digits: str) -> str:
    """Return the path of the content with that digest."""
    return f"objects/{digits[:2]}/{digits[2:4]}/{digits}"


class S3Upload(ContentUpload):
    """An upload as parts; the last part is in memory until it is full."""

    def __init__(self, bucket: Bucket, name: str, *, resumable: bool, part_bytes: int) -> None:
        self._bucket = bucket
        self._name = name
        self._resumable = resumable
        self._part_bytes = part_bytes
        self._token = uuid.uuid4().hex
        self._parts: list[tuple[str, int]] = []
        self._written_bytes = 0
        self._buffer = bytearray()
        self._hash = hashlib.sha256()
        self._is_finished = False

    @property
    def size(self) -> int:
        return self._written_bytes + len(self._buffer)

    # -- begin ----------------------------------------------------------------------------------------

    def take_over(self, begin: int) -> None:
        """Take the upload over and resume it after the first *begin* bytes."""
        old_parts = list_parts(self._bucket, self._name) if self._resumable else []
        stored_bytes = sum(size for _, size in contiguous_parts(old_parts))
        if not 0 <= begin <= stored_bytes:
            raise offset_error(self._name, begin, stored_bytes)
        if self._resumable:
            self._bucket.replace(self._claim_path, self._token.encode())
        for path, size in contiguous_parts(old_parts):
            if self._written_bytes + size > begin:
                self._read_into_buffer(path, begin - self._written_bytes)
                break
            self._parts.append((path, size))
            self._written_bytes += size
        for chunk in self._read_parts():
            self._hash.update(chunk)
        self._hash.update(self._buffer)
        kept_paths = {path for path, _ in self._parts}
        self._bucket.delete([part.path for part in old_parts if part.path not in kept_paths])

    def _read_into_buffer(self, path: str, length: int) -> None:
        if length:
            content = self._bucket.read(path, 0, length)
            if content is None:
                raise upload_lost_error(self._name)
            self._buffer += content

    @property
    def _claim_path(self) -> str:
        return f"uploads/{self._name}/claim"

    # -- add ------------------------------------------------------------------------------------------

    def add(self, piece: bytes) -> None:
        check_chunk(piece)
        remaining = memoryview(piece).cast("B")
        while remaining:
            block = remaining[: self._part_bytes - len(self._buffer)]
            self._buffer += block
            self._hash.update(block)
            remaining = remaining[len(block) :]
            if len(self._buffer) == self._part_bytes:
                self._write_part()

    def _write_part(self) -> None:
        """Write the buffered bytes as a part."""
        self._check_owner()
        path = f"uploads/{self._name}/{self._written_bytes:020d}-{self._token}"
        self._bucket.replace(path, bytes(self._buffer))
        self._parts.append((path, len(self._buffer)))
        self._written_bytes += len(self._buffer)
        self._buffer.clear()

    def _check_owner(self) -> None:
        if self._resumable and self._bucket.read(self._claim_path, 0, len(self._token)) != self._token.encode():
            raise upload_lost_error(self._name)

    # -- commit ---------------------------------------------------------------------------------------

    def commit(self, expected: StoredArtifact | None = None) -> StoredArtifact:
        stored = StoredArtifact(f"sha256:{self._hash.hexdigest()}", self.size)
        self._check_owner()
        if expected is not None and stored != expected:
            self._discard()
            raise digest_mismatch_error(expected, stored)
        self._store(content_path(self._hash.hexdigest()), stored)
        self._discard()
        return stored

    def _store(self, path: str, stored: StoredArtifact) -> None:
        if not self._parts and self._bucket.create(path, bytes(self._buffer)):
            return
        # An existing content was verified by its commit, unless its size differs.
        if self._bucket.size_of(path) == stored.size:
            return
        if self._parts:
            self._bucket.write(path, self._read_verified(stored), size=stored.size, part_bytes=self._part_bytes)
        else:
            self._bucket.replace(path, bytes(self._buffer))

    def _read_verified(self, stored: StoredArtifact) -> Iterator[bytes]:
        """Yield all bytes, read again; raise before the last chunk if they differ from what was hashed on arrival."""
        hasher = hashlib.sha256()
        for chunk in self._read_parts():
            hasher.update(chunk)
            yield chunk
        hasher.update(self._buffer)
        if f"sha256:{hasher.hexdigest()}" != stored.digest:
            raise upload_lost_error(self._name)
        yield bytes(self._buffer)

    def _read_parts(self) -> Iterator[bytes]:
        for path, size in self._parts:
            for begin in range(0, size, READ_BYTES):
                chunk = self._bucket.read(path, begin, min(READ_BYTES, size - begin))
                if chunk is None:
                    raise upload_lost_error(self._name)
                yield chunk

    # -- close ----------------------------------------------------------------------------------------

    def _discard(self) -> None:
        """Delete the upload; what cannot be deleted now is removed by a later cleanup."""
        self._is_finished = True
        with suppress(ErgonError):
            self._check_owner()  # a new owner may have resumed after these parts
            # The claim is deleted last: while it exists, other processes know that there may be parts.
            self._bucket.delete([part.path for part in list_parts(self._bucket, self._name)])
            if self._resumable:
                self._bucket.delete([self._claim_path])

    def close(self) -> None:
        """Close the upload: an unnamed upload is deleted, a named one can be resumed."""
        if self._is_finished:
            return
        if not self._resumable:
            self._discard()
        elif self._buffer:
            # If the connection failed, the last part is not stored and has to be sent again.
            with suppress(ErgonError):
                self._write_part()
