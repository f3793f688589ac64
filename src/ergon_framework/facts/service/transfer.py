"""Transfers: what is known of an upload or a download under way, and whether it goes on after a break."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from ergon_framework.facts.errors import ArtifactMismatch, InvalidFactError, ServiceFailed
from ergon_framework.facts.model import Stored
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service import faults, messages
from ergon_framework.facts.service.messages import written

#: The largest piece in one message.
PIECE: Final = 1024 * 1024
#: Seconds before it goes on after a break; when they are used up without a byte more, it is given up. Together they are
#: longer than a service needs to start again, also on a machine that has much to do.
WAITS: Final = (0.1, 0.4, 1.6, 3.2, 6.4)


class Breaks:
    """How often a transfer has broken off without having come further."""

    def __init__(self) -> None:
        self._at = -1
        self._count = 0

    def wait(self, at: int) -> float | None:
        """Seconds to wait before it goes on from byte *at*; None if it does not."""
        self._count = 0 if at > self._at else self._count + 1
        self._at = max(self._at, at)
        return WAITS[self._count] if self._count < len(WAITS) else None


@dataclass(slots=True)
class Upload:
    """An artifact on its way out; *blob* yields it from *begin* on."""

    bucket: str
    key: str
    blob: Iterable[bytes] | AsyncIterable[bytes]
    expected: Stored | None
    begin: int
    zone: str = ""

    @property
    def repeatable(self) -> bool:
        """Whether it can go on after a break: it is known what it will be, and it can be read again."""
        return (
            self.expected is not None and not isinstance(self.blob, AsyncIterable) and iter(self.blob) is not self.blob
        )

    def header(self, begin: int) -> bytes:
        expected = None if self.expected is None else messages.write_stored(self.expected)
        header = wire.PutObjectHeader(bucket=self.bucket, key=self.key, expected=expected, begin=begin, zone=self.zone)
        return written(wire.PutObjectRequest(header=header))


class Sending:
    """The pieces of one stream, as messages."""

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip
        self._size = 0

    def pieces(self, piece: Any) -> Iterator[bytes]:
        """*piece*, without what need not be sent again, in messages that are not too large."""
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise InvalidFactError(f"a blob yields bytes, not {type(piece).__name__}")
        data = bytes(piece)
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        for start in range(skipped, len(data), PIECE):
            part = data[start : start + PIECE]
            self._size += len(part)
            yield written(wire.PutObjectRequest(piece=part))

    def end(self) -> bytes:
        return written(wire.PutObjectRequest(end=wire.PutObjectEnd(size=self._size)))


def stored(data: bytes | None) -> Stored:
    """What was confirmed; None is an answer that did not come."""
    try:
        answer = wire.PutObjectAnswer.FromString(data or b"")
        kind = answer.WhichOneof("result")
        if kind == "stored":
            return messages.read_stored(answer.stored)
    except (DecodeError, InvalidFactError) as error:
        raise ServiceFailed(f"the answer to PutObject cannot be read: {error}") from error
    if kind == "fault":
        raise faults.read(answer.fault)
    raise ServiceFailed("PutObject has ended without an answer; nobody knows whether it was done, ask again")


class Download:
    """An artifact on its way in, from *begin* on."""

    def __init__(self, bucket: str, key: str, begin: int, zone: str = "") -> None:
        self._bucket = bucket
        self._key = key
        self._zone = zone
        self._begin = begin
        self._got = 0
        self._hash = hashlib.sha256()
        self._stored: Stored | None = None

    @property
    def at(self) -> int:
        """The next byte."""
        return self._begin + self._got

    @property
    def repeatable(self) -> bool:
        """Whether it can go on after a break: it is known what the whole must be."""
        return self._stored is not None

    def request(self) -> bytes:
        return written(wire.GetObjectRequest(bucket=self._bucket, key=self._key, begin=self.at, zone=self._zone))

    def take(self, data: bytes) -> bytes | None:
        """The bytes of one message; None for the header."""
        try:
            answer = wire.GetObjectAnswer.FromString(data)
            if answer.WhichOneof("part") == "header":
                self._recognise(
                    messages.read_stored(answer.header.stored) if answer.header.HasField("stored") else None
                )
                return None
        except (DecodeError, InvalidFactError) as error:
            raise ServiceFailed(f"the answer to GetObject cannot be read: {error}") from error
        self._got += len(answer.piece)
        self._hash.update(answer.piece)
        piece: bytes = answer.piece
        return piece

    def _recognise(self, told: Stored | None) -> None:
        if self._stored is not None and told != self._stored:
            raise self._other(f"{told}")
        self._stored = told

    def end(self) -> None:
        """All has come, and is what it has to be; of what begins later than its first byte only the size is known."""
        if self._stored is None:
            return
        found = f"sha256:{self._hash.hexdigest()}" if self._begin == 0 else self._stored.digest
        if (found, self.at) != self._stored and self._begin <= self._stored.size:
            raise self._other(f"{found} with {self.at} bytes")

    def _other(self, found: str) -> ArtifactMismatch:
        return ArtifactMismatch(
            f"{self._bucket}/{self._key} is {self._stored} in the store, and {found} has come; read it again"
        )
