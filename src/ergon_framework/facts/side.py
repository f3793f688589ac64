"""FactSide: what a boundary does not keep for the consumers of its facts, kept beside it."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ergon_framework.connectors.side_store import Kept, MemorySideStore, SideStore


class FactSide(SideStore, Protocol):
    """Counts, delays and dead letters of one reader, and who of that name has the facts in hand."""

    #: The epoch of the facts that were read last; None before the first, and when somebody accepts another one.
    epoch: str | None

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held around every call: those who read under one name have one side in a process."""

    def take_over(self) -> int:
        """Begin a new generation, and say which; whoever had the one before has lost its claims."""

    @property
    def generation(self) -> int:
        """The one that holds."""

    def hand_over(self, beyond: Collection[int]) -> None:
        """Remember what was settled beyond the cursor, for whoever comes next."""

    def handed_over(self) -> Collection[int]:
        """What the one before has settled beyond the cursor, if it left in order."""

    def replay(self, kept: Kept) -> None:
        """Keep a dead letter for delivery at once, also by an owner who is running."""

    def replayed(self) -> Sequence[Kept]:
        """What was replayed since this was last asked."""


class MemoryFactSide(MemorySideStore):
    """One that lives as long as this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.epoch: str | None = None
        self.generation = 0
        self._beyond: frozenset[int] = frozenset()
        self._replayed: list[Kept] = []

    def take_over(self) -> int:
        self.generation += 1
        # They are among all that is kept, which the new owner asks for.
        self._replayed.clear()
        return self.generation

    def hand_over(self, beyond: Collection[int]) -> None:
        self._beyond = frozenset(beyond)

    def handed_over(self) -> Collection[int]:
        return self._beyond

    def replay(self, kept: Kept) -> None:
        self.keep(kept)
        self._replayed.append(kept)

    def replayed(self) -> Sequence[Kept]:
        found, self._replayed = self._replayed, []
        return found
