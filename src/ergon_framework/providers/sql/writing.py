"""Writing of one batch in one database transaction, at most once."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import psycopg
from psycopg import Connection

from ergon_framework.providers.sql import minutes
from ergon_framework.providers.sql.batch import AttemptBatch, ScopeKey, last_seen
from ergon_framework.providers.sql.task_table import OWN_TASK_TABLE, TaskTable

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
{minutes.HOUR_RATES}
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
    rollups = batch.rollups()
    last_seen_by_scope = last_seen(rollups)
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
            conn.execute(minutes.ADD_ROLLUPS, minutes.rollup_columns(rollups))
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
        updated = conn.execute(_UPDATE_RATES, {**keys, "bounds": minutes.BUCKET_BOUNDS})
    return {(tenant, provider, capability) for tenant, provider, capability, is_empty in updated if is_empty}


def _to_key_columns(scopes: Collection[ScopeKey]) -> dict[str, Any]:
    return {
        "tenants": [scope[0] for scope in scopes],
        "providers": [scope[1] for scope in scopes],
        "capabilities": [scope[2] for scope in scopes],
    }


# -- classification of errors -------------------------------------------------------------------------

#: The SQLSTATE class of exceeded program limits, such as the length of a row in an index.
_LIMIT_EXCEEDED: Final = "54"


def is_data_error(error: Exception) -> bool:
    """Return whether the server would reject the same batch in any state; then nothing of it was written."""
    if not isinstance(error, psycopg.Error):
        return True  # it could not even be sent
    if isinstance(error, psycopg.DataError | psycopg.IntegrityError):
        return True
    return (error.sqlstate or "").startswith(_LIMIT_EXCEEDED)
