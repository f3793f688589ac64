"""The statements of a side of facts in PostgreSQL. Placeholders are psycopg's.

Whatever an owner writes begins with the row of its side, by the number of its generation: whoever has taken over has
raised it under the lock of that row, so that an owner of before finds no row, and writes nothing.
"""

from __future__ import annotations

from typing import Final

SIDE: Final = """
select s.id, s.queue from ergon.fact_side s
where s.from_zone = %(from)s and s.to_zone = %(to)s and s.reader = %(reader)s
"""

READERS: Final = """
select s.reader from ergon.fact_side s where s.from_zone = %(from)s and s.to_zone = %(to)s order by s.reader limit 20
"""

MAKE: Final = """
insert into ergon.fact_side (from_zone, to_zone, reader, queue)
select %(from)s, %(to)s, %(reader)s,
    coalesce((select q.id from ergon.queue q where q.name = %(name)s), ergon.make_queue(%(name)s))
on conflict (from_zone, to_zone, reader) do nothing
"""

# -- taking over ------------------------------------------------------------------------------------------

LOCK: Final = "select s.epoch from ergon.fact_side s where s.id = %(side)s for update"

#: What the one before had in hand was delivered, and how that ended nobody knows.
COUNT: Final = """
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
PRUNE: Final = """
delete from ergon.fact_aside where side = %(side)s and fact_offset <= %(cursor)s and due_at is null
"""
RISE: Final = """
update ergon.fact_side set generation = generation + 1, turn = 0, held = '{}' where id = %(side)s
returning generation, replays
"""
ASIDE: Final = """
select fact_offset, deliveries, settled, extract(epoch from due_at)::float8, envelope, body
from ergon.fact_aside where side = %(side)s
"""

# -- an owner ---------------------------------------------------------------------------------------------

#: Two accounts may arrive in another order than they were drawn up in: the later one is right.
_HELD: Final = """
update ergon.fact_side s
set held = case when s.turn < %(turn)s then %(held)s::bigint[] else s.held end, turn = greatest(s.turn, %(turn)s),
    epoch = coalesce(%(epoch)s, s.epoch)
"""
FENCE: Final = f"""
{_HELD} where s.id = %(side)s and s.generation = %(generation)s returning s.replays
"""

#: Without waiting for the disk: a process that dies loses nothing by it, and a server that does only a count.
CLAIM: Final = f"""
{_HELD} from (select set_config('synchronous_commit', 'off', true) as setting) as quick
where s.id = %(side)s and s.generation = %(generation)s returning s.replays, quick.setting
"""

LOOK: Final = "select s.replays from ergon.fact_side s where s.id = %(side)s and s.generation = %(generation)s"

REPLAYED: Final = """
select a.fact_offset, extract(epoch from a.due_at)::float8, a.envelope, a.body from ergon.fact_aside a
where a.side = %(side)s and a.replay > %(known)s and a.replay <= %(latest)s and a.due_at is not null order by a.replay
"""

DELAY: Final = """
insert into ergon.fact_aside as a (side, fact_offset, deliveries, due_at, envelope, body)
select %(side)s, g.fact_offset, g.deliveries, to_timestamp(g.due), g.envelope, g.body
from unnest(
    %(offsets)s::bigint[], %(deliveries)s::integer[], %(dues)s::float8[], %(envelopes)s::text[], %(bodies)s::bytea[]
) as g(fact_offset, deliveries, due, envelope, body)
on conflict (side, fact_offset) do update set due_at = excluded.due_at, envelope = excluded.envelope,
    body = excluded.body, settled = false, replay = null
"""

_EMPTIED: Final = "settled = true, due_at = null, replay = null, envelope = null, body = null"

#: Settled, and not deleted: beyond the cursor the log would bring it again.
DONE: Final = f"""
update ergon.fact_aside set {_EMPTIED}
where side = %(side)s and fact_offset = any(%(offsets)s::bigint[]) and due_at is not null
"""  # noqa: S608 - of constants

#: One dead letter for one fact, however often it is said because the answer was lost: what is settled is passed over.
BURY: Final = f"""
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
    update ergon.fact_aside a set {_EMPTIED} from given g
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
"""  # noqa: S608 - of constants

#: The cursor has gone beyond them, and says as much.
SWEEP: Final = """
delete from ergon.fact_aside where side = %(side)s and settled and fact_offset <= %(confirmed)s
"""

LEAVE: Final = """
insert into ergon.fact_aside as a (side, fact_offset, settled)
select %(side)s, o, true from unnest(%(offsets)s::bigint[]) as o
on conflict (side, fact_offset) do update set settled = true where a.due_at is null
"""

# -- dead letters -----------------------------------------------------------------------------------------

#: In one statement: a crash finds it here or there. The row of the side is locked, so that numbers come in order.
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

DEAD: Final = "select count(*) from ergon.dead_letter where queue = %(queue)s"

# -- another epoch ----------------------------------------------------------------------------------------

#: Offsets mean other facts from now on; what is said of the old ones would be said of these.
FORGET: Final = "delete from ergon.fact_aside where side = %(side)s"
RENEW: Final = """
update ergon.fact_side set generation = generation + 1, epoch = null, turn = 0, held = '{}' where id = %(side)s
"""
