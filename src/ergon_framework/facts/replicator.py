"""Replicator: copies the facts of another zone into this one, over the line between them, for as long as it runs.

It runs in the zone that receives, and pulls: a zone needs to let nobody in who writes. All decisions are in
``facts/replicate.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing, contextmanager
from functools import partial

from ergon_framework.engine.drivers.aio import Asyncio
from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.engine.slots import Slots
from ergon_framework.errors import ConfigurationError
from ergon_framework.facts import replica_tally as tally
from ergon_framework.facts.boundary import AsyncBoundary, Boundary
from ergon_framework.facts.carry import CopyMeans, Progress
from ergon_framework.facts.model import ArtifactReference, Pair, Stored, check_zone
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replica import ReplicaState, Status
from ergon_framework.facts.replicate import Means, Replication


class _Replicator:
    """What both variants share: everything but how stores are called."""

    def __init__(
        self,
        pair: Pair,
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
        self._running: tuple[Slots, Replication] | None = None
        self._stops = 0
        self._last = ReplicaState(
            name=self.name,
            pair=pair,
            status=Status.STARTING,
            since=time.time(),
            offset=0,
            confirmed=0,
            lag=None,
        )

    def state(self) -> ReplicaState:
        """How it is; any thread may ask."""
        running = self._running
        return self._last if running is None else running[1].state()

    @property
    def caught_up(self) -> bool:
        """Whether the source had nothing more when it was last asked."""
        running = self._running
        return running is not None and running[1].caught_up

    def stop(self) -> None:
        """Have it end, from any thread: calls under way have the policy's ``drain`` seconds; asked again, none."""
        with self._lock:
            self._stops += 1
            running = self._running
        if running is not None:
            running[0].stop()

    @contextmanager
    def _entered(self, slots: Slots, means: Means) -> Iterator[Replication]:
        replication = Replication(
            self.pair, means, name=self.name, policy=self.policy, slots=slots, changed=self._changed
        )
        with self._lock:
            if self._running is not None:
                raise ConfigurationError(
                    f"the replicator {self.name!r} of {self.pair.from_zone!r} is running already; one is enough"
                )
            self._running = slots, replication
            early = self._stops
        # A stop that came before it ran is not forgotten.
        for _ in range(early):
            slots.stop()
        try:
            with tally.counted(replication):
                yield replication
        finally:
            with self._lock:
                self._last, self._running, self._stops = replication.state(), None, 0

    def _changed(self, state: ReplicaState) -> None:
        tally.tell(state)
        if self._on_change is not None:
            self._on_change(state)


class Replicator(_Replicator):
    """Copies the facts of *pair* from *source*, the other zone's boundary, to *destination*, this zone's own.

    It works on threads. *name* is the reader that it is at the source, by default the receiving zone: what it has not
    confirmed is kept there. *on_change* is told of each change of state, where the decision is made; it must not wait.
    """

    def __init__(
        self,
        source: Boundary,
        destination: Boundary,
        pair: Pair,
        *,
        name: str | None = None,
        policy: ReplicationPolicy | None = None,
        on_change: Callable[[ReplicaState], None] | None = None,
        driver: Callable[[int], Threads] = Threads,
    ) -> None:
        super().__init__(pair, name=name, policy=policy, on_change=on_change)
        self._source = source
        self._driver = driver
        self._means = Means(
            fetch_facts=source.fetch_facts,
            confirm_receipt=source.confirm_receipt,
            survey=source.survey,
            end_of=destination.end_of,
            get_fact=destination.get_fact,
            forward_facts=destination.forward_facts,
            artifacts=CopyMeans(
                partial(destination.received, zone=pair.from_zone),
                partial(_copy, source, destination, zone=pair.from_zone),
            ),
        )

    def run(self) -> None:
        """Copy until it is stopped."""
        driver = self._driver(1)
        with self._entered(driver, self._means) as replication:
            unlisten = self._source.listen(replication.wake)
            try:
                driver.run(replication.run())
            finally:
                unlisten()


class AsyncReplicator(_Replicator):
    """The same on asyncio."""

    def __init__(
        self,
        source: AsyncBoundary,
        destination: AsyncBoundary,
        pair: Pair,
        *,
        name: str | None = None,
        policy: ReplicationPolicy | None = None,
        on_change: Callable[[ReplicaState], None] | None = None,
        driver: Callable[[], Asyncio] = Asyncio,
    ) -> None:
        super().__init__(pair, name=name, policy=policy, on_change=on_change)
        self._source = source
        self._driver = driver
        self._means = Means(
            fetch_facts=source.fetch_facts_async,
            confirm_receipt=source.confirm_receipt_async,
            survey=source.survey_async,
            end_of=destination.end_of_async,
            get_fact=destination.get_fact_async,
            forward_facts=destination.forward_facts_async,
            artifacts=CopyMeans(
                partial(destination.received_async, zone=pair.from_zone),
                partial(_copy_async, source, destination, zone=pair.from_zone),
            ),
        )

    async def run(self) -> None:
        """Copy until it is stopped, or its task is cancelled."""
        driver = self._driver()
        with self._entered(driver, self._means) as replication:
            unlisten = self._source.listen(replication.wake)
            try:
                await driver.run(replication.run())
            finally:
                unlisten()


# -- one artifact, from the one to the other ------------------------------------------------------------


def _copy(
    source: Boundary, destination: Boundary, reference: ArtifactReference, begin: int, progress: Progress, *, zone: str
) -> None:
    expected = Stored(reference.digest, reference.size)
    place = reference.bucket, reference.key
    put = partial(destination.put_object, *place, expected=expected, begin=begin, zone=zone)
    try:
        if begin == reference.size:
            put(())
            return
        with closing(progress.through(source.get_object(*place, begin=begin, zone=zone))) as pieces:
            put(pieces)
    except Exception:
        # Whatever the destination has made of it: the reading has failed.
        if progress.unread is not None:
            raise progress.unread  # noqa: B904 - the one is the other
        raise
    finally:
        progress.over = True


async def _copy_async(
    source: AsyncBoundary,
    destination: AsyncBoundary,
    reference: ArtifactReference,
    begin: int,
    progress: Progress,
    *,
    zone: str,
) -> None:
    expected = Stored(reference.digest, reference.size)
    place = reference.bucket, reference.key
    put = partial(destination.put_object_async, *place, expected=expected, begin=begin, zone=zone)
    try:
        if begin == reference.size:
            await put(())
            return
        async with aclosing(_through(source.get_object_async(*place, begin=begin, zone=zone), progress)) as pieces:
            await put(pieces)
    except Exception:
        if progress.unread is not None:
            raise progress.unread  # noqa: B904 - as above
        raise
    finally:
        progress.over = True


async def _through(pieces: AsyncIterator[bytes], progress: Progress) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in pieces:
            yield progress.moved(piece)
    except Exception as error:
        progress.unread = error
        raise
