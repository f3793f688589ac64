"""RedisQueue: a queue in a Redis stream, as a sync and an async connector.

All workers of a queue are consumers of one group of its stream. A fetch claims entries, which is the exclusive right to
process them for a lease; a settlement (ack, release, deferral or dead letter) is valid only while the claim exists.
Every step of a claim or a settlement is a Lua script (``redis.scripts``), so that the server does all of it or nothing.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from redis.exceptions import OutOfMemoryError, ResponseError

from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    Delivery,
    Depth,
    Listener,
    SettlementRequest,
    SettleResult,
    Unlisten,
)
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.credentials import CredentialsSource
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.encryption import select_codec
from ergon_framework.connectors.limits import MAX_FETCH_BYTES, FetchLimits
from ergon_framework.connectors.login import find_source
from ergon_framework.connectors.outage import public_address
from ergon_framework.connectors.redis import dead_letters, scripts
from ergon_framework.connectors.redis.address import ServerNode
from ergon_framework.connectors.redis.claims import GROUP, ClaimManager, RedisReceipt
from ergon_framework.connectors.redis.client import ServerClient, acquire_client, release_client
from ergon_framework.connectors.redis.connection import MEMORY_FULL, Connection, Operation, Pipeline
from ergon_framework.connectors.redis.durability import RedisDurability
from ergon_framework.connectors.redis.inspect import diagnose
from ergon_framework.connectors.redis.messages import Messages, queue_keys
from ergon_framework.connectors.redis.notify import NotificationListener
from ergon_framework.connectors.redis.pool import ClusterMovedError
from ergon_framework.connectors.redis.settle import RedisSettler
from ergon_framework.connectors.wakeup import WakeupHub
from ergon_framework.diagnostics import Diagnostic, WallClock
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.redaction import learn_address
from ergon_framework.transaction import Transaction

R = TypeVar("R")

#: The environment variable with the address of the server, read if the program gives none.
URL_VARIABLE: Final = "ERGON_REDIS__URL"
#: The longest interval between two polls of a waiting fetch, with or without the notification listener.
_POLL_INTERVAL_SECONDS: Final = 0.25
#: Maximum number of messages that are dispatched in one step.
_MAX_DISPATCH_BATCH: Final = 1_000
#: Maximum number of delayed messages that are dispatched in one step, and of their bytes: the server is blocked
#: meanwhile.
_MAX_DELAY_BATCH: Final = 200
_MAX_DELAY_BYTES: Final = 4 * 1024 * 1024
#: Redirections that a call follows before it fails because the cluster is moving the queue.
_MAX_REDIRECTIONS: Final = 5
_DAY_SECONDS: Final = 86_400.0
#: Seconds between two clean-ups, and the idle time after which a consumer without claims is removed.
_CLEANUP_INTERVAL_SECONDS: Final = 300.0
_CONSUMER_IDLE_SECONDS: Final = 3_600.0
#: Timeout for a cancelled fetch to release the messages that it claimed.
_RELEASE_TIMEOUT_SECONDS: Final = 1.0


class RedisQueue(Connector, AsyncConnector):
    """One queue of a Redis server, 7 or newer, of a cluster of them, or of a primary that sentinels watch.

    The address is *url*, or ``ERGON_REDIS__URL`` of the environment. Claims last for *lease* seconds
    and are renewed one by one; all workers of a queue have the same lease. *stream* is the key of a
    stream that a third-party producer writes, and *body* the field that holds the body there. Dead
    letters are kept for *dead_days*, without limit if None. One fetch loads messages of
    *max_fetch_bytes* at most, and always at least one. *credentials* returns the user and the
    password, and is called before every new connection.
    """

    def __init__(
        self,
        name: str,
        *,
        url: str | None = None,
        lease: float = 30.0,
        codec: Codec | None = None,
        stream: str | None = None,
        body: str = "body",
        dead_days: float | None = None,
        max_fetch_bytes: int = MAX_FETCH_BYTES,
        credentials: CredentialsSource | None = None,
    ) -> None:
        if not 0 < lease < math.inf:
            raise ConfigurationError(f"a lease must be a finite number of seconds > 0, not {lease!r}")
        self._name = name
        self._keys = queue_keys(name, stream)
        self._url = url
        self._credentials = credentials
        self._lease = lease
        self._codec = select_codec(codec)
        self._messages = Messages(self._codec, name=name, body_field=body)
        self._dead_days = dead_days
        self._limits = FetchLimits(max_fetch_bytes)
        self._lock = threading.Lock()
        self._arrivals = WakeupHub()
        self._client: ServerClient | None = None
        self._inherited: ServerClient | None = None
        #: The cluster node that has the queue, as far as known; None for the server that the address names.
        self._node: ServerNode | None = None
        self._durability: RedisDurability | None = None
        #: The primary that was checked, of those that sentinels have named.
        self._checked_primary: ServerNode | None = None
        self._listener_count = 0
        self._last_cleanup = time.monotonic()
        self._create_consumer()

    def _create_consumer(self) -> None:
        """Create a separate consumer, in this process and in every child that is forked from it."""
        self._owner_pid = os.getpid()
        consumer = f"{socket.gethostname()[:60]}:{self._owner_pid}:{secrets.token_hex(6)}"
        self._claims = ClaimManager(
            self._keys, self._messages, consumer=consumer, lease=self._lease, limits=self._limits
        )
        self._settler = RedisSettler(self._keys, self._claims, codec=self._codec)
        self._listener = self._new_listener()

    def _new_listener(self) -> NotificationListener:
        return NotificationListener(self._connect, (self._keys.stream, self._keys.bell), self._arrivals.notify)

    def __repr__(self) -> str:
        return f"RedisQueue({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def server_address(self) -> str | None:
        return public_address(self._url or os.environ.get(URL_VARIABLE))

    @property
    def server_host(self) -> str | None:
        """Host and port of the server that has the queue, as far as known; None before the first connection."""
        client = self._client
        return None if client is None else client.pool(self._node).host

    @property
    def write_refusal(self) -> str | None:
        """Why the server rejects writes; at its memory limit it still lets workers fetch and ack."""
        return MEMORY_FULL if self._claims.memory_full else None

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the queue; the durability is known once the queue was opened."""
        return Capabilities(
            mode="queue",
            renewable=True,
            lease=self._lease,
            release_uncounted=True,
            delays=True,
            dead_letters=True,
            fenced_by="token",
            durable=None if self._durability is None else self._durability.durable,
            max_payload=self._codec.max_bytes,
        )

    @property
    def durability(self) -> str | None:
        """What a power loss could lose, as text; None before the queue was opened."""
        return None if self._durability is None else self._durability.message

    # -- opening and closing ------------------------------------------------------------------------

    def _get_client(self) -> ServerClient:
        with self._lock:
            if self._owner_pid != os.getpid():
                # A reference is kept, so that the parent's connections are not garbage-collected here.
                self._inherited, self._client, self._durability = self._client, None, None
                self._create_consumer()
                for _ in range(self._listener_count):
                    self._listener.enable()
            if self._client is None:
                credentials = self._credentials or find_source("redis", self._url)
                self._client = acquire_client(self._require_url(), credentials)
            return self._client

    def _require_url(self) -> str:
        url = self._url or os.environ.get(URL_VARIABLE)
        if not url:
            raise ConfigurationError(f"queue {self._name!r} has no server address: set {URL_VARIABLE} or pass url=…")
        learn_address(url)
        return url

    def _ensure_open(self, client: ServerClient) -> Operation[None]:
        """Create the consumer group and check the server, the first time and after a failover to another one."""
        primary = client.pool(self._node).primary
        if self._durability is None or primary != self._checked_primary:
            yield from self._create_group()
            self._durability = yield from client.check_durability(self._node)
            self._checked_primary = primary

    def _create_group(self) -> Operation[None]:
        try:
            yield ("XGROUP", "CREATE", self._keys.stream, GROUP, "0", "MKSTREAM")
        except ResponseError as error:
            if str(error).startswith("BUSYGROUP"):
                return
            # At its memory limit the server rejects the command before it looks for the group. Workers that start then
            # must be able to fetch and ack: only that frees memory.
            if not isinstance(error, OutOfMemoryError) or not (yield from self._has_group()):
                raise

    def _has_group(self) -> Operation[bool]:
        try:
            groups = yield ("XINFO", "GROUPS", self._keys.stream)
        except ResponseError:  # there is no stream
            return False
        return any(GROUP.encode() in group for group in groups)

    def _run(self, work: Callable[[ServerClient], Operation[R]]) -> R:
        for _ in range(_MAX_REDIRECTIONS):
            client, node = self._get_client(), self._node
            try:
                return client.pool(node).run(self._run_with_group(work, client))
            except ClusterMovedError as redirection:
                self._node = redirection.node
            except ConnectionLostError:
                self._node = client.follow_redirect(node)
                raise
        raise self._redirection_error()

    async def _run_async(self, work: Callable[[ServerClient], Operation[R]]) -> R:
        for _ in range(_MAX_REDIRECTIONS):
            client, node = self._get_client(), self._node
            try:
                return await client.pool(node).run_async(self._run_with_group(work, client))
            except ClusterMovedError as redirection:
                self._node = redirection.node
            except ConnectionLostError:
                self._node = client.follow_redirect(node)
                raise
        raise self._redirection_error()

    def _run_with_group(self, work: Callable[[ServerClient], Operation[R]], client: ServerClient) -> Operation[R]:
        """Run *work*, and once more where the server has lost the group, as after a flush."""
        try:
            return (yield from work(client))
        except ResponseError as error:
            if "NOGROUP" not in str(error) and "no such key" not in str(error):
                raise
        yield from self._create_group()
        return (yield from work(client))

    def _redirection_error(self) -> ConnectionLostError:
        return ConnectionLostError(f"the cluster redirects requests for the queue {self._name!r} without end")

    def _connect(self) -> Connection:
        """Open a connection for the notification listener; fail if the queue was closed meanwhile."""
        client = self._client
        if client is None:
            raise ConnectionLostError(f"the queue {self._name!r} is closed")
        return client.pool(self._node).connect()

    def open(self) -> None:
        """Connect; reject a server that would evict the queue, and log the durability of its settings."""
        self._run(self._ensure_open)

    async def open_async(self) -> None:
        await self._run_async(self._ensure_open)

    def close(self) -> None:
        """Disconnect. Unsettled messages are redelivered when their lease ends."""
        self.interrupt()
        with suppress(Exception):  # without an answer, the claims expire and the idle consumer is removed later
            if self._client is not None and self._owner_pid == os.getpid():
                self._run(self._remove_consumer)
        client, is_last = self._detach()
        if client is not None and is_last:
            client.close()

    async def close_async(self) -> None:
        self.interrupt()
        with suppress(Exception):  # as in close
            if self._client is not None and self._owner_pid == os.getpid():
                await self._run_async(self._remove_consumer)
        client, is_last = self._detach()
        if client is not None and is_last:
            await client.close_async()

    def _remove_consumer(self, _: ServerClient) -> Operation[None]:
        if self._durability is not None:
            yield from scripts.REMOVE_CONSUMER.run((self._keys.stream,), GROUP, self._claims.consumer)

    def _detach(self) -> tuple[ServerClient | None, bool]:
        """Detach from the client; return it, and whether this was its last user in this process."""
        with self._lock:
            client, self._client, self._durability = self._client, None, None
            self._listener.close()
            self._listener = self._new_listener()
            for _ in range(self._listener_count):
                self._listener.enable()
        return client, client is not None and release_client(client)

    def interrupt(self) -> None:
        """Make every waiting fetch return immediately."""
        self._arrivals.interrupt()

    # -- wake-ups -------------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> Unlisten:
        unlisten = self._arrivals.listen(listener)
        with self._lock:
            self._listener_count += 1
            self._listener.enable()

        def stop_listening() -> None:
            unlisten()
            with self._lock:
                self._listener_count -= 1
                self._listener.disable()

        return stop_listening

    @contextmanager
    def _enable_listener(self) -> Iterator[None]:
        """Enable the notification listener while a fetch waits."""
        listener = self._listener
        listener.enable()
        try:
            yield
        finally:
            listener.disable()

    # -- fetch ------------------------------------------------------------------------------------------

    def limit_deliveries(self, max_deliveries: int) -> None:
        self._limits.raise_max_deliveries(max_deliveries)

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        """Return ready transactions: redelivered ones first, then by age."""
        if batch_size < 1:
            return []
        if wait <= 0:
            return self._notify_lost(self._fetch_once(batch_size))
        end = time.monotonic() + wait
        with self._enable_listener(), self._arrivals.waiter() as waiter:
            while True:
                waiter.clear()
                deliveries = self._notify_lost(self._fetch_once(batch_size))
                remaining = end - time.monotonic()
                if deliveries or remaining <= 0 or waiter.is_interrupted:
                    return deliveries
                waiter.wait(min(remaining, _POLL_INTERVAL_SECONDS))

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        if batch_size < 1:
            return []
        if wait <= 0:
            return self._notify_lost(await self._fetch_once_async(batch_size))
        end = time.monotonic() + wait
        with self._enable_listener(), self._arrivals.waiter_async() as waiter:
            while True:
                waiter.clear()
                deliveries = self._notify_lost(await self._fetch_once_async(batch_size))
                remaining = end - time.monotonic()
                if deliveries or remaining <= 0 or waiter.is_interrupted:
                    return deliveries
                await waiter.wait(min(remaining, _POLL_INTERVAL_SECONDS))

    def _fetch_once(self, count: int) -> tuple[list[Delivery], list[RedisReceipt]]:
        self._get_client()
        with self._claims.track_fetch():
            return self._run(lambda client: self._claim(client, count))

    async def _fetch_once_async(self, count: int) -> tuple[list[Delivery], list[RedisReceipt]]:
        self._get_client()
        try:
            with self._claims.track_fetch():
                return await self._run_async(lambda client: self._claim(client, count))
        except asyncio.CancelledError:
            # The caller that cancels does not handle what was claimed meanwhile; other workers do.
            with suppress(Exception):
                async with asyncio.timeout(_RELEASE_TIMEOUT_SECONDS):
                    await self._run_async(lambda _: self._release_unconfirmed())
            raise

    def _claim(self, client: ServerClient, count: int) -> Operation[tuple[list[Delivery], list[RedisReceipt]]]:
        yield from self._ensure_open(client)
        yield from self._release_unconfirmed()
        yield from self._clean_up_if_due()
        deliveries, lost, state = yield from self._claims.claim(count, wants_wakeup=self._listener.enabled)
        if state is not None:
            self._listener.watch_from(state)
        return deliveries, lost

    def _notify_lost(self, fetched: tuple[list[Delivery], list[RedisReceipt]]) -> list[Delivery]:
        deliveries, lost = fetched
        if lost:
            self._arrivals.notify_lost(lost)
        return deliveries

    def _release_unconfirmed(self) -> Operation[None]:
        """Release the messages of fetches whose answer never arrived."""
        unknown = yield from self._claims.find_unknown()
        if unknown:
            yield from self._settler.settle(unknown)

    def _clean_up_if_due(self) -> Operation[None]:
        """Remove idle consumers and expired dead letters, at an interval."""
        if time.monotonic() < self._last_cleanup + _CLEANUP_INTERVAL_SECONDS:
            return
        self._last_cleanup = time.monotonic()
        yield from self._clean_up()

    def _clean_up(self) -> Operation[None]:
        idle = round(max(_CONSUMER_IDLE_SECONDS, 10 * self._lease) * 1000)
        yield from scripts.CLEAN_UP.run((self._keys.stream,), GROUP, idle)
        if self._dead_days is not None:
            oldest = max(0, round((time.time() - self._dead_days * _DAY_SECONDS) * 1000))
            yield ("XTRIM", self._keys.dead, "MINID", oldest)

    # -- settle and renew -------------------------------------------------------------------------------

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        if not requests:
            return []
        with self._mark_unknown_on_error(requests):
            return self._notify_ready(self._run(lambda client: self._settle(client, requests)))

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        if not requests:
            return []
        with self._mark_unknown_on_error(requests):
            return self._notify_ready(await self._run_async(lambda client: self._settle(client, requests)))

    @contextmanager
    def _mark_unknown_on_error(self, requests: Sequence[SettlementRequest]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._settler.mark_unknown(requests)
            raise

    def _settle(
        self, client: ServerClient, requests: Sequence[SettlementRequest]
    ) -> Operation[tuple[list[SettleResult], bool]]:
        yield from self._ensure_open(client)
        return (yield from self._settler.settle(requests))

    def _notify_ready(self, settled: tuple[list[SettleResult], bool]) -> list[SettleResult]:
        results, ready = settled
        if ready:
            self._arrivals.notify()
        return results

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return self._run(lambda client: self._extend(client, deliveries)) if deliveries else []

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return await self._run_async(lambda client: self._extend(client, deliveries)) if deliveries else []

    def _extend(self, client: ServerClient, deliveries: Sequence[Delivery]) -> Operation[list[float | None]]:
        yield from self._ensure_open(client)
        return (yield from self._settler.extend(deliveries, self._lease))

    # -- dispatch ---------------------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Add all to the stream, in steps of up to a thousand messages; each step adds all of its messages or none.

        Delayed ones are added in further steps, of up to two hundred messages, and are held by the server.
        Return when the server has confirmed every one. After ConnectionLostError the outcome is
        unknown: a repeated dispatch may add them twice.
        """
        return self._run(self._prepare_dispatch(transactions)) if transactions else []

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return await self._run_async(self._prepare_dispatch(transactions)) if transactions else []

    def _prepare_dispatch(
        self, transactions: Sequence[Transaction]
    ) -> Callable[[ServerClient], Operation[Sequence[Confirmation]]]:
        prepared = [self.prepare(transaction) for transaction in transactions]
        stream, encode_fields = self._keys.stream, self._messages.encode_fields
        now = time.time()
        commands: list[tuple[Any, ...]] = []
        delayed: list[tuple[Any, ...]] = []
        for transaction in prepared:
            fields, delay = encode_fields(transaction), transaction.compute_delay(now)
            if delay > 0:
                delayed.append((math.ceil(delay * 1000), len(fields), *fields))
            else:
                commands.append(("XADD", stream, "*", *fields))

        def send(client: ServerClient) -> Operation[Sequence[Confirmation]]:
            yield from self._ensure_open(client)
            if len(commands) == 1:
                yield commands[0]
            for start in range(0, len(commands) if len(commands) > 1 else 0, _MAX_DISPATCH_BATCH):
                answers = yield Pipeline([("MULTI",), *commands[start : start + _MAX_DISPATCH_BATCH], ("EXEC",)])
                # A step that is rejected for lack of memory is rejected before anything is added.
                for answer in (*answers, *(answers[-1] if isinstance(answers[-1], list) else ())):
                    if isinstance(answer, Exception):
                        raise answer
            for step in _split_delayed(delayed):
                keys = (self._keys.later, self._keys.due, self._keys.bell)
                yield from scripts.DELAY.run(keys, *(part for message in step for part in message))
            return [Confirmation(transaction.id) for transaction in prepared]

        return send

    # -- inspection ---------------------------------------------------------------------------------------

    def depth(self) -> Depth:
        return self._run(self._depth)

    async def depth_async(self) -> Depth:
        return await self._run_async(self._depth)

    def _depth(self, client: ServerClient) -> Operation[Depth]:
        yield from self._ensure_open(client)
        keys = self._keys
        answer = yield from scripts.DEPTH.run((keys.stream, keys.later, keys.due, keys.dead), GROUP)
        ready, delayed, in_flight, dead, age = answer
        return Depth(ready, delayed, in_flight, dead, None if ready == 0 or age < 0 else age / 1000)

    def find_queued(self, ids: Collection[str]) -> Collection[str]:
        """Return those of *ids* that are ready, delayed or in flight; reads the whole queue."""
        return self._run(lambda client: self._find_queued(client, ids))

    async def find_queued_async(self, ids: Collection[str]) -> Collection[str]:
        return await self._run_async(lambda client: self._find_queued(client, ids))

    def _find_queued(self, client: ServerClient, ids: Collection[str]) -> Operation[set[str]]:
        yield from self._ensure_open(client)
        return (yield from dead_letters.find_queued(self._keys, self._messages, ids))

    def diagnose(self, wall: WallClock) -> Sequence[Diagnostic]:
        """Diagnose the server and the queue; a missing stream is not created."""
        return self._run(lambda client: diagnose(client, self._node, self._keys, self._name, wall))

    # -- dead letters -------------------------------------------------------------------------------------

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self._run(lambda client: self._list_dead(client, query, after=after, limit=limit))

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return await self._run_async(lambda client: self._list_dead(client, query, after=after, limit=limit))

    def _list_dead(
        self, client: ServerClient, query: DeadLetterQuery, *, after: str | None, limit: int
    ) -> Operation[Sequence[DeadLetterRecord]]:
        yield from self._ensure_open(client)
        return (
            yield from dead_letters.list_dead(
                self._keys,
                self._messages,
                self._name,
                query,
                after=after,
                limit=limit,
                max_bytes=self._limits.max_bytes,
            )
        )

    def replay_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        replayed = self._run(lambda client: self._replay_dead(client, handles))
        self._arrivals.notify()
        return replayed

    async def replay_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        replayed = await self._run_async(lambda client: self._replay_dead(client, handles))
        self._arrivals.notify()
        return replayed

    def _replay_dead(self, client: ServerClient, handles: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
        yield from self._ensure_open(client)
        return (yield from dead_letters.replay_dead(self._keys, handles))

    def discard_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return self._run(lambda client: self._discard_dead(client, handles))

    async def discard_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._run_async(lambda client: self._discard_dead(client, handles))

    def replace_dead(self, handle: str, transaction: Transaction) -> ReplayResult:
        return self._run(self._prepare_replace(handle, transaction))

    async def replace_dead_async(self, handle: str, transaction: Transaction) -> ReplayResult:
        return await self._run_async(self._prepare_replace(handle, transaction))

    def _prepare_replace(
        self, handle: str, transaction: Transaction
    ) -> Callable[[ServerClient], Operation[ReplayResult]]:
        fields = self._messages.encode_fields(self._prepare_replacement(transaction))

        def replace(client: ServerClient) -> Operation[ReplayResult]:
            yield from self._ensure_open(client)
            result = yield from dead_letters.replace_dead(self._keys, handle, fields)
            self._arrivals.notify()
            return result

        return replace

    def _discard_dead(self, client: ServerClient, handles: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
        yield from self._ensure_open(client)
        return (yield from dead_letters.discard_dead(self._keys, handles))


def _split_delayed(messages: Sequence[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """Split *messages* into steps, each bounded by its number of messages and of bytes."""
    step: list[tuple[Any, ...]] = []
    size = 0
    for message in messages:
        if step and (len(step) >= _MAX_DELAY_BATCH or size >= _MAX_DELAY_BYTES):
            yield step
            step, size = [], 0
        step.append(message)
        size += sum(len(part) for part in message[2:])
    if step:
        yield step
