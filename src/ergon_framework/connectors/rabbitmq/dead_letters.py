"""The dead-letter queue, with the same dead-letter record as on every broker.

AMQP can inspect a queue only by consuming from it. A caller that lists or moves dead letters therefore excludes others
by an exclusive lock queue, which only one connection can have, and requeues the rest by closing its connection.
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
from ergon_framework.connectors.codec import Codec, UnencodableError, decode, encode_unchanged, remove_progress
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, DeadLetterResult, ReplayResult
from ergon_framework.connectors.encryption import hide_record, reveal_record
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.fields import FaithfulSelectConnection
from ergon_framework.connectors.rabbitmq.message import Message, OutgoingMessage, RabbitMQReceipt, new_message
from ergon_framework.errors import ConnectionLostError
from ergon_framework.failure import Failure
from ergon_framework.transaction import Transaction

#: Marks a message whose body is a record; the server itself dead-lettered a message without it.
_RECORD_HEADER: Final = "ergon-dead"
#: The server's reason for dead-lettering a message that a worker has rejected.
_REJECTED_REASON: Final = "rejected"
#: The reason for a message after its last delivery, as the consumer loop reports it.
_MAX_DELIVERIES_REASON: Final = "max_deliveries"
_RESOURCE_LOCKED_CODE: Final = 405
#: Seconds between two attempts to get the lock.
_LOCK_RETRY_SECONDS: Final = 0.02
_handle_numbers = itertools.count()


def dead_letter_message(
    queue: str, delivery: Delivery, settlement: DeadLetter, *, headers: dict[str, str], codec: Codec
) -> OutgoingMessage:
    """Return the record of *delivery* as a message."""
    # An undecoded body is stored with the headers that are needed to decode it.
    stored_headers = headers if delivery.error is not None or isinstance(delivery.transaction.payload, bytes) else None
    at = time.time()
    plain_record = DeadLetterRecord.from_delivery(
        delivery, settlement, queue=queue, at=at, headers=stored_headers, handle=_new_handle(at)
    )
    record = hide_record(codec, plain_record)
    properties = pika.BasicProperties(
        headers={_RECORD_HEADER: "1"}, delivery_mode=2, content_type="application/json", message_id=record.handle
    )
    return OutgoingMessage(topology.dead_letter_queue(queue), record.model_dump_json().encode(), properties)


def _get_message(channel: BlockingChannel, name: str) -> Message | None:
    method, properties, body = channel.basic_get(name)
    if method is None or properties is None or body is None:
        return None
    return Message(RabbitMQReceipt(0, method.delivery_tag or 0), body, properties)


def _new_handle(at: float) -> str:
    """Return a unique handle that sorts by time."""
    return f"{int(at * 1_000_000):017d}-{os.getpid():x}-{next(_handle_numbers):x}-{os.urandom(4).hex()}"


def _to_failure(delivery: Delivery, error: UndecodableError | MissingKeyError, at: float) -> Failure:
    """Return the failure record of a message that was dead-lettered without its body, and so without a record."""
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


class DeadLetterQueue:
    """The dead letters of one queue, over a connection that lives as long as one call."""

    def __init__(
        self,
        queue: str,
        codec: Codec,
        *,
        connect: Callable[[], Sequence[pika.ConnectionParameters]],
        bind_durably: Callable[[], None],
        timeout: float,
        dead_days: float | None,
        max_bytes: int,
    ) -> None:
        self._queue = queue
        self._codec = codec
        self._connect = connect
        #: Binds the queue itself, so that it accepts replayed messages.
        self._bind_durably = bind_durably
        self._timeout = timeout
        self._arguments = topology.dead_letter_arguments(dead_days)
        #: Largest dead letter that is loaded, in bytes.
        self._max_bytes = max_bytes

    def list_dead(self, query: DeadLetterQuery, *, after: str | None, limit: int) -> list[DeadLetterRecord]:
        """Return one page, the oldest first."""
        with self._open_channel() as channel:
            records = sorted((record for _, record in self._iterate(channel)), key=lambda record: record.handle)
        following = (record for record in records if after is None or record.handle > after)
        return list(itertools.islice((record for record in following if query.matches(record)), limit))

    def replay(self, handles: Sequence[str]) -> list[ReplayResult]:
        """Publish each to its queue, then ack it here: a crash in between leaves both copies."""
        return self._move(handles, self._replay_message)

    def discard(self, handles: Sequence[str]) -> list[ReplayResult]:
        return self._move(
            handles, lambda _channel, _message, record: ReplayResult(record.handle, DeadLetterResult.DISCARDED)
        )

    def replace(self, handle: str, transaction: Transaction) -> ReplayResult:
        """Publish *transaction*, then ack the dead letter with *handle*: a crash in between leaves both."""
        content = self._codec.encode(transaction)
        (result,) = self._move(
            [handle], lambda channel, _, record: self._publish_and_report(channel, record, lambda: content)
        )
        return result

    def _move(
        self, handles: Sequence[str], move: Callable[[BlockingChannel, Message, DeadLetterRecord], ReplayResult]
    ) -> list[ReplayResult]:
        remaining, results = set(handles), {handle: ReplayResult(handle, DeadLetterResult.GONE) for handle in handles}
        with self._open_channel() as channel:
            channel.confirm_delivery()
            channel.exchange_declare(topology.publish_exchange(self._queue), "direct", durable=True)
            for message, record in self._iterate(channel):
                if record.handle in remaining:
                    remaining.discard(record.handle)
                    results[record.handle] = result = move(channel, message, record)
                    if result.outcome is not DeadLetterResult.FAILED:
                        channel.basic_ack(message.receipt.tag)
        return [results.pop(handle, ReplayResult(handle, DeadLetterResult.GONE)) for handle in handles]

    def _replay_message(self, channel: BlockingChannel, message: Message, record: DeadLetterRecord) -> ReplayResult:
        if message.unread is not None:
            problem = f"its body of {message.unread} bytes exceeds the limit; raise max_bytes of the codec"
            return ReplayResult(record.handle, DeadLetterResult.FAILED, f"{problem} and max_fetch_bytes of the queue")
        return self._publish_and_report(channel, record, lambda: self._restore_content(message, record))

    def _publish_and_report(
        self, channel: BlockingChannel, record: DeadLetterRecord, content: Callable[[], tuple[bytes, Mapping[str, str]]]
    ) -> ReplayResult:
        try:
            body, headers = content()
            outgoing = new_message(self._queue, body, headers, ready_since=time.time())
            try:
                self._publish_message(channel, outgoing)
            except UnroutableError:
                self._bind_durably()
                self._publish_message(channel, outgoing)
        except (UnencodableError, UnroutableError, NackError) as error:
            return ReplayResult(record.handle, DeadLetterResult.FAILED, f"{type(error).__name__}: {error}"[:200])
        return ReplayResult(record.handle, DeadLetterResult.REPLAYED)

    def _publish_message(self, channel: BlockingChannel, outgoing: OutgoingMessage) -> None:
        exchange = topology.publish_exchange(self._queue)
        channel.basic_publish(exchange, outgoing.queue, outgoing.body, outgoing.properties, mandatory=True)

    def _restore_content(self, message: Message, record: DeadLetterRecord) -> tuple[bytes, Mapping[str, str]]:
        if _RECORD_HEADER not in message.raw_headers:
            return message.body, remove_progress(message.headers)
        if record.raw is not None and record.headers:  # an undecodable message is replayed unchanged
            return record.raw, remove_progress(record.headers)
        return encode_unchanged(self._codec, record.to_new_transaction())

    # -- reading ---------------------------------------------------------------------------------------

    def _iterate(self, channel: BlockingChannel) -> Iterator[tuple[Message, DeadLetterRecord]]:
        """Yield all dead letters that exist now, held by *channel*."""
        name = topology.dead_letter_queue(self._queue)
        channel.queue_declare(name, durable=True, arguments=self._arguments)
        message = _get_message(channel, name)
        # Counted after the first get, not before: a queue that was just recovered has no leader for a moment and
        # reports to be empty, while a get waits for the leader.
        remaining = channel.queue_declare(name, passive=True).method.message_count
        while message is not None:
            yield message, self._to_record(message)
            message = _get_message(channel, name) if remaining > 0 else None
            remaining -= 1

    def _omits_body(self, properties: pika.BasicProperties, size: int) -> bool:
        """Return whether a dead letter of *size* bytes is shown without its body; a record has its bytes in base64."""
        if _RECORD_HEADER in (properties.headers or {}):
            return size > 2 * self._max_bytes
        max_bytes = self._codec.max_bytes
        return size > self._max_bytes or (max_bytes is not None and size > max_bytes)

    def _to_record(self, message: Message) -> DeadLetterRecord:
        if _RECORD_HEADER in message.raw_headers and message.unread is None:
            try:
                record = reveal_record(self._codec, DeadLetterRecord.model_validate_json(message.body))
                return self._decode_payload(record)
            except ValueError:
                pass  # a third-party message with the framework's mark: it is shown without a record
        deaths: Any = message.raw_headers.get("x-death")
        first_death = deaths[0] if isinstance(deaths, list) and deaths and isinstance(deaths[0], dict) else {}
        dead_lettered_at = first_death.get("time")
        stated_at = dead_lettered_at.timestamp() if dead_lettered_at is not None else message.stated_ready_since
        at = message.seen if stated_at is None else stated_at
        headers = message.headers
        transaction, error = message.decode(self._codec, source=self._queue)
        delivery = Delivery(transaction, message.receipt, message.deliveries, None, error)
        # Without its own time the letter is shown with the time of reading, which must not be part of its handle.
        handle = f"{int((stated_at or 0) * 1_000_000):017d}-{transaction.id[:64]}"
        if _RECORD_HEADER in message.raw_headers and message.properties.message_id:
            handle = message.properties.message_id
        reason = str(message.raw_headers.get("x-first-death-reason") or "unknown")
        if reason == _REJECTED_REASON:
            # Rejected by a worker without its body: because of its size, or after its last delivery.
            reason = _MAX_DELIVERIES_REASON if error is None else error.code
        return DeadLetterRecord.from_delivery(
            delivery,
            DeadLetter(reason, None if error is None or message.unread is None else _to_failure(delivery, error, at)),
            queue=self._queue,
            at=at,
            headers=None if error is None else headers,
            handle=handle,
            size=message.unread,
        )

    def _decode_payload(self, record: DeadLetterRecord) -> DeadLetterRecord:
        """Return *record* with the decoded payload of a body that the worker did not decode, if it can be decoded."""
        if record.raw is None or not record.headers or record.reason != _MAX_DELIVERIES_REASON:
            return record
        transaction, error = decode(self._codec, record.raw, record.headers, source=self._queue)
        if error is not None:
            return record
        return record.model_copy(update={"payload": transaction.payload, "raw": None, "headers": {}})

    # -- the exclusive lock ------------------------------------------------------------------------------

    @contextmanager
    def _open_channel(self) -> Iterator[BlockingChannel]:
        try:
            connection = pika.BlockingConnection(self._connect(), _impl_class=FaithfulSelectConnection)
            try:
                self._acquire_lock(connection)
                channel = connection.channel()
                connection._impl.leave_out(channel.channel_number, self._omits_body)  # noqa: SLF001 - as _impl_class
                yield channel
            finally:
                if connection.is_open:
                    connection.close()
        except ChannelClosedByBroker as error:
            raise topology.declare_error(topology.dead_letter_queue(self._queue), error.reply_text) from error
        except (AMQPError, OSError) as error:
            raise ConnectionLostError(
                f"the dead letters of {self._queue!r} are unavailable: {type(error).__name__}: {error}"[:300]
            ) from error

    def _acquire_lock(self, connection: pika.BlockingConnection) -> None:
        """Wait for the exclusive lock; it ends with the connection, however that ends."""
        end = time.monotonic() + self._timeout
        while True:
            try:
                connection.channel().queue_declare(topology.lock_queue(self._queue), exclusive=True)
            except ChannelClosedByBroker as error:
                if error.reply_code != _RESOURCE_LOCKED_CODE or time.monotonic() > end:
                    raise
                connection.sleep(_LOCK_RETRY_SECONDS)
            else:
                return
