"""Bucket: the S3 operations that the content store uses, with the client's errors translated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, ConnectionLostError, require_extra

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
        with self._translate_errors("look into"):
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
                    f"there is no bucket {self._name!r}; make it, or look at the name, the endpoint and the region"
                ) from error
            raise ConnectionLostError(f"cannot {action} the bucket {self._name!r}: {_get_first_line(error)}") from error


def _get_first_line(error: BaseException) -> str:
    """Return the first line of an error; the details after it are for the developers of the library."""
    return str(error).split("\n", 1)[0][:300]
