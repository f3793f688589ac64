"""Keeping: the side of one reader in PostgreSQL, as operations for both flavours."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, DeadLetterRecord, number
from ergon_framework.connectors.postgres import burials
from ergon_framework.connectors.side_store import Kept, Place
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import Cursor
from ergon_framework.facts.side import (
    ONLY,
    OUTDATED,
    Acked,
    Buried,
    Change,
    Claimed,
    Claiming,
    Delayed,
    Freed,
    Reading,
    Settled,
    Taken,
)
from ergon_framework.facts.stores import postgres_reading as reading
from ergon_framework.facts.stores import postgres_side_records as records
from ergon_framework.facts.stores import postgres_side_statements as statements
from ergon_framework.facts.stores.postgres_store import Store
from ergon_framework.schema.operation import BEGIN, COMMIT, ROLLBACK, Operation, Query

C = TypeVar("C", Acked, Buried, Delayed)

#: Later than any account of an owner.
_LAST: Final = 2**62


class _Known(NamedTuple):
    side: int
    queue: int


class Keeping:
    """What a connector asks of the side of its reader; it remembers what only an owner has to know."""

    def __init__(self, whose: Reading) -> None:
        self._whose = whose
        self._named = {"from": whose.pair.from_zone, "to": whose.pair.to_zone, "reader": whose.reader}
        self._known: _Known | None = None
        #: By offset, how many deliveries ended with their owner. Nobody but whoever takes over adds to them.
        self._counts: dict[int, int] = {}

    def _found(self) -> Operation[_Known | None]:
        if self._known is None:
            rows = yield Query(statements.SIDE, self._named)
            self._known = _Known(*rows[0]) if rows else None
        return self._known

    def _made(self) -> Operation[_Known]:
        while (known := (yield from self._found())) is None:
            name = f"{self._named['from']}/{self._named['to']} as {self._named['reader']}"
            yield Query(statements.MAKE, {**self._named, "name": name})
        return known

    # -- owning it ------------------------------------------------------------------------------------

    def take_over(self, cursor: Cursor) -> Operation[Taken]:
        # After a restore the number may be another reader's, or nobody's.
        self._known = None
        side, _ = yield from self._made()
        yield BEGIN
        ((epoch,),) = yield Query(statements.LOCK, {"side": side})
        self._whose.recognise(epoch, cursor.epoch)
        asked = {"side": side, "cursor": cursor.offset}
        yield Query(statements.COUNT, asked)
        yield Query(statements.PRUNE, asked)
        ((generation, replays),) = yield Query(statements.RISE, {"side": side})
        rows = yield Query(statements.ASIDE, {"side": side})
        yield COMMIT
        self._counts = {offset: lost for offset, lost, settled, *_ in rows if lost and not settled}
        beyond = [offset for offset, _, settled, *_ in rows if settled]
        kept = [self._kept(offset, *more) for offset, _, _, *more in rows if more[0] is not None]
        return Taken(generation, beyond, kept, replays)

    def _kept(self, offset: int, due: float, envelope: str, body: bytes) -> Kept:
        return Kept(due, Place(ONLY, offset), records.read(envelope, body, self._whose.codec))

    def holds(self, generation: int) -> Operation[bool]:
        side, _ = yield from self._made()
        return bool((yield Query(statements.LOOK, {"side": side, "generation": generation})))

    def leave(self, generation: int, beyond: Collection[int]) -> Operation[bool]:
        side, _ = yield from self._made()
        yield BEGIN
        told = {"side": side, "generation": generation, "turn": _LAST, "held": [], "epoch": None}
        if not (yield Query(statements.FENCE, told)):
            yield ROLLBACK
            return False
        yield Query(statements.LEAVE, {"side": side, "offsets": list(beyond)})
        yield COMMIT
        return True

    # -- an owner -------------------------------------------------------------------------------------

    def claim(self, claiming: Claiming) -> Operation[Claimed | None]:
        side, _ = yield from self._made()
        told: dict[str, Any] = {"side": side, "generation": claiming.generation}
        if claiming.new:
            told |= {"turn": claiming.turn, "held": list(claiming.held), "epoch": claiming.epoch}
        rows = yield Query(statements.CLAIM if claiming.new else statements.LOOK, told)
        if not rows:
            return None
        replays, replayed = rows[0][0], []
        if replays > claiming.replays:
            asked = {"side": side, "known": claiming.replays, "latest": replays}
            for offset, *more in (yield Query(statements.REPLAYED, asked)):
                self._counts.pop(offset, None)
                replayed.append(self._kept(offset, *more))
        return Claimed([self._counts.get(offset, 0) + 1 for offset in claiming.new], replayed, replays)

    def settle(self, settled: Settled) -> Operation[bool]:
        known = yield from self._made()
        told = {"side": known.side, "generation": settled.generation, "turn": settled.turn, "held": list(settled.held)}
        told["epoch"] = None
        if all(_leaves_nothing(change) for change in settled.changes):
            return bool((yield Query(statements.CLAIM, told)))
        writing = self._writing(known, settled)
        yield BEGIN
        if not (yield Query(statements.FENCE, told)):
            yield ROLLBACK
            return False
        for query in writing:  # noqa: UP028 - a list has no use for what is sent back
            yield query
        yield COMMIT
        for change in settled.changes:
            if not isinstance(change, Freed | Delayed):
                self._counts.pop(change.offset, None)
        return True

    def _writing(self, known: _Known, settled: Settled) -> list[Query]:
        """Made before the first of them is sent: what cannot be written is known by then."""
        given = {"side": known.side}
        found: list[Query] = []
        if delayed := _of(settled.changes, Delayed):
            found.append(Query(statements.DELAY, given | self._delays(delayed)))
        if done := [change.offset for change in _of(settled.changes, Acked) if change.aside]:
            found.append(Query(statements.DONE, given | {"offsets": done}))
        if buried := _of(settled.changes, Buried):
            found.append(self._burial(known, buried))
        found.append(Query(statements.SWEEP, given | {"confirmed": settled.confirmed}))
        return found

    def _burial(self, known: _Known, buried: Sequence[Buried]) -> Query:
        columns = records.burial(buried, self._whose.codec)
        return Query(statements.BURY, {"side": known.side, "queue": known.queue, **columns})

    def _delays(self, delayed: Sequence[Delayed]) -> dict[str, list[Any]]:
        written = [records.written(change.kept.transaction, self._whose.codec) for change in delayed]
        return {
            "offsets": [change.offset for change in delayed],
            "deliveries": [self._counts.get(change.offset, 0) for change in delayed],
            "dues": [change.kept.due for change in delayed],
            "envelopes": [envelope for envelope, _ in written],
            "bodies": [body for _, body in written],
        }

    def confirm(self, store: Store, generation: int, cursor: Cursor) -> Operation[bool]:
        """To the boundary, which is the same database."""
        side, _ = yield from self._made()
        whose = self._whose
        return (
            yield from reading.confirm_held(store, whose.reader, whose.pair, cursor, side=side, generation=generation)
        )

    # -- dead letters ---------------------------------------------------------------------------------

    def dead(self, place: str) -> Operation[DeadLetterRecord | None]:
        try:
            before = str(number(place) - 1)
        except ConnectorError:
            return None
        found = yield from self.list_dead(DeadLetterQuery(), before if before != "-1" else None, 1)
        return found[0] if found and found[0].place == place else None

    def list_dead(self, query: DeadLetterQuery, after: str | None, limit: int) -> Operation[list[DeadLetterRecord]]:
        known = yield from self._found()
        if known is None:
            return []
        rows = yield from burials.found(known.queue, query, after=after, limit=limit)
        return [records.record(row, self._whose.queue, self._whose.codec) for row in rows]

    def dead_count(self) -> Operation[int]:
        known = yield from self._found()
        return 0 if known is None else int((yield Query(statements.DEAD, {"queue": known.queue}))[0][0])

    def replay(self, place: str, kept: Kept) -> Operation[bool]:
        known = yield from self._made()
        envelope, body = records.written(kept.transaction, self._whose.codec)
        given: dict[str, Any] = {
            "side": known.side,
            "queue": known.queue,
            "id": number(place),
            "offset": kept.place.offset,
        }
        given |= {"due": kept.due, "envelope": envelope, "body": body}
        return bool((yield Query(statements.REPLAY, given)))

    def discard(self, place: str) -> Operation[bool]:
        known = yield from self._found()
        if known is None:
            return False
        (result,) = yield from burials.discarded(known.queue, [place])
        return result.became is Became.DISCARDED

    # -- another epoch --------------------------------------------------------------------------------

    def forget_epoch(self, at: float) -> Operation[int]:
        """Be ready for another epoch; how many facts were due later, and are dead letters now."""
        known = yield from self._found()
        if known is None:
            # Not made: whoever misspells a name would be told that all is well, while his consumer stands still.
            readers = yield Query(statements.READERS, self._named)
            raise InvalidFactError(
                f"no reader {self._named['reader']!r} of facts from {self._named['from']!r} to {self._named['to']!r} "
                f"is known; known are: {', '.join(sorted(name for (name,) in readers)) or 'none'}"
            )
        yield BEGIN
        yield Query(statements.LOCK, {"side": known.side})
        rows = yield Query(statements.ASIDE, {"side": known.side})
        due = [(self._kept(offset, *more), lost) for offset, lost, _, *more in rows if more[0] is not None]
        buried = [Buried(kept.place.offset, aside=True, record=self._outdated(kept, lost, at)) for kept, lost in due]
        if buried:
            yield self._burial(known, buried)
        yield Query(statements.FORGET, {"side": known.side})
        yield Query(statements.RENEW, {"side": known.side})
        yield COMMIT
        return len(buried)

    def _outdated(self, kept: Kept, lost: int, at: float) -> DeadLetterRecord:
        delivery = Delivery(kept.transaction, None, lost)
        return DeadLetterRecord.of(delivery, DeadLetter(OUTDATED), queue=self._whose.queue, at=at)


def _leaves_nothing(change: Change) -> bool:
    return isinstance(change, Freed) or (isinstance(change, Acked) and not change.aside)


def _of(changes: Sequence[Change], kind: type[C]) -> list[C]:
    return [change for change in changes if isinstance(change, kind)]
