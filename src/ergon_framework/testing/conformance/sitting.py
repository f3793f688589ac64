"""CheckContext: one check on one system in one variant, with its own queue."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from ergon_framework.connectors.base import Ack, Capabilities, Delivery, Release, SettleResult
from ergon_framework.errors import ConnectionLostError
from ergon_framework.testing.conformance.candidate import ConnectorUnderTest, Server
from ergon_framework.testing.conformance.check import CheckFailed, expect
from ergon_framework.testing.conformance.client import Client, Variant, in_thread
from ergon_framework.transaction import Transaction


class CheckContext:
    """The queue, its clients, and the system under test."""

    def __init__(self, candidate: ConnectorUnderTest, variant: Variant, *, lease: float) -> None:
        self.candidate = candidate
        self.variant: Variant = variant
        self.lease = lease
        self.queue = f"exam-{uuid.uuid4().hex[:12]}"
        self._clients: list[Client] = []

    @property
    def capabilities(self) -> Capabilities:
        return self._clients[0].capabilities

    async def client(self) -> Client:
        """Create and open a client. On a log the latest client has the records, so create producers first."""
        connector = self.candidate.client(self.queue, lease=self.lease)
        client = Client(connector, self.variant, patience=self.candidate.patience, arrival=self.candidate.arrival)
        self._clients.append(client)
        await client.open()
        return client

    async def crash_and_reconnect(self, client: Client) -> Client:
        """Crash *client* and return a new client in its place."""
        await in_thread(lambda: self.candidate.crash(client.connector))
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
        return Transaction(f"tx-{number}", {"number": number} if payload is None else payload, **fields)

    def transactions(self, count: int, **fields: Any) -> list[Transaction]:
        return [self.transaction(number, **fields) for number in range(count)]

    async def until(self, holds: Callable[[], object], words: str, *, within: float | None = None) -> None:
        """Wait until *condition* holds."""
        within = self.candidate.arrival if within is None else within
        end = time.monotonic() + within
        while not holds():
            expect(time.monotonic() < end, f"{words}: not within {within:g} s")
            await asyncio.sleep(0.005)

    # -- outages ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def outage(self, fault: str) -> AsyncIterator[None]:
        """Make the server unreachable during the block, and reachable again afterwards."""
        server = self._server
        try:
            await in_thread(getattr(server, fault))
            yield
        finally:
            await in_thread(server.heal_network)
            await in_thread(server.start)

    @property
    def _server(self) -> Server:
        if self.candidate.server is None:
            raise CheckFailed("the candidate has no server")
        return self.candidate.server

    async def retry_until_connected(self, call: Callable[[], Any]) -> Any:
        """Retry *call* while it raises ConnectionLostError, until the connection is restored; return its result."""
        end = time.monotonic() + self.candidate.arrival
        while True:
            try:
                return await call()
            except ConnectionLostError as error:
                if time.monotonic() > end:
                    raise CheckFailed(
                        f"the same client still fails {self.candidate.arrival:g} s after the line is back: {error}"
                    ) from error
                await asyncio.sleep(0.02)

    async def drain(
        self, client: Client, ids: Collection[str], *, may: Collection[str] = (), held: Sequence[Delivery] = ()
    ) -> None:
        """Ack until each of *ids* was settled once; *optional* ids may also be missing.

        The client first releases the claims that it has *claimed* all the time: without a lease they would never end.
        """
        if held:
            await self.retry_until_connected(lambda: client.settle(*((delivery, Release()) for delivery in held)))
        missing, end = set(ids), time.monotonic() + self.lease + self.candidate.arrival
        while missing:
            expect(time.monotonic() < end, f"{sorted(missing)} did not come again: lost")
            for delivery in await self.retry_until_connected(lambda: client.fetch(10, wait=0.1)):
                name = delivery.transaction.id
                (result,) = await self.retry_until_connected(partial(client.settle, (delivery, Ack())))
                if result is SettleResult.SETTLED:
                    expect(name in missing or name in may, f"{name} came although it was settled")
                    missing.discard(name)
