"""Settle a group of claims.

A message that continues to exist is published first and acked afterwards, so that a crash in between duplicates it and
never loses it.

The server does not answer acks. A count of the ready messages, requested on the same channel after them, is answered
when it has received them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from ergon_framework.connectors.base import (
    Ack,
    DeadLetter,
    Defer,
    Delivery,
    Release,
    Settlement,
    SettlementRequest,
    SettleResult,
    UndecodableError,
)
from ergon_framework.connectors.codec import Codec, UnencodableError
from ergon_framework.connectors.encryption import write_envelope
from ergon_framework.connectors.rabbitmq import dead_letters, topology
from ergon_framework.connectors.rabbitmq.consumer import Consumer
from ergon_framework.connectors.rabbitmq.message import Message, OutgoingMessage
from ergon_framework.connectors.rabbitmq.publisher import DurablePublisher
from ergon_framework.errors import ConfigurationError, ConnectionLostError, ErgonError
from ergon_framework.failure import Failure
from ergon_framework.telemetry import logs
from ergon_framework.transaction import MAX_DELAY_SECONDS

_log = logging.getLogger(__name__)

SETTLED, LOST, FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED


class RabbitMQSettler:
    """Settles the claims of one queue; runs on the connection thread."""

    def __init__(self, queue: str, consumer: Consumer, publisher: DurablePublisher, *, codec: Codec) -> None:
        self._queue = queue
        self._codec = codec
        self._consumer = consumer
        self._publisher = publisher

    async def settle(self, requests: Sequence[SettlementRequest]) -> list[SettleResult]:
        """Settle claims and return one result each.

        Raises ConnectionLostError if a written settlement was not answered: its outcome is unknown.
        """
        results = [FAILED] * len(requests)
        channel_number = self._consumer.channel_number
        finished: list[tuple[int, Message]] = []
        republished: list[tuple[int, Message, OutgoingMessage]] = []
        unread: dict[bool, list[tuple[int, Message]]] = {True: [], False: []}
        for index, (delivery, settlement) in enumerate(requests):
            message = self._consumer.begin_settle(delivery.receipt)
            if message is None:
                results[index] = LOST
            elif type(settlement) is Ack:
                finished.append((index, message))
            elif message.unread is not None and type(settlement) in (DeadLetter, Release):
                # Its body is not loaded, so the server moves the message.
                unread[type(settlement) is Release].append((index, message))
            else:
                outgoing = self._to_outgoing(delivery, settlement, message)
                if outgoing is None:
                    self._consumer.cancel_settle([message])
                else:
                    republished.append((index, message, outgoing))
        # Messages that end need not wait for those that are republished.
        acked = self._consumer.ack([message for _, message in finished])
        for requeue, indexed in unread.items():
            acked = self._consumer.reject([message for _, message in indexed], requeue=requeue) and acked
            finished += indexed
        published = await self._publish(republished)
        acked = self._consumer.ack([message for _, message in published]) and acked
        finished += published
        if not finished:
            return results
        await self._consumer.count_ready()
        if not acked or self._consumer.channel_number != channel_number:
            raise ConnectionLostError("connection to RabbitMQ was lost while settling")
        for index, _ in finished:
            results[index] = SETTLED
        return results

    async def release(self, messages: Sequence[Message]) -> None:
        """Release messages that were never handed out."""
        held = [message for message in messages if self._consumer.begin_settle(message.receipt) is not None]
        self._consumer.reject([message for message in held if message.unread is not None], requeue=True)
        held = [message for message in held if message.unread is None]
        republished = [(0, message, _build_release(self._queue, message)) for message in held]
        published_ids = {id(message) for _, message in await self._publish(republished)}
        self._consumer.ack([message for message in held if id(message) in published_ids])
        # The next message may end this process, and with it every ack that the server has not received.
        if published_ids:
            with suppress(ErgonError):
                await self._consumer.count_ready()
        self._consumer.retain([message for message in held if id(message) not in published_ids])

    async def delay_again(self, messages: Sequence[Message]) -> list[Message]:
        """Delay messages that came before their time, uncounted; return those that are still held."""
        held = [message for message in messages if self._consumer.begin_settle(message.receipt) is not None]
        now = time.time()
        republished = [(0, message, _build_delay(self._queue, message, now)) for message in held]
        published_ids = {id(message) for _, message in await self._publish(republished)}
        self._consumer.ack([message for message in held if id(message) in published_ids])
        return [message for message in held if id(message) not in published_ids]

    async def _publish(self, republished: list[tuple[int, Message, OutgoingMessage]]) -> list[tuple[int, Message]]:
        """Publish; return the messages that the server stored. The others are held as before."""
        if not republished:
            return []
        try:
            problems = await self._publisher.send([outgoing for *_, outgoing in republished])
        except ErgonError as error:
            # These settlements may be retried; those that were only acked have ended.
            if isinstance(error, ConfigurationError):
                logs.log_event(
                    logging.WARNING, "settlement rejected", {"queue": self._queue, "error": str(error)}, to=_log
                )
            problems = ["unknown"] * len(republished)
        stored: list[tuple[int, Message]] = []
        for (index, message, _), problem in zip(republished, problems, strict=True):
            if problem:
                self._consumer.cancel_settle([message])
            else:
                stored.append((index, message))
        return stored

    def _to_outgoing(self, delivery: Delivery, settlement: Settlement, message: Message) -> OutgoingMessage | None:
        """Return the message that is published in its place; None if none can be."""
        if message.unread is not None:
            return None
        match settlement:
            case Release():
                return _build_release(self._queue, message)
            case Defer():
                return self._build_deferred(delivery, settlement, message)
            case DeadLetter():
                return self._build_dead_letter(delivery, settlement, message)
            case _:
                return None

    def _build_deferred(self, delivery: Delivery, settlement: Defer, message: Message) -> OutgoingMessage | None:
        envelope: dict[str, str] | None = None
        if not isinstance(delivery.error, UndecodableError):  # an undecodable message is republished unchanged
            try:
                envelope = write_envelope(self._codec, delivery, settlement)
            except UnencodableError:
                return None
        delay_ms = topology.delay_bucket_ms(settlement.delay) if settlement.delay > 0 else 0
        target = topology.delay_queue(self._queue, delay_ms) if delay_ms else self._queue
        return message.republished_to(
            target, delivered=message.deliveries - 1, ready_since=time.time() + delay_ms / 1000, envelope=envelope
        )

    def _build_dead_letter(
        self, delivery: Delivery, settlement: DeadLetter, message: Message
    ) -> OutgoingMessage | None:
        if settlement.failure is not None and not isinstance(settlement.failure, Failure):
            return None
        try:
            return dead_letters.dead_letter_message(
                self._queue, delivery, settlement, headers=message.headers, codec=self._codec
            )
        except (ValueError, TypeError, UnencodableError):
            return None


def _build_release(queue: str, message: Message) -> OutgoingMessage:
    return message.republished_to(queue, delivered=message.deliveries - 1)


def _build_delay(queue: str, message: Message, now: float) -> OutgoingMessage:
    not_before = now if message.not_before is None else message.not_before
    delay_ms = topology.delay_part_ms(max(0.0, min(not_before - now, MAX_DELAY_SECONDS)))
    return message.republished_to(
        topology.delay_queue(queue, delay_ms), delivered=message.deliveries - 1, ready_since=not_before
    )
