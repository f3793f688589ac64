"""The journal: how stays of transactions ended, written in groups by a thread of each process that keeps one.

It is there to be read by people. Nothing waits for it, and it fails nothing: what cannot be written is kept as long as
there is room, and then dropped, the oldest first.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.encryption import Keys, environment_keys, hide_text, reveal_text
from ergon_framework.connectors.postgres.cleanup import Cleanup, retain_journal
from ergon_framework.connectors.tracing import MOST
from ergon_framework.errors import ErgonError
from ergon_framework.history import Event, History, Kind, Place, State, Value
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: Rows of one statement, and seconds between two.
GROUP: Final = 500
PAUSE: Final = 0.5
#: Seconds that one statement may take, and between two attempts at an outage or a missing table.
_WITHIN: Final = 10.0
_LONGEST_PAUSE: Final = 15.0
#: Seconds between two warnings that rows were dropped.
_WARN: Final = 10.0

_WRITE: Final = """
insert into ergon.journal (
    at, transaction_id, task, queue, correlation, tenant, outcome, category, code, reason, error, attempts, seconds,
    tries, worker
)
select to_timestamp(r.at), r.transaction_id, %(task)s, %(queue)s, r.correlation, r.tenant, r.outcome, r.category,
    r.code, r.reason, r.error, r.attempts, r.seconds, r.tries, %(worker)s
from jsonb_to_recordset(%(rows)s::jsonb) as r(
    at float8, transaction_id text, correlation text, tenant text, outcome text, category text, code text,
    reason text, error text, attempts integer, seconds float8, tries jsonb
)
"""
#: A database of an earlier release has none.
_THERE: Final = "select to_regclass('ergon.journal') is not null"
#: Distinct: a group whose confirmation was lost is written again.
_READ: Final = """
select distinct j.queue, j.task, j.worker, extract(epoch from j.at)::float8, j.transaction_id, j.correlation, j.tenant,
    j.outcome, j.category, j.code, j.reason, j.error, j.attempts, j.seconds, j.tries
from ergon.journal j where j.transaction_id = %(id)s order by 4 desc limit %(most)s
"""


class Entry(NamedTuple):
    """How one stay of a transaction ended; *at* is in seconds since the epoch."""

    at: float
    transaction_id: str
    correlation: str | None
    tenant: str | None
    outcome: str
    category: str | None
    code: str | None
    reason: str | None
    error: str | None
    attempts: int
    seconds: float
    #: As plain data.
    tries: list[dict[str, Any]] | None


def write(entries: Sequence[Entry], *, task: str, queue: str, worker: str) -> Operation[None]:
    """Put *entries* down."""
    rows = json.dumps([entry._asdict() for entry in entries], allow_nan=False)
    # What neither jsonb nor a text of the database can hold; a backslash before it would make it another character.
    clean = rows.replace("\\\\", "\\u005c").replace("\\u0000", "\\ufffd")
    yield Query(_WRITE, {"rows": clean, "task": task, "queue": queue, "worker": worker})


def _hide(keys: Keys | None, entry: Entry) -> Entry:
    """Return *entry* with its texts encrypted; once for all tries to write it, which must write the same."""
    if keys is None or (entry.error is None and not entry.tries):
        return entry
    return _with_texts(entry, lambda text: hide_text(keys, text, entry.transaction_id))


def _reveal(keys: Keys | None, entry: Entry) -> Entry:
    return _with_texts(entry, lambda text: reveal_text(keys, text, entry.transaction_id))


def _with_texts(entry: Entry, change: Callable[[str | None], str | None]) -> Entry:
    tries = entry.tries and [{**past, "error": change(past.get("error"))} for past in entry.tries]
    return entry._replace(error=change(entry.error), tries=tries)


# -- for workers ----------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Entries that are written together; *first* is the number of the first among all there ever were."""

    first: int
    entries: list[Entry]


class RefusedError(ConnectorError):
    """The server does not take what it was given."""


class Journal:
    """Takes entries at once, and writes them when it can; at most *room* wait."""

    def __init__(self, dsn: str, *, task: str, queue: str, worker: str, keep: float, room: int) -> None:
        self._lines = Lines(dsn, most=1, other=RefusedError)
        self._who = {"task": task, "queue": queue, "worker": worker}
        self._cleanup = Cleanup(dsn)
        self._keys = environment_keys()
        self._retention = retain_journal(keep)
        self._room = room
        self._lock = threading.Lock()
        self._waiting: deque[Entry] = deque()
        self._dropped = 0
        self._warned = -_WARN
        #: How many have left the front, written or dropped.
        self._left = 0
        #: How many are to be written alone, because one among them was refused.
        self._alone = 0
        self._lost = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="ergon-journal", daemon=True)

    def start(self) -> Journal:
        self._thread.start()
        return self

    def note(self, entry: Entry) -> None:
        """Keep *entry* for the next group; any thread may, and none waits."""
        entry = _hide(self._keys, entry)
        with self._lock:
            if len(self._waiting) >= self._room:
                self._waiting.popleft()
                self._left += 1
                self._dropped += 1
            self._waiting.append(entry)

    def stop(self, timeout: float) -> None:
        """Write what there is within *timeout* seconds; what is left then is dropped, and said."""
        self._over.set()
        self._thread.join(max(0.0, timeout))
        with self._lock:
            self._dropped += len(self._waiting)
            self._left += len(self._waiting)
            self._waiting.clear()
        self._warn(at_once=True)

    # -- its thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        end_retention = self._cleanup.add(self._retention)
        pause = PAUSE
        while not self._over.wait(pause):
            pause = PAUSE if self._round() else min(2 * pause, _LONGEST_PAUSE)
        end_retention()
        self._round()
        self._lines.close()

    def _round(self) -> bool:
        """Write all that waits; whether it could."""
        try:
            while (group := self._group()).entries:
                self._write(group)
        except ErgonError as error:
            if not self._lost:
                self._lost = True
                logs.say(
                    logging.WARNING, "journal lost", {"task": self._who["task"], "error": type(error).__name__}, to=_log
                )
            return False
        finally:
            self._warn()
        return True

    def _write(self, group: _Group) -> None:
        try:
            self._lines.run(write(group.entries, **self._who), within=_WITHIN)
        except RefusedError:
            # One of them cannot be written, whenever it is tried; the others can.
            if len(group.entries) > 1:
                self._alone = len(group.entries)
                return
            self._taken(group, written=False)
        else:
            self._taken(group, written=True)
            if self._lost:
                self._lost = False
                logs.say(logging.INFO, "journal regained", {"task": self._who["task"]}, to=_log)

    def _group(self) -> _Group:
        # They stay until they are written: the oldest of them may be dropped before, if the room is needed.
        with self._lock:
            size = min(1 if self._alone else GROUP, len(self._waiting))
            return _Group(self._left, [self._waiting[place] for place in range(size)])

    def _taken(self, group: _Group, *, written: bool) -> None:
        with self._lock:
            count = len(group.entries)
            self._alone = max(0, self._alone - count)
            # Some may have made room meanwhile: they were counted as dropped, and were written all the same.
            gone = min(count, self._left - group.first)
            for _ in range(count - gone):
                self._waiting.popleft()
                self._left += 1
            self._dropped += -gone if written else count - gone

    def _warn(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        with self._lock:
            dropped = self._dropped
            if not dropped or not (at_once or now - self._warned >= _WARN):
                return
            self._dropped, self._warned = 0, now
        logs.say(logging.WARNING, "journal rows dropped", {"task": self._who["task"], "rows": dropped}, to=_log)


# -- for people -----------------------------------------------------------------------------------------


def trace(transaction_id: str) -> Operation[list[History]]:
    """What the journal has of it, a history for each queue that it was in."""
    ((there,),) = yield Query(_THERE)
    if not there:
        return []
    rows = yield Query(_READ, {"id": transaction_id, "most": MOST})
    keys = environment_keys()
    by_queue: dict[str, list[_Row]] = {}
    for queue, task, worker, *entry in reversed(rows):
        found_entry = _reveal(keys, Entry(*entry))
        by_queue.setdefault(str(queue), []).append(_Row(str(task), str(worker), found_entry))
    return [_history(transaction_id, queue, found) for queue, found in by_queue.items()]


class _Row(NamedTuple):
    """An entry, with who wrote it."""

    task: str
    worker: str
    entry: Entry


#: What it was when it was last seen; of one that went back only its queue can say more.
_STATES: Final = {"succeeded": State.SUCCEEDED, "failed": State.FAILED, "handler_failed": State.FAILED}


def _history(transaction_id: str, queue: str, rows: Sequence[_Row]) -> History:
    task, worker, last = rows[-1]
    whose = {"correlation": last.correlation, "tenant": last.tenant}
    about: dict[str, Value] = {name: value for name, value in whose.items() if value is not None}
    about |= {"task": task, "attempts": last.attempts}
    state = _STATES.get(last.outcome, State.QUEUED)
    return History(
        kind=Kind.TRANSACTION,
        id=transaction_id,
        where=queue,
        about=about,
        events=tuple(event for row in rows for event in _events(row)),
        place=Place(state=state, since=last.at, words=f"as {worker} has written"),
    )


def _events(row: _Row) -> list[Event]:
    entry = row.entry
    tries = [
        Event(
            at=past.get("at"),
            what=f"{past.get('step', 'process')} {int(past.get('attempt', 0)) + 1}",
            verdict=str(past.get("category") or ""),
            words=": ".join(str(past[name]) for name in ("code", "error") if past.get(name)),
            values={} if past.get("delay") is None else {"delay": float(past["delay"])},
        )
        for past in entry.tries or ()
    ]
    said = ": ".join(word for word in (entry.code, entry.error or entry.reason) if word)
    ended = Event(
        at=entry.at,
        what=entry.outcome.replace("_", " "),
        verdict=entry.category or "",
        words=f"{said} by {row.worker}" if said else f"by {row.worker}",
        values={"seconds": round(entry.seconds, 6)},
    )
    return [*tries, ended]
