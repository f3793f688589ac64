"""One worker process of the brokers' chaos run: a consumer of any broker, on threads or asyncio, with a journal.

The broker suffers; the database with the effects and the inbox's marks is left alone, so that what it says at
the end is the truth. A handler's effect and its mark are written in one database transaction.
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
from ergon_framework.connectors import schemes
from ergon_framework.connectors.base import AsyncConnector, Connector
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq.consumer import Consumer
from ergon_framework.connectors.rabbitmq.message import Message
from ergon_framework.connectors.rabbitmq.settling import Settler
from ergon_framework.runner.queues import NamedQueue
from tests.chaos.journal import Journal
from tests.chaos.verdict import named
from tests.chaos.worker import QUEUE, AsyncWorker, Purse, ThreadsWorker, policy

#: Seconds for which a transaction may be held, all attempts together.
HOLD = 300.0


class Journalled(NamedQueue):
    """Any connector, with a note of each claim that it hands out and of what each settlement was answered with."""

    def __init__(self, connector: Connector | AsyncConnector, journal: Journal, who: str) -> None:
        super().__init__(connector.name)
        self._found = connector
        self._journal = journal
        self._who = who
        self._numbers = itertools.count(1)
        self._claims: dict[Any, str] = {}

    def fetch_transactions(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return self._claimed(super().fetch_transactions(batch_size, **extra))

    async def fetch_transactions_async(self, batch_size: int, **extra: Any) -> Sequence[Delivery]:
        return self._claimed(await super().fetch_transactions_async(batch_size, **extra))

    def settle(self, settlings: Any) -> Any:
        began = time.time()
        return self._settled(settlings, super().settle(settlings), began)

    async def settle_async(self, settlings: Any) -> Any:
        began = time.time()
        return self._settled(settlings, await super().settle_async(settlings), began)

    def _claimed(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        for delivery in deliveries:
            claim = f"{self._who}#{next(self._numbers)}"
            self._claims[delivery.receipt] = claim
            self._journal.note("claim", claim, delivery.transaction.id, delivery.deliveries)
            # The only way to the handler that a transaction has for something that is not the user's.
            carried = {**delivery.transaction.trace, "claim": claim}
            delivery.transaction = delivery.transaction.replace(trace=carried)
        return deliveries

    def _settled(self, settlings: Any, results: Any, began: float) -> Any:
        for (delivery, how), result in zip(settlings, results, strict=True):
            claim = self._claims.get(delivery.receipt, "?")
            self._journal.note("settle", claim, type(how).__name__, result.value, began)
        return results


def order_of(message: Message) -> str:
    """Which order it is of: what strangers send has its id only in its body."""
    return message.headers.get("ergon-id") or named(message.body)


def note_passing(journal: Journal, who: str) -> None:
    """Have it noted what RabbitMQ pushed to this process and went back without having been handed out.

    That is publishing anew and acking, as with every release: a fault between the two leaves both.
    """
    numbers, give_back = itertools.count(1), Settler.give_back

    async def noted(settler: Settler, messages: Sequence[Message]) -> None:
        claims = [(f"{who}~{next(numbers)}", message) for message in messages]
        for claim, message in claims:
            journal.note("claim", claim, order_of(message), message.deliveries)
            journal.note("settle", claim, "Release", "begun", time.time())
        await give_back(settler, messages)
        for claim, _ in claims:
            journal.note("settle", claim, "Release", "passed on", time.time())

    Settler.give_back = noted  # type: ignore[method-assign]


def note_tags(path: Path) -> None:
    """Have a file of what RabbitMQ handed to this process and what it was told of it, by tag.

    Not for the verdict: should something be lost, it says who had it last, and whether he acked it.
    """
    file = path.open("a", buffering=1, encoding="utf-8")
    note, ack = Consumer._note, Consumer.ack

    def noted(consumer: Consumer, message: Message) -> None:
        words = order_of(message), *message.receipt, message.deliveries
        file.write(json.dumps([time.time(), "seen", *words]) + "\n")
        note(consumer, message)

    def acked(consumer: Consumer, messages: Sequence[Message]) -> bool:
        done = ack(consumer, messages)
        file.write(json.dumps([time.time(), "acked", done, *(message.receipt for message in messages)]) + "\n")
        return done

    Consumer._note, Consumer.ack = noted, acked  # type: ignore[method-assign]


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
    given = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    journal = Journal(given.journal)
    note_passing(journal, given.who)
    note_tags(given.journal.with_suffix(".tags"))
    queue = Journalled(schemes.connect(QUEUE, given.url, given.options), journal, given.who)
    # Never opened: it only writes marks, on the handlers' own connections.
    inbox = PostgresQueue(QUEUE, dsn=given.dsn, inbox=True)
    services = {"journal": journal, "queue": inbox, "who": given.who, "purse": Purse(given.dsn)}
    rules = policy(concurrency=given.concurrency, max_deliveries=given.max_deliveries)
    # Some brokers take back what is held for too long, and refuse a policy that allows it.
    rules = rules.model_copy(update={"loop": rules.loop.model_copy(update={"transaction_timeout": HOLD})})
    kind: Any = ThreadsWorker if given.flavour == "threads" else AsyncWorker
    task = kind(queue, policy=rules, **services)
    signal.signal(signal.SIGTERM, lambda *_: task.stop())
    journal.write("begin", given.who, os.getpid())
    report = task.run() if given.flavour == "threads" else asyncio.run(task.run())
    journal.write("over", str(report.end), dict(report.settled), dict(report.refused))
    return 0


if __name__ == "__main__":
    sys.exit(main())
