"""What a call came to, as data."""

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
    """The deadline passed first; user code that raises TimeoutError is something else.

    *body* is the call that may still be running: a thread cannot be killed.
    """

    __slots__ = ("body",)
    __match_args__ = ("body",)

    def __init__(self, body: Call) -> None:
        self.body = body

    def __repr__(self) -> str:
        return f"Expired({self.body!r})"


class Stopped:
    """The wait was interrupted; *body* is the call that was being waited for, if it was one."""

    __slots__ = ("body",)
    __match_args__ = ("body",)

    def __init__(self, body: Call | None = None) -> None:
        self.body = body

    def __repr__(self) -> str:
        return f"Stopped({self.body!r})"


class NotBegunError(ErgonError):
    """The deadline passed while a call waited for a thread: nothing of its body has run or will run."""

    code = "not_begun"


#: What a Call is answered with.
Answer: TypeAlias = Ok | Err | Expired | Stopped
