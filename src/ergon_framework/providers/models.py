"""The data of a provider call: its context, its result, and the record of each attempt.

A provider is a third-party API; its capability is a group of its operations. An attempt is one try of a call.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from ergon_framework.providers.errors import AttemptInfo, ReasonCode
from ergon_framework.providers.health import AttemptOutcome

#: The tenant of calls that name none.
DEFAULT_TENANT = "default"
#: The id of the task execution to which the calls in this context belong, unless they name one; for monitoring.
current_task_execution: Final[ContextVar[str | None]] = ContextVar("ergon_task_execution", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderExecutionContext:
    """The context of a call; fields that are None come from the handler's scope, if there is one.

    ``timeout`` is in seconds and can only shorten the budget. ``attempt_number`` and ``timeout`` are set for
    each attempt: ``timeout`` is then the remaining time, which is the limit to pass to a client.
    ``name`` distinguishes two calls of the same operation in one handler. ``arguments`` are set by a typed operation:
    its arguments as the caller passed them.
    """

    correlation_id: str | None = None
    idempotency_key: str | None = None
    timeout: float | None = None
    task_execution_id: str | None = None
    name: str | None = None
    attempt_number: int = 1
    arguments: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The values of a call that its caller leaves out; None leaves a value to the handler's scope."""

    tenant_id: str | None = None
    campaign_id: str | None = None
    correlation_id: str | None = None
    idempotency_key: str | None = None
    timeout: float | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ProviderReply:
    """A return value of ``_execute_impl`` that adds the HTTP status to the value."""

    value: dict[str, Any]
    http_status: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderExecutionResult:
    """The result of a call. A failed call has a ``reason_code`` and no value; its error carries the result.

    ``attempts`` counts the attempts of this call: a ``replayed`` result has none. ``duration_ms`` is the duration of
    the whole call, including waits.
    """

    provider_name: str
    capability: str
    operation: str
    tenant_id: str
    campaign_id: str | None
    correlation_id: str
    idempotency_key: str | None
    value: dict[str, Any] | None
    outcome: AttemptOutcome
    reason_code: ReasonCode | None
    attempts: int
    duration_ms: float
    http_status: int | None = None
    replayed: bool = False
    attempt_history: tuple[AttemptInfo, ...] = ()


class AttemptRecord(NamedTuple):
    """One attempt, as the metrics table stores it; ``created_at`` is in seconds since the epoch."""

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
    outcome: AttemptOutcome
    reason_code: ReasonCode | None
    retryable: bool
    http_status: int | None
    created_at: float


@dataclass(slots=True, kw_only=True)
class ProviderRequest:
    """One call with all values that the caller had left to the scope."""

    provider_name: str
    capability: str
    tenant_id: str
    campaign_id: str | None
    operation: str
    payload: dict[str, Any]
    correlation_id: str
    idempotency_key: str | None
    fingerprint: str
    #: Unique for this call: the name under which it claims its key.
    owner: str
    #: The context that the caller passed; the fields above hold the values it left to the scope.
    context: ProviderExecutionContext
