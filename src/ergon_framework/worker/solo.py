"""Solo runs: a suspected poison message runs alone among all loops of a process.

A transaction on its last permitted delivery is a suspect: if the process dies while it runs, the broker dead-letters
it. So nothing else may run then that could have killed the process, and no other loop may hold a claim that would lose
a delivery. The loop that holds a suspect asks for a solo run; every other loop of the process stops fetching and
starting, releases the deliveries that have not started, and confirms once its running handlers have left.

Every wait has a limit. The loop with the suspect waits at most ``MAX_WAIT_SECONDS``, then it starts the suspect next
to the others. Another loop pauses for at most ``MAX_PAUSE_SECONDS``, even if the loop with the suspect hangs. After a
solo run the other loops get as much time as it took, at most ``MAX_REST_SECONDS``, before the next one begins, so that
a queue full of suspects does not stop them. Settlements and lease renewals go on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Final

from ergon_framework.engine.effects import NEVER

#: Maximum seconds that a suspect waits for the running handlers of other loops.
MAX_WAIT_SECONDS: Final = 30.0
#: Maximum seconds that a loop pauses for the suspect of another one.
MAX_PAUSE_SECONDS: Final = 60.0
#: Maximum seconds between the end of a solo run and the beginning of the next one.
MAX_REST_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class SoloStart:
    """A suspect may start: it waited *waited* seconds, and is *alone* unless the limit ended the wait."""

    waited: float
    alone: bool


@dataclass(frozen=True, slots=True)
class SoloPause:
    """A pause of a loop for the suspect of another one; *timed_out*: the limit ended it."""

    seconds: float
    timed_out: bool


class SoloRun:
    """Decides which loop of a process has a solo run; one instance is shared by all loops, on any thread."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = Lock()
        self._members: set[SoloMember] = set()
        #: The member that has the solo run or waits for it, and the members that have not confirmed their pause.
        self._holder: SoloMember | None = None
        self._unconfirmed: set[SoloMember] = set()
        self._requested_at = 0.0
        self._rest_until = -NEVER

    def join(self, member: SoloMember) -> None:
        """Add a loop that begins."""
        with self._lock:
            self._members.add(member)
            # It has neither a handler nor a claim yet, so nothing has to be confirmed.
            member.is_held = self._holder is not None

    def leave(self, member: SoloMember) -> None:
        """Remove a loop that ends."""
        self.release(member)
        self.confirm(member)
        with self._lock:
            self._members.discard(member)

    def request(self, member: SoloMember) -> bool:
        """Pause all other loops, unless another one has a solo run; return whether *member* runs alone now."""
        paused: set[SoloMember] = set()
        with self._lock:
            if self._holder is None and self._rest_seconds() == 0:
                self._holder, self._requested_at = member, self._monotonic()
                paused = self._members - {member}
                self._unconfirmed = set(paused)
                for other in paused:
                    other.is_held = True
            is_alone = self._holder is member and not self._unconfirmed
        _notify_all(paused)
        return is_alone

    def rest_seconds(self) -> float:
        """Return the seconds before which no solo run begins."""
        with self._lock:
            return self._rest_seconds()

    def _rest_seconds(self) -> float:
        return max(0.0, self._rest_until - self._monotonic())

    def confirm(self, member: SoloMember) -> None:
        """Note that *member* runs nothing and starts nothing."""
        with self._lock:
            self._unconfirmed.discard(member)
            waiting = {self._holder} if self._holder is not None and not self._unconfirmed else set()
        _notify_all(waiting)

    def release(self, member: SoloMember) -> None:
        """End the solo run of *member*, or its request; the other loops continue."""
        with self._lock:
            if self._holder is not member:
                return
            others, now = self._members - {member}, self._monotonic()
            self._holder = None
            self._unconfirmed = set()
            if others:
                self._rest_until = now + min(now - self._requested_at, MAX_REST_SECONDS)
            for other in others:
                other.is_held = False
        _notify_all(others)


class SoloMember:
    """One loop's part in the solo runs of its process.

    *notify* makes the loop check its state and is called on any thread; the loop itself calls the other methods.
    """

    __slots__ = ("_monotonic", "_notify", "_requested_at", "_run", "deadline", "is_held", "paused_at")

    def __init__(self, run: SoloRun, notify: Callable[[], None], monotonic: Callable[[], float]) -> None:
        self._run = run
        self._notify = notify
        self._monotonic = monotonic
        self._requested_at: float | None = None
        #: Whether another loop has a solo run or waits for it: then this one fetches and starts nothing.
        self.is_held = False
        #: When this loop noticed that it is held.
        self.paused_at: float | None = None
        #: When the loop checks its state again, although nothing has notified it.
        self.deadline = NEVER

    def notify(self) -> None:
        # An event loop that has just been closed raises; then there is no loop to notify.
        with suppress(RuntimeError):
            self._notify()

    def join(self) -> None:
        """Join: the loop begins."""
        self._run.join(self)

    def try_start(self) -> SoloStart | None:
        """Ask for a solo run; return None while the suspect has to wait."""
        now = self._monotonic()
        if self._requested_at is None:
            self._requested_at = now
        waited, is_alone = now - self._requested_at, self._run.request(self)
        if not is_alone and waited < MAX_WAIT_SECONDS:
            self.deadline = min(self._requested_at + MAX_WAIT_SECONDS, now + (self._run.rest_seconds() or NEVER))
            return None
        self.deadline = NEVER
        return SoloStart(waited, is_alone)

    def finish(self) -> None:
        """End the solo run, or withdraw the request."""
        if self._requested_at is not None:
            self._requested_at = None
            self.deadline = NEVER
            self._run.release(self)

    def pause(self) -> bool:
        """Note that this loop is held; return False if the pause has lasted too long, and the loop continues."""
        now = self._monotonic()
        if self.paused_at is None:
            # A request of this loop is withdrawn: it releases its suspect, and fetches it again after the pause.
            self.finish()
            self.paused_at = now
            self.deadline = now + MAX_PAUSE_SECONDS
        if now < self.deadline:
            return True
        self.is_held = False
        return False

    def confirm(self) -> None:
        """Confirm the pause: no handler of this loop runs, and it holds no claim that would lose a delivery."""
        self._run.confirm(self)

    def resume(self) -> SoloPause | None:
        """Note the end of a pause and return it, if there was one."""
        if self.paused_at is None:
            return None
        seconds = self._monotonic() - self.paused_at
        self.paused_at, self.deadline = None, NEVER
        return SoloPause(seconds, timed_out=seconds >= MAX_PAUSE_SECONDS)

    def leave(self) -> None:
        """Leave: the loop ends."""
        self._run.leave(self)


def _notify_all(members: set[SoloMember]) -> None:
    for member in members:
        member.notify()
