"""The judge of the brokers' chaos run finds what is wrong, and takes an excuse only where there is one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.chaos.broker_verdict import Evidence, judge
from tests.chaos.faults import Fault
from tests.chaos.fleet import Life
from tests.chaos.mix import Order


class World:
    """A run that went well, until a test changes something."""

    def __init__(self, folder):
        self.folder = folder
        self.journals = {"one": [], "two": []}
        self.orders = [Order("plain-1", "plain", 0.1, 0.5)]
        self.faults = []
        self.repeated = set()
        self.effects = ["plain-1"]
        self.dead = []
        self.exact = True
        self.how = "in good order"

    def run(self, who, claim, began, ended, *, name="plain-1", key=None, told=("Ack", "settled")):
        lines = self.journals[who]
        lines.append([began, "claim", claim, name, 1])
        lines.append([began, "start", claim, name, claim, key])
        if ended is not None:
            lines.append([ended, "end", claim, "done"])
            lines.append([ended, "settle", claim, *told, ended])

    def findings(self):
        lives = []
        for who, lines in self.journals.items():
            life = Life(who, None, 0.0, ended=100.0, how=self.how)
            (self.folder / f"{who}.journal").write_text("".join(json.dumps(line) + "\n" for line in lines))
            lives.append(life)
        fleet = SimpleNamespace(
            lives=lives, journal=lambda life: self.folder / f"{life.who}.journal", said=lambda _life: "its last words"
        )
        names = {order.id for order in self.orders}
        evidence = Evidence(
            fleet, self.orders, self.faults, names, self.repeated, self.effects, self.dead, 5, exact=self.exact
        )
        return set(judge(evidence).findings)


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_a_run_that_went_well_has_no_findings(world):
    world.run("one", "1", 10, 11)
    assert world.findings() == set()


def test_what_has_neither_an_effect_nor_a_dead_letter_is_lost(world):
    world.run("one", "1", 10, 11)
    world.effects = []
    assert world.findings() == {"confirmed and lost"}


def test_an_effect_twice_is_doubled_and_one_without_a_start_is_nobodys(world):
    world.effects = ["plain-1", "plain-1"]
    assert world.findings() == {"effect doubled", "effect without a start"}


@pytest.mark.parametrize("began, wrong", [(11.5, "run again without a cause"), (10.5, "overlap without a cause")])
def test_a_second_run_needs_a_cause(world, began, wrong):
    world.run("one", "1", 10, 11, told=("Ack", "lost"))
    world.run("two", "2", began, 12)
    assert world.findings() == {wrong}
    elsewhere = [Fault("stop", "two", 8.5, 9.0), Fault("stop", "one", 20.0, 21.0), Fault("stop", "one", 1.0, 8.0)]
    world.faults = elsewhere
    assert world.findings() == {wrong}
    world.faults = [Fault("stop", "one", 9.9, 10.2)]
    assert world.findings() == set()
    world.faults = [Fault("crash", None, 9.9, 10.2)]
    assert world.findings() == set()
    world.faults, world.repeated = [], {"plain-1"}
    assert world.findings() == set()


@pytest.mark.parametrize("fault", [Fault("cut", "one", 1.0, 2.0), Fault("stop", "two", 8.0, 10.5)])
def test_a_claim_that_arrived_late_is_a_cause(world, fault):
    world.run("one", "1", 10, 11, told=("Ack", "lost"))
    world.run("two", "2", 11.2, 12)
    assert world.findings() == {"run again without a cause"}
    world.faults = [fault]
    assert world.findings() == set()


def test_what_was_put_off_comes_back_by_itself(world):
    world.run("one", "1", 10, 11, told=("Later", "settled"))
    world.run("one", "2", 12, 13)
    assert world.findings() == set()


def test_nobody_runs_two_of_an_id_or_of_a_key_at_once_in_one_process(world):
    world.faults = [Fault("crash", None, 0, 90)]
    world.orders.append(Order("plain-2", "plain", 0.1, 0.5))
    world.effects.append("plain-2")
    world.run("one", "1", 10, 12, key="key")
    world.run("one", "2", 11, 13, name="plain-2", key="key")
    world.run("one", "3", 11.5, 13, told=("Ack", "lost"))
    assert world.findings() == {"two of a key at once", "overlap within a process"}


def test_two_acks_of_one_transaction_are_excused_only_where_nobody_answers(world):
    world.faults = [Fault("cut", "one", 9.9, 12)]
    world.run("one", "1", 10, 11)
    world.run("two", "2", 11.5, 12)
    assert world.findings() == {"acked twice"}
    world.exact = False
    assert world.findings() == set()


def test_a_copy_that_putting_off_has_left_is_excused_only_where_that_is_two_steps(world):
    world.faults = [Fault("crash", None, 10.5, 10.9)]
    world.run("one", "1", 10, 11, told=("Later", "settled"))
    world.run("one", "2", 12, 13)
    world.run("two", "3", 14, 15)
    assert world.findings() == {"run again without a cause", "acked twice"}
    world.exact = False
    assert world.findings() == set()
    world.faults = []
    assert world.findings() == {"run again without a cause", "acked twice"}


def test_dead_letters_are_due_or_worn_out(world):
    world.run("one", "1", 10, None)
    world.run("two", "2", 13, 14, told=("DeadLetter", "settled"))
    world.effects, world.dead = [], [("plain-1", "max_deliveries", 6, {})]
    assert "dead without being due" in world.findings()
    world.faults = [Fault("kill", "one", 11, 11)]
    assert world.findings() == set()
    world.dead = [("plain-1", "declined", 1, {})]
    assert world.findings() == {"dead without being due"}


def test_what_had_to_die_is_dead_also_when_its_id_cannot_be_read(world):
    world.orders = [Order("undecodable-7", "undecodable", 0, 0.5)]
    world.effects, world.dead = [], [("digest", "undecodable", 1, b"\xff{not json undecodable-7")]
    assert world.findings() == set()
    world.dead = []
    assert world.findings() == {"alive although it had to die", "confirmed and lost"}


def test_a_worker_that_ends_by_itself_is_a_finding(world):
    world.run("one", "1", 10, 11)
    world.how = "by itself with 1"
    assert "a worker ended by itself" in world.findings()
