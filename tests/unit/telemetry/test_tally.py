"""Each outcome is counted with the attempts that were made, the waits that were waited and nothing else."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.base import Later
from ergon_framework.engine.attempts import Note
from ergon_framework.engine.effects import Call
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.task.report import Kind, Outcome
from ergon_framework.task.tally import count
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import Registry
from ergon_framework.transaction import Transaction

ERROR = TransactionException("down")
METRICS = (names.TRANSACTIONS, names.ATTEMPTS, names.RETRIES, names.WAITS, names.WAITED, names.ABANDONED)


def outcome(kind, *notes, steps=("process",), error=None, **more):
    made = Outcome(Transaction("a"), kind)
    made.notes = [note(*args) for args in notes]
    made.durations = dict.fromkeys(steps, 0.1)
    made.error = error
    for name, value in more.items():
        setattr(made, name, value)
    return made


def note(step, attempt, delay, error=ERROR):
    made = Note(step, attempt, error, at=0.0)
    made.delay = delay
    return made


def counted(made):
    registry = Registry()
    counts = registry.counts("T", steps=("process", "success", "exception"), everyday=("process", "success"))
    registry.open(counts)
    count(counts, made)
    return {
        (metric.name, *list(labels.values())[1:]): value
        for metric in METRICS
        for labels, value in registry.read(metric)
    }


@pytest.mark.parametrize(
    "made, expected",
    [
        (
            outcome(Kind.SUCCEEDED, steps=("process", "success"), processed=True),
            {
                ("ergon.transactions", "succeeded"): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.attempts", "success"): 1,
            },
        ),
        (
            outcome(
                Kind.SUCCEEDED, ("process", 0, 2.0), ("process", 1, 0.0), steps=("process", "success"), processed=True
            ),
            {
                ("ergon.transactions", "succeeded"): 1,
                ("ergon.attempts", "process"): 3,
                ("ergon.attempts", "success"): 1,
                ("ergon.retries", "process"): 2,
                ("ergon.waits", "process"): 1,
                ("ergon.waits.duration", "process"): 2.0,
            },
        ),
        (
            outcome(
                Kind.FAILED, ("process", 0, 2.0), ("process", 1, None), steps=("process", "exception"), error=ERROR
            ),
            {
                ("ergon.transactions", "failed", "SYSTEM"): 1,
                ("ergon.attempts", "process"): 2,
                ("ergon.attempts", "exception"): 1,
                ("ergon.retries", "process"): 1,
                ("ergon.waits", "process"): 1,
                ("ergon.waits.duration", "process"): 2.0,
            },
        ),
        (
            outcome(Kind.DEFERRED, ("process", 0, 90.0), error=ERROR, settlement=Later(90.0)),
            {("ergon.transactions", "deferred", "SYSTEM"): 1, ("ergon.attempts", "process"): 1},
        ),
        (
            outcome(Kind.RELEASED, ("process", 0, None), reason="stop"),
            {("ergon.transactions", "released"): 1, ("ergon.attempts", "process"): 1},
        ),
        (
            outcome(Kind.RELEASED, reason="limit", steps=()),
            {("ergon.transactions", "released"): 1},
        ),
        (
            outcome(
                Kind.FAILED, ("process", 0, None), steps=("process", "exception"), error=ERROR, body=Call("x", int, ())
            ),
            {
                ("ergon.transactions", "failed", "SYSTEM"): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.attempts", "exception"): 1,
                ("ergon.bodies.abandoned",): 1,
            },
        ),
        (
            # The time was over before success could begin, so there is no note of it.
            outcome(Kind.FAILED, steps=("process", "success", "exception"), error=ERROR, processed=True),
            {
                ("ergon.transactions", "failed", "SYSTEM"): 1,
                ("ergon.attempts", "process"): 1,
                ("ergon.attempts", "exception"): 1,
            },
        ),
    ],
    ids=["plain", "retried", "exhausted", "deferred", "stopped", "not begun", "abandoned", "time over"],
)
def test_an_outcome_is_counted(made, expected):
    assert counted(made) == expected
