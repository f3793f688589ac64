"""TopologyDeclarer: declares the queues that are needed, once, and explains declaration errors.

A server writes the name of a new quorum queue to its disk up to three seconds after it has confirmed the declaration.
If it is killed before that, it finds a queue without a leader at restart, and messages confirmed there are lost. It
writes all pending names immediately when it looks up an unknown queue, which it does whenever a queue is declared. So
one more queue is declared after the new ones, which are then bound to an exchange. All messages are published to that
exchange, and are returned if their queue is not bound: no message goes to a queue whose name is not persisted,
whichever client declared it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.line import Channel, ChannelClosedError, Connection

#: Sends a request over a channel; its second argument receives the response.
_DeclareRequest: TypeAlias = Callable[[Any, Callable[[Any], None]], object]


class TopologyDeclarer:
    """Declares the queues of one work queue; runs on the connection thread."""

    def __init__(self, queue: str, connection: Connection, *, dead_days: float | None) -> None:
        self._queue = queue
        self._connection = connection
        self._dead_days = dead_days
        self._declared: set[str] = set()
        self._channel: Channel | None = None
        self._request_lock = asyncio.Lock()

    @property
    def delay_queues(self) -> list[str]:
        """The names of the delay queues that this client has used."""
        return sorted(name for name in self._declared if name.startswith(f"{self._queue}.later."))

    async def declare_all(self) -> None:
        """Declare the queue and its dead-letter queue, whatever is cached; delay queues are declared on first use."""
        names = (topology.dead_letter_queue(self._queue), self._queue)
        self.invalidate(*names)
        missing = [name for name in names if not await self._queue_exists(name)]
        for name in names:
            await self.ensure_queue(name)
        if missing:
            await self.bind_durably(missing)

    async def ensure_queue(self, name: str) -> None:
        """Declare the queue called *name*, unless it is cached as declared."""
        exchange = topology.publish_exchange(self._queue)
        if exchange not in self._declared:
            await self._request(
                exchange,
                lambda raw, callback: raw.exchange_declare(exchange, "direct", durable=True, callback=callback),
            )
            self._declared.add(exchange)
        if name not in self._declared:
            await self.count_ready(name)
            self._declared.add(name)

    async def bind_durably(self, names: Collection[str]) -> None:
        """Make the queues called *names* survive a crash of the server, and bind them for publishing."""
        for name in names:
            await self.ensure_queue(name)
        probe = topology.sync_probe_queue(self._queue, os.urandom(6).hex())
        await self._request(
            probe,
            lambda raw, callback: raw.queue_declare(
                probe, durable=True, arguments=topology.sync_probe_arguments(), callback=callback
            ),
        )
        for name in names:
            await self._request(name, self._build_bind(name))
        await self._request(probe, lambda raw, callback: raw.queue_delete(probe, callback=callback))

    def invalidate(self, *names: str) -> None:
        """Remove the queues and the exchange from the cache, because they may have been deleted."""
        self._declared -= {*names, topology.publish_exchange(self._queue)}

    async def count_ready(self, name: str) -> int:
        """Return the number of ready messages in the queue called *name*, declaring it on the way."""
        answer = await self._request(
            name,
            lambda raw, callback: raw.queue_declare(
                name, durable=True, arguments=self._build_arguments(name), callback=callback
            ),
        )
        return int(answer.method.message_count)

    def _build_bind(self, name: str) -> _DeclareRequest:
        return lambda raw, callback: raw.queue_bind(
            name, topology.publish_exchange(self._queue), routing_key=name, callback=callback
        )

    def _build_arguments(self, name: str) -> topology.QueueArguments:
        if name == self._queue:
            return topology.work_queue_arguments(name)
        if name == topology.dead_letter_queue(self._queue):
            return topology.dead_letter_arguments(self._dead_days)
        return topology.delay_queue_arguments(self._queue, int(name.rpartition(".")[2]))

    async def _queue_exists(self, name: str) -> bool:
        try:
            await self._send_request(
                name, lambda raw, callback: raw.queue_declare(name, passive=True, callback=callback)
            )
        except ChannelClosedError as error:
            if "NOT_FOUND" in str(error):
                return False
            raise topology.declare_error(name, str(error)) from error
        return True

    async def _request(self, name: str, request: _DeclareRequest) -> Any:
        try:
            return await self._send_request(name, request)
        except ChannelClosedError as error:
            raise topology.declare_error(name, str(error)) from error

    async def _send_request(self, name: str, request: _DeclareRequest) -> Any:
        async with self._request_lock:
            if self._channel is None or not self._channel.is_open:
                self._channel = await self._connection.channel()
            raw = self._channel.raw
            async with self._connection.timeout(f"declare {name!r}"):
                return await self._channel.request(lambda callback: request(raw, callback))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
