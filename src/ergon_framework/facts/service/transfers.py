"""Upload and download over a channel, for threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.facts.service import faults
from ergon_framework.facts.service.address import ServiceAddress
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.line import ReconnectingChannel
from ergon_framework.facts.service.transfer import RemoteDownload, RemoteUpload, RetryBudget, UploadStream, check_stored


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
            raise faults.to_client_error(rpc_error, "PutObject") from error
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
            raise faults.to_client_error(rpc_error, "GetObject") from error
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
