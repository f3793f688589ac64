"""The statements: all SQL that the queue is made of. Placeholders are psycopg's named ones.

Three rules run through all of them. A claim is one row, of a worker and a token, with the ids that
it took: whatever settles a message names that row and locks it, so that a stale worker changes
nothing. A claim takes a key share lock on its worker's row: whoever takes that row away knows that
no claim slips in behind. And nothing is written anew on the way of a message that succeeds: it is
inserted twice, into content and ready, and deleted from the one when it is claimed and from the
other when it is done.
"""

from __future__ import annotations

from typing import Final

CHANNEL: Final = "ergon"

# -- start ----------------------------------------------------------------------------------------

REVISION: Final = "select version_num from ergon.revision"

SETTINGS: Final = """
select name, setting from pg_settings
where name in ('fsync', 'synchronous_commit', 'full_page_writes', 'server_version_num')
"""

BACKEND: Final = "select pg_backend_pid()"

#: For a session of our own. Every statement here is meant to go by its indexes, whatever the statistics say: a plan
#: that was made while a table was empty must be good when it is full, so that none has to be made twice.
PLANS: Final = """
select set_config(name, setting, false) from (values
    ('plan_cache_mode', 'force_generic_plan'), ('enable_seqscan', 'off'), ('enable_bitmapscan', 'off'),
    ('enable_hashjoin', 'off'), ('enable_mergejoin', 'off'), ('jit', 'off')
) as wanted(name, setting)
"""

QUEUE: Final = "select coalesce((select id from ergon.queue where name = %(name)s), ergon.make_queue(%(name)s))"

# -- a worker instance ------------------------------------------------------------------------------

REGISTER: Final = """
insert into ergon.worker (alive_until, name) values (now() + %(lease)s * interval '1 second', %(name)s) returning id
"""

HEARTBEAT: Final = """
update ergon.worker set alive_until = now() + %(lease)s * interval '1 second' where id = %(worker)s returning id
"""

#: A worker that holds nothing needs no row; one that does keeps it until its lease is over.
RETIRE: Final = """
with left_over as (
    delete from ergon.held h where h.worker = %(worker)s
    and not exists (select 1 from ergon.content c where c.id = any(h.ids)) returning h.token
),
gone as (
    delete from ergon.worker w where w.id = %(worker)s and not exists (
        select 1 from ergon.held h where h.worker = w.id and h.token not in (select token from left_over)
    )
)
select 1
"""

#: Which of these instances were never taken away.
LIVING: Final = "select id from ergon.worker where id = any(%(workers)s)"

EXPIRED: Final = "select 1 from ergon.worker where alive_until < now() limit 1"

BURY_WORKERS: Final = """
delete from ergon.worker where id in (
    select id from ergon.worker where alive_until < now() for update skip locked
) returning id
"""

_REAP: Final = """
with lost as (delete from ergon.held h where {whose} returning h.ids, h.queue),
turns as (delete from ergon.turn h where {whose}),
back as (
    update ergon.content c set deliveries = c.deliveries + 1
    from (select unnest(ids) as id from lost) as l where c.id = l.id
    returning c.id, c.queue, c.key
),
into_returned as (
    insert into ergon.returned (id, due_at, queue, key) select id, now(), queue, key from back
    on conflict (id) do nothing
)
select count(*) from back
"""
#: In a statement of its own, after the one above: it has to see every claim that was made before.
REAP: Final = _REAP.format(whose="h.worker = any(%(workers)s)")
#: What is held by somebody who does not exist, as after a restored backup.
REAP_STRAYS: Final = _REAP.format(whose="not exists (select 1 from ergon.worker w where w.id = h.worker)")

#: A claim whose answer never arrived: given back as if it had not been made.
DISOWN: Final = """
with lost as (
    delete from ergon.held h where h.worker = %(worker)s and h.token = any(%(tokens)s) returning h.ids
),
turns as (delete from ergon.turn t where t.worker = %(worker)s and t.token = any(%(tokens)s))
insert into ergon.returned (id, due_at, queue, key)
select c.id, now(), c.queue, c.key from ergon.content c join (select unnest(ids) as id from lost) as l on l.id = c.id
on conflict (id) do nothing
"""

# -- claiming ---------------------------------------------------------------------------------------

_CONTENT: Final = """
select t.id, c.key, t.rank, c.deliveries + 1, c.headers, c.body, {done} as done
from taken t join ergon.content c on c.id = t.id {inbox}
"""
_PLAIN: Final = _CONTENT.format(done="false", inbox="")
_INBOX: Final = _CONTENT.format(
    done="i.transaction_id is not null",
    inbox="left join ergon.inbox i on i.queue = %(queue)s and i.transaction_id = c.transaction_id",
)
_ALIVE: Final = "select id from ergon.worker where id = %(worker)s and alive_until > now() for key share"
_HOLD: Final = """
    insert into ergon.held (worker, token, queue, ids)
    select %(worker)s, %(token)s, %(queue)s, array_agg(id) from taken having count(*) > 0
    on conflict (worker, token) do update set ids = held.ids || excluded.ids
"""

#: What came back first, then fresh ones above the floor. Those with a key are only named: whether
#: one may be handed out depends on its elders, which takes a lock and another look. A rank is told of
#: fresh ones only. A negative id says that the worker is gone.
_CLAIM: Final = """
with alive as materialized ({alive}),
due as materialized (
    select r.ctid as place, r.id, r.key from ergon.returned r
    where r.queue = %(queue)s and r.due_at <= now() and exists (select 1 from alive)
    order by r.due_at limit %(count)s for update skip locked
),
fresh as materialized (
    select r.ctid as place, r.id, r.key, r.rank from ergon.ready r
    where r.queue = %(queue)s {where} and exists (select 1 from alive)
    order by {order} limit %(count)s - (select count(*) from due) for update skip locked
),
from_due as (
    delete from ergon.returned r where r.ctid = any(array(select place from due where key is null)) returning r.id
),
from_fresh as (
    delete from ergon.ready r where r.ctid = any(array(select place from fresh where key is null))
    returning r.id, r.rank
),
taken as (
    select id, null::smallint as rank from from_due union all select id, rank from from_fresh
),
hold as ({hold})
{content}
union all select d.id, d.key, null, null, null, null, null from due d where d.key is not null
union all select f.id, f.key, f.rank, null, null, null, null from fresh f where f.key is not null
union all select -1, null, null, null, null, null, null where not exists (select 1 from alive)
order by 1
"""

_FAST: Final = {"where": "and r.rank = %(rank)s and r.id > %(floor)s", "order": "r.id"}
_SWEEP: Final = {"where": "", "order": "r.rank, r.id"}

#: By (from the bottom, with the inbox).
CLAIM: Final = {
    (sweep, inbox): _CLAIM.format(
        alive=_ALIVE, hold=_HOLD, content=_INBOX if inbox else _PLAIN, **(_SWEEP if sweep else _FAST)
    )
    for sweep in (False, True)
    for inbox in (False, True)
}

#: Which of these keys nobody else is looking at; held to the end of the transaction.
LOCK_KEYS: Final = """
select c.id from ergon.content c
where c.id = any(%(ids)s) and pg_try_advisory_xact_lock(hashtextextended(c.queue || ':' || c.key, 0))
"""

_CLAIM_KEYED: Final = """
with alive as materialized ({alive}),
fresh as materialized (
    select r.ctid as place, r.id, r.key from ergon.ready r
    where r.queue = %(queue)s and r.rank = any(%(ranks)s) and r.id = any(%(ids)s)
    and exists (select 1 from alive) for update skip locked
),
due as materialized (
    select r.ctid as place, r.id, r.key from ergon.returned r
    where r.id = any(%(ids)s) and r.due_at <= now() and exists (select 1 from alive) for update skip locked
),
there as materialized (select id, key from fresh union all select id, key from due),
elders as materialized (
    select t.id, exists (
        select 1 from ergon.content e where e.queue = %(queue)s and e.key = t.key and e.id < t.id
    ) as behind from there t
),
taken as materialized (
    select t.id, null::smallint as rank, t.key from there t join elders e on e.id = t.id
    where not e.behind and not exists (select 1 from ergon.turn u where u.queue = %(queue)s and u.key = t.key)
),
turns as (
    insert into ergon.turn (queue, key, id, worker, token)
    select %(queue)s, key, id, %(worker)s, %(token)s from taken
),
leaving as materialized (
    select id, false as behind from taken union all select id, behind from elders where behind
),
from_fresh as (
    delete from ergon.ready r
    where r.ctid = any(array(select f.place from fresh f join leaving l on l.id = f.id))
),
from_due as (
    delete from ergon.returned r
    where r.ctid = any(array(select d.place from due d join leaving l on l.id = d.id where not l.behind))
),
waiting as (
    update ergon.returned r set due_at = 'infinity' where r.id in (
        select d.id from due d join elders e on e.id = d.id where e.behind
    )
),
blocked as (
    insert into ergon.returned (id, due_at, queue, key)
    select f.id, 'infinity', %(queue)s, f.key from fresh f join elders e on e.id = f.id where e.behind
),
hold as ({hold})
{content}
order by 1
"""
CLAIM_KEYED: Final = {
    inbox: _CLAIM_KEYED.format(alive=_ALIVE, hold=_HOLD, content=_INBOX if inbox else _PLAIN) for inbox in (False, True)
}

#: Ids of foreign messages, which are known only once they were read; and those of them that are done.
RECOGNISE: Final = """
with given as (select * from unnest(%(ids)s::bigint[], %(names)s::text[]) as g(id, name)),
named as (
    update ergon.content c set transaction_id = g.name from given g where c.id = g.id and c.transaction_id <> g.name
)
select g.id from given g join ergon.inbox i on i.queue = %(queue)s and i.transaction_id = g.name
"""

# -- waking -----------------------------------------------------------------------------------------

#: Seconds until something of the queue becomes due by itself.
DUE: Final = """
select extract(epoch from due_at - now())::float8 from ergon.returned
where queue = %(queue)s and due_at < 'infinity' order by due_at limit 1
"""

SLEEP: Final = """
insert into ergon.sleeper (queue, sleeper, until)
values (%(queue)s, %(sleeper)s, now() + %(seconds)s * interval '1 second')
on conflict (queue, sleeper) do update set until = excluded.until
"""

AWAKE: Final = "delete from ergon.sleeper where queue = %(queue)s and sleeper = %(sleeper)s"

# -- settling ---------------------------------------------------------------------------------------

#: What is to be settled, and the claims that it is held by, locked: whoever takes one away waits for us or was first.
_GIVEN: Final = """
given as materialized (
    select * from unnest(
        %(ids)s::bigint[], %(workers)s::bigint[], %(tokens)s::bigint[]{columns}
    ) as g(id, worker, token{names})
),
claims as materialized (
    select h.worker, h.token, h.ids from ergon.held h
    where (h.worker, h.token) in (select worker, token from given) for {lock}
),
own as materialized (
    select g.* from given g join claims h on h.worker = g.worker and h.token = g.token where g.id = any(h.ids)
)
"""
#: The claim's row goes when nothing is left of it. The client says when that may be so; that it is so is seen here.
_EMPTIED: Final = """
empties as materialized (
    select h.worker, h.token
    from unnest(%(empty_workers)s::bigint[], %(empty_tokens)s::bigint[]) as e(worker, token)
    join ergon.held h on h.worker = e.worker and h.token = e.token
    where not exists (
        select 1 from ergon.content c where c.id = any(h.ids) and not exists (select 1 from own o where o.id = c.id)
    )
),
emptied as (
    delete from ergon.held h using empties e where h.worker = e.worker and h.token = e.token
)
"""
_TURNS: Final = """
turns as (
    delete from ergon.turn t using own o where t.queue = %(queue)s and t.id = o.id and t.worker = o.worker
)
"""
#: What goes back leaves its claim: the same worker may take it again, and the old receipt must be worth nothing.
_LEAVE: Final = """
leave as (
    update ergon.held h
    set ids = array(select id from unnest(h.ids) as i(id) where id not in (select id from own))
    where (h.worker, h.token) in (select worker, token from own)
    and (h.worker, h.token) not in (select worker, token from empties)
)
"""


def _given(columns: str = "", names: str = "", lock: str = "key share") -> str:
    return _GIVEN.format(columns=columns, names=names, lock=lock)


_ACK: Final = """
with {given}, {emptied},
done as (delete from ergon.content c using own o where c.id = o.id returning c.id, c.transaction_id){turns}{marked}
select o.id, o.worker, o.token from own o join done d on d.id = o.id
"""
_MARKED: Final = """,
marked as (
    insert into ergon.inbox (queue, transaction_id) select %(queue)s, transaction_id from done
    where transaction_id <> '' on conflict do nothing
)"""
#: By (some have a key, the inbox is on).
ACK: Final = {
    (keyed, inbox): _ACK.format(
        given=_given(), emptied=_EMPTIED, turns=f", {_TURNS}" if keyed else "", marked=_MARKED if inbox else ""
    )
    for keyed in (False, True)
    for inbox in (False, True)
}

RELEASE: Final = """
with {given}, {emptied}, {leave}, {turns},
back as (
    insert into ergon.returned (id, due_at, queue, key)
    select c.id, now(), c.queue, c.key from own o join ergon.content c on c.id = o.id
)
select id, worker, token from own
""".format(given=_given(lock="no key update"), emptied=_EMPTIED, leave=_LEAVE, turns=_TURNS)

LATER: Final = """
with {given}, {emptied}, {leave}, {turns},
back as (
    insert into ergon.returned (id, due_at, queue, key)
    select c.id, now() + o.delay * interval '1 second', c.queue, c.key
    from own o join ergon.content c on c.id = o.id
),
changed as (
    update ergon.content c set headers = o.headers::jsonb from own o where c.id = o.id and o.headers is not null
)
select id, worker, token from own
""".format(
    given=_given(", %(delays)s::float8[], %(headers)s::text[]", ", delay, headers", lock="no key update"),
    emptied=_EMPTIED,
    leave=_LEAVE,
    turns=_TURNS,
)

DEAD: Final = """
with {given}, {emptied}, {turns},
done as (delete from ergon.content c using own o where c.id = o.id returning c.*),
buried as (
    insert into ergon.dead_letter (
        queue, transaction_id, reason, deliveries, type, key, tenant, correlation, task, error_type, category,
        readable, priority, failure, headers, body
    )
    select d.queue, o.name, o.reason, d.deliveries + 1, o.type, d.key, o.tenant, o.correlation, o.task, o.error_type,
        o.category, o.readable, d.priority, o.failure, d.headers, d.body
    from own o join done d on d.id = o.id
)
select o.id, o.worker, o.token from own o join done d on d.id = o.id
""".format(
    given=_given(
        """,
        %(reasons)s::text[], %(types)s::text[], %(tenants)s::text[], %(correlations)s::text[], %(tasks)s::text[],
        %(error_types)s::text[], %(categories)s::text[], %(readables)s::bool[], %(failures)s::text[],
        %(names)s::text[]""",
        ", reason, type, tenant, correlation, task, error_type, category, readable, failure, name",
    ),
    emptied=_EMPTIED,
    turns=_TURNS,
)

#: Blocking, and in one order for everybody: those who settle must not meet crosswise.
LOCK_SETTLED: Final = """
select pg_advisory_xact_lock(hash)
from (
    select distinct hashtextextended(%(queue)s::int || ':' || key, 0) as hash
    from unnest(%(keys)s::text[]) as k(key) order by 1
) as h
"""

#: The eldest of each key may go on, if it waited behind one that is gone now.
UNBLOCK: Final = """
update ergon.returned r set due_at = now()
from unnest(%(keys)s::text[]) as k(key)
where r.due_at = 'infinity' and r.id = (
    select e.id from ergon.content e where e.queue = %(queue)s and e.key = k.key order by e.id limit 1
)
returning r.id
"""

#: Something has become ready for whoever sleeps.
WAKE: Final = """
select pg_notify('ergon', %(queue)s::text)
where exists (select 1 from ergon.sleeper where queue = %(queue)s and until > now())
"""

# -- what is there ----------------------------------------------------------------------------------

DEPTH: Final = """
select
    (select count(*) from ergon.ready where queue = %(queue)s)
        + (select count(*) from ergon.returned where queue = %(queue)s and due_at <= now()) as ready,
    (select count(*) from ergon.returned where queue = %(queue)s and due_at > now()) as delayed,
    (
        select count(*) from ergon.held h cross join unnest(h.ids) as i(id) join ergon.content c on c.id = i.id
        where h.queue = %(queue)s
    ) as in_flight,
    (select count(*) from ergon.dead_letter where queue = %(queue)s) as dead,
    (select extract(epoch from now() - min(c.created_at))::float8 from ergon.content c where c.id in (
        (select id from ergon.ready where queue = %(queue)s order by rank, id limit 1)
        union all
        (select id from ergon.returned where queue = %(queue)s and due_at <= now() order by id limit 1)
    )) as oldest_age
"""

# -- keeping house ----------------------------------------------------------------------------------

_FORGET: Final = """
with old as (
    select ctid from ergon.{table} where queue = %(queue)s and at < now() - %(seconds)s * interval '1 second'
    limit %(most)s
),
gone as (delete from ergon.{table} where ctid = any(array(select ctid from old)) returning 1)
select count(*) from gone
"""
FORGET_MARKS: Final = _FORGET.format(table="inbox")
FORGET_DEAD: Final = _FORGET.format(table="dead_letter")

FORGET_SLEEPERS: Final = "delete from ergon.sleeper where until < now() - interval '1 minute'"
