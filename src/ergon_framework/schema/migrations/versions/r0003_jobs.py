"""Jobs: the row that is the truth about each, the function that submits one with its message, and what is due when."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLE = """
-- One row for each job, until its retention is over. Its arguments are in the body of its message, and only there; the
-- message wakes somebody, and what is to be done with it is decided by this row.
create table ergon.job (
    -- The transaction id of the message.
    id text collate "C" primary key,
    -- The order of submission, by which they are listed.
    number bigint generated always as identity,
    queue integer not null,
    -- As it goes on the wire, without the prefix that selects an executor.
    function_name text not null,
    state text not null default 'pending'
        check (state in ('pending', 'running', 'succeeded', 'failed', 'cancelled', 'killed')),
    attempts integer not null default 0,
    -- Null is what the orchestrator's policy says; so is a timeout that is null.
    max_attempts integer check (max_attempts > 0),
    timeout double precision check (timeout > 0),
    priority smallint not null default 0,
    tenant text,
    correlation text,
    unique_key text,
    -- Of function and arguments: whoever submits the same again is told of this one.
    digest bytea not null,
    created_at timestamptz not null default now(),
    due_at timestamptz not null default now(),
    started_at timestamptz,
    ended_at timestamptz,
    -- Seconds for which it is kept after its end, and when they are over.
    retention double precision not null check (retention >= 0),
    expires_at timestamptz,
    -- The claim of the last attempt: nobody else may say how it ended.
    worker bigint,
    token bigint,
    -- The message that the last attempt was made for. Of a job that failed it is the one that was buried: any other is
    -- a replay.
    message bigint,
    kill_asked boolean not null default false,
    -- JSON as it was answered: jsonb would refuse what it cannot hold.
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
create index job_listed on ergon.job (queue, state, number);
-- Of one tenant: what another one calls its jobs is nobody else's business.
create unique index job_unique_key on ergon.job (unique_key, coalesce(tenant, '')) where unique_key is not null;
create index job_kill on ergon.job (id) where kill_asked and state = 'running';
create index job_expires on ergon.job (expires_at) where expires_at is not null;
"""

#: A job and its message, or the job that was there: one statement, on whichever connection. A second one who submits
#: the same id or key waits until the first one's database transaction has ended, and then sees its job. One that is to
#: wait goes where messages wait that came back; it takes its number from the same sequence, so that there is one order.
SUBMIT = """
create function ergon.submit_job(
    queue_name text, job_id text, function_name text, headers jsonb, body bytea, digest bytea, delay double precision,
    priority smallint, tenant text, correlation text, unique_key text, max_attempts integer, timeout double precision,
    retention double precision
) returns table (id text, created boolean, same boolean, state text, job_function text) language plpgsql as $$
#variable_conflict use_column
declare
    of_queue integer;
    message bigint;
begin
    select q.id into of_queue from ergon.queue q where q.name = queue_name;
    if of_queue is null then
        of_queue := ergon.make_queue(queue_name);
    end if;
    loop
        insert into ergon.job (
            id, queue, function_name, max_attempts, timeout, priority, tenant, correlation, unique_key, digest, due_at,
            retention
        )
        values (
            submit_job.job_id, of_queue, submit_job.function_name, submit_job.max_attempts, submit_job.timeout,
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
        -- It was there, and its retention has ended since.
    end loop;
    if submit_job.delay > 0 then
        message := nextval(pg_get_serial_sequence('ergon.ready', 'id'));
        insert into ergon.content (id, created_at, queue, priority, transaction_id, headers, body)
        values (
            message, now(), of_queue, submit_job.priority, submit_job.job_id, submit_job.headers, submit_job.body
        );
        insert into ergon.returned (id, due_at, queue)
        values (message, now() + submit_job.delay * interval '1 second', of_queue);
    else
        insert into ergon.ready (queue, rank, transaction_id, headers, body)
        values (of_queue, -submit_job.priority, submit_job.job_id, submit_job.headers, submit_job.body);
    end if;
    -- Also for one that waits: whoever sleeps has to know until when.
    if exists (select 1 from ergon.sleeper s where s.queue = of_queue and s.until > now()) then
        perform ergon.ring(of_queue);
    end if;
    return query select submit_job.job_id, true, true, 'pending'::text, submit_job.function_name;
end $$;
"""

CRON = """
-- One row for each entry: jobs that are submitted at set times. Whoever holds the row's lock submits those that are due
-- and moves next_at, in one database transaction.
create table ergon.cron (
    name text collate "C" primary key,
    expression text not null,
    -- The time zone that the expression is read in.
    zone text not null,
    -- The executors, and the handler as it goes on the wire.
    kind text not null,
    function_name text not null,
    -- JSON: positional and keyword arguments.
    arguments text not null,
    priority smallint not null default 0,
    -- Null is what the orchestrator's policy says; so is a timeout that is null.
    max_attempts integer check (max_attempts > 0),
    timeout double precision check (timeout > 0),
    tenant text,
    -- Seconds for which its jobs are kept after their end.
    retention double precision not null check (retention >= 0),
    misfire text not null check (misfire in ('skip', 'once', 'all')),
    -- Seconds after which a time that has passed is a misfire.
    grace double precision not null check (grace >= 0),
    -- Of all that was declared: the same again changes nothing.
    digest bytea not null,
    enabled boolean not null default true,
    -- The first time that has not been fired; null if none comes any more.
    next_at timestamptz,
    -- The last one that was.
    last_at timestamptz
);
create index cron_due on ergon.cron (next_at) where enabled;
"""


def upgrade() -> None:
    """Make the tables; nothing that was there is touched."""
    op.execute(TABLE)
    op.execute(SUBMIT)
    op.execute(CRON)


def downgrade() -> None:
    """Take them away again, with what is in them."""
    op.execute("drop table ergon.cron")
    op.execute("drop function ergon.submit_job")
    op.execute("drop table ergon.job")
