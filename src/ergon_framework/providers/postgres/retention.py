"""Maintenance of the provider state, and retention of recorded attempts and of their roll-ups.

The provider state is the quota, circuit breakers and idempotency keys that all processes share. A roll-up is the sum of
the attempts of one minute. A reservation that its process did not end in time is lost: its calls count as used.

Any process runs the maintenance at intervals for all, in small steps. Retention creates partitions in advance, drops
them when they expire, and deletes expired rows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final

from psycopg import Connection, errors
from psycopg import sql as pg_sql
from pydantic import Field

from ergon_framework.database.operation import Operation, Query
from ergon_framework.errors import ErgonError
from ergon_framework.policy import Count, Policy
from ergon_framework.providers.postgres import sql
from ergon_framework.providers.postgres.connection import connection
from ergon_framework.providers.postgres.keys import parse_scope_key
from ergon_framework.providers.postgres.task_table import read_task_table
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.state import ProviderScope
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)

#: Maximum number of rows of one statement.
_MAX_ROWS: Final = 500
#: Maximum number of consecutive statements, because other work shares the connection.
_MAX_STATEMENTS: Final = 10
#: Number of tenants whose windows one statement examines.
_TENANTS_PER_STATEMENT: Final = 100
_DAY_SECONDS: Final = 86_400.0
#: Seconds for which a window is kept after its end, and a lost reservation after it was marked.
WINDOW_RETENTION_SECONDS: Final = _DAY_SECONDS
LOST_RETENTION_SECONDS: Final = 30 * _DAY_SECONDS

_WINDOW_KINDS: Final = tuple(WindowKind)


@dataclass(frozen=True, slots=True)
class LostReservation:
    """A reservation of one or more calls that its owner let expire: whether the calls were made is unknown."""

    id: int
    account: ProviderScope
    windows: tuple[tuple[WindowKind, datetime], ...]
    owner: str
    calls: int
    until: datetime
    lost_at: datetime | None
    created_at: datetime

    @classmethod
    def from_row(cls, row: Any) -> LostReservation:
        """Create it from a row of ``RECONCILE``, or a row with the same columns."""
        number, tenant, provider, capability, starts, owner, calls, until, lost_at, created_at = row
        windows = tuple(parse_window(start) for start in starts)
        scope = parse_scope_key(tenant, provider, capability)
        return cls(number, scope, windows, owner, calls, until, lost_at, created_at)


def parse_window(start: datetime) -> tuple[WindowKind, datetime]:
    """Return the kind and the start of a window from its stored start: see ``provider_window_start``."""
    return _WINDOW_KINDS[start.microsecond], start.astimezone(UTC).replace(microsecond=0)


#: Greater than any reservation's id.
MAX_RESERVATION_ID: Final = 2**63 - 1


def reconcile_reservations(max_id: int = MAX_RESERVATION_ID) -> Operation[list[LostReservation]]:
    """Mark the expired reservations: they stay counted as used, and are listed."""
    rows = yield Query(sql.RECONCILE, {"upto": max_id, "most": _MAX_ROWS})
    lost_reservations = [LostReservation.from_row(row) for row in rows]
    if lost_reservations:
        logs.log_event(
            logging.WARNING,
            "provider reservations lost",
            {
                "reservations": len(lost_reservations),
                "calls": sum(reservation.calls for reservation in lost_reservations),
            },
            to=_log,
        )
    return lost_reservations


class Maintenance:
    """The maintenance by one process; each run continues where the last one ended."""

    def __init__(self) -> None:
        #: The newest reservation at the last run. Newer ones are examined later, because most of them are in flight.
        self._max_id = MAX_RESERVATION_ID
        #: The last tenant whose windows were examined; empty to begin again.
        self._after_tenant = ""

    def run(self) -> Operation[None]:
        """Mark lost reservations, and delete expired keys, reservations and windows."""
        yield from reconcile_reservations(self._max_id)
        ((self._max_id,),) = yield Query(sql.SELECT_NEWEST_RESERVATION)
        for statement in (sql.DELETE_KEYS, sql.DELETE_LOST):
            for _ in range(_MAX_STATEMENTS):
                ((deleted,),) = yield Query(statement, {"seconds": LOST_RETENTION_SECONDS, "most": _MAX_ROWS})
                if deleted < _MAX_ROWS:
                    break
        parameters = {
            "after": self._after_tenant,
            "tenants": _TENANTS_PER_STATEMENT,
            "seconds": WINDOW_RETENTION_SECONDS,
            "most": _MAX_ROWS,
        }
        ((_, last),) = yield Query(sql.DELETE_WINDOWS, parameters)
        self._after_tenant = last or ""


# -- retention --------------------------------------------------------------------------------------

#: The time for which the id of a batch is stored. No writer retries a batch that is older than a quarter of it.
BATCH_ID_RETENTION: Final = timedelta(hours=2)
#: The id of the advisory lock that lets one process run retention at a time.
_RETENTION_LOCK_ID: Final = 0x6572676F6F
#: Maximum number of rows that one statement deletes.
_MAX_DELETED_ROWS: Final = 10_000
#: Seconds to wait for one answer of the server.
_ANSWER_TIMEOUT_SECONDS: Final = 60.0
# A waiting lock request blocks all later ones, so it waits half a second and is retried in another run.
_SET_LIMITS_AND_LOCK: Final = """
select set_config('lock_timeout', '500ms', true), set_config('statement_timeout', '30s', true),
    pg_try_advisory_xact_lock(%s)
"""


class ProviderRetention(Policy):
    """Retention periods, in days unless stated otherwise."""

    ahead: Count = Field(default=3, description="Days for which partitions are created in advance.")
    rows: Count = Field(default=30, description="Days for which attempts are kept.")
    minutes: Count = Field(default=8, description="Days for which minute roll-ups are kept.")
    quotas: Count = Field(default=35, description="Days for which a quota window is kept after its end.")
    interval: float = Field(default=3600.0, gt=0, description="Seconds between two retention runs of a writer.")


@dataclass(frozen=True, slots=True)
class RetentionResult:
    """The result of a run; *others*: another process runs retention; *left*: partitions whose lock was not free."""

    made: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    removed: int = 0
    left: tuple[str, ...] = ()
    others: bool = False


class _LockHeldElsewhere(ErgonError):
    """Another process holds the retention lock."""


def run_retention(dsn: str, retention: ProviderRetention | None = None) -> RetentionResult:
    """Run retention once on a separate connection: for cron, and for roles with rights that workers do not have."""
    with connection(dsn, answer_timeout=_ANSWER_TIMEOUT_SECONDS) as conn:
        return apply_retention(conn, ProviderRetention() if retention is None else retention)


def apply_retention(conn: Connection[Any], retention: ProviderRetention) -> RetentionResult:
    """Create missing partitions and remove expired data in short transactions; one process at a time.

    A lock that is not available immediately is left for the next run.
    """
    progress = RetentionProgress()
    for _ in retention_steps(conn, retention, progress):
        pass
    return progress.result()


def retention_steps(conn: Connection[Any], retention: ProviderRetention, progress: RetentionProgress) -> Iterator[None]:
    """Apply retention in short steps, for a caller with other work in between; *progress* collects the result."""
    try:
        yield from create_future_partitions(conn, retention, progress)
        today = _read_today(conn)
        for name, day in _list_partitions(conn).items():
            if day < today - timedelta(days=retention.rows):
                progress.run_statements(conn, name, progress.dropped, _build_drop_statements(name))
                yield
        for statement, values in _iterate_deletions(today, retention):
            yield from _delete_rows(conn, statement, values, progress)
        if read_task_table(conn).is_own:
            # One day longer than the attempts, so that rows that refer to an execution are deleted first.
            until = datetime.combine(today, time(), UTC) - timedelta(days=retention.rows + 1)
            yield from _delete_rows(conn, _DELETE_EXECUTIONS, {"until": until}, progress)
    except _LockHeldElsewhere:
        progress.others = True


def create_future_partitions(
    conn: Connection[Any], retention: ProviderRetention, progress: RetentionProgress
) -> Iterator[None]:
    """Create the missing partitions."""
    existing_days, today = _list_partitions(conn).values(), _read_today(conn)
    # Yesterday's too: attempts from before midnight are written after it.
    for day in (today + timedelta(days=offset) for offset in range(-1, retention.ahead + 1)):
        if day not in existing_days:
            try:
                progress.run_statements(conn, _format_partition_name(day), progress.made, _build_create_statements(day))
            except _LockHeldElsewhere:
                progress.others = True
                return
            yield


class RetentionProgress:
    """The progress of a run; its fields are those of ``RetentionResult``."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.dropped: list[str] = []
        self.left: list[str] = []
        self.removed = 0
        self.others = False

    def result(self) -> RetentionResult:
        return RetentionResult(tuple(self.made), tuple(self.dropped), self.removed, tuple(self.left), self.others)

    def run_statements(
        self, conn: Connection[Any], name: str, names: list[str], statements: list[pg_sql.Composed]
    ) -> None:
        try:
            with conn.transaction():
                _take_lock(conn)
                for statement in statements:
                    conn.execute(statement)
        except (errors.LockNotAvailable, errors.QueryCanceled, errors.DeadlockDetected):
            self.left.append(name)
        else:
            names.append(name)


def _take_lock(conn: Connection[Any]) -> None:
    row = conn.execute(_SET_LIMITS_AND_LOCK, [_RETENTION_LOCK_ID]).fetchone()
    if row is None or not row[2]:
        raise _LockHeldElsewhere


# -- partitions -------------------------------------------------------------------------------------

_TABLE: Final = "provider_execution_metrics"
_SELECT_PARTITIONS: Final = """
select relname from pg_inherits join pg_class on pg_class.oid = inhrelid
where inhparent = 'ergon.provider_execution_metrics'::regclass order by relname
"""
_PARTITION_NAME: Final = re.compile(rf"{_TABLE}_d([0-9]{{4}})([0-9]{{2}})([0-9]{{2}})")


def _read_today(conn: Connection[Any]) -> date:
    row = conn.execute("select now()").fetchone()
    server_time: datetime = datetime.now(UTC) if row is None else row[0]
    return server_time.astimezone(UTC).date()


def _list_partitions(conn: Connection[Any]) -> dict[str, date]:
    """Return the days of the daily partitions, by their names."""
    names = [str(row[0]) for row in conn.execute(_SELECT_PARTITIONS)]
    matches = {name: _PARTITION_NAME.fullmatch(name) for name in names}
    return {name: date(*map(int, match.groups())) for name, match in matches.items() if match}


def _format_partition_name(day: date) -> str:
    return f"{_TABLE}_d{day:%Y%m%d}"


def _build_create_statements(day: date) -> list[pg_sql.Composed]:
    # Created separately and then attached, so that reads and writes continue meanwhile. Rows of that day in the default
    # partition are moved first, under a lock that keeps new ones out until the end.
    name = pg_sql.Identifier("ergon", _format_partition_name(day))
    begin = datetime.combine(day, time(), UTC)
    bounds = {
        "since": pg_sql.Literal(begin.isoformat()),
        "until": pg_sql.Literal((begin + timedelta(days=1)).isoformat()),
    }
    day_condition = pg_sql.SQL("created_at >= {since} and created_at < {until}").format(**bounds)
    default_partition = pg_sql.Identifier("ergon", f"{_TABLE}_default")
    parent = pg_sql.Identifier("ergon", _TABLE)
    return [
        pg_sql.SQL("create table {} (like {} including defaults including constraints)").format(name, parent),
        pg_sql.SQL("lock table {} in access exclusive mode").format(default_partition),
        pg_sql.SQL("with early as (delete from {} where {} returning *) insert into {} select * from early").format(
            default_partition, day_condition, name
        ),
        pg_sql.SQL("alter table {} attach partition {} for values from ({since}) to ({until})").format(
            parent, name, **bounds
        ),
    ]


def _build_drop_statements(name: str) -> list[pg_sql.Composed]:
    return [pg_sql.SQL("drop table {}").format(pg_sql.Identifier("ergon", name))]


# -- rows -------------------------------------------------------------------------------------------


def _iterate_deletions(today: date, retention: ProviderRetention) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the statements that delete expired rows, with their parameters."""
    begin = datetime.combine(today, time(), UTC)
    rows = timedelta(days=retention.rows)
    # A time that far in the future is a clock error, and would never expire.
    yield _DELETE_REST_ROWS, {"until": begin - rows, "since": begin + rows + timedelta(days=retention.ahead)}
    yield _DELETE_ROLLUPS, {"until": begin - timedelta(days=retention.minutes)}
    yield _DELETE_QUOTAS, {"until": begin - timedelta(days=retention.quotas)}
    yield _DELETE_BATCHES, {"age": BATCH_ID_RETENTION}
    yield _CLEAR_RATES, {}


_DELETE_REST_ROWS: Final = """
delete from ergon.provider_execution_metrics_default where ctid = any (array(
    select ctid from ergon.provider_execution_metrics_default
    where created_at < %(until)s or created_at >= %(since)s limit %(part)s
))
"""
_DELETE_ROLLUPS: Final = """
delete from ergon.provider_minute_rollups where ctid = any (array(
    select ctid from ergon.provider_minute_rollups where minute < %(until)s limit %(part)s
))
"""
_DELETE_QUOTAS: Final = """
delete from ergon.provider_quota_states where ctid = any (array(
    select ctid from ergon.provider_quota_states where window_end < %(until)s limit %(part)s
))
"""
_DELETE_BATCHES: Final = """
delete from ergon.provider_batches where ctid = any (array(
    select ctid from ergon.provider_batches where at < now() - %(age)s limit %(part)s
))
"""
_DELETE_EXECUTIONS: Final = """
delete from ergon.task_executions where ctid = any (array(
    select e.ctid from ergon.task_executions e where e.created_at < %(until)s and not exists (
        select 1 from ergon.provider_execution_metrics m where m.task_execution_id = e.id
    ) limit %(part)s
))
"""
# A scope without recent calls has no rates of the last hour.
_CLEAR_RATES: Final = """
update ergon.provider_health_states set success_rate_1h = null, p95_latency_ms_1h = null
where ctid = any (array(
    select ctid from ergon.provider_health_states
    where (success_rate_1h is not null or p95_latency_ms_1h is not null)
        and greatest(last_success_at, last_error_at) < now() - interval '1 hour'
    limit %(part)s
    for update skip locked
))
"""


def _delete_rows(
    conn: Connection[Any], statement: str, values: dict[str, Any], progress: RetentionProgress
) -> Iterator[None]:
    """Delete rows in chunks; each chunk is a separate database transaction."""
    deleted_count = _MAX_DELETED_ROWS
    while deleted_count == _MAX_DELETED_ROWS:
        with conn.transaction():
            _take_lock(conn)
            deleted_count = conn.execute(statement, {**values, "part": _MAX_DELETED_ROWS}).rowcount
        progress.removed += deleted_count
        yield
