"""Check that one poison transaction that kills each of its workers becomes the only dead letter."""

from __future__ import annotations

import subprocess
import time

import pytest

from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.transaction import Transaction
from tests.integration.brokers import BROKERS, create_named_queue, is_empty
from tests.integration.running import ERGON

pytestmark = pytest.mark.invariant

TRANSACTION_COUNT = 500
POISON_EXIT_CODE = 66
TIMEOUT_SECONDS = 240.0
MAX_DELIVERIES = 3

APP_TEMPLATE = """
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
HANDLERS = {
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
    """One worker process at a time; a poisoned one is replaced, and any other exit is a failure."""

    def __init__(self):
        self.crashes = 0
        self.start()

    def start(self):
        self._process = subprocess.Popen([*ERGON, "run", "app:handle"], stdout=subprocess.DEVNULL)

    def replace(self):
        if self._process.poll() is not None:
            self._count_crash()
            self.start()

    def stop(self):
        """Stop cleanly: its claims are acked or back in the queue."""
        self._process.terminate()
        self._process.wait(TIMEOUT_SECONDS)
        self._count_crash()

    def kill(self):
        self._process.kill()
        self._process.wait()

    def _count_crash(self):
        assert self._process.returncode in {0, POISON_EXIT_CODE}
        self.crashes += self._process.returncode == POISON_EXIT_CODE


def run_until_empty(queue, workers):
    """Run workers until nothing is left, including claims that the broker has not yet returned."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        while not (is_empty(depth := queue.depth()) and depth.dead):
            assert time.monotonic() < deadline, f"{depth} after {workers.crashes} crashes"
            workers.replace()
            time.sleep(0.02)
        workers.stop()
        if is_empty(queue.depth()):
            return
        workers.start()


@pytest.fixture
def run_to_dead_letters(request, tmp_path, monkeypatch):
    """Return a function that runs workers on transactions and returns the dead letters and the number of crashes."""

    def run(broker, variant, transactions, *, seconds):
        queue = create_named_queue(broker, request, tmp_path, monkeypatch)
        handler = HANDLERS[variant].strip().format(seconds=seconds)
        fields = {"name": queue.name, "max_deliveries": MAX_DELIVERIES, "poisoned": POISON_EXIT_CODE}
        (tmp_path / "app.py").write_text(APP_TEMPLATE.format(**fields, body=handler), encoding="utf-8")
        queue.dispatch(transactions)
        workers = Workers()
        try:
            run_until_empty(queue, workers)
        finally:
            workers.kill()
        dead = queue.list_dead(DeadLetterQuery(), limit=len(transactions))
        left = queue.fetch_transactions(len(transactions), wait=1.0)
        queue.close()
        assert not left
        return [(letter.id, letter.reason) for letter in dead], workers.crashes

    return run


@pytest.mark.spec("CNN-11", "CNN-04")
@pytest.mark.parametrize("variant", HANDLERS)
@pytest.mark.parametrize("broker", BROKERS)
def test_one_poison_message_among_five_hundred_becomes_exactly_one_dead_letter(broker, variant, run_to_dead_letters):
    # In the middle of a batch: the messages before it have started, those after it are claimed.
    transactions = [Transaction({"poison": n == 250}, id=f"order-{n}") for n in range(TRANSACTION_COUNT)]
    dead, crashes = run_to_dead_letters(broker, variant, transactions, seconds=0.02)
    assert dead == [("order-250", "max_deliveries")]
    assert crashes == MAX_DELIVERIES


@pytest.mark.spec("CNN-11", "DX-05")
@pytest.mark.parametrize("variant", HANDLERS)
@pytest.mark.parametrize("broker", BROKERS)
def test_the_only_neighbour_of_a_poison_message_is_not_dead_lettered(broker, variant, run_to_dead_letters):
    transactions = [Transaction({"poison": True}, id="poison"), Transaction({"poison": False}, id="neighbour")]
    # The neighbour runs long enough to be lost with the process, until its own delivery is the last permitted one.
    dead, crashes = run_to_dead_letters(broker, variant, transactions, seconds=0.5)
    assert dead == [("poison", "max_deliveries")]
    assert crashes == MAX_DELIVERIES
