"""QueueChannels: the parts of one queue that run on the connection thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ergon_framework.connectors.base import Depth
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.consumer import Consumer
from ergon_framework.connectors.rabbitmq.declaring import TopologyDeclarer
from ergon_framework.connectors.rabbitmq.fields import BodyRule
from ergon_framework.connectors.rabbitmq.line import ConnectionThread
from ergon_framework.connectors.rabbitmq.message import Message, OutgoingMessage
from ergon_framework.connectors.rabbitmq.sending import DurablePublisher
from ergon_framework.connectors.rabbitmq.settling import RabbitMQSettler
from ergon_framework.errors import ErgonError


class QueueChannels:
    """Consumer, publisher and settler of one queue."""

    def __init__(
        self,
        queue: str,
        thread: ConnectionThread,
        *,
        codec: Codec,
        dead_days: float | None,
        body_rule: BodyRule,
        max_bytes: int,
        on_arrival: Callable[[], None],
        on_lost: Callable[[Sequence[Any]], None],
    ) -> None:
        self._queue = queue
        self._connection_thread = thread
        self._declarer = TopologyDeclarer(queue, thread.publish_connection, dead_days=dead_days)
        self._publisher = DurablePublisher(queue, thread.publish_connection, self._declarer)
        self.consumer = Consumer(
            queue,
            thread.consume_connection,
            prepare=self.open,
            body_rule=body_rule,
            max_bytes=max_bytes,
            on_arrival=on_arrival,
            on_lost=on_lost,
            release=self._release,
        )
        self.settler = RabbitMQSettler(queue, self.consumer, self._publisher, codec=codec)

    async def open(self) -> None:
        """Declare the queues, and log once how durable the server's confirmations are."""
        await self._declarer.declare_all()
        self._connection_thread.log_durability(self._connection_thread.publish_connection.server)

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[str]:
        await self._declarer.ensure_queue(topology.dead_letter_queue(self._queue))
        return await self._publisher.send(messages)

    async def bind_durably(self) -> None:
        """Bind the queue itself, so that it accepts messages of other publishers."""
        await self._declarer.bind_durably([self._queue])

    async def depth(self) -> Depth:
        """Return the server's counts plus the messages that were delivered here but not handed out."""
        ready = await self._declarer.count_ready(self._queue)
        delayed = sum([await self._declarer.count_ready(name) for name in self._declarer.delay_queues])
        dead = await self._declarer.count_ready(topology.dead_letter_queue(self._queue))
        waiting = list(self.consumer.waiting)
        ready_since = min(
            (message.ready_since for message in waiting), default=self.consumer.newest_ready_since if ready else None
        )
        return Depth(
            ready=ready + len(waiting),
            delayed=delayed,
            in_flight=self.consumer.in_flight,
            dead=dead,
            oldest_age=None if ready_since is None else max(0.0, time.time() - ready_since),
        )

    async def _release(self, messages: Sequence[Message]) -> None:
        await self.settler.release(messages)

    async def close(self, *, is_last: bool) -> None:
        """Release messages that were never handed out, and close the channels."""
        with suppress(ErgonError):
            await self.consumer.release_waiting()
        await self.consumer.close()
        self._declarer.close()
        self._publisher.close()
        if is_last:
            await self._connection_thread.close()
