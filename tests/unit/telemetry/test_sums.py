"""What several processes have counted is added up, and no counter goes back."""

from __future__ import annotations

import json
import random

import pytest

from ergon_framework.telemetry import names, sums
from ergon_framework.telemetry.metrics import OTHER, Registry
from ergon_framework.telemetry.sums import Sums, told

DONE = (names.TRANSACTIONS.name, ("charge", "succeeded", ""))
WAITED = (names.WAITED.name, ("charge", "process"))
SLOTS = (names.SLOTS.name, ("charge", "running"))
DEPTH = (names.QUEUE_DEPTH.name, ("charge", "ready"))


def tell(together, source, numbers):
    """As it comes over the line."""
    for part in told(numbers):
        together.tell(source, json.loads(json.dumps(part)))


@pytest.fixture
def together():
    return Sums(own=dict)


@pytest.mark.spec("RUN-04")
def test_counters_of_several_processes_are_added_with_those_of_the_own_process():
    together = Sums(own=lambda: {DONE: 1})
    tell(together, 1, {DONE: 10})
    tell(together, 2, {DONE: 100})
    assert together.read() == {DONE: 111}
    tell(together, 2, {DONE: 200})
    assert together.read() == {DONE: 211}


@pytest.mark.spec("RUN-04")
def test_what_a_dead_process_has_counted_is_kept_and_its_gauges_are_not(together):
    tell(together, 1, {DONE: 10, SLOTS: 3})
    tell(together, 2, {DONE: 5, SLOTS: 4})
    together.gone(1)
    assert together.read() == {DONE: 15, SLOTS: 4}
    tell(together, 1, {DONE: 2, SLOTS: 1})
    assert together.read() == {DONE: 17, SLOTS: 5}
    together.gone(1)
    together.gone(1)
    assert together.read() == {DONE: 17, SLOTS: 4}


def test_of_what_all_processes_look_at_the_largest_value_holds(together):
    tell(together, 1, {DEPTH: 7})
    tell(together, 2, {DEPTH: 9})
    assert together.read() == {DEPTH: 9}
    together.gone(2)
    assert together.read() == {DEPTH: 7}


def test_a_sum_of_fractions_does_not_go_back_by_a_hair_when_a_process_dies(together):
    dice = random.Random(7)
    for _ in range(200):
        for source in (1, 2, 3):
            tell(together, source, {WAITED: dice.random()})
        before = together.read()[WAITED]
        for source in dice.sample((1, 2, 3), 3):
            together.gone(source)
            assert together.read()[WAITED] >= before


def test_a_report_in_parts_counts_when_it_is_complete(together, monkeypatch):
    monkeypatch.setattr(sums, "PART", 2)
    tell(together, 1, {DONE: 1})
    parts = list(told({DONE: 5, SLOTS: 1, DEPTH: 2}))
    assert [part["last"] for part in parts] == [False, True]
    together.tell(1, parts[0])
    assert together.read() == {DONE: 1}
    together.tell(1, parts[1])
    assert together.read() == {DONE: 5, SLOTS: 1, DEPTH: 2}


def test_a_report_that_broke_off_is_forgotten_with_its_process(together, monkeypatch):
    monkeypatch.setattr(sums, "PART", 1)
    together.tell(1, next(told({DONE: 5, SLOTS: 1})))
    together.gone(1)
    tell(together, 1, {SLOTS: 2})
    assert together.read() == {SLOTS: 2}


def test_a_process_that_has_counted_nothing_tells_that(together):
    tell(together, 1, {SLOTS: 1})
    tell(together, 1, {})
    assert together.read() == {}


def test_labels_stay_bounded_over_any_number_of_deaths():
    together = Sums(own=dict, limit=3)
    for number in range(50):
        tell(together, 1, {(names.REFUSED.name, ("charge", f"reason-{number}")): 1})
        together.gone(1)
    found = together.read()
    assert found.pop((names.REFUSED.name, ("charge", OTHER))) == 47
    assert list(found.values()) == [1, 1, 1]


@pytest.mark.parametrize(
    "rows",
    [
        None,
        "x",
        [None],
        [[names.SLOTS.name, ["charge"], 1]],
        [["ergon.unknown", ["charge"], 1]],
        [[1, [], 1]],
        [[names.FETCHES.name, ["charge"], "many"]],
    ],
)
def test_of_a_report_nothing_is_believed_but_what_fits(together, rows):
    together.tell(1, {"numbers": rows, "last": True})
    assert together.read() == {}


def test_a_snapshot_has_every_value_that_is_read_one_by_one_and_keeps_the_largest_age_for_others():
    registry = Registry()
    counts = registry.counts("charge", steps=("process",), everyday=("process", "success"))
    registry.open(counts)
    counts.plain = 3
    counts.durations["process"].add(0.2)
    counts.aged(5.0)
    counts.usage = lambda: (1, 2, 3)
    registry.level("charge", {"ready": 4}, 6.0)
    found = registry.snapshot()
    for metric in names.METRICS:
        if metric is not names.QUEUE_AGE_MAX:
            expected = {
                (metric.name, tuple(labels.get(name, "") for name in metric.attributes)): value
                for labels, value in registry.read(metric)
            }
            assert {key: value for key, value in found.items() if key[0] == metric.name} == expected
    assert registry.read(names.QUEUE_AGE_MAX) == [({"ergon.task": "charge"}, 5.0)]
