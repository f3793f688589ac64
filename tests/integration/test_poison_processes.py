"""Check that ``ergon run --processes 2`` with defaults dead-letters a poison message and continues."""

from __future__ import annotations

import signal
import time

import pytest

from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.runner.exit import RunExit
from ergon_framework.transaction import Transaction
from tests.integration.brokers import create_named_queue, is_empty
from tests.integration.running import ErgonProcess

pytestmark = [pytest.mark.spec("SEC-16"), pytest.mark.invariant]

TIMEOUT_SECONDS = 240.0
TRANSACTION_COUNT = 100
APP_TEMPLATE = """
import os

@consumer(queue_named("{name}"))
def task(order, transaction: Transaction):
    if order["poison"]:
        os._exit(66)
    with open("done", "a") as file:
        file.write(transaction.id + chr(10))
"""


def test_a_poison_message_becomes_a_dead_letter_and_the_run_continues(request, tmp_path, monkeypatch):
    # RabbitMQ: it has no lease to wait for, so crashes follow each other as fast as processes start.
    queue = create_named_queue("rabbitmq", request, tmp_path, monkeypatch)
    queue.dispatch([Transaction({"poison": n == 13}, id=f"order-{n}") for n in range(TRANSACTION_COUNT)])
    source = "from ergon_framework import queue as queue_named\n" + APP_TEMPLATE.format(name=queue.name)
    with ErgonProcess(tmp_path, source, "--streaming", "--processes", "2") as run:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (is_empty(depth := queue.depth()) and depth.dead == 1):
            assert time.monotonic() < deadline, depth
            assert run.is_running, f"the run has ended: {depth}"
            time.sleep(0.1)
        queue.dispatch([Transaction({"poison": False}, id="last")])
        done = tmp_path / "done"
        while "last" not in done.read_text().split():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        assert run.wait_for_exit()[0] == RunExit.OK
    dead = {letter.id: letter.reason for letter in queue.list_dead(DeadLetterQuery(), limit=10)}
    queue.close()
    assert dead == {"order-13": "max_deliveries"}
    assert len(set(done.read_text().split())) == TRANSACTION_COUNT
    assert sum('event="process exited unexpectedly"' in line for line in run.output) >= 10
