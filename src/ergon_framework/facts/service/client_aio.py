"""AsyncBoundaryClient: a boundary that is somewhere else, in the async flavour."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import grpc

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.blob import to_pieces
from ergon_framework.facts.boundary import (
    Appended,
    Appending,
    AsyncBlobSource,
    AsyncBoundary,
    BoundaryCapabilities,
    LogState,
    Pruned,
    Unlisten,
)
from ergon_framework.facts.model import Cursor, Envelope, Fact, FactConfirmation, Pair, Stored, StoredFact
from ergon_framework.facts.service import calls, faults
from ergon_framework.facts.service.address import Address
from ergon_framework.facts.service.bell import Bell
from ergon_framework.facts.service.calls import SERVICE, Asked
from ergon_framework.facts.service.client import BoundaryClient
from ergon_framework.facts.service.line import AsyncLine
from ergon_framework.facts.service.messages import written
from ergon_framework.facts.service.transfer import Download, Upload
from ergon_framework.facts.service.transfers_aio import download, upload

T = TypeVar("T")


class AsyncBoundaryClient(AsyncBoundary):
    """A store behind a service. A line that is down is ConnectionLost: nobody knows whether it was done.

    ``epoch`` and ``capabilities`` are asked for once, which holds the event loop up if ``describe`` was not awaited
    before; ``describe`` asks again.
    """

    def __init__(self, address: Address) -> None:
        self._line = AsyncLine(address)
        self._deadline = address.deadline
        self._bell = Bell(address)
        self._described: tuple[str, BoundaryCapabilities] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Calls that are under way are cancelled."""
        self._bell.close()
        await self._line.close()

    async def describe(self) -> tuple[str, BoundaryCapabilities]:
        """The epoch and the capabilities of the store as they are now."""
        self._described = await self._ask(calls.describe())
        return self._described

    @property
    def epoch(self) -> str:
        return self._known()[0]

    @property
    def capabilities(self) -> BoundaryCapabilities:
        return self._known()[1]

    def _known(self) -> tuple[str, BoundaryCapabilities]:
        if self._described is None:
            # A property cannot wait; the other flavour can.
            with BoundaryClient(self._line.address) as client:
                self._described = client.describe()
        return self._described

    def listen(self, wake: Callable[[], None]) -> Unlisten:
        return self._bell.listen(wake)

    # -- facts ----------------------------------------------------------------------------------------

    async def append_fact_async(self, envelope: Envelope, fact: Fact) -> FactConfirmation:
        return await self._ask(calls.append_fact(envelope, fact))

    async def append_facts_async(self, facts: Sequence[Appending]) -> Sequence[Appended]:
        return [result for asked in calls.append_facts(facts) for result in await self._ask(asked)]

    async def forward_facts_async(self, facts: Sequence[StoredFact]) -> Sequence[Appended]:  # noqa: ARG002 - not here
        raise calls.not_offered("forwarding facts")

    async def get_fact_async(self, from_zone: str, message_id: str) -> FactConfirmation | None:
        return await self._ask(calls.get_fact(from_zone, message_id))

    # -- reading --------------------------------------------------------------------------------------

    async def fetch_facts_async(
        self, reader: str, pair: Pair, limit: int, *, after: Cursor | None = None, max_readers: int | None = None
    ) -> Sequence[StoredFact]:
        if max_readers is not None:
            raise calls.not_offered("a limit of readers")
        return await self._ask(calls.fetch_facts(reader, pair, limit, after))

    async def confirm_receipt_async(self, reader: str, pair: Pair, cursor: Cursor) -> None:
        await self._ask(calls.confirm_receipt(reader, pair, cursor))

    async def cursor_of_async(self, reader: str, pair: Pair) -> Cursor | None:
        return await self._ask(calls.cursor_of(reader, pair))

    async def end_of_async(self, pair: Pair) -> Cursor | None:
        return await self._ask(calls.end_of(pair))

    async def cursor_at_async(self, pair: Pair, unix_ms: int) -> Cursor | None:
        return await self._ask(calls.cursor_at(pair, unix_ms))

    async def retire_reader_async(self, reader: str, pair: Pair, *, by: str = "") -> bool:
        return await self._ask(calls.retire_reader(reader, pair, by))

    async def survey_async(self) -> Sequence[LogState]:
        return await self._ask(calls.survey())

    # -- artifacts ------------------------------------------------------------------------------------

    async def put_object_async(
        self,
        bucket: str,
        key: str,
        blob: AsyncBlobSource,
        *,
        expected: Stored | None = None,
        begin: int = 0,
        zone: str = "",
    ) -> Stored:
        pieces = blob if isinstance(blob, AsyncIterable) else to_pieces(blob)
        given = Upload(bucket, key, pieces, expected, begin, zone)
        return await upload(given, self._line, received=partial(self.received_async, zone=zone))

    async def received_async(self, bucket: str, key: str, expected: Stored, *, zone: str = "") -> int:
        return await self._ask(calls.received(bucket, key, expected, zone))

    def get_object_async(self, bucket: str, key: str, *, begin: int = 0, zone: str = "") -> AsyncIterator[bytes]:
        return download(Download(bucket, key, begin, zone), self._line)

    # -- retention ------------------------------------------------------------------------------------

    async def prune_async(self, before_unix_ms: int) -> Pruned:  # noqa: ARG002 - not here
        raise calls.not_offered("retention")

    async def _ask(self, asked: Asked[T]) -> T:
        async with self._line.open() as held:
            call: Any = held.call("unary_unary", SERVICE + asked.method)
            try:
                data = await call(written(asked.request), timeout=self._deadline)
            except grpc.RpcError as error:
                failed: Any = error
                raise faults.raised(failed, asked.method) from error
            except grpc.aio.UsageError as error:
                raise ConnectionLost(f"{asked.method} was not sent, the client is closed; make another one") from error
        return asked.result(data)
