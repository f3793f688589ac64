"""Output of diagnostics: the most severe first, each with its remedy."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Final

import typer
from rich.console import Console
from rich.text import Text

from ergon_framework.cli.dlq_view import sanitize
from ergon_framework.finding import Diagnostic, Severity

#: Maximum length of a text in the output.
_MAX_TEXT_CHARS: Final = 1_000
_COLOURS: Final = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}


def show(reports: Sequence[tuple[str, str, Sequence[Diagnostic]]], counts: Counter[Severity]) -> None:
    """Print the diagnostics of each target, and the number of diagnostics per severity."""
    printer = Printer()
    for name, address, findings in reports:
        printer.print_line(f"{name} ({address})" if address else name, "bold")
        width = max((len(each.what) for each in findings), default=0)
        for each in findings:
            printer.print_line(
                f"  {each.weight.value:<7}  {each.what:<{width}}  {sanitize(each.observed, _MAX_TEXT_CHARS)}",
                _COLOURS[each.weight],
            )
            if each.remedy:
                printer.print_line(f"           {'':<{width}}  do: {sanitize(each.remedy, _MAX_TEXT_CHARS)}")
    printer.print_line(", ".join(f"{counts[weight]} {weight.value}" for weight in Severity))


class Printer:
    """Prints coloured lines on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self._console = Console() if sys.stdout.isatty() else None

    def print_line(self, line: str, style: str = "") -> None:
        if self._console is None:
            typer.echo(line)
        else:
            # Text, because a server's message may contain characters that rich reads as markup.
            self._console.print(Text(line, style=style), soft_wrap=True)
