"""The statements of the PostgreSQL consumer store. Placeholders are psycopg's.

Every write of an owner begins with the row of its reader, selected by the number of its generation. A takeover raises
the number under the lock of that row, so that a previous owner finds no row and writes nothing.
"""

from __future__ import annotations

from typing import Final

SELECT_CONSUMER: Final = """
select s.id, s.queue from ergon.fact_side s
where s.from_zone = %(from)s and s.to_zone = %(to)s and s.reader = %(reader)s
"""

LIST_READERS: Final = """
select s.reader from ergon.fact_side s where s.from_zone = %(from)s and s.to_zone = %(to)s order by s.reader limit 20
"""

INSERT_CONSUMER: Final = """
insert into ergon.fact_side (from_zone, to_zone, reader, queue)
select %(from)s, %(to)s, %(reader)s,
    coalesce((select q.id from ergon.queue q where q.name = %(name)s), ergon.make_queue(%(name)s))
on conflict (from_zone, to_zone, reader) do nothing
"""

# -- takeover ---------------------------------------------------------------------------------------------

LOCK_CONSUMER: Final = "select s.epoch from ergon.fact_side s where s.id = %(side)s for update"

#: Claims of the previous owner count as delivered; their outcome is unknown.
COUNT_LOST_CLAIMS: Final = """
insert into ergon.fact_aside as a (side, fact_offset, deliveries)
select s.id, h.fact_offset, 1
from ergon.fact_side s cross join lateral (select distinct unnest(s.held) as fact_offset) as h
where s.id = %(side)s and (
    h.fact_offset > %(cursor)s or exists (
        select 1 from ergon.fact_aside k
        where k.side = s.id and k.fact_offset = h.fact_offset and k.due_at is not null
    )
)
on conflict (side, fact_offset) do update set deliveries = a.deliveries + 1 where not a.settled
"""
DELETE_OBSOLETE: Final = """
delete from ergon.fact_aside where side = %(side)s and fact_offset <= %(cursor)s and due_at is null
"""
NEXT_GENERATION: Final = """
update ergon.fact_side set generation = generation + 1, turn = 0, held = '{}' where id = %(side)s
returning generation, replays
"""
SELECT_STATE: Final = """
select fact_offset, deliveries, settled, extract(epoch from due_at)::float8, envelope, body
from ergon.fact_aside where side = %(side)s
"""

# -- owner ------------------------------------------------------------------------------------------------

#: Two updates may arrive in another order than they were created: the one with the later turn is valid.
_UPDATE_CLAIMS: Final = """
update ergon.fact_side s
set held = case when s.turn < %(turn)s then %(held)s::bigint[] else s.held end, turn = greatest(s.turn, %(turn)s),
    epoch = coalesce(%(epoch)s, s.epoch)
"""
FENCE: Final = f"""
{_UPDATE_CLAIMS} where s.id = %(side)s and s.generation = %(generation)s returning s.replays
"""

#: Does not wait for the disk: a killed process loses nothing, and a server crash loses only a delivery count.
CLAIM: Final = f"""
{_UPDATE_CLAIMS} from (select set_config('synchronous_commit', 'off', true) as setting) as quick
where s.id = %(side)s and s.generation = %(generation)s returning s.replays, quick.setting
"""

CHECK_OWNER: Final = "select s.replays from ergon.fact_side s where s.id = %(side)s and s.generation = %(generation)s"

LIST_REPLAYED: Final = """
select a.fact_offset, extract(epoch from a.due_at)::float8, a.envelope, a.body from ergon.fact_aside a
where a.side = %(side)s and a.replay > %(known)s and a.replay <= %(latest)s and a.due_at is not null order by a.replay
"""

DEFER: Final = """
insert into ergon.fact_aside as a (side, fact_offset, deliveries, due_at, envelope, body)
select %(side)s, g.fact_offset, g.deliveries, to_timestamp(g.due), g.envelope, g.body
from unnest(
    %(offsets)s::bigint[], %(deliveries)s::integer[], %(dues)s::float8[], %(envelopes)s::text[], %(bodies)s::bytea[]
) as g(fact_offset, deliveries, due, envelope, body)
on conflict (side, fact_offset) do update set due_at = excluded.due_at, envelope = excluded.envelope,
    body = excluded.body, settled = false, replay = null
"""

_CLEARED_COLUMNS: Final = "settled = true, due_at = null, replay = null, envelope = null, body = null"

#: Marked as settled and not deleted: after the cursor the log would deliver the fact again.
ACK: Final = f"""
update ergon.fact_aside set {_CLEARED_COLUMNS}
where side = %(side)s and fact_offset = any(%(offsets)s::bigint[]) and due_at is not null
"""  # noqa: S608 - constants

#: One dead letter per fact, also if the request is repeated after a lost answer: settled facts are skipped.
DEAD_LETTER: Final = f"""
with given as materialized (
    select * from unnest(
        %(offsets)s::bigint[], %(asides)s::bool[], %(names)s::text[], %(reasons)s::text[], %(ats)s::float8[],
        %(deliveries)s::integer[], %(types)s::text[], %(keys)s::text[], %(tenants)s::text[], %(correlations)s::text[],
        %(tasks)s::text[], %(error_types)s::text[], %(categories)s::text[], %(failures)s::text[], %(headers)s::text[],
        %(bodies)s::bytea[]
    ) as g(fact_offset, aside, name, reason, at, deliveries, type, key, tenant, correlation, task, error_type, category,
        failure, headers, body)
), fresh as (
    insert into ergon.fact_aside as a (side, fact_offset, settled)
    select %(side)s, g.fact_offset, true from given g where not g.aside
    on conflict (side, fact_offset) do update set settled = true where not a.settled and a.due_at is null
    returning a.fact_offset
), again as (
    update ergon.fact_aside a set {_CLEARED_COLUMNS} from given g
    where g.aside and a.side = %(side)s and a.fact_offset = g.fact_offset and a.due_at is not null
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
delete from ergon.fact_aside where side = %(side)s and settled and fact_offset <= %(confirmed)s
"""

RELEASE: Final = """
insert into ergon.fact_aside as a (side, fact_offset, settled)
select %(side)s, o, true from unnest(%(offsets)s::bigint[]) as o
on conflict (side, fact_offset) do update set settled = true where a.due_at is null
"""

# -- dead letters -----------------------------------------------------------------------------------------

#: One statement, so that a crash loses nothing. The row of the reader is locked, so that numbers are in order.
REPLAY: Final = """
with dead as (
    delete from ergon.dead_letter where queue = %(queue)s and id = %(id)s returning id
), counted as (
    update ergon.fact_side set replays = replays + 1 where id = %(side)s and exists (select 1 from dead)
    returning replays
)
insert into ergon.fact_aside as a (side, fact_offset, due_at, replay, envelope, body)
select %(side)s, %(offset)s, to_timestamp(%(due)s), c.replays, %(envelope)s, %(body)s from counted c
on conflict (side, fact_offset) do update set deliveries = 0, settled = false, due_at = excluded.due_at,
    replay = excluded.replay, envelope = excluded.envelope, body = excluded.body
returning 1
"""

COUNT_DEAD_LETTERS: Final = "select count(*) from ergon.dead_letter where queue = %(queue)s"

# -- another epoch ----------------------------------------------------------------------------------------

#: Offsets mean other facts from now on; the state of the old ones would apply to the new ones.
DELETE_STATE: Final = "delete from ergon.fact_aside where side = %(side)s"
RESET_CONSUMER: Final = """
update ergon.fact_side set generation = generation + 1, epoch = null, turn = 0, held = '{}' where id = %(side)s
"""
