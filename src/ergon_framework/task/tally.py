"""What an outcome adds to the metrics of a loop."""

from __future__ import annotations

from ergon_framework.connectors.base import Defer
from ergon_framework.engine.attempts import FailedAttempt
from ergon_framework.task.report import Outcome, OutcomeKind
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import LoopMetrics


def count_outcome(metrics: LoopMetrics, outcome: Outcome) -> None:
    """Add *outcome*; the common case takes about a microsecond, because it runs for every transaction."""
    durations, step_durations = metrics.durations, outcome.durations
    for step, seconds in step_durations.items():
        durations[step].add(seconds)
    if outcome.kind is OutcomeKind.SUCCEEDED and not outcome.failed_attempts:
        if len(step_durations) == 1:
            metrics.single += 1
        else:
            metrics.plain += 1
        return
    category = "" if outcome.error is None else outcome.error.category.value
    metrics.add(names.TRANSACTIONS, outcome.kind.value, category)
    if outcome.abandoned_call is not None:
        metrics.add(names.ABANDONED)
    for step in outcome.durations:
        _count_attempts(metrics, step, outcome)


def _count_attempts(metrics: LoopMetrics, step: str, outcome: Outcome) -> None:
    failed_attempts = [failed_attempt for failed_attempt in outcome.failed_attempts if failed_attempt.step == step]
    deferred = isinstance(outcome.settlement, Defer) and not outcome.processed and outcome.error is not None
    has_given_up = bool(failed_attempts) and (failed_attempts[-1].delay is None or deferred)
    attempt_count = len(failed_attempts) + (not has_given_up and _was_attempted(step, outcome))
    if attempt_count:
        metrics.add(names.ATTEMPTS, step, amount=attempt_count)
    if attempt_count > 1:
        metrics.add(names.RETRIES, step, amount=attempt_count - 1)
    delays = _list_delays(failed_attempts[: attempt_count - 1])
    if delays:
        metrics.add(names.WAITS, step, amount=len(delays))
        metrics.add(names.WAITED, step, amount=sum(delays))


def _list_delays(failed_attempts: list[FailedAttempt]) -> list[float]:
    return [failed_attempt.delay for failed_attempt in failed_attempts if failed_attempt.delay]


def _was_attempted(step: str, outcome: Outcome) -> bool:
    """Return whether the unrecorded attempt was made: an expired lifecycle does not start a step."""
    error = outcome.error
    has_unrecorded_failure = error is not None and all(
        failed_attempt.error is not error for failed_attempt in outcome.failed_attempts
    )
    last_step = next((name for name in reversed(outcome.durations) if name != "exception"), step)
    return not (has_unrecorded_failure and step == last_step)
