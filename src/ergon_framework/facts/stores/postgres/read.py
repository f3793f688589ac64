"""Operations of readers: fetch facts, confirm them, and manage cursors and epochs.

A fact belongs to a log, the sequence of facts from one zone to another, and has an offset there. A reader's cursor is
the epoch and the offset of the last fact that it confirmed. An epoch names the history of a store: it changes when a
backup is restored, because offsets may mean other facts then. To adopt an epoch is to continue a log of forwarded facts
in another epoch of its origin.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from ergon_framework.database.operation import BEGIN, COMMIT, Operation, Query
from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts import columns
from ergon_framework.facts.boundary import LogState, ReaderLag
from ergon_framework.facts.errors import FactError
from ergon_framework.facts.model import SENDER_PREFIX, Cursor, StoredFact, ZonePair, zone_of_reader
from ergon_framework.facts.stores import errors
from ergon_framework.facts.stores.postgres import sql as statements
from ergon_framework.facts.stores.postgres.session import MAX_ATTEMPTS, DatabaseSession

#: Bytes of objects that one fetch returns, besides the first fact.
_MAX_FETCH_BYTES: Final = 16 * 1024 * 1024
#: Larger than any timestamp and any number of facts.
_MAX_INTEGER: Final = 2**62


class _ReaderState(NamedTuple):
    """A log as one of its readers sees it."""

    #: None before the first fact or reader.
    log: int | None
    epoch: str
    last: int
    dropped: int
    #: The offset that the reader has confirmed; None if it is not registered.
    confirmed: int | None


def _read_state(session: DatabaseSession, pair: ZonePair, reader: str = "") -> Operation[_ReaderState]:
    """Read the state of a log; first verify the store again if it may have become another one."""
    parameters = {"from": pair.from_zone, "to": pair.to_zone, "reader": reader}
    for _ in range(MAX_ATTEMPTS):
        identity = yield from session.ensure_open()
        # Read before the query: the offsets that other calls record meanwhile may be higher than its result.
        highest_seen = session.highest_offset(pair)
        ((token, log, epoch, last, dropped, confirmed),) = yield Query(statements.STATE, parameters)
        if token != identity.token:
            yield from session.verify()
        elif (last or 0) < highest_seen:
            yield from session.begin_epoch_after_restore(identity)
        else:
            session.record_offset(pair, last or 0)
            return _ReaderState(log, epoch or identity.epoch, last or 0, dropped or 0, confirmed)
    raise ConnectionLostError("store identity kept changing during the read; read again")


def fetch(
    session: DatabaseSession, reader: str, pair: ZonePair, limit: int, *, after: Cursor | None, max_readers: int | None
) -> Operation[list[StoredFact]]:
    """Return the facts after the reader's cursor, or after *after*; the first fetch registers the reader."""
    for _ in range(MAX_ATTEMPTS):
        state = yield from _read_state(session, pair, reader)
        if state.confirmed is None:
            if max_readers is None:
                yield from _register_reader(state, reader, pair)
            else:
                yield BEGIN
                yield from _check_readers(reader, pair, max_readers)
                yield from _register_reader(state, reader, pair)
                yield COMMIT
            continue
        if after is not None:
            _check_cursor(pair, after, state)
        begin = state.confirmed if after is None else after.offset
        if state.last == 0:
            return []
        if begin < state.dropped:
            raise errors.offset_gone_error(pair, begin, state.dropped)
        if limit <= 0 or begin == state.last:
            return []
        parameters = {
            "log": state.log,
            "after": begin,
            "last": state.last,
            "bytes": _MAX_FETCH_BYTES,
            "limit": min(limit, _MAX_INTEGER),
        }
        rows = yield Query(statements.FETCH, parameters)
        if rows:
            return _to_facts(rows, pair, state.epoch)
        # Retention removed the rows in between; the next attempt reports it.
    raise FactError(
        f"retained facts from {pair.from_zone!r} to {pair.to_zone!r} are missing from the database; "
        "check the tables ergon.fact_log and ergon.facts"
    )


def _register_reader(state: _ReaderState, reader: str, pair: ZonePair) -> Operation[None]:
    parameters = {"from": pair.from_zone, "to": pair.to_zone, "reader": reader}
    if state.log is None:
        yield Query(statements.INSERT_LOG, parameters)
    yield Query(statements.REGISTER_READER, parameters)


def _check_readers(reader: str, pair: ZonePair, limit: int) -> Operation[None]:
    """Reject a further reader of a zone that has *limit* readers; the lock ends with the registration."""
    zone = zone_of_reader(reader, pair)
    parameters = {"zone": zone, "sender": SENDER_PREFIX, "from": pair.from_zone, "to": pair.to_zone, "reader": reader}
    yield Query(statements.LOCK_READERS, parameters)
    ((count, registered),) = yield Query(statements.COUNT_READERS, parameters)
    if count >= limit and not registered:
        raise errors.too_many_readers_error(reader, zone, count, limit)


def _check_cursor(pair: ZonePair, cursor: Cursor, state: _ReaderState) -> None:
    # A reader at offset 0 has read nothing and so belongs to no epoch.
    if cursor.epoch != state.epoch and cursor.offset:
        raise errors.epoch_changed_error(cursor.epoch, state.epoch)
    if not 0 <= cursor.offset <= state.last:
        raise errors.offset_ahead_error(pair, cursor.offset, state.last)


def _to_facts(rows: Sequence[tuple[Any, ...]], pair: ZonePair, epoch: str) -> list[StoredFact]:
    """Return the facts of *rows*, which are not empty."""
    offsets, stored_at, ids, produced, correlations, causations, labels, subjects, predicates, texts, digests = zip(
        *rows, strict=True
    )
    parsed = columns.columns_to_facts(
        columns.FactColumns(
            message_ids=ids,
            from_zones=[pair.from_zone] * len(rows),
            to_zones=[pair.to_zone] * len(rows),
            produced_at_unix_ms=produced,
            correlations=correlations,
            causations=causations,
            subjects=subjects,
            predicates=predicates,
            objects=texts,
            labels={index: json.loads(text) for index, text in enumerate(labels) if text},
        )
    )
    return [
        StoredFact(
            envelope=envelope,
            fact=fact,
            digest=f"sha256:{digest.hex()}",
            offset=offset,
            epoch=epoch,
            stored_at_unix_ms=stored_at_ms,
        )
        for (envelope, fact), digest, offset, stored_at_ms in zip(parsed, digests, offsets, stored_at, strict=True)
    ]


def _check_confirmable(
    session: DatabaseSession, reader: str, pair: ZonePair, cursor: Cursor
) -> Operation[tuple[_ReaderState, int]]:
    """Return the state and the confirmed offset, after checking that the cursor can be confirmed."""
    state = yield from _read_state(session, pair, reader)
    if state.confirmed is None:
        raise errors.unknown_reader_error(reader, pair)
    _check_cursor(pair, cursor, state)
    return state, state.confirmed


def confirm_if_owner(
    session: DatabaseSession, reader: str, pair: ZonePair, cursor: Cursor, *, consumer_id: int, generation: int
) -> Operation[bool]:
    """Confirm like confirm() if the reader's consumer store is in that generation; return whether it is."""
    state, _ = yield from _check_confirmable(session, reader, pair, cursor)
    parameters = {
        "log": state.log,
        "reader": reader,
        "offset": cursor.offset,
        "consumer": consumer_id,
        "generation": generation,
    }
    return bool((yield Query(statements.CONFIRM_IF_OWNER, parameters)))


def confirm(session: DatabaseSession, reader: str, pair: ZonePair, cursor: Cursor) -> Operation[None]:
    """Confirm all facts up to *cursor*."""
    state, confirmed = yield from _check_confirmable(session, reader, pair, cursor)
    if cursor.offset > confirmed:
        # Unconfirmed facts are retained for the reader, so the fact at its cursor exists.
        yield Query(statements.CONFIRM, {"log": state.log, "reader": reader, "offset": cursor.offset})


def get_cursor(session: DatabaseSession, reader: str, pair: ZonePair) -> Operation[Cursor | None]:
    """Return the reader's cursor, or None if it is not registered."""
    state = yield from _read_state(session, pair, reader)
    return None if state.confirmed is None else Cursor(state.epoch, state.confirmed)


def last_offset(session: DatabaseSession, pair: ZonePair) -> Operation[Cursor | None]:
    """Return a cursor at the last assigned offset, or None without facts."""
    state = yield from _read_state(session, pair)
    return Cursor(state.epoch, state.last) if state.last else None


def get_cursor_at_time(session: DatabaseSession, pair: ZonePair, unix_ms: int) -> Operation[Cursor | None]:
    """Return a cursor before the first retained fact that was stored at that moment or later."""
    state = yield from _read_state(session, pair)
    if not state.last:
        return None
    moment = max(-_MAX_INTEGER, min(unix_ms, _MAX_INTEGER))
    parameters = {"log": state.log, "dropped": state.dropped, "moment": moment}
    rows = yield Query(statements.FIRST_SINCE, parameters)
    return Cursor(state.epoch, rows[0][0] - 1 if rows else state.last)


def retire_reader(session: DatabaseSession, reader: str, pair: ZonePair, by: str) -> Operation[bool]:
    """Remove a reader, and record who did it."""
    yield from session.ensure_open()
    parameters = {"from": pair.from_zone, "to": pair.to_zone, "reader": reader, "by": by}
    return bool((yield Query(statements.RETIRE_READER, parameters)))


def adopt_epoch(session: DatabaseSession, pair: ZonePair, cursor: Cursor, by: str) -> Operation[None]:
    """Continue a forward buffer in another epoch of its origin."""
    state = yield from _read_state(session, pair)
    why = f"adopted for {pair.from_zone} to {pair.to_zone} at offset {cursor.offset}"
    parameters = {"from": pair.from_zone, "to": pair.to_zone, "epoch": cursor.epoch, "offset": cursor.offset}
    parameters |= {"why": why, "by": by}
    if not (yield Query(statements.ADOPT_EPOCH, parameters)):
        raise errors.not_at_end_error(pair, cursor.offset, None if state.log is None else state.last)


def list_logs(session: DatabaseSession) -> Operation[Sequence[LogState]]:
    """Return the state of all pairs that have facts or readers here."""
    identity = yield from session.ensure_open()
    states: dict[ZonePair, LogState] = {}
    for row in (yield Query(statements.LOG_STATES)):
        from_zone, to_zone, forwarded, epoch, last, total, dropped, dropped_total, *reader_columns = row
        pair = ZonePair(from_zone, to_zone)
        # The buffer is unknown before the first fact: a waiting reader expects facts that are forwarded to this store.
        buffer = session.side.store_buffer if forwarded is False else session.side.forward_buffer
        lags = dict(states[pair].readers) if pair in states else {}
        if reader_columns[0] is not None:
            name, offset, confirmed_total, since = reader_columns
            lags[name] = ReaderLag(offset, last - offset, total - confirmed_total, since)
        states[pair] = LogState(
            pair=pair,
            buffer=buffer,
            epoch=epoch or identity.epoch,
            first=dropped + 1,
            last=last,
            bytes=total - dropped_total,
            readers=lags,
        )
    return list(states.values())
