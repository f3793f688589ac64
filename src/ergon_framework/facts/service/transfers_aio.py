"""Uploading and downloading over a connection of asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.model import Stored
from ergon_framework.facts.service import faults
from ergon_framework.facts.service.calls import SERVICE
from ergon_framework.facts.service.line import AsyncLine
from ergon_framework.facts.service.transfer import Breaks, Download, Sending, Upload, stored


async def upload(given: Upload, line: AsyncLine, *, received: Callable[[str, str, Stored], Awaitable[int]]) -> Stored:
    """Store an artifact; what can be read again goes on after a break, from what the service has received."""
    breaks, begin = Breaks(), given.begin
    while True:
        try:
            return await _sent(given, line, begin)
        except ConnectionLost:
            if not given.repeatable or given.expected is None:
                raise
            wait = breaks.wait(begin)
            if wait is None:
                raise
            await asyncio.sleep(wait)
            try:
                begin = max(given.begin, await received(given.bucket, given.key, given.expected))
            except ConnectionLost:
                continue


async def _sent(given: Upload, line: AsyncLine, begin: int) -> Stored:
    async with line.open() as held:
        call: Any = held.call("stream_stream", SERVICE + "PutObject")()
        writing = asyncio.ensure_future(_written(call, given, line, begin))
        answer = asyncio.ensure_future(_answer(call))
        try:
            # Whoever is refused is told so while he is still writing.
            await asyncio.wait((writing, answer), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                await writing
            async with asyncio.timeout(line.address.seal):
                return stored(await answer)
        except TimeoutError:
            raise faults.unavailable_error(
                "PutObject has no answer; nobody knows whether it was done, ask again"
            ) from None
        finally:
            call.cancel()
            for task in (writing, answer):
                task.cancel()
            await asyncio.gather(writing, answer, return_exceptions=True)


async def _written(call: Any, given: Upload, line: AsyncLine, begin: int) -> None:
    await _write(call, given.header(begin), line)
    sending = Sending(begin - given.begin)
    async for piece in _pieces(given):
        for message in sending.pieces(piece):
            await _write(call, message, line)
    await _write(call, sending.end(), line)


async def _write(call: Any, message: bytes, line: AsyncLine) -> None:
    try:
        async with asyncio.timeout(line.address.deadline):
            await call.write(message)
    except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError) as error:
        raise _broken() from error


async def _answer(call: Any) -> bytes | None:
    try:
        data: bytes | None = await call.read()
    except grpc.RpcError as error:
        failed: Any = error
        if failed.code() is grpc.StatusCode.INTERNAL and not faults.carried(failed):
            # What is left of every status after a write that failed; the service sends a fault with its own.
            raise _broken() from error
        raise faults.raised(failed, "PutObject") from error
    return None if data is grpc.aio.EOF else data


def _broken() -> ConnectionLost:
    return faults.unavailable_error("PutObject broke off; nobody knows whether it was done, ask again")


async def _pieces(given: Upload) -> AsyncIterator[bytes]:
    if isinstance(given.blob, AsyncIterable):
        async for piece in given.blob:
            yield piece
    else:
        for piece in given.blob:
            yield piece


async def download(given: Download, line: AsyncLine) -> AsyncIterator[bytes]:
    """The artifact; it goes on after a break, and is checked at its end."""
    breaks = Breaks()
    while True:
        try:
            async for piece in _received(given, line):
                yield piece
            given.end()
        except ConnectionLost:
            wait = breaks.wait(given.at) if given.repeatable else None
            if wait is None:
                raise
            await asyncio.sleep(wait)
        else:
            return


async def _received(given: Download, line: AsyncLine) -> AsyncIterator[bytes]:
    async with line.open() as held:
        call: Any = held.call("unary_stream", SERVICE + "GetObject")(given.request())
        try:
            while True:
                async with asyncio.timeout(line.address.deadline):
                    data = await call.read()
                if data is grpc.aio.EOF:
                    return
                piece = given.take(data)
                if piece:
                    yield piece
        except TimeoutError:
            raise faults.unavailable_error("GetObject stands still; ask again") from None
        except grpc.RpcError as error:
            failed: Any = error
            raise faults.raised(failed, "GetObject") from error
        finally:
            call.cancel()
