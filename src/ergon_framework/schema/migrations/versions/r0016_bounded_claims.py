"""Bounded claims: a claim stops at a number of bytes and returns no body that the worker must not load."""

from __future__ import annotations

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

#: Messages that came back. One whose deliveries have ended with their worker is a suspect and is claimed alone: if
#: loading it ends the worker again, no other message of the claim pays with a delivery.
_DUE = """
    select array_agg(d.id) filter (where d.taken and d.key is null),
        array_agg(d.id) filter (where d.taken and d.key is not null),
        coalesce(bool_or(d.alone), false), coalesce(sum(d.size) filter (where d.taken), 0)
    into due, due_keyed, is_alone, loaded
    from (
        select l.id, l.key, l.size, row_number() over w = 1 and l.suspect as alone,
            row_number() over w = 1 or (not bool_or(l.suspect) over w and sum(l.size) over w <= budget) as taken
        from (
            select r.id, r.key, r.due_at, c.deliveries > 0 as suspect, case
                when octet_length(c.body) > largest or c.deliveries >= last_delivery then 0 else octet_length(c.body)
            end as size
            from ergon.returned r join ergon.content c on c.id = r.id
            where r.queue = of_queue and r.due_at <= now() and (suspects or c.deliveries = 0)
            order by r.due_at limit most for update of r skip locked
        ) as l
        window w as (order by l.due_at, l.id rows unbounded preceding)
    ) as d;"""

#: Fresh ones that no claim names, locked, up to the number of bytes.
_LOCKED = """
            select array_agg(f.id) filter (where f.fits and f.key is null),
                array_agg(f.rank) filter (where f.fits and f.key is null),
                array_agg(f.place) filter (where f.fits and f.key is null),
                array_agg(f.place) filter (where f.fits and f.key is not null),
                min(f.id) filter (where f.fits and f.key is null), max(f.id) filter (where f.fits and f.key is null),
                coalesce(bool_or(not f.fits), false)
            into fresh, ranks, places, keyed, first, last, is_cut
            from (
                select l.place, l.id, l.rank, l.key,
                    (row_number() over w = 1 and is_first) or sum(l.size) over w <= budget as fits
                from (
                    select r.ctid as place, r.id, r.rank, r.key,
                        case when octet_length(r.body) > largest then 0 else octet_length(r.body) end as size
                    from ergon.ready r
                    where r.queue = of_queue {where}
                    and r.id not in (
                        select unnest(h.ids) from ergon.held h where h.queue = of_queue and h.high > above
                    )
                    order by {order} limit most for update of r skip locked
                ) as l
                window w as (order by l.rank, l.id rows unbounded preceding)
            ) as f;"""

#: As ergon.claim, which workers of earlier releases go on to use, with four more arguments. Of a body of more than
#: *largest* bytes, and of a message that has had its *last_delivery*, the size is returned and not the body. The bodies
#: of one claim have *budget* bytes at most; the first is always among them. Without *suspects*, messages whose
#: deliveries have ended with their worker are left out. *alone* says that a suspect is the only one that was looked at,
#: *cut* that the budget has left messages behind.
CLAIM = f"""
create function ergon.claim_bounded(
    of_queue integer, most integer, by_worker bigint, by_token bigint, in_rank smallint, above bigint, known boolean,
    largest bigint, budget bigint, last_delivery integer, suspects boolean
) returns table (
    id bigint, key text, rank smallint, deliveries integer, headers jsonb, body bytea, done boolean, size integer,
    alone boolean, cut boolean
) language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off set work_mem = '32MB'
as $$
#variable_conflict use_column
declare
    due bigint[];
    due_keyed bigint[];
    fresh bigint[];
    ranks smallint[];
    places tid[];
    keyed tid[];
    first bigint;
    last bigint;
    loaded bigint;
    is_alone boolean;
    is_first boolean;
    is_cut boolean := false;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'invalid_transaction_state',
            message = 'a claim needs the isolation read committed, not ' || current_setting('transaction_isolation');
    end if;
    perform 1 from ergon.worker w where w.id = by_worker and w.alive_until > now() for key share;
    if not found then
        return query
        select -1::bigint, null::text, null::smallint, null::integer, null::jsonb, null::bytea, null::boolean,
            null::integer, false, false;
        return;
    end if;

{_DUE}
    if due is not null then
        delete from ergon.returned r where r.id = any(due);
    end if;
    is_first := due is null and due_keyed is null;
    budget := budget - loaded;
    if is_alone then
        most := 0;
    else
        most := most - coalesce(cardinality(due), 0) - coalesce(cardinality(due_keyed), 0);
    end if;

    while most > 0 loop
        if in_rank is null then {_LOCKED.format(where="", order="r.rank, r.id")}
        else {_LOCKED.format(where="and r.rank = in_rank and r.id > above", order="r.id")}
        end if;
        -- The second look. Whatever it finds, the first one leaves out when it is done again.
        exit when fresh is null or not exists (
            select 1 from ergon.held h cross join unnest(h.ids) as i(id)
            where h.queue = of_queue and h.high >= first and h.low <= last and i.id = any(fresh)
        );
    end loop;

    if due is not null or fresh is not null then
        insert into ergon.held as h (worker, token, queue, low, high, ids, ranks)
        values (
            by_worker, by_token, of_queue,
            coalesce(first, 0), coalesce(last, 0), coalesce(due, '{{}}') || coalesce(fresh, '{{}}'),
            array_fill(null::smallint, array[coalesce(cardinality(due), 0)]) || coalesce(ranks, '{{}}')
        )
        on conflict (worker, token) do update set
            low = coalesce(least(nullif(h.low, 0), nullif(excluded.low, 0)), 0),
            high = greatest(h.high, excluded.high),
            ids = h.ids || excluded.ids, ranks = h.ranks || excluded.ranks;
    end if;

    return query
    select m.id, m.key, m.rank, 1, m.headers, case when octet_length(m.body) <= largest then m.body end, known and (
        select i.queue from ergon.inbox i where i.queue = of_queue and i.transaction_id = m.transaction_id
    ) is not null, octet_length(m.body), false, is_cut from ergon.ready m where m.ctid = any(places)
    union all
    select m.id, m.key, null, m.deliveries + 1, m.headers,
        case when octet_length(m.body) <= largest and m.deliveries < last_delivery then m.body end, known and (
        select i.queue from ergon.inbox i where i.queue = of_queue and i.transaction_id = m.transaction_id
    ) is not null, octet_length(m.body), is_alone, is_cut from ergon.content m where m.id = any(due)
    union all
    select m.id, m.key, m.rank, null, null, null, null, null, false, is_cut
    from ergon.ready m where m.ctid = any(keyed)
    union all
    select r.id, r.key, null, null, null, null, null, null, is_alone, is_cut
    from ergon.returned r where r.id = any(due_keyed)
    order by 1;
end $$;
"""  # noqa: S608 - of constants


def upgrade() -> None:
    """Add the function; workers of earlier releases use the one before."""
    op.execute(CLAIM)


def downgrade() -> None:
    """Drop the function."""
    op.execute(
        "drop function ergon.claim_bounded("
        "integer, integer, bigint, bigint, smallint, bigint, boolean, bigint, bigint, integer, boolean)"
    )
