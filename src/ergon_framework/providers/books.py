"""The books: what all processes know together of quota, breakers and keys. One visit before a call, one after it.

Each visit is one coarse step, so that a shared store needs one round trip for it. Whoever keeps
books decides nothing: the rules are in ``quota``, ``circuit_breaker`` and ``idempotency``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ergon_framework.providers.circuit_breaker import BreakerState, Pass
from ergon_framework.providers.errors import ProviderError
from ergon_framework.providers.execution import AttemptRow
from ergon_framework.providers.idempotency import Kept
from ergon_framework.providers.policy import ProviderPolicy
from ergon_framework.providers.quota import Window


class Account(NamedTuple):
    """Whose quota and breaker: those of one tenant, or of all where *tenant_id* is None."""

    tenant_id: str | None
    provider_name: str
    capability: str


@dataclass(slots=True, kw_only=True)
class Asked:
    """One attempt that wants to be made.

    The key is claimed at the first attempt, under the name of *owner*, for *lease* seconds. *doubt*
    says that an earlier attempt of this call may have been carried out. *now* is the asking
    process's wall time; a shared store goes by its own clock. After *within* seconds nobody waits
    for the answer any more; None where there is no such end.
    """

    account: Account
    policy: ProviderPolicy
    tenant_id: str
    idempotency_key: str | None
    fingerprint: str
    owner: str
    attempt_number: int
    lease: float
    now: float
    doubt: bool = False
    within: float | None = None


@dataclass(slots=True)
class Admitted:
    """The attempt may be made: its quota is reserved, and *leave* is the breaker's."""

    asked: Asked
    leave: Pass
    windows: tuple[Window, ...] = ()


@dataclass(frozen=True, slots=True)
class Replayed:
    """It need not be made: this is what the key's call came to."""

    kept: Kept


@dataclass(frozen=True, slots=True)
class Busy:
    """Somebody makes the call of this key just now, and has it until *until* at the latest."""

    until: float


Admission: TypeAlias = Admitted | Replayed | Busy


@dataclass(slots=True, kw_only=True)
class Concluded:
    """How an attempt ended; *last* says that no further one follows.

    *error* and *kept* are both None where nobody knows: whoever waited for it was called away.
    *doubt* is about the whole call: this attempt, or one before it, may have been carried out.
    *within* is that of Asked.
    """

    now: float
    last: bool
    doubt: bool
    error: ProviderError | None = None
    kept: Kept | None = None
    within: float | None = None


class Recording(ABC):
    """Where what happened is written down."""

    #: Whether a visit may have to wait for somebody else; then it is made under the call's deadline.
    waits: bool = True
    #: Whether a visit ends by itself within what it is given, whatever it waits for, and raises nothing but ErgonError.
    #: Then whoever calls makes it himself; any other is made by a thread or a task of its own, which can be left.
    punctual: bool = False

    @abstractmethod
    def held_until(self, account: Account) -> float | None:
        """Until when the breaker of *account* is known to let nothing through; None where it is not. It never waits."""

    @abstractmethod
    def record(self, row: AttemptRow) -> None:
        """Note an attempt. It neither waits nor raises; what there is no room for is dropped, and counted."""


class Books(Recording):
    """Books that threads visit."""

    @abstractmethod
    def admit(self, asked: Asked) -> Admission:
        """Claim the key, reserve quota, ask the breaker, in this order.

        ProviderQuotaExceededError or ProviderCircuitOpenError if one of them refuses, and
        ProviderBadRequestError if the key stands for another payload; then nothing stays reserved,
        and the key's call has ended as ``asked.doubt`` says.
        """

    @abstractmethod
    def conclude(self, admitted: Admitted, concluded: Concluded) -> BreakerState | None:
        """Refund what was not sent, tell the breaker, and end the key's call if this was its last attempt.

        The state that the breaker has entered by this; None where it is as it was.
        """


class AsyncBooks(Recording):
    """Books that tasks visit; the same promises."""

    @abstractmethod
    async def admit_async(self, asked: Asked) -> Admission:
        """See Books."""

    @abstractmethod
    async def conclude_async(self, admitted: Admitted, concluded: Concluded) -> BreakerState | None:
        """See Books."""
