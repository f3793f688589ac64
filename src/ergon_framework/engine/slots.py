"""Slots: where a script stands, who holds its ticket, and which of its bodies have not left.

All drivers share this. It knows when a script goes on and with which answer; how (on which
thread, in which task, in which simulated moment) is the driver's part.

A slot's ticket is the effect that its script waits for. Whoever takes the ticket (the body that
came back, the watcher at the deadline, a mailbox that filled, an interrupt) answers the script;
everybody else comes too late and finds that out from the ticket alone.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from ergon_framework.engine.effects import NEVER, Afterwards, Call, Effect, Gone, Interrupt, Script, Sleep, Spawn, Wait
from ergon_framework.engine.outcome import Answer, Expired, Ok, Stopped
from ergon_framework.engine.senses import Senses
from ergon_framework.engine.watcher import Watcher

#: A script that waits: it goes on when somebody takes its ticket.
PARKED: Final = object()


class Done:
    """A spawned script has ended with *value*; *freed* when none of its bodies is left behind."""

    __slots__ = ("freed", "slot", "value")

    def __init__(self, slot: Slot, value: Any, *, freed: bool) -> None:
        self.slot = slot
        self.value = value
        self.freed = freed


class Freed:
    """The last abandoned body of a script that had ended has left."""

    __slots__ = ("slot",)

    def __init__(self, slot: Slot) -> None:
        self.slot = slot


class Slot:
    """One script in progress."""

    __slots__ = ("bodies", "counted", "due", "ended", "interrupted", "script", "then", "ticket", "told")

    def __init__(self, script: Script[Any], *, told: Mailbox | None, counted: bool) -> None:
        self.script = script
        self.told = told
        self.counted = counted
        self.ticket: Effect | None = None
        self.due = NEVER
        #: How many bodies were given up on and have not come back.
        self.bodies = 0
        self.ended = False
        #: How many interrupts its script has not been told of.
        self.interrupted = 0
        #: What is to be done once nothing of it is left.
        self.then: Callable[[], None] | None = None


class Mailbox:
    """Where a script is told what happened; anybody in the driver's own thread of control may put."""

    __slots__ = ("_items", "_lock", "_needed", "_slots", "_urgent", "_waiting")

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._lock = slots.lock
        self._items: list[Any] = []
        self._urgent = False
        self._waiting: Slot | None = None
        #: How many items the waiting script waits for; nobody waits for infinitely many.
        self._needed: float = NEVER

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any, *, urgent: bool = False) -> None:
        """Add *item*; the waiting script goes on once it has what it waits for."""
        with self._lock:
            items = self._items
            items.append(item)
            if urgent:
                self._urgent = True
            slot = self._waiting
            if slot is None or (len(items) < self._needed and not self._urgent):
                return
            self._slots.unpark(slot)
            answer = self.take()
        self._slots.resume(slot, answer)

    # The lock is held by whoever calls these.

    def take(self) -> list[Any]:
        """All that is there."""
        items, self._items = self._items, []
        self._urgent = False
        return items

    def await_by(self, slot: Slot, count: int) -> bool:
        """Have *slot* wait for *count* items; False if they are there already."""
        if self._urgent or len(self._items) >= count:
            return False
        self._waiting, self._needed = slot, count
        return True

    def leave(self) -> None:
        """Nobody waits any more."""
        self._waiting, self._needed = None, NEVER


class Slots(ABC):
    """The part of a driver that is the same for all: tickets, parking, mailboxes."""

    def __init__(self, senses: Senses) -> None:
        self.senses = senses
        self.clock = senses.clock
        self.lock = threading.Lock()
        self.watcher = Watcher()
        self.live: set[Slot] = set()
        self.fenced = 0
        self._closed = False
        self._root: Slot | None = None
        self._stopped_early = 0

    def mailbox(self) -> Mailbox:
        return Mailbox(self)

    def came_late(self) -> int:
        """How many bodies came back after nobody waited for them any more."""
        return self.fenced

    # -- what a driver supplies ---------------------------------------------------------------

    @abstractmethod
    def stop(self) -> None:
        """Interrupt the first script, from any thread."""

    @abstractmethod
    def signal(self, mailbox: Mailbox, item: Any) -> None:
        """Put *item* from any thread."""

    @abstractmethod
    def resume(self, slot: Slot, answer: Any) -> None:
        """Have *slot*'s script go on with *answer*, soon and elsewhere."""

    @abstractmethod
    def _poke(self, until: float) -> None:
        """Have the watcher look again by *until*, which is before it meant to."""

    @abstractmethod
    def _finish(self, value: Any, error: BaseException | None) -> None:
        """The first script has ended, or a script has broken."""

    # -- what the drivers' workers call ---------------------------------------------------------

    def start(self, script: Script[Any], *, told: Mailbox | None = None, counted: bool = False) -> Slot:
        """Begin *script*; without anybody to tell it is the first one."""
        slot = Slot(script, told=told, counted=counted)
        with self.lock:
            self.live.add(slot)
            if told is None:
                self._root = slot
                slot.interrupted = self._stopped_early
        self.resume(slot, None)
        return slot

    def halt(self) -> None:
        """Interrupt the first script, also when it has not begun."""
        with self.lock:
            root = self._root
            if root is None:
                self._stopped_early += 1
        if root is not None:
            self.interrupt(root)

    def advance(self, slot: Slot, answer: Any) -> Call | None:
        """Feed *answer*; return the next call to make, or None when the script waits or has ended."""
        send = slot.script.send
        while True:
            try:
                effect = send(answer)
            except StopIteration as stop:
                self._ended(slot, stop.value)
                return None
            except BaseException as error:  # noqa: BLE001 - a script never fails by itself: this is a defect, and it is handed on
                self._broken(slot, error)
                return None
            if type(effect) is Call:
                with self.lock:
                    if slot.interrupted:
                        slot.interrupted -= 1
                        answer = Stopped()
                        continue
                    slot.ticket = effect
                    slot.due = until = effect.until
                if until < self.watcher.wakes_at:
                    self._poke(until)
                return effect
            if type(effect) is Spawn:
                answer = self.start(effect.script, told=effect.told, counted=effect.counted)
                continue
            answer = self._perform(slot, effect)
            if answer is PARKED:
                return None

    def returned(self, slot: Slot, call: Call, answer: Answer) -> Answer | None:
        """What the script is to be told now that *call* has come back; None if it has been told already.

        The deadline decides, not whether the watcher got round to it: a body that comes back too
        late has timed out, on a busy machine too.
        """
        with self.lock:
            awaited = slot.ticket is call
            if awaited:
                overdue = slot.due <= self.clock()
                slot.ticket = None
                slot.due = NEVER
                if not overdue:
                    return answer
                self._abandoned(slot, call)
        if call.late is not None and type(answer) is Ok:
            call.late(answer.value)
        self._left(slot, call)
        return Expired(call) if awaited else None

    def _left(self, slot: Slot, call: Call) -> None:
        """The body of a call that nobody waited for any more has come back."""
        with self.lock:
            self.fenced += 1
            call.left = True
            slot.bodies -= 1
            waiting = slot.ticket
            awaited = isinstance(waiting, Gone) and waiting.body is call
            if awaited:
                self.unpark(slot)
            freed = slot.ended and slot.bodies == 0
            if freed:
                self.live.discard(slot)
        if awaited:
            self.resume(slot, True)  # noqa: FBT003 - the answer to Gone
        elif freed:
            if slot.then is not None:
                slot.then()
            if slot.told is not None:
                slot.told.put(Freed(slot))

    def expire(self) -> None:
        """Answer everybody whose time is over."""
        now = self.clock()
        with self.lock:
            late = [(slot, self._overdue(slot)) for slot in self.live if slot.due <= now]
        for slot, answer in late:
            self.resume(slot, answer)

    def interrupt(self, slot: Slot) -> None:
        """Answer the present or the next effect of *slot* with Stopped."""
        with self.lock:
            effect = slot.ticket
            if slot.ended:
                return
            if effect is None:
                slot.interrupted += 1
                return
            answer = Stopped(self._abandoned(slot, effect) if isinstance(effect, Call) else None)
            self.unpark(slot)
        self.resume(slot, answer)

    def close(self) -> None:
        """Fence whatever is still running: nothing of it counts any more."""
        with self.lock:
            self._closed = True
            for slot in self.live:
                if isinstance(slot.ticket, Call):
                    self._abandoned(slot, slot.ticket)
                slot.ticket = None
                slot.due = NEVER

    @property
    def closed(self) -> bool:
        return self._closed

    # -- inside ---------------------------------------------------------------------------------

    def unpark(self, slot: Slot) -> None:
        """Take the ticket; the lock is held."""
        effect = slot.ticket
        if isinstance(effect, Wait):
            effect.mailbox.leave()
        slot.ticket = None
        slot.due = NEVER

    def _perform(self, slot: Slot, effect: Effect) -> Any:
        if type(effect) is Interrupt:
            return self.interrupt(effect.slot)
        if type(effect) is Afterwards:
            slot.then = effect.then
            return None
        return self._park(slot, effect)

    def _park(self, slot: Slot, effect: Any) -> Any:
        """Answer a waiting effect that has its answer already; park the others."""
        if type(effect) is Gone and not effect.body.left:
            _ask_to_leave(effect.body)
        with self.lock:
            if slot.interrupted:
                slot.interrupted -= 1
                return Stopped()
            answer = self._at_once(slot, effect)
            if answer is not PARKED:
                return answer
            slot.ticket = effect
            slot.due = effect.until
        if effect.until < self.watcher.wakes_at:
            self._poke(effect.until)
        return PARKED

    def _at_once(self, slot: Slot, effect: Sleep | Gone | Wait) -> Any:
        over = effect.until <= self.clock()
        if isinstance(effect, Wait):
            waits = not over and effect.mailbox.await_by(slot, effect.count)
            return PARKED if waits else effect.mailbox.take()
        if isinstance(effect, Gone):
            return effect.body.left if over or effect.body.left else PARKED
        return None if over else PARKED

    def _overdue(self, slot: Slot) -> Any:
        effect = slot.ticket
        self.unpark(slot)
        if isinstance(effect, Call):
            return Expired(self._abandoned(slot, effect))
        if isinstance(effect, Wait):
            return effect.mailbox.take()
        return False if isinstance(effect, Gone) else None

    def _abandoned(self, slot: Slot, call: Call) -> Call:
        slot.bodies += 1
        if call.scope is not None:
            call.scope.cancel()
        return call

    def _ended(self, slot: Slot, value: Any) -> None:
        with self.lock:
            slot.ended = True
            freed = slot.bodies == 0
            if freed:
                self.live.discard(slot)
        if freed and slot.then is not None:
            slot.then()
        if slot.told is None:
            self._finish(value, None)
        else:
            slot.told.put(Done(slot, value, freed=freed))

    def _broken(self, slot: Slot, error: BaseException) -> None:
        with self.lock:
            slot.ended = True
            self.live.discard(slot)
        self._finish(None, error)


def _ask_to_leave(body: Call) -> None:
    """Once: a body that shrugged off one request has made its choice."""
    cancel, body.cancel = body.cancel, None
    if cancel is not None:
        cancel()
