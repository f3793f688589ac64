"""Books in PostgreSQL: quota, breakers and keys that a whole fleet shares."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Final, Protocol, Self
from weakref import WeakSet

from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.providers import circuit_breaker
from ergon_framework.providers.books import (
    Account,
    Admission,
    Admitted,
    Asked,
    AsyncBooks,
    Books,
    Concluded,
)
from ergon_framework.providers.circuit_breaker import BreakerState, Pass
from ergon_framework.providers.errors import ProviderQuotaExceededError
from ergon_framework.providers.execution import AttemptRow
from ergon_framework.providers.sql import statements
from ergon_framework.providers.sql.blocks import BlockPolicy, Limits, Purse, Rest
from ergon_framework.providers.sql.names import owner_of
from ergon_framework.providers.sql.sweeping import LostRow, reconciled
from ergon_framework.providers.sql.view import View
from ergon_framework.providers.sql.visits import (
    Granted,
    admission,
    conclusion,
    held,
    is_closed,
    lease,
    limits_of,
)
from ergon_framework.providers.sql.watcher import Watcher
from ergon_framework.providers.sql.writer import MetricsWriter
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.schema.revisions import suffices

_log = logging.getLogger(__name__)

#: Where the address of the database is found unless it is given.
VARIABLE: Final = "ERGON_POSTGRES__DSN"
#: The revision that has the tables of providers as this release uses them.
NEEDED: Final = "0011"
#: The most accounts of which a process has blocks in hand.
_PURSES: Final = 10_000
#: Seconds for the blocks to be given back at the end.
_GIVE_BACK: Final = 2.0


class Writer(Protocol):
    """Whoever writes the attempts down."""

    def record(self, row: AttemptRow) -> None:
        """Take a row; neither wait nor raise."""

    def close(self, timeout: float) -> None:
        """Write what is left, within so many seconds."""


class PostgresBooks(Books, AsyncBooks):
    """Quota, breakers and keys in the database at *dsn*; for threads and for asyncio, safe from any of them.

    Each visit is one round trip, made in one transaction by the server's clock. With *blocks* a process
    takes calls out of the windows in advance, so that a call without a key needs no visit at all. Attempts
    are written to the metrics tables by a writer of its own, or by *writer*; both are closed with the books.
    With ``metrics=False`` attempts are counted in ``dropped`` and not written. A forked child has connections,
    blocks, a watcher and a writer of its own.
    """

    punctual = True

    def __init__(
        self,
        dsn: str | None = None,
        *,
        blocks: BlockPolicy | None = None,
        writer: Writer | None = None,
        metrics: bool = True,
        connections: int = 8,
    ) -> None:
        found = dsn or os.environ.get(VARIABLE)
        if not found:
            raise ConfigurationError(f"the books have no database: set {VARIABLE} in the environment or give dsn=…")
        self._lines = Lines(found, most=connections)
        self._blocks = blocks
        self._writer = writer
        self._own_writer = MetricsWriter(found) if metrics and writer is None else None
        self._unwritten = 0
        self._begin_anew()
        _everybody.add(self)

    def _begin_anew(self) -> None:
        """At the start, and in a forked child: what the parent has in hand is the parent's."""
        self._lock = threading.Lock()
        self._view = View()
        self._purses: dict[tuple[Account, Limits], Purse] = {}
        #: Blocks that could not be given back yet.
        self._owed: list[Rest] = []
        self._watcher: Watcher | None = None
        self._who = f"{socket.gethostname()[:100]}:{os.getpid()}"

    # -- coming and going -------------------------------------------------------------------------------

    def open(self) -> Self:
        """Ask the database whether it has the tables; nobody has to."""
        try:
            self._lines.run(_checked())
        except BaseException:
            self.close()
            raise
        return self

    async def open_async(self) -> Self:
        try:
            await self._lines.run_async(_checked())
        except BaseException:
            await self.close_async()
            raise
        return self

    @property
    def dropped(self) -> int:
        """How many attempts were recorded and kept nowhere."""
        return self._unwritten + (0 if self._own_writer is None else self._own_writer.dropped)

    def close(self, timeout: float = _GIVE_BACK) -> None:
        """Write the attempts that wait, give the blocks back, close what is open; each within *timeout* seconds.

        A later visit opens connections again, and a later attempt is written by a new thread.
        """
        self._stop()
        if self._purses or self._owed:
            with suppress(ErgonError):
                self._lines.run(self._returned(), within=timeout)
        self._lines.close()
        self._close_writer(timeout)

    async def close_async(self) -> None:
        self._stop()
        if self._purses or self._owed:
            with suppress(ErgonError):
                await self._lines.run_async(self._returned(), within=_GIVE_BACK)
        await self._lines.close_async()
        await asyncio.to_thread(self._close_writer)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await self.open_async()

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    def _stop(self) -> None:
        with self._lock:
            watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.stop()

    def _close_writer(self, timeout: float = _GIVE_BACK) -> None:
        if self._writer is not None:
            self._writer.close(timeout)
        if self._own_writer is not None:
            self._own_writer.flush(timeout)

    # -- the port -----------------------------------------------------------------------------------------

    def admit(self, asked: Asked) -> Admission:
        admitted = self._at_once(asked)
        return self._lines.run(self._admitted(asked), within=asked.within) if admitted is None else admitted

    async def admit_async(self, asked: Asked) -> Admission:
        admitted = self._at_once(asked)
        return await self._lines.run_async(self._admitted(asked), within=asked.within) if admitted is None else admitted

    def conclude(self, admitted: Admitted, concluded: Concluded) -> BreakerState | None:
        visit = self._concluded(admitted, concluded)
        return None if visit is None else self._lines.run(visit, within=concluded.within)

    async def conclude_async(self, admitted: Admitted, concluded: Concluded) -> BreakerState | None:
        visit = self._concluded(admitted, concluded)
        return None if visit is None else await self._lines.run_async(visit, within=concluded.within)

    def held_until(self, account: Account) -> float | None:
        owner_of(account)
        self._watch()
        seen = self._view.of(account)
        return None if seen is None else circuit_breaker.held_until(seen)

    def record(self, row: AttemptRow) -> None:
        writer = self._writer or self._own_writer
        if writer is None:
            self._unwritten += 1
        else:
            writer.record(row)

    def reconcile(self) -> list[LostRow]:
        """Mark the reservations that their owners let lapse, and say which; done now and then by any process."""
        return self._lines.run(reconciled())

    async def reconcile_async(self) -> list[LostRow]:
        return await self._lines.run_async(reconciled())

    # -- before an attempt --------------------------------------------------------------------------------

    def _at_once(self, asked: Asked) -> Admission | None:
        """The leave for a call that needs no visit: there are blocks, no key is to be claimed, the breaker is closed.

        A breaker known to be open refuses here too, if there is a call that it could refuse.
        """
        owner_of(asked.account)  # what cannot be kept is not looked for either
        self._watch()
        if self._blocks is None or (asked.idempotency_key is not None and asked.attempt_number == 1):
            return None
        watcher, seen, clock = self._watcher, self._view.of(asked.account), time.monotonic()
        if seen is None or watcher is None or not watcher.is_fresh(clock):
            return None
        purse = self._purse(asked)
        if not is_closed(seen):
            refused = held(seen, asked.now)
            if refused is None or asked.idempotency_key is not None or not (purse is None or purse.has(clock)):
                return None
            raise circuit_breaker.refusal(refused, asked.now)
        leave = Pass(seen.generation)
        if purse is None:
            return Granted(asked, leave)
        block = purse.take(clock)
        return None if block is None else Granted(asked, leave, purse=purse, block=block)

    def _admitted(self, asked: Asked) -> Operation[Admission]:
        """The leave that a visit gives: its call is out of a block where there is one, else out of the windows."""
        limits, purse = limits_of(asked.policy.quota), self._purse(asked)
        block = None if purse is None else (yield from self._taken(asked, purse))
        if block is not None and asked.idempotency_key is None:
            seen = self._view.of(asked.account)
            if seen is not None and is_closed(seen):
                return Granted(asked, Pass(seen.generation), purse=purse, block=block)
        try:
            admitted = yield from admission(
                asked, limits=limits if block is None else None, who=self._who, view=self._view
            )
        except BaseException:
            # Also where nobody knows: a call that is made without a leave is none that was counted.
            if purse is not None and block is not None:
                purse.put_back(block)
            raise
        if purse is not None and block is not None:
            if not isinstance(admitted, Granted):
                purse.put_back(block)
            else:
                admitted.purse, admitted.block = purse, block
        return admitted

    def _taken(self, asked: Asked, purse: Purse) -> Operation[int | None]:
        """A call of the purse, with the next block if there is none left; None where the windows are to be asked."""
        block = purse.take(time.monotonic())
        if block is not None or self._blocks is None:
            return block
        mine, rest = purse.renewal()
        if not mine:
            return None
        leased = None
        try:
            leased = yield from lease(asked, purse, rest, policy=self._blocks, who=self._who, view=self._view)
        except BaseException:
            if rest is not None:
                self._owed.append(rest)
            raise
        finally:
            purse.renewed(None if isinstance(leased, ProviderQuotaExceededError) else leased)
        if isinstance(leased, ProviderQuotaExceededError):
            # A key comes before the quota: what it stands for may be there already.
            if asked.idempotency_key is None:
                raise leased
            return None
        return purse.take(time.monotonic())

    def _purse(self, asked: Asked) -> Purse | None:
        """Where the blocks of the account are; None where it takes none."""
        limits = None if self._blocks is None else limits_of(asked.policy.quota)
        if limits is None:
            return None
        place = asked.account, limits
        purse = self._purses.get(place)
        if purse is None:
            with self._lock:
                if len(self._purses) >= _PURSES:
                    return None
                purse = self._purses.setdefault(place, Purse(asked.account, limits))
        return purse

    # -- after an attempt ---------------------------------------------------------------------------------

    def _concluded(self, admitted: Admitted, concluded: Concluded) -> Operation[BreakerState | None] | None:
        if not isinstance(admitted, Granted):
            raise ConfigurationError("an attempt is concluded in the books that admitted it")
        error = concluded.error
        if admitted.purse is not None and admitted.block is not None and error is not None and not error.sent:
            admitted.purse.put_back(admitted.block)
            admitted.block = None
        return conclusion(admitted, concluded, self._view)

    # -- beside the calls -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Have a watcher, from the first need on: not before, because threads do not survive a fork."""
        if self._watcher is None:
            with self._lock:
                if self._watcher is None:
                    self._watcher = Watcher(self._lines, self._view, self._tidied)

    def _tidied(self) -> Operation[None]:
        """Give back blocks that lapsed: nobody may come for the next ones."""
        clock = time.monotonic()
        lapsed = [purse.lapsed(clock) for purse in list(self._purses.values())]
        self._owed += [rest for rest in lapsed if rest is not None]
        yield from self._paid()

    def _returned(self) -> Operation[None]:
        with self._lock:
            purses, self._purses = self._purses, {}
        self._owed += [rest for purse in purses.values() if (rest := purse.emptied()) is not None]
        yield from self._paid()

    def _paid(self) -> Operation[None]:
        while self._owed:
            rest = self._owed[0]
            yield Query(statements.GIVE_BACK, rest._asdict())
            with suppress(ValueError):
                self._owed.remove(rest)


def _checked() -> Operation[None]:
    found = yield Query("select version_num from ergon.revision")
    revision: Any = found[0][0] if found else None
    if not suffices(revision, NEEDED):
        raise ConfigurationError(
            f"the database is at revision {revision or 'none'}, the books need {NEEDED}; run: ergon db upgrade"
        )


# -- the books of this process ------------------------------------------------------------------------

_everybody: Final[WeakSet[PostgresBooks]] = WeakSet()


def _forked() -> None:
    for books in list(_everybody):
        books._begin_anew()  # noqa: SLF001 - their own module


os.register_at_fork(after_in_child=_forked)
