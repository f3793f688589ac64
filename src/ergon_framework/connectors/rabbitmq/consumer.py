"""Consumer: what the server has handed to this client, and how much more it may hand out.

The server pushes, so it is told how much it may push: as much as was ever asked for at once. What came and was not
asked for yet waits here; a crash would cost it a delivery that it never had. For a message that is new that is no harm,
but once something came back that might be the message that kills processes, nothing may wait here any more: from then
on messages are got one by one, exactly as many as are asked for, until the queue is empty or what comes has been new
for a while.

The one that came back is kept, though, and is the next to be taken once all others have gone back. Given back too, it
would be pushed to the next client that has nothing to do, and from there to another, and nobody would ever be handed
it: each finds the queue empty while it is with the others, and has messages pushed again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import count
from math import ceil
from typing import Any, Final

from pika.compat import long
from pika.exceptions import AMQPError
from pika.spec import Basic

from ergon_framework.connectors.rabbitmq.fields import BodyRule
from ergon_framework.connectors.rabbitmq.line import Channel, Connection, Refused
from ergon_framework.connectors.rabbitmq.message import Message, Receipt
from ergon_framework.connectors.rabbitmq.sharing import Shared, heeded
from ergon_framework.errors import ConnectionLost

#: Seconds that a push may take that the server has announced.
_PUSH: Final = 0.25
#: Seconds that it may take before consumers are given up, which costs whatever is still on its way to them.
_LAST_PUSH: Final = 2.0
#: Seconds that one who leaves waits for what was asked for.
_LEAVING: Final = 1.0
#: Seconds between two looks of one who waits while nothing is pushed.
_PAUSE: Final = 0.05
#: Seconds after which what nobody asks for goes back: whoever stopped asking must not keep it from others.
_STALE: Final = 1.0
#: How many are got at most for one who asks: if the first of them has to run alone, the others go back again.
_AT_ONCE: Final = 8
#: How many new ones in a row it takes to trust again, once something came back.
_TRUST: Final = 50
#: Acks after which the server may hold back others; its own limit is 32 unless somebody changed it.
_ON_THEIR_WAY: Final = 24
#: What a consumer says that is to be given nothing.
_NOTHING: Final = {"x-credit": {"credit": long(0), "drain": False}}
#: Of all clients of this process together, so that no two deliveries have the same receipt.
_numbers = count(1)


class Consumer:
    """The claims of one client on one queue; all but ``take`` is called on the line's own thread."""

    def __init__(
        self,
        queue: str,
        connection: Connection,
        *,
        prepare: Callable[[], Awaitable[None]],
        leaves_out: BodyRule,
        max_bytes: int,
        arrived: Callable[[], None],
        lost: Callable[[Sequence[Receipt]], None],
        give_back: Callable[[Sequence[Message]], Awaitable[None]],
    ) -> None:
        self._queue = queue
        self._connection = connection
        self._prepare = prepare
        self._leaves_out = leaves_out
        #: Bytes of bodies that one fetch may bring, and that the server may have pushed.
        self._max_bytes = max_bytes
        #: Bytes of bodies that were pushed or got and are not settled.
        self._held_bytes = 0
        self._arrived = arrived
        self._lost = lost
        self._give_back = give_back
        self._opening = asyncio.Lock()
        self._getting = asyncio.Lock()
        self._channel: Channel | None = None
        #: Nothing is handed out any more; nothing is open any more.
        self._leaves = False
        self._ended = False
        #: The number of the channel that is open; 0 when none is.
        self.number = 0
        self._consumers: list[str] = []
        #: How much the server may have handed out at a time.
        self._room = 0
        #: Whether messages are got one by one, and how many new ones are to come before they are pushed.
        self._careful = True
        self._doubts = 1
        #: What was pushed and is to go back, and who sees to that.
        self._surplus: list[Message] = []
        #: What was pushed although it had come back: the next to be taken, when all that was pushed with it is gone.
        self._suspect: Message | None = None
        self._calming: asyncio.Task[None] | None = None
        #: What came and was not taken yet.
        self.waiting: deque[Message] = deque()
        #: In the order of their tags: all that the server has not been told the end of.
        self._unacked: dict[int, Message] = {}
        #: Those of them that were got; the rest was pushed, and takes room.
        self._got: set[int] = set()
        #: Those of them that are being settled.
        self._leaving: set[int] = set()
        self._empty: Callable[[], None] = _nothing
        self._bell: asyncio.Future[None] | None = None
        #: How many are ready, asked behind everything that was written.
        self.ready = Shared(self._count)
        #: Returns when the acks that were written are in the queue's own log.
        self.written = Shared(self._ask_log)
        #: The consumer that is given nothing and asks the log, if it is there.
        self._asker = ""
        #: Messages that were acked since the log was asked.
        self._acks = 0
        self._looking: asyncio.TimerHandle | None = None
        #: Since when the last one that came had been ready.
        self.newest: float | None = None

    # -- taking -------------------------------------------------------------------------------------

    def take(self, most: int) -> list[Message]:
        """At most so many of what came; from any thread. What came back before is taken alone."""
        found: list[Message] = []
        size = 0
        with suppress(IndexError):
            while len(found) < most and not self._leaves:
                message = self.waiting.popleft()
                size += len(message.body)
                if found and (message.deliveries > 1 or size > self._max_bytes):
                    self.waiting.appendleft(message)
                    break
                found.append(message)
                if message.deliveries > 1:
                    break
        return found

    @property
    def handed_out(self) -> int:
        return len(self._unacked) - len(self.waiting)

    async def want(self, most: int, seconds: float) -> None:
        """Return when something can be taken, or there is nothing for *seconds*; ConnectionLost if nobody can say."""
        end = time.monotonic() + seconds
        while not self.waiting:
            await self._opened()
            if self._careful:
                # Whole, although its caller may be cancelled: what was asked for comes, and must find its place.
                await asyncio.shield(heeded(self._get(most)))
            if not self._careful:
                self._make_room(self.handed_out + most - len(self._got))
            left = end - time.monotonic()
            if self.waiting or (self._careful and left <= 0):
                return
            if self._careful:
                await asyncio.sleep(min(left, _PAUSE))
                continue
            bell = self._ring()
            # The answer also says that the line is there: an empty queue and a dead line look the same otherwise.
            ready = heeded(self.ready())
            await asyncio.wait((bell, ready), return_when=asyncio.FIRST_COMPLETED)
            if self.waiting:
                return
            if await ready and self.handed_out - len(self._got) < self._room and not self.waiting:
                await asyncio.wait((bell,), timeout=_PUSH)
            left = end - time.monotonic()
            if left <= 0 or self.waiting:
                return
            await asyncio.wait((bell,), timeout=left)

    def _ring(self) -> asyncio.Future[None]:
        """A future that is done when something has come or the channel is gone."""
        if self._bell is None or self._bell.done():
            self._bell = asyncio.get_running_loop().create_future()
        return self._bell

    def _make_room(self, wanted: int) -> None:
        if wanted <= self._room or self._channel is None:
            return
        # Beside those there are: a consumer's room cannot be changed, and giving one up costs what is on its way to it.
        channel, self._room, more = self._channel, wanted, wanted - self._room
        try:
            channel.raw.basic_qos(prefetch_count=more)
            self._consumers.append(channel.raw.basic_consume(self._queue, self._on_message(self.number)))
        except AMQPError as error:
            raise ConnectionLost("the connection to RabbitMQ is gone") from error

    def _on_message(self, number: int) -> Callable[[Any, Any, Any, bytes], None]:
        def on_message(_channel: Any, method: Any, properties: Any, body: bytes) -> None:
            if number == self.number:
                message = Message(Receipt(number, method.delivery_tag), body, properties)
                self._pushed(message)

        return on_message

    def _pushed(self, message: Message) -> None:
        self._note(message)
        if self._careful:  # nobody has asked for it
            self._surplus.append(message)
            self._be_careful()
        elif message.deliveries > 1:
            self._suspect = message
            self._be_careful()
        elif self._held_bytes > self._max_bytes and len(self._unacked) > 1:
            self._surplus.append(message)
            self._be_careful()
        else:
            self._offer(message)

    def _note(self, message: Message) -> None:
        self._unacked[message.receipt.tag] = message
        self._held_bytes += len(message.body)
        # A large one is likely to be followed by others, and pushed ones cannot be told to stop at a number of bytes.
        doubted = message.deliveries > 1 or len(message.body) * _AT_ONCE > self._max_bytes
        self._doubts = _TRUST if doubted else self._doubts - 1

    def _offer(self, message: Message) -> None:
        """It can be taken."""
        self.newest = message.since
        first = not self.waiting
        self.waiting.append(message)
        if first:
            self._announce()

    def _announce(self) -> None:
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)
        self._arrived()
        self._look_later()

    def _look_later(self) -> None:
        if self._looking is None:
            loop = asyncio.get_running_loop()
            self._looking = loop.call_later(_STALE, self._look)

    def _look(self) -> None:
        """What has waited for too long goes back, and nothing more is pushed until somebody asks."""
        self._looking = None
        if not self.waiting:
            return
        if time.time() - self.waiting[0].seen >= _STALE:
            self._put_aside()
            self._be_careful()
        else:
            self._look_later()

    def _be_careful(self) -> None:
        """Have nothing pushed any more, and give back what waits: it comes again when it is asked for."""
        if not self._careful:
            self._careful = True
            self._put_aside()
        if not self._is_calming:
            self._calming = heeded(self._calm())

    def _put_aside(self) -> None:
        """What waits is to go back; from any thread some of it may be taken at the same time."""
        with suppress(IndexError):
            while True:
                self._surplus.append(self.waiting.popleft())

    @property
    def _is_calming(self) -> bool:
        return self._calming is not None and not self._calming.done()

    async def _calm(self) -> None:
        end = time.monotonic() + _LAST_PUSH
        # The server counts a delivery for whatever is on its way when it is told to stop. So it is told when it has
        # nothing to push, or may not push any more.
        while len(self._unacked) - len(self._got) < self._room and time.monotonic() < end:
            if not await self.ready():
                break
        consumers, self._consumers, self._room = self._consumers, [], 0
        if self._channel is not None and self._channel.is_open:
            for tag in consumers:
                # Not basic_cancel: the client would reject what still comes.
                self._channel.raw._send_method(Basic.Cancel(tag, nowait=True))  # noqa: SLF001 - there is no other way
            await self.ready()
        while self._surplus:
            surplus, self._surplus = self._surplus, []
            await self._give_back(surplus)
        suspect, self._suspect = self._suspect, None
        if suspect is not None:
            self._offer(suspect)

    async def _get(self, most: int) -> None:
        """Get at most so many; as soon as one is new, have the rest pushed."""
        async with self._getting:
            # Whoever is handed out next may be the one that ends this process; nobody else is to pay for it.
            await self._calmed()
            while self._careful and not self._leaves and self._may_get(most):
                channel = await self._opened()
                async with self._connection.answering("get a message"):
                    try:
                        got = await channel.ask(self._getter(channel))
                    except Refused as error:
                        raise _refused(error) from error
                if not got:
                    # What is held and came back before may come back again at once.
                    held = any(message.deliveries > 1 for message in self._unacked.values())
                    self._doubts = _TRUST if held else 0
                # Nothing is pushed anew while what was pushed goes back.
                self._careful = self._doubts > 0 or self._is_calming
                if not got:
                    return

    def _may_get(self, most: int) -> bool:
        """Whether one more fits beside those that wait; what came back before is handed out alone."""
        waiting = list(self.waiting)
        if len(waiting) >= min(most, _AT_ONCE) or any(message.deliveries > 1 for message in waiting):
            return False
        return sum(len(message.body) for message in waiting) < self._max_bytes

    def _getter(self, channel: Channel) -> Callable[[Callable[[Any], None]], None]:
        """Asks for one, and tells whether it came."""
        number = self.number

        def get(told: Callable[[Any], None]) -> None:
            def came(_channel: Any, method: Any, properties: Any, body: bytes) -> None:
                # Here and not where it is awaited: what is behind it may come before that, and tags must stay in order.
                if number == self.number:
                    self._got.add(method.delivery_tag)
                    message = Message(Receipt(number, method.delivery_tag), body, properties)
                    self._note(message)
                    self._offer(message)
                told(True)  # noqa: FBT003 - a callback has no names

            self._empty = lambda: told(False)  # noqa: FBT003 - as above
            channel.raw.basic_get(self._queue, came)

        return get

    # -- the channel ----------------------------------------------------------------------------------

    async def _opened(self) -> Channel:
        async with self._opening:
            if self._ended:
                raise ConnectionLost(f"the queue {self._queue!r} was closed during the call")
            if self._channel is None or not self._channel.is_open:
                await self._prepare()
                channel = await self._connection.channel()
                # Whether or not the one before has said that it is closed: tags begin anew, and old ones among them
                # would be out of order, so that an ack up to one of them could end what nobody has handled.
                self._closed(self.number)
                self.number = number = next(_numbers)
                self._channel, self._careful, self._doubts, self._room, self._consumers = channel, True, 1, 0, []
                self._asker, self._acks = "", 0
                channel.leave_out(self._leaves_out)
                channel.when_closed(lambda _: self._closed(number))
                channel.raw.add_on_cancel_callback(lambda _: self._cancelled(channel))
                channel.raw.add_callback(lambda _: self._empty(), [Basic.GetEmpty], one_shot=False)
            return self._channel

    def _cancelled(self, channel: Channel) -> None:
        """The server pushes no more: the queue was deleted, or another node leads it now."""
        channel.lose(ConnectionLost("RabbitMQ has cancelled the consumer: the queue is gone, or has another leader"))
        channel.close()

    def _closed(self, number: int) -> None:
        """Whatever was handed out over that channel is the server's again."""
        if number != self.number:
            return
        gone = [message.receipt for message in self._unacked.values()]
        self.number, self._room, self._careful = 0, 0, True
        self.waiting.clear()
        self._surplus.clear()
        self._suspect = None
        self._unacked.clear()
        self._held_bytes = 0
        self._got.clear()
        self._leaving.clear()
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)
        if gone:
            self._lost(gone)
            self._arrived()

    async def empty(self) -> None:
        """Hand out nothing any more, have nothing pushed, and give back what nobody took."""
        self._leaves = True
        # Whoever was asking may have gone, but what was asked for still comes, and would cost a delivery.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVING), self._getting:
                pass
        await self._calmed()
        if self._channel is not None and self._channel.is_open and (self.waiting or self._consumers):
            self._put_aside()
            self._be_careful()
        await self._calmed()

    async def _calmed(self) -> None:
        while self._calming is not None and not self._calming.done():
            await asyncio.wait((self._calming,))

    def hold(self, messages: Sequence[Message]) -> None:
        """They could not be given back, and wait as before."""
        held = [message for message in messages if message.receipt.channel == self.number]
        self.stay(held)
        self.waiting.extendleft(reversed(held))
        if held:
            self._announce()

    async def close(self) -> None:
        """Give the channel up, and with it every claim."""
        channel, self._channel, self._ended = self._channel, None, True
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        if channel is not None:
            channel.lose(ConnectionLost("the queue was closed"))
            channel.close()

    # -- settling -------------------------------------------------------------------------------------

    def leave(self, receipt: Any) -> Message | None:
        """The message of *receipt*, which nobody else may settle from now on; None if it is not held."""
        if not isinstance(receipt, Receipt) or receipt.channel != self.number or receipt.tag in self._leaving:
            return None
        message = self._unacked.get(receipt.tag)
        if message is not None:
            self._leaving.add(receipt.tag)
        return message

    def stay(self, messages: Iterable[Message]) -> None:
        """They could not be settled, and are held as before."""
        for message in messages:
            if message.receipt.channel == self.number:
                self._leaving.discard(message.receipt.tag)

    def ack(self, messages: Sequence[Message]) -> bool:
        """Tell the server that it may forget them; False if their channel is gone, and so are they."""
        channel = self._channel
        if not messages:
            return True
        if channel is None or not channel.is_open or any(each.receipt.channel != self.number for each in messages):
            return False
        tags = {message.receipt.tag for message in messages}
        last = 0
        for tag in self._unacked:
            if tag not in tags:
                break
            last = tag
            # One ack up to a tag is one entry of the log for each message.
            self._acks += 1
        try:
            if last:
                channel.raw.basic_ack(last, multiple=True)
            for tag in tags:
                if tag > last:
                    channel.raw.basic_ack(tag)
                    self._acks += 1
                self._forget(tag)
        except AMQPError:
            return False
        if self._careful and not self._unacked:
            self._arrived()  # nobody is told of what comes while messages are got one by one
        return True

    def reject(self, messages: Sequence[Message], *, requeue: bool) -> bool:
        """Have the server dead-letter them, or put them back, which costs a delivery; False as above."""
        channel = self._channel
        if not messages:
            return True
        if channel is None or not channel.is_open or any(each.receipt.channel != self.number for each in messages):
            return False
        try:
            for message in messages:
                channel.raw.basic_reject(message.receipt.tag, requeue=requeue)
                self._acks += 1
                self._forget(message.receipt.tag)
        except AMQPError:
            return False
        return True

    def _forget(self, tag: int) -> None:
        self._held_bytes -= len(self._unacked.pop(tag).body)
        self._leaving.discard(tag)
        self._got.discard(tag)

    async def _count(self) -> int:
        channel = self._living()
        async with self._connection.answering("tell how much is ready"):
            try:
                answer = await channel.ask(
                    lambda told: channel.raw.queue_declare(self._queue, passive=True, callback=told)
                )
            except Refused as error:
                raise _refused(error) from error
        return int(answer.method.message_count)

    async def _ask_log(self) -> None:
        """Acks have no answer, and a count is answered before they are in the queue's log, where a kill loses them.

        A consumer that comes or goes is an entry of that log behind theirs, and is answered when it is kept. While many
        entries are on their way the server holds back the rest, so each part of them takes one question more.
        """
        channel = self._living()
        acks, self._acks = self._acks, 0
        async with self._connection.answering("keep what was acked"):
            try:
                for _ in range(1 + ceil(acks / _ON_THEIR_WAY)):
                    await channel.ask(self._enter(channel))
            except Refused as error:
                raise _refused(error) from error

    def _enter(self, channel: Channel) -> Callable[[Callable[[Any], None]], None]:
        """Has the consumer that is given nothing come, or go."""

        def enter(told: Callable[[Any], None]) -> None:
            if self._asker:
                asker, self._asker = self._asker, ""
                channel.raw.basic_cancel(asker, told)
            else:
                come = self._on_message(self.number)
                self._asker = channel.raw.basic_consume(self._queue, come, arguments=_NOTHING, callback=told)

        return enter

    def _living(self) -> Channel:
        channel = self._channel
        if channel is None or channel.reason is not None:
            raise ConnectionLost("the connection to RabbitMQ is gone")
        return channel


def _refused(error: Refused) -> ConnectionLost:
    return ConnectionLost(f"RabbitMQ closed the channel: {error}")


def _nothing() -> None: ...
