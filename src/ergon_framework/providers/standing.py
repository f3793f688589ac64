"""Standing: whether calls of a provider are made for a tenant now, until when not, and what went wrong lately; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Cause(StrEnum):
    """What keeps calls back."""

    BREAKER = "breaker"
    #: An operator has opened the breaker.
    OPERATOR = "operator"
    #: The breaker lets probes through, and nothing else.
    PROBING = "probing"
    QUOTA = "quota"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """One reason why calls are not made; *until* is in seconds since the epoch, None where no moment is known.

    *shared* says that it is the one of all tenants. Its counts are made of other tenants' calls, so it has none.
    """

    cause: Cause
    shared: bool
    until: float | None = None
    #: Of a breaker: faults in a row.
    faults: int | None = None
    #: Of a quota: its window, and how much of it is used.
    window: str | None = None
    used: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How one provider is for one tenant."""

    tenant: str
    provider: str
    capability: str
    holds: tuple[Hold, ...] = ()
    #: Calls of this tenant that failed in the last hour, by their reason; empty too where nobody writes attempts down.
    failures: Mapping[str, int] = field(default_factory=dict)
    #: The last failure of all, and when.
    last_error: str | None = None
    last_error_at: float | None = None
