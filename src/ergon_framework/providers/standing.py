"""The availability of a provider for a tenant: whether calls are blocked, until when, and recent failures; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


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
