"""A consumer whose handler appends a fact is killed at a hundred random points: one fact for each transaction."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.transaction import Transaction
from tests.integration.consumer_killing import ARTIFACT_EVERY, QUEUE

pytestmark = [pytest.mark.invariant, pytest.mark.spec("FAC-02", "FAC-03")]

ROOT = Path(__file__).parents[2]
KILLS = 100
ORDERS = 2_000


@pytest.mark.parametrize("variant", ["threads", "asyncio"])
def test_one_fact_for_each_transaction_however_often_its_handler_was_killed(database, tmp_path, variant):
    queue = PostgresQueue(QUEUE, dsn=database)
    queue.dispatch([Transaction({"number": number}, id=f"order-{number}") for number in range(ORDERS)])
    queue.close()
    command = [sys.executable, "-m", "tests.integration.consumer_killing", database, str(tmp_path / "papers")]
    command += [str(KILLS), "7", variant]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    # The kills have interrupted each phase, and some messages remained for the last run.
    assert report.pop("hit")["append"] >= KILLS // 10, result.stdout
    assert report.pop("duplicates") >= KILLS // 10, result.stdout
    assert report.pop("left after the kills") > 0
    assert report == {
        "stored": ORDERS,
        "subjects": ORDERS,
        "dense": True,
        "kept": True,
        "papers": ORDERS // ARTIFACT_EVERY,
        "whole": True,
        "changed": [],
        "left": 0,
    }
