"""Claims on the messages of one queue by this worker, and the receipts by which it settles them.

A claim is a worker's exclusive right to process the messages of one fetch until its lease ends. It is one row, found by
the number of the worker instance and a token, which is different for every claim. A receipt is one message of a claim.
A rank is the negated priority: the lowest rank is claimed first. A key is an ordering key: of the messages with one key
only the oldest is claimed, and the others are blocked until it is settled.

Messages that were never claimed are looked up above a floor, the last claimed id: below it are only the dead rows
of finished messages, which PostgreSQL cannot vacuum while an old snapshot is open. Messages that became visible late,
with an id below the floor, are found by a sweep from the bottom. A sweep runs at least once a second while there is
work, and immediately when there seems to be none; while there is work, a slow sweep is delayed in proportion.

Headers are converted to text, because a third-party producer may have written any JSON. An Operation is a generator
that yields queries and receives their rows; a thread or an event loop runs it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ergon_framework.connectors.base import Delivery, UndecodableError
from ergon_framework.connectors.codec import NOT_BEFORE, Codec, decode, describe_unread
from ergon_framework.connectors.limits import FetchLimits
from ergon_framework.connectors.postgres import sql
from ergon_framework.database.operation import BEGIN, COMMIT, Operation, Query, Rows

if TYPE_CHECKING:
    from ergon_framework.connectors.postgres.client import WorkerLease


def headers_as_text(headers: Any) -> dict[str, str]:
    """Convert *headers* to texts by name; a value that is not an object gives none, and a null is dropped.

    >>> headers_as_text({"x-order": 7, "x-name": "seven", "x-nothing": None})
    {'x-order': '7', 'x-name': 'seven'}
    >>> headers_as_text([1, 2])
    {}
    """
    if not isinstance(headers, dict):
        return {}
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in headers.items()
        if value is not None
    }


class PostgresReceipt(NamedTuple):
    """The claim on one message: the worker instance that made it, and the token of the claim."""

    id: int
    worker: int
    token: int
    #: The rank in the table of ready messages; None for a message that has been returned before.
    rank: int | None
    #: The key in the queue, also of a message that could not be decoded; no message of that key may overtake it.
    key: str | None
    readable: bool = True


# -- claims -----------------------------------------------------------------------------------------

#: Column indexes in a row of CLAIM and CLAIM_KEYED. A suspect is a message whose earlier delivery ended with its
#: worker: it may be what ended it. The claim is cut if it is shorter than requested because of its limit of bytes.
KEY_COLUMN, RANK_COLUMN, DELIVERIES_COLUMN, HEADERS_COLUMN, BODY_COLUMN, SUSPECT_COLUMN, CUT_COLUMN = (
    1,
    2,
    3,
    4,
    5,
    8,
    9,
)
#: The largest bigint and the largest integer of PostgreSQL, for limits that are not set.
_MAX_BIGINT = 2**63 - 1
_MAX_INTEGER = 2**31 - 1
#: Seconds between two sweeps while there is work, and the pause after a sweep as a multiple of its duration.
SWEEP_INTERVAL_SECONDS = 1.0
SWEEP_PAUSE_FACTOR = 20.0
#: Seconds for which an unconfirmed claim, one whose answer never arrived, is released again every second; afterwards,
#: the interval of further releases.
UNCONFIRMED_RELEASE_SECONDS = 60.0
#: Unconfirmed claims that are remembered; the oldest are dropped first.
MAX_UNCONFIRMED_CLAIMS = 1_000
#: Seconds for which a worker registers as a listener, and before their end at which it registers again.
LISTENER_SECONDS, LISTENER_RENEW_SECONDS = 30.0, 10.0


def _lacks_key(row: Sequence[Any]) -> bool:
    """Return whether a delayed dispatch has left out the key of this message."""
    if row[KEY_COLUMN] is not None or row[RANK_COLUMN] is not None or row[BODY_COLUMN] is None:
        return False
    headers = row[HEADERS_COLUMN]
    return isinstance(headers, dict) and NOT_BEFORE in headers and "ergon-key" in headers


class ClaimManager:
    """The claims of one queue."""

    def __init__(
        self,
        worker_lease: WorkerLease,
        codec: Codec,
        *,
        name: str,
        inbox: bool,
        limits: FetchLimits,
        listener_id: int,
        wake_after: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._worker_lease = worker_lease
        self._codec = codec
        self._name = name
        self._inbox = inbox
        self._limits = limits
        #: The id under which producers see this waiting worker.
        self._listener_id = listener_id
        #: Called with the seconds until a message becomes due.
        self._wake_after = wake_after
        self._clock = clock
        #: The unsettled message ids of each claim.
        self.held: dict[tuple[int, int], set[int]] = {}
        #: Empty claims whose rows still exist: parts of a claim were settled at the same time, and no settlement knew
        #: that it was the last one. The next settlement deletes their rows.
        self.left_over: set[tuple[int, int]] = set()
        #: Receipts in flight that have a key.
        self._keyed_receipts: set[PostgresReceipt] = set()
        #: By rank, the most urgent first; a message without priority has rank 0.
        self._floors: dict[int, int] = {0: 0}
        #: The time of the last sweep, and the seconds by which its own duration delays the next one.
        self._last_sweep = float("-inf")
        self._sweep_pause = 0.0
        #: Claims whose answer never arrived, each with the time until which it is released again every second.
        self._unconfirmed: dict[tuple[int, int], float] = {}
        self._last_release = float("-inf")
        #: Until when this worker is registered in the database as a listener of the queue.
        self._listening_until = float("-inf")
        #: When the next deferred or delayed message is due, as far as known; after that time it is queried again.
        self._next_due = float("inf")
        self._is_closed = False

    def close(self) -> None:
        """Let the claims end with the current lease, also those of a running fetch.

        Other queues of this process continue to renew the lease, so these claims are marked as abandoned.
        """
        self._is_closed = True
        self._worker_lease.abandon(list(self.held))

    @property
    def has_keyed_claims(self) -> bool:
        """Whether a message with a key is in flight here, so that others of that key may wait for it."""
        return bool(self._keyed_receipts)

    def claim(self, queue: int, count: int, *, wants_wakeup: bool) -> Operation[list[Delivery]]:
        """Claim at most *count* messages; with *wants_wakeup*, register as a listener if there are none."""
        deliveries = yield from self._claim_messages(queue, count)
        if not wants_wakeup:
            return deliveries
        now = self._clock()
        if not deliveries and self._listening_until - now < LISTENER_RENEW_SECONDS:
            yield Query(
                sql.REGISTER_LISTENER,
                {"queue": queue, "listener": self._listener_id, "seconds": LISTENER_SECONDS},
            )
            self._listening_until = now + LISTENER_SECONDS
            yield from self._find_next_due(queue)
            # Messages committed before this worker was registered as a listener did not wake it.
            deliveries = yield from self._claim_messages(queue, count)
        elif not deliveries and now >= self._next_due:
            yield from self._find_next_due(queue)
        elif len(deliveries) >= count and self._listening_until > now:
            # A busy worker needs no notifications, which would serialize the commits of producers.
            self._listening_until = float("-inf")
            yield Query(sql.UNREGISTER_LISTENER, {"queue": queue, "listener": self._listener_id})
        return deliveries

    def _find_next_due(self, queue: int) -> Operation[None]:
        """Wake up again when the next deferred or delayed message is due."""
        due = yield Query(sql.SECONDS_UNTIL_DUE, {"queue": queue})
        seconds = due[0][0] if due else float("inf")
        self._next_due = self._clock() + seconds
        if due:
            self._wake_after(seconds)

    def _claim_messages(self, queue: int, count: int) -> Operation[list[Delivery]]:
        """Claim for the current worker instance; if it has expired, register a new one and claim again."""
        worker = yield from self._worker_lease.ensure()
        yield from self._repeat_release()
        token = self._worker_lease.next_token()
        try:
            parameters = {"queue": queue, "count": count, "worker": worker, "token": token, "inbox": self._inbox}
            rows = yield from self._select_rows({**parameters, **self._build_limits()})
            rows, promoted = yield from self._promote(queue, rows, worker=worker, token=token)
            deliveries = [self._to_delivery(row, worker, token, self._worker_lease.until) for row in rows or ()]
            if self._inbox:
                yield from self._store_decoded_ids(queue, deliveries, rows or ())
        except BaseException:
            # The outcome of the claim is unknown: its answer was lost with the connection.
            self._unconfirmed[worker, token] = self._clock() + UNCONFIRMED_RELEASE_SECONDS
            raise
        if rows is None:
            self._worker_lease.mark_expired(worker)
            return (yield from self._claim_messages(queue, count))
        if promoted:
            self._next_due = float("-inf")
        if promoted and not rows:
            return (yield from self._claim_messages(queue, count))
        if rows:
            self.held[worker, token] = {row[0] for row in rows}
            if any(row[RANK_COLUMN] is None for row in rows):
                self._next_due = float("-inf")  # a message was due, and the time of the next one is unknown
            self._keyed_receipts.update(delivery.receipt for delivery in deliveries if delivery.receipt.key is not None)
            if self._is_closed:
                self._worker_lease.abandon([(worker, token)])
        return deliveries

    def _promote(
        self, queue: int, rows: Rows | None, *, worker: int, token: int
    ) -> Operation[tuple[Rows | None, bool]]:
        """Give due messages of a delayed dispatch their key and their place in its order; return the other rows.

        The second value says whether there were such messages. One whose body was not loaded is not moved: it is to be
        dead-lettered.
        """
        ids = [row[0] for row in rows or () if _lacks_key(row)]
        if not ids or rows is None:
            return rows, False
        yield Query(sql.PROMOTE, {"worker": worker, "token": token, "ids": ids})
        yield Query(sql.NOTIFY_LISTENERS, {"queue": queue})
        promoted = set(ids)
        return [row for row in rows if row[0] not in promoted], True

    def _build_limits(self) -> dict[str, Any]:
        """Return the limits of one claim."""
        max_body_bytes, last_delivery = self._codec.max_bytes, self._limits.max_deliveries
        return {
            "largest": _MAX_BIGINT if max_body_bytes is None else max_body_bytes,
            "budget": self._limits.max_bytes,
            "last_delivery": _MAX_INTEGER if last_delivery is None else last_delivery,
            "suspects": True,
        }

    def mark_settled(self, receipts: Iterable[PostgresReceipt], emptied: Collection[tuple[int, int]]) -> None:
        """Remove settled *receipts* from the claims; the database has deleted the rows of the *emptied* claims."""
        self.left_over.difference_update(emptied)
        for receipt in receipts:
            claim = receipt.worker, receipt.token
            held = self.held.get(claim)
            if held is not None:
                held.discard(receipt.id)
                if not held and self.held.pop(claim, None) is not None and claim not in emptied:
                    self.left_over.add(claim)
        if self._keyed_receipts:
            self._keyed_receipts.difference_update(receipts)

    def _select_rows(self, parameters: dict[str, Any]) -> Operation[Rows | None]:
        """Return the rows of a claim; None if the worker has expired."""
        now, requested = self._clock(), parameters["count"]
        if now >= self._last_sweep + max(SWEEP_INTERVAL_SECONDS, self._sweep_pause):
            return (yield from self._sweep_rows(parameters))
        rows: Rows = []
        for rank, floor in list(self._floors.items()):
            claimed = yield from self._claim_rows({**parameters, "rank": rank, "floor": floor})
            if claimed is None:
                return None
            rows += claimed
            parameters["count"] = requested - len(rows)
            parameters["budget"] -= sum(len(row[BODY_COLUMN] or b"") for row in claimed)
            if (
                parameters["count"] <= 0
                or parameters["budget"] <= 0
                or any(row[SUSPECT_COLUMN] or row[CUT_COLUMN] for row in claimed)
            ):
                return rows
            # A suspect is claimed alone, never together with rows that are already claimed.
            parameters["suspects"] = not rows
        # An empty result ends a loop that does not stream, so a sweep has to confirm it: there may be messages below
        # the floors.
        if not rows or now >= self._last_sweep + self._sweep_pause:
            claimed = yield from self._sweep_rows(parameters)
            rows = rows if claimed is None else rows + claimed
        return rows

    def _sweep_rows(self, parameters: dict[str, Any]) -> Operation[Rows | None]:
        """Claim from the bottom of the queue, in every rank; like ``_claim_rows`` in what it returns."""
        began = self._clock()
        rows = yield from self._claim_rows({**parameters, "rank": None, "floor": 0})
        if rows is None:
            return None  # no sweep took place: the next claim must sweep, or the most urgent message would wait for one
        self._last_sweep = self._clock()
        self._sweep_pause = SWEEP_PAUSE_FACTOR * (self._last_sweep - began)
        return rows

    def _claim_rows(self, parameters: dict[str, Any]) -> Operation[Rows | None]:
        """Claim once; return the rows of the claimed messages, or None if the worker instance has expired."""
        last_suspect = None
        while True:
            rows = yield Query(sql.CLAIM, parameters)
            # A negative id says that the worker has expired.
            if rows and rows[0][0] < 0:
                return None
            self._raise_floors(
                rows, complete=len(rows) < parameters["count"] and not any(row[CUT_COLUMN] for row in rows)
            )
            # Messages with a key are found here without a delivery count, and claimed by a statement of their own.
            keyed_rows = [row for row in rows if row[DELIVERIES_COLUMN] is None]
            if not keyed_rows:
                return rows
            heads = yield from self._claim_keyed(keyed_rows, parameters)
            if heads or not keyed_rows[0][SUSPECT_COLUMN]:
                return sorted(
                    [row for row in rows if row[DELIVERIES_COLUMN] is not None] + heads, key=lambda row: row[0]
                )
            # The suspect was not claimed: an older message of its key blocks it, or another worker is claiming it.
            # Search again for messages after it, and without suspects once the same one is found twice.
            parameters = {**parameters, "suspects": keyed_rows[0][0] != last_suspect}
            last_suspect = keyed_rows[0][0]

    def _claim_keyed(self, keyed_rows: Rows, parameters: dict[str, Any]) -> Operation[Rows]:
        """Claim the first message of each key among rows with a key; the others wait until it is settled."""
        yield BEGIN
        heads: Rows = []
        lock_parameters = {
            "queue": parameters["queue"],
            "ids": [row[0] for row in keyed_rows],
            "keys": [row[KEY_COLUMN] for row in keyed_rows],
        }
        locked = yield Query(sql.LOCK_KEYS, lock_parameters)
        if locked:
            ranks = list({row[RANK_COLUMN] for row in keyed_rows if row[RANK_COLUMN] is not None})
            claim_parameters = {**parameters, "ids": [row[0] for row in locked], "ranks": ranks}
            heads = yield Query(sql.CLAIM_KEYED, claim_parameters)
        yield COMMIT
        return heads

    def _raise_floors(self, rows: Rows, *, complete: bool) -> None:
        """Raise the floors to the claimed ids; *complete* says that the claim left no available message behind."""
        tops: dict[int, int] = {}
        for row in rows:
            if row[RANK_COLUMN] is not None:
                tops[row[RANK_COLUMN]] = max(tops.get(row[RANK_COLUMN], 0), row[0])
        last = max(tops, default=None)
        new_ranks = tops.keys() - self._floors.keys()
        for rank, top in tops.items():
            # An incomplete claim has stopped in its last rank: messages between its last id there and the floor may
            # remain, so that floor may sink. In all other ranks the claim has taken everything available.
            floor = self._floors.get(rank, 0)
            self._floors[rank] = top if rank == last and not complete else max(floor, top)
        if new_ranks:
            self._floors = dict(sorted(self._floors.items()))

    def release_unconfirmed(self) -> Operation[None]:
        """Release the messages of claims whose answer never arrived."""
        unconfirmed, worker = list(self._unconfirmed), self._worker_lease.worker
        tokens = [token for owner, token in unconfirmed if owner == worker]
        if tokens:
            yield Query(sql.RELEASE_UNCONFIRMED, {"worker": worker, "tokens": tokens})

    def _repeat_release(self) -> Operation[None]:
        """Release unconfirmed claims again: a claim may reach the server long after the caller gave up.

        Every second at first, then rarely, for as long as the worker instance exists.
        """
        now, unconfirmed = self._clock(), dict(self._unconfirmed)
        if not unconfirmed or now < self._last_release + (
            1.0 if max(unconfirmed.values()) > now else UNCONFIRMED_RELEASE_SECONDS
        ):
            return
        yield from self.release_unconfirmed()
        self._last_release = now
        # Claims of earlier worker instances ended with these; of the others only the latest are remembered.
        expired = [claim for claim in unconfirmed if claim[0] != self._worker_lease.worker]
        for claim in expired or list(unconfirmed)[:-MAX_UNCONFIRMED_CLAIMS]:
            self._unconfirmed.pop(claim, None)

    def _store_decoded_ids(
        self, queue: int, deliveries: list[Delivery], rows: Iterable[Sequence[Any]]
    ) -> Operation[None]:
        """Store the ids of third-party messages, known only after decoding, and mark those that the inbox has."""
        third_party = {
            delivery.receipt.id: delivery
            for delivery, row in zip(deliveries, rows, strict=True)
            if delivery.error is None
            and row[BODY_COLUMN] is not None
            and "ergon-id" not in headers_as_text(row[HEADERS_COLUMN])
        }
        if third_party:
            names = [delivery.transaction.id for delivery in third_party.values()]
            ranks = [delivery.receipt.rank for delivery in third_party.values()]
            parameters = {"queue": queue, "ids": list(third_party), "ranks": ranks, "names": names}
            processed = yield Query(sql.STORE_DECODED_IDS, parameters)
            for (message_id,) in processed:
                third_party[message_id].done = True

    def _to_delivery(self, row: Sequence[Any], worker: int, token: int, until: float) -> Delivery:
        message_id, key, rank, deliveries, headers, body, done, size, *_ = row
        if body is None:
            limit = self._codec.max_bytes
            transaction, error = describe_unread(size, headers_as_text(headers), source=self._name, limit=limit)
        else:
            transaction, error = decode(self._codec, body, headers_as_text(headers), source=self._name)
        receipt = PostgresReceipt(message_id, worker, token, rank, key, not isinstance(error, UndecodableError))
        return Delivery(transaction, receipt, deliveries, until, error, done)
