"""Facts: what a boundary store keeps, the one function that gives offsets, and what retention and restores need."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

TABLES = """
-- Every epoch that offsets were given in, here or where forwarded facts come from; and why one of ours began.
create table ergon.fact_epochs (
    id integer generated always as identity primary key,
    epoch text collate "C" not null unique,
    began_at timestamptz not null default now(),
    why text not null default '',
    by_whom text not null default ''
);

-- One row: the present epoch, and by what a restored backup is recognised. *born* is the database transaction that
-- wrote the row: whoever loads a dump writes it in another one.
create table ergon.fact_store (
    only_one boolean primary key default true check (only_one),
    epoch integer not null references ergon.fact_epochs (id),
    side text not null check (side in ('inner', 'outer')),
    system_identifier bigint not null,
    database oid not null,
    timeline text not null,
    born bigint not null
);

-- One row, which is locked by whoever must not exceed a bound: bytes of all artifacts.
create table ergon.fact_room (
    only_one boolean primary key default true check (only_one),
    content_bytes bigint not null default 0
);

-- One row for each pair of zones. Offsets are given under its lock, which is held until the commit. Facts up to
-- *dropped* are gone, whether or not their rows are still there. Totals are running sums of the bytes of all objects.
create table ergon.fact_log (
    id integer generated always as identity primary key,
    from_zone text collate "C" not null,
    to_zone text collate "C" not null,
    -- Both are null before the first fact.
    forwarded boolean,
    epoch integer references ergon.fact_epochs (id),
    last bigint not null default 0,
    total bigint not null default 0,
    dropped bigint not null default 0,
    dropped_total bigint not null default 0,
    unique (from_zone, to_zone)
) with (fillfactor = 50, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);

-- What was confirmed for each id, for as long as ids are kept: apart from the facts, because a unique index over
-- partitions would have to contain their time.
create table ergon.fact_ids (
    from_zone text collate "C" not null,
    message_id text collate "C" not null,
    digest bytea not null,
    log integer not null,
    fact_offset bigint not null,
    epoch integer not null,
    -- Milliseconds by the clock of this store.
    kept_at bigint not null,
    primary key (from_zone, message_id)
) with (autovacuum_vacuum_insert_scale_factor = 0.2);
create index fact_ids_kept on ergon.fact_ids using brin (kept_at);

-- The facts themselves, in partitions by the week, which retention drops.
create table ergon.facts (
    log integer not null,
    fact_offset bigint not null,
    -- Milliseconds by the clock of the store where it was appended.
    stored_at bigint not null,
    -- Of all objects up to this one, of this log.
    total bigint not null,
    produced_at bigint not null,
    message_id text not null,
    correlation_id text,
    causation_id text,
    labels text,
    subject text not null,
    predicate text not null,
    -- As it was given: jsonb would write it anew.
    object_json text not null,
    digest bytea not null,
    primary key (log, fact_offset, stored_at)
) partition by range (stored_at);
-- Facts of weeks without a partition of their own: too late, too early, or nobody had the right to make one.
create table ergon.facts_rest partition of ergon.facts default;

-- How far a reader has come; his total spares a look at the fact.
create table ergon.fact_readers (
    log integer not null,
    reader text collate "C" not null,
    fact_offset bigint not null,
    total bigint not null,
    registered_at timestamptz not null default now(),
    confirmed_at timestamptz,
    primary key (log, reader)
) with (fillfactor = 50, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0);

-- Who retired whom: from then on nothing is kept for him.
create table ergon.fact_reader_audit (
    id bigint generated always as identity primary key,
    from_zone text not null,
    to_zone text not null,
    reader text not null,
    fact_offset bigint not null,
    last bigint not null,
    by_whom text not null,
    at timestamptz not null default now()
);

-- Contents that may be where bytes are kept: written down before they are put there, so that none is ever forgotten.
create table ergon.fact_contents (
    digest bytea primary key,
    size bigint not null,
    -- Whether it counts as stored: its bytes are durable, and were named once.
    sealed boolean not null default false,
    since bigint not null
);

-- The names of artifacts; a name means one content, for ever.
create table ergon.fact_objects (
    id bigint generated always as identity primary key,
    bucket text collate "C" not null,
    key text collate "C" not null,
    digest bytea not null references ergon.fact_contents (digest),
    size bigint not null,
    stored_at bigint not null,
    unique (bucket, key)
);
create index fact_objects_digest on ergon.fact_objects (digest);
create index fact_objects_stored on ergon.fact_objects (stored_at);

-- Which retained facts name an artifact.
create table ergon.fact_object_uses (
    object bigint not null references ergon.fact_objects (id),
    log integer not null,
    fact_offset bigint not null,
    primary key (object, log, fact_offset)
);
create index fact_object_uses_fact on ergon.fact_object_uses (log, fact_offset);
"""

#: By what a process recognises the store that it knows: another start of the server, another database of that name (its
#: number is in the path of every file) or another epoch make it look again before anything is given an offset. Not in
#: SQL, whose functions are planned anew for every statement.
FACT_STORE_STAMP = """
create function ergon.fact_token() returns text language plpgsql stable as $$
begin
    return (
        select extract(epoch from pg_postmaster_start_time())::text || ' ' || pg_relation_filepath('ergon.fact_store')
            || ' ' || s.xmin || ' ' || s.epoch
        from ergon.fact_store s
    );
end $$;
"""

#: A new epoch, unless somebody has begun another one than *was* meanwhile; null for the first of all. Facts that were
#: appended here are of the new one from then on, forwarded ones stay of their origin's.
BEGIN_EPOCH = """
create function ergon.begin_fact_epoch(was text, of_side text, reason text, by_whom text) returns void
language plpgsql as $$
declare
    present text;
    number integer;
begin
    select e.epoch into present from ergon.fact_store s join ergon.fact_epochs e on e.id = s.epoch for update of s;
    if present is distinct from was then
        return;
    end if;
    insert into ergon.fact_epochs (epoch, why, by_whom)
    values (replace(gen_random_uuid()::text, '-', ''), reason, begin_fact_epoch.by_whom) returning id into number;
    insert into ergon.fact_room default values on conflict do nothing;
    insert into ergon.fact_store as s (epoch, side, system_identifier, database, timeline, born)
    select number, of_side, c.system_identifier, d.oid, left(pg_walfile_name(pg_current_wal_lsn()), 8),
        mod(pg_current_xact_id()::text::numeric, 4294967296)::bigint
    from pg_control_system() c, pg_catalog.pg_database d where d.datname = current_database()
    on conflict (only_one) do update set epoch = excluded.epoch, system_identifier = excluded.system_identifier,
        database = excluded.database, timeline = excluded.timeline, born = excluded.born
    where was is not null;
    -- In the order in which appends lock them.
    perform 1 from ergon.fact_log l order by l.from_zone, l.to_zone for update;
    update ergon.fact_log l set epoch = s.epoch from ergon.fact_store s where not l.forwarded;
end $$;
"""

#: How facts come into a store, in one database transaction: all at once if nothing is odd about any of them, else one
#: after the other, each with an answer of its own. What is new is answered with its offset, all else with a word and
#: what there is to say. *told* is the token that the caller knows the store by, *seen* of each pair the highest offset
#: that he has seen: a store that has not come so far is an older one than his. *careful* says that an id comes twice.
#:
#: Pairs come in the order of their names, so that nobody waits for somebody who waits for him. All of it goes by its
#: indexes whatever the statistics say, also in the sessions of a pooler.
APPEND = """
create function ergon.append_facts(
    told text, pairs json, given json, forwarding boolean, now_ms bigint, most_facts bigint, most_bytes bigint,
    strict boolean, careful boolean
) returns text language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_hashjoin = off
set enable_mergejoin = off set jit = off
as $$
declare
    here integer;
    p record;
    g record;
    l ergon.fact_log;
    i ergon.fact_ids;
    o ergon.fact_objects;
    zones text[] := '{}';
    logs integer[] := '{}';
    lasts bigint[] := '{}';
    totals bigint[] := '{}';
    kinds boolean[] := '{}';
    epochs integer[] := '{}';
    names text[] := '{}';
    changed boolean[] := '{}';
    answers text[] := '{}';
    retained bigint;
    used bigint;
    at bigint;
    stored boolean := false;
    answer text;
    plain boolean := not careful;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'invalid_transaction_state',
            message = 'facts need the isolation read committed, not ' || current_setting('transaction_isolation');
    end if;
    -- A setting that was changed behind our back must not cost what is confirmed.
    if strict and current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    if most_facts is not null or most_bytes is not null then
        select r.content_bytes into used from ergon.fact_room r for update;
    end if;
    for p in
        select e.value ->> 0 as from_zone, e.value ->> 1 as to_zone, (e.value ->> 2)::bigint as seen
        from json_array_elements(pairs) as e(value)
    loop
        loop
            select f.* into l from ergon.fact_log f
            where f.from_zone = p.from_zone and f.to_zone = p.to_zone for update;
            exit when found;
            -- Nobody begins an epoch meanwhile, who would not see the new row.
            perform 1 from ergon.fact_store for share;
            insert into ergon.fact_log (from_zone, to_zone) values (p.from_zone, p.to_zone) on conflict do nothing;
        end loop;
        if l.last < p.seen then
            return 'behind';
        end if;
        zones := zones || l.from_zone;
        logs := logs || l.id;
        lasts := lasts || l.last;
        totals := totals || l.total;
        kinds := kinds || l.forwarded;
        epochs := epochs || l.epoch;
        names := names || case when l.forwarded then (select e.epoch from ergon.fact_epochs e where e.id = l.epoch) end;
        changed := changed || false;
        plain := plain and coalesce(l.forwarded = forwarding, not forwarding);
    end loop;
    if ergon.fact_token() is distinct from told then
        return 'stale';
    end if;
    if used is not null then
        select coalesce(sum(f.last - f.dropped), 0), used + coalesce(sum(f.total - f.dropped_total), 0)
        into retained, used from ergon.fact_log f;
    end if;
    select s.epoch into here from ergon.fact_store s;

    -- All at once. Whoever appends one of these ids to another pair just now makes this fail as a whole, and the next
    -- time it is odd.
    if plain then
        with row_of as materialized (
            select x.*, lasts[x.p] + row_number() over w as place, totals[x.p] + sum(x.size) over w as total
            from rows from (json_to_recordset(given) as (
                p integer, id text, digest text, produced bigint, correlation text, causation text, labels text,
                subject text, predicate text, object text, size integer, bucket text, at bigint, epoch text,
                stored bigint
            )) with ordinality as x(
                p, id, digest, produced, correlation, causation, labels, subject, predicate, object, size, bucket, at,
                epoch, stored, n
            )
            window w as (partition by x.p order by x.n)
        ),
        odd as materialized (
            select 1 from row_of r
            where r.bucket is not null or forwarding and (r.at <> r.place or r.epoch <> names[r.p])
            union all
            -- Joined: asked whether one exists, the server may choose to read all ids there are.
            select 1 from row_of r join ergon.fact_ids f on f.from_zone = zones[r.p] and f.message_id = r.id
            union all
            select 1 from row_of r
            having count(*) + retained > most_facts or sum(r.size) + used > most_bytes
        ),
        ids as (
            insert into ergon.fact_ids (from_zone, message_id, digest, log, fact_offset, epoch, kept_at)
            select zones[r.p], r.id, decode(r.digest, 'hex'), logs[r.p], r.place, coalesce(epochs[r.p], here), now_ms
            from row_of r where not exists (select 1 from odd)
        ),
        kept as (
            insert into ergon.facts (
                log, fact_offset, stored_at, total, produced_at, message_id, correlation_id, causation_id, labels,
                subject, predicate, object_json, digest
            )
            select logs[r.p], r.place, coalesce(r.stored, now_ms), r.total, r.produced, r.id, r.correlation,
                r.causation, r.labels, r.subject, r.predicate, r.object, decode(r.digest, 'hex')
            from row_of r where not exists (select 1 from odd)
        ),
        moved as (
            update ergon.fact_log f
            set last = m.last, total = m.total, forwarded = forwarding, epoch = coalesce(f.epoch, here)
            from (
                select logs[r.p] as log, max(r.place) as last, max(r.total) as total
                from row_of r where not exists (select 1 from odd) group by r.p
            ) as m
            where f.id = m.log
        )
        select string_agg(r.place::text, ',' order by r.n) into answer
        from row_of r where not exists (select 1 from odd);
        if answer is not null then
            if exists (select 1 from ergon.sleeper s where s.queue = -1 and s.until > now()) then
                perform ergon.ring(-1);
            end if;
            return '[' || answer || ']';
        end if;
    end if;

    for g in
        select * from json_to_recordset(given) as x(
            p integer, id text, digest text, produced bigint, correlation text, causation text, labels text,
            subject text, predicate text, object text, size integer, bucket text, key text, content text, length bigint,
            at bigint, epoch text, stored bigint
        )
    loop
        loop
            select f.* into i from ergon.fact_ids f where f.from_zone = zones[g.p] and f.message_id = g.id;
            if found then
                answers := answers || (
                    select json_build_array('known', i.fact_offset, e.epoch, encode(i.digest, 'hex'), f.forwarded)::text
                    from ergon.fact_epochs e, ergon.fact_log f where e.id = i.epoch and f.id = i.log
                );
                exit;
            end if;
            if kinds[g.p] <> forwarding then
                answers := answers || json_build_array('misplaced', kinds[g.p])::text;
                exit;
            end if;
            at := lasts[g.p] + 1;
            if forwarding and g.epoch <> names[g.p] then
                answers := answers || json_build_array('changed', names[g.p])::text;
                exit;
            elsif forwarding and g.at <> at then
                answers := answers || json_build_array('ahead', lasts[g.p])::text;
                exit;
            end if;
            if g.bucket is not null then
                -- Whoever removes it waits for us, and finds out that it is named.
                select f.* into o from ergon.fact_objects f where f.bucket = g.bucket and f.key = g.key for key share;
                if o.digest is distinct from decode(g.content, 'hex') or o.size is distinct from g.length then
                    answers := answers || json_build_array('refused', encode(o.digest, 'hex'), o.size)::text;
                    exit;
                end if;
            end if;
            if retained + 1 > most_facts then
                answers := answers || json_build_array('facts', retained)::text;
                exit;
            elsif used + g.size > most_bytes then
                answers := answers || json_build_array('bytes', used)::text;
                exit;
            end if;
            if epochs[g.p] is null then
                kinds[g.p] := forwarding;
                if forwarding then
                    insert into ergon.fact_epochs (epoch, why) values (g.epoch, 'forwarded') on conflict do nothing;
                    epochs[g.p] := (select e.id from ergon.fact_epochs e where e.epoch = g.epoch);
                    names[g.p] := g.epoch;
                else
                    epochs[g.p] := here;
                end if;
            end if;
            insert into ergon.fact_ids (from_zone, message_id, digest, log, fact_offset, epoch, kept_at)
            values (zones[g.p], g.id, decode(g.digest, 'hex'), logs[g.p], at, epochs[g.p], now_ms)
            on conflict do nothing;
            -- Else it was appended to another pair of zones just now.
            if found then
                lasts[g.p] := at;
                totals[g.p] := totals[g.p] + g.size;
                changed[g.p] := true;
                stored := true;
                retained := retained + 1;
                used := used + g.size;
                insert into ergon.facts (
                    log, fact_offset, stored_at, total, produced_at, message_id, correlation_id, causation_id, labels,
                    subject, predicate, object_json, digest
                )
                values (
                    logs[g.p], at, coalesce(g.stored, now_ms), totals[g.p], g.produced, g.id, g.correlation,
                    g.causation, g.labels, g.subject, g.predicate, g.object, decode(g.digest, 'hex')
                );
                if g.bucket is not null then
                    insert into ergon.fact_object_uses (object, log, fact_offset) values (o.id, logs[g.p], at);
                end if;
                answers := answers || at::text;
                exit;
            end if;
        end loop;
    end loop;

    for n in 1 .. cardinality(logs) loop
        if changed[n] then
            update ergon.fact_log f
            set last = lasts[n], total = totals[n], forwarded = kinds[n], epoch = epochs[n] where f.id = logs[n];
        end if;
    end loop;
    if stored and exists (select 1 from ergon.sleeper s where s.queue = -1 and s.until > now()) then
        perform ergon.ring(-1);
    end if;
    return '[' || array_to_string(answers, ',') || ']';
end $$;
"""

#: Let go of what is old and confirmed by all readers, of one log; how many. If nobody is registered, nobody has read.
DROP_FACTS = """
create function ergon.drop_facts(of_log integer, before bigint) returns bigint language plpgsql
set plan_cache_mode = force_generic_plan set enable_seqscan = off set enable_bitmapscan = off
set enable_hashjoin = off set enable_mergejoin = off set jit = off
as $$
declare
    l ergon.fact_log;
    done bigint;
    young bigint;
begin
    select f.* into l from ergon.fact_log f where f.id = of_log for update;
    select min(r.fact_offset) into done from ergon.fact_readers r where r.log = of_log;
    if done is null or done <= l.dropped then
        return 0;
    end if;
    select f.fact_offset into young from ergon.facts f
    where f.log = of_log and f.fact_offset > l.dropped and f.stored_at >= before order by f.fact_offset limit 1;
    done := least(done, young - 1);
    if done <= l.dropped then
        return 0;
    end if;
    update ergon.fact_log f
    set dropped = done,
        dropped_total = (select d.total from ergon.facts d where d.log = of_log and d.fact_offset = done)
    where f.id = of_log;
    delete from ergon.fact_object_uses u where u.log = of_log and u.fact_offset <= done;
    return done - l.dropped;
end $$;
"""

FUNCTION_NAMES = ("drop_facts", "append_facts", "begin_fact_epoch", "fact_token")
TABLE_NAMES = (
    "fact_object_uses",
    "fact_objects",
    "fact_contents",
    "fact_reader_audit",
    "fact_readers",
    "facts",
    "fact_ids",
    "fact_log",
    "fact_room",
    "fact_store",
    "fact_epochs",
)


def upgrade() -> None:
    """Make the tables; nothing that was there is touched."""
    for statement in (TABLES, FACT_STORE_STAMP, BEGIN_EPOCH, APPEND, DROP_FACTS):
        op.execute(statement)


def downgrade() -> None:
    """Take them away again, with what is in them."""
    for function in FUNCTION_NAMES:
        op.execute(f"drop function ergon.{function}")
    for table in TABLE_NAMES:
        op.execute(f"drop table ergon.{table}")
