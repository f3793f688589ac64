"""The ledger of Celery tasks in PostgreSQL: the number of deliveries of each task, and its single end.

A process that ends a task writes the end here first, and the first process to do so ends the task. Other deliveries
or abandoned children of the same task find that end and report no result of their own. The dead letter is written by
the same statement.

Connections are opened on use, one per process and thread, so that a ledger may be created before a fork.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

import psycopg
from psycopg import Connection
from psycopg.rows import TupleRow

from ergon_framework.database.address import connect_options, find_login
from ergon_framework.database.connection import open_connection
from ergon_framework.database.errors import get_unavailability_cause
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.providers.dead_letter import ProviderDeadLetter

R = TypeVar("R")

#: The environment variable with the database address, if none is passed.
DSN_VARIABLE: Final = "ERGON_POSTGRES__DSN"
#: Detects a server that does not respond within seconds, because a waiting caller blocks a worker.
_KEEPALIVE_OPTIONS: Final[dict[str, Any]] = {
    "connect_timeout": 3,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 2,
    "tcp_user_timeout": 5_000,
    "application_name": "ergon",
}
#: Limits a statement of a ledger with *close_after_use* to 3000 milliseconds.
_SET_STATEMENT_TIMEOUT: Final = "set local statement_timeout = 3000"

_BEGIN: Final = """
insert into ergon.provider_deliveries as known (task_id, task_name, deliveries) values (%s, %s, 1)
on conflict (task_id) do update set deliveries = known.deliveries + 1
returning deliveries, state, extract(epoch from now() - ended_at)::float8"""
_RELEASE: Final = """
update ergon.provider_deliveries set deliveries = deliveries - 1 where task_id = %s and deliveries > 0"""
_REOPEN: Final = """
update ergon.provider_deliveries set state = 'running', run = null, ended_at = null
where task_id = %s and state = 'succeeding'"""
_COMPLETE: Final = """
insert into ergon.provider_deliveries as known (task_id, task_name, deliveries, state, run, ended_at)
values (%(task_id)s, %(task_name)s, 1, %(state)s, %(run)s, now())
on conflict (task_id) do update set state = excluded.state, run = excluded.run, ended_at = now()
where known.state = 'running' or (known.state = 'succeeding' and known.run = excluded.run)
returning 1"""
_CONFIRM: Final = """
update ergon.provider_deliveries set state = 'succeeded' where task_id = %s and state = 'succeeding'"""
_FAIL: Final = """
with ended as (
    insert into ergon.provider_deliveries as known (task_id, task_name, deliveries, state, ended_at)
    values (%(task_id)s, %(task_name)s, 1, 'dead', now())
    on conflict (task_id) do update set state = 'dead', ended_at = now() where known.state = 'running'
    returning task_id
),
letter as (
insert into ergon.provider_dead_letters (
    tenant_id, campaign_id, task_name, provider_name, capability, operation, idempotency_key, correlation_id,
    reason_code, error_type, error_message, attempts, occurred_at, task_id
)
select
    %(tenant_id)s, %(campaign_id)s, %(task_name)s, %(provider_name)s, %(capability)s, %(operation)s,
    %(idempotency_key)s, %(correlation_id)s, %(reason_code)s, %(error_type)s, %(error_message)s, %(attempts)s,
    to_timestamp(%(occurred_at)s), task_id
from ended
on conflict (task_id) do nothing
returning 1
)
select ergon.provider_dead_letter_count(
    %(tenant_id)s, %(task_execution_id)s, %(provider_name)s, %(capability)s, %(operation)s, %(idempotency_key)s,
    %(correlation_id)s, %(attempts)s, %(max_attempts)s, %(timeout_budget_ms)s, %(reason_code)s, %(retryable)s,
    %(http_status)s, to_timestamp(%(occurred_at)s)
) from letter"""
_SELECT_STATE: Final = "select state from ergon.provider_deliveries where task_id = %s"
_SELECT_DEAD_LETTER: Final = "select reason_code, error_message from ergon.provider_dead_letters where task_id = %s"
_SELECT_UNPUBLISHED: Final = """
select
    tenant_id, campaign_id, task_name, provider_name, capability, operation, idempotency_key, correlation_id,
    reason_code, error_type, error_message, attempts, extract(epoch from occurred_at)::float8, task_id, id
from ergon.provider_dead_letters where published_at is null
order by id limit %s for update skip locked"""
_MARK_PUBLISHED: Final = "update ergon.provider_dead_letters set published_at = now() where id = any(%s)"
_DELETE_EXPIRED: Final = """
delete from ergon.provider_deliveries where task_id in (
    select task_id from ergon.provider_deliveries where created_at < now() - make_interval(secs => %s) limit 5000
)"""


class TaskState(StrEnum):
    """The state of a task. ``succeeding`` means that its result may not have been reported yet."""

    RUNNING = "running"
    SUCCEEDING = "succeeding"
    SUCCEEDED = "succeeded"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class TaskDelivery:
    """A counted delivery: its number, the task's state, and the seconds since the task ended, if it has."""

    deliveries: int
    state: TaskState
    ended_ago: float | None = None


@dataclass(frozen=True, slots=True)
class DeadLetterInfo:
    """The failure that a dead letter records."""

    reason_code: str
    error_message: str


class TaskLedger:
    """The ledger in one database; *dsn* defaults to ERGON_POSTGRES__DSN, which is read on first use.

    With *close_after_use* it closes its connection after each use, so that none is open when its process forks.
    All operations raise ConnectionLostError if the database is unavailable, and ConfigurationError if it rejects the
    statement; the outcome is unknown then. All operations may be repeated, at the cost of a delivery that is counted
    twice.
    """

    def __init__(self, dsn: str | None = None, *, close_after_use: bool = False) -> None:
        self._dsn = dsn
        self._close_after_use = close_after_use
        self._thread_local = threading.local()

    def with_short_connections(self) -> TaskLedger:
        """Return a ledger for a parent process, which must have no connection open when it forks."""
        return TaskLedger(self._dsn, close_after_use=True)

    # -- one task -----------------------------------------------------------------------------------

    def begin(self, task_id: str, task_name: str) -> TaskDelivery:
        """Count a delivery and return its number and the task's state."""
        row = self._run(lambda conn: _fetch_one(conn, _BEGIN, (task_id, task_name)))
        return TaskDelivery(row[0], TaskState(row[1]), row[2])

    def release(self, task_id: str) -> None:
        """Uncount a delivery in which nothing was tried."""
        self._run(lambda conn: conn.execute(_RELEASE, (task_id,)))

    def reopen(self, task_id: str) -> None:
        """Set the task to running again: its result was never reported, and the process that had it has exited."""
        self._run(lambda conn: conn.execute(_REOPEN, (task_id,)))

    def complete(self, task_id: str, task_name: str, *, run: str, is_reported: bool) -> TaskState | None:
        """End the task with a result; return None, or the existing state if the task has ended before.

        *run* identifies this call, so that a repeated one, after a lost answer, is not taken for another delivery.
        Unless *is_reported* is set, ``confirm`` must follow after the result is reported.
        """
        fields = {
            "task_id": task_id,
            "task_name": task_name,
            "run": run,
            "state": (TaskState.SUCCEEDED if is_reported else TaskState.SUCCEEDING).value,
        }

        def write_result(conn: Connection[TupleRow]) -> TaskState | None:
            if conn.execute(_COMPLETE, fields).fetchone() is not None:
                return None
            return TaskState(_fetch_one(conn, _SELECT_STATE, (task_id,))[0])

        return self._run(write_result)

    def confirm(self, task_id: str) -> None:
        """Record that the task's result has been reported."""
        self._run(lambda conn: conn.execute(_CONFIRM, (task_id,)))

    def fail(self, letter: ProviderDeadLetter) -> TaskState:
        """End the task with a dead letter unless it has ended; return the state that it has now."""

        def write_dead_letter(conn: Connection[TupleRow]) -> TaskState:
            if conn.execute(_FAIL, letter._asdict()).rowcount:
                return TaskState.DEAD
            return TaskState(_fetch_one(conn, _SELECT_STATE, (letter.task_id,))[0])

        return self._run(write_dead_letter)

    def get_dead_letter(self, task_id: str) -> DeadLetterInfo | None:
        """Return the failure that the task's dead letter records; None without a dead letter."""
        row = self._run(lambda conn: conn.execute(_SELECT_DEAD_LETTER, (task_id,)).fetchone())
        return None if row is None else DeadLetterInfo(row[0], row[1])

    # -- all tasks ----------------------------------------------------------------------------------

    def publish(self, send: Callable[[ProviderDeadLetter], object], *, limit: int) -> int:
        """Pass unpublished dead letters to *send*, the oldest first; return the number of published ones.

        If *send* raises, that dead letter and all later ones stay unpublished. A dead letter may be sent again
        if this process is killed before the publication is recorded.
        """
        sent: list[int] = []

        def send_batch(conn: Connection[TupleRow]) -> Exception | None:
            failure: Exception | None = None
            with conn.transaction():
                for *fields, number in conn.execute(_SELECT_UNPUBLISHED, (limit,)).fetchall():
                    try:
                        send(ProviderDeadLetter(*fields))
                    except Exception as error:  # noqa: BLE001 - raised below, after the sent letters are recorded
                        failure = error
                        break
                    sent.append(number)
                if sent:
                    conn.execute(_MARK_PUBLISHED, (sent,))
            return failure

        failure = self._run_once(send_batch)
        if failure is not None:
            raise failure
        return len(sent)

    def delete_expired(self, older_than: float) -> int:
        """Delete tasks whose first delivery is more than *older_than* seconds ago; dead letters stay."""
        return self._run(lambda conn: conn.execute(_DELETE_EXPIRED, (older_than,)).rowcount)

    # -- connections --------------------------------------------------------------------------------

    def close(self) -> None:
        """Close this thread's connection; the next use opens another."""
        pid, conn = self._get_thread_connection()
        self._thread_local.line = (0, None)
        # An inherited connection is the parent's: closing it would end the parent's session.
        if conn is not None and pid == os.getpid():
            conn.close()

    def _run(self, operation: Callable[[Connection[TupleRow]], R]) -> R:
        """Run *operation*; retry once on a new connection if the old one is broken."""
        try:
            return self._run_once(operation)
        except ConnectionLostError:
            return self._run_once(operation)

    def _run_once(self, operation: Callable[[Connection[TupleRow]], R]) -> R:
        """Run *operation*, and translate the driver's errors."""
        try:
            with self._connection() as conn:
                return operation(conn)
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            self.close()
            # Without the cause, which quotes the address.
            raise ConnectionLostError(f"task ledger is unavailable ({type(error).__name__})") from None
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction):
            raise ConfigurationError(
                "database schema is missing or outdated: provider tables; run: ergon db upgrade"
            ) from None
        except psycopg.Error as error:
            if cause := get_unavailability_cause(error):
                raise ConnectionLostError(f"task ledger is not writable: {cause}") from None
            raise ConfigurationError(
                f"task ledger failed: the database rejected the statement ({type(error).__name__})"
            ) from None

    @contextmanager
    def _connection(self) -> Iterator[Connection[TupleRow]]:
        """Yield this thread's connection, opened if needed; with *close_after_use*, a connection for one use."""
        if self._close_after_use:
            with self._open_connection(autocommit=False) as short_connection:
                short_connection.execute(_SET_STATEMENT_TIMEOUT)
                yield short_connection
            return
        pid, conn = self._get_thread_connection()
        if conn is None or pid != os.getpid() or conn.closed:
            conn = self._open_connection(autocommit=True)
            self._thread_local.line = (os.getpid(), conn)
        try:
            yield conn
        except BaseException:
            # A time limit may have interrupted a statement, so the state of the connection is unknown.
            with suppress(Exception):
                self.close()
            raise

    def _get_thread_connection(self) -> tuple[int, Connection[TupleRow] | None]:
        """Return this thread's connection, and the id of the process that opened it."""
        entry: tuple[int, Connection[TupleRow] | None] = getattr(self._thread_local, "line", (0, None))
        return entry

    def _open_connection(self, *, autocommit: bool) -> Connection[TupleRow]:
        dsn = self._dsn or os.environ.get(DSN_VARIABLE)
        if not dsn:
            raise ConfigurationError(
                f"task ledger has no database address: set {DSN_VARIABLE} or pass ledger=TaskLedger(dsn)"
            )
        options = connect_options(dsn, _KEEPALIVE_OPTIONS)
        settings = {**options, "autocommit": autocommit, "prepare_threshold": None}
        return open_connection(psycopg.connect, settings, find_login(options))


def _fetch_one(conn: Connection[TupleRow], statement: Any, values: Sequence[Any]) -> TupleRow:
    row = conn.execute(statement, values).fetchone()
    if row is None:
        raise ConnectionLostError("the task was deleted from the ledger during the operation")
    return row
