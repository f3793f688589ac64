"""Retention: partitions made ahead and dropped when they are old, and what else has served its time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final

from psycopg import Connection, errors, sql
from pydantic import Field

from ergon_framework.errors import ErgonError
from ergon_framework.policy import Count, Policy
from ergon_framework.providers.sql.reaching import reached
from ergon_framework.providers.sql.task_table import read_task_table

#: How long the id of a batch is remembered. No writer repeats one that is older than a quarter of it.
FORGET: Final = timedelta(hours=2)
#: One of the fleet at a time.
_TURN: Final = 0x6572676F6F
#: Rows that are removed in one go.
_PART: Final = 10_000
#: Seconds that the server has for one answer.
_PATIENCE: Final = 60.0
# Whoever waits for a lock makes all others wait behind him: half a second, then another time.
_LIMITS: Final = """
select set_config('lock_timeout', '500ms', true), set_config('statement_timeout', '30s', true),
    pg_try_advisory_xact_lock(%s)
"""


class Retention(Policy):
    """How long what is kept, in days unless it says otherwise."""

    ahead: Count = Field(default=3, description="Days for which partitions are made ahead.")
    rows: Count = Field(default=30, description="Days for which the row of an attempt is kept.")
    minutes: Count = Field(default=8, description="Days for which roll-ups by the minute are kept.")
    quotas: Count = Field(default=35, description="Days for which a window of quota is kept after its end.")
    interval: float = Field(default=3600.0, gt=0, description="Seconds between two runs of a writer.")


@dataclass(frozen=True, slots=True)
class Tidied:
    """What was done; *others* says that somebody else was at it, *left* what could not be had without waiting."""

    made: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    removed: int = 0
    left: tuple[str, ...] = ()
    others: bool = False


class _Elsewhere(ErgonError):
    """Somebody else has the turn."""


def run(dsn: str, retention: Retention | None = None) -> Tidied:
    """Do it now, on a connection of its own: for cron, and for roles with rights that workers have not."""
    with reached(dsn, patience=_PATIENCE) as line:
        return tidy(line, Retention() if retention is None else retention)


def tidy(line: Connection[Any], retention: Retention) -> Tidied:
    """Make what is missing and remove what is old, in short database transactions; one of the fleet at a time.

    A lock that is not to be had at once is left for the next time.
    """
    done = Done()
    for _ in steps(line, retention, done):
        pass
    return done.told()


def steps(line: Connection[Any], retention: Retention, done: Done) -> Iterator[None]:
    """The same in short steps, for one who has other work in between; *done* tells of it."""
    try:
        yield from make_ahead(line, retention, done)
        today = _today(line)
        for name, day in _partitions(line).items():
            if day < today - timedelta(days=retention.rows):
                done.attempt(line, name, done.dropped, _drop(name))
                yield
        for statement, values in _old(today, retention):
            yield from _emptied(line, statement, values, done)
        if read_task_table(line).is_own:
            # A day more than the attempts: what refers to an execution is gone first.
            until = datetime.combine(today, time(), UTC) - timedelta(days=retention.rows + 1)
            yield from _emptied(line, _EXECUTIONS, {"until": until}, done)
    except _Elsewhere:
        done.others = True


def make_ahead(line: Connection[Any], retention: Retention, done: Done) -> Iterator[None]:
    """Make the partitions that are missing."""
    found, today = _partitions(line).values(), _today(line)
    # Yesterday's too: what happened before midnight is written after it.
    for day in (today + timedelta(days=n) for n in range(-1, retention.ahead + 1)):
        if day not in found:
            try:
                done.attempt(line, _name(day), done.made, _make(day))
            except _Elsewhere:
                done.others = True
                return
            yield


class Done:
    """What has been done so far."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.dropped: list[str] = []
        self.left: list[str] = []
        self.removed = 0
        self.others = False

    def told(self) -> Tidied:
        return Tidied(tuple(self.made), tuple(self.dropped), self.removed, tuple(self.left), self.others)

    def attempt(self, line: Connection[Any], name: str, into: list[str], statements: list[sql.Composed]) -> None:
        try:
            with line.transaction():
                _turn(line)
                for statement in statements:
                    line.execute(statement)
        except (errors.LockNotAvailable, errors.QueryCanceled, errors.DeadlockDetected):
            self.left.append(name)
        else:
            into.append(name)


def _turn(line: Connection[Any]) -> None:
    found = line.execute(_LIMITS, [_TURN]).fetchone()
    if found is None or not found[2]:
        raise _Elsewhere


# -- partitions -------------------------------------------------------------------------------------

_TABLE: Final = "provider_execution_metrics"
_PARTITIONS: Final = """
select relname from pg_inherits join pg_class on pg_class.oid = inhrelid
where inhparent = 'ergon.provider_execution_metrics'::regclass order by relname
"""
_NAME: Final = re.compile(rf"{_TABLE}_d([0-9]{{4}})([0-9]{{2}})([0-9]{{2}})")


def _today(line: Connection[Any]) -> date:
    found = line.execute("select now()").fetchone()
    moment: datetime = datetime.now(UTC) if found is None else found[0]
    return moment.astimezone(UTC).date()


def _partitions(line: Connection[Any]) -> dict[str, date]:
    """The partitions of days, by their names."""
    names = [str(row[0]) for row in line.execute(_PARTITIONS)]
    found = {name: _NAME.fullmatch(name) for name in names}
    return {name: date(*map(int, match.groups())) for name, match in found.items() if match}


def _name(day: date) -> str:
    return f"{_TABLE}_d{day:%Y%m%d}"


def _make(day: date) -> list[sql.Composed]:
    # Made aside and then attached, which lets everybody read and write meanwhile. Rows of that day that came too early
    # for it have to leave the rest first, where nobody may put another one until it is done.
    name = sql.Identifier("ergon", _name(day))
    begin = datetime.combine(day, time(), UTC)
    bounds = {"since": sql.Literal(begin.isoformat()), "until": sql.Literal((begin + timedelta(days=1)).isoformat())}
    within = sql.SQL("created_at >= {since} and created_at < {until}").format(**bounds)
    rest = sql.Identifier("ergon", f"{_TABLE}_rest")
    parent = sql.Identifier("ergon", _TABLE)
    return [
        sql.SQL("create table {} (like {} including defaults including constraints)").format(name, parent),
        sql.SQL("lock table {} in access exclusive mode").format(rest),
        sql.SQL("with early as (delete from {} where {} returning *) insert into {} select * from early").format(
            rest, within, name
        ),
        sql.SQL("alter table {} attach partition {} for values from ({since}) to ({until})").format(
            parent, name, **bounds
        ),
    ]


def _drop(name: str) -> list[sql.Composed]:
    return [sql.SQL("drop table {}").format(sql.Identifier("ergon", name))]


# -- rows -------------------------------------------------------------------------------------------


def _old(today: date, retention: Retention) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is to be removed, part by part."""
    begin = datetime.combine(today, time(), UTC)
    rows = timedelta(days=retention.rows)
    # A moment so far ahead is a clock's mistake, and would never grow old.
    yield _REST, {"until": begin - rows, "since": begin + rows + timedelta(days=retention.ahead)}
    yield _MINUTES, {"until": begin - timedelta(days=retention.minutes)}
    yield _QUOTAS, {"until": begin - timedelta(days=retention.quotas)}
    yield _BATCHES, {"age": FORGET}
    yield _RATES, {}


_REST: Final = """
delete from ergon.provider_execution_metrics_rest where ctid = any (array(
    select ctid from ergon.provider_execution_metrics_rest
    where created_at < %(until)s or created_at >= %(since)s limit %(part)s
))
"""
_MINUTES: Final = """
delete from ergon.provider_minutes where ctid = any (array(
    select ctid from ergon.provider_minutes where minute < %(until)s limit %(part)s
))
"""
_QUOTAS: Final = """
delete from ergon.provider_quota_states where ctid = any (array(
    select ctid from ergon.provider_quota_states where window_end < %(until)s limit %(part)s
))
"""
_BATCHES: Final = """
delete from ergon.provider_batches where ctid = any (array(
    select ctid from ergon.provider_batches where at < now() - %(age)s limit %(part)s
))
"""
_EXECUTIONS: Final = """
delete from ergon.task_executions where ctid = any (array(
    select e.ctid from ergon.task_executions e where e.created_at < %(until)s and not exists (
        select 1 from ergon.provider_execution_metrics m where m.task_execution_id = e.id
    ) limit %(part)s
))
"""
# An account that nobody calls any more has no last hour.
_RATES: Final = """
update ergon.provider_health_states set success_rate_1h = null, p95_latency_ms_1h = null
where ctid = any (array(
    select ctid from ergon.provider_health_states
    where (success_rate_1h is not null or p95_latency_ms_1h is not null)
        and greatest(last_success_at, last_error_at) < now() - interval '1 hour'
    limit %(part)s
    for update skip locked
))
"""


def _emptied(line: Connection[Any], statement: str, values: dict[str, Any], done: Done) -> Iterator[None]:
    """Take rows away, part by part; each part is a database transaction of its own."""
    part = _PART
    while part == _PART:
        with line.transaction():
            _turn(line)
            part = line.execute(statement, {**values, "part": _PART}).rowcount
        done.removed += part
        yield
