"""Every query of every dashboard and alert, asked of a real Prometheus that looks at real workers under load."""

from __future__ import annotations

import re
import time

import pytest

from tests.integration.observing import PATIENCE, World
from tests.servers.prometheus import PrivatePrometheus
from tests.unit.tools.queries import ALERTS, alerts, boards, panels, selectors

#: What no healthy system shows: an artifact that a fact names and that is gone, and a replica that stands still.
NEVER = {
    "ergon_artifacts_lost_total",
    'ergon_replica_status{ergon_fact_status!~"starting|following|stopped"}',
}


@pytest.fixture
def observed(tmp_path, databases):
    """A Prometheus that looks at the world, and the world."""
    dsn = databases.borrow()
    folder = tmp_path / "world"
    with World(folder, dsn) as world:
        server = PrivatePrometheus(folder / "prometheus", [f"127.0.0.1:{port}" for port in world.ports], rules=ALERTS)
        try:
            server.start()
            yield server, world
        finally:
            server.stop()
    databases.give_back(dsn)


def unanswered(server, queries):
    """What of *queries* has had no data, each asked again and again until it has."""
    waiting, end = dict(queries), time.monotonic() + PATIENCE
    while waiting and time.monotonic() < end:
        for name, expression in list(waiting.items()):
            if any(one["value"][1] != "NaN" for one in server.ask(expression)):
                del waiting[name]
        if waiting:
            time.sleep(0.2)
    return waiting


@pytest.mark.spec("RUN-04")
def test_every_query_of_every_dashboard_and_alert_finds_data_of_workers_under_load(observed):
    server, world = observed
    queries = {(name, expression): expression for name, expression in panels()}
    for board in boards().values():
        for variable in board["templating"]["list"][1:]:
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
            queries[board["title"], variable["name"]] = f'{metric}{{{label}!=""}}'
    looked_at = {selector for rule in alerts() for selector in selectors(rule["expr"])}
    assert looked_at >= NEVER
    queries |= {("alerts", one): one for one in looked_at - NEVER}
    assert unanswered(server, queries) == {}, world.said()
    rules = server.rules()
    assert len(rules) == len(alerts())
    assert [rule for rule in rules if rule.get("lastError")] == []
