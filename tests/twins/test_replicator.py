"""The replicator on threads and on asyncio: the same facts, artifacts and states, over a line with planned faults."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial

import pytest

from ergon_framework.engine.drivers.threads import Threads
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.facts.asking import HELD
from ergon_framework.facts.errors import InvalidFactError, OffsetAhead
from ergon_framework.facts.model import ArtifactReference, Cursor, Envelope, Fact, Pair, Side
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replica import Status
from ergon_framework.facts.replicator import AsyncReplicator, Replicator
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.finding import Page
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import registry_of
from ergon_framework.testing.virtual import VirtualTime, run_virtual
from tests.log_events import event_of
from tests.twins.world import FLAVOURS

pytestmark = pytest.mark.spec("FAC-17")

PAIR = Pair("plant", "hub")
POLICY = ReplicationPolicy(batch=8, timeout=5.0, poll=1.0, survey=5.0, cap=2.0, drain=1.0, copies=2)
HOUR = 3600.0


class Line:
    """A store as it is reached over a line on which call n of a method meets fault n of its list."""

    def __init__(self, store, faults):
        self._store = store
        self._faults = {name: list(planned) for name, planned in faults.items()}
        self.calls = Counter()
        self.sleep = None
        #: Bytes after which an artifact breaks off, or stops coming.
        self.breaks = []
        self.sent = 0

    def __getattr__(self, name):
        plain = name.removesuffix("_async")
        act = getattr(self._store, plain)
        if plain in {"epoch", "capabilities", "listen"}:
            return act
        return partial(self._call_async if name != plain else self._call, plain, act)

    def _fault(self, name):
        self.calls[name] += 1
        planned = self._faults.get(name, [])
        return planned[self.calls[name] - 1] if self.calls[name] <= len(planned) else None

    def _call(self, name, act, *args, **kwargs):
        fault = self._fault(name)
        if fault == "hangs":
            self.sleep(HOUR)
        if fault == "before":
            raise ConnectionLost("planned")
        value = act(*args, **kwargs)
        if fault == "after":
            raise ConnectionLost("planned")
        return value

    async def _call_async(self, name, act, *args, **kwargs):
        fault = self._fault(name)
        if fault == "hangs":
            await asyncio.sleep(HOUR)
        if fault == "before":
            raise ConnectionLost("planned")
        if name == "put_object":
            value = await self._store.put_object_async(*args, **kwargs)
        else:
            value = act(*args, **kwargs)
        if fault == "after":
            raise ConnectionLost("planned")
        return value

    def get_object(self, bucket, key, *, begin=0, zone=""):
        at, how = self.breaks.pop(0) if self.breaks else (None, None)
        yield from self._pieces(bucket, key, begin, at, zone)
        if how == "hangs":
            self.sleep(HOUR)
        if how is not None:
            raise ConnectionLost("planned")

    async def get_object_async(self, bucket, key, *, begin=0, zone=""):
        at, how = self.breaks.pop(0) if self.breaks else (None, None)
        for piece in self._pieces(bucket, key, begin, at, zone):
            yield piece
        if how == "hangs":
            await asyncio.sleep(HOUR)
        if how is not None:
            raise ConnectionLost("planned")

    def _pieces(self, bucket, key, begin, at, zone):
        data = b"".join(self._store.get_object(bucket, key, begin=begin, zone=zone))[:at]
        self.sent += len(data)
        for start in range(0, len(data), 100):
            yield data[start : start + 100]


class Zones:
    """Two stores, a line from each, and a replicator between them that runs in virtual time."""

    def __init__(self, flavour, *, source=None, destination=None):
        self.flavour = flavour
        self.plant, self.hub = MemoryBoundary(side=Side.INNER), MemoryBoundary(side=Side.OUTER)
        self.source, self.destination = Line(self.plant, source or {}), Line(self.hub, destination or {})
        self.states = []
        self.later = []

    def append(self, *sizes):
        """One fact for each size of an artifact; None has none."""
        end = self.plant.end_of(PAIR)
        for number, size in enumerate(sizes, 0 if end is None else end.offset):
            about = {"n": number}
            if size is not None:
                stored = self.plant.put_object("of-plant", str(number), [b"%d," % number * size][:1])
                about = ArtifactReference(
                    bucket="of-plant", key=str(number), digest=stored.digest, size=stored.size
                ).as_object()
            envelope = Envelope(message_id=f"m-{number}", from_zone="plant", to_zone="hub", produced_at_unix_ms=0)
            self.plant.append_fact(envelope, Fact.of("s", "p", about))

    def run(self, seconds=60.0, policy=POLICY):
        """Let the replicator run for so long, and end."""
        kind = Replicator if self.flavour == "threads" else AsyncReplicator
        replicate = partial(kind, self.source, self.destination, PAIR, policy=policy, on_change=self.states.append)
        if self.flavour == "threads":
            time = VirtualTime()
            self.source.sleep = self.destination.sleep = time.sleep
            replicator = replicate(driver=partial(Threads, waiting=time))
            for at, act in [*self.later, (seconds, lambda _: replicator.stop())]:
                time.at(at, partial(act, replicator))
            replicator.run()
            time.rest()
        else:

            async def main():
                replicator = replicate()
                for at, act in [*self.later, (seconds, lambda _: replicator.stop())]:
                    asyncio.get_running_loop().call_later(at, act, replicator)
                await replicator.run()
                return replicator

            replicator = run_virtual(main())
        return replicator

    @property
    def same(self):
        """Whether both have the same facts and the hub their artifacts."""
        there, here = (store.fetch_facts("test", PAIR, 10_000) for store in (self.plant, self.hub))
        for stored in here:
            if (artifact := stored.fact.artifact) is not None:
                sent, got = (
                    b"".join(store.get_object(artifact.bucket, artifact.key, zone=PAIR.from_zone))
                    for store in (self.plant, self.hub)
                )
                assert sent == got
        facts = [[(stored.offset, stored.epoch, stored.digest) for stored in facts] for facts in (there, here)]
        return facts[0] == facts[1]


@pytest.fixture(params=FLAVOURS)
def zones(request):
    return partial(Zones, request.param)


@pytest.mark.parametrize("fault", ["before", "after", "hangs"])
@pytest.mark.parametrize(
    "side, name",
    [
        ("source", "fetch_facts"),
        ("source", "confirm_receipt"),
        ("source", "survey"),
        ("destination", "end_of"),
        ("destination", "received"),
        ("destination", "put_object"),
        ("destination", "forward_facts"),
    ],
)
def test_a_call_that_fails_is_made_again_and_nothing_is_lost_or_doubled(zones, side, name, fault):
    world = zones(**{side: {name: [fault, None, fault]}})
    world.append(*[None, 10, 0] * 10)
    replicator = world.run()
    assert world.same
    assert world.plant.cursor_of("hub", PAIR).offset == 30
    assert replicator.state().status is Status.STOPPED
    assert replicator.state().offset == replicator.state().confirmed == 30
    assert getattr(world, side).calls[name] > 1


@pytest.mark.parametrize("how", ["breaks", "hangs"])
def test_an_artifact_that_breaks_off_or_stops_coming_is_gone_on_with(zones, how):
    world = zones()
    world.append(None, 1000, None)
    world.source.breaks = [(700, how), (500, how)]
    world.run()
    assert world.same
    # A thread that hangs keeps what it has: the store in memory knows nothing of it, and gets all of it again.
    if (world.flavour, how) != ("threads", "hangs"):
        assert world.source.sent == world.plant.fetch_facts("test", PAIR, 3)[1].fact.artifact.size


def test_calls_that_never_come_back_do_not_pile_up(zones):
    """A thread cannot be killed: after some that hang nothing new is begun. A task that hangs is cancelled."""
    world = zones(source={"fetch_facts": ["hangs"] * 1000})
    world.append(None)
    world.run(seconds=HOUR / 2)
    calls = world.source.calls["fetch_facts"]
    assert (calls == HELD) if world.flavour == "threads" else (calls > 2 * HELD)


def test_what_comes_later_is_copied_when_the_store_says_so(zones):
    world = zones()
    world.append(None)
    seen = []
    world.later = [
        (20.5, lambda _: world.append(None, None)),
        (20.6, lambda replicator: seen.append(replicator.state().offset)),
    ]
    world.run(policy=POLICY.model_copy(update={"poll": 1000.0}))
    assert seen == [3]
    assert world.same


def test_a_halt_is_logged_once_with_what_is_to_be_done_and_seen_in_metrics(zones, caplog):
    world = zones()
    world.append(None, None)
    # Somebody else's store was put back from a backup: the same ids at other offsets.
    older = MemoryBoundary(side=Side.INNER)
    world.plant, kept = older, world.plant
    world.append(None)
    world.hub.forward_facts(older.fetch_facts("x", PAIR, 10))
    world.plant = kept
    seen = []
    world.later = [(30.0, lambda _: seen.extend(registry_of().read(names.REPLICA_STATUS)))]
    with caplog.at_level(logging.INFO, logger="ergon_framework.facts"):
        replicator = world.run()
    assert world.states[-2].status is Status.EPOCH_CHANGED
    assert replicator.state().trouble.status is Status.EPOCH_CHANGED
    [record] = [record for record in caplog.records if event_of(record) == "replica halted"]
    assert record.levelno == logging.ERROR
    assert (record.replica, record.from_zone, record.to_zone) == ("hub", "plant", "hub")
    assert record.status == "epoch_changed"
    assert Page.FACTS_RUNBOOK.named in record.action
    told = {
        "ergon.fact.replica": "hub",
        "ergon.fact.from_zone": "plant",
        "ergon.fact.to_zone": "hub",
        "ergon.fact.status": "epoch_changed",
    }
    assert (told, 1) in seen


def test_a_pair_goes_on_in_another_epoch_when_an_operator_has_said_so(zones):
    world = zones()
    world.append(None, None)
    world.run()
    # A standby has taken over, and has lost nothing.
    world.plant = world.source._store = world.plant.restored()
    world.append(None)
    assert world.run().state().trouble.status is Status.EPOCH_CHANGED
    moved = Cursor(world.plant.end_of(PAIR).epoch, 2)
    with pytest.raises(OffsetAhead, match="the last one here is 2"):
        world.hub.adopt_epoch(PAIR, moved._replace(offset=3), by="ada")
    world.hub.adopt_epoch(PAIR, moved, by="ada")
    world.run()
    assert world.same


def test_an_epoch_that_was_adopted_for_another_source_stops_the_pair_again(zones):
    world = zones()
    world.append(None, None)
    world.run()
    # Not a standby but somebody else, who has other facts at the same offsets.
    world.plant = world.source._store = MemoryBoundary(side=Side.INNER)
    world.append(7, 7, 7)
    world.hub.adopt_epoch(PAIR, Cursor(world.plant.end_of(PAIR).epoch, 2), by="ada")
    assert world.run().state().status is Status.STOPPED
    assert world.states[-2].status in {Status.EPOCH_CHANGED, Status.CONFLICT}
    assert world.hub.end_of(PAIR).offset == 2


def test_facts_artifacts_and_troubles_are_counted(zones):
    labels = {"ergon.fact.replica": "hub", "ergon.fact.from_zone": "plant", "ergon.fact.to_zone": "hub"}

    def counted():
        read = registry_of().read
        return [
            sum(value for told, value in read(metric) if told.items() >= labels.items())
            for metric in (names.REPLICA_FACTS, names.REPLICA_ARTIFACTS, names.REPLICA_BYTES, names.REPLICA_TROUBLES)
        ]

    world = zones(source={"fetch_facts": ["before"]})
    world.append(None, 10, 20)
    before = counted()
    world.run()
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [3, 2, world.source.sent, 1]


def test_a_stop_that_comes_before_it_runs_is_not_forgotten(zones):
    world = zones()
    world.append(None)
    replicator = world.run(seconds=0.0)
    assert replicator.state().status is Status.STOPPED


def test_what_was_begun_when_it_stops_is_confirmed_at_the_source(zones):
    world = zones()
    world.append(*[None] * 20)
    world.later = [(10.0, lambda _: world.append(None))]
    world.run(seconds=10.0)
    end = world.hub.end_of(PAIR)
    assert world.plant.cursor_of("hub", PAIR).offset == end.offset


def test_one_replicator_does_not_run_twice_at_once():
    store = MemoryBoundary()
    replicator = Replicator(store, MemoryBoundary(side=Side.OUTER), PAIR)
    with replicator._entered(Threads(1), replicator._means), pytest.raises(ConfigurationError, match="running already"):
        replicator.run()


def test_the_names_of_zones_are_checked():
    with pytest.raises(InvalidFactError, match="from_zone"):
        Replicator(MemoryBoundary(), MemoryBoundary(), Pair("", "hub"))
