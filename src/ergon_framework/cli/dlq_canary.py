"""The canary: replay a few dead letters first, and wait until their transactions have ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from ergon_framework.cli.dlq_moving import CanaryResult, SelectedLetter, StopFlag, iter_dead
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.deadletters import DeadLetterQuery

#: Seconds between two polls.
POLL_INTERVAL_SECONDS = 0.25


class Canary:
    """Watches transactions by their ids: a dead letter with a new handle means that the transaction failed again."""

    def __init__(self, connector: Connector, letters: Sequence[SelectedLetter]) -> None:
        """Store the current dead-letter handles of the ids before any of them is replayed."""
        self._connector = connector
        self._known_handles = {letter.id: self._list_handles(letter.id) for letter in letters}

    def wait(
        self,
        letters: Sequence[SelectedLetter],
        *,
        wait: float,
        stop: StopFlag,
        clock: Callable[[], float] = time.monotonic,
    ) -> CanaryResult:
        """Return the outcome of the replayed *letters* within *wait* seconds.

        If the broker cannot report queued transactions, a transaction that has no new dead letter when the wait
        expires counts as succeeded.
        """
        result, deadline = CanaryResult(), clock() + wait
        pending = Counter(letter.id for letter in letters)
        while pending:
            queued_ids = self._list_queued_ids(list(pending))
            is_over = stop.is_set or clock() >= deadline
            for transaction_id, count in list(pending.items()):
                failed = min(count, len(self._list_handles(transaction_id) - self._known_handles[transaction_id]))
                has_ended = (
                    transaction_id not in queued_ids
                    if queued_ids is not None
                    else failed == count or (is_over and not stop.is_set)
                )
                if has_ended:
                    result.failed += failed
                    result.succeeded += count - failed
                    del pending[transaction_id]
            if is_over:
                break
            if pending:
                stop.wait(min(POLL_INTERVAL_SECONDS, max(0.0, deadline - clock())))
        result.waiting = pending.total()
        return result

    def _list_queued_ids(self, ids: Sequence[str]) -> set[str] | None:
        """Return the queued ids; called before the dead letters are listed, so that moved transactions are found."""
        queued_ids = self._connector.find_queued(ids)
        if queued_ids is not None:
            return set(queued_ids)
        # Reading the depth of an unopened log connector would take its partitions over.
        depth = self._connector.depth() if self._connector.capabilities.mode == "queue" else None
        return set() if depth is not None and not depth.ready + depth.delayed + depth.in_flight else None

    def _list_handles(self, transaction_id: str) -> set[str]:
        return {record.handle for record in iter_dead(self._connector, DeadLetterQuery.load(id=transaction_id))}
