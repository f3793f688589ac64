"""Helpers for tests of outbox, inbox and relay: open a queue and take its messages."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from ergon_framework.connectors.base import Ack
from ergon_framework.connectors.postgres import PostgresQueue


@contextmanager
def open_queue(dsn, name=None, **options) -> Iterator[PostgresQueue]:
    """Open a queue with a unique name."""
    queue = PostgresQueue(name or f"orders-{uuid.uuid4().hex[:8]}", dsn=dsn, **options)
    queue.open()
    try:
        yield queue
    finally:
        queue.close()


def fetch_and_ack(queue, count=1000):
    """Fetch and ack all ready messages."""
    deliveries = queue.fetch_transactions(count)
    queue.settle([(delivery, Ack()) for delivery in deliveries])
    return [delivery.transaction for delivery in deliveries]
