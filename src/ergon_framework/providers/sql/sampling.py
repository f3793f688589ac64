"""Sampling: which attempts get a row of their own when there are too many; all of them are counted."""

from __future__ import annotations

from pydantic import Field

from ergon_framework.policy import Count, Policy
from ergon_framework.providers.execution import AttemptRow
from ergon_framework.providers.health import Outcome


class Sample(Policy):
    """Beyond so many attempts a second, of one process, only every n-th success is stored; every failure is."""

    above: float = Field(default=100.0, ge=0, description="Attempts a second that are all stored.")
    every: Count = Field(default=10, description="Of the successes beyond, each n-th is stored.")


class Sampler:
    """Decides row by row, by the second in which each was made; its owner asks once for each."""

    def __init__(self, sample: Sample | None) -> None:
        self._sample = sample
        self._second = -1
        self._seen = 0
        self._passed_over = 0

    def keeps(self, row: AttemptRow) -> bool:
        sample = self._sample
        if sample is None:
            return True
        second = int(row.created_at)
        if second != self._second:
            self._second, self._seen = second, 0
        self._seen += 1
        if row.outcome is not Outcome.SUCCESS or self._seen <= sample.above:
            return True
        # Over the seconds, so that a rate just above the bar loses its share and not all.
        self._passed_over += 1
        return self._passed_over % sample.every == 0
