"""Zones that lose each other: stores in memory, lines that drop, double, delay and hang, and replicators that die.

All of it happens in one thread and in virtual time. One seed is one course of events, again and again.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import dataclass, field
from functools import partial

from ergon_framework.engine.effects import Sleep
from ergon_framework.errors import ConnectionLost
from ergon_framework.facts.boundary import AsyncBoundary
from ergon_framework.facts.errors import BufferFull, FactError
from ergon_framework.facts.model import ArtifactReference, Envelope, Fact, Pair, Side
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replicate import Replication
from ergon_framework.facts.replicator import AsyncReplicator
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.testing.simulation import Simulation

FOREVER = 1e9
#: Bytes that go over a line at once: small, so that breaking off has a middle.
PIECE = 16
#: How a line is, and how often a call then fails before and after its effect, hangs, and is done twice.
MOODS = {
    "good": (0.0, 0.0, 0.0, 0.0, 0.02),
    "lossy": (0.15, 0.15, 0.05, 0.15, 0.3),
    "slow": (0.02, 0.02, 0.0, 0.1, 3.0),
    "cut": (1.0, 0.0, 0.0, 0.0, 0.1),
    "silent": (0.0, 0.0, 1.0, 0.0, 0.1),
}


@dataclass(frozen=True)
class Plan:
    """What is going to happen."""

    seed: int
    #: Each line from zone to zone, and how it is from which moment on; the last mood is good.
    moods: dict[tuple[str, str], list[tuple[float, str]]]
    #: When whose zone appends to whom, how many, and how large their artifacts are (None: no artifact).
    appends: list[tuple[float, Pair, list[int | None]]]
    #: When whose replicator dies, or is stopped in order; it is started again a little later.
    ends: list[tuple[float, Pair, str, float]]
    #: When which zone's store does not answer, and for how long.
    outages: list[tuple[float, str, float]]
    #: When which zone removes what all have confirmed.
    prunes: list[tuple[float, str]]
    #: When whose backup is taken, and when it is put back.
    restores: list[tuple[float, str, float]]
    #: When which zone's store has no more room than for so many facts, and for how long.
    squeezes: list[tuple[float, str, int, float]]
    policy: ReplicationPolicy
    #: Whether a backup that is put back shows no other epoch, as the snapshot of a disk does not.
    silent: bool = False
    listens: bool = True
    until: float = 300.0


def draw(seed, *, zones=("plant", "hub"), restores=(), silent=False):
    """A plan full of trouble; *restores* are the zones whose backup is put back."""
    dice = random.Random(seed)
    hub = zones[-1]
    pairs = [pair for zone in zones[:-1] for pair in (Pair(zone, hub), Pair(hub, zone))]
    trouble = dice.uniform(20, 120)

    def moments(most):
        return sorted(dice.uniform(0, trouble) for _ in range(dice.randint(0, most)))

    moods = {}
    for pair in pairs:
        changes = [(at, dice.choice(list(MOODS))) for at in moments(6)]
        moods[pair] = [(0.0, dice.choice(("good", "lossy"))), *changes, (trouble, "good")]
    appends = []
    for pair in pairs:
        for at in [*moments(5), 0.0]:
            sizes = [dice.choice((None, None, None, 0, 5, 40, 200)) for _ in range(dice.randint(1, 12))]
            appends.append((at, pair, sizes))
    return Plan(
        seed,
        moods,
        appends,
        [(at, dice.choice(pairs), dice.choice(("killed", "stopped")), dice.uniform(0.1, 20)) for at in moments(3)],
        [(at, dice.choice(zones), dice.uniform(0.1, 15)) for at in moments(3)],
        [(at, dice.choice(zones)) for at in moments(4)],
        [(at, zone, at + dice.uniform(1, 30)) for zone in restores for at in [dice.uniform(1, trouble * 0.6)]],
        [(at, dice.choice(zones), dice.randint(0, 6), dice.uniform(1, 40)) for at in moments(3)],
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
        until=trouble + 100,
    )


class Line(AsyncBoundary):
    """A zone's store as somebody calls it who may lose it: from afar, or next to it while it is down."""

    def __init__(self, world, zone, *, far):
        self._world = world
        self._zone = zone
        self.mood = "good"
        self._far = far
        #: A caller who is dead calls nobody.
        self.alive = True

    @property
    def store(self):
        return self._world.stores[self._zone]

    @property
    def epoch(self):
        return self.store.epoch

    @property
    def capabilities(self):
        return self.store.capabilities

    async def _through(self, name, *args, **kwargs):
        nap, dice = self._world.simulation.sleep, self._world.dice
        before, after, hangs, twice, delay = MOODS[self.mood]
        store = self.store
        await nap(delay * dice.random())
        if not self.alive or dice.random() < hangs / 2 or hangs == 1:
            await nap(FOREVER)
        # A server under which a backup was put back was stopped for it, and its connections with it.
        if dice.random() < before or self._world.down(self._zone) or self.store is not store:
            raise ConnectionLost("planned")
        value = self._effect(name, args, kwargs)
        if dice.random() < twice:
            self._world.after(8 * dice.random(), partial(self._again, store, name, args, kwargs))
        await nap(delay * dice.random())
        if not self.alive or dice.random() < hangs / 2:
            await nap(FOREVER)
        if dice.random() < after:
            raise ConnectionLost("planned, after the effect")
        if isinstance(value, Exception):
            raise value
        return value

    def _effect(self, name, args, kwargs):
        self._world.before_effect(self, self._zone, name, args)
        try:
            value = getattr(self.store, name)(*args, **kwargs)
        except FactError as error:
            value = error
        self._world.after_effect(self._zone, name)
        return value

    def _again(self, store, name, args, kwargs):
        if not self._world.down(self._zone) and self.store is store:
            self._effect(name, args, kwargs)

    async def append_facts_async(self, facts):
        return await self._through("append_facts", facts)

    async def forward_facts_async(self, facts):
        return await self._through("forward_facts", facts)

    async def get_fact_async(self, from_zone, message_id):
        return await self._through("get_fact", from_zone, message_id)

    async def fetch_facts_async(self, reader, pair, limit, *, after=None):
        return await self._through("fetch_facts", reader, pair, limit, after=after)

    async def confirm_receipt_async(self, reader, pair, cursor):
        return await self._through("confirm_receipt", reader, pair, cursor)

    async def cursor_of_async(self, reader, pair):
        return await self._through("cursor_of", reader, pair)

    async def end_of_async(self, pair):
        return await self._through("end_of", pair)

    async def cursor_at_async(self, pair, unix_ms):
        return await self._through("cursor_at", pair, unix_ms)

    async def retire_reader_async(self, reader, pair, *, by=""):
        return await self._through("retire_reader", reader, pair, by=by)

    async def survey_async(self):
        return await self._through("survey")

    async def received_async(self, bucket, key, expected, *, zone=""):
        return await self._through("received", bucket, key, expected, zone=zone)

    async def prune_async(self, before_unix_ms):
        return await self._through("prune", before_unix_ms)

    async def put_object_async(self, bucket, key, blob, *, expected=None, begin=0, zone=""):
        nap, dice = self._world.simulation.sleep, self._world.dice
        before, after, *_ = MOODS[self.mood]
        if not self.alive:
            await nap(FOREVER)
        if dice.random() < before or self._world.down(self._zone):
            raise ConnectionLost("planned")
        stored = await self.store.put_object_async(bucket, key, blob, expected=expected, begin=begin, zone=zone)
        if not self.alive:
            await nap(FOREVER)
        if dice.random() < after:
            raise ConnectionLost("planned, after the effect")
        return stored

    async def get_object_async(self, bucket, key, *, begin=0, zone=""):
        nap, dice = self._world.simulation.sleep, self._world.dice
        for piece in self.store.get_object(bucket, key, begin=begin, zone=zone):
            for start in range(0, len(piece), PIECE):
                before, _, hangs, _, delay = MOODS[self.mood]
                await nap(delay * dice.random() / 4)
                if not self.alive or dice.random() < hangs / 4 or hangs == 1:
                    await nap(FOREVER)
                if dice.random() < before / 2 or before == 1 or self._world.down(self._zone):
                    raise ConnectionLost("planned, in the middle of an artifact")
                sent = piece[start : start + PIECE]
                self._world.sent += len(sent)
                yield sent


@dataclass
class World:
    """All zones, their ledgers, and what was seen."""

    plan: Plan
    replication: type[Replication] = Replication
    ledgers: dict[Pair, list[tuple[str, str, tuple[str, str] | None]]] = field(default_factory=dict)
    breaches: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.dice = random.Random(self.plan.seed + 1)
        self.simulation = Simulation(self.plan.seed)
        self.stores = {}
        self.lines = {}
        self.replicas = {}
        self.slots = {}
        self.sent = 0
        self._down = {}
        self._furthest = {}
        #: How many facts a zone had more than the backup of the source, when that was put back.
        self.ahead = {}
        self._epochs = {}
        self._numbers = itertools.count()
        self._mailbox = self.simulation.mailbox()
        zones = dict.fromkeys(zone for pair in self.plan.moods for zone in pair)
        for zone in zones:
            side = Side.OUTER if zone == "hub" else Side.INNER
            self.stores[zone] = MemoryBoundary(side=side, wall=self.simulation.senses.wall)

    # -- the course of events -------------------------------------------------------------------------

    def run(self):
        plan, at = self.plan, self.simulation.at
        for when, pair, sizes in plan.appends:
            at(when, partial(self.append, pair, sizes))
        for pair, changes in plan.moods.items():
            self.start(pair)
            for when, mood in changes:
                at(when, partial(self._change, pair, mood))
        for when, pair, how, rest in plan.ends:
            at(when, partial(self.end, pair, how))
            at(when + rest, partial(self.start, pair))
        for when, zone, lasting in plan.outages:
            at(when, partial(self._down.__setitem__, zone, when + lasting))
        for when, zone in plan.prunes:
            at(when, partial(self.prune, zone))
        for when, zone, room, lasting in plan.squeezes:
            at(when, partial(self._squeeze, zone, room))
            at(when + lasting, partial(self._squeeze, zone, None))
        at(plan.until - 100, partial(self._squeeze, None, None))
        for when, zone, back in plan.restores:
            at(when, partial(self._back_up, zone, back))
        self.simulation.run(_lasts(plan.until))
        return self

    def _change(self, pair, mood):
        self.lines[pair][0].mood = mood
        if mood == "good":
            self.lines[pair][1].mood = mood

    def _squeeze(self, zone, room):
        for name, store in self.stores.items():
            if zone in {None, name}:
                retained = sum(state.last - state.first + 1 for state in store.survey())
                store._max_facts = None if room is None else retained + room

    def start(self, pair):
        mood = self.lines[pair][0].mood if pair in self.lines else "good"
        source, destination = Line(self, pair.from_zone, far=True), Line(self, pair.to_zone, far=False)
        source.mood = mood
        # Also the own store is slow now and then.
        if self.simulation.clock() < self.plan.until - 100:
            destination.mood = self.dice.choice(("good", "good", "slow"))
        self.lines[pair] = source, destination
        means = AsyncReplicator(source, destination, pair)._means
        replica = self.replication(
            pair, means, name=pair.to_zone, policy=self.plan.policy, slots=self.simulation, changed=lambda state: None
        )
        if self.plan.listens:
            self.stores[pair.from_zone].listen(replica.wake)
        self.replicas[pair] = replica
        self.slots[pair] = self.simulation.start(replica.run(), told=self._mailbox)

    def end(self, pair, how):
        if how == "stopped":
            self.simulation.interrupt(self.slots[pair])
        else:
            for line in self.lines[pair]:
                line.alive = False

    def down(self, zone):
        return self._down.get(zone, 0.0) > self.simulation.clock()

    def after(self, seconds, act):
        self.simulation.at(self.simulation.clock() + seconds, act)

    def append(self, pair, sizes):
        """As a producer of that zone does."""
        store, ledger = self.stores[pair.from_zone], self.ledgers.setdefault(pair, [])
        for size in sizes:
            number = next(self._numbers)
            about, artifact = {"n": number}, None
            if size is not None:
                data = hashlib.sha256(f"{pair}{number}".encode()).digest() * 10
                stored = store.put_object(f"of-{pair.from_zone}", f"{pair.to_zone}/{number}", [data[:size]])
                artifact = f"{pair.to_zone}/{number}", stored.digest
                about = ArtifactReference(
                    bucket=f"of-{pair.from_zone}", key=artifact[0], digest=stored.digest, size=size
                ).as_object()
            envelope = Envelope(
                message_id=f"{pair.from_zone}-{pair.to_zone}-{number}",
                from_zone=pair.from_zone,
                to_zone=pair.to_zone,
                produced_at_unix_ms=1,
            )
            try:
                confirmation = store.append_fact(envelope, Fact.of("s", "p", about))
            except BufferFull:
                return  # its producer is told, and comes again another day
            ledger.append((envelope.message_id, confirmation.digest, artifact))

    def prune(self, zone):
        for line in self.stores.values():
            # Consumers of a zone read what arrives there at once: nothing is kept for them.
            for state in line.survey():
                if state.pair.to_zone == zone and line is self.stores[zone]:
                    line.fetch_facts("consumer", state.pair, 0)
        self.stores[zone].prune(10**18)

    def _back_up(self, zone, back):
        backup = self.stores[zone].restored()
        kept = {pair: list(ledger) for pair, ledger in self.ledgers.items() if pair.from_zone == zone}
        self.simulation.at(back, partial(self._put_back, zone, backup, kept))

    def _put_back(self, zone, backup, kept):
        if self.plan.silent:
            backup._epoch = self.stores[zone].epoch
            for log in backup._logs.values():
                log.reborn(backup._epoch if log.buffer is backup._side.store_buffer else log.epoch)
            # Nobody can put a disk back under a server that answers, nor faster than somebody looks.
            self._down[zone] = self.simulation.clock() + 9.0
            for pair in self.ledgers:
                if pair.from_zone == zone:
                    end = self.stores[pair.to_zone].end_of(pair)
                    self.ahead[pair] = 0 if end is None else end.offset - len(kept.get(pair, ()))
        self.stores[zone] = backup
        backup._max_facts = None
        self._epochs[zone] = backup.epoch
        self.restored = zone
        for pair in self.ledgers:
            if pair.from_zone == zone:
                # What is appended from now on are other facts at the same offsets.
                self.after(1.0, partial(self.append, pair, [None, 7]))

    # -- what may never be ----------------------------------------------------------------------------

    restored = None

    def before_effect(self, line, zone, name, args):
        if name == "confirm_receipt":
            reader, pair, cursor = args
            end = self.stores[pair.to_zone].end_of(pair)
            has = max(0 if end is None else end.offset, self._furthest.get(pair, 0) if self.restored else 0)
            if cursor.offset > has:
                self.breaches.append(f"{reader} confirmed {cursor.offset} of {pair} and has {has}")

    def after_effect(self, zone, name):
        if name == "forward_facts":
            for pair in self.ledgers:
                if pair.to_zone == zone:
                    self.look(pair)

    def look(self, pair):
        """The destination has a dense beginning of what the source has confirmed, with its artifacts."""
        store, ledger = self.stores[pair.to_zone], self.ledgers[pair]
        end = store.end_of(pair)
        if end is None:
            return
        self._furthest[pair] = max(self._furthest.get(pair, 0), end.offset)
        state = next(state for state in store.survey() if state.pair == pair)
        seen = store._logs[pair].facts
        if [stored.offset for stored in seen] != list(range(state.first, end.offset + 1)):
            self.breaches.append(f"{pair}: offsets {[stored.offset for stored in seen]} have a gap")
        if self.restored == pair.from_zone:
            return
        for stored in seen:
            told = stored.envelope.message_id, stored.digest
            if stored.offset > len(ledger) or told != ledger[stored.offset - 1][:2]:
                self.breaches.append(f"{pair}: {told} stands at {stored.offset}, where the source has something else")

    def verdict(self):
        """Everything that is wrong once all lines have been good for long."""
        found = list(self.breaches)
        for pair, ledger in self.ledgers.items():
            replica, state = self.replicas[pair], self.replicas[pair].state()
            store = self.stores[pair.to_zone]
            end = store.end_of(pair)
            if self.restored in pair:
                found += self._after_a_restore(pair, state, end)
                continue
            if end is None or end.offset != len(ledger):
                found.append(f"{pair}: {len(ledger)} facts at the source, {end} here, {state}")
                continue
            cursor = self.stores[pair.from_zone].cursor_of(pair.to_zone, pair)
            if cursor.offset != len(ledger) or state.confirmed != len(ledger):
                found.append(f"{pair}: all is here and the source believes {cursor}, the replica {state.confirmed}")
            if state.status != "following" or state.lag is None or state.lag.facts or not replica.caught_up:
                found.append(f"{pair}: all is here and it says {state}")
            found += self._artifacts(pair, store, ledger)
        return found

    def _artifacts(self, pair, store, ledger):
        state = next(state for state in store.survey() if state.pair == pair)
        for number in range(state.first - 1, len(ledger)):
            if ledger[number][2] is None:
                continue
            key, digest = ledger[number][2]
            data = b"".join(store.get_object(f"of-{pair.from_zone}", key, zone=pair.from_zone))
            if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
                yield f"{pair}: the artifact of {number} is another"

    def _after_a_restore(self, pair, state, end):
        source_end = self.stores[pair.from_zone].end_of(pair)
        here = 0 if end is None else end.offset
        if self.restored == pair.from_zone and self.plan.silent:
            noticed = state.status in {"epoch_changed", "conflict"}
            return (
                [f"{pair}: the source was put back unnoticed: {state}"] if self.ahead[pair] > 0 and not noticed else []
            )
        if self.restored == pair.from_zone:
            if here == 0 or (end.epoch == source_end.epoch):
                whole = source_end is None or here == source_end.offset
                return [] if whole else [f"{pair}: the source was restored before anything came, and {state}"]
            return [] if state.status == "epoch_changed" else [f"{pair}: the source was restored unnoticed: {state}"]
        if state.status == "gone":
            return []
        whole = here == len(self.ledgers[pair])
        return [] if whole else [f"{pair}: this zone was restored, and has {here}: {state}"]


def _lasts(until):
    yield Sleep(until)
