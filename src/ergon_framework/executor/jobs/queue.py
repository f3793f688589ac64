"""JobQueue: the queue of one kind of executors, whose transactions bring the claims that they are held by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.base import Delivery
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.postgres.home import Home
from ergon_framework.connectors.postgres.receipt import Receipt
from ergon_framework.connectors.postgres.statements import DUE
from ergon_framework.executor.jobs.model import queue_name
from ergon_framework.executor.jobs.request import CODEC
from ergon_framework.schema.operation import Operation, Query

#: Seconds that a fetch waits until there is use for a job; then one is taken all the same, because an empty fetch
#: would mean that there are none.
PATIENCE: Final = 5.0
#: Seconds that it waits for more room, so that one claim brings many.
LINGER: Final = 0.01


class Room(NamedTuple):
    """How many jobs there is use for, and how many are worth a claim."""

    left: int
    enough: int


class Held(NamedTuple):
    """What a message of a job says, and the claim on it."""

    body: Any
    receipt: Receipt


class JobQueue(PostgresQueue):
    """The queue of the executors called *kind*; their jobs are submitted by a JobClient."""

    def __init__(
        self, kind: str, *, dsn: str | None = None, lease: float = 30.0, room: Callable[[], Room] | None = None
    ) -> None:
        super().__init__(queue_name(kind), dsn=dsn, lease=lease, codec=CODEC)
        self.kind = kind
        self._room = room
        #: To be set when there may be more room.
        self.freed = asyncio.Event()

    def _select_codec(self, codec: Codec | None) -> Codec:
        # Jobs are written by functions of the database, which do not encrypt.
        return codec or CODEC

    @property
    def address(self) -> str:
        """Where its database is."""
        return self._address()

    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        """As every queue, but no more than there is use for; without any, it waits a while for that first."""
        if self._room is None:
            return await super().fetch_transactions_async(batch_size, **extra)
        # Those that were fetched before begin now, and are counted then.
        await asyncio.sleep(0)
        if self._room().left < 1:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE):
                    while self._room().left < 1:
                        self.freed.clear()
                        await self.freed.wait()
        if self._room().left < self._room().enough:
            await asyncio.sleep(LINGER)
        return await super().fetch_transactions_async(max(1, min(batch_size, self._room().left)), **extra)

    def _claimed(self, home: Home, count: int) -> Operation[list[Delivery]]:
        found = yield from super()._claimed(home, count)
        for delivery in found:
            if delivery.error is None:
                transaction = delivery.transaction
                delivery.transaction = transaction.replace(payload=Held(transaction.payload, delivery.receipt))
        if not found and self._number is not None:
            # Jobs are submitted for later, by others: whoever sleeps has to know until when.
            due = yield Query(DUE, {"queue": self._number})
            if due:
                self._remind(due[0][0])
        return found
