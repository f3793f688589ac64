"""Clockwork: what an orchestrator does about cron entries while it runs, beside its jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from ergon_framework.errors import ConnectionLost
from ergon_framework.executor.jobs import crontab, observe
from ergon_framework.executor.jobs.observe import Tick
from ergon_framework.schema.lines import Lines

#: Seconds between two looks, at most: an entry may be new.
LOOK: Final = 1.0
#: Seconds that one firing may take.
_WITHIN: Final = 15.0
#: Seconds between two complaints.
_TOLD: Final = 5.0


@asynccontextmanager
async def clockwork(dsn: str, crons: Sequence[dict[str, Any]], *, task: str) -> AsyncIterator[None]:
    """Declare these ``columns``, and fire what is due for as long as this lasts, whoever has declared it."""
    lines = Lines(dsn, most=1)
    try:
        if crons:
            await lines.run_async(crontab.declare(crons), within=_WITHIN)
        running = asyncio.create_task(Clockwork(lines, task=task).run(), name=f"{task}-cron")
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await lines.close_async()


class Clockwork:
    """Belongs to one event loop."""

    def __init__(self, lines: Lines, *, task: str) -> None:
        self._lines = lines
        self._task = task
        self._tally = observe.tally_of(task)
        self._told = float("-inf")

    async def run(self) -> None:
        """Look for what is due and fire it, for ever."""
        while True:
            pause = LOOK
            try:
                pause = await self._look()
            except Exception as error:  # noqa: BLE001 - the boundary of a look: there is always a next one
                self._complain(error)
            await asyncio.sleep(pause)

    async def _look(self) -> float:
        """One look; seconds until the next one."""
        seconds = await self._lines.run_async(crontab.due(), within=_WITHIN)
        if seconds is None or seconds > 0:
            return LOOK if seconds is None else min(LOOK, seconds)
        # Nothing was fired though something is due: somebody else has it, or nobody can.
        return 0.0 if await self._fire() else LOOK

    async def _fire(self) -> bool:
        """Fire all that is due; whether there was any."""
        tried: set[str] = set()
        some = False
        while True:
            before = len(tried)
            try:
                fired = await self._lines.run_async(crontab.fire(tried), within=_WITHIN)
            except ConnectionLost:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary of an entry: the others are fired all the same
                self._complain(error, *tried)
                if len(tried) == before:
                    return some
                continue
            if fired is None:
                return some
            some = True
            self._tally.ticked(Tick.FIRED, fired.submitted)
            self._tally.ticked(Tick.REPEATED, fired.repeated)
            if fired.missed_since is not None:
                observe.missed(self._task, fired.name, submitted=fired.submitted)

    def _complain(self, error: Exception, *names: str) -> None:
        now = time.monotonic()
        if now >= self._told + _TOLD:
            self._told = now
            observe.unfired(self._task, error, names)
