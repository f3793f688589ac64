"""Providers: the kind of a quota window, the metrics of dead letters, and the task table of the host."""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

#: The unique index of the document has no kind of window, and at midnight of the first four windows begin at once: the
#: start of a longer one is stored as many microseconds later. The column is computed from that, and the view shows the
#: start without it.
WINDOWS = """
alter table ergon.provider_quota_states add column window_kind text generated always as (
    (array['minute', 'hour', 'day', 'month'])[
        1 + mod(extract(microseconds from (window_start at time zone 'UTC'))::integer, 60000000)
    ]
) stored;
create view ergon.provider_quota_windows as
select id, tenant_id, provider_name, capability, window_kind, date_trunc('second', window_start, 'UTC') as window_start,
    window_end, limit_count, used_count, remaining_count, last_exhausted_at, updated_at
from ergon.provider_quota_states;
"""

#: Every Celery task has an execution now: attempts are found by it, and old ones are removed.
EXECUTIONS = """
create index provider_execution_metrics_task on ergon.provider_execution_metrics (task_execution_id)
    where task_execution_id is not null;
create index task_executions_created on ergon.task_executions using brin (created_at);

-- The table that attempts refer to, and the type of its id.
create function ergon.provider_task_table(out task_table regclass, out id_type text) language sql stable as $$
    select c.confrelid::regclass, format_type(a.atttypid, null) from pg_constraint c
    join pg_attribute a on a.attrelid = c.confrelid and a.attname = 'id'
    where c.contype = 'f' and c.conrelid = 'ergon.provider_execution_metrics'::regclass limit 1
$$;
"""

#: A dead letter is counted in the statement that writes it: one row of metrics and one in the minute's roll-up.
DEAD_LETTERS = """
create function ergon.provider_dead_letter_counted(
    the_tenant text, the_execution text, the_provider text, the_capability text, the_operation text, the_key text,
    the_correlation text, attempts integer, max_attempts integer, budget_ms double precision, the_reason text,
    is_retryable boolean, the_status integer, moment timestamptz
) returns void language plpgsql as $$
declare
    host regclass;
    kind text;
    execution text;
begin
    select t.task_table, t.id_type into host, kind from ergon.provider_task_table() t;
    if the_execution is not null and host = 'ergon.task_executions'::regclass then
        insert into ergon.task_executions (id) values (the_execution) on conflict do nothing;
        execution := the_execution;
    elsif the_execution is not null then
        begin
            execute 'select id::text from ' || host || ' where id = $1::' || kind into execution using the_execution;
        exception when data_exception then
            execution := null;
        end;
    end if;
    execute '
        insert into ergon.provider_execution_metrics (
            tenant_id, task_execution_id, provider_name, capability, operation, idempotency_key, correlation_id,
            attempt_number, max_attempts, duration_ms, timeout_budget_ms, outcome, reason_code, retryable,
            http_status, created_at
        ) values ($1, $2::' || kind || ', $3, $4, $5, $6, $7, $8, $9, 0, $10, ''dead_letter'', $11, $12, $13, $14)'
    using the_tenant, execution, the_provider, the_capability, the_operation, the_key, the_correlation, attempts,
        max_attempts, budget_ms, the_reason, is_retryable, the_status, moment;
    insert into ergon.provider_minutes as here
        (tenant_id, provider_name, capability, minute, dead_letter, buckets)
    values (the_tenant, the_provider, the_capability, date_trunc('minute', moment, 'UTC'), 1,
        array_fill(0::bigint, array[52]))
    on conflict (tenant_id, provider_name, capability, minute) do update set dead_letter = here.dead_letter + 1;
    insert into ergon.provider_health_states (tenant_id, provider_name, capability)
    values (the_tenant, the_provider, the_capability) on conflict do nothing;
end $$;
"""


def upgrade() -> None:
    """Add a column, a view, indexes and functions; the release before this one goes on working."""
    for statement in (WINDOWS, EXECUTIONS, DEAD_LETTERS):
        op.execute(statement)


def downgrade() -> None:
    """Take them away again."""
    op.execute("drop function ergon.provider_dead_letter_counted")
    op.execute("drop function ergon.provider_task_table")
    op.execute("drop index ergon.task_executions_created")
    op.execute("drop index ergon.provider_execution_metrics_task")
    op.execute("drop view ergon.provider_quota_windows")
    op.execute("alter table ergon.provider_quota_states drop column window_kind")
