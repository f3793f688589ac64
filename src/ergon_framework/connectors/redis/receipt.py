"""Receipt: what a worker must show to settle what it holds."""

from __future__ import annotations

from typing import NamedTuple


class Receipt(NamedTuple):
    """The claim on one entry of the stream: whose it is, and how often the entry was handed out by then.

    Every claim of an entry counts one more, whoever makes it, so that no two have the same number.
    """

    id: bytes
    consumer: str
    times: int
    deliveries: int
    readable: bool = True
