"""A consumer whose handler appends a fact is SIGKILLed at a hundred random points: one fact for each transaction."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.transaction import Transaction
from tests.integration.consumer_killing import PAPER_EACH, QUEUE

pytestmark = [pytest.mark.invariant, pytest.mark.spec("FAC-02", "FAC-03")]

ROOT = Path(__file__).parents[2]
KILLS = 100
ORDERS = 2_000


@pytest.mark.parametrize("flavour", ["threads", "asyncio"])
def test_one_fact_for_each_transaction_however_often_its_handler_was_killed(database, tmp_path, flavour):
    queue = PostgresQueue(QUEUE, dsn=database)
    queue.dispatch([Transaction(f"order-{number}", {"number": number}) for number in range(ORDERS)])
    queue.close()
    words = [sys.executable, "-m", "tests.integration.consumer_killing", database, str(tmp_path / "papers")]
    words += [str(KILLS), "7", flavour]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    # The kills have hit what they were for, and there was something left for the last run.
    assert verdict.pop("hit")["append"] >= KILLS // 10, done.stdout
    assert verdict.pop("duplicates") >= KILLS // 10, done.stdout
    assert verdict.pop("left after the kills") > 0
    assert verdict == {
        "stored": ORDERS,
        "subjects": ORDERS,
        "dense": True,
        "kept": True,
        "papers": ORDERS // PAPER_EACH,
        "whole": True,
        "changed": [],
        "left": 0,
    }
