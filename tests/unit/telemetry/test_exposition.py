"""The text that Prometheus reads."""

from __future__ import annotations

import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ergon_framework.errors import MissingExtraError
from ergon_framework.telemetry import names
from ergon_framework.telemetry.exposition import exposed, exposed_label, exposed_name
from ergon_framework.telemetry.metrics import BOUNDS, HISTOGRAMS, Registry
from ergon_framework.telemetry.names import METRICS


def read(numbers):
    """Families by name, as Prometheus' own library reads them."""
    return {family.name: family for family in text_string_to_metric_families(exposed(numbers).decode())}


def samples(family):
    return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in family.samples}


@pytest.mark.spec("RUN-04")
def test_counters_and_gauges_have_the_names_that_opentelemetry_gives_them_in_prometheus():
    found = read(
        {
            (names.WAITED.name, ("charge", "process")): 1.5,
            (names.SLOTS.name, ("charge", "held")): 2,
            (names.REPLICA_LAG_BYTES.name, ("r", "a", "b")): 3,
            (names.ROOM.name, ("ISB", "disk")): 0.25,
        }
    )
    labels = (("ergon_step", "process"), ("ergon_task", "charge"))
    waited = found["ergon_waits_duration_seconds"]
    assert (waited.type, samples(waited)) == ("counter", {("ergon_waits_duration_seconds_total", *labels): 1.5})
    assert found["ergon_slots"].type == "gauge"
    assert {"ergon_slots", "ergon_replica_lag_size_bytes", "ergon_facts_room_ratio"} <= found.keys()


def test_an_attribute_without_a_value_is_no_label():
    found = read({(names.TRANSACTIONS.name, ("charge", "succeeded", "")): 4})
    assert found["ergon_transactions"].samples[0].labels == {"ergon_task": "charge", "ergon_outcome": "succeeded"}


@pytest.mark.spec("RUN-04")
def test_durations_and_waits_are_histograms_with_all_their_buckets_in_order():
    registry = Registry()
    counts = registry.counts("charge", steps=("process",), everyday=("process", "success"))
    registry.open(counts)
    for seconds in (0.002, 0.3, 1000.0):
        counts.durations["process"].add(seconds)
        counts.aged(seconds)
    found = read(registry.snapshot())
    for name in ("ergon_step_duration_seconds", "ergon_queue_wait_seconds"):
        family = found[name]
        assert family.type == "histogram"
        buckets = [sample for sample in family.samples if sample.name == f"{name}_bucket"]
        assert [float(sample.labels["le"]) for sample in buckets] == [*BOUNDS, float("inf")]
        assert [sample.value for sample in buckets] == sorted(sample.value for sample in buckets)
        told = {sample.name.removeprefix(name): sample.value for sample in family.samples}
        assert told["_count"] == told["_bucket"] == 3
        assert told["_sum"] == pytest.approx(1000.302)


def test_what_has_not_happened_yet_is_zero_so_that_its_first_time_is_a_rise():
    found = read({(names.PROCESSES.name, ("charge",)): 2, (names.TRANSACTIONS.name, ("charge", "released", "")): 1})
    outcomes = {tuple(sorted(sample.labels.items())): sample.value for sample in found["ergon_transactions"].samples}
    assert sorted(outcomes.values()) == [0] * 8 + [1]
    assert [sample.value for sample in found["ergon_processes_died"].samples] == [0]


def test_values_are_escaped():
    found = read({(names.PAUSED.name, ("charge", 'a "quoted"\nreason\\')): 1})
    assert found["ergon_paused"].samples[0].labels["ergon_reason"] == 'a "quoted"\nreason\\'


def test_no_two_metrics_have_one_name():
    parts = {part for histogram in HISTOGRAMS for part in (histogram.count, histogram.total, histogram.bucket)}
    plain = [exposed_name(metric) for metric in METRICS if metric not in parts]
    assert len(set(plain)) == len(plain)
    assert "ergon_step_duration_seconds" not in plain
    assert exposed_label("ergon.task") == "ergon_task"


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client.exposition", None)
    with pytest.raises(MissingExtraError, match="prometheus"):
        exposed({})
