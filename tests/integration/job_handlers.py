"""Handlers for tests of jobs, run by the Python runtime."""

from __future__ import annotations

import time
from pathlib import Path

from ergon_framework.executors.registry import HandlerRegistry, Retry
from ergon_framework.executors.runtime import current_job

registry = HandlerRegistry()


@registry.handler
def double(number: int) -> int:
    return 2 * number


@registry.handler
async def double_later(number: int) -> int:
    return 2 * number


@registry.handler
def fail(words: str) -> None:
    raise LookupError(words)


@registry.handler
async def fail_later(words: str) -> None:
    raise LookupError(words)


@registry.handler
def third_time_lucky() -> int:
    attempt = current_job().attempt
    if attempt < 3:
        raise Retry("not yet", after=0.05)
    return attempt


@registry.handler
def wait_for_file(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.01)
    return "found"


@registry.handler
def traced() -> str:
    return current_job().carrier["traceparent"]
