"""Publisher: what is sent, and what the server says that it has."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final

from pika.exceptions import AMQPError
from pika.spec import Basic

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.rabbitmq.line import Channel, Connection, Refused
from ergon_framework.connectors.rabbitmq.message import Outgoing
from ergon_framework.errors import ConnectionLost

#: How many are written before others get a turn on the line's thread.
_AT_ONCE: Final = 200

UNROUTABLE: Final = "there is no such queue"
REFUSED: Final = "the server refused it; the queue may be full"


class _Batch:
    """What was published together, and what is still to be confirmed of it."""

    __slots__ = ("done", "left", "problems")

    def __init__(self, count: int, done: asyncio.Future[None]) -> None:
        self.left = count
        self.problems = [""] * count
        self.done = done

    def told(self, index: int, problem: str) -> None:
        self.problems[index] = self.problems[index] or problem
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)


class _Stream:
    """One channel, and what is not confirmed yet on it: what an older one says late means nothing here."""

    def __init__(self, channel: Channel, exchange: str) -> None:
        self.channel = channel
        self._exchange = exchange
        self._next = 1
        #: By number, in order.
        self._open: dict[int, tuple[_Batch, int, Outgoing]] = {}
        channel.raw.add_on_return_callback(self._on_return)

    async def confirm(self) -> None:
        await self.channel.ask(lambda told: self.channel.raw.confirm_delivery(self._on_confirm, told))

    def write(self, message: Outgoing, batch: _Batch, index: int) -> None:
        self._open[self._next] = batch, index, message
        self._next += 1
        self.channel.raw.basic_publish(self._exchange, message.queue, message.body, message.properties, mandatory=True)

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        problem = "" if isinstance(method, Basic.Ack) else REFUSED
        if method.multiple:
            for tag in list(takewhile(lambda tag: tag <= method.delivery_tag, self._open)):
                self._told(tag, problem)
        else:
            self._told(method.delivery_tag, problem)

    def _told(self, tag: int, problem: str) -> None:
        found = self._open.pop(tag, None)
        if found is not None:
            batch, index, _ = found
            batch.told(index, problem)

    def _on_return(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        # What comes back does not say which one it was. It comes in order, and before it is confirmed; and of two that
        # look alike it does not matter which is sent again. One that is not meant must not be: the server has it.
        for batch, index, message in self._open.values():
            sent = message.queue, message.body, message.properties.message_id
            if sent == (method.routing_key, body, properties.message_id) and not batch.problems[index]:
                batch.problems[index] = UNROUTABLE
                return


class Publisher:
    """Publishes to queues by name over *exchange*, every message mandatory and confirmed."""

    def __init__(self, connection: Connection, exchange: str) -> None:
        self._connection = connection
        self._exchange = exchange
        self._opening = asyncio.Lock()
        self._stream: _Stream | None = None

    async def publish(self, messages: Sequence[Outgoing]) -> list[str]:
        """One word each: empty when the server has it on disk, otherwise why it has not."""
        stream = await self._opened()
        batch = _Batch(len(messages), stream.channel.future())
        for index, message in enumerate(messages):
            if index and index % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if not stream.channel.is_open:
                break  # the batch has been told why
            try:
                stream.write(message, batch, index)
            except AMQPError as error:
                raise ConnectionLost("the connection to RabbitMQ was lost while publishing") from error
        async with self._connection.answering("confirm what was published"):
            try:
                await batch.done
            except Refused as error:
                raise ConnectorError(f"RabbitMQ refuses what was published: {error}") from error
        return batch.problems

    async def _opened(self) -> _Stream:
        async with self._opening:
            if self._stream is None or not self._stream.channel.is_open:
                stream = _Stream(await self._connection.channel(), self._exchange)
                async with self._connection.answering("confirm what is published"):
                    await stream.confirm()
                self._stream = stream
            return self._stream

    def close(self) -> None:
        if self._stream is not None:
            self._stream.channel.close()
            self._stream = None
