"""FactLog: the facts of one pair of zones as a log that a consumer reads, as scripts for threads and for asyncio.

The boundary keeps one cursor for each reader. Counts, delays and dead letters are beside it, in a
``FactSide``. A fact that is settled out of order comes again only after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

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
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.deadletters import Became, DeadLetterRecord, ReplayResult
from ergon_framework.connectors.partition import Commit, Partition, Receipt
from ergon_framework.connectors.side_store import Kept, Place
from ergon_framework.engine.effects import Call, Script, call
from ergon_framework.engine.outcome import Answer, Err, Ok
from ergon_framework.errors import ConnectionLost, ErgonError, text
from ergon_framework.facts.boundary import confirmed
from ergon_framework.facts.errors import EpochChanged
from ergon_framework.facts.model import Cursor, FactConfirmation, Pair, StoredFact
from ergon_framework.facts.side import FactSide
from ergon_framework.facts.window import Window, to_fact, to_transaction
from ergon_framework.transaction import Transaction

#: The one partition that a pair of zones is.
_ONLY: Final = 0


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

    def untouched(self, cursor: Cursor | None) -> bool:
        """Whether nothing was handed out yet, so that it could as well begin at *cursor*, further on."""
        further = cursor is not None and cursor.offset > self.confirmed
        return further and self.window.last == self.confirmed and not self.partition.held


class FactLog:
    """One reader of one pair of zones, and a producer to it."""

    def __init__(
        self,
        name: str,
        calls: Calls,
        pair: Pair,
        *,
        reader: str,
        side: FactSide,
        codec: Codec,
        wall: Callable[[], float],
    ) -> None:
        self.name = name
        self.side = side
        self._calls = calls
        self._pair = pair
        self._reader = reader
        self._codec = codec
        self._wall = wall
        self._hold: _Hold | None = None
        self._closed = False

    # -- owning it ------------------------------------------------------------------------------------

    def open(self, *, again: bool = True) -> Script[None]:
        """Take it over, at the reader's cursor; not if the store is another than the one that was read from.

        With *again* off, nothing is taken over that somebody has in hand by then.
        """
        cursor = yield from self._cursor()
        if cursor is None:
            return
        with self.side.lock:
            if not again and self._hold is not None:
                return
            self._recognise(cursor.epoch)
            hold = self._hold = self._begun(cursor, self.side.take_over())
            self._closed = False
        # The one before may have confirmed more between our question and its end.
        answer = yield from call(Call("cursor_of", self._calls.cursor_of, (self._reader, self._pair)))
        with self.side.lock:
            if isinstance(answer, Ok) and self._hold is hold and hold.untouched(answer.value):
                self._hold = self._begun(answer.value, hold.partition.generation)

    def _begun(self, cursor: Cursor, generation: int) -> _Hold:
        begin = cursor.offset + 1
        beyond, kept = frozenset(self.side.handed_over()), self.side.kept(_ONLY)
        partition = Partition(_ONLY, generation=generation, commit=Commit(begin, beyond), kept=kept)
        return _Hold(partition, Window(begin), cursor.epoch, cursor.offset)

    def _recognise(self, epoch: str) -> None:
        known = self.side.epoch
        if known is not None and known != epoch:
            raise EpochChanged(
                f"{self._reader!r} has read {self.name!r} in epoch {known!r} and the store is in {epoch!r}: it was put "
                "back from a backup, and offsets may mean other facts; compare the two, then set side.epoch to None"
            )

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
        with self.side.lock:
            if self._holds(hold):
                # Also what could not be confirmed just now: it is settled all the same.
                unconfirmed = range(hold.confirmed + 1, hold.partition.watermark)
                self.side.hand_over({*unconfirmed, *hold.partition.commit(orderly=True).beyond})

    def _owned(self) -> Script[_Hold | None]:
        """What is in hand here; None when the caller was stopped."""
        if self._closed:
            raise ConnectionLost(f"the log of facts {self.name!r} was closed; open() it again")
        if self._hold is None:
            # Several may fetch at once for the first time, and take it from each other.
            yield from self.open(again=False)
        hold = self._hold
        if hold is not None and not self._holds(hold):
            raise ConnectionLost(
                f"another consumer that reads as {self._reader!r} has taken over {self.name!r}; open() takes it back"
            )
        return hold

    def _holds(self, hold: _Hold) -> bool:
        return self.side.generation == hold.partition.generation

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
        batch = self._taken(hold, count)
        if len(batch) == count:
            return batch
        answer = yield from self._load(hold, count - len(batch))
        if isinstance(answer, Ok):
            return batch + self._taken(hold, count - len(batch))
        if isinstance(answer, Err) and batch:
            return batch  # what is claimed already must reach somebody
        self._give_back(hold, batch)
        _answered(answer)
        return []

    def _load(self, hold: _Hold, count: int) -> Script[Answer]:
        after = Cursor(hold.epoch, hold.window.last)
        fetch = partial(self._calls.fetch_facts, after=after)
        answer = yield from call(Call("fetch_facts", fetch, (self._reader, self._pair, count)))
        if isinstance(answer, Ok):
            loaded: Sequence[StoredFact] = answer.value
            read = [(stored, to_transaction(stored, self._codec)) for stored in loaded]
            with self.side.lock:
                hold.window.add(read)
                if loaded:
                    # The first fact of a pair says which epoch its offsets are of.
                    hold.epoch = self.side.epoch = loaded[0].epoch
        return answer

    def _taken(self, hold: _Hold, count: int) -> list[Delivery]:
        batch: list[Delivery] = []
        partition, now = hold.partition, self._wall()
        with self.side.lock:
            if not self._holds(hold):
                return batch
            for kept in self.side.replayed():
                partition.keep(kept)
            while len(batch) < count and (taken := partition.take(now, hold.window)) is not None:
                offset, transaction = taken
                try:
                    deliveries = self.side.count(partition.place(offset))
                except ErgonError:
                    partition.back(offset)
                    if batch:
                        break
                    raise
                batch.append(Delivery(transaction, partition.receipt(offset), deliveries))
        return batch

    def _give_back(self, hold: _Hold, batch: Sequence[Delivery]) -> None:
        with self.side.lock:
            for delivery in batch:
                if self._holds(hold) and hold.partition.holds(delivery.receipt):
                    self.side.uncount(hold.partition.place(delivery.receipt.offset))
                    hold.partition.back(delivery.receipt.offset)

    def next_due(self) -> float | None:
        """Seconds until a delay ends; None when nothing will become ready by itself."""
        hold = self._hold
        due = None if hold is None else hold.partition.next_due()
        return None if due is None else max(0.0, due - self._wall())

    # -- settle ---------------------------------------------------------------------------------------

    def settle(self, settlings: Sequence[Settling]) -> Script[list[SettleResult]]:
        """Settle many, and then confirm to the boundary as far as there is no gap."""
        hold = self._hold
        if hold is None:
            return [SettleResult.LOST for _ in settlings]
        with self.side.lock:
            results = [self._settle(hold, delivery, settlement) for delivery, settlement in settlings]
        yield from self._confirm(hold)
        return results

    def _settle(self, hold: _Hold, delivery: Delivery, settlement: Settlement) -> SettleResult:
        if not self._claims(hold, delivery.receipt):
            return SettleResult.LOST
        try:
            return self._settle_held(hold, delivery, settlement)
        except Exception:  # noqa: BLE001 - the side store's trouble or an odd item; the claim is still held
            return SettleResult.FAILED

    def _claims(self, hold: _Hold, receipt: Any) -> bool:
        return isinstance(receipt, Receipt) and self._holds(hold) and hold.partition.holds(receipt)

    def _settle_held(self, hold: _Hold, delivery: Delivery, settlement: Settlement) -> SettleResult:
        partition, place = hold.partition, hold.partition.place(delivery.receipt.offset)
        match settlement:
            case Ack():
                self.side.forget(place)
                partition.settled(place.offset)
            case Later():
                changed = delivery.transaction.replace(attempts=settlement.attempts, history=settlement.history)
                self._codec.encode(changed)  # what could not be written could not be kept by a side store that lasts
                kept = Kept(self._wall() + settlement.delay, place, changed)
                # Beside the log first: a crash in between must find it there.
                self.side.keep(kept)
                self.side.uncount(place)
                partition.keep(kept)
            case Release():
                self.side.uncount(place)
                partition.back(place.offset)
                return SettleResult.SETTLED
            case DeadLetter():
                self.side.bury(DeadLetterRecord.of(delivery, settlement, queue=self.name, at=self._wall()))
                self.side.forget(place)
                partition.settled(place.offset)
            case _:
                return SettleResult.FAILED
        hold.window.forget(place.offset)
        return SettleResult.SETTLED

    def _confirm(self, hold: _Hold) -> Script[bool]:
        """Tell the boundary how far all is settled; False when the caller was stopped.

        If it cannot be told now, it is told with the next call; until then a crash would bring again what
        is settled, as it may on any log.
        """
        with self.side.lock:
            done = hold.partition.watermark - 1
            if done <= hold.confirmed or not self._holds(hold):
                return True
        told = self._reader, self._pair, Cursor(hold.epoch, done)
        answer = yield from call(Call("confirm_receipt", self._calls.confirm_receipt, told))
        if isinstance(answer, Ok):
            hold.confirmed = max(hold.confirmed, done)
        elif isinstance(answer, Err) and not isinstance(answer.error, ConnectionLost):
            raise answer.error
        return isinstance(answer, Ok | Err)

    def extend(self, deliveries: Sequence[Delivery]) -> list[float | None]:
        """A claim ends with its generation only: infinity while it is good, None once it is gone."""
        hold = self._hold
        with self.side.lock:
            return [
                float("inf") if hold is not None and self._claims(hold, delivery.receipt) else None
                for delivery in deliveries
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
        now = self._wall()
        with self.side.lock:
            partition = hold.partition
            ready = partition.ready(now, 1 if end is None else end.offset + 1)
            ages = [now - since for offset in ready if (since := hold.window.since(offset)) is not None]
            return Depth(
                ready=len(ready),
                delayed=partition.delayed(now),
                in_flight=len(partition.held),
                dead=self.side.dead_count,
                oldest_age=max(ages, default=None),
            )

    # -- dead letters ---------------------------------------------------------------------------------

    def replay_dead(self, places: Sequence[str]) -> Script[list[ReplayResult]]:
        """Have them delivered anew. The fact itself is in the log for ever, and cannot be appended again."""
        results = []
        for place in places:
            with self.side.lock:
                record = self.side.dead(place)
            if record is None:
                results.append(ReplayResult(place, Became.GONE))
                continue
            answer = yield from call(Call("get_fact", self._calls.get_fact, (self._pair.from_zone, record.id)))
            results.append(self._replay(place, record, answer))
        return results

    def _replay(self, place: str, record: DeadLetterRecord, answer: Answer) -> ReplayResult:
        if not isinstance(answer, Ok):
            return ReplayResult(place, Became.FAILED, text(answer.error) if isinstance(answer, Err) else "stopped")
        found: FactConfirmation | None = answer.value
        if found is None:
            words = f"the boundary no longer knows the fact {record.id!r}, so nothing would be settled by it"
            return ReplayResult(place, Became.FAILED, words)
        with self.side.lock:
            try:
                # Kept first: a crash in between doubles it, the other way round would lose it.
                self.side.replay(Kept(self._wall(), Place(_ONLY, found.offset), record.fresh()))
                became = Became.REPLAYED if self.side.exhume(place) else Became.GONE
            except ErgonError as error:  # the side store's own trouble, which spoils no other place
                return ReplayResult(place, Became.FAILED, text(error))
        return ReplayResult(place, became)

    def discard_dead(self, places: Sequence[str]) -> list[ReplayResult]:
        """Throw dead letters away."""
        with self.side.lock:
            return [
                ReplayResult(place, Became.DISCARDED if self.side.exhume(place) else Became.GONE) for place in places
            ]


def _answered(answer: Answer) -> Any:
    """What a call returned; what it raised is raised, and a caller who was stopped is answered nothing."""
    if isinstance(answer, Err):
        raise answer.error
    return answer.value if isinstance(answer, Ok) else None


def _confirmation(confirmation: FactConfirmation) -> Confirmation:
    detail = {"offset": confirmation.offset, "epoch": confirmation.epoch, "digest": confirmation.digest}
    return Confirmation(confirmation.message_id, duplicate=confirmation.duplicate, detail=detail)
