"""A consumer of facts is SIGKILLed at random points: no fact is lost, and every bad one is one dead letter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ergon_framework.facts.connector import FactConnector
from ergon_framework.facts.stores.postgres import PostgresBoundary
from ergon_framework.transaction import Transaction
from tests.integration.side_killing import BAD_EACH, PAIR

pytestmark = [pytest.mark.invariant, pytest.mark.spec("FAC-27")]

ROOT = Path(__file__).parents[2]
KILLS = 20
FACTS = 400
DELIVERIES = 3


def filled(dsn, payloads):
    with PostgresBoundary(dsn, accept_loss=True) as boundary:
        FactConnector(boundary, **PAIR._asdict()).dispatch(
            [Transaction(f"f-{payload['number']}", payload) for payload in payloads]
        )


def killing(dsn, *words):
    command = [sys.executable, "-m", "tests.integration.side_killing", dsn, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_every_fact_has_its_effect_or_is_one_dead_letter_however_often_its_consumer_was_killed(database, flavour):
    filled(database, ({"number": number} for number in range(1, FACTS + 1)))
    verdict = killing(database, KILLS, 7, flavour)
    bad = {f"f-{number}" for number in range(BAD_EACH, FACTS + 1, BAD_EACH)}
    good = {f"f-{number}" for number in range(1, FACTS + 1)} - bad
    # The kills have hit what they were for, and there was something left for the last run.
    assert verdict["left after the kills"] > 0
    assert verdict["hits"].get("handling", 0) + verdict["hits"].get("settling", 0) >= KILLS // 2, verdict["hits"]
    assert verdict["left"] == 0
    assert set(verdict["effects"]) == good
    assert sorted(name for name, *_ in verdict["dead"]) == sorted(bad)
    assert {reason for _, reason, _ in verdict["dead"]} == {"bad"}


@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_a_fact_that_kills_its_consumer_is_buried_after_its_deliveries_and_its_neighbours_are_not(database, flavour):
    filled(database, ({"number": number, "deadly": number == 3} for number in range(1, 7)))
    verdict = killing(database, 0, DELIVERIES, flavour)
    assert verdict["left"] == 0
    assert verdict["deaths"] == DELIVERIES
    ((name, _, deliveries),) = verdict["dead"]
    assert (name, deliveries) == ("f-3", DELIVERIES + 1)
    assert set(verdict["effects"]) == {"f-1", "f-2", "f-4", "f-5", "f-6"}
