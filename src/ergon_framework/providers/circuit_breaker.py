"""The breaker: which calls may go to a provider, decided from a small state by pure functions.

Each function takes a state and answers the next one, and the same object where nothing changes,
so that whoever keeps the state in a shared row knows when there is nothing to write. Moments are
seconds since the epoch, because the state is shared between machines and outlives processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field

from ergon_framework.engine.senses import Senses
from ergon_framework.policy import Count, Policy, Seconds
from ergon_framework.providers.errors import ProviderCircuitOpenError, ProviderError, ReasonCode


class BreakerPolicy(Policy):
    """When a breaker opens, how long it stays open, and how it finds out that the provider is back."""

    failure_threshold: Count = Field(default=5, description="Faults in a row that open the breaker.")
    open_cooldown_seconds: Seconds = Field(default=30.0, description="Seconds it stays open.")
    half_open_max_calls: Count = Field(
        default=1, description="Probes at any one time, and probes that must succeed to close it."
    )
    probe_lease_seconds: float = Field(
        default=120.0, gt=0, description="Seconds after which a probe without a result loses its place."
    )


class BreakerState(StrEnum):
    """How much a breaker lets through: everything, nothing, or probes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class OverrideKind(StrEnum):
    """What an operator wants: nothing goes through, or everything does."""

    FORCE_OPEN = "force_open"
    DISABLE = "disable"


@dataclass(frozen=True, slots=True)
class Override:
    """An operator's word, which ends by itself at *until*."""

    kind: OverrideKind
    until: float


@dataclass(frozen=True, slots=True)
class Probe:
    """A call that went out in half_open; at *until* it loses its place."""

    number: int
    until: float


@dataclass(frozen=True, slots=True)
class Pass:
    """The leave to make one call; its result counts only while the breaker is in the same generation."""

    generation: int
    probe: Probe | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a breaker knows; ``generation`` rises at each transition."""

    state: BreakerState = BreakerState.CLOSED
    consecutive_failures: int = 0
    open_until: float | None = None
    generation: int = 0
    probes: tuple[Probe, ...] = ()
    probes_begun: int = 0
    probe_successes: int = 0
    override: Override | None = None

    def to_dict(self) -> dict[str, Any]:
        """The state as plain JSON."""
        return asdict(self) | {"probes": [asdict(probe) for probe in self.probes]}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """The state that *to_dict* wrote; what is missing is as in a new breaker."""
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
class Admitted:
    """The call may be made."""

    state: Snapshot
    leave: Pass


@dataclass(frozen=True, slots=True)
class Refused:
    """It may not; *until* is when to ask again."""

    state: Snapshot
    until: float


Admission: TypeAlias = Admitted | Refused


# -- the transitions ------------------------------------------------------------------------------


def advance(state: Snapshot, now: float) -> Snapshot:
    """What time alone has changed: an override that ended, a cooldown that is over, probes that expired."""
    if state.override is not None:
        # While it holds time stands still for the rest, so that its end finds the breaker as it was.
        if now < state.override.until:
            return state
        state = replace(state, override=None, generation=state.generation + 1)
    if state.state is BreakerState.OPEN and (state.open_until is None or now >= state.open_until):
        return _entered(state, BreakerState.HALF_OPEN)
    kept = tuple(probe for probe in state.probes if now < probe.until)
    return state if len(kept) == len(state.probes) else replace(state, probes=kept)


def admit(state: Snapshot, policy: BreakerPolicy, now: float) -> Admission:
    """Whether one more call may be made at *now*."""
    state = advance(state, now)
    if state.override is not None:
        if state.override.kind is OverrideKind.FORCE_OPEN:
            return Refused(state, state.override.until)
        return Admitted(state, Pass(state.generation))
    if state.state is BreakerState.CLOSED:
        return Admitted(state, Pass(state.generation))
    if state.state is BreakerState.OPEN:
        return Refused(state, now if state.open_until is None else state.open_until)
    return _admit_probe(state, policy, now)


def record(state: Snapshot, policy: BreakerPolicy, leave: Pass, now: float, *, fault: bool | None) -> Snapshot:
    """The state after the call of *leave* is over: with a fault of the provider, without, or None: nobody knows.

    Ignored are results of an earlier generation, of a probe that has lost its place, and whatever
    comes while an operator's override holds.
    """
    state = advance(state, now)
    if leave.generation != state.generation or state.override is not None:
        return state
    if leave.probe is not None:
        return _probed(state, policy, leave.probe, now, fault=fault) if leave.probe in state.probes else state
    if fault is None:
        return state
    if not fault:
        return state if state.consecutive_failures == 0 else replace(state, consecutive_failures=0)
    state = replace(state, consecutive_failures=state.consecutive_failures + 1)
    return _opened(state, policy, now) if state.consecutive_failures >= policy.failure_threshold else state


def force_open(state: Snapshot, *, until: float) -> Snapshot:
    """An operator's word that nothing goes through before *until*."""
    return _overridden(state, Override(OverrideKind.FORCE_OPEN, until))


def disable(state: Snapshot, *, until: float) -> Snapshot:
    """An operator's word that everything goes through before *until*."""
    return _overridden(state, Override(OverrideKind.DISABLE, until))


def lift(state: Snapshot) -> Snapshot:
    """An operator's word that the breaker decides again."""
    return state if state.override is None else _overridden(state, None)


def shown(state: Snapshot, now: float) -> BreakerState:
    """How the breaker is at *now* for whoever calls: an override counts as what it does."""
    state = advance(state, now)
    if state.override is None:
        return state.state
    return BreakerState.OPEN if state.override.kind is OverrideKind.FORCE_OPEN else BreakerState.CLOSED


def held_until(state: Snapshot) -> float | None:
    """Until when nothing goes through for certain; None where something may. It asks for no probe's place."""
    if state.override is not None:
        return state.override.until if state.override.kind is OverrideKind.FORCE_OPEN else None
    return state.open_until if state.state is BreakerState.OPEN else None


def fault_of(error: ProviderError | None) -> bool | None:
    """What the end of a call says of the provider; *error* is None after a success.

    Nothing is said by what never reached it and by what broke on our side; a refusal of any kind
    says that it is well.
    """
    if error is None:
        return False
    if error.fault:
        return True
    return None if not error.sent or error.reason_code is ReasonCode.INTERNAL_ERROR else False


def _admit_probe(state: Snapshot, policy: BreakerPolicy, now: float) -> Admission:
    if state.probe_successes >= policy.half_open_max_calls:  # the policy asks for fewer than it did
        state = _closed(state)
        return Admitted(state, Pass(state.generation))
    # Those that have succeeded hold their places: more probes than must succeed would prove nothing more.
    if len(state.probes) + state.probe_successes >= policy.half_open_max_calls:
        # A probe may end at any moment, and its lease is the longest it can take: nobody waits for more
        # than a cooldown, and with a cooldown of 0 nobody is told to come back at once.
        patience = policy.open_cooldown_seconds or policy.probe_lease_seconds
        return Refused(state, min(*(probe.until for probe in state.probes), now + patience))
    probe = Probe(state.probes_begun + 1, now + policy.probe_lease_seconds)
    state = replace(state, probes=(*state.probes, probe), probes_begun=probe.number)
    return Admitted(state, Pass(state.generation, probe))


def _probed(state: Snapshot, policy: BreakerPolicy, probe: Probe, now: float, *, fault: bool | None) -> Snapshot:
    state = replace(state, probes=tuple(other for other in state.probes if other != probe))
    if fault is None:
        return state
    if fault:
        return _opened(replace(state, consecutive_failures=state.consecutive_failures + 1), policy, now)
    state = replace(state, probe_successes=state.probe_successes + 1)
    return state if state.probe_successes < policy.half_open_max_calls else _closed(state)


def _closed(state: Snapshot) -> Snapshot:
    return _entered(replace(state, consecutive_failures=0), BreakerState.CLOSED)


def _opened(state: Snapshot, policy: BreakerPolicy, now: float) -> Snapshot:
    return _entered(state, BreakerState.OPEN, open_until=now + policy.open_cooldown_seconds)


def _entered(state: Snapshot, which: BreakerState, *, open_until: float | None = None) -> Snapshot:
    return Snapshot(
        state=which,
        consecutive_failures=state.consecutive_failures,
        open_until=open_until,
        generation=state.generation + 1,
    )


def _overridden(state: Snapshot, override: Override | None) -> Snapshot:
    # The results of calls in flight no longer count, so their probes must not hold places either.
    return replace(state, override=override, probes=(), generation=state.generation + 1)


# -- one breaker of one process -------------------------------------------------------------------


class CircuitBreaker:
    """A circuit breaker in memory, with its snapshot; not thread-safe.

    Its rules are passed field by field or as *policy*; a missing field has the default of ``BreakerPolicy``.
    """

    __slots__ = ("_last_pass", "_wall", "policy", "snapshot")

    def __init__(
        self,
        policy: BreakerPolicy | None = None,
        snapshot: Snapshot | None = None,
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
        rules = {name: value for name, value in fields.items() if value is not None}
        base = BreakerPolicy() if policy is None else policy
        self.policy = BreakerPolicy.load({**base.model_dump(), **rules}) if rules else base
        if snapshot is None:
            state = BreakerState.CLOSED if open_until is None else BreakerState.OPEN
            snapshot = Snapshot(state, consecutive_failures, open_until)
        self.snapshot = snapshot
        self._wall = Senses().wall if wall is None else wall
        self._last_pass: Pass | None = None

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

    def before_call(self, now: float | None = None) -> Pass:
        """Return the pass for one call; ProviderCircuitOpenError if there is none.

        *now* is in seconds since the epoch, by default the clock's.
        """
        now = self._wall() if now is None else now
        answer = admit(self.snapshot, self.policy, now)
        self.snapshot = answer.state
        if isinstance(answer, Admitted):
            self._last_pass = answer.leave
            return answer.leave
        raise refusal(answer, now)

    def after_call(
        self,
        leave: Pass | None = None,
        now: float | None = None,
        *,
        error: ProviderError | None = None,
        fault: bool | Literal["by error"] | None = "by error",
    ) -> None:
        """Report how the call of *leave* ended: with *error*, or without one if it succeeded; see ``record``.

        *leave* defaults to that of the last ``before_call``. *fault* decides in the place of *error* whether the
        provider is to blame; None means that nothing is known.
        """
        leave = self._last_pass if leave is None else leave
        if leave is None:
            raise ValueError("after_call has no call to report: call before_call first")
        blame = fault_of(error) if fault == "by error" else fault
        now = self._wall() if now is None else now
        self.snapshot = record(self.snapshot, self.policy, leave, now, fault=blame)


def refusal(refused: Refused, now: float) -> ProviderCircuitOpenError:
    """The error that a refusal is: later, at ``open_until``."""
    override = refused.state.override
    why = refused.state.state if override is None else override.kind
    return ProviderCircuitOpenError(
        f"the breaker is {why.replace('_', ' ')}; the provider is not called",
        open_until=refused.until,
        retry_after=max(0.0, refused.until - now),
    )
