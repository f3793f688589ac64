"""Consume from one queue: the deliveries that the server has sent to this client, and the limits for further ones.

The server pushes, limited by a prefetch count: the largest number that was ever requested together. Deliveries that
were pushed but not requested yet wait here; a crash counts a delivery for them although no handler saw them. That is
harmless for new messages. Once a redelivered message has come, which might kill processes, no other message may wait
here: from then on messages are fetched one by one with basic.get, exactly as many as are requested, until the queue is
empty or the messages have been new for a while.

The redelivered message itself is kept, and is the next to be handed out once all others have been released. If it were
released too, it would be pushed to the next idle client, and from there to another, and no worker would ever receive
it: each client finds the queue empty while another holds the message, and starts pushing again.

AsyncCoalescer sends one request to the server for all callers that need it at the same time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Final, Generic, TypeVar

from pika.exceptions import AMQPError
from pika.spec import Basic

from ergon_framework.connectors.rabbitmq.connection import Channel, ChannelClosedError, Connection
from ergon_framework.connectors.rabbitmq.fields import BodyRule
from ergon_framework.connectors.rabbitmq.message import Message, RabbitMQReceipt
from ergon_framework.errors import ConnectionLostError

T = TypeVar("T")


class AsyncCoalescer(Generic[T]):
    """A request that is sent after all earlier writes: callers that arrive while one waits share the next one."""

    def __init__(self, request: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._request = request
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        if self._next is None:
            self._next = create_background_task(self._run_after(self._running))
        return await asyncio.shield(self._next)

    async def _run_after(self, previous: asyncio.Task[T] | None) -> T:
        if previous is not None:
            await asyncio.wait((previous,))
        self._running, self._next = self._next, None
        return await self._request()


def create_background_task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Run *work* as a task whose failure is consumed, because possibly no caller awaits it."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_consume_exception)
    return task


def _consume_exception(done: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that asyncio does not log it."""
    if not done.cancelled():
        done.exception()


#: Seconds that an announced push may take.
_PUSH_TIMEOUT_SECONDS: Final = 0.25
#: Seconds to wait for pushes before consumers are cancelled, which counts a delivery for messages in transit.
_DRAIN_TIMEOUT_SECONDS: Final = 2.0
#: Seconds that closing waits for requested messages.
_CLOSE_TIMEOUT_SECONDS: Final = 1.0
#: Seconds between two polls of a waiting fetch while nothing is pushed.
_POLL_INTERVAL_SECONDS: Final = 0.05
#: Seconds after which unrequested messages are released, so that a client that stopped fetching does not block them.
_STALE_SECONDS: Final = 1.0
#: Most messages fetched for one request: if the first of them has to run alone, the others are released again.
_MAX_PULLED: Final = 8
#: New messages in a row before pushing starts again after a redelivered message.
_NEW_BEFORE_PUSH: Final = 50
#: Seconds before an early message that could not be delayed is delayed again.
_DELAY_RETRY_SECONDS: Final = 1.0
#: One counter for all clients of this process, so that no two deliveries have the same receipt.
_channel_numbers = count(1)


class Consumer:
    """The claims of one client on one queue; all methods but ``pop`` run on the connection thread."""

    def __init__(
        self,
        queue: str,
        connection: Connection,
        *,
        prepare: Callable[[], Awaitable[None]],
        body_rule: BodyRule,
        max_bytes: int,
        on_arrival: Callable[[], None],
        on_lost: Callable[[Sequence[RabbitMQReceipt]], None],
        release: Callable[[Sequence[Message]], Awaitable[None]],
        delay_again: Callable[[Sequence[Message]], Awaitable[Sequence[Message]]],
    ) -> None:
        self._queue = queue
        self._connection = connection
        self._prepare = prepare
        self._body_rule = body_rule
        #: Bytes of bodies that one fetch may bring, and that the server may have pushed.
        self._max_bytes = max_bytes
        #: Bytes of bodies that were delivered and are not settled.
        self._held_bytes = 0
        self._on_arrival = on_arrival
        self._on_lost = on_lost
        self._release = release
        self._delay_again = delay_again
        #: Messages that came before their time, the task that delays them again, and the tags of all those that are not
        #: acked yet.
        self._early: list[Message] = []
        self._early_task: asyncio.Task[None] | None = None
        self._early_tags: set[int] = set()
        self._open_lock = asyncio.Lock()
        self._pull_lock = asyncio.Lock()
        #: One get at a time: the client has one callback for its answer.
        self._get_lock = asyncio.Lock()
        self._channel: Channel | None = None
        #: Nothing is handed out any more; nothing is open any more.
        self._is_closing = False
        self._is_closed = False
        #: The number of the open channel; 0 if there is none.
        self.channel_number = 0
        self._consumer_tags: list[str] = []
        #: The sum of the prefetch counts.
        self._prefetch = 0
        #: Whether messages are fetched one by one, and how many new ones must come before pushing starts.
        self._is_pulling = True
        self._pulls_before_push = 1
        #: Pushed messages that have to be released, and the task that releases them.
        self._surplus: list[Message] = []
        #: A redelivered message that was pushed: handed out next, when all that was pushed with it is released.
        self._suspect: Message | None = None
        self._drain_task: asyncio.Task[None] | None = None
        #: Delivered and not yet handed out.
        self.waiting: deque[Message] = deque()
        #: All messages that the server does not know to be settled, in the order of their tags.
        self._unacked: dict[int, Message] = {}
        #: Those that were fetched one by one; the others were pushed and count towards the prefetch limit.
        self._pulled: set[int] = set()
        #: Those that are being settled.
        self._settling: set[int] = set()
        self._on_get_empty: Callable[[], None] = _do_nothing
        self._arrival: asyncio.Future[None] | None = None
        #: The number of ready messages, or 0 although there are some if the server is busy. The answer follows all that
        #: the server sent before, and shows that it has received all that was written before.
        self.count_ready = AsyncCoalescer(self._request_count)
        self._stale_timer: asyncio.TimerHandle | None = None
        #: The time since which the latest message was ready.
        self.newest_ready_since: float | None = None

    # -- handing out --------------------------------------------------------------------------------

    def pop(self, limit: int) -> list[Message]:
        """Return at most *limit* waiting messages; from any thread. A redelivered message is handed out alone."""
        messages: list[Message] = []
        size = 0
        with suppress(IndexError):
            while len(messages) < limit and not self._is_closing:
                message = self.waiting.popleft()
                size += len(message.body)
                if messages and (message.deliveries > 1 or size > self._max_bytes):
                    self.waiting.appendleft(message)
                    break
                messages.append(message)
                if message.deliveries > 1:
                    break
        return messages

    @property
    def in_flight(self) -> int:
        return len(self._unacked) - len(self.waiting) - len(self._early_tags)

    async def wait_for_messages(self, limit: int, seconds: float) -> None:
        """Return when a message waits, or none came for *seconds*; raise ConnectionLostError if that is unknown."""
        end = time.monotonic() + seconds
        while not self.waiting:
            await self._ensure_channel()
            if self._is_pulling:
                # Shielded: requested messages arrive even if the caller is cancelled, and must be accounted for.
                await asyncio.shield(create_background_task(self._pull(limit)))
            if not self._is_pulling:
                self._grow_prefetch(self.in_flight + limit - len(self._pulled))
            remaining = end - time.monotonic()
            if self.waiting or (self._is_pulling and remaining <= 0):
                return
            if self._is_pulling:
                await asyncio.sleep(min(remaining, _POLL_INTERVAL_SECONDS))
                continue
            arrival = self._get_arrival()
            # The response also shows that the connection is alive: an empty queue and a dead connection look alike.
            ready = create_background_task(self.count_ready())
            await asyncio.wait((arrival, ready), return_when=asyncio.FIRST_COMPLETED)
            if self.waiting:
                return
            if await ready and self.in_flight - len(self._pulled) < self._prefetch and not self.waiting:
                await asyncio.wait((arrival,), timeout=_PUSH_TIMEOUT_SECONDS)
            remaining = end - time.monotonic()
            if remaining > 0 and not self.waiting:
                await asyncio.wait((arrival,), timeout=remaining)
            if not self.waiting and time.monotonic() >= end and not await self._get_when_idle():
                return

    async def _get_when_idle(self) -> bool:
        """Get a message although the server pushes; return False if the queue is really empty.

        The count of ready messages does not tell: a server that is busy, or has just recovered, reports 0 instead of
        its count. A get waits for the queue.
        """
        async with self._pull_lock:
            if self._is_pulling or self.waiting:
                return True
            if await asyncio.shield(create_background_task(self._get(self._accept_while_pushing))):
                return True
        # Messages that were pushed before the queue was found empty arrive before this answer.
        await self.count_ready()
        return bool(self.waiting)

    def _get_arrival(self) -> asyncio.Future[None]:
        """Return a future that completes when a message arrives or the channel closes."""
        if self._arrival is None or self._arrival.done():
            self._arrival = asyncio.get_running_loop().create_future()
        return self._arrival

    def _grow_prefetch(self, prefetch: int) -> None:
        if prefetch <= self._prefetch or self._channel is None:
            return
        # An additional consumer: a prefetch count is fixed, and cancelling counts a delivery for messages in transit.
        channel, self._prefetch, more = self._channel, prefetch, prefetch - self._prefetch
        try:
            channel.raw.basic_qos(prefetch_count=more)
            self._consumer_tags.append(channel.raw.basic_consume(self._queue, self._on_message(self.channel_number)))
        except AMQPError as error:
            raise ConnectionLostError("connection to RabbitMQ was lost") from error

    def _on_message(self, number: int) -> Callable[[Any, Any, Any, bytes], None]:
        def on_message(_channel: Any, method: Any, properties: Any, body: bytes) -> None:
            if number == self.channel_number:
                receipt = RabbitMQReceipt(number, method.delivery_tag)
                self._on_push(Message(receipt, body, properties, redelivered=method.redelivered))

        return on_message

    def _on_push(self, message: Message) -> None:
        self._track(message)
        self._accept_while_pushing(message)

    def _accept_while_pushing(self, message: Message) -> None:
        """Offer *message*, or stop pushing because of it."""
        if self._is_early(message):
            self._return_early(message)
        elif self._is_pulling or message.is_uncounted:
            # It was not requested, or must be published again with its count.
            self._surplus.append(message)
            self._stop_pushing()
        elif message.deliveries > 1:
            self._suspect = message
            self._stop_pushing()
        elif self._held_bytes > self._max_bytes and len(self._unacked) > 1:
            self._surplus.append(message)
            self._stop_pushing()
        else:
            self._offer(message)

    def _accept_while_pulling(self, message: Message) -> None:
        if self._is_early(message):
            self._return_early(message)
        elif message.is_uncounted:
            self._surplus.append(message)
            self._stop_pushing()
        else:
            self._offer(message)

    def _is_early(self, message: Message) -> bool:
        """Return whether *message* is not due yet: a delay queue may hold it for the first part of its delay only.

        A message without its body cannot be published again.
        """
        not_before = message.not_before
        return not_before is not None and not_before > time.time() and message.unread is None

    def _return_early(self, message: Message) -> None:
        self._early.append(message)
        self._early_tags.add(message.receipt.tag)
        if self._early_task is None or self._early_task.done():
            self._early_task = create_background_task(self._delay_early())

    async def _delay_early(self) -> None:
        """Delay early messages again, together; repeat what the server does not store."""
        while self._early:
            await asyncio.sleep(0)  # those that arrive together are published together
            early, self._early = self._early, []
            failed = [
                message for message in await self._delay_again(early) if message.receipt.channel == self.channel_number
            ]
            if failed:
                self._early += failed
                await asyncio.sleep(_DELAY_RETRY_SECONDS)

    def _track(self, message: Message) -> None:
        self._unacked[message.receipt.tag] = message
        self._held_bytes += len(message.body)
        # A large message is likely to be followed by others, and pushing cannot be limited by bytes.
        is_suspicious = message.deliveries > 1 or len(message.body) * _MAX_PULLED > self._max_bytes
        self._pulls_before_push = _NEW_BEFORE_PUSH if is_suspicious else self._pulls_before_push - 1

    def _offer(self, message: Message) -> None:
        """Make *message* available to fetches."""
        self.newest_ready_since = message.ready_since
        first = not self.waiting
        self.waiting.append(message)
        if first:
            self._notify_arrival()

    def _notify_arrival(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        self._on_arrival()
        self._schedule_stale_check()

    def _schedule_stale_check(self) -> None:
        if self._stale_timer is None:
            loop = asyncio.get_running_loop()
            self._stale_timer = loop.call_later(_STALE_SECONDS, self._release_stale)

    def _release_stale(self) -> None:
        """Release messages that waited too long, and stop pushing until the next request."""
        self._stale_timer = None
        if not self.waiting:
            return
        if time.time() - self.waiting[0].seen >= _STALE_SECONDS:
            self._withdraw_waiting()
            self._stop_pushing()
        else:
            self._schedule_stale_check()

    def _stop_pushing(self) -> None:
        """Stop pushing and release waiting messages: they are redelivered on request."""
        if not self._is_pulling:
            self._is_pulling = True
            self._withdraw_waiting()
        if not self._is_draining:
            self._drain_task = create_background_task(self._drain_pushed())

    def _withdraw_waiting(self) -> None:
        """Move waiting messages to those to be released; another thread may hand out some at the same time."""
        with suppress(IndexError):
            while True:
                self._surplus.append(self.waiting.popleft())

    @property
    def _is_draining(self) -> bool:
        return self._drain_task is not None and not self._drain_task.done()

    async def _drain_pushed(self) -> None:
        end = time.monotonic() + _DRAIN_TIMEOUT_SECONDS
        # A message in transit to a cancelled consumer returns to the queue, which counts a delivery. So the cancel is
        # sent when the server must not push more, or has nothing to push.
        while len(self._unacked) - len(self._pulled) < self._prefetch and time.monotonic() < end:
            # A count of 0 may be wrong, as in _get_when_idle.
            if not await self.count_ready() and not await self._get(self._surplus.append):
                await self.count_ready()
                break
        tags, self._consumer_tags, self._prefetch = self._consumer_tags, [], 0
        if self._channel is not None and self._channel.is_open:
            for tag in tags:
                await self._cancel_consumer(self._channel, tag)
        while self._surplus:
            surplus, self._surplus = self._surplus, []
            await self._release(surplus)
        suspect, self._suspect = self._suspect, None
        if suspect is not None:
            self._offer(suspect)

    async def _pull(self, limit: int) -> None:
        """Fetch at most *limit* messages; as soon as one is new, start pushing."""
        async with self._pull_lock:
            # The next message may kill this process, which must not count a delivery for the others.
            await self._wait_for_drain()
            while self._is_pulling and not self._is_closing and self._can_pull(limit):
                await self._ensure_channel()
                has_message = await self._get(self._accept_while_pulling)
                if not has_message:
                    # A redelivered message that is held here may be redelivered again soon.
                    holds_suspect = any(message.deliveries > 1 for message in self._unacked.values())
                    self._pulls_before_push = _NEW_BEFORE_PUSH if holds_suspect else 0
                # Pushing does not restart while pushed messages are being released.
                self._is_pulling = self._pulls_before_push > 0 or self._is_draining
                if not has_message:
                    return

    def _can_pull(self, limit: int) -> bool:
        """Return whether one more fits with those that wait; a redelivered message is handed out alone."""
        waiting = list(self.waiting)
        if len(waiting) >= min(limit, _MAX_PULLED) or any(message.deliveries > 1 for message in waiting):
            return False
        return sum(len(message.body) for message in waiting) < self._max_bytes

    async def _get(self, accept: Callable[[Message], None]) -> bool:
        """Get one message and pass it to *accept*; return whether there was one."""
        channel = self._require_channel()
        async with self._get_lock, self._connection.timeout("get a message"):
            try:
                return bool(await channel.request(self._build_get(channel, accept)))
            except ChannelClosedError as error:
                raise _to_connection_lost(error) from error

    def _build_get(
        self, channel: Channel, accept: Callable[[Message], None]
    ) -> Callable[[Callable[[Any], None]], None]:
        """Return a request that gets one message and reports whether there was one."""
        number = self.channel_number

        def get(callback: Callable[[Any], None]) -> None:
            def on_get(_channel: Any, method: Any, properties: Any, body: bytes) -> None:
                # Here and not where it is awaited: the following message may arrive first, and tags must stay in order.
                if number == self.channel_number:
                    self._pulled.add(method.delivery_tag)
                    receipt = RabbitMQReceipt(number, method.delivery_tag)
                    message = Message(receipt, body, properties, redelivered=method.redelivered)
                    self._track(message)
                    accept(message)
                callback(True)  # noqa: FBT003 - callbacks have positional parameters

            self._on_get_empty = lambda: callback(False)  # noqa: FBT003 - as above
            channel.raw.basic_get(self._queue, on_get)

        return get

    # -- the channel ----------------------------------------------------------------------------------

    async def _ensure_channel(self) -> Channel:
        async with self._open_lock:
            if self._is_closed:
                raise ConnectionLostError(f"the queue {self._queue!r} was closed during the call")
            if self._channel is None or not self._channel.is_open:
                await self._prepare()
                channel = await self._connection.channel()
                # Even if the previous channel did not report that it is closed: tags restart, and with old ones among
                # them out of order a multiple ack could settle messages that were not handled.
                self._on_close(self.channel_number)
                self.channel_number = number = next(_channel_numbers)
                self._channel, self._is_pulling, self._pulls_before_push, self._prefetch, self._consumer_tags = (
                    channel,
                    True,
                    1,
                    0,
                    [],
                )
                channel.leave_out(self._body_rule)
                channel.add_close_callback(lambda _: self._on_close(number))
                channel.raw.add_on_cancel_callback(lambda _: self._on_cancel(channel))
                channel.raw.add_callback(lambda _: self._on_get_empty(), [Basic.GetEmpty], one_shot=False)
            return self._channel

    def _on_cancel(self, channel: Channel) -> None:
        """Close the channel: the server cancelled the consumer because the queue was deleted or its leader moved."""
        channel.fail(ConnectionLostError("RabbitMQ cancelled the consumer: the queue was deleted, or its leader moved"))
        channel.close()

    def _on_close(self, number: int) -> None:
        """Report the claims of the closed channel as lost: the server releases its messages."""
        if number != self.channel_number:
            return
        receipts = [message.receipt for message in self._unacked.values()]
        self.channel_number, self._prefetch, self._is_pulling = 0, 0, True
        self.waiting.clear()
        self._surplus.clear()
        self._suspect = None
        self._early.clear()
        self._early_tags.clear()
        self._unacked.clear()
        self._held_bytes = 0
        self._pulled.clear()
        self._settling.clear()
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        if receipts:
            self._on_lost(receipts)
            self._on_arrival()

    async def release_waiting(self) -> None:
        """Stop handing out and pushing, and release messages that were not handed out."""
        self._is_closing = True
        # The fetch may have been cancelled, but its messages still arrive, and would count a delivery.
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS), self._pull_lock:
                pass
        await self._wait_for_drain()
        if self._channel is not None and self._channel.is_open and (self.waiting or self._consumer_tags):
            self._withdraw_waiting()
            self._stop_pushing()
        await self._wait_for_drain()
        if self._early_task is not None and not self._early_task.done():
            await asyncio.wait((self._early_task,), timeout=_CLOSE_TIMEOUT_SECONDS)

    async def _wait_for_drain(self) -> None:
        while self._drain_task is not None and not self._drain_task.done():
            await asyncio.wait((self._drain_task,))

    def retain(self, messages: Sequence[Message]) -> None:
        """Put messages back that could not be released; they wait as before."""
        held = [message for message in messages if message.receipt.channel == self.channel_number]
        self.cancel_settle(held)
        self.waiting.extendleft(reversed(held))
        if held:
            self._notify_arrival()

    async def close(self) -> None:
        """Close the channel, and with it every claim."""
        channel, self._channel, self._is_closed = self._channel, None, True
        if self._stale_timer is not None:
            self._stale_timer.cancel()
            self._stale_timer = None
        if channel is not None:
            channel.fail(ConnectionLostError("the queue was closed"))
            channel.close()

    # -- settling -------------------------------------------------------------------------------------

    def begin_settle(self, receipt: Any) -> Message | None:
        """Return the message of *receipt* and lock it against other settlements; None if it is not held."""
        if (
            not isinstance(receipt, RabbitMQReceipt)
            or receipt.channel != self.channel_number
            or receipt.tag in self._settling
        ):
            return None
        message = self._unacked.get(receipt.tag)
        if message is not None:
            self._settling.add(receipt.tag)
        return message

    def cancel_settle(self, messages: Iterable[Message]) -> None:
        """Keep messages that could not be settled; they are held as before."""
        for message in messages:
            if message.receipt.channel == self.channel_number:
                self._settling.discard(message.receipt.tag)

    def ack(self, messages: Sequence[Message]) -> bool:
        """Ack messages; return False if their channel is closed, so that their claims are lost."""
        channel = self._channel
        if not messages:
            return True
        if (
            channel is None
            or not channel.is_open
            or any(each.receipt.channel != self.channel_number for each in messages)
        ):
            return False
        tags = {message.receipt.tag for message in messages}
        last = 0
        for tag in self._unacked:
            if tag not in tags:
                break
            last = tag
        try:
            if last:
                channel.raw.basic_ack(last, multiple=True)
            for tag in tags:
                if tag > last:
                    channel.raw.basic_ack(tag)
                self._untrack(tag)
        except AMQPError:
            return False
        if self._is_pulling and not self._unacked:
            self._on_arrival()  # while messages are fetched one by one, arrivals send no signal
        return True

    def reject(self, messages: Sequence[Message], *, requeue: bool) -> bool:
        """Dead-letter messages on the server, or requeue them, which counts a delivery; return as ``ack`` does."""
        channel = self._channel
        if not messages:
            return True
        if (
            channel is None
            or not channel.is_open
            or any(each.receipt.channel != self.channel_number for each in messages)
        ):
            return False
        try:
            for message in messages:
                channel.raw.basic_reject(message.receipt.tag, requeue=requeue)
                self._untrack(message.receipt.tag)
        except AMQPError:
            return False
        return True

    def _untrack(self, tag: int) -> None:
        self._held_bytes -= len(self._unacked.pop(tag).body)
        self._settling.discard(tag)
        self._pulled.discard(tag)
        self._early_tags.discard(tag)

    async def _cancel_consumer(self, channel: Channel, tag: str) -> None:
        async with self._connection.timeout("cancel a consumer"):
            try:
                await channel.request(lambda callback: channel.raw.basic_cancel(tag, callback))
            except ChannelClosedError as error:
                raise _to_connection_lost(error) from error

    async def _request_count(self) -> int:
        channel = self._require_channel()
        async with self._connection.timeout("count the ready messages"):
            try:
                answer = await channel.request(
                    lambda callback: channel.raw.queue_declare(self._queue, passive=True, callback=callback)
                )
            except ChannelClosedError as error:
                raise _to_connection_lost(error) from error
        return int(answer.method.message_count)

    def _require_channel(self) -> Channel:
        channel = self._channel
        if channel is None or channel.reason is not None:
            raise ConnectionLostError("connection to RabbitMQ was lost")
        return channel


def _to_connection_lost(error: ChannelClosedError) -> ConnectionLostError:
    return ConnectionLostError(f"RabbitMQ closed the channel: {error}")


def _do_nothing() -> None: ...
