"""The circuit breaker: pure functions that decide from a small state which calls may go to a provider.

A closed breaker admits all calls. Consecutive faults, failures for which the provider is to blame, open it: it admits
none until its cooldown ends. It is half-open then, and admits a few calls, the probes: if they succeed, it closes. Each
transition begins a new generation.

Each function takes a state and returns the next one, or the same object if nothing changes, so that a caller that
stores the state knows when there is nothing to write. Times are in seconds since the epoch, because the state is shared
between machines and outlives processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field

from ergon_framework.clock import Clock
from ergon_framework.policy import Count, Policy, Seconds
from ergon_framework.providers.errors import ProviderCircuitOpenError, ProviderError, ReasonCode

# -- availability of a provider for a tenant, from its breakers and its quotas ------------------------


class BlockCause(StrEnum):
    """The cause that blocks calls."""

    BREAKER = "breaker"
    #: An operator has forced the breaker open.
    OPERATOR = "operator"
    #: The breaker admits only probes.
    PROBING = "probing"
    QUOTA = "quota"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReason:
    """One reason why calls are blocked; *until* is in seconds since the epoch, None if the end is unknown.

    *shared* means that the breaker or quota is that of all tenants. Its counts include other tenants' calls, so they
    are omitted.
    """

    cause: BlockCause
    shared: bool
    until: float | None = None
    #: Of a breaker: consecutive faults.
    faults: int | None = None
    #: Of a quota: its window, and its used calls.
    window: str | None = None
    used: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderAvailability:
    """The availability of one provider for one tenant."""

    tenant: str
    provider: str
    capability: str
    block_reasons: tuple[BlockReason, ...] = ()
    #: This tenant's failed calls of the last hour, by reason code; also empty if attempts are not recorded.
    failures: Mapping[str, int] = field(default_factory=dict)
    #: The last failure, and its time.
    last_error: str | None = None
    last_error_at: float | None = None


# -- policy and state -------------------------------------------------------------------------------


class BreakerPolicy(Policy):
    """When a breaker opens, how long it stays open, and how it detects that the provider has recovered."""

    failure_threshold: Count = Field(default=5, description="Consecutive faults that open the breaker.")
    open_cooldown_seconds: Seconds = Field(default=30.0, description="Seconds for which it stays open.")
    half_open_max_calls: Count = Field(
        default=1, description="Maximum concurrent probes, and successful probes that close it."
    )
    probe_lease_seconds: float = Field(
        default=120.0, gt=0, description="Seconds after which a probe without a result loses its slot."
    )


class BreakerState(StrEnum):
    """The state of a breaker: it admits all calls, no calls, or only probes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class OverrideKind(StrEnum):
    """The kind of an operator's override: admit no calls, or admit all calls."""

    FORCE_OPEN = "force_open"
    DISABLE = "disable"


@dataclass(frozen=True, slots=True)
class Override:
    """An operator's override, which ends automatically at *until*."""

    kind: OverrideKind
    until: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A call that was admitted in half_open; its slot expires at *until*."""

    number: int
    until: float


@dataclass(frozen=True, slots=True)
class Permit:
    """The permit for one call; its result counts only while the breaker is in the same generation."""

    generation: int
    probe: Probe | None = None


@dataclass(frozen=True, slots=True)
class BreakerSnapshot:
    """The complete state of a breaker; ``generation`` increases at each transition."""

    state: BreakerState = BreakerState.CLOSED
    #: Faults only; other failures leave it unchanged or set it to 0.
    consecutive_failures: int = 0
    open_until: float | None = None
    generation: int = 0
    probes: tuple[Probe, ...] = ()
    probes_begun: int = 0
    probe_successes: int = 0
    override: Override | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return asdict(self) | {"probes": [asdict(probe) for probe in self.probes]}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """Return the state that *to_dict* wrote; missing fields are as in a new breaker."""
        override = stored.get("override")
        fields = {name: stored[name] for name in cls.__slots__ if name in stored}
        return cls(
            **fields
            | {
                "state": BreakerState(stored.get("state", BreakerState.CLOSED)),
                "probes": tuple(Probe(**probe) for probe in stored.get("probes", ())),
                "override": override and Override(OverrideKind(override["kind"]), override["until"]),
            }
        )


@dataclass(frozen=True, slots=True)
class CallAdmitted:
    """The call may be made."""

    state: BreakerSnapshot
    permit: Permit


@dataclass(frozen=True, slots=True)
class CallRefused:
    """The call may not be made before *until*."""

    state: BreakerSnapshot
    until: float


BreakerDecision: TypeAlias = CallAdmitted | CallRefused


# -- the transitions --------------------------------------------------------------------------------


def advance(state: BreakerSnapshot, now: float) -> BreakerSnapshot:
    """Apply the changes caused by time alone: the end of an override, of a cooldown, or of a probe's lease."""
    if state.override is not None:
        # Nothing else advances while an override is active. Its end begins a new generation, so that calls which began
        # under it do not count.
        if now < state.override.until:
            return state
        state = replace(state, override=None, generation=state.generation + 1)
    if state.state is BreakerState.OPEN and (state.open_until is None or now >= state.open_until):
        return _enter_state(state, BreakerState.HALF_OPEN)
    active_probes = tuple(probe for probe in state.probes if now < probe.until)
    return state if len(active_probes) == len(state.probes) else replace(state, probes=active_probes)


def admit(state: BreakerSnapshot, policy: BreakerPolicy, now: float) -> BreakerDecision:
    """Decide whether one more call may be made at *now*."""
    state = advance(state, now)
    if state.override is not None:
        if state.override.kind is OverrideKind.FORCE_OPEN:
            return CallRefused(state, state.override.until)
        return CallAdmitted(state, Permit(state.generation))
    if state.state is BreakerState.CLOSED:
        return CallAdmitted(state, Permit(state.generation))
    if state.state is BreakerState.OPEN:
        return CallRefused(state, now if state.open_until is None else state.open_until)
    return _admit_probe(state, policy, now)


def record(
    state: BreakerSnapshot, policy: BreakerPolicy, permit: Permit, now: float, *, fault: bool | None
) -> BreakerSnapshot:
    """Return the state after the call of *permit* ended: with a provider fault, without one, or None if unknown.

    Results of an earlier generation, of a probe that has lost its slot, and results that arrive during an operator's
    override are ignored.
    """
    state = advance(state, now)
    if permit.generation != state.generation or state.override is not None:
        return state
    if permit.probe is not None:
        return _record_probe(state, policy, permit.probe, now, fault=fault) if permit.probe in state.probes else state
    if fault is None:
        return state
    if not fault:
        return state if state.consecutive_failures == 0 else replace(state, consecutive_failures=0)
    state = replace(state, consecutive_failures=state.consecutive_failures + 1)
    return _open(state, policy, now) if state.consecutive_failures >= policy.failure_threshold else state


def force_open(state: BreakerSnapshot, *, until: float) -> BreakerSnapshot:
    """Admit no calls before *until*, by an operator's override."""
    return _set_override(state, Override(OverrideKind.FORCE_OPEN, until))


def disable(state: BreakerSnapshot, *, until: float) -> BreakerSnapshot:
    """Admit all calls before *until*, by an operator's override."""
    return _set_override(state, Override(OverrideKind.DISABLE, until))


def clear_override(state: BreakerSnapshot) -> BreakerSnapshot:
    """Clear the operator's override, so that the breaker decides again."""
    return state if state.override is None else _set_override(state, None)


def visible_state(state: BreakerSnapshot, now: float) -> BreakerState:
    """Return the breaker's state at *now* as callers see it: an override counts as its effect."""
    state = advance(state, now)
    if state.override is None:
        return state.state
    return BreakerState.OPEN if state.override.kind is OverrideKind.FORCE_OPEN else BreakerState.CLOSED


def blocked_until(state: BreakerSnapshot) -> float | None:
    """Return until when no call is admitted; None if a call may be admitted.

    Without ``advance`` before, the result may be in the past, which the caller has to check. Unlike ``admit``, this
    takes no probe slot.
    """
    if state.override is not None:
        return state.override.until if state.override.kind is OverrideKind.FORCE_OPEN else None
    return state.open_until if state.state is BreakerState.OPEN else None


def is_provider_fault(error: ProviderError | None) -> bool | None:
    """Return whether the end of a call counts as the provider's fault; *error* is None after a success.

    None means that it says nothing about the provider: the request never reached it, or failed on this side. Any
    rejection by the provider counts as healthy.
    """
    if error is None:
        return False
    if error.fault:
        return True
    return None if not error.sent or error.reason_code is ReasonCode.INTERNAL_ERROR else False


def _admit_probe(state: BreakerSnapshot, policy: BreakerPolicy, now: float) -> BreakerDecision:
    if state.probe_successes >= policy.half_open_max_calls:  # the policy was changed and now requires fewer
        state = _close(state)
        return CallAdmitted(state, Permit(state.generation))
    # Successful probes keep their slots: more probes than must succeed would prove nothing more.
    if len(state.probes) + state.probe_successes >= policy.half_open_max_calls:
        # A probe may end at any time, and its lease is only an upper bound: callers wait at most one cooldown,
        # and with a cooldown of 0 they are not sent back immediately.
        max_wait = policy.open_cooldown_seconds or policy.probe_lease_seconds
        return CallRefused(state, min(*(probe.until for probe in state.probes), now + max_wait))
    probe = Probe(state.probes_begun + 1, now + policy.probe_lease_seconds)
    state = replace(state, probes=(*state.probes, probe), probes_begun=probe.number)
    return CallAdmitted(state, Permit(state.generation, probe))


def _record_probe(
    state: BreakerSnapshot, policy: BreakerPolicy, probe: Probe, now: float, *, fault: bool | None
) -> BreakerSnapshot:
    state = replace(state, probes=tuple(other for other in state.probes if other != probe))
    if fault is None:
        return state
    if fault:
        return _open(replace(state, consecutive_failures=state.consecutive_failures + 1), policy, now)
    state = replace(state, probe_successes=state.probe_successes + 1)
    return state if state.probe_successes < policy.half_open_max_calls else _close(state)


def _close(state: BreakerSnapshot) -> BreakerSnapshot:
    return _enter_state(replace(state, consecutive_failures=0), BreakerState.CLOSED)


def _open(state: BreakerSnapshot, policy: BreakerPolicy, now: float) -> BreakerSnapshot:
    return _enter_state(state, BreakerState.OPEN, open_until=now + policy.open_cooldown_seconds)


def _enter_state(
    state: BreakerSnapshot, new_state: BreakerState, *, open_until: float | None = None
) -> BreakerSnapshot:
    return BreakerSnapshot(
        state=new_state,
        consecutive_failures=state.consecutive_failures,
        open_until=open_until,
        generation=state.generation + 1,
    )


def _set_override(state: BreakerSnapshot, override: Override | None) -> BreakerSnapshot:
    # The results of running calls no longer count, so their probes must not hold slots either.
    return replace(state, override=override, probes=(), generation=state.generation + 1)


# -- one breaker of one process ---------------------------------------------------------------------


class CircuitBreaker:
    """A circuit breaker in memory, with its snapshot; not thread-safe.

    Its rules are passed field by field or as *policy*; a missing field has the default of ``BreakerPolicy``.
    """

    __slots__ = ("_last_permit", "_wall", "policy", "snapshot")

    def __init__(
        self,
        policy: BreakerPolicy | None = None,
        snapshot: BreakerSnapshot | None = None,
        *,
        failure_threshold: int | None = None,
        open_cooldown_seconds: float | None = None,
        half_open_max_calls: int | None = None,
        probe_lease_seconds: float | None = None,
        consecutive_failures: int = 0,
        open_until: float | None = None,
        wall: Callable[[], float] | None = None,
    ) -> None:
        fields = {
            "failure_threshold": failure_threshold,
            "open_cooldown_seconds": open_cooldown_seconds,
            "half_open_max_calls": half_open_max_calls,
            "probe_lease_seconds": probe_lease_seconds,
        }
        given_fields = {name: value for name, value in fields.items() if value is not None}
        base = BreakerPolicy() if policy is None else policy
        self.policy = BreakerPolicy.load({**base.model_dump(), **given_fields}) if given_fields else base
        if snapshot is None:
            state = BreakerState.CLOSED if open_until is None else BreakerState.OPEN
            snapshot = BreakerSnapshot(state, consecutive_failures, open_until)
        self.snapshot = snapshot
        self._wall = Clock().wall if wall is None else wall
        self._last_permit: Permit | None = None

    @property
    def failure_threshold(self) -> int:
        return self.policy.failure_threshold

    @property
    def open_cooldown_seconds(self) -> float:
        return self.policy.open_cooldown_seconds

    @property
    def half_open_max_calls(self) -> int:
        return self.policy.half_open_max_calls

    @property
    def state(self) -> BreakerState:
        return self.snapshot.state

    @property
    def consecutive_failures(self) -> int:
        return self.snapshot.consecutive_failures

    @property
    def open_until(self) -> float | None:
        return self.snapshot.open_until

    def before_call(self, now: float | None = None) -> Permit:
        """Return the permit for one call; raise ProviderCircuitOpenError if there is none.

        *now* is in seconds since the epoch, by default the clock's.
        """
        now = self._wall() if now is None else now
        decision = admit(self.snapshot, self.policy, now)
        self.snapshot = decision.state
        if isinstance(decision, CallAdmitted):
            self._last_permit = decision.permit
            return decision.permit
        raise circuit_open_error(decision, now)

    def after_call(
        self,
        permit: Permit | None = None,
        now: float | None = None,
        *,
        error: ProviderError | None = None,
        fault: bool | Literal["by error"] | None = "by error",
    ) -> None:
        """Report how the call of *permit* ended: with *error*, or without one if it succeeded; see ``record``.

        *permit* defaults to that of the last ``before_call``. *fault* overrides *error* in deciding whether the
        provider is to blame; None means that it is unknown.
        """
        permit = self._last_permit if permit is None else permit
        if permit is None:
            raise ValueError("after_call failed: no call is in progress; call before_call first")
        is_fault = is_provider_fault(error) if fault == "by error" else fault
        now = self._wall() if now is None else now
        self.snapshot = record(self.snapshot, self.policy, permit, now, fault=is_fault)


def circuit_open_error(rejection: CallRefused, now: float) -> ProviderCircuitOpenError:
    """Return the error of a refused call: it does not count as an attempt, and may be retried at ``open_until``."""
    override = rejection.state.override
    reason = rejection.state.state if override is None else override.kind
    return ProviderCircuitOpenError(
        f"the breaker is {reason.replace('_', ' ')}; the provider is not called",
        open_until=rejection.until,
        retry_after=max(0.0, rejection.until - now),
    )
