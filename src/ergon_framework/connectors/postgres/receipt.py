"""Receipt: what a worker must show to settle what it holds."""

from __future__ import annotations

from typing import NamedTuple


class Receipt(NamedTuple):
    """The claim on one message: which instance made it, by which of its tokens."""

    id: int
    worker: int
    token: int
    #: By which it is found among those that have not come back yet; None for one that has.
    rank: int | None
    #: The key in the queue, also of what could not be read; nothing of that key may overtake it.
    key: str | None
    readable: bool = True
