"""Claiming: how messages of one queue come into this worker's hands.

Messages that were never claimed are looked for above a floor, the last id that was taken: below
it lie only the dead rows of what is done, which nobody can clear away while some old snapshot is
open. What became visible late, with an id below the floor, is found by a sweep from the bottom,
at least once a second while there is work and at once when there seems to be none; while there is
work, a sweep that is slow is made rarer in proportion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ergon_framework.connectors.base import Delivery, UndecodableError
from ergon_framework.connectors.codec import Codec, decode, describe_unread
from ergon_framework.connectors.limits import FetchLimits
from ergon_framework.connectors.postgres import statements
from ergon_framework.connectors.postgres.headers import texts
from ergon_framework.connectors.postgres.receipt import Receipt
from ergon_framework.schema.operation import BEGIN, COMMIT, Operation, Query, Rows

if TYPE_CHECKING:
    from ergon_framework.connectors.postgres.tenure import Tenure

#: Places in the row of a claim.
KEY, RANK, DELIVERIES, HEADERS, BODY, ALONE, CUT = 1, 2, 3, 4, 5, 8, 9
#: As PostgreSQL writes numbers that nothing exceeds: a bigint and an integer.
_UNLIMITED = 2**63 - 1
_UNCOUNTED = 2**31 - 1
#: Seconds between two sweeps while there is work, and how much longer than itself a sweep is put off.
SWEEP = 1.0
RARER = 20.0
#: How long the outcome of a claim that broke off is looked for each second, and how often later.
DOUBT = 60.0
#: How many such claims are remembered; the oldest are forgotten first.
MAX_DOUBTED = 1_000
#: How long a worker asks to be woken, and how early it asks again.
ASLEEP, AGAIN = 30.0, 10.0


class Claiming:
    """The claims of one queue."""

    def __init__(
        self,
        tenure: Tenure,
        codec: Codec,
        *,
        name: str,
        inbox: bool,
        limits: FetchLimits,
        has_bounds: Callable[[], bool],
        sleeper: int,
        remind: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenure = tenure
        self._codec = codec
        self._name = name
        self._inbox = inbox
        self._limits = limits
        #: Whether the schema has the function that bounds a claim.
        self._has_bounds = has_bounds
        #: Who sleeps here, to those who send.
        self._sleeper = sleeper
        #: Is told in how many seconds something becomes due.
        self._remind = remind
        self._clock = clock
        #: What of each claim is not settled.
        self.held: dict[tuple[int, int], set[int]] = {}
        #: Claims whose rows are left: they were settled in bits and at once, and nobody knew to be the last.
        self.left_over: set[tuple[int, int]] = set()
        #: Claims in hand that have a key.
        self._keys: set[Receipt] = set()
        #: By rank, the most urgent first; what has no priority has rank 0.
        self._floors: dict[int, int] = {0: 0}
        #: When the last sweep was, and for how long its own duration makes the next one unwelcome.
        self._swept = float("-inf")
        self._spared = 0.0
        self._doubted: dict[tuple[int, int], float] = {}
        self._disowned = float("-inf")
        self._asleep = float("-inf")
        self._is_closed = False

    def close(self) -> None:
        """Let held claims, and those of a fetch under way, return with their lease; other queues renew the instance."""
        self._is_closed = True
        self._tenure.abandon(list(self.held))

    @property
    def holds_keys(self) -> bool:
        """Whether something with a key is in hand here, so that others of that key may be waiting for it."""
        return bool(self._keys)

    def claim(self, queue: int, count: int, *, asks: bool) -> Operation[list[Delivery]]:
        """At most *count* messages; with *asks*, a worker that finds nothing says that it wants to be woken."""
        found = yield from self._claimed(queue, count)
        if not asks:
            return found
        now = self._clock()
        if not found and self._asleep - now < AGAIN:
            yield Query(statements.SLEEP, {"queue": queue, "sleeper": self._sleeper, "seconds": ASLEEP})
            self._asleep = now + ASLEEP
            due = yield Query(statements.DUE, {"queue": queue})
            if due:
                self._remind(due[0][0])
            # What was committed before anybody knew that we sleep woke nobody.
            found = yield from self._claimed(queue, count)
        elif len(found) >= count and self._asleep > now:
            # Busy: those who send need not ring, which would make their commits wait for each other.
            self._asleep = float("-inf")
            yield Query(statements.AWAKE, {"queue": queue, "sleeper": self._sleeper})
        return found

    def _claimed(self, queue: int, count: int) -> Operation[list[Delivery]]:
        worker = yield from self._tenure.present()
        yield from self._disown()
        token = self._tenure.token()
        try:
            given = {"queue": queue, "count": count, "worker": worker, "token": token, "inbox": self._inbox}
            rows = yield from self._rows({**given, **self._bounds()})
            found = [self._delivery(row, worker, token, self._tenure.until) for row in rows or ()]
            if self._inbox:
                yield from self._recognise(queue, found, rows or ())
        except BaseException:
            # Whether it was made nobody knows: the answer is on a line that is no more.
            self._doubted[worker, token] = self._clock() + DOUBT
            raise
        if rows is None:
            self._tenure.gone(worker)
            return (yield from self._claimed(queue, count))
        if rows:
            self.held[worker, token] = {row[0] for row in rows}
            self._keys.update(delivery.receipt for delivery in found if delivery.receipt.key is not None)
            if self._is_closed:
                self._tenure.abandon([(worker, token)])
        return found

    def _bounds(self) -> dict[str, Any]:
        """Return what one claim may load."""
        largest, last_delivery = self._codec.max_bytes, self._limits.max_deliveries
        return {
            "largest": _UNLIMITED if largest is None else largest,
            "budget": self._limits.max_bytes,
            "last_delivery": _UNCOUNTED if last_delivery is None else last_delivery,
            "suspects": True,
        }

    def settled(self, receipts: Iterable[Receipt], emptied: Collection[tuple[int, int]]) -> None:
        """These are in nobody's hands any more; of the claims that are *emptied* nothing is left in the database."""
        self.left_over.difference_update(emptied)
        for receipt in receipts:
            claim = receipt.worker, receipt.token
            held = self.held.get(claim)
            if held is not None:
                held.discard(receipt.id)
                if not held and self.held.pop(claim, None) is not None and claim not in emptied:
                    self.left_over.add(claim)
        if self._keys:
            self._keys.difference_update(receipts)

    def _rows(self, given: dict[str, Any]) -> Operation[Rows | None]:
        """The rows of a claim; None when the worker is gone."""
        now, wanted = self._clock(), given["count"]
        if now >= self._swept + max(SWEEP, self._spared):
            return (yield from self._swept_rows(given))
        rows: Rows = []
        for rank, floor in list(self._floors.items()):
            found = yield from self._picked({**given, "rank": rank, "floor": floor})
            if found is None:
                return None
            rows += found
            given["count"] = wanted - len(rows)
            given["budget"] -= sum(len(row[BODY] or b"") for row in found)
            if given["count"] <= 0 or given["budget"] <= 0 or any(row[ALONE] or row[CUT] for row in found):
                return rows
            # A suspect is claimed alone, and not beside what is claimed already.
            given["suspects"] = not rows
        # An answer of nothing has to be true, whatever it costs: it ends a loop that does not stream.
        if not rows or now >= self._swept + self._spared:
            found = yield from self._swept_rows(given)
            rows = rows if found is None else rows + found
        return rows

    def _swept_rows(self, given: dict[str, Any]) -> Operation[Rows | None]:
        began = self._clock()
        found = yield from self._picked({**given, "rank": None, "floor": 0})
        if found is None:
            return None  # nobody has looked: the next claim is a sweep again, or the most urgent would wait for one
        self._swept = self._clock()
        self._spared = RARER * (self._swept - began)
        return found

    def _picked(self, given: dict[str, Any]) -> Operation[Rows | None]:
        tried = None
        while True:
            rows = yield Query(statements.CLAIM if self._has_bounds() else statements.CLAIM_UNBOUNDED, given)
            if rows and rows[0][0] < 0:
                return None
            self._raise_floors(rows, whole=len(rows) < given["count"] and not any(row[CUT] for row in rows))
            keyed = [row for row in rows if row[DELIVERIES] is None]
            if not keyed:
                return rows
            heads = yield from self._keyed(keyed, given)
            if heads or not keyed[0][ALONE]:
                return sorted([row for row in rows if row[DELIVERIES] is not None] + heads, key=lambda row: row[0])
            # A suspect that is not its key's next one. Others are behind it; the same again is in another's hands.
            given = {**given, "suspects": keyed[0][0] != tried}
            tried = keyed[0][0]

    def _keyed(self, named: Rows, given: dict[str, Any]) -> Operation[Rows]:
        """Of those with a key, the ones whose turn it is; the others wait aside."""
        yield BEGIN
        heads: Rows = []
        looked_at = {"queue": given["queue"], "ids": [row[0] for row in named], "keys": [row[KEY] for row in named]}
        locked = yield Query(statements.LOCK_KEYS, looked_at)
        if locked:
            ranks = list({row[RANK] for row in named if row[RANK] is not None})
            mine = {**given, "ids": [row[0] for row in locked], "ranks": ranks}
            heads = yield Query(statements.CLAIM_KEYED, mine)
        yield COMMIT
        return heads

    def _raise_floors(self, rows: Rows, *, whole: bool) -> None:
        """Nothing that is to be had lies below what was just taken; *whole* when nothing was left behind at all."""
        tops: dict[int, int] = {}
        for row in rows:
            if row[RANK] is not None:
                tops[row[RANK]] = max(tops.get(row[RANK], 0), row[0])
        last = max(tops, default=None)
        fresh = tops.keys() - self._floors.keys()
        for rank, top in tops.items():
            # Only in the last rank may something be left between what was taken and the floor.
            known = self._floors.get(rank, 0)
            self._floors[rank] = top if rank == last and not whole else max(known, top)
        if fresh:
            self._floors = dict(sorted(self._floors.items()))

    def disowned(self) -> Operation[None]:
        """Give back what claims took whose answer never arrived."""
        doubted, worker = list(self._doubted), self._tenure.worker
        tokens = [token for whose, token in doubted if whose == worker]
        if tokens:
            yield Query(statements.DISOWN, {"worker": worker, "tokens": tokens})

    def _disown(self) -> Operation[None]:
        """The same, again and again: a claim may arrive at the server long after it was given up.

        Each second at first, then rarely, for as long as the instance lives.
        """
        now, doubted = self._clock(), dict(self._doubted)
        if not doubted or now < self._disowned + (1.0 if max(doubted.values()) > now else DOUBT):
            return
        yield from self.disowned()
        self._disowned = now
        forgotten = [claim for claim in doubted if claim[0] != self._tenure.worker]
        for claim in forgotten or list(doubted)[:-MAX_DOUBTED]:
            self._doubted.pop(claim, None)

    def _recognise(self, queue: int, found: list[Delivery], rows: Iterable[Sequence[Any]]) -> Operation[None]:
        """Foreign messages have an id once they were read: note it where the inbox looks, and look there."""
        foreign = {
            delivery.receipt.id: delivery
            for delivery, row in zip(found, rows, strict=True)
            if delivery.error is None and row[BODY] is not None and "ergon-id" not in texts(row[HEADERS])
        }
        if foreign:
            names = [delivery.transaction.id for delivery in foreign.values()]
            ranks = [delivery.receipt.rank for delivery in foreign.values()]
            given = {"queue": queue, "ids": list(foreign), "ranks": ranks, "names": names}
            done = yield Query(statements.RECOGNISE, given)
            for (place,) in done:
                foreign[place].done = True

    def _delivery(self, row: Sequence[Any], worker: int, token: int, until: float) -> Delivery:
        place, key, rank, deliveries, headers, body, done, size, *_ = row
        if body is None:
            limit = self._codec.max_bytes
            transaction, error = describe_unread(size, texts(headers), source=self._name, limit=limit)
        else:
            transaction, error = decode(self._codec, body, texts(headers), source=self._name)
        receipt = Receipt(place, worker, token, rank, key, not isinstance(error, UndecodableError))
        return Delivery(transaction, receipt, deliveries, until, error, done)
