"""Zones that are disconnected for hours: with any connection faults, both have the same facts once, in order."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from ergon_framework.facts.errors import FactConflict
from ergon_framework.facts.model import Envelope, Fact, StoredFact, ZonePair, fact_digest
from ergon_framework.facts.replica_state import ReplicaStatus
from ergon_framework.facts.replication import Replication
from tests.properties import mutated_replication as broken
from tests.properties.zones_runner import ZoneWorld, draw_plan

pytestmark = [pytest.mark.invariant, pytest.mark.spec("FAC-17")]

PLANS = int(os.environ.get("ERGON_PLANS", "4000")) // 16
PARTS = 4
EGRESS = ZonePair("plant", "hub")


def find_first_failure(seeds, replication=Replication, **options):
    """Return the first plan that fails, with its problems; None if none does."""
    for seed in seeds:
        problems = ZoneWorld(draw_plan(seed, **options), replication).run().find_problems()
        if problems:
            return seed, problems
    return None


def make_quiet_plan(seed=1, **changes):
    """Return a plan without faults except for *changes*."""
    drawn = draw_plan(seed)
    moods = {pair: [(0.0, "good")] for pair in drawn.moods}
    quiet_plan = replace(
        drawn, moods=moods, appends=[], ends=[], outages=[], prunes=[], squeezes=[], listens=True, until=120.0
    )
    return replace(quiet_plan, **changes)


@pytest.mark.spec("FAC-10", "FAC-11", "FAC-15")
@pytest.mark.parametrize("part", range(PARTS))
def test_two_zones_have_the_same_facts_with_any_connection_faults(part):
    assert find_first_failure(range(part, PLANS, PARTS)) is None


@pytest.mark.parametrize("restored_zone", ["plant", "hub"])
def test_a_restored_backup_is_detected_or_repaired(restored_zone):
    assert find_first_failure(range(100_000, 100_000 + PLANS // 4), restores=(restored_zone,)) is None


def test_a_restored_disk_snapshot_is_detected_by_the_zone_with_more_facts():
    seeds = range(300_000, 300_000 + PLANS // 4)
    assert find_first_failure(seeds, restores=("plant",), silent=True) is None


def test_a_hub_and_its_spokes_do_not_block_each_other():
    assert find_first_failure(range(200_000, 200_000 + PLANS // 10), zones=("plant", "shop", "hub")) is None


def test_the_plans_contain_every_fault():
    """Plans without faults would prove nothing."""
    counts = dict.fromkeys(("killed", "stopped", "unreachable", "unwritable", "full", "artifacts", "pruned"), 0)
    for seed in range(60):
        world = ZoneWorld(draw_plan(seed)).run()
        for _, _, how, _ in world.plan.ends:
            counts[how] += 1
        for replica in world.replicas.values():
            for status, times in replica.failure_counts.items():
                counts[status] = counts.get(status, 0) + times
            counts["artifacts"] += replica.copied_artifacts[0]
        counts["pruned"] += sum(state.first > 1 for store in world.stores.values() for state in store.list_logs())
    assert min(counts.values()) >= 10, counts


# -- broken replicators are detected ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "replication",
    [
        broken.ConfirmsFetchedFacts,
        broken.ConfirmsUnansweredForwards,
        broken.SkipsRejectedFacts,
        broken.TrustsItsOwnOffset,
        broken.ForwardsBeforeArtifacts,
        broken.NeverTimesOut,
        broken.NeverConfirms,
    ],
)
def test_a_broken_replicator_is_detected(replication):
    assert find_first_failure(range(60), replication) is not None


def test_a_replicator_that_continues_in_another_epoch_is_detected():
    assert find_first_failure(range(100_000, 100_060), broken.ContinuesInAnotherEpoch, restores=("plant",)) is not None


def test_a_replicator_that_does_not_verify_its_source_is_detected():
    assert (
        find_first_failure(range(300_000, 300_100), broken.TrustsTheEpoch, restores=("plant",), silent=True) is not None
    )


# -- each fault on its own ---------------------------------------------------------------------------------


def forward_conflicting_fact(world):
    """Put another fact under the same id into the forward buffer, which only a defect can do."""
    fact = Fact.create("s", "p", {"n": "another"})
    other = Envelope(message_id="plant-hub-1", from_zone="plant", to_zone="other", produced_at_unix_ms=1)
    stored = StoredFact(
        envelope=other, fact=fact, digest=fact_digest(other, fact), offset=1, epoch="e", stored_at_unix_ms=1
    )
    world.stores["hub"].forward_facts([stored])


@pytest.mark.spec("FAC-13")
def test_a_conflict_stops_the_pair_and_is_reported():
    world = ZoneWorld(make_quiet_plan(appends=[(1.0, EGRESS, [None, None, None])]))
    forward_conflicting_fact(world)
    world.run()
    state = world.replicas[EGRESS].state()
    assert state.status is ReplicaStatus.CONFLICT
    assert state.needs_operator
    assert isinstance(state.problem.error, FactConflict)
    assert (state.problem.message_id, state.problem.offset) == ("plant-hub-1", 2)
    assert "'A conflict' in the page" in state.problem.action
    assert world.stores["hub"].last_offset(EGRESS).offset == 1
    assert world.stores["plant"].get_cursor("hub", EGRESS).offset == 1


def test_a_replicator_that_skips_conflicts_is_detected():
    world = ZoneWorld(make_quiet_plan(appends=[(1.0, EGRESS, [None, None, None])]), broken.SkipsConflicts)
    forward_conflicting_fact(world)
    world.run()
    assert world.replicas[EGRESS].state().status is not ReplicaStatus.CONFLICT
    assert world.find_problems()


class InterruptedSource:
    """A source that interrupts every artifact after a number of bytes."""

    def __init__(self, store, max_bytes):
        self._store = store
        self._max_bytes = max_bytes

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get_object(self, bucket, key, *, begin=0, zone=""):
        sent = b"".join(self._store.get_object(bucket, key, begin=begin, zone=zone))
        yield sent[: self._max_bytes]
        if len(sent) > self._max_bytes:
            raise ConnectionResetError("planned")


@pytest.mark.parametrize("replication, arrives", [(Replication, True), (broken.RestartsInterruptedCopies, False)])
def test_an_interrupted_artifact_is_resumed(replication, arrives):
    world = ZoneWorld(make_quiet_plan(appends=[(1.0, EGRESS, [None, 300, None])]), replication)
    world.stores["plant"] = InterruptedSource(world.stores["plant"], 64)
    world.run()
    assert (world.find_problems() == []) is arrives
    # No byte was transferred twice.
    assert (world.sent_bytes == 300) is arrives


def run_with_lost_artifact(replication=Replication):
    """Run a world whose second fact lacks its artifact for a minute; return it and the state in the meantime."""
    world = ZoneWorld(make_quiet_plan(until=200.0), replication)
    world.append(EGRESS, [None, 40, None])
    contents, states = world.stores["plant"]._artifacts._contents, []
    saved_contents = dict(contents)
    contents.clear()
    world.schedule(60.0, lambda: states.append(world.replicas[EGRESS].state()))
    world.schedule(61.0, lambda: contents.update(saved_contents))
    return world.run(), states[0]


@pytest.mark.spec("FAC-23")
def test_facts_wait_for_a_lost_artifact_and_continue_when_it_is_restored():
    world, state = run_with_lost_artifact()
    assert state.status is ReplicaStatus.ARTIFACT_LOST
    assert not state.needs_operator
    assert (state.offset, state.problem.message_id) == (1, "plant-hub-1")
    assert "of-plant/hub/1" in state.problem.reason
    assert world.find_problems() == []


def test_a_replicator_that_skips_lost_artifacts_is_detected():
    """The destination accepts nothing after the gap; the check detects that the loss is not reported."""
    _, state = run_with_lost_artifact(broken.SkipsLostArtifacts)
    assert state.status is not ReplicaStatus.ARTIFACT_LOST


@pytest.mark.spec("FAC-16")
def test_replication_waits_for_a_full_store_and_loses_nothing():
    world = ZoneWorld(make_quiet_plan(appends=[(1.0, EGRESS, [None] * 10)], until=200.0))
    world.stores["hub"]._max_facts = 4
    states = []

    def read_facts():
        states.append(world.replicas[EGRESS].state())
        hub = world.stores["hub"]
        for stored in hub.fetch_facts("consumer", EGRESS, 10):
            hub.confirm_receipt("consumer", EGRESS, stored.cursor)
        hub.prune(10**18)

    for at in (30.0, 60.0, 90.0):
        world.schedule(at, read_facts)
    world.run()
    assert [state.status for state in states] == [ReplicaStatus.FULL, ReplicaStatus.FULL, ReplicaStatus.FOLLOWING]
    assert [state.offset for state in states] == [4, 8, 10]
    assert states[0].lag.facts == 6
    assert world.find_problems() == []


def test_a_reader_that_was_retired_is_registered_again():
    world = ZoneWorld(make_quiet_plan(appends=[(1.0, EGRESS, [None, None]), (50.0, EGRESS, [None])]))
    world.schedule(20.0, lambda: world.stores["plant"].retire_reader("hub", EGRESS))
    assert world.run().find_problems() == []


def test_facts_that_the_source_has_dropped_stop_the_pair():
    world = ZoneWorld(make_quiet_plan(appends=[(1.0, EGRESS, [None] * 3)]))

    def drop_facts():
        plant = world.stores["plant"]
        plant.fetch_facts("other", EGRESS, 0)
        plant.retire_reader("hub", EGRESS)
        plant.confirm_receipt("other", EGRESS, plant.last_offset(EGRESS))
        plant.prune(10**18)

    world.plan = replace(world.plan, appends=[])
    world.append(EGRESS, [None] * 3)
    drop_facts()
    world.run()
    state = world.replicas[EGRESS].state()
    assert state.status is ReplicaStatus.GONE
    assert state.needs_operator
    assert state.offset == 0


def test_lag_is_reported_and_keeps_growing_while_disconnected():
    moods = {EGRESS: [(0.0, "good"), (20.0, "cut"), (100.0, "good")]}
    plan = make_quiet_plan(moods=moods, appends=[(1.0, EGRESS, [None] * 2), (25.0, EGRESS, [None] * 3)], until=160.0)
    world = ZoneWorld(plan)
    states = {}
    for at in (18.0, 60.0, 90.0, 150.0):
        world.schedule(at, lambda at=at: states.__setitem__(at, world.replicas[EGRESS].state()))
    world.run()
    assert (states[18.0].status, states[18.0].lag.facts) == (ReplicaStatus.FOLLOWING, 0)
    # The number of new facts is unknown while disconnected; only the time since the last contact is known.
    assert states[60.0].status is states[90.0].status is ReplicaStatus.UNREACHABLE
    assert 35 < states[60.0].lag.seconds < 45
    assert 65 < states[90.0].lag.seconds < 75
    assert (states[150.0].status, states[150.0].lag.facts, states[150.0].lag.seconds) == (ReplicaStatus.FOLLOWING, 0, 0)
