"""Reading: where a reader is, what comes next for him, and what he has done with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ergon_framework.errors import ConnectionLost
from ergon_framework.facts import table
from ergon_framework.facts.boundary import Behind, LogState
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import SENDER, Cursor, Pair, StoredFact, zone_of_reader
from ergon_framework.facts.stores import postgres_statements as statements
from ergon_framework.facts.stores import refusals
from ergon_framework.facts.stores.postgres_store import TRIES, Store
from ergon_framework.schema.operation import BEGIN, COMMIT, Operation, Query

#: Bytes of objects that one fetch brings, besides the first fact.
_BYTES: Final = 16 * 1024 * 1024
#: More than any moment and any count of facts.
_LARGEST: Final = 2**62


class _State(NamedTuple):
    """A log as one of its readers finds it."""

    #: None while nobody has written or read there.
    log: int | None
    epoch: str
    last: int
    dropped: int
    #: What the reader has confirmed; None if he is not registered.
    confirmed: int | None


def _state(store: Store, pair: Pair, reader: str = "") -> Operation[_State]:
    asked = {"from": pair.from_zone, "to": pair.to_zone, "reader": reader}
    for _ in range(TRIES):
        known = yield from store.opened()
        # Before the question: what others see meanwhile may be more than it answers.
        seen = store.seen(pair)
        ((token, log, epoch, last, dropped, confirmed),) = yield Query(statements.STATE, asked)
        if token != known.token:
            yield from store.recognised()
        elif (last or 0) < seen:
            yield from store.went_back(known)
        else:
            store.see(pair, last or 0)
            return _State(log, epoch or known.epoch, last or 0, dropped or 0, confirmed)
    raise ConnectionLost("the store became another one while it was read; read again")


def fetch(
    store: Store, reader: str, pair: Pair, limit: int, *, after: Cursor | None, max_readers: int | None
) -> Operation[list[StoredFact]]:
    """What comes behind what the reader has confirmed, or behind *after*; it is registered from then on."""
    for _ in range(TRIES):
        state = yield from _state(store, pair, reader)
        if state.confirmed is None:
            if max_readers is None:
                yield from _registered(state, reader, pair)
            else:
                yield BEGIN
                yield from _check_readers(reader, pair, max_readers)
                yield from _registered(state, reader, pair)
                yield COMMIT
            continue
        if after is not None:
            _check(pair, after, state)
        begin = state.confirmed if after is None else after.offset
        if state.last == 0:
            return []
        if begin < state.dropped:
            raise refusals.gone(pair, begin, state.dropped)
        if limit <= 0 or begin == state.last:
            return []
        asked = {"log": state.log, "after": begin, "last": state.last, "bytes": _BYTES, "limit": min(limit, _LARGEST)}
        rows = yield Query(statements.FETCH, asked)
        if rows:
            return _stored(rows, pair, state.epoch)
        # Retention came in between; the next look says so.
    raise FactError(
        f"facts from {pair.from_zone!r} to {pair.to_zone!r} are missing from the database that should be retained; "
        "look at the tables ergon.fact_log and ergon.facts"
    )


def _registered(state: _State, reader: str, pair: Pair) -> Operation[None]:
    asked = {"from": pair.from_zone, "to": pair.to_zone, "reader": reader}
    if state.log is None:
        yield Query(statements.MAKE_LOG, asked)
    yield Query(statements.REGISTER, asked)


def _check_readers(reader: str, pair: Pair, most: int) -> Operation[None]:
    """Refuse a further reader of a zone that has *most* of them; the lock ends with the registration."""
    zone = zone_of_reader(reader, pair)
    asked = {"zone": zone, "sender": SENDER, "from": pair.from_zone, "to": pair.to_zone, "reader": reader}
    yield Query(statements.LOCK_READERS, asked)
    ((count, registered),) = yield Query(statements.COUNT_READERS, asked)
    if count >= most and not registered:
        raise refusals.too_many_readers(reader, zone, count, most)


def _check(pair: Pair, cursor: Cursor, state: _State) -> None:
    # Whoever has read nothing has read it in no epoch.
    if cursor.epoch != state.epoch and cursor.offset:
        raise refusals.changed(cursor.epoch, state.epoch)
    if not 0 <= cursor.offset <= state.last:
        raise refusals.never_given(pair, cursor.offset, state.last)


def _stored(rows: Sequence[tuple[Any, ...]], pair: Pair, epoch: str) -> list[StoredFact]:
    """The facts of *rows*, of which there is at least one."""
    offsets, stored_at, ids, produced, correlations, causations, labels, subjects, predicates, texts, digests = zip(
        *rows, strict=True
    )
    stated = table.read(
        table.Table(
            message_ids=ids,
            from_zones=[pair.from_zone] * len(rows),
            to_zones=[pair.to_zone] * len(rows),
            produced=produced,
            correlations=correlations,
            causations=causations,
            subjects=subjects,
            predicates=predicates,
            objects=texts,
            labels={place: json.loads(written) for place, written in enumerate(labels) if written},
        )
    )
    return [
        StoredFact(
            envelope=envelope,
            fact=fact,
            digest=f"sha256:{digest.hex()}",
            offset=offset,
            epoch=epoch,
            stored_at_unix_ms=moment,
        )
        for (envelope, fact), digest, offset, moment in zip(stated, digests, offsets, stored_at, strict=True)
    ]


def _confirmable(store: Store, reader: str, pair: Pair, cursor: Cursor) -> Operation[tuple[_State, int]]:
    """The state, and what is confirmed."""
    state = yield from _state(store, pair, reader)
    if state.confirmed is None:
        raise refusals.unknown_reader(reader, pair)
    _check(pair, cursor, state)
    return state, state.confirmed


def confirm_held(
    store: Store, reader: str, pair: Pair, cursor: Cursor, *, side: int, generation: int
) -> Operation[bool]:
    """The same as confirm, if the side of that reader is in that generation; whether it is."""
    state, _ = yield from _confirmable(store, reader, pair, cursor)
    asked = {"log": state.log, "reader": reader, "offset": cursor.offset, "side": side, "generation": generation}
    return bool((yield Query(statements.CONFIRM_HELD, asked)))


def confirm(store: Store, reader: str, pair: Pair, cursor: Cursor) -> Operation[None]:
    """He has done with all up to *cursor*."""
    state, before = yield from _confirmable(store, reader, pair, cursor)
    if cursor.offset > before:
        # What he has not confirmed is retained for him, so the fact at his cursor is there.
        yield Query(statements.CONFIRM, {"log": state.log, "reader": reader, "offset": cursor.offset})


def cursor_of(store: Store, reader: str, pair: Pair) -> Operation[Cursor | None]:
    """What he has confirmed."""
    state = yield from _state(store, pair, reader)
    return None if state.confirmed is None else Cursor(state.epoch, state.confirmed)


def end_of(store: Store, pair: Pair) -> Operation[Cursor | None]:
    """The last offset that was given."""
    state = yield from _state(store, pair)
    return Cursor(state.epoch, state.last) if state.last else None


def cursor_at(store: Store, pair: Pair, unix_ms: int) -> Operation[Cursor | None]:
    """Before the first retained fact that was stored at that moment or later."""
    state = yield from _state(store, pair)
    if not state.last:
        return None
    moment = max(-_LARGEST, min(unix_ms, _LARGEST))
    asked = {"log": state.log, "dropped": state.dropped, "moment": moment}
    found = yield Query(statements.FIRST_SINCE, asked)
    return Cursor(state.epoch, found[0][0] - 1 if found else state.last)


def retire(store: Store, reader: str, pair: Pair, by: str) -> Operation[bool]:
    """Forget him, and keep who did it."""
    yield from store.opened()
    asked = {"from": pair.from_zone, "to": pair.to_zone, "reader": reader, "by": by}
    return bool((yield Query(statements.RETIRE, asked)))


def adopt(store: Store, pair: Pair, cursor: Cursor, by: str) -> Operation[None]:
    """Have a forward buffer go on in another epoch of its origin."""
    state = yield from _state(store, pair)
    why = f"adopted for {pair.from_zone} to {pair.to_zone} at offset {cursor.offset}"
    asked = {"from": pair.from_zone, "to": pair.to_zone, "epoch": cursor.epoch, "offset": cursor.offset}
    asked |= {"why": why, "by": by}
    if not (yield Query(statements.ADOPT, asked)):
        raise refusals.not_the_end(pair, cursor.offset, None if state.log is None else state.last)


def survey(store: Store) -> Operation[Sequence[LogState]]:
    """All pairs that have facts here, or readers."""
    known = yield from store.opened()
    states: dict[Pair, LogState] = {}
    for row in (yield Query(statements.SURVEY)):
        from_zone, to_zone, forwarded, epoch, last, total, dropped, dropped_total, *reader = row
        pair = Pair(from_zone, to_zone)
        # Of a pair without facts nobody knows yet which buffer it will be: whoever waits, waits for what arrives.
        buffer = store.side.store_buffer if forwarded is False else store.side.forward_buffer
        behind = dict(states[pair].readers) if pair in states else {}
        if reader[0] is not None:
            name, offset, read, since = reader
            behind[name] = Behind(offset, last - offset, total - read, since)
        states[pair] = LogState(
            pair=pair,
            buffer=buffer,
            epoch=epoch or known.epoch,
            first=dropped + 1,
            last=last,
            bytes=total - dropped_total,
            readers=behind,
        )
    return list(states.values())
