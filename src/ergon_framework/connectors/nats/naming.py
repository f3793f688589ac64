"""Naming: what the streams and subjects of a queue are called."""

from __future__ import annotations

import hashlib
import re
from typing import Final, NamedTuple

#: The one consumer that all workers of a queue share.
CONSUMER: Final = "ergon"
#: Longest name that stays readable: a stream's name is a folder's too.
_LONGEST: Final = 150
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")


class Names(NamedTuple):
    """The streams of one queue, and where their messages go."""

    work: str
    notes: str
    dead: str
    #: Where others publish; what we send goes one level below, by its id.
    subject: str
    note_subject: str
    dead_subject: str

    def of(self, transaction_id: str) -> str:
        """The subject of a transaction, by which it can be found again."""
        return f"{self.subject}.{hashlib.blake2b(transaction_id.encode(), digest_size=16).hexdigest()}"


def names(queue: str) -> Names:
    """The names that belong to *queue*; no two queues share one.

    >>> names("orders").work
    'ERGON-WORK-orders'
    >>> names("orders.eu").subject
    'ergon.work.orders=2E=eu'
    """
    safe = _UNSAFE.sub(lambda found: f"={found[0].encode().hex().upper()}=", queue)
    if len(safe) > _LONGEST:
        safe = f"{safe[:_LONGEST]}=-{hashlib.sha256(queue.encode()).hexdigest()[:32]}"
    return Names(
        work=f"ERGON-WORK-{safe}",
        notes=f"ERGON-NOTES-{safe}",
        dead=f"ERGON-DEAD-{safe}",
        subject=f"ergon.work.{safe}",
        note_subject=f"ergon.notes.{safe}",
        dead_subject=f"ergon.dead.{safe}",
    )
