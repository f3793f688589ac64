"""Helpers that propagate the context: across threads, across tasks, and through timeouts.

The engine's own calls propagate it already; these helpers are for user code that starts its own threads or tasks, or
needs a separate time limit inside a handler.
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
    """Wrap *fn* so that each call runs with the current context, or *context*, on any thread.

    Each call gets its own copy, because a context cannot be entered twice at a time.
    """
    captured = copy_context() if context is None else context

    def run_in_context(*args: P.args, **kwargs: P.kwargs) -> T:
        return captured.copy().run(fn, *args, **kwargs)

    return run_in_context


def with_context_async(
    fn: Callable[P, Coroutine[Any, Any, T]], context: Context | None = None
) -> Callable[P, Awaitable[T]]:
    """Wrap a coroutine function so that each call runs as a task with the current context, or *context*."""
    captured = copy_context() if context is None else context

    def run_in_context(*args: P.args, **kwargs: P.kwargs) -> Awaitable[T]:
        own_context = captured.copy()
        return asyncio.get_running_loop().create_task(own_context.run(fn, *args, **kwargs), context=own_context)

    return run_in_context


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
