"""The cache of the breaker states that this process read last, and the thread that updates it.

A circuit breaker stops calls to a failing provider. It is closed (calls pass), open (calls are rejected) or half-open
(a few calls, the probes, test the provider); its generation increases with every transition. A scope is what one
breaker is for: a tenant, or all tenants together, a provider and a capability.

The cache never blocks, and may be slightly outdated. The thread receives notifications of transitions, and polls every
0.9 seconds in addition: behind a pooler there are no notifications, and a lost connection is not noticed. It also runs
maintenance at intervals.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from ergon_framework.database.connection import DeadlineConnection
from ergon_framework.database.listen import NotificationWaiter
from ergon_framework.database.operation import Operation, run_operation
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.providers.circuit_breaker import BreakerSnapshot, BreakerState, Override, OverrideKind
from ergon_framework.providers.postgres import sql
from ergon_framework.providers.postgres.keys import ALL_TENANTS, parse_scope_key
from ergon_framework.providers.postgres.retention import Maintenance
from ergon_framework.providers.state import ProviderScope
from ergon_framework.telemetry import logs

#: Maximum number of scopes that a process watches; the one updated longest ago is evicted first.
_MAX_SCOPES: Final = 10_000
NEW_BREAKER: Final = BreakerSnapshot()


def parse_snapshot(values: Sequence[Any] | None) -> BreakerSnapshot:
    """Parse the answer of ``provider_breaker_json``; without the probes, which only the row needs."""
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
        #: Called when a scope is added to the unread ones; set by ``BreakerListener`` to wake its thread.
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


# -- the listener -----------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

#: Seconds between two polls, and the age in seconds at which the cache is too old to use.
POLL_INTERVAL_SECONDS: Final = 0.9
MAX_CACHE_AGE_SECONDS: Final = 2.5
#: Average seconds between two maintenance runs; then the shortest and the longest delay before it reconnects.
_MAINTENANCE_INTERVAL_SECONDS: Final = 20.0
_MIN_RECONNECT_SECONDS, _MAX_RECONNECT_SECONDS = 0.1, 2.0


class BreakerListener:
    """The thread that updates *breaker_cache*; after each poll it runs *release_blocks*, which returns unused quota."""

    def __init__(
        self, pool: ConnectionPool, breaker_cache: BreakerCache, release_blocks: Callable[[], Operation[None]]
    ) -> None:
        self._pool = pool
        self._breaker_cache = breaker_cache
        self._release_blocks = release_blocks
        self._stopped = threading.Event()
        self._waiter = NotificationWaiter()
        # Wakes the thread when a scope is requested that was never read.
        breaker_cache.on_scope_requested = self._waiter.wake
        #: When the last complete poll began: states may have changed since then.
        self._polled_at = float("-inf")
        self._maintenance = Maintenance()
        # A separate generator, so that processes do not run in step: forked children share the global one's state.
        self._random = random.Random()  # noqa: S311 - no secret
        self._maintenance_due_at = time.monotonic() + self._random.uniform(0, _MAINTENANCE_INTERVAL_SECONDS)
        self._thread = threading.Thread(target=self._run, name="ergon-breakers", daemon=True)
        self._thread.start()

    def is_fresh(self, clock: float) -> bool:
        """Return whether the cache was compared with the database recently enough."""
        return clock - self._polled_at <= MAX_CACHE_AGE_SECONDS

    def stop(self, timeout: float = 1.0) -> None:
        """End the thread; a thread that is blocked in a connection is abandoned."""
        self._stopped.set()
        self._waiter.wake()
        self._thread.join(timeout)

    # -- the thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._waiter:
            self._run_until_stopped()

    def _run_until_stopped(self) -> None:
        delay, is_lost = _MIN_RECONNECT_SECONDS, False
        while not self._stopped.is_set():
            try:
                with self._pool.connect() as connection:
                    if self._pool.is_direct:
                        connection.execute(f"listen {sql.CHANNEL}")
                    # Notifications may have been missed before this connection listened.
                    self._read(connection, self._breaker_cache.list_scopes())
                    delay = _MIN_RECONNECT_SECONDS
                    if is_lost:
                        logs.log_event(logging.INFO, "breaker listener restored", {}, to=_log)
                        is_lost = False
                    # After a failover the pool connects to another server, whose state is needed.
                    while not self._stopped.is_set() and self._pool.is_current(connection):
                        self._poll(connection)
            except Exception as error:  # noqa: BLE001 - any error may be temporary, so it reconnects
                if not is_lost:
                    logs.log_event(logging.WARNING, "breaker listener lost", {"error": type(error).__name__}, to=_log)
                    is_lost = True
                self._stopped.wait(delay)
                delay = min(2 * delay, _MAX_RECONNECT_SECONDS)

    def _poll(self, connection: DeadlineConnection) -> None:
        """Poll once, then wait for the next poll or for notifications."""
        started_at = time.monotonic()
        self._store(connection.execute(sql.SELECT_CHANGED_BREAKERS, binary=True).fetchall())
        self._read(connection, self._breaker_cache.unread_scopes())
        self._polled_at = started_at
        run_operation(connection, self._release_blocks())
        if started_at >= self._maintenance_due_at:
            self._maintenance_due_at = started_at + _MAINTENANCE_INTERVAL_SECONDS * self._random.uniform(0.5, 1.5)
            run_operation(connection, self._maintenance.run())
        while (
            seconds_left := started_at + POLL_INTERVAL_SECONDS - time.monotonic()
        ) > 0 and not self._stopped.is_set():
            self._listen(connection, seconds_left)
            if self._breaker_cache.unread_scopes():
                return

    def _listen(self, connection: DeadlineConnection, seconds: float) -> None:
        if not self._pool.is_direct:
            self._waiter.wait(seconds)
            return
        notified_scopes = {_parse_scope(payload) for payload in self._waiter.notifications(connection, seconds)}
        self._read(
            connection,
            [scope for scope in notified_scopes if scope is not None and self._breaker_cache.is_known(scope)],
        )

    def _read(self, connection: DeadlineConnection, scopes: Iterable[ProviderScope]) -> None:
        requested_scopes = list(scopes)
        if not requested_scopes:
            return
        parameters = {
            "tenants": [ALL_TENANTS if scope.tenant_id is None else scope.tenant_id for scope in requested_scopes],
            "providers": [scope.provider_name for scope in requested_scopes],
            "capabilities": [scope.capability for scope in requested_scopes],
        }
        self._store(connection.execute(sql.SELECT_BREAKERS, parameters, binary=True).fetchall(), was_requested=True)

    def _store(self, rows: list[Any], *, was_requested: bool = False) -> None:
        wall = time.time()
        for breaker_values, server_time, tenant, provider, capability in rows:
            scope = parse_scope_key(tenant, provider, capability)
            if was_requested or self._breaker_cache.is_known(scope):
                self._breaker_cache.update(scope, shift_clock(parse_snapshot(breaker_values), wall - server_time))


def _parse_scope(payload: str) -> ProviderScope | None:
    """Return the scope that a notification is about; None for an invalid payload."""
    with suppress(ValueError):
        match json.loads(payload):
            case [str(tenant), str(provider), str(capability)]:
                return parse_scope_key(tenant, provider, capability)
    return None
