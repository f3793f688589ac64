"""The policy of a provider: one object that configures its calls."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, model_validator

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


#: The section and the key that each keyword of ProviderPolicy sets; ``retries`` is one less than ``max_attempts``.
_KEYWORDS: Final[Mapping[str, tuple[str, str]]] = {
    "retries": ("retry", "max_attempts"),
    "backoff": ("retry", "base_delay_seconds"),
    "calls_per_minute": ("quota", "minute"),
    "calls_per_hour": ("quota", "hour"),
    "calls_per_day": ("quota", "day"),
    "calls_per_month": ("quota", "month"),
    "breaker_threshold": ("breaker", "failure_threshold"),
    "breaker_cooldown": ("breaker", "open_cooldown_seconds"),
}


class ProviderPolicy(Policy):
    """The configuration of a provider's calls.

    Keywords set the usual keys of the sections: ``retries`` after the first attempt and ``backoff`` (``retry``), calls
    per window (``quota``), and the breaker's threshold and cooldown (``breaker``). A section and its keywords exclude
    each other.
    """

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

    if TYPE_CHECKING:
        # At run time the validator below maps the keywords, so that files may use them too.
        def __init__(
            self,
            *,
            retries: int = 2,
            backoff: float = 0.5,
            timeout: float = 30.0,
            attempt_timeout: float | None = None,
            calls_per_minute: int | None = None,
            calls_per_hour: int | None = None,
            calls_per_day: int | None = None,
            calls_per_month: int | None = None,
            breaker_threshold: int = 5,
            breaker_cooldown: float = 30.0,
            scope: Literal["tenant", "provider"] = "tenant",
            keep: float = 86_400.0,
            retry: RetryPolicy = ...,
            breaker: BreakerPolicy = ...,
            quota: QuotaPolicy = ...,
        ) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _move_keywords_to_sections(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not values.keys() & _KEYWORDS.keys():
            return values
        sections = {key: value for key, value in values.items() if key not in _KEYWORDS}
        for keyword, (section, key) in _KEYWORDS.items():
            if keyword not in values:
                continue
            if section in values:
                raise ValueError(f"{keyword} and {section} are both set; pass {key} in {section}, or only keywords")
            value = _to_max_attempts(values[keyword]) if keyword == "retries" else values[keyword]
            sections.setdefault(section, {})[key] = value
        return sections


def _to_max_attempts(retries: Any) -> int:
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        value = retries if isinstance(retries, int | float) else type(retries).__name__
        raise ValueError(f"retries must be an integer >= 0, got {value}; 0 makes one attempt")
    return retries + 1
