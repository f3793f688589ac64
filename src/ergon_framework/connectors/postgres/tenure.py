"""The worker lease: this process as a worker instance, and how long its claims last.

All claims of a process belong to one row that is renewed as a whole. If the row was deleted, because its lease ended
and another worker noticed, all earlier claims are gone and a new instance is registered; a receipt with the old number
settles nothing.
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

#: The remaining share of a lease below which another call renews it first.
_RENEW_SHARE = 0.6
#: The remaining share of a lease above which a renewal is skipped.
_SKIP_RENEWAL_SHARE = 0.9


class WorkerLease:
    """The current worker instance; shared by all queues of one database in this process."""

    def __init__(self, lease: float) -> None:
        self.lease = lease
        self._lock = threading.Lock()
        self.worker: int | None = None
        #: The end of the lease on the monotonic clock, counted from before the request to the server.
        self.until = 0.0
        # Unique within an instance: a repeated claim of the same process is another claim.
        self._tokens: Iterator[int] = itertools.count(1)
        #: Claims of closed queues, each with the end of its lease; the row as a whole may be renewed beyond that.
        self._abandoned: dict[tuple[int, int], float] = {}

    def next_token(self) -> int:
        """Return a number that no other claim of this instance has."""
        return next(self._tokens)

    def abandon(self, claims: Iterable[tuple[int, int]]) -> None:
        """Let these claims, each a worker and a token, return at the end of their current lease."""
        with self._lock:
            self._abandoned |= dict.fromkeys(claims, self.until)

    def return_abandoned(self) -> Operation[bool]:
        """Return abandoned claims whose lease is over; called at each renewal. Return whether there were any."""
        if not self._abandoned:
            return False
        now = time.monotonic()
        with self._lock:
            # The claims of an earlier instance returned when that instance expired.
            self._abandoned = {claim: end for claim, end in self._abandoned.items() if claim[0] == self.worker}
            due = [claim for claim, end in self._abandoned.items() if end <= now]
        if due:
            # Kept until the server has answered: the next call repeats a call that fails.
            yield Query(statements.REAP_CLAIMS, {"worker": due[0][0], "tokens": [token for _, token in due]})
            with self._lock:
                self._abandoned = {claim: end for claim, end in self._abandoned.items() if claim not in due}
        return bool(due)

    def ensure(self) -> Operation[int]:
        """Return the number of the instance; register it or renew its lease where that is due."""
        worker = self.worker
        if worker is not None and self.until - time.monotonic() < self.lease * _RENEW_SHARE:
            worker = yield from self.renew(worker)
        if worker is None:
            worker = yield from self._register()
        return worker

    def renew(self, worker: int) -> Operation[int | None]:
        """Renew the lease of *worker*; return None if it has expired."""
        began = time.monotonic()
        if worker == self.worker and self.until - began > self.lease * _SKIP_RENEWAL_SHARE:
            return worker
        rows = yield Query(statements.RENEW_WORKER, {"worker": worker, "lease": self.lease})
        if not rows:
            self.mark_expired(worker)
            return None
        if worker == self.worker:
            self.until = began + self.lease
        return worker

    def _register(self) -> Operation[int]:
        began = time.monotonic()
        ((number,),) = yield Query(statements.INSERT_WORKER, {"lease": self.lease, "name": _build_worker_name()})
        with self._lock:
            # Two threads may have registered at the same time. One instance is kept, because only one is renewed.
            if self.worker is None:
                self.worker, self.until = number, began + self.lease
            worker = self.worker
        if worker != number:
            yield Query(statements.DELETE_WORKER, {"worker": number})
        return worker

    def mark_expired(self, worker: int) -> None:
        """Record that the instance *worker* has expired."""
        with self._lock:
            if self.worker == worker:
                self.worker = None

    def deregister(self) -> Operation[None]:
        """Delete the row of the instance, unless it has claims: those end with the lease."""
        with self._lock:
            worker, self.worker = self.worker, None
        if worker is not None:
            yield Query(statements.DELETE_WORKER, {"worker": worker})


def _build_worker_name() -> str:
    return f"{socket.gethostname()[:100]}:{os.getpid()}"
