"""Zones that lose contact: stores in memory, connections that drop, double, delay and hang, and killed replicators.

All of it happens in one thread and in virtual time. One seed always gives the same course of events.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass, field
from functools import partial

from ergon_framework.engine.effects import Sleep
from ergon_framework.errors import ConnectionLostError
from ergon_framework.facts.boundary import AsyncBoundary
from ergon_framework.facts.errors import BufferFull, FactError
from ergon_framework.facts.model import ArtifactReference, BoundarySide, Envelope, Fact, ZonePair
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replication import Replication
from ergon_framework.facts.replicator import AsyncReplicator
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.testing.simulation import Simulation

FOREVER_SECONDS = 1e9
#: Bytes transferred at once: small, so that an artifact can be interrupted in the middle.
CHUNK_BYTES = 16
#: State of a connection: how often a call fails before and after its effect, hangs, and is done twice; and its delay.
CONNECTION_STATES = {
    "good": (0.0, 0.0, 0.0, 0.0, 0.02),
    "lossy": (0.15, 0.15, 0.05, 0.15, 0.3),
    "slow": (0.02, 0.02, 0.0, 0.1, 3.0),
    "cut": (1.0, 0.0, 0.0, 0.0, 0.1),
    "silent": (0.0, 0.0, 1.0, 0.0, 0.1),
}


@dataclass(frozen=True)
class ZonePlan:
    """The planned events of one run."""

    seed: int
    #: The state of each connection from zone to zone, and its start time; the last state is good.
    moods: dict[tuple[str, str], list[tuple[float, str]]]
    #: Time, pair and artifact sizes of appended facts (None: no artifact).
    appends: list[tuple[float, ZonePair, list[int | None]]]
    #: Time and pair of a replicator's kill or graceful stop; it is started again a little later.
    ends: list[tuple[float, ZonePair, str, float]]
    #: Time, zone and duration of a store outage.
    outages: list[tuple[float, str, float]]
    #: Time and zone of the removal of facts that all readers have confirmed.
    prunes: list[tuple[float, str]]
    #: Time and zone of a backup, and the time of its restore.
    restores: list[tuple[float, str, float]]
    #: Time, zone, remaining capacity in facts and duration of a full store.
    squeezes: list[tuple[float, str, int, float]]
    policy: ReplicationPolicy
    #: Whether a restored backup keeps its epoch, as the snapshot of a disk does.
    silent: bool = False
    listens: bool = True
    until: float = 300.0


def draw_plan(seed, *, zones=("plant", "hub"), restores=(), silent=False):
    """Draw a plan full of trouble; *restores* are the zones whose backup is restored."""
    dice = random.Random(seed)
    hub = zones[-1]
    pairs = [pair for zone in zones[:-1] for pair in (ZonePair(zone, hub), ZonePair(hub, zone))]
    trouble_seconds = dice.uniform(20, 120)

    def draw_times(max_count):
        return sorted(dice.uniform(0, trouble_seconds) for _ in range(dice.randint(0, max_count)))

    moods = {}
    for pair in pairs:
        state_changes = [(at, dice.choice(list(CONNECTION_STATES))) for at in draw_times(6)]
        moods[pair] = [(0.0, dice.choice(("good", "lossy"))), *state_changes, (trouble_seconds, "good")]
    appends = []
    for pair in pairs:
        for at in [*draw_times(5), 0.0]:
            sizes = [dice.choice((None, None, None, 0, 5, 40, 200)) for _ in range(dice.randint(1, 12))]
            appends.append((at, pair, sizes))
    return ZonePlan(
        seed,
        moods,
        appends,
        [(at, dice.choice(pairs), dice.choice(("killed", "stopped")), dice.uniform(0.1, 20)) for at in draw_times(3)],
        [(at, dice.choice(zones), dice.uniform(0.1, 15)) for at in draw_times(3)],
        [(at, dice.choice(zones)) for at in draw_times(4)],
        [(at, zone, at + dice.uniform(1, 30)) for zone in restores for at in [dice.uniform(1, trouble_seconds * 0.6)]],
        [(at, dice.choice(zones), dice.randint(0, 6), dice.uniform(1, 40)) for at in draw_times(3)],
        ReplicationPolicy(
            batch=dice.choice((1, 2, 5, 50)),
            batch_bytes=dice.choice((60, 4_000_000)),
            copies=dice.choice((1, 3)),
            copy_bytes=dice.choice((1, 300, 4_000_000)),
            timeout=4.0,
            poll=2.0,
            survey=15.0,
            backoff=0.1,
            cap=3.0,
            drain=2.0,
        ),
        silent=silent,
        listens=dice.random() < 0.5,
        until=trouble_seconds + 100,
    )


class UnreliableStore(AsyncBoundary):
    """A zone's store behind an unreliable connection: remote, or local and sometimes down."""

    def __init__(self, world, zone, *, is_remote):
        self._world = world
        self._zone = zone
        self.state = "good"
        self._is_remote = is_remote
        #: A killed caller makes no calls.
        self.is_alive = True

    @property
    def store(self):
        return self._world.stores[self._zone]

    @property
    def epoch(self):
        return self.store.epoch

    @property
    def capabilities(self):
        return self.store.capabilities

    async def _call(self, name, *args, **kwargs):
        sleep, dice = self._world.simulation.sleep, self._world.dice
        before, after, hangs, twice, delay = CONNECTION_STATES[self.state]
        store = self.store
        await sleep(delay * dice.random())
        if not self.is_alive or dice.random() < hangs / 2 or hangs == 1:
            await sleep(FOREVER_SECONDS)
        # The restore of a backup stops its server, and with it all connections.
        if dice.random() < before or self._world.is_down(self._zone) or self.store is not store:
            raise ConnectionLostError("planned")
        value = self._apply(name, args, kwargs)
        if dice.random() < twice:
            self._world.schedule(8 * dice.random(), partial(self._apply_again, store, name, args, kwargs))
        await sleep(delay * dice.random())
        if not self.is_alive or dice.random() < hangs / 2:
            await sleep(FOREVER_SECONDS)
        if dice.random() < after:
            raise ConnectionLostError("planned, after the effect")
        if isinstance(value, Exception):
            raise value
        return value

    def _apply(self, name, args, kwargs):
        self._world.before_effect(self, self._zone, name, args)
        try:
            value = getattr(self.store, name)(*args, **kwargs)
        except FactError as error:
            value = error
        self._world.after_effect(self._zone, name)
        return value

    def _apply_again(self, store, name, args, kwargs):
        if not self._world.is_down(self._zone) and self.store is store:
            self._apply(name, args, kwargs)

    async def append_facts_async(self, facts):
        return await self._call("append_facts", facts)

    async def forward_facts_async(self, facts):
        return await self._call("forward_facts", facts)

    async def get_fact_async(self, from_zone, message_id):
        return await self._call("get_fact", from_zone, message_id)

    async def fetch_facts_async(self, reader, pair, limit, *, after=None):
        return await self._call("fetch_facts", reader, pair, limit, after=after)

    async def confirm_receipt_async(self, reader, pair, cursor):
        return await self._call("confirm_receipt", reader, pair, cursor)

    async def get_cursor_async(self, reader, pair):
        return await self._call("get_cursor", reader, pair)

    async def last_offset_async(self, pair):
        return await self._call("last_offset", pair)

    async def cursor_at_time_async(self, pair, unix_ms):
        return await self._call("cursor_at_time", pair, unix_ms)

    async def retire_reader_async(self, reader, pair, *, by=""):
        return await self._call("retire_reader", reader, pair, by=by)

    async def list_logs_async(self):
        return await self._call("list_logs")

    async def uploaded_bytes_async(self, bucket, key, expected, *, zone=""):
        return await self._call("uploaded_bytes", bucket, key, expected, zone=zone)

    async def prune_async(self, before_unix_ms):
        return await self._call("prune", before_unix_ms)

    async def put_object_async(self, bucket, key, blob, *, expected=None, begin=0, zone=""):
        sleep, dice = self._world.simulation.sleep, self._world.dice
        before, after, *_ = CONNECTION_STATES[self.state]
        if not self.is_alive:
            await sleep(FOREVER_SECONDS)
        if dice.random() < before or self._world.is_down(self._zone):
            raise ConnectionLostError("planned")
        stored = await self.store.put_object_async(bucket, key, blob, expected=expected, begin=begin, zone=zone)
        if not self.is_alive:
            await sleep(FOREVER_SECONDS)
        if dice.random() < after:
            raise ConnectionLostError("planned, after the effect")
        return stored

    async def get_object_async(self, bucket, key, *, begin=0, zone=""):
        sleep, dice = self._world.simulation.sleep, self._world.dice
        for chunk in self.store.get_object(bucket, key, begin=begin, zone=zone):
            for start in range(0, len(chunk), CHUNK_BYTES):
                before, _, hangs, _, delay = CONNECTION_STATES[self.state]
                await sleep(delay * dice.random() / 4)
                if not self.is_alive or dice.random() < hangs / 4 or hangs == 1:
                    await sleep(FOREVER_SECONDS)
                if dice.random() < before / 2 or before == 1 or self._world.is_down(self._zone):
                    raise ConnectionLostError("planned, in the middle of an artifact")
                sent = chunk[start : start + CHUNK_BYTES]
                self._world.sent_bytes += len(sent)
                yield sent


@dataclass
class ZoneWorld:
    """All zones, their ledgers, and the recorded problems."""

    plan: ZonePlan
    replication: type[Replication] = Replication
    ledgers: dict[ZonePair, list[tuple[str, str, tuple[str, str] | None]]] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.dice = random.Random(self.plan.seed + 1)
        self.simulation = Simulation(self.plan.seed)
        self.stores = {}
        self.connections = {}
        self.replicas = {}
        self.slots = {}
        self.sent_bytes = 0
        self._outage_ends = {}
        self._highest_offsets = {}
        #: How many facts a zone was ahead of the source's backup when that was restored.
        self.facts_ahead = {}
        self._epochs = {}
        self._numbers = itertools.count()
        self._mailbox = self.simulation.create_mailbox()
        zones = dict.fromkeys(zone for pair in self.plan.moods for zone in pair)
        for zone in zones:
            side = BoundarySide.OUTER if zone == "hub" else BoundarySide.INNER
            self.stores[zone] = MemoryBoundary(side=side, wall=self.simulation.time_source.wall)

    # -- the course of events -------------------------------------------------------------------------

    def run(self):
        plan, at = self.plan, self.simulation.call_at
        for when, pair, sizes in plan.appends:
            at(when, partial(self.append, pair, sizes))
        for pair, state_changes in plan.moods.items():
            self.start(pair)
            for when, state in state_changes:
                at(when, partial(self._set_state, pair, state))
        for when, pair, how, downtime in plan.ends:
            at(when, partial(self.end_replica, pair, how))
            at(when + downtime, partial(self.start, pair))
        for when, zone, duration in plan.outages:
            at(when, partial(self._outage_ends.__setitem__, zone, when + duration))
        for when, zone in plan.prunes:
            at(when, partial(self.prune, zone))
        for when, zone, capacity, duration in plan.squeezes:
            at(when, partial(self._limit_capacity, zone, capacity))
            at(when + duration, partial(self._limit_capacity, zone, None))
        at(plan.until - 100, partial(self._limit_capacity, None, None))
        for when, zone, restore_at in plan.restores:
            at(when, partial(self._schedule_restore, zone, restore_at))
        self.simulation.run(_sleep_until(plan.until))
        return self

    def _set_state(self, pair, state):
        self.connections[pair][0].state = state
        if state == "good":
            self.connections[pair][1].state = state

    def _limit_capacity(self, zone, capacity):
        for name, store in self.stores.items():
            if zone in {None, name}:
                retained = sum(state.last - state.first + 1 for state in store.list_logs())
                store._max_facts = None if capacity is None else retained + capacity

    def start(self, pair):
        initial_state = self.connections[pair][0].state if pair in self.connections else "good"
        source, destination = (
            UnreliableStore(self, pair.from_zone, is_remote=True),
            UnreliableStore(self, pair.to_zone, is_remote=False),
        )
        source.state = initial_state
        # The local store is also slow now and then.
        if self.simulation.monotonic() < self.plan.until - 100:
            destination.state = self.dice.choice(("good", "good", "slow"))
        self.connections[pair] = source, destination
        means = AsyncReplicator(source, destination, pair)._calls
        replica = self.replication(
            pair,
            means,
            name=pair.to_zone,
            policy=self.plan.policy,
            scheduler=self.simulation,
            on_change=lambda state: None,
        )
        if self.plan.listens:
            self.stores[pair.from_zone].listen(replica.wake)
        self.replicas[pair] = replica
        self.slots[pair] = self.simulation.start(replica.run(), notify=self._mailbox)

    def end_replica(self, pair, how):
        if how == "stopped":
            self.simulation.interrupt(self.slots[pair])
        else:
            for connection in self.connections[pair]:
                connection.is_alive = False

    def is_down(self, zone):
        return self._outage_ends.get(zone, 0.0) > self.simulation.monotonic()

    def schedule(self, seconds, act):
        self.simulation.call_at(self.simulation.monotonic() + seconds, act)

    def append(self, pair, sizes):
        """Append facts as a producer of that zone."""
        store, ledger = self.stores[pair.from_zone], self.ledgers.setdefault(pair, [])
        for size in sizes:
            number = next(self._numbers)
            fact_object, artifact = {"n": number}, None
            if size is not None:
                data = hashlib.sha256(f"{pair}{number}".encode()).digest() * 10
                stored = store.put_object(f"of-{pair.from_zone}", f"{pair.to_zone}/{number}", [data[:size]])
                artifact = f"{pair.to_zone}/{number}", stored.digest
                fact_object = ArtifactReference(
                    bucket=f"of-{pair.from_zone}", key=artifact[0], digest=stored.digest, size=size
                ).to_object()
            envelope = Envelope(
                message_id=f"{pair.from_zone}-{pair.to_zone}-{number}",
                from_zone=pair.from_zone,
                to_zone=pair.to_zone,
                produced_at_unix_ms=1,
            )
            try:
                confirmation = store.append_fact(envelope, Fact.create("s", "p", fact_object))
            except BufferFull:
                return  # the producer receives the error and would append later
            ledger.append((envelope.message_id, confirmation.digest, artifact))

    def prune(self, zone):
        for store in self.stores.values():
            # Consumers of a zone read new facts immediately: nothing is kept for them.
            for state in store.list_logs():
                if state.pair.to_zone == zone and store is self.stores[zone]:
                    store.fetch_facts("consumer", state.pair, 0)
        self.stores[zone].prune(10**18)

    def _schedule_restore(self, zone, restore_at):
        backup = self.stores[zone].as_restored_backup()
        ledgers = {pair: list(ledger) for pair, ledger in self.ledgers.items() if pair.from_zone == zone}
        self.simulation.call_at(restore_at, partial(self._restore, zone, backup, ledgers))

    def _restore(self, zone, backup, ledgers):
        if self.plan.silent:
            backup._epoch = self.stores[zone].epoch
            for log in backup._logs.values():
                log.restart_epoch(backup._epoch if log.buffer is backup._side.store_buffer else log.epoch)
            # A disk cannot be restored under a running server, nor faster than the replicator polls.
            self._outage_ends[zone] = self.simulation.monotonic() + 9.0
            for pair in self.ledgers:
                if pair.from_zone == zone:
                    end = self.stores[pair.to_zone].last_offset(pair)
                    self.facts_ahead[pair] = 0 if end is None else end.offset - len(ledgers.get(pair, ()))
        self.stores[zone] = backup
        backup._max_facts = None
        self._epochs[zone] = backup.epoch
        self.restored_zone = zone
        for pair in self.ledgers:
            if pair.from_zone == zone:
                # Facts appended from now on have the same offsets with other content.
                self.schedule(1.0, partial(self.append, pair, [None, 7]))

    # -- invariants -----------------------------------------------------------------------------------

    restored_zone = None

    def before_effect(self, caller, zone, name, args):
        if name == "confirm_receipt":
            reader, pair, cursor = args
            end = self.stores[pair.to_zone].last_offset(pair)
            end_offset = max(
                0 if end is None else end.offset, self._highest_offsets.get(pair, 0) if self.restored_zone else 0
            )
            if cursor.offset > end_offset:
                self.violations.append(f"{reader} confirmed {cursor.offset} of {pair} and has {end_offset}")

    def after_effect(self, zone, name):
        if name == "forward_facts":
            for pair in self.ledgers:
                if pair.to_zone == zone:
                    self.check_destination(pair)

    def check_destination(self, pair):
        """Check that the destination has a gapless prefix of the source's facts, with their artifacts."""
        store, ledger = self.stores[pair.to_zone], self.ledgers[pair]
        end = store.last_offset(pair)
        if end is None:
            return
        self._highest_offsets[pair] = max(self._highest_offsets.get(pair, 0), end.offset)
        state = next(state for state in store.list_logs() if state.pair == pair)
        facts = store._logs[pair].facts
        if [stored.offset for stored in facts] != list(range(state.first, end.offset + 1)):
            self.violations.append(f"{pair}: offsets {[stored.offset for stored in facts]} have a gap")
        if self.restored_zone == pair.from_zone:
            return
        for stored in facts:
            entry = stored.envelope.message_id, stored.digest
            if stored.offset > len(ledger) or entry != ledger[stored.offset - 1][:2]:
                self.violations.append(
                    f"{pair}: {entry} stands at {stored.offset}, where the source has something else"
                )

    def find_problems(self):
        """Return all problems after all connections have been good for a long time."""
        problems = list(self.violations)
        for pair, ledger in self.ledgers.items():
            replica, state = self.replicas[pair], self.replicas[pair].state()
            store = self.stores[pair.to_zone]
            end = store.last_offset(pair)
            if self.restored_zone in pair:
                problems += self._check_after_restore(pair, state, end)
                continue
            if end is None or end.offset != len(ledger):
                problems.append(f"{pair}: {len(ledger)} facts at the source, {end} here, {state}")
                continue
            cursor = self.stores[pair.from_zone].get_cursor(pair.to_zone, pair)
            if cursor.offset != len(ledger) or state.confirmed != len(ledger):
                problems.append(f"{pair}: all is here and the source believes {cursor}, the replica {state.confirmed}")
            if state.status != "following" or state.lag is None or state.lag.facts or not replica.is_caught_up:
                problems.append(f"{pair}: all is here and it says {state}")
            problems += self._check_artifacts(pair, store, ledger)
        return problems

    def _check_artifacts(self, pair, store, ledger):
        state = next(state for state in store.list_logs() if state.pair == pair)
        for number in range(state.first - 1, len(ledger)):
            if ledger[number][2] is None:
                continue
            key, digest = ledger[number][2]
            data = b"".join(store.get_object(f"of-{pair.from_zone}", key, zone=pair.from_zone))
            if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
                yield f"{pair}: the artifact of {number} is another"

    def _check_after_restore(self, pair, state, end):
        source_end = self.stores[pair.from_zone].last_offset(pair)
        end_offset = 0 if end is None else end.offset
        if self.restored_zone == pair.from_zone and self.plan.silent:
            is_detected = state.status in {"epoch_changed", "conflict"}
            return (
                [f"{pair}: the source was put back unnoticed: {state}"]
                if self.facts_ahead[pair] > 0 and not is_detected
                else []
            )
        if self.restored_zone == pair.from_zone:
            if end_offset == 0 or (end.epoch == source_end.epoch):
                is_complete = source_end is None or end_offset == source_end.offset
                return [] if is_complete else [f"{pair}: the source was restored before anything came, and {state}"]
            return [] if state.status == "epoch_changed" else [f"{pair}: the source was restored unnoticed: {state}"]
        if state.status == "gone":
            return []
        is_complete = end_offset == len(self.ledgers[pair])
        return [] if is_complete else [f"{pair}: this zone was restored, and has {end_offset}: {state}"]


def _sleep_until(until):
    yield Sleep(until)
