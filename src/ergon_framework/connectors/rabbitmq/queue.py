"""RabbitMQQueue: a queue in RabbitMQ, in the sync and async variants.

QueueChannels has the parts of one queue that run on the connection thread.
"""

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

from ergon_framework._util.daemon_executor import DaemonExecutor
from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    ConnectorError,
    Delivery,
    Depth,
    Listener,
    SettlementRequest,
    SettleResult,
    Unlisten,
)
from ergon_framework.connectors.codec import MAX_BYTES, Codec, describe_unread
from ergon_framework.connectors.credentials import CredentialsSource
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.encryption import select_codec
from ergon_framework.connectors.limits import MAX_FETCH_BYTES, FetchLimits
from ergon_framework.connectors.login import BrokerLogin, find_source
from ergon_framework.connectors.outage import public_address
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.connection import (
    URL_VARIABLE,
    ConnectionThread,
    acquire_connection_thread,
    connection_parameters,
    has_priorities,
    release_connection_thread,
)
from ergon_framework.connectors.rabbitmq.consumer import Consumer
from ergon_framework.connectors.rabbitmq.dead_letters import DeadLetterQueue
from ergon_framework.connectors.rabbitmq.fields import BodyRule
from ergon_framework.connectors.rabbitmq.inspect import diagnose
from ergon_framework.connectors.rabbitmq.message import (
    DEFAULT_PRIORITY,
    MAX_PRIORITY,
    Message,
    OutgoingMessage,
    count_deliveries,
    new_message,
)
from ergon_framework.connectors.rabbitmq.publisher import DurablePublisher
from ergon_framework.connectors.rabbitmq.settle import RabbitMQSettler
from ergon_framework.connectors.rabbitmq.topology import TopologyDeclarer
from ergon_framework.connectors.wakeup import WakeupHub
from ergon_framework.diagnostics import Diagnostic, WallClock
from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.redaction import learn_address
from ergon_framework.transaction import Transaction


class QueueChannels:
    """Consumer, publisher and settler of one queue."""

    def __init__(
        self,
        queue: str,
        thread: ConnectionThread,
        *,
        codec: Codec,
        dead_days: float | None,
        declare: bool,
        body_rule: BodyRule,
        max_bytes: int,
        on_arrival: Callable[[], None],
        on_lost: Callable[[Sequence[Any]], None],
    ) -> None:
        self._queue = queue
        self._connection_thread = thread
        self._declarer = TopologyDeclarer(queue, thread.publish_connection, dead_days=dead_days, declare=declare)
        self._publisher = DurablePublisher(queue, thread.publish_connection, self._declarer)
        self.consumer = Consumer(
            queue,
            thread.consume_connection,
            prepare=self.open,
            body_rule=body_rule,
            max_bytes=max_bytes,
            on_arrival=on_arrival,
            on_lost=on_lost,
            release=self._release,
            delay_again=self._delay_again,
        )
        self.settler = RabbitMQSettler(queue, self.consumer, self._publisher, codec=codec)

    async def open(self) -> None:
        """Declare the queues, and log once how durable the server's confirmations are."""
        await self._declarer.declare_all()
        self._connection_thread.log_durability(self._connection_thread.publish_connection.server)

    async def publish(self, messages: Sequence[OutgoingMessage]) -> list[str]:
        await self._declarer.ensure_queue(topology.dead_letter_queue(self._queue))
        return await self._publisher.send(messages)

    async def bind_durably(self) -> None:
        """Bind the queue itself, so that it accepts messages of other publishers."""
        await self._declarer.bind_durably([self._queue])

    async def depth(self) -> Depth:
        """Return the server's counts plus the messages that were delivered here but not handed out."""
        ready = await self._declarer.count_ready(self._queue)
        delayed = sum([await self._declarer.count_ready(name) for name in self._declarer.delay_queues])
        dead = await self._declarer.count_ready(topology.dead_letter_queue(self._queue))
        waiting = list(self.consumer.waiting)
        ready_since = min(
            (message.ready_since for message in waiting), default=self.consumer.newest_ready_since if ready else None
        )
        return Depth(
            ready=ready + len(waiting),
            delayed=delayed,
            in_flight=self.consumer.in_flight,
            dead=dead,
            oldest_age=None if ready_since is None else max(0.0, time.time() - ready_since),
        )

    async def _release(self, messages: Sequence[Message]) -> None:
        await self.settler.release(messages)

    async def _delay_again(self, messages: Sequence[Message]) -> Sequence[Message]:
        return await self.settler.delay_again(messages)

    async def has_priorities(self) -> bool | None:
        """Return whether the server has priorities, after connecting to it; None if that is unknown."""
        await self._declarer.ensure_queue(topology.dead_letter_queue(self._queue))
        return has_priorities(self._connection_thread.publish_connection.server)

    async def close(self, *, is_last: bool) -> None:
        """Release messages that were never handed out, and close the channels."""
        with suppress(ErgonError):
            await self.consumer.release_waiting()
        await self.consumer.close()
        self._declarer.close()
        self._publisher.close()
        if is_last:
            await self._connection_thread.close()


# -- queue ------------------------------------------------------------------------------------------

R = TypeVar("R")

#: Longest queue name: the 255 bytes of AMQP, less the longest suffix.
_MAX_NAME_BYTES: Final = 230
#: Threads for the blocking calls about dead letters.
_DEAD_LETTER_THREADS: Final = 2


class RabbitMQQueue(Connector, AsyncConnector):
    """One quorum queue of a RabbitMQ server, declared with its dead-letter and delay queues when it is opened.

    The address is *url*, or the environment's ``ERGON_RABBITMQ__URL``. A claim lasts as long as the connection, but no
    longer than the server's ``consumer_timeout``, which the server does not report: pass its value as
    *consumer_timeout*. Dead letters are kept for *dead_days*, None for no limit. A server that does not answer for
    *timeout* seconds counts as lost. One fetch loads bodies of *max_fetch_bytes* at most, and always at least one.

    *priority* returns the priority of a transaction, by default its own; quorum queues have priorities from RabbitMQ
    4.0 on.
    With *declare* false, the queue must exist and may be of any type; it is neither created nor checked.
    *credentials* is called for every new connection, and replaces user and password of the address.
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
        priority: Callable[[Transaction], int] | None = None,
        declare: bool = True,
        credentials: CredentialsSource | None = None,
    ) -> None:
        if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
            raise ConfigurationError(
                f"queue name {name!r:.40} must have 1 to {_MAX_NAME_BYTES} bytes, not {len(name.encode())}"
            )
        if name.startswith("amq."):
            raise ConfigurationError(f"the name {name!r} begins with 'amq.', which is reserved for the server")
        for option, seconds in (("timeout", timeout), ("consumer_timeout", consumer_timeout)):
            if not 0 < seconds < math.inf:
                raise ConfigurationError(f"{option} must be a finite number of seconds > 0, not {seconds!r}")
        self._name = name
        self._url = url
        self._codec = select_codec(codec)
        self._dead_days = dead_days
        self._consumer_timeout = consumer_timeout
        self._timeout = timeout
        self._limits = FetchLimits(max_fetch_bytes)
        self._priority = priority
        self._declare = declare
        self._credentials = credentials
        self._lock = threading.Lock()
        self._arrivals = WakeupHub()
        self._connection_thread: ConnectionThread | None = None
        self._inherited: ConnectionThread | None = None
        self._channels: QueueChannels | None = None
        self._dead_letters = DeadLetterQueue(
            name,
            self._codec,
            connect=self._build_parameters,
            bind_durably=lambda: self._run(lambda channels: channels.bind_durably()),
            timeout=timeout,
            dead_days=dead_days,
            max_bytes=max_fetch_bytes,
        )
        self._executor = DaemonExecutor(f"ergon-{name}-dead", size=_DEAD_LETTER_THREADS)

    def __repr__(self) -> str:
        return f"RabbitMQQueue({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def server_address(self) -> str | None:
        return public_address(self._url or os.environ.get(URL_VARIABLE))

    @property
    def server_host(self) -> str | None:
        """Host and port of the server of the newest connection; None before the first one."""
        return None if self._connection_thread is None else self._connection_thread.consume_connection.host

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the server; durability and priority are known once the queue was opened."""
        thread = self._connection_thread
        durability = None if thread is None or not self._declare else thread.durability
        return Capabilities(
            mode="queue",
            renewable=False,
            lease=None,
            release_uncounted=True,
            delays=True,
            dead_letters=True,
            fenced_by="channel",
            durable=None if durability is None else durability.durable,
            priority=None if thread is None else has_priorities(thread.publish_connection.server),
            max_payload=self._codec.max_bytes,
            deadline=self._consumer_timeout,
            confirms_settlements=False,
            atomic_replay=False,
        )

    @property
    def durability(self) -> str | None:
        """A description of what a power loss could lose; None before the queue was opened."""
        if not self._declare:
            return f"durability is unknown: the queue {self._name!r} was not declared by this client"
        return (
            None
            if self._connection_thread is None or self._connection_thread.durability is None
            else self._connection_thread.durability.message
        )

    # -- opening and closing ----------------------------------------------------------------------------

    def _require_url(self) -> str:
        url = self._url or os.environ.get(URL_VARIABLE)
        if not url:
            raise ConfigurationError(f"queue {self._name!r} has no server address: set {URL_VARIABLE} or pass url=…")
        learn_address(url)
        return url

    def _build_parameters(self) -> Sequence[pika.ConnectionParameters]:
        credentials = BrokerLogin(self._find_credentials()).read()
        return connection_parameters(self._require_url(), credentials, timeout=self._timeout)

    def _find_credentials(self) -> CredentialsSource | None:
        return self._credentials or find_source("rabbitmq", self._url)

    def _ensure_channels(self) -> tuple[ConnectionThread, QueueChannels]:
        with self._lock:
            if self._connection_thread is not None and self._connection_thread.owner_pid != os.getpid():
                # Kept, so that the parent's connections are not garbage-collected.
                self._inherited, self._connection_thread, self._channels = self._connection_thread, None, None
            if self._connection_thread is None or self._channels is None:
                self._connection_thread = acquire_connection_thread(
                    self._require_url(), self._timeout, self._find_credentials()
                )
                self._channels = QueueChannels(
                    self._name,
                    self._connection_thread,
                    codec=self._codec,
                    dead_days=self._dead_days,
                    declare=self._declare,
                    body_rule=self._omits_body,
                    max_bytes=self._limits.max_bytes,
                    on_arrival=self._arrivals.notify,
                    on_lost=self._arrivals.notify_lost,
                )
            return self._connection_thread, self._channels

    def _run(self, work: Callable[[QueueChannels], Coroutine[Any, Any, R]]) -> R:
        thread, channels = self._ensure_channels()
        return thread.run(work(channels))

    async def _run_async(self, work: Callable[[QueueChannels], Coroutine[Any, Any, R]], *, whole: bool = True) -> R:
        thread, channels = self._ensure_channels()
        return await thread.run_async(work(channels), whole=whole)

    def open(self) -> None:
        """Connect, declare missing queues, and reject existing ones whose arguments differ."""
        self._run(lambda channels: channels.open())

    async def open_async(self) -> None:
        await self._run_async(lambda channels: channels.open())

    def close(self) -> None:
        """Disconnect. Claims that are still held are requeued, and their delivery is counted."""
        thread, channels, is_last = self._detach()
        if thread is not None and channels is not None:
            with suppress(Exception):  # an unavailable server detects the close on its own
                thread.run(channels.close(is_last=is_last))
            if is_last:
                thread.stop()

    async def close_async(self) -> None:
        thread, channels, is_last = self._detach()
        if thread is not None and channels is not None:
            with suppress(Exception):  # as above
                await thread.run_async(channels.close(is_last=is_last), whole=True)
            if is_last:
                thread.stop()

    def _detach(self) -> tuple[ConnectionThread | None, QueueChannels | None, bool]:
        self._executor.close()
        with self._lock:
            thread, channels, self._connection_thread, self._channels = (
                self._connection_thread,
                self._channels,
                None,
                None,
            )
        if thread is None or thread.owner_pid != os.getpid():
            return None, None, False
        return thread, channels, release_connection_thread(thread)

    # -- fetch ------------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> Unlisten:
        return self._arrivals.listen(listener)

    def limit_deliveries(self, max_deliveries: int) -> None:
        self._limits.raise_max_deliveries(max_deliveries)

    def _omits_body(self, properties: pika.BasicProperties, size: int) -> bool:
        """Return whether a body of *size* bytes is not loaded."""
        max_bytes = self._codec.max_bytes
        if not self._declare:  # the server dead-letters a message without its body, which takes arguments of the queue
            return False
        if max_bytes is not None and size > max_bytes:
            return True
        return size > MAX_BYTES and self._limits.exceeds(count_deliveries(properties))

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        """Return ready transactions, the oldest first."""
        if batch_size < 1:
            return []
        thread, channels = self._ensure_channels()
        messages = channels.consumer.pop(batch_size)
        if not messages:
            thread.run(channels.consumer.wait_for_messages(batch_size, wait))
            messages = channels.consumer.pop(batch_size)
        return [self._to_delivery(message) for message in messages]

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        if batch_size < 1:
            return []
        thread, channels = self._ensure_channels()
        messages = channels.consumer.pop(batch_size)
        if not messages:
            await thread.run_async(channels.consumer.wait_for_messages(batch_size, wait))
            # No await from here on, so that a cancelled caller has claimed nothing.
            messages = channels.consumer.pop(batch_size)
        return [self._to_delivery(message) for message in messages]

    def _to_delivery(self, message: Message) -> Delivery:
        if message.unread is None and self._limits.exceeds(message.deliveries):
            # It will be dead-lettered, and decoding it may be what ended the earlier processes.
            transaction, error = describe_unread(len(message.body), message.headers, source=self._name, limit=None)
            transaction = transaction.replace(payload=message.body)
        else:
            transaction, error = message.decode(self._codec, source=self._name)
        return Delivery(transaction, message.receipt, message.deliveries, None, error)

    # -- settle -----------------------------------------------------------------------------------------

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        return self._run(lambda channels: channels.settler.settle(requests)) if requests else []

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        return await self._run_async(lambda channels: channels.settler.settle(requests)) if requests else []

    # -- dispatch ---------------------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Publish transactions. After an error it is unknown which of them the server has."""
        return self._run(self._prepare_dispatch(transactions)) if transactions else []

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return await self._run_async(self._prepare_dispatch(transactions)) if transactions else []

    def _prepare_dispatch(
        self, transactions: Sequence[Transaction]
    ) -> Callable[[QueueChannels], Coroutine[Any, Any, Sequence[Confirmation]]]:
        now = time.time()
        messages = [self._to_message(self.prepare(each), now) for each in transactions]

        urgent = next((each for each in transactions if each.priority and self._priority is None), None)

        async def send(channels: QueueChannels) -> Sequence[Confirmation]:
            if urgent is not None and await channels.has_priorities() is False:
                raise self._no_priority_error(urgent)
            problems = await channels.publish(messages)
            failed = [(each.id, problem) for each, problem in zip(transactions, problems, strict=True) if problem]
            if failed:
                raise ConnectorError(
                    f"{len(failed)} of {len(messages)} transactions were rejected by the queue {self._name!r}, first "
                    f"{failed[0][0]!r}: {failed[0][1]}; dispatch them again"
                )
            return [Confirmation(each.id) for each in transactions]

        return send

    def _to_message(self, transaction: Transaction, now: float) -> OutgoingMessage:
        priority = transaction.priority if self._priority is None else int(self._priority(transaction))
        if not -DEFAULT_PRIORITY <= priority <= MAX_PRIORITY - DEFAULT_PRIORITY:
            limits = f"between -{DEFAULT_PRIORITY} and {MAX_PRIORITY - DEFAULT_PRIORITY}"
            raise ConfigurationError(f"a priority of RabbitMQ must be {limits}, not {priority}")
        queue, delay = self._name, transaction.compute_delay(now)
        if delay > 0:
            queue = topology.delay_queue(queue, topology.delay_part_ms(delay))
        return new_message(queue, *self._codec.encode(transaction), ready_since=now + delay, priority=priority)

    # -- state ------------------------------------------------------------------------------------------

    def depth(self) -> Depth:
        """Return the depth. Other clients' claims, and delay queues that only they have used, are not included."""
        return self._run(lambda channels: channels.depth())

    async def depth_async(self) -> Depth:
        return await self._run_async(lambda channels: channels.depth())

    def diagnose(self, wall: WallClock) -> Sequence[Diagnostic]:  # noqa: ARG002 - the server does not report its time
        """Diagnose the server and the queue; missing queues are not declared."""
        thread, _ = self._ensure_channels()
        return thread.run(
            diagnose(
                thread.publish_connection,
                self._name,
                dead_days=self._dead_days,
                declare=self._declare,
                deadline=self._consumer_timeout,
            )
        )

    # -- dead letters -----------------------------------------------------------------------------------

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self._dead_letters.list_dead(query, after=after, limit=limit)

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return await self._run_in_thread(lambda: self._dead_letters.list_dead(query, after=after, limit=limit))

    def replay_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return self._dead_letters.replay(handles)

    async def replay_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._run_in_thread(lambda: self._dead_letters.replay(handles))

    def discard_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return self._dead_letters.discard(handles)

    async def discard_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._run_in_thread(lambda: self._dead_letters.discard(handles))

    def replace_dead(self, handle: str, transaction: Transaction) -> ReplayResult:
        return self._dead_letters.replace(handle, self._prepare_replacement(transaction))

    async def replace_dead_async(self, handle: str, transaction: Transaction) -> ReplayResult:
        prepared = self._prepare_replacement(transaction)
        return await self._run_in_thread(lambda: self._dead_letters.replace(handle, prepared))

    async def _run_in_thread(self, call: Callable[[], R]) -> R:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def complete(value: R | None, error: BaseException | None) -> None:
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
            except Exception as raised:  # noqa: BLE001 - handed to the caller, which raises it
                error = raised
            with suppress(RuntimeError):  # the loop has closed: no caller waits there any more
                loop.call_soon_threadsafe(complete, value, error)

        self._executor.open()
        self._executor.submit(job)
        result: R = await future
        return result
