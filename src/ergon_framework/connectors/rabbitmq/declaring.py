"""Declarer: makes the queues that are needed, once, and explains why one cannot be made.

A server writes the name of a new quorum queue to its disk up to three seconds after it has said that the queue is
there. Killed before that, it finds a queue without a leader when it is back, and what was confirmed there is gone. It
writes at once, though, all names that it still has to write when it looks for one that it does not know, and it does
that whenever a queue is made. So one more queue is made behind those that are new; then they are bound to an exchange.
Everything is published over that exchange, and comes back if its queue is not bound: nothing can be trusted to a queue
whose name is not written, whoever made it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.line import Channel, Connection, Refused

#: Asks the server something over a channel, and is given whom to tell the answer.
_Request: TypeAlias = Callable[[Any, Callable[[Any], None]], object]


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
        names = (topology.dead(self._queue), self._queue)
        self.forget(*names)
        missing = [name for name in names if not await self._is_there(name)]
        for name in names:
            await self.needed(name)
        if missing:
            await self.trust(missing)

    async def needed(self, name: str) -> None:
        """Have the queue called *name*, unless it is known."""
        exchange = topology.ready(self._queue)
        if exchange not in self._known:
            await self._ask(
                exchange, lambda raw, told: raw.exchange_declare(exchange, "direct", durable=True, callback=told)
            )
            self._known.add(exchange)
        if name not in self._known:
            await self.count(name)
            self._known.add(name)

    async def trust(self, names: Collection[str]) -> None:
        """Have the queues called *names* so that a crash of the server leaves them, and let messages in."""
        for name in names:
            await self.needed(name)
        proof = topology.proof(self._queue, os.urandom(6).hex())
        await self._ask(
            proof,
            lambda raw, told: raw.queue_declare(
                proof, durable=True, arguments=topology.proof_arguments(), callback=told
            ),
        )
        for name in names:
            await self._ask(name, self._binding(name))
        await self._ask(proof, lambda raw, told: raw.queue_delete(proof, callback=told))

    def forget(self, *names: str) -> None:
        """They may be gone, and the exchange too."""
        self._known -= {*names, topology.ready(self._queue)}

    async def count(self, name: str) -> int:
        """How many are ready in the queue called *name*, which is declared in passing."""
        answer = await self._ask(
            name,
            lambda raw, told: raw.queue_declare(name, durable=True, arguments=self._arguments(name), callback=told),
        )
        return int(answer.method.message_count)

    def _binding(self, name: str) -> _Request:
        return lambda raw, told: raw.queue_bind(name, topology.ready(self._queue), routing_key=name, callback=told)

    def _arguments(self, name: str) -> topology.Arguments:
        if name == self._queue:
            return topology.work_arguments(name)
        if name == topology.dead(self._queue):
            return topology.dead_arguments(self._dead_days)
        return topology.later_arguments(self._queue, int(name.rpartition(".")[2]))

    async def _is_there(self, name: str) -> bool:
        try:
            await self._asked(name, lambda raw, told: raw.queue_declare(name, passive=True, callback=told))
        except Refused as error:
            if "NOT_FOUND" in str(error):
                return False
            raise topology.refusal(name, str(error)) from error
        return True

    async def _ask(self, name: str, request: _Request) -> Any:
        try:
            return await self._asked(name, request)
        except Refused as error:
            raise topology.refusal(name, str(error)) from error

    async def _asked(self, name: str, request: _Request) -> Any:
        async with self._asking:
            if self._channel is None or not self._channel.is_open:
                self._channel = await self._connection.channel()
            raw = self._channel.raw
            async with self._connection.answering(f"declare {name!r}"):
                return await self._channel.ask(lambda told: request(raw, told))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
