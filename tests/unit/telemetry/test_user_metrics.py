"""Metrics of user code on the metrics page: of one process, and of several."""

from __future__ import annotations

import json
import sys

import prometheus_client
import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from ergon_framework.telemetry import names, user_metrics
from ergon_framework.telemetry.multiprocess import MultiprocessMetrics, serialize_report
from ergon_framework.telemetry.names import Event
from ergon_framework.telemetry.prometheus import render_prometheus
from ergon_framework.telemetry.user_metrics import UserFamily, collect_families, parse_families, serialize_families

DONE = (names.TRANSACTIONS.name, ("charge", "succeeded", ""))


@pytest.fixture
def register():
    """Register a collector in the default registry until the end of the test."""
    registry, collectors = prometheus_client.REGISTRY, []

    def add(collector):
        if not isinstance(collector, prometheus_client.metrics.MetricWrapperBase):
            registry.register(collector)
        collectors.append(collector)
        return collector

    yield add
    for collector in collectors:
        registry.unregister(collector)


class Families:
    """A collector with fixed families."""

    def __init__(self, *families, error=None):
        self.families = families
        self.error = error

    def describe(self):
        return []

    def collect(self):
        yield from self.families
        if self.error is not None:
            raise self.error


def render(numbers, families):
    return {
        family.name: {(sample.name, *sorted(sample.labels.values())): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(render_prometheus(numbers, families).decode())
    }


def family(name, value, kind="counter", labels=()):
    sample = f"{name}_total" if kind == "counter" else name
    return {name: UserFamily(name, kind, "of a test", {(sample, tuple(labels)): value})}


def send_report(totals, source, families, numbers=()):
    for part in serialize_report(dict(numbers), families):
        totals.update(source, json.loads(json.dumps(part)))


def test_what_user_code_has_registered_is_on_the_page_beside_ours(register):
    register(prometheus_client.Counter("orders_charged", "Charged orders.", ["shop"])).labels('no"rth\n').inc(3)
    register(prometheus_client.Gauge("shelf_level", "Items.")).set(7)
    register(prometheus_client.Histogram("charge_seconds", "Durations.", buckets=[1.0])).observe(0.5)
    page = render({DONE: 5}, collect_families())
    assert page["orders_charged"] == {("orders_charged_total", 'no"rth\n'): 3.0}
    assert page["shelf_level"] == {("shelf_level",): 7.0}
    assert page["charge_seconds"] == {
        ("charge_seconds_bucket", "1.0"): 1.0,
        ("charge_seconds_bucket", "+Inf"): 1.0,
        ("charge_seconds_count",): 1.0,
        ("charge_seconds_sum",): 0.5,
    }
    assert page["ergon_transactions"]["ergon_transactions_total", "charge", "succeeded"] == 5
    assert not [name for name in page if name.startswith(("python_", "process_"))]


def test_a_name_of_ours_is_left_out(register):
    register(Families(CounterMetricFamily("ergon_transactions", "not ours", value=9), GaugeMetricFamily("mine", "", 1)))
    assert list(collect_families()) == ["mine"]


def test_without_prometheus_client_there_is_nothing_to_collect(monkeypatch):
    monkeypatch.delitem(sys.modules, "prometheus_client")
    assert collect_families() == {}


def test_a_collector_that_raises_leaves_the_families_before_it(register, caplog):
    register(Families(GaugeMetricFamily("first", "", 1), error=OSError("no database")))
    assert list(collect_families()) == ["first"]
    assert [entry.event for entry in caplog.records] == [Event.TELEMETRY_FAILED]


def test_the_number_of_samples_is_limited(register, monkeypatch):
    monkeypatch.setattr(user_metrics, "MAX_SAMPLES", 2)
    register(Families(*(GaugeMetricFamily(name, "", 1) for name in ("one", "two", "three"))))
    assert list(collect_families()) == ["one", "two"]


@pytest.mark.spec("RUN-04")
def test_counters_of_all_processes_are_summed_and_stay_after_an_end():
    totals = MultiprocessMetrics(read_own=dict)
    send_report(totals, 1, family("charged", 2) | family("level", 1, "gauge"))
    send_report(totals, 2, family("charged", 5) | family("level", 3, "gauge"))
    page = render(totals.read(), totals.read_families())
    assert page == {"charged": {("charged_total",): 7.0}, "level": {("level",): 4.0}}
    totals.remove(1)
    page = render(totals.read(), totals.read_families())
    assert page == {"charged": {("charged_total",): 7.0}, "level": {("level",): 3.0}}
    send_report(totals, 1, family("charged", 1))
    assert render({}, totals.read_families())["charged"] == {("charged_total",): 8.0}


def test_a_counter_never_decreases():
    totals = MultiprocessMetrics(read_own=dict)
    send_report(totals, 1, family("charged", 5.0))
    assert totals.read_families()["charged"].samples == {("charged_total", ()): 5.0}
    send_report(totals, 1, family("charged", 4.0))
    assert totals.read_families()["charged"].samples == {("charged_total", ()): 5.0}


def test_a_state_is_not_summed():
    totals = MultiprocessMetrics(read_own=dict)
    for source in (1, 2):
        send_report(totals, source, family("build", 1, "info", [("version", "3")]))
    assert list(totals.read_families()["build"].samples.values()) == [1]


def test_a_family_that_has_another_kind_in_another_process_is_skipped():
    totals = MultiprocessMetrics(read_own=dict)
    send_report(totals, 1, family("level", 1, "gauge"))
    send_report(totals, 2, family("level", 1, "counter"))
    assert totals.read_families()["level"].samples == {("level", ()): 1}


def test_a_report_is_applied_as_a_whole_and_a_part_may_hold_a_part_of_a_family(monkeypatch):
    monkeypatch.setattr(user_metrics, "MAX_REPORT_CHARS", 300)
    samples = {("level", (("shelf", f"{n}"),)): float(n) for n in range(9)}
    families = {"level": UserFamily("level", "gauge", "", samples), "empty": UserFamily("empty", "gauge", "")}
    parts = list(serialize_families(families))
    assert len(parts) > 2
    totals = MultiprocessMetrics(read_own=dict)
    for part in parts:
        totals.update(1, {"families": part, "last": False})
        assert totals.read_families() == {}
    totals.update(1, {"numbers": [], "last": True})
    assert totals.read_families() == families
    send_report(totals, 1, {})
    assert totals.read_families() == {}


def test_malformed_reports_are_skipped():
    assert list(parse_families(None)) == []
    rows = [["level"], ["level", "gauge", "", [["level", [["a", "b"]], "x"], ["level", [], 2]]]]
    assert list(parse_families(rows)) == [UserFamily("level", "gauge", "", {("level", ()): 2})]
