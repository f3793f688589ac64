"""Hooks for ``json.loads`` that reject numbers beyond a float, NaN and Infinity, and repeated keys in an object.

Pass them as ``parse_float``, ``parse_constant`` and ``object_pairs_hook``; all JSON readers of the package do.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

from ergon_framework.errors import ErgonError


class RepeatedKeyError(ErgonError, ValueError):
    """An object contains one key twice: readers that take the first and readers that take the last would disagree."""

    def __init__(self, key: str) -> None:
        super().__init__("a JSON object contains a key twice")
        self.key = key


def parse_finite(literal: str) -> float:
    """Return the number of *literal*; ValueError beyond the range of a float."""
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError("number exceeds the range of a float")
    return number


def reject_constant(literal: str) -> NoReturn:
    """Reject NaN and Infinity, which the json module reads and JSON does not have."""
    raise ValueError(f"{literal} is not JSON")


def reject_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of *pairs*; RepeatedKeyError if a key occurs twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise RepeatedKeyError(find_repeated_key(key for key, _ in pairs))
    return result


def find_repeated_key(keys: Iterable[str]) -> str:
    """Return a repeated key of *keys*: the most frequent one."""
    return Counter(keys).most_common(1)[0][0]
