"""UploadSlots: how many artifacts each zone may upload at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ergon_framework.facts.errors import LimitExceeded

#: Uploads that a zone may have under way.
MAX_UPLOADS = 16


class UploadSlots:
    """Counts the uploads of each zone; called on one event loop."""

    def __init__(self, limit: int = MAX_UPLOADS) -> None:
        self._limit = limit
        self._uploads: Counter[str] = Counter()

    @contextmanager
    def take(self, zones: Collection[str]) -> Iterator[None]:
        """Count an upload of *zones* until it ends; LimitExceeded if one of them has as many as it may."""
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
