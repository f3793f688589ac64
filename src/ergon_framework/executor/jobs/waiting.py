"""Wait for many jobs to be final, and poll them in batches."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Final

from ergon_framework.executor.jobs import reading
from ergon_framework.executor.jobs.model import Job, JobWaitTimeout
from ergon_framework.schema.operation import Operation

#: Maximum and minimum number of jobs in one poll. The first ids are polled first, because they are likely to end first;
#: about twice as many as were final at the last poll, because polling a running job is useless.
_MAX_POLLED_JOBS: Final = 500
_MIN_POLLED_JOBS: Final = 50


class JobWaiter:
    """Waits for *job_ids*; the caller polls and pauses in turn until all jobs are final."""

    def __init__(self, job_ids: Iterable[str], *, timeout: float | None) -> None:
        self._ids = list(job_ids)
        self._unfinished = dict.fromkeys(self._ids)
        self._finished: dict[str, Job] = {}
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._intervals = reading.poll_intervals()
        self._poll_size = _MAX_POLLED_JOBS

    def __bool__(self) -> bool:
        """Return whether some jobs are not final yet."""
        return bool(self._unfinished)

    def poll(self) -> Operation[float]:
        """Poll once; return the seconds until the next poll. Raise JobWaitTimeout if the time is over."""
        job_ids = list(islice(self._unfinished, self._poll_size))
        finished = yield from reading.find_finished(job_ids)
        self._poll_size = min(_MAX_POLLED_JOBS, max(_MIN_POLLED_JOBS, 2 * len(finished)))
        for job in finished:
            self._finished[job.id] = job
            self._unfinished.pop(job.id, None)
        if finished:
            self._intervals = reading.poll_intervals()
        if not self._unfinished or len(finished) == len(job_ids):
            return 0.0
        return self._next_pause(self._intervals)

    def _next_pause(self, intervals: Iterator[float]) -> float:
        pause = next(intervals)
        remaining = pause if self._deadline is None else self._deadline - time.monotonic()
        if remaining <= 0:
            raise JobWaitTimeout(
                f"{len(self._unfinished):,} of {len(self._ids):,} jobs are not over after "
                f"{self._timeout:g} s; they go on"
            )
        return min(pause, remaining)

    @property
    def jobs(self) -> list[Job]:
        """All jobs, in the order of the given ids."""
        return [self._finished[job_id] for job_id in self._ids]
