"""Attempts, retries and waits are counted for the step that made them, and only if they were made."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.base import Ack, Later
from ergon_framework.engine.attempts import Note
from ergon_framework.engine.effects import Call
from ergon_framework.task.exceptions import BusinessError, TransactionException
from ergon_framework.task.report import Kind, Outcome
from ergon_framework.task.tally import count
from ergon_framework.telemetry.metrics import Registry
from ergon_framework.transaction import Transaction

DOWN, OVER, NO = TransactionException("down"), TransactionException("over", "TIMEOUT"), BusinessError("no")
STEPS = ("process", "success", "exception")


def note(step, delay, error=DOWN):
    made = Note(step, 0, error, at=0.0)
    made.delay = delay
    return made


def outcome(kind, *notes, steps=("process",), seconds=0.5, **more):
    made = Outcome(Transaction("a"), kind)
    made.notes = list(notes)
    made.durations = dict.fromkeys(steps, seconds)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def counts_of(*outcomes):
    counts = Registry().counts("Orders", steps=STEPS, everyday=("process", "success"))
    for each in outcomes:
        count(counts, each)
    return counts


def counted(*outcomes):
    """Every number but the durations."""
    numbers = counts_of(*outcomes).counted()
    return {(name, *values): value for (name, values), value in numbers.items() if "duration." not in name} | {
        (name, *values): value for (name, values), value in numbers.items() if name == "ergon.waits.duration"
    }


def test_a_success_at_once_only_raises_one_number():
    both = counts_of(*[outcome(Kind.SUCCEEDED, steps=("process", "success"), processed=True)] * 3)
    assert (both.plain, both.single) == (3, 0)
    alone = counts_of(*[outcome(Kind.SUCCEEDED, processed=True)] * 2)
    assert (alone.plain, alone.single) == (0, 2)


def test_a_success_after_a_retry_is_no_everyday_one():
    counts = counts_of(outcome(Kind.SUCCEEDED, note("process", 1.0), processed=True))
    assert (counts.plain, counts.single) == (0, 0)


def test_a_failure_without_a_note_is_no_everyday_success():
    counts = counts_of(outcome(Kind.RELEASED, reason="limit", steps=()))
    assert (counts.plain, counts.single) == (0, 0)


def test_the_time_of_each_step_is_added_to_its_own_histogram():
    counts = counts_of(
        outcome(Kind.SUCCEEDED, steps=("process", "success"), seconds=0.25, processed=True),
        outcome(Kind.FAILED, note("process", None), steps=("process", "exception"), seconds=2.0, error=DOWN),
    )
    assert {step: (sum(each.buckets), each.total) for step, each in counts.durations.items()} == {
        "process": (2, 2.25),
        "success": (1, 0.25),
        "exception": (1, 2.0),
    }


@pytest.mark.parametrize("reason", ["stop", "lost", "failed"])
def test_what_came_after_a_retry_that_succeeded_does_not_undo_it(reason):
    made = outcome(Kind.RELEASED, note("process", 2.0), steps=("process", "success"), processed=True, reason=reason)
    assert counted(made) == {
        ("ergon.transactions", "released", ""): 1,
        ("ergon.attempts", "process"): 2,
        ("ergon.retries", "process"): 1,
        ("ergon.waits", "process"): 1,
        ("ergon.waits.duration", "process"): 2.0,
        ("ergon.attempts", "success"): 1,
    }


def test_an_attempt_that_was_stopped_in_its_body_was_made():
    made = outcome(Kind.RELEASED, note("process", 2.0), reason="stop")
    assert counted(made)["ergon.attempts", "process"] == 2


@pytest.mark.parametrize(
    "made, expected",
    [
        (
            # Success failed for good; process, which was retried before, had succeeded.
            outcome(
                Kind.FAILED,
                note("process", 2.0),
                note("success", 0.5),
                note("success", None, OVER),
                steps=STEPS,
                processed=True,
                error=OVER,
            ),
            {
                ("ergon.transactions", "failed", "TIMEOUT"): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.waits", "process"): 1,
                ("ergon.waits.duration", "process"): 2.0,
                ("ergon.attempts", "success"): 2,
                ("ergon.retries", "success"): 1,
                ("ergon.waits", "success"): 1,
                ("ergon.waits.duration", "success"): 0.5,
                ("ergon.attempts", "exception"): 1,
            },
        ),
        (
            # As before, but the time was over before success began: its error has no note.
            outcome(Kind.FAILED, note("process", 2.0), steps=STEPS, processed=True, error=OVER),
            {
                ("ergon.transactions", "failed", "TIMEOUT"): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.waits", "process"): 1,
                ("ergon.waits.duration", "process"): 2.0,
                ("ergon.attempts", "exception"): 1,
            },
        ),
        (
            # The time ran out during the wait, so the next attempt was not begun.
            outcome(Kind.FAILED, note("process", 2.0), steps=("process", "exception"), error=OVER),
            {
                ("ergon.transactions", "failed", "TIMEOUT"): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.attempts", "exception"): 1,
            },
        ),
        (
            outcome(
                Kind.HANDLER_FAILED,
                note("process", None, NO),
                note("exception", 3.0),
                note("exception", None),
                steps=("process", "exception"),
                error=NO,
            ),
            {
                ("ergon.transactions", "handler_failed", "BUSINESS"): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.attempts", "exception"): 2,
                ("ergon.retries", "exception"): 1,
                ("ergon.waits", "exception"): 1,
                ("ergon.waits.duration", "exception"): 3.0,
            },
        ),
        (
            # The wait that the broker keeps is none of ours, the one before it is.
            outcome(Kind.DEFERRED, note("process", 2.0), note("process", 90.0), error=DOWN, settlement=Later(90.0)),
            {
                ("ergon.transactions", "deferred", "SYSTEM"): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.waits", "process"): 1,
                ("ergon.waits.duration", "process"): 2.0,
            },
        ),
        (
            # The handler itself asked for Later: every attempt was made.
            outcome(
                Kind.SUCCEEDED,
                note("process", 2.0),
                steps=("process", "success"),
                processed=True,
                settlement=Later(5.0),
            ),
            {
                ("ergon.transactions", "succeeded", ""): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.waits", "process"): 1,
                ("ergon.waits.duration", "process"): 2.0,
                ("ergon.attempts", "success"): 1,
            },
        ),
        (
            outcome(Kind.RELEASED, note("process", 2.0), note("process", None), reason="stop"),
            {
                ("ergon.transactions", "released", ""): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.waits", "process"): 1,
                ("ergon.waits.duration", "process"): 2.0,
            },
        ),
        (
            # Stopped in a wait, and then the claim was gone too.
            outcome(Kind.RELEASED, note("process", None), reason="lost"),
            {("ergon.transactions", "released", ""): 1, ("ergon.attempts", "process"): 1},
        ),
        (
            # The broker refused the settlement of what had succeeded at the second attempt.
            outcome(
                Kind.RELEASED,
                note("process", 2.0),
                steps=("process", "success"),
                processed=True,
                settlement=Ack(),
                reason="failed",
            ),
            {
                ("ergon.transactions", "released", ""): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.retries", "process"): 1,
                ("ergon.waits", "process"): 1,
                ("ergon.waits.duration", "process"): 2.0,
                ("ergon.attempts", "success"): 1,
            },
        ),
        (
            # Stopped while the first attempt ran, which has left no note; its body would not leave.
            outcome(Kind.RELEASED, reason="stop", body=Call("process", int, ())),
            {
                ("ergon.transactions", "released", ""): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.bodies.abandoned",): 1,
            },
        ),
        (
            outcome(Kind.DEFERRED, reason="key", steps=(), settlement=Later(1.0)),
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
        "settlement refused",
        "stopped in a body",
        "never begun",
    ],
)
def test_an_outcome_is_counted_step_by_step(made, expected):
    assert counted(made) == expected


def test_waits_of_no_time_are_no_waits():
    made = outcome(Kind.SUCCEEDED, note("process", 0.0), note("process", 0.5), note("process", 0.25), processed=True)
    assert counted(made) == {
        ("ergon.transactions", "succeeded", ""): 1,
        ("ergon.attempts", "process"): 4,
        ("ergon.retries", "process"): 3,
        ("ergon.waits", "process"): 2,
        ("ergon.waits.duration", "process"): 0.75,
    }
