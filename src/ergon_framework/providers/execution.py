"""What a call is given, what it comes to, and what is written down of each of its attempts: pure data."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ergon_framework.providers.errors import ReasonCode
from ergon_framework.providers.health import Outcome
from ergon_framework.providers.retry import Tried

#: Whose calls they are where nobody has named a tenant.
NO_TENANT = "default"
#: The task execution that the calls of this context are part of, unless they name one.
current_task_execution: Final[ContextVar[str | None]] = ContextVar("ergon_task_execution", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderExecutionContext:
    """What a call is part of; what is None comes from the scope of the handler, where there is one.

    ``timeout`` is in seconds and can only shorten the budget. ``attempt_number`` is filled in for
    each attempt, and so is ``timeout``: what is left then is what a client should be told to wait.
    ``name`` tells two calls of one operation in one handler apart.
    """

    correlation_id: str | None = None
    idempotency_key: str | None = None
    timeout: float | None = None
    task_execution_id: str | None = None
    name: str | None = None
    attempt_number: int = 1


@dataclass(frozen=True, slots=True)
class Reply:
    """What ``_execute_impl`` may return in place of the bare value: the value, and the status it came with."""

    value: dict[str, Any]
    http_status: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderExecutionResult:
    """What a call came to. A failure has a ``reason_code`` and no value, and is found at its error.

    ``attempts`` counts those that were made now: one that is ``replayed`` made none. ``duration_ms``
    is that of the whole call, waits included.
    """

    provider_name: str
    capability: str
    operation: str
    tenant_id: str
    campaign_id: str | None
    correlation_id: str
    idempotency_key: str | None
    value: dict[str, Any] | None
    outcome: Outcome
    reason_code: ReasonCode | None
    attempts: int
    duration_ms: float
    http_status: int | None = None
    replayed: bool = False
    tried: tuple[Tried, ...] = ()


class AttemptRow(NamedTuple):
    """One attempt, as the table of metrics keeps it; ``created_at`` is in seconds since the epoch."""

    tenant_id: str
    task_execution_id: str | None
    provider_name: str
    capability: str
    operation: str
    idempotency_key: str | None
    correlation_id: str
    attempt_number: int
    max_attempts: int
    duration_ms: float
    timeout_budget_ms: float
    outcome: Outcome
    reason_code: ReasonCode | None
    retryable: bool
    http_status: int | None
    created_at: float


@dataclass(slots=True, kw_only=True)
class Request:
    """One call as it was asked for, with everything that was left to the scope filled in."""

    provider_name: str
    capability: str
    tenant_id: str
    campaign_id: str | None
    operation: str
    payload: Mapping[str, Any]
    correlation_id: str
    idempotency_key: str | None
    fingerprint: str
    #: Unique for this call: the name under which it holds its key.
    owner: str
    #: As it was given: what it leaves to the scope is above.
    context: ProviderExecutionContext
