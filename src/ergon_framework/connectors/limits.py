"""FetchLimits: how much one fetch of a queue may load into the worker."""

from __future__ import annotations

from typing import Final

from ergon_framework.errors import ConfigurationError

#: Bytes of bodies that one fetch loads unless the queue is configured otherwise.
MAX_FETCH_BYTES: Final = 32 * 1024 * 1024


class FetchLimits:
    """The byte limit of one fetch, and the number of deliveries after which a body is no longer loaded.

    A consumer dead-letters a message after ``max_deliveries``: the envelope suffices for that, and the body may be what
    ends the process. With several consumers of one queue object the largest number applies, because no consumer may
    receive a message without its body that it is going to handle.
    """

    __slots__ = ("max_bytes", "max_deliveries")

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ConfigurationError(f"max_fetch_bytes must be at least 1, not {max_bytes!r}")
        self.max_bytes = max_bytes
        #: None until a consumer has set a number.
        self.max_deliveries: int | None = None

    def raise_max_deliveries(self, max_deliveries: int) -> None:
        """Load bodies up to delivery number *max_deliveries*, or more if another consumer has set more."""
        self.max_deliveries = max(max_deliveries, self.max_deliveries or 0)

    def exceeds(self, deliveries: int) -> bool:
        """Return whether every consumer dead-letters at delivery number *deliveries*."""
        return self.max_deliveries is not None and deliveries > self.max_deliveries
