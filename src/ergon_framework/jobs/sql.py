"""SQL statements that start and finish attempts, and those that query and control jobs.

A job is a row of ``ergon.job`` and a message in a queue. The row is authoritative; the message only triggers
processing. A worker that fetches claims messages: a row of ``ergon.claim`` with the worker, a token (a number that is
never used again) and ``ids``, the messages that are still claimed. An attempt begins under the claim on its message and
is counted before anything is sent to the executor; only the same claim (worker and token) can write how it ended, so an
orchestrator that lost its claim changes nothing. The message is settled afterwards: if that fails, the message is
redelivered, and the row decides what happens to it.

START_ATTEMPTS, FINISH_ATTEMPTS and FAIL_UNSERVED have numbered parameters, and take and return JSON: they run for many
jobs, and the driver's conversions would take longer than all the rest. The others use psycopg's named placeholders.
"""

from __future__ import annotations

from typing import Final

from ergon_framework.jobs.model import QUEUE_PREFIX

#: ``claimed`` has the messages of the JSON array $1 (job id, message, worker, token) that these claims still cover.
_CLAIMED_MESSAGES: Final = """
with claims as materialized (
    select * from json_to_recordset($1::json) as g(id text, message bigint, worker bigint, token bigint)
),
alive as materialized (
    select w.id from ergon.worker w where w.id in (select g.worker from claims g) for key share
),
claimed as materialized (
    select g.* from claims g join alive a on a.id = g.worker
    join ergon.claim h on h.worker = g.worker and h.token = g.token
    where g.message = any(h.ids)
)
"""

#: Decides for each claimed message, according to the row of its job, and begins the attempts. Parameters: $1 the claims
#: of ``_CLAIMED_MESSAGES``; $2 default of max_attempts and $3 of timeout; $4 error code and $5 message of a job without
#: attempts left; $6 message of a killed job.
#: ``case`` computes the decision: over (the job is final: ack), failed (dead-letter the message), replayed (the dead
#: letter of a failed job is in the queue again: its attempts restart), begun (by this claim: the answer of an earlier
#: call was lost), killed, early (not due), exhausted (no attempt left) or run; unknown is a message without a job. See
#: ``jobs.store.StartDecision``.
#: The worker's row is locked as by a claim: a statement that removes the worker waits, or has run before, and then
#: nothing is found here.
START_ATTEMPTS: Final = f"""
{_CLAIMED_MESSAGES},
jobs as materialized (
    select j.id, j.state, j.attempts, j.due_at, j.kill_requested, j.worker as by_worker, j.token as by_token,
        j.message as for_message, coalesce(j.max_attempts, $2::integer) as max_attempts,
        coalesce(j.timeout, $3::float8) as timeout, j.category, j.error_code, j.error_message,
        m.message, m.worker, m.token
    from claimed m join ergon.job j on j.id = m.id order by j.id for no key update of j
),
decided as materialized (
    select f.*, case
        when f.state in ('succeeded', 'cancelled', 'killed') then 'over'
        when f.state = 'failed' and f.for_message = f.message then 'failed'
        when f.state = 'failed' then 'replayed'
        when f.state = 'running' and f.by_worker = f.worker and f.by_token = f.token then 'begun'
        when f.state = 'running' and f.for_message <> f.message and exists (
            select 1 from ergon.claim h
            where h.worker = f.by_worker and h.token = f.by_token and f.for_message = any(h.ids)
        ) then 'over'
        when f.kill_requested then 'killed'
        when f.state = 'pending' and f.due_at > now() then 'early'
        when f.attempts >= f.max_attempts then 'exhausted'
        else 'run'
    end as decision
    from jobs f
),
changed as (
    update ergon.job j set
        state = case d.decision when 'exhausted' then 'failed' when 'killed' then 'killed' else 'running' end,
        attempts = case d.decision when 'run' then j.attempts + 1 when 'replayed' then 1 else j.attempts end,
        worker = d.worker, token = d.token, message = d.message,
        started_at = case when d.decision in ('run', 'replayed') then now() else j.started_at end,
        ended_at = case when d.decision in ('exhausted', 'killed') then now() end,
        expires_at = case when d.decision in ('exhausted', 'killed') then now() + j.retention * interval '1 second' end,
        category = case d.decision when 'exhausted' then 'SYSTEM' when 'killed' then 'BUSINESS'
            when 'run' then j.category end,
        error_code = case d.decision when 'exhausted' then $4::text when 'killed' then 'killed'
            when 'run' then j.error_code end,
        error_type = case d.decision when 'run' then j.error_type end,
        error_message = case d.decision when 'exhausted' then $5::text when 'killed' then $6::text
            when 'run' then j.error_message end,
        error_traceback = case d.decision when 'run' then j.error_traceback end
    from decided d
    where j.id = d.id and d.decision in ('run', 'replayed', 'exhausted', 'killed')
    returning j.id, j.attempts, j.category, j.error_code, j.error_message
)
select json_agg(json_build_array(
    m.id, coalesce(d.decision, 'unknown'), coalesce(c.attempts, d.attempts), d.max_attempts, d.timeout,
    greatest(0, extract(epoch from d.due_at - now()))::float8, coalesce(c.category, d.category),
    coalesce(c.error_code, d.error_code), coalesce(c.error_message, d.error_message)
))::text
from claimed m left join decided d on d.id = m.id left join changed c on c.id = m.id
"""

#: Writes how attempts ended. Parameters: $1 a JSON array of ends, with the columns of ``ends``; $2 the message of a
#: killed job. The state of an end is pending for a retry after *delay* seconds; *attempts_to_uncount* is 1 for an
#: attempt that does not count, because nothing was sent or it was interrupted for another job. Only the claim that
#: began the attempt can write. A job that this claim has finished before is reported with its state, because the caller
#: lost the answer. An outcome is applied also after a kill request, but then there is no retry. Returns the state by
#: job id, for each job of these claims.
FINISH_ATTEMPTS: Final = """
with ends as materialized (
    select * from json_to_recordset($1::json) as g(
        id text, worker bigint, token bigint, state text, delay float8, attempts_to_uncount integer, result text,
        category text, code text, type text, error_message text, traceback text
    )
),
own_jobs as materialized (
    select g.*, j.state as was,
        case when j.kill_requested and g.state = 'pending' then 'killed' else g.state end as becomes
    from ends g join ergon.job j on j.id = g.id
    where j.worker = g.worker and j.token = g.token order by j.id for no key update of j
),
done as (
    update ergon.job j set
        state = m.becomes,
        attempts = j.attempts - m.attempts_to_uncount,
        due_at = case m.becomes when 'pending' then now() + m.delay * interval '1 second' else j.due_at end,
        ended_at = case m.becomes when 'pending' then null else now() end,
        expires_at = case m.becomes when 'pending' then null else now() + j.retention * interval '1 second' end,
        result = case m.becomes when 'succeeded' then m.result end,
        category = case when m.attempts_to_uncount = 0 then m.category when m.becomes = 'killed' then 'BUSINESS'
            else j.category end,
        error_code = case when m.attempts_to_uncount = 0 then m.code when m.becomes = 'killed' then 'killed'
            else j.error_code end,
        error_type = case when m.attempts_to_uncount = 0 then m.type when m.becomes <> 'killed' then j.error_type end,
        error_message = case when m.attempts_to_uncount = 0 then m.error_message
            when m.becomes = 'killed' then $2::text else j.error_message end,
        error_traceback = case when m.attempts_to_uncount = 0 then m.traceback
            when m.becomes <> 'killed' then j.error_traceback end
    from own_jobs m where j.id = m.id and m.was = 'running'
    returning j.id, j.state
)
select json_object_agg(m.id, coalesce(d.state, m.was))::text from own_jobs m left join done d on d.id = m.id
"""

#: Running jobs with a kill request, of all orchestrators: there is rarely one.
JOBS_TO_KILL: Final = "select id from ergon.job where kill_requested and state = 'running'"

#: Deletes at most *most* expired jobs. A failed job whose dead letter exists can be replayed, so it is kept, and
#: checked again after its retention, or after an hour if that is shorter.
DELETE_EXPIRED: Final = """
with old as materialized (
    select j.id, j.state = 'failed' and exists (
        select 1 from ergon.dead_letter d where d.queue = j.queue and d.transaction_id = j.id
    ) as needed
    from ergon.job j where j.expires_at < now() order by j.expires_at limit %(most)s for update of j skip locked
),
kept as (
    update ergon.job j set expires_at = now() + greatest(j.retention, 3600) * interval '1 second'
    from old o where o.needed and j.id = o.id
),
deleted as (
    delete from ergon.job j using old o where not o.needed and j.id = o.id
)
select count(*) from old
"""

# -- executors that no orchestrator serves ----------------------------------------------------------

#: Records that an orchestrator serves *kinds* now. ``since`` is the start of the present service: it restarts after
#: more than *absent* seconds without one. Orchestrators of one kind write the same row, so one just written is skipped.
REGISTER: Final = """
insert into ergon.executor as e (kind, since, served_at)
select g.kind, now(), now() from unnest(%(kinds)s::text[]) as g(kind) order by g.kind
on conflict (kind) do update set
    since = case when e.served_at < now() - %(absent)s * interval '1 second' then now() else e.since end,
    served_at = now()
where e.served_at < now() - interval '5 seconds'
"""

#: An executor *e* is known for 400 days after an orchestrator served it last: longer than an outage, and than the
#: interval of a job that runs once a year.
_IS_SERVED: Final = "e.served_at > now() - interval '400 days'"

#: The executor of a queue *q* is registered.
_IS_REGISTERED: Final = (
    f"exists (select 1 from ergon.executor e where q.name = '{QUEUE_PREFIX}' || e.kind and {_IS_SERVED})"
)
#: Jobs of a queue *q* run or have succeeded: an orchestrator of an older release, which does not register, serves it.
_HAS_ACTIVE_JOBS: Final = (
    "exists (select 1 from ergon.job s where s.queue = q.id and s.state in ('running', 'succeeded'))"
)
_IS_UNKNOWN: Final = f"not {_IS_REGISTERED} and not {_HAS_ACTIVE_JOBS}"

EXECUTORS: Final = f"""
select e.kind, e.served_at from ergon.executor e where {_IS_SERVED}
union all
select substr(q.name, length('{QUEUE_PREFIX}') + 1), now() from ergon.queue q
where starts_with(q.name, '{QUEUE_PREFIX}') and not {_IS_REGISTERED} and {_HAS_ACTIVE_JOBS}
order by 1
"""

#: Queues without an orchestrator that have a message to dead-letter, or to remove because its job has ended. A job may
#: wait for an orchestrator for *grace* seconds after it is due. Nothing is returned unless some orchestrator has been
#: running for *grace* seconds; it counts as running until *absent* seconds after its last registration.
UNSERVED: Final = f"""
select q.name from ergon.queue q
where starts_with(q.name, '{QUEUE_PREFIX}') and {_IS_UNKNOWN} and exists (
    select 1 from (
        select r.transaction_id from ergon.ready r where r.queue = q.id
        union all
        select c.transaction_id from ergon.redelivery b join ergon.content c on c.id = b.id
        where b.queue = q.id and b.due_at <= now()
    ) as m
    join ergon.job j on j.id = m.transaction_id
    where j.queue = q.id and (j.state <> 'pending' or j.due_at < now() - %(grace)s * interval '1 second')
)
-- After an outage of all orchestrators, the one that serves it may start a moment later than this one.
and exists (
    select 1 from ergon.executor e where e.since < now() - %(grace)s * interval '1 second'
    and e.served_at > now() - %(absent)s * interval '1 second'
)
order by q.name
"""

#: Fails the jobs of claimed messages whose executor no orchestrator serves. Parameters: $1 the claims
#: of ``_CLAIMED_MESSAGES``; $2 seconds that a job may wait after it is due; $3 error code; $4 error message. The queue
#: is checked again, because an orchestrator may have started. A job that has already failed is written again: an
#: orchestrator stopped between the failure and the dead letter, and the decision ``failed`` makes this caller write the
#: dead letter.
FAIL_UNSERVED: Final = f"""
{_CLAIMED_MESSAGES},
failed as (
    update ergon.job j set
        state = 'failed', worker = m.worker, token = m.token, message = m.message, ended_at = now(),
        expires_at = now() + j.retention * interval '1 second', category = 'SYSTEM', error_code = $3::text,
        error_type = null, error_message = $4::text, error_traceback = null
    from claimed m, ergon.queue q
    where j.id = m.id and q.id = j.queue and {_IS_UNKNOWN} and (
        j.state = 'failed' or j.state = 'pending' and j.due_at < now() - $2::float8 * interval '1 second'
    )
    returning j.id, j.attempts
)
select json_agg(json_build_array(
    m.id, case when f.id is not null then 'failed' when j.state in ('succeeded', 'cancelled', 'killed') then 'over'
        else 'waiting' end, coalesce(f.attempts, 0)
))::text
from claimed m left join ergon.job j on j.id = m.id left join failed f on f.id = m.id
"""

# -- queries and control ----------------------------------------------------------------------------

#: The row is kept until the due time of the job: its delayed message is delivered then, and must find the row.
CANCEL: Final = """
update ergon.job set state = 'cancelled', ended_at = now(),
    expires_at = greatest(now(), due_at) + retention * interval '1 second'
where id = %(id)s and state = 'pending'
returning id, (select q.name from ergon.queue q where q.id = ergon.job.queue)
"""

KILL: Final = """
update ergon.job set
    kill_requested = state = 'running',
    state = case state when 'pending' then 'cancelled' else state end,
    ended_at = case state when 'pending' then now() end,
    expires_at = case state when 'pending' then greatest(now(), due_at) + retention * interval '1 second' end
where id = %(id)s and state in ('pending', 'running')
returning state, (select q.name from ergon.queue q where q.id = ergon.job.queue)
"""

COLUMNS: Final = """
    j.id, q.name, j.function_name, j.state, j.attempts, j.max_attempts, j.timeout, j.priority, j.tenant, j.correlation,
    j.unique_key, j.created_at, j.due_at, j.started_at, j.ended_at, j.expires_at, j.kill_requested, j.result,
    j.category, j.error_code, j.error_message, j.error_type, j.error_traceback, j.number
"""
GET_JOB: Final = f"select {COLUMNS} from ergon.job j join ergon.queue q on q.id = j.queue where j.id = %(id)s"

#: Jobs ahead of a due job: running jobs of its kind, and due jobs submitted before it. The counts are limited.
JOBS_AHEAD: Final = """
select
    (select count(*) from (
        select from ergon.job r where r.queue = j.queue and r.state = 'running' limit %(most)s
    ) as running),
    (select count(*) from (
        select from ergon.job w where w.queue = j.queue and w.state = 'pending' and w.number < j.number
        and w.due_at <= now() limit %(most)s
    ) as waiting)
from ergon.job j where j.id = %(id)s and j.state = 'pending' and j.due_at <= now()
"""

#: Those of the given jobs that are final.
FIND_FINISHED: Final = f"""
select {COLUMNS} from ergon.job j join ergon.queue q on q.id = j.queue
where j.id = any(%(ids)s::text[]) and j.state not in ('pending', 'running')
"""

FIND_MISSING: Final = """
select i.id from unnest(%(ids)s::text[]) as i(id) where not exists (select 1 from ergon.job j where j.id = i.id) limit 1
"""

GET_STATE: Final = "select state from ergon.job where id = %(id)s"

#: Uses one index for any filter: the newest jobs of each queue and state, and the newest of these.
LIST_JOBS: Final = f"""
select p.* from unnest(%(states)s::text[]) as s(state)
cross join (
    select q.id, q.name from ergon.queue q
    where case when %(queue)s::text is null then starts_with(q.name, %(prefix)s) else q.name = %(queue)s end
) as q
cross join lateral (
    select {COLUMNS} from ergon.job j
    where j.queue = q.id and j.state = s.state and (%(before)s::bigint is null or j.number < %(before)s)
    and (%(function)s::text is null or j.function_name = %(function)s)
    and (%(tenant)s::text is null or j.tenant = %(tenant)s)
    order by j.number desc limit %(limit)s
) as p
order by p.number desc limit %(limit)s
"""

LOCK_FOR_REPLAY: Final = """
select j.state, j.queue, (
    select max(d.id) from ergon.dead_letter d where d.queue = j.queue and d.transaction_id = j.id
) from ergon.job j where j.id = %(id)s for no key update of j
"""

RESET_JOB: Final = """
update ergon.job set state = 'pending', attempts = 0, due_at = now(), ended_at = null, expires_at = null, result = null,
    kill_requested = false, category = null, error_code = null, error_type = null, error_message = null,
    error_traceback = null
where id = %(id)s
"""
