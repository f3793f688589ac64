"""Every query of every dashboard and alert, run on a real Prometheus that scrapes real workers under load."""

from __future__ import annotations

import re
import time

import pytest

from tests.integration.observing import TIMEOUT_SECONDS, ObservedSystem
from tests.servers.prometheus import PrivatePrometheus
from tests.unit.tools.queries import ALERTS_FILE, find_selectors, iter_panel_queries, load_alert_rules, load_dashboards

#: What no healthy system shows: a missing artifact that a fact names, and a replica that has stopped.
EXPECTED_EMPTY = {
    "ergon_artifacts_lost_total",
    'ergon_replication_status{ergon_fact_status!~"starting|following|stopped"}',
}


@pytest.fixture
def prometheus_and_system(tmp_path, databases):
    """A Prometheus that scrapes the test system, and the test system."""
    dsn = databases.borrow()
    folder = tmp_path / "world"
    with ObservedSystem(folder, dsn) as system:
        server = PrivatePrometheus(
            folder / "prometheus", [f"127.0.0.1:{port}" for port in system.ports], rules=ALERTS_FILE
        )
        try:
            server.start()
            yield server, system
        finally:
            server.stop()
    databases.release(dsn)


def find_unanswered(server, queries):
    """Return those of *queries* that have returned no data, each repeated until it has."""
    pending, deadline = dict(queries), time.monotonic() + TIMEOUT_SECONDS
    while pending and time.monotonic() < deadline:
        for name, expression in list(pending.items()):
            if any(sample["value"][1] != "NaN" for sample in server.ask(expression)):
                del pending[name]
        if pending:
            time.sleep(0.2)
    return pending


@pytest.mark.spec("RUN-04")
def test_every_dashboard_and_alert_query_returns_data_under_load(prometheus_and_system):
    server, system = prometheus_and_system
    queries = {(name, expression): expression for name, expression in iter_panel_queries()}
    for board in load_dashboards().values():
        for variable in board["templating"]["list"][1:]:
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
            queries[board["title"], variable["name"]] = f'{metric}{{{label}!=""}}'
    alert_selectors = {selector for rule in load_alert_rules() for selector in find_selectors(rule["expr"])}
    assert alert_selectors >= EXPECTED_EMPTY
    queries |= {("alerts", one): one for one in alert_selectors - EXPECTED_EMPTY}
    assert find_unanswered(server, queries) == {}, system.read_logs()
    rules = server.list_rules()
    assert len(rules) == len(load_alert_rules())
    assert [rule for rule in rules if rule.get("lastError")] == []
