"""An order during an outage of its provider, on PostgreSQL with the default settings: deferred, then paid."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ergon_framework import Transaction, consumer
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.providers.base import ProviderBase
from ergon_framework.providers.errors import ProviderDependencyError
from ergon_framework.providers.postgres.state import PostgresProviderState


class FailingBank(ProviderBase):
    provider_name = "bank"
    capability = "charging"

    def __init__(self, dsn):
        super().__init__(state_store=PostgresProviderState(dsn))
        self.is_down = True
        self.calls = 0

    def _execute_impl(self, **_):
        self.calls += 1
        if self.is_down:
            raise ProviderDependencyError("the bank answered 503", http_status=503)
        return {"status": "paid"}


def run_worker(dsn, bank):
    """Run a worker until nothing is ready, as `ergon run` does, and return its report."""
    orders = PostgresQueue("orders", dsn=dsn)

    @consumer(orders)
    def pay(order):
        bank.call("charge", order)

    try:
        return pay.run()
    finally:
        orders.close()


def run_why(dsn, transaction_id):
    command = [sys.executable, "-c", "from ergon_framework.cli.main import main; main()", "why", transaction_id]
    env = {**os.environ, "ERGON_POSTGRES__DSN": dsn}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.spec("DX-27", "RUN-06", "CNN-04")
def test_one_order_survives_an_outage_and_restarts_of_its_worker(database):
    bank = FailingBank(database)
    queue = PostgresQueue("orders", dsn=database)
    queue.dispatch([Transaction({"amount": 9}, id="order-1")])
    try:
        report = run_worker(database, bank)
        assert (report.counts["deferred"], report.finished, bank.calls) == (1, 1, 3)
        (history,) = queue.lookup("order-1")
        (first,) = [event for event in history.events if event.event == "deferred"]
        assert (first.details, first.values["times"]) == ("dependency_unavailable: the bank answered 503", 1)
        output = run_why(database, "order-1")
        assert "deferred" in output
        assert "times 1, since 20" in output
        assert "at the latest until 20" in output
        bank.is_down = False
        deadline = time.monotonic() + 30
        while not report.counts["succeeded"] and time.monotonic() < deadline:
            # A new worker each time: the state of the deferral is in the queue.
            report = run_worker(database, bank)
        assert (report.counts["succeeded"], report.finished) == (1, 1)
        assert (bank.calls, queue.depth().dead) == (4, 0)
    finally:
        queue.close()
        bank.state_store.close()
