"""Standings: how the providers of a tenant are, as the books have it, for whoever asks why a transaction waits.

A tenant is told of its own rows. Of what all tenants share it is told whether and until when it holds calls back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from ergon_framework.providers import circuit_breaker as breakers
from ergon_framework.providers.books import Account
from ergon_framework.providers.circuit_breaker import BreakerState, Override, Snapshot
from ergon_framework.providers.health import NOT_CALLED
from ergon_framework.providers.sql.names import ALL
from ergon_framework.providers.sql.operator import BreakerRow, QuotaRow, breakers_and_quotas
from ergon_framework.providers.standing import Cause, Hold, Standing
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.schema.snapshot import in_one_snapshot

#: The most failures that are counted, the latest.
MOST: Final = 1_000

_CLOCK: Final = "select extract(epoch from ergon.provider_clock())::float8"
FAILURES: Final = """
select f.reason_code, count(*)::int from (
    select m.reason_code from ergon.provider_execution_metrics m
    where m.tenant_id = %(tenant)s and m.provider_name = %(provider)s and m.capability = %(capability)s
        and m.created_at > now() - interval '1 hour' and m.reason_code <> all(%(not_called)s::text[])
    order by m.created_at desc limit %(most)s
) f group by 1 order by 2 desc, 1
"""
_LAST: Final = """
select h.last_error_code, extract(epoch from h.last_error_at)::float8 from ergon.provider_health_states h
where h.tenant_id = %(tenant)s and h.provider_name = %(provider)s and h.capability = %(capability)s
"""


def standings(tenant: str, accounts: Sequence[tuple[str, str]] = ()) -> Operation[list[Standing]]:
    """How each provider and capability of *accounts* is for *tenant*; without any, those that hold calls back."""
    return (yield from in_one_snapshot(_named(tenant, accounts) if accounts else _held(tenant)))


def _named(tenant: str, accounts: Sequence[tuple[str, str]]) -> Operation[list[Standing]]:
    found = []
    for provider, capability in dict.fromkeys(accounts):
        holds = yield from _holds(tenant, provider, capability)
        found.append((yield from _standing(tenant, provider, capability, holds.get((provider, capability), []))))
    return found


def _held(tenant: str) -> Operation[list[Standing]]:
    holds = yield from _holds(tenant)
    found = []
    for (provider, capability), held in sorted(holds.items()):
        found.append((yield from _standing(tenant, provider, capability, held)))
    return found


def _holds(
    tenant: str, provider: str | None = None, capability: str | None = None
) -> Operation[dict[tuple[str, str], list[Hold]]]:
    ((now,),) = yield Query(_CLOCK)
    found: dict[tuple[str, str], list[Hold]] = {}
    for owner in (tenant, ALL):
        rows = yield from breakers_and_quotas(owner, provider=provider, capability=capability)
        for account, hold in (*_of_breakers(rows[0], now), *_of_quotas(rows[1])):
            found.setdefault((account.provider_name, account.capability), []).append(hold)
    return found


def _of_breakers(rows: Sequence[BreakerRow], now: float) -> Iterator[tuple[Account, Hold]]:
    for row in rows:
        state, shared = breakers.advance(_snapshot(row), now), row.account.tenant_id is None
        seen = breakers.shown(state, now)
        if seen is BreakerState.CLOSED:
            continue
        cause = Cause.BREAKER if seen is BreakerState.OPEN else Cause.PROBING
        cause = cause if state.override is None else Cause.OPERATOR
        faults = None if shared or cause is Cause.OPERATOR else row.consecutive_failures
        yield row.account, Hold(cause=cause, shared=shared, until=breakers.held_until(state), faults=faults)


def _of_quotas(rows: Sequence[QuotaRow]) -> Iterator[tuple[Account, Hold]]:
    for row in rows:
        if row.remaining_count > 0:
            continue
        shared = row.account.tenant_id is None
        counts: dict[str, Any] = {} if shared else {"used": row.used_count, "limit": row.limit_count}
        ends = row.window_end.timestamp()
        yield row.account, Hold(cause=Cause.QUOTA, shared=shared, until=ends, window=row.kind.value, **counts)


def _snapshot(row: BreakerRow) -> Snapshot:
    override = None
    if row.override is not None and row.override_until is not None:
        override = Override(row.override, row.override_until.timestamp())
    until = None if row.open_until is None else row.open_until.timestamp()
    return Snapshot(row.state, row.consecutive_failures, until, row.generation, override=override)


def _standing(tenant: str, provider: str, capability: str, holds: Sequence[Hold]) -> Operation[Standing]:
    given = {"tenant": tenant, "provider": provider, "capability": capability}
    failures = yield Query(FAILURES, {**given, "not_called": sorted(NOT_CALLED), "most": MOST})
    last = yield Query(_LAST, given)
    code, at = last[0] if last else (None, None)
    return Standing(
        **given,
        # The one that ends last is what counts: before, nothing goes through.
        holds=tuple(sorted(holds, key=lambda hold: hold.until or 0.0, reverse=True)),
        failures=dict(failures),
        last_error=code,
        last_error_at=at,
    )
