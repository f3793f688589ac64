"""ContentsCandidate: what the author of a place for contents tells the exam, and the sitting that uses it."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from typing import Any

from ergon_framework.facts.contents import Contents
from ergon_framework.testing.conformance.candidate import UNSAID


class ContentsCandidate(ABC):
    """A place that takes the exam; only ``contents`` must be written. What is not offered is not examined."""

    #: What ``durable`` must say of the place as it is set up here.
    durable: Any = UNSAID
    #: Bytes of a content that is not kept in one piece, if there is such a limit; else some that fill several CHUNKs.
    large: int = 1_000_017

    @abstractmethod
    def contents(self, place: str, *, room: int | None = None) -> Contents:
        """*place*, as another process would open it; it is empty when its name is used for the first time.

        *room* is how many bytes it may hold.
        """

    #: Whether ``contents`` can be told how much room there is.
    bounded: bool = False

    def cut(self, place: str, digest: str) -> bool:  # noqa: ARG002 - for those who can
        """Take the end of a content away, behind everybody's back; False if nobody knows how."""
        return False

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """The exam is over."""


class ContentsSitting:
    """One check being tried, in a place of its own."""

    def __init__(self, candidate: ContentsCandidate) -> None:
        self.candidate = candidate
        self.place = f"exam{uuid.uuid4().hex[:12]}"

    def contents(self, *, room: int | None = None) -> Contents:
        """The place, opened once more."""
        return self.candidate.contents(self.place, room=room)
