"""A consumer of facts is killed at random points: no fact is lost, and every bad fact is one dead letter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ergon_framework.facts.connector import FactConnector
from ergon_framework.facts.stores.postgres.store import PostgresBoundary
from ergon_framework.transaction import Transaction
from tests.integration.side_killing import BAD_EVERY, PAIR

pytestmark = [pytest.mark.invariant, pytest.mark.spec("FAC-27")]

ROOT = Path(__file__).parents[2]
KILLS = 20
FACT_COUNT = 400
MAX_DELIVERIES = 3


def append_facts(dsn, payloads):
    with PostgresBoundary(dsn, accept_loss=True) as boundary:
        FactConnector(boundary, **PAIR._asdict()).dispatch(
            [Transaction(payload, id=f"f-{payload['number']}") for payload in payloads]
        )


def run_killing_script(dsn, *args):
    command = [sys.executable, "-m", "tests.integration.side_killing", dsn, *map(str, args)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("variant", ["threads", "asyncio"])
def test_every_fact_has_its_effect_or_is_one_dead_letter_however_often_its_consumer_was_killed(database, variant):
    append_facts(database, ({"number": number} for number in range(1, FACT_COUNT + 1)))
    report = run_killing_script(database, KILLS, 7, variant)
    bad = {f"f-{number}" for number in range(BAD_EVERY, FACT_COUNT + 1, BAD_EVERY)}
    good = {f"f-{number}" for number in range(1, FACT_COUNT + 1)} - bad
    # The kills have interrupted each phase, and some facts remained for the last run.
    assert report["left after the kills"] > 0
    assert report["hits"].get("handling", 0) + report["hits"].get("settling", 0) >= KILLS // 2, report["hits"]
    assert report["left"] == 0
    assert set(report["effects"]) == good
    assert sorted(name for name, *_ in report["dead"]) == sorted(bad)
    assert {reason for _, reason, _ in report["dead"]} == {"bad"}


@pytest.mark.parametrize("variant", ["threads", "asyncio"])
def test_a_fact_that_kills_its_consumer_is_dead_lettered_after_its_deliveries_and_other_facts_are_not(
    database, variant
):
    append_facts(database, ({"number": number, "deadly": number == 3} for number in range(1, 7)))
    report = run_killing_script(database, 0, MAX_DELIVERIES, variant)
    assert report["left"] == 0
    assert report["deaths"] == MAX_DELIVERIES
    ((name, _, deliveries),) = report["dead"]
    assert (name, deliveries) == ("f-3", MAX_DELIVERIES + 1)
    assert set(report["effects"]) == {"f-1", "f-2", "f-4", "f-5", "f-6"}
