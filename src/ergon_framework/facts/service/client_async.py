"""AsyncBoundaryClient: the async client of a remote boundary, and its uploads and downloads over a channel.

A boundary stores facts and artifacts of zones; a remote one is served by ``facts.service.server``. A call whose
connection was lost has an unknown outcome: the caller repeats it with the same ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import grpc

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.append import to_chunks
from ergon_framework.facts.boundary import (
    AppendResult,
    AsyncBlobSource,
    AsyncBoundary,
    BoundaryCapabilities,
    LogState,
    NewFact,
    PruneResult,
    Unlisten,
)
from ergon_framework.facts.model import Cursor, Envelope, Fact, FactConfirmation, StoredArtifact, StoredFact, ZonePair
from ergon_framework.facts.service import calls, errors
from ergon_framework.facts.service.calls import SERVICE, RpcCall
from ergon_framework.facts.service.channel import AsyncReconnectingChannel, ServiceAddress
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.transfer import RemoteDownload, RemoteUpload, RetryBudget, UploadStream, check_stored
from ergon_framework.facts.service.wakeup import ServiceListener
from ergon_framework.facts.service.wire import encode


async def upload(
    artifact: RemoteUpload,
    channel: AsyncReconnectingChannel,
    *,
    uploaded_bytes: Callable[[str, str, StoredArtifact], Awaitable[int]],
) -> StoredArtifact:
    """Store an artifact; a repeatable upload resumes after a break, from the bytes that the service has received."""
    budget, begin = RetryBudget(), artifact.begin
    while True:
        try:
            return await _send_upload(artifact, channel, begin)
        except ConnectionLostError:
            if not artifact.is_resumable or artifact.expected is None:
                raise
            delay = budget.next_delay(begin)
            if delay is None:
                raise
            await asyncio.sleep(delay)
            try:
                begin = max(artifact.begin, await uploaded_bytes(artifact.bucket, artifact.key, artifact.expected))
            except ConnectionLostError:
                continue


async def _send_upload(artifact: RemoteUpload, channel: AsyncReconnectingChannel, begin: int) -> StoredArtifact:
    async with channel.open() as lease:
        call: Any = lease.get_stub("stream_stream", SERVICE + "PutObject")()
        writer = asyncio.ensure_future(_write_upload(call, artifact, channel, begin))
        answer = asyncio.ensure_future(_read_answer(call))
        try:
            # A rejection arrives while the client is still sending.
            await asyncio.wait((writer, answer), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                # Raises the error of a failed write, or of the blob.
                await writer
            async with asyncio.timeout(channel.address.commit_timeout):
                return check_stored(await answer)
        except TimeoutError:
            raise errors.unavailable_error("PutObject timed out: its outcome is unknown, retry it") from None
        finally:
            call.cancel()
            for task in (writer, answer):
                task.cancel()
            await asyncio.gather(writer, answer, return_exceptions=True)


async def _write_upload(call: Any, artifact: RemoteUpload, channel: AsyncReconnectingChannel, begin: int) -> None:
    await _write(call, artifact.to_header(begin), channel)
    stream = UploadStream(begin - artifact.begin)
    async for piece in _iterate_chunks(artifact):
        for message in stream.to_messages(piece):
            await _write(call, message, channel)
    await _write(call, stream.to_end_message(), channel)


async def _write(call: Any, message: bytes, channel: AsyncReconnectingChannel) -> None:
    try:
        async with asyncio.timeout(channel.address.deadline):
            await call.write(message)
    except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError) as error:
        raise _broken_off_error() from error


async def _read_answer(call: Any) -> bytes | None:
    try:
        data: bytes | None = await call.read()
    except grpc.RpcError as error:
        rpc_error: Any = error
        if rpc_error.code() is grpc.StatusCode.INTERNAL and not errors.error_from_status(rpc_error):
            # After a failed write gRPC reports this code for every status; errors of the service itself are attached.
            raise _broken_off_error() from error
        raise errors.to_client_error(rpc_error, "PutObject") from error
    return None if data is grpc.aio.EOF else data


def _broken_off_error() -> ConnectionLostError:
    return errors.unavailable_error("PutObject broke off: its outcome is unknown, retry it")


async def _iterate_chunks(artifact: RemoteUpload) -> AsyncIterator[bytes]:
    if isinstance(artifact.blob, AsyncIterable):
        async for piece in artifact.blob:
            yield piece
    else:
        for piece in artifact.blob:
            yield piece


async def download(artifact: RemoteDownload, channel: AsyncReconnectingChannel) -> AsyncIterator[bytes]:
    """Yield the artifact; the download resumes after a break, and the content is verified at its end."""
    budget = RetryBudget()
    while True:
        try:
            async for piece in _receive_chunks(artifact, channel):
                yield piece
            artifact.verify()
        except ConnectionLostError:
            delay = budget.next_delay(artifact.position) if artifact.is_resumable else None
            if delay is None:
                raise
            await asyncio.sleep(delay)
        else:
            return


async def _receive_chunks(artifact: RemoteDownload, channel: AsyncReconnectingChannel) -> AsyncIterator[bytes]:
    async with channel.open() as lease:
        call: Any = lease.get_stub("unary_stream", SERVICE + "GetObject")(artifact.to_request())
        try:
            while True:
                async with asyncio.timeout(channel.address.deadline):
                    data = await call.read()
                if data is grpc.aio.EOF:
                    return
                piece = artifact.parse_chunk(data)
                if piece:
                    yield piece
        except TimeoutError:
            raise errors.unavailable_error("GetObject made no progress; retry it") from None
        except grpc.RpcError as error:
            rpc_error: Any = error
            raise errors.to_client_error(rpc_error, "GetObject") from error
        finally:
            call.cancel()


T = TypeVar("T")


class AsyncBoundaryClient(AsyncBoundary):
    """A store behind a service. A lost connection raises ConnectionLostError: the outcome is then unknown.

    ``epoch`` and ``capabilities`` are queried once, which blocks the event loop unless ``describe`` was awaited
    before; ``describe`` queries them again.
    """

    def __init__(self, address: ServiceAddress) -> None:
        self._channel = AsyncReconnectingChannel(address)
        self._deadline = address.deadline
        self._listener = ServiceListener(address)
        self._description: tuple[str, BoundaryCapabilities] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the client; running calls are cancelled."""
        self._listener.close()
        await self._channel.close()

    async def describe(self) -> tuple[str, BoundaryCapabilities]:
        """Query the current epoch and capabilities of the store."""
        self._description = await self._call(calls.describe())
        return self._description

    @property
    def epoch(self) -> str:
        return self._require_description()[0]

    @property
    def capabilities(self) -> BoundaryCapabilities:
        return self._require_description()[1]

    def _require_description(self) -> tuple[str, BoundaryCapabilities]:
        if self._description is None:
            # A property cannot await, so the sync client makes the call.
            with BoundaryClient(self._channel.address) as client:
                self._description = client.describe()
        return self._description

    def listen(self, wake: Callable[[], None]) -> Unlisten:
        return self._listener.listen(wake)

    # -- facts ----------------------------------------------------------------------------------------

    async def append_fact_async(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        return await self._call(calls.append_fact(envelope, fact))

    async def append_facts_async(self, facts: Sequence[NewFact]) -> Sequence[AppendResult]:
        return [result for rpc_call in calls.append_facts(facts) for result in await self._call(rpc_call)]

    async def forward_facts_async(self, facts: Sequence[StoredFact]) -> Sequence[AppendResult]:  # noqa: ARG002 - unused
        raise calls.not_supported_error("forwarding facts")

    async def get_fact_async(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return await self._call(calls.get_fact(from_zone, message_id))

    # -- reading --------------------------------------------------------------------------------------

    async def fetch_facts_async(
        self, reader: str, pair: ZonePair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        if max_readers is not None:
            raise calls.not_supported_error("a limit of readers")
        return await self._call(calls.fetch_facts(reader, pair, limit, after))

    async def confirm_receipt_async(self, reader: str, pair: ZonePair, cursor: Cursor) -> None:
        await self._call(calls.confirm_receipt(reader, pair, cursor))

    async def get_cursor_async(self, reader: str, pair: ZonePair) -> Cursor | None:
        return await self._call(calls.get_cursor(reader, pair))

    async def last_offset_async(self, pair: ZonePair) -> Cursor | None:
        return await self._call(calls.last_offset(pair))

    async def cursor_at_time_async(self, pair: ZonePair, unix_ms: int) -> Cursor | None:
        return await self._call(calls.cursor_at_time(pair, unix_ms))

    async def retire_reader_async(self, reader: str, pair: ZonePair, *, by: str = "") -> bool:
        return await self._call(calls.retire_reader(reader, pair, by))

    async def list_logs_async(self) -> Sequence[LogState]:
        return await self._call(calls.list_logs())

    # -- artifacts ------------------------------------------------------------------------------------

    async def put_object_async(
        self,
        bucket: str,
        key: str,
        blob: AsyncBlobSource,
        *,
        expected: StoredArtifact | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> StoredArtifact:
        pieces = blob if isinstance(blob, AsyncIterable) else to_chunks(blob)
        artifact = RemoteUpload(bucket, key, pieces, expected, begin, zone)
        return await upload(artifact, self._channel, uploaded_bytes=partial(self.uploaded_bytes_async, zone=zone))

    async def uploaded_bytes_async(self, bucket: str, key: str, expected: StoredArtifact, *, zone: str = "") -> int:
        return await self._call(calls.uploaded_bytes(bucket, key, expected, zone))

    def get_object_async(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> AsyncIterator[bytes]:
        return download(RemoteDownload(bucket, key, begin, zone), self._channel)

    # -- retention ------------------------------------------------------------------------------------

    async def prune_async(self, before_unix_ms: int) -> PruneResult:  # noqa: ARG002 - unused
        raise calls.not_supported_error("retention")

    async def _call(self, rpc_call: RpcCall[T]) -> T:
        async with self._channel.open() as lease:
            call: Any = lease.get_stub("unary_unary", SERVICE + rpc_call.method)
            try:
                data = await call(encode(rpc_call.request), timeout=self._deadline)
            except grpc.RpcError as error:
                rpc_error: Any = error
                raise errors.to_client_error(rpc_error, rpc_call.method) from error
            except grpc.aio.UsageError as error:
                raise ConnectionLostError(
                    f"{rpc_call.method} was not sent: the client is closed; create a new one"
                ) from error
        return rpc_call.to_result(data)
