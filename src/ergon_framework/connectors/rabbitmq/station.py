"""Station: all that one queue has on the line's own thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ergon_framework.connectors.base import Depth
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.consumer import Consumer
from ergon_framework.connectors.rabbitmq.declaring import Declarer
from ergon_framework.connectors.rabbitmq.fields import BodyRule
from ergon_framework.connectors.rabbitmq.line import Line
from ergon_framework.connectors.rabbitmq.message import Message, Outgoing
from ergon_framework.connectors.rabbitmq.sending import Sender
from ergon_framework.connectors.rabbitmq.settling import Settler
from ergon_framework.errors import ErgonError


class Station:
    """Consumer, publisher and settler of one queue."""

    def __init__(
        self,
        queue: str,
        line: Line,
        *,
        codec: Codec,
        dead_days: float | None,
        leaves_out: BodyRule,
        max_bytes: int,
        arrived: Callable[[], None],
        lost: Callable[[Sequence[Any]], None],
    ) -> None:
        self._queue = queue
        self._line = line
        self._declarer = Declarer(queue, line.sends, dead_days=dead_days)
        self._sender = Sender(queue, line.sends, self._declarer)
        self.consumer = Consumer(
            queue,
            line.takes,
            prepare=self.open,
            leaves_out=leaves_out,
            max_bytes=max_bytes,
            arrived=arrived,
            lost=lost,
            give_back=self._give_back,
        )
        self.settler = Settler(queue, self.consumer, self._sender, codec=codec)

    async def open(self) -> None:
        """Have the queues, and say once what the server's confirmations are worth."""
        await self._declarer.everything()
        self._line.judge(self._line.sends.server)

    async def publish(self, messages: Sequence[Outgoing]) -> list[str]:
        await self._declarer.needed(topology.dead(self._queue))
        return await self._sender.send(messages)

    async def trust(self) -> None:
        """Have the queue itself, and let messages in that somebody else publishes."""
        await self._declarer.trust([self._queue])

    async def depth(self) -> Depth:
        """What the server says, and what has come here without having been handed out."""
        ready = await self._declarer.count(self._queue)
        delayed = sum([await self._declarer.count(name) for name in self._declarer.delays])
        dead = await self._declarer.count(topology.dead(self._queue))
        waiting = list(self.consumer.waiting)
        since = min((message.since for message in waiting), default=self.consumer.newest if ready else None)
        return Depth(
            ready=ready + len(waiting),
            delayed=delayed,
            in_flight=self.consumer.handed_out,
            dead=dead,
            oldest_age=None if since is None else max(0.0, time.time() - since),
        )

    async def _give_back(self, messages: Sequence[Message]) -> None:
        await self.settler.give_back(messages)

    async def close(self, *, last: bool) -> None:
        """Give back what was never handed out, and let go of the rest."""
        with suppress(ErgonError):
            await self.consumer.empty()
        await self.consumer.close()
        self._declarer.close()
        self._sender.close()
        if last:
            await self._line.close()
