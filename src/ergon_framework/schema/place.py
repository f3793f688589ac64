"""A pool permit: the right to use one connection of a pool, which can be transferred to another owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self


class PoolPermit:
    """A permit that is returned at the end of its ``with``, unless it was transferred before."""

    __slots__ = ("_release",)

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release

    def transfer(self) -> PoolPermit:
        """Transfer the permit: return a new one, and make this one inert."""
        permit, self._release = PoolPermit(self._release), _do_nothing
        return permit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()


def _do_nothing() -> None:
    """Do nothing; the release of a transferred permit."""
