"""Sizes on the command line."""

from __future__ import annotations

import re
from typing import Final

import typer

_UNITS: Final[dict[str, int]] = {"": 1, "B": 1} | {
    f"{letter}{kind}": int(base**power)
    for power, letter in enumerate(("k", "M", "G", "T"), 1)
    for kind, base in (("B", 1000), ("iB", 1024))
}
_match_size: Final = re.compile(r"(\d+)\s*([kKMGT]?i?B?)").fullmatch


def parse_size(text: str) -> int:
    """Parse a size into a number of bytes.

    >>> parse_size("500MB"), parse_size("2GiB"), parse_size("4096")
    (500000000, 2147483648, 4096)
    """
    match = _match_size(text)
    if match is None or (unit := match[2].replace("K", "k")) not in _UNITS:
        raise typer.BadParameter(f"{text!r} is no size; write 4096, 500MB or 2GiB")
    return int(match[1]) * _UNITS[unit]
