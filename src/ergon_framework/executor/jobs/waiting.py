"""Waiting: many jobs that are to have their ends, looked at some at a time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from ergon_framework.executor.jobs import reading
from ergon_framework.executor.jobs.model import Job, JobWaitTimeout
from ergon_framework.schema.operation import Operation

#: How many are looked at together, at most and at least. Those that were named first, because they are likely to end
#: first; about twice as many as were found the last time, because looking at one that runs is in vain.
_MOST: Final = 500
_LEAST: Final = 50


class Waiting:
    """The ends of *job_ids*; whoever waits looks and pauses in turn, until nothing is left."""

    def __init__(self, job_ids: Iterable[str], *, timeout: float | None) -> None:
        self._ids = list(job_ids)
        self._left = dict.fromkeys(self._ids)
        self._found: dict[str, Job] = {}
        self._timeout = timeout
        self._until = None if timeout is None else time.monotonic() + timeout
        self._looks = reading.looks()
        self._portion = _MOST

    def __bool__(self) -> bool:
        """Whether some have no end yet."""
        return bool(self._left)

    def look(self) -> Operation[float]:
        """Look once; seconds to pause before the next look. JobWaitTimeout if there is to be none."""
        portion = list(islice(self._left, self._portion))
        found = yield from reading.ended(portion)
        self._portion = min(_MOST, max(_LEAST, 2 * len(found)))
        for job in found:
            self._found[job.id] = job
            self._left.pop(job.id, None)
        if found:
            self._looks = reading.looks()
        if not self._left or len(found) == len(portion):
            return 0.0
        return self._pause(self._looks)

    def _pause(self, looks: Iterator[float]) -> float:
        pause = next(looks)
        left = pause if self._until is None else self._until - time.monotonic()
        if left <= 0:
            raise JobWaitTimeout(
                f"{len(self._left):,} of {len(self._ids):,} jobs are not over after {self._timeout:g} s; they go on"
            )
        return min(pause, left)

    @property
    def jobs(self) -> list[Job]:
        """All of them, in the order in which they were named."""
        return [self._found[job_id] for job_id in self._ids]
