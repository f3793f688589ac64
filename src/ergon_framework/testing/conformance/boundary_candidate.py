"""BoundaryUnderTest: the adapter through which the conformance suite uses a store and injects faults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.model import BoundarySide
from ergon_framework.testing.conformance.candidate import UNSAID


class BoundaryUnderTest(ABC):
    """A store under test; only ``client`` is required. The suite skips checks of optional features that are missing."""

    #: Seconds within which every call must return.
    patience: float = 20.0
    #: The expected value of ``capabilities.durable`` for the store's setup.
    durable: Any = UNSAID

    @abstractmethod
    def client(
        self, store: str, *, side: BoundarySide = BoundarySide.INNER, room: int | None = None
    ) -> Boundary | AsyncBoundary:
        """Create a new client of *store*, as another process would.

        The store is empty when its name is used for the first time. *room* is the number of facts that it may retain.
        """

    #: Whether ``client`` supports *room*.
    bounded: bool = False

    #: Whether an interrupted upload can be resumed instead of starting from scratch.
    resumes: bool = False

    def backup(self, store: str) -> Callable[[], None] | None:  # noqa: ARG002 - optional
        """Make a backup and return a function that restores it; None if this is not supported."""
        return None

    def lose(self, store: str, bucket: str, key: str) -> bool:  # noqa: ARG002 - as above
        """Remove the bytes of an artifact without using the store; False if this is not supported."""
        return False

    def damage(self, store: str, bucket: str, key: str) -> bool:  # noqa: ARG002 - as above
        """Change some bytes of an artifact without using the store; False if this is not supported."""
        return False

    def close(self) -> None:  # noqa: B027 - optional
        """Release all resources after the suite."""
