"""Replicator: copies the facts of another zone into this one, over the network, for as long as it runs.

A zone is a site with its own store, the boundary. The replicator runs in the receiving zone and pulls, so a zone never
gives another zone write access. All decisions are in ``facts/replication.py``, whose script a driver runs on threads or
asyncio. Metrics and logs report its lag, what it has copied, and each change of its state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from functools import partial
from typing import Final

from ergon_framework.engine.aio import AsyncioDriver
from ergon_framework.engine.scheduler import Scheduler
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.artifact_copy import CopyCalls, CopyProgress
from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.model import ArtifactReference, StoredArtifact, ZonePair, check_zone
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replica_state import ReplicaState, ReplicaStatus
from ergon_framework.facts.replication import Replication, ReplicationCalls
from ergon_framework.telemetry import logs, names
from ergon_framework.telemetry.metrics import LabelLimiter, LoopMetrics, Numbers, get_registry
from ergon_framework.telemetry.names import LIBRARY, Event, Field
from ergon_framework.telemetry.redaction import mask_credentials

log: Final = logging.getLogger(f"{LIBRARY}.facts")


class ReplicaMetrics(LoopMetrics):
    """The metrics of one replicator, for the metrics registry; readable from any thread."""

    def __init__(self, name: str, *, label_limiter: LabelLimiter, replication: Replication) -> None:
        # The steps are those of a handler; a replicator has none.
        super().__init__(name, steps=(), success_steps=("", ""), label_limiter=label_limiter)
        self._replication = replication

    def counters(self) -> Numbers:
        replication = self._replication
        zones = self._zones
        artifacts, size = replication.copied_artifacts
        numbers: Numbers = {
            (names.REPLICATED_FACTS.name, zones): replication.forwarded_count,
            (names.REPLICATED_ARTIFACTS.name, zones): artifacts,
            (names.REPLICATED_BYTES.name, zones): size,
        }
        for status, times in list(replication.failure_counts.items()):
            numbers[names.REPLICATION_ERRORS.name, (*zones, status.value)] = times
        return numbers

    def gauges(self) -> Numbers:
        state, zones = self._replication.state(), self._zones
        numbers: Numbers = {(names.REPLICATION_STATUS.name, (*zones, state.status.value)): 1}
        if state.lag is not None:
            numbers[names.REPLICATION_LAG.name, zones] = state.lag.facts
            numbers[names.REPLICATION_LAG_BYTES.name, zones] = state.lag.bytes
            numbers[names.REPLICATION_LAG_SECONDS.name, zones] = state.lag.seconds
        return numbers

    @property
    def _zones(self) -> tuple[str, ...]:
        return self._label_limiter(names.REPLICATION_LAG, tuple(self._replication.state().pair))


@contextmanager
def track_metrics(replication: Replication) -> Iterator[None]:
    """Register the metrics of *replication* until the context exits; its counters are kept afterwards."""
    registry = get_registry()
    metrics = registry.register(partial(ReplicaMetrics, replication=replication), replication.state().name)
    try:
        yield
    finally:
        registry.close(metrics)


_LEVELS: Final = {
    ReplicaStatus.FOLLOWING: logging.INFO,
    ReplicaStatus.STARTING: logging.INFO,
    ReplicaStatus.STOPPED: logging.INFO,
}


def log_state_change(state: ReplicaState) -> None:
    """Log a state change of a replicator, with the action expected from the operator: once for each change."""
    level = logging.ERROR if state.needs_operator else _LEVELS.get(state.status, logging.WARNING)
    problem = state.problem if state.status not in _LEVELS else None
    fields = {
        Field.REPLICA: state.name,
        Field.FROM_ZONE: state.pair.from_zone,
        Field.TO_ZONE: state.pair.to_zone,
        Field.STATUS: state.status.value,
        Field.OFFSET: state.offset,
        Field.MESSAGE_ID: None if problem is None else problem.message_id,
        Field.REASON: None if problem is None else mask_credentials(problem.reason),
        Field.ACTION: None if problem is None else problem.action,
    }
    logs.log_event(
        level, Event.REPLICATION_HALTED if state.needs_operator else Event.REPLICATION_CHANGED, fields, to=log
    )


# -- replicator -------------------------------------------------------------------------------------


class _Replicator:
    """The common part of the sync and async variants: everything except how stores are called."""

    def __init__(
        self,
        pair: ZonePair,
        *,
        name: str | None,
        policy: ReplicationPolicy | None,
        on_change: Callable[[ReplicaState], None] | None,
    ) -> None:
        check_zone("from_zone", pair.from_zone)
        check_zone("to_zone", pair.to_zone)
        self.pair = pair
        self.name = name or pair.to_zone
        self.policy = policy or ReplicationPolicy()
        self._on_change = on_change
        self._lock = threading.Lock()
        self._running: tuple[Scheduler, Replication] | None = None
        self._stop_count = 0
        self._last_state = ReplicaState(
            name=self.name,
            pair=pair,
            status=ReplicaStatus.STARTING,
            since=time.time(),
            offset=0,
            confirmed=0,
            lag=None,
        )

    def state(self) -> ReplicaState:
        """Return the current state; callable from any thread."""
        running = self._running
        return self._last_state if running is None else running[1].state()

    @property
    def is_caught_up(self) -> bool:
        """Whether the source had no more facts at the last fetch."""
        running = self._running
        return running is not None and running[1].is_caught_up

    def stop(self) -> None:
        """Stop, from any thread: running calls get the policy's ``drain`` seconds; a second stop allows none."""
        with self._lock:
            self._stop_count += 1
            running = self._running
        if running is not None:
            running[0].stop()

    @contextmanager
    def _replication(self, scheduler: Scheduler, calls: ReplicationCalls) -> Iterator[Replication]:
        replication = Replication(
            self.pair, calls, name=self.name, policy=self.policy, scheduler=scheduler, on_change=self._handle_change
        )
        with self._lock:
            if self._running is not None:
                raise ConfigurationError(
                    f"the replicator {self.name!r} of {self.pair.from_zone!r} is already running; run it only once"
                )
            self._running = scheduler, replication
            early_stops = self._stop_count
        # Stops requested before the run are applied now.
        for _ in range(early_stops):
            scheduler.stop()
        try:
            with track_metrics(replication):
                yield replication
        finally:
            with self._lock:
                self._last_state, self._running, self._stop_count = replication.state(), None, 0

    def _handle_change(self, state: ReplicaState) -> None:
        log_state_change(state)
        if self._on_change is not None:
            self._on_change(state)


class Replicator(_Replicator):
    """Copies the facts of *pair* from *source*, the other zone's boundary, to *destination*, the boundary of this zone.

    It works on threads. *name* is its reader name at the source, by default the receiving zone: the source keeps what
    that reader has not confirmed. *on_change* is called on each change of state, inside the script; it must not block.
    """

    def __init__(
        self,
        source: Boundary,
        destination: Boundary,
        pair: ZonePair,
        *,
        name: str | None = None,
        policy: ReplicationPolicy | None = None,
        on_change: Callable[[ReplicaState], None] | None = None,
        driver: Callable[[int], ThreadDriver] = ThreadDriver,
    ) -> None:
        super().__init__(pair, name=name, policy=policy, on_change=on_change)
        self._source = source
        self._driver = driver
        self._calls = ReplicationCalls(
            fetch_facts=source.fetch_facts,
            confirm_receipt=source.confirm_receipt,
            list_logs=source.list_logs,
            last_offset=destination.last_offset,
            get_fact=destination.get_fact,
            forward_facts=destination.forward_facts,
            artifacts=CopyCalls(
                partial(destination.uploaded_bytes, zone=pair.from_zone),
                partial(_copy, source, destination, zone=pair.from_zone),
            ),
        )

    def run(self) -> None:
        """Copy until stopped."""
        # One thread runs the script; its calls run on threads of their own.
        driver = self._driver(1)
        with self._replication(driver, self._calls) as replication:
            unlisten = self._source.listen(replication.wake)
            try:
                driver.run(replication.run())
            finally:
                unlisten()


class AsyncReplicator(_Replicator):
    """The same as ``Replicator``, on asyncio."""

    def __init__(
        self,
        source: AsyncBoundary,
        destination: AsyncBoundary,
        pair: ZonePair,
        *,
        name: str | None = None,
        policy: ReplicationPolicy | None = None,
        on_change: Callable[[ReplicaState], None] | None = None,
        driver: Callable[[], AsyncioDriver] = AsyncioDriver,
    ) -> None:
        super().__init__(pair, name=name, policy=policy, on_change=on_change)
        self._source = source
        self._driver = driver
        self._calls = ReplicationCalls(
            fetch_facts=source.fetch_facts_async,
            confirm_receipt=source.confirm_receipt_async,
            list_logs=source.list_logs_async,
            last_offset=destination.last_offset_async,
            get_fact=destination.get_fact_async,
            forward_facts=destination.forward_facts_async,
            artifacts=CopyCalls(
                partial(destination.uploaded_bytes_async, zone=pair.from_zone),
                partial(_copy_async, source, destination, zone=pair.from_zone),
            ),
        )

    async def run(self) -> None:
        """Copy until stopped, or until the task is cancelled."""
        driver = self._driver()
        with self._replication(driver, self._calls) as replication:
            unlisten = self._source.listen(replication.wake)
            try:
                await driver.run(replication.run())
            finally:
                unlisten()


# -- copying one artifact ---------------------------------------------------------------------------


def _copy(
    source: Boundary,
    destination: Boundary,
    reference: ArtifactReference,
    begin: int,
    progress: CopyProgress,
    *,
    zone: str,
) -> None:
    """Copy an artifact from byte *begin* on; an error of reading replaces the destination's error that it causes.

    ``ArtifactCopier``, which started the copy, reads *progress*: the bytes so far, and whether this call has exited.
    """
    expected = StoredArtifact(reference.digest, reference.size)
    location = reference.bucket, reference.key
    put = partial(destination.put_object, *location, expected=expected, begin=begin, zone=zone)
    try:
        if begin == reference.size:
            put(())
            return
        with closing(progress.track_chunks(source.get_object(*location, begin=begin, zone=zone))) as chunks:
            put(chunks)
    except Exception:
        # Whatever error the destination raises, a failed read is the cause.
        if progress.read_error is not None:
            raise progress.read_error  # noqa: B904 - the read error replaces the write error
        raise
    finally:
        progress.exited = True


async def _copy_async(
    source: AsyncBoundary,
    destination: AsyncBoundary,
    reference: ArtifactReference,
    begin: int,
    progress: CopyProgress,
    *,
    zone: str,
) -> None:
    expected = StoredArtifact(reference.digest, reference.size)
    location = reference.bucket, reference.key
    put = partial(destination.put_object_async, *location, expected=expected, begin=begin, zone=zone)
    try:
        if begin == reference.size:
            await put(())
            return
        async with aclosing(
            _track_chunks(source.get_object_async(*location, begin=begin, zone=zone), progress)
        ) as chunks:
            await put(chunks)
    except Exception:
        if progress.read_error is not None:
            raise progress.read_error  # noqa: B904 - as in _copy
        raise
    finally:
        progress.exited = True


async def _track_chunks(chunks: AsyncIterator[bytes], progress: CopyProgress) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in chunks:
            yield progress.add_chunk(chunk)
    except Exception as error:
        progress.read_error = error
        raise
