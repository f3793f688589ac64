"""UploadSlots: how many artifacts each zone may upload concurrently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ergon_framework.facts.errors import LimitExceeded

#: Maximum concurrent uploads of a zone.
MAX_UPLOADS = 16


class UploadSlots:
    """Counts the uploads of each zone; for one event loop."""

    def __init__(self, limit: int = MAX_UPLOADS) -> None:
        self._limit = limit
        self._uploads: Counter[str] = Counter()

    @contextmanager
    def take(self, zones: Collection[str]) -> Iterator[None]:
        """Count an upload of *zones* until the context exits; raise LimitExceeded if a zone has reached its limit."""
        for zone in zones:
            if self._uploads[zone] >= self._limit:
                raise LimitExceeded(
                    f"zone {zone!r} has {self._uploads[zone]} uploads under way, and {self._limit} is the limit; wait "
                    "until one has ended"
                )
        self._uploads.update(zones)
        try:
            yield
        finally:
            self._uploads.subtract(zones)
