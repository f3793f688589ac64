"""Every query of the dashboards and alerts in deploy/."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
ALERTS_FILE = DEPLOY / "prometheus" / "alerts.yml"


def load_dashboards():
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (DEPLOY / "grafana").glob("*.json")}


def load_alert_rules():
    document = yaml.safe_load(ALERTS_FILE.read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def iter_panel_queries():
    """Return every query of every dashboard, as Grafana sends it with all variables set to all."""
    for name, dashboard in load_dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", fill_variables(target["expr"])


def fill_variables(expression):
    return re.sub(r'"\$\w+"', '".*"', expression.replace("$__rate_interval", "10s"))


def find_selectors(expression):
    """Return the distinct selectors of a query; labels in `by (…)` are not selectors."""
    bare = re.sub(r"\b(?:by|on)\s*\([^)]*\)", " ", expression)
    return sorted(set(re.findall(r"\b(?:ergon_[a-z_]+|up)(?:\{[^}]*\})?", bare)))
