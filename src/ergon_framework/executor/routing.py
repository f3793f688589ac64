"""Routing of a job: the executor that it goes to, and the handler that it names there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ergon_framework.executor.protocol import MAX_NAME_CHARS

#: Ends the executor's name; only the first occurrence does, so that a handler's name may contain it.
EXECUTOR_SEPARATOR = "#"


@dataclass(frozen=True, slots=True)
class Route:
    """An executor that exists, and the handler's name as it is sent."""

    executor: str
    handler: str


@dataclass(frozen=True, slots=True)
class UnroutableJob:
    """No executor can run the job: it is dead-lettered with *message* as the reason."""

    message: str
    code: str = "no_route"


def route_job(function_name: str, *, default: str | None, executors: Collection[str]) -> Route | UnroutableJob:
    """Return the route of *function_name*, which is ``handler`` or ``executor#handler``.

    >>> route_job("rust#send_email", default="python", executors=["python", "rust"])
    Route(executor='rust', handler='send_email')
    >>> route_job("send_email", default="python", executors=["python", "rust"])
    Route(executor='python', handler='send_email')
    """
    if not 1 <= len(function_name) <= MAX_NAME_CHARS:
        return UnroutableJob(f"a function name has 1 to {MAX_NAME_CHARS} characters, not {len(function_name)}")
    prefix, separator, rest = function_name.partition(EXECUTOR_SEPARATOR)
    executor, handler = (prefix, rest) if separator else (default, function_name)
    if not handler:
        return UnroutableJob(f"{function_name!r} names no handler; write executor{EXECUTOR_SEPARATOR}handler")
    if executor is None:
        return UnroutableJob(
            f"{function_name!r} names no executor and no default is configured; write "
            f"executor{EXECUTOR_SEPARATOR}handler"
        )
    if executor not in executors:
        known = ", ".join(sorted(executors)) or "none"
        return UnroutableJob(
            f"{function_name!r} asks for the executor {executor!r}, which does not exist; known: {known}"
        )
    return Route(executor, handler)
