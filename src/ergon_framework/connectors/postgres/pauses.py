"""Pauses: who of the fleet is told not to fetch, kept in the database and watched by a thread of each process."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from psycopg import errors

from ergon_framework.audit import new_entry
from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.postgres import audit
from ergon_framework.schema.hearing import Hearing
from ergon_framework.schema.line import Line
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import BEGIN, COMMIT, Operation, Query
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

CHANNEL: Final = "ergon_pause"
#: Seconds between two looks.
LOOK: Final = 0.9
#: Seconds within which a look must be answered.
_PATIENCE: Final = 5.0
#: Seconds before it connects again: first, longest, and where the database has no table of pauses yet.
_FIRST, _LONGEST, _UNMADE = 0.1, 2.0, 30.0
#: Seconds between two reports of a watcher that has nothing new to say, and after which one is taken for gone.
_REPORT: Final = 5.0
GONE: Final = 20.0

_PAUSED: Final = "select name, by, because from ergon.pause where name = any(%(names)s) order by at, name limit 1"
_ALL: Final = "select name, by, because, extract(epoch from at)::float8 from ergon.pause order by at, name"
_SET: Final = """
insert into ergon.pause as kept (name, by, because) values (%(name)s, %(by)s, %(because)s)
on conflict (name) do update set by = excluded.by, because = excluded.because
    where (kept.by, kept.because) <> (excluded.by, excluded.because)
"""
_END: Final = "delete from ergon.pause where name = %(name)s returning name"
_HERE: Final = """
insert into ergon.pause_watcher (id, task, queue, host, pid, obeys, in_hand)
values (%(id)s, %(task)s, %(queue)s, %(host)s, %(pid)s, %(obeys)s, %(in_hand)s)
on conflict (id) do update set obeys = excluded.obeys, in_hand = excluded.in_hand, at = now()
"""
_LEFT: Final = "delete from ergon.pause_watcher where id = %(id)s or at < now() - make_interval(secs => 3600)"
_WATCHERS: Final = """
select task, queue, host, pid, obeys, in_hand from ergon.pause_watcher
where at > now() - make_interval(secs => %(gone)s) order by task, host, pid
"""


@dataclass(frozen=True, slots=True)
class Paused:
    """Somebody's word that what is called *name* is not to be fetched for; *at* is in seconds since the epoch."""

    name: str
    by: str
    because: str
    at: float


@dataclass(frozen=True, slots=True)
class Fetching:
    """A loop of the fleet: whose it is, which pause it obeys, if any, and how much it has in hand."""

    task: str
    queue: str
    host: str
    pid: int
    obeys: str | None
    in_hand: int

    def is_called(self, name: str) -> bool:
        """Whether a pause of *name* means it."""
        return name in (self.task, self.queue)


# -- for operators --------------------------------------------------------------------------------------


def pause(name: str, *, by: str, because: str) -> Operation[None]:
    """Have nobody fetch for what is called *name*; said again it is the last word that counts."""
    entry = new_entry("pause", name, actor=by, reason=because)
    yield BEGIN
    yield Query(_SET, {"name": name, "by": by, "because": because})
    yield from audit.note(None if entry is None else entry.end(count=1))
    yield COMMIT


def resume(name: str, *, by: str = "", because: str = "") -> Operation[bool]:
    """Have everybody fetch again; False where *name* was not paused."""
    entry = new_entry("resume", name, actor=by, reason=because)
    yield BEGIN
    resumed = bool((yield Query(_END, {"name": name})))
    yield from audit.note(entry.end(count=1) if resumed and entry is not None else None)
    yield COMMIT
    return resumed


def survey() -> Operation[tuple[list[Paused], list[Fetching]]]:
    """All pauses there are, and the loops that have reported of late."""
    pauses = yield Query(_ALL)
    watchers = yield Query(_WATCHERS, {"gone": GONE})
    return [Paused(*row) for row in pauses], [Fetching(*row) for row in watchers]


# -- for workers ----------------------------------------------------------------------------------------


class PauseWatch:
    """Knows whether the loop of one task is to fetch; asked at once, kept by a thread of its own.

    What it knew last holds while the database is out of reach. *in_hand* says how much the loop has in hand; *changed*
    is called when the loop had better ask again, because it may idle for long.
    """

    def __init__(
        self,
        dsn: str,
        *,
        task: str,
        queue: str,
        in_hand: Callable[[], int],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._lines = Lines(dsn, most=1, other=ConnectorError)
        self._names = [task, queue]
        self._who: dict[str, Any] = {
            "id": secrets.token_hex(8),
            "task": task,
            "queue": queue,
            "host": socket.gethostname()[:200],
            "pid": os.getpid(),
        }
        self._in_hand = in_hand
        self._changed = changed
        self._over = threading.Event()
        self._hearing = Hearing()
        #: Set once it is known whether there is a pause, or that it cannot be known for now.
        self._known = threading.Event()
        self._found: tuple[str, str, str] | None = None
        #: Whether the loop has been told and has stopped fetching; kept by whoever tells it.
        self.held = False
        self._lost = False
        self._reported: tuple[str | None, int] | None = None
        self._due = 0.0
        self._thread = threading.Thread(target=self._watch, name="ergon-pauses", daemon=True)

    def start(self) -> PauseWatch:
        self._thread.start()
        return self

    def stop(self, timeout: float = 1.0) -> None:
        """End it; a thread that is stuck in a connection is left behind."""
        self._over.set()
        self._hearing.wake()
        self._thread.join(timeout)

    def wait(self, timeout: float) -> bool:
        """Until it is known whether there is a pause, for at most *timeout* seconds."""
        return self._known.wait(timeout)

    @property
    def known(self) -> bool:
        """Whether the first look is over, well or not."""
        return self._known.is_set()

    @property
    def reason(self) -> str | None:
        """Why the loop is not to fetch; None while it may."""
        found = self._found
        if found is None:
            return None
        name, by, because = found
        words = f"{name} was paused by {by}{f': {because}' if because else ''}"
        return f"{words}; the database is out of reach, it may have been resumed" if self._lost else words

    # -- its thread -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        with self._hearing:
            self._keep_watching()

    def _keep_watching(self) -> None:
        delay = _FIRST
        while not self._over.is_set():
            try:
                with self._lines.connect() as connection:
                    self._heard(connection)
            except errors.UndefinedTable:
                # An older schema: nobody can pause anything there.
                self._found, delay = None, _UNMADE
                self._known.set()
            except Exception as error:  # noqa: BLE001 - whatever it is, the next look may be well
                delay = min(2 * delay, _LONGEST) if self._lost else _FIRST
                self._missed(error)
            self._over.wait(delay)

    def _heard(self, connection: Line) -> None:
        if self._lines.direct:
            connection.execute(f"listen {CHANNEL}")
        while not self._over.is_set():
            self._look(connection)
            self._wait(connection)
        connection.execute(_LEFT, self._who)

    def _look(self, connection: Line) -> None:
        # A server that stands still is as good as gone.
        connection.until = time.monotonic() + _PATIENCE
        found = connection.execute(_PAUSED, {"names": self._names}).fetchone()
        before, self._found = self._found, None if found is None else (str(found[0]), str(found[1]), str(found[2]))
        # A loop that is woken between its gate and its fetch does not hear it, and is told again.
        if before != self._found or (self._found is not None and not self.held):
            self._changed()
        if self._lost:
            self._lost = False
            logs.say(logging.INFO, "pause watch regained", {"task": self._who["task"]}, to=_log)
        self._known.set()
        self._report(connection)
        connection.until = None

    def _report(self, connection: Line) -> None:
        """Say that the loop is there: at once where its pause changes and while it finishes, else now and then."""
        obeys, in_hand = self._found[0] if self._found is not None and self.held else None, self._in_hand()
        # How much is in hand of one that fetches is old when it is read.
        news = (obeys, 0 if obeys is None else in_hand)
        now = time.monotonic()
        if news == self._reported and now < self._due:
            return
        connection.execute(_HERE, {**self._who, "obeys": obeys, "in_hand": in_hand})
        self._reported, self._due = news, now + _REPORT

    def _wait(self, connection: Line) -> None:
        """Until somebody pauses or resumes anything, it is time to look, or this is to end."""
        if self._lines.direct:
            self._hearing.notices(connection, LOOK)
        else:
            self._hearing.wait(LOOK)

    def _missed(self, error: Exception) -> None:
        self._known.set()
        if not self._lost:
            self._lost = True
            held = "paused" if self._found is not None else "fetching"
            logs.say(
                logging.WARNING,
                "pause watch lost",
                {"task": self._who["task"], "state": held, "error": type(error).__name__},
                to=_log,
            )
