"""Each outcome is counted with its attempts and its waits and nothing else."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.base import Defer
from ergon_framework.engine.effects import Call
from ergon_framework.engine.retry import FailedAttempt
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import Registry
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import TransactionException
from ergon_framework.worker.report import Outcome, OutcomeKind
from ergon_framework.worker.telemetry import count_outcome

ERROR = TransactionException("down")
METRICS = (
    names.TRANSACTIONS,
    names.ATTEMPTS,
    names.RETRIES,
    names.RETRY_BACKOFFS,
    names.RETRY_BACKOFF_SECONDS,
    names.ABANDONED_CALLS,
)


def make_outcome(kind, *notes, steps=("process",), error=None, **attributes):
    result = Outcome(Transaction(id="a"), kind)
    result.failed_attempts = [make_failed_attempt(*args) for args in notes]
    result.durations = dict.fromkeys(steps, 0.1)
    result.error = error
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


def make_failed_attempt(step, attempt, delay, error=ERROR):
    failed_attempt = FailedAttempt(step, attempt, error, occurred_at=0.0)
    failed_attempt.delay = delay
    return failed_attempt


def get_counts(result):
    registry = Registry()
    counts = registry.new_loop_metrics(
        "T", steps=("process", "success", "exception"), success_steps=("process", "success")
    )
    registry.open(counts)
    count_outcome(counts, result)
    return {
        (metric.name, *list(labels.values())[1:]): value
        for metric in METRICS
        for labels, value in registry.read(metric)
    }


@pytest.mark.parametrize(
    "result, expected",
    [
        (
            make_outcome(OutcomeKind.SUCCEEDED, steps=("process", "success"), processed=True),
            {
                ("ergon.transactions", "succeeded"): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.attempts", "success"): 1,
            },
        ),
        (
            make_outcome(
                OutcomeKind.SUCCEEDED,
                ("process", 0, 2.0),
                ("process", 1, 0.0),
                steps=("process", "success"),
                processed=True,
            ),
            {
                ("ergon.transactions", "succeeded"): 1,
                ("ergon.attempts", "process"): 3,
                ("ergon.attempts", "success"): 1,
                ("ergon.retries", "process"): 2,
                ("ergon.retry.backoff", "process"): 1,
                ("ergon.retry.backoff.duration", "process"): 2.0,
            },
        ),
        (
            make_outcome(
                OutcomeKind.FAILED,
                ("process", 0, 2.0),
                ("process", 1, None),
                steps=("process", "exception"),
                error=ERROR,
            ),
            {
                ("ergon.transactions", "failed", "SYSTEM"): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.attempts", "exception"): 1,
                ("ergon.retries", "process"): 1,
                ("ergon.retry.backoff", "process"): 1,
                ("ergon.retry.backoff.duration", "process"): 2.0,
            },
        ),
        (
            make_outcome(OutcomeKind.DEFERRED, ("process", 0, 90.0), error=ERROR, settlement=Defer(90.0)),
            {("ergon.transactions", "deferred", "SYSTEM"): 1, ("ergon.attempts", "process"): 1},
        ),
        (
            make_outcome(OutcomeKind.RELEASED, ("process", 0, None), reason="stop"),
            {("ergon.transactions", "released"): 1, ("ergon.attempts", "process"): 1},
        ),
        (
            make_outcome(OutcomeKind.RELEASED, reason="limit", steps=()),
            {("ergon.transactions", "released"): 1},
        ),
        (
            make_outcome(
                OutcomeKind.FAILED,
                ("process", 0, None),
                steps=("process", "exception"),
                error=ERROR,
                abandoned_calls=(Call("x", int, ()),),
            ),
            {
                ("ergon.transactions", "failed", "SYSTEM"): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.attempts", "exception"): 1,
                ("ergon.handler.abandoned",): 1,
            },
        ),
        (
            # The time limit passed before success could start, so there is no note of it.
            make_outcome(OutcomeKind.FAILED, steps=("process", "success", "exception"), error=ERROR, processed=True),
            {
                ("ergon.transactions", "failed", "SYSTEM"): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.attempts", "exception"): 1,
            },
        ),
    ],
    ids=["plain", "retried", "exhausted", "deferred", "stopped", "not begun", "abandoned", "time over"],
)
def test_an_outcome_is_counted(result, expected):
    assert get_counts(result) == expected
