"""The handlers of the conformance suite on the Python runtime: ergon executor run --handlers handlers:registry"""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Any

from ergon_framework.executors import HandlerRegistry, Retry, current_job

registry = HandlerRegistry()


@registry.handler("conformance.echo")
def echo(value: Any) -> Any:
    return value


@registry.handler("conformance.fail")
def fail(message: str) -> None:
    raise ValueError(message)


@registry.handler("conformance.retry")
def retry(seconds: float) -> Retry:
    return Retry(after=seconds)


@registry.handler("conformance.context")
def read_context() -> Any:
    return current_job()


@registry.handler("conformance.sleep")
async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


@registry.handler("conformance.print")
def write(text: str) -> None:
    print(text)  # noqa: T201 - the point


@registry.handler("conformance.child")
def run_child(text: str) -> None:
    subprocess.run(["/bin/echo", text], check=True)  # noqa: S603 - the point


@registry.handler("conformance.crash")
def crash() -> None:
    os._exit(9)
