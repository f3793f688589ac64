"""Tenure: this process as a worker instance, and how long what it holds is its own.

All claims of a process belong to one row that is renewed as a whole. If the row was taken away,
because its time was over and somebody noticed, all claims of before are gone and a new instance
begins; nothing that carries the old number can settle anything.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator

from ergon_framework.connectors.postgres import statements
from ergon_framework.schema.operation import Operation, Query

#: Of a lease that is left, the share below which it is renewed on the way to something else.
_RENEW = 0.6
#: And above which a renewal would tell nobody anything new.
_FRESH = 0.9


class Tenure:
    """The present worker instance; shared by all queues of one database in this process."""

    def __init__(self, lease: float) -> None:
        self.lease = lease
        self._lock = threading.Lock()
        self.worker: int | None = None
        #: When the lease ends, in seconds of the monotonic clock, as it was known before the server said yes.
        self.until = 0.0
        # Unique within an instance: a claim made again by the same process is another claim.
        self._tokens: Iterator[int] = itertools.count(1)
        #: Claims of queues that were closed, each with the end of its lease; the row as a whole may be renewed beyond.
        self._abandoned: dict[tuple[int, int], float] = {}

    def token(self) -> int:
        """A number that no other claim of this instance has."""
        return next(self._tokens)

    def abandon(self, claims: Iterable[tuple[int, int]]) -> None:
        """Let these claims, each a worker and a token, return at the end of their present lease."""
        with self._lock:
            self._abandoned |= dict.fromkeys(claims, self.until)

    def return_abandoned(self) -> Operation[bool]:
        """Return abandoned claims whose lease is over, at each renewal of the lease; return whether there were any."""
        if not self._abandoned:
            return False
        now = time.monotonic()
        with self._lock:
            # What an earlier instance held came back when that instance was taken away.
            self._abandoned = {claim: end for claim, end in self._abandoned.items() if claim[0] == self.worker}
            due = [claim for claim, end in self._abandoned.items() if end <= now]
        if due:
            # Kept until the server has answered: a call that fails is made again by the next one.
            yield Query(statements.REAP_CLAIMS, {"worker": due[0][0], "tokens": [token for _, token in due]})
            with self._lock:
                self._abandoned = {claim: end for claim, end in self._abandoned.items() if claim not in due}
        return bool(due)

    def present(self) -> Operation[int]:
        """The number of the instance, registered or renewed where that is due."""
        worker = self.worker
        if worker is not None and self.until - time.monotonic() < self.lease * _RENEW:
            worker = yield from self.renewed(worker)
        if worker is None:
            worker = yield from self._registered()
        return worker

    def renewed(self, worker: int) -> Operation[int | None]:
        """Renew the lease of *worker*; None if it is gone."""
        began = time.monotonic()
        if worker == self.worker and self.until - began > self.lease * _FRESH:
            return worker
        found = yield Query(statements.HEARTBEAT, {"worker": worker, "lease": self.lease})
        if not found:
            self.gone(worker)
            return None
        if worker == self.worker:
            self.until = began + self.lease
        return worker

    def _registered(self) -> Operation[int]:
        began = time.monotonic()
        ((number,),) = yield Query(statements.REGISTER, {"lease": self.lease, "name": _name()})
        with self._lock:
            # Two may have begun at once. One instance is enough, because only one is renewed.
            if self.worker is None:
                self.worker, self.until = number, began + self.lease
            worker = self.worker
        if worker != number:
            yield Query(statements.RETIRE, {"worker": number})
        return worker

    def gone(self, worker: int) -> None:
        """The instance was taken away."""
        with self._lock:
            if self.worker == worker:
                self.worker = None

    def retired(self) -> Operation[None]:
        """Take the row away, unless something is still held: that ends with the lease."""
        with self._lock:
            worker, self.worker = self.worker, None
        if worker is not None:
            yield Query(statements.RETIRE, {"worker": worker})


def _name() -> str:
    return f"{socket.gethostname()[:100]}:{os.getpid()}"
