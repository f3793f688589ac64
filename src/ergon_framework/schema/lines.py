"""Lines: the connections of this process to one database, made when they are needed and kept while they are sound.

By hand and small instead of a pool with threads of its own: after an outage the very next call
tries to connect, so that a loop's own waiting decides when work goes on.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import psycopg
from psycopg import generators
from psycopg.pq import TransactionStatus

from ergon_framework.errors import ConfigurationError, ConnectionLost, ErgonError
from ergon_framework.redaction import learn_address
from ergon_framework.schema.failures import Silent, translated
from ergon_framework.schema.line import AsyncLine, Line
from ergon_framework.schema.operation import Operation, perform, perform_async
from ergon_framework.schema.place import Place

R = TypeVar("R")

#: How a silent network is noticed: an unanswered packet after twelve seconds, an idle line after twenty.
SILENCE: Final = {
    "connect_timeout": 5,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 3,
    "keepalives_count": 3,
    "tcp_user_timeout": 12_000,
    "application_name": "ergon",
}
#: A statement that was executed this often is prepared.
_PREPARE: Final = 2
#: Seconds for which the place of a statement that nobody waits for is kept; the server's own limits are shorter.
_OUTWAIT: Final = 10.0

_BACKEND: Final = "select pg_backend_pid()"

#: For a session of our own. Every statement here is meant to go by its indexes, whatever the statistics say: a plan
#: that was made while a table was empty must be good when it is full, so that none has to be made twice. And whoever
#: looks twice means to see what has happened between.
_PLANS: Final = """
select set_config(name, setting, false) from (values
    ('plan_cache_mode', 'force_generic_plan'), ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'),
    ('enable_hashjoin', 'off'), ('enable_mergejoin', 'off'), ('jit', 'off'),
    ('default_transaction_isolation', 'read committed')
) as wanted(name, setting)
"""


def options_of(dsn: str, silence: Mapping[str, Any] = SILENCE) -> dict[str, Any]:
    """What a connection to *dsn* is made with; what the address itself says wins over how *silence* is noticed."""
    try:
        return {**silence, **psycopg.conninfo.conninfo_to_dict(dsn)}
    except psycopg.ProgrammingError:
        # Without its cause, which quotes the address.
        raise ConfigurationError(
            "the address of the database cannot be read; it looks like postgresql://user@host:5432/name, and is named "
            "by ERGON_POSTGRES__DSN, by ergon.toml or by the program"
        ) from None


def is_same_database(one: str, other: str) -> bool:
    """Tell whether two addresses name the same database; user and options are ignored."""
    named = [{key: options_of(dsn).get(key) for key in ("host", "hostaddr", "port", "dbname")} for dsn in (one, other)]
    return named[0] == named[1]


def public_address(dsn: str | None) -> str | None:
    """Return where the database of *dsn* is, without credentials and options; None if *dsn* cannot be read."""
    if not dsn:
        return None
    try:
        found = options_of(dsn, {})
    except ConfigurationError:
        return None
    hosts = str(found.get("host") or found.get("hostaddr") or "").split(",")
    ports = str(found.get("port") or "").split(",")
    # One port stands for all hosts.
    ports *= len(hosts) if len(ports) == 1 else 1
    where = ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=False))
    return f"postgresql://{where}/{found.get('dbname', '')}"


class Lines:
    """Connections for both flavours; at most *most* each, whoever comes later waits.

    What the server answers to a statement that it refuses is raised as *other*.
    """

    def __init__(self, dsn: str, *, most: int = 8, other: type[ErgonError] = ErgonError) -> None:
        learn_address(dsn)
        self._options: dict[str, Any] = options_of(dsn)
        self._most = most
        self._other = other
        #: False once a pooler was found between us and the server; None before anybody has looked.
        self.direct: bool | None = None
        self._closed = False
        self._owner = os.getpid()
        self._make_room()
        self._idle: list[Line] = []
        #: Strongly: lines that went with their loop, unclosed, would be the driver's to complain about.
        self._per_loop: dict[asyncio.AbstractEventLoop, _LoopLines] = {}

    @property
    def hosts(self) -> int:
        """The number of servers in the address."""
        return len(str(self._options.get("host") or self._options.get("hostaddr") or "").split(","))

    def _settings(self) -> dict[str, Any]:
        # A pooler hands one session to many: what was prepared in it may be somebody else's.
        return {**self._options, "autocommit": True, "prepare_threshold": _PREPARE if self.direct else None}

    # -- the sync flavour -----------------------------------------------------------------------

    def run(self, operation: Operation[R], *, within: float | None = None) -> R:
        """Perform *operation* on a connection of its own, *within* so many seconds whatever the server does.

        Who comes away empty does not know whether the statement that he waited for is carried out.
        """
        until = None if within is None else time.monotonic() + within
        with self._entered(within) as place:
            line: Line | None = None
            try:
                line = _first_sound(self._idle) or self._dialled(until, place)
                line.until = until
                return perform(line, operation)
            except psycopg.Error as error:
                raise self._told(error, line) from None
            finally:
                if line is not None and line.is_under_way:
                    self._leave(line, place)
                elif line is not None:
                    self._back(line)

    def _entered(self, within: float | None) -> Place:
        """A place among those who have a connection, until it is left."""
        self._after_fork()
        try:
            self._free.get(timeout=within)
        except Empty:
            # Whoever waited has been given up by then: what he wanted must not be done any more.
            raise self._full() from None
        return Place(self._vacate)

    def _make_room(self) -> None:
        # A queue: a semaphore is written in Python, and costs more than the rest of a visit's way to the driver.
        self._free: SimpleQueue[None] = SimpleQueue()
        self._vacate = partial(self._free.put, None)
        for _ in range(self._most):
            self._vacate()

    def _full(self) -> ConnectionLost:
        return ConnectionLost(f"none of {self._most} connections to the database was free in time")

    def _dialled(self, until: float | None, place: Place) -> Line:
        """A new connection, made by another thread: whoever looks up a name cannot be called away from it."""
        if until is None:
            return self.connect()
        made: Future[Line] = Future()
        try:
            threading.Thread(target=_dial, args=(made, self.connect), name="ergon-dial", daemon=True).start()
        except RuntimeError:
            raise ConnectionLost("no thread could be had to reach the database") from None
        try:
            return made.result(until - time.monotonic())
        except BaseException as error:
            # What is made for nobody is kept for the next one; until then it has the place.
            made.add_done_callback(partial(self._arrived, place.handed_on()))
            if isinstance(error, TimeoutError):
                raise _unreached() from None
            raise

    def _arrived(self, place: Place, made: Future[Line]) -> None:
        with place:
            if made.exception() is None:
                self._back(made.result())

    def _leave(self, line: Line, place: Place) -> None:
        """Go away from a statement that is under way; it keeps its place until the server has ended it.

        Else the statements that nobody waits for would pile up there, without a bound.
        """
        kept = place.handed_on()
        try:
            threading.Thread(target=_outwait, args=(line, kept), name="ergon-outwait", daemon=True).start()
        except RuntimeError:
            with kept:
                line.close()

    def _told(self, error: psycopg.Error, connection: Line | AsyncLine | None) -> ErgonError:
        broken = connection is None or connection.broken or isinstance(error, Silent)
        return translated(error, broken=broken, other=self._other)

    def connect(self) -> Line:
        """A new connection that nobody else will use; the caller closes it."""
        connection = Line.connect(**self._settings())
        try:
            if self.direct is None:
                found = connection.execute(_BACKEND).fetchone()
                # A pooler answers for a server process that the client was not told of.
                self.direct = found is not None and found[0] == connection.info.backend_pid
                connection.prepare_threshold = _PREPARE if self.direct else None
            if self.direct:
                connection.execute(_PLANS)
        except BaseException:
            connection.close()
            raise
        return connection

    def _back(self, connection: Line) -> None:
        if connection.pgconn.transaction_status != TransactionStatus.IDLE:
            with suppress(psycopg.Error):
                connection.rollback()
        if self._closed or connection.pgconn.transaction_status != TransactionStatus.IDLE:
            connection.close()
        else:
            self._idle.append(connection)

    def _after_fork(self) -> None:
        if self._owner == os.getpid():
            return
        # They are the parent's: closing them here would end its sessions. Kept, so that nobody collects them.
        self._inherited = (self._idle, self._per_loop)
        self._owner, self._idle, self._per_loop = os.getpid(), [], {}
        self._make_room()

    def close(self) -> None:
        """Close what is idle; what is borrowed is closed when it comes back."""
        self._after_fork()
        self._closed = True
        while self._idle:
            self._idle.pop().close()
        self._forget_closed()

    # -- the async flavour ----------------------------------------------------------------------

    async def run_async(self, operation: Operation[R], *, within: float | None = None) -> R:
        """See run."""
        lines = self._here()
        until = None if within is None else asyncio.get_running_loop().time() + within
        with await self._entered_async(lines, until) as place:
            line: AsyncLine | None = None
            try:
                line = _first_sound(lines.idle) or await self._dialled_async(until)
                line.until = until
                return await perform_async(line, operation)
            except psycopg.Error as error:
                raise self._told(error, line) from None
            finally:
                if line is not None and until is not None and line.is_under_way:
                    lines.leave(line, place)
                elif line is not None:
                    await lines.back(line, closed=self._closed)

    async def _entered_async(self, lines: _LoopLines, until: float | None) -> Place:
        room = lines.room
        if not room.locked():
            await room.acquire()
        else:
            try:
                async with asyncio.timeout_at(until):
                    await room.acquire()
            except TimeoutError:
                raise self._full() from None
        return Place(room.release)

    async def _dialled_async(self, until: float | None) -> AsyncLine:
        try:
            async with asyncio.timeout_at(until):
                return await self._connect_async()
        except TimeoutError:
            raise _unreached() from None

    async def _connect_async(self) -> AsyncLine:
        connection = await AsyncLine.connect(**self._settings())
        try:
            if self.direct is None:
                found = await (await connection.execute(_BACKEND)).fetchone()
                self.direct = found is not None and found[0] == connection.info.backend_pid
                connection.prepare_threshold = _PREPARE if self.direct else None
            if self.direct:
                await connection.execute(_PLANS)
        except BaseException:
            # Not awaited: whoever is cancelled here may be cancelled there too.
            connection.finish()
            raise
        return connection

    def _here(self) -> _LoopLines:
        """The lines of the running event loop; those of loops that have closed are given up."""
        self._after_fork()
        loop = asyncio.get_running_loop()
        found = self._per_loop.get(loop)
        if found is None:
            self._forget_closed()
            self._per_loop[loop] = found = _LoopLines(self._most)
        return found

    def _forget_closed(self) -> None:
        for loop in [loop for loop in list(self._per_loop) if loop.is_closed()]:
            lines = self._per_loop.pop(loop, None)
            if lines is not None:
                lines.abandon()

    async def close_async(self) -> None:
        """Close what is idle on the running event loop, and all of the sync flavour."""
        self._after_fork()
        found = self._per_loop.pop(asyncio.get_running_loop(), None)
        while found is not None and found.idle:
            await found.idle.pop().close()
        self.close()


def _unreached() -> ConnectionLost:
    return ConnectionLost("the database could not be reached in time")


def _dial(made: Future[Line], connect: Callable[[], Line]) -> None:
    try:
        made.set_result(connect())
    except BaseException as error:  # noqa: BLE001 - told to whoever waits for the connection
        made.set_exception(error)


def _outwait(line: Line, place: Place) -> None:
    with place, suppress(psycopg.Error):
        line.until = time.monotonic() + _OUTWAIT
        try:
            line.wait(generators.execute(line.pgconn))
        finally:
            line.close()


async def _outwait_async(line: AsyncLine, place: Place) -> None:
    with place, suppress(psycopg.Error):
        line.until = asyncio.get_running_loop().time() + _OUTWAIT
        try:
            await line.wait(generators.execute(line.pgconn))
        finally:
            line.finish()


class _LoopLines:
    """The connections of one event loop."""

    def __init__(self, most: int) -> None:
        self.room = asyncio.Semaphore(most)
        self.idle: list[AsyncLine] = []
        #: The event loop itself holds tasks only weakly.
        self._left: set[asyncio.Task[None]] = set()

    async def back(self, connection: AsyncLine, *, closed: bool) -> None:
        try:
            if connection.pgconn.transaction_status != TransactionStatus.IDLE:
                with suppress(psycopg.Error):
                    await connection.rollback()
        except BaseException:
            connection.finish()
            raise
        if closed or connection.pgconn.transaction_status != TransactionStatus.IDLE:
            connection.finish()
        else:
            self.idle.append(connection)

    def leave(self, line: AsyncLine, place: Place) -> None:
        """See Lines."""
        task = asyncio.get_running_loop().create_task(_outwait_async(line, place.handed_on()))
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    def abandon(self) -> None:
        """The loop has closed: nobody can await the closing, so it is done below the driver."""
        while self.idle:
            connection = self.idle.pop()  # held by a name: without one it is collected, unclosed, before it is closed
            connection.finish()


C = TypeVar("C", Line, AsyncLine)


def _first_sound(idle: list[C]) -> C | None:
    """One of those that wait; a server that went away has said so on the line, and nobody has listened yet."""
    while True:
        try:
            connection = idle.pop()
        except IndexError:  # asked for beforehand, it could be gone by now: others take from here too
            return None
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        if not poll.poll(0):
            return connection
        connection.finish()
