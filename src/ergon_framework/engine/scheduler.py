"""The scheduler that all drivers share: slots, pending effects, mailboxes, deadlines and abandoned calls.

A script is a generator with the decisions of a loop or of a transaction's lifecycle; it does no I/O. It yields an
effect, a request such as ``Call`` (run a function) or ``Sleep``, and is sent the result. A driver performs the effects:
on threads, as asyncio tasks, or in simulated time. Each driver is a subclass of Scheduler, which decides when a script
continues and with which result; the driver decides how (on which thread, in which task, at which simulated moment).

A slot holds one script in progress. Its pending effect is the effect that the script waits for. Whatever takes it
first (the call that returned, the timer at the deadline, a mailbox that filled, an interrupt) resumes the script; all
others are late, and detect it by comparing the pending effect with theirs.

A call whose deadline passes, or that is interrupted, is abandoned: its script continues, and its result is discarded
when it returns. Each driver has one deadline timer, for everything that has a deadline.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from ergon_framework.clock import Clock
from ergon_framework.engine.effects import (
    NEVER,
    AwaitExit,
    Call,
    CallResult,
    Effect,
    Expired,
    Interrupt,
    Interrupted,
    Ok,
    OnExit,
    Script,
    Sleep,
    Spawn,
    Wait,
)


class DeadlineTimer:
    """Tracks the nearest deadline; a script with an earlier deadline reschedules it.

    ``wakes_at`` is the time of the next wakeup. It is NEVER (infinity) while ``fire_due`` executes, so that a call
    that starts at that moment reschedules it instead of being missed.
    """

    __slots__ = ("wakes_at",)

    def __init__(self) -> None:
        self.wakes_at = NEVER

    def fire_due(self, scheduler: Scheduler) -> float:
        """Answer every effect that is due, and return the time of the next wakeup, or NEVER."""
        self.wakes_at = NEVER
        scheduler.expire_due()
        with scheduler.lock:
            due = min((slot.due for slot in scheduler.live_slots), default=NEVER)
        self.wakes_at = due
        return due


# -- slots, mailboxes and the scheduler -------------------------------------------------------------

#: The script waits; it continues when its pending effect is taken.
WAITING: Final = object()


class ScriptEnded:
    """A spawned script has ended with *value*; *freed* is true if it left no abandoned call."""

    __slots__ = ("freed", "slot", "value")

    def __init__(self, slot: Slot, value: Any, *, freed: bool) -> None:
        self.slot = slot
        self.value = value
        self.freed = freed


class SlotFreed:
    """The last abandoned call of an ended script has exited."""

    __slots__ = ("slot",)

    def __init__(self, slot: Slot) -> None:
        self.slot = slot


class Slot:
    """One script in progress.

    *notify* receives ScriptEnded when the script has ended, and SlotFreed if an abandoned call of it exits later; the
    root script has none. *counted* scripts run under the concurrency limit of the driver: those of transactions are,
    those that fetch or settle are not.
    """

    __slots__ = (
        "abandoned_calls",
        "counted",
        "due",
        "ended",
        "notify",
        "on_exit",
        "pending_effect",
        "pending_interrupts",
        "script",
    )

    def __init__(self, script: Script[Any], *, notify: Mailbox | None, counted: bool) -> None:
        self.script = script
        self.notify = notify
        self.counted = counted
        self.pending_effect: Effect | None = None
        #: The deadline of the pending effect on the monotonic clock; NEVER (infinity) if it has none.
        self.due = NEVER
        #: The number of abandoned calls that have not exited.
        self.abandoned_calls = 0
        self.ended = False
        #: The number of interrupts that the script has not received yet.
        self.pending_interrupts = 0
        #: Called once the script has ended and its last call has exited.
        self.on_exit: Callable[[], None] | None = None


class Mailbox:
    """A queue of events for one script.

    Code on the driver's threads or event loop calls ``put``; all other code calls ``Scheduler.put_from_any_thread``.
    """

    __slots__ = ("_items", "_lock", "_needed_count", "_scheduler", "_urgent", "_waiter")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = scheduler.lock
        self._items: list[Any] = []
        self._urgent = False
        self._waiter: Slot | None = None
        #: The number of items that the waiting script needs; NEVER (infinity) if no script waits.
        self._needed_count: float = NEVER

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Any, *, urgent: bool = False) -> None:
        """Add *item*; the waiting script continues once it has enough items, or immediately if *urgent*."""
        with self._lock:
            items = self._items
            items.append(item)
            if urgent:
                self._urgent = True
            slot = self._waiter
            if slot is None or (len(items) < self._needed_count and not self._urgent):
                return
            self._scheduler.clear_wait(slot)
            answer = self.take()
        self._scheduler.resume(slot, answer)

    def put_from_any_thread(self, item: Any) -> None:
        """Add *item* as an urgent one, from any thread or signal handler."""
        self._scheduler.put_from_any_thread(self, item)

    # The caller holds the lock in the methods below.

    def take(self) -> list[Any]:
        """Remove and return all items."""
        items, self._items = self._items, []
        self._urgent = False
        return items

    def register_waiter(self, slot: Slot, count: int) -> bool:
        """Register *slot* as waiting for *count* items; return False if they are there already."""
        if self._urgent or len(self._items) >= count:
            return False
        self._waiter, self._needed_count = slot, count
        return True

    def clear_waiter(self) -> None:
        """Forget the waiting slot."""
        self._waiter, self._needed_count = None, NEVER


class Scheduler(ABC):
    """The part of a driver that all drivers share: pending effects, waiting and mailboxes."""

    def __init__(self, clock: Clock) -> None:
        self.time_source = clock
        #: Returns the time in seconds by which all deadlines are compared.
        self.monotonic = clock.monotonic
        self.lock = threading.Lock()
        self.deadline_timer = DeadlineTimer()
        #: Slots whose script has not ended, or has left an abandoned call that still runs.
        self.live_slots: set[Slot] = set()
        self.late_results = 0
        self._closed = False
        self._root: Slot | None = None
        #: The number of interrupts of the root script that came before it started.
        self._early_interrupts = 0

    def create_mailbox(self) -> Mailbox:
        return Mailbox(self)

    def late_result_count(self) -> int:
        """Return the number of calls that returned after the script had stopped waiting for them."""
        return self.late_results

    # -- implemented by the driver --------------------------------------------------------------

    @abstractmethod
    def stop(self) -> None:
        """Interrupt the root script, from any thread."""

    @abstractmethod
    def put_from_any_thread(self, mailbox: Mailbox, item: Any) -> None:
        """Put *item* into *mailbox* as an urgent item, from any thread or signal handler."""

    @abstractmethod
    def resume(self, slot: Slot, answer: Any) -> None:
        """Continue *slot*'s script with *answer*, soon and outside the current call."""

    @abstractmethod
    def _reschedule_timer(self, until: float) -> None:
        """Make the deadline timer fire by *until*, which is earlier than planned."""

    @abstractmethod
    def _finish(self, value: Any, error: BaseException | None) -> None:
        """Handle the end of the root script, or a failure inside any script."""

    # -- called by the threads or tasks of the driver -------------------------------------------

    def start(self, script: Script[Any], *, notify: Mailbox | None = None, counted: bool = False) -> Slot:
        """Start *script*; without *notify* it is the root script, whose end ends the driver's run."""
        slot = Slot(script, notify=notify, counted=counted)
        with self.lock:
            self.live_slots.add(slot)
            if notify is None:
                self._root = slot
                slot.pending_interrupts = self._early_interrupts
        self.resume(slot, None)
        return slot

    def interrupt_root(self) -> None:
        """Interrupt the root script, also if it has not started."""
        with self.lock:
            root = self._root
            if root is None:
                self._early_interrupts += 1
        if root is not None:
            self.interrupt(root)

    def step(self, slot: Slot, answer: Any) -> Call | None:
        """Send *answer* to the script; return the next call to make, or None if the script waits or has ended."""
        send = slot.script.send
        while True:
            try:
                effect = send(answer)
            except StopIteration as stop:
                self._end_script(slot, stop.value)
                return None
            except BaseException as error:  # noqa: BLE001 - scripts never raise; this is a defect, reported to the caller
                self._fail_script(slot, error)
                return None
            if type(effect) is Call:
                with self.lock:
                    if slot.pending_interrupts:
                        slot.pending_interrupts -= 1
                        answer = Interrupted()
                        continue
                    slot.pending_effect = effect
                    slot.due = until = effect.until
                if until < self.deadline_timer.wakes_at:
                    self._reschedule_timer(until)
                return effect
            if type(effect) is Spawn:
                answer = self.start(effect.script, notify=effect.notify, counted=effect.counted)
                continue
            answer = self._perform(slot, effect)
            if answer is WAITING:
                return None

    def accept_result(self, slot: Slot, call: Call, answer: CallResult) -> CallResult | None:
        """Return the result for the script after *call* has returned; None if the script already has a result.

        The deadline decides, not whether the timer has fired yet: a call that returns after its deadline has timed
        out.
        """
        with self.lock:
            is_awaited = slot.pending_effect is call
            if is_awaited:
                is_overdue = slot.due <= self.monotonic()
                slot.pending_effect = None
                slot.due = NEVER
                if not is_overdue:
                    return answer
                self._abandon(slot, call)
        if call.on_late_result is not None and type(answer) is Ok:
            call.on_late_result(answer.value)
        self._record_late_exit(slot, call)
        return Expired(call) if is_awaited else None

    def _record_late_exit(self, slot: Slot, call: Call) -> None:
        """Count the late result of an abandoned call, and record that the call has exited."""
        with self.lock:
            self.late_results += 1
            call.exited = True
            slot.abandoned_calls -= 1
            effect = slot.pending_effect
            is_awaited = isinstance(effect, AwaitExit) and effect.call is call
            if is_awaited:
                self.clear_wait(slot)
            is_freed = slot.ended and slot.abandoned_calls == 0
            if is_freed:
                self.live_slots.discard(slot)
        if is_awaited:
            self.resume(slot, True)  # noqa: FBT003 - the answer to AwaitExit
        elif is_freed:
            if slot.on_exit is not None:
                slot.on_exit()
            if slot.notify is not None:
                slot.notify.put(SlotFreed(slot))

    def expire_due(self) -> None:
        """Answer every pending effect whose deadline has passed."""
        now = self.monotonic()
        with self.lock:
            expired = [(slot, self._expire(slot)) for slot in self.live_slots if slot.due <= now]
        for slot, answer in expired:
            self.resume(slot, answer)

    def interrupt(self, slot: Slot) -> None:
        """Answer the current or next effect of *slot* with Interrupted; abandon the call that it waits for."""
        with self.lock:
            effect = slot.pending_effect
            if slot.ended:
                return
            if effect is None:
                slot.pending_interrupts += 1
                return
            answer = Interrupted(self._abandon(slot, effect) if isinstance(effect, Call) else None)
            self.clear_wait(slot)
        self.resume(slot, answer)

    def close(self) -> None:
        """Abandon every running call and drop its result."""
        with self.lock:
            self._closed = True
            for slot in self.live_slots:
                if isinstance(slot.pending_effect, Call):
                    self._abandon(slot, slot.pending_effect)
                slot.pending_effect = None
                slot.due = NEVER

    @property
    def closed(self) -> bool:
        return self._closed

    # -- internal -------------------------------------------------------------------------------

    def clear_wait(self, slot: Slot) -> None:
        """Clear the pending effect of *slot*; the caller holds the lock."""
        effect = slot.pending_effect
        if isinstance(effect, Wait):
            effect.mailbox.clear_waiter()
        slot.pending_effect = None
        slot.due = NEVER

    def _perform(self, slot: Slot, effect: Effect) -> Any:
        if type(effect) is Interrupt:
            return self.interrupt(effect.slot)
        if type(effect) is OnExit:
            slot.on_exit = effect.callback
            return None
        return self._wait_for(slot, effect)

    def _wait_for(self, slot: Slot, effect: Any) -> Any:
        """Return the result of *effect* if it is known already; otherwise make the script wait."""
        if type(effect) is AwaitExit and not effect.call.exited:
            _request_exit(effect.call)
        with self.lock:
            if slot.pending_interrupts:
                slot.pending_interrupts -= 1
                return Interrupted()
            answer = self._answer_immediately(slot, effect)
            if answer is not WAITING:
                return answer
            slot.pending_effect = effect
            slot.due = effect.until
        if effect.until < self.deadline_timer.wakes_at:
            self._reschedule_timer(effect.until)
        return WAITING

    def _answer_immediately(self, slot: Slot, effect: Sleep | AwaitExit | Wait) -> Any:
        """Return the result of *effect* if it is known or its deadline is past, otherwise WAITING."""
        is_due = effect.until <= self.monotonic()
        if isinstance(effect, Wait):
            must_wait = not is_due and effect.mailbox.register_waiter(slot, effect.count)
            return WAITING if must_wait else effect.mailbox.take()
        if isinstance(effect, AwaitExit):
            return effect.call.exited if is_due or effect.call.exited else WAITING
        return None if is_due else WAITING

    def _expire(self, slot: Slot) -> Any:
        """End the wait of *slot*, whose deadline is past; return the result that the script receives."""
        effect = slot.pending_effect
        self.clear_wait(slot)
        if isinstance(effect, Call):
            return Expired(self._abandon(slot, effect))
        if isinstance(effect, Wait):
            return effect.mailbox.take()
        return False if isinstance(effect, AwaitExit) else None

    def _abandon(self, slot: Slot, call: Call) -> Call:
        """Count *call* as abandoned: it may still run, but its script no longer waits for it."""
        slot.abandoned_calls += 1
        # This sets the flag that the handler can read; AwaitExit lets the driver cancel the call itself.
        if call.scope is not None:
            call.scope.cancel()
        return call

    def _end_script(self, slot: Slot, value: Any) -> None:
        """Record the end of a script; its slot stays alive while an abandoned call of it still runs."""
        with self.lock:
            slot.ended = True
            is_freed = slot.abandoned_calls == 0
            if is_freed:
                self.live_slots.discard(slot)
        if is_freed and slot.on_exit is not None:
            slot.on_exit()
        if slot.notify is None:
            self._finish(value, None)
        else:
            slot.notify.put(ScriptEnded(slot, value, freed=is_freed))

    def _fail_script(self, slot: Slot, error: BaseException) -> None:
        with self.lock:
            slot.ended = True
            self.live_slots.discard(slot)
        self._finish(None, error)


def _request_exit(abandoned_call: Call) -> None:
    """Cancel *abandoned_call* if its driver can (asyncio can, threads cannot), at most once.

    A call that ignores one cancellation would ignore the next.
    """
    cancel, abandoned_call.cancel = abandoned_call.cancel, None
    if cancel is not None:
        cancel()
