"""The dead letter of a call that was given up on: thirteen fields, and whose end it is; pure."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Final, NamedTuple

from ergon_framework.failure import describe
from ergon_framework.providers.errors import ProviderError
from ergon_framework.providers.invocation import LONGEST, Invocation

#: An operation is any text of the host's code, and PostgreSQL keeps no NUL.
_UNPRINTABLE: Final = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
#: Where dead letters go.
QUEUE: Final = "queue.deadletter"


class DeadLetter(NamedTuple):
    """One call that ended in failure; ``occurred_at`` is in seconds since the epoch."""

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


#: The fields of a message; the id of the task travels beside them.
FIELDS: Final = DeadLetter._fields[: DeadLetter._fields.index("task_id")]


def dead_letter(invocation: Invocation, error: ProviderError, *, attempts: int, now: float) -> DeadLetter:
    """The dead letter of *invocation*, which ended with *error*.

    The call that failed is the error's, where it says which it was. *attempts* is how many were made,
    where the error does not know.
    """
    told = error.particulars
    return DeadLetter(
        tenant_id=invocation.tenant_id,
        campaign_id=told.get("campaign_id") or invocation.campaign_id,
        task_name=invocation.task_name[:LONGEST],
        provider_name=told.get("provider_name", invocation.provider_name),
        capability=told.get("capability", invocation.capability),
        operation=_UNPRINTABLE.sub("?", told.get("operation", invocation.operation))[:LONGEST],
        idempotency_key=told.get("idempotency_key", invocation.key),
        correlation_id=invocation.correlation_id,
        reason_code=error.reason_code.value,
        error_type=type(error).__name__,
        error_message=describe(error),
        attempts=len(error.attempts) if told else attempts,
        occurred_at=now,
        task_id=invocation.task_id,
        task_execution_id=invocation.task_execution_id,
        max_attempts=invocation.max_attempts,
        timeout_budget_ms=invocation.budget * 1000,
        retryable=error.retryable,
        http_status=error.http_status,
    )


def message(letter: DeadLetter) -> bytes:
    """*letter* as JSON, with the moment in ISO 8601."""
    fields = dict(zip(FIELDS, letter, strict=False))
    moment = datetime.fromtimestamp(letter.occurred_at, UTC)
    return json.dumps(fields | {"occurred_at": moment.isoformat()}, allow_nan=False).encode()
