"""Blob: the bytes of an artifact, which can be read again when storing them has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from ergon_framework.facts.boundary import CHUNK_BYTES, BlobSource


def to_chunks(source: BlobSource) -> Iterable[bytes]:
    """Return *source* as an iterable of chunks; bytes are split into chunks."""
    return Blob.from_bytes(bytes(source)) if isinstance(source, bytes | bytearray | memoryview) else source


class Blob:
    """Bytes that are read in chunks, from the beginning each time, so that a retry sends the same bytes.

    Reading a file blocks for one chunk at a time, also on an event loop.
    """

    __slots__ = ("_open",)

    def __init__(self, open: Callable[[], Iterable[bytes]]) -> None:  # noqa: A002 - the name says what it does
        self._open = open

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Create a blob of bytes in memory."""
        return cls(lambda: (data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES)))

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Create a blob of a file, which is opened each time it is read."""

        def read_chunks() -> Iterator[bytes]:
            with Path(path).open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk

        return cls(read_chunks)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._open())
