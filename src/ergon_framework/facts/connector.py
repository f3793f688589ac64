"""Facts as a connector, both ways: a consumer reads them as a log, and a producer dispatches transactions as facts."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

from ergon_framework.connectors.arrivals import Arrivals
from ergon_framework.connectors.base import (
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    Delivery,
    Depth,
    Listener,
    Release,
    SettleResult,
    Settling,
    Unlisten,
)
from ergon_framework.connectors.codec import Codec, JsonCodec
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.encryption import EncryptingCodec
from ergon_framework.engine.drivers.caller import AsyncCaller, Caller
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.log import Calls, FactLog
from ergon_framework.facts.model import Pair, check_zone
from ergon_framework.facts.side import FactSide, MemoryFactSide, Reading, SideCalls
from ergon_framework.transaction import Transaction

#: A waiting fetch looks at least this often, in case its boundary has no signals.
_LOOK: Final = 0.25

_caller: Final = Caller()
_async_caller: Final = AsyncCaller()


class _FactConnector:
    """What both flavours share: everything but how a script is performed."""

    boundary: Boundary | AsyncBoundary

    def __init__(
        self,
        boundary: Boundary | AsyncBoundary,
        calls: Calls,
        *,
        from_zone: str,
        to_zone: str,
        reader: str,
        name: str | None,
        side: FactSide | None,
        codec: Codec | None,
        wall: Callable[[], float],
    ) -> None:
        check_zone("from_zone", from_zone)
        check_zone("to_zone", to_zone)
        self.boundary = boundary
        self.pair = Pair(from_zone, to_zone)
        self._name = name or f"{from_zone}/{to_zone}"
        if isinstance(codec, EncryptingCodec):
            raise ConfigurationError(
                f"the facts of {self._name!r} cannot be encrypted: their readers and the store compare them; encrypt "
                "the values inside the payload instead"
            )
        self._codec = codec or JsonCodec()
        self._arrivals = Arrivals()
        self._unlisten: Unlisten | None = None
        self.side: FactSide = (side or boundary.fact_side()) or MemoryFactSide()
        reading = Reading(self.pair, reader, self._name, self._codec, self._lasts)
        self._log = FactLog(calls, self._asked(reading), reading, wall=wall, lock=threading.Lock())

    @abstractmethod
    def _asked(self, reading: Reading) -> SideCalls:
        """What is called of the side, in this flavour."""

    def _lasts(self) -> bool:
        return self.boundary.capabilities.durable is not False

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            mode="log",
            renewable=False,
            lease=None,
            release_is_free=True,
            delays=True,
            dead_letters=True,
            fenced_by="generation",
            durable=self.boundary.capabilities.durable,
            ordered_by_key=True,
            once_per_id=True,
            max_payload=self._codec.max_bytes,
        )

    def listen(self, listener: Listener) -> Unlisten:
        self._hear()
        return self._arrivals.listen(listener)

    def interrupt(self) -> None:
        """Every fetch that is waiting now returns at once."""
        self._arrivals.interrupt()

    def _hear(self) -> None:
        if self._unlisten is None:
            self._unlisten = self.boundary.listen(self._arrivals.arrived)

    def _left(self) -> None:
        unlisten, self._unlisten = self._unlisten, None
        if unlisten is not None:
            unlisten()
        self.interrupt()

    def _pause(self, left: float) -> float:
        due = self._log.next_due()
        return min(left, _LOOK) if due is None else min(left, _LOOK, max(due, 0.001))

    def _came_back(self, settlings: Sequence[Settling]) -> None:
        if any(isinstance(settlement, Release) for _, settlement in settlings):
            self._arrivals.arrived()


class FactConnector(_FactConnector, Connector):
    """The facts from one zone to another, for threads.

    *reader* names the cursor in the boundary. Opening another connector with the same reader and *side*
    takes the log over. Dispatching an id again adds nothing, and with another payload it is a FactConflict.
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
        side: FactSide | None = None,
        codec: Codec | None = None,
        caller: Caller | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        calls = Calls(
            boundary.append_facts,
            boundary.get_fact,
            boundary.fetch_facts,
            boundary.confirm_receipt,
            boundary.cursor_of,
            boundary.end_of,
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
        self._perform = (caller or _caller).perform

    def _asked(self, reading: Reading) -> SideCalls:
        return self.side.calls(reading)

    def open(self) -> None:
        self._hear()
        self._perform(self._log.open())

    def close(self) -> None:
        self._left()
        self._perform(self._log.close())

    def fetch_transactions(self, batch_size: int, *, wait: float = 0.0, **_extra: Any) -> Sequence[Delivery]:
        if batch_size < 1:
            return []
        self._hear()
        until = time.monotonic() + wait
        with self._arrivals.bell() as bell:
            while True:
                bell.clear()
                found = self._perform(self._log.claim(batch_size))
                left = until - time.monotonic()
                if found or left <= 0 or bell.interrupted:
                    return found
                bell.rung(self._pause(left))

    def settle(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        results = self._perform(self._log.settle(settlings))
        self._came_back(settlings)
        return results

    def extend(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return self._perform(self._log.extend(deliveries))

    def dispatch(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return self._perform(self._log.dispatch([self.stamped(transaction) for transaction in transactions]))

    def depth(self) -> Depth:
        return self._perform(self._log.depth())

    def list_dead(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return self._perform(self._log.list_dead(query, after=after, limit=limit))

    def replay_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        results = self._perform(self._log.replay_dead(places))
        self._arrivals.arrived()
        return results

    def discard_dead(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return self._perform(self._log.discard_dead(places))


class AsyncFactConnector(_FactConnector, AsyncConnector):
    """The facts from one zone to another, for asyncio; the same promises."""

    boundary: AsyncBoundary

    def __init__(
        self,
        boundary: AsyncBoundary,
        *,
        from_zone: str,
        to_zone: str,
        reader: str = "default",
        name: str | None = None,
        side: FactSide | None = None,
        codec: Codec | None = None,
        caller: AsyncCaller | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        calls = Calls(
            boundary.append_facts_async,
            boundary.get_fact_async,
            boundary.fetch_facts_async,
            boundary.confirm_receipt_async,
            boundary.cursor_of_async,
            boundary.end_of_async,
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
        self._perform = (caller or _async_caller).perform

    def _asked(self, reading: Reading) -> SideCalls:
        return self.side.calls_async(reading)

    async def open_async(self) -> None:
        self._hear()
        await self._perform(self._log.open())

    async def close_async(self) -> None:
        self._left()
        await self._perform(self._log.close())

    async def fetch_transactions_async(
        self, batch_size: int, *, wait: float = 0.0, **_extra: Any
    ) -> Sequence[Delivery]:
        if batch_size < 1:
            return []
        self._hear()
        until = time.monotonic() + wait
        with self._arrivals.bell_async() as bell:
            while True:
                bell.clear()
                found = await self._perform(self._log.claim(batch_size))
                left = until - time.monotonic()
                if found or left <= 0 or bell.interrupted:
                    return found
                await bell.rung(self._pause(left))

    async def settle_async(self, settlings: Sequence[Settling]) -> Sequence[SettleResult]:
        results = await self._perform(self._log.settle(settlings))
        self._came_back(settlings)
        return results

    async def extend_async(self, deliveries: Sequence[Delivery]) -> Sequence[float | None]:
        return await self._perform(self._log.extend(deliveries))

    async def dispatch_async(self, transactions: Sequence[Transaction]) -> Sequence[Confirmation]:
        return await self._perform(self._log.dispatch([self.stamped(transaction) for transaction in transactions]))

    async def depth_async(self) -> Depth:
        return await self._perform(self._log.depth())

    async def list_dead_async(
        self, query: DeadLetterQuery, *, after: str | None = None, limit: int = 100
    ) -> Sequence[DeadLetterRecord]:
        return await self._perform(self._log.list_dead(query, after=after, limit=limit))

    async def replay_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        results = await self._perform(self._log.replay_dead(places))
        self._arrivals.arrived()
        return results

    async def discard_dead_async(self, places: Sequence[str]) -> Sequence[ReplayResult]:
        return await self._perform(self._log.discard_dead(places))
