"""The handlers of the conformance suite on the Python runtime: ergon executor run --handlers handlers:registry"""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Any

from ergon_framework.executor.job import current_job
from ergon_framework.executor.registry import HandlerRegistry, Retry

registry = HandlerRegistry()


@registry.handler("exam.echo")
def echo(value: Any) -> Any:
    return value


@registry.handler("exam.fail")
def fail(message: str) -> None:
    raise ValueError(message)


@registry.handler("exam.retry")
def retry(seconds: float) -> Retry:
    return Retry(after=seconds)


@registry.handler("exam.context")
def read_context() -> Any:
    return current_job()


@registry.handler("exam.sleep")
async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


@registry.handler("exam.print")
def write(text: str) -> None:
    print(text)  # noqa: T201 - the point


@registry.handler("exam.child")
def run_child(text: str) -> None:
    subprocess.run(["/bin/echo", text], check=True)  # noqa: S603 - the point


@registry.handler("exam.crash")
def crash() -> None:
    os._exit(9)
