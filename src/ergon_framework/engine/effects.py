"""The effects that a script can yield, the results of calls, and the check of a handler's return value.

A script is a generator with the decisions of a loop or of a transaction's lifecycle. It does no I/O: it yields
effects, such as a handler call or a wait, and a driver (threads, asyncio or simulated time) performs them and sends
the results back. Every effect that waits has a deadline (``until``, in seconds of the driver's clock; ``NEVER`` means
none) and may be answered with ``Interrupted``. The driver only reports the result; the script decides what follows.

A slot is one script in progress, its pending effect is the one that the script waits for, and a mailbox is a queue of
events for one script. A call is abandoned when its script no longer waits for it and it still runs.

The classes are plain and slotted, not frozen dataclasses, because these take longer to create and each transaction
creates two effects.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextvars import Context
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ergon_framework.errors import ErgonError
from ergon_framework.scope import Scope

if TYPE_CHECKING:
    from ergon_framework.engine.scheduler import Mailbox, Slot


#: Types of objects whose code has not started yet.
_UNSTARTED_TYPES = (CoroutineType, GeneratorType, AsyncGeneratorType)


def reject_unstarted_coroutine(value: Any) -> Any:
    """Return *value*; TypeError if it is an unstarted coroutine or generator: accepting it would lose the work."""
    if type(value) not in _UNSTARTED_TYPES:
        return value
    if not isinstance(value, AsyncGeneratorType):
        value.close()
    raise TypeError(
        f"a handler returned a {type(value).__name__} instead of a result, and none of it has run; "
        "use an async task for async functions, and do not yield in handlers"
    )


# -- results of calls -------------------------------------------------------------------------------


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


# -- effects ----------------------------------------------------------------------------------------

R = TypeVar("R")

#: The deadline of an effect that has none.
NEVER = float("inf")


class Call:
    """Run ``fn(*args)`` once, until *until* at the latest. Answered with a CallResult.

    The call is the pending effect of its slot. The first thread or task that removes it there (the call that has
    returned, or the deadline timer) decides the result; a value that the call returns later is discarded, counted as
    late and passed to *on_late_result*. ``exited`` becomes true when an abandoned call has returned. *step* is the name
    of the call, *scope* is what its handler can read, and *context* holds its context variables.
    """

    __slots__ = ("args", "cancel", "context", "exited", "fn", "on_late_result", "scope", "step", "until")

    def __init__(  # noqa: PLR0917 - keywords cost more, and one is made for every attempt
        self,
        step: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        until: float = NEVER,
        scope: Scope | None = None,
        context: Context | None = None,
        on_late_result: Callable[[Any], None] | None = None,
    ) -> None:
        self.step = step
        self.fn = fn
        self.args = args
        self.until = until
        self.scope = scope
        self.context = context
        self.on_late_result = on_late_result
        self.exited = False
        #: Set by a driver that can cancel a running call; AwaitExit calls it. ``scope.cancel`` only sets a flag for the
        #: handler.
        self.cancel: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"Call({self.step})"


class SelfTimedCall(Call):
    """A call that keeps its own time limit, so that it is never abandoned. Only InlineRunner supports it; no loop does.

    It raises only ErgonError; any other exception, such as KeyboardInterrupt, was raised in the thread from outside.
    """

    __slots__ = ()


class Sleep:
    """Wait until *until*. Answered with None or Interrupted."""

    __slots__ = ("until",)

    def __init__(self, until: float) -> None:
        self.until = until


class AwaitExit:
    """Cancel *call*, where the driver can, and wait for its exit. Answered with Interrupted or whether it exited."""

    __slots__ = ("call", "until")

    def __init__(self, call: Call, until: float) -> None:
        self.call = call
        self.until = until


class Wait:
    """Wait until *mailbox* holds *count* items. Answered with all its items, or Interrupted.

    An urgent item ends the wait whatever the count.
    """

    __slots__ = ("count", "mailbox", "until")

    def __init__(self, mailbox: Mailbox, count: int = 1, until: float = NEVER) -> None:
        self.mailbox = mailbox
        self.count = count
        self.until = until


class Spawn:
    """Start *script* next to this one. Answered with its slot.

    *notify* gets a ScriptEnded when the script ends. If a call that it abandoned still runs then, *notify* gets a
    SlotFreed when the last such call has exited.
    """

    __slots__ = ("counted", "notify", "script")

    def __init__(self, script: Script[Any], notify: Mailbox, *, counted: bool) -> None:
        self.script = script
        self.notify = notify
        #: Whether it runs under the concurrency limit: the lifecycles of transactions do, fetching and settling do not.
        self.counted = counted


class Interrupt:
    """Answer the current or next effect of *slot*'s script with Interrupted. Answered with None."""

    __slots__ = ("slot",)

    def __init__(self, slot: Slot) -> None:
        self.slot = slot


class OnExit:
    """Call *callback* once this script has ended and its last call has exited. Answered with None."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback = callback


Effect: TypeAlias = Call | Sleep | AwaitExit | Wait | Spawn | Interrupt | OnExit
Script: TypeAlias = Generator[Effect, Any, R]


# One typed helper per effect keeps `Any` out of the scripts.


def call(effect: Call) -> Script[CallResult]:
    """Yield *effect* and return its result."""
    answer: CallResult = yield effect
    return answer


def sleep(until: float) -> Script[Interrupted | None]:
    """Wait until *until*."""
    answer: Interrupted | None = yield Sleep(until)
    return answer


def await_exit(abandoned_call: Call, until: float) -> Script[bool | Interrupted]:
    """Cancel *abandoned_call*, where the driver can, and wait for its exit until *until*."""
    answer: bool | Interrupted = yield AwaitExit(abandoned_call, until)
    return answer


def wait(mailbox: Mailbox, *, count: int = 1, until: float = NEVER) -> Script[list[Any] | Interrupted]:
    """Wait for *count* items in *mailbox*."""
    answer: list[Any] | Interrupted = yield Wait(mailbox, count, until)
    return answer


def spawn(script: Script[Any], *, notify: Mailbox, counted: bool) -> Script[Slot]:
    """Start *script* next to this one and return its slot."""
    slot: Slot = yield Spawn(script, notify, counted=counted)
    return slot


def interrupt(slot: Slot) -> Script[None]:
    """Interrupt *slot*'s script."""
    yield Interrupt(slot)


def on_exit(callback: Callable[[], None]) -> Script[None]:
    """Call *callback* once this script has ended and its last call has exited."""
    yield OnExit(callback)
