"""One worker process of the brokers' chaos run: a consumer of any broker, on threads or asyncio, with a journal.

Only the broker suffers faults; the database with the effects and the inbox's marks does not, so its content at the
end is reliable. A handler's effect and its mark are written in one database transaction.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from ergon_framework import Delivery
from ergon_framework.connectors import registry
from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq.consumer import Consumer
from ergon_framework.connectors.rabbitmq.message import Message
from ergon_framework.connectors.rabbitmq.settle import RabbitMQSettler
from ergon_framework.runner.queues import NamedQueue
from tests.chaos.journal import Journal
from tests.chaos.verdict import find_id
from tests.chaos.worker import QUEUE, AsyncWorker, HandlerConnections, ThreadsWorker, make_policy

#: Maximum seconds for which a transaction is held, over all attempts.
MAX_HOLD_SECONDS = 300.0


class JournalingConnector(NamedQueue):
    """Wraps any connector and records each claim and the result of each settlement."""

    def __init__(self, connector: Connector | AsyncConnector, journal: Journal, who: str) -> None:
        super().__init__(connector.name)
        self._connector = connector
        self._journal = journal
        self._who = who
        self._numbers = itertools.count(1)
        self._claims: dict[Any, str] = {}

    def fetch_transactions(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return self._record_claims(super().fetch_transactions(batch_size, **extra))

    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return self._record_claims(await super().fetch_transactions_async(batch_size, **extra))

    def settle(self, requests: Any) -> Any:
        started_at = time.time()
        return self._record_settlements(requests, super().settle(requests), started_at)

    async def settle_async(self, requests: Any) -> Any:
        started_at = time.time()
        return self._record_settlements(requests, await super().settle_async(requests), started_at)

    def _record_claims(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        for delivery in deliveries:
            claim = f"{self._who}#{next(self._numbers)}"
            self._claims[delivery.receipt] = claim
            self._journal.write_soon("claim", claim, delivery.transaction.id, delivery.deliveries)
            # The trace is the only field of a transaction that reaches the handler and does not belong to the user.
            trace = {**delivery.transaction.trace, "claim": claim}
            delivery.transaction = delivery.transaction.replace(trace=trace)
        return deliveries

    def _record_settlements(self, settlings: Any, results: Any, started_at: float) -> Any:
        for (delivery, settlement), result in zip(settlings, results, strict=True):
            claim = self._claims.get(delivery.receipt, "?")
            self._journal.write_soon("settle", claim, type(settlement).__name__, result.value, started_at)
        return results


def get_order_id(message: Message) -> str:
    """Return the order of *message*: third-party messages have their id only in the body."""
    return message.headers.get("ergon-id") or find_id(message.body)


def record_releases(journal: Journal, who: str) -> None:
    """Record the messages that RabbitMQ pushed to this process and that it released without handing them out.

    Such a release publishes again and acks, as every release: a fault between the two steps leaves both messages.
    """
    numbers, original_release = itertools.count(1), RabbitMQSettler.release

    async def release_and_record(settler: RabbitMQSettler, messages: Sequence[Message]) -> None:
        claims = [(f"{who}~{next(numbers)}", message) for message in messages]
        for claim, message in claims:
            journal.write_soon("claim", claim, get_order_id(message), message.deliveries)
            journal.write_soon("settle", claim, "Release", "begun", time.time())
        await original_release(settler, messages)
        for claim, _ in claims:
            journal.write_soon("settle", claim, "Release", "passed on", time.time())

    RabbitMQSettler.release = release_and_record  # type: ignore[method-assign]


def record_tags(path: Path) -> None:
    """Record by tag which messages RabbitMQ delivered to this process and which of them it acked.

    The verdict does not use this file: if a message is lost, it names the last holder and whether it acked.
    """
    file = path.open("a", buffering=1, encoding="utf-8")
    original_track, original_ack = Consumer._track, Consumer.ack

    def track_and_record(consumer: Consumer, message: Message) -> None:
        fields = get_order_id(message), *message.receipt, message.deliveries
        file.write(json.dumps([time.time(), "seen", *fields]) + "\n")
        original_track(consumer, message)

    def ack_and_record(consumer: Consumer, messages: Sequence[Message]) -> bool:
        result = original_ack(consumer, messages)
        file.write(json.dumps([time.time(), "acked", result, *(message.receipt for message in messages)]) + "\n")
        return result

    Consumer._track, Consumer.ack = track_and_record, ack_and_record  # type: ignore[method-assign]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flavour", choices=["threads", "async"])
    parser.add_argument("--url", required=True, help="of the broker")
    parser.add_argument("--options", type=json.loads, required=True, help="of its connector, in JSON")
    parser.add_argument("--dsn", required=True, help="of the database that is left alone")
    parser.add_argument("--who", required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--max-deliveries", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    journal = Journal(options.journal)
    record_releases(journal, options.who)
    record_tags(options.journal.with_suffix(".tags"))
    queue = JournalingConnector(registry.create_connector(QUEUE, options.url, options.options), journal, options.who)
    # The queue is never opened: it only writes marks, on the handlers' own connections.
    inbox = PostgresQueue(QUEUE, dsn=options.dsn, inbox=True)
    services = {"journal": journal, "queue": inbox, "who": options.who, "purse": HandlerConnections(options.dsn)}
    consumer_policy = make_policy(concurrency=options.concurrency, max_deliveries=options.max_deliveries)
    # Some brokers take back messages that are held for too long, and reject a policy that allows it.
    consumer_policy = consumer_policy.model_copy(
        update={"loop": consumer_policy.loop.model_copy(update={"transaction_timeout": MAX_HOLD_SECONDS})}
    )
    worker_class: Any = ThreadsWorker if options.flavour == "threads" else AsyncWorker
    task = worker_class(queue, policy=consumer_policy, **services)
    signal.signal(signal.SIGTERM, lambda *_: task.stop())
    journal.write("begin", options.who, os.getpid())
    report = task.run() if options.flavour == "threads" else asyncio.run(task.run())
    journal.write("over", str(report.stop_reason), dict(report.settled), dict(report.rejected))
    return 0


if __name__ == "__main__":
    sys.exit(main())
