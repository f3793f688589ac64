"""A poison message under ``ergon run --processes 2``, at its defaults, becomes a dead letter, and the run goes on."""

from __future__ import annotations

import signal
import time

import pytest

from ergon_framework.connectors.deadletters import DeadLetterQuery
from ergon_framework.runner.exits import Exit
from ergon_framework.transaction import Transaction
from tests.integration.brokers import is_empty, named
from tests.integration.running import Running

pytestmark = [pytest.mark.spec("SEC-16"), pytest.mark.invariant]

PATIENCE = 240.0
COUNT = 100
WORKER = """
import os

@consumer(queue_named("{name}"))
def task(order, transaction: Transaction):
    if order["poison"]:
        os._exit(66)
    with open("done", "a") as file:
        file.write(transaction.id + chr(10))
"""


def test_a_poison_message_ends_as_a_dead_letter_and_the_run_goes_on(request, tmp_path, monkeypatch):
    # RabbitMQ: it has no lease to wait for, so deaths follow each other as fast as processes start.
    queue = named("rabbitmq", request, tmp_path, monkeypatch)
    queue.dispatch([Transaction(f"order-{n}", {"poison": n == 13}) for n in range(COUNT)])
    source = "from ergon_framework import queue as queue_named\n" + WORKER.format(name=queue.name)
    with Running(tmp_path, source, "--streaming", "--processes", "2") as run:
        end = time.monotonic() + PATIENCE
        while not (is_empty(depth := queue.depth()) and depth.dead == 1):
            assert time.monotonic() < end, depth
            assert run.is_running, f"the run has ended: {depth}"
            time.sleep(0.1)
        queue.dispatch([Transaction("last", {"poison": False})])
        done = tmp_path / "done"
        while "last" not in done.read_text().split():
            assert time.monotonic() < end
            time.sleep(0.05)
        run.send(signal.SIGTERM)
        assert run.ended()[0] == Exit.OK
    dead = {letter.id: letter.reason for letter in queue.list_dead(DeadLetterQuery(), limit=10)}
    queue.close()
    assert dead == {"order-13": "max_deliveries"}
    assert len(set(done.read_text().split())) == COUNT
    assert sum('event="process died"' in line for line in run.said) >= 10
