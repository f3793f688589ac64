"""RabbitMQQueue: a queue in RabbitMQ, in both flavours."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import pika

from ergon_framework.connectors.arrivals import Arrivals
from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    ConnectorError,
    Delivery,
    Depth,
    Listener,
    SettleResult,
    Settling,
    Unlisten,
)
from ergon_framework.connectors.codec import MAX_BYTES, Codec, describe_unread
from ergon_framework.connectors.daemons import Daemons
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.encryption import select_codec
from ergon_framework.connectors.limits import MAX_FETCH_BYTES, FetchLimits
from ergon_framework.connectors.outage import public_address
from ergon_framework.connectors.rabbitmq.address import VARIABLE, parameters
from ergon_framework.connectors.rabbitmq.examining import examined
from ergon_framework.connectors.rabbitmq.graves import Graves
from ergon_framework.connectors.rabbitmq.line import Line, leave, line_to
from ergon_framework.connectors.rabbitmq.message import Message, count_deliveries, fresh
from ergon_framework.connectors.rabbitmq.station import Station
from ergon_framework.errors import ConfigurationError
from ergon_framework.finding import Finding, Wall
from ergon_framework.redaction import learn_address
from ergon_framework.transaction import Transaction

R = TypeVar("R")

#: As long as the longest name that goes with it leaves room for: 255 bytes, less what is appended to it.
_LONGEST: Final = 230
#: Threads for the calls about dead letters, which block.
_THREADS: Final = 2


class RabbitMQQueue(Connector, AsyncConnector):
    """One quorum queue of a RabbitMQ server, made with its dead letters and delays when it is opened.

    The address is *url*, or the environment's ``ERGON_RABBITMQ__URL``. A claim holds as long as the connection, but no
    longer than the server's *consumer_timeout*, which it does not tell: give here what it is set to. Dead letters are
    kept for *dead_days*, None for ever. A server that does not answer for *timeout* seconds is taken for gone. One
    fetch loads bodies of *max_fetch_bytes* at most, and always at least one.
    """

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        codec: Codec | None = None,
        dead_days: float | None = None,
        consumer_timeout: float = 1800.0,
        timeout: float = 10.0,
        max_fetch_bytes: int = MAX_FETCH_BYTES,
    ) -> None:
        if not 0 < len(name.encode()) <= _LONGEST:
            raise ConfigurationError(f"the name of a queue has 1 to {_LONGEST} bytes, not {len(name.encode())}")
        if name.startswith("amq."):
            raise ConfigurationError(f"the name {name!r} begins with 'amq.', which the server keeps for itself")
        for words, seconds in (("timeout", timeout), ("consumer_timeout", consumer_timeout)):
            if not 0 < seconds < math.inf:
                raise ConfigurationError(f"{words} must be a finite number of seconds > 0, not {seconds!r}")
        self._name = name
        self._url = url
        self._codec = select_codec(codec)
        self._dead_days = dead_days
        self._consumer_timeout = consumer_timeout
        self._timeout = timeout
        self._limits = FetchLimits(max_fetch_bytes)
        self._lock = threading.Lock()
        self._arrivals = Arrivals()
        self._line: Line | None = None
        self._inherited: Line | None = None
        self._station: Station | None = None
        self._graves = Graves(
            name,
            self._codec,
            connect=self._parameters,
            trust=lambda: self._run(lambda station: station.trust()),
            timeout=timeout,
            days=dead_days,
            load=max_fetch_bytes,
        )
        self._threads = Daemons(f"ergon-{name}-dead", size=_THREADS)

    def __repr__(self) -> str:
        return f"RabbitMQQueue({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def server_address(self) -> str | None:
        return public_address(self._url or os.environ.get(VARIABLE))

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; whether it is durable is known once it was opened."""
        durability = None if self._line is None else self._line.durability
        return Capabilities(
            mode="queue",
            renewable=False,
            lease=None,
            release_is_free=True,
            delays=True,
            dead_letters=True,
            fenced_by="channel",
            durable=None if durability is None else durability.durable,
            max_payload=self._codec.max_bytes,
            deadline=self._consumer_timeout,
            replays_at_once=False,
        )

    @property
    def durability(self) -> str | None:
        """In words, what a power loss could cost; None before the queue was opened."""
        return None if self._line is None or self._line.durability is None else self._line.durability.words

    # -- coming and going -------------------------------------------------------------------------------

    def _address(self) -> str:
        url = self._url or os.environ.get(VARIABLE)
        if not url:
            raise ConfigurationError(
                f"the queue {self._name!r} has no server: set {VARIABLE} in the environment or give url=…"
            )
        learn_address(url)
        return url

    def _parameters(self) -> pika.ConnectionParameters:
        return parameters(self._address(), timeout=self._timeout)

    def _at(self) -> tuple[Line, Station]:
        with self._lock:
            if self._line is not None and self._line.owner != os.getpid():
                # Kept, so that nobody collects connections that are the parent's.
                self._inherited, self._line, self._station = self._line, None, None
            if self._line is None or self._station is None:
                self._line = line_to(self._address(), self._timeout)
                self._station = Station(
                    self._name,
                    self._line,
                    codec=self._codec,
                    dead_days=self._dead_days,
                    leaves_out=self._leaves_out,
                    max_bytes=self._limits.max_bytes,
                    arrived=self._arrivals.arrived,
                    lost=self._arrivals.lost,
                )
            return self._line, self._station

    def _run(self, work: Callable[[Station], Coroutine[Any, Any, R]]) -> R:
        line, station = self._at()
        return line.run(work(station))

    async def _run_async(self, work: Callable[[Station], Coroutine[Any, Any, R]], *, whole: bool = True) -> R:
        line, station = self._at()
        return await line.run_async(work(station), whole=whole)

    def open(self) -> None:
        """Connect, make the queues that are missing, and refuse those that are there but not as they must be."""
        self._run(lambda station: station.open())

    async def open_async(self) -> None:
        await self._run_async(lambda station: station.open())

    def close(self) -> None:
        """Disconnect. What is still held goes back to the queue, and has cost a delivery."""
        line, station, last = self._left()
        if line is not None and station is not None:
            with suppress(Exception):  # a server that is gone will find out by itself
                line.run(station.close(last=last))
            if last:
                line.end()

    async def close_async(self) -> None:
        line, station, last = self._left()
        if line is not None and station is not None:
            with suppress(Exception):  # as above
                await line.run_async(station.close(last=last), whole=True)
            if last:
                line.end()

    def _left(self) -> tuple[Line | None, Station | None, bool]:
        self._threads.close()
        with self._lock:
            line, station, self._line, self._station = self._line, self._station, None, None
        if line is None or line.owner != os.getpid():
            return None, None, False
        return line, station, leave(line)

    # -- fetch ------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> Unlisten:
        return self._arrivals.listen(listener)

    def limit_deliveries(self, most: int) -> None:
        self._limits.raise_deliveries(most)

    def _leaves_out(self, properties: pika.BasicProperties, size: int) -> bool:
        """Whether a body of *size* bytes is not loaded."""
        most = self._codec.max_bytes
        if most is not None and size > most:
            return True
        return size > MAX_BYTES and self._limits.exceeds(count_deliveries(properties))

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        """What is ready, the oldest first."""
        if batch_size < 1:
            return []
        line, station = self._at()
        found = station.consumer.take(batch_size)
        if not found:
            line.run(station.consumer.want(batch_size, wait))
            found = station.consumer.take(batch_size)
        return [self._delivery(message) for message in found]

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        if batch_size < 1:
            return []
        line, station = self._at()
        found = station.consumer.take(batch_size)
        if not found:
            await line.run_async(station.consumer.want(batch_size, wait))
            # Nothing is awaited from here on: whoever is cancelled has taken nothing.
            found = station.consumer.take(batch_size)
        return [self._delivery(message) for message in found]

    def _delivery(self, message: Message) -> Delivery:
        if message.unread is None and self._limits.exceeds(message.deliveries):
            # It is a dead letter, and decoding it may be what ended the processes before.
            transaction, error = describe_unread(len(message.body), message.headers, source=self._name, limit=None)
            transaction = transaction.replace(payload=message.body)
        else:
            transaction, error = message.decode(self._codec, source=self._name)
        return Delivery(transaction, message.receipt, message.deliveries, None, error)

    # -- settle -----------------------------------------------------------------------------------------

    def settle(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        return self._run(lambda station: station.settler.settle(settlings)) if settlings else []

    async def settle_async(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        return await self._run_async(lambda station: station.settler.settle(settlings)) if settlings else []

    # -- dispatch ---------------------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Hand over many. Where that fails nobody knows which of them the server has."""
        return self._run(self._sent(transactions)) if transactions else []

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return await self._run_async(self._sent(transactions)) if transactions else []

    def _sent(
        self, transactions: Sequence[Transaction]
    ) -> Callable[[Station], Coroutine[Any, Any, Sequence[Confirmation]]]:
        now, encode = time.time(), self._codec.encode
        written = [fresh(self._name, *encode(self.stamped(each)), since=now) for each in transactions]

        async def sent(station: Station) -> Sequence[Confirmation]:
            problems = await station.publish(written)
            failed = [(each.id, problem) for each, problem in zip(transactions, problems, strict=True) if problem]
            if failed:
                raise ConnectorError(
                    f"{len(failed)} of {len(written)} transactions were not taken by the queue {self._name!r}, first "
                    f"{failed[0][0]!r}: {failed[0][1]}; dispatch them again"
                )
            return [Confirmation(each.id) for each in transactions]

        return sent

    # -- what is there ----------------------------------------------------------------------------------

    def depth(self) -> Depth:
        """How much is there. What others have in flight, and delays that only others have used, it cannot see."""
        return self._run(lambda station: station.depth())

    async def depth_async(self) -> Depth:
        return await self._run_async(lambda station: station.depth())

    def examine(self, wall: Wall) -> Sequence[Finding]:  # noqa: ARG002 - the server does not tell its time
        """How the server and the queue are; queues are not made if they are not there."""
        line, _ = self._at()
        return line.run(examined(line.sends, self._name, dead_days=self._dead_days, deadline=self._consumer_timeout))

    # -- dead letters -----------------------------------------------------------------------------------

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self._graves.listed(query, after=after, limit=limit)

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return await self._in_thread(lambda: self._graves.listed(query, after=after, limit=limit))

    def replay_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return self._graves.replayed(places)

    async def replay_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._in_thread(lambda: self._graves.replayed(places))

    def discard_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return self._graves.discarded(places)

    async def discard_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._in_thread(lambda: self._graves.discarded(places))

    def replace_dead(self, place: str, transaction: Transaction) -> ReplayResult:
        return self._graves.replace(place, self.stamped(transaction))

    async def replace_dead_async(self, place: str, transaction: Transaction) -> ReplayResult:
        stamped = self.stamped(transaction)
        return await self._in_thread(lambda: self._graves.replace(place, stamped))

    async def _in_thread(self, call: Callable[[], R]) -> R:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def arrive(value: R | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)

        def job() -> None:
            value, error = None, None
            try:
                value = call()
            except Exception as raised:  # noqa: BLE001 - handed to the caller, who raises it
                error = raised
            with suppress(RuntimeError):  # the loop has closed: nobody waits there any more
                loop.call_soon_threadsafe(arrive, value, error)

        self._threads.open()
        self._threads.submit(job)
        came: R = await future
        return came
