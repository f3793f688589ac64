"""The checker of the brokers' chaos run finds violations, and accepts an excuse only where one exists."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.chaos.broker_verdict import Evidence, evaluate
from tests.chaos.faults import Fault
from tests.chaos.fleet import ProcessRecord
from tests.chaos.mix import Order


class RunBuilder:
    """A run without findings, until a test changes something."""

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

    def run(self, worker, claim, began, ended, *, name="plain-1", key=None, told=("Ack", "settled")):
        lines = self.journals[worker]
        lines.append([began, "claim", claim, name, 1])
        lines.append([began, "start", claim, name, claim, key])
        if ended is not None:
            lines.append([ended, "end", claim, "done"])
            lines.append([ended, "settle", claim, *told, ended])

    def findings(self):
        records = []
        for worker, lines in self.journals.items():
            record = ProcessRecord(worker, None, 0.0, ended_at=100.0, ending=self.how)
            (self.folder / f"{worker}.journal").write_text("".join(json.dumps(line) + "\n" for line in lines))
            records.append(record)
        fleet = SimpleNamespace(
            records=records,
            journal=lambda record: self.folder / f"{record.who}.journal",
            read_stderr=lambda _record: "its last words",
        )
        names = {order.id for order in self.orders}
        evidence = Evidence(
            fleet,
            self.orders,
            self.faults,
            names,
            self.repeated,
            self.effects,
            self.dead,
            5,
            confirms_settlements=self.exact,
        )
        return set(evaluate(evidence).findings)


@pytest.fixture
def builder(tmp_path):
    return RunBuilder(tmp_path)


def test_a_run_that_went_well_has_no_findings(builder):
    builder.run("one", "1", 10, 11)
    assert builder.findings() == set()


def test_a_transaction_without_an_effect_or_dead_letter_is_lost(builder):
    builder.run("one", "1", 10, 11)
    builder.effects = []
    assert builder.findings() == {"confirmed and lost"}


def test_a_repeated_effect_is_doubled_and_also_without_a_start(builder):
    builder.effects = ["plain-1", "plain-1"]
    assert builder.findings() == {"effect doubled", "effect without a start"}


@pytest.mark.parametrize("began, finding", [(11.5, "run again without a cause"), (10.5, "overlap without a cause")])
def test_a_second_run_needs_a_cause(builder, began, finding):
    builder.run("one", "1", 10, 11, told=("Ack", "lost"))
    builder.run("two", "2", began, 12)
    assert builder.findings() == {finding}
    unrelated_faults = [
        Fault("stop", "two", 8.5, 9.0),
        Fault("stop", "one", 20.0, 21.0),
        Fault("stop", "one", 1.0, 8.0),
    ]
    builder.faults = unrelated_faults
    assert builder.findings() == {finding}
    builder.faults = [Fault("stop", "one", 9.9, 10.2)]
    assert builder.findings() == set()
    builder.faults = [Fault("crash", None, 9.9, 10.2)]
    assert builder.findings() == set()
    builder.faults, builder.repeated = [], {"plain-1"}
    assert builder.findings() == set()


@pytest.mark.parametrize("fault", [Fault("cut", "one", 1.0, 2.0), Fault("stop", "two", 8.0, 10.5)])
def test_a_claim_that_arrived_late_is_a_cause(builder, fault):
    builder.run("one", "1", 10, 11, told=("Ack", "lost"))
    builder.run("two", "2", 11.2, 12)
    assert builder.findings() == {"run again without a cause"}
    builder.faults = [fault]
    assert builder.findings() == set()


def test_a_deferred_transaction_needs_no_cause_to_run_again(builder):
    builder.run("one", "1", 10, 11, told=("Defer", "settled"))
    builder.run("one", "2", 12, 13)
    assert builder.findings() == set()


def test_two_runs_of_an_id_or_key_at_once_in_one_process_are_findings(builder):
    builder.faults = [Fault("crash", None, 0, 90)]
    builder.orders.append(Order("plain-2", "plain", 0.1, 0.5))
    builder.effects.append("plain-2")
    builder.run("one", "1", 10, 12, key="key")
    builder.run("one", "2", 11, 13, name="plain-2", key="key")
    builder.run("one", "3", 11.5, 13, told=("Ack", "lost"))
    assert builder.findings() == {"two of a key at once", "overlap within a process"}


def test_two_acks_of_one_transaction_are_excused_only_if_the_broker_does_not_confirm_acks(builder):
    builder.faults = [Fault("cut", "one", 9.9, 12)]
    builder.run("one", "1", 10, 11)
    builder.run("two", "2", 11.5, 12)
    assert builder.findings() == {"acked twice"}
    builder.exact = False
    assert builder.findings() == set()


def test_a_copy_left_by_a_deferral_is_excused_only_if_a_deferral_takes_two_steps(builder):
    builder.faults = [Fault("crash", None, 10.5, 10.9)]
    builder.run("one", "1", 10, 11, told=("Defer", "settled"))
    builder.run("one", "2", 12, 13)
    builder.run("two", "3", 14, 15)
    assert builder.findings() == {"run again without a cause", "acked twice"}
    builder.exact = False
    assert builder.findings() == set()
    builder.faults = []
    assert builder.findings() == {"run again without a cause", "acked twice"}


def test_a_dead_letter_neither_expected_nor_out_of_deliveries_is_a_finding(builder):
    builder.run("one", "1", 10, None)
    builder.run("two", "2", 13, 14, told=("DeadLetter", "settled"))
    builder.effects, builder.dead = [], [("plain-1", "max_deliveries", 6, {})]
    assert "dead without being due" in builder.findings()
    builder.faults = [Fault("kill", "one", 11, 11)]
    assert builder.findings() == set()
    builder.dead = [("plain-1", "declined", 1, {})]
    assert builder.findings() == {"dead without being due"}


def test_an_expected_dead_letter_is_matched_even_if_its_id_cannot_be_read(builder):
    builder.orders = [Order("undecodable-7", "undecodable", 0, 0.5)]
    builder.effects, builder.dead = [], [("digest", "undecodable", 1, b"\xff{not json undecodable-7")]
    assert builder.findings() == set()
    builder.dead = []
    assert builder.findings() == {"alive although it had to die", "confirmed and lost"}


def test_a_worker_that_exits_unexpectedly_is_a_finding(builder):
    builder.run("one", "1", 10, 11)
    builder.how = "by itself with 1"
    assert "a worker ended by itself" in builder.findings()
