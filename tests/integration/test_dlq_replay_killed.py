"""``ergon dlq replay`` of many dead letters, killed in the middle and run again: each is replayed once."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, DeadLetter
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.database.migrate import upgrade
from ergon_framework.transaction import Transaction
from tests.integration.running import ERGON, TIMEOUT_SECONDS

pytestmark = pytest.mark.invariant

COUNT = 10_000
PAGE_SIZE = 1000
#: Number of messages in the queue at which the process is killed.
KILL_DEPTHS = (1, 3_000, 7_000)
#: Slow enough to be interrupted in the middle, also on a busy machine.
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


def create_dead_letters(queue):
    """Create COUNT dead letters, each with one attempt counted."""
    for start in range(0, COUNT, PAGE_SIZE):
        numbers = range(start, start + PAGE_SIZE)
        queue.dispatch([Transaction(n, id=f"order-{n}", correlation=f"basket-{n}", attempts=1) for n in numbers])
    left = COUNT
    while left:
        batch = queue.fetch_transactions(PAGE_SIZE, wait=1.0)
        queue.settle([(delivery, DeadLetter("declined")) for delivery in batch])
        left -= len(batch)


def list_dead_ids(queue):
    ids, after = [], None
    while page := queue.list_dead(DeadLetterQuery(), after=after, limit=PAGE_SIZE):
        ids += [record.id for record in page]
        after = page[-1].handle
    return ids


def start_replay(folder, dsn, *args):
    return subprocess.Popen(
        [*ERGON, "dlq", "replay", "app:orders", "--dead-letter-reason", "declined", "--json", *args],
        cwd=folder,
        env=os.environ | {"ORDERS": dsn},
        stdout=subprocess.PIPE,
        text=True,
    )


def kill_at(queue, process, count):
    """SIGKILL *process* once *count* messages are in the queue, and wait until the server has noticed."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while queue.depth().ready < count:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline, "it does not get on"
        time.sleep(0.005)
    process.kill()
    process.communicate()


def wait_until_idle(dsn):
    """Wait until no statement of the killed process is running."""
    query = """
        select count(*) from pg_stat_activity
        where datname = current_database() and state <> 'idle' and pid <> pg_backend_pid()
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    with psycopg.connect(dsn, autocommit=True) as connection:
        while connection.execute(query).fetchone()[0]:
            assert time.monotonic() < deadline, "the server is still at it"
            time.sleep(0.005)


@pytest.mark.spec("CNN-08")
def test_a_replay_that_is_killed_and_run_again_replays_each_once(orders, dsn, tmp_path):
    (tmp_path / "app.py").write_text(APP, encoding="utf-8")
    all_ids = {f"order-{n}" for n in range(COUNT)}
    create_dead_letters(orders)
    assert set(list_dead_ids(orders)) == all_ids

    for depth in KILL_DEPTHS:
        kill_at(orders, start_replay(tmp_path, dsn, "--batch", "50", "--rate", RATE), depth)
        wait_until_idle(dsn)
        # Each message is in one of the two, never in both or in none.
        dead_ids, queued_ids = list_dead_ids(orders), orders.find_queued(all_ids)
        assert (len(dead_ids), len(queued_ids)) == (len(all_ids - set(queued_ids)), len(all_ids - set(dead_ids)))
        assert 0 < len(dead_ids) < COUNT

    left = len(list_dead_ids(orders))
    process = start_replay(tmp_path, dsn)
    summary = json.loads(process.communicate(timeout=TIMEOUT_SECONDS)[0])
    assert (process.returncode, summary["selected"], summary["replayed"], summary["gone"]) == (0, left, left, 0)

    seen = Counter()
    while batch := orders.fetch_transactions(PAGE_SIZE):
        for delivery in batch:
            transaction = delivery.transaction
            seen[transaction.id] += 1
            assert (transaction.correlation, transaction.attempts, delivery.deliveries) == (
                f"basket-{transaction.payload}",
                0,
                1,
            )
        orders.settle([(delivery, Ack()) for delivery in batch])
    assert seen == Counter(all_ids)
    assert (list_dead_ids(orders), orders.depth().dead) == ([], 0)
