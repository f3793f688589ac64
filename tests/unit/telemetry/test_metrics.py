"""Metrics are plain numbers until they are collected."""

from __future__ import annotations

import gc
import weakref

import pytest
from opentelemetry.sdk.metrics import MeterProvider

from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import BUCKET_BOUNDS_SECONDS, OTHER_VALUE, Registry, get_registry


def open_loop(registry, task="Orders"):
    counts = registry.new_loop_metrics(task, steps=("process", "success"), success_steps=("process", "success"))
    registry.open(counts)
    return counts


def read_metric(registry, metric):
    return {tuple(labels.get(name) for name in metric.attributes): value for labels, value in registry.read(metric)}


@pytest.fixture
def registry():
    return Registry()


def test_counters_of_all_loops_of_a_task_are_added(registry):
    for _ in range(3):
        open_loop(registry).add(names.FETCHES)
    open_loop(registry, "Bills").add(names.FETCHES, amount=5)
    assert read_metric(registry, names.FETCHES) == {("Orders",): 3, ("Bills",): 5}


def test_the_counters_of_a_loop_outlive_it(registry):
    counts = open_loop(registry)
    counts.add(names.FETCHES)
    counts.plain = 2
    counts.durations["process"].add(0.2)
    counts.late_results = lambda: 4
    before = {metric.name: read_metric(registry, metric) for metric in names.METRICS}
    registry.close(counts)
    assert {metric.name: read_metric(registry, metric) for metric in names.METRICS} == before
    assert read_metric(registry, names.LATE_RESULTS) == {("Orders",): 4}


def test_closing_twice_counts_once(registry):
    counts = open_loop(registry)
    counts.add(names.FETCHES)
    registry.close(counts)
    registry.close(counts)
    assert read_metric(registry, names.FETCHES) == {("Orders",): 1}


def test_a_closed_loop_is_garbage_collected(registry):
    counts = open_loop(registry)
    registry.close(counts)
    reference = weakref.ref(counts)
    del counts
    gc.collect()
    assert reference() is None


def test_the_common_case_counts_an_attempt_of_both_steps(registry):
    open_loop(registry).plain = 7
    assert read_metric(registry, names.TRANSACTIONS) == {("Orders", "succeeded", None): 7}
    assert read_metric(registry, names.ATTEMPTS) == {("Orders", "process"): 7, ("Orders", "success"): 7}


def test_durations_are_a_cumulative_histogram(registry):
    durations = open_loop(registry).durations["process"]
    for seconds in (0.001, 0.0011, 0.4, 1000.0):
        durations.add(seconds)
    buckets = {le: value for (_, _, le), value in read_metric(registry, names.STEP_BUCKETS).items()}
    assert (buckets["0.001"], buckets["0.0025"], buckets["0.25"], buckets["0.5"]) == (1, 2, 2, 3)
    assert (buckets["300"], buckets["+Inf"]) == (3, 4)
    assert len(buckets) == len(BUCKET_BOUNDS_SECONDS) + 1
    assert read_metric(registry, names.STEPS) == {("Orders", "process"): 4}
    assert read_metric(registry, names.STEP_SECONDS)["Orders", "process"] == pytest.approx(1000.4021)


def test_labels_are_bounded():
    registry = Registry(limit=2)
    counts = open_loop(registry)
    for reason in ("a", "b", "c", "d", "a"):
        counts.add(names.REJECTED_DELIVERIES, reason)
    assert read_metric(registry, names.REJECTED_DELIVERIES) == {
        ("Orders", "a"): 2,
        ("Orders", "b"): 1,
        ("Orders", OTHER_VALUE): 2,
    }


def test_task_names_are_bounded_too():
    registry = Registry(limit=2)
    for task in ("A", "B", "C", "D"):
        open_loop(registry, task).add(names.FETCHES)
    assert read_metric(registry, names.FETCHES) == {("A",): 1, ("B",): 1, (OTHER_VALUE,): 2}


def test_reasons_of_pauses_are_bounded():
    registry = Registry(limit=1)
    for reason in ("breaker", "disk"):
        open_loop(registry).paused = reason
    assert set(read_metric(registry, names.PAUSED)) == {("Orders", "breaker"), ("Orders", OTHER_VALUE)}


def test_gauges_are_removed_with_their_loop(registry):
    counts = open_loop(registry)
    counts.usage = lambda: (3, 2, 1)
    counts.paused = "breaker"
    counts.observe_age(5.0)
    assert read_metric(registry, names.SLOTS) == {
        ("Orders", "running"): 3,
        ("Orders", "abandoned"): 2,
        ("Orders", "waiting"): 1,
    }
    registry.close(counts)
    for metric in (names.SLOTS, names.PAUSED, names.QUEUE_AGE, names.QUEUE_AGE_MAX):
        assert read_metric(registry, metric) == {}


def test_the_age_of_a_queue_is_that_of_its_oldest_loop(registry):
    for age in (5.0, 9.0, 2.0):
        open_loop(registry).observe_age(age)
    assert read_metric(registry, names.QUEUE_AGE) == {("Orders",): 9.0}


def test_the_maximum_age_is_reset_when_it_is_read(registry):
    counts = open_loop(registry)
    for age in (5.0, 9.0, 2.0):
        counts.observe_age(age)
    assert read_metric(registry, names.QUEUE_AGE) == {("Orders",): 2.0}
    assert read_metric(registry, names.QUEUE_AGE_MAX) == {("Orders",): 9.0}
    assert read_metric(registry, names.QUEUE_AGE_MAX) == {}


def test_a_provider_has_one_registry_and_is_not_kept_alive_by_it():
    provider = MeterProvider()
    assert get_registry(provider) is get_registry(provider)
    assert get_registry(provider) is not get_registry()
    provider.shutdown()
    reference = weakref.ref(provider)
    del provider
    gc.collect()
    assert reference() is None


def test_the_process_has_one_default_registry():
    assert get_registry() is get_registry()


def test_queue_depth_is_set_per_task_and_can_be_removed(registry):
    registry.set_queue_depth("Relay", {"ready": 3, "dead": 1}, 2.5)
    registry.set_queue_depth("Relay", {"ready": 2, "dead": 0})
    assert read_metric(registry, names.QUEUE_DEPTH) == {("Relay", "ready"): 2, ("Relay", "dead"): 0}
    assert read_metric(registry, names.QUEUE_LAG) == {("Relay",): 0.0}
    registry.set_queue_depth("Relay", {"ready": 1}, 2.5)
    assert read_metric(registry, names.QUEUE_LAG) == {("Relay",): 2.5}
    for _ in range(2):
        registry.set_queue_depth("Relay", None)
        assert read_metric(registry, names.QUEUE_DEPTH) == read_metric(registry, names.QUEUE_LAG) == {}
