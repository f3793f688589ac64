"""Settling: what a group of claims becomes.

What is to live on is published first and acked then, so that a crash in between leaves it twice and never nowhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from ergon_framework.connectors.base import (
    Ack,
    DeadLetter,
    Delivery,
    Later,
    Release,
    Settlement,
    SettleResult,
    Settling,
    UndecodableError,
)
from ergon_framework.connectors.codec import Codec, UnencodableError
from ergon_framework.connectors.encryption import write_envelope
from ergon_framework.connectors.rabbitmq import graves, topology
from ergon_framework.connectors.rabbitmq.consumer import Consumer
from ergon_framework.connectors.rabbitmq.message import Message, Outgoing
from ergon_framework.connectors.rabbitmq.sending import Sender
from ergon_framework.errors import ConfigurationError, ConnectionLost, ErgonError
from ergon_framework.failure import Failure
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

SETTLED, LOST, FAILED = SettleResult.SETTLED, SettleResult.LOST, SettleResult.FAILED


class Settler:
    """Settles for one queue; lives on the line's own thread."""

    def __init__(self, queue: str, consumer: Consumer, sender: Sender, *, codec: Codec) -> None:
        self._queue = queue
        self._codec = codec
        self._consumer = consumer
        self._sender = sender

    async def settle(self, settlings: Sequence[Settling]) -> list[SettleResult]:
        """One result each. What was written and not answered raises ConnectionLost: nobody knows what became of it."""
        results = [FAILED] * len(settlings)
        number = self._consumer.number
        ending: list[tuple[int, Message]] = []
        living: list[tuple[int, Message, Outgoing]] = []
        unread: dict[bool, list[tuple[int, Message]]] = {True: [], False: []}
        for index, (delivery, how) in enumerate(settlings):
            message = self._consumer.leave(delivery.receipt)
            if message is None:
                results[index] = LOST
            elif type(how) is Ack:
                ending.append((index, message))
            elif message.unread is not None and type(how) in (DeadLetter, Release):
                # Its body is not here to be published: the server moves it.
                unread[type(how) is Release].append((index, message))
            else:
                outgoing = self._outgoing(delivery, how, message)
                if outgoing is None:
                    self._consumer.stay([message])
                else:
                    living.append((index, message, outgoing))
        # What ends need not wait for what lives on.
        acked = self._consumer.ack([message for _, message in ending])
        for requeue, placed in unread.items():
            acked = self._consumer.reject([message for _, message in placed], requeue=requeue) and acked
            ending += placed
        published = await self._published(living)
        acked = self._consumer.ack([message for _, message in published]) and acked
        ending += published
        if not ending:
            return results
        await self._consumer.written()
        if not acked or self._consumer.number != number:
            raise ConnectionLost("the connection to RabbitMQ was lost while settling")
        for index, _ in ending:
            results[index] = SETTLED
        return results

    async def give_back(self, messages: Sequence[Message]) -> None:
        """Release what was never handed out."""
        kept = [message for message in messages if self._consumer.leave(message.receipt) is not None]
        self._consumer.reject([message for message in kept if message.unread is not None], requeue=True)
        kept = [message for message in kept if message.unread is None]
        living = [(0, message, _released(self._queue, message)) for message in kept]
        done = {id(message) for _, message in await self._published(living)}
        self._consumer.ack([message for message in kept if id(message) in done])
        # What is handed out next may end this process, and with it every ack that is not in the queue's log.
        if done:
            with suppress(ErgonError):
                await self._consumer.written()
        self._consumer.hold([message for message in kept if id(message) not in done])

    async def _published(self, living: list[tuple[int, Message, Outgoing]]) -> list[tuple[int, Message]]:
        """Those that the server has; the others are held as before."""
        if not living:
            return []
        try:
            problems = await self._sender.send([outgoing for *_, outgoing in living])
        except ErgonError as error:
            # Each may be asked for again; those beside them that only end have ended.
            if isinstance(error, ConfigurationError):
                logs.say(logging.WARNING, "settlement refused", {"queue": self._queue, "error": str(error)}, to=_log)
            problems = ["unknown"] * len(living)
        kept: list[tuple[int, Message]] = []
        for (index, message, _), problem in zip(living, problems, strict=True):
            if problem:
                self._consumer.stay([message])
            else:
                kept.append((index, message))
        return kept

    def _outgoing(self, delivery: Delivery, how: Settlement, message: Message) -> Outgoing | None:
        """What is published in its place; None for what cannot be."""
        if message.unread is not None:
            return None
        match how:
            case Release():
                return _released(self._queue, message)
            case Later():
                return self._later(delivery, how, message)
            case DeadLetter():
                return self._buried(delivery, how, message)
            case _:
                return None

    def _later(self, delivery: Delivery, how: Later, message: Message) -> Outgoing | None:
        written: dict[str, str] | None = None
        if not isinstance(delivery.error, UndecodableError):  # what could not be read comes back as it was
            try:
                written = write_envelope(self._codec, delivery, how)
            except UnencodableError:
                return None
        wait = topology.step(how.delay) if how.delay > 0 else 0
        target = topology.later(self._queue, wait) if wait else self._queue
        return message.sent_on(
            target, delivered=message.deliveries - 1, since=time.time() + wait / 1000, written=written
        )

    def _buried(self, delivery: Delivery, how: DeadLetter, message: Message) -> Outgoing | None:
        if how.failure is not None and not isinstance(how.failure, Failure):
            return None
        try:
            return graves.buried(self._queue, delivery, how, headers=message.headers, codec=self._codec)
        except (ValueError, TypeError, UnencodableError):
            return None


def _released(queue: str, message: Message) -> Outgoing:
    return message.sent_on(queue, delivered=message.deliveries - 1)
