"""The view: what this process saw last of the breakers. It never waits, and may be a moment old."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from ergon_framework.providers.books import Account
from ergon_framework.providers.circuit_breaker import BreakerState, Override, OverrideKind, Snapshot

#: The most accounts that a process watches; the one that was not asked for the longest is given up first.
_MOST: Final = 10_000
NEW: Final = Snapshot()


def snapshot(shown: Sequence[Any] | None) -> Snapshot:
    """What ``provider_breaker_shown`` answers; without the probes, which only the row needs."""
    if shown is None or shown[0] is None:
        return NEW
    state, failures, open_until, generation, kind, until = shown
    override = None if kind is None else Override(OverrideKind(kind), until)
    return Snapshot(BreakerState(state), failures, open_until, generation, override=override)


def moved(seen: Snapshot, seconds: float) -> Snapshot:
    """*seen* in the time of another clock, which is ahead by *seconds*."""
    if seen.open_until is not None:
        seen = replace(seen, open_until=seen.open_until + seconds)
    if seen.override is not None:
        seen = replace(seen, override=replace(seen.override, until=seen.override.until + seconds))
    return seen


class View:
    """Breakers by account, in this process's own time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: OrderedDict[Account, Snapshot] = OrderedDict()
        #: Accounts that somebody has asked for and nobody has read yet.
        self._unread: set[Account] = set()
        #: Called when there is one more of these.
        self.wanting: Callable[[], None] = lambda: None

    def of(self, account: Account) -> Snapshot | None:
        """The breaker of *account*; None where it was never read, which is then due."""
        found = self._seen.get(account)
        if found is None:
            with self._lock:
                new = len(self._unread) < _MOST and account not in self._unread
                if new:
                    self._unread.add(account)
            if new:
                self.wanting()
        return found

    def failures(self, account: Account) -> int:
        """The faults in a row that were seen last."""
        found = self._seen.get(account)
        return 0 if found is None else found.consecutive_failures

    def saw(self, account: Account, seen: Snapshot) -> None:
        """Take *seen* for the state, unless a later one is known: answers may overtake each other."""
        known = self._seen.get(account)
        if known is seen or (known is not None and known.generation > seen.generation):
            return
        with self._lock:
            self._seen[account] = seen
            self._seen.move_to_end(account)
            self._unread.discard(account)
            if len(self._seen) > _MOST:
                self._seen.popitem(last=False)

    def known(self, account: Account) -> bool:
        return account in self._seen

    def unread(self) -> list[Account]:
        """Those that are due to be read."""
        with self._lock:
            return list(self._unread)

    def accounts(self) -> list[Account]:
        """All that somebody takes an interest in."""
        with self._lock:
            return [*self._seen, *self._unread]
