"""FactLog: the facts of one pair of zones as a log that a consumer reads, as scripts for threads and for asyncio.

The boundary keeps one cursor for each reader. Counts, delays and dead letters are beside it, in a
``FactSide``. A fact that is settled out of order comes again only after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from ergon_framework.connectors.base import (
    Ack,
    Confirmation,
    DeadLetter,
    Delivery,
    Depth,
    Later,
    Release,
    Settlement,
    SettleResult,
    Settling,
)
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.partition import Commit, Partition, Receipt
from ergon_framework.connectors.side_store import Kept, Place
from ergon_framework.engine.effects import Call, Script, call
from ergon_framework.engine.outcome import Answer, Err, Ok, Stopped
from ergon_framework.errors import ConnectionLost, text
from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.model import Cursor, FactConfirmation, StoredFact
from ergon_framework.facts.side import (
    ONLY,
    Acked,
    Buried,
    Change,
    Claimed,
    Claiming,
    Delayed,
    Freed,
    Reading,
    Settled,
    SideCalls,
    Taken,
)
from ergon_framework.facts.window import Window, to_fact, to_transaction
from ergon_framework.transaction import Transaction

#: A fact that is next: its offset, and what it is handled as.
_Next: TypeAlias = tuple[int, Transaction]


@dataclass(frozen=True, slots=True)
class Calls:
    """What of a boundary is called, of either flavour."""

    append_facts: Callable[..., Any]
    get_fact: Callable[..., Any]
    fetch_facts: Callable[..., Any]
    confirm_receipt: Callable[..., Any]
    cursor_of: Callable[..., Any]
    end_of: Callable[..., Any]


@dataclass(slots=True)
class _Hold:
    """What an owner of the log has of it: until somebody takes it over, or it is closed."""

    partition: Partition
    window: Window
    epoch: str
    #: The offset that the boundary knows to be confirmed.
    confirmed: int
    #: The number of the last replay that is known.
    replays: int
    #: How often the side was told what is held.
    turn: int = 0
    #: Offsets that somebody is settling.
    settling: set[int] = field(default_factory=set)
    #: Whether any facts were read, so that their epoch is known.
    read: bool = False
    #: Whether somebody is known to have taken it over.
    lost: bool = False

    def untouched(self, cursor: Cursor | None) -> bool:
        """Whether nothing was handed out yet, so that it could as well begin at *cursor*, further on."""
        further = cursor is not None and cursor.offset > self.confirmed
        return further and self.window.last == self.confirmed and not self.partition.held


class FactLog:
    """One reader of one pair of zones, and a producer to it."""

    def __init__(
        self,
        calls: Calls,
        side: SideCalls,
        reading: Reading,
        *,
        wall: Callable[[], float],
        lock: AbstractContextManager[object],
    ) -> None:
        self.name = reading.queue
        self._calls = calls
        self._side = side
        self._pair = reading.pair
        self._reader = reading.reader
        self._codec = reading.codec
        self._wall = wall
        #: Around what is in hand; never held while somebody is asked.
        self._lock = lock
        self._hold: _Hold | None = None
        self._opening = False
        self._closed = False

    # -- owning it ------------------------------------------------------------------------------------

    def open(self, *, again: bool = True) -> Script[None]:
        """Take it over, at the reader's cursor; not if the store is another than the one that was read from.

        With *again* off, nothing is taken over that somebody has in hand by then.
        """
        cursor = yield from self._cursor()
        while not self._turn_to_open():
            # Another one here is at it. The question is as good a wait as any, and its answer the newer one.
            cursor = yield from self._cursor()
            if cursor is None:
                return
        try:
            if cursor is None or (not again and self._hold is not None):
                return
            taken: Taken | None = _answered((yield from call(Call("take_over", self._side.take_over, (cursor,)))))
            if taken is None:
                return
            with self._lock:
                hold = self._hold = _begun(cursor, taken)
                self._closed = False
        finally:
            self._opening = False
        # The one before may have confirmed more between our question and its end.
        answer = yield from call(Call("cursor_of", self._calls.cursor_of, (self._reader, self._pair)))
        with self._lock:
            if isinstance(answer, Ok) and self._hold is hold and hold.untouched(answer.value):
                self._hold = _begun(answer.value, taken)

    def _turn_to_open(self) -> bool:
        with self._lock:
            mine, self._opening = not self._opening, True
        return mine

    def _cursor(self) -> Script[Cursor | None]:
        """Where the reader is; None when the caller was stopped."""
        ask = Call("cursor_of", self._calls.cursor_of, (self._reader, self._pair))
        answer = yield from call(ask)
        if isinstance(answer, Ok) and answer.value is None:
            # Fetching nothing registers the reader: from now on the boundary keeps what he has not confirmed.
            _answered((yield from call(Call("fetch_facts", self._calls.fetch_facts, (self._reader, self._pair, 0)))))
            answer = yield from call(ask)
        cursor: Cursor | None = _answered(answer)
        return cursor

    def close(self) -> Script[None]:
        """Hand it over in order; what is still held goes to the next owner."""
        hold, self._hold, self._closed = self._hold, None, True
        if hold is None:
            return
        yield from self._confirm(hold)
        with self._lock:
            # Also what could not be confirmed just now: it is settled all the same.
            unconfirmed = range(hold.confirmed + 1, hold.partition.watermark)
            beyond = {*unconfirmed, *hold.partition.commit(orderly=True).beyond}
        if not hold.lost:
            answer = yield from call(Call("leave", self._side.leave, (hold.partition.generation, beyond)))
            if isinstance(answer, Err) and not isinstance(answer.error, ConnectionLost):
                raise answer.error

    def _owned(self) -> Script[_Hold | None]:
        """What is in hand here; None when the caller was stopped."""
        if self._closed:
            raise ConnectionLost(f"the log of facts {self.name!r} was closed; open() it again")
        if self._hold is None:
            # Several may fetch at once for the first time, and take it from each other.
            yield from self.open(again=False)
        if self._hold is not None and self._hold.lost:
            raise self._taken_over()
        return self._hold

    def _taken_over(self) -> ConnectionLost:
        return ConnectionLost(
            f"another consumer that reads as {self._reader!r} has taken over {self.name!r}; open() takes it back"
        )

    def _holds(self, hold: _Hold) -> Script[bool]:
        """Whether it is in hand here still, as the side knows it."""
        if not hold.lost:
            answer = yield from call(Call("holds", self._side.holds, (hold.partition.generation,)))
            hold.lost = not _answered(answer) and not isinstance(answer, Stopped)
        return not hold.lost

    # -- dispatch -------------------------------------------------------------------------------------

    def dispatch(self, transactions: Sequence[Transaction]) -> Script[list[Confirmation]]:
        """Append all; nothing is appended if one of them cannot be written."""
        facts = [to_fact(transaction, self._pair, self._codec, now=self._wall()) for transaction in transactions]
        answer = yield from call(Call("append_facts", self._calls.append_facts, (facts,)))
        return [_confirmation(confirmed(result)) for result in _answered(answer) or ()]

    # -- fetch ----------------------------------------------------------------------------------------

    def claim(self, count: int) -> Script[list[Delivery]]:
        """What is due, what came back and what is new, in order."""
        hold = yield from self._owned()
        if hold is None or not (yield from self._confirm(hold)):
            return []
        taken = self._taken(hold, count)
        if len(taken) < count:
            answer = yield from self._load(hold, count - len(taken))
            if isinstance(answer, Ok):
                taken += self._taken(hold, count - len(taken))
            elif not (isinstance(answer, Err) and taken):
                self._give_back(hold, taken)
                _answered(answer)
                return []
        batch, replayed = yield from self._claimed(hold, taken)
        if not batch and replayed:
            batch, _ = yield from self._claimed(hold, self._taken(hold, count))
        return batch

    def _load(self, hold: _Hold, count: int) -> Script[Answer]:
        after = Cursor(hold.epoch, hold.window.last)
        fetch = partial(self._calls.fetch_facts, after=after)
        answer = yield from call(Call("fetch_facts", fetch, (self._reader, self._pair, count)))
        if isinstance(answer, Ok):
            loaded: Sequence[StoredFact] = answer.value
            read = [(stored, to_transaction(stored, self._codec)) for stored in loaded]
            with self._lock:
                hold.window.add(read)
                if loaded:
                    # The first fact of a pair says which epoch its offsets are of.
                    hold.epoch, hold.read = loaded[0].epoch, True
        return answer

    def _taken(self, hold: _Hold, count: int) -> list[_Next]:
        """What is next; it is held from then on, and not yet handed out."""
        taken: list[_Next] = []
        now = self._wall()
        with self._lock:
            while len(taken) < count and (found := hold.partition.take(now, hold.window)) is not None:
                taken.append(found)
        return taken

    def _claimed(self, hold: _Hold, taken: Sequence[_Next]) -> Script[tuple[list[Delivery], bool]]:
        """Have *taken* counted and hand it out; and whether something was replayed meanwhile."""
        partition = hold.partition
        with self._lock:
            hold.turn += 1
            offsets = [offset for offset, _ in taken]
            epoch = hold.epoch if hold.read else None
            held = tuple(partition.held)
            claiming = Claiming(partition.generation, hold.turn, held, offsets, hold.replays, epoch)
        answer = yield from call(Call("claim", self._side.claim, (claiming,)))
        claimed: Claimed | None = answer.value if isinstance(answer, Ok) else None
        if claimed is None:
            self._give_back(hold, taken)
            if isinstance(answer, Ok):
                hold.lost = True
                raise self._taken_over()
            _answered(answer)
            return [], False
        with self._lock:
            # Of two who ask at once both are told; what only the later one was told is told again.
            news = claimed.replayed if claiming.replays == hold.replays else ()
            for kept in news:
                partition.keep(kept)
            if news:
                hold.replays = claimed.replays
            batch = [
                Delivery(transaction, partition.receipt(offset), deliveries)
                for (offset, transaction), deliveries in zip(taken, claimed.counts, strict=False)
            ]
        self._give_back(hold, taken[len(batch) :])
        return batch, bool(news)

    def _give_back(self, hold: _Hold, taken: Sequence[_Next]) -> None:
        with self._lock:
            for offset, _ in taken:
                hold.partition.back(offset)

    def next_due(self) -> float | None:
        """Seconds until a delay ends; None when nothing will become ready by itself."""
        hold = self._hold
        due = None if hold is None else hold.partition.next_due()
        return None if due is None else max(0.0, due - self._wall())

    # -- settle ---------------------------------------------------------------------------------------

    def settle(self, settlings: Sequence[Settling]) -> Script[list[SettleResult]]:
        """Settle many, and then confirm to the boundary as far as there is no gap."""
        hold = self._hold
        if hold is None or hold.lost:
            return [SettleResult.LOST for _ in settlings]
        with self._lock:
            planned = [self._planned(hold, delivery, settlement) for delivery, settlement in settlings]
        changes = [change for change in planned if not isinstance(change, SettleResult)]
        if self._side.confirm is not None and all(isinstance(each, Acked) and not each.aside for each in changes):
            told = yield from self._confirmed(hold, changes)
        else:
            told = yield from self._settled(hold, changes)
            yield from self._confirm(hold)
        became = iter(told)
        return [change if isinstance(change, SettleResult) else next(became) for change in planned]

    def _planned(self, hold: _Hold, delivery: Delivery, settlement: Settlement) -> Change | SettleResult:
        """What *settlement* changes, or how it ends here; nobody else settles it until it is done."""
        receipt = delivery.receipt
        if not isinstance(receipt, Receipt) or not hold.partition.holds(receipt) or receipt.offset in hold.settling:
            return SettleResult.LOST
        try:
            change = self._change(hold, delivery, settlement)
        except Exception:  # noqa: BLE001 - an odd item; the claim is still held
            return SettleResult.FAILED
        if change is None:
            return SettleResult.FAILED
        hold.settling.add(receipt.offset)
        return change

    def _change(self, hold: _Hold, delivery: Delivery, settlement: Settlement) -> Change | None:
        offset = delivery.receipt.offset
        aside = hold.partition.held[offset] is not None
        match settlement:
            case Ack():
                return Acked(offset, aside)
            case Later():
                changed = settlement.apply(delivery.transaction)
                self._codec.encode(changed)  # what could not be written could not be kept by a side store that lasts
                kept = Kept(self._wall() + settlement.delay, hold.partition.place(offset), changed)
                return Delayed(offset, aside, kept)
            case Release():
                return Freed(offset, aside)
            case DeadLetter():
                record = DeadLetterRecord.of(delivery, settlement, queue=self.name, at=self._wall())
                return Buried(offset, aside, record)
            case _:
                return None

    def _settled(self, hold: _Hold, changes: Sequence[Change]) -> Script[list[SettleResult]]:
        """Have the side settle them: beside the log first, because a crash in between must find it there."""
        if not changes:
            return []
        with self._lock:
            hold.turn += 1
            done = {change.offset for change in changes}
            held = tuple(offset for offset in hold.partition.held if offset not in done)
            settled = Settled(hold.partition.generation, hold.turn, held, changes, hold.confirmed)
        answer = yield from call(Call("settle", self._side.settle, (settled,)))
        if isinstance(answer, Ok) and answer.value:
            self._apply(hold, changes)
            return [SettleResult.SETTLED] * len(changes)
        if isinstance(answer, Err) and not isinstance(answer.error, ConnectionLost) and len(changes) > 1:
            # One of them cannot be written. Each for itself: the others are not to pay for it.
            results: list[SettleResult] = []
            for change in changes:
                results += yield from self._settled(hold, [change])
            return results
        with self._lock:
            hold.settling -= done
        if isinstance(answer, Err) and not isinstance(answer.error, Exception):
            raise answer.error
        hold.lost = hold.lost or isinstance(answer, Ok)
        return [SettleResult.LOST if hold.lost else SettleResult.FAILED] * len(changes)

    def _confirmed(self, hold: _Hold, changes: Sequence[Change]) -> Script[list[SettleResult]]:
        """Facts that have succeeded leave nothing beside the log: the receipt is all that there is to write.

        Whoever is no longer the owner is told so by the answer to it.
        """
        self._apply(hold, changes)
        if hold.partition.watermark - 1 > hold.confirmed:
            yield from self._confirm(hold)
        elif changes:
            answer = yield from call(Call("holds", self._side.holds, (hold.partition.generation,)))
            hold.lost = hold.lost or (isinstance(answer, Ok) and not answer.value)
        return [SettleResult.LOST if hold.lost else SettleResult.SETTLED] * len(changes)

    def _apply(self, hold: _Hold, changes: Sequence[Change]) -> None:
        with self._lock:
            for change in changes:
                match change:
                    case Freed():
                        hold.partition.back(change.offset)
                    case Delayed():
                        hold.partition.keep(change.kept)
                    case _:
                        hold.partition.settled(change.offset)
                if not isinstance(change, Freed):
                    hold.window.forget(change.offset)
                hold.settling.discard(change.offset)

    def _confirm(self, hold: _Hold) -> Script[bool]:
        """Tell the boundary how far all is settled; False when the caller was stopped.

        If it cannot be told now, it is told with the next call; until then a crash would bring again what
        is settled, as it may on any log.
        """
        with self._lock:
            done = hold.partition.watermark - 1
            if done <= hold.confirmed or hold.lost:
                return True
        cursor = Cursor(hold.epoch, done)
        if self._side.confirm is None:
            told = Call("confirm_receipt", self._calls.confirm_receipt, (self._reader, self._pair, cursor))
        else:
            told = Call("confirm_receipt", self._side.confirm, (hold.partition.generation, cursor))
        answer = yield from call(told)
        if isinstance(answer, Ok) and self._side.confirm is not None and not answer.value:
            hold.lost = True
        elif isinstance(answer, Ok):
            hold.confirmed = max(hold.confirmed, done)
        elif isinstance(answer, Err) and not isinstance(answer.error, ConnectionLost):
            raise answer.error
        return isinstance(answer, Ok | Err)

    def extend(self, deliveries: Sequence[Delivery]) -> Script[list[float | None]]:
        """A claim ends with its generation only: infinity while it is good, None once it is gone."""
        hold = self._hold
        if hold is None or not (yield from self._holds(hold)):
            return [None for _ in deliveries]
        with self._lock:
            return [
                float("inf") if isinstance(each.receipt, Receipt) and hold.partition.holds(each.receipt) else None
                for each in deliveries
            ]

    # -- what is there --------------------------------------------------------------------------------

    def depth(self) -> Script[Depth]:
        """How much is there; the age is that of the oldest fact that could be had."""
        hold = yield from self._owned()
        end: Cursor | None = _answered((yield from call(Call("end_of", self._calls.end_of, (self._pair,)))))
        if hold is None:
            return Depth(0)  # of a caller who was stopped, and sees another end than this
        if hold.window.last < (0 if end is None else end.offset):
            _answered((yield from self._load(hold, 1)))
        if not (yield from self._holds(hold)):
            raise self._taken_over()
        dead: int = _answered((yield from call(Call("dead_count", self._side.dead_count, ())))) or 0
        now = self._wall()
        with self._lock:
            partition = hold.partition
            ready = partition.ready(now, 1 if end is None else end.offset + 1)
            ages = [now - since for offset in ready if (since := hold.window.since(offset)) is not None]
            return Depth(
                ready=len(ready),
                delayed=partition.delayed(now),
                in_flight=len(partition.held),
                dead=dead,
                oldest_age=max(ages, default=None),
            )

    # -- dead letters ---------------------------------------------------------------------------------

    def replay_dead(self, places: Sequence[str]) -> Script[list[ReplayResult]]:
        """Have them delivered anew. The fact itself is in the log for ever, and cannot be appended again."""
        results: list[ReplayResult] = []
        for place in places:
            result = yield from self._replayed(place)
            results.append(result)
        return results

    def _replayed(self, place: str) -> Script[ReplayResult]:
        record: DeadLetterRecord | None = _answered((yield from call(Call("dead", self._side.dead, (place,)))))
        if record is None:
            return ReplayResult(place, Became.GONE)
        answer = yield from call(Call("get_fact", self._calls.get_fact, (self._pair.from_zone, record.id)))
        if not isinstance(answer, Ok):
            return _failed(place, answer)
        found: FactConfirmation | None = answer.value
        if found is None:
            words = f"the boundary no longer knows the fact {record.id!r}, so nothing would be settled by it"
            return ReplayResult(place, Became.FAILED, words)
        kept = Kept(self._wall(), Place(ONLY, found.offset), record.fresh())
        answer = yield from call(Call("replay", self._side.replay, (place, kept)))
        if not isinstance(answer, Ok):
            return _failed(place, answer)  # the side store's own trouble, which spoils no other place
        return ReplayResult(place, Became.REPLAYED if answer.value else Became.GONE)

    def discard_dead(self, places: Sequence[str]) -> Script[list[ReplayResult]]:
        """Throw dead letters away."""
        results = []
        for place in places:
            gone = _answered((yield from call(Call("discard", self._side.discard, (place,)))))
            results.append(ReplayResult(place, Became.DISCARDED if gone else Became.GONE))
        return results

    def list_dead(self, query: DeadLetterQuery, *, after: str | None, limit: int) -> Script[Sequence[DeadLetterRecord]]:
        """One page of them."""
        asked = Call("list_dead", self._side.list_dead, (query, after, limit))
        return _answered((yield from call(asked))) or []


def _begun(cursor: Cursor, taken: Taken) -> _Hold:
    begin = cursor.offset + 1
    commit = Commit(begin, frozenset(taken.beyond))
    partition = Partition(ONLY, generation=taken.generation, commit=commit, kept=taken.kept)
    return _Hold(partition, Window(begin), cursor.epoch, cursor.offset, taken.replays)


def _failed(place: str, answer: Answer) -> ReplayResult:
    return ReplayResult(place, Became.FAILED, text(answer.error) if isinstance(answer, Err) else "stopped")


def _answered(answer: Answer) -> Any:
    """What a call returned; what it raised is raised, and a caller who was stopped is answered nothing."""
    if isinstance(answer, Err):
        raise answer.error
    return answer.value if isinstance(answer, Ok) else None


def _confirmation(confirmation: FactConfirmation) -> Confirmation:
    detail = {"offset": confirmation.offset, "epoch": confirmation.epoch, "digest": confirmation.digest}
    return Confirmation(confirmation.message_id, duplicate=confirmation.duplicate, detail=detail)
