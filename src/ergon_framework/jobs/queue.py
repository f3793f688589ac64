"""The queue of one kind of executors; its transactions include the claims on their messages.

An executor is a process that runs jobs. A job has a row and a message. The message is claimed with a receipt, which has
the worker instance and the token of the claim; the row of the job stores both, so that only the present claim can write
the end of an attempt. A claim has a lease: it expires unless it is renewed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.base import Delivery
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.postgres.claims import PostgresReceipt
from ergon_framework.connectors.postgres.client import DatabaseClient
from ergon_framework.connectors.postgres.sql import SECONDS_UNTIL_DUE
from ergon_framework.database.operation import Operation, Query
from ergon_framework.jobs.model import CODEC, queue_name

#: Seconds that a fetch waits for capacity; after that it claims one job anyway, because an empty fetch would mean that
#: there are none.
CAPACITY_WAIT_SECONDS: Final = 5.0
#: Seconds that a fetch waits for more capacity, so that one claim returns many jobs.
LINGER_SECONDS: Final = 0.01


class FetchCapacity(NamedTuple):
    """The number of jobs that can be claimed, and the number that is worth a claim."""

    available: int
    worthwhile: int


class ClaimedJob(NamedTuple):
    """The body of a job's message, and the claim on it."""

    body: Any
    receipt: PostgresReceipt


class JobQueue(PostgresQueue):
    """The queue of the executors *kind*; a JobClient submits their jobs.

    *get_capacity* returns how many jobs the executors can take; without it, a fetch claims as many as it is asked for.
    """

    def __init__(
        self,
        kind: str,
        *,
        dsn: str | None = None,
        lease: float = 30.0,
        get_capacity: Callable[[], FetchCapacity] | None = None,
    ) -> None:
        super().__init__(queue_name(kind), dsn=dsn, lease=lease, codec=CODEC)
        self.kind = kind
        self._get_capacity = get_capacity
        #: Set when there may be more capacity.
        self.capacity_freed = asyncio.Event()

    def _select_codec(self, codec: Codec | None) -> Codec:
        # Functions of the database write jobs, and they do not encrypt.
        return codec or CODEC

    @property
    def dsn(self) -> str:
        """The address of its database."""
        return self._require_dsn()

    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        """Fetch at most as many jobs as there is capacity for; without any, wait a while for capacity first."""
        if self._get_capacity is None:
            return await super().fetch_transactions_async(batch_size, **extra)
        # Jobs of the previous fetch start during this pause, so that the capacity counts them as running.
        await asyncio.sleep(0)
        if self._get_capacity().available < 1:
            with suppress(TimeoutError):
                async with asyncio.timeout(CAPACITY_WAIT_SECONDS):
                    while self._get_capacity().available < 1:
                        self.capacity_freed.clear()
                        await self.capacity_freed.wait()
        if self._get_capacity().available < self._get_capacity().worthwhile:
            await asyncio.sleep(LINGER_SECONDS)
        return await super().fetch_transactions_async(max(1, min(batch_size, self._get_capacity().available)), **extra)

    def _claim(self, client: DatabaseClient, count: int) -> Operation[list[Delivery]]:
        deliveries = yield from super()._claim(client, count)
        for delivery in deliveries:
            if delivery.error is None:
                transaction = delivery.transaction
                delivery.transaction = transaction.replace(payload=ClaimedJob(transaction.payload, delivery.receipt))
        if not deliveries and self._number is not None:
            # Clients submit jobs with a later due time: an idle worker needs the time of its next poll.
            due = yield Query(SECONDS_UNTIL_DUE, {"queue": self._number})
            if due:
                self._wake_after(due[0][0])
        return deliveries
