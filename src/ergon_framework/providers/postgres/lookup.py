"""Lookup of the provider calls of one business process, and of the reasons that blocked them.

An attempt is one try of a call of a provider; the correlation is the id of the business process that it belongs to. A
scope is a tenant, a provider and a capability, which is a group of the provider's operations.

Attempts are found by their correlation, which has an index; everything else by the data of the attempts. A call
without a stored attempt is therefore not found.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final, NamedTuple

from ergon_framework.database.operation import Operation, Query, in_snapshot
from ergon_framework.history import History, HistoryEvent, Location, Value, WorkKind, WorkState, sort_events
from ergon_framework.providers.postgres.keys import ALL_TENANTS

#: Maximum number of attempts that are returned, the latest.
MAX_ATTEMPTS: Final = 200
_WINDOW_NAMES: Final = ("minute", "hour", "day", "month")
_STATE_BY_OUTCOME: Final = {"success": WorkState.SUCCEEDED, "retry": WorkState.RETRYING}

ATTEMPTS: Final = """
select m.tenant_id, m.provider_name, m.capability, m.operation, m.idempotency_key, m.correlation_id,
    m.task_execution_id, m.attempt_number, m.max_attempts, m.duration_ms, m.timeout_budget_ms, m.outcome, m.reason_code,
    m.http_status, m.created_at
from ergon.provider_execution_metrics m where m.correlation_id = any(%(names)s)
    and m.tenant_id = any(coalesce(%(whose)s::text[], array[m.tenant_id]))
order by m.created_at desc, m.attempt_number desc limit %(most)s
"""

#: The windows at the times of the attempts, with their current counts: an ended window keeps its last count.
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

#: Operator actions during the attempts, or up to one day before them.
OVERRIDES: Final = """
select o.tenant_id, o.provider_name, o.capability, o.at, o.action, o.until, o.calls
from unnest(%(tenants)s::text[], %(providers)s::text[], %(capabilities)s::text[]) as a(tenant, provider, capability)
cross join unnest(array[a.tenant, %(all)s::text]) as t(tenant)
join ergon.provider_overrides o on o.tenant_id = t.tenant and o.provider_name = a.provider
    and o.capability = a.capability and o.at between %(first)s::timestamptz - interval '1 day' and %(last)s
order by o.at limit %(most)s
"""

KEYS: Final = """
select k.tenant_id, k.provider_name, k.key, k.state, k.until, k.prior_call_unknown, k.until > now()
from unnest(%(tenants)s::text[], %(providers)s::text[], %(keys)s::text[]) as a(tenant, provider, key)
join ergon.provider_keys k on k.tenant_id = a.tenant and k.provider_name = a.provider and k.key = a.key
"""

#: Dead letters of a Celery task by its id, others by tenant and time: there is no index on the correlation.
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


class _StoredAttempt(NamedTuple):
    """A row of ``ATTEMPTS``."""

    tenant: str
    provider: str
    capability: str
    operation: str
    key: str | None
    correlation: str
    task_execution: str | None
    number: int
    max_attempts: int
    duration_ms: float
    budget_ms: float
    outcome: str
    reason: str | None
    status: int | None
    at: datetime

    @property
    def scope(self) -> tuple[str, str, str]:
        return self.tenant, self.provider, self.capability

    @property
    def call_key(self) -> tuple[str, ...]:
        """The key that distinguishes calls: without an idempotency key, all of one operation count as one."""
        return (*self.scope, self.operation, self.key or "", self.correlation)


class _StoredBreaker(NamedTuple):
    """A row of ``BREAKERS`` after the columns of its scope."""

    state: str
    failures: int
    open_until: datetime | None
    override: str | None
    override_until: datetime | None
    updated_at: datetime


class _StoredDeadLetter(NamedTuple):
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


class _CallContext(NamedTuple):
    """The data around the attempts: quotas by the index of the attempt, the rest by scope or by key.

    An override is an operator's action on a breaker or quota.
    """

    quotas: dict[int, dict[str, Value]]
    breakers: dict[tuple[str, str, str], _StoredBreaker]
    overrides: list[tuple[Any, ...]]
    keys: dict[tuple[str, str, str], tuple[Any, ...]]


def lookup_calls(names: Sequence[str], tenants: Sequence[str] = ()) -> Operation[list[History]]:
    """Return the calls whose correlation is one of *names*, and the dead letters of calls among them.

    With *tenants* only theirs: a correlation is arbitrary text, and two tenants may use the same one.
    """
    return (yield from in_snapshot(_lookup(names, list(tenants) or None)))


def _lookup(names: Sequence[str], tenants: list[str] | None) -> Operation[list[History]]:
    parameters = {"names": list(names), "whose": tenants, "most": MAX_ATTEMPTS}
    rows = yield Query(ATTEMPTS, parameters)
    attempts = [_StoredAttempt(*row) for row in reversed(rows)]
    dead_letters = yield Query(DEAD, {**parameters, **_get_time_span(attempts)})
    call_context = (yield from _read_context(attempts)) if attempts else _CallContext({}, {}, [], {})
    numbered = sorted(enumerate(attempts), key=lambda entry: (entry[1].call_key, entry[0]))
    calls = [list(group) for _, group in groupby(numbered, key=lambda entry: entry[1].call_key)]
    calls.sort(key=lambda call: call[0][0])
    return [
        *(_to_call_history(call, call_context) for call in calls),
        *(_to_dead_letter_history(_StoredDeadLetter(*row)) for row in dead_letters),
    ]


def _get_time_span(attempts: Sequence[_StoredAttempt]) -> dict[str, Any]:
    times = [attempt.at for attempt in attempts]
    return {
        "tenants": sorted({attempt.tenant for attempt in attempts}),
        "first": min(times, default=None),
        "last": max(times, default=None),
    }


def _read_context(attempts: Sequence[_StoredAttempt]) -> Operation[_CallContext]:
    """Read the quotas, breakers, overrides and keys that the attempts met."""
    scopes = _to_columns(sorted({attempt.scope for attempt in attempts}))
    parameters = {**scopes, "all": ALL_TENANTS, "most": MAX_ATTEMPTS}
    attempt_columns = {
        **_to_columns([attempt.scope for attempt in attempts]),
        "moments": [attempt.at for attempt in attempts],
    }
    quotas: dict[int, dict[str, Value]] = {}
    for number, kind, tenant, used, limit in (yield Query(QUOTAS, {**parameters, **attempt_columns})):
        suffix = " of all tenants" if tenant == ALL_TENANTS else ""
        # The shared count includes other tenants' calls, so it is not shown.
        usage = ("exhausted" if used >= limit else "not exhausted") if suffix else f"{used}/{limit}"
        quotas.setdefault(number - 1, {})[f"quota per {_WINDOW_NAMES[kind - 1]}{suffix}"] = usage
    breakers = yield Query(BREAKERS, parameters)
    span = _get_time_span(attempts)
    overrides = yield Query(OVERRIDES, {**parameters, "first": span["first"], "last": span["last"]})
    attempt_keys = sorted({(entry.tenant, entry.provider, entry.key) for entry in attempts if entry.key is not None})
    tenants, providers, names = ([entry[column] for entry in attempt_keys] for column in range(3))
    keys = yield Query(KEYS, {"tenants": tenants, "providers": providers, "keys": names})
    return _CallContext(
        quotas,
        {row[:3]: _StoredBreaker(*row[3:]) for row in breakers},
        list(overrides),
        {row[:3]: row[3:] for row in keys},
    )


def _to_columns(scopes: Sequence[tuple[str, str, str]]) -> dict[str, list[str]]:
    return {
        "tenants": [scope[0] for scope in scopes],
        "providers": [scope[1] for scope in scopes],
        "capabilities": [scope[2] for scope in scopes],
    }


# -- conversion to histories ------------------------------------------------------------------------


def _to_call_history(attempts: Sequence[tuple[int, _StoredAttempt]], call_context: _CallContext) -> History:
    last = attempts[-1][1]
    attributes: dict[str, Value | None] = {
        "tenant": last.tenant,
        "provider": last.provider,
        "capability": last.capability,
        "operation": last.operation,
        "correlation": last.correlation,
        "idempotency key": last.key,
        "task execution": last.task_execution,
        "max attempts": last.max_attempts,
        "timeout budget": last.budget_ms / 1000,
    }
    for suffix, tenant in (("", last.tenant), (" of all tenants", ALL_TENANTS)):
        breaker = call_context.breakers.get((tenant, last.provider, last.capability))
        if breaker is not None:
            attributes[f"breaker{suffix}"] = _describe_breaker(breaker, with_count=not suffix)
    events = [_to_event(attempt, call_context.quotas.get(number, {})) for number, attempt in attempts]
    scope_keys = {last.scope, (ALL_TENANTS, last.provider, last.capability)}
    events += [_to_override_event(*row[3:]) for row in call_context.overrides if row[:3] in scope_keys]
    key = None if last.key is None else call_context.keys.get((last.tenant, last.provider, last.key))
    return History(
        kind=WorkKind.CALL,
        id=last.correlation,
        where=f"{last.provider}.{last.operation}",
        attributes={name: value for name, value in attributes.items() if value is not None},
        events=sort_events(events),
        location=_to_location(last, key),
    )


def _to_event(attempt: _StoredAttempt, quota: dict[str, Value]) -> HistoryEvent:
    values: dict[str, Value] = {"duration": attempt.duration_ms / 1000, **quota}
    if attempt.status is not None:
        values["http status"] = attempt.status
    return HistoryEvent(
        at=attempt.at.timestamp(),
        event=f"attempt {attempt.number} of {attempt.max_attempts}",
        result=attempt.outcome,
        details=attempt.reason or "",
        values=values,
    )


def _to_override_event(time: datetime, action: str, until: datetime | None, calls: int | None) -> HistoryEvent:
    values: dict[str, Value] = {} if calls is None else {"calls": calls}
    return HistoryEvent(
        at=time.timestamp(),
        event="operator action",
        details=action if until is None else f"{action} until {_format_time(until)}",
        values=values,
    )


def _describe_breaker(breaker: _StoredBreaker, *, with_count: bool) -> str:
    description = f"{breaker.state}, {breaker.failures} consecutive faults" if with_count else breaker.state
    if breaker.open_until is not None:
        description += f", open until {_format_time(breaker.open_until)}"
    if breaker.override is not None:
        description += f", {breaker.override}" + (
            "" if breaker.override_until is None else f" until {_format_time(breaker.override_until)}"
        )
    return f"{description}, last changed {_format_time(breaker.updated_at)}"


def _to_location(last: _StoredAttempt, key: tuple[Any, ...] | None) -> Location:
    since = last.at.timestamp()
    state = _STATE_BY_OUTCOME.get(last.outcome, WorkState.FAILED)
    if key is None:
        return Location(state=state, since=since, details=last.reason or "")
    key_state, until, outcome_unknown, is_current = key
    if key_state == "in_flight" and is_current:
        return Location(state=WorkState.RUNNING, since=since, until=until.timestamp(), details="call in flight")
    if state is not WorkState.SUCCEEDED and (outcome_unknown or key_state in {"in_flight", "unknown"}):
        detail = "the provider may have carried out the call; retry with the same payload"
        return Location(
            state=WorkState.UNKNOWN, since=since, until=until.timestamp() if is_current else None, details=detail
        )
    detail = f"result kept until {_format_time(until)}" if key_state == "done" and is_current else last.reason or ""
    return Location(state=state, since=since, details=detail)


def _to_dead_letter_history(row: _StoredDeadLetter) -> History:
    attributes: dict[str, Value | None] = {
        "tenant": row.tenant,
        "capability": row.capability,
        "task": row.task,
        "task id": row.task_id,
        "correlation": row.correlation,
        "attempts": row.attempts,
    }
    occurred_at, message = row.at.timestamp(), f"{row.error_type}: {row.message}"
    events = [HistoryEvent(at=occurred_at, event="dead letter", result=row.reason, details=message)]
    if row.published_at is not None:
        events.append(HistoryEvent(at=row.published_at.timestamp(), event="published", details="to queue.deadletter"))
    return History(
        kind=WorkKind.CALL,
        id=row.correlation,
        where=f"{row.provider}.{row.operation}" if row.provider and row.operation else row.task,
        attributes={name: value for name, value in attributes.items() if value is not None},
        events=sort_events(events),
        location=Location(state=WorkState.DEAD, since=occurred_at, handle=str(row.number), details=row.reason),
    )


def _format_time(time: datetime) -> str:
    return time.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
