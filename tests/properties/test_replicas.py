"""Zones that lose each other for hours: whatever the lines do, both have the same facts once, in order, and no gap."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from ergon_framework.facts.errors import FactConflict
from ergon_framework.facts.model import Envelope, Fact, Pair, StoredFact, digest_of
from ergon_framework.facts.replica import Status
from ergon_framework.facts.replicate import Replication
from tests.properties import broken_replicas as broken
from tests.properties.zones import World, draw

pytestmark = [pytest.mark.invariant, pytest.mark.spec("FAC-17")]

PLANS = int(os.environ.get("ERGON_PLANS", "4000")) // 16
PARTS = 4
EGRESS = Pair("plant", "hub")


def verdicts(seeds, replication=Replication, **world):
    """The first plan that goes wrong, and how; None if none does."""
    for seed in seeds:
        found = World(draw(seed, **world), replication).run().verdict()
        if found:
            return seed, found
    return None


def quiet(seed=1, **changes):
    """A plan in which nothing goes wrong but what is said."""
    drawn = draw(seed)
    moods = {pair: [(0.0, "good")] for pair in drawn.moods}
    calm = replace(
        drawn, moods=moods, appends=[], ends=[], outages=[], prunes=[], squeezes=[], listens=True, until=120.0
    )
    return replace(calm, **changes)


@pytest.mark.spec("FAC-10", "FAC-11", "FAC-15")
@pytest.mark.parametrize("part", range(PARTS))
def test_two_zones_have_the_same_facts_however_their_lines_are(part):
    assert verdicts(range(part, PLANS, PARTS)) is None


@pytest.mark.parametrize("restored", ["plant", "hub"])
def test_a_restored_backup_is_noticed_or_made_good(restored):
    assert verdicts(range(100_000, 100_000 + PLANS // 4), restores=(restored,)) is None


def test_the_snapshot_of_a_disk_that_was_put_back_is_noticed_by_whoever_has_more():
    seeds = range(300_000, 300_000 + PLANS // 4)
    assert verdicts(seeds, restores=("plant",), silent=True) is None


def test_a_hub_and_its_spokes_do_not_hold_each_other_up():
    assert verdicts(range(200_000, 200_000 + PLANS // 10), zones=("plant", "shop", "hub")) is None


def test_the_plans_are_full_of_trouble():
    """A world in which nothing happens would prove nothing."""
    seen = dict.fromkeys(("killed", "stopped", "unreachable", "unwritable", "full", "artifacts", "pruned"), 0)
    for seed in range(60):
        world = World(draw(seed)).run()
        for _, _, how, _ in world.plan.ends:
            seen[how] += 1
        for replica in world.replicas.values():
            for status, times in replica.troubles.items():
                seen[status] = seen.get(status, 0) + times
            seen["artifacts"] += replica.carried[0]
        seen["pruned"] += sum(state.first > 1 for store in world.stores.values() for state in store.survey())
    assert min(seen.values()) >= 10, seen


# -- the watch itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "replication",
    [
        broken.ConfirmsWhatItHasFetched,
        broken.ConfirmsWhatItHasSent,
        broken.PassesOverRefusals,
        broken.BelievesItsMemory,
        broken.PutsFactsBeforeArtifacts,
        broken.WaitsForEver,
        broken.NeverConfirms,
    ],
)
def test_a_replicator_that_is_broken_is_noticed(replication):
    assert verdicts(range(60), replication) is not None


def test_one_that_goes_on_in_another_epoch_is_noticed():
    assert verdicts(range(100_000, 100_060), broken.GoesOnInAnotherEpoch, restores=("plant",)) is not None


def test_one_that_does_not_recognise_its_source_is_noticed():
    assert verdicts(range(300_000, 300_100), broken.TrustsTheEpoch, restores=("plant",), silent=True) is not None


# -- each trouble by itself --------------------------------------------------------------------------------


def conflicting(world):
    """Somebody has put another fact under the same id into the forward buffer, which only a defect can do."""
    fact = Fact.of("s", "p", {"n": "another"})
    other = Envelope(message_id="plant-hub-1", from_zone="plant", to_zone="other", produced_at_unix_ms=1)
    stored = StoredFact(
        envelope=other, fact=fact, digest=digest_of(other, fact), offset=1, epoch="e", stored_at_unix_ms=1
    )
    world.stores["hub"].forward_facts([stored])


@pytest.mark.spec("FAC-13")
def test_a_conflict_stops_the_pair_and_is_said():
    world = World(quiet(appends=[(1.0, EGRESS, [None, None, None])]))
    conflicting(world)
    world.run()
    state = world.replicas[EGRESS].state()
    assert state.status is Status.CONFLICT
    assert state.halted
    assert isinstance(state.trouble.error, FactConflict)
    assert (state.trouble.message_id, state.trouble.offset) == ("plant-hub-1", 2)
    assert "'A conflict' in the page" in state.trouble.action
    assert world.stores["hub"].end_of(EGRESS).offset == 1
    assert world.stores["plant"].cursor_of("hub", EGRESS).offset == 1


def test_one_that_passes_over_conflicts_is_noticed():
    world = World(quiet(appends=[(1.0, EGRESS, [None, None, None])]), broken.PassesOverConflicts)
    conflicting(world)
    world.run()
    assert world.replicas[EGRESS].state().status is not Status.CONFLICT
    assert world.verdict()


class Short:
    """A source whose every artifact breaks off after so many bytes."""

    def __init__(self, store, after):
        self._store = store
        self._after = after

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get_object(self, bucket, key, *, begin=0, zone=""):
        sent = b"".join(self._store.get_object(bucket, key, begin=begin, zone=zone))
        yield sent[: self._after]
        if len(sent) > self._after:
            raise ConnectionResetError("planned")


@pytest.mark.parametrize("replication, arrives", [(Replication, True), (broken.CopiesFromTheBeginning, False)])
def test_an_artifact_that_breaks_off_is_gone_on_with(replication, arrives):
    world = World(quiet(appends=[(1.0, EGRESS, [None, 300, None])]), replication)
    world.stores["plant"] = Short(world.stores["plant"], 64)
    world.run()
    assert (world.verdict() == []) is arrives
    # No byte went over the line twice.
    assert (world.sent == 300) is arrives


def after_a_loss(replication=Replication):
    """A world whose second fact has lost its artifact for a minute, and the state in the meantime."""
    world = World(quiet(until=200.0), replication)
    world.append(EGRESS, [None, 40, None])
    contents, seen = world.stores["plant"]._artifacts._contents, []
    lost = dict(contents)
    contents.clear()
    world.after(60.0, lambda: seen.append(world.replicas[EGRESS].state()))
    world.after(61.0, lambda: contents.update(lost))
    return world.run(), seen[0]


@pytest.mark.spec("FAC-23")
def test_facts_wait_behind_a_lost_artifact_and_go_on_when_it_is_back():
    world, state = after_a_loss()
    assert state.status is Status.ARTIFACT_LOST
    assert not state.halted
    assert (state.offset, state.trouble.message_id) == (1, "plant-hub-1")
    assert "of-plant/hub/1" in state.trouble.reason
    assert world.verdict() == []


def test_one_that_passes_over_lost_artifacts_is_noticed():
    """The destination lets nothing past the gap; what is noticed is that the loss is not told."""
    _, state = after_a_loss(broken.PassesOverLostArtifacts)
    assert state.status is not Status.ARTIFACT_LOST


@pytest.mark.spec("FAC-16")
def test_a_full_store_is_waited_for_and_loses_nothing():
    world = World(quiet(appends=[(1.0, EGRESS, [None] * 10)], until=200.0))
    world.stores["hub"]._max_facts = 4
    seen = []

    def read():
        seen.append(world.replicas[EGRESS].state())
        hub = world.stores["hub"]
        for stored in hub.fetch_facts("consumer", EGRESS, 10):
            hub.confirm_receipt("consumer", EGRESS, stored.cursor)
        hub.prune(10**18)

    for at in (30.0, 60.0, 90.0):
        world.after(at, read)
    world.run()
    assert [state.status for state in seen] == [Status.FULL, Status.FULL, Status.FOLLOWING]
    assert [state.offset for state in seen] == [4, 8, 10]
    assert seen[0].lag.facts == 6
    assert world.verdict() == []


def test_a_reader_that_was_retired_is_registered_again():
    world = World(quiet(appends=[(1.0, EGRESS, [None, None]), (50.0, EGRESS, [None])]))
    world.after(20.0, lambda: world.stores["plant"].retire_reader("hub", EGRESS))
    assert world.run().verdict() == []


def test_facts_that_the_source_has_dropped_stop_the_pair():
    world = World(quiet(appends=[(1.0, EGRESS, [None] * 3)]))

    def drop():
        plant = world.stores["plant"]
        plant.fetch_facts("other", EGRESS, 0)
        plant.retire_reader("hub", EGRESS)
        plant.confirm_receipt("other", EGRESS, plant.end_of(EGRESS))
        plant.prune(10**18)

    world.plan = replace(world.plan, appends=[])
    world.append(EGRESS, [None] * 3)
    drop()
    world.run()
    state = world.replicas[EGRESS].state()
    assert state.status is Status.GONE
    assert state.halted
    assert state.offset == 0


def test_lag_is_told_in_facts_bytes_and_seconds_and_goes_on_growing_while_the_line_is_cut():
    moods = {EGRESS: [(0.0, "good"), (20.0, "cut"), (100.0, "good")]}
    plan = quiet(moods=moods, appends=[(1.0, EGRESS, [None] * 2), (25.0, EGRESS, [None] * 3)], until=160.0)
    world = World(plan)
    seen = {}
    for at in (18.0, 60.0, 90.0, 150.0):
        world.after(at, lambda at=at: seen.__setitem__(at, world.replicas[EGRESS].state()))
    world.run()
    assert (seen[18.0].status, seen[18.0].lag.facts) == (Status.FOLLOWING, 0)
    # Nobody knows what has come meanwhile: what is known is how long nothing was heard.
    assert seen[60.0].status is seen[90.0].status is Status.UNREACHABLE
    assert 35 < seen[60.0].lag.seconds < 45
    assert 65 < seen[90.0].lag.seconds < 75
    assert (seen[150.0].status, seen[150.0].lag.facts, seen[150.0].lag.seconds) == (Status.FOLLOWING, 0, 0)
