"""Dead letters and redelivery of a job's message: what the message becomes when the job has failed or is deferred."""

from __future__ import annotations

import time

from ergon_framework.connectors.base import DeadLetter
from ergon_framework.errors import Category
from ergon_framework.executor.verdict import FailureCause
from ergon_framework.failure import Failure, describe_error, get_error_type
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.mixins.policies import SettlePolicy
from ergon_framework.telemetry.context import current_ids
from ergon_framework.telemetry.options import DEFAULT_OPTIONS, TelemetryOptions
from ergon_framework.telemetry.tracebacks import format_traceback
from ergon_framework.transaction import Transaction


class JobFailed(TransactionException):
    """The job has failed, and its row records the failure."""

    def __init__(self, cause: FailureCause, attempts: int) -> None:
        super().__init__(cause.message, cause.category, final=True, code=cause.code)
        self.cause = cause
        self.attempts_made = attempts
        self.error_type = cause.error_type
        if cause.traceback is not None:
            self.details = {"traceback": cause.traceback}


def defer(message: str, delay: float, *, code: str) -> TransactionException:
    """Return an error that redelivers the message after *delay* seconds; no attempt was made."""
    return TransactionException(message, Category.SYSTEM, not_attempted=True, retry_after=delay, code=code)


def retry_later(cause: FailureCause, delay: float, *, attempts: int) -> TransactionException:
    """Return an error that redelivers the message after *delay* seconds for a retry; *attempts* were made."""
    error = TransactionException(cause.message, cause.category, not_attempted=True, retry_after=delay, code=cause.code)
    error.attempts_made, error.error_type = attempts, cause.error_type
    return error


def dead_letter(
    task: str, transaction: Transaction, error: JobFailed, options: TelemetryOptions = DEFAULT_OPTIONS
) -> DeadLetter:
    """Return the dead letter of a job, with the same data as its row, attempts included."""
    code, ids = error.code or error.category.value.lower(), current_ids()
    failure = Failure(
        task_name=task,
        transaction_id=transaction.id,
        source=transaction.source,
        tenant_id=transaction.tenant,
        correlation_id=transaction.correlation or transaction.id,
        idempotency_key=transaction.id,
        reason_code=code,
        error_type=get_error_type(error),
        error_message=describe_error(error),
        attempts=error.attempts_made or 0,
        occurred_at=time.time(),
        category=error.category,
        step="process",
        final=error.cause.final,
        trace_id=None if ids is None else ids[0],
        traceback=format_traceback(error, options),
    )
    return DeadLetter(code, failure)


def acks_failure(category: Category, policy: SettlePolicy) -> bool:
    """Return whether *policy* acks failures of this category instead of dead-lettering them."""
    on = {
        Category.BUSINESS: policy.on_business,
        Category.SYSTEM: policy.on_system,
        Category.TIMEOUT: policy.on_timeout,
    }
    return on[category] == "ack"
