"""A place: the right to use one of so many connections, which can be handed on to whoever ends the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self


class Place:
    """Held until the end of its ``with``, unless somebody has taken it over by then."""

    __slots__ = ("_vacate",)

    def __init__(self, vacate: Callable[[], object]) -> None:
        self._vacate = vacate

    def handed_on(self) -> Place:
        """The same place for somebody else."""
        other, self._vacate = Place(self._vacate), _nothing
        return other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._vacate()


def _nothing() -> None:
    """What is left to do for a place that somebody else has."""
