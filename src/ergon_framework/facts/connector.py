"""Connectors for facts: a consumer reads them as a log, and a producer dispatches transactions as facts.

A fact is a statement that one zone, a site with its own store (the boundary), sends to another. The boundary keeps one
cursor for each reader, a named consumer. All other consumer state is in a separate store, called *side* here: delivery
counts, deferred records, dead letters, and the owner, the one connector that currently reads as this reader.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    Delivery,
    Depth,
    Listener,
    Release,
    SettlementRequest,
    SettleResult,
    Unlisten,
)
from ergon_framework.connectors.codec import Codec, JsonCodec
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.encryption import EncryptingCodec
from ergon_framework.connectors.wakeup import WakeupHub
from ergon_framework.engine.inline import AsyncInlineRunner, InlineRunner
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.consumer_state import (
    ConsumerStoreCalls,
    FactConsumerStore,
    MemoryFactConsumerStore,
    ReaderInfo,
)
from ergon_framework.facts.fact_log import BoundaryCalls, FactLog
from ergon_framework.facts.model import ZonePair, check_zone
from ergon_framework.transaction import Transaction

#: Maximum seconds between two polls of a waiting fetch, for boundaries without notifications.
_POLL_INTERVAL_SECONDS: Final = 0.25

_caller: Final = InlineRunner()
_async_caller: Final = AsyncInlineRunner()


class _FactConnector:
    """The common part of the sync and async variants: everything except how a script is run."""

    boundary: Boundary | AsyncBoundary

    def __init__(
        self,
        boundary: Boundary | AsyncBoundary,
        calls: BoundaryCalls,
        *,
        from_zone: str,
        to_zone: str,
        reader: str,
        name: str | None,
        side: FactConsumerStore | None,
        codec: Codec | None,
        wall: Callable[[], float],
    ) -> None:
        check_zone("from_zone", from_zone)
        check_zone("to_zone", to_zone)
        self.boundary = boundary
        self.pair = ZonePair(from_zone, to_zone)
        self._name = name or f"{from_zone}/{to_zone}"
        if isinstance(codec, EncryptingCodec):
            raise ConfigurationError(
                f"the facts of {self._name!r} cannot be encrypted: their readers and the store compare them; encrypt "
                "the values inside the payload instead"
            )
        self._codec = codec or JsonCodec()
        self._wakeups = WakeupHub()
        self._unlisten: Unlisten | None = None
        self.side: FactConsumerStore = (side or boundary.consumer_store()) or MemoryFactConsumerStore()
        reader_info = ReaderInfo(self.pair, reader, self._name, self._codec, self._is_durable)
        self._log = FactLog(calls, self._make_store_calls(reader_info), reader_info, wall=wall, lock=threading.Lock())

    @abstractmethod
    def _make_store_calls(self, reader_info: ReaderInfo) -> ConsumerStoreCalls:
        """Return the calls of the consumer store, sync or async."""

    def _is_durable(self) -> bool:
        # Unknown counts as durable: a consumer store in memory then warns about dead letters that it would lose.
        return self.boundary.capabilities.durable is not False

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            mode="log",
            # A claim ends only when another connector takes the log over, so there is nothing to renew.
            renewable=False,
            lease=None,
            release_uncounted=True,
            delays=True,
            dead_letters=True,
            fenced_by="generation",
            durable=self.boundary.capabilities.durable,
            ordered_by_key=True,
            deduplicates_ids=True,
            max_payload=self._codec.max_bytes,
        )

    def listen(self, listener: Listener) -> Unlisten:
        self._subscribe()
        return self._wakeups.listen(listener)

    def interrupt(self) -> None:
        """Make every fetch that is waiting now return immediately."""
        self._wakeups.interrupt()

    def _subscribe(self) -> None:
        if self._unlisten is None:
            self._unlisten = self.boundary.listen(self._wakeups.notify)

    def _unsubscribe(self) -> None:
        unlisten, self._unlisten = self._unlisten, None
        if unlisten is not None:
            unlisten()
        self.interrupt()

    def _limit_wait(self, remaining: float) -> float:
        # A deferred fact becomes due without a notification.
        due = self._log.next_due()
        return (
            min(remaining, _POLL_INTERVAL_SECONDS)
            if due is None
            else min(remaining, _POLL_INTERVAL_SECONDS, max(due, 0.001))
        )

    def _notify_releases(self, requests: Sequence[SettlementRequest]) -> None:
        # A released fact can be claimed again at once; the boundary does not know of it, and so notifies no fetch.
        if any(isinstance(settlement, Release) for _, settlement in requests):
            self._wakeups.notify()


class FactConnector(_FactConnector, Connector):
    """The facts from one zone to another, for threads.

    *reader* names the cursor in the boundary. *side* is the consumer state store, by default that of the boundary, or
    one in memory if it has none. Opening another connector with the same reader and *side* takes the log over: this one
    loses its claims. Dispatching an id again adds nothing; with another payload it raises FactConflict.
    """

    boundary: Boundary

    def __init__(
        self,
        boundary: Boundary,
        *,
        from_zone: str,
        to_zone: str,
        reader: str = "default",
        name: str | None = None,
        side: FactConsumerStore | None = None,
        codec: Codec | None = None,
        caller: InlineRunner | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        calls = BoundaryCalls(
            boundary.append_facts,
            boundary.get_fact,
            boundary.fetch_facts,
            boundary.confirm_receipt,
            boundary.get_cursor,
            boundary.last_offset,
        )
        super().__init__(
            boundary,
            calls,
            from_zone=from_zone,
            to_zone=to_zone,
            reader=reader,
            name=name,
            side=side,
            codec=codec,
            wall=wall,
        )
        self._perform = (caller or _caller).run

    def _make_store_calls(self, reader_info: ReaderInfo) -> ConsumerStoreCalls:
        return self.side.get_calls(reader_info)

    def open(self) -> None:
        self._subscribe()
        self._perform(self._log.open())

    def close(self) -> None:
        self._unsubscribe()
        self._perform(self._log.close())

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        if batch_size < 1:
            return []
        self._subscribe()
        deadline = time.monotonic() + wait
        with self._wakeups.waiter() as waiter:
            while True:
                waiter.clear()
                deliveries = self._perform(self._log.claim(batch_size))
                remaining = deadline - time.monotonic()
                if deliveries or remaining <= 0 or waiter.is_interrupted:
                    return deliveries
                waiter.wait(self._limit_wait(remaining))

    def settle(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        results = self._perform(self._log.settle(requests))
        self._notify_releases(requests)
        return results

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return self._perform(self._log.extend(deliveries))

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return self._perform(self._log.dispatch([self.prepare(transaction) for transaction in transactions]))

    def depth(self) -> Depth:
        return self._perform(self._log.depth())

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self._perform(self._log.list_dead(query, after=after, limit=limit))

    def replay_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        results = self._perform(self._log.replay_dead(handles))
        self._wakeups.notify()
        return results

    def discard_dead(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return self._perform(self._log.discard_dead(handles))


class AsyncFactConnector(_FactConnector, AsyncConnector):
    """The facts from one zone to another, for asyncio; same guarantees as ``FactConnector``."""

    boundary: AsyncBoundary

    def __init__(
        self,
        boundary: AsyncBoundary,
        *,
        from_zone: str,
        to_zone: str,
        reader: str = "default",
        name: str | None = None,
        side: FactConsumerStore | None = None,
        codec: Codec | None = None,
        caller: AsyncInlineRunner | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        calls = BoundaryCalls(
            boundary.append_facts_async,
            boundary.get_fact_async,
            boundary.fetch_facts_async,
            boundary.confirm_receipt_async,
            boundary.get_cursor_async,
            boundary.last_offset_async,
        )
        super().__init__(
            boundary,
            calls,
            from_zone=from_zone,
            to_zone=to_zone,
            reader=reader,
            name=name,
            side=side,
            codec=codec,
            wall=wall,
        )
        self._perform = (caller or _async_caller).run

    def _make_store_calls(self, reader_info: ReaderInfo) -> ConsumerStoreCalls:
        return self.side.get_calls_async(reader_info)

    async def open_async(self) -> None:
        self._subscribe()
        await self._perform(self._log.open())

    async def close_async(self) -> None:
        self._unsubscribe()
        await self._perform(self._log.close())

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        if batch_size < 1:
            return []
        self._subscribe()
        deadline = time.monotonic() + wait
        with self._wakeups.waiter_async() as waiter:
            while True:
                waiter.clear()
                deliveries = await self._perform(self._log.claim(batch_size))
                remaining = deadline - time.monotonic()
                if deliveries or remaining <= 0 or waiter.is_interrupted:
                    return deliveries
                await waiter.wait(self._limit_wait(remaining))

    async def settle_async(self, requests: Sequence[SettlementRequest]) -> Sequence[SettleResult]:
        results = await self._perform(self._log.settle(requests))
        self._notify_releases(requests)
        return results

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return await self._perform(self._log.extend(deliveries))

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return await self._perform(self._log.dispatch([self.prepare(transaction) for transaction in transactions]))

    async def depth_async(self) -> Depth:
        return await self._perform(self._log.depth())

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return await self._perform(self._log.list_dead(query, after=after, limit=limit))

    async def replay_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        results = await self._perform(self._log.replay_dead(handles))
        self._wakeups.notify()
        return results

    async def discard_dead_async(self, handles: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._perform(self._log.discard_dead(handles))
