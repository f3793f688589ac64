"""Uploads and downloads of artifacts: their state, whether they can resume after a break, and transfer on threads.

An artifact is a file that facts reference. An upload of a name and an expected digest can resume: the store keeps its
bytes.

The state is the same for the transfer on threads and on asyncio.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.errors import ArtifactMismatch, InvalidFactError, ServiceError
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.facts.service import boundary_pb2 as pb
from ergon_framework.facts.service import errors, wire
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.channel import ReconnectingChannel, ServiceAddress
from ergon_framework.facts.service.wire import encode

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
    """An artifact to upload; *blob* yields it from *begin* on.

    *expected* is its digest and size, None if unknown; *zone* owns the artifact, empty for the zones of the store.
    """

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
        expected = None if self.expected is None else wire.write_artifact(self.expected)
        header = pb.PutObjectHeader(bucket=self.bucket, key=self.key, expected=expected, begin=begin, zone=self.zone)
        return encode(pb.PutObjectRequest(header=header))


class UploadStream:
    """Converts the content of one upload stream to messages, without the first *skip* bytes, which the service has."""

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
            yield encode(pb.PutObjectRequest(piece=part))

    def to_end_message(self) -> bytes:
        return encode(pb.PutObjectRequest(end=pb.PutObjectEnd(size=self._size)))


def check_stored(data: bytes | None) -> StoredArtifact:
    """Return the confirmed artifact; raise the error of the service. None as *data* is a missing answer."""
    try:
        answer = pb.PutObjectAnswer.FromString(data or b"")
        kind = answer.WhichOneof("result")
        if kind == "stored":
            return wire.read_artifact(answer.stored)
    except (DecodeError, InvalidFactError) as error:
        raise ServiceError(f"the answer to PutObject cannot be read: {error}") from error
    if kind == "fault":
        raise errors.from_wire(answer.fault)
    raise ServiceError("PutObject ended without an answer: its outcome is unknown, retry it")


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
        return encode(pb.GetObjectRequest(bucket=self._bucket, key=self._key, begin=self.position, zone=self._zone))

    def parse_chunk(self, data: bytes) -> bytes | None:
        """Return the content of one message; None for the header."""
        try:
            answer = pb.GetObjectAnswer.FromString(data)
            if answer.WhichOneof("part") == "header":
                self._check_header(
                    wire.read_artifact(answer.header.stored) if answer.header.HasField("stored") else None
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
        # A download that began behind the end is empty, whatever its position.
        digest = f"sha256:{self._hash.hexdigest()}" if self._begin == 0 else self._stored.digest
        if (digest, self.position) != self._stored and self._begin <= self._stored.size:
            raise self._mismatch_error(f"{digest} with {self.position} bytes")

    def _mismatch_error(self, actual: str) -> ArtifactMismatch:
        return ArtifactMismatch(
            f"{self._bucket}/{self._key} is {self._stored} in the store, and {actual} was received; download it again"
        )


# -- transfer on threads ----------------------------------------------------------------------------


def upload(
    artifact: RemoteUpload, channel: ReconnectingChannel, *, uploaded_bytes: Callable[[str, str, StoredArtifact], int]
) -> StoredArtifact:
    """Store an artifact; a repeatable upload resumes after a break, from the bytes that the service has received."""
    budget, begin = RetryBudget(), artifact.begin
    while True:
        try:
            return _send_upload(artifact, channel, begin)
        except ConnectionLostError:
            if not artifact.is_resumable or artifact.expected is None:
                raise
            delay = budget.next_delay(begin)
            if delay is None:
                raise
            time.sleep(delay)
            try:
                begin = max(artifact.begin, uploaded_bytes(artifact.bucket, artifact.key, artifact.expected))
            except ConnectionLostError:
                continue


def _send_upload(artifact: RemoteUpload, channel: ReconnectingChannel, begin: int) -> StoredArtifact:
    with channel.open() as lease:
        sender = _UploadSender(artifact, begin)
        call: Any = lease.get_stub("stream_stream", SERVICE + "PutObject")(sender.iterate_messages())
        sender.begin(call)
        watchdog = _StallWatchdog(call, channel.address.deadline, lambda: sender.is_stalled(channel.address))
        try:
            return check_stored(next(call, None))
        except grpc.RpcError as error:
            if sender.error is not None:
                raise sender.error from None
            rpc_error: Any = error
            raise errors.to_client_error(rpc_error, "PutObject") from error
        finally:
            watchdog.stop()
            call.cancel()


class _UploadSender:
    """Reads the blob in the thread in which gRPC iterates over the messages, and records errors of the blob."""

    def __init__(self, artifact: RemoteUpload, begin: int) -> None:
        self._artifact = artifact
        self._begin = begin
        self._call: Any = None
        self._started = threading.Event()
        #: Since when it waits for the connection; None while the blob is read, which has no time limit.
        self._waiting_since: float | None = time.monotonic()
        self._is_complete = False
        #: The error of the blob: the uploading caller gets it instead of gRPC's error for the cancelled call.
        self.error: BaseException | None = None

    def begin(self, call: Any) -> None:
        self._call = call
        self._started.set()

    def is_stalled(self, address: ServiceAddress) -> bool:
        """Return whether the upload has made no progress for too long."""
        since = self._waiting_since
        max_seconds = address.commit_timeout if self._is_complete else address.deadline
        return since is not None and time.monotonic() - since > max_seconds

    def iterate_messages(self) -> Iterator[bytes]:
        try:
            yield self._artifact.to_header(self._begin)
            stream = UploadStream(self._begin - self._artifact.begin)
            blob: Any = self._artifact.blob
            self._waiting_since = None
            for piece in blob:
                for message in stream.to_messages(piece):
                    self._waiting_since = time.monotonic()
                    yield message
                self._waiting_since = None
            self._is_complete = True
            self._waiting_since = time.monotonic()
            yield stream.to_end_message()
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - any error of the blob is raised to the uploading caller
            self.error = error
            self._started.wait()
            # Without the end message the service discards the upload, even if the cancellation does not arrive.
            self._call.cancel()


def download(artifact: RemoteDownload, channel: ReconnectingChannel) -> Iterator[bytes]:
    """Yield the artifact; the download resumes after a break, and the content is verified at its end."""
    budget = RetryBudget()
    while True:
        try:
            yield from _receive_chunks(artifact, channel)
            artifact.verify()
        except ConnectionLostError:
            delay = budget.next_delay(artifact.position) if artifact.is_resumable else None
            if delay is None:
                raise
            time.sleep(delay)
        else:
            return


def _receive_chunks(artifact: RemoteDownload, channel: ReconnectingChannel) -> Iterator[bytes]:
    with channel.open() as lease:
        call: Any = lease.get_stub("unary_stream", SERVICE + "GetObject")(artifact.to_request())
        since: float | None = None

        def is_stalled() -> bool:
            return since is not None and time.monotonic() - since > channel.address.deadline

        watchdog = _StallWatchdog(call, channel.address.deadline, is_stalled)
        try:
            while True:
                since = time.monotonic()
                data = next(call, None)
                since = None
                if data is None:
                    return
                piece = artifact.parse_chunk(data)
                if piece:
                    yield piece
        except grpc.RpcError as error:
            rpc_error: Any = error
            raise errors.to_client_error(rpc_error, "GetObject") from error
        finally:
            watchdog.stop()
            call.cancel()


class _StallWatchdog:
    """Cancels a call that makes no progress; nothing else ends a wait for the next message."""

    def __init__(self, call: Any, timeout: float, is_stalled: Callable[[], bool]) -> None:
        self._call = call
        self._timeout = timeout
        self._is_stalled = is_stalled
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="ergon-facts-watch", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._timeout / 4):
            if self._is_stalled():
                self._call.cancel()
                return
