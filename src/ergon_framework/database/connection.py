"""Connections with a deadline for every wait, as a sync and an async class, their opening, and a socket waiter.

The socket waiter waits on an event loop for the answers to one connection, and stays registered between them. To
register with a loop and to unregister costs more than to receive an answer, and driving the driver's generator here
saves the task one iteration of the loop. In return the loop knows the file descriptor between answers, so that the
owner of the connection must close the waiter before the connection.
"""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psycopg
from psycopg import AsyncConnection, Connection
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from ergon_framework.database.errors import (
    ServerTimeout,
    is_login_refusal,
    to_driver_error,
    translate_connect_error,
)
from ergon_framework.errors import ErgonError

if TYPE_CHECKING:
    from ergon_framework.connectors.credentials import Credentials
    from ergon_framework.connectors.login import BrokerLogin

#: The events that the driver waits for, as its own constants.
READ: Final = 1
WRITE: Final = 2


class SocketWaiter:
    """The waiter of one connection, on one event loop."""

    __slots__ = (
        "_deadline",
        "_fd",
        "_future",
        "_generator",
        "_is_reading",
        "_is_writing",
        "_timer",
        "_timer_deadline",
        "loop",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self.loop = loop
        self._fd = fd
        self._generator: Any = None
        self._future: asyncio.Future[Any] | None = None
        self._deadline = self._timer_deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_reading = self._is_writing = False

    async def wait(self, generator: Any, deadline: float) -> Any:
        """Run *generator* of the driver and return its result; raise ServerTimeout if it takes beyond *deadline*."""
        try:
            events = next(generator)
            self._generator, self._deadline = generator, deadline
            future = self._future = self.loop.create_future()
            self._watch(events)
            # A timer that fires earlier is kept: it is restarted when it fires before the deadline.
            if self._timer is None or self._timer_deadline > deadline:
                self._start_timer(deadline)
            return await future
        except StopIteration as stop:
            return stop.value
        except BaseException:
            # A later answer belongs to no caller.
            self.close()
            raise
        finally:
            self._generator = self._future = None

    def close(self) -> None:
        """Unregister from the loop; the next wait registers again."""
        if self.loop.is_closed():
            return
        self._watch(0)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- called by the loop -------------------------------------------------------------------------------

    def _on_ready(self, ready: int) -> None:
        future = self._future
        if future is None or future.done():
            # Not an answer: a lost connection becomes readable. The pool checks a connection before its next use.
            self._watch(0)
            return
        try:
            events = self._generator.send(ready)
        except StopIteration as stop:
            future.set_result(stop.value)
        except BaseException as error:  # noqa: BLE001 - the waiting caller gets it
            # Immediately: with a broken connection the driver has closed its file, and its number may be reused.
            self.close()
            future.set_exception(error)
        else:
            self._watch(events)

    def _on_timer(self) -> None:
        self._timer, future = None, self._future
        if future is None or future.done():
            return
        if self._deadline > self._timer_deadline:
            self._start_timer(self._deadline)
        else:
            future.set_exception(ServerTimeout())

    def _start_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_deadline, self._timer = deadline, self.loop.call_at(deadline, self._on_timer)

    def _watch(self, events: int) -> None:
        reads, writes = bool(events & READ), bool(events & WRITE)
        if reads != self._is_reading:
            self._is_reading = reads
            if reads:
                self.loop.add_reader(self._fd, self._on_ready, READ)
            else:
                self.loop.remove_reader(self._fd)
        if writes != self._is_writing:
            self._is_writing = writes
            if writes:
                self.loop.add_writer(self._fd, self._on_ready, WRITE)
            else:
                self.loop.remove_writer(self._fd)


# -- connections ------------------------------------------------------------------------------------

#: The driver's events as poll() events: read, write, or either.
_POLL_EVENTS: Final = {1: select.POLLIN, 2: select.POLLOUT, 3: select.POLLIN | select.POLLOUT}


class DeadlineConnection(Connection[TupleRow]):
    """A connection on which no call waits beyond *deadline*, a time of the monotonic clock.

    The kernel of a machine whose server hangs may still acknowledge packets, so that no network setting ends such a
    wait. A later answer belongs to no caller: a connection that is left busy must not be used again. Without a deadline
    it waits as the driver does.
    """

    deadline: float | None = None
    #: The epoch of its pool in which it was opened.
    epoch: int = 0

    @property
    def is_busy(self) -> bool:
        """Whether a statement is running whose answer was not fully read."""
        return self.pgconn.transaction_status == TransactionStatus.ACTIVE

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        if self.deadline is None:
            return super().wait(gen, *args, **options)
        # Not the driver's loop: it wakes ten times a second to look at the clock, and after an interrupt it waits for
        # the server to stop.
        poll, fd = select.poll(), self.pgconn.socket
        try:
            events = next(gen)
            while True:
                poll.register(fd, _POLL_EVENTS[events])
                ready = poll.poll(max(0.0, 1000 * (self.deadline - time.monotonic())))
                if not ready:
                    raise ServerTimeout
                events = gen.send(_to_driver_events(ready[0][1], events))
        except StopIteration as stop:
            return stop.value

    def abort(self) -> None:
        """Close the connection, whatever is running on it."""
        self.pgconn.finish()


class AsyncDeadlineConnection(AsyncConnection[TupleRow]):
    """The async variant; *deadline* is a time of the event loop's clock."""

    deadline: float | None = None
    epoch: int = 0
    _waiter: SocketWaiter | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether a statement is running whose answer was not fully read."""
        return self.pgconn.transaction_status == TransactionStatus.ACTIVE

    async def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        if self.deadline is None:
            self._close_waiter()  # the driver registers the same file itself
            return await super().wait(gen, *args, **options)
        loop, waiter = asyncio.get_running_loop(), self._waiter
        if waiter is None or waiter.loop is not loop:
            self._close_waiter()
            waiter = self._waiter = SocketWaiter(loop, self.pgconn.socket)
        return await waiter.wait(gen, self.deadline)

    def abort(self) -> None:
        """Close the connection without waiting; also after its event loop has closed."""
        self._close_waiter()
        self.pgconn.finish()

    async def close(self) -> None:
        self._close_waiter()
        await super().close()

    def __del__(self, *args: Any) -> None:
        # A closed file that its loop still knows disturbs the next file with the same number.
        self._close_waiter()
        super().__del__(*args)

    def _close_waiter(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.close()


# -- opening ----------------------------------------------------------------------------------------

C = TypeVar("C")


def open_connection(connect: Callable[..., C], options: Mapping[str, Any], login: BrokerLogin) -> C:
    """Open a connection by *connect* with *options* and the credentials that *login* has now.

    Raise ConnectFailed or ConnectRejected, which are also errors of the driver.
    """
    attempts = _LoginAttempts(options, login)
    while True:
        with _as_driver_errors():
            credentials = login.read()
        parameters = attempts.begin(credentials)
        try:
            connection = connect(**parameters)
        except psycopg.OperationalError as error:
            attempts.check(error)
        else:
            login.accept()
            return connection


async def open_connection_async(
    connect: Callable[..., Coroutine[Any, Any, C]], options: Mapping[str, Any], login: BrokerLogin
) -> C:
    """Open an async connection; see ``open_connection``. The credentials are read in another thread."""
    attempts = _LoginAttempts(options, login)
    while True:
        with _as_driver_errors():
            credentials = await login.read_async()
        parameters = attempts.begin(credentials)
        try:
            connection = await connect(**parameters)
        except psycopg.OperationalError as error:
            attempts.check(error)
        else:
            login.accept()
            return connection


@contextmanager
def _as_driver_errors() -> Iterator[None]:
    try:
        yield
    except ErgonError as error:
        raise to_driver_error(error) from error


class _LoginAttempts:
    """The attempts to open one connection: a second one if the login was refused and the credentials have changed."""

    def __init__(self, options: Mapping[str, Any], login: BrokerLogin) -> None:
        self._options = options
        self._login = login
        self._credentials: Credentials | None = None
        self._refusal: psycopg.Error | None = None

    def begin(self, credentials: Credentials | None) -> dict[str, Any]:
        """Return the connection parameters; raise the last refusal if the credentials are still the same."""
        if self._refusal is not None and credentials == self._credentials:
            raise translate_connect_error(self._refusal, self._login) from None
        self._credentials = credentials
        if credentials is None:
            return dict(self._options)
        user = {} if credentials.user is None else {"user": credentials.user}
        return {**self._options, **user, "password": credentials.password}

    def check(self, error: psycopg.Error) -> None:
        """Return if the password may have been rotated after its read; raise the error of the framework otherwise."""
        if self._credentials is None or self._refusal is not None or not is_login_refusal(error):
            # Without the cause, which may quote the address.
            raise translate_connect_error(error, self._login) from None
        self._refusal = error


def _to_driver_events(poll_events: int, requested: int) -> int:
    if poll_events & ~(select.POLLIN | select.POLLOUT):
        return requested  # hung up: the driver's next read or write raises the error
    return READ * bool(poll_events & select.POLLIN) | WRITE * bool(poll_events & select.POLLOUT)
