"""What a body gave back: a value, or something that only looks like one."""

from __future__ import annotations

from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

#: Nothing of their bodies has run yet.
_UNBEGUN = (CoroutineType, GeneratorType, AsyncGeneratorType)


def checked(value: Any) -> Any:
    """*value*, unless it is a body that has not even begun: to take that for success would be to lose the work."""
    if type(value) not in _UNBEGUN:
        return value
    if not isinstance(value, AsyncGeneratorType):
        value.close()
    raise TypeError(
        f"a handler returned a {type(value).__name__} in place of a result, so nothing of it has run; "
        "async functions need an async task, and handlers must not yield"
    )
