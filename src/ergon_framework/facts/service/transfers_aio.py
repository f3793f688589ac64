"""Upload and download over a channel, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.model import StoredArtifact
from ergon_framework.facts.service import faults
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.line import AsyncReconnectingChannel
from ergon_framework.facts.service.transfer import RemoteDownload, RemoteUpload, RetryBudget, UploadStream, check_stored


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
                await writer
            async with asyncio.timeout(channel.address.commit_timeout):
                return check_stored(await answer)
        except TimeoutError:
            raise faults.unavailable_error(
                "PutObject has no answer; nobody knows whether it was done, ask again"
            ) from None
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
        if rpc_error.code() is grpc.StatusCode.INTERNAL and not faults.error_from_status(rpc_error):
            # After a failed write gRPC reports this code for every status; the service's own errors carry a fault.
            raise _broken_off_error() from error
        raise faults.to_client_error(rpc_error, "PutObject") from error
    return None if data is grpc.aio.EOF else data


def _broken_off_error() -> ConnectionLostError:
    return faults.unavailable_error("PutObject broke off; nobody knows whether it was done, ask again")


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
            raise faults.unavailable_error("GetObject stands still; ask again") from None
        except grpc.RpcError as error:
            rpc_error: Any = error
            raise faults.to_client_error(rpc_error, "GetObject") from error
        finally:
            call.cancel()
