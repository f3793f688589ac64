"""Output of a policy explanation: a table of its steps, and sentences with the totals."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ergon_framework.task.worst import RetryDelay, StepWorstCase, WorstCase

if TYPE_CHECKING:
    from ergon_framework.cli.policy_work import PolicyExplanation, ProviderRetries

#: Maximum number of waits listed individually.
_MAX_LISTED_WAITS = 6
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def show(explanation: PolicyExplanation) -> None:
    """Print the whole explanation."""
    worst = explanation.worst
    table = Table(box=box.SIMPLE, title=f"{explanation.task} on {explanation.queue}", title_justify="left")
    for heading in ("step", "attempts", "each at most", "waits between them", "in one delivery at most"):
        table.add_column(heading)
    for step in worst.steps:
        attempt_text = f"{format_duration(step.timeout)} + {format_duration(step.grace)} to leave"
        table.add_row(
            step.name, str(step.attempts), attempt_text, _format_waits(step.waits), format_duration(step.held)
        )
    Console(highlight=False, soft_wrap=True).print(table)
    for line in _build_summary(explanation):
        typer.echo(line)
    for advice in explanation.advice:
        typer.echo(f"note: {advice}")
    if explanation.refused is not None:
        typer.echo(f"ergon: {explanation.refused}", err=True)


def format_duration(duration: float) -> str:
    """Format a duration in seconds.

    >>> [format_duration(duration) for duration in (0.002, 1.5, 90, 7200, 200_000, float("inf"))]
    ['2 ms', '1.5 s', '1 min 30 s', '2 h', '2 d 7 h', 'no limit']
    """
    if isinf(duration):
        return "no limit"
    if 0 < duration < 1:
        return f"{1000 * duration:.3g} ms"
    if duration < _MINUTE:
        return f"{duration:.3g} s"
    whole = round(duration)
    for unit, name, smaller_unit, smaller_name in (
        (_DAY, "d", _HOUR, "h"),
        (_HOUR, "h", _MINUTE, "min"),
        (_MINUTE, "min", 1, "s"),
    ):
        if whole >= unit:
            rest = whole % unit // smaller_unit
            return f"{whole // unit} {name}" + (f" {rest} {smaller_name}" if rest else "")
    raise AssertionError("a minute or more has a unit")


def _build_summary(explanation: PolicyExplanation) -> Sequence[str]:
    worst = explanation.worst
    busy_text, claim_text = format_duration(worst.max_busy_seconds), format_duration(worst.max_claim_seconds)
    lines = [
        f"worst case of one delivery: {busy_text} from its first attempt until it is settled",
        f"worst case of its claim:    {claim_text}, with the wait for others before it begins",
        f"deferred:                   {_describe_step_deferral(worst.process)}",
        f"a service is unavailable:   {_describe_deferrals(worst)}",
        f"calls of process:           {worst.calls}; {worst.calls_with_crashes} with a crash in each delivery",
        f"the claim:                  {_describe_claim(explanation)}",
    ]
    lines += [
        f"stacked: {provider.name} tries {provider.attempts} times within {format_duration(provider.timeout)}"
        f"{_describe_attempt_timeout(provider)}: {_format_count(provider.calls)} calls of it for one transaction, "
        f"{_format_count(provider.calls_with_crashes)} with crashes; "
        "an open breaker defers without a call, and each of its probes is a call more"
        for provider in explanation.stacked
    ]
    return lines


def _format_waits(waits: Sequence[RetryDelay]) -> str:
    if not waits:
        return "none"
    local_waits, broker_waits = (
        [wait for wait in waits if (wait.slept is None) is is_deferred] for is_deferred in (False, True)
    )
    parts = [_format_durations(local_waits)] if local_waits else []
    if broker_waits:
        parts.append(f"then at the broker {_format_durations(broker_waits)}")
    first = waits[0]
    jitter = 0.0 if not first.planned else first.longest / first.planned - 1
    return "; ".join(parts) + (f"; ±{jitter:.0%}" if jitter else "")


def _format_durations(waits: Sequence[RetryDelay]) -> str:
    durations = [format_duration(wait.planned) for wait in waits]
    return ", ".join(
        durations if len(durations) <= _MAX_LISTED_WAITS else [*durations[: _MAX_LISTED_WAITS - 1], "…", durations[-1]]
    )


def _describe_step_deferral(step: StepWorstCase) -> str:
    return (
        f"up to {format_duration(step.deferred)} in all, held by the broker"
        if step.deferred
        else "no wait is that long"
    )


def _describe_deferrals(worst: WorstCase) -> str:
    if not worst.max_deferral:
        return "no deferral (loop.max_deferral is 0): a dead letter when the provider's own attempts are spent"
    return (
        f"deferred for {format_duration(worst.max_deferral)} since the first time (loop.max_deferral), at most "
        f"{_format_count(worst.deferrals)} times; costs no attempt and no delivery"
    )


def _describe_attempt_timeout(provider: ProviderRetries) -> str:
    return "" if provider.attempt_timeout is None else f", each at most {format_duration(provider.attempt_timeout)}"


def _format_count(number: float) -> str:
    return "any number of" if isinf(number) else f"{number:.0f}"


def _describe_claim(explanation: PolicyExplanation) -> str:
    if explanation.deadline is not None:
        return f"ends after {format_duration(explanation.deadline)}, and cannot be renewed"
    if explanation.lease is None:
        return "lasts as long as the connection"
    return f"lasts {format_duration(explanation.lease)} and is renewed for as long as the transaction takes"
