"""The canary: a few are replayed first, and watched until they have ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from ergon_framework.cli.dlq_moving import Letter, Stop, Trial, found
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.deadletters import DeadLetterQuery

#: Seconds between two looks.
LOOK = 0.25


class Canary:
    """Watches transactions by their ids: one that is dead at a place that is new has failed again."""

    def __init__(self, connector: Connector, letters: Sequence[Letter]) -> None:
        """Remember where the ids are dead now, before any of them is replayed."""
        self._connector = connector
        self._known = {letter.id: self._places(letter.id) for letter in letters}

    def watch(
        self, letters: Sequence[Letter], *, wait: float, stop: Stop, clock: Callable[[], float] = time.monotonic
    ) -> Trial:
        """How *letters*, which were replayed, end within *wait* seconds.

        Where the broker cannot say what is in the queue, one that is not dead again when the time
        is over counts as succeeded.
        """
        trial, end = Trial(), clock() + wait
        pending = Counter(letter.id for letter in letters)
        while pending:
            queued = self._queued(list(pending))
            over = stop.asked or clock() >= end
            for name, count in list(pending.items()):
                failed = min(count, len(self._places(name) - self._known[name]))
                ended = name not in queued if queued is not None else failed == count or (over and not stop.asked)
                if ended:
                    trial.failed += failed
                    trial.succeeded += count - failed
                    del pending[name]
            if over:
                break
            if pending:
                stop.wait(min(LOOK, max(0.0, end - clock())))
        trial.waiting = pending.total()
        return trial

    def _queued(self, ids: Sequence[str]) -> set[str] | None:
        """Asked before the dead letters are looked at: whoever has left the queue by then is seen there."""
        queued = self._connector.queued(ids)
        if queued is not None:
            return set(queued)
        # Asking a log that was not opened for its depth would take its partitions over.
        depth = self._connector.depth() if self._connector.capabilities.mode == "queue" else None
        return set() if depth is not None and not depth.ready + depth.delayed + depth.in_flight else None

    def _places(self, transaction_id: str) -> set[str]:
        return {record.place for record in found(self._connector, DeadLetterQuery.load(id=transaction_id))}
