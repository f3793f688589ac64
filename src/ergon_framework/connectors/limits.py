"""FetchLimits: what one fetch of a queue may load into the worker."""

from __future__ import annotations

from typing import Final

from ergon_framework.errors import ConfigurationError

#: Bytes of bodies that one fetch loads unless the queue is told otherwise.
MAX_FETCH_BYTES: Final = 32 * 1024 * 1024


class FetchLimits:
    """The bytes of one fetch, and the deliveries after which a body is no longer loaded.

    A consumer dead-letters a message after ``max_deliveries``: it needs the envelope for that, and the body may be what
    ends the process. Of several consumers of one queue object the largest number counts: none of them may be given a
    message without its body that it is going to handle.
    """

    __slots__ = ("max_bytes", "max_deliveries")

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ConfigurationError(f"max_fetch_bytes must be at least 1, not {max_bytes!r}")
        self.max_bytes = max_bytes
        #: None while no consumer has stated a number.
        self.max_deliveries: int | None = None

    def raise_deliveries(self, most: int) -> None:
        """Load bodies up to delivery number *most*, or more if another consumer has said so."""
        self.max_deliveries = max(most, self.max_deliveries or 0)

    def exceeds(self, deliveries: int) -> bool:
        """Whether delivery number *deliveries* is one that every consumer dead-letters."""
        return self.max_deliveries is not None and deliveries > self.max_deliveries
