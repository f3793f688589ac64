"""What is shipped to Grafana and Prometheus is whole, and speaks of metrics that there are."""

from __future__ import annotations

import re

from ergon_framework.telemetry.exposition import exposed_name
from ergon_framework.telemetry.names import METRICS
from tests.unit.tools.queries import DEPLOY, ROOT, alerts, boards, panels, selectors
from tools import dashboards


def test_the_dashboards_are_as_the_tool_writes_them():
    assert set(boards()) == set(dashboards.ALL)
    for name, dashboard in dashboards.ALL.items():
        text = (DEPLOY / "grafana" / f"{name}.json").read_text(encoding="utf-8")
        assert text == dashboards.written(dashboard), "run: python tools/dashboards.py"


def test_dashboards_and_alerts_name_metrics_that_there_are():
    known = {exposed_name(metric) + ("_total" if metric.kind == "counter" else "") for metric in METRICS} | {"up"}
    for name in ("ergon_step_duration_seconds", "ergon_queue_wait_seconds"):
        known |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    asked = [expression for _, expression in panels()] + [rule["expr"] for rule in alerts()]
    named = {selector.partition("{")[0] for expression in asked for selector in selectors(expression)}
    assert named - known == set()
    assert len(named) > 40


def test_no_two_panels_share_a_place_and_every_page_has_a_name_of_its_own():
    for board in boards().values():
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(set(places)) == len(places)
    assert len({board["uid"] for board in boards().values()}) == len(boards())


def test_every_alert_stands_in_the_guide_with_what_to_do():
    guide = (ROOT / "docs" / "guides" / "observe.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(Ergon\w+)` \|", guide, re.MULTILINE)
    assert sorted(told) == sorted(rule["alert"] for rule in alerts())
