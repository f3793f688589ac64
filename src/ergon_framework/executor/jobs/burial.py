"""Burial: what a message of a job becomes when the job has failed, or is to come back later."""

from __future__ import annotations

import time

from ergon_framework.connectors.base import DeadLetter
from ergon_framework.errors import Category
from ergon_framework.executor.verdict import Blame
from ergon_framework.failure import Failure, describe, error_type_of
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.mixins.policies import SettlePolicy
from ergon_framework.telemetry.context import current_ids
from ergon_framework.telemetry.options import DEFAULTS, TelemetryOptions
from ergon_framework.telemetry.tracebacks import format_traceback
from ergon_framework.transaction import Transaction


class JobFailed(TransactionException):
    """The job has failed, and its row says so."""

    def __init__(self, blame: Blame, attempts: int) -> None:
        super().__init__(blame.message, blame.category, final=True, code=blame.code)
        self.blame = blame
        self.attempts_made = attempts
        self.error_type = blame.error_type
        if blame.traceback is not None:
            self.particulars = {"traceback": blame.traceback}


def later(message: str, delay: float, *, code: str) -> TransactionException:
    """The message comes back after *delay* seconds, and no attempt was made."""
    return TransactionException(message, Category.SYSTEM, later=True, retry_after=delay, code=code)


def again(blame: Blame, delay: float, *, attempts: int) -> TransactionException:
    """The message comes back after *delay* seconds for a further attempt; *attempts* were made."""
    error = TransactionException(blame.message, blame.category, later=True, retry_after=delay, code=blame.code)
    error.attempts_made, error.error_type = attempts, blame.error_type
    return error


def letter(task: str, transaction: Transaction, error: JobFailed, options: TelemetryOptions = DEFAULTS) -> DeadLetter:
    """The dead letter of a job says what its row says, attempts included."""
    code, ids = error.code or error.category.value.lower(), current_ids()
    failure = Failure(
        task_name=task,
        transaction_id=transaction.id,
        source=transaction.source,
        tenant_id=transaction.tenant,
        correlation_id=transaction.correlation or transaction.id,
        idempotency_key=transaction.id,
        reason_code=code,
        error_type=error_type_of(error),
        error_message=describe(error),
        attempts=error.attempts_made or 0,
        occurred_at=time.time(),
        category=error.category,
        step="process",
        final=error.blame.final,
        trace_id=None if ids is None else ids[0],
        traceback=format_traceback(error, options),
    )
    return DeadLetter(code, failure)


def acked(category: Category, policy: SettlePolicy) -> bool:
    """Whether *policy* acks failures of this category, in place of a dead letter."""
    on = {
        Category.BUSINESS: policy.on_business,
        Category.SYSTEM: policy.on_system,
        Category.TIMEOUT: policy.on_timeout,
    }
    return on[category] == "ack"
