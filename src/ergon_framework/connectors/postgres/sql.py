"""All SQL of the queue. Placeholders are psycopg's named ones.

A claim is a worker's exclusive right to process messages. The tables: ready has the messages that were never returned,
by rank (the negated priority); content has those that were; redelivery has the due time of each message in content that
is in no claim, 'infinity' while an older message with the same ordering key blocks it; worker has one row per worker
instance with the end of its lease; claim has the claimed ids; key_lock has the ordering keys of claimed messages; inbox
has the ids of processed transactions; listener has the idle workers to notify.

Three rules hold for all statements. A claim is one row, of a worker and a token, with the ids that it took: every
statement that settles a message names that row and locks it, so that a stale worker changes nothing. A claim takes a
key share lock on its worker's row: a statement that deletes that row knows that no claim is added meanwhile. And a
message that succeeds is never rewritten: it is inserted into ready and deleted there when it is done. A message that
is returned is moved into content, by the same statement that takes it out of its claim. So a message is in one of the
two, a read of both in one statement finds it once, and a row of ready is either in a claim or was never in one.
"""

from __future__ import annotations

from typing import Final

from ergon_framework.connectors.codec import PROGRESS_HEADERS

CHANNEL: Final = "ergon"

# -- start ----------------------------------------------------------------------------------------

SELECT_REVISION: Final = "select version_num from ergon.revision"

SELECT_SETTINGS: Final = """
select name, setting from pg_settings
where name in (
    'fsync', 'synchronous_commit', 'full_page_writes', 'server_version_num', 'synchronous_standby_names'
)
"""

#: Every role sees the number of rows, even if their contents are hidden from it.
COUNT_STANDBYS: Final = "select count(*)::int from pg_stat_replication"

ENSURE_QUEUE: Final = (
    "select coalesce((select id from ergon.queue where name = %(name)s), ergon.create_queue(%(name)s))"
)

# -- a worker instance ------------------------------------------------------------------------------

INSERT_WORKER: Final = """
insert into ergon.worker (alive_until, name) values (now() + %(lease)s * interval '1 second', %(name)s) returning id
"""

RENEW_WORKER: Final = """
update ergon.worker set alive_until = now() + %(lease)s * interval '1 second' where id = %(worker)s returning id
"""

#: Whether the message *i* of a claim *h* still exists. A subselect instead of EXISTS: for EXISTS the server may choose
#: to read the whole table once, and keep that plan when the table has grown.
_MESSAGE_EXISTS: Final = """
case when i.rank is null
    then (select c.id from ergon.content c where c.id = i.id)
    else (select r.id from ergon.ready r where r.queue = h.queue and r.rank = i.rank and r.id = i.id)
end is not null
"""

#: A worker without claims needs no row; a worker with claims keeps its row until its lease is over.
DELETE_WORKER: Final = f"""
with empty_claims as (
    delete from ergon.claim h where h.worker = %(worker)s
    and not exists (select 1 from unnest(h.ids, h.ranks) as i(id, rank) where {_MESSAGE_EXISTS}) returning h.token
),
deleted as (
    delete from ergon.worker w where w.id = %(worker)s and not exists (
        select 1 from ergon.claim h where h.worker = w.id and h.token not in (select token from empty_claims)
    )
)
select 1
"""

#: Those of the instances whose row was never deleted.
SELECT_LIVING_WORKERS: Final = "select id from ergon.worker where id = any(%(workers)s)"

#: After the clock of the server was set back, a lease ends later than it is long. clock_timestamp() is the time when
#: each row is read, not the start of the transaction: a worker that has renewed its lease meanwhile keeps all of it.
_IS_AHEAD: Final = "alive_until > clock_timestamp() + lease + interval '1 second'"

HAS_EXPIRED_OR_AHEAD_WORKER: Final = f"select 1 from ergon.worker where alive_until < now() or {_IS_AHEAD} limit 1"

#: Shortens such a lease to its full length from now: a living worker has time to renew it, a dead one expires after it.
BOUND_LEASES: Final = f"""
update ergon.worker set alive_until = clock_timestamp() + lease where id in (
    select id from ergon.worker where {_IS_AHEAD} for update skip locked
)
"""

DELETE_EXPIRED_WORKERS: Final = """
delete from ergon.worker where id in (
    select id from ergon.worker where alive_until < now() for update skip locked
) returning id
"""

#: Messages that are returned to their queue for the first time, the rows of *back*, are moved into content.
_INSERT_MOVED: Final = """
moved as (
    insert into ergon.content (id, created_at, queue, deliveries, priority, transaction_id, key, headers, body)
    select id, created_at, queue, {deliveries}, -rank, transaction_id, key, {headers}, body from {back}
)
"""


def _render_moved(back: str, deliveries: int = 0, headers: str = "headers") -> str:
    return _INSERT_MOVED.format(back=back, deliveries=deliveries, headers=headers)


#: Deletes the claims that *whose* selects, and returns their messages to their queues; each delivery is counted.
_REAP: Final = """
with lost_claims as (delete from ergon.claim h where {whose} returning h.ids, h.ranks, h.queue),
named as materialized (
    select l.queue, i.id, i.rank from lost_claims l cross join unnest(l.ids, l.ranks) as i(id, rank)
),
key_locks as (delete from ergon.key_lock h where {whose}),
first_time as (
    delete from ergon.ready r using named n where r.queue = n.queue and r.rank = n.rank and r.id = n.id
    returning r.*
),
{moved},
again as (
    update ergon.content c set deliveries = c.deliveries + 1 from named n where n.rank is null and c.id = n.id
    returning c.id, c.queue, c.key
),
redeliveries as (
    insert into ergon.redelivery (id, due_at, queue, key)
    select id, now(), queue, key from first_time union all select id, now(), queue, key from again
    on conflict (id) do nothing
)
select (select count(*) from first_time) + (select count(*) from again)
"""
#: The claims of deleted workers. A separate statement after DELETE_EXPIRED_WORKERS, because it has to see every claim
#: that was made before the deletion.
REAP_WORKERS: Final = _REAP.format(whose="h.worker = any(%(workers)s)", moved=_render_moved("first_time", deliveries=1))
#: Claims of a worker that does not exist, as after a restored backup.
REAP_STRAYS: Final = _REAP.format(
    whose="not exists (select 1 from ergon.worker w where w.id = h.worker)",
    moved=_render_moved("first_time", deliveries=1),
)

#: Whole claims of a living instance whose lease is over.
REAP_CLAIMS: Final = _REAP.format(
    whose="h.worker = %(worker)s and h.token = any(%(tokens)s)", moved=_render_moved("first_time", deliveries=1)
)

#: Releases claims whose answer never arrived, as if they had not been made: the deliveries are not counted.
RELEASE_UNCONFIRMED: Final = """
with lost_claims as (
    delete from ergon.claim h where h.worker = %(worker)s and h.token = any(%(tokens)s)
    returning h.ids, h.ranks, h.queue
),
named as materialized (
    select l.queue, i.id, i.rank from lost_claims l cross join unnest(l.ids, l.ranks) as i(id, rank)
),
key_locks as (delete from ergon.key_lock k where k.worker = %(worker)s and k.token = any(%(tokens)s)),
first_time as (
    delete from ergon.ready r using named n where r.queue = n.queue and r.rank = n.rank and r.id = n.id
    returning r.*
),
{moved}
insert into ergon.redelivery (id, due_at, queue, key)
select id, now(), queue, key from first_time
union all
select c.id, now(), c.queue, c.key from named n join ergon.content c on c.id = n.id where n.rank is null
on conflict (id) do nothing
""".format(moved=_render_moved("first_time"))

# -- claiming ---------------------------------------------------------------------------------------

#: Claims up to *count* due redeliveries and messages of one *rank* (null for all) above the id *floor*. A body over
#: *largest* bytes, or at a delivery number over *last_delivery*, is left out, and *budget* bounds the bytes of all.
#: *inbox* asks whether each id was processed before. *suspects* allows messages whose earlier delivery ended with their
#: worker, which they may have ended. A function of the schema: its second query depends on the first, and both take one
#: round trip this way.
CLAIM: Final = """
select * from ergon.claim_messages(
    %(queue)s::integer, %(count)s::integer, %(worker)s::bigint, %(token)s::bigint, %(rank)s::smallint,
    %(floor)s::bigint, %(inbox)s::boolean, %(largest)s::bigint, %(budget)s::bigint, %(last_delivery)s::integer,
    %(suspects)s::boolean
)
"""

#: The ids whose keys no other worker is claiming; the locks are held to the end of the transaction.
LOCK_KEYS: Final = """
select n.id from unnest(%(ids)s::bigint[], %(keys)s::text[]) as n(id, key)
where pg_try_advisory_xact_lock(hashtextextended(%(queue)s::int || ':' || n.key, 0))
"""

#: One statement, because claimers of one key run one after the other: each sees what the previous one did. A message
#: that has its key's lock is in a claim and is not blocked. Each lookup has a limit as an optimization fence: of a
#: table without statistics the planner expects so few rows that it would read the whole queue for every claim.
CLAIM_KEYED: Final = """
with alive as materialized (
    select id from ergon.worker where id = %(worker)s and alive_until > now() for key share
),
fresh as materialized (
    select r.id, r.rank, r.key from ergon.ready r
    where r.ctid = any(array(
        select f.row_ctid from unnest(%(ids)s::bigint[]) as g(id), unnest(%(ranks)s::smallint[]) as w(rank), lateral (
            select p.ctid as row_ctid from ergon.ready p
            where p.queue = %(queue)s and p.rank = w.rank and p.id = g.id limit 1
        ) as f
    ))
    and not exists (select 1 from ergon.key_lock u where u.queue = %(queue)s and u.key = r.key and u.id = r.id)
    and exists (select 1 from alive) for update of r skip locked
),
due as materialized (
    select r.ctid as row_ctid, r.id, r.key from ergon.redelivery r
    where r.id = any(%(ids)s) and r.due_at <= now() and exists (select 1 from alive) for update skip locked
),
candidates as materialized (select id, key, rank from fresh union all select id, key, null from due),
ordered as materialized (
    select t.id, t.key, t.rank, exists (
        select 1 from ergon.content e where e.queue = %(queue)s and e.key = t.key and e.id < t.id
    ) or exists (
        select 1 from ergon.ready e where e.queue = %(queue)s and e.key = t.key and e.id < t.id
    ) as is_blocked from candidates t
),
taken as materialized (
    select e.id, e.key, e.rank from ordered e
    where not e.is_blocked and not exists (select 1 from ergon.key_lock u where u.queue = %(queue)s and u.key = e.key)
),
key_locks as (
    insert into ergon.key_lock (queue, key, id, worker, token)
    select %(queue)s, key, id, %(worker)s, %(token)s from taken
),
from_due as (
    delete from ergon.redelivery r where r.ctid = any(array(select d.row_ctid from due d join taken t on t.id = d.id))
),
waiting as (
    update ergon.redelivery r set due_at = 'infinity' where r.id in (
        select id from ordered where is_blocked and rank is null
    )
),
blocked as (
    delete from ergon.ready r where r.ctid = any(array(
        select f.row_ctid from ordered e, lateral (
            select p.ctid as row_ctid from ergon.ready p
            where p.queue = %(queue)s and p.rank = e.rank and p.id = e.id limit 1
        ) as f where e.is_blocked
    ))
    returning r.*
),
{moved},
blocked_redeliveries as (
    insert into ergon.redelivery (id, due_at, queue, key) select id, 'infinity', queue, key from blocked
),
claimed as (
    insert into ergon.claim as h (worker, token, queue, low, high, ids, ranks)
    select %(worker)s, %(token)s, %(queue)s, coalesce(min(id) filter (where rank is not null), 0),
        coalesce(max(id) filter (where rank is not null), 0), array_agg(id order by id), array_agg(rank order by id)
    from taken having count(*) > 0
    on conflict (worker, token) do update set
        low = coalesce(least(nullif(h.low, 0), nullif(excluded.low, 0)), 0),
        high = greatest(h.high, excluded.high),
        ids = h.ids || excluded.ids, ranks = h.ranks || excluded.ranks
)
select m.id, m.key, m.rank, 1, m.headers,
    case when octet_length(m.body) <= %(largest)s::bigint then m.body end, %(inbox)s and (
    select i.queue from ergon.inbox i where i.queue = %(queue)s and i.transaction_id = m.transaction_id
) is not null, octet_length(m.body), false, false from taken t, lateral (
    select p.* from ergon.ready p where p.queue = %(queue)s and p.rank = t.rank and p.id = t.id limit 1
) as m
union all
select m.id, m.key, null, m.deliveries + 1, m.headers, case
        when octet_length(m.body) <= %(largest)s::bigint and m.deliveries < %(last_delivery)s::integer then m.body
    end, %(inbox)s and (
    select i.queue from ergon.inbox i where i.queue = %(queue)s and i.transaction_id = m.transaction_id
) is not null, octet_length(m.body), m.deliveries > 0, false
from taken t, lateral (select c.* from ergon.content c where c.id = t.id limit 1) as m
where t.rank is null
order by 1
""".format(moved=_render_moved("blocked"))

#: Stores the ids of third-party messages, known only after decoding, and returns those that the inbox has.
STORE_DECODED_IDS: Final = """
with given as materialized (
    select * from unnest(%(ids)s::bigint[], %(ranks)s::smallint[], %(names)s::text[]) as g(id, rank, name)
),
first_time as (
    update ergon.ready r set transaction_id = g.name from given g
    where r.queue = %(queue)s and r.rank = g.rank and r.id = g.id and r.transaction_id <> g.name
),
again as (
    update ergon.content c set transaction_id = g.name from given g
    where g.rank is null and c.id = g.id and c.transaction_id <> g.name
)
select g.id from given g join ergon.inbox i on i.queue = %(queue)s and i.transaction_id = g.name
"""

#: Moves messages out of the claim that has just taken them to the end of their queue, with the key that their
#: delayed dispatch left out: from now on they have their place in the order of that key.
PROMOTE: Final = """
with claimed as materialized (
    select h.ids from ergon.claim h where h.worker = %(worker)s and h.token = %(token)s for no key update
),
moved as (
    delete from ergon.content c where c.id = any(%(ids)s::bigint[]) and c.id = any((select ids from claimed)::bigint[])
    returning c.*
),
promoted as (
    insert into ergon.ready (queue, rank, transaction_id, key, headers, body)
    select queue, -priority, transaction_id, headers ->> 'ergon-key', headers, body from moved order by id
),
shrunk as (
    update ergon.claim h
    set (ids, ranks) = (
        select array_agg(i.id), array_agg(i.rank) from unnest(h.ids, h.ranks) as i(id, rank)
        where i.id <> all(%(ids)s::bigint[])
    )
    where h.worker = %(worker)s and h.token = %(token)s and not h.ids <@ %(ids)s::bigint[]
),
emptied as (
    delete from ergon.claim h
    where h.worker = %(worker)s and h.token = %(token)s and h.ids <@ %(ids)s::bigint[]
)
select count(*) from moved
"""

# -- notifications ----------------------------------------------------------------------------------

#: Seconds until a deferred message of the queue becomes due.
SECONDS_UNTIL_DUE: Final = """
select extract(epoch from due_at - now())::float8 from ergon.redelivery
where queue = %(queue)s and due_at < 'infinity' order by due_at limit 1
"""

REGISTER_LISTENER: Final = """
insert into ergon.listener (queue, id, until)
values (%(queue)s, %(listener)s, now() + %(seconds)s * interval '1 second')
on conflict (queue, id) do update set until = excluded.until
"""

UNREGISTER_LISTENER: Final = "delete from ergon.listener where queue = %(queue)s and id = %(listener)s"

# -- settling ---------------------------------------------------------------------------------------

#: The receipts to settle and their claims, locked: a statement that deletes a claim waits for this one or was first.
_SELECT_RECEIPTS: Final = """
given as materialized (
    select * from unnest(
        %(ids)s::bigint[], %(ranks)s::smallint[], %(workers)s::bigint[], %(tokens)s::bigint[]{columns}
    ) as g(id, rank, worker, token{names})
),
claims as materialized (
    select h.worker, h.token, h.ids from ergon.claim h
    where (h.worker, h.token) in (select worker, token from given) for {lock}
),
own as materialized (
    select g.* from given g join claims h on h.worker = g.worker and h.token = g.token where g.id = any(h.ids)
)
"""
#: The row of an empty claim is deleted. The client names the candidates; the server checks that they are empty.
_DELETE_EMPTIED: Final = f"""
empties as materialized (
    select h.worker, h.token
    from unnest(%(empty_workers)s::bigint[], %(empty_tokens)s::bigint[]) as e(worker, token)
    join ergon.claim h on h.worker = e.worker and h.token = e.token
    where not exists (
        select 1 from unnest(h.ids, h.ranks) as i(id, rank)
        where case when i.id in (select id from own) then false else {_MESSAGE_EXISTS} end
    )
),
emptied as (
    delete from ergon.claim h using empties e where h.worker = e.worker and h.token = e.token
)
"""
_DELETE_KEY_LOCKS: Final = """
key_locks as (
    delete from ergon.key_lock k using own o where k.queue = %(queue)s and k.id = o.id and k.worker = o.worker
)
"""
#: A returned message leaves its claim: the same worker may claim it again, and the old receipt must be invalid.
_SHRINK_CLAIMS: Final = """
shrunk as (
    update ergon.claim h
    set (ids, ranks) = (
        select coalesce(array_agg(i.id), '{}'), coalesce(array_agg(i.rank), '{}')
        from unnest(h.ids, h.ranks) as i(id, rank) where i.id not in (select id from own)
    )
    where (h.worker, h.token) in (select worker, token from own)
    and (h.worker, h.token) not in (select worker, token from empties)
)
"""
#: A settled message leaves its table, with the given parameters: ready if this is its first claim, otherwise content.
_DELETE_READY: Final = """
first_time as (
    delete from ergon.ready r using own o where r.queue = %(queue)s and r.rank = o.rank and r.id = o.id
    returning {of_ready}
)
"""
_DELETE_CONTENT: Final = """
again as (
    delete from ergon.content c using own o where o.rank is null and c.id = o.id
    returning {of_content}
)
"""


def _render_receipts(columns: str = "", names: str = "", lock: str = "key share") -> str:
    return _SELECT_RECEIPTS.format(columns=columns, names=names, lock=lock)


_ACK: Final = """
with {given}, {emptied}, {first_time}, {again},
done as (select * from first_time union all select * from again){key_locks}{marked}
select id, worker, token from done
"""
_INSERT_MARKS: Final = """,
marked as (
    insert into ergon.inbox (queue, transaction_id) select %(queue)s, transaction_id from done
    where transaction_id <> '' on conflict do nothing
)"""
#: By (whether a message has a key, whether the inbox is on).
ACK: Final = {
    (keyed, inbox): _ACK.format(
        given=_render_receipts(),
        emptied=_DELETE_EMPTIED,
        first_time=_DELETE_READY.format(of_ready="r.id, o.worker, o.token, r.transaction_id"),
        again=_DELETE_CONTENT.format(of_content="c.id, o.worker, o.token, c.transaction_id"),
        key_locks=f", {_DELETE_KEY_LOCKS}" if keyed else "",
        marked=_INSERT_MARKS if inbox else "",
    )
    for keyed in (False, True)
    for inbox in (False, True)
}

RELEASE: Final = """
with {given}, {emptied}, {shrunk}, {key_locks}, {first_time}, {moved},
back as (
    insert into ergon.redelivery (id, due_at, queue, key)
    select id, now(), queue, key from first_time
    union all
    select c.id, now(), c.queue, c.key from own o join ergon.content c on c.id = o.id where o.rank is null
)
select id, worker, token from own
""".format(
    given=_render_receipts(lock="no key update"),
    emptied=_DELETE_EMPTIED,
    shrunk=_SHRINK_CLAIMS,
    key_locks=_DELETE_KEY_LOCKS,
    first_time=_DELETE_READY.format(of_ready="r.*"),
    moved=_render_moved("first_time"),
)

#: Returns messages as the end of a lease does: the delivery is counted, unlike that of a release.
RETURN_CLAIMS: Final = """
with {given}, {emptied}, {shrunk}, {key_locks}, {first_time}, {moved},
again as (
    update ergon.content c set deliveries = c.deliveries + 1 from own o where o.rank is null and c.id = o.id
    returning c.id, c.queue, c.key
),
back as (
    insert into ergon.redelivery (id, due_at, queue, key)
    select id, now(), queue, key from first_time union all select id, now(), queue, key from again
)
select id, worker, token from own
""".format(
    given=_render_receipts(lock="no key update"),
    emptied=_DELETE_EMPTIED,
    shrunk=_SHRINK_CLAIMS,
    key_locks=_DELETE_KEY_LOCKS,
    first_time=_DELETE_READY.format(of_ready="r.*"),
    moved=_render_moved("first_time", deliveries=1),
)


def _render_changed_headers(old: str, new: str) -> str:
    """Render the headers of a deferred message: those that describe its body, such as the key id, stay."""
    progress = ", ".join(f"'{name}'" for name in PROGRESS_HEADERS)
    return f"case jsonb_typeof({old}) when 'object' then {old} - array[{progress}] else '{{}}' end || {new}::jsonb"


DEFER: Final = """
with {given}, {emptied}, {shrunk}, {key_locks}, {first_time}, {moved},
changed as (
    update ergon.content c set headers = {again}
    from own o where o.rank is null and c.id = o.id and o.headers is not null
),
back as (
    insert into ergon.redelivery (id, due_at, queue, key)
    select id, now() + delay * interval '1 second', queue, key from first_time
    union all
    select c.id, now() + o.delay * interval '1 second', c.queue, c.key
    from own o join ergon.content c on c.id = o.id where o.rank is null
)
select id, worker, token from own
""".format(
    given=_render_receipts(", %(delays)s::float8[], %(headers)s::text[]", ", delay, headers", lock="no key update"),
    emptied=_DELETE_EMPTIED,
    shrunk=_SHRINK_CLAIMS,
    key_locks=_DELETE_KEY_LOCKS,
    first_time=_DELETE_READY.format(of_ready="r.*, o.delay, o.headers as changed"),
    moved=_render_moved("first_time", headers=f"coalesce({_render_changed_headers('headers', 'changed')}, headers)"),
    again=_render_changed_headers("c.headers", "o.headers"),
)

_DEAD_LETTER_COLUMNS: Final = """
    o.worker, o.token, o.name, o.reason, o.type, o.tenant, o.correlation, o.task, o.error_type, o.category,
    o.readable, o.failure
"""
DEAD_LETTER: Final = """
with {given}, {emptied}, {key_locks}, {first_time}, {again},
done as (select * from first_time union all select * from again),
dead_lettered as (
    insert into ergon.dead_letter (
        queue, transaction_id, reason, deliveries, type, key, tenant, correlation, task, error_type, category,
        readable, priority, failure, headers, body
    )
    select queue, name, reason, deliveries, type, key, tenant, correlation, task, error_type, category, readable,
        priority, failure, headers, body
    from done
)
select id, worker, token from done
""".format(
    given=_render_receipts(
        """,
        %(reasons)s::text[], %(types)s::text[], %(tenants)s::text[], %(correlations)s::text[], %(tasks)s::text[],
        %(error_types)s::text[], %(categories)s::text[], %(readables)s::bool[], %(failures)s::text[],
        %(names)s::text[]""",
        ", reason, type, tenant, correlation, task, error_type, category, readable, failure, name",
    ),
    emptied=_DELETE_EMPTIED,
    key_locks=_DELETE_KEY_LOCKS,
    first_time=_DELETE_READY.format(
        of_ready="r.id, r.queue, r.key, 1 as deliveries, -r.rank as priority, r.headers, r.body, "
        f"{_DEAD_LETTER_COLUMNS}"
    ),
    again=_DELETE_CONTENT.format(
        of_content=f"c.id, c.queue, c.key, c.deliveries + 1, c.priority, c.headers, c.body, {_DEAD_LETTER_COLUMNS}"
    ),
)

#: Blocking, and always in the same order: concurrent settlements must not deadlock.
LOCK_SETTLED_KEYS: Final = """
select pg_advisory_xact_lock(hash)
from (
    select distinct hashtextextended(%(queue)s::int || ':' || key, 0) as hash
    from unnest(%(keys)s::text[]) as k(key) order by 1
) as h
"""

#: The oldest message of each key becomes ready, if it was blocked by one that is settled now.
UNBLOCK_KEYS: Final = """
update ergon.redelivery r set due_at = now()
from unnest(%(keys)s::text[]) as k(key)
where r.due_at = 'infinity' and r.id = (
    select e.id from ergon.content e where e.queue = %(queue)s and e.key = k.key order by e.id limit 1
)
and not exists (select 1 from ergon.ready e where e.queue = %(queue)s and e.key = k.key and e.id < r.id)
returning r.id
"""

#: Notifies the listeners that a message has become ready.
NOTIFY_LISTENERS: Final = """
select pg_notify('ergon', %(queue)s::text)
where exists (select 1 from ergon.listener where queue = %(queue)s and until > now())
"""

# -- inspection -------------------------------------------------------------------------------------

DEPTH: Final = f"""
with claimed as materialized (
    select i.id, i.rank from ergon.claim h cross join unnest(h.ids, h.ranks) as i(id, rank)
    where h.queue = %(queue)s and {_MESSAGE_EXISTS}
)
select
    (select count(*) from ergon.ready where queue = %(queue)s)
        - (select count(*) from claimed where rank is not null)
        + (select count(*) from ergon.redelivery where queue = %(queue)s and due_at <= now()) as ready,
    (select count(*) from ergon.redelivery where queue = %(queue)s and due_at > now()) as delayed,
    (select count(*) from claimed) as in_flight,
    (select count(*) from ergon.dead_letter where queue = %(queue)s) as dead,
    (select extract(epoch from now() - min(o.created_at))::float8 from (
        (
            select created_at from ergon.ready where queue = %(queue)s and id not in (select id from claimed)
            order by rank, id limit 1
        )
        union all
        (
            select c.created_at from ergon.redelivery r join ergon.content c on c.id = r.id
            where r.queue = %(queue)s and r.due_at <= now() order by r.id limit 1
        )
    ) as o) as oldest_age
"""

# -- clean-up ---------------------------------------------------------------------------------------

DELETE_EXPIRED_LISTENERS: Final = "delete from ergon.listener where until < now() - interval '1 minute'"
