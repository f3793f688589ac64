"""``ergon dlq replay`` of many, killed in the middle and run again: each is replayed once."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, DeadLetter
from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.schema.migrate import upgrade
from ergon_framework.transaction import Transaction
from tests.integration.running import ERGON, PATIENCE

pytestmark = pytest.mark.invariant

COUNT = 10_000
PAGE = 1000
#: When to kill it: at so many in the queue.
KILLS = (1, 3_000, 7_000)
#: Slow enough to be caught in the middle, also on a machine that is busy.
RATE = "4000/s"

APP = """
import os
from ergon_framework.connectors.postgres import PostgresQueue

orders = PostgresQueue("orders", dsn=os.environ["ORDERS"])
"""


@pytest.fixture
def dsn(postgres):
    dsn = postgres.create_database("replay_killed")
    upgrade(dsn)
    return dsn


@pytest.fixture
def orders(dsn):
    queue = PostgresQueue("orders", dsn=dsn)
    queue.open()
    yield queue
    queue.close()


def bury(queue):
    """Make COUNT dead letters, each with an attempt counted against it."""
    for start in range(0, COUNT, PAGE):
        names = range(start, start + PAGE)
        queue.dispatch([Transaction(f"order-{n}", n, correlation=f"basket-{n}", attempts=1) for n in names])
    left = COUNT
    while left:
        batch = queue.fetch_transactions(PAGE, wait=1.0)
        queue.settle([(delivery, DeadLetter("declined")) for delivery in batch])
        left -= len(batch)


def dead(queue):
    found, after = [], None
    while page := queue.list_dead(DeadLetterQuery(), after=after, limit=PAGE):
        found += [record.id for record in page]
        after = page[-1].place
    return found


def replay(folder, dsn, *words):
    return subprocess.Popen(
        [*ERGON, "dlq", "replay", "app:orders", "--reason", "declined", "--json", *words],
        cwd=folder,
        env=os.environ | {"ORDERS": dsn},
        stdout=subprocess.PIPE,
        text=True,
    )


def kill_at(queue, process, many):
    """SIGKILL *process* once that many are in the queue, and wait until the server has noticed."""
    until = time.monotonic() + PATIENCE
    while queue.depth().ready < many:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < until, "it does not get on"
        time.sleep(0.005)
    process.kill()
    process.communicate()


def settle_down(dsn):
    """Wait until no statement of the killed process is under way."""
    busy = """
        select count(*) from pg_stat_activity
        where datname = current_database() and state <> 'idle' and pid <> pg_backend_pid()
    """
    until = time.monotonic() + PATIENCE
    with psycopg.connect(dsn, autocommit=True) as connection:
        while connection.execute(busy).fetchone()[0]:
            assert time.monotonic() < until, "the server is still at it"
            time.sleep(0.005)


@pytest.mark.spec("CNN-08")
def test_a_replay_that_is_killed_and_run_again_replays_each_once(orders, dsn, tmp_path):
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    every = {f"order-{n}" for n in range(COUNT)}
    bury(orders)
    assert set(dead(orders)) == every

    for many in KILLS:
        kill_at(orders, replay(tmp_path, dsn, "--batch", "50", "--rate", RATE), many)
        settle_down(dsn)
        # In one of the two, never in both or in none.
        here, there = dead(orders), orders.queued(every)
        assert (len(here), len(there)) == (len(every - set(there)), len(every - set(here)))
        assert 0 < len(here) < COUNT

    left = len(dead(orders))
    process = replay(tmp_path, dsn)
    told = json.loads(process.communicate(timeout=PATIENCE)[0])
    assert (process.returncode, told["chosen"], told["replayed"], told["gone"]) == (0, left, left, 0)

    seen = Counter()
    while batch := orders.fetch_transactions(PAGE):
        for delivery in batch:
            got = delivery.transaction
            seen[got.id] += 1
            assert (got.correlation, got.attempts, delivery.deliveries) == (f"basket-{got.payload}", 0, 1)
        orders.settle([(delivery, Ack()) for delivery in batch])
    assert seen == Counter(every)
    assert (dead(orders), orders.depth().dead) == ([], 0)
