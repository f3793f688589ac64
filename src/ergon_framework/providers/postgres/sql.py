"""The SQL statements of the provider state. An operation is a function of the schema, so that it is one round trip.

A scope is a tenant, a provider and a capability (a group of its operations). A reservation counts calls as used in each
quota window; *unspent* are those of its calls that were not made, and are returned. A key is an idempotency key,
owned by the attempt that is in flight; its fingerprint is a digest of the payload. The generation of a circuit breaker
increases with every transition, so that the outcome of an older call does not change it; a probe is a call that tests a
half-open breaker.
"""

from __future__ import annotations

from typing import Final

#: The notification channel for transitions of breakers.
CHANNEL: Final = "ergon_breaker"

#: Admits an attempt, or returns why not. ADMIT is for calls with a key, ADMIT_PLAIN for calls without one, because each
#: parameter takes time. $1 tenant; $2 provider; $3 capability; $4 limits of the minute, hour, day and month; $5 seconds
#: to keep the key, cooldown of the breaker, maximum number of probes and their lease; $6 name of the process; $7 lease
#: of the reservation in seconds; $8 whether the breaker is expected to be open; $9 tenant of the key; $10 key; $11 its
#: fingerprint; $12 its owner; $13 whether this is the first attempt; $14 whether the outcome of an earlier attempt is
#: unknown.
ADMIT: Final = """
select ergon.provider_admit(
    $1, $2, $3, $4::bigint[], $5::float8[], $6, $7::float8, $8::boolean, $9, $10, $11, $12, $13::boolean, $14::boolean
)
"""
ADMIT_PLAIN: Final = """
select ergon.provider_admit(
    $1, $2, $3, $4::bigint[], $5::float8[], $6, $7::float8, $8::boolean, null, null, null, null, false, false
)
"""

#: The common end of a successful call: its key and its reservation belong to it alone, so it waits for no lock. $1
#: tenant of the key; $2 provider; $3 key; $4 its owner; $5 result; $6 HTTP status; $7 seconds to keep the result; $8
#: reservation.
COMPLETE_SUCCESS: Final = """
with k as (
    update ergon.provider_keys k set state = 'done', value = $5::json, http_status = $6::integer,
        until = ergon.provider_clock() + $7::float8 * interval '1 second'
    where k.tenant_id = $1 and k.provider_name = $2 and k.key = $3 and k.owner = $4 and k.state = 'in_flight'
),
r as (delete from ergon.provider_reservations r where r.id = $8::bigint)
select 1
"""

#: The end of an attempt that does not change the breaker. $1 provider; $2 longest wait for a lock in seconds; $3
#: reservation; $4 unspent calls; $5 tenant of the key; $6 key; $7 its owner; $8 whether the call succeeded; $9 whether
#: its outcome is unknown; $10 seconds to keep the key; $11 result; $12 HTTP status.
FINISH: Final = """
select ergon.provider_finish(
    $1, $2::float8, $3::bigint, $4::bigint, $5, $6, $7, $8::boolean, $9::boolean, $10::float8, $11::json, $12::integer
)
"""

#: The end of an attempt that may change the breaker.
COMPLETE: Final = """
select ergon.provider_breaker_json(a.breaker), a.new_state, extract(epoch from a.at)::float8
from ergon.provider_conclude(
    %(tenant)s, %(provider)s, %(capability)s, %(timeout)s::float8, %(reservation)s::bigint,
    %(unspent)s::bigint, %(key_tenant)s, %(key)s, %(owner)s, %(done)s, %(outcome_unknown)s, %(keep)s::float8,
    %(value)s::json, %(http_status)s::integer, %(generation)s::bigint, %(probe)s::bigint,
    %(fault)s::boolean, %(code)s, %(threshold)s::integer, %(cooldown)s::float8, %(max_probes)s::integer
) a
"""

#: Reserves a block of *calls* for *seconds*, and returns the unspent calls of the *previous* one.
LEASE: Final = """
select ergon.provider_breaker_json(a.breaker), a.granted, extract(epoch from a.at)::float8,
    extract(epoch from a.until)::float8, a.kind, a.limit_count, a.reservation
from ergon.provider_lease(
    %(tenant)s, %(provider)s, %(capability)s, %(limits)s::bigint[], %(process_name)s, %(calls)s::bigint,
    %(seconds)s::float8, %(timeout)s::float8, %(previous)s::bigint, %(unspent)s::bigint
) a
"""

RELEASE_RESERVATION: Final = """
select ergon.provider_reservation_end(%(reservation)s::bigint, %(unspent)s::bigint, ergon.provider_clock())
"""

OVERRIDE: Final = """
select ergon.provider_override(
    %(tenant)s, %(provider)s, %(capability)s, %(action)s, %(until)s::timestamptz, %(seconds)s::float8,
    %(calls)s::bigint, %(actor)s, %(reason)s
)
"""

# -- queries of the breaker listener --------------------------------------------------------------------

#: The breakers of these scopes; a breaker that was never needed has no row.
SELECT_BREAKERS: Final = """
select ergon.provider_breaker_json(b), extract(epoch from ergon.provider_clock())::float8,
    w.tenant_id, w.provider_name, w.capability
from unnest(%(tenants)s::text[], %(providers)s::text[], %(capabilities)s::text[])
    as w(tenant_id, provider_name, capability)
left join ergon.provider_breakers b on (b.tenant_id, b.provider_name, b.capability)
    = (w.tenant_id, w.provider_name, w.capability)
"""

#: Breakers changed in the last 15 seconds: longer than a transaction can take from its clock to its commit.
SELECT_CHANGED_BREAKERS: Final = """
select ergon.provider_breaker_json(b), extract(epoch from ergon.provider_clock())::float8,
    b.tenant_id, b.provider_name, b.capability
from ergon.provider_breakers b where b.updated_at > ergon.provider_clock() - interval '15 seconds'
"""

# -- maintenance --------------------------------------------------------------------------------------

#: Marks reservations that their owners let expire: they stay counted as used, and are listed. Only reservations up to
#: an id that was reached some time ago are examined, because most younger ones are in flight.
RECONCILE: Final = """
with late as (
    select id from ergon.provider_reservations
    where id <= %(upto)s and lost_at is null and until < ergon.provider_clock()
    order by id limit %(most)s for update skip locked
)
update ergon.provider_reservations r set lost_at = ergon.provider_clock() from late where r.id = late.id
returning r.id, r.tenant_id, r.provider_name, r.capability, r.window_starts, r.owner, r.calls, r.until, r.lost_at,
    r.created_at
"""

SELECT_NEWEST_RESERVATION: Final = "select coalesce(max(id), 0) from ergon.provider_reservations"

DELETE_LOST: Final = """
with old as (
    select id from ergon.provider_reservations
    where lost_at < ergon.provider_clock() - %(seconds)s * interval '1 second'
    order by lost_at limit %(most)s for update skip locked
),
deleted as (delete from ergon.provider_reservations r using old where r.id = old.id returning 1)
select count(*) from deleted
"""

#: A key whose owner crashed is kept as long as one with an unknown outcome, for its payload.
DELETE_KEYS: Final = """
with old as (
    select tenant_id, provider_name, key from ergon.provider_keys
    where cleanup_at < ergon.provider_clock() and until < ergon.provider_clock()
    order by cleanup_at limit %(most)s for update skip locked
),
deleted as (delete from ergon.provider_keys k using old
    where (k.tenant_id, k.provider_name, k.key) = (old.tenant_id, old.provider_name, old.key) returning 1)
select count(*) from deleted
"""

#: Deletes old windows of the next tenants after *after*; returns the last of those tenants, null at the end.
DELETE_WINDOWS: Final = """
with recursive walk(tenant_id, n) as (
    (select q.tenant_id, 1 from ergon.provider_quota_states q where q.tenant_id > %(after)s
        order by q.tenant_id limit 1)
    union all
    select (select q.tenant_id from ergon.provider_quota_states q where q.tenant_id > walk.tenant_id
        order by q.tenant_id limit 1), walk.n + 1
    from walk where walk.tenant_id is not null and walk.n < %(tenants)s
),
old as (
    select found.id from walk, lateral (
        select q.id from ergon.provider_quota_states q where q.tenant_id = walk.tenant_id
        and q.window_end < ergon.provider_clock() - %(seconds)s * interval '1 second'
        order by q.window_end limit %(most)s for update skip locked
    ) found
),
deleted as (delete from ergon.provider_quota_states q using old where q.id = old.id returning 1)
select (select count(*) from deleted), (select max(tenant_id) from walk where n = %(tenants)s)
"""
