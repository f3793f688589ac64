"""BoundaryCandidate: what a store's author tells the exam, so that it can treat his store well and badly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.model import Side
from ergon_framework.testing.conformance.candidate import UNSAID


class BoundaryCandidate(ABC):
    """A store that takes the exam; only ``client`` must be written. What is not offered is not examined."""

    #: Seconds within which every call must come back.
    patience: float = 20.0
    #: What ``capabilities.durable`` must say of the store as it is set up here.
    durable: Any = UNSAID

    @abstractmethod
    def client(self, store: str, *, side: Side = Side.INNER, room: int | None = None) -> Boundary | AsyncBoundary:
        """A new client of *store*, as another process would have it.

        The store is empty when its name is used for the first time. *room* is how many facts it may retain.
        """

    #: Whether ``client`` can be told how much room there is.
    bounded: bool = False

    #: Whether an upload that broke off can be gone on with, and need not begin anew.
    resumes: bool = False

    def backup(self, store: str) -> Callable[[], None] | None:  # noqa: ARG002 - for those who can
        """Make a backup; what is returned puts it back in place. None if nobody knows how."""
        return None

    def lose(self, store: str, bucket: str, key: str) -> bool:  # noqa: ARG002 - as above
        """Take the bytes of an artifact away, behind the store's back; False if nobody knows how."""
        return False

    def damage(self, store: str, bucket: str, key: str) -> bool:  # noqa: ARG002 - as above
        """Change some bytes of an artifact, behind the store's back; False if nobody knows how."""
        return False

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """The exam is over."""
