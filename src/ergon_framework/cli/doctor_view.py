"""Findings as a person reads them: what is broken first, each with what to do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Final

import typer
from rich.console import Console
from rich.text import Text

from ergon_framework.cli.dlq_view import clean
from ergon_framework.finding import Finding, Weight

#: The longest text that is repeated.
_LONGEST: Final = 1_000
_COLOURS: Final = {Weight.FINE: "green", Weight.WARNING: "yellow", Weight.BROKEN: "bold red"}


def show(reports: Sequence[tuple[str, str, Sequence[Finding]]], counts: Counter[Weight]) -> None:
    """Print what was found of each, and how many of each weight there are."""
    lines = Lines()
    for name, address, findings in reports:
        lines.say(f"{name} ({address})" if address else name, "bold")
        width = max((len(each.what) for each in findings), default=0)
        for each in findings:
            lines.say(
                f"  {each.weight.value:<7}  {each.what:<{width}}  {clean(each.seen, _LONGEST)}", _COLOURS[each.weight]
            )
            if each.do:
                lines.say(f"           {'':<{width}}  do: {clean(each.do, _LONGEST)}")
    lines.say(", ".join(f"{counts[weight]} {weight.value}" for weight in Weight))


class Lines:
    """Lines in colours on a terminal, plain ones elsewhere."""

    def __init__(self) -> None:
        self._console = Console() if sys.stdout.isatty() else None

    def say(self, line: str, style: str = "") -> None:
        if self._console is None:
            typer.echo(line)
        else:
            # Text, because what a server says is no markup.
            self._console.print(Text(line, style=style), soft_wrap=True)
