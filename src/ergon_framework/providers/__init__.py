"""Providers: calls of third parties under quota, circuit breaker, retries and idempotency keys."""

from typing import TYPE_CHECKING

from ergon_framework._util.exports import lazy_exports

if TYPE_CHECKING:
    from ergon_framework.providers.base import AsyncProviderBase, ProviderBase
    from ergon_framework.providers.celery.dead_letter_publisher import publish_dead_letters
    from ergon_framework.providers.celery.task import CeleryProviderTask, provider_task
    from ergon_framework.providers.circuit_breaker import BreakerPolicy, CircuitBreaker
    from ergon_framework.providers.error_mapping import to_provider_error
    from ergon_framework.providers.errors import (
        ProviderAuthError,
        ProviderBadRequestError,
        ProviderCircuitOpenError,
        ProviderConnectionError,
        ProviderDependencyError,
        ProviderError,
        ProviderInternalError,
        ProviderQuotaExceededError,
        ProviderRateLimitError,
        ProviderResponseFormatError,
        ProviderTimeoutError,
        ReasonCode,
    )
    from ergon_framework.providers.memory_state import MemoryProviderState
    from ergon_framework.providers.models import ProviderExecutionContext, ProviderExecutionResult, ProviderReply
    from ergon_framework.providers.operations import OperationAttempt, operation
    from ergon_framework.providers.policy import ProviderPolicy, QuotaPolicy
    from ergon_framework.providers.provider import Provider
    from ergon_framework.providers.retry import RetryPolicy
    from ergon_framework.providers.state import ProviderScope
else:
    __getattr__ = lazy_exports(
        __name__,
        {
            "base": ("AsyncProviderBase", "ProviderBase"),
            "celery.dead_letter_publisher": ("publish_dead_letters",),
            "celery.task": ("CeleryProviderTask", "provider_task"),
            "circuit_breaker": ("BreakerPolicy", "CircuitBreaker"),
            "error_mapping": ("to_provider_error",),
            "errors": (
                "ProviderAuthError",
                "ProviderBadRequestError",
                "ProviderCircuitOpenError",
                "ProviderConnectionError",
                "ProviderDependencyError",
                "ProviderError",
                "ProviderInternalError",
                "ProviderQuotaExceededError",
                "ProviderRateLimitError",
                "ProviderResponseFormatError",
                "ProviderTimeoutError",
                "ReasonCode",
            ),
            "memory_state": ("MemoryProviderState",),
            "models": ("ProviderExecutionContext", "ProviderExecutionResult", "ProviderReply"),
            "operations": ("OperationAttempt", "operation"),
            "policy": ("ProviderPolicy", "QuotaPolicy"),
            "provider": ("Provider",),
            "retry": ("RetryPolicy",),
            "state": ("ProviderScope",),
        },
        extras={
            "celery.dead_letter_publisher": ("celery", "celery"),
            "celery.task": ("celery", "celery"),
        },
    )

__all__ = [
    "AsyncProviderBase",
    "BreakerPolicy",
    "CeleryProviderTask",
    "CircuitBreaker",
    "MemoryProviderState",
    "OperationAttempt",
    "Provider",
    "ProviderAuthError",
    "ProviderBadRequestError",
    "ProviderBase",
    "ProviderCircuitOpenError",
    "ProviderConnectionError",
    "ProviderDependencyError",
    "ProviderError",
    "ProviderExecutionContext",
    "ProviderExecutionResult",
    "ProviderInternalError",
    "ProviderPolicy",
    "ProviderQuotaExceededError",
    "ProviderRateLimitError",
    "ProviderReply",
    "ProviderResponseFormatError",
    "ProviderScope",
    "ProviderTimeoutError",
    "QuotaPolicy",
    "ReasonCode",
    "RetryPolicy",
    "operation",
    "provider_task",
    "publish_dead_letters",
    "to_provider_error",
]
