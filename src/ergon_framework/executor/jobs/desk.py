"""Desk: where the orchestrators of one kind ask the database about their jobs, and tell it, many at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from ergon_framework.errors import ConnectionLost, ErgonError
from ergon_framework.executor.jobs import attempts, observe
from ergon_framework.executor.jobs.attempts import Claim, End, Started
from ergon_framework.executor.jobs.model import JobState
from ergon_framework.executor.jobs.together import Together
from ergon_framework.failure import describe
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Operation
from ergon_framework.task.mixins.policies import RetryPolicy

R = TypeVar("R")
T = TypeVar("T")

#: Seconds that one statement may take.
_WITHIN: Final = 15.0
#: How long to wait before the database is asked once more.
_AGAIN: Final = RetryPolicy(backoff=0.05, multiplier=2.0, cap=2.0)
#: How often something is said that the server refuses, though it can be reached.
_REFUSED: Final = 5
#: Seconds between two complaints.
_TOLD: Final = 5.0
#: Seconds that an outcome waits for others to be written with, where there are many: statements are dear.
_LINGER: Final = 0.005
#: How many expired jobs are thrown away at a time.
_SWEPT: Final = 500


class Unwritten(ErgonError):
    """The database does not take what it is told about a job; the message comes back to whatever the row says."""

    code = "job_unwritten"
    later = True
    retry_after = 5.0


class Desk:
    """Belongs to one event loop."""

    def __init__(
        self, lines: Lines, *, task: str, max_attempts: int, timeout: float | None, busy: Callable[[], bool]
    ) -> None:
        self._lines = lines
        self._task = task
        self._max_attempts = max_attempts
        self._timeout = timeout
        self._starting: Together[Claim, Started] = Together(self._start)
        self._finishing: Together[End, JobState | None] = Together(self._finish, linger=self._patience)
        self._busy = busy
        self._told = float("-inf")

    async def start(self, claim: Claim) -> Started:
        """Begin an attempt. Asked again for the same claim, it answers the same and counts nothing."""
        return await self._said(self._starting, claim)

    async def finish(self, end: End) -> JobState | None:
        """Write how an attempt ended; None if the claim was not the last. Said twice, it is written once.

        While the database is out of reach it is tried again: a result is not to be lost for that.
        """
        return await self._said(self._finishing, end)

    async def kills(self) -> set[str]:
        """The running jobs that somebody wants killed."""
        return await self.run(attempts.kills())

    async def sweep(self) -> None:
        """Throw away some of the jobs whose retention is over."""
        while await self.run(attempts.swept(_SWEPT)) == _SWEPT:
            pass

    def close(self) -> None:
        """Nobody asks any more."""
        self._starting.close()
        self._finishing.close()

    async def run(self, operation: Operation[R]) -> R:
        """Everything that is asked goes through here."""
        return await self._lines.run_async(operation, within=_WITHIN)

    async def _start(self, claims: Sequence[Claim]) -> Sequence[Started]:
        return await self.run(attempts.start(claims, max_attempts=self._max_attempts, timeout=self._timeout))

    async def _finish(self, ends: Sequence[End]) -> Sequence[JobState | None]:
        return await self.run(attempts.finish(ends))

    async def _said(self, how: Callable[[R], Awaitable[T]], what: R) -> T:
        number = 0
        while True:
            try:
                return await how(what)
            except Exception as error:
                hopeless = not isinstance(error, ErgonError) or error.final
                self._complain(error)
                if hopeless or (not isinstance(error, ConnectionLost) and number >= _REFUSED):
                    raise Unwritten(f"the database does not take what it is told: {describe(error)}") from error
            await asyncio.sleep(_AGAIN.delay(number))
            number = min(number + 1, 1000)

    def _patience(self) -> float:
        return _LINGER if self._busy() else 0.0

    def _complain(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._told + _TOLD:
            self._told = now
            observe.unwritten(self._task, error)
