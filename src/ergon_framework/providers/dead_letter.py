"""The dead letter of a call that was given up: thirteen fields and the id of its task; no I/O."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Final, NamedTuple

from ergon_framework.failure import describe_error
from ergon_framework.providers.celery.invocation import MAX_NAME_CHARS, Invocation
from ergon_framework.providers.errors import ProviderError

#: An operation is arbitrary text from the host's code, and PostgreSQL cannot store NUL.
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
#: The name of the dead-letter queue.
DEAD_LETTER_QUEUE: Final = "queue.deadletter"


class ProviderDeadLetter(NamedTuple):
    """One failed call; ``occurred_at`` is in seconds since the epoch."""

    tenant_id: str
    campaign_id: str | None
    task_name: str
    provider_name: str
    capability: str
    operation: str
    idempotency_key: str | None
    correlation_id: str
    reason_code: str
    error_type: str
    error_message: str
    attempts: int
    occurred_at: float
    task_id: str
    # Columns of the metrics row only; the stored dead letter and its message do not have them.
    task_execution_id: str | None = None
    max_attempts: int = 0
    timeout_budget_ms: float = 0.0
    retryable: bool = False
    http_status: int | None = None


#: The fields of a message; the task id is sent as the message id.
MESSAGE_FIELDS: Final = ProviderDeadLetter._fields[: ProviderDeadLetter._fields.index("task_id")]


def build_dead_letter(invocation: Invocation, error: ProviderError, *, attempts: int, now: float) -> ProviderDeadLetter:
    """Return the dead letter of *invocation*, which ended with *error*.

    The details of the failed call come from the error if it has them. *attempts* is the number of attempts
    if the error has none.
    """
    details = error.details
    return ProviderDeadLetter(
        tenant_id=invocation.tenant_id,
        campaign_id=details.get("campaign_id") or invocation.campaign_id,
        task_name=invocation.task_name[:MAX_NAME_CHARS],
        provider_name=details.get("provider_name", invocation.provider_name),
        capability=details.get("capability", invocation.capability),
        operation=_UNPRINTABLE.sub("?", details.get("operation", invocation.operation))[:MAX_NAME_CHARS],
        idempotency_key=details.get("idempotency_key", invocation.key),
        correlation_id=invocation.correlation_id,
        reason_code=error.reason_code.value,
        error_type=type(error).__name__,
        error_message=describe_error(error),
        attempts=len(error.attempts) if details else attempts,
        occurred_at=now,
        task_id=invocation.task_id,
        task_execution_id=invocation.task_execution_id,
        max_attempts=invocation.max_attempts,
        timeout_budget_ms=invocation.budget * 1000,
        retryable=error.retryable,
        http_status=error.http_status,
    )


def to_json(letter: ProviderDeadLetter) -> bytes:
    """Return *letter* as JSON, with the time in ISO 8601."""
    fields = dict(zip(MESSAGE_FIELDS, letter, strict=False))
    occurred_at = datetime.fromtimestamp(letter.occurred_at, UTC)
    return json.dumps(fields | {"occurred_at": occurred_at.isoformat()}, allow_nan=False).encode()
