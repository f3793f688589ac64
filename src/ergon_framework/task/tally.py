"""The tally: what an outcome adds to a loop's counts."""

from __future__ import annotations

from ergon_framework.connectors.base import Later
from ergon_framework.engine.attempts import Note
from ergon_framework.task.report import Kind, Outcome
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import Counts


def count(counts: Counts, outcome: Outcome) -> None:
    """Add *outcome*; the everyday one in about a microsecond, because that is paid for every transaction."""
    durations, taken = counts.durations, outcome.durations
    for step, seconds in taken.items():
        durations[step].add(seconds)
    if outcome.kind is Kind.SUCCEEDED and not outcome.notes:
        if len(taken) == 1:
            counts.single += 1
        else:
            counts.plain += 1
        return
    category = "" if outcome.error is None else outcome.error.category.value
    counts.add(names.TRANSACTIONS, outcome.kind.value, category)
    if outcome.body is not None:
        counts.add(names.ABANDONED)
    for step in outcome.durations:
        _count_attempts(counts, step, outcome)


def _count_attempts(counts: Counts, step: str, outcome: Outcome) -> None:
    notes = [note for note in outcome.notes if note.step == step]
    deferred = isinstance(outcome.settlement, Later) and not outcome.processed and outcome.error is not None
    given_up = bool(notes) and (notes[-1].delay is None or deferred)
    made = len(notes) + (not given_up and _begun(step, outcome))
    if made:
        counts.add(names.ATTEMPTS, step, amount=made)
    if made > 1:
        counts.add(names.RETRIES, step, amount=made - 1)
    waits = _waits(notes[: made - 1])
    if waits:
        counts.add(names.WAITS, step, amount=len(waits))
        counts.add(names.WAITED, step, amount=sum(waits))


def _waits(notes: list[Note]) -> list[float]:
    return [note.delay for note in notes if note.delay]


def _begun(step: str, outcome: Outcome) -> bool:
    """Whether the attempt that left no note was made: a lifecycle whose time is over does not begin a step."""
    error = outcome.error
    failed = error is not None and all(note.error is not error for note in outcome.notes)
    last = next((name for name in reversed(outcome.durations) if name != "exception"), step)
    return not (failed and step == last)
