"""Names of the streams and subjects of a queue."""

from __future__ import annotations

import hashlib
import re
from typing import Final, NamedTuple

#: The consumer that all workers of a queue share.
CONSUMER: Final = "ergon"
#: Longest readable part of a name: the server also uses stream names as directory names.
_MAX_NAME_CHARS: Final = 150
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_-]")


class StreamNames(NamedTuple):
    """The names of one queue's streams, and the subjects of their messages."""

    work: str
    states: str
    dead: str
    #: The subject for other producers; the connector publishes one level below, by id.
    subject: str
    state_subject: str
    dead_subject: str

    def subject_for(self, transaction_id: str) -> str:
        """Return the subject of a transaction, by which it can be found again."""
        return f"{self.subject}.{hashlib.blake2b(transaction_id.encode(), digest_size=16).hexdigest()}"


def stream_names(queue: str) -> StreamNames:
    """Return the names that belong to *queue*; no two queues share one.

    >>> stream_names("orders").work
    'ERGON-WORK-orders'
    >>> stream_names("orders.eu").subject
    'ergon.work.orders=2E=eu'
    """
    safe = _UNSAFE.sub(lambda match: f"={match[0].encode().hex().upper()}=", queue)
    if len(safe) > _MAX_NAME_CHARS:
        safe = f"{safe[:_MAX_NAME_CHARS]}=-{hashlib.sha256(queue.encode()).hexdigest()[:32]}"
    return StreamNames(
        work=f"ERGON-WORK-{safe}",
        states=f"ERGON-NOTES-{safe}",
        dead=f"ERGON-DEAD-{safe}",
        subject=f"ergon.work.{safe}",
        state_subject=f"ergon.notes.{safe}",
        dead_subject=f"ergon.dead.{safe}",
    )
