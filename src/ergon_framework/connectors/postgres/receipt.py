"""The receipt that a worker presents to settle a claimed message."""

from __future__ import annotations

from typing import NamedTuple


class PostgresReceipt(NamedTuple):
    """The claim on one message: the worker instance that made it, and the token of the claim."""

    id: int
    worker: int
    token: int
    #: The rank in the table of ready messages; None for a message that has been returned before.
    rank: int | None
    #: The key in the queue, also of a message that could not be decoded; no message of that key may overtake it.
    key: str | None
    readable: bool = True
