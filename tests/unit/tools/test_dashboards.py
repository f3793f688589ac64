"""The files for Grafana and Prometheus are complete and use existing metrics."""

from __future__ import annotations

import re

from ergon_framework.telemetry.names import METRICS
from ergon_framework.telemetry.prometheus import prometheus_name
from tests.unit.tools.queries import DEPLOY, ROOT, find_selectors, iter_panel_queries, load_alert_rules, load_dashboards
from tools import dashboards


def test_the_dashboards_are_as_the_tool_writes_them():
    assert set(load_dashboards()) == set(dashboards.DASHBOARDS)
    for name, dashboard in dashboards.DASHBOARDS.items():
        text = (DEPLOY / "grafana" / f"{name}.json").read_text(encoding="utf-8")
        assert text == dashboards.render_dashboard(dashboard), "run: python tools/dashboards.py"


def test_dashboards_and_alerts_use_existing_metrics():
    metric_names = {prometheus_name(metric) + ("_total" if metric.kind == "counter" else "") for metric in METRICS} | {
        "up"
    }
    for name in ("ergon_step_duration_seconds", "ergon_queue_wait_seconds"):
        metric_names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    expressions = [expression for _, expression in iter_panel_queries()] + [rule["expr"] for rule in load_alert_rules()]
    used_names = {selector.partition("{")[0] for expression in expressions for selector in find_selectors(expression)}
    assert used_names - metric_names == set()
    assert len(used_names) > 40


def test_no_two_panels_share_a_position_and_every_dashboard_has_its_own_uid():
    for dashboard in load_dashboards().values():
        positions = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
        assert len(set(positions)) == len(positions)
    assert len({dashboard["uid"] for dashboard in load_dashboards().values()}) == len(load_dashboards())


def test_every_alert_is_in_the_guide():
    guide = (ROOT / "docs" / "guides" / "observe.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(Ergon\w+)` \|", guide, re.MULTILINE)
    assert sorted(documented) == sorted(rule["alert"] for rule in load_alert_rules())
