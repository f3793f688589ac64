"""The shared provider state: quota, breakers and idempotency keys, with one round trip before and after each attempt.

A quota limits the calls per window of time, a circuit breaker stops calls to a failing provider, and an idempotency key
names a call, so that repeating the call does not carry it out twice. A store makes no decisions: the rules are in
``quota``, ``circuit_breaker`` and ``idempotency``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ergon_framework.providers.circuit_breaker import BreakerState, Permit
from ergon_framework.providers.errors import ProviderError
from ergon_framework.providers.idempotency import StoredResult
from ergon_framework.providers.models import AttemptRecord
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.quota import Window


class ProviderScope(NamedTuple):
    """The scope of a quota and a breaker: one tenant, or all tenants where *tenant_id* is None."""

    tenant_id: str | None
    provider_name: str
    capability: str


@dataclass(slots=True, kw_only=True)
class AdmissionRequest:
    """The request to admit one attempt.

    The first attempt claims the key for *owner*, for *lease* seconds. *outcome_unknown* means that the provider may
    have carried out an earlier attempt of this call. *now* is the wall time of the requesting process; a shared store
    uses its own clock. After *timeout* seconds the caller no longer waits for the answer; None means no limit.
    """

    scope: ProviderScope
    policy: ProviderPolicy
    tenant_id: str
    idempotency_key: str | None
    fingerprint: str
    owner: str
    attempt_number: int
    lease: float
    now: float
    outcome_unknown: bool = False
    timeout: float | None = None


@dataclass(slots=True)
class AdmittedAttempt:
    """The attempt may be made: its quota is reserved, and *permit* is the breaker's."""

    request: AdmissionRequest
    permit: Permit
    windows: tuple[Window, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayedResult:
    """The call need not be made: its key has a stored result."""

    stored_result: StoredResult


@dataclass(frozen=True, slots=True)
class KeyInFlight:
    """Another caller is making the call of this key, and holds the key until *until* at the latest."""

    until: float


AdmissionResult: TypeAlias = AdmittedAttempt | ReplayedResult | KeyInFlight


@dataclass(slots=True, kw_only=True)
class AttemptResult:
    """The result of an attempt; *is_last* means that no further attempt follows.

    *error* and *stored_result* are both None if the outcome is unknown because the wait was interrupted.
    *outcome_unknown* is about the whole call: the provider may have carried out this attempt or an earlier one.
    *timeout* is that of AdmissionRequest.
    """

    now: float
    is_last: bool
    outcome_unknown: bool
    error: ProviderError | None = None
    stored_result: StoredResult | None = None
    timeout: float | None = None


class AttemptRecorder(ABC):
    """The part of the provider state that records attempts."""

    #: Whether a round trip may block; it is then made under the call's deadline.
    may_block: bool = True
    #: Whether a round trip ends on its own within its timeout and raises only ErgonError. The caller then makes it
    #: directly; any other round trip runs in a separate thread or task, which can be abandoned.
    is_self_timed: bool = False

    @abstractmethod
    def blocked_until(self, scope: ProviderScope) -> float | None:
        """Return when the breaker of *scope* next admits calls; None if it is not known to be open. Never blocks."""

    @abstractmethod
    def record(self, row: AttemptRecord) -> None:
        """Record an attempt without waiting or raising; attempts that exceed the capacity are dropped and counted."""


class ProviderState(AttemptRecorder):
    """The provider state for threads."""

    @abstractmethod
    def admit(self, request: AdmissionRequest) -> AdmissionResult:
        """Claim the key, reserve quota and get the breaker's permit, in this order.

        Raises ProviderQuotaExceededError or ProviderCircuitOpenError if quota or breaker rejects the attempt, and
        ProviderBadRequestError if the key belongs to another payload. Nothing stays reserved then, and the key's
        call has ended as ``request.outcome_unknown`` says.
        """

    @abstractmethod
    def complete(self, admitted: AdmittedAttempt, result: AttemptResult) -> BreakerState | None:
        """Refund unsent calls, report the result to the breaker, and end the key's call after its last attempt.

        Return the state that the breaker entered because of this; None if its state is unchanged.
        """


class AsyncProviderState(AttemptRecorder):
    """The provider state for asyncio tasks, with the guarantees of ProviderState."""

    @abstractmethod
    async def admit_async(self, request: AdmissionRequest) -> AdmissionResult:
        """Admit an attempt; see ``ProviderState.admit``."""

    @abstractmethod
    async def complete_async(self, admitted: AdmittedAttempt, result: AttemptResult) -> BreakerState | None:
        """Complete an attempt; see ``ProviderState.complete``."""
