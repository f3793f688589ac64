"""Writing: one batch, in one database transaction, at most once."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import psycopg
from psycopg import Connection

from ergon_framework.providers.sql import minutes
from ergon_framework.providers.sql.batch import Account, Batch, seen
from ergon_framework.providers.sql.task_table import OWN, TaskTable

# Of a writer that stands still in the middle, stopped or cut off, nobody has to wait for the locks for long; and its
# batch becomes certain, because its database transaction ends.
_LIMITS: Final = """
select set_config('statement_timeout', '10s', true), set_config('lock_timeout', '5s', true),
    set_config('idle_in_transaction_session_timeout', '10s', true)
"""
# It waits for another database transaction that has written the same id and is not over.
_CLAIM: Final = "insert into ergon.provider_batches (id) values (%s) on conflict do nothing"
_COPY: Final = """
copy ergon.provider_execution_metrics (
    tenant_id, task_execution_id, provider_name, capability, operation, idempotency_key, correlation_id, attempt_number,
    max_attempts, duration_ms, timeout_budget_ms, outcome, reason_code, retryable, http_status, created_at
) from stdin
"""
_SEEN: Final = """
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
_RATES: Final = f"""
with keys as (
    select * from unnest(%(tenants)s::text[], %(providers)s::text[], %(capabilities)s::text[])
        as wanted (tenant_id, provider_name, capability)
),
{minutes.HOURS}
update ergon.provider_health_states as here
set success_rate_1h = hours.success_rate_1h, p95_latency_ms_1h = hours.p95_latency_ms_1h, updated_at = now()
from keys left join hours using (tenant_id, provider_name, capability)
where here.tenant_id = keys.tenant_id
    and here.provider_name = keys.provider_name
    and here.capability = keys.capability
returning here.tenant_id, here.provider_name, here.capability, here.success_rate_1h is null
"""  # noqa: S608 - of constants


def write(line: Connection[Any], batch: Batch, *, task_table: TaskTable = OWN) -> None:
    """Write *batch*, unless it has been written; its attempts refer to *task_table*.

    Whatever is raised leaves the batch unwritten, unless ``batch.doubt`` is set then: the same batch may be given
    again in any case.
    """
    with line.pipeline():
        line.execute("begin")
        line.execute(_LIMITS)
        claimed = line.execute(_CLAIM, [batch.id])
    if claimed.rowcount == 0:
        line.execute("rollback")
        return
    batch.doubt = False  # who could claim it knows that nobody has written it
    if rows := batch.rows(task_table.ensure_rows(line, batch.executions)):
        with line.cursor() as cursor, cursor.copy(_COPY) as copy:
            for row in rows:
                copy.write_row(row)
    tallies = batch.tallies()
    accounts = seen(tallies)
    last = {
        **_keys(accounts),
        "last_success": [one.last_success_at for one in accounts.values()],
        "last_error": [one.last_error_at for one in accounts.values()],
        "last_code": [one.last_error_code for one in accounts.values()],
    }
    # The rows that others want to write too are locked last and in one go with the commit, so that they wait for the
    # server only and never for this process.
    batch.doubt = True
    try:
        with line.pipeline():
            line.execute(minutes.ADD, minutes.columns(tallies))
            line.execute(_SEEN, last)
            line.execute("commit")
    except Exception:
        batch.doubt = line.closed  # on a line that lives, a refusal is the server's last word
        raise


def refresh_rates(line: Connection[Any], accounts: Collection[Account]) -> set[Account]:
    """Compute the rates of *accounts* from the last hour; return those that had no attempt in it.

    The states are locked before the attempts are read, so that of two processes the one that writes last has read what
    both have committed.
    """
    keys = _keys(sorted(accounts))
    with line.pipeline(), line.transaction():
        line.execute(_LIMITS)
        line.execute(_LOCK_STATES, keys)
        updated = line.execute(_RATES, {**keys, "bounds": minutes.BOUNDS})
    return {(tenant, provider, capability) for tenant, provider, capability, is_empty in updated if is_empty}


def _keys(accounts: Collection[Account]) -> dict[str, Any]:
    return {
        "tenants": [account[0] for account in accounts],
        "providers": [account[1] for account in accounts],
        "capabilities": [account[2] for account in accounts],
    }


# -- what an error says of a batch --------------------------------------------------------------------

#: Program limits, as the length of a row in an index.
_LIMIT_EXCEEDED: Final = "54"


def is_content(error: Exception) -> bool:
    """Whether the same batch would be refused again, whatever the server's state; then nothing of it was written."""
    if not isinstance(error, psycopg.Error):
        return True  # it could not even be sent
    if isinstance(error, psycopg.DataError | psycopg.IntegrityError):
        return True
    return (error.sqlstate or "").startswith(_LIMIT_EXCEEDED)
