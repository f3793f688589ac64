"""Every query of the dashboards and alerts in deploy/."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"


def boards():
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (DEPLOY / "grafana").glob("*.json")}


def alerts():
    found = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    return [rule for group in found["groups"] for rule in group["rules"]]


def panels():
    """Every query of every dashboard, as Grafana asks it with everything chosen."""
    for name, board in boards().items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", filled(target["expr"])


def filled(expression):
    return re.sub(r'"\$\w+"', '".*"', expression.replace("$__rate_interval", "10s"))


def selectors(expression):
    """The series that a query looks at, each as a query of its own; labels in `by (…)` are none."""
    bare = re.sub(r"\b(?:by|on)\s*\([^)]*\)", " ", expression)
    return sorted(set(re.findall(r"\b(?:ergon_[a-z_]+|up)(?:\{[^}]*\})?", bare)))
