"""The availability of a tenant's providers from the shared state, to explain why a transaction waits.

A tenant sees its own rows. Of rows that all tenants share it sees only whether and until when they block calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from ergon_framework.providers import circuit_breaker as breakers
from ergon_framework.providers.books import ProviderScope
from ergon_framework.providers.circuit_breaker import BreakerSnapshot, BreakerState, Override
from ergon_framework.providers.health import NOT_CALLED_REASONS
from ergon_framework.providers.sql.names import ALL_TENANTS
from ergon_framework.providers.sql.operator import BreakerRow, QuotaRow, read_breakers_and_quotas
from ergon_framework.providers.standing import BlockCause, BlockReason, ProviderAvailability
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.schema.snapshot import in_snapshot

#: Maximum number of failures that are counted, the latest.
MAX_FAILURES: Final = 1_000

_SELECT_CLOCK: Final = "select extract(epoch from ergon.provider_clock())::float8"
SELECT_FAILURES: Final = """
select f.reason_code, count(*)::int from (
    select m.reason_code from ergon.provider_execution_metrics m
    where m.tenant_id = %(tenant)s and m.provider_name = %(provider)s and m.capability = %(capability)s
        and m.created_at > now() - interval '1 hour' and m.reason_code <> all(%(not_called)s::text[])
    order by m.created_at desc limit %(most)s
) f group by 1 order by 2 desc, 1
"""
_SELECT_LAST_ERROR: Final = """
select h.last_error_code, extract(epoch from h.last_error_at)::float8 from ergon.provider_health_states h
where h.tenant_id = %(tenant)s and h.provider_name = %(provider)s and h.capability = %(capability)s
"""


def provider_availability(tenant: str, scopes: Sequence[tuple[str, str]] = ()) -> Operation[list[ProviderAvailability]]:
    """Return the availability of *scopes* (provider, capability) for *tenant*; without any, of the blocked ones."""
    return (yield from in_snapshot(_read_named(tenant, scopes) if scopes else _read_blocked(tenant)))


def _read_named(tenant: str, scopes: Sequence[tuple[str, str]]) -> Operation[list[ProviderAvailability]]:
    availabilities = []
    for provider, capability in dict.fromkeys(scopes):
        reasons_by_scope = yield from _read_block_reasons(tenant, provider, capability)
        availabilities.append(
            (
                yield from _read_availability(
                    tenant, provider, capability, reasons_by_scope.get((provider, capability), [])
                )
            )
        )
    return availabilities


def _read_blocked(tenant: str) -> Operation[list[ProviderAvailability]]:
    reasons_by_scope = yield from _read_block_reasons(tenant)
    availabilities = []
    for (provider, capability), block_reasons in sorted(reasons_by_scope.items()):
        availabilities.append((yield from _read_availability(tenant, provider, capability, block_reasons)))
    return availabilities


def _read_block_reasons(
    tenant: str, provider: str | None = None, capability: str | None = None
) -> Operation[dict[tuple[str, str], list[BlockReason]]]:
    ((now,),) = yield Query(_SELECT_CLOCK)
    reasons_by_scope: dict[tuple[str, str], list[BlockReason]] = {}
    for stored_tenant in (tenant, ALL_TENANTS):
        rows = yield from read_breakers_and_quotas(stored_tenant, provider=provider, capability=capability)
        for scope, block_reason in (*_find_breaker_blocks(rows[0], now), *_find_quota_blocks(rows[1])):
            reasons_by_scope.setdefault((scope.provider_name, scope.capability), []).append(block_reason)
    return reasons_by_scope


def _find_breaker_blocks(rows: Sequence[BreakerRow], now: float) -> Iterator[tuple[ProviderScope, BlockReason]]:
    for row in rows:
        state, is_shared = breakers.advance(_to_snapshot(row), now), row.account.tenant_id is None
        visible = breakers.visible_state(state, now)
        if visible is BreakerState.CLOSED:
            continue
        cause = BlockCause.BREAKER if visible is BreakerState.OPEN else BlockCause.PROBING
        cause = cause if state.override is None else BlockCause.OPERATOR
        faults = None if is_shared or cause is BlockCause.OPERATOR else row.consecutive_failures
        yield (
            row.account,
            BlockReason(cause=cause, shared=is_shared, until=breakers.blocked_until(state), faults=faults),
        )


def _find_quota_blocks(rows: Sequence[QuotaRow]) -> Iterator[tuple[ProviderScope, BlockReason]]:
    for row in rows:
        if row.remaining_count > 0:
            continue
        is_shared = row.account.tenant_id is None
        counts: dict[str, Any] = {} if is_shared else {"used": row.used_count, "limit": row.limit_count}
        until = row.window_end.timestamp()
        yield (
            row.account,
            BlockReason(cause=BlockCause.QUOTA, shared=is_shared, until=until, window=row.kind.value, **counts),
        )


def _to_snapshot(row: BreakerRow) -> BreakerSnapshot:
    override = None
    if row.override is not None and row.override_until is not None:
        override = Override(row.override, row.override_until.timestamp())
    until = None if row.open_until is None else row.open_until.timestamp()
    return BreakerSnapshot(row.state, row.consecutive_failures, until, row.generation, override=override)


def _read_availability(
    tenant: str, provider: str, capability: str, block_reasons: Sequence[BlockReason]
) -> Operation[ProviderAvailability]:
    parameters = {"tenant": tenant, "provider": provider, "capability": capability}
    failures = yield Query(
        SELECT_FAILURES, {**parameters, "not_called": sorted(NOT_CALLED_REASONS), "most": MAX_FAILURES}
    )
    last_error = yield Query(_SELECT_LAST_ERROR, parameters)
    code, last_error_at = last_error[0] if last_error else (None, None)
    return ProviderAvailability(
        **parameters,
        # The reason that ends last comes first: no call is admitted before its end.
        block_reasons=tuple(sorted(block_reasons, key=lambda block_reason: block_reason.until or 0.0, reverse=True)),
        failures=dict(failures),
        last_error=code,
        last_error_at=last_error_at,
    )
