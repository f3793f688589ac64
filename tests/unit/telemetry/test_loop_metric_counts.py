"""Attempts, retries and waits are counted for the step that made them, and only if they were made."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.base import Ack, Defer
from ergon_framework.engine.effects import Call
from ergon_framework.engine.retry import FailedAttempt
from ergon_framework.telemetry.metrics import Registry
from ergon_framework.transaction import Transaction
from ergon_framework.worker.exceptions import BusinessError, TransactionException
from ergon_framework.worker.report import Outcome, OutcomeKind
from ergon_framework.worker.telemetry import count_outcome

SYSTEM_ERROR, TIMEOUT_ERROR, BUSINESS_ERROR = (
    TransactionException("down"),
    TransactionException("over", "TIMEOUT"),
    BusinessError("no"),
)
STEPS = ("process", "success", "exception")


def make_failed_attempt(step, delay, error=SYSTEM_ERROR):
    failed_attempt = FailedAttempt(step, 0, error, occurred_at=0.0)
    failed_attempt.delay = delay
    return failed_attempt


def make_outcome(kind, *notes, steps=("process",), seconds=0.5, **attributes):
    result = Outcome(Transaction(id="a"), kind)
    result.failed_attempts = list(notes)
    result.durations = dict.fromkeys(steps, seconds)
    for name, value in attributes.items():
        setattr(result, name, value)
    return result


def count_all(*outcomes):
    counts = Registry().new_loop_metrics("Orders", steps=STEPS, success_steps=("process", "success"))
    for each in outcomes:
        count_outcome(counts, each)
    return counts


def count_without_durations(*outcomes):
    """Return every number except the durations."""
    numbers = count_all(*outcomes).counters()
    return {(name, *values): value for (name, values), value in numbers.items() if "duration." not in name} | {
        (name, *values): value for (name, values), value in numbers.items() if name == "ergon.retry.backoff.duration"
    }


def test_a_success_at_the_first_attempt_only_increments_one_number():
    with_success_step = count_all(
        *[make_outcome(OutcomeKind.SUCCEEDED, steps=("process", "success"), processed=True)] * 3
    )
    assert (with_success_step.plain, with_success_step.single) == (3, 0)
    without_success_step = count_all(*[make_outcome(OutcomeKind.SUCCEEDED, processed=True)] * 2)
    assert (without_success_step.plain, without_success_step.single) == (0, 2)


def test_a_success_after_a_retry_is_not_the_common_case():
    counts = count_all(make_outcome(OutcomeKind.SUCCEEDED, make_failed_attempt("process", 1.0), processed=True))
    assert (counts.plain, counts.single) == (0, 0)


def test_a_release_without_a_failed_attempt_is_not_the_common_case():
    counts = count_all(make_outcome(OutcomeKind.RELEASED, reason="limit", steps=()))
    assert (counts.plain, counts.single) == (0, 0)


def test_the_time_of_each_step_is_added_to_its_own_histogram():
    counts = count_all(
        make_outcome(OutcomeKind.SUCCEEDED, steps=("process", "success"), seconds=0.25, processed=True),
        make_outcome(
            OutcomeKind.FAILED,
            make_failed_attempt("process", None),
            steps=("process", "exception"),
            seconds=2.0,
            error=SYSTEM_ERROR,
        ),
    )
    assert {step: (sum(each.buckets), each.total) for step, each in counts.durations.items()} == {
        "process": (2, 2.25),
        "success": (1, 0.25),
        "exception": (1, 2.0),
    }


@pytest.mark.parametrize("reason", ["stop", "lost", "failed"])
def test_a_release_after_a_successful_retry_still_counts_the_retry(reason):
    result = make_outcome(
        OutcomeKind.RELEASED,
        make_failed_attempt("process", 2.0),
        steps=("process", "success"),
        processed=True,
        reason=reason,
    )
    assert count_without_durations(result) == {
        ("ergon.transactions", "released", ""): 1,
        ("ergon.attempts", "process"): 2,
        ("ergon.retries", "process"): 1,
        ("ergon.retry.backoff", "process"): 1,
        ("ergon.retry.backoff.duration", "process"): 2.0,
        ("ergon.attempts", "success"): 1,
    }


def test_a_stopped_attempt_is_counted():
    result = make_outcome(OutcomeKind.RELEASED, make_failed_attempt("process", 2.0), reason="stop")
    assert count_without_durations(result)["ergon.attempts", "process"] == 2


@pytest.mark.parametrize(
    "result, expected",
    [
        (
            # Success failed permanently; process, which was retried before, had succeeded.
            make_outcome(
                OutcomeKind.FAILED,
                make_failed_attempt("process", 2.0),
                make_failed_attempt("success", 0.5),
                make_failed_attempt("success", None, TIMEOUT_ERROR),
                steps=STEPS,
                processed=True,
                error=TIMEOUT_ERROR,
            ),
            {
                ("ergon.transactions", "failed", "TIMEOUT"): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.retry.backoff", "process"): 1,
                ("ergon.retry.backoff.duration", "process"): 2.0,
                ("ergon.attempts", "success"): 2,
                ("ergon.retries", "success"): 1,
                ("ergon.retry.backoff", "success"): 1,
                ("ergon.retry.backoff.duration", "success"): 0.5,
                ("ergon.attempts", "exception"): 1,
            },
        ),
        (
            # As before, but the time limit passed before success started: its error has no note.
            make_outcome(
                OutcomeKind.FAILED,
                make_failed_attempt("process", 2.0),
                steps=STEPS,
                processed=True,
                error=TIMEOUT_ERROR,
            ),
            {
                ("ergon.transactions", "failed", "TIMEOUT"): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.retry.backoff", "process"): 1,
                ("ergon.retry.backoff.duration", "process"): 2.0,
                ("ergon.attempts", "exception"): 1,
            },
        ),
        (
            # The time limit passed during the wait, so the next attempt was not started.
            make_outcome(
                OutcomeKind.FAILED,
                make_failed_attempt("process", 2.0),
                steps=("process", "exception"),
                error=TIMEOUT_ERROR,
            ),
            {
                ("ergon.transactions", "failed", "TIMEOUT"): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.attempts", "exception"): 1,
            },
        ),
        (
            make_outcome(
                OutcomeKind.EXCEPTION_HANDLER_FAILED,
                make_failed_attempt("process", None, BUSINESS_ERROR),
                make_failed_attempt("exception", 3.0),
                make_failed_attempt("exception", None),
                steps=("process", "exception"),
                error=BUSINESS_ERROR,
            ),
            {
                ("ergon.transactions", "handler_failed", "BUSINESS"): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.attempts", "exception"): 2,
                ("ergon.retries", "exception"): 1,
                ("ergon.retry.backoff", "exception"): 1,
                ("ergon.retry.backoff.duration", "exception"): 3.0,
            },
        ),
        (
            # The wait in the broker is not counted; the one before it is.
            make_outcome(
                OutcomeKind.DEFERRED,
                make_failed_attempt("process", 2.0),
                make_failed_attempt("process", 90.0),
                error=SYSTEM_ERROR,
                settlement=Defer(90.0),
            ),
            {
                ("ergon.transactions", "deferred", "SYSTEM"): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.retry.backoff", "process"): 1,
                ("ergon.retry.backoff.duration", "process"): 2.0,
            },
        ),
        (
            # The handler itself returned Later: every attempt was made.
            make_outcome(
                OutcomeKind.SUCCEEDED,
                make_failed_attempt("process", 2.0),
                steps=("process", "success"),
                processed=True,
                settlement=Defer(5.0),
            ),
            {
                ("ergon.transactions", "succeeded", ""): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.retry.backoff", "process"): 1,
                ("ergon.retry.backoff.duration", "process"): 2.0,
                ("ergon.attempts", "success"): 1,
            },
        ),
        (
            make_outcome(
                OutcomeKind.RELEASED,
                make_failed_attempt("process", 2.0),
                make_failed_attempt("process", None),
                reason="stop",
            ),
            {
                ("ergon.transactions", "released", ""): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.retry.backoff", "process"): 1,
                ("ergon.retry.backoff.duration", "process"): 2.0,
            },
        ),
        (
            # Stopped in a wait, and then the claim was lost too.
            make_outcome(OutcomeKind.RELEASED, make_failed_attempt("process", None), reason="lost"),
            {("ergon.transactions", "released", ""): 1, ("ergon.attempts", "process"): 1},
        ),
        (
            # The broker rejected the settlement of a success at the second attempt.
            make_outcome(
                OutcomeKind.RELEASED,
                make_failed_attempt("process", 2.0),
                steps=("process", "success"),
                processed=True,
                settlement=Ack(),
                reason="failed",
            ),
            {
                ("ergon.transactions", "released", ""): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.retry.backoff", "process"): 1,
                ("ergon.retry.backoff.duration", "process"): 2.0,
                ("ergon.attempts", "success"): 1,
            },
        ),
        (
            # Stopped during the first attempt, which has left no note; its call would not exit.
            make_outcome(OutcomeKind.RELEASED, reason="stop", abandoned_calls=(Call("process", int, ()),)),
            {
                ("ergon.transactions", "released", ""): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.handler.abandoned",): 1,
            },
        ),
        (
            make_outcome(OutcomeKind.DEFERRED, reason="key", steps=(), settlement=Defer(1.0)),
            {("ergon.transactions", "deferred", ""): 1},
        ),
    ],
    ids=[
        "success exhausted",
        "success not begun",
        "over in the wait",
        "handler exhausted",
        "deferred",
        "later asked for",
        "stopped in a wait",
        "lost in a wait",
        "settlement rejected",
        "stopped in a body",
        "never begun",
    ],
)
def test_an_outcome_is_counted_step_by_step(result, expected):
    assert count_without_durations(result) == expected


def test_waits_of_zero_seconds_are_not_counted():
    result = make_outcome(
        OutcomeKind.SUCCEEDED,
        make_failed_attempt("process", 0.0),
        make_failed_attempt("process", 0.5),
        make_failed_attempt("process", 0.25),
        processed=True,
    )
    assert count_without_durations(result) == {
        ("ergon.transactions", "succeeded", ""): 1,
        ("ergon.attempts", "process"): 4,
        ("ergon.retries", "process"): 3,
        ("ergon.retry.backoff", "process"): 2,
        ("ergon.retry.backoff.duration", "process"): 0.75,
    }
