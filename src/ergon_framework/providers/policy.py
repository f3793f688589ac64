"""The policy of a provider: one object that configures its calls."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field

from ergon_framework.policy import Policy, Seconds
from ergon_framework.providers.circuit_breaker import BreakerPolicy
from ergon_framework.providers.quota import WindowKind
from ergon_framework.providers.retry import RetryPolicy


class QuotaPolicy(Policy):
    """The maximum number of calls per window; None means no limit."""

    minute: int | None = Field(default=None, ge=0, description="Maximum calls per minute.")
    hour: int | None = Field(default=None, ge=0, description="Maximum calls per hour.")
    day: int | None = Field(default=None, ge=0, description="Maximum calls per day.")
    month: int | None = Field(default=None, ge=0, description="Maximum calls per month.")

    @cached_property
    def limits(self) -> tuple[tuple[WindowKind, int], ...]:
        """The windows with a limit, the shortest first."""
        window_limits = ((kind, getattr(self, kind.value)) for kind in WindowKind)
        return tuple((kind, limit) for kind, limit in window_limits if limit is not None)


class ProviderPolicy(Policy):
    """The configuration of a provider's calls."""

    timeout: float = Field(default=30.0, gt=0, description="Seconds for a call, including all attempts and delays.")
    attempt_timeout: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Seconds for one attempt; null: the rest of timeout."
    )
    retry: RetryPolicy = Field(default=RetryPolicy(), description="Attempts and delays.")
    breaker: BreakerPolicy = Field(default=BreakerPolicy(), description="When calls are blocked, and for how long.")
    quota: QuotaPolicy = Field(default=QuotaPolicy(), description="Maximum calls per window.")
    scope: Literal["tenant", "provider"] = Field(
        default="tenant", description="Scope of quota and breaker: one per tenant, or one for all tenants."
    )
    keep: Seconds = Field(default=86_400.0, description="Seconds for which the result of a key is replayed.")
