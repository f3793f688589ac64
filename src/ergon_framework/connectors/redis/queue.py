"""RedisQueue: a queue in a Redis stream, in both flavours."""

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

from ergon_framework.connectors.arrivals import Arrivals
from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    Delivery,
    Depth,
    Listener,
    SettleResult,
    Settling,
    Unlisten,
)
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.encryption import select_codec
from ergon_framework.connectors.limits import MAX_FETCH_BYTES, FetchLimits
from ergon_framework.connectors.outage import public_address
from ergon_framework.connectors.redis import burials, scripts
from ergon_framework.connectors.redis.claiming import GROUP, Claiming
from ergon_framework.connectors.redis.doorbell import Doorbell
from ergon_framework.connectors.redis.durability import Durability
from ergon_framework.connectors.redis.examining import examined
from ergon_framework.connectors.redis.failures import MEMORY_FULL
from ergon_framework.connectors.redis.home import Home, home_of, leave
from ergon_framework.connectors.redis.keys import keys_of
from ergon_framework.connectors.redis.lines import Line, Moved, Node
from ergon_framework.connectors.redis.messages import Messages
from ergon_framework.connectors.redis.operation import Operation, Together
from ergon_framework.connectors.redis.receipt import Receipt
from ergon_framework.connectors.redis.settling import Settler
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.finding import Finding, Wall
from ergon_framework.redaction import learn_address
from ergon_framework.transaction import Transaction

R = TypeVar("R")

#: Where the address of the server is looked for if the program does not give one.
VARIABLE: Final = "ERGON_REDIS__URL"
#: A waiting fetch looks at least this often, doorbell or not.
_LOOK: Final = 0.25
#: Most that is dispatched in one step.
_TOGETHER: Final = 1_000
#: How often a queue is looked for before a cluster is said to be moving it.
_REDIRECTIONS: Final = 5
_DAY: Final = 86_400.0
#: Seconds between two rounds of tidying, and for how long a consumer with empty hands is remembered.
_TIDY: Final = 300.0
_REMEMBERED: Final = 3_600.0
#: Seconds that a cancelled fetch may take to give back what it claimed.
_GIVE_BACK: Final = 1.0


class RedisQueue(Connector, AsyncConnector):
    """One queue of a Redis server, 7 or newer, or of a cluster of them.

    The address is *url*, or the environment's ``ERGON_REDIS__URL``. Claims last for *lease* seconds
    and are renewed one by one; all workers of a queue have the same lease. *stream* is the key of a
    stream that somebody else's producer writes, and *body* the field that holds the body there. Dead
    letters are kept for *dead_days*, None for ever. One fetch loads messages of *max_fetch_bytes* at
    most, and always at least one.
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
    ) -> None:
        if not 0 < lease < math.inf:
            raise ConfigurationError(f"a lease must be a finite number of seconds > 0, not {lease!r}")
        self._name = name
        self._keys = keys_of(name, stream)
        self._url = url
        self._lease = lease
        self._codec = select_codec(codec)
        self._messages = Messages(self._codec, name=name, body=body)
        self._dead_days = dead_days
        self._limits = FetchLimits(max_fetch_bytes)
        self._lock = threading.Lock()
        self._arrivals = Arrivals()
        self._home: Home | None = None
        self._inherited: Home | None = None
        self._node: Node | None = None
        self._durability: Durability | None = None
        self._listening = 0
        self._tidied = time.monotonic()
        self._begin()

    def _begin(self) -> None:
        """A consumer of its own, in this process and in every child that is forked from it."""
        self._owner = os.getpid()
        consumer = f"{socket.gethostname()[:60]}:{self._owner}:{secrets.token_hex(6)}"
        self._claiming = Claiming(self._keys, self._messages, consumer=consumer, lease=self._lease, limits=self._limits)
        self._settler = Settler(self._keys, self._claiming, codec=self._codec)
        self._bell = self._new_bell()

    def _new_bell(self) -> Doorbell:
        return Doorbell(self._connect, (self._keys.stream, self._keys.bell), self._arrivals.arrived)

    def __repr__(self) -> str:
        return f"RedisQueue({self._name!r})"

    @property
    def name(self) -> str:
        return self._name

    @property
    def server_address(self) -> str | None:
        return public_address(self._url or os.environ.get(VARIABLE))

    @property
    def write_refusal(self) -> str | None:
        """Return why the server takes nothing new; at its memory limit it still lets workers fetch and ack."""
        return MEMORY_FULL if self._claiming.memory_full else None

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; whether it is durable is known once it was opened."""
        return Capabilities(
            mode="queue",
            renewable=True,
            lease=self._lease,
            release_is_free=True,
            delays=True,
            dead_letters=True,
            fenced_by="token",
            durable=None if self._durability is None else self._durability.durable,
            max_payload=self._codec.max_bytes,
        )

    @property
    def durability(self) -> str | None:
        """In words, what a power loss could cost; None before the queue was opened."""
        return None if self._durability is None else self._durability.words

    # -- coming and going ---------------------------------------------------------------------------

    def _at_home(self) -> Home:
        with self._lock:
            if self._owner != os.getpid():
                # Kept, so that nobody collects connections that are the parent's.
                self._inherited, self._home, self._durability = self._home, None, None
                self._begin()
                for _ in range(self._listening):
                    self._bell.want()
            if self._home is None:
                self._home = home_of(self._address())
            return self._home

    def _address(self) -> str:
        url = self._url or os.environ.get(VARIABLE)
        if not url:
            raise ConfigurationError(
                f"the queue {self._name!r} has no server: set {VARIABLE} in the environment or give url=…"
            )
        learn_address(url)
        return url

    def _opened(self, home: Home) -> Operation[None]:
        """The first time, make the group and look at the server."""
        if self._durability is None:
            yield from self._grouped()
            self._durability = yield from home.checked(self._node)

    def _grouped(self) -> Operation[None]:
        try:
            yield ("XGROUP", "CREATE", self._keys.stream, GROUP, "0", "MKSTREAM")
        except ResponseError as error:
            if str(error).startswith("BUSYGROUP"):
                return
            # At its memory limit the server refuses the command before it looks for the group. Workers that start then
            # must be able to fetch and ack: nothing else makes room.
            if not isinstance(error, OutOfMemoryError) or not (yield from self._has_group()):
                raise

    def _has_group(self) -> Operation[bool]:
        try:
            groups = yield ("XINFO", "GROUPS", self._keys.stream)
        except ResponseError:  # there is no stream
            return False
        return any(GROUP.encode() in group for group in groups)

    def _run(self, work: Callable[[Home], Operation[R]]) -> R:
        for _ in range(_REDIRECTIONS):
            home, node = self._at_home(), self._node
            try:
                return home.lines(node).run(self._grouping(work, home))
            except Moved as moved:
                self._node = moved.node
            except ConnectionLost:
                self._node = home.next_after(node)
                raise
        raise self._wandering()

    async def _run_async(self, work: Callable[[Home], Operation[R]]) -> R:
        for _ in range(_REDIRECTIONS):
            home, node = self._at_home(), self._node
            try:
                return await home.lines(node).run_async(self._grouping(work, home))
            except Moved as moved:
                self._node = moved.node
            except ConnectionLost:
                self._node = home.next_after(node)
                raise
        raise self._wandering()

    def _grouping(self, work: Callable[[Home], Operation[R]], home: Home) -> Operation[R]:
        """*work*, once more where the server has lost the group, as after a flush."""
        try:
            return (yield from work(home))
        except ResponseError as error:
            if "NOGROUP" not in str(error) and "no such key" not in str(error):
                raise
        yield from self._grouped()
        return (yield from work(home))

    def _wandering(self) -> ConnectionLost:
        return ConnectionLost(f"the cluster sends everybody who asks for the queue {self._name!r} somewhere else")

    def _connect(self) -> Line:
        """A line for the doorbell, which must not bring back to life what was closed meanwhile."""
        home = self._home
        if home is None:
            raise ConnectionLost(f"the queue {self._name!r} is closed")
        return home.lines(self._node).connect()

    def open(self) -> None:
        """Connect; refuse a server that would throw the queue away, and say what its settings are worth."""
        self._run(self._opened)

    async def open_async(self) -> None:
        await self._run_async(self._opened)

    def close(self) -> None:
        """Disconnect. What is still held comes back to somebody when the lease ends."""
        self.interrupt()
        with suppress(Exception):  # a server that is gone will find out by itself
            if self._home is not None and self._owner == os.getpid():
                self._run(self._left)
        home, last = self._gone()
        if home is not None and last:
            home.close()

    async def close_async(self) -> None:
        self.interrupt()
        with suppress(Exception):  # as above
            if self._home is not None and self._owner == os.getpid():
                await self._run_async(self._left)
        home, last = self._gone()
        if home is not None and last:
            await home.close_async()

    def _left(self, _: Home) -> Operation[None]:
        if self._durability is not None:
            yield from scripts.LEAVE.run((self._keys.stream,), GROUP, self._claiming.consumer)

    def _gone(self) -> tuple[Home | None, bool]:
        """The home that is left, and whether nobody else in this process lives there."""
        with self._lock:
            home, self._home, self._durability = self._home, None, None
            self._bell.close()
            self._bell = self._new_bell()
            for _ in range(self._listening):
                self._bell.want()
        return home, home is not None and leave(home)

    def interrupt(self) -> None:
        """Every fetch that is waiting now returns at once."""
        self._arrivals.interrupt()

    # -- being woken ----------------------------------------------------------------------------------

    def listen(self, listener: Listener) -> Unlisten:
        unlisten = self._arrivals.listen(listener)
        with self._lock:
            self._listening += 1
            self._bell.want()

        def leave_off() -> None:
            unlisten()
            with self._lock:
                self._listening -= 1
                self._bell.unwant()

        return leave_off

    @contextmanager
    def _wanting(self) -> Iterator[None]:
        """Somebody waits in a fetch."""
        bell = self._bell
        bell.want()
        try:
            yield
        finally:
            bell.unwant()

    # -- fetch ------------------------------------------------------------------------------------------

    def limit_deliveries(self, most: int) -> None:
        self._limits.raise_deliveries(most)

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        """What is ready: what came back first, then by age."""
        if batch_size < 1:
            return []
        if wait <= 0:
            return self._told_lost(self._fetched(batch_size))
        end = time.monotonic() + wait
        with self._wanting(), self._arrivals.bell() as bell:
            while True:
                bell.clear()
                found = self._told_lost(self._fetched(batch_size))
                left = end - time.monotonic()
                if found or left <= 0 or bell.interrupted:
                    return found
                bell.rung(min(left, _LOOK))

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        if batch_size < 1:
            return []
        if wait <= 0:
            return self._told_lost(await self._fetched_async(batch_size))
        end = time.monotonic() + wait
        with self._wanting(), self._arrivals.bell_async() as bell:
            while True:
                bell.clear()
                found = self._told_lost(await self._fetched_async(batch_size))
                left = end - time.monotonic()
                if found or left <= 0 or bell.interrupted:
                    return found
                await bell.rung(min(left, _LOOK))

    def _fetched(self, count: int) -> tuple[list[Delivery], list[Receipt]]:
        self._at_home()
        with self._claiming.fetching():
            return self._run(lambda home: self._claimed(home, count))

    async def _fetched_async(self, count: int) -> tuple[list[Delivery], list[Receipt]]:
        self._at_home()
        try:
            with self._claiming.fetching():
                return await self._run_async(lambda home: self._claimed(home, count))
        except asyncio.CancelledError:
            # Whoever cancels has no use for what was claimed on the way, and somebody else has.
            with suppress(Exception):
                async with asyncio.timeout(_GIVE_BACK):
                    await self._run_async(lambda _: self._disowned())
            raise

    def _claimed(self, home: Home, count: int) -> Operation[tuple[list[Delivery], list[Receipt]]]:
        yield from self._opened(home)
        yield from self._disowned()
        yield from self._tidy()
        found, lost, seen = yield from self._claiming.claim(count, asks=self._bell.wanted)
        if seen is not None:
            self._bell.arm(seen)
        return found, lost

    def _told_lost(self, fetched: tuple[list[Delivery], list[Receipt]]) -> list[Delivery]:
        found, lost = fetched
        if lost:
            self._arrivals.lost(lost)
        return found

    def _disowned(self) -> Operation[None]:
        """Give back what fetches took whose answer never arrived."""
        unknown = yield from self._claiming.unknown()
        if unknown:
            yield from self._settler.settle(unknown)

    def _tidy(self) -> Operation[None]:
        """Now and then forget who is gone, and what is older than it is to get."""
        if time.monotonic() < self._tidied + _TIDY:
            return
        self._tidied = time.monotonic()
        yield from self._tidied_up()

    def _tidied_up(self) -> Operation[None]:
        idle = round(max(_REMEMBERED, 10 * self._lease) * 1000)
        yield from scripts.TIDY.run((self._keys.stream,), GROUP, idle)
        if self._dead_days is not None:
            oldest = max(0, round((time.time() - self._dead_days * _DAY) * 1000))
            yield ("XTRIM", self._keys.dead, "MINID", oldest)

    # -- settle and renew -------------------------------------------------------------------------------

    def settle(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        if not settlings:
            return []
        with self._doubting(settlings):
            return self._told_ready(self._run(lambda home: self._settled(home, settlings)))

    async def settle_async(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        if not settlings:
            return []
        with self._doubting(settlings):
            return self._told_ready(await self._run_async(lambda home: self._settled(home, settlings)))

    @contextmanager
    def _doubting(self, settlings: Sequence[Settling]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._settler.doubt(settlings)
            raise

    def _settled(self, home: Home, settlings: Sequence[Settling]) -> Operation[tuple[list[SettleResult], bool]]:
        yield from self._opened(home)
        return (yield from self._settler.settle(settlings))

    def _told_ready(self, settled: tuple[list[SettleResult], bool]) -> list[SettleResult]:
        results, ready = settled
        if ready:
            self._arrivals.arrived()
        return results

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return self._run(lambda home: self._extended(home, deliveries)) if deliveries else []

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return await self._run_async(lambda home: self._extended(home, deliveries)) if deliveries else []

    def _extended(self, home: Home, deliveries: Sequence[Delivery]) -> Operation[list[float | None]]:
        yield from self._opened(home)
        return (yield from self._settler.extend(deliveries, self._lease))

    # -- dispatch ---------------------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        """Add all to the stream; up to a thousand at once are added in one step, or none of them.

        Returns when the server has confirmed every one. After ConnectionLost nobody knows: whoever
        asks again may have them twice.
        """
        return self._run(self._sent(transactions)) if transactions else []

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return await self._run_async(self._sent(transactions)) if transactions else []

    def _sent(self, transactions: Sequence[Transaction]) -> Callable[[Home], Operation[Sequence[Confirmation]]]:
        stamped = [self.stamped(transaction) for transaction in transactions]
        stream, written = self._keys.stream, self._messages.fields
        commands = [("XADD", stream, "*", *written(transaction)) for transaction in stamped]

        def sent(home: Home) -> Operation[Sequence[Confirmation]]:
            yield from self._opened(home)
            if len(commands) == 1:
                yield commands[0]
            for start in range(0, len(commands) if len(commands) > 1 else 0, _TOGETHER):
                answers = yield Together([("MULTI",), *commands[start : start + _TOGETHER], ("EXEC",)])
                # What was refused for want of memory was refused before anything was done.
                for answer in (*answers, *(answers[-1] if isinstance(answers[-1], list) else ())):
                    if isinstance(answer, Exception):
                        raise answer
            return [Confirmation(transaction.id) for transaction in stamped]

        return sent

    # -- what is there ------------------------------------------------------------------------------------

    def depth(self) -> Depth:
        return self._run(self._depth)

    async def depth_async(self) -> Depth:
        return await self._run_async(self._depth)

    def _depth(self, home: Home) -> Operation[Depth]:
        yield from self._opened(home)
        keys = self._keys
        answer = yield from scripts.DEPTH.run((keys.stream, keys.later, keys.due, keys.dead), GROUP)
        ready, delayed, in_flight, dead, age = answer
        return Depth(ready, delayed, in_flight, dead, None if ready == 0 or age < 0 else age / 1000)

    def queued(self, ids: Collection[str]) -> Collection[str]:
        """Which of these are ready, delayed or in flight; the whole queue is looked through."""
        return self._run(lambda home: self._queued(home, ids))

    async def queued_async(self, ids: Collection[str]) -> Collection[str]:
        return await self._run_async(lambda home: self._queued(home, ids))

    def _queued(self, home: Home, ids: Collection[str]) -> Operation[set[str]]:
        yield from self._opened(home)
        return (yield from burials.queued(self._keys, self._messages, ids))

    def examine(self, wall: Wall) -> Sequence[Finding]:
        """How the server and the queue are; the stream is not made if it is not there."""
        return self._run(lambda home: examined(home, self._node, self._keys, self._name, wall))

    # -- dead letters -------------------------------------------------------------------------------------

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self._run(lambda home: self._listed(home, query, after=after, limit=limit))

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return await self._run_async(lambda home: self._listed(home, query, after=after, limit=limit))

    def _listed(
        self, home: Home, query: DeadLetterQuery, *, after: str | None, limit: int
    ) -> Operation[Sequence[DeadLetterRecord]]:
        yield from self._opened(home)
        return (
            yield from burials.listed(
                self._keys, self._messages, self._name, query, after=after, limit=limit, load=self._limits.max_bytes
            )
        )

    def replay_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        replayed = self._run(lambda home: self._replayed(home, places))
        self._arrivals.arrived()
        return replayed

    async def replay_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        replayed = await self._run_async(lambda home: self._replayed(home, places))
        self._arrivals.arrived()
        return replayed

    def _replayed(self, home: Home, places: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
        yield from self._opened(home)
        return (yield from burials.replayed(self._keys, places))

    def discard_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return self._run(lambda home: self._discarded(home, places))

    async def discard_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._run_async(lambda home: self._discarded(home, places))

    def replace_dead(self, place: str, transaction: Transaction) -> ReplayResult:
        return self._run(self._replaced(place, transaction))

    async def replace_dead_async(self, place: str, transaction: Transaction) -> ReplayResult:
        return await self._run_async(self._replaced(place, transaction))

    def _replaced(self, place: str, transaction: Transaction) -> Callable[[Home], Operation[ReplayResult]]:
        fields = self._messages.fields(self.stamped(transaction))

        def replaced(home: Home) -> Operation[ReplayResult]:
            yield from self._opened(home)
            result = yield from burials.replace_dead(self._keys, place, fields)
            self._arrivals.arrived()
            return result

        return replaced

    def _discarded(self, home: Home, places: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
        yield from self._opened(home)
        return (yield from burials.discarded(self._keys, places))
