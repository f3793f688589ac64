"""Publish the depth of a task's queue, the number of its messages by state, as a metric while the task runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from ergon_framework.connectors.bridge import as_async, as_sync
from ergon_framework.task.relay import AsyncRelay, Relay, publish_queue_depth

#: Maximum seconds that the end of a run waits for a measurement under way: much less than the time for the exit.
_STOP_TIMEOUT_SECONDS: Final = 0.2


def should_measure(task: Any, *, number: int | None) -> bool:
    """Return whether process *number*, None for the only one, measures the depth.

    One process does so for a queue, because all of them consume the same one. In the mode "log", as with the connector
    of facts, every process does so: each reads its own part of a log.
    """
    if isinstance(task, Relay | AsyncRelay):
        return False  # a relay publishes the depth of its source itself
    return number in {None, 1} or task.connector.capabilities.mode == "log"


@contextmanager
def publish_depth(task: Any, interval: float | None) -> Iterator[None]:
    """Publish the depth of the task's queue every *interval* seconds while the context lasts; None: never.

    The metric is removed while the depth is unknown and at the end: ``publish_queue_depth(task, None)``.
    """
    if interval is None:
        yield
        return
    stopped = threading.Event()
    thread = threading.Thread(
        target=_publish_repeatedly, args=(task, interval, stopped), name="ergon-depth", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(_STOP_TIMEOUT_SECONDS)


@asynccontextmanager
async def publish_depth_async(task: Any, interval: float | None) -> AsyncIterator[None]:
    """Publish the depth as ``publish_depth`` does, on the event loop."""
    if interval is None:
        yield
        return
    publisher = asyncio.create_task(_publish_repeatedly_async(task, interval), name="ergon-depth")
    try:
        yield
    finally:
        publisher.cancel()
        await asyncio.wait([publisher], timeout=_STOP_TIMEOUT_SECONDS)
        publish_queue_depth(task, None)


def _publish_repeatedly(task: Any, interval: float, stopped: threading.Event) -> None:
    source = as_sync(task.connector)
    while not stopped.is_set():
        try:
            publish_queue_depth(task, source.depth())
        except Exception:  # noqa: BLE001 - the depth is unknown then, and fetching reports the error
            publish_queue_depth(task, None)
        stopped.wait(interval)
    publish_queue_depth(task, None)


async def _publish_repeatedly_async(task: Any, interval: float) -> None:
    source = as_async(task.connector)
    while True:
        try:
            publish_queue_depth(task, await source.depth_async())
        except Exception:  # noqa: BLE001 - the depth is unknown then, and fetching reports the error
            publish_queue_depth(task, None)
        await asyncio.sleep(interval)
