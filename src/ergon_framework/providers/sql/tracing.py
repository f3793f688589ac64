"""Tracing: the calls to providers that were made for one business process, and what held them back.

Attempts are found by their correlation, which has an index; everything else by what the attempts say. So a call of
which no attempt was written down is not found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final, NamedTuple

from ergon_framework.history import Event, History, Kind, Place, State, Value, in_order
from ergon_framework.providers.sql.names import ALL
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.schema.snapshot import in_one_snapshot

#: The most attempts that are told of, the latest.
MOST: Final = 200
_WINDOWS: Final = ("minute", "hour", "day", "month")
_ENDS: Final = {"success": State.SUCCEEDED, "retry": State.RETRYING}

ATTEMPTS: Final = """
select m.tenant_id, m.provider_name, m.capability, m.operation, m.idempotency_key, m.correlation_id,
    m.task_execution_id, m.attempt_number, m.max_attempts, m.duration_ms, m.timeout_budget_ms, m.outcome, m.reason_code,
    m.http_status, m.created_at
from ergon.provider_execution_metrics m where m.correlation_id = any(%(names)s)
    and m.tenant_id = any(coalesce(%(whose)s::text[], array[m.tenant_id]))
order by m.created_at desc, m.attempt_number desc limit %(most)s
"""

#: The windows of those moments, as they stand now: a window that is over keeps its last count.
QUOTAS: Final = """
select a.n, k.kind, s.tenant_id, s.used_count, s.limit_count
from unnest(%(tenants)s::text[], %(providers)s::text[], %(capabilities)s::text[], %(moments)s::timestamptz[])
    with ordinality as a(tenant, provider, capability, at, n)
cross join generate_series(1, 4) as k(kind)
cross join unnest(array[a.tenant, %(all)s::text]) as t(tenant)
join ergon.provider_quota_states s on s.tenant_id = t.tenant and s.provider_name = a.provider
    and s.capability = a.capability and s.window_start = ergon.provider_window_start(k.kind, a.at)
order by a.n, k.kind
"""

BREAKERS: Final = """
select b.tenant_id, b.provider_name, b.capability, b.state, b.consecutive_failures, b.open_until, b.override_kind,
    b.override_until, b.updated_at
from unnest(%(tenants)s::text[], %(providers)s::text[], %(capabilities)s::text[]) as a(tenant, provider, capability)
cross join unnest(array[a.tenant, %(all)s::text]) as t(tenant)
join ergon.provider_breakers b
    on b.tenant_id = t.tenant and b.provider_name = a.provider and b.capability = a.capability
"""

#: What operators said while the attempts were made, or shortly before.
OVERRIDES: Final = """
select o.tenant_id, o.provider_name, o.capability, o.at, o.action, o.until, o.calls
from unnest(%(tenants)s::text[], %(providers)s::text[], %(capabilities)s::text[]) as a(tenant, provider, capability)
cross join unnest(array[a.tenant, %(all)s::text]) as t(tenant)
join ergon.provider_overrides o on o.tenant_id = t.tenant and o.provider_name = a.provider
    and o.capability = a.capability and o.at between %(first)s::timestamptz - interval '1 day' and %(last)s
order by o.at limit %(most)s
"""

KEYS: Final = """
select k.tenant_id, k.provider_name, k.key, k.state, k.until, k.doubt, k.until > now()
from unnest(%(tenants)s::text[], %(providers)s::text[], %(keys)s::text[]) as a(tenant, provider, key)
join ergon.provider_keys k on k.tenant_id = a.tenant and k.provider_name = a.provider and k.key = a.key
"""

#: Those of a task of Celery by its id, the others by whose they are and when: they have no index by correlation.
DEAD: Final = """
select d.id, d.tenant_id, d.provider_name, d.capability, d.operation, d.task_name, d.task_id, d.correlation_id,
    d.reason_code, d.error_type, d.error_message, d.attempts, d.occurred_at, d.published_at
from ergon.provider_dead_letters d where d.task_id = any(%(names)s)
    and d.tenant_id = any(coalesce(%(whose)s::text[], array[d.tenant_id]))
union
select d.id, d.tenant_id, d.provider_name, d.capability, d.operation, d.task_name, d.task_id, d.correlation_id,
    d.reason_code, d.error_type, d.error_message, d.attempts, d.occurred_at, d.published_at
from unnest(%(tenants)s::text[]) as t(tenant)
join ergon.provider_dead_letters d on d.tenant_id = t.tenant
    and d.occurred_at between %(first)s::timestamptz and %(last)s::timestamptz + interval '1 hour'
    and d.correlation_id = any(%(names)s)
order by 1 limit %(most)s
"""


class _Attempt(NamedTuple):
    """A row of ``ATTEMPTS``."""

    tenant: str
    provider: str
    capability: str
    operation: str
    key: str | None
    correlation: str
    task_execution: str | None
    number: int
    most: int
    duration_ms: float
    budget_ms: float
    outcome: str
    reason: str | None
    status: int | None
    at: datetime

    @property
    def account(self) -> tuple[str, str, str]:
        return self.tenant, self.provider, self.capability

    @property
    def call(self) -> tuple[str, ...]:
        """What tells calls apart: without a key, all of one operation are taken for one."""
        return (*self.account, self.operation, self.key or "", self.correlation)


class _Breaker(NamedTuple):
    """A row of ``BREAKERS`` behind its account."""

    state: str
    failures: int
    open_until: datetime | None
    override: str | None
    override_until: datetime | None
    updated_at: datetime


class _Dead(NamedTuple):
    """A row of ``DEAD``."""

    number: int
    tenant: str
    provider: str | None
    capability: str | None
    operation: str | None
    task: str
    task_id: str
    correlation: str
    reason: str
    error_type: str
    message: str
    attempts: int
    at: datetime
    published_at: datetime | None


class _Seen(NamedTuple):
    """What was found besides the attempts themselves, by the place of the attempt or by the account."""

    quotas: dict[int, dict[str, Value]]
    breakers: dict[tuple[str, str, str], _Breaker]
    overrides: list[tuple[Any, ...]]
    keys: dict[tuple[str, str, str], tuple[Any, ...]]


def trace(names: Sequence[str], tenants: Sequence[str] = ()) -> Operation[list[History]]:
    """The calls whose correlation is one of *names*, and the dead letters of calls among them.

    With *tenants* only theirs: a correlation is whatever somebody wrote, and two tenants may have written the same.
    """
    return (yield from in_one_snapshot(_traced(names, list(tenants) or None)))


def _traced(names: Sequence[str], whose: list[str] | None) -> Operation[list[History]]:
    given = {"names": list(names), "whose": whose, "most": MOST}
    rows = yield Query(ATTEMPTS, given)
    attempts = [_Attempt(*row) for row in reversed(rows)]
    buried = yield Query(DEAD, {**given, **_span(attempts)})
    seen = (yield from _around(attempts)) if attempts else _Seen({}, {}, [], {})
    numbered = sorted(enumerate(attempts), key=lambda one: (one[1].call, one[0]))
    calls = [list(group) for _, group in groupby(numbered, key=lambda one: one[1].call)]
    calls.sort(key=lambda call: call[0][0])
    return [*(_call(call, seen) for call in calls), *(_dead(_Dead(*row)) for row in buried)]


def _span(attempts: Sequence[_Attempt]) -> dict[str, Any]:
    moments = [attempt.at for attempt in attempts]
    return {
        "tenants": sorted({attempt.tenant for attempt in attempts}),
        "first": min(moments, default=None),
        "last": max(moments, default=None),
    }


def _around(attempts: Sequence[_Attempt]) -> Operation[_Seen]:
    accounts = _columns(sorted({attempt.account for attempt in attempts}))
    given = {**accounts, "all": ALL, "most": MOST}
    each = {**_columns([attempt.account for attempt in attempts]), "moments": [attempt.at for attempt in attempts]}
    quotas: dict[int, dict[str, Value]] = {}
    for number, kind, tenant, used, limit in (yield Query(QUOTAS, {**given, **each})):
        shared = " of all tenants" if tenant == ALL else ""
        # What all tenants have used together is made of other tenants' calls.
        told = ("spent" if used >= limit else "not spent") if shared else f"{used}/{limit}"
        quotas.setdefault(number - 1, {})[f"quota per {_WINDOWS[kind - 1]}{shared}"] = told
    breakers = yield Query(BREAKERS, given)
    span = _span(attempts)
    overrides = yield Query(OVERRIDES, {**given, "first": span["first"], "last": span["last"]})
    named = sorted({(one.tenant, one.provider, one.key) for one in attempts if one.key is not None})
    tenants, providers, names = ([one[place] for one in named] for place in range(3))
    keys = yield Query(KEYS, {"tenants": tenants, "providers": providers, "keys": names})
    return _Seen(
        quotas, {row[:3]: _Breaker(*row[3:]) for row in breakers}, list(overrides), {row[:3]: row[3:] for row in keys}
    )


def _columns(accounts: Sequence[tuple[str, str, str]]) -> dict[str, list[str]]:
    return {
        "tenants": [account[0] for account in accounts],
        "providers": [account[1] for account in accounts],
        "capabilities": [account[2] for account in accounts],
    }


# -- as histories -----------------------------------------------------------------------------------


def _call(attempts: Sequence[tuple[int, _Attempt]], seen: _Seen) -> History:
    last = attempts[-1][1]
    told: dict[str, Value | None] = {
        "tenant": last.tenant,
        "provider": last.provider,
        "capability": last.capability,
        "operation": last.operation,
        "correlation": last.correlation,
        "idempotency key": last.key,
        "task execution": last.task_execution,
        "max attempts": last.most,
        "timeout budget": last.budget_ms / 1000,
    }
    for shared, tenant in (("", last.tenant), (" of all tenants", ALL)):
        breaker = seen.breakers.get((tenant, last.provider, last.capability))
        if breaker is not None:
            told[f"breaker{shared}"] = _breaker(breaker, counted=not shared)
    events = [_event(attempt, seen.quotas.get(number, {})) for number, attempt in attempts]
    account = {last.account, (ALL, last.provider, last.capability)}
    events += [_override(*row[3:]) for row in seen.overrides if row[:3] in account]
    key = None if last.key is None else seen.keys.get((last.tenant, last.provider, last.key))
    return History(
        kind=Kind.CALL,
        id=last.correlation,
        where=f"{last.provider}.{last.operation}",
        about={name: value for name, value in told.items() if value is not None},
        events=in_order(events),
        place=_place(last, key),
    )


def _event(attempt: _Attempt, quota: dict[str, Value]) -> Event:
    values: dict[str, Value] = {"duration": attempt.duration_ms / 1000, **quota}
    if attempt.status is not None:
        values["http status"] = attempt.status
    return Event(
        at=attempt.at.timestamp(),
        what=f"attempt {attempt.number} of {attempt.most}",
        verdict=attempt.outcome,
        words=attempt.reason or "",
        values=values,
    )


def _override(at: datetime, action: str, until: datetime | None, calls: int | None) -> Event:
    values: dict[str, Value] = {} if calls is None else {"calls": calls}
    return Event(
        at=at.timestamp(),
        what="an operator said",
        words=action if until is None else f"{action} until {_moment(until)}",
        values=values,
    )


def _breaker(seen: _Breaker, *, counted: bool) -> str:
    words = f"{seen.state}, {seen.failures} faults in a row" if counted else seen.state
    if seen.open_until is not None:
        words += f", open until {_moment(seen.open_until)}"
    if seen.override is not None:
        words += f", {seen.override}" + (
            "" if seen.override_until is None else f" until {_moment(seen.override_until)}"
        )
    return f"{words}, last changed {_moment(seen.updated_at)}"


def _place(last: _Attempt, key: tuple[Any, ...] | None) -> Place:
    since = last.at.timestamp()
    state = _ENDS.get(last.outcome, State.FAILED)
    if key is None:
        return Place(state=state, since=since, words=last.reason or "")
    kept, until, doubt, current = key
    if kept == "in_flight" and current:
        return Place(state=State.RUNNING, since=since, until=until.timestamp(), words="somebody makes the call now")
    if state is not State.SUCCEEDED and (doubt or kept in {"in_flight", "unknown"}):
        words = "the provider may have carried it out; the same call may be made again, with the same payload"
        return Place(state=State.DOUBTFUL, since=since, until=until.timestamp() if current else None, words=words)
    words = f"its result is kept until {_moment(until)}" if kept == "done" and current else last.reason or ""
    return Place(state=state, since=since, words=words)


def _dead(row: _Dead) -> History:
    told: dict[str, Value | None] = {
        "tenant": row.tenant,
        "capability": row.capability,
        "task": row.task,
        "task id": row.task_id,
        "correlation": row.correlation,
        "attempts": row.attempts,
    }
    at, words = row.at.timestamp(), f"{row.error_type}: {row.message}"
    events = [Event(at=at, what="dead letter", verdict=row.reason, words=words)]
    if row.published_at is not None:
        events.append(Event(at=row.published_at.timestamp(), what="published", words="into queue.deadletter"))
    return History(
        kind=Kind.CALL,
        id=row.correlation,
        where=f"{row.provider}.{row.operation}" if row.provider and row.operation else row.task,
        about={name: value for name, value in told.items() if value is not None},
        events=in_order(events),
        place=Place(state=State.DEAD, since=at, handle=str(row.number), words=row.reason),
    )


def _moment(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
