"""State of uploads and downloads, and whether they can be resumed after a break."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError

from ergon_framework.facts.errors import ArtifactMismatch, InvalidFactError, ServiceError
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.facts.service import boundary_pb2 as wire
from ergon_framework.facts.service import faults, messages
from ergon_framework.facts.service.messages import encode

#: Maximum bytes of content in one message.
MAX_CHUNK_BYTES: Final = 1024 * 1024
#: Seconds to wait before each resumption; a transfer fails when all are used without progress. Their sum is longer than
#: a service needs to restart, also on a busy machine.
RESUME_DELAYS_SECONDS: Final = (0.1, 0.4, 1.6, 3.2, 6.4)


class RetryBudget:
    """Counts the breaks of a transfer without progress."""

    def __init__(self) -> None:
        self._position = -1
        self._failures = 0

    def next_delay(self, position: int) -> float | None:
        """Return the seconds to wait before resuming from byte *position*; None if the budget is exhausted."""
        self._failures = 0 if position > self._position else self._failures + 1
        self._position = max(self._position, position)
        return RESUME_DELAYS_SECONDS[self._failures] if self._failures < len(RESUME_DELAYS_SECONDS) else None


@dataclass(slots=True)
class RemoteUpload:
    """An artifact to upload; *blob* yields it from *begin* on."""

    bucket: str
    key: str
    blob: Iterable[bytes] | AsyncIterable[bytes]
    expected: StoredArtifact | None
    begin: int
    zone: str = ""

    @property
    def is_resumable(self) -> bool:
        """Whether the upload can be resumed: its digest is known, and the blob can be read again."""
        return (
            self.expected is not None and not isinstance(self.blob, AsyncIterable) and iter(self.blob) is not self.blob
        )

    def to_header(self, begin: int) -> bytes:
        expected = None if self.expected is None else messages.write_artifact(self.expected)
        header = wire.PutObjectHeader(bucket=self.bucket, key=self.key, expected=expected, begin=begin, zone=self.zone)
        return encode(wire.PutObjectRequest(header=header))


class UploadStream:
    """Converts the content of one upload stream to messages."""

    def __init__(self, skip: int = 0) -> None:
        self._skip = skip
        self._size = 0

    def to_messages(self, piece: Any) -> Iterator[bytes]:
        """Yield *piece*, without the bytes to skip, in messages of limited size."""
        if not isinstance(piece, bytes | bytearray | memoryview):
            raise InvalidFactError(f"a blob yields bytes, not {type(piece).__name__}")
        data = bytes(piece)
        skipped = min(self._skip, len(data))
        self._skip -= skipped
        for start in range(skipped, len(data), MAX_CHUNK_BYTES):
            part = data[start : start + MAX_CHUNK_BYTES]
            self._size += len(part)
            yield encode(wire.PutObjectRequest(piece=part))

    def to_end_message(self) -> bytes:
        return encode(wire.PutObjectRequest(end=wire.PutObjectEnd(size=self._size)))


def check_stored(data: bytes | None) -> StoredArtifact:
    """Return the confirmed artifact; raise the error of the service. None as *data* is a missing answer."""
    try:
        answer = wire.PutObjectAnswer.FromString(data or b"")
        kind = answer.WhichOneof("result")
        if kind == "stored":
            return messages.read_artifact(answer.stored)
    except (DecodeError, InvalidFactError) as error:
        raise ServiceError(f"the answer to PutObject cannot be read: {error}") from error
    if kind == "fault":
        raise faults.from_wire(answer.fault)
    raise ServiceError("PutObject has ended without an answer; nobody knows whether it was done, ask again")


class RemoteDownload:
    """An artifact being downloaded, from *begin* on."""

    def __init__(self, bucket: str, key: str, begin: int, zone: str = "") -> None:
        self._bucket = bucket
        self._key = key
        self._zone = zone
        self._begin = begin
        self._received = 0
        self._hash = hashlib.sha256()
        self._stored: StoredArtifact | None = None

    @property
    def position(self) -> int:
        """The position of the next byte."""
        return self._begin + self._received

    @property
    def is_resumable(self) -> bool:
        """Whether the download can be resumed: the digest of the whole artifact is known."""
        return self._stored is not None

    def to_request(self) -> bytes:
        return encode(wire.GetObjectRequest(bucket=self._bucket, key=self._key, begin=self.position, zone=self._zone))

    def parse_chunk(self, data: bytes) -> bytes | None:
        """Return the content of one message; None for the header."""
        try:
            answer = wire.GetObjectAnswer.FromString(data)
            if answer.WhichOneof("part") == "header":
                self._check_header(
                    messages.read_artifact(answer.header.stored) if answer.header.HasField("stored") else None
                )
                return None
        except (DecodeError, InvalidFactError) as error:
            raise ServiceError(f"the answer to GetObject cannot be read: {error}") from error
        self._received += len(answer.piece)
        self._hash.update(answer.piece)
        piece: bytes = answer.piece
        return piece

    def _check_header(self, artifact: StoredArtifact | None) -> None:
        if self._stored is not None and artifact != self._stored:
            raise self._mismatch_error(f"{artifact}")
        self._stored = artifact

    def verify(self) -> None:
        """Verify the complete download; without the first byte only its size can be checked."""
        if self._stored is None:
            return
        digest = f"sha256:{self._hash.hexdigest()}" if self._begin == 0 else self._stored.digest
        if (digest, self.position) != self._stored and self._begin <= self._stored.size:
            raise self._mismatch_error(f"{digest} with {self.position} bytes")

    def _mismatch_error(self, actual: str) -> ArtifactMismatch:
        return ArtifactMismatch(
            f"{self._bucket}/{self._key} is {self._stored} in the store, and {actual} has come; read it again"
        )
