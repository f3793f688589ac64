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
from ergon_framework.providers.sql.books import PostgresBooks


class Bank(ProviderBase):
    provider_name = "bank"
    capability = "charging"

    def __init__(self, dsn):
        super().__init__(books=PostgresBooks(dsn))
        self.is_down = True
        self.calls = 0

    def _execute_impl(self, **_):
        self.calls += 1
        if self.is_down:
            raise ProviderDependencyError("the bank answered 503", http_status=503)
        return {"status": "paid"}


def run(dsn, bank):
    """Run a worker until nothing is ready, as `ergon run` does; its report."""
    orders = PostgresQueue("orders", dsn=dsn)

    @consumer(orders)
    def pay(order):
        bank.call("charge", order)

    try:
        return pay.run()
    finally:
        orders.close()


def why(dsn, transaction_id):
    command = [sys.executable, "-c", "from ergon_framework.cli.main import main; main()", "why", transaction_id]
    env = {**os.environ, "ERGON_POSTGRES__DSN": dsn}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.spec("DX-27", "RUN-06", "CNN-04")
def test_one_order_survives_an_outage_and_restarts_of_its_worker(database):
    bank = Bank(database)
    queue = PostgresQueue("orders", dsn=database)
    queue.dispatch([Transaction("order-1", {"amount": 9})])
    try:
        report = run(database, bank)
        assert (report.counts["deferred"], report.finished, bank.calls) == (1, 1, 3)
        (history,) = queue.trace("order-1")
        (first,) = [event for event in history.events if event.what == "deferred"]
        assert (first.words, first.values["times"]) == ("dependency_unavailable: the bank answered 503", 1)
        shown = why(database, "order-1")
        assert "deferred" in shown
        assert "times 1, since 20" in shown
        assert "at the latest until 20" in shown
        bank.is_down = False
        until = time.monotonic() + 30
        while not report.counts["succeeded"] and time.monotonic() < until:
            # Another worker each time: what is known of the deferral is in the queue.
            report = run(database, bank)
        assert (report.counts["succeeded"], report.finished) == (1, 1)
        assert (bank.calls, queue.depth().dead) == (4, 0)
    finally:
        queue.close()
        bank.books.close()
