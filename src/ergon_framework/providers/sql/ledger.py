"""The ledger of tasks in PostgreSQL: how often each was delivered, and the one end that it had.

Whoever ends a task writes its end here first, and the first one to do so has ended it: whatever
else still runs for it (a second delivery, a child that was given up on) finds that end and reports
nothing of its own. The dead letter is part of the same statement.

Connections are made when they are needed, one for each process and thread, so that a ledger may be
made before a fork.
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

from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.providers.deadletter import DeadLetter
from ergon_framework.schema.failures import unavailability_of
from ergon_framework.schema.lines import options_of

R = TypeVar("R")

#: Names the database, where a ledger is given none.
VARIABLE: Final = "ERGON_POSTGRES__DSN"
#: A silent server is noticed within seconds: whoever waits here holds a worker.
_SILENCE: Final[dict[str, Any]] = {
    "connect_timeout": 3,
    "keepalives": 1,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 2,
    "tcp_user_timeout": 5_000,
    "application_name": "ergon",
}
#: Milliseconds that a statement of a brief ledger may take.
_BRIEFLY: Final = "set local statement_timeout = 3000"

_BEGIN: Final = """
insert into ergon.provider_deliveries as known (task_id, task_name, deliveries) values (%s, %s, 1)
on conflict (task_id) do update set deliveries = known.deliveries + 1
returning deliveries, state, extract(epoch from now() - ended_at)::float8"""
_GIVE_BACK: Final = """
update ergon.provider_deliveries set deliveries = deliveries - 1 where task_id = %s and deliveries > 0"""
_REOPEN: Final = """
update ergon.provider_deliveries set state = 'running', run = null, ended_at = null
where task_id = %s and state = 'succeeding'"""
_SUCCEED: Final = """
insert into ergon.provider_deliveries as known (task_id, task_name, deliveries, state, run, ended_at)
values (%(task_id)s, %(task_name)s, 1, %(state)s, %(run)s, now())
on conflict (task_id) do update set state = excluded.state, run = excluded.run, ended_at = now()
where known.state = 'running' or (known.state = 'succeeding' and known.run = excluded.run)
returning 1"""
_CONFIRM: Final = """
update ergon.provider_deliveries set state = 'succeeded' where task_id = %s and state = 'succeeding'"""
_BURY: Final = """
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
select ergon.provider_dead_letter_counted(
    %(tenant_id)s, %(task_execution_id)s, %(provider_name)s, %(capability)s, %(operation)s, %(idempotency_key)s,
    %(correlation_id)s, %(attempts)s, %(max_attempts)s, %(timeout_budget_ms)s, %(reason_code)s, %(retryable)s,
    %(http_status)s, to_timestamp(%(occurred_at)s)
) from letter"""
_STATE: Final = "select state from ergon.provider_deliveries where task_id = %s"
_LETTER: Final = "select reason_code, error_message from ergon.provider_dead_letters where task_id = %s"
_WAITING: Final = """
select
    tenant_id, campaign_id, task_name, provider_name, capability, operation, idempotency_key, correlation_id,
    reason_code, error_type, error_message, attempts, extract(epoch from occurred_at)::float8, task_id, id
from ergon.provider_dead_letters where published_at is null
order by id limit %s for update skip locked"""
_PUBLISHED: Final = "update ergon.provider_dead_letters set published_at = now() where id = any(%s)"
_FORGET: Final = """
delete from ergon.provider_deliveries where task_id in (
    select task_id from ergon.provider_deliveries where created_at < now() - make_interval(secs => %s) limit 5000
)"""


class State(StrEnum):
    """How far a task is. ``succeeding`` has a result that may not have been reported yet."""

    RUNNING = "running"
    SUCCEEDING = "succeeding"
    SUCCEEDED = "succeeded"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Begun:
    """A delivery that was counted: which one it is, and, if the task has ended, how, and how many seconds ago."""

    deliveries: int
    state: State
    ended_ago: float | None = None


@dataclass(frozen=True, slots=True)
class Buried:
    """What a dead letter says of the failure."""

    reason_code: str
    error_message: str


class Ledger:
    """The ledger of one database; *dsn* is read from ERGON_POSTGRES__DSN at the first use, unless it is given.

    A *brief* one closes its connection after each use: nothing of it is left when its process forks.
    Everything raises ConnectionLost if the database is away, and ConfigurationError if it refuses; then
    nobody knows whether it was done, and all of it may be done again, at the price of a delivery that
    is counted twice.
    """

    def __init__(self, dsn: str | None = None, *, brief: bool = False) -> None:
        self._dsn = dsn
        self._is_brief = brief
        self._kept = threading.local()

    def brief(self) -> Ledger:
        return Ledger(self._dsn, brief=True)

    # -- one task -----------------------------------------------------------------------------------

    def begin(self, task_id: str, task_name: str) -> Begun:
        """Count a delivery."""
        row = self._run(lambda line: _one(line, _BEGIN, (task_id, task_name)))
        return Begun(row[0], State(row[1]), row[2])

    def give_back(self, task_id: str) -> None:
        """The delivery was none: nothing was tried."""
        self._run(lambda line: line.execute(_GIVE_BACK, (task_id,)))

    def reopen(self, task_id: str) -> None:
        """Its result was never reported, and whoever had it is gone."""
        self._run(lambda line: line.execute(_REOPEN, (task_id,)))

    def succeed(self, task_id: str, task_name: str, *, run: str, reported: bool) -> State | None:
        """End it with a result; None if that was done, or the state that it has already.

        Unless it counts as *reported*, ``confirm`` is to follow when the result has been.
        """
        fields = {
            "task_id": task_id,
            "task_name": task_name,
            "run": run,
            "state": (State.SUCCEEDED if reported else State.SUCCEEDING).value,
        }

        def act(line: Connection[TupleRow]) -> State | None:
            if line.execute(_SUCCEED, fields).fetchone() is not None:
                return None
            return State(_one(line, _STATE, (task_id,))[0])

        return self._run(act)

    def confirm(self, task_id: str) -> None:
        """Its result has been reported."""
        self._run(lambda line: line.execute(_CONFIRM, (task_id,)))

    def bury(self, letter: DeadLetter) -> State:
        """End it with a dead letter, unless it has ended; the state that it has now."""

        def act(line: Connection[TupleRow]) -> State:
            if line.execute(_BURY, letter._asdict()).rowcount:
                return State.DEAD
            return State(_one(line, _STATE, (letter.task_id,))[0])

        return self._run(act)

    def buried(self, task_id: str) -> Buried | None:
        """What its dead letter says."""
        row = self._run(lambda line: line.execute(_LETTER, (task_id,)).fetchone())
        return None if row is None else Buried(row[0], row[1])

    # -- all tasks ----------------------------------------------------------------------------------

    def publish(self, send: Callable[[DeadLetter], object], *, limit: int) -> int:
        """Hand dead letters that were not published to *send*, the oldest first; how many are published now.

        One that *send* raises at waits for the next time, and so do those after it. A letter that was
        sent may be sent again, if this process dies before that is written down.
        """
        sent: list[int] = []

        def act(line: Connection[TupleRow]) -> Exception | None:
            failure: Exception | None = None
            with line.transaction():
                for *fields, number in line.execute(_WAITING, (limit,)).fetchall():
                    try:
                        send(DeadLetter(*fields))
                    except Exception as error:  # noqa: BLE001 - raised below, when what was sent is written down
                        failure = error
                        break
                    sent.append(number)
                if sent:
                    line.execute(_PUBLISHED, (sent,))
            return failure

        failure = self._once(act)
        if failure is not None:
            raise failure
        return len(sent)

    def forget(self, older_than: float) -> int:
        """Drop what is known of tasks that were first delivered so many seconds ago; dead letters stay."""
        return self._run(lambda line: line.execute(_FORGET, (older_than,)).rowcount)

    # -- its lines ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close this thread's connection; the next use makes another."""
        pid, line = self._mine()
        self._kept.line = (0, None)
        # One that came with a fork is the parent's: closing it would end the parent's session.
        if line is not None and pid == os.getpid():
            line.close()

    def _run(self, act: Callable[[Connection[TupleRow]], R]) -> R:
        """What *act* returns; once more on a fresh connection if the old one was found to be broken."""
        try:
            return self._once(act)
        except ConnectionLost:
            return self._once(act)

    def _once(self, act: Callable[[Connection[TupleRow]], R]) -> R:
        try:
            with self._line() as line:
                return act(line)
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            self.close()
            # Without its cause, which quotes the address.
            raise ConnectionLost(f"the ledger of tasks cannot be reached ({type(error).__name__})") from None
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction):
            raise ConfigurationError(
                "the database has not the tables of providers that this release needs; run: ergon db upgrade"
            ) from None
        except psycopg.Error as error:
            if cause := unavailability_of(error):
                raise ConnectionLost(f"the ledger of tasks cannot be written: {cause}") from None
            raise ConfigurationError(
                f"the ledger of tasks is refused by its database ({type(error).__name__})"
            ) from None

    @contextmanager
    def _line(self) -> Iterator[Connection[TupleRow]]:
        if self._is_brief:
            with self._connected(autocommit=False) as brief:
                brief.execute(_BRIEFLY)
                yield brief
            return
        pid, line = self._mine()
        if line is None or pid != os.getpid() or line.closed:
            line = self._connected(autocommit=True)
            self._kept.line = (os.getpid(), line)
        try:
            yield line
        except BaseException:
            # A time limit may have struck in the middle of a statement: nobody knows what the line is worth.
            with suppress(Exception):
                self.close()
            raise

    def _mine(self) -> tuple[int, Connection[TupleRow] | None]:
        """The connection of this thread, and the process that it belongs to."""
        found: tuple[int, Connection[TupleRow] | None] = getattr(self._kept, "line", (0, None))
        return found

    def _connected(self, *, autocommit: bool) -> Connection[TupleRow]:
        dsn = self._dsn or os.environ.get(VARIABLE)
        if not dsn:
            raise ConfigurationError(
                f"the ledger of tasks needs a database: set {VARIABLE}, or give ledger=Ledger(dsn)"
            )
        options = options_of(dsn, _SILENCE)
        return psycopg.connect(**options, autocommit=autocommit, prepare_threshold=None)


def _one(line: Connection[TupleRow], statement: Any, values: Sequence[Any]) -> TupleRow:
    row = line.execute(statement, values).fetchone()
    if row is None:
        raise ConnectionLost("the ledger has forgotten the task in this very moment")
    return row
