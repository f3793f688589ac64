"""The cache of the breaker states that this process read last. It never blocks, and may be slightly outdated."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from ergon_framework.providers.books import ProviderScope
from ergon_framework.providers.circuit_breaker import BreakerSnapshot, BreakerState, Override, OverrideKind

#: Maximum number of scopes that a process watches; the one updated longest ago is evicted first.
_MAX_SCOPES: Final = 10_000
NEW_BREAKER: Final = BreakerSnapshot()


def parse_snapshot(values: Sequence[Any] | None) -> BreakerSnapshot:
    """Parse the answer of ``provider_breaker_shown``; without the probes, which only the row needs."""
    if values is None or values[0] is None:
        return NEW_BREAKER
    breaker_state, failures, open_until, generation, kind, until = values
    override = None if kind is None else Override(OverrideKind(kind), until)
    return BreakerSnapshot(BreakerState(breaker_state), failures, open_until, generation, override=override)


def shift_clock(state: BreakerSnapshot, seconds: float) -> BreakerSnapshot:
    """Convert *state* to the time of another clock, which is ahead by *seconds*."""
    if state.open_until is not None:
        state = replace(state, open_until=state.open_until + seconds)
    if state.override is not None:
        state = replace(state, override=replace(state.override, until=state.override.until + seconds))
    return state


class BreakerCache:
    """Breaker states by scope, in this process's own time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: OrderedDict[ProviderScope, BreakerSnapshot] = OrderedDict()
        #: Requested scopes that have not been read yet.
        self._unread: set[ProviderScope] = set()
        #: Called when a scope is added to them.
        self.on_scope_requested: Callable[[], None] = lambda: None

    def get(self, scope: ProviderScope) -> BreakerSnapshot | None:
        """Return the breaker of *scope*; None if it was never read, which requests a read."""
        state = self._states.get(scope)
        if state is None:
            with self._lock:
                is_new = len(self._unread) < _MAX_SCOPES and scope not in self._unread
                if is_new:
                    self._unread.add(scope)
            if is_new:
                self.on_scope_requested()
        return state

    def count_failures(self, scope: ProviderScope) -> int:
        """Return the last known number of consecutive faults."""
        state = self._states.get(scope)
        return 0 if state is None else state.consecutive_failures

    def update(self, scope: ProviderScope, state: BreakerSnapshot) -> None:
        """Store *state* unless a later one is known, because answers may arrive out of order."""
        current = self._states.get(scope)
        if current is state or (current is not None and current.generation > state.generation):
            return
        with self._lock:
            self._states[scope] = state
            self._states.move_to_end(scope)
            self._unread.discard(scope)
            if len(self._states) > _MAX_SCOPES:
                self._states.popitem(last=False)

    def is_known(self, scope: ProviderScope) -> bool:
        return scope in self._states

    def unread_scopes(self) -> list[ProviderScope]:
        """Return the scopes that are due to be read."""
        with self._lock:
            return list(self._unread)

    def list_scopes(self) -> list[ProviderScope]:
        """Return all cached and requested scopes."""
        with self._lock:
            return [*self._states, *self._unread]
