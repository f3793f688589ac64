"""CallAdmission: the calls, streams and bytes that each identity has in flight, and whether it may start more.

An identity is the set of zones and the operator that a caller's certificate proves (``facts.service.access``).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, TypeVar

from ergon_framework.facts.errors import InvalidFactError, LimitExceeded
from ergon_framework.facts.service.access import Identity, IdentityKey
from ergon_framework.facts.service.limits import Limits

#: Requests of one identity that are received concurrently; further ones wait at the sender.
MAX_RECEIVING: Final = 8
#: Answers of one identity that are built concurrently, each as large as a message may be.
MAX_FETCHING: Final = 16
#: Threads that parse and hash requests, for all identities; each identity uses one at a time.
PARSER_THREADS: Final = 2

T = TypeVar("T")


class CallerUsage:
    """The calls and bytes that one identity has in flight. For one event loop."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._name = name
        self._limits = limits
        #: Numbers of "calls" and "streams".
        self.in_flight: Counter[str] = Counter()
        self._bytes = 0
        self._receive_slots = asyncio.Semaphore(MAX_RECEIVING)
        self._run_lock = asyncio.Lock()
        self.fetch_slots = asyncio.Semaphore(MAX_FETCHING)

    @property
    def is_idle(self) -> bool:
        return not (self.in_flight.total() or self._run_lock.locked())

    @asynccontextmanager
    async def request(self, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Receive the request of a call, and count its bytes until the context exits."""
        async with self._receive_slots:
            data = await anext(incoming, None)
        if data is None:
            raise InvalidFactError("the call has no request; send one message")
        size = len(data)
        limit = self._limits.bytes_per_identity
        if self._bytes + size > limit:
            raise LimitExceeded(
                f"a request of {size:,} bytes exceeds the limit of {self._name}: {self._bytes:,} of {limit:,} bytes "
                "are in flight (bytes_per_identity); send fewer requests concurrently"
            )
        self._bytes += size
        try:
            yield data
        finally:
            self._bytes -= size

    async def run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """Run *work* in a thread of *pool*, one at a time for this identity."""
        await self._run_lock.acquire()
        loop = asyncio.get_running_loop()

        def release(_: Future[T]) -> None:
            # A thread cannot be stopped: the lock is released when it ends, even if the call has ended before.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._run_lock.release)

        future = pool.submit(work)
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)


class CallAdmission:
    """Counts the calls of a service by identity. For one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._calls = 0
        self._callers: dict[IdentityKey, CallerUsage] = {}
        self._pool = ThreadPoolExecutor(PARSER_THREADS, thread_name_prefix="ergon-facts-read")

    @contextmanager
    def admit(self, identity: Identity, *, stream: bool) -> Iterator[CallerUsage]:
        """Count a call or a stream of *identity* until the context exits; raise LimitExceeded if there are too many."""
        caller = self._get_usage(identity)
        limits = self._limits
        kind = "streams" if stream else "calls"
        limit = limits.streams_per_identity if stream else limits.calls_per_identity
        if caller.in_flight[kind] >= limit:
            raise LimitExceeded(
                f"{identity.name} has {limit} concurrent {kind}, the limit of one identity ({kind}_per_identity); "
                "make fewer concurrent calls"
            )
        if self._calls >= limits.calls:
            raise LimitExceeded(
                f"the service has {self._calls} concurrent calls, its limit for all callers (calls); retry later"
            )
        self._calls += 1
        caller.in_flight[kind] += 1
        try:
            yield caller
        finally:
            self._calls -= 1
            caller.in_flight[kind] -= 1
            if caller.is_idle:
                del self._callers[identity.key]

    async def run(self, identity: Identity, work: Callable[[], T]) -> T:
        """Run *work* for *identity* outside the event loop."""
        return await self._get_usage(identity).run(self._pool, work)

    def fetch_slots(self, identity: Identity) -> asyncio.Semaphore:
        """Return the semaphore that limits the answers being built for *identity*."""
        return self._get_usage(identity).fetch_slots

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _get_usage(self, identity: Identity) -> CallerUsage:
        return self._callers.setdefault(identity.key, CallerUsage(identity.name, self._limits))
