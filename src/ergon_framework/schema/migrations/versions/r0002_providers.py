"""Providers: quota, health, breakers, keys, attempts, dead letters and what operators have said."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

#: What the foundation of providers names: these tables, columns and indexes, and no others in them.
TABLES_BY_CONTRACT = """
-- Calls of one window. Windows of several lengths may begin at the same moment: a longer one's start is written a few
-- microseconds later, so that each has a row of its own.
create table ergon.provider_quota_states (
    id bigint generated always as identity primary key,
    tenant_id text collate "C" not null,
    provider_name text collate "C" not null,
    capability text collate "C" not null,
    window_start timestamptz not null,
    window_end timestamptz not null,
    limit_count bigint not null,
    used_count bigint not null default 0,
    remaining_count bigint not null,
    last_exhausted_at timestamptz,
    updated_at timestamptz not null default now(),
    check (used_count + remaining_count = limit_count)
) with (fillfactor = 50);
create unique index provider_quota_states_window
    on ergon.provider_quota_states (tenant_id, provider_name, capability, window_start);
create index provider_quota_states_end on ergon.provider_quota_states (tenant_id, window_end);

create table ergon.provider_health_states (
    id bigint generated always as identity primary key,
    tenant_id text not null,
    provider_name text not null,
    capability text not null,
    breaker_state text not null default 'closed' check (breaker_state in ('closed', 'open', 'half_open')),
    consecutive_failures integer not null default 0,
    success_rate_1h double precision,
    p95_latency_ms_1h double precision,
    last_error_code text,
    last_error_at timestamptz,
    last_success_at timestamptz,
    updated_at timestamptz not null default now()
) with (fillfactor = 50);
create unique index provider_health_states_account
    on ergon.provider_health_states (tenant_id, provider_name, capability);
create index provider_health_states_breaker on ergon.provider_health_states (tenant_id, breaker_state);

-- What a call was made for. A host that has such a table names its own.
create table ergon.task_executions (
    id text primary key,
    task_name text,
    created_at timestamptz not null default now()
);

-- One row per attempt, never changed; in partitions by the day, which retention drops.
create table ergon.provider_execution_metrics (
    id bigint generated always as identity,
    tenant_id text not null,
    task_execution_id text references ergon.task_executions (id),
    provider_name text not null,
    capability text not null,
    operation text not null,
    idempotency_key text,
    correlation_id text not null,
    attempt_number integer not null,
    max_attempts integer not null,
    duration_ms double precision not null,
    timeout_budget_ms double precision not null,
    outcome text not null check (outcome in ('success', 'retry', 'failed', 'dead_letter')),
    reason_code text,
    retryable boolean not null,
    http_status integer,
    created_at timestamptz not null,
    primary key (id, created_at),
    check ((reason_code is null) = (outcome = 'success'))
) partition by range (created_at);
create index provider_execution_metrics_account
    on ergon.provider_execution_metrics (tenant_id, provider_name, capability, created_at);
create index provider_execution_metrics_outcome
    on ergon.provider_execution_metrics (tenant_id, outcome, created_at);
create index provider_execution_metrics_correlation on ergon.provider_execution_metrics (correlation_id);
"""

#: The live state of quota, breakers and keys. Tenant '*' is all tenants together. What a visit looks up is compared
#: byte by byte: by the rules of a language that would cost more than the rest. For the same reason keys have no checks:
#: the server reads a check anew for each statement.
SHARED_STATE_TABLES = """
-- A breaker as all processes share it; a closed one that has seen no fault has no row.
create table ergon.provider_breakers (
    tenant_id text collate "C" not null,
    provider_name text collate "C" not null,
    capability text collate "C" not null,
    state text not null default 'closed' check (state in ('closed', 'open', 'half_open')),
    consecutive_failures integer not null default 0,
    open_until timestamptz,
    generation bigint not null default 0,
    -- Numbers and ends, in seconds since the epoch.
    probes jsonb not null default '[]',
    probes_begun bigint not null default 0,
    probe_successes integer not null default 0,
    override_kind text check (override_kind in ('force_open', 'disable')),
    override_until timestamptz,
    updated_at timestamptz not null default now(),
    primary key (tenant_id, provider_name, capability)
) with (fillfactor = 50);
-- What changed lately, for those who are told of no transition.
create index provider_breakers_updated on ergon.provider_breakers (updated_at);

-- One key, one call: who makes it, or what it came to; doubt says that a call before this one may have been made.
-- A result is kept as it was written, letter by letter; one that could not be kept is a done key without a value.
-- At sweep_at nothing of it is needed any more: written once, so that the end of a call changes no index.
create table ergon.provider_keys (
    tenant_id text collate "C" not null,
    provider_name text collate "C" not null,
    key text collate "C" not null,
    fingerprint text not null,
    -- in_flight, done or unknown.
    state text not null,
    owner text not null,
    until timestamptz not null,
    sweep_at timestamptz not null,
    doubt boolean not null default false,
    value json,
    http_status integer,
    primary key (tenant_id, provider_name, key)
) with (fillfactor = 60);
create index provider_keys_sweep on ergon.provider_keys (sweep_at);

-- Quota that somebody has in hand: of one attempt, or a leased block of many. What is here after *until* belongs to a
-- process that died; it stays booked as used, and is listed.
create table ergon.provider_reservations (
    id bigint generated always as identity primary key,
    tenant_id text not null,
    provider_name text not null,
    capability text not null,
    window_starts timestamptz[] not null,
    owner text not null,
    calls integer not null default 1,
    until timestamptz not null,
    lost_at timestamptz,
    created_at timestamptz not null default now()
);
create index provider_reservations_lost on ergon.provider_reservations (lost_at) where lost_at is not null;

-- What operators have said, and who; written once and never changed.
create table ergon.provider_overrides (
    id bigint generated always as identity primary key,
    at timestamptz not null default now(),
    tenant_id text not null,
    provider_name text not null,
    capability text not null,
    action text not null check (action in ('force_open', 'disable', 'lift', 'extend_quota')),
    until timestamptz,
    calls bigint,
    actor text not null,
    reason text not null
);
create index provider_overrides_account on ergon.provider_overrides (tenant_id, provider_name, capability, at);
create index provider_overrides_quota on ergon.provider_overrides (tenant_id, provider_name, capability, id)
    where action = 'extend_quota';
"""

#: What the books do, each visit one statement. The rules are those of ``providers.circuit_breaker``, ``quota`` and
#: ``idempotency``; a model test holds the two against each other. Locks are taken in one order: key, windows from the
#: shortest to the longest, breaker.
SHARED_STATE_FUNCTIONS = """
-- Everybody's clock.
create function ergon.provider_clock() returns timestamptz language sql volatile as 'select clock_timestamp()';

-- The windows of a moment, in UTC: 1 is the minute, 2 the hour, 3 the day, 4 the month. A longer one's start is written
-- later by as many microseconds.
create function ergon.provider_window_start(kind integer, moment timestamptz) returns timestamptz language sql stable as
$$ select (date_trunc((array['minute', 'hour', 'day', 'month'])[kind], moment at time zone 'UTC') at time zone 'UTC')
    + (kind - 1) * interval '1 microsecond' $$;
create function ergon.provider_window_end(kind integer, moment timestamptz) returns timestamptz language sql stable as
$$ select (date_trunc((array['minute', 'hour', 'day', 'month'])[kind], moment at time zone 'UTC')
    + (array['1 minute', '1 hour', '1 day', '1 month'])[kind]::interval) at time zone 'UTC' $$;

-- The window's row as the policy and the operators want it: made, and with today's limit; locked unless it is spent.
create function ergon.provider_window_ready(
    the_tenant text, the_provider text, the_capability text, kind integer, policy bigint, moment timestamptz,
    calls bigint
) returns ergon.provider_quota_states language plpgsql as $$
declare
    start timestamptz := ergon.provider_window_start(kind, moment);
    wanted bigint := policy + coalesce((
        select case when o.until > moment then o.calls else 0 end from ergon.provider_overrides o
        where o.tenant_id = the_tenant and o.provider_name = the_provider and o.capability = the_capability
        and o.action = 'extend_quota' order by o.id desc limit 1), 0);
    found_row ergon.provider_quota_states;
begin
    select * into found_row from ergon.provider_quota_states q
    where q.tenant_id = the_tenant and q.provider_name = the_provider and q.capability = the_capability
    and q.window_start = start;
    if found and found_row.limit_count = wanted and found_row.remaining_count < calls then
        return found_row;
    end if;
    if not found then
        insert into ergon.provider_quota_states
            (tenant_id, provider_name, capability, window_start, window_end, limit_count, remaining_count, updated_at)
        values (the_tenant, the_provider, the_capability, start, ergon.provider_window_end(kind, moment), wanted,
            wanted, moment)
        on conflict (tenant_id, provider_name, capability, window_start) do nothing;
    end if;
    select * into found_row from ergon.provider_quota_states q
    where q.tenant_id = the_tenant and q.provider_name = the_provider and q.capability = the_capability
    and q.window_start = start for update;
    if found_row.limit_count <> wanted then
        update ergon.provider_quota_states q
        set limit_count = wanted, remaining_count = wanted - q.used_count, updated_at = moment
        where q.id = found_row.id returning * into found_row;
    end if;
    return found_row;
end $$;

-- So many calls more, or fewer, in a window that is there.
create function ergon.provider_window_charge(
    the_tenant text, the_provider text, the_capability text, start timestamptz, calls bigint, moment timestamptz
) returns void language plpgsql as $$
begin
    update ergon.provider_quota_states q
    set used_count = q.used_count + calls, remaining_count = q.remaining_count - calls, updated_at = moment
    where q.tenant_id = the_tenant and q.provider_name = the_provider and q.capability = the_capability
    and q.window_start = start;
end $$;

-- That a window was found spent; not more than once a second, or refusals would cost as much as calls.
create function ergon.provider_window_spent(spent bigint, moment timestamptz) returns void language plpgsql as $$
begin
    update ergon.provider_quota_states q set last_exhausted_at = moment, updated_at = moment
    where q.id = spent and (q.last_exhausted_at is null or q.last_exhausted_at < moment - interval '1 second');
end $$;

-- A breaker as the processes know it: without its probes.
create function ergon.provider_breaker_shown(b ergon.provider_breakers) returns json language sql stable as
$$ select json_build_array(b.state, b.consecutive_failures, extract(epoch from b.open_until), b.generation,
    b.override_kind, extract(epoch from b.override_until)) $$;

create function ergon.provider_breaker_in(
    b ergon.provider_breakers, entered text, until timestamptz
) returns ergon.provider_breakers language plpgsql immutable as $$
begin
    b.state := entered;
    b.open_until := until;
    b.generation := b.generation + 1;
    b.probes := '[]';
    b.probes_begun := 0;
    b.probe_successes := 0;
    return b;
end $$;

-- What time alone has changed.
create function ergon.provider_breaker_at(
    b ergon.provider_breakers, moment timestamptz
) returns ergon.provider_breakers language plpgsql immutable as $$
begin
    if b.override_kind is not null then
        if moment < b.override_until then
            return b;
        end if;
        b.override_kind := null;
        b.override_until := null;
        b.generation := b.generation + 1;
    end if;
    if b.state = 'open' and (b.open_until is null or moment >= b.open_until) then
        return ergon.provider_breaker_in(b, 'half_open', null);
    end if;
    if b.probes <> '[]' then
        b.probes := (select coalesce(jsonb_agg(probe order by place), '[]')
            from jsonb_array_elements(b.probes) with ordinality as p(probe, place)
            where extract(epoch from moment) < (probe ->> 1)::numeric);
    end if;
    return b;
end $$;

-- Whether one more call may be made, and the breaker afterwards.
create function ergon.provider_breaker_asked(
    inout b ergon.provider_breakers, moment timestamptz, cooldown double precision, places integer,
    probe_lease double precision, out allowed boolean, out until timestamptz, out probe bigint
) language plpgsql immutable as $$
begin
    b := ergon.provider_breaker_at(b, moment);
    allowed := true;
    if b.override_kind is not null then
        allowed := b.override_kind <> 'force_open';
        until := b.override_until;
    elsif b.state = 'open' then
        allowed := false;
        until := b.open_until;
    elsif b.state = 'half_open' then
        if b.probe_successes >= places then
            b.consecutive_failures := 0;
            b := ergon.provider_breaker_in(b, 'closed', null);
        elsif jsonb_array_length(b.probes) + b.probe_successes >= places then
            allowed := false;
            until := least(
                (select to_timestamp(min((each ->> 1)::numeric)::double precision)
                    from jsonb_array_elements(b.probes) as p(each)),
                moment + coalesce(nullif(cooldown, 0), probe_lease) * interval '1 second');
        else
            b.probes_begun := b.probes_begun + 1;
            probe := b.probes_begun;
            b.probes := b.probes || jsonb_build_array(jsonb_build_array(
                probe, extract(epoch from moment + probe_lease * interval '1 second')));
        end if;
    end if;
end $$;

-- The breaker after a call is over: with a fault, without one, or null for nobody knows.
create function ergon.provider_breaker_told(
    b ergon.provider_breakers, moment timestamptz, of_generation bigint, probe bigint, fault boolean,
    threshold integer, cooldown double precision, places integer
) returns ergon.provider_breakers language plpgsql immutable as $$
declare
    others jsonb;
begin
    b := ergon.provider_breaker_at(b, moment);
    if of_generation <> b.generation or b.override_kind is not null then
        return b;
    end if;
    if probe is not null then
        others := (select coalesce(jsonb_agg(each order by place), '[]')
            from jsonb_array_elements(b.probes) with ordinality as p(each, place) where (each ->> 0)::bigint <> probe);
        if others = b.probes then
            return b;
        end if;
        b.probes := others;
    end if;
    if fault is null then
        return b;
    end if;
    if fault then
        b.consecutive_failures := b.consecutive_failures + 1;
        if probe is not null or b.consecutive_failures >= threshold then
            b := ergon.provider_breaker_in(b, 'open', moment + cooldown * interval '1 second');
        end if;
    elsif probe is null then
        b.consecutive_failures := 0;
    else
        b.probe_successes := b.probe_successes + 1;
        if b.probe_successes >= places then
            b.consecutive_failures := 0;
            b := ergon.provider_breaker_in(b, 'closed', null);
        end if;
    end if;
    return b;
end $$;

-- Write the breaker, and what of it health shows; tell everybody of a transition.
create function ergon.provider_breaker_kept(
    before ergon.provider_breakers, b ergon.provider_breakers, moment timestamptz, error_code text
) returns void language plpgsql as $$
begin
    if before is not distinct from b and error_code is null then
        return;
    end if;
    update ergon.provider_breakers set state = b.state, consecutive_failures = b.consecutive_failures,
        open_until = b.open_until, generation = b.generation, probes = b.probes, probes_begun = b.probes_begun,
        probe_successes = b.probe_successes, override_kind = b.override_kind, override_until = b.override_until,
        updated_at = moment
    where tenant_id = b.tenant_id and provider_name = b.provider_name and capability = b.capability;
    insert into ergon.provider_health_states as h (tenant_id, provider_name, capability, breaker_state,
        consecutive_failures, last_error_code, last_error_at, updated_at)
    values (b.tenant_id, b.provider_name, b.capability, b.state, b.consecutive_failures, error_code,
        case when error_code is not null then moment end, moment)
    on conflict (tenant_id, provider_name, capability) do update set breaker_state = excluded.breaker_state,
        consecutive_failures = excluded.consecutive_failures,
        last_error_code = coalesce(excluded.last_error_code, h.last_error_code),
        last_error_at = coalesce(excluded.last_error_at, h.last_error_at), updated_at = excluded.updated_at;
    if before.generation <> b.generation then
        perform pg_notify('ergon_breaker', json_build_array(b.tenant_id, b.provider_name, b.capability)::text);
    end if;
end $$;

create function ergon.provider_breaker_locked(
    the_tenant text, the_provider text, the_capability text, moment timestamptz
) returns ergon.provider_breakers language plpgsql as $$
declare
    b ergon.provider_breakers;
begin
    insert into ergon.provider_breakers (tenant_id, provider_name, capability, updated_at)
    values (the_tenant, the_provider, the_capability, moment) on conflict do nothing;
    select * into b from ergon.provider_breakers x
    where x.tenant_id = the_tenant and x.provider_name = the_provider and x.capability = the_capability for update;
    return b;
end $$;

-- The call of a key failed: definitely, and it is forgotten; or in doubt, of this call or of one before it.
create function ergon.provider_key_ended(
    key_tenant text, the_provider text, the_key text, the_owner text, in_doubt boolean, moment timestamptz,
    keep double precision
) returns void language plpgsql as $$
begin
    if not in_doubt then
        delete from ergon.provider_keys k where k.tenant_id = key_tenant and k.provider_name = the_provider
        and k.key = the_key and k.owner = the_owner and k.state = 'in_flight' and not k.doubt;
        if found then
            return;
        end if;
    end if;
    update ergon.provider_keys k set state = 'unknown', until = moment + keep * interval '1 second'
    where k.tenant_id = key_tenant and k.provider_name = the_provider
    and k.key = the_key and k.owner = the_owner and k.state = 'in_flight';
end $$;

-- Before an attempt: the key, a call in each window, the breaker. What one of them refuses leaves nothing behind.
create function ergon.provider_admit_in_full(
    the_tenant text, the_provider text, the_capability text, limits bigint[], who text, lease double precision,
    key_tenant text, the_key text, the_fingerprint text, the_owner text, first boolean, in_doubt boolean,
    keep double precision, shut boolean, cooldown double precision, places integer, probe_lease double precision,
    out verdict text, out at timestamptz, out until timestamptz, out kind integer, out limit_count bigint,
    out reservation bigint, out probe bigint, out value json, out http_status integer,
    out breaker ergon.provider_breakers
) language plpgsql as $$
declare
    starts timestamptz[];
    known ergon.provider_keys;
    claimed boolean := false;
    quota ergon.provider_quota_states;
    asked record;
    start timestamptz;
begin
    at := ergon.provider_clock();
    if first then
        insert into ergon.provider_keys (tenant_id, provider_name, key, fingerprint, state, owner, until, sweep_at)
        values (key_tenant, the_provider, the_key, the_fingerprint, 'in_flight', the_owner,
            at + lease * interval '1 second', at + (lease + keep) * interval '1 second')
        on conflict do nothing;
        claimed := found;
        while not claimed loop
            select * into known from ergon.provider_keys k
            where k.tenant_id = key_tenant and k.provider_name = the_provider and k.key = the_key for update;
            if not found then
                -- It was given up in this very moment.
                insert into ergon.provider_keys
                    (tenant_id, provider_name, key, fingerprint, state, owner, until, sweep_at)
                values (key_tenant, the_provider, the_key, the_fingerprint, 'in_flight', the_owner,
                    at + lease * interval '1 second', at + (lease + keep) * interval '1 second')
                on conflict do nothing;
                claimed := found;
                continue;
            end if;
            at := ergon.provider_clock();
            if known.state = 'in_flight' or at < known.until then
                if known.fingerprint <> the_fingerprint then
                    verdict := 'conflict';
                    return;
                elsif known.state = 'done' then
                    verdict := 'replayed';
                    value := known.value;
                    http_status := known.http_status;
                    return;
                elsif known.state = 'in_flight' and known.owner <> the_owner and at < known.until then
                    verdict := 'busy';
                    until := known.until;
                    return;
                end if;
                -- Whoever had it before may have made his call.
                known.doubt := known.doubt or known.state = 'unknown' or known.owner <> the_owner;
            else
                known.doubt := false;
            end if;
            update ergon.provider_keys k set fingerprint = the_fingerprint, state = 'in_flight', owner = the_owner,
                until = at + lease * interval '1 second', sweep_at = at + (lease + keep) * interval '1 second',
                doubt = known.doubt, value = null, http_status = null
            where k.tenant_id = key_tenant and k.provider_name = the_provider and k.key = the_key;
            claimed := true;
        end loop;
    end if;
    verdict := 'admitted';
    -- A breaker that is believed to be shut is looked at first: whoever is refused by it anyway need not write.
    if shut then
        select * into breaker from ergon.provider_breakers b
        where b.tenant_id = the_tenant and b.provider_name = the_provider and b.capability = the_capability;
        if found then
            asked := ergon.provider_breaker_asked(breaker, at, cooldown, places, probe_lease);
            if not asked.allowed then
                verdict := 'open';
            end if;
        end if;
    end if;
    for k in 1 .. coalesce(array_length(limits, 1), 0) loop
        continue when limits[k] is null;
        start := ergon.provider_window_start(k, at);
        if verdict = 'admitted' then
            update ergon.provider_quota_states q
            set used_count = q.used_count + 1, remaining_count = q.remaining_count - 1, updated_at = at
            where q.tenant_id = the_tenant and q.provider_name = the_provider and q.capability = the_capability
            and q.window_start = start and q.limit_count = limits[k] and q.remaining_count >= 1;
        end if;
        if verdict <> 'admitted' or not found then
            quota := ergon.provider_window_ready(the_tenant, the_provider, the_capability, k, limits[k], at, 1);
            if quota.remaining_count < 1 then
                verdict := 'spent';
                kind := k;
                limit_count := quota.limit_count;
                until := quota.window_end;
                exit;
            elsif verdict = 'admitted' then
                perform ergon.provider_window_charge(the_tenant, the_provider, the_capability, start, 1, at);
            end if;
        end if;
        if verdict = 'admitted' then
            starts := starts || start;
        end if;
    end loop;
    if verdict = 'admitted' then
        select * into breaker from ergon.provider_breakers b
        where b.tenant_id = the_tenant and b.provider_name = the_provider and b.capability = the_capability;
        if found and (breaker.state <> 'closed' or breaker.override_kind is not null) then
            asked := ergon.provider_breaker_asked(breaker, at, cooldown, places, probe_lease);
            if asked.b is distinct from breaker then
                breaker := ergon.provider_breaker_locked(the_tenant, the_provider, the_capability, at);
                at := ergon.provider_clock();
                asked := ergon.provider_breaker_asked(breaker, at, cooldown, places, probe_lease);
                perform ergon.provider_breaker_kept(breaker, asked.b, at, null);
            end if;
            breaker := asked.b;
            until := asked.until;
            probe := asked.probe;
            if not asked.allowed then
                verdict := 'open';
            end if;
        end if;
    elsif verdict = 'open' then
        breaker := asked.b;
        until := asked.until;
    end if;
    if verdict = 'admitted' then
        if starts is not null then
            insert into ergon.provider_reservations
                (tenant_id, provider_name, capability, window_starts, owner, until, created_at)
            values (the_tenant, the_provider, the_capability, starts, who, at + lease * interval '1 second', at)
            returning id into reservation;
        end if;
        return;
    end if;
    foreach start in array coalesce(starts, '{}') loop
        perform ergon.provider_window_charge(the_tenant, the_provider, the_capability, start, -1, at);
    end loop;
    if the_key is not null then
        perform ergon.provider_key_ended(key_tenant, the_provider, the_key, the_owner, in_doubt, at, keep);
    end if;
    if verdict = 'spent' then
        perform ergon.provider_window_spent(quota.id, at);
    end if;
end $$;

-- The same in the ordinary case, without rows in variables and in the answer, which would double its price: the key is
-- new, the windows have a call left, the breaker is closed. Whatever is otherwise begins again in full. The answer is
-- [reservation, generation, faults in a row], or an object. The rules are how long a result is kept, and the breaker's
-- cooldown, places for probes and lease of a probe.
create function ergon.provider_admit(
    the_tenant text, the_provider text, the_capability text, limits bigint[], rules double precision[], who text,
    lease double precision, shut boolean, key_tenant text, the_key text, the_fingerprint text, the_owner text,
    first boolean, in_doubt boolean
) returns text language plpgsql as $$
declare
    at timestamptz := ergon.provider_clock();
    starts timestamptz[];
    start timestamptz;
    breaker text;
    overridden text;
    generation bigint;
    failures integer;
    reservation bigint;
begin
    perform set_config('lock_timeout', ceil(greatest(0.001, least(lease, 5)) * 1000)::text, true);
    <<ordinary>>
    begin
        exit ordinary when shut;
        if first then
            insert into ergon.provider_keys
                (tenant_id, provider_name, key, fingerprint, state, owner, until, sweep_at)
            values (key_tenant, the_provider, the_key, the_fingerprint, 'in_flight', the_owner,
                at + lease * interval '1 second', at + (lease + rules[1]) * interval '1 second')
            on conflict do nothing;
            exit ordinary when not found;
        end if;
        for k in 1 .. coalesce(array_length(limits, 1), 0) loop
            continue when limits[k] is null;
            start := ergon.provider_window_start(k, at);
            update ergon.provider_quota_states q
            set used_count = q.used_count + 1, remaining_count = q.remaining_count - 1, updated_at = at
            where q.tenant_id = the_tenant and q.provider_name = the_provider and q.capability = the_capability
            and q.window_start = start and q.limit_count = limits[k] and q.remaining_count >= 1;
            exit ordinary when not found;
            starts := starts || start;
        end loop;
        select b.state, b.override_kind, b.generation, b.consecutive_failures
        into breaker, overridden, generation, failures from ergon.provider_breakers b
        where b.tenant_id = the_tenant and b.provider_name = the_provider and b.capability = the_capability;
        exit ordinary when breaker <> 'closed' or overridden is not null;
        if starts is not null then
            insert into ergon.provider_reservations
                (tenant_id, provider_name, capability, window_starts, owner, until, created_at)
            values (the_tenant, the_provider, the_capability, starts, who, at + lease * interval '1 second', at)
            returning id into reservation;
        end if;
        return '[' || coalesce(reservation::text, 'null') || ',' || coalesce(generation, 0) || ','
            || coalesce(failures, 0) || ']';
    end ordinary;
    foreach start in array coalesce(starts, '{}') loop
        perform ergon.provider_window_charge(the_tenant, the_provider, the_capability, start, -1, at);
    end loop;
    return (
        select json_build_object('verdict', f.verdict, 'at', extract(epoch from f.at),
            'until', extract(epoch from f.until), 'kind', f.kind, 'limit', f.limit_count,
            'reservation', f.reservation, 'probe', f.probe, 'value', f.value, 'http_status', f.http_status,
            'breaker', ergon.provider_breaker_shown(f.breaker))
        from ergon.provider_admit_in_full(the_tenant, the_provider, the_capability, limits, who, lease, key_tenant,
            the_key, the_fingerprint, the_owner, first, in_doubt, rules[1], shut, rules[2], rules[3]::integer,
            rules[4]) f
    );
end $$;

-- The end of a reservation, with what was not spent of it; only once.
create function ergon.provider_reservation_ended(
    reservation bigint, unspent bigint, moment timestamptz
) returns boolean language plpgsql as $$
declare
    r ergon.provider_reservations;
    start timestamptz;
begin
    delete from ergon.provider_reservations where id = reservation returning * into r;
    if not found then
        return false;
    end if;
    if least(unspent, r.calls) > 0 then
        foreach start in array r.window_starts loop
            perform ergon.provider_window_charge(r.tenant_id, r.provider_name, r.capability, start,
                -least(unspent, r.calls), moment);
        end loop;
    end if;
    return true;
end $$;

-- After an attempt of which the breaker need not know: the key and the reservation.
create function ergon.provider_finish(
    the_provider text, patience double precision, reservation bigint, unspent bigint, key_tenant text, the_key text,
    the_owner text, done boolean, in_doubt boolean, keep double precision, the_value json, the_status integer
) returns timestamptz language plpgsql as $$
declare
    moment timestamptz := ergon.provider_clock();
begin
    perform set_config('lock_timeout', ceil(greatest(0.001, least(patience, 5)) * 1000)::text, true);
    if the_key is null then
        -- Lost with a crash of the server, this makes a window poorer or a breaker slower, and never the reverse.
        perform set_config('synchronous_commit', 'off', true);
    elsif done then
        update ergon.provider_keys k set state = 'done', value = the_value, http_status = the_status,
            until = moment + keep * interval '1 second'
        where k.tenant_id = key_tenant and k.provider_name = the_provider
        and k.key = the_key and k.owner = the_owner and k.state = 'in_flight';
    else
        perform ergon.provider_key_ended(key_tenant, the_provider, the_key, the_owner, in_doubt, moment, keep);
    end if;
    if unspent > 0 then
        perform ergon.provider_reservation_ended(reservation, unspent, moment);
    elsif reservation is not null then
        delete from ergon.provider_reservations r where r.id = reservation;
    end if;
    return moment;
end $$;

-- After an attempt that says something of the provider: all of that, and the breaker.
create function ergon.provider_conclude(
    the_tenant text, the_provider text, the_capability text, patience double precision, reservation bigint,
    unspent bigint, key_tenant text, the_key text, the_owner text, done boolean, in_doubt boolean,
    keep double precision, the_value json, the_status integer, of_generation bigint, probe bigint,
    fault boolean, error_code text, threshold integer, cooldown double precision, places integer,
    out at timestamptz, out entered text, out breaker ergon.provider_breakers
) language plpgsql as $$
declare
    before ergon.provider_breakers;
begin
    at := ergon.provider_finish(the_provider, patience, reservation, unspent, key_tenant, the_key, the_owner, done,
        in_doubt, keep, the_value, the_status);
    select * into before from ergon.provider_breakers b
    where b.tenant_id = the_tenant and b.provider_name = the_provider and b.capability = the_capability;
    if found then
        breaker := ergon.provider_breaker_told(before, at, of_generation, probe, fault, threshold, cooldown, places);
        if breaker is not distinct from before then
            return;
        end if;
    elsif fault is distinct from true or of_generation <> 0 then
        return;
    end if;
    before := ergon.provider_breaker_locked(the_tenant, the_provider, the_capability, at);
    at := ergon.provider_clock();
    breaker := ergon.provider_breaker_told(before, at, of_generation, probe, fault, threshold, cooldown, places);
    perform ergon.provider_breaker_kept(before, breaker, at,
        case when breaker is distinct from before then error_code end);
    if breaker.state <> before.state then
        entered := breaker.state;
    end if;
end $$;

-- A block of at most so many calls out of every window, in exchange for the one before it.
create function ergon.provider_lease(
    the_tenant text, the_provider text, the_capability text, limits bigint[], who text, calls bigint,
    seconds double precision, patience double precision, previous bigint, unspent bigint,
    out at timestamptz, out granted bigint, out until timestamptz, out kind integer, out limit_count bigint,
    out reservation bigint, out starts timestamptz[], out breaker ergon.provider_breakers
) language plpgsql as $$
declare
    quota ergon.provider_quota_states;
    start timestamptz;
begin
    perform set_config('lock_timeout', ceil(greatest(0.001, least(patience, 5)) * 1000)::text, true);
    at := ergon.provider_clock();
    if previous is not null then
        perform ergon.provider_reservation_ended(previous, unspent, at);
    end if;
    select * into breaker from ergon.provider_breakers b
    where b.tenant_id = the_tenant and b.provider_name = the_provider and b.capability = the_capability;
    granted := calls;
    until := at + seconds * interval '1 second';
    for k in 1 .. coalesce(array_length(limits, 1), 0) loop
        continue when limits[k] is null;
        quota := ergon.provider_window_ready(the_tenant, the_provider, the_capability, k, limits[k], at, 1);
        if quota.remaining_count < 1 then
            granted := 0;
            kind := k;
            limit_count := quota.limit_count;
            until := quota.window_end;
            starts := null;
            perform ergon.provider_window_spent(quota.id, at);
            return;
        end if;
        granted := least(granted, quota.remaining_count);
        until := least(until, quota.window_end);
        starts := starts || quota.window_start;
    end loop;
    foreach start in array coalesce(starts, '{}') loop
        perform ergon.provider_window_charge(the_tenant, the_provider, the_capability, start, granted, at);
    end loop;
    insert into ergon.provider_reservations
        (tenant_id, provider_name, capability, window_starts, owner, calls, until, created_at)
    values (the_tenant, the_provider, the_capability, coalesce(starts, '{}'), who, granted, until, at)
    returning id into reservation;
end $$;

-- An operator's word on a breaker or a quota, and who gave it and why.
create function ergon.provider_override(
    the_tenant text, the_provider text, the_capability text, the_action text, the_until timestamptz,
    seconds double precision, the_calls bigint, the_actor text, the_reason text
) returns void language plpgsql as $$
declare
    moment timestamptz := ergon.provider_clock();
    ends timestamptz := coalesce(the_until, moment + seconds * interval '1 second');
    before ergon.provider_breakers;
    b ergon.provider_breakers;
begin
    insert into ergon.provider_overrides
        (at, tenant_id, provider_name, capability, action, until, calls, actor, reason)
    values (moment, the_tenant, the_provider, the_capability, the_action, ends, the_calls, the_actor, the_reason);
    if the_action = 'extend_quota' then
        return;
    end if;
    before := ergon.provider_breaker_locked(the_tenant, the_provider, the_capability, moment);
    -- Time stands still while an override holds, so what it has changed until now comes first.
    b := ergon.provider_breaker_at(before, moment);
    if the_action <> 'lift' or b.override_kind is not null then
        b.override_kind := nullif(the_action, 'lift');
        b.override_until := case when the_action <> 'lift' then ends end;
        b.probes := '[]';
        b.generation := b.generation + 1;
    end if;
    perform ergon.provider_breaker_kept(before, b, moment, null);
end $$;
"""

#: In the order in which they can be taken away.
FUNCTION_NAMES = (
    "provider_override",
    "provider_lease",
    "provider_conclude",
    "provider_finish",
    "provider_reservation_ended",
    "provider_admit",
    "provider_admit_in_full",
    "provider_key_ended",
    "provider_breaker_locked",
    "provider_breaker_kept",
    "provider_breaker_told",
    "provider_breaker_asked",
    "provider_breaker_at",
    "provider_breaker_in",
    "provider_breaker_shown",
    "provider_window_spent",
    "provider_window_charge",
    "provider_window_ready",
    "provider_window_end",
    "provider_window_start",
    "provider_clock",
)

#: What health is read from.
MINUTE_TABLES = """
-- The attempts of one minute of UTC, counted; the truth for health, whatever became of the attempts' own rows.
create table ergon.provider_minutes (
    tenant_id text not null,
    provider_name text not null,
    capability text not null,
    minute timestamptz not null,
    success bigint not null default 0,
    retry bigint not null default 0,
    failed bigint not null default 0,
    dead_letter bigint not null default 0,
    refused bigint not null default 0,
    buckets bigint[] not null,
    longest_ms double precision not null default 0,
    last_success_at timestamptz,
    last_error_at timestamptz,
    last_error_code text,
    primary key (tenant_id, provider_name, capability, minute)
) with (fillfactor = 70);
create index provider_minutes_minute on ergon.provider_minutes using brin (minute);

-- Batches of attempts that were written. Who lost his line at a commit looks here before he repeats one; after a few
-- hours nobody does any more.
create table ergon.provider_batches (
    id uuid primary key,
    at timestamptz not null default now()
);

-- Attempts of days without a partition of their own: too late, too early, or nobody had the right to make one.
create table ergon.provider_execution_metrics_rest partition of ergon.provider_execution_metrics default;
"""

#: Calls that were given up outside of any lifecycle.
DEAD_LETTER_TABLES = """
-- One row per call that ended in failure; queue.deadletter is fed from those that were not published.
create table ergon.provider_dead_letters (
    id bigint generated always as identity primary key,
    tenant_id text not null,
    campaign_id text,
    task_name text not null,
    provider_name text,
    capability text,
    operation text,
    idempotency_key text,
    correlation_id text not null,
    reason_code text not null,
    error_type text not null,
    error_message text not null,
    attempts integer not null,
    occurred_at timestamptz not null default now(),
    -- The call that it is the end of: one call, one dead letter.
    task_id text not null unique,
    published_at timestamptz
);
create index provider_dead_letters_waiting on ergon.provider_dead_letters (id) where published_at is null;
create index provider_dead_letters_tenant on ergon.provider_dead_letters (tenant_id, occurred_at);

-- Tasks of Celery: how often each was delivered, and the one end that it had. *run* is who had the result that was not
-- reported yet.
create table ergon.provider_deliveries (
    task_id text primary key,
    task_name text not null,
    deliveries integer not null,
    state text not null default 'running' check (state in ('running', 'succeeding', 'succeeded', 'dead')),
    run text,
    created_at timestamptz not null default now(),
    ended_at timestamptz
) with (fillfactor = 50);
create index provider_deliveries_created on ergon.provider_deliveries using brin (created_at);
"""

TABLE_NAMES = (
    "provider_deliveries",
    "provider_dead_letters",
    "provider_batches",
    "provider_minutes",
    "provider_overrides",
    "provider_reservations",
    "provider_keys",
    "provider_breakers",
    "provider_execution_metrics",
    "task_executions",
    "provider_health_states",
    "provider_quota_states",
)


def upgrade() -> None:
    """Make the tables; nothing that was there is touched."""
    for statement in (
        TABLES_BY_CONTRACT,
        SHARED_STATE_TABLES,
        SHARED_STATE_FUNCTIONS,
        MINUTE_TABLES,
        DEAD_LETTER_TABLES,
    ):
        op.execute(statement)


def downgrade() -> None:
    """Take them away again, with what is in them."""
    for function in FUNCTION_NAMES:
        op.execute(f"drop function ergon.{function}")
    for table in TABLE_NAMES:
        op.execute(f"drop table ergon.{table}")
