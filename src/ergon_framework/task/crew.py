"""The crew: who occupies the slots of a loop, and since when nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from ergon_framework.engine.effects import NEVER, Script, interrupt, wait
from ergon_framework.engine.outcome import Stopped
from ergon_framework.engine.slots import Done, Freed, Mailbox, Slot

T = TypeVar("T")

#: What a loop does with the events of its mailbox.
Hear: TypeAlias = Callable[[list[Any]], Script[None]]


class Crew(Generic[T]):
    """The bookkeeping of slots: a slot is free again when the last body of its transaction has left."""

    def __init__(self, concurrency: int, *, patience: float, clock: Callable[[], float]) -> None:
        self.concurrency = concurrency
        self._patience = patience
        self._clock = clock
        #: Lifecycles in progress.
        self.flights: dict[Slot, T] = {}
        #: Those that ended but left a body behind.
        self.bodies: dict[Slot, T] = {}
        self._stalled_since: float | None = None
        #: It was stalled for too long: whoever watches over the process is to begin anew.
        self._wedged = False

    @property
    def free(self) -> int:
        return 0 if self._wedged else self.concurrency - len(self.flights) - len(self.bodies)

    def hear(self, event: Done | Freed) -> T | None:
        """Take note of *event*; what has left its slot with it, if anything has."""
        if type(event) is Done and event.freed and not self.bodies:
            return self.flights.pop(event.slot)  # the everyday case, in which nobody can be stalled
        if isinstance(event, Freed):
            # An aide's body may be left behind too; it held no slot.
            left = self.bodies.pop(event.slot, None)
        elif event.freed:
            left = self.flights.pop(event.slot)
        else:
            left = None
            self.bodies[event.slot] = self.flights.pop(event.slot)
        self._wedged = not self.live
        if self._wedged:
            return left
        if len(self.bodies) < self.concurrency:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = self._clock()
        return left

    @property
    def stall_ends(self) -> float:
        """When the loop has been unable to start anything for too long."""
        return NEVER if self._stalled_since is None else self._stalled_since + self._patience

    @property
    def live(self) -> bool:
        """False when every slot has been held by abandoned bodies for too long."""
        return self._clock() < self.stall_ends

    def dismiss(self, mailbox: Mailbox, hear: Hear) -> Script[None]:
        """Interrupt whatever is in progress, and hear how each of them ended."""
        for slot in list(self.flights):
            yield from interrupt(slot)
        # None of them waits for anything any more, so this does not wait long.
        yield from hear_until(lambda: not self.flights, mailbox, hear)


def hear_until(true: Callable[[], bool], mailbox: Mailbox, hear: Hear) -> Script[None]:
    """Hear what comes until it is *true*, however often somebody interrupts."""
    while not true():
        events = yield from wait(mailbox)
        if not isinstance(events, Stopped):
            yield from hear(events)
