"""Publishers: published messages, and the server's confirmations of them.

DurablePublisher publishes to queues that survive a crash of the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final

from pika.exceptions import AMQPError
from pika.spec import Basic

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.connection import Channel, ChannelClosedError, Connection
from ergon_framework.connectors.rabbitmq.message import OutgoingMessage
from ergon_framework.connectors.rabbitmq.topology import TopologyDeclarer
from ergon_framework.errors import ConnectionLostError

#: Messages that are written before other tasks on the connection thread get a turn.
_MAX_WRITES_PER_TURN: Final = 200

UNROUTABLE: Final = "there is no such queue"
REJECTED: Final = "the server rejected it; the queue may be full"


class _PublishBatch:
    """Messages that were published together, and the number that is still unconfirmed."""

    __slots__ = ("done", "left", "problems")

    def __init__(self, count: int, done: asyncio.Future[None]) -> None:
        self.left = count
        self.problems = [""] * count
        self.done = done

    def confirm(self, index: int, problem: str) -> None:
        self.problems[index] = self.problems[index] or problem
        self.left -= 1
        if not self.left and not self.done.done():
            self.done.set_result(None)


class _ConfirmChannel:
    """One channel and its unconfirmed messages: late confirmations of an older channel are ignored."""

    def __init__(self, channel: Channel, exchange: str) -> None:
        self.channel = channel
        self._exchange = exchange
        self._next_tag = 1
        #: By delivery tag, in order.
        self._unconfirmed: dict[int, tuple[_PublishBatch, int, OutgoingMessage]] = {}
        channel.raw.add_on_return_callback(self._on_return)

    async def enable_confirms(self) -> None:
        await self.channel.request(lambda callback: self.channel.raw.confirm_delivery(self._on_confirm, callback))

    def write(self, message: OutgoingMessage, batch: _PublishBatch, index: int) -> None:
        self._unconfirmed[self._next_tag] = batch, index, message
        self._next_tag += 1
        self.channel.raw.basic_publish(self._exchange, message.queue, message.body, message.properties, mandatory=True)

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        problem = "" if isinstance(method, Basic.Ack) else REJECTED
        if method.multiple:
            for tag in list(takewhile(lambda tag: tag <= method.delivery_tag, self._unconfirmed)):
                self._confirm_tag(tag, problem)
        else:
            self._confirm_tag(method.delivery_tag, problem)

    def _confirm_tag(self, tag: int, problem: str) -> None:
        entry = self._unconfirmed.pop(tag, None)
        if entry is not None:
            batch, index, _ = entry
            batch.confirm(index, problem)

    def _on_return(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        # A returned message does not carry its tag. Returns come in order and before the confirmation, and between two
        # equal messages it does not matter which is sent again. Others must not be sent again: the server has them.
        for batch, index, message in self._unconfirmed.values():
            identity = message.queue, message.body, message.properties.message_id
            if identity == (method.routing_key, body, properties.message_id) and not batch.problems[index]:
                batch.problems[index] = UNROUTABLE
                return


class Publisher:
    """Publishes to queues by name over *exchange*, every message mandatory and confirmed."""

    def __init__(self, connection: Connection, exchange: str) -> None:
        self._connection = connection
        self._exchange = exchange
        self._open_lock = asyncio.Lock()
        self._confirm_channel: _ConfirmChannel | None = None

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[str]:
        """Return one text each: empty if the server has the message on disk, otherwise the reason."""
        confirm_channel = await self._ensure_channel()
        batch = _PublishBatch(len(messages), confirm_channel.channel.create_future())
        for index, message in enumerate(messages):
            if index and index % _MAX_WRITES_PER_TURN == 0:
                await asyncio.sleep(0)
            if not confirm_channel.channel.is_open:
                break  # the batch has the reason already
            try:
                confirm_channel.write(message, batch, index)
            except AMQPError as error:
                raise ConnectionLostError("connection to RabbitMQ was lost while publishing") from error
        async with self._connection.timeout("confirm the published messages"):
            try:
                await batch.done
            except ChannelClosedError as error:
                raise ConnectorError(f"RabbitMQ rejected the published messages: {error}") from error
        return batch.problems

    async def _ensure_channel(self) -> _ConfirmChannel:
        async with self._open_lock:
            if self._confirm_channel is None or not self._confirm_channel.channel.is_open:
                confirm_channel = _ConfirmChannel(await self._connection.channel(), self._exchange)
                async with self._connection.timeout("enable publisher confirms"):
                    await confirm_channel.enable_confirms()
                self._confirm_channel = confirm_channel
            return self._confirm_channel

    def close(self) -> None:
        if self._confirm_channel is not None:
            self._confirm_channel.channel.close()
            self._confirm_channel = None


# -- durable publisher ------------------------------------------------------------------------------


class DurablePublisher:
    """Publishes for one work queue, and declares missing queues; runs on the connection thread."""

    def __init__(self, queue: str, connection: Connection, declarer: TopologyDeclarer) -> None:
        self._declarer = declarer
        self._publisher = Publisher(connection, topology.publish_exchange(queue))

    async def send(self, messages: Sequence[OutgoingMessage]) -> list[str]:
        """Return one text each: empty if the server has the message on disk, otherwise the reason."""
        queues = {message.queue for message in messages}
        try:
            for queue in queues:
                await self._declarer.ensure_queue(queue)
            problems = await self._publisher.publish(messages)
            returned = [index for index, problem in enumerate(problems) if problem == UNROUTABLE]
            if returned:
                await self._publish_again(messages, problems, returned)
        except ConnectorError:
            self._declarer.invalidate(*queues)
            raise
        return problems

    async def _publish_again(
        self, messages: Sequence[OutgoingMessage], problems: list[str], returned: Sequence[int]
    ) -> None:
        """Bind the queues that rejected messages, and publish the *returned* messages again."""
        queues = {messages[index].queue for index in returned}
        self._declarer.invalidate(*queues)
        await self._declarer.bind_durably(queues)
        outcomes = await self._publisher.publish([messages[index] for index in returned])
        for index, problem in zip(returned, outcomes, strict=True):
            problems[index] = problem

    def close(self) -> None:
        self._publisher.close()
