"""Sampling: the choice of attempts that are stored as rows at high rates; all attempts are counted."""

from __future__ import annotations

from pydantic import Field

from ergon_framework.policy import Count, Policy
from ergon_framework.providers.execution import AttemptRecord
from ergon_framework.providers.health import AttemptOutcome


class SamplingPolicy(Policy):
    """Above a rate per second and process, only every n-th success is stored; every failure is stored."""

    above: float = Field(default=100.0, ge=0, description="Attempts a second that are all stored.")
    every: Count = Field(default=10, description="Of the successes beyond, each n-th is stored.")


class Sampler:
    """The decision per row, by the second in which the attempt was made; call it once for each row."""

    def __init__(self, policy: SamplingPolicy | None) -> None:
        self._policy = policy
        self._second = -1
        self._count = 0
        self._skipped_count = 0

    def should_store(self, row: AttemptRecord) -> bool:
        policy = self._policy
        if policy is None:
            return True
        second = int(row.created_at)
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        if row.outcome is not AttemptOutcome.SUCCESS or self._count <= policy.above:
            return True
        # Counted across seconds, so that a rate just above the limit loses only its share of rows.
        self._skipped_count += 1
        return self._skipped_count % policy.every == 0
