"""Queues for tests of outbox, inbox and relay, and a look at what is in them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from ergon_framework.connectors.base import Ack
from ergon_framework.connectors.postgres import PostgresQueue


@contextmanager
def opened(dsn, name=None, **options) -> Iterator[PostgresQueue]:
    """A queue of a name that nobody else has."""
    queue = PostgresQueue(name or f"orders-{uuid.uuid4().hex[:8]}", dsn=dsn, **options)
    queue.open()
    try:
        yield queue
    finally:
        queue.close()


def taken(queue, count=1000):
    """All that is ready, acked."""
    deliveries = queue.fetch_transactions(count)
    queue.settle([(delivery, Ack()) for delivery in deliveries])
    return [delivery.transaction for delivery in deliveries]
