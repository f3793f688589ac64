"""Routing: which executor a job goes to, and which handler it names there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ergon_framework.executor.protocol import LONGEST_NAME

#: Ends the executor's name; only the first one does, so that a handler's name may contain it.
MARK = "#"


@dataclass(frozen=True, slots=True)
class Route:
    """An executor that exists, and the handler's name as it goes on the wire."""

    executor: str
    handler: str


@dataclass(frozen=True, slots=True)
class NoRoute:
    """Nobody can take the job: a dead letter, with *message* as its reason."""

    message: str
    code: str = "no_route"


def route(function_name: str, *, default: str | None, executors: Collection[str]) -> Route | NoRoute:
    """Where *function_name*, ``handler`` or ``executor#handler``, goes.

    >>> route("rust#send_email", default="python", executors=["python", "rust"])
    Route(executor='rust', handler='send_email')
    >>> route("send_email", default="python", executors=["python", "rust"])
    Route(executor='python', handler='send_email')
    """
    if not 1 <= len(function_name) <= LONGEST_NAME:
        return NoRoute(f"a function name has 1 to {LONGEST_NAME} characters, not {len(function_name)}")
    prefix, mark, rest = function_name.partition(MARK)
    executor, handler = (prefix, rest) if mark else (default, function_name)
    if not handler:
        return NoRoute(f"{function_name!r} names no handler; write executor{MARK}handler")
    if executor is None:
        return NoRoute(f"{function_name!r} names no executor and no default is configured; write executor{MARK}handler")
    if executor not in executors:
        known = ", ".join(sorted(executors)) or "none"
        return NoRoute(f"{function_name!r} asks for the executor {executor!r}, which does not exist; known: {known}")
    return Route(executor, handler)
