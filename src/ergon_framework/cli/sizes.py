"""Sizes as they are written on a command line."""

from __future__ import annotations

import re
from typing import Final

import typer

_UNITS: Final[dict[str, int]] = {"": 1, "B": 1} | {
    f"{letter}{kind}": int(base**power)
    for power, letter in enumerate(("k", "M", "G", "T"), 1)
    for kind, base in (("B", 1000), ("iB", 1024))
}
_SIZE: Final = re.compile(r"(\d+)\s*([kKMGT]?i?B?)").fullmatch


def size(given: str) -> int:
    """A number of bytes.

    >>> size("500MB"), size("2GiB"), size("4096")
    (500000000, 2147483648, 4096)
    """
    found = _SIZE(given)
    if found is None or (unit := found[2].replace("K", "k")) not in _UNITS:
        raise typer.BadParameter(f"{given!r} is no size; write 4096, 500MB or 2GiB")
    return int(found[1]) * _UNITS[unit]
