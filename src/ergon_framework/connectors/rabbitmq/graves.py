"""Graves: dead letters in a queue of their own, as the one record that every broker keeps.

AMQP can look at a queue only by taking from it. Whoever lists or moves dead letters therefore has them to himself, by a
queue that only one connection can have at a time, and gives back what stays by closing his connection.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError, ChannelClosedByBroker, NackError, UnroutableError

from ergon_framework.connectors.base import DeadLetter, Delivery, MissingKeyError, UndecodableError
from ergon_framework.connectors.codec import Codec, UnencodableError, decode, remove_progress
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.encryption import hide_record, reveal_record
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.fields import FaithfulSelectConnection
from ergon_framework.connectors.rabbitmq.message import Message, Outgoing, Receipt, fresh
from ergon_framework.errors import ConnectionLost
from ergon_framework.failure import Failure
from ergon_framework.transaction import Transaction

#: Marks a message whose body is a record; one without it was put aside by the server itself.
_MARK: Final = "ergon-dead"
#: Why the server puts a message aside that a worker has refused.
_REJECTED: Final = "rejected"
#: The reason of what had its last delivery, as the loop says it.
_REFUSED: Final = "max_deliveries"
_LOCKED: Final = 405
#: Seconds between two looks whether somebody else is done.
_PAUSE: Final = 0.02
_numbers = itertools.count()


def buried(queue: str, delivery: Delivery, how: DeadLetter, *, headers: dict[str, str], codec: Codec) -> Outgoing:
    """The record of *delivery* as a message."""
    # A body that was not decoded goes with the headers that are needed to decode it.
    own = headers if delivery.error is not None or isinstance(delivery.transaction.payload, bytes) else None
    at = time.time()
    whole = DeadLetterRecord.of(delivery, how, queue=queue, at=at, headers=own, place=_place(at))
    record = hide_record(codec, whole)
    properties = pika.BasicProperties(
        headers={_MARK: "1"}, delivery_mode=2, content_type="application/json", message_id=record.place
    )
    return Outgoing(topology.dead(queue), record.model_dump_json().encode(), properties)


def _taken(channel: BlockingChannel, name: str) -> Message | None:
    method, properties, body = channel.basic_get(name)
    if method is None or properties is None or body is None:
        return None
    return Message(Receipt(0, method.delivery_tag or 0), body, properties)


def _place(at: float) -> str:
    """A place that sorts by time, and is nobody else's."""
    return f"{int(at * 1_000_000):017d}-{os.getpid():x}-{next(_numbers):x}-{os.urandom(4).hex()}"


def _failure(delivery: Delivery, error: UndecodableError | MissingKeyError, at: float) -> Failure:
    """Return the failure record of a message that was put aside without its body, and so without a record."""
    transaction = delivery.transaction
    return Failure(
        task_name="",
        transaction_id=transaction.id,
        source=transaction.source,
        tenant_id=transaction.tenant,
        correlation_id=transaction.correlation or transaction.id,
        idempotency_key=transaction.id,
        reason_code=error.code,
        error_type=type(error).__name__,
        error_message=str(error),
        attempts=transaction.attempts,
        occurred_at=at,
        category=error.category,
        final=True,
    )


class Graves:
    """The dead letters of one queue, over a connection that lives as long as one call."""

    def __init__(
        self,
        queue: str,
        codec: Codec,
        *,
        connect: Callable[[], pika.ConnectionParameters],
        trust: Callable[[], None],
        timeout: float,
        days: float | None,
        load: int,
    ) -> None:
        self._queue = queue
        self._codec = codec
        self._connect = connect
        #: Makes the queue itself, so that it lets in what is replayed.
        self._trust = trust
        self._timeout = timeout
        self._arguments = topology.dead_arguments(days)
        #: Bytes of the largest dead letter that is loaded.
        self._load = load

    def listed(self, query: DeadLetterQuery, *, after: str | None, limit: int) -> list[DeadLetterRecord]:
        """One page, the oldest first."""
        with self._opened() as channel:
            records = sorted((record for _, record in self._all(channel)), key=lambda record: record.place)
        behind = (record for record in records if after is None or record.place > after)
        return list(itertools.islice((record for record in behind if query.matches(record)), limit))

    def replayed(self, places: Sequence[str]) -> list[ReplayResult]:
        """Publish each to its queue, then take it away here: a crash in between leaves it in both."""
        return self._moved(places, self._replay)

    def discarded(self, places: Sequence[str]) -> list[ReplayResult]:
        return self._moved(places, lambda _channel, _message, record: ReplayResult(record.place, Became.DISCARDED))

    def replace(self, place: str, transaction: Transaction) -> ReplayResult:
        """Publish *transaction*, then take the dead letter at *place* away: a crash in between leaves both."""
        content = self._codec.encode(transaction)
        (result,) = self._moved([place], lambda channel, _, record: self._send(channel, record, lambda: content))
        return result

    def _moved(
        self, places: Sequence[str], move: Callable[[BlockingChannel, Message, DeadLetterRecord], ReplayResult]
    ) -> list[ReplayResult]:
        wanted, results = set(places), {place: ReplayResult(place, Became.GONE) for place in places}
        with self._opened() as channel:
            channel.confirm_delivery()
            channel.exchange_declare(topology.ready(self._queue), "direct", durable=True)
            for message, record in self._all(channel):
                if record.place in wanted:
                    wanted.discard(record.place)
                    results[record.place] = result = move(channel, message, record)
                    if result.became is not Became.FAILED:
                        channel.basic_ack(message.receipt.tag)
        return [results.pop(place, ReplayResult(place, Became.GONE)) for place in places]

    def _replay(self, channel: BlockingChannel, message: Message, record: DeadLetterRecord) -> ReplayResult:
        if message.unread is not None:
            words = f"its body of {message.unread} bytes is over the limit; raise max_bytes of the codec"
            return ReplayResult(record.place, Became.FAILED, f"{words} and max_fetch_bytes of the queue")
        return self._send(channel, record, lambda: self._original(message, record))

    def _send(
        self, channel: BlockingChannel, record: DeadLetterRecord, content: Callable[[], tuple[bytes, Mapping[str, str]]]
    ) -> ReplayResult:
        try:
            body, headers = content()
            outgoing = fresh(self._queue, body, headers, since=time.time())
            try:
                self._publish(channel, outgoing)
            except UnroutableError:
                self._trust()
                self._publish(channel, outgoing)
        except (UnencodableError, UnroutableError, NackError) as error:
            return ReplayResult(record.place, Became.FAILED, f"{type(error).__name__}: {error}"[:200])
        return ReplayResult(record.place, Became.REPLAYED)

    def _publish(self, channel: BlockingChannel, outgoing: Outgoing) -> None:
        exchange = topology.ready(self._queue)
        channel.basic_publish(exchange, outgoing.queue, outgoing.body, outgoing.properties, mandatory=True)

    def _original(self, message: Message, record: DeadLetterRecord) -> tuple[bytes, Mapping[str, str]]:
        if _MARK not in message.table:
            return message.body, remove_progress(message.headers)
        if record.raw is not None and record.headers:  # what could not be read goes back as it came
            return record.raw, remove_progress(record.headers)
        return self._codec.encode(record.fresh())

    # -- reading ---------------------------------------------------------------------------------------

    def _all(self, channel: BlockingChannel) -> Iterator[tuple[Message, DeadLetterRecord]]:
        """All that is there now, held by *channel*."""
        name = topology.dead(self._queue)
        channel.queue_declare(name, durable=True, arguments=self._arguments)
        message = _taken(channel, name)
        # Counted behind the first, not before: a queue that was just recovered has no leader for a moment, and is said
        # to be empty. Who takes from it is made to wait.
        left = channel.queue_declare(name, passive=True).method.message_count
        while message is not None:
            yield message, self._record(message)
            message = _taken(channel, name) if left > 0 else None
            left -= 1

    def _leaves_out(self, properties: pika.BasicProperties, size: int) -> bool:
        """Whether a dead letter of *size* bytes is shown without its body; a record has its bytes in base64."""
        if _MARK in (properties.headers or {}):
            return size > 2 * self._load
        most = self._codec.max_bytes
        return size > self._load or (most is not None and size > most)

    def _record(self, message: Message) -> DeadLetterRecord:
        if _MARK in message.table and message.unread is None:
            try:
                record = reveal_record(self._codec, DeadLetterRecord.model_validate_json(message.body))
                return self._decoded(record)
            except ValueError:
                pass  # somebody else's, with our mark: it is shown as what it is
        deaths: Any = message.table.get("x-death")
        first = deaths[0] if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else {}
        moment = first.get("time")
        stated = moment.timestamp() if moment is not None else message.stated_since
        at = message.seen if stated is None else stated
        headers = message.headers
        transaction, error = message.decode(self._codec, source=self._queue)
        delivery = Delivery(transaction, message.receipt, message.deliveries, None, error)
        # Without a time of its own it is shown with that of the look, which must not be part of its place.
        place = f"{int((stated or 0) * 1_000_000):017d}-{transaction.id[:64]}"
        if _MARK in message.table and message.properties.message_id:
            place = message.properties.message_id
        reason = str(message.table.get("x-first-death-reason") or "unknown")
        if reason == _REJECTED:
            # What a worker has rejected without its body: by its size, or after its last delivery.
            reason = _REFUSED if error is None else error.code
        return DeadLetterRecord.of(
            delivery,
            DeadLetter(reason, None if error is None or message.unread is None else _failure(delivery, error, at)),
            queue=self._queue,
            at=at,
            headers=None if error is None else headers,
            place=place,
            size=message.unread,
        )

    def _decoded(self, record: DeadLetterRecord) -> DeadLetterRecord:
        """Return *record* with the payload of a body that the worker did not decode, where it can be decoded."""
        if record.raw is None or not record.headers or record.reason != _REFUSED:
            return record
        transaction, error = decode(self._codec, record.raw, record.headers, source=self._queue)
        if error is not None:
            return record
        return record.model_copy(update={"payload": transaction.payload, "raw": None, "headers": {}})

    # -- having them to oneself --------------------------------------------------------------------------

    @contextmanager
    def _opened(self) -> Iterator[BlockingChannel]:
        try:
            connection = pika.BlockingConnection(self._connect(), _impl_class=FaithfulSelectConnection)
            try:
                self._locked(connection)
                channel = connection.channel()
                connection._impl.leave_out(channel.channel_number, self._leaves_out)  # noqa: SLF001 - as _impl_class
                yield channel
            finally:
                if connection.is_open:
                    connection.close()
        except ChannelClosedByBroker as error:
            raise topology.refusal(topology.dead(self._queue), error.reply_text) from error
        except (AMQPError, OSError) as error:
            raise ConnectionLost(
                f"the dead letters of {self._queue!r} cannot be reached: {type(error).__name__}: {error}"[:300]
            ) from error

    def _locked(self, connection: pika.BlockingConnection) -> None:
        """Wait until nobody else looks at them; the lock ends with the connection, however that ends."""
        end = time.monotonic() + self._timeout
        while True:
            try:
                connection.channel().queue_declare(topology.lock(self._queue), exclusive=True)
            except ChannelClosedByBroker as error:
                if error.reply_code != _LOCKED or time.monotonic() > end:
                    raise
                connection.sleep(_PAUSE)
            else:
                return
