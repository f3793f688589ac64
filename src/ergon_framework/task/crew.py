"""The slot table: what occupies the slots of a loop, and since when the loop is stalled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from ergon_framework.engine.effects import NEVER, Script, interrupt, wait
from ergon_framework.engine.outcome import Interrupted
from ergon_framework.engine.slots import Mailbox, ScriptEnded, Slot, SlotFreed

T = TypeVar("T")

#: Handles the events of a loop's mailbox.
EventHandler: TypeAlias = Callable[[list[Any]], Script[None]]


class SlotTable(Generic[T]):
    """The occupied slots of a loop: a slot is free again when the last call of its transaction has exited."""

    def __init__(self, concurrency: int, *, stall_timeout: float, clock: Callable[[], float]) -> None:
        self.concurrency = concurrency
        self._stall_timeout = stall_timeout
        self._clock = clock
        #: Running lifecycles.
        self.running: dict[Slot, T] = {}
        #: Ended lifecycles with an abandoned call that still runs.
        self.abandoned: dict[Slot, T] = {}
        self._stalled_since: float | None = None
        #: It was stalled for too long: the supervisor of the process must restart it.
        self._is_stalled = False

    @property
    def free(self) -> int:
        return 0 if self._is_stalled else self.concurrency - len(self.running) - len(self.abandoned)

    def handle_event(self, event: ScriptEnded | SlotFreed) -> T | None:
        """Record *event*; return the entry whose slot is now free, if there is one."""
        if type(event) is ScriptEnded and event.freed and not self.abandoned:
            return self.running.pop(event.slot)  # the common case, which cannot be stalled
        if isinstance(event, SlotFreed):
            # A helper script may also have abandoned a call; it held no slot.
            freed = self.abandoned.pop(event.slot, None)
        elif event.freed:
            freed = self.running.pop(event.slot)
        else:
            freed = None
            self.abandoned[event.slot] = self.running.pop(event.slot)
        self._is_stalled = not self.live
        if self._is_stalled:
            return freed
        if len(self.abandoned) < self.concurrency:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = self._clock()
        return freed

    @property
    def stall_deadline(self) -> float:
        """The time at which the loop has been unable to start work for too long."""
        return NEVER if self._stalled_since is None else self._stalled_since + self._stall_timeout

    @property
    def live(self) -> bool:
        """Whether the loop can start work: false after abandoned calls have held every slot for too long."""
        return self._clock() < self.stall_deadline

    def interrupt_all(self, mailbox: Mailbox, handle_events: EventHandler) -> Script[None]:
        """Interrupt all running lifecycles, and handle their ends."""
        for slot in list(self.running):
            yield from interrupt(slot)
        # None of them waits any more, so they end soon.
        yield from process_events_until(lambda: not self.running, mailbox, handle_events)


def process_events_until(condition: Callable[[], bool], mailbox: Mailbox, handle_events: EventHandler) -> Script[None]:
    """Handle events until *condition* returns true; interrupts do not end it."""
    while not condition():
        events = yield from wait(mailbox)
        if not isinstance(events, Interrupted):
            yield from handle_events(events)
