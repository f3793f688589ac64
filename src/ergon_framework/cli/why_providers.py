"""Find the providers that block or failed a transaction, their availability, and the remedy, for ``ergon why``.

A provider is a third-party API with quotas and circuit breakers: an exhausted quota, an open breaker or an operator can
block its calls, for one tenant or for all. A gate pauses the fetching of a task while the breaker that all tenants of a
provider share is open.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ergon_framework.cli.dlq_view import format_time
from ergon_framework.cli.provider import ALL_TENANTS
from ergon_framework.history import History, WorkKind, WorkState
from ergon_framework.providers.base import Provider
from ergon_framework.providers.circuit_breaker import BlockCause, BlockReason, ProviderAvailability
from ergon_framework.providers.health import NOT_CALLED_REASONS
from ergon_framework.providers.models import DEFAULT_TENANT

#: Tolerance in seconds between the end of a block and the return of a transaction, for clock skew and latency.
_TIME_TOLERANCE_SECONDS: Final = 5.0
#: READY and DELAYED: the queue itself has reported the transaction. QUEUED: only that it is in the queue is known, from
#: the journal or from a broker that reports no details.
_WAITING_STATES: Final = frozenset({WorkState.DELAYED, WorkState.READY, WorkState.QUEUED})
_FAILED_STATES: Final = frozenset({WorkState.DEAD, WorkState.FAILED})

#: Takes a tenant and scopes (provider and capability); returns their availability, for an empty sequence that of all
#: providers that block calls. None if it is unknown.
AvailabilityLookup = Callable[[str, Sequence[tuple[str, str]]], Sequence[ProviderAvailability] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class InvolvedProvider:
    """A provider that affects a transaction, and its current availability.

    *evidence* says how the provider was found: "failure", from the dead-letter record; "call", from a recorded
    attempt; "uses", from the task definition; "timing", only because its block ends at the
    redelivery.
    """

    tenant: str
    provider: str
    capability: str
    evidence: str
    operation: str | None = None
    #: Why the call was not made, or why it failed.
    reason: str | None = None
    #: None when the availability is unknown.
    availability: ProviderAvailability | None = None

    @property
    def scope(self) -> tuple[str, str]:
        return self.provider, self.capability

    @property
    def block(self) -> BlockReason | None:
        """The block that lasts longest."""
        return (
            self.availability.block_reasons[0]
            if self.availability is not None and self.availability.block_reasons
            else None
        )


def task_providers(gates: Iterable[Any]) -> list[tuple[str, str]]:
    """Return the providers that a task ``uses``: each of their gates is a bound method of the provider."""
    owners = (getattr(gate, "__self__", None) for gate in gates)
    return [(owner.provider_name, owner.capability) for owner in owners if isinstance(owner, Provider)]


def find_involved_providers(
    history: History, others: Sequence[History], used_providers: Sequence[tuple[str, str]], lookup: AvailabilityLookup
) -> list[InvolvedProvider]:
    """Return the providers that block or failed *history*; *others* are the other histories found."""
    if history.kind is not WorkKind.TRANSACTION or history.location.state not in _WAITING_STATES | _FAILED_STATES:
        return []
    tenant = str(history.attributes.get("tenant", DEFAULT_TENANT))
    if history.location.state in _FAILED_STATES:
        return _add_availability(_find_by_failure(history, tenant), lookup)
    if history.location.state is WorkState.QUEUED and any(_is_same_work(history, other) for other in others):
        # The queue's own history of this transaction has more details; the providers are reported with that one.
        return []
    providers = _add_availability(_find_by_calls(history, others), lookup)
    if providers or _is_explained(history):
        return providers
    return (
        _find_by_use(history, tenant, used_providers, lookup)
        if used_providers
        else _find_by_timing(history, tenant, lookup)
    )


def _is_same_work(history: History, other: History) -> bool:
    is_waiting = other.kind is history.kind and other.location.state in _WAITING_STATES - {WorkState.QUEUED}
    return is_waiting and (other.id, other.where) == (history.id, history.where)


def _is_explained(history: History) -> bool:
    """Return whether the delay of the last attempt explains the return time."""
    until, last = history.location.until, history.events[-1] if history.events else None
    if until is None or last is None or last.at is None or "delay" not in last.values:
        return False
    return abs(last.at + float(last.values["delay"]) - until) <= _TIME_TOLERANCE_SECONDS


def _find_by_failure(history: History, tenant: str) -> list[InvolvedProvider]:
    attributes = history.attributes
    if "provider" not in attributes or "capability" not in attributes:
        return []
    return [
        InvolvedProvider(
            tenant=tenant,
            provider=str(attributes["provider"]),
            capability=str(attributes["capability"]),
            operation=str(attributes["operation"]) if "operation" in attributes else None,
            reason=history.location.details or None,
            evidence="failure",
        )
    ]


def _find_by_calls(history: History, others: Sequence[History]) -> list[InvolvedProvider]:
    """Return the last call of each provider with the same correlation id, unless it succeeded.

    *others* are in order of time. The history of a call has the correlation id of its transaction as its id.
    """
    correlation = history.attributes.get("correlation", history.id)
    own_tenant = history.attributes.get("tenant")
    last: dict[tuple[str, str], InvolvedProvider | None] = {}
    for call in others:
        attributes = call.attributes
        if call.kind is not WorkKind.CALL or call.id != correlation or "provider" not in attributes or not call.events:
            continue
        if own_tenant is not None and attributes["tenant"] != own_tenant:
            continue
        one = InvolvedProvider(
            tenant=str(attributes["tenant"]),
            provider=str(attributes["provider"]),
            capability=str(attributes["capability"]),
            operation=str(attributes["operation"]),
            reason=call.events[-1].details or None,
            evidence="call",
        )
        last[one.scope] = None if call.location.state is WorkState.SUCCEEDED else one
    return [one for one in last.values() if one is not None]


def _find_by_use(
    history: History, tenant: str, used_providers: Sequence[tuple[str, str]], lookup: AvailabilityLookup
) -> list[InvolvedProvider]:
    """Return the providers of the task that block calls now; there is nothing to report about the others."""
    candidates = [
        InvolvedProvider(tenant=tenant, provider=one, capability=capability, evidence="uses")
        for one, capability in dict.fromkeys(used_providers)
    ]
    blocking = [one for one in _add_availability(candidates, lookup) if one.block is not None]
    if history.location.state is WorkState.READY:
        # A ready transaction was not fetched yet, so only a closed gate of the task can keep it in the queue.
        return [one for one in blocking if _find_shared_block(one) is not None]
    # Without a block that ends at the return time, any of them may be the cause.
    return [one for one in blocking if _is_at_return_time(one.availability, history)] or blocking


def _find_shared_block(one: InvolvedProvider) -> BlockReason | None:
    """Return the shared breaker if it is open: a task that uses the provider then fetches nothing."""
    blocks = () if one.availability is None else one.availability.block_reasons
    return next(
        (block for block in blocks if block.shared and block.cause in {BlockCause.BREAKER, BlockCause.OPERATOR}), None
    )


def _find_by_timing(history: History, tenant: str, lookup: AvailabilityLookup) -> list[InvolvedProvider]:
    if history.location.state is not WorkState.DELAYED:
        return []
    return [
        InvolvedProvider(
            tenant=tenant, provider=one.provider, capability=one.capability, evidence="timing", availability=one
        )
        for one in lookup(tenant, ()) or ()
        if _is_at_return_time(one, history)
    ]


def _is_at_return_time(availability: ProviderAvailability | None, history: History) -> bool:
    until, blocks = history.location.until, () if availability is None else availability.block_reasons
    return until is not None and any(
        block.until is not None and abs(block.until - until) <= _TIME_TOLERANCE_SECONDS for block in blocks
    )


def _add_availability(providers: Sequence[InvolvedProvider], lookup: AvailabilityLookup) -> list[InvolvedProvider]:
    results: list[InvolvedProvider] = []
    for one in providers:
        availability = lookup(one.tenant, [one.scope])
        results.append(one if not availability else replace(one, availability=availability[0]))
    return results


# -- output -----------------------------------------------------------------------------------------


def describe_provider(one: InvolvedProvider) -> str:
    """Return a line about one provider: tenant, outcome of the call, blocks, and recent failures."""
    prefix = "perhaps " if one.evidence == "timing" else ""
    subject = f"{prefix}{one.provider} ({one.capability}) of tenant {one.tenant}"
    parts = [f"{subject}: {_describe_call(one)}{_describe_availability(one)}"]
    if one.availability is not None:
        parts += _describe_failures(one.availability)
    return "; ".join(parts)


def _describe_call(one: InvolvedProvider) -> str:
    if one.reason is None or one.operation is None:
        return ""
    if one.reason in NOT_CALLED_REASONS:
        return f"{one.operation} was not called ({one.reason}); "
    return f"{one.operation} failed ({one.reason}); "


def _describe_availability(one: InvolvedProvider) -> str:
    if one.availability is None:
        return "availability unknown"
    if not one.availability.block_reasons:
        return "calls are not blocked"
    return "; ".join(_describe_block(block) for block in one.availability.block_reasons)


def _describe_block(block: BlockReason) -> str:
    scope_text = " of all tenants" if block.shared else ""
    until_text = "" if block.until is None else f" until {format_time(block.until)}"
    match block.cause:
        case BlockCause.QUOTA:
            usage_text = "" if block.used is None else f", {block.used} of {block.limit} used"
            return f"quota{scope_text} per {block.window} exhausted{until_text}{usage_text}"
        case BlockCause.OPERATOR:
            return f"breaker{scope_text} forced open by an operator{until_text}"
        case BlockCause.PROBING:
            return f"breaker{scope_text} half-open, only probes are sent{_describe_faults(block)}"
        case BlockCause.BREAKER:
            return f"breaker{scope_text} open{until_text}{_describe_faults(block)}"


def _describe_faults(block: BlockReason) -> str:
    return "" if block.faults is None else f", {block.faults} consecutive faults"


def _describe_failures(availability: ProviderAvailability) -> list[str]:
    if availability.failures:
        counts = ", ".join(f"{reason} {count}" for reason, count in availability.failures.items())
        return [f"failed in the last hour: {counts}"]
    if availability.last_error is not None and availability.last_error_at is not None:
        return [f"last error {availability.last_error} at {format_time(availability.last_error_at)}"]
    return []


def add_provider_remedy(history: History, providers: Sequence[InvolvedProvider], remedy: str) -> str:
    """Return *remedy* extended by what to do about the providers of *history*."""
    if not providers:
        return remedy
    one = next((provider for provider in providers if provider.block is not None), providers[0])
    check_hint = f"check the provider: {_build_check_command(one)}"
    if history.location.state in _FAILED_STATES:
        return f"{check_hint}; {remedy}" if remedy else check_hint
    # Only the gate of a provider that the task uses keeps a ready transaction in its queue.
    if one.block is None or (history.location.state is WorkState.READY and one.evidence != "uses"):
        return f"{remedy}; {check_hint}" if remedy else check_hint
    wait_text = (
        "fetching resumes when calls are allowed"
        if history.location.state is WorkState.READY
        else "redelivery is automatic"
    )
    return f"nothing, {wait_text}; {check_hint}{_build_unblock_hint(one, one.block)}"


def _build_check_command(one: InvolvedProvider) -> str:
    block = one.block
    if block is None:
        return f"ergon provider health --tenant {shlex.quote(one.tenant)}"
    kind = "quota" if block.cause is BlockCause.QUOTA else "breaker"
    return f"ergon provider {kind} list --tenant {_quote_tenant(one, block)} --provider {shlex.quote(one.provider)}"


def _build_unblock_hint(one: InvolvedProvider, block: BlockReason) -> str:
    """Return the operator command that ends the block, or an empty string if there is none."""
    scope_arguments = f"{shlex.quote(one.provider)} {shlex.quote(one.capability)} --tenant {_quote_tenant(one, block)}"
    if block.cause is BlockCause.QUOTA:
        return f"; for more calls: ergon provider quota extend {scope_arguments} --calls N --for 1h --reason WHY"
    if block.cause is BlockCause.OPERATOR:
        return f"; to clear it: ergon provider breaker lift {scope_arguments} --reason WHY"
    return ""


def _quote_tenant(one: InvolvedProvider, block: BlockReason) -> str:
    return shlex.quote(ALL_TENANTS if block.shared else one.tenant)


def waiting_reason(history: History, providers: Sequence[InvolvedProvider]) -> str:
    """Return why a transaction waits, as a suffix of its status; empty if the cause is a guess."""
    for one in providers:
        if (
            history.location.state is not WorkState.READY
            and one.evidence == "call"
            and one.reason in NOT_CALLED_REASONS
        ):
            return f", because {one.provider}.{one.operation} was not called ({one.reason})"
        if history.location.state is WorkState.READY and one.evidence == "uses":
            return f"; tasks that use {one.provider} fetch nothing while its breaker is open"
    return ""


def to_dict(one: InvolvedProvider) -> Mapping[str, Any]:
    """Return *one* as JSON-compatible data."""
    availability = one.availability
    return {
        "tenant": one.tenant,
        "provider": one.provider,
        "capability": one.capability,
        "operation": one.operation,
        "evidence": one.evidence,
        "reason": one.reason,
        "blocks": None if availability is None else [_block_to_dict(block) for block in availability.block_reasons],
        "failures": None if availability is None else dict(availability.failures),
        "description": describe_provider(one),
    }


def _block_to_dict(block: BlockReason) -> Mapping[str, Any]:
    return {
        "cause": block.cause.value,
        "shared": block.shared,
        "until": block.until,
        "description": _describe_block(block),
    }
