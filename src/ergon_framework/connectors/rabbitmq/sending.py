"""DurablePublisher: publishes messages to queues that survive a crash of the server."""

from __future__ import annotations

from collections.abc import Sequence

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.declaring import TopologyDeclarer
from ergon_framework.connectors.rabbitmq.line import Connection
from ergon_framework.connectors.rabbitmq.message import OutgoingMessage
from ergon_framework.connectors.rabbitmq.publisher import UNROUTABLE, Publisher


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
