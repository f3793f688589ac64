"""Blob: the bytes of an artifact, which can be read once more when storing them has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Self

from ergon_framework.facts.boundary import CHUNK, BlobSource


def to_pieces(source: BlobSource) -> Iterable[bytes]:
    """Return *source* as an iterable of pieces; bytes are cut into pieces."""
    return Blob.of(bytes(source)) if isinstance(source, bytes | bytearray | memoryview) else source


class Blob:
    """Bytes that are read in pieces, from the beginning each time: what is tried again must be the same.

    Reading a file blocks for one piece at a time, also on an event loop.
    """

    __slots__ = ("_open",)

    def __init__(self, open: Callable[[], Iterable[bytes]]) -> None:  # noqa: A002 - what it does
        self._open = open

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Bytes that are in memory already."""
        return cls(lambda: (data[start : start + CHUNK] for start in range(0, len(data), CHUNK)))

    @classmethod
    def file(cls, path: str | Path) -> Self:
        """A file, which is opened when it is read."""

        def pieces() -> Iterator[bytes]:
            with Path(path).open("rb") as file:
                while piece := file.read(CHUNK):
                    yield piece

        return cls(pieces)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._open())
