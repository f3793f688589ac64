"""Declarer: makes the queues that are needed, once, and explains why one cannot be made."""

from __future__ import annotations

import asyncio

from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.line import Channel, Connection, Refused


class Declarer:
    """The queues of one work queue; lives on the line's own thread."""

    def __init__(self, queue: str, connection: Connection, *, dead_days: float | None) -> None:
        self._queue = queue
        self._connection = connection
        self._dead_days = dead_days
        self._known: set[str] = set()
        self._channel: Channel | None = None
        self._asking = asyncio.Lock()

    @property
    def delays(self) -> list[str]:
        """The queues of delays that this client has used."""
        return sorted(name for name in self._known if name.startswith(f"{self._queue}.later."))

    async def everything(self) -> None:
        """Have the queue itself and its dead letters, whatever was there before; delays are made when they are used."""
        self._known -= {self._queue, topology.dead(self._queue)}
        await self.needed(topology.dead(self._queue))
        await self.needed(self._queue)

    async def needed(self, name: str) -> None:
        """Have the queue called *name*, unless it is known."""
        if name not in self._known:
            await self._ask(name, self._arguments(name))
            self._known.add(name)

    def forget(self, name: str) -> None:
        """It may be gone."""
        self._known.discard(name)

    async def count(self, name: str) -> int:
        """How many are ready in the queue called *name*, which is declared in passing."""
        return await self._ask(name, self._arguments(name))

    def _arguments(self, name: str) -> topology.Arguments:
        if name == self._queue:
            return topology.work_arguments(name)
        if name == topology.dead(self._queue):
            return topology.dead_arguments(self._dead_days)
        return topology.later_arguments(self._queue, int(name.rpartition(".")[2]))

    async def _ask(self, name: str, arguments: topology.Arguments) -> int:
        async with self._asking:
            if self._channel is None or not self._channel.is_open:
                self._channel = await self._connection.channel()
            raw = self._channel.raw
            async with self._connection.answering(f"declare the queue {name!r}"):
                try:
                    answer = await self._channel.ask(
                        lambda told: raw.queue_declare(name, durable=True, arguments=arguments, callback=told)
                    )
                except Refused as error:
                    raise topology.refusal(name, str(error)) from error
        return int(answer.method.message_count)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
