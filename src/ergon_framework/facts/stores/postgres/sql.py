"""The SQL of the PostgreSQL fact store, except that of retention. Placeholders are psycopg's.

A log is the sequence of facts from one zone to another; its row has the last offset and the last dropped one. An epoch
names the history of a store, and changes when a backup is restored. A consumer is a reader with stored state (deferred
facts, delivery counts, claims in flight); its owner is the process that reads for it, and each takeover by another
process raises its generation. A content is the bytes of all artifacts with one digest. The token identifies the store
as this process verified it: it changes when the server restarts or an epoch begins.

Only ergon.append_facts assigns offsets. A reader reads the row of the log first, and then facts after the dropped
offset in that row: rows of dropped facts may still exist.

Every write of a consumer's owner begins with the row of its reader, selected by the number of its generation. A
takeover raises the number under the lock of that row, so that a previous owner finds no row and writes nothing.
"""

from __future__ import annotations

from typing import Final

SELECT_CONSUMER: Final = """
select s.id, s.queue from ergon.fact_consumer s
where s.from_zone = %(from)s and s.to_zone = %(to)s and s.reader = %(reader)s
"""

LIST_READERS: Final = """
select s.reader from ergon.fact_consumer s
where s.from_zone = %(from)s and s.to_zone = %(to)s order by s.reader limit 20
"""

INSERT_CONSUMER: Final = """
insert into ergon.fact_consumer (from_zone, to_zone, reader, queue)
select %(from)s, %(to)s, %(reader)s,
    coalesce((select q.id from ergon.queue q where q.name = %(name)s), ergon.create_queue(%(name)s))
on conflict (from_zone, to_zone, reader) do nothing
"""

# -- takeover ---------------------------------------------------------------------------------------------

LOCK_CONSUMER: Final = "select s.epoch from ergon.fact_consumer s where s.id = %(consumer)s for update"

#: Claims of the previous owner count as delivered; their outcome is unknown.
COUNT_LOST_CLAIMS: Final = """
insert into ergon.fact_consumer_state as a (consumer, fact_offset, deliveries)
select s.id, h.fact_offset, 1
from ergon.fact_consumer s cross join lateral (select distinct unnest(s.in_flight) as fact_offset) as h
where s.id = %(consumer)s and (
    h.fact_offset > %(cursor)s or exists (
        select 1 from ergon.fact_consumer_state k
        where k.consumer = s.id and k.fact_offset = h.fact_offset and k.due_at is not null
    )
)
on conflict (consumer, fact_offset) do update set deliveries = a.deliveries + 1 where not a.settled
"""
DELETE_OBSOLETE: Final = """
delete from ergon.fact_consumer_state where consumer = %(consumer)s and fact_offset <= %(cursor)s and due_at is null
"""
NEXT_GENERATION: Final = """
update ergon.fact_consumer set generation = generation + 1, claim_sequence = 0, in_flight = '{}' where id = %(consumer)s
returning generation, replays
"""
SELECT_STATE: Final = """
select fact_offset, deliveries, settled, extract(epoch from due_at)::float8, envelope, body
from ergon.fact_consumer_state where consumer = %(consumer)s
"""

# -- owner ------------------------------------------------------------------------------------------------

#: Two updates may arrive in another order than they were created: the one with the later sequence number is valid.
_UPDATE_CLAIMS: Final = """
update ergon.fact_consumer s
set in_flight = case when s.claim_sequence < %(sequence)s then %(claims)s::bigint[] else s.in_flight end,
    claim_sequence = greatest(s.claim_sequence, %(sequence)s),
    epoch = coalesce(%(epoch)s, s.epoch)
"""
FENCE: Final = f"""
{_UPDATE_CLAIMS} where s.id = %(consumer)s and s.generation = %(generation)s returning s.replays
"""

#: Does not wait for the disk: a killed process loses nothing, and a server crash loses only a delivery count.
CLAIM: Final = f"""
{_UPDATE_CLAIMS} from (select set_config('synchronous_commit', 'off', true) as setting) as quick
where s.id = %(consumer)s and s.generation = %(generation)s returning s.replays, quick.setting
"""

CHECK_OWNER: Final = (
    "select s.replays from ergon.fact_consumer s where s.id = %(consumer)s and s.generation = %(generation)s"
)

LIST_REPLAYED: Final = """
select a.fact_offset, extract(epoch from a.due_at)::float8, a.envelope, a.body from ergon.fact_consumer_state a
where a.consumer = %(consumer)s and a.replay > %(known)s and a.replay <= %(latest)s and a.due_at is not null
order by a.replay
"""

DEFER: Final = """
insert into ergon.fact_consumer_state as a (consumer, fact_offset, deliveries, due_at, envelope, body)
select %(consumer)s, g.fact_offset, g.deliveries, to_timestamp(g.due), g.envelope, g.body
from unnest(
    %(offsets)s::bigint[], %(deliveries)s::integer[], %(dues)s::float8[], %(envelopes)s::text[], %(bodies)s::bytea[]
) as g(fact_offset, deliveries, due, envelope, body)
on conflict (consumer, fact_offset) do update set due_at = excluded.due_at, envelope = excluded.envelope,
    body = excluded.body, settled = false, replay = null
"""

_CLEARED_COLUMNS: Final = "settled = true, due_at = null, replay = null, envelope = null, body = null"

#: Marked as settled and not deleted: after the cursor the log would deliver the fact again.
ACK: Final = f"""
update ergon.fact_consumer_state set {_CLEARED_COLUMNS}
where consumer = %(consumer)s and fact_offset = any(%(offsets)s::bigint[]) and due_at is not null
"""  # noqa: S608 - constants

#: One dead letter per fact, also if the request is repeated after a lost answer: settled facts are skipped.
DEAD_LETTER: Final = f"""
with given as materialized (
    select * from unnest(
        %(offsets)s::bigint[], %(was_deferred)s::bool[], %(names)s::text[], %(reasons)s::text[], %(ats)s::float8[],
        %(deliveries)s::integer[], %(types)s::text[], %(keys)s::text[], %(tenants)s::text[], %(correlations)s::text[],
        %(tasks)s::text[], %(error_types)s::text[], %(categories)s::text[], %(failures)s::text[], %(headers)s::text[],
        %(bodies)s::bytea[]
    ) as g(fact_offset, was_deferred, name, reason, at, deliveries, type, key, tenant, correlation, task, error_type,
        category, failure, headers, body)
), fresh as (
    insert into ergon.fact_consumer_state as a (consumer, fact_offset, settled)
    select %(consumer)s, g.fact_offset, true from given g where not g.was_deferred
    on conflict (consumer, fact_offset) do update set settled = true where not a.settled and a.due_at is null
    returning a.fact_offset
), again as (
    update ergon.fact_consumer_state a set {_CLEARED_COLUMNS} from given g
    where g.was_deferred and a.consumer = %(consumer)s and a.fact_offset = g.fact_offset and a.due_at is not null
    returning a.fact_offset
)
insert into ergon.dead_letter (
    queue, transaction_id, reason, at, deliveries, type, key, tenant, correlation, task, error_type, category, readable,
    failure, headers, body
)
select %(queue)s, g.name, g.reason, to_timestamp(g.at), g.deliveries, g.type, g.key, g.tenant, g.correlation, g.task,
    g.error_type, g.category, true, g.failure, g.headers::jsonb, g.body
from given g where g.fact_offset in (select fact_offset from fresh union all select fact_offset from again)
order by g.fact_offset
"""  # noqa: S608 - constants

#: The cursor is beyond these offsets, which makes the rows redundant.
DELETE_CONFIRMED: Final = """
delete from ergon.fact_consumer_state where consumer = %(consumer)s and settled and fact_offset <= %(confirmed)s
"""

RELEASE: Final = """
insert into ergon.fact_consumer_state as a (consumer, fact_offset, settled)
select %(consumer)s, o, true from unnest(%(offsets)s::bigint[]) as o
on conflict (consumer, fact_offset) do update set settled = true where a.due_at is null
"""

# -- dead letters -----------------------------------------------------------------------------------------

#: One statement, so that a crash loses nothing. The row of the reader is locked, so that numbers are in order.
REPLAY: Final = """
with dead as (
    delete from ergon.dead_letter where queue = %(queue)s and id = %(id)s returning id
), counted as (
    update ergon.fact_consumer set replays = replays + 1 where id = %(consumer)s and exists (select 1 from dead)
    returning replays
)
insert into ergon.fact_consumer_state as a (consumer, fact_offset, due_at, replay, envelope, body)
select %(consumer)s, %(offset)s, to_timestamp(%(due)s), c.replays, %(envelope)s, %(body)s from counted c
on conflict (consumer, fact_offset) do update set deliveries = 0, settled = false, due_at = excluded.due_at,
    replay = excluded.replay, envelope = excluded.envelope, body = excluded.body
returning 1
"""

COUNT_DEAD_LETTERS: Final = "select count(*) from ergon.dead_letter where queue = %(queue)s"

# -- another epoch ----------------------------------------------------------------------------------------

#: For a reader that accepts a new epoch. Offsets mean other facts from now on; the state of the old ones would apply to
#: the new ones.
DELETE_STATE: Final = "delete from ergon.fact_consumer_state where consumer = %(consumer)s"
RESET_CONSUMER: Final = """
update ergon.fact_consumer set generation = generation + 1, epoch = null, claim_sequence = 0, in_flight = '{}'
where id = %(consumer)s
"""


#: A number that no queue can have: it identifies listeners for facts.
FACT_LISTENER_QUEUE: Final = -1

# -- the store ------------------------------------------------------------------------------------------

#: Whether the store is the one that its row was written for. Not valid on a standby.
VERIFY_STORE: Final = """
select ergon.fact_token(), e.epoch, s.side,
    s.system_identifier = c.system_identifier and s.database = d.oid and s.row_xid = s.xmin::text::bigint
    and s.timeline = left(pg_walfile_name(pg_current_wal_lsn()), 8)
from ergon.fact_store s join ergon.fact_epochs e on e.id = s.epoch, pg_control_system() c, pg_catalog.pg_database d
where d.datname = current_database()
"""
IN_RECOVERY: Final = "select pg_is_in_recovery()"

#: Newest first.
EPOCHS: Final = """
select e.epoch, e.began_at, e.reason, e.actor, s.epoch is not null
from ergon.fact_epochs e left join ergon.fact_store s on s.epoch = e.id order by e.id desc
"""

BEGIN_EPOCH: Final = "select ergon.begin_fact_epoch(%(was)s, %(side)s, %(why)s, %(by)s)"

#: Appends or forwards any batch. Numbered placeholders, because all arguments and the result are text: $1 token of the
#: store, which shows that the caller knows its identity; $2 pairs of zones and $3 facts, as JSON; $4 whether facts are
#: forwarded; $5 time in ms; $6 maximum number of facts and $7 of bytes; $8 whether commits must be durable; $9 whether
#: ids repeat in the batch.
APPEND: Final = "select ergon.append_facts($1, $2, $3, $4, $5, $6, $7, $8, $9)"

#: For a regular batch, by columns; returns null if the batch is irregular, and nothing was done. $1 token; $2 pairs; $3
#: whether facts are forwarded; $4 time in ms; $5 maximum number of facts and $6 of bytes; $7 whether commits must be
#: durable; then one text per column: $8 ids, $9 digests, $10 production times, $11 correlations, $12 causations, $13
#: labels, $14 subjects, $15 predicates, $16 objects, $17 running sums of bytes, $18 storage times of forwarded facts.
APPEND_REGULAR: Final = """
select ergon.append_plain_facts($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)
"""

#: For the common case: one fact without an artifact, with a new id, of a pair that has facts, without bounds. In every
#: other case it does nothing and returns null, and the function decides. Two concurrent appends of the same id both get
#: here, and the insert of the second one fails. $1 token; $2 from zone; $3 to zone; $4 highest offset that this process
#: knows: a lower one in the database means a restored backup; $5 epoch; $6 message id; $7 digest in hexadecimal; $8
#: time in ms; $9 production time in ms; $10 subject; $11 predicate; $12 object; $13 bytes of the fact; $14 whether
#: commits must be durable; $15 correlation; $16 causation; $17 labels.
APPEND_ONE: Final = """
with l as materialized (
    select f.id, f.epoch, f.last + 1 as new_offset, f.total + $13::bigint as total
    from ergon.fact_log f join ergon.fact_epochs e on e.id = f.epoch
    where f.from_zone = $2 and f.to_zone = $3 and f.last >= $4::bigint and not f.forwarded and e.epoch = $5
        and ergon.fact_token() = $1 and current_setting('transaction_isolation') = 'read committed'
        and (current_setting('synchronous_commit') <> 'off' or not $14::boolean)
        and (select i.log from ergon.fact_ids i where i.from_zone = $2 and i.message_id = $6) is null
    for update of f
),
new_id as (
    insert into ergon.fact_ids (from_zone, message_id, digest, log, fact_offset, epoch, kept_at)
    select $2, $6, decode($7, 'hex'), l.id, l.new_offset, l.epoch, $8::bigint from l
),
new_fact as (
    insert into ergon.facts (
        log, fact_offset, stored_at, total, produced_at, message_id, correlation_id, causation_id, labels, subject,
        predicate, object_json, digest
    )
    select l.id, l.new_offset, $8::bigint, l.total, $9::bigint, $6, $15, $16, $17, $10, $11, $12, decode($7, 'hex')
    from l
),
advanced as (
    update ergon.fact_log f set last = l.new_offset, total = l.total from l where f.id = l.id
)
select (select l.new_offset::text from l), (
    select ergon.notify_listeners(-1) from l
    where exists (select 1 from ergon.listener s where s.queue = -1 and s.until > now())
)
"""

GET_CONFIRMATION: Final = """
select i.fact_offset, e.epoch, encode(i.digest, 'hex'), l.forwarded
from ergon.fact_ids i join ergon.fact_epochs e on e.id = i.epoch join ergon.fact_log l on l.id = i.log
where i.from_zone = %(zone)s and i.message_id = %(id)s
"""

# -- reading --------------------------------------------------------------------------------------------

#: All values that decide the result of a reader's call.
STATE: Final = """
select ergon.fact_token(), l.id, e.epoch, l.last, l.dropped, r.fact_offset
from (select 1) one
left join ergon.fact_log l on l.from_zone = %(from)s and l.to_zone = %(to)s
left join ergon.fact_epochs e on e.id = l.epoch
left join ergon.fact_readers r on r.log = l.id and r.reader = %(reader)s
"""

INSERT_LOG: Final = """
insert into ergon.fact_log (from_zone, to_zone) values (%(from)s, %(to)s) on conflict do nothing
"""

#: Under a lock of the log: a concurrent retention run drops its facts before this statement or not at all.
REGISTER_READER: Final = """
insert into ergon.fact_readers (log, reader, fact_offset, total)
select l.id, %(reader)s, l.dropped, l.dropped_total from (
    select id, dropped, dropped_total from ergon.fact_log where from_zone = %(from)s and to_zone = %(to)s for share
) as l
on conflict do nothing
"""

#: One caller at a time counts the readers of a zone. Two statements: the snapshot of the first is from before the lock.
LOCK_READERS: Final = "select pg_advisory_xact_lock(hashtextextended(%(zone)s, 7))"
COUNT_READERS: Final = """
select count(*), coalesce(
    bool_or(l.from_zone = %(from)s and l.to_zone = %(to)s and r.reader = %(reader)s), false
)
from ergon.fact_readers r join ergon.fact_log l on l.id = r.log
where case when starts_with(r.reader, %(sender)s) then l.from_zone else l.to_zone end = %(zone)s
"""

#: Bounded by number and by bytes after the first fact: objects may be large.
FETCH: Final = """
select f.fact_offset, f.stored_at, f.message_id, f.produced_at, f.correlation_id, f.causation_id, f.labels, f.subject,
    f.predicate, f.object_json, f.digest
from ergon.facts f
where f.log = %(log)s and f.fact_offset > %(after)s and f.fact_offset <= %(last)s and f.total <= %(bytes)s + (
    select b.total from ergon.facts b where b.log = %(log)s and b.fact_offset = %(after)s + 1
)
order by f.fact_offset limit %(limit)s
"""

CONFIRM: Final = """
update ergon.fact_readers r set fact_offset = f.fact_offset, total = f.total, confirmed_at = now()
from ergon.facts f
where r.log = %(log)s and r.reader = %(reader)s and r.fact_offset < %(offset)s
    and f.log = %(log)s and f.fact_offset = %(offset)s
"""

#: CONFIRM for a reader whose consumer store is in that generation; returns a row if it is.
CONFIRM_IF_OWNER: Final = """
with owner as (
    select s.id from ergon.fact_consumer s where s.id = %(consumer)s and s.generation = %(generation)s
), confirmed as (
    update ergon.fact_readers r set fact_offset = f.fact_offset, total = f.total, confirmed_at = now()
    from ergon.facts f, owner
    where r.log = %(log)s and r.reader = %(reader)s and r.fact_offset < %(offset)s
        and f.log = %(log)s and f.fact_offset = %(offset)s
)
select id from owner
"""

FIRST_SINCE: Final = """
select f.fact_offset from ergon.facts f
where f.log = %(log)s and f.fact_offset > %(dropped)s and f.stored_at >= %(moment)s order by f.fact_offset limit 1
"""

RETIRE_READER: Final = """
with retired as (
    delete from ergon.fact_readers r using ergon.fact_log l
    where l.from_zone = %(from)s and l.to_zone = %(to)s and r.log = l.id and r.reader = %(reader)s
    returning l.from_zone, l.to_zone, r.reader, r.fact_offset, l.last
)
insert into ergon.fact_reader_audit (from_zone, to_zone, reader, fact_offset, last, actor)
select from_zone, to_zone, reader, fact_offset, last, %(by)s from retired returning id
"""

#: Forwarding locks the row of the log, so that its end cannot change while this statement runs.
ADOPT_EPOCH: Final = """
with l as materialized (
    select id from ergon.fact_log
    where from_zone = %(from)s and to_zone = %(to)s and forwarded and last = %(offset)s for update
),
named as (
    insert into ergon.fact_epochs (epoch, reason, actor) select %(epoch)s, %(why)s, %(by)s from l
    on conflict (epoch) do update
    set reason = concat_ws('; ', nullif(fact_epochs.reason, ''), excluded.reason),
        actor = concat_ws('; ', nullif(fact_epochs.actor, ''), excluded.actor)
    returning id
)
update ergon.fact_log f set epoch = named.id from l, named where f.id = l.id returning f.last
"""

LOG_STATES: Final = """
select l.from_zone, l.to_zone, l.forwarded, e.epoch, l.last, l.total, l.dropped, l.dropped_total,
    r.reader, r.fact_offset, r.total,
    (select f.stored_at from ergon.facts f where f.log = l.id and f.fact_offset = r.fact_offset + 1)
from ergon.fact_log l
left join ergon.fact_epochs e on e.id = l.epoch left join ergon.fact_readers r on r.log = l.id
where l.last > 0 or r.reader is not null
order by l.id, r.reader
"""

# -- artifacts ------------------------------------------------------------------------------------------

SELECT_ARTIFACT: Final = """
select o.id, encode(o.digest, 'hex'), o.size, o.zone from ergon.fact_objects o
where o.bucket = %(bucket)s and o.key = %(key)s and o.zone = %(zone)s
"""

#: For reading: artifacts that facts of the store's own zones reference may have no owner.
SELECT_READABLE_ARTIFACT: Final = """
select o.id, encode(o.digest, 'hex'), o.size, o.zone from ergon.fact_objects o
where o.bucket = %(bucket)s and o.key = %(key)s and (
    o.zone = %(zone)s or o.zone = '' and exists (
        select 1 from ergon.fact_object_uses u join ergon.fact_log l on l.id = u.log
        where u.object = o.id and l.from_zone = %(zone)s
    )
)
order by o.zone desc limit 1
"""

#: Zone and id of one retained fact that references the artifact.
REFERENCING_FACT: Final = """
select l.from_zone, f.message_id from ergon.fact_object_uses u
join ergon.fact_log l on l.id = u.log
join ergon.facts f on f.log = u.log and f.fact_offset = u.fact_offset
where u.object = %(object)s order by u.log, u.fact_offset limit 1
"""

#: The pairs of zones of all retained facts that reference the artifact.
REFERENCING_PAIRS: Final = """
select distinct l.from_zone, l.to_zone from ergon.fact_object_uses u join ergon.fact_log l on l.id = u.log
where u.object = %(object)s
"""

INSERT_CONTENT: Final = """
insert into ergon.fact_contents (digest, size, created_at) values (decode(%(digest)s, 'hex'), %(size)s, %(now)s)
on conflict do nothing
"""
#: Removal takes the exclusive lock. The lock ends with the session, also after a crash.
LOCK_CONTENT_SHARED: Final = "select pg_advisory_xact_lock_shared(hashtextextended(%(digest)s, 6))"
#: Waits until no transaction holds the content; ends with the transaction, so it is held only briefly.
LOCK_CONTENT: Final = "select pg_advisory_xact_lock(hashtextextended(%(digest)s, 6))"
CONTENT_EXISTS: Final = "select 1 from ergon.fact_contents where digest = decode(%(digest)s, 'hex')"

LOCK_USED_BYTES: Final = """
select r.content_bytes + coalesce((select sum(l.total - l.dropped_total) from ergon.fact_log l), 0)
from (select content_bytes from ergon.fact_usage for update) as r
"""
USED_BYTES: Final = LOCK_USED_BYTES.replace(" for update", "")
CONTENT_BYTES: Final = "select content_bytes from ergon.fact_usage"
IS_CONTENT_COMMITTED: Final = "select committed from ergon.fact_contents where digest = decode(%(digest)s, 'hex')"
COMMIT_CONTENT: Final = """
with changed as (
    update ergon.fact_contents set committed = true
    where digest = decode(%(digest)s, 'hex') and not committed returning size
)
update ergon.fact_usage set content_bytes = content_bytes + (select size from changed)
where exists (select 1 from changed)
"""
INSERT_ARTIFACT: Final = """
insert into ergon.fact_objects (zone, bucket, key, digest, size, stored_at)
values (%(zone)s, %(bucket)s, %(key)s, decode(%(digest)s, 'hex'), %(size)s, %(now)s)
on conflict do nothing returning id
"""

# -- retention ------------------------------------------------------------------------------------------

LOG_IDS: Final = "select id from ergon.fact_log order by id"
DROP_FACTS: Final = "select ergon.drop_facts(%(log)s, %(before)s)"

#: Names are locked first, so that the next statement sees every fact that references one of them.
LOCK_UNREFERENCED_ARTIFACTS: Final = """
select o.id from ergon.fact_objects o
where o.stored_at < %(before)s and o.id > %(behind)s
    and not exists (select 1 from ergon.fact_object_uses u where u.object = o.id)
order by o.id limit %(part)s for update skip locked
"""
DELETE_ARTIFACTS: Final = """
delete from ergon.fact_objects o
where o.id = any(%(ids)s) and not exists (select 1 from ergon.fact_object_uses u where u.object = o.id)
returning o.id
"""

UNUSED_CONTENTS: Final = """
select encode(c.digest, 'hex') from ergon.fact_contents c
where c.created_at < %(before)s and not exists (select 1 from ergon.fact_objects o where o.digest = c.digest)
"""
TRY_LOCK_CONTENT: Final = "select pg_try_advisory_xact_lock(hashtextextended(%(digest)s, 6))"
DELETE_CONTENT: Final = """
with deleted as (
    delete from ergon.fact_contents c where c.digest = decode(%(digest)s, 'hex') returning c.size, c.committed
)
update ergon.fact_usage set content_bytes = content_bytes - (select size from deleted where committed)
where exists (select 1 from deleted where committed)
"""
IS_CONTENT_UNUSED: Final = """
select 1 from ergon.fact_contents c
where c.digest = decode(%(digest)s, 'hex')
    and not exists (select 1 from ergon.fact_objects o where o.digest = c.digest)
"""

#: Never the id of a retained fact. Within a log, times and offsets grow together: the loop ends after a batch with
#: few ids to delete. The result is the number of deleted and of read ids, and the time of the last one.
DELETE_IDS: Final = """
with old as materialized (
    select i.row_ctid, i.kept_at, i.fact_offset <= l.dropped as is_dropped
    from ergon.fact_log l cross join lateral (
        select k.ctid as row_ctid, k.kept_at, k.fact_offset from ergon.fact_ids k
        where k.log = l.id and k.kept_at >= %(since)s and k.kept_at < %(latest)s
        order by k.log, k.kept_at limit %(part)s
    ) i
    where l.id = %(log)s
),
deleted as (
    delete from ergon.fact_ids where ctid = any (array(select row_ctid from old where is_dropped)) returning 1
)
select (select count(*) from deleted), count(*), max(kept_at) from old
"""
