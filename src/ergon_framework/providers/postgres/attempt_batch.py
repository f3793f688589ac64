"""Batches of attempts: each is written in one database transaction, at most once.

An attempt is one try of a provider call. The id of a batch is inserted in the same database transaction: a batch whose
commit had an unknown outcome is written again, and the second transaction finds the id and adds nothing.

All attempts are counted; at high rates only a sample of them is stored as rows.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple, TypeAlias

import psycopg
from psycopg import Connection
from pydantic import Field

from ergon_framework.policy import Count, Policy
from ergon_framework.providers.health import AttemptOutcome
from ergon_framework.providers.models import AttemptRecord
from ergon_framework.providers.postgres import rollups
from ergon_framework.providers.postgres.rollups import MinuteRollup, RollupAttempt, RollupKey, roll_up, to_attempt
from ergon_framework.providers.postgres.task_table import OWN_TASK_TABLE, TaskTable


class SamplingPolicy(Policy):
    """Above a rate per second and process, only every n-th success is stored; every failure is stored."""

    above: float = Field(default=100.0, ge=0, description="Attempts per second that are all stored.")
    every: Count = Field(default=10, description="Of further successes, every n-th is stored.")


class Sampler:
    """The decision per row, by the second in which the attempt was made; call it once for each row."""

    def __init__(self, policy: SamplingPolicy | None) -> None:
        self._policy = policy
        self._second = -1
        self._count = 0
        self._skipped_count = 0

    def should_store(self, row: AttemptRecord) -> bool:
        policy = self._policy
        if policy is None:
            return True
        second = int(row.created_at)
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        if row.outcome is not AttemptOutcome.SUCCESS or self._count <= policy.above:
            return True
        # Counted across seconds, so that a rate just above the limit loses only its share of rows.
        self._skipped_count += 1
        return self._skipped_count % policy.every == 0


# -- batches ----------------------------------------------------------------------------------------

#: Tenant, provider and capability.
ScopeKey: TypeAlias = tuple[str, str, str]
#: Maximum length of a text column; a longer correlation would not fit into its index.
MAX_TEXT_CHARS: Final = 500


class PreparedAttempt(NamedTuple):
    """One attempt: as it is counted, and as it is stored if *is_stored* is set."""

    row: AttemptRecord
    attempt: RollupAttempt
    is_stored: bool


class AccountLastSeen(NamedTuple):
    """The last success and the last error of one scope in a batch."""

    last_success_at: datetime | None
    last_error_at: datetime | None
    last_error_code: str | None


@dataclass(slots=True)
class AttemptBatch:
    """Attempts under one batch id.

    *outcome_unknown* means that the commit was sent and not confirmed; ``write_batch`` sets it. *was_rejected* means
    that the server rejected the batch once; the writer's loop sets it, and splits the batch at the second rejection.
    """

    attempts: tuple[PreparedAttempt, ...]
    id: uuid.UUID = field(default_factory=uuid.uuid4)
    outcome_unknown: bool = False
    was_rejected: bool = False

    def __len__(self) -> int:
        return len(self.attempts)

    def split(self) -> list[AttemptBatch]:
        """Split the attempts into two batches with new ids; only for a batch that was certainly not written."""
        middle = len(self.attempts) // 2
        return [AttemptBatch(part) for part in (self.attempts[:middle], self.attempts[middle:]) if part]

    def to_rows(self, executions: Collection[str]) -> list[tuple[Any, ...]]:
        """Return the stored rows, column by column of the table; rows can refer only to *executions*."""
        return [_to_row(prepared, executions) for prepared in self.attempts if prepared.is_stored]

    @property
    def executions(self) -> list[str]:
        """The task executions that the stored rows name."""
        names = {prepared.row.task_execution_id for prepared in self.attempts if prepared.is_stored}
        return sorted({_fit_text(name) for name in names if name is not None})

    def rollups(self) -> dict[RollupKey, MinuteRollup]:
        return roll_up(prepared.attempt for prepared in self.attempts)


def prepare_batch(rows: Iterable[AttemptRecord], sampler: Sampler) -> tuple[AttemptBatch, list[AttemptRecord]]:
    """Return a batch of *rows*, and the rows that no table can hold."""
    attempts, rejected = [], []
    for row in rows:
        try:
            # Values may exceed the calendar or the histogram, because callers can pass anything.
            prepared_attempt = math.isfinite(row.duration_ms) and PreparedAttempt(
                row, to_attempt(row), sampler.should_store(row)
            )
        except Exception:  # noqa: BLE001 - a row with arbitrary values can raise anything
            prepared_attempt = False
        if prepared_attempt:
            attempts.append(prepared_attempt)
        else:
            rejected.append(row)
    return AttemptBatch(tuple(attempts)), rejected


def last_seen(rollups: dict[RollupKey, MinuteRollup]) -> dict[ScopeKey, AccountLastSeen]:
    """Return the last success and the last error of each scope, in the order of the scopes."""
    last_seen_by_scope: dict[ScopeKey, AccountLastSeen] = {}
    for key, rollup in rollups.items():
        scope = key[:3]
        previous = last_seen_by_scope.get(scope, AccountLastSeen(None, None, None))
        error = max(
            ((entry.last_error_at, entry.last_error_code) for entry in (previous, rollup) if entry.last_error_at),
            default=(None, None),
        )
        success = max((entry.last_success_at for entry in (previous, rollup) if entry.last_success_at), default=None)
        last_seen_by_scope[scope] = AccountLastSeen(success, *error)
    return last_seen_by_scope


def _to_row(prepared: PreparedAttempt, executions: Collection[str]) -> tuple[Any, ...]:
    """Return the columns of one stored attempt; it refers to no task execution that is not in *executions*."""
    row = prepared.row
    execution_id = None if row.task_execution_id is None else _fit_text(row.task_execution_id)
    return (
        row.tenant_id,
        execution_id if execution_id in executions else None,
        row.provider_name,
        row.capability,
        _fit_text(row.operation),
        None if row.idempotency_key is None else _fit_text(row.idempotency_key),
        _fit_text(row.correlation_id),
        row.attempt_number,
        row.max_attempts,
        row.duration_ms,
        row.timeout_budget_ms,
        row.outcome.value,
        None if row.reason_code is None else row.reason_code.value,
        row.retryable,
        row.http_status,
        prepared.attempt.at,
    )


def _fit_text(text: str) -> str:
    """Return *text* as a column can hold it. Never used for scope names: two tenants must not become one."""
    return text[:MAX_TEXT_CHARS].replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


# -- writing ----------------------------------------------------------------------------------------

# A writer that stops in the middle, paused or disconnected, must not hold its locks for long; and its batch gets a
# definite outcome, because its database transaction ends.
_SET_LIMITS: Final = """
select set_config('statement_timeout', '10s', true), set_config('lock_timeout', '5s', true),
    set_config('idle_in_transaction_session_timeout', '10s', true)
"""
# The insert waits for another open database transaction that has written the same id.
_CLAIM_BATCH: Final = "insert into ergon.provider_batches (id) values (%s) on conflict do nothing"
_COPY_ATTEMPTS: Final = """
copy ergon.provider_execution_metrics (
    tenant_id, task_execution_id, provider_name, capability, operation, idempotency_key, correlation_id, attempt_number,
    max_attempts, duration_ms, timeout_budget_ms, outcome, reason_code, retryable, http_status, created_at
) from stdin
"""
_UPDATE_LAST_SEEN: Final = """
insert into ergon.provider_health_states as here (
    tenant_id, provider_name, capability, last_success_at, last_error_at, last_error_code
)
select tenant_id, provider_name, capability, last_success_at, last_error_at, last_error_code
from unnest(
    %(tenants)s::text[], %(providers)s::text[], %(capabilities)s::text[],
    %(last_success)s::timestamptz[], %(last_error)s::timestamptz[], %(last_code)s::text[]
) with ordinality as new (
    tenant_id, provider_name, capability, last_success_at, last_error_at, last_error_code, place
)
order by place
on conflict (tenant_id, provider_name, capability) do update set
    last_success_at = greatest(here.last_success_at, excluded.last_success_at),
    (last_error_at, last_error_code) = (
        select at, code
        from (values (here.last_error_at, here.last_error_code), (excluded.last_error_at, excluded.last_error_code))
            as both_of (at, code)
        order by at desc nulls last, code collate "C" desc nulls last
        limit 1
    ),
    updated_at = now()
"""
_LOCK_STATES: Final = """
select 1 from ergon.provider_health_states as here
join unnest(%(tenants)s::text[], %(providers)s::text[], %(capabilities)s::text[])
    as wanted (tenant_id, provider_name, capability) using (tenant_id, provider_name, capability)
order by here.tenant_id collate "C", here.provider_name collate "C", here.capability collate "C"
for update of here
"""
_UPDATE_RATES: Final = f"""
with keys as (
    select * from unnest(%(tenants)s::text[], %(providers)s::text[], %(capabilities)s::text[])
        as wanted (tenant_id, provider_name, capability)
),
{rollups.HOUR_RATES}
update ergon.provider_health_states as here
set success_rate_1h = hours.success_rate_1h, p95_latency_ms_1h = hours.p95_latency_ms_1h, updated_at = now()
from keys left join hours using (tenant_id, provider_name, capability)
where here.tenant_id = keys.tenant_id
    and here.provider_name = keys.provider_name
    and here.capability = keys.capability
returning here.tenant_id, here.provider_name, here.capability, here.success_rate_1h is null
"""  # noqa: S608 - of constants


def write_batch(conn: Connection[Any], batch: AttemptBatch, *, task_table: TaskTable = OWN_TASK_TABLE) -> None:
    """Write *batch* unless it has been written; its attempts refer to *task_table*.

    Any error leaves the batch unwritten, unless ``batch.outcome_unknown`` is set then: the same batch may be written
    again in any case.
    """
    with conn.pipeline():
        conn.execute("begin")
        conn.execute(_SET_LIMITS)
        claimed = conn.execute(_CLAIM_BATCH, [batch.id])
    if claimed.rowcount == 0:
        conn.execute("rollback")
        return
    batch.outcome_unknown = False  # a successful claim proves that the batch was not written
    if rows := batch.to_rows(task_table.ensure_rows(conn, batch.executions)):
        with conn.cursor() as cursor, cursor.copy(_COPY_ATTEMPTS) as copy:
            for row in rows:
                copy.write_row(row)
    minute_rows = batch.rollups()
    last_seen_by_scope = last_seen(minute_rows)
    parameters = {
        **_to_key_columns(last_seen_by_scope),
        "last_success": [entry.last_success_at for entry in last_seen_by_scope.values()],
        "last_error": [entry.last_error_at for entry in last_seen_by_scope.values()],
        "last_code": [entry.last_error_code for entry in last_seen_by_scope.values()],
    }
    # Rows that other writers need too are locked last, in one round trip with the commit, so that those wait
    # only for the server and never for this process.
    batch.outcome_unknown = True
    try:
        with conn.pipeline():
            conn.execute(rollups.ADD_ROLLUPS, rollups.rollup_columns(minute_rows))
            conn.execute(_UPDATE_LAST_SEEN, parameters)
            conn.execute("commit")
    except Exception:
        batch.outcome_unknown = conn.closed  # on an open connection the rejection is definite
        raise


def refresh_rates(conn: Connection[Any], scopes: Collection[ScopeKey]) -> set[ScopeKey]:
    """Compute the rates of *scopes* from the last hour; return the scopes without attempts in it.

    The states are locked before the attempts are read, so that of two processes the one that writes last has read the
    commits of both.
    """
    keys = _to_key_columns(sorted(scopes))
    with conn.pipeline(), conn.transaction():
        conn.execute(_SET_LIMITS)
        conn.execute(_LOCK_STATES, keys)
        updated = conn.execute(_UPDATE_RATES, {**keys, "bounds": rollups.BUCKET_BOUNDS})
    return {(tenant, provider, capability) for tenant, provider, capability, is_empty in updated if is_empty}


def _to_key_columns(scopes: Collection[ScopeKey]) -> dict[str, Any]:
    return {
        "tenants": [scope[0] for scope in scopes],
        "providers": [scope[1] for scope in scopes],
        "capabilities": [scope[2] for scope in scopes],
    }


# -- classification of errors -----------------------------------------------------------------------

#: The SQLSTATE class of exceeded program limits, such as the length of a row in an index.
_LIMIT_EXCEEDED: Final = "54"


def is_data_error(error: Exception) -> bool:
    """Return whether the server would reject the same batch in any state; then nothing of it was written."""
    if not isinstance(error, psycopg.Error):
        return True  # it could not even be sent
    if isinstance(error, psycopg.DataError | psycopg.IntegrityError):
        return True
    return (error.sqlstate or "").startswith(_LIMIT_EXCEEDED)
