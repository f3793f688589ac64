"""Admission: how many calls, streams and bytes each identity has in flight, and whether it may have more."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final, TypeVar

from ergon_framework.facts.errors import InvalidFactError, LimitExceeded
from ergon_framework.facts.service.identity import Identity, IdentityKey
from ergon_framework.facts.service.limits import Limits

#: Requests of one identity whose bytes are being received; further ones wait at the sender.
MAX_RECEIVING: Final = 8
#: Answers of one identity that are being put together, each as large as a message may be.
MAX_FETCHING: Final = 16
#: Threads that read and hash requests, for all identities; each identity uses one at a time.
THREADS: Final = 2

T = TypeVar("T")


class Caller:
    """What one identity has in flight. For one event loop."""

    def __init__(self, name: str, limits: Limits) -> None:
        self._name = name
        self._limits = limits
        #: Calls and streams, by these names.
        self.open: Counter[str] = Counter()
        self._bytes = 0
        self._receiving = asyncio.Semaphore(MAX_RECEIVING)
        self._turn = asyncio.Lock()
        self.fetching = asyncio.Semaphore(MAX_FETCHING)

    @property
    def is_idle(self) -> bool:
        return not (self.open.total() or self._turn.locked())

    @asynccontextmanager
    async def request(self, incoming: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Receive the request of a call, and count its bytes for as long as this lasts."""
        async with self._receiving:
            data = await anext(incoming, None)
        if data is None:
            raise InvalidFactError("the call has no request; send one message")
        size = len(data)
        limit = self._limits.bytes_per_identity
        if self._bytes + size > limit:
            raise LimitExceeded(
                f"requests of {self._name} with {self._bytes:,} bytes are being handled, and with {size:,} more it "
                f"would be above the limit of {limit:,} (bytes_per_identity); send fewer at once"
            )
        self._bytes += size
        try:
            yield data
        finally:
            self._bytes -= size

    async def run(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """Run *work* in a thread of *pool*, one at a time for this identity."""
        await self._turn.acquire()
        loop = asyncio.get_running_loop()

        def release(_: Future[T]) -> None:
            # A thread cannot be stopped: the turn ends with it, also if the call has ended before.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._turn.release)

        started = pool.submit(work)
        started.add_done_callback(release)
        return await asyncio.wrap_future(started)


class Admission:
    """Counts the calls of a service by identity. For one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._calls = 0
        self._callers: dict[IdentityKey, Caller] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="ergon-facts-read")

    @contextmanager
    def admit(self, who: Identity, *, stream: bool) -> Iterator[Caller]:
        """Count a call of *who*, or a stream, for as long as this lasts; LimitExceeded if there are too many."""
        caller = self._of(who)
        limits = self._limits
        kind = "streams" if stream else "calls"
        limit = limits.streams_per_identity if stream else limits.calls_per_identity
        if caller.open[kind] >= limit:
            raise LimitExceeded(
                f"{who.name} has {limit} {kind} at once, which is the limit of one identity ({kind}_per_identity); "
                "make fewer at once"
            )
        if self._calls >= limits.calls:
            raise LimitExceeded(
                f"the service has {self._calls} calls at once of all callers, which is its limit (calls); try again"
            )
        self._calls += 1
        caller.open[kind] += 1
        try:
            yield caller
        finally:
            self._calls -= 1
            caller.open[kind] -= 1
            if caller.is_idle:
                del self._callers[who.key]

    async def run(self, who: Identity, work: Callable[[], T]) -> T:
        """Run *work* for *who* outside of the event loop."""
        return await self._of(who).run(self._pool, work)

    def fetching(self, who: Identity) -> asyncio.Semaphore:
        """Return what limits the answers for *who* that are being put together."""
        return self._of(who).fetching

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _of(self, who: Identity) -> Caller:
        return self._callers.setdefault(who.key, Caller(who.name, self._limits))
