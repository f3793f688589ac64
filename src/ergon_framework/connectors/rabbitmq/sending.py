"""Sender: hands messages over, to queues that outlive a crash of the server."""

from __future__ import annotations

from collections.abc import Sequence

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.declaring import Declarer
from ergon_framework.connectors.rabbitmq.line import Connection
from ergon_framework.connectors.rabbitmq.message import Outgoing
from ergon_framework.connectors.rabbitmq.publisher import UNROUTABLE, Publisher


class Sender:
    """Publishes for one work queue, and makes what is missing; lives on the line's own thread."""

    def __init__(self, queue: str, connection: Connection, declarer: Declarer) -> None:
        self._declarer = declarer
        self._publisher = Publisher(connection, topology.ready(queue))

    async def send(self, messages: Sequence[Outgoing]) -> list[str]:
        """One word each: empty when the server has it on disk, otherwise why it has not."""
        queues = {message.queue for message in messages}
        try:
            for queue in queues:
                await self._declarer.needed(queue)
            problems = await self._publisher.publish(messages)
            back = [index for index, problem in enumerate(problems) if problem == UNROUTABLE]
            if back:
                await self._again(messages, problems, back)
        except ConnectorError:
            self._declarer.forget(*queues)
            raise
        return problems

    async def _again(self, messages: Sequence[Outgoing], problems: list[str], back: Sequence[int]) -> None:
        """Have those queues that let nothing in, and send once more what came *back*."""
        queues = {messages[index].queue for index in back}
        self._declarer.forget(*queues)
        await self._declarer.trust(queues)
        told = await self._publisher.publish([messages[index] for index in back])
        for index, problem in zip(back, told, strict=True):
            problems[index] = problem

    def close(self) -> None:
        self._publisher.close()
