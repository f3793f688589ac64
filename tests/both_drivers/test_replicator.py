"""The replicator on threads and on asyncio: the same facts, artifacts and states, with planned connection faults."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial

import pytest

from ergon_framework.diagnostics import DocPage
from ergon_framework.engine.threads import ThreadDriver
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.facts.concurrent_calls import MAX_ABANDONED_CALLS
from ergon_framework.facts.errors import InvalidFactError, OffsetAhead
from ergon_framework.facts.model import ArtifactReference, BoundarySide, Cursor, Envelope, Fact, ZonePair
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replica_state import ReplicaStatus
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import get_registry
from ergon_framework.testing.virtual_time import VirtualTime, run_virtual
from tests.both_drivers.harness import VARIANTS
from tests.log_events import get_event

pytestmark = pytest.mark.spec("FAC-17")

PAIR = ZonePair("plant", "hub")
POLICY = ReplicationPolicy(batch=8, timeout=5.0, poll=1.0, survey=5.0, cap=2.0, drain=1.0, copies=2)
HOUR_SECONDS = 3600.0


class FaultyStore:
    """A store behind a connection on which call n of a method meets fault n of its list."""

    def __init__(self, store, faults):
        self._store = store
        self._faults = {name: list(planned) for name, planned in faults.items()}
        self.calls = Counter()
        self.sleep = None
        #: Bytes after which an artifact is interrupted or stalls.
        self.interruptions = []
        self.sent = 0

    def __getattr__(self, name):
        method_name = name.removesuffix("_async")
        method = getattr(self._store, method_name)
        if method_name in {"epoch", "capabilities", "listen"}:
            return method
        return partial(self._call_async if name != method_name else self._call, method_name, method)

    def _fault(self, name):
        self.calls[name] += 1
        planned = self._faults.get(name, [])
        return planned[self.calls[name] - 1] if self.calls[name] <= len(planned) else None

    def _call(self, name, method, *args, **kwargs):
        fault = self._fault(name)
        if fault == "hangs":
            self.sleep(HOUR_SECONDS)
        if fault == "before":
            raise ConnectionLostError("planned")
        value = method(*args, **kwargs)
        if fault == "after":
            raise ConnectionLostError("planned")
        return value

    async def _call_async(self, name, method, *args, **kwargs):
        fault = self._fault(name)
        if fault == "hangs":
            await asyncio.sleep(HOUR_SECONDS)
        if fault == "before":
            raise ConnectionLostError("planned")
        if name == "put_object":
            value = await self._store.put_object_async(*args, **kwargs)
        else:
            value = method(*args, **kwargs)
        if fault == "after":
            raise ConnectionLostError("planned")
        return value

    def get_object(self, bucket, key, *, begin=0, zone=""):
        length, kind = self.interruptions.pop(0) if self.interruptions else (None, None)
        yield from self._read_chunks(bucket, key, begin, length, zone)
        if kind == "hangs":
            self.sleep(HOUR_SECONDS)
        if kind is not None:
            raise ConnectionLostError("planned")

    async def get_object_async(self, bucket, key, *, begin=0, zone=""):
        length, kind = self.interruptions.pop(0) if self.interruptions else (None, None)
        for chunk in self._read_chunks(bucket, key, begin, length, zone):
            yield chunk
        if kind == "hangs":
            await asyncio.sleep(HOUR_SECONDS)
        if kind is not None:
            raise ConnectionLostError("planned")

    def _read_chunks(self, bucket, key, begin, length, zone):
        data = b"".join(self._store.get_object(bucket, key, begin=begin, zone=zone))[:length]
        self.sent += len(data)
        for start in range(0, len(data), 100):
            yield data[start : start + 100]


class Zones:
    """Two stores, a connection to each, and a replicator between them that runs in virtual time."""

    def __init__(self, variant, *, source=None, destination=None):
        self.variant = variant
        self.plant, self.hub = MemoryBoundary(side=BoundarySide.INNER), MemoryBoundary(side=BoundarySide.OUTER)
        self.source, self.destination = FaultyStore(self.plant, source or {}), FaultyStore(self.hub, destination or {})
        self.states = []
        self.scheduled = []

    def append(self, *sizes):
        """Append one fact for each artifact size; None means no artifact."""
        end = self.plant.last_offset(PAIR)
        for number, size in enumerate(sizes, 0 if end is None else end.offset):
            object_value = {"n": number}
            if size is not None:
                stored_object = self.plant.put_object("of-plant", str(number), [b"%d," % number * size][:1])
                object_value = ArtifactReference(
                    bucket="of-plant", key=str(number), digest=stored_object.digest, size=stored_object.size
                ).to_object()
            envelope = Envelope(message_id=f"m-{number}", from_zone="plant", to_zone="hub", produced_at_unix_ms=0)
            self.plant.append_fact(envelope, Fact.create("s", "p", object_value))

    def run(self, seconds=60.0, policy=POLICY):
        """Run the replicator for *seconds* and stop it."""
        replicator_class = Replicator if self.variant == "threads" else AsyncReplicator
        create_replicator = partial(
            replicator_class, self.source, self.destination, PAIR, policy=policy, on_change=self.states.append
        )
        if self.variant == "threads":
            time = VirtualTime()
            self.source.sleep = self.destination.sleep = time.sleep
            replicator = create_replicator(driver=partial(ThreadDriver, waiting=time))
            for delay, action in [*self.scheduled, (seconds, lambda _: replicator.stop())]:
                time.call_at(delay, partial(action, replicator))
            replicator.run()
            time.run_until_idle()
        else:

            async def main():
                replicator = create_replicator()
                for delay, action in [*self.scheduled, (seconds, lambda _: replicator.stop())]:
                    asyncio.get_running_loop().call_later(delay, action, replicator)
                await replicator.run()
                return replicator

            replicator = run_virtual(main())
        return replicator

    @property
    def stores_are_equal(self):
        """Whether both stores have the same facts and the hub has their artifacts."""
        plant_facts, hub_facts = (store.fetch_facts("test", PAIR, 10_000) for store in (self.plant, self.hub))
        for stored in hub_facts:
            if (artifact := stored.fact.artifact) is not None:
                plant_bytes, hub_bytes = (
                    b"".join(store.get_object(artifact.bucket, artifact.key, zone=PAIR.from_zone))
                    for store in (self.plant, self.hub)
                )
                assert plant_bytes == hub_bytes
        facts = [
            [(stored.offset, stored.epoch, stored.digest) for stored in facts] for facts in (plant_facts, hub_facts)
        ]
        return facts[0] == facts[1]


@pytest.fixture(params=VARIANTS)
def zones(request):
    return partial(Zones, request.param)


@pytest.mark.parametrize("fault", ["before", "after", "hangs"])
@pytest.mark.parametrize(
    "side, name",
    [
        ("source", "fetch_facts"),
        ("source", "confirm_receipt"),
        ("source", "list_logs"),
        ("destination", "last_offset"),
        ("destination", "uploaded_bytes"),
        ("destination", "put_object"),
        ("destination", "forward_facts"),
    ],
)
def test_a_failed_call_is_retried_and_nothing_is_lost_or_doubled(zones, side, name, fault):
    world = zones(**{side: {name: [fault, None, fault]}})
    world.append(*[None, 10, 0] * 10)
    replicator = world.run()
    assert world.stores_are_equal
    assert world.plant.get_cursor("hub", PAIR).offset == 30
    assert replicator.state().status is ReplicaStatus.STOPPED
    assert replicator.state().offset == replicator.state().confirmed == 30
    assert getattr(world, side).calls[name] > 1


@pytest.mark.parametrize("kind", ["breaks", "hangs"])
def test_an_interrupted_or_stalled_artifact_is_resumed(zones, kind):
    world = zones()
    world.append(None, 1000, None)
    world.source.interruptions = [(700, kind), (500, kind)]
    world.run()
    assert world.stores_are_equal
    # A thread that hangs keeps its bytes: the store in memory does not have them and receives all of them again.
    if (world.variant, kind) != ("threads", "hangs"):
        assert world.source.sent == world.plant.fetch_facts("test", PAIR, 3)[1].fact.artifact.size


def test_hanging_calls_do_not_accumulate(zones):
    """A thread cannot be killed: after some hanging calls no new one is started. A hanging task is cancelled."""
    world = zones(source={"fetch_facts": ["hangs"] * 1000})
    world.append(None)
    world.run(seconds=HOUR_SECONDS / 2)
    calls = world.source.calls["fetch_facts"]
    assert (calls == MAX_ABANDONED_CALLS) if world.variant == "threads" else (calls > 2 * MAX_ABANDONED_CALLS)


def test_new_facts_are_copied_on_a_notification_of_the_store(zones):
    world = zones()
    world.append(None)
    seen = []
    world.scheduled = [
        (20.5, lambda _: world.append(None, None)),
        (20.6, lambda replicator: seen.append(replicator.state().offset)),
    ]
    world.run(policy=POLICY.model_copy(update={"poll": 1000.0}))
    assert seen == [3]
    assert world.stores_are_equal


def test_a_halt_is_logged_once_with_the_remedy_and_visible_in_metrics(zones, caplog):
    world = zones()
    world.append(None, None)
    # Another source was restored from a backup: the same ids at other offsets.
    older = MemoryBoundary(side=BoundarySide.INNER)
    world.plant, original = older, world.plant
    world.append(None)
    world.hub.forward_facts(older.fetch_facts("x", PAIR, 10))
    world.plant = original
    samples = []
    world.scheduled = [(30.0, lambda _: samples.extend(get_registry().read(names.REPLICATION_STATUS)))]
    with caplog.at_level(logging.INFO, logger="ergon_framework.facts"):
        replicator = world.run()
    assert world.states[-2].status is ReplicaStatus.EPOCH_CHANGED
    assert replicator.state().problem.status is ReplicaStatus.EPOCH_CHANGED
    [record] = [record for record in caplog.records if get_event(record) == "replication halted"]
    assert record.levelno == logging.ERROR
    assert (record.replica, record.from_zone, record.to_zone) == ("hub", "plant", "hub")
    assert record.status == "epoch_changed"
    assert DocPage.FACTS_RUNBOOK.label in record.action
    labels = {
        "ergon.fact.replica": "hub",
        "ergon.fact.from_zone": "plant",
        "ergon.fact.to_zone": "hub",
        "ergon.fact.status": "epoch_changed",
    }
    assert (labels, 1) in samples


def test_a_pair_continues_in_another_epoch_after_an_operator_adopts_it(zones):
    world = zones()
    world.append(None, None)
    world.run()
    # A standby has taken over, and has lost nothing.
    world.plant = world.source._store = world.plant.as_restored_backup()
    world.append(None)
    assert world.run().state().problem.status is ReplicaStatus.EPOCH_CHANGED
    adopted = Cursor(world.plant.last_offset(PAIR).epoch, 2)
    with pytest.raises(OffsetAhead, match="the last one here is 2"):
        world.hub.adopt_epoch(PAIR, adopted._replace(offset=3), by="ada")
    world.hub.adopt_epoch(PAIR, adopted, by="ada")
    world.run()
    assert world.stores_are_equal


def test_an_epoch_adopted_for_the_wrong_source_stops_the_pair_again(zones):
    world = zones()
    world.append(None, None)
    world.run()
    # Not a standby but another source, with other facts at the same offsets.
    world.plant = world.source._store = MemoryBoundary(side=BoundarySide.INNER)
    world.append(7, 7, 7)
    world.hub.adopt_epoch(PAIR, Cursor(world.plant.last_offset(PAIR).epoch, 2), by="ada")
    assert world.run().state().status is ReplicaStatus.STOPPED
    assert world.states[-2].status in {ReplicaStatus.EPOCH_CHANGED, ReplicaStatus.CONFLICT}
    assert world.hub.last_offset(PAIR).offset == 2


def test_facts_artifacts_and_failures_are_counted(zones):
    labels = {"ergon.fact.replica": "hub", "ergon.fact.from_zone": "plant", "ergon.fact.to_zone": "hub"}

    def read_counts():
        read = get_registry().read
        return [
            sum(value for attributes, value in read(metric) if attributes.items() >= labels.items())
            for metric in (
                names.REPLICATED_FACTS,
                names.REPLICATED_ARTIFACTS,
                names.REPLICATED_BYTES,
                names.REPLICATION_ERRORS,
            )
        ]

    world = zones(source={"fetch_facts": ["before"]})
    world.append(None, 10, 20)
    before = read_counts()
    world.run()
    assert [now - then for now, then in zip(read_counts(), before, strict=True)] == [3, 2, world.source.sent, 1]


def test_a_stop_before_the_run_takes_effect(zones):
    world = zones()
    world.append(None)
    replicator = world.run(seconds=0.0)
    assert replicator.state().status is ReplicaStatus.STOPPED


def test_facts_in_flight_at_a_stop_are_confirmed_at_the_source(zones):
    world = zones()
    world.append(*[None] * 20)
    world.scheduled = [(10.0, lambda _: world.append(None))]
    world.run(seconds=10.0)
    end = world.hub.last_offset(PAIR)
    assert world.plant.get_cursor("hub", PAIR).offset == end.offset


def test_a_replicator_cannot_run_twice_concurrently():
    store = MemoryBoundary()
    replicator = Replicator(store, MemoryBoundary(side=BoundarySide.OUTER), PAIR)
    with (
        replicator._replication(ThreadDriver(1), replicator._calls),
        pytest.raises(ConfigurationError, match="is already running"),
    ):
        replicator.run()


def test_zone_names_are_validated():
    with pytest.raises(InvalidFactError, match="from_zone"):
        Replicator(MemoryBoundary(), MemoryBoundary(), ZonePair("", "hub"))
