"""The counters of several processes are added, and no counter decreases."""

from __future__ import annotations

import json
import random

import pytest

from ergon_framework.telemetry import multiprocess, names
from ergon_framework.telemetry.metrics import OTHER_VALUE, Registry
from ergon_framework.telemetry.multiprocess import MultiprocessMetrics, serialize_numbers

DONE = (names.TRANSACTIONS.name, ("charge", "succeeded", ""))
WAITED = (names.RETRY_BACKOFF_SECONDS.name, ("charge", "process"))
SLOTS = (names.SLOTS.name, ("charge", "running"))
DEPTH = (names.QUEUE_DEPTH.name, ("charge", "ready"))


def send_report(totals, source, numbers):
    """Apply a report as it arrives through the pipe."""
    for part in serialize_numbers(numbers):
        totals.update(source, json.loads(json.dumps(part)))


@pytest.fixture
def totals():
    return MultiprocessMetrics(read_own=dict)


@pytest.mark.spec("RUN-04")
def test_counters_of_all_processes_are_summed():
    totals = MultiprocessMetrics(read_own=lambda: {DONE: 1})
    send_report(totals, 1, {DONE: 10})
    send_report(totals, 2, {DONE: 100})
    assert totals.read() == {DONE: 111}
    send_report(totals, 2, {DONE: 200})
    assert totals.read() == {DONE: 211}


@pytest.mark.spec("RUN-04")
def test_the_counters_of_a_dead_process_are_kept_and_its_gauges_are_not(totals):
    send_report(totals, 1, {DONE: 10, SLOTS: 3})
    send_report(totals, 2, {DONE: 5, SLOTS: 4})
    totals.remove(1)
    assert totals.read() == {DONE: 15, SLOTS: 4}
    send_report(totals, 1, {DONE: 2, SLOTS: 1})
    assert totals.read() == {DONE: 17, SLOTS: 5}
    totals.remove(1)
    totals.remove(1)
    assert totals.read() == {DONE: 17, SLOTS: 4}


def test_a_gauge_of_a_shared_resource_is_the_maximum_of_all_processes(totals):
    send_report(totals, 1, {DEPTH: 7})
    send_report(totals, 2, {DEPTH: 9})
    assert totals.read() == {DEPTH: 9}
    totals.remove(2)
    assert totals.read() == {DEPTH: 7}


def test_a_sum_of_fractions_does_not_decrease_when_a_process_dies(totals):
    rng = random.Random(7)
    for _ in range(200):
        for source in (1, 2, 3):
            send_report(totals, source, {WAITED: rng.random()})
        before = totals.read()[WAITED]
        for source in rng.sample((1, 2, 3), 3):
            totals.remove(source)
            assert totals.read()[WAITED] >= before


def test_a_report_in_parts_counts_when_it_is_complete(totals, monkeypatch):
    monkeypatch.setattr(multiprocess, "MAX_REPORT_VALUES", 2)
    send_report(totals, 1, {DONE: 1})
    parts = list(serialize_numbers({DONE: 5, SLOTS: 1, DEPTH: 2}))
    assert [part["last"] for part in parts] == [False, True]
    totals.update(1, parts[0])
    assert totals.read() == {DONE: 1}
    totals.update(1, parts[1])
    assert totals.read() == {DONE: 5, SLOTS: 1, DEPTH: 2}


def test_an_incomplete_report_is_dropped_with_its_process(totals, monkeypatch):
    monkeypatch.setattr(multiprocess, "MAX_REPORT_VALUES", 1)
    totals.update(1, next(serialize_numbers({DONE: 5, SLOTS: 1})))
    totals.remove(1)
    send_report(totals, 1, {SLOTS: 2})
    assert totals.read() == {SLOTS: 2}


def test_an_empty_report_replaces_the_previous_one(totals):
    send_report(totals, 1, {SLOTS: 1})
    send_report(totals, 1, {})
    assert totals.read() == {}


def test_labels_stay_bounded_over_any_number_of_deaths():
    totals = MultiprocessMetrics(read_own=dict, limit=3)
    for number in range(50):
        send_report(totals, 1, {(names.REJECTED_DELIVERIES.name, ("charge", f"reason-{number}")): 1})
        totals.remove(1)
    numbers = totals.read()
    assert numbers.pop((names.REJECTED_DELIVERIES.name, ("charge", OTHER_VALUE))) == 47
    assert list(numbers.values()) == [1, 1, 1]


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
def test_invalid_rows_of_a_report_are_ignored(totals, rows):
    totals.update(1, {"numbers": rows, "last": True})
    assert totals.read() == {}


def test_a_snapshot_has_every_metric_and_does_not_reset_the_maximum_age():
    registry = Registry()
    counts = registry.new_loop_metrics("charge", steps=("process",), success_steps=("process", "success"))
    registry.open(counts)
    counts.plain = 3
    counts.durations["process"].add(0.2)
    counts.observe_age(5.0)
    counts.usage = lambda: (1, 2, 3)
    registry.set_queue_depth("charge", {"ready": 4}, 6.0)
    numbers = registry.snapshot()
    for metric in names.METRICS:
        if metric is not names.QUEUE_AGE_MAX:
            expected = {
                (metric.name, tuple(labels.get(name, "") for name in metric.attributes)): value
                for labels, value in registry.read(metric)
            }
            assert {key: value for key, value in numbers.items() if key[0] == metric.name} == expected
    assert registry.read(names.QUEUE_AGE_MAX) == [({"ergon.task": "charge"}, 5.0)]
