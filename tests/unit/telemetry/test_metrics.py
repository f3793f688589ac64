"""Metrics are plain numbers until somebody collects them."""

from __future__ import annotations

import gc
import weakref

import pytest
from opentelemetry.sdk.metrics import MeterProvider

from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import BOUNDS, OTHER, Registry, registry_of


def loop(registry, task="Orders"):
    counts = registry.counts(task, steps=("process", "success"), everyday=("process", "success"))
    registry.open(counts)
    return counts


def read(registry, metric):
    return {tuple(labels.get(name) for name in metric.attributes): value for labels, value in registry.read(metric)}


@pytest.fixture
def registry():
    return Registry()


def test_counters_of_all_loops_of_a_task_are_added(registry):
    for _ in range(3):
        loop(registry).add(names.FETCHES)
    loop(registry, "Bills").add(names.FETCHES, amount=5)
    assert read(registry, names.FETCHES) == {("Orders",): 3, ("Bills",): 5}


def test_what_a_loop_has_counted_outlives_it(registry):
    counts = loop(registry)
    counts.add(names.FETCHES)
    counts.plain = 2
    counts.durations["process"].add(0.2)
    counts.fenced = lambda: 4
    before = {metric.name: read(registry, metric) for metric in names.METRICS}
    registry.close(counts)
    assert {metric.name: read(registry, metric) for metric in names.METRICS} == before
    assert read(registry, names.FENCED) == {("Orders",): 4}


def test_closing_twice_counts_once(registry):
    counts = loop(registry)
    counts.add(names.FETCHES)
    registry.close(counts)
    registry.close(counts)
    assert read(registry, names.FETCHES) == {("Orders",): 1}


def test_a_loop_that_is_over_is_forgotten(registry):
    counts = loop(registry)
    registry.close(counts)
    gone = weakref.ref(counts)
    del counts
    gc.collect()
    assert gone() is None


def test_the_everyday_case_counts_an_attempt_of_both_steps(registry):
    loop(registry).plain = 7
    assert read(registry, names.TRANSACTIONS) == {("Orders", "succeeded", None): 7}
    assert read(registry, names.ATTEMPTS) == {("Orders", "process"): 7, ("Orders", "success"): 7}


def test_durations_are_a_cumulative_histogram(registry):
    durations = loop(registry).durations["process"]
    for seconds in (0.001, 0.0011, 0.4, 1000.0):
        durations.add(seconds)
    buckets = {le: value for (_, _, le), value in read(registry, names.STEP_BUCKETS).items()}
    assert (buckets["0.001"], buckets["0.0025"], buckets["0.25"], buckets["0.5"]) == (1, 2, 2, 3)
    assert (buckets["300"], buckets["+Inf"]) == (3, 4)
    assert len(buckets) == len(BOUNDS) + 1
    assert read(registry, names.STEPS) == {("Orders", "process"): 4}
    assert read(registry, names.STEP_SECONDS)["Orders", "process"] == pytest.approx(1000.4021)


def test_labels_are_bounded():
    registry = Registry(limit=2)
    counts = loop(registry)
    for reason in ("a", "b", "c", "d", "a"):
        counts.add(names.REFUSED, reason)
    assert read(registry, names.REFUSED) == {("Orders", "a"): 2, ("Orders", "b"): 1, ("Orders", OTHER): 2}


def test_task_names_are_bounded_too():
    registry = Registry(limit=2)
    for task in ("A", "B", "C", "D"):
        loop(registry, task).add(names.FETCHES)
    assert read(registry, names.FETCHES) == {("A",): 1, ("B",): 1, (OTHER,): 2}


def test_reasons_of_pauses_are_bounded():
    registry = Registry(limit=1)
    for reason in ("breaker", "disk"):
        loop(registry).paused = reason
    assert set(read(registry, names.PAUSED)) == {("Orders", "breaker"), ("Orders", OTHER)}


def test_gauges_vanish_with_their_loop(registry):
    counts = loop(registry)
    counts.usage = lambda: (3, 2, 1)
    counts.paused = "breaker"
    counts.aged(5.0)
    assert read(registry, names.SLOTS) == {
        ("Orders", "running"): 3,
        ("Orders", "abandoned"): 2,
        ("Orders", "held"): 1,
    }
    registry.close(counts)
    for metric in (names.SLOTS, names.PAUSED, names.QUEUE_AGE, names.QUEUE_AGE_MAX):
        assert read(registry, metric) == {}


def test_the_age_of_a_queue_is_that_of_its_oldest_loop(registry):
    for age in (5.0, 9.0, 2.0):
        loop(registry).aged(age)
    assert read(registry, names.QUEUE_AGE) == {("Orders",): 9.0}


def test_the_largest_age_begins_anew_when_it_was_read(registry):
    counts = loop(registry)
    for age in (5.0, 9.0, 2.0):
        counts.aged(age)
    assert read(registry, names.QUEUE_AGE) == {("Orders",): 2.0}
    assert read(registry, names.QUEUE_AGE_MAX) == {("Orders",): 9.0}
    assert read(registry, names.QUEUE_AGE_MAX) == {}


def test_a_provider_has_one_registry_and_is_not_kept_alive_by_it():
    provider = MeterProvider()
    assert registry_of(provider) is registry_of(provider)
    assert registry_of(provider) is not registry_of()
    provider.shutdown()
    gone = weakref.ref(provider)
    del provider
    gc.collect()
    assert gone() is None


def test_the_process_has_one_registry_of_its_own():
    assert registry_of() is registry_of()


def test_the_level_of_a_queue_is_told_by_task_and_taken_back(registry):
    registry.level("Relay", {"ready": 3, "dead": 1}, 2.5)
    registry.level("Relay", {"ready": 2, "dead": 0})
    assert read(registry, names.QUEUE_DEPTH) == {("Relay", "ready"): 2, ("Relay", "dead"): 0}
    assert read(registry, names.QUEUE_LAG) == {("Relay",): 0.0}
    registry.level("Relay", {"ready": 1}, 2.5)
    assert read(registry, names.QUEUE_LAG) == {("Relay",): 2.5}
    for _ in range(2):
        registry.level("Relay", None)
        assert read(registry, names.QUEUE_DEPTH) == read(registry, names.QUEUE_LAG) == {}
