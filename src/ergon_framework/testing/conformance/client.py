"""Client: one client of the connector under test, with the same calls in both variants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, Final, Literal, TypeAlias, TypeVar

from ergon_framework.connectors.base import (
    Ack,
    AsyncConnector,
    Capabilities,
    Confirmation,
    Connector,
    Delivery,
    Depth,
    Settlement,
    SettleResult,
    Unlisten,
)
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.testing.conformance.check import CheckFailed, expect
from ergon_framework.transaction import Transaction

T = TypeVar("T")
Variant: TypeAlias = Literal["sync", "async"]
VARIANTS: Final[tuple[Variant, ...]] = ("sync", "async")

#: Seconds to wait for a delivery that must not arrive.
QUIET: Final = 0.15


async def in_thread(call: Callable[[], T]) -> T:
    """Run *call* on a daemon thread, so that a hanging call blocks nothing else; return or raise its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = copy_context()

    def arrive(came: tuple[T | None, BaseException | None]) -> None:
        if not future.done():
            future.set_result(came)

    def job() -> None:
        came: tuple[T | None, BaseException | None]
        try:
            came = context.run(call), None
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            came = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(arrive, came)

    threading.Thread(target=job, name="ergon-exam", daemon=True).start()
    value, error = await future
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class RecordingListener:
    """A listener that records its notifications."""

    def __init__(self) -> None:
        self.wakes = 0
        self.gone: list[Any] = []

    def wake(self) -> None:
        self.wakes += 1

    def on_lost(self, receipts: Sequence[Any]) -> None:
        self.gone.extend(receipts)


class Client:
    """A connector with one coroutine per call; no call may take longer than *patience*."""

    def __init__(
        self, connector: Connector | AsyncConnector, variant: Variant, *, patience: float, arrival: float
    ) -> None:
        self.connector = connector
        self._flavour: Any = as_sync(connector) if variant == "sync" else as_async(connector)
        self._is_sync = variant == "sync"
        self._patience = patience
        self._arrival = arrival

    @property
    def capabilities(self) -> Capabilities:
        return self.connector.capabilities

    def listen(self, ear: RecordingListener) -> Unlisten:
        unlisten: Unlisten = self._flavour.listen(ear)
        return unlisten

    async def open(self) -> None:
        await self._call("open")

    async def close(self) -> None:
        await self._call("close")

    async def fetch(self, count: int, *, wait: float = 0.0) -> Sequence[Delivery]:
        found: Sequence[Delivery] = await self._call("fetch_transactions", count, wait=wait, longer=wait)
        expect(len(found) <= count, f"a fetch of {count} brought {len(found)}")
        return found

    async def settle(self, *settlings: tuple[Delivery, Settlement]) -> list[SettleResult]:
        results = list(await self._call("settle", list(settlings)))
        expect(len(results) == len(settlings), f"{len(settlings)} settlements had {len(results)} results")
        return results

    async def extend(self, *deliveries: Delivery) -> list[float | None]:
        results = list(await self._call("extend", list(deliveries)))
        expect(len(results) == len(deliveries), f"{len(deliveries)} renewals had {len(results)} results")
        return results

    async def dispatch(self, *transactions: Transaction) -> list[Confirmation]:
        return list(await self._call("dispatch", list(transactions)))

    async def depth(self) -> Depth | None:
        found: Depth | None = await self._call("depth")
        return found

    async def list_dead(
        self, query: DeadLetterQuery | None = None, *, after: str | None = None, limit: int = 100
    ) -> list[DeadLetterRecord]:
        return list(await self._call("list_dead", query or DeadLetterQuery(), after=after, limit=limit))

    async def replay_dead(self, *places: str) -> list[ReplayResult]:
        return list(await self._call("replay_dead", list(places)))

    async def discard_dead(self, *places: str) -> list[ReplayResult]:
        return list(await self._call("discard_dead", list(places)))

    async def replace_dead(self, place: str, transaction: Transaction) -> ReplayResult:
        result: ReplayResult = await self._call("replace_dead", place, transaction)
        return result

    # -- with waiting and expectations ----------------------------------------------------------

    async def claim(self, count: int = 1, *, within: float | None = None) -> list[Delivery]:
        """Return *count* deliveries, with as many fetches as necessary."""
        within = self._arrival if within is None else min(within, self._arrival)
        found: list[Delivery] = []
        end = time.monotonic() + within
        while len(found) < count:
            found += await self.fetch(count - len(found), wait=min(0.1, within))
            expect(
                len(found) == count or time.monotonic() < end,
                f"{len(found)} of {count} transactions came within {within:g} s",
            )
        return found

    async def claim_one(self, *, within: float | None = None) -> Delivery:
        (delivery,) = await self.claim(within=within)
        return delivery

    async def finds_nothing(self, *, during: float = QUIET, because: str = "nothing was to come") -> None:
        """Check for *during* seconds that nothing is delivered."""
        end = time.monotonic() + during
        while True:
            found = await self.fetch(10, wait=max(0.0, min(0.05, end - time.monotonic())))
            expect(not found, f"{because}, but {[delivery.transaction.id for delivery in found]} came")
            if time.monotonic() >= end:
                return
            await asyncio.sleep(0.01)

    async def settles(self, settlement: Settlement, *deliveries: Delivery) -> None:
        """Settle *deliveries*, all of which are claimed, and expect success."""
        results = await self.settle(*((delivery, settlement) for delivery in deliveries))
        expect(
            all(result is SettleResult.SETTLED for result in results),
            f"settling held claims with {type(settlement).__name__} answered {[str(result) for result in results]}",
        )

    async def ack(self, *deliveries: Delivery) -> None:
        await self.settles(Ack(), *deliveries)

    async def _call(self, name: str, *args: Any, longer: float = 0.0, **extra: Any) -> Any:
        limit = self._patience + longer
        try:
            async with asyncio.timeout(limit):
                if self._is_sync:
                    return await in_thread(partial(getattr(self._flavour, name), *args, **extra))
                return await getattr(self._flavour, f"{name}_async")(*args, **extra)
        except TimeoutError as error:
            raise CheckFailed(
                f"{name} did not come back within {limit:g} s, or gave up with a bare TimeoutError"
            ) from error
