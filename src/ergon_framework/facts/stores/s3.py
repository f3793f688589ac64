"""Content store in a bucket of S3 or of a compatible server: one object per content, named by its digest.

``objects/ab/cd/HEX`` are the contents, ``uploads/NAME/`` holds uploads that are not committed: parts, each a
separate object, after which any process can resume. The commit reads the parts again, in order, into one object;
the object gets its name only when it is complete and its digest is right.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, require_extra
from ergon_framework.facts.boundary import CHUNK_BYTES
from ergon_framework.facts.contents import ContentStore, ContentUpload, check_upload, digest_hex
from ergon_framework.facts.stores.s3_bucket import READ_BYTES, Bucket
from ergon_framework.facts.stores.s3_uploads import S3Upload, content_path, contiguous_parts, list_parts

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
            raise ConfigurationError(
                f"a part has at least {MIN_PART_BYTES:,} bytes on S3, and part_bytes is {part_bytes:,}"
            )
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
