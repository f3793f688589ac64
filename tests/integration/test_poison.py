"""One poisoned transaction among many, which ends every process that touches it: one dead letter, and no other."""

from __future__ import annotations

import subprocess
import time

import pytest

from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.transaction import Transaction
from tests.integration.brokers import BROKERS, is_empty, named
from tests.integration.running import ERGON

pytestmark = pytest.mark.invariant

COUNT = 500
POISONED = 66
PATIENCE = 240.0
MAX_DELIVERIES = 3

WORKER = """
import asyncio, os, time
from ergon_framework import ConsumerPolicy, consumer, queue

policy = ConsumerPolicy.load({{
    "loop": {{"streaming": True, "concurrency": {{"value": 100}}, "batch": {{"size": 100}},
              "empty_queue": {{"backoff": 0.05, "cap": 0.05}}, "max_deliveries": {max_deliveries}}},
}})

def poisoned(order):
    if order["poison"]:
        os._exit({poisoned})

@consumer(queue("{name}"), policy=policy)
{body}
"""
BODIES = {
    "threads": """
def handle(order):
    poisoned(order)
    time.sleep({seconds})
""",
    "async": """
async def handle(order):
    poisoned(order)
    await asyncio.sleep({seconds})
""",
}


class Workers:
    """One worker at a time; one that was poisoned is replaced, and any other end is a fault."""

    def __init__(self):
        self.crashes = 0
        self.start()

    def start(self):
        self._process = subprocess.Popen([*ERGON, "run", "app:handle"], stdout=subprocess.DEVNULL)

    def replace(self):
        if self._process.poll() is not None:
            self._ended()
            self.start()

    def end(self):
        """In good order: what it held is acked, or back in the queue."""
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._ended()

    def kill(self):
        self._process.kill()
        self._process.wait()

    def _ended(self):
        assert self._process.returncode in {0, POISONED}
        self.crashes += self._process.returncode == POISONED


def work_off(queue, workers):
    """Have workers until nothing is left, also of what they held without the broker telling."""
    until = time.monotonic() + PATIENCE
    while True:
        while not (is_empty(depth := queue.depth()) and depth.dead):
            assert time.monotonic() < until, f"{depth} after {workers.crashes} crashes"
            workers.replace()
            time.sleep(0.02)
        workers.end()
        if is_empty(queue.depth()):
            return
        workers.start()


@pytest.fixture
def dead_letters(request, tmp_path, monkeypatch):
    """Has workers handle transactions until none is left; what was dead-lettered, and how often a worker ended."""

    def run(broker, flavour, transactions, *, seconds):
        queue = named(broker, request, tmp_path, monkeypatch)
        body = BODIES[flavour].strip().format(seconds=seconds)
        names = {"name": queue.name, "max_deliveries": MAX_DELIVERIES, "poisoned": POISONED}
        (tmp_path / "app.py").write_text(WORKER.format(**names, body=body), encoding="utf-8")
        queue.dispatch(transactions)
        workers = Workers()
        try:
            work_off(queue, workers)
        finally:
            workers.kill()
        dead = queue.list_dead(DeadLetterQuery(), limit=len(transactions))
        left = queue.fetch_transactions(len(transactions), wait=1.0)
        queue.close()
        assert not left
        return [(letter.id, letter.reason) for letter in dead], workers.crashes

    return run


@pytest.mark.spec("CNN-11", "CNN-04")
@pytest.mark.parametrize("flavour", BODIES)
@pytest.mark.parametrize("broker", BROKERS)
def test_one_poison_among_five_hundred_gives_exactly_one_dead_letter(broker, flavour, dead_letters):
    # In the middle of a batch: those before it have started, those behind it are held.
    transactions = [Transaction(f"order-{n}", {"poison": n == 250}) for n in range(COUNT)]
    dead, crashes = dead_letters(broker, flavour, transactions, seconds=0.02)
    assert dead == [("order-250", "max_deliveries")]
    assert crashes == MAX_DELIVERIES


@pytest.mark.spec("CNN-11", "DX-05")
@pytest.mark.parametrize("flavour", BODIES)
@pytest.mark.parametrize("broker", BROKERS)
def test_the_only_neighbour_of_a_poison_message_is_not_dead_lettered(broker, flavour, dead_letters):
    transactions = [Transaction("poison", {"poison": True}), Transaction("neighbour", {"poison": False})]
    # The neighbour runs long enough to be lost with the process, until its own delivery is the last permitted one.
    dead, crashes = dead_letters(broker, flavour, transactions, seconds=0.5)
    assert dead == [("poison", "max_deliveries")]
    assert crashes == MAX_DELIVERIES
