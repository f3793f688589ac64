"""Delayed dispatch under a server crash: checks that no delayed transaction comes early and none is lost.

On each broker, transactions are dispatched that become due evenly over a window. Workers fetch and ack all the time. In
the middle of the window the server is killed, and started again after a pause. A transaction that is received before
its time is early; one that is never received is lost; one that is received twice is doubled, which an ack without an
answer may cause.

Lateness is the time from the due time to the fetch. It is reported for all transactions, and for those that were due
while the server was up and its workers had been connected for some seconds. RabbitMQ is measured with its default
settings, and with the one that shortens the pause before it repeats a failed move out of a delay queue.

One line of JSON per broker. The exit code is 1 if a transaction was early or lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework import Ack, ErgonError, Transaction
from ergon_framework.connectors import registry
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.bridge import as_sync
from tests.chaos.broker_servers import BROKER_KINDS, BrokerKind, FaultableBroker
from tests.servers.rabbitmq import PrivateRabbitMQ

QUEUE = "delays"
TRANSACTIONS = 20_000
WINDOW_SECONDS = 60.0
#: Seconds between the first dispatch and the first due time: the dispatch of all takes that long on a slow broker.
LEAD_SECONDS = 25.0
DISPATCH_BATCH = 500
FETCH_BATCH = 100
WORKER_THREADS = 2
LEASE_SECONDS = 5.0
#: Seconds that the server is down, and after its start until lateness counts as steady again.
DOWN_SECONDS = 2.0
RECOVERY_SECONDS = 10.0
#: Seconds after the window in which a late transaction is still waited for. RabbitMQ repeats a move from a delay queue
#: that failed while it started only after three minutes.
PATIENCE_SECONDS = 260.0
RETRY_SECONDS = 0.1


def _make_rabbitmq(settings: Mapping[str, int]) -> BrokerKind:
    """Return a RabbitMQ with *settings*, and the heartbeat that users have: on a busy machine, a short one fails."""

    def create(folder: Path) -> FaultableBroker:
        server = PrivateRabbitMQ(folder, settings=settings)
        return FaultableBroker(server, lambda: server.url)

    return BrokerKind(create, lambda _lease: {}, confirms_settlements=False)


KINDS = {
    **BROKER_KINDS,
    "rabbitmq": _make_rabbitmq({}),
    "rabbitmq-retrying": _make_rabbitmq({"dead_letter_worker_publisher_confirm_timeout": 5_000}),
}


class Workers:
    """Threads that fetch and ack, each with a connector of its own, and record when each transaction was received."""

    def __init__(self, connectors: Sequence[Connector]) -> None:
        self._connectors = connectors
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.received: defaultdict[str, list[float]] = defaultdict(list)
        self._threads = [threading.Thread(target=self._work, args=(each,), daemon=True) for each in connectors]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(30)

    def _work(self, connector: Connector) -> None:
        while not self._stopping.is_set():
            try:
                deliveries = connector.fetch_transactions(FETCH_BATCH, wait=0.5)
                now = time.time()
                with self._lock:
                    for delivery in deliveries:
                        self.received[delivery.transaction.id].append(now)
                if deliveries:
                    connector.settle([(delivery, Ack()) for delivery in deliveries])
            except ErgonError:
                self._stopping.wait(RETRY_SECONDS)


def run_broker(name: str, *, count: int, window: float) -> dict[str, Any]:
    kind = KINDS[name]
    folder = Path(tempfile.mkdtemp(prefix=f"ergon-delays-{name}-"))
    folder.chmod(0o755)
    broker = kind.create(folder / "server")
    connectors: list[Connector] = []
    try:
        broker.start()
        kind.prepare(broker.url)
        options = dict(kind.make_options(LEASE_SECONDS))
        for _ in range(WORKER_THREADS + 1):
            connector = as_sync(registry.create_connector(QUEUE, broker.url, options))
            connector.open()
            connectors.append(connector)
        return {"broker": name, **measure(broker, connectors, count=count, window=window)}
    finally:
        for connector in connectors:
            with contextlib.suppress(Exception):
                connector.close()
        broker.kill()
        shutil.rmtree(folder, ignore_errors=True)


def measure(broker: FaultableBroker, connectors: Sequence[Connector], *, count: int, window: float) -> dict[str, Any]:
    dispatcher, workers = connectors[0], Workers(connectors[1:])
    workers.start()
    began = time.time()
    # A step that is coprime to the count mixes the due times, so that they are not in the order of dispatch.
    due = {f"tx-{index}": began + LEAD_SECONDS + (index * 7919 % count) * window / count for index in range(count)}
    transactions = [Transaction({"due": moment}, id=each, not_before=moment) for each, moment in due.items()]
    for first in range(0, count, DISPATCH_BATCH):
        dispatcher.dispatch(transactions[first : first + DISPATCH_BATCH])
    dispatch_seconds = time.time() - began
    depth = dispatcher.depth()
    _wait_until_time(began + LEAD_SECONDS + window / 2)
    killed_at = time.time()
    broker.kill()
    time.sleep(DOWN_SECONDS)
    broker.start()
    started_at = time.time()
    deadline = max(started_at, began + LEAD_SECONDS + window) + PATIENCE_SECONDS
    while len(workers.received) < count and time.time() < deadline:
        time.sleep(0.2)
    # A transaction that is redelivered late counts as doubled.
    time.sleep(LEASE_SECONDS)
    workers.stop()
    missing = set(due) - set(workers.received)
    held = _find_held(dispatcher, connectors[1:], missing)
    steady = {
        each
        for each, moment in due.items()
        if moment > began + dispatch_seconds and not killed_at - 1 <= moment <= started_at + RECOVERY_SECONDS
    }
    received = {each: list(times) for each, times in workers.received.items()}
    lateness = {each: min(times) - due[each] for each, times in received.items()}
    early = [each for each, seconds in lateness.items() if seconds < 0]
    lost = count - len(received)
    return {
        "ok": not early and not lost,
        "transactions": count,
        "early": len(early),
        "earliest": min(0.0, *lateness.values()) if lateness else None,
        "lost": lost,
        "held": len(held),
        "missing_due_after_kill": sorted(round(due[each] - killed_at, 1) for each in missing)[:20],
        "doubled": sum(len(times) > 1 for times in received.values()),
        "delayed_after_dispatch": None if depth is None else depth.delayed,
        "dispatch_seconds": round(dispatch_seconds, 1),
        "down_seconds": round(started_at - killed_at, 1),
        "lateness": _summarize(list(lateness.values())),
        "lateness_while_up": _summarize([seconds for each, seconds in lateness.items() if each in steady]),
    }


def _find_held(reader: Connector, holders: Sequence[Connector], missing: set[str]) -> set[str]:
    """Return which of *missing* come once *holders* are closed: a worker has held them without delivering them."""
    if not missing:
        return set()
    for each in holders:
        with contextlib.suppress(ErgonError):
            each.close()
    held: set[str] = set()
    deadline = time.monotonic() + 2 * LEASE_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(ErgonError):
            held |= {delivery.transaction.id for delivery in reader.fetch_transactions(FETCH_BATCH, wait=0.5)}
    return held & missing


def _wait_until_time(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


def _summarize(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "p50": round(ordered[len(ordered) // 2], 3),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 3),
        "max": round(ordered[-1], 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--broker", action="append", choices=sorted(KINDS), help="which; all by default")
    parser.add_argument("--transactions", type=int, default=TRANSACTIONS)
    parser.add_argument("--window", type=float, default=WINDOW_SECONDS, help="seconds over which they become due")
    options = parser.parse_args()
    results = []
    for name in options.broker or list(KINDS):
        results.append(run_broker(name, count=options.transactions, window=options.window))
        print(json.dumps(results[-1]), flush=True)
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
