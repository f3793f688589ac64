"""The desk: what the writer's thread does, batch by batch, and what it says of it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from ergon_framework.providers.execution import AttemptRow
from ergon_framework.providers.observe import safely
from ergon_framework.providers.sql.batch import Account, Batch, prepared
from ergon_framework.providers.sql.reaching import PatientLine, connect
from ergon_framework.providers.sql.retention import FORGET, Done, Retention, make_ahead, steps
from ergon_framework.providers.sql.sampling import Sample, Sampler
from ergon_framework.providers.sql.task_table import OWN, read_task_table
from ergon_framework.providers.sql.tray import Tray
from ergon_framework.providers.sql.writing import is_content, refresh_rates, write
from ergon_framework.telemetry import logs
from ergon_framework.telemetry.names import LIBRARY, Event, Field

log: Final = logging.getLogger(f"{LIBRARY}.providers")

#: Seconds that the server has for one answer.
_PATIENCE: Final = 15.0
#: Seconds after a failure before the next try: the first, and the longest.
_SOON: Final = 0.1
_SELDOM: Final = 5.0
#: Seconds after which a batch in doubt is given up: well before its id is forgotten.
_DOUBT: Final = FORGET.total_seconds() / 4
#: Seconds between two computations of one account's rates after new attempts, and without any: the hour moves on.
REFRESH_SECONDS: Final = 5.0
IDLE_REFRESH_SECONDS: Final = 60.0
#: Accounts whose rates are computed in one database transaction.
_REFRESH_BATCH: Final = 200
#: Accounts without new attempts whose rates are still computed.
_MAX_IDLE_ACCOUNTS: Final = 10_000
#: Partitions that are made before the first batch, at most.
_AHEAD: Final = 400
#: Seconds between two words on the same matter.
_QUIET: Final = 10.0


class Desk:
    """Takes from the tray and writes. Only one thread sits at it; its errors are data, and never end it."""

    def __init__(self, dsn: str, tray: Tray, *, every: float, sample: Sample | None, retention: Retention) -> None:
        self._dsn = dsn
        self._tray = tray
        self._every = every
        self._retention = retention
        self._sampler = Sampler(sample)
        self.line: PatientLine | None = None
        #: As the database said when the line was made.
        self._task_table = OWN
        #: When the rates of an account were computed last, and the accounts with attempts since then.
        self._refreshed: dict[Account, float] = {}
        self._changed: set[Account] = set()
        #: When to tidy up; None before the first look at the database.
        self._due: float | None = None
        self._tidying: Iterator[None] | None = None
        self._said: dict[str, float] = {}
        self._told: Counter[str] = Counter()
        self._away = False

    def work(self) -> None:
        """Until the tray is closed, and then until it is empty or its time is over."""
        tray = self._tray
        try:
            while not tray.closed or (tray.rows and tray.left > 0):
                self._turn(self._next())
            while self._changed and tray.left > 0:
                if not self._refresh(self._changed):
                    self._pause(_SOON)
        finally:
            # Should it ever end by an error, the next attempt starts another thread.
            tray.asleep = True
            if self.line is not None:
                self.line.close()

    def _next(self) -> list[AttemptRow]:
        """The attempts of the next batch, as soon as there are many or the first has waited long enough."""
        tray = self._tray
        tray.asleep = True
        if not tray.rows and not tray.closed:
            tray.bell.wait(self._leisure())
        tray.asleep = False
        tray.bell.clear()
        if len(tray.rows) < tray.many and tray.rows and not tray.closed:
            tray.bell.wait(self._every)
            tray.bell.clear()
        return tray.take()

    def _leisure(self) -> float | None:
        """Seconds until there is something to do besides attempts."""
        if self._tidying is not None:
            return 0.0
        moments = [self._refresh_moment(account) for account in self._refreshed.keys() | self._changed]
        if self._due is not None:
            moments.append(self._due)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _turn(self, rows: list[AttemptRow]) -> None:
        batch, refused = prepared(rows, self._sampler)
        if refused:
            self._drop(refused, "refused", ValueError())
        if batch.ready:
            self._see_through(batch)
        if not self._tray.closed:
            now = time.monotonic()
            accounts = self._refreshed.keys() | self._changed
            self._refresh([account for account in accounts if self._refresh_moment(account) <= now])
            self._tidy()
        self._speak()

    # -- a batch ------------------------------------------------------------------------------------

    def _see_through(self, batch: Batch) -> None:
        """Try until it is written, or refused, or there is no more time."""
        waiting = [batch]
        began, delay = time.monotonic(), _SOON
        while waiting:
            current = waiting.pop()
            error = self._tried(current)
            if error is None:
                began, delay, self._away = time.monotonic(), _SOON, False
            elif self._tray.left <= 0:
                self._drop((one.row for one in current.ready), "closed", error)
            elif is_content(error) and not current.doubt:
                waiting += self._taken_apart(current, error)
            elif current.doubt and time.monotonic() - began >= _DOUBT:
                self._drop((one.row for one in current.ready), "doubt", error)
            else:
                waiting.append(current)
                self._say_away(error)
                self._pause(delay)
                delay = min(2 * delay, _SELDOM)

    def _taken_apart(self, batch: Batch, error: Exception) -> list[Batch]:
        """What is left to be tried of a batch that was refused for what is in it."""
        if not batch.refused:
            # A partition that was attached at the same moment looks like that too, and is there the next time.
            batch.refused = True
            return [batch]
        if len(batch) == 1:
            self._drop((one.row for one in batch.ready), "refused", error)
            return []
        return batch.halves()

    def _tried(self, batch: Batch) -> Exception | None:
        """What kept *batch* from being written; None if it is."""
        try:
            line = self._connected()
            write(line, batch, task_table=self._task_table)
        except Exception as error:  # noqa: BLE001 - the thread's own boundary: handed on as data
            self._rolled_back()
            return error
        self._changed |= {one.attempt[:3] for one in batch.ready}
        return None

    # -- rates ------------------------------------------------------------------------------------------

    def _refresh_moment(self, account: Account) -> float:
        """When the rates of *account* are to be computed next."""
        last = self._refreshed.get(account, float("-inf"))
        return last + (REFRESH_SECONDS if account in self._changed else IDLE_REFRESH_SECONDS)

    def _refresh(self, accounts: Iterable[Account]) -> bool:
        """Compute the rates of *accounts*; return False if that failed, and is to be done again."""
        wanted = sorted(accounts)
        for start in range(0, len(wanted), _REFRESH_BATCH):
            chunk = wanted[start : start + _REFRESH_BATCH]
            try:
                empty = refresh_rates(self._connected(), chunk)
            except Exception as error:  # noqa: BLE001 - the thread's own boundary: it is tried again
                self._rolled_back()
                self._refreshed |= dict.fromkeys(chunk, time.monotonic())
                self._say_away(error)
                return False
            self._changed.difference_update(chunk)
            self._refreshed |= dict.fromkeys(chunk, time.monotonic())
            for account in empty:
                del self._refreshed[account]
        if len(self._refreshed) > _MAX_IDLE_ACCOUNTS:
            self._refreshed = {account: at for account, at in self._refreshed.items() if account in self._changed}
        return True

    def _connected(self) -> PatientLine:
        left = self._tray.left
        if left <= 0:
            raise TimeoutError
        if self.line is None or self.line.closed:
            self.line = connect(self._dsn, patience=min(_PATIENCE, left))
            self._task_table = read_task_table(self.line)
        self.line.patience = min(_PATIENCE, left)
        if self._due is None:
            self._due = time.monotonic()
            self._step(make_ahead(self.line, self._retention, Done()), most=_AHEAD)
        return self.line

    def _rolled_back(self) -> None:
        """Leave no open database transaction behind; a line that cannot do even that is given up."""
        if self.line is not None and not self.line.closed:
            try:
                self.line.execute("rollback")
            except Exception:  # noqa: BLE001 - as above
                self.line.close()

    def _pause(self, delay: float) -> None:
        tray, until = self._tray, time.monotonic() + delay
        # New attempts ring the bell too; only the end is a reason to hurry.
        while not tray.closed and (left := until - time.monotonic()) > 0:
            tray.bell.wait(left)
            tray.bell.clear()
        if tray.closed:
            time.sleep(min(_SOON, max(0.0, tray.left)))

    # -- now and then -----------------------------------------------------------------------------------

    def _tidy(self) -> None:
        """One short step of it, between two batches."""
        if self._due is not None and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._retention.interval
            self._tidying = self._steps()
        if self._tidying is not None and not self._step(self._tidying):
            self._tidying = None

    def _steps(self) -> Iterator[None]:
        yield from steps(self._connected(), self._retention, Done())

    def _step(self, work: Iterator[None], *, most: int = 1) -> bool:
        """Whether there is more of *work*; what fails is left for another time."""
        try:
            for _ in range(most):
                if next(work, self) is self:
                    return False
        except Exception as error:  # noqa: BLE001 - the thread's own boundary: it is tried again
            self._rolled_back()
            logs.say(logging.WARNING, Event.RETENTION_FAILED, {Field.ERROR_TYPE: type(error).__name__}, to=log)
            return False
        return True

    # -- what is said -----------------------------------------------------------------------------------

    def _drop(self, rows: Iterable[AttemptRow], reason: str, error: BaseException) -> None:
        safely(self._tray.drop, list(rows), reason)
        self._speak(error)

    def _speak(self, error: BaseException | None = None) -> None:
        """Say what was dropped since the last word on it; of an error the type only, its message may quote the row."""
        now = time.monotonic()
        blame = {} if error is None else {Field.ERROR_TYPE: type(error).__name__}
        for reason, lost in list(self._tray.lost.items()):
            new = lost - self._told[reason]
            if new and now - self._said.get(reason, float("-inf")) >= _QUIET:
                self._said[reason], self._told[reason] = now, lost
                logs.say(logging.WARNING, Event.ROWS_DROPPED, {Field.ROWS: new, Field.REASON: reason} | blame, to=log)

    def _say_away(self, error: BaseException) -> None:
        if not self._away:
            self._away = True
            logs.say(logging.WARNING, Event.ROWS_WAIT, {Field.ERROR_TYPE: type(error).__name__}, to=log)
        self._speak()
