"""Content store in a bucket of S3 or of a compatible server: one object per content, named by its digest.

``objects/ab/cd/HEX`` are the contents, ``uploads/NAME/`` holds uploads that are not committed: parts, each a
separate object, after which any process can resume. The commit reads the parts again, in order, into one object;
the object gets its name only when it is complete and its digest is right.

S3 has no locks. The owner of an upload writes its token into a claim object, and checks it before each part. A part
that is written after another process has taken the upload over has the old token in its name, and the new owner
does not use it. The digest check of the commit ensures that concurrent writers cannot corrupt the content.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError, require_extra
from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.content_store import (
    ContentStore,
    ContentUpload,
    check_chunk,
    check_upload,
    digest_hex,
    digest_mismatch_error,
    offset_error,
    upload_lost_error,
)
from ergon_framework.facts.model import StoredArtifact

#: Bytes that one read requests.
READ_BYTES: Final = 4 * 1024 * 1024
#: Below the maximum of 10,000 parts that S3 accepts for one object.
_MAX_PARTS: Final = 9_000
#: How often the client itself retries a request.
_MAX_RETRIES: Final = 3


class Bucket:
    """A bucket, or everything in it below a prefix."""

    def __init__(self, name: str, *, endpoint: str | None, region: str, prefix: str, timeout: float) -> None:
        self._obstore: Any = require_extra("s3", "obstore")
        errors: Any = require_extra("s3", "obstore.exceptions")
        self._exists_error: Any = errors.AlreadyExistsError
        self._access_errors: Any = (errors.PermissionDeniedError, errors.UnauthenticatedError)
        self._base_error: Any = errors.BaseError
        self._name = name
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout), "connect_timeout": timedelta(seconds=10)}
        if endpoint is not None and endpoint.startswith("http://"):
            options["allow_http"] = True
        with self._translate_errors("open"):
            self._store: Any = require_extra("s3", "obstore.store").S3Store(
                name,
                region=region,
                prefix=prefix or None,
                client_options=options,
                retry_config={"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(seconds=timeout)},
                **({} if endpoint is None else {"endpoint": endpoint}),
            )

    def create(self, path: str, content: bytes) -> bool:
        """Write an object unless it exists; return whether it was written."""
        with self._translate_errors("write to"):
            try:
                self._store.put(path, content, mode="create")
            except self._exists_error:
                return False
        return True

    def write(self, path: str, chunks: Iterable[bytes], *, size: int, part_bytes: int) -> None:
        """Write or replace an object in parts; it becomes visible when it is complete, or not at all."""
        part_size = max(part_bytes, -(-size // _MAX_PARTS))
        with self._translate_errors("write to"):
            # Two parts at a time: one is sent while the next is filled, and memory holds no more.
            writer = self._obstore.open_writer(self._store, path, buffer_size=part_size, max_concurrency=2)
            for chunk in chunks:
                writer.write(chunk)
            # Only close() completes the object. After an error it is not called: the parts stay invisible, and the
            # bucket's own rules decide what happens to incomplete uploads.
            writer.close()

    def replace(self, path: str, content: bytes) -> None:
        """Write or replace a small object."""
        with self._translate_errors("write to"):
            self._store.put(path, content, use_multipart=False)

    def size_of(self, path: str) -> int | None:
        """Return the size of an object, or None if it does not exist."""
        with self._translate_errors("query"):
            try:
                return int(self._store.head(path)["size"])
            except FileNotFoundError:  # a missing bucket gives the same answer to a HEAD request
                return None

    def read(self, path: str, begin: int, length: int) -> bytes | None:
        """Return a range of bytes of an object, or None if it does not exist."""
        with self._translate_errors("read from"):
            try:
                return bytes(self._store.get_range(path, start=begin, length=length))
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def list(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        """Yield all objects whose path begins with *prefix*, with path, size and last_modified."""
        with self._translate_errors("list"):
            for page in self._store.list(prefix):
                yield from page

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; missing objects are not an error."""
        with self._translate_errors("delete from"):
            for path in paths:
                self._store.delete(path)

    @contextmanager
    def _translate_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except self._access_errors as error:
            raise ConfigurationError(
                f"cannot {action} the bucket {self._name!r}: {_get_first_line(error)}; give this process credentials "
                "in its environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) that may "
                "read, write, list and delete there"
            ) from error
        except (self._base_error, OSError) as error:
            if "NoSuchBucket" in str(error):
                raise ConfigurationError(
                    f"there is no bucket {self._name!r}: create it, or check the name, the endpoint and the region"
                ) from error
            raise ConnectionLostError(f"cannot {action} the bucket {self._name!r}: {_get_first_line(error)}") from error


def _get_first_line(error: BaseException) -> str:
    """Return the first line of an error; the details after it are for the developers of the library."""
    return str(error).split("\n", 1)[0][:300]


# -- uploads ----------------------------------------------------------------------------------------


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
    # Two owners may have written parts that begin at the same byte: the largest is used, and the digest is checked.
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


# -- content store ----------------------------------------------------------------------------------

#: Bytes of a part, which one upload holds in memory; S3 accepts smaller parts only at the end of an object.
DEFAULT_PART_BYTES: Final = 8 * 1024 * 1024
MIN_PART_BYTES: Final = 5 * 1024 * 1024


class S3ContentStore(ContentStore):
    """Contents in *bucket*, below *prefix*.

    Credentials come from the environment (``AWS_ACCESS_KEY_ID`` and the others, or the machine's role), never
    from arguments. *endpoint* is for servers other than Amazon's. Such a server does not report whether it syncs
    before it confirms: *durable* is what its operator states, and unknown by default.
    """

    def __init__(
        self,
        bucket: str,
        *,
        endpoint: str | None = None,
        region: str = "us-east-1",
        prefix: str = "",
        durable: bool | None = None,
        part_bytes: int = DEFAULT_PART_BYTES,
        timeout: float = 60.0,
    ) -> None:
        if part_bytes < MIN_PART_BYTES:
            raise ConfigurationError(f"part_bytes {part_bytes:,} is too small: the minimum is {MIN_PART_BYTES:,}")
        require_extra("s3", "obstore")
        self._bucket = Bucket(bucket, endpoint=endpoint, region=region, prefix=prefix, timeout=timeout)
        self._durable = durable
        self._part_bytes = part_bytes

    @property
    def durable(self) -> bool | None:
        return self._durable

    # -- uploads --------------------------------------------------------------------------------------

    @contextmanager
    def begin_upload(self, upload: str | None = None, *, begin: int = 0) -> Iterator[ContentUpload]:
        name = uuid.uuid4().hex if upload is None else check_upload(upload)
        s3_upload = S3Upload(self._bucket, name, resumable=upload is not None, part_bytes=self._part_bytes)
        s3_upload.take_over(begin)
        try:
            yield s3_upload
        finally:
            s3_upload.close()

    def uploaded_bytes(self, upload: str) -> int:
        return sum(size for _, size in contiguous_parts(list_parts(self._bucket, check_upload(upload))))

    def delete_stale_uploads(self, before_unix_ms: int) -> int:
        uploads: dict[str, list[Mapping[str, Any]]] = {}
        for entry in self._bucket.list("uploads/"):
            uploads.setdefault(entry["path"].split("/")[1], []).append(entry)
        old = [
            files
            for files in uploads.values()
            if max(file["last_modified"].timestamp() for file in files) * 1000 < before_unix_ms
        ]
        for files in old:
            self._bucket.delete([file["path"] for file in files])
        return len(old)

    def upload_bytes(self) -> int:
        return sum(entry["size"] for entry in self._bucket.list("uploads/"))

    # -- contents -------------------------------------------------------------------------------------

    def size_of(self, digest: str) -> int | None:
        digits = digest_hex(digest)
        return None if digits is None else self._bucket.size_of(content_path(digits))

    def read(self, digest: str, *, begin: int = 0) -> Iterator[bytes]:
        size = self.size_of(digest)
        if size is None:
            raise KeyError(digest)
        return self._read_chunks(digest, begin, size)

    def _read_chunks(self, digest: str, begin: int, size: int) -> Iterator[bytes]:
        path = content_path(str(digest_hex(digest)))
        # Several reads instead of one long stream: each has its own timeout, however slow the reader is.
        while begin < size:
            block = self._bucket.read(path, begin, min(READ_BYTES, size - begin))
            if block is None:
                raise KeyError(digest)
            for start in range(0, len(block), CHUNK_BYTES):
                yield block[start : start + CHUNK_BYTES]
            begin += len(block)

    def remove(self, digest: str) -> bool:
        if self.size_of(digest) is None:
            return False
        self._bucket.delete([content_path(str(digest_hex(digest)))])
        return True
