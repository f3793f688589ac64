"""ContentStoreUnderTest: the adapter to a content store, and the context that the checks use."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from typing import Any

from ergon_framework.facts.contents import ContentStore
from ergon_framework.testing.conformance.candidate import UNSAID


class ContentStoreUnderTest(ABC):
    """A content store under test; only ``contents`` is required. The suite skips checks of missing features."""

    #: The expected value of ``durable`` for the store's setup.
    durable: Any = UNSAID
    #: Size of a content that the store splits, if it has such a limit; otherwise of one that fills several chunks.
    large: int = 1_000_017

    @abstractmethod
    def contents(self, place: str, *, room: int | None = None) -> ContentStore:
        """Open *place*, as another process would; it is empty when its name is used for the first time.

        *room* is the number of bytes that it may hold.
        """

    #: Whether ``contents`` supports *room*.
    bounded: bool = False

    def cut(self, place: str, digest: str) -> bool:  # noqa: ARG002 - optional
        """Remove the end of a content without using the store; False if this is not supported."""
        return False

    def close(self) -> None:  # noqa: B027 - optional
        """Release all resources after the suite."""


class ContentCheckContext:
    """The context of one check, with its own store."""

    def __init__(self, candidate: ContentStoreUnderTest) -> None:
        self.candidate = candidate
        self.place = f"exam{uuid.uuid4().hex[:12]}"

    def contents(self, *, room: int | None = None) -> ContentStore:
        """Open the store again."""
        return self.candidate.contents(self.place, room=room)
