"""The result of a call, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ergon_framework.errors import ErgonError

if TYPE_CHECKING:
    from ergon_framework.engine.effects import Call


class Ok:
    """The call returned *value*."""

    __slots__ = ("value",)
    __match_args__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Ok({type(self.value).__name__})"


class Err:
    """The call raised *error*."""

    __slots__ = ("error",)
    __match_args__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"Err({self.error!r})"


class Expired:
    """The deadline passed first; a TimeoutError that user code raises is an Err.

    *call* may still be running: a thread cannot be killed.
    """

    __slots__ = ("call",)
    __match_args__ = ("call",)

    def __init__(self, call: Call) -> None:
        self.call = call

    def __repr__(self) -> str:
        return f"Expired({self.call!r})"


class Interrupted:
    """The wait was interrupted; *call* is the call that the script waited for, if there was one."""

    __slots__ = ("call",)
    __match_args__ = ("call",)

    def __init__(self, call: Call | None = None) -> None:
        self.call = call

    def __repr__(self) -> str:
        return f"Interrupted({self.call!r})"


class NotStartedError(ErgonError):
    """The deadline passed while a call waited for a thread: no part of it has run or will run."""

    code = "not_begun"


#: The result of a Call effect.
CallResult: TypeAlias = Ok | Err | Expired | Interrupted
