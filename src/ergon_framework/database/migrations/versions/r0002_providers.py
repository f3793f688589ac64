"""Providers: quota, health, breakers, keys, attempts, dead letters and overrides of operators.

A provider is a third-party API, and an attempt one try of a call of it. A breaker stops calls to a failing provider. A
key is an idempotency key: it names a call, so that repeating the call does not carry it out twice.
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

#: The tables of the provider foundation, with its names of columns; window_kind is added.
TABLES_BY_CONTRACT = """
-- Calls per window. Windows of several lengths may begin at the same time: window_start of a longer one is stored a few
-- microseconds later, and window_kind is computed from that.
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
    window_kind text generated always as (
        (array['minute', 'hour', 'day', 'month'])[
            1 + mod(extract(microseconds from (window_start at time zone 'UTC'))::integer, 60000000)
        ]
    ) stored,
    check (used_count + remaining_count = limit_count)
) with (fillfactor = 50);
create unique index provider_quota_states_window
    on ergon.provider_quota_states (tenant_id, provider_name, capability, window_start);
create index provider_quota_states_end on ergon.provider_quota_states (tenant_id, window_end);

-- The windows with their exact start.
create view ergon.provider_quota_windows as
select id, tenant_id, provider_name, capability, window_kind, date_trunc('second', window_start, 'UTC') as window_start,
    window_end, limit_count, used_count, remaining_count, last_exhausted_at, updated_at
from ergon.provider_quota_states;

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
create unique index provider_health_states_scope
    on ergon.provider_health_states (tenant_id, provider_name, capability);
create index provider_health_states_breaker on ergon.provider_health_states (tenant_id, breaker_state);

-- The task execution of an attempt. A host with such a table names its own.
create table ergon.task_executions (
    id text primary key,
    task_name text,
    created_at timestamptz not null default now()
);
create index task_executions_created on ergon.task_executions using brin (created_at);

-- One row per attempt, never changed; partitioned by day, and retention drops whole partitions.
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
create index provider_execution_metrics_scope
    on ergon.provider_execution_metrics (tenant_id, provider_name, capability, created_at);
create index provider_execution_metrics_outcome
    on ergon.provider_execution_metrics (tenant_id, outcome, created_at);
create index provider_execution_metrics_correlation on ergon.provider_execution_metrics (correlation_id);
create index provider_execution_metrics_task on ergon.provider_execution_metrics (task_execution_id)
    where task_execution_id is not null;

-- Attempts of days without a partition: too late, too early, or the worker had no right to create one.
create table ergon.provider_execution_metrics_default partition of ergon.provider_execution_metrics default;
"""

#: The live state of quota, breakers and keys. Tenant '*' stands for all tenants together. Key columns compare bytes and
#: have no checks, because a collation or a check takes longer than the rest of a statement.
SHARED_STATE_TABLES = """
-- The shared state of a breaker; a closed breaker without a fault has no row.
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
    probes_started bigint not null default 0,
    probe_successes integer not null default 0,
    override_kind text check (override_kind in ('force_open', 'disable')),
    override_until timestamptz,
    updated_at timestamptz not null default now(),
    primary key (tenant_id, provider_name, capability)
) with (fillfactor = 50);
-- Recent changes, for processes that receive no notifications.
create index provider_breakers_updated on ergon.provider_breakers (updated_at);

-- One idempotency key, one call: its owner, or its result as JSON text, unchanged. A result that cannot be stored is a
-- done key without a value. At cleanup_at the row is obsolete; written once, so that the end of a call changes no
-- index.
create table ergon.provider_keys (
    tenant_id text collate "C" not null,
    provider_name text collate "C" not null,
    key text collate "C" not null,
    fingerprint text not null,
    -- in_flight, done or unknown.
    state text not null,
    owner text not null,
    until timestamptz not null,
    cleanup_at timestamptz not null,
    -- Whether an earlier call with this key may have been made.
    prior_call_unknown boolean not null default false,
    value json,
    http_status integer,
    primary key (tenant_id, provider_name, key)
) with (fillfactor = 60);
create index provider_keys_cleanup on ergon.provider_keys (cleanup_at);

-- Reserved quota, of one attempt or a leased block. After *until* its process was killed: it stays counted as used, and
-- is listed.
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

-- Overrides of operators; rows are added and never changed.
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
create index provider_overrides_scope on ergon.provider_overrides (tenant_id, provider_name, capability, at);
create index provider_overrides_quota on ergon.provider_overrides (tenant_id, provider_name, capability, id)
    where action = 'extend_quota';
"""

#: Each operation is one statement. The rules are those of ``providers.circuit_breaker``, ``quota`` and ``idempotency``;
#: a model test compares the two. The order of locks is: key, windows from the shortest to the longest, breaker.
SHARED_STATE_FUNCTIONS = """
-- The clock of all processes.
create function ergon.provider_clock() returns timestamptz language sql volatile as 'select clock_timestamp()';

-- The windows of a moment, in UTC: 1 is the minute, 2 the hour, 3 the day, 4 the month. The start of a longer one is
-- later by kind - 1 microseconds.
create function ergon.provider_window_start(kind integer, moment timestamptz) returns timestamptz language sql stable as
$$ select (date_trunc((array['minute', 'hour', 'day', 'month'])[kind], moment at time zone 'UTC') at time zone 'UTC')
    + (kind - 1) * interval '1 microsecond' $$;

create function ergon.provider_window_end(kind integer, moment timestamptz) returns timestamptz language sql stable as
$$ select (date_trunc((array['minute', 'hour', 'day', 'month'])[kind], moment at time zone 'UTC')
    + (array['1 minute', '1 hour', '1 day', '1 month'])[kind]::interval) at time zone 'UTC' $$;

-- Returns the window's row, created if missing, with the current limit of policy and operators; locked unless
-- exhausted.
create function ergon.provider_window_ensure(
    the_tenant text, the_provider text, the_capability text, kind integer, policy_limit bigint, moment timestamptz,
    calls bigint
) returns ergon.provider_quota_states language plpgsql as $$
declare
    starts_at timestamptz := ergon.provider_window_start(kind, moment);
    current_limit bigint := policy_limit + coalesce((
        select case when o.until > moment then o.calls else 0 end from ergon.provider_overrides o
        where o.tenant_id = the_tenant and o.provider_name = the_provider and o.capability = the_capability
        and o.action = 'extend_quota' order by o.id desc limit 1), 0);
    quota ergon.provider_quota_states;
begin
    select * into quota from ergon.provider_quota_states q
    where q.tenant_id = the_tenant and q.provider_name = the_provider and q.capability = the_capability
    and q.window_start = starts_at;
    if found and quota.limit_count = current_limit and quota.remaining_count < calls then
        return quota;
    end if;
    if not found then
        insert into ergon.provider_quota_states
            (tenant_id, provider_name, capability, window_start, window_end, limit_count, remaining_count, updated_at)
        values (the_tenant, the_provider, the_capability, starts_at, ergon.provider_window_end(kind, moment),
            current_limit, current_limit, moment)
        on conflict (tenant_id, provider_name, capability, window_start) do nothing;
    end if;
    select * into quota from ergon.provider_quota_states q
    where q.tenant_id = the_tenant and q.provider_name = the_provider and q.capability = the_capability
    and q.window_start = starts_at for update;
    if quota.limit_count <> current_limit then
        update ergon.provider_quota_states q
        set limit_count = current_limit, remaining_count = current_limit - q.used_count, updated_at = moment
        where q.id = quota.id returning * into quota;
    end if;
    return quota;
end $$;

-- Adds calls to an existing window; a negative number removes them.
create function ergon.provider_window_charge(
    the_tenant text, the_provider text, the_capability text, starts_at timestamptz, calls bigint, moment timestamptz
) returns void language plpgsql as $$
begin
    update ergon.provider_quota_states q
    set used_count = q.used_count + calls, remaining_count = q.remaining_count - calls, updated_at = moment
    where q.tenant_id = the_tenant and q.provider_name = the_provider and q.capability = the_capability
    and q.window_start = starts_at;
end $$;

-- Records that a window was exhausted, at most once a second, so that rejections write less than calls.
create function ergon.provider_window_mark_exhausted(window_id bigint, moment timestamptz) returns void
language plpgsql as $$
begin
    update ergon.provider_quota_states q set last_exhausted_at = moment, updated_at = moment
    where q.id = window_id and (q.last_exhausted_at is null or q.last_exhausted_at < moment - interval '1 second');
end $$;

-- The breaker as the processes cache it: without its probes.
create function ergon.provider_breaker_json(b ergon.provider_breakers) returns json language sql stable as
$$ select json_build_array(b.state, b.consecutive_failures, extract(epoch from b.open_until), b.generation,
    b.override_kind, extract(epoch from b.override_until)) $$;

create function ergon.provider_breaker_enter(
    b ergon.provider_breakers, new_state text, until timestamptz
) returns ergon.provider_breakers language plpgsql immutable as $$
begin
    b.state := new_state;
    b.open_until := until;
    b.generation := b.generation + 1;
    b.probes := '[]';
    b.probes_started := 0;
    b.probe_successes := 0;
    return b;
end $$;

-- Applies the changes that time alone causes.
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
        return ergon.provider_breaker_enter(b, 'half_open', null);
    end if;
    if b.probes <> '[]' then
        b.probes := (select coalesce(jsonb_agg(probe order by ordinal), '[]')
            from jsonb_array_elements(b.probes) with ordinality as p(probe, ordinal)
            where extract(epoch from moment) < (probe ->> 1)::numeric);
    end if;
    return b;
end $$;

-- Whether one more call may be made, and the breaker afterwards.
create function ergon.provider_breaker_request(
    inout b ergon.provider_breakers, moment timestamptz, cooldown double precision, max_probes integer,
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
        if b.probe_successes >= max_probes then
            b.consecutive_failures := 0;
            b := ergon.provider_breaker_enter(b, 'closed', null);
        elsif jsonb_array_length(b.probes) + b.probe_successes >= max_probes then
            allowed := false;
            until := least(
                (select to_timestamp(min((each ->> 1)::numeric)::double precision)
                    from jsonb_array_elements(b.probes) as p(each)),
                moment + coalesce(nullif(cooldown, 0), probe_lease) * interval '1 second');
        else
            b.probes_started := b.probes_started + 1;
            probe := b.probes_started;
            b.probes := b.probes || jsonb_build_array(jsonb_build_array(
                probe, extract(epoch from moment + probe_lease * interval '1 second')));
        end if;
    end if;
end $$;

-- The breaker after a call: with a fault, without one, or null if the outcome is unknown.
create function ergon.provider_breaker_record(
    b ergon.provider_breakers, moment timestamptz, of_generation bigint, probe bigint, fault boolean,
    threshold integer, cooldown double precision, max_probes integer
) returns ergon.provider_breakers language plpgsql immutable as $$
declare
    remaining_probes jsonb;
begin
    b := ergon.provider_breaker_at(b, moment);
    if of_generation <> b.generation or b.override_kind is not null then
        return b;
    end if;
    if probe is not null then
        remaining_probes := (select coalesce(jsonb_agg(each order by ordinal), '[]')
            from jsonb_array_elements(b.probes) with ordinality as p(each, ordinal)
            where (each ->> 0)::bigint <> probe);
        if remaining_probes = b.probes then
            return b;
        end if;
        b.probes := remaining_probes;
    end if;
    if fault is null then
        return b;
    end if;
    if fault then
        b.consecutive_failures := b.consecutive_failures + 1;
        if probe is not null or b.consecutive_failures >= threshold then
            b := ergon.provider_breaker_enter(b, 'open', moment + cooldown * interval '1 second');
        end if;
    elsif probe is null then
        b.consecutive_failures := 0;
    else
        b.probe_successes := b.probe_successes + 1;
        if b.probe_successes >= max_probes then
            b.consecutive_failures := 0;
            b := ergon.provider_breaker_enter(b, 'closed', null);
        end if;
    end if;
    return b;
end $$;

-- Writes the breaker and its health row, and notifies of a transition.
create function ergon.provider_breaker_save(
    before ergon.provider_breakers, b ergon.provider_breakers, moment timestamptz, error_code text
) returns void language plpgsql as $$
begin
    if before is not distinct from b and error_code is null then
        return;
    end if;
    update ergon.provider_breakers set state = b.state, consecutive_failures = b.consecutive_failures,
        open_until = b.open_until, generation = b.generation, probes = b.probes, probes_started = b.probes_started,
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

create function ergon.provider_breaker_lock(
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

-- Ends a key whose call failed: the key is deleted, or its outcome is unknown, of this call or of an earlier one.
create function ergon.provider_key_end(
    key_tenant text, the_provider text, the_key text, the_owner text, is_unknown boolean, moment timestamptz,
    keep_seconds double precision
) returns void language plpgsql as $$
begin
    if not is_unknown then
        delete from ergon.provider_keys k where k.tenant_id = key_tenant and k.provider_name = the_provider
        and k.key = the_key and k.owner = the_owner and k.state = 'in_flight' and not k.prior_call_unknown;
        if found then
            return;
        end if;
    end if;
    update ergon.provider_keys k set state = 'unknown', until = moment + keep_seconds * interval '1 second'
    where k.tenant_id = key_tenant and k.provider_name = the_provider
    and k.key = the_key and k.owner = the_owner and k.state = 'in_flight';
end $$;

-- Before an attempt: the key, a call in each window, the breaker. A rejection leaves no change behind.
create function ergon.provider_admit_full(
    the_tenant text, the_provider text, the_capability text, limits bigint[], process_name text,
    lease_seconds double precision, key_tenant text, the_key text, the_fingerprint text, the_owner text,
    is_first_attempt boolean, is_unknown boolean, keep_seconds double precision, expect_open boolean,
    cooldown double precision, max_probes integer, probe_lease double precision,
    out decision text, out at timestamptz, out until timestamptz, out kind integer, out limit_count bigint,
    out reservation bigint, out probe bigint, out value json, out http_status integer,
    out breaker ergon.provider_breakers
) language plpgsql as $$
declare
    start_times timestamptz[];
    existing ergon.provider_keys;
    claimed boolean := false;
    quota ergon.provider_quota_states;
    request record;
    starts_at timestamptz;
begin
    at := ergon.provider_clock();
    if is_first_attempt then
        insert into ergon.provider_keys (tenant_id, provider_name, key, fingerprint, state, owner, until, cleanup_at)
        values (key_tenant, the_provider, the_key, the_fingerprint, 'in_flight', the_owner,
            at + lease_seconds * interval '1 second', at + (lease_seconds + keep_seconds) * interval '1 second')
        on conflict do nothing;
        claimed := found;
        while not claimed loop
            select * into existing from ergon.provider_keys k
            where k.tenant_id = key_tenant and k.provider_name = the_provider and k.key = the_key for update;
            if not found then
                -- It was deleted meanwhile.
                insert into ergon.provider_keys
                    (tenant_id, provider_name, key, fingerprint, state, owner, until, cleanup_at)
                values (key_tenant, the_provider, the_key, the_fingerprint, 'in_flight', the_owner,
                    at + lease_seconds * interval '1 second',
                    at + (lease_seconds + keep_seconds) * interval '1 second')
                on conflict do nothing;
                claimed := found;
                continue;
            end if;
            at := ergon.provider_clock();
            if existing.state = 'in_flight' or at < existing.until then
                if existing.fingerprint <> the_fingerprint then
                    decision := 'conflict';
                    return;
                elsif existing.state = 'done' then
                    decision := 'replayed';
                    value := existing.value;
                    http_status := existing.http_status;
                    return;
                elsif existing.state = 'in_flight' and existing.owner <> the_owner and at < existing.until then
                    decision := 'busy';
                    until := existing.until;
                    return;
                end if;
                -- The previous owner may have made its call.
                existing.prior_call_unknown := existing.prior_call_unknown or existing.state = 'unknown'
                    or existing.owner <> the_owner;
            else
                existing.prior_call_unknown := false;
            end if;
            update ergon.provider_keys k set fingerprint = the_fingerprint, state = 'in_flight', owner = the_owner,
                until = at + lease_seconds * interval '1 second',
                cleanup_at = at + (lease_seconds + keep_seconds) * interval '1 second',
                prior_call_unknown = existing.prior_call_unknown, value = null, http_status = null
            where k.tenant_id = key_tenant and k.provider_name = the_provider and k.key = the_key;
            claimed := true;
        end loop;
    end if;
    decision := 'admitted';
    -- If the breaker is probably open it is checked first: a rejected call then writes nothing.
    if expect_open then
        select * into breaker from ergon.provider_breakers b
        where b.tenant_id = the_tenant and b.provider_name = the_provider and b.capability = the_capability;
        if found then
            request := ergon.provider_breaker_request(breaker, at, cooldown, max_probes, probe_lease);
            if not request.allowed then
                decision := 'open';
            end if;
        end if;
    end if;
    for k in 1 .. coalesce(array_length(limits, 1), 0) loop
        continue when limits[k] is null;
        starts_at := ergon.provider_window_start(k, at);
        if decision = 'admitted' then
            update ergon.provider_quota_states q
            set used_count = q.used_count + 1, remaining_count = q.remaining_count - 1, updated_at = at
            where q.tenant_id = the_tenant and q.provider_name = the_provider and q.capability = the_capability
            and q.window_start = starts_at and q.limit_count = limits[k] and q.remaining_count >= 1;
        end if;
        if decision <> 'admitted' or not found then
            quota := ergon.provider_window_ensure(the_tenant, the_provider, the_capability, k, limits[k], at, 1);
            if quota.remaining_count < 1 then
                decision := 'exhausted';
                kind := k;
                limit_count := quota.limit_count;
                until := quota.window_end;
                exit;
            elsif decision = 'admitted' then
                perform ergon.provider_window_charge(the_tenant, the_provider, the_capability, starts_at, 1, at);
            end if;
        end if;
        if decision = 'admitted' then
            start_times := start_times || starts_at;
        end if;
    end loop;
    if decision = 'admitted' then
        select * into breaker from ergon.provider_breakers b
        where b.tenant_id = the_tenant and b.provider_name = the_provider and b.capability = the_capability;
        if found and (breaker.state <> 'closed' or breaker.override_kind is not null) then
            request := ergon.provider_breaker_request(breaker, at, cooldown, max_probes, probe_lease);
            if request.b is distinct from breaker then
                breaker := ergon.provider_breaker_lock(the_tenant, the_provider, the_capability, at);
                at := ergon.provider_clock();
                request := ergon.provider_breaker_request(breaker, at, cooldown, max_probes, probe_lease);
                perform ergon.provider_breaker_save(breaker, request.b, at, null);
            end if;
            breaker := request.b;
            until := request.until;
            probe := request.probe;
            if not request.allowed then
                decision := 'open';
            end if;
        end if;
    elsif decision = 'open' then
        breaker := request.b;
        until := request.until;
    end if;
    if decision = 'admitted' then
        if start_times is not null then
            insert into ergon.provider_reservations
                (tenant_id, provider_name, capability, window_starts, owner, until, created_at)
            values (the_tenant, the_provider, the_capability, start_times, process_name,
                at + lease_seconds * interval '1 second', at)
            returning id into reservation;
        end if;
        return;
    end if;
    foreach starts_at in array coalesce(start_times, '{}') loop
        perform ergon.provider_window_charge(the_tenant, the_provider, the_capability, starts_at, -1, at);
    end loop;
    if the_key is not null then
        perform ergon.provider_key_end(key_tenant, the_provider, the_key, the_owner, is_unknown, at, keep_seconds);
    end if;
    if decision = 'exhausted' then
        perform ergon.provider_window_mark_exhausted(quota.id, at);
    end if;
end $$;

-- The same for the common case, without composite variables, which would double its time: the key is new, the windows
-- have a call left, the breaker is closed. Any other case starts again with provider_admit_full. Returns [reservation,
-- generation, consecutive failures], or an object. The settings are: seconds that a result is kept, cooldown, maximum
-- number of probes, and lease of a probe.
create function ergon.provider_admit(
    the_tenant text, the_provider text, the_capability text, limits bigint[], settings double precision[],
    process_name text, lease_seconds double precision, expect_open boolean, key_tenant text, the_key text,
    the_fingerprint text, the_owner text, is_first_attempt boolean, is_unknown boolean
) returns text language plpgsql as $$
declare
    at timestamptz := ergon.provider_clock();
    start_times timestamptz[];
    starts_at timestamptz;
    breaker text;
    active_override text;
    generation bigint;
    failures integer;
    reservation bigint;
begin
    perform set_config('lock_timeout', ceil(greatest(0.001, least(lease_seconds, 5)) * 1000)::text, true);
    <<fast_path>>
    begin
        exit fast_path when expect_open;
        if is_first_attempt then
            insert into ergon.provider_keys
                (tenant_id, provider_name, key, fingerprint, state, owner, until, cleanup_at)
            values (key_tenant, the_provider, the_key, the_fingerprint, 'in_flight', the_owner,
                at + lease_seconds * interval '1 second', at + (lease_seconds + settings[1]) * interval '1 second')
            on conflict do nothing;
            exit fast_path when not found;
        end if;
        for k in 1 .. coalesce(array_length(limits, 1), 0) loop
            continue when limits[k] is null;
            starts_at := ergon.provider_window_start(k, at);
            update ergon.provider_quota_states q
            set used_count = q.used_count + 1, remaining_count = q.remaining_count - 1, updated_at = at
            where q.tenant_id = the_tenant and q.provider_name = the_provider and q.capability = the_capability
            and q.window_start = starts_at and q.limit_count = limits[k] and q.remaining_count >= 1;
            exit fast_path when not found;
            start_times := start_times || starts_at;
        end loop;
        select b.state, b.override_kind, b.generation, b.consecutive_failures
        into breaker, active_override, generation, failures from ergon.provider_breakers b
        where b.tenant_id = the_tenant and b.provider_name = the_provider and b.capability = the_capability;
        exit fast_path when breaker <> 'closed' or active_override is not null;
        if start_times is not null then
            insert into ergon.provider_reservations
                (tenant_id, provider_name, capability, window_starts, owner, until, created_at)
            values (the_tenant, the_provider, the_capability, start_times, process_name,
                at + lease_seconds * interval '1 second', at)
            returning id into reservation;
        end if;
        return '[' || coalesce(reservation::text, 'null') || ',' || coalesce(generation, 0) || ','
            || coalesce(failures, 0) || ']';
    end fast_path;
    foreach starts_at in array coalesce(start_times, '{}') loop
        perform ergon.provider_window_charge(the_tenant, the_provider, the_capability, starts_at, -1, at);
    end loop;
    return (
        select json_build_object('decision', f.decision, 'at', extract(epoch from f.at),
            'until', extract(epoch from f.until), 'kind', f.kind, 'limit', f.limit_count,
            'reservation', f.reservation, 'probe', f.probe, 'value', f.value, 'http_status', f.http_status,
            'breaker', ergon.provider_breaker_json(f.breaker))
        from ergon.provider_admit_full(the_tenant, the_provider, the_capability, limits, process_name, lease_seconds,
            key_tenant, the_key, the_fingerprint, the_owner, is_first_attempt, is_unknown, settings[1], expect_open,
            settings[2], settings[3]::integer, settings[4]) f
    );
end $$;

-- Ends a reservation once, and returns its unspent calls.
create function ergon.provider_reservation_end(
    reservation bigint, unspent bigint, moment timestamptz
) returns boolean language plpgsql as $$
declare
    r ergon.provider_reservations;
    starts_at timestamptz;
begin
    delete from ergon.provider_reservations where id = reservation returning * into r;
    if not found then
        return false;
    end if;
    if least(unspent, r.calls) > 0 then
        foreach starts_at in array r.window_starts loop
            perform ergon.provider_window_charge(r.tenant_id, r.provider_name, r.capability, starts_at,
                -least(unspent, r.calls), moment);
        end loop;
    end if;
    return true;
end $$;

-- After an attempt that does not change the breaker: the key and the reservation.
create function ergon.provider_finish(
    the_provider text, max_wait_seconds double precision, reservation bigint, unspent bigint, key_tenant text,
    the_key text, the_owner text, done boolean, is_unknown boolean, keep_seconds double precision, the_value json,
    the_status integer
) returns timestamptz language plpgsql as $$
declare
    moment timestamptz := ergon.provider_clock();
begin
    perform set_config('lock_timeout', ceil(greatest(0.001, least(max_wait_seconds, 5)) * 1000)::text, true);
    if the_key is null then
        -- If a crash of the server loses this, a window has fewer calls or a breaker is slower, never the reverse.
        perform set_config('synchronous_commit', 'off', true);
    elsif done then
        update ergon.provider_keys k set state = 'done', value = the_value, http_status = the_status,
            until = moment + keep_seconds * interval '1 second'
        where k.tenant_id = key_tenant and k.provider_name = the_provider
        and k.key = the_key and k.owner = the_owner and k.state = 'in_flight';
    else
        perform ergon.provider_key_end(key_tenant, the_provider, the_key, the_owner, is_unknown, moment, keep_seconds);
    end if;
    if unspent > 0 then
        perform ergon.provider_reservation_end(reservation, unspent, moment);
    elsif reservation is not null then
        delete from ergon.provider_reservations r where r.id = reservation;
    end if;
    return moment;
end $$;

-- After an attempt that may change the breaker: provider_finish, and the breaker.
create function ergon.provider_conclude(
    the_tenant text, the_provider text, the_capability text, max_wait_seconds double precision, reservation bigint,
    unspent bigint, key_tenant text, the_key text, the_owner text, done boolean, is_unknown boolean,
    keep_seconds double precision, the_value json, the_status integer, of_generation bigint, probe bigint,
    fault boolean, error_code text, threshold integer, cooldown double precision, max_probes integer,
    out at timestamptz, out new_state text, out breaker ergon.provider_breakers
) language plpgsql as $$
declare
    before ergon.provider_breakers;
begin
    at := ergon.provider_finish(the_provider, max_wait_seconds, reservation, unspent, key_tenant, the_key, the_owner,
        done, is_unknown, keep_seconds, the_value, the_status);
    select * into before from ergon.provider_breakers b
    where b.tenant_id = the_tenant and b.provider_name = the_provider and b.capability = the_capability;
    if found then
        breaker := ergon.provider_breaker_record(before, at, of_generation, probe, fault, threshold, cooldown,
            max_probes);
        if breaker is not distinct from before then
            return;
        end if;
    elsif fault is distinct from true or of_generation <> 0 then
        return;
    end if;
    before := ergon.provider_breaker_lock(the_tenant, the_provider, the_capability, at);
    at := ergon.provider_clock();
    breaker := ergon.provider_breaker_record(before, at, of_generation, probe, fault, threshold, cooldown, max_probes);
    perform ergon.provider_breaker_save(before, breaker, at,
        case when breaker is distinct from before then error_code end);
    if breaker.state <> before.state then
        new_state := breaker.state;
    end if;
end $$;

-- Reserves a block of at most *calls* in every window, and ends the *previous* block.
create function ergon.provider_lease(
    the_tenant text, the_provider text, the_capability text, limits bigint[], process_name text, calls bigint,
    lease_seconds double precision, max_wait_seconds double precision, previous bigint, unspent bigint,
    out at timestamptz, out granted bigint, out until timestamptz, out kind integer, out limit_count bigint,
    out reservation bigint, out start_times timestamptz[], out breaker ergon.provider_breakers
) language plpgsql as $$
declare
    quota ergon.provider_quota_states;
    starts_at timestamptz;
begin
    perform set_config('lock_timeout', ceil(greatest(0.001, least(max_wait_seconds, 5)) * 1000)::text, true);
    at := ergon.provider_clock();
    if previous is not null then
        perform ergon.provider_reservation_end(previous, unspent, at);
    end if;
    select * into breaker from ergon.provider_breakers b
    where b.tenant_id = the_tenant and b.provider_name = the_provider and b.capability = the_capability;
    granted := calls;
    until := at + lease_seconds * interval '1 second';
    for k in 1 .. coalesce(array_length(limits, 1), 0) loop
        continue when limits[k] is null;
        quota := ergon.provider_window_ensure(the_tenant, the_provider, the_capability, k, limits[k], at, 1);
        if quota.remaining_count < 1 then
            granted := 0;
            kind := k;
            limit_count := quota.limit_count;
            until := quota.window_end;
            start_times := null;
            perform ergon.provider_window_mark_exhausted(quota.id, at);
            return;
        end if;
        granted := least(granted, quota.remaining_count);
        until := least(until, quota.window_end);
        start_times := start_times || quota.window_start;
    end loop;
    foreach starts_at in array coalesce(start_times, '{}') loop
        perform ergon.provider_window_charge(the_tenant, the_provider, the_capability, starts_at, granted, at);
    end loop;
    insert into ergon.provider_reservations
        (tenant_id, provider_name, capability, window_starts, owner, calls, until, created_at)
    values (the_tenant, the_provider, the_capability, coalesce(start_times, '{}'), process_name, granted, until, at)
    returning id into reservation;
end $$;

-- An operator's override of a breaker or a quota, with actor and reason.
create function ergon.provider_override(
    the_tenant text, the_provider text, the_capability text, the_action text, the_until timestamptz,
    duration_seconds double precision, the_calls bigint, the_actor text, the_reason text
) returns void language plpgsql as $$
declare
    moment timestamptz := ergon.provider_clock();
    ends_at timestamptz := coalesce(the_until, moment + duration_seconds * interval '1 second');
    before ergon.provider_breakers;
    b ergon.provider_breakers;
begin
    insert into ergon.provider_overrides
        (at, tenant_id, provider_name, capability, action, until, calls, actor, reason)
    values (moment, the_tenant, the_provider, the_capability, the_action, ends_at, the_calls, the_actor, the_reason);
    if the_action = 'extend_quota' then
        return;
    end if;
    before := ergon.provider_breaker_lock(the_tenant, the_provider, the_capability, moment);
    -- Time stands still during an override, so earlier changes are applied first.
    b := ergon.provider_breaker_at(before, moment);
    if the_action <> 'lift' or b.override_kind is not null then
        b.override_kind := nullif(the_action, 'lift');
        b.override_until := case when the_action <> 'lift' then ends_at end;
        b.probes := '[]';
        b.generation := b.generation + 1;
    end if;
    perform ergon.provider_breaker_save(before, b, moment, null);
end $$;
"""

MINUTE_TABLES = """
-- The attempts of one minute of UTC, counted; health is computed from them.
create table ergon.provider_minute_rollups (
    tenant_id text not null,
    provider_name text not null,
    capability text not null,
    minute timestamptz not null,
    success bigint not null default 0,
    retry bigint not null default 0,
    failed bigint not null default 0,
    dead_letter bigint not null default 0,
    rejected bigint not null default 0,
    buckets bigint[] not null,
    max_ms double precision not null default 0,
    last_success_at timestamptz,
    last_error_at timestamptz,
    last_error_code text,
    primary key (tenant_id, provider_name, capability, minute)
) with (fillfactor = 70);
create index provider_minute_rollups_minute on ergon.provider_minute_rollups using brin (minute);

-- Written batches of attempts. A writer that lost its connection at a commit looks here before it repeats one; rows of
-- more than a few hours are obsolete.
create table ergon.provider_batches (
    id uuid primary key,
    at timestamptz not null default now()
);
"""

#: Calls that failed outside of a transaction's lifecycle.
DEAD_LETTER_TABLES = """
-- One row per failed call; rows without published_at are published to queue.deadletter.
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
    -- One call, one dead letter.
    task_id text not null unique,
    published_at timestamptz
);
create index provider_dead_letters_unpublished on ergon.provider_dead_letters (id) where published_at is null;
create index provider_dead_letters_tenant on ergon.provider_dead_letters (tenant_id, occurred_at);

-- Celery tasks: the number of deliveries, and the outcome. *run* is the run whose result is not reported yet.
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

DEAD_LETTER_FUNCTIONS = """
-- The table that attempts refer to, and the type of its id.
create function ergon.provider_task_table(out task_table regclass, out id_type text) language sql stable as $$
    select c.confrelid::regclass, format_type(a.atttypid, null) from pg_constraint c
    join pg_attribute a on a.attrelid = c.confrelid and a.attname = 'id'
    where c.contype = 'f' and c.conrelid = 'ergon.provider_execution_metrics'::regclass limit 1
$$;

-- Counts a dead letter: one row of metrics, and one in the minute's roll-up.
create function ergon.provider_dead_letter_count(
    the_tenant text, the_execution text, the_provider text, the_capability text, the_operation text, the_key text,
    the_correlation text, attempts integer, max_attempts integer, budget_ms double precision, the_reason text,
    is_retryable boolean, the_status integer, moment timestamptz
) returns void language plpgsql as $$
declare
    host_table regclass;
    kind text;
    execution text;
begin
    select t.task_table, t.id_type into host_table, kind from ergon.provider_task_table() t;
    if the_execution is not null and host_table = 'ergon.task_executions'::regclass then
        insert into ergon.task_executions (id) values (the_execution) on conflict do nothing;
        execution := the_execution;
    elsif the_execution is not null then
        begin
            execute 'select id::text from ' || host_table || ' where id = $1::' || kind
            into execution using the_execution;
        exception when data_exception then
            execution := null;
        end;
    end if;
    execute '
        insert into ergon.provider_execution_metrics (
            tenant_id, task_execution_id, provider_name, capability, operation, idempotency_key, correlation_id,
            attempt_number, max_attempts, duration_ms, timeout_budget_ms, outcome, reason_code, retryable,
            http_status, created_at
        ) values ($1, $2::' || kind || ', $3, $4, $5, $6, $7, $8, $9, 0, $10, ''dead_letter'', $11, $12, $13, $14)'
    using the_tenant, execution, the_provider, the_capability, the_operation, the_key, the_correlation, attempts,
        max_attempts, budget_ms, the_reason, is_retryable, the_status, moment;
    insert into ergon.provider_minute_rollups as rollup
        (tenant_id, provider_name, capability, minute, dead_letter, buckets)
    values (the_tenant, the_provider, the_capability, date_trunc('minute', moment, 'UTC'), 1,
        array_fill(0::bigint, array[52]))
    on conflict (tenant_id, provider_name, capability, minute) do update set dead_letter = rollup.dead_letter + 1;
    insert into ergon.provider_health_states (tenant_id, provider_name, capability)
    values (the_tenant, the_provider, the_capability) on conflict do nothing;
end $$;
"""

#: In the order in which they are dropped.
FUNCTION_NAMES = (
    "provider_dead_letter_count",
    "provider_task_table",
    "provider_override",
    "provider_lease",
    "provider_conclude",
    "provider_finish",
    "provider_reservation_end",
    "provider_admit",
    "provider_admit_full",
    "provider_key_end",
    "provider_breaker_lock",
    "provider_breaker_save",
    "provider_breaker_record",
    "provider_breaker_request",
    "provider_breaker_at",
    "provider_breaker_enter",
    "provider_breaker_json",
    "provider_window_mark_exhausted",
    "provider_window_charge",
    "provider_window_ensure",
    "provider_window_end",
    "provider_window_start",
    "provider_clock",
)
TABLE_NAMES = (
    "provider_deliveries",
    "provider_dead_letters",
    "provider_batches",
    "provider_minute_rollups",
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
    """Create the tables and functions."""
    for statement in (
        TABLES_BY_CONTRACT,
        SHARED_STATE_TABLES,
        SHARED_STATE_FUNCTIONS,
        MINUTE_TABLES,
        DEAD_LETTER_TABLES,
        DEAD_LETTER_FUNCTIONS,
    ):
        op.execute(statement)


def downgrade() -> None:
    """Drop the functions, the view, and the tables with their rows."""
    for function in FUNCTION_NAMES:
        op.execute(f"drop function ergon.{function}")
    op.execute("drop view ergon.provider_quota_windows")
    for table in TABLE_NAMES:
        op.execute(f"drop table ergon.{table}")
