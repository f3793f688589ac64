"""S3Contents: contents in a bucket of S3 or of a server that speaks like it, each under its digest.

``objects/ab/cd/HEX`` are the contents, ``uploads/NAME/`` is what has not been sealed: parts, each an object of
its own, which anybody can go on behind. At the seal the parts are read again, in order, into the one object;
it has its name only when all of it is there and its digest is right.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, extra
from ergon_framework.facts.boundary import CHUNK
from ergon_framework.facts.contents import Contents, Receiving, check_upload, hexadecimal
from ergon_framework.facts.stores.s3_bucket import READ, Bucket
from ergon_framework.facts.stores.s3_uploads import S3Upload, chain, listed, place_of

#: Bytes of a part, which one upload holds in memory; S3 takes no smaller ones in the middle of an object.
PART: Final = 8 * 1024 * 1024
SMALLEST: Final = 5 * 1024 * 1024


class S3Contents(Contents):
    """Contents in *bucket*, below *prefix*.

    Credentials come from the environment (``AWS_ACCESS_KEY_ID`` and the others, or the machine's role), never
    from arguments. *endpoint* is for servers other than Amazon's. Whether such a server syncs before it
    confirms cannot be asked: *durable* is what its operator says, and unknown unless he says it.
    """

    def __init__(
        self,
        bucket: str,
        *,
        endpoint: str | None = None,
        region: str = "us-east-1",
        prefix: str = "",
        durable: bool | None = None,
        part_bytes: int = PART,
        timeout: float = 60.0,
    ) -> None:
        if part_bytes < SMALLEST:
            raise ConfigurationError(f"a part has at least {SMALLEST:,} bytes on S3, and part_bytes is {part_bytes:,}")
        extra("s3", "obstore")
        self._bucket = Bucket(bucket, endpoint=endpoint, region=region, prefix=prefix, timeout=timeout)
        self._durable = durable
        self._part = part_bytes

    @property
    def durable(self) -> bool | None:
        return self._durable

    # -- uploads --------------------------------------------------------------------------------------

    @contextmanager
    def receive(self, upload: str | None = None, *, begin: int = 0) -> Iterator[Receiving]:
        name = uuid.uuid4().hex if upload is None else check_upload(upload)
        taken = S3Upload(self._bucket, name, resumable=upload is not None, part_bytes=self._part)
        taken.take(begin)
        try:
            yield taken
        finally:
            taken.close()

    def received(self, upload: str) -> int:
        return sum(size for _, size in chain(listed(self._bucket, check_upload(upload))))

    def sweep(self, before_unix_ms: int) -> int:
        uploads: dict[str, list[Mapping[str, Any]]] = {}
        for found in self._bucket.list("uploads/"):
            uploads.setdefault(found["path"].split("/")[1], []).append(found)
        old = [
            files
            for files in uploads.values()
            if max(file["last_modified"].timestamp() for file in files) * 1000 < before_unix_ms
        ]
        for files in old:
            self._bucket.delete([file["path"] for file in files])
        return len(old)

    def upload_bytes(self) -> int:
        return sum(found["size"] for found in self._bucket.list("uploads/"))

    # -- contents -------------------------------------------------------------------------------------

    def size_of(self, digest: str) -> int | None:
        digits = hexadecimal(digest)
        return None if digits is None else self._bucket.size_of(place_of(digits))

    def read(self, digest: str, *, begin: int = 0) -> Iterator[bytes]:
        size = self.size_of(digest)
        if size is None:
            raise KeyError(digest)
        return self._pieces(digest, begin, size)

    def _pieces(self, digest: str, begin: int, size: int) -> Iterator[bytes]:
        path = place_of(str(hexadecimal(digest)))
        # In stretches, and not as one long stream: each has a timeout of its own, however slow the reader is.
        while begin < size:
            stretch = self._bucket.read(path, begin, min(READ, size - begin))
            if stretch is None:
                raise KeyError(digest)
            for start in range(0, len(stretch), CHUNK):
                yield stretch[start : start + CHUNK]
            begin += len(stretch)

    def remove(self, digest: str) -> bool:
        if self.size_of(digest) is None:
            return False
        self._bucket.delete([place_of(str(hexadecimal(digest)))])
        return True
