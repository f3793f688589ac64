"""The text that Prometheus reads."""

from __future__ import annotations

import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ergon_framework.errors import MissingExtraError
from ergon_framework.telemetry import names
from ergon_framework.telemetry.metrics import BUCKET_BOUNDS_SECONDS, HISTOGRAMS, Registry
from ergon_framework.telemetry.names import METRICS
from ergon_framework.telemetry.prometheus import prometheus_label, prometheus_name, render_prometheus


def parse_families(numbers):
    """Return the families by name, as the Prometheus client library parses them."""
    return {family.name: family for family in text_string_to_metric_families(render_prometheus(numbers).decode())}


def get_sample_values(family):
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in family.samples}


@pytest.mark.spec("RUN-04")
def test_counters_and_gauges_have_the_names_that_opentelemetry_gives_them_in_prometheus():
    families = parse_families(
        {
            (names.RETRY_BACKOFF_SECONDS.name, ("charge", "process")): 1.5,
            (names.SLOTS.name, ("charge", "waiting")): 2,
            (names.REPLICATION_LAG_BYTES.name, ("r", "a", "b")): 3,
            (names.CAPACITY_USED_RATIO.name, ("ISB", "disk")): 0.25,
        }
    )
    labels = (("ergon_step", "process"), ("ergon_task", "charge"))
    waited = families["ergon_retry_backoff_duration_seconds"]
    assert (waited.type, get_sample_values(waited)) == (
        "counter",
        {("ergon_retry_backoff_duration_seconds_total", *labels): 1.5},
    )
    assert families["ergon_slots"].type == "gauge"
    assert {"ergon_slots", "ergon_replication_lag_size_bytes", "ergon_facts_capacity_used_ratio"} <= families.keys()


def test_an_attribute_without_a_value_is_no_label():
    families = parse_families({(names.TRANSACTIONS.name, ("charge", "succeeded", "")): 4})
    assert families["ergon_transactions"].samples[0].labels == {"ergon_task": "charge", "ergon_outcome": "succeeded"}


@pytest.mark.spec("RUN-04")
def test_durations_and_waits_are_histograms_with_all_their_buckets_in_order():
    registry = Registry()
    counts = registry.new_loop_metrics("charge", steps=("process",), success_steps=("process", "success"))
    registry.open(counts)
    for seconds in (0.002, 0.3, 1000.0):
        counts.durations["process"].add(seconds)
        counts.observe_age(seconds)
    families = parse_families(registry.snapshot())
    for name in ("ergon_step_duration_seconds", "ergon_queue_wait_seconds"):
        family = families[name]
        assert family.type == "histogram"
        buckets = [sample for sample in family.samples if sample.name == f"{name}_bucket"]
        assert [float(sample.labels["le"]) for sample in buckets] == [*BUCKET_BOUNDS_SECONDS, float("inf")]
        assert [sample.value for sample in buckets] == sorted(sample.value for sample in buckets)
        values = {sample.name.removeprefix(name): sample.value for sample in family.samples}
        assert values["_count"] == values["_bucket"] == 3
        assert values["_sum"] == pytest.approx(1000.302)


def test_counters_of_events_that_have_not_happened_are_zero():
    families = parse_families(
        {(names.PROCESSES.name, ("charge",)): 2, (names.TRANSACTIONS.name, ("charge", "released", "")): 1}
    )
    outcomes = {tuple(sorted(sample.labels.items())): sample.value for sample in families["ergon_transactions"].samples}
    assert sorted(outcomes.values()) == [0] * 8 + [1]
    assert [sample.value for sample in families["ergon_processes_died"].samples] == [0]


def test_values_are_escaped():
    families = parse_families({(names.PAUSED.name, ("charge", 'a "quoted"\nreason\\')): 1})
    assert families["ergon_paused"].samples[0].labels["ergon_reason"] == 'a "quoted"\nreason\\'


def test_metric_names_are_unique():
    bucket_metrics = {part for histogram in HISTOGRAMS for part in (histogram.count, histogram.total, histogram.bucket)}
    exposed_names = [prometheus_name(metric) for metric in METRICS if metric not in bucket_metrics]
    assert len(set(exposed_names)) == len(exposed_names)
    assert "ergon_step_duration_seconds" not in exposed_names
    assert prometheus_label("ergon.task") == "ergon_task"


def test_a_missing_library_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    with pytest.raises(MissingExtraError, match="prometheus"):
        render_prometheus({})
