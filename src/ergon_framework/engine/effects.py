"""What a script may ask of the world.

A script is a generator that yields effects and is sent their answers. Every effect that waits
has a latest moment (``until``, in seconds of the driver's clock; infinity where there is none)
and may be answered ``Stopped`` when somebody interrupts its script. Which it is, the script finds
out from the answer; what follows from it is the script's decision and never the driver's.

The classes are plain and slotted rather than frozen: two of them are made for every transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ergon_framework.engine.outcome import Answer, Stopped
from ergon_framework.scope import Scope

if TYPE_CHECKING:
    from ergon_framework.engine.slots import Mailbox, Slot

R = TypeVar("R")

NEVER = float("inf")


class Call:
    """Run ``fn(*args)`` once, until *until* at the latest. Answered with an Answer.

    The call is its own ticket: whoever is found holding it decides what becomes of the result,
    and a body that comes back without it is fenced. ``left`` turns true when a body that nobody
    waited for any more has come back. *late* is told what such a body returned.
    """

    __slots__ = ("args", "cancel", "context", "fn", "late", "left", "scope", "step", "until")

    def __init__(  # noqa: PLR0917 - keywords cost more, and one is made for every attempt
        self,
        step: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        until: float = NEVER,
        scope: Scope | None = None,
        context: Context | None = None,
        late: Callable[[Any], None] | None = None,
    ) -> None:
        self.step = step
        self.fn = fn
        self.args = args
        self.until = until
        self.scope = scope
        self.context = context
        self.late = late
        self.left = False
        #: Set by a driver that can ask a running body to leave.
        self.cancel: Callable[[], None] | None = None

    def __repr__(self) -> str:
        return f"Call({self.step})"


class Visit(Call):
    """A call that ends in time by itself, so that nobody need be able to leave it. Only a Caller knows it.

    It raises ErgonError and nothing else; whatever else comes out of it has struck the thread.
    """

    __slots__ = ()


class Sleep:
    """Wait until *until*. Answered None, or Stopped."""

    __slots__ = ("until",)

    def __init__(self, until: float) -> None:
        self.until = until


class Gone:
    """Ask *body* to leave, where that is possible, and wait for it. Answered whether it has left, or Stopped."""

    __slots__ = ("body", "until")

    def __init__(self, body: Call, until: float) -> None:
        self.body = body
        self.until = until


class Wait:
    """Wait until *count* items are in *mailbox*. Answered with all that are there, or Stopped.

    Urgent items end the wait whatever the count.
    """

    __slots__ = ("count", "mailbox", "until")

    def __init__(self, mailbox: Mailbox, count: int = 1, until: float = NEVER) -> None:
        self.mailbox = mailbox
        self.count = count
        self.until = until


class Spawn:
    """Start *script* beside this one. Answered with its slot; *told* gets Done, and Freed if that comes later."""

    __slots__ = ("counted", "script", "told")

    def __init__(self, script: Script[Any], told: Mailbox, *, counted: bool) -> None:
        self.script = script
        self.told = told
        #: Whether it is one of the workers that concurrency bounds.
        self.counted = counted


class Interrupt:
    """Have the present or next effect of *slot*'s script answered Stopped. Answered None."""

    __slots__ = ("slot",)

    def __init__(self, slot: Slot) -> None:
        self.slot = slot


class Afterwards:
    """Have *then* called once this script has ended and the last of its bodies has left. Answered None."""

    __slots__ = ("then",)

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then


Effect: TypeAlias = Call | Sleep | Gone | Wait | Spawn | Interrupt | Afterwards
Script: TypeAlias = Generator[Effect, Any, R]


# One typed helper per effect keeps `Any` out of the scripts.


def call(effect: Call) -> Script[Answer]:
    """Make *effect*."""
    answer: Answer = yield effect
    return answer


def sleep(until: float) -> Script[Stopped | None]:
    """Wait until *until*."""
    answer: Stopped | None = yield Sleep(until)
    return answer


def gone(body: Call, until: float) -> Script[bool | Stopped]:
    """Have *body* leave, and wait for it."""
    answer: bool | Stopped = yield Gone(body, until)
    return answer


def wait(mailbox: Mailbox, *, count: int = 1, until: float = NEVER) -> Script[list[Any] | Stopped]:
    """Wait for what comes into *mailbox*."""
    answer: list[Any] | Stopped = yield Wait(mailbox, count, until)
    return answer


def spawn(script: Script[Any], *, told: Mailbox, counted: bool) -> Script[Slot]:
    """Start *script* beside this one."""
    slot: Slot = yield Spawn(script, told, counted=counted)
    return slot


def interrupt(slot: Slot) -> Script[None]:
    """Interrupt *slot*'s script."""
    yield Interrupt(slot)


def afterwards(then: Callable[[], None]) -> Script[None]:
    """Have *then* called once nothing of this script is left."""
    yield Afterwards(then)
