"""Helpers that carry the context: across threads, across tasks, and through timeouts.

The engine's own calls carry it themselves; these are for user code that starts threads or tasks
of its own, or wants a limit of its own inside a handler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent import futures
from contextvars import Context, copy_context
from typing import Any, ParamSpec, TypeVar

from ergon_framework.engine.drivers.daemons import DaemonExecutor

P = ParamSpec("P")
T = TypeVar("T")

_threads = DaemonExecutor(name="ergon-timeout")


def with_context(fn: Callable[P, T], context: Context | None = None) -> Callable[P, T]:
    """*fn*, to be run with the context of this moment (or *context*) wherever it is called.

    Each call gets a copy of its own, because a context cannot be entered twice at a time.
    """
    kept = copy_context() if context is None else context

    def carried(*args: P.args, **kwargs: P.kwargs) -> T:
        return kept.copy().run(fn, *args, **kwargs)

    return carried


def with_context_async(
    fn: Callable[P, Coroutine[Any, Any, T]], context: Context | None = None
) -> Callable[P, Awaitable[T]]:
    """The same for a coroutine function: it runs as a task with the context of this moment."""
    kept = copy_context() if context is None else context

    def carried(*args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        own = kept.copy()
        return asyncio.get_running_loop().create_task(own.run(fn, *args, **kwargs), context=own)

    return carried


def run_with_timeout(fn: Callable[P, T], timeout: float | None, /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call *fn* and wait at most *timeout* seconds, then raise TimeoutError. The thread is abandoned, not killed."""
    if timeout is None:
        return fn(*args, **kwargs)
    future = _threads.submit(fn, *args, **kwargs)
    if not futures.wait([future], timeout).done:
        raise TimeoutError(f"no answer within {timeout} s")
    return future.result()


async def run_with_timeout_async(
    fn: Callable[P, Awaitable[T]], timeout: float | None, /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Await *fn* for at most *timeout* seconds, then cancel it and raise TimeoutError."""
    async with asyncio.timeout(timeout):
        return await fn(*args, **kwargs)
