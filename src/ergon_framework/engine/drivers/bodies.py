"""Check the return value of a handler call: a coroutine or generator object is not a result."""

from __future__ import annotations

from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

#: Types of objects whose code has not started yet.
_UNSTARTED_TYPES = (CoroutineType, GeneratorType, AsyncGeneratorType)


def reject_unstarted_coroutine(value: Any) -> Any:
    """Return *value*; TypeError if it is an unstarted coroutine or generator: accepting it would lose the work."""
    if type(value) not in _UNSTARTED_TYPES:
        return value
    if not isinstance(value, AsyncGeneratorType):
        value.close()
    raise TypeError(
        f"a handler returned a {type(value).__name__} in place of a result, so nothing of it has run; "
        "async functions need an async task, and handlers must not yield"
    )
