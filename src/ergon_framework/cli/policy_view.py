"""A policy as a person reads it: a table of its steps, and sentences with the sums."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import TYPE_CHECKING

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ergon_framework.task.worst import StepCase, Wait, WorstCase

if TYPE_CHECKING:
    from ergon_framework.cli.policy_work import Explained, Stacked

#: Waits that are shown one by one.
_SHOWN = 6
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400


def show(found: Explained) -> None:
    """Print everything."""
    worst = found.worst
    table = Table(box=box.SIMPLE, title=f"{found.task} on {found.queue}", title_justify="left")
    for head in ("step", "attempts", "each at most", "waits between them", "in one delivery at most"):
        table.add_column(head)
    for step in worst.steps:
        each = f"{seconds(step.timeout)} + {seconds(step.grace)} to leave"
        table.add_row(step.name, str(step.attempts), each, _waits(step.waits), seconds(step.held))
    Console(highlight=False, soft_wrap=True).print(table)
    for line in _sums(found):
        typer.echo(line)
    for advice in found.advice:
        typer.echo(f"note: {advice}")
    if found.refused is not None:
        typer.echo(f"ergon: {found.refused}", err=True)


def seconds(length: float) -> str:
    """A length of time as people say it.

    >>> [seconds(length) for length in (0.002, 1.5, 90, 7200, 200_000, float("inf"))]
    ['2 ms', '1.5 s', '1 min 30 s', '2 h', '2 d 7 h', 'no limit']
    """
    if isinf(length):
        return "no limit"
    if 0 < length < 1:
        return f"{1000 * length:.3g} ms"
    if length < _MINUTE:
        return f"{length:.3g} s"
    whole = round(length)
    for unit, name, below, lesser in ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {name}" + (f" {rest} {lesser}" if rest else "")
    raise AssertionError("a minute or more has a unit")


def _sums(found: Explained) -> Sequence[str]:
    worst = found.worst
    lines = [
        f"worst case of one delivery: {seconds(worst.busy)} from its first attempt until it is settled",
        f"worst case of its claim:    {seconds(worst.held)}, with the wait for others before it begins",
        f"deferred:                   {_deferred(worst.process)}",
        f"a service is unavailable:   {_describe_deferrals(worst)}",
        f"calls of process:           {worst.calls}; {worst.calls_with_crashes} with a crash in each delivery",
        f"the claim:                  {_claim(found)}",
    ]
    lines += [
        f"stacked: {one.name} tries {one.attempts} times within {seconds(one.timeout)}"
        f"{_describe_attempt_timeout(one)}: {_format_count(one.calls)} calls of it for one transaction, "
        f"{_format_count(one.calls_with_crashes)} with crashes; "
        "an open breaker defers without a call, and each of its probes is a call more"
        for one in found.stacked
    ]
    return lines


def _waits(waits: Sequence[Wait]) -> str:
    if not waits:
        return "none"
    here, there = ([wait for wait in waits if (wait.slept is None) is away] for away in (False, True))
    parts = [_lengths(here)] if here else []
    if there:
        parts.append(f"then at the broker {_lengths(there)}")
    first = waits[0]
    share = 0.0 if not first.planned else first.longest / first.planned - 1
    return "; ".join(parts) + (f"; ±{share:.0%}" if share else "")


def _lengths(waits: Sequence[Wait]) -> str:
    said = [seconds(wait.planned) for wait in waits]
    return ", ".join(said if len(said) <= _SHOWN else [*said[: _SHOWN - 1], "…", said[-1]])


def _deferred(step: StepCase) -> str:
    return f"up to {seconds(step.deferred)} in all, held by the broker" if step.deferred else "no wait is that long"


def _describe_deferrals(worst: WorstCase) -> str:
    if not worst.max_deferral:
        return "no deferral (loop.max_deferral is 0): a dead letter when the provider's own attempts are spent"
    return (
        f"deferred for {seconds(worst.max_deferral)} since the first time (loop.max_deferral), at most "
        f"{_format_count(worst.deferrals)} times; costs no attempt and no delivery"
    )


def _describe_attempt_timeout(one: Stacked) -> str:
    return "" if one.attempt_timeout is None else f", each at most {seconds(one.attempt_timeout)}"


def _format_count(number: float) -> str:
    return "any number of" if isinf(number) else f"{number:.0f}"


def _claim(found: Explained) -> str:
    if found.deadline is not None:
        return f"ends after {seconds(found.deadline)}, and cannot be renewed"
    if found.lease is None:
        return "lasts as long as the connection"
    return f"lasts {seconds(found.lease)} and is renewed for as long as the transaction takes"
