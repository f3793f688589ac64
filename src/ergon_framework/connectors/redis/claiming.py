"""Claiming: how messages of one queue come into this worker's hands.

What nobody renewed for a lease is looked for a few times per lease, with a cursor that is kept from
fetch to fetch, so that the look is short however much is in flight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ergon_framework.connectors.base import Delivery, Release, Settling, UndecodableError
from ergon_framework.connectors.limits import FetchLimits
from ergon_framework.connectors.redis import scripts
from ergon_framework.connectors.redis.doorbell import Seen
from ergon_framework.connectors.redis.keys import Keys
from ergon_framework.connectors.redis.messages import DELIVERIES, Messages, counted
from ergon_framework.connectors.redis.operation import Operation
from ergon_framework.connectors.redis.receipt import Receipt
from ergon_framework.transaction import Transaction

#: The group in which all workers of a queue share its stream.
GROUP: Final = "ergon"
_START: Final = b"0-0"
#: Seconds between two looks for what is in dead hands, at most; for short leases it is a quarter of them.
_REAP: Final = 5.0
#: Seconds for which a fetch takes only what is new, as long as there is more of that than it asks for.
_GLANCE: Final = 0.25
#: Most that one fetch brings: as many as one command can name.
_MOST: Final = 1_000
#: Seconds between two looks for what a fetch took whose answer never came, and how much is looked through.
_DISOWN: Final = 1.0
_HANDS: Final = 10_000
#: More deliveries than any message has.
_UNCOUNTED: Final = 2**31


class Claiming:
    """The claims of one queue by one consumer."""

    def __init__(
        self,
        keys: Keys,
        messages: Messages,
        *,
        consumer: str,
        lease: float,
        limits: FetchLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._messages = messages
        self.consumer = consumer
        self._lease = lease
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        #: By entry, what is in hand.
        self.held: dict[bytes, Receipt] = {}
        #: When everything was looked through, while there was more than was asked for.
        self._looked = float("-inf")
        self._cursor = b""
        self._reaped = float("-inf")
        #: Whether the server has refused to store more, at the latest full look or settlement, for want of memory.
        self.memory_full = False
        self._fetching = 0
        #: How many fetches have begun.
        self._begun = 0
        #: Until when there may be claims of which nobody here knows.
        self._doubted = float("-inf")
        self._disowned = float("-inf")

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Around every fetch: one whose answer never came may have claimed something."""
        with self._lock:
            self._fetching += 1
            self._begun += 1
        try:
            yield
        except BaseException:
            self._doubted = self._clock() + self._lease
            raise
        finally:
            with self._lock:
                self._fetching -= 1

    def claim(self, count: int, *, asks: bool) -> Operation[tuple[list[Delivery], list[Receipt], Seen | None]]:
        """At most *count* messages; which claims were lost to oneself; and what was seen if there were none."""
        want = min(count, _MOST)
        found = (yield from self._read(want)) if self._clock() < self._looked + _GLANCE else []
        lost: list[Receipt] = []
        seen = None
        if len(found) < want:
            more, lost, seen = yield from self._looked_for(want - len(found), asks=asks and not found)
            found += more
        if len(found) < want:
            self._looked = float("-inf")
        return found, lost, seen

    def _read(self, want: int) -> Operation[list[Delivery]]:
        """What was never handed out, and nothing else."""
        began = self._clock()
        taken = yield from scripts.READ.run((self._keys.stream, self._keys.free), *self._bounds(want))
        return [self._delivery(entry, began + self._lease) for entry in taken]

    def _bounds(self, want: int) -> tuple[Any, ...]:
        """Return the arguments that say what one claim may take."""
        most = self._limits.max_deliveries
        last_delivery = _UNCOUNTED if most is None else most
        messages = self._messages
        return GROUP, self.consumer, want, messages.body, messages.largest, self._limits.max_bytes, last_delivery

    def _looked_for(self, want: int, *, asks: bool) -> Operation[tuple[list[Delivery], list[Receipt], Seen | None]]:
        """Also what is due, what was given back and what is in dead hands."""
        keys, cursor = self._keys, self._next_cursor()
        self._looked = began = self._clock()
        answer = yield from scripts.FETCH.run(
            (keys.stream, keys.free, keys.later, keys.due, keys.bell),
            *self._bounds(want),
            max(1, round(self._lease * 1000)),
            cursor,
            int(asks),
        )
        if cursor:
            self._cursor = b"" if answer[0] == _START else answer[0]
        until = began + self._lease
        lost: list[Receipt] = []
        found = []
        for entry in answer[1]:
            before = self.held.get(entry[0])
            if before is not None:
                lost.append(before)
            found.append(self._delivery(entry, until))
        seen = None
        self.memory_full = bool(answer[2])
        if len(answer) > 3:  # noqa: PLR2004 - the rest is for those who find nothing
            last, rung, soon = answer[3:]
            seen = Seen(last, rung, None if soon < 0 else self._clock() + soon / 1000)
        return found, lost, seen

    def _next_cursor(self) -> bytes:
        now = self._clock()
        if not self._cursor and now >= self._reaped + min(self._lease / 4, _REAP):
            self._reaped, self._cursor = now, _START
        return self._cursor

    def _delivery(self, entry: Sequence[Any], until: float) -> Delivery:
        place, fields, count, free, size = entry
        body, headers = self._messages.split(fields)
        transaction, error = self._messages.read(body, headers) if size < 0 else self._messages.describe(size, headers)
        deliveries = max(1, counted(headers) + count - free) if free or DELIVERIES in headers else count
        readable = not isinstance(error, UndecodableError)
        receipt = self.held[place] = Receipt(place, self.consumer, count, deliveries, readable)
        return Delivery(transaction, receipt, deliveries, until, error)

    def settled(self, receipt: Receipt) -> None:
        """It is in hand no more."""
        if self.held.get(receipt.id) == receipt:
            self.held.pop(receipt.id, None)

    def unknown(self) -> Operation[list[Settling]]:
        """What this consumer holds without knowing it, to be given back: the answer of its fetch never came.

        Looked for now and then until it would have come back by itself: what was sent may arrive at
        the server after it was given up.
        """
        now = self._clock()
        with self._lock:
            others = self._fetching > 1  # what they have claimed is not in hand yet
            begun = self._begun
        if now > self._doubted or now < self._disowned + _DISOWN or others:
            return []
        self._disowned = now
        pending = yield ("XPENDING", self._keys.stream, GROUP, "-", "+", _HANDS, self.consumer)
        with self._lock:
            if self._begun != begun:
                return []  # the answer may list what a fetch that began meanwhile has claimed
        release = Release()
        return [
            (Delivery(Transaction("unknown", None), Receipt(place, self.consumer, count, 0)), release)
            for place, _, _, count in pending
            if place not in self.held
        ]
