"""Measuring: who looks, while a task runs, how full its queue is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.task.relay import AsyncRelay, Relay, tell_depth

#: How long the end of a run waits for a look that has begun: a fraction of what a process has for its end.
_LEAVE: Final = 0.2


def looks(task: Any, *, number: int | None) -> bool:
    """Whether process *number* of a run is to look: of a queue one tells for all, of a log each knows its own part."""
    if isinstance(task, Relay | AsyncRelay):
        return False  # it looks itself
    return number in {None, 1} or task.connector.capabilities.mode == "log"


@contextmanager
def measured(task: Any, every: float | None) -> Iterator[None]:
    """Have the depth of the task's queue in the metrics for as long as this lasts; None: nobody looks."""
    if every is None:
        yield
        return
    over = threading.Event()
    looking = threading.Thread(target=_look, args=(task, every, over), name="ergon-depth", daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join(_LEAVE)


@asynccontextmanager
async def measured_async(task: Any, every: float | None) -> AsyncIterator[None]:
    """The same on the event loop."""
    if every is None:
        yield
        return
    looking = asyncio.create_task(_look_async(task, every), name="ergon-depth")
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait([looking], timeout=_LEAVE)
        tell_depth(task, None)


def _look(task: Any, every: float, over: threading.Event) -> None:
    source = as_sync(task.connector)
    while not over.is_set():
        try:
            tell_depth(task, source.depth())
        except Exception:  # noqa: BLE001 - how much there is is unknown then, and fetching says why
            tell_depth(task, None)
        over.wait(every)
    tell_depth(task, None)


async def _look_async(task: Any, every: float) -> None:
    source = as_async(task.connector)
    while True:
        try:
            tell_depth(task, await source.depth_async())
        except Exception:  # noqa: BLE001 - as its twin
            tell_depth(task, None)
        await asyncio.sleep(every)
