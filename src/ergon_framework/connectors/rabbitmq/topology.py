"""The queues of a work queue: their arguments, their declaration, and the errors of a server whose queues differ.

A server writes the name of a new quorum queue to its disk up to three seconds after it has confirmed the declaration.
If it is killed before that, it finds a queue without a leader at restart, and messages confirmed there are lost. It
writes all pending names immediately when it looks up an unknown queue, which it does whenever a queue is declared. So
one more queue is declared after the new ones, which are then bound to an exchange. All messages are published to that
exchange, and are returned if their queue is not bound: no message goes to a queue whose name is not persisted,
whichever client declared it.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Callable, Collection
from typing import Any, Final, TypeAlias

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.rabbitmq.connection import Channel, ChannelClosedError, Connection
from ergon_framework.errors import ConfigurationError

#: The steps of delays within a power of ten. A delay is rounded up to the next step: every step is a separate queue,
#: because a queue expires only the message at its head, and so must hold delays of one length.
DELAY_STEPS: Final = (1.0, 1.2, 1.5, 1.8, 2.2, 2.7, 3.3, 3.9, 4.7, 5.6, 6.8, 8.2)
_MIN_DELAY_MS: Final = 10
#: The longest time by which rounding up may make a message later than the time that its transaction names.
_MAX_LATENESS_MS: Final = 500
#: Largest delay that the server accepts: 32 bits of milliseconds.
_MAX_DELAY_MS: Final = 4_294_967_295
#: Deliveries after which the server itself dead-letters a message. The effective limit is the task's; this one is for
#: consumers without such a limit, and far above the deliveries that outages may add.
DELIVERY_LIMIT: Final = 1000
#: An unreachable limit. Without one, servers from version 4 on drop a message after 20 deliveries.
_NO_DELIVERY_LIMIT: Final = 2_147_483_647
_DAY_MS: Final = 86_400_000
_PROBE_EXPIRES_MS: Final = 60_000
_MISMATCH_PATTERN: Final = re.compile(
    r"inequivalent arg '(?P<name>[^']+)' for queue '(?P<queue>.+)' in vhost '.*': "
    r"received (?P<wanted>.+?) but current is (?P<found>.+)$"
)

QueueArguments = dict[str, Any]


def dead_letter_queue(queue: str) -> str:
    """Return the name of the dead-letter queue."""
    return f"{queue}.dead"


def delay_queue(queue: str, milliseconds: int) -> str:
    """Return the name of the queue that holds messages deferred for *milliseconds*."""
    return f"{queue}.later.{milliseconds}"


def lock_queue(queue: str) -> str:
    """Return the name of the exclusive queue that locks moves of dead letters."""
    return f"{queue}.dead.lock"


def publish_exchange(queue: str) -> str:
    """Return the name of the exchange for all publishes: a queue bound to it survives a crash."""
    return f"{queue}.ready"


def sync_probe_queue(queue: str, number: str) -> str:
    """Return the name of a queue that is declared only so that the names of earlier ones are persisted."""
    return f"{queue}.proof.{number}"


def delay_bucket_ms(delay: float) -> int:
    """Return the actual delay of a delay of *delay* seconds, in milliseconds: never shorter, at most a quarter longer.

    >>> delay_bucket_ms(0.4), delay_bucket_ms(1.0), delay_bucket_ms(1.01), delay_bucket_ms(3600)
    (470, 1000, 1200, 3900000)
    """
    delay_ms = max(_MIN_DELAY_MS, math.ceil(delay * 1000))
    if delay_ms >= _MAX_DELAY_MS:
        return _MAX_DELAY_MS
    magnitude = int(10 ** (len(str(delay_ms)) - 1))
    return min(
        _MAX_DELAY_MS,
        next((round(part * magnitude) for part in DELAY_STEPS if round(part * magnitude) >= delay_ms), 10 * magnitude),
    )


def delay_part_ms(delay: float) -> int:
    """Return the length of the delay queue that holds a message for *delay* seconds, or for the first part of them.

    It is the next longer one where that is not too late, otherwise the next shorter one: the consumer finds the message
    early and delays it for the rest. So the number of queues is bounded, and a delay is exact.

    >>> delay_part_ms(0.4), delay_part_ms(3600.0), delay_part_ms(1.7)
    (470, 3300000, 1800)
    """
    longer, delay_ms = delay_bucket_ms(delay), math.ceil(delay * 1000)
    if longer - delay_ms <= _MAX_LATENESS_MS:
        return longer
    magnitude = int(10 ** (len(str(delay_ms)) - 1))
    return max(length for part in DELAY_STEPS if (length := round(part * magnitude)) <= delay_ms)


def work_queue_arguments(queue: str) -> QueueArguments:
    """Return the arguments of the queue itself."""
    return {**_build_at_least_once_arguments(dead_letter_queue(queue)), "x-delivery-limit": DELIVERY_LIMIT}


def delay_queue_arguments(queue: str, milliseconds: int) -> QueueArguments:
    """Return the arguments of a queue whose messages return to *queue* after *milliseconds*."""
    return {
        **_build_at_least_once_arguments(queue),
        "x-message-ttl": milliseconds,
        "x-delivery-limit": _NO_DELIVERY_LIMIT,
    }


def dead_letter_arguments(days: float | None) -> QueueArguments:
    """Return the arguments of the dead-letter queue, which keeps its messages for *days*."""
    retention: QueueArguments = {} if days is None else {"x-message-ttl": min(_MAX_DELAY_MS, round(days * _DAY_MS))}
    return {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-delivery-limit": _NO_DELIVERY_LIMIT,
        **retention,
    }


def sync_probe_arguments() -> QueueArguments:
    """Return the arguments of a probe queue; it expires if the client that declared it could not delete it."""
    return {"x-queue-type": "quorum", "x-expires": _PROBE_EXPIRES_MS}


def _build_at_least_once_arguments(target: str) -> QueueArguments:
    """Return arguments by which an expired or rejected message stays until *target* has stored it.

    That takes both an at-least-once strategy and an overflow mode that rejects.
    """
    return {
        "x-queue-type": "quorum",
        "x-overflow": "reject-publish",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": target,
        "x-dead-letter-strategy": "at-least-once",
    }


def declare_error(queue: str, message: str) -> ConnectorError | ConfigurationError:
    """Translate the server's error for declaring *queue*, whose text is *message*."""
    if mismatch := _MISMATCH_PATTERN.search(message):
        return ConfigurationError(
            f"queue {mismatch['queue']!r} exists with a different argument {mismatch['name']!r}: expected "
            f"{mismatch['wanted']}, found {mismatch['found']}; empty and delete the queue so that it is declared "
            "again, or choose another name"
        )
    if "PRECONDITION_FAILED" in message:
        return ConfigurationError(
            f"the server cannot declare the queue {queue!r} with the required arguments: {message}"
        )
    if "ACCESS_REFUSED" in message:
        return ConfigurationError(
            f"the user may not declare the queue {queue!r}; grant the rights to configure, write and read it and "
            f"those whose names begin with {queue + '.'!r}: {message}"
        )
    return ConnectorError(f"the server cannot declare the queue {queue!r}: {message}")


# -- declaration ------------------------------------------------------------------------------------

#: Sends a request over a channel; its second argument receives the response.
_DeclareRequest: TypeAlias = Callable[[Any, Callable[[Any], None]], object]


class TopologyDeclarer:
    """Declares the queues of one work queue; runs on the connection thread."""

    def __init__(self, queue: str, connection: Connection, *, dead_days: float | None, declare: bool = True) -> None:
        self._queue = queue
        #: Whether the work queue itself is declared; if not, it must exist, with whatever arguments.
        self._declare = declare
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
        names = (dead_letter_queue(self._queue), self._queue)
        self.invalidate(*names)
        missing = [name for name in names if not await self._queue_exists(name)]
        for name in names:
            await self.ensure_queue(name)
        if missing:
            await self.bind_durably(missing)

    async def ensure_queue(self, name: str) -> None:
        """Declare the queue called *name*, unless it is cached as declared."""
        exchange = publish_exchange(self._queue)
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
        probe = sync_probe_queue(self._queue, os.urandom(6).hex())
        await self._request(
            probe,
            lambda raw, callback: raw.queue_declare(
                probe, durable=True, arguments=sync_probe_arguments(), callback=callback
            ),
        )
        for name in names:
            await self._request(name, self._build_bind(name))
        await self._request(probe, lambda raw, callback: raw.queue_delete(probe, callback=callback))

    def invalidate(self, *names: str) -> None:
        """Remove the queues and the exchange from the cache, because they may have been deleted."""
        self._declared -= {*names, publish_exchange(self._queue)}

    async def count_ready(self, name: str) -> int:
        """Return the number of ready messages in the queue called *name*, declaring it on the way."""
        if name == self._queue and not self._declare:
            return await self._count_existing(name)
        answer = await self._request(
            name,
            lambda raw, callback: raw.queue_declare(
                name, durable=True, arguments=self._build_arguments(name), callback=callback
            ),
        )
        return int(answer.method.message_count)

    async def _count_existing(self, name: str) -> int:
        try:
            answer = await self._send_request(
                name, lambda raw, callback: raw.queue_declare(name, passive=True, callback=callback)
            )
        except ChannelClosedError as error:
            if "NOT_FOUND" in str(error):
                raise ConfigurationError(
                    f"queue {name!r} does not exist, and declare=False does not create it; create it on the server, or "
                    "remove declare=False"
                ) from error
            raise declare_error(name, str(error)) from error
        return int(answer.method.message_count)

    def _build_bind(self, name: str) -> _DeclareRequest:
        return lambda raw, callback: raw.queue_bind(
            name, publish_exchange(self._queue), routing_key=name, callback=callback
        )

    def _build_arguments(self, name: str) -> QueueArguments:
        if name == self._queue:
            return work_queue_arguments(name)
        if name == dead_letter_queue(self._queue):
            return dead_letter_arguments(self._dead_days)
        return delay_queue_arguments(self._queue, int(name.rpartition(".")[2]))

    async def _queue_exists(self, name: str) -> bool:
        try:
            await self._send_request(
                name, lambda raw, callback: raw.queue_declare(name, passive=True, callback=callback)
            )
        except ChannelClosedError as error:
            if "NOT_FOUND" in str(error):
                return False
            raise declare_error(name, str(error)) from error
        return True

    async def _request(self, name: str, request: _DeclareRequest) -> Any:
        try:
            return await self._send_request(name, request)
        except ChannelClosedError as error:
            raise declare_error(name, str(error)) from error

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
