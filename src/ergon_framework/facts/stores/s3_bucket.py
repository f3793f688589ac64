"""Bucket: the few things that are asked of S3, with its errors as ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from ergon_framework.errors import ConfigurationError, ConnectionLost, extra

#: Bytes that are asked for at a time.
READ: Final = 4 * 1024 * 1024
#: S3 takes so many parts of one object, and we stay below.
_PARTS: Final = 9_000
#: How often a request is tried again, by the client itself.
_RETRIES: Final = 3


class Bucket:
    """A bucket, or all of it below a prefix."""

    def __init__(self, name: str, *, endpoint: str | None, region: str, prefix: str, timeout: float) -> None:
        self._obstore: Any = extra("s3", "obstore")
        errors: Any = extra("s3", "obstore.exceptions")
        self._exists: Any = errors.AlreadyExistsError
        self._refusals: Any = (errors.PermissionDeniedError, errors.UnauthenticatedError)
        self._failures: Any = errors.BaseError
        self._name = name
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout), "connect_timeout": timedelta(seconds=10)}
        if endpoint is not None and endpoint.startswith("http://"):
            options["allow_http"] = True
        with self._told("open"):
            self._store: Any = extra("s3", "obstore.store").S3Store(
                name,
                region=region,
                prefix=prefix or None,
                client_options=options,
                retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=timeout)},
                **({} if endpoint is None else {"endpoint": endpoint}),
            )

    def create(self, path: str, content: bytes) -> bool:
        """Write an object, unless there is one; whether it was written."""
        with self._told("write to"):
            try:
                self._store.put(path, content, mode="create")
            except self._exists:
                return False
        return True

    def write(self, path: str, pieces: Iterable[bytes], *, size: int, part_bytes: int) -> None:
        """Write an object, or take the place of one, in parts; it is there when all of it is, or not at all."""
        part = max(part_bytes, -(-size // _PARTS))
        with self._told("write to"):
            # Two at a time: one is sent while the next is filled, and memory holds no more.
            writer = self._obstore.open_writer(self._store, path, buffer_size=part, max_concurrency=2)
            for piece in pieces:
                writer.write(piece)
            # Only this makes an object of it. After an error it is not closed: its parts are never seen, and what
            # the bucket does with parts that belong to nothing is a rule of the bucket.
            writer.close()

    def replace(self, path: str, content: bytes) -> None:
        """Write a small object, or take the place of one."""
        with self._told("write to"):
            self._store.put(path, content, use_multipart=False)

    def size_of(self, path: str) -> int | None:
        """How large an object is; None if there is none."""
        with self._told("look into"):
            try:
                return int(self._store.head(path)["size"])
            except FileNotFoundError:  # also if there is no bucket: the answer to such a request says no more
                return None

    def read(self, path: str, begin: int, length: int) -> bytes | None:
        """Some bytes of an object; None if there is none."""
        with self._told("read from"):
            try:
                return bytes(self._store.get_range(path, start=begin, length=length))
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def list(self, prefix: str) -> Iterator[Mapping[str, Any]]:
        """All objects whose path begins with a folder, with path, size and last_modified."""
        with self._told("list"):
            for page in self._store.list(prefix):
                yield from page

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects; those that are not there are no error."""
        with self._told("delete from"):
            for path in paths:
                self._store.delete(path)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._refusals as error:
            raise ConfigurationError(
                f"cannot {what} the bucket {self._name!r}: {_first(error)}; give this process credentials in its "
                "environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) that may read, write, list and delete there"
            ) from error
        except (self._failures, OSError) as error:
            if "NoSuchBucket" in str(error):
                raise ConfigurationError(
                    f"there is no bucket {self._name!r}; make it, or look at the name, the endpoint and the region"
                ) from error
            raise ConnectionLost(f"cannot {what} the bucket {self._name!r}: {_first(error)}") from error


def _first(error: BaseException) -> str:
    """What is said before the details, which are for the developers of the library."""
    return str(error).split("\n", 1)[0][:300]
