"""The receipt that a worker presents to settle a claimed message."""

from __future__ import annotations

from typing import NamedTuple


class RedisReceipt(NamedTuple):
    """The claim on one entry of the stream: its consumer, and the number of claims of the entry so far.

    Every claim of an entry increments the count, by any consumer, so that no two claims have the same number.
    """

    id: bytes
    consumer: str
    claim_count: int
    deliveries: int
    readable: bool = True
