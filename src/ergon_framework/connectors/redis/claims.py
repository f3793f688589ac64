"""Claims on the messages of one queue by this worker, and the receipts by which it settles them.

A claim is a worker's exclusive right to process a message until its lease ends. In Redis it is an entry in the pending
list of the consumer group: the worker is a consumer, and the claim count of the entry identifies the claim. An
unconfirmed claim is one whose answer never arrived, so the worker does not know that it has it.

Expired claims are searched a few times per lease, with a cursor that is kept from fetch to fetch, so that each search
is short however many messages are in flight.

An Operation is a generator that yields commands and receives their answers; a thread or an event loop runs it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.base import Delivery, Release, SettlementRequest, UndecodableError
from ergon_framework.connectors.limits import FetchLimits
from ergon_framework.connectors.redis import scripts
from ergon_framework.connectors.redis.connection import Operation
from ergon_framework.connectors.redis.messages import DELIVERIES_HEADER, Messages, QueueKeys, previous_deliveries
from ergon_framework.connectors.redis.notify import EmptyFetchState
from ergon_framework.transaction import Transaction


class RedisReceipt(NamedTuple):
    """The claim on one entry of the stream: its consumer, and the number of claims of the entry so far.

    Every claim of an entry increments the count, by any consumer, so that no two claims have the same number.
    """

    id: bytes
    consumer: str
    claim_count: int
    deliveries: int
    readable: bool = True


#: The consumer group through which all workers of a queue share its stream.
GROUP: Final = "ergon"
_FIRST_ID: Final = b"0-0"
#: Maximum seconds between two searches for expired claims; for short leases a quarter of the lease.
_MAX_REAP_INTERVAL_SECONDS: Final = 5.0
#: Seconds for which a fetch takes only new messages, as long as there are more of them than it asks for.
_NEW_ONLY_SECONDS: Final = 0.25
#: Largest batch of one fetch: one command can name that many entries.
_MAX_BATCH: Final = 1_000
#: Seconds between two searches for unconfirmed claims, and how many pending entries a search reads.
_UNCONFIRMED_SEARCH_SECONDS: Final = 1.0
_MAX_PENDING_READ: Final = 10_000
#: The delivery limit if none is set; no message reaches it.
_NO_DELIVERY_LIMIT: Final = 2**31


class ClaimManager:
    """The claims of one queue by one consumer."""

    def __init__(
        self,
        keys: QueueKeys,
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
        #: The receipts of messages in flight, by entry id.
        self.held: dict[bytes, RedisReceipt] = {}
        #: The time of the last fetch of all kinds of messages, if no fetch since has returned fewer than it asked for.
        self._last_full_fetch = float("-inf")
        #: Where the search for expired claims continues at the next fetch; empty if no search is in progress.
        self._cursor = b""
        self._last_reap = float("-inf")
        #: Whether the server rejected a write for lack of memory, at the latest fetch of all kinds or settlement.
        self.memory_full = False
        self._running_fetches = 0
        #: Number of fetches begun so far.
        self._started_fetches = 0
        #: The time until which this consumer may have claims that it does not know of.
        self._unconfirmed_until = float("-inf")
        self._last_unconfirmed_search = float("-inf")

    @contextmanager
    def track_fetch(self) -> Iterator[None]:
        """Track a running fetch: one whose answer never came may have claimed messages."""
        with self._lock:
            self._running_fetches += 1
            self._started_fetches += 1
        try:
            yield
        except BaseException:
            self._unconfirmed_until = self._clock() + self._lease
            raise
        finally:
            with self._lock:
                self._running_fetches -= 1

    def claim(
        self, count: int, *, wants_wakeup: bool
    ) -> Operation[tuple[list[Delivery], list[RedisReceipt], EmptyFetchState | None]]:
        """Claim at most *count* messages; return them and the own claims that were found to be lost.

        The third value is the state from which to wait for a message; None if there were messages or *wants_wakeup* is
        false.
        """
        limit = min(count, _MAX_BATCH)
        deliveries = (
            (yield from self._fetch_new(limit)) if self._clock() < self._last_full_fetch + _NEW_ONLY_SECONDS else []
        )
        lost: list[RedisReceipt] = []
        state = None
        if len(deliveries) < limit:
            more, lost, state = yield from self._fetch_all(
                limit - len(deliveries), wants_wakeup=wants_wakeup and not deliveries
            )
            deliveries += more
        if len(deliveries) < limit:
            self._last_full_fetch = float("-inf")
        return deliveries, lost, state

    def _fetch_new(self, limit: int) -> Operation[list[Delivery]]:
        """Fetch only messages that were never delivered."""
        began = self._clock()
        entries = yield from scripts.READ.run((self._keys.stream, self._keys.free), *self._build_limits(limit))
        return [self._to_delivery(entry, began + self._lease) for entry in entries]

    def _build_limits(self, limit: int) -> tuple[Any, ...]:
        """Return the script arguments with the limits of one claim."""
        max_deliveries = self._limits.max_deliveries
        last_delivery = _NO_DELIVERY_LIMIT if max_deliveries is None else max_deliveries
        messages = self._messages
        return (
            GROUP,
            self.consumer,
            limit,
            messages.body_field,
            messages.max_body_bytes,
            self._limits.max_bytes,
            last_delivery,
        )

    def _fetch_all(
        self, limit: int, *, wants_wakeup: bool
    ) -> Operation[tuple[list[Delivery], list[RedisReceipt], EmptyFetchState | None]]:
        """Fetch due, released and expired messages as well as new ones."""
        keys, cursor = self._keys, self._next_cursor()
        self._last_full_fetch = began = self._clock()
        answer = yield from scripts.FETCH.run(
            (keys.stream, keys.free, keys.later, keys.due, keys.bell),
            *self._build_limits(limit),
            max(1, round(self._lease * 1000)),
            cursor,
            int(wants_wakeup),
        )
        if cursor:
            self._cursor = b"" if answer[0] == _FIRST_ID else answer[0]
        until = began + self._lease
        lost: list[RedisReceipt] = []
        deliveries = []
        for entry in answer[1]:
            previous = self.held.get(entry[0])
            if previous is not None:
                lost.append(previous)
            deliveries.append(self._to_delivery(entry, until))
        state = None
        self.memory_full = bool(answer[2])
        if len(answer) > 3:  # noqa: PLR2004 - an empty fetch has more values
            last_delivered, last_notification, due_ms = answer[3:]
            state = EmptyFetchState(
                last_delivered, last_notification, None if due_ms < 0 else self._clock() + due_ms / 1000
            )
        return deliveries, lost, state

    def _next_cursor(self) -> bytes:
        """Return where to search for expired claims now, beginning a new search if one is due; empty for nowhere."""
        now = self._clock()
        if not self._cursor and now >= self._last_reap + min(self._lease / 4, _MAX_REAP_INTERVAL_SECONDS):
            self._last_reap, self._cursor = now, _FIRST_ID
        return self._cursor

    def _to_delivery(self, entry: Sequence[Any], until: float) -> Delivery:
        """Return the delivery of an entry that a script has claimed.

        The entry has its id, its fields, the number of its claims, how many of these do not count as deliveries, and
        the size of a body that was not loaded, otherwise -1.
        """
        entry_id, fields, count, free, size = entry
        body, headers = self._messages.split(fields)
        transaction, error = (
            self._messages.decode(body, headers) if size < 0 else self._messages.describe(size, headers)
        )
        deliveries = (
            max(1, previous_deliveries(headers) + count - free) if free or DELIVERIES_HEADER in headers else count
        )
        readable = not isinstance(error, UndecodableError)
        receipt = self.held[entry_id] = RedisReceipt(entry_id, self.consumer, count, deliveries, readable)
        return Delivery(transaction, receipt, deliveries, until, error)

    def mark_settled(self, receipt: RedisReceipt) -> None:
        """Remove a settled receipt from those in flight."""
        if self.held.get(receipt.id) == receipt:
            self.held.pop(receipt.id, None)

    def find_unknown(self) -> Operation[list[SettlementRequest]]:
        """Return requests that release the claims which this consumer has without knowing it.

        The answers to the fetches that made them never came. They are searched at an interval until the lease would
        have ended, because a request may reach the server after the caller gave up.
        """
        now = self._clock()
        with self._lock:
            # The caller may be one running fetch itself; the claims of others are not recorded yet.
            has_others = self._running_fetches > 1
            started = self._started_fetches
        if (
            now > self._unconfirmed_until
            or now < self._last_unconfirmed_search + _UNCONFIRMED_SEARCH_SECONDS
            or has_others
        ):
            return []
        self._last_unconfirmed_search = now
        pending = yield ("XPENDING", self._keys.stream, GROUP, "-", "+", _MAX_PENDING_READ, self.consumer)
        with self._lock:
            if self._started_fetches != started:
                return []  # the answer may contain claims of a fetch that began meanwhile
        release = Release()
        return [
            (Delivery(Transaction(None, id="unknown"), RedisReceipt(entry_id, self.consumer, count, 0)), release)
            for entry_id, _, _, count in pending
            if entry_id not in self.held
        ]
