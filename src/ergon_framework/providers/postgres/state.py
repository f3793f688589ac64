"""The provider state in PostgreSQL: quota, breakers and keys that all processes share.

A provider is a third-party API. A quota limits the calls of a tenant in a window, a circuit breaker stops calls to a
failing provider, and an idempotency key stores the result of a call for its repetitions. Breaker states are cached, and
quota may be reserved in blocks, so that many calls need no round trip.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Final, Protocol, Self
from weakref import WeakSet

from ergon_framework.database.operation import Operation, Query
from ergon_framework.database.pool import ConnectionPool
from ergon_framework.database.revisions import is_compatible
from ergon_framework.errors import ConfigurationError, ErgonError
from ergon_framework.providers import circuit_breaker
from ergon_framework.providers.circuit_breaker import BreakerState, Permit
from ergon_framework.providers.errors import ProviderQuotaExceededError
from ergon_framework.providers.models import AttemptRecord
from ergon_framework.providers.postgres import sql
from ergon_framework.providers.postgres.attempt_writer import MetricsWriter
from ergon_framework.providers.postgres.breaker_cache import BreakerCache, BreakerListener
from ergon_framework.providers.postgres.keys import scope_key
from ergon_framework.providers.postgres.operations import (
    PostgresAdmitted,
    admit_operation,
    blocked_by,
    complete_operation,
    is_closed,
    lease_block_operation,
    quota_limits,
)
from ergon_framework.providers.postgres.quota_blocks import BlockPolicy, QuotaBlockCache, UnusedQuota, WindowLimits
from ergon_framework.providers.postgres.retention import LostReservation, reconcile_reservations
from ergon_framework.providers.state import (
    AdmissionRequest,
    AdmissionResult,
    AdmittedAttempt,
    AsyncProviderState,
    AttemptResult,
    ProviderScope,
    ProviderState,
)

_log = logging.getLogger(__name__)

#: The environment variable with the database address, if none is passed.
DSN_VARIABLE: Final = "ERGON_POSTGRES__DSN"
#: The schema revision with the provider tables that this release requires.
REQUIRED_REVISION: Final = "0002"
#: Maximum number of scopes for which a process holds quota blocks.
_MAX_BLOCK_CACHES: Final = 10_000
#: Seconds to release the quota blocks at shutdown.
_RELEASE_TIMEOUT_SECONDS: Final = 2.0


class AttemptWriter(Protocol):
    """A writer that stores attempts."""

    def record(self, row: AttemptRecord) -> None:
        """Take a row without waiting or raising."""

    def close(self, timeout: float) -> None:
        """Write the pending rows within *timeout* seconds."""


class PostgresProviderState(ProviderState, AsyncProviderState):
    """Quota, breakers and keys in the database at *dsn*; for threads and for asyncio, safe from any of them.

    Each operation is one round trip in one transaction, by the server's clock. With *blocks* a process reserves
    calls of the windows in advance, so that a call without a key needs no round trip at all. Attempts are written to
    the metrics tables by an internal writer, or by *writer*; both are closed with this object. With ``metrics=False``
    attempts are counted in ``dropped`` and not written. A forked child has its own connections, blocks, listener and
    writer.
    """

    #: The connection pool ends every round trip at its timeout.
    is_self_timed = True

    def __init__(
        self,
        dsn: str | None = None,
        *,
        blocks: BlockPolicy | None = None,
        writer: AttemptWriter | None = None,
        metrics: bool = True,
        connections: int = 8,
    ) -> None:
        database_address = dsn or os.environ.get(DSN_VARIABLE)
        if not database_address:
            raise ConfigurationError(f"provider state has no database address: set {DSN_VARIABLE} or pass dsn=…")
        self._pool = ConnectionPool(database_address, max_size=connections)
        self._block_policy = blocks
        self._writer = writer
        self._own_writer = MetricsWriter(database_address) if metrics and writer is None else None
        #: Attempts that were recorded without a writer.
        self._unwritten_count = 0
        self._reset()
        _instances.add(self)

    def _reset(self) -> None:
        """Set the initial state, also in a forked child: connections and blocks of the parent stay the parent's."""
        self._lock = threading.Lock()
        self._breaker_cache = BreakerCache()
        self._block_caches: dict[tuple[ProviderScope, WindowLimits], QuotaBlockCache] = {}
        #: Ended blocks whose unused calls are not yet released in the database.
        self._unreleased: list[UnusedQuota] = []
        self._listener: BreakerListener | None = None
        self._process_name = f"{socket.gethostname()[:100]}:{os.getpid()}"

    # -- open and close ---------------------------------------------------------------------------------

    def open(self) -> Self:
        """Check that the database has the required tables; optional."""
        try:
            self._pool.run(_check_schema())
        except BaseException:
            self.close()
            raise
        return self

    async def open_async(self) -> Self:
        try:
            await self._pool.run_async(_check_schema())
        except BaseException:
            await self.close_async()
            raise
        return self

    @property
    def dropped(self) -> int:
        """Number of attempts that were recorded and stored nowhere."""
        return self._unwritten_count + (0 if self._own_writer is None else self._own_writer.dropped)

    def close(self, timeout: float = _RELEASE_TIMEOUT_SECONDS) -> None:
        """Release the blocks, close connections and write pending attempts; each within *timeout* seconds.

        A later operation opens connections again, and a later attempt is written by a new thread.
        """
        self._stop_listener()
        if self._block_caches or self._unreleased:
            with suppress(ErgonError):
                self._pool.run(self._release_all_blocks(), timeout_seconds=timeout)
        self._pool.close()
        self._close_writer(timeout)

    async def close_async(self) -> None:
        self._stop_listener()
        if self._block_caches or self._unreleased:
            with suppress(ErgonError):
                await self._pool.run_async(self._release_all_blocks(), timeout_seconds=_RELEASE_TIMEOUT_SECONDS)
        await self._pool.close_async()
        await asyncio.to_thread(self._close_writer)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await self.open_async()

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    def _stop_listener(self) -> None:
        with self._lock:
            breaker_listener, self._listener = self._listener, None
        if breaker_listener is not None:
            breaker_listener.stop()

    def _close_writer(self, timeout: float = _RELEASE_TIMEOUT_SECONDS) -> None:
        if self._writer is not None:
            self._writer.close(timeout)
        if self._own_writer is not None:
            self._own_writer.flush(timeout)

    # -- the ProviderState interface ----------------------------------------------------------------------

    def admit(self, request: AdmissionRequest) -> AdmissionResult:
        admitted = self._admit_locally(request)
        return (
            self._pool.run(self._admit_operation(request), timeout_seconds=request.timeout)
            if admitted is None
            else admitted
        )

    async def admit_async(self, request: AdmissionRequest) -> AdmissionResult:
        admitted = self._admit_locally(request)
        return (
            await self._pool.run_async(self._admit_operation(request), timeout_seconds=request.timeout)
            if admitted is None
            else admitted
        )

    def complete(self, admitted: AdmittedAttempt, result: AttemptResult) -> BreakerState | None:
        operation = self._complete_attempt(admitted, result)
        return None if operation is None else self._pool.run(operation, timeout_seconds=result.timeout)

    async def complete_async(self, admitted: AdmittedAttempt, result: AttemptResult) -> BreakerState | None:
        operation = self._complete_attempt(admitted, result)
        return None if operation is None else await self._pool.run_async(operation, timeout_seconds=result.timeout)

    def blocked_until(self, scope: ProviderScope) -> float | None:
        scope_key(scope)
        self._start_listener()
        state = self._breaker_cache.get(scope)
        return None if state is None else circuit_breaker.blocked_until(state)

    def record(self, row: AttemptRecord) -> None:
        writer = self._writer or self._own_writer
        if writer is None:
            self._unwritten_count += 1
        else:
            writer.record(row)

    def reconcile(self) -> list[LostReservation]:
        """Mark and return the reservations that their owners let expire; any process may call it at intervals."""
        return self._pool.run(reconcile_reservations())

    async def reconcile_async(self) -> list[LostReservation]:
        return await self._pool.run_async(reconcile_reservations())

    # -- before an attempt --------------------------------------------------------------------------------

    def _admit_locally(self, request: AdmissionRequest) -> AdmissionResult | None:
        """Admit a call that needs no round trip: blocks exist, no key is to be claimed, the breaker is closed.

        A breaker that is known to be open rejects the call here too, if quota would have admitted it.
        """
        scope_key(request.scope)  # validates the names
        self._start_listener()
        if self._block_policy is None or (request.idempotency_key is not None and request.attempt_number == 1):
            return None
        breaker_listener, state, clock = self._listener, self._breaker_cache.get(request.scope), time.monotonic()
        if state is None or breaker_listener is None or not breaker_listener.is_fresh(clock):
            return None
        block_cache = self._get_block_cache(request)
        if not is_closed(state):
            rejection = blocked_by(state, request.now)
            if (
                rejection is None
                or request.idempotency_key is not None
                or not (block_cache is None or block_cache.has_quota(clock))
            ):
                return None
            raise circuit_breaker.circuit_open_error(rejection, request.now)
        permit = Permit(state.generation)
        if block_cache is None:
            return PostgresAdmitted(request, permit)
        reservation = block_cache.take(clock)
        return (
            None
            if reservation is None
            else PostgresAdmitted(request, permit, block_cache=block_cache, block=reservation)
        )

    def _admit_operation(self, request: AdmissionRequest) -> Operation[AdmissionResult]:
        """Admit a call with a round trip: it is taken from a block if there is one, else from the windows."""
        limits, block_cache = quota_limits(request.policy.quota), self._get_block_cache(request)
        reservation = None if block_cache is None else (yield from self._take_from_block(request, block_cache))
        if reservation is not None and request.idempotency_key is None:
            state = self._breaker_cache.get(request.scope)
            if state is not None and is_closed(state):
                return PostgresAdmitted(request, Permit(state.generation), block_cache=block_cache, block=reservation)
        try:
            admitted = yield from admit_operation(
                request,
                limits=limits if reservation is None else None,
                process_name=self._process_name,
                breaker_cache=self._breaker_cache,
            )
        except BaseException:
            # Also if the outcome is unknown: without a permit the call is not made, so it does not count.
            if block_cache is not None and reservation is not None:
                block_cache.refund(reservation)
            raise
        if block_cache is not None and reservation is not None:
            if not isinstance(admitted, PostgresAdmitted):
                block_cache.refund(reservation)
            else:
                admitted.block_cache, admitted.block = block_cache, reservation
        return admitted

    def _take_from_block(self, request: AdmissionRequest, block_cache: QuotaBlockCache) -> Operation[int | None]:
        """Take a call from the block, or from the next block if it is empty; return None if the windows decide."""
        reservation = block_cache.take(time.monotonic())
        if reservation is not None or self._block_policy is None:
            return reservation
        must_renew, unused = block_cache.start_renewal()
        if not must_renew:
            # Another call fetches the next block; this one is taken from the windows instead of waiting for it.
            return None
        leased_block = None
        try:
            leased_block = yield from lease_block_operation(
                request,
                block_cache,
                unused,
                policy=self._block_policy,
                process_name=self._process_name,
                breaker_cache=self._breaker_cache,
            )
        except BaseException:
            if unused is not None:
                self._unreleased.append(unused)
            raise
        finally:
            block_cache.set_next(None if isinstance(leased_block, ProviderQuotaExceededError) else leased_block)
        if isinstance(leased_block, ProviderQuotaExceededError):
            # The key is checked before the quota: its result may be stored already.
            if request.idempotency_key is None:
                raise leased_block
            return None
        return block_cache.take(time.monotonic())

    def _get_block_cache(self, request: AdmissionRequest) -> QuotaBlockCache | None:
        """Return the block cache of the scope; None if the scope uses no blocks."""
        limits = None if self._block_policy is None else quota_limits(request.policy.quota)
        if limits is None:
            return None
        cache_key = request.scope, limits
        block_cache = self._block_caches.get(cache_key)
        if block_cache is None:
            with self._lock:
                if len(self._block_caches) >= _MAX_BLOCK_CACHES:
                    return None
                block_cache = self._block_caches.setdefault(cache_key, QuotaBlockCache(request.scope, limits))
        return block_cache

    # -- after an attempt ---------------------------------------------------------------------------------

    def _complete_attempt(
        self, admitted: AdmittedAttempt, result: AttemptResult
    ) -> Operation[BreakerState | None] | None:
        if not isinstance(admitted, PostgresAdmitted):
            raise ConfigurationError("the attempt was admitted by another state store: complete it in that store")
        error = result.error
        if admitted.block_cache is not None and admitted.block is not None and error is not None and not error.sent:
            admitted.block_cache.refund(admitted.block)
            admitted.block = None
        return complete_operation(admitted, result, self._breaker_cache)

    # -- background work ------------------------------------------------------------------------------------

    def _start_listener(self) -> None:
        """Start the listener on first use and not earlier, because threads do not survive a fork."""
        if self._listener is None:
            with self._lock:
                if self._listener is None:
                    self._listener = BreakerListener(self._pool, self._breaker_cache, self._release_expired_blocks)

    def _release_expired_blocks(self) -> Operation[None]:
        """Release expired blocks, because no further call may ask for the next ones."""
        clock = time.monotonic()
        expired = [block_cache.pop_expired(clock) for block_cache in list(self._block_caches.values())]
        self._unreleased += [unused for unused in expired if unused is not None]
        yield from self._release_pending()

    def _release_all_blocks(self) -> Operation[None]:
        with self._lock:
            block_caches, self._block_caches = self._block_caches, {}
        self._unreleased += [
            unused for block_cache in block_caches.values() if (unused := block_cache.drain()) is not None
        ]
        yield from self._release_pending()

    def _release_pending(self) -> Operation[None]:
        while self._unreleased:
            unused = self._unreleased[0]
            yield Query(sql.RELEASE_RESERVATION, unused._asdict())
            with suppress(ValueError):
                self._unreleased.remove(unused)


def _check_schema() -> Operation[None]:
    rows = yield Query("select version_num from ergon.revision")
    revision: Any = rows[0][0] if rows else None
    if not is_compatible(revision, REQUIRED_REVISION):
        raise ConfigurationError(
            f"database schema has revision {revision or 'none'}, needed is {REQUIRED_REVISION}; run: ergon db upgrade"
        )


# -- forks --------------------------------------------------------------------------------------------

_instances: Final[WeakSet[PostgresProviderState]] = WeakSet()


def _reset_instances() -> None:
    for state in list(_instances):
        state._reset()  # noqa: SLF001 - the class's own module


os.register_at_fork(after_in_child=_reset_instances)
