"""The client of a connector under test, with the same calls in both variants, and the context of a check.

A check runs on one system in one variant (sync or async), with its own queue. A claim is a client's right to a fetched
message until it is settled (acked, deferred, released or dead-lettered); with a lease, the right expires unless it is
renewed. The system under test is the adapter to a connector: it creates and crashes connectors, and sets the time for
a call (``call_timeout``) and for an expected delivery (``arrival``).
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
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
    Release,
    Settlement,
    SettleResult,
    Unlisten,
)
from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.errors import ConnectionLostError
from ergon_framework.testing.conformance.check import CheckFailed, expect
from ergon_framework.testing.conformance.connector.adapter import ConnectorUnderTest, Server
from ergon_framework.transaction import Transaction

T = TypeVar("T")
Variant: TypeAlias = Literal["sync", "async"]
VARIANTS: Final[tuple[Variant, ...]] = ("sync", "async")

#: Seconds to wait for a delivery that must not arrive.
QUIET_PERIOD_SECONDS: Final = 0.15


async def run_in_thread(call: Callable[[], T]) -> T:
    """Run *call* on a daemon thread, so that a hanging call blocks nothing else; return or raise its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()
    context = copy_context()

    def deliver(outcome: tuple[T | None, BaseException | None]) -> None:
        if not future.done():
            future.set_result(outcome)

    def run() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = context.run(call), None
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            outcome = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=run, name="ergon-conformance", daemon=True).start()
    value, error = await future
    if error is not None:
        raise error
    return value  # type: ignore[return-value]


class RecordingListener:
    """A listener that records its notifications."""

    def __init__(self) -> None:
        self.wake_count = 0
        self.lost_receipts: list[Any] = []

    def wake(self) -> None:
        self.wake_count += 1

    def on_lost(self, receipts: Sequence[Any]) -> None:
        self.lost_receipts.extend(receipts)


class Client:
    """A connector with one coroutine per call; no call may take longer than *call_timeout*."""

    def __init__(
        self, connector: Connector | AsyncConnector, variant: Variant, *, call_timeout: float, arrival: float
    ) -> None:
        self.connector = connector
        self._bridged_connector: Any = as_sync(connector) if variant == "sync" else as_async(connector)
        self._is_sync = variant == "sync"
        self._call_timeout = call_timeout
        self._arrival = arrival

    @property
    def capabilities(self) -> Capabilities:
        return self.connector.capabilities

    def listen(self, listener: RecordingListener) -> Unlisten:
        unlisten: Unlisten = self._bridged_connector.listen(listener)
        return unlisten

    async def open(self) -> None:
        await self._call("open")

    async def close(self) -> None:
        await self._call("close")

    async def fetch(self, count: int, *, wait: float = 0.0) -> Sequence[Delivery]:
        deliveries: Sequence[Delivery] = await self._call("fetch_transactions", count, wait=wait, extra_timeout=wait)
        expect(len(deliveries) <= count, f"a fetch of {count} returned {len(deliveries)}")
        return deliveries

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
        depth: Depth | None = await self._call("depth")
        return depth

    async def list_dead(
        self, query: DeadLetterQuery | None = None, *, after: str | None = None, limit: int = 100
    ) -> list[DeadLetterRecord]:
        return list(await self._call("list_dead", query or DeadLetterQuery(), after=after, limit=limit))

    async def replay_dead(self, *handles: str) -> list[ReplayResult]:
        return list(await self._call("replay_dead", list(handles)))

    async def discard_dead(self, *handles: str) -> list[ReplayResult]:
        return list(await self._call("discard_dead", list(handles)))

    async def replace_dead(self, handle: str, transaction: Transaction) -> ReplayResult:
        result: ReplayResult = await self._call("replace_dead", handle, transaction)
        return result

    # -- with waiting and expectations ----------------------------------------------------------

    async def claim(self, count: int = 1, *, within: float | None = None) -> list[Delivery]:
        """Return *count* deliveries, with as many fetches as necessary."""
        within = self._arrival if within is None else min(within, self._arrival)
        deliveries: list[Delivery] = []
        deadline = time.monotonic() + within
        while len(deliveries) < count:
            deliveries += await self.fetch(count - len(deliveries), wait=min(0.1, within))
            expect(
                len(deliveries) == count or time.monotonic() < deadline,
                f"{len(deliveries)} of {count} transactions came within {within:g} s",
            )
        return deliveries

    async def claim_one(self, *, within: float | None = None) -> Delivery:
        (delivery,) = await self.claim(within=within)
        return delivery

    async def expect_nothing(
        self, *, during: float = QUIET_PERIOD_SECONDS, reason: str = "no delivery was expected"
    ) -> None:
        """Check for *during* seconds that nothing is delivered."""
        deadline = time.monotonic() + during
        while True:
            deliveries = await self.fetch(10, wait=max(0.0, min(0.05, deadline - time.monotonic())))
            expect(not deliveries, f"{reason}, but {[delivery.transaction.id for delivery in deliveries]} came")
            if time.monotonic() >= deadline:
                return
            await asyncio.sleep(0.01)

    async def settle_successfully(self, settlement: Settlement, *deliveries: Delivery) -> None:
        """Settle *deliveries*, all of which are claimed, and expect success."""
        results = await self.settle(*((delivery, settlement) for delivery in deliveries))
        expect(
            all(result is SettleResult.SETTLED for result in results),
            f"settling current claims with {type(settlement).__name__} returned {[str(result) for result in results]}",
        )

    async def ack(self, *deliveries: Delivery) -> None:
        await self.settle_successfully(Ack(), *deliveries)

    async def _call(self, name: str, *args: Any, extra_timeout: float = 0.0, **options: Any) -> Any:
        limit = self._call_timeout + extra_timeout
        try:
            async with asyncio.timeout(limit):
                if self._is_sync:
                    return await run_in_thread(partial(getattr(self._bridged_connector, name), *args, **options))
                return await getattr(self._bridged_connector, f"{name}_async")(*args, **options)
        except TimeoutError as error:
            raise CheckFailed(f"{name} did not return within {limit:g} s, or raised a bare TimeoutError") from error


# -- the context of a check -------------------------------------------------------------------------


class CheckContext:
    """The queue, its clients, and the system under test."""

    def __init__(self, system: ConnectorUnderTest, variant: Variant, *, lease: float) -> None:
        self.system = system
        self.variant: Variant = variant
        self.lease = lease
        self.queue = f"conformance-{uuid.uuid4().hex[:12]}"
        self._clients: list[Client] = []

    @property
    def capabilities(self) -> Capabilities:
        return self._clients[0].capabilities

    async def client(self) -> Client:
        """Create and open a client.

        On a log, the client that was opened last takes over the records from the others, so create producers first.
        """
        connector = self.system.client(self.queue, lease=self.lease)
        client = Client(connector, self.variant, call_timeout=self.system.call_timeout, arrival=self.system.arrival)
        self._clients.append(client)
        await client.open()
        return client

    async def crash_and_reconnect(self, client: Client) -> Client:
        """Crash *client* and return a new client in its place."""
        await run_in_thread(lambda: self.system.crash(client.connector))
        if client.capabilities.lease is None and client.capabilities.mode == "queue":
            await client.close()  # its claims end with its connection
        return await self.client()

    async def let_leases_expire(self) -> None:
        """Wait until claims that are not renewed have ended."""
        await asyncio.sleep(self.lease * 1.2)

    async def close(self) -> None:
        for client in self._clients:
            with suppress(Exception):  # it may have crashed, or been closed by the check
                await client.close()

    def transaction(self, number: int | str = 0, payload: Any = None, **fields: Any) -> Transaction:
        return Transaction({"number": number} if payload is None else payload, id=f"tx-{number}", **fields)

    def transactions(self, count: int, **fields: Any) -> list[Transaction]:
        return [self.transaction(number, **fields) for number in range(count)]

    async def wait_until(
        self, condition: Callable[[], object], description: str, *, within: float | None = None
    ) -> None:
        """Wait until *condition* holds."""
        within = self.system.arrival if within is None else within
        deadline = time.monotonic() + within
        while not condition():
            expect(time.monotonic() < deadline, f"{description}: not within {within:g} s")
            await asyncio.sleep(0.005)

    # -- outages ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def outage(self, fault: str) -> AsyncIterator[None]:
        """Make the server unreachable during the block, and reachable again afterwards."""
        server = self._server
        try:
            await run_in_thread(getattr(server, fault))
            yield
        finally:
            await run_in_thread(server.heal_network)
            await run_in_thread(server.start)

    @property
    def _server(self) -> Server:
        if self.system.server is None:
            raise CheckFailed("the system under test has no server")
        return self.system.server

    async def retry_until_connected(self, call: Callable[[], Any]) -> Any:
        """Retry *call* while it raises ConnectionLostError, until the connection is restored; return its result."""
        deadline = time.monotonic() + self.system.arrival
        while True:
            try:
                return await call()
            except ConnectionLostError as error:
                if time.monotonic() > deadline:
                    raise CheckFailed(
                        f"the same client still fails {self.system.arrival:g} s after the outage: {error}"
                    ) from error
                await asyncio.sleep(0.02)

    async def drain(
        self, client: Client, ids: Collection[str], *, optional: Collection[str] = (), claimed: Sequence[Delivery] = ()
    ) -> None:
        """Ack until each of *ids* was settled once; *optional* ids may also be missing.

        The client first releases *claimed*, which it has held all the time: without a lease those claims never end.
        """
        if claimed:
            await self.retry_until_connected(lambda: client.settle(*((delivery, Release()) for delivery in claimed)))
        missing, deadline = set(ids), time.monotonic() + self.lease + self.system.arrival
        while missing:
            expect(time.monotonic() < deadline, f"{sorted(missing)} were not redelivered: lost")
            for delivery in await self.retry_until_connected(lambda: client.fetch(10, wait=0.1)):
                name = delivery.transaction.id
                (result,) = await self.retry_until_connected(partial(client.settle, (delivery, Ack())))
                if result is SettleResult.SETTLED:
                    expect(name in missing or name in optional, f"{name} was redelivered although it was settled")
                    missing.discard(name)
