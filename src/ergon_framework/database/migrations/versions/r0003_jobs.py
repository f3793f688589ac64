"""Jobs: the row of each job, the function that submits one with its message, schedules, and served executors.

A job is a stored call of a function that an executor, a separate process, runs; an orchestrator sends it the call.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

JOB = """
-- One row per job, until its retention ends; the job's state is this row. Its arguments are only in the body of its
-- message, which triggers processing.
create table ergon.job (
    -- The transaction id of the message.
    id text collate "C" primary key,
    -- The order of submission, and of lists.
    number bigint generated always as identity,
    queue integer not null,
    -- As on the wire, without the prefix that selects an executor.
    function_name text not null,
    state text not null default 'pending'
        check (state in ('pending', 'running', 'succeeded', 'failed', 'cancelled', 'killed')),
    attempts integer not null default 0,
    -- Null for the orchestrator's policy, as is a null timeout.
    max_attempts integer check (max_attempts > 0),
    timeout double precision check (timeout > 0),
    priority smallint not null default 0,
    tenant text,
    correlation text,
    unique_key text,
    -- Of function and arguments: a repeated submission returns this job.
    digest bytea not null,
    created_at timestamptz not null default now(),
    due_at timestamptz not null default now(),
    started_at timestamptz,
    ended_at timestamptz,
    -- Seconds for which the job is kept after its end, and when they are over.
    retention double precision not null check (retention >= 0),
    expires_at timestamptz,
    -- The claim of the last attempt: only that claim may write the outcome.
    worker bigint,
    token bigint,
    -- The message of the last attempt. Of a failed job it is the dead-lettered one: any other message is a replay.
    message bigint,
    kill_requested boolean not null default false,
    -- JSON text, because jsonb cannot store every JSON value.
    result text,
    category text,
    error_code text,
    error_type text,
    error_message text,
    error_traceback text
) with (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0
);
create index job_state on ergon.job (queue, state, number);
-- Unique per tenant.
create unique index job_unique_key on ergon.job (unique_key, coalesce(tenant, '')) where unique_key is not null;
create index job_kill on ergon.job (id) where kill_requested and state = 'running';
create index job_expires on ergon.job (expires_at) where expires_at is not null;
"""

#: Submits a job with its message, or returns the existing job, in one statement on any connection. A second submission
#: of the same id or key waits until the first one's transaction has ended. The message of a delayed job is stored as a
#: redelivery; its id comes from the same sequence, so that ids order all messages.
SUBMIT_JOB = """
create function ergon.submit_job(
    queue_name text, job_id text, function_name text, headers jsonb, body bytea, digest bytea, delay double precision,
    priority smallint, tenant text, correlation text, unique_key text, max_attempts integer, timeout double precision,
    retention double precision
) returns table (id text, created boolean, same boolean, state text, job_function text) language plpgsql as $$
#variable_conflict use_column
declare
    queue_id integer;
    message bigint;
begin
    select q.id into queue_id from ergon.queue q where q.name = queue_name;
    if queue_id is null then
        queue_id := ergon.create_queue(queue_name);
    end if;
    loop
        insert into ergon.job (
            id, queue, function_name, max_attempts, timeout, priority, tenant, correlation, unique_key, digest, due_at,
            retention
        )
        values (
            submit_job.job_id, queue_id, submit_job.function_name, submit_job.max_attempts, submit_job.timeout,
            submit_job.priority, submit_job.tenant, submit_job.correlation, submit_job.unique_key, submit_job.digest,
            now() + greatest(submit_job.delay, 0) * interval '1 second', submit_job.retention
        )
        on conflict do nothing;
        if found then
            exit;
        end if;
        return query
        select j.id, false, j.digest = submit_job.digest, j.state, j.function_name from ergon.job j
        where j.unique_key = submit_job.unique_key and coalesce(j.tenant, '') = coalesce(submit_job.tenant, '')
        union all
        select j.id, false, j.digest = submit_job.digest, j.state, j.function_name from ergon.job j
        where j.id = submit_job.job_id
        limit 1;
        if found then
            return;
        end if;
        -- The job existed, and its retention has ended meanwhile.
    end loop;
    if submit_job.delay > 0 then
        message := nextval(pg_get_serial_sequence('ergon.ready', 'id'));
        insert into ergon.content (id, created_at, queue, priority, transaction_id, headers, body)
        values (
            message, now(), queue_id, submit_job.priority, submit_job.job_id, submit_job.headers, submit_job.body
        );
        insert into ergon.redelivery (id, due_at, queue)
        values (message, now() + submit_job.delay * interval '1 second', queue_id);
    else
        insert into ergon.ready (queue, rank, transaction_id, headers, body)
        values (queue_id, -submit_job.priority, submit_job.job_id, submit_job.headers, submit_job.body);
    end if;
    -- Also for a delayed job: listeners compute the time until the next due message.
    if exists (select 1 from ergon.listener s where s.queue = queue_id and s.until > now()) then
        perform ergon.notify_listeners(queue_id);
    end if;
    return query select submit_job.job_id, true, true, 'pending'::text, submit_job.function_name;
end $$;
"""

CRON = """
-- One row per schedule entry. The process that locks the row submits the due jobs and advances next_at, in one
-- transaction.
create table ergon.cron (
    name text collate "C" primary key,
    expression text not null,
    -- The time zone of the expression.
    zone text not null,
    -- The executors, and the handler as on the wire.
    kind text not null,
    function_name text not null,
    -- JSON: positional and keyword arguments.
    arguments text not null,
    priority smallint not null default 0,
    -- Null for the orchestrator's policy, as is a null timeout.
    max_attempts integer check (max_attempts > 0),
    timeout double precision check (timeout > 0),
    tenant text,
    -- Seconds for which its jobs are kept after their end.
    retention double precision not null check (retention >= 0),
    misfire text not null check (misfire in ('skip', 'once', 'all')),
    -- Seconds after which a scheduled time that has passed is a misfire.
    grace double precision not null check (grace >= 0),
    -- Of the whole declaration: an equal one changes nothing.
    digest bytea not null,
    enabled boolean not null default true,
    -- The first scheduled time that has not fired; null if there is none.
    next_at timestamptz,
    -- The last scheduled time that has fired.
    last_at timestamptz
);
create index cron_due on ergon.cron (next_at) where enabled;
"""

EXECUTOR = """
-- One row per kind of executors. Every orchestrator that serves the kind renews the row while it runs, so that a job
-- for an unknown kind does not wait without limit.
create table ergon.executor (
    kind text collate "C" primary key,
    -- Since when orchestrators have served it without a gap.
    since timestamptz not null,
    served_at timestamptz not null
) with (fillfactor = 50);
"""


def upgrade() -> None:
    """Create the tables and the function."""
    for statement in (JOB, SUBMIT_JOB, CRON, EXECUTOR):
        op.execute(statement)


def downgrade() -> None:
    """Drop the function, and the tables with their rows; messages stay in their queues."""
    op.execute("drop function ergon.submit_job")
    for table in ("executor", "cron", "job"):
        op.execute(f"drop table ergon.{table}")
