"""Queues in NATS for tests, and direct access to the server."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import asynccontextmanager, suppress

import nats

from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.errors import ConnectionLostError


def new_queue_name():
    """Return a unique queue name."""
    return f"orders-{uuid.uuid4().hex[:8]}"


@asynccontextmanager
async def open_queue(server, queue=None, **options):
    """Open a queue with timeouts short enough for a test."""
    settings = {"url": server.url, "timeout": 2.0, "patience": 3.0, **options}
    nats_queue = NatsQueue(queue or new_queue_name(), **settings)
    try:
        await nats_queue.open_async()
        yield nats_queue
    finally:
        await nats_queue.close_async()


async def claim_deliveries(queue, count, *, within=5.0):
    """Claim exactly *count* deliveries, in as many fetches as necessary."""
    deliveries, deadline = [], time.monotonic() + within
    while time.monotonic() < deadline:
        with suppress(ConnectionLostError):
            deliveries += await queue.fetch_transactions_async(count - len(deliveries), wait=0.1)
        if len(deliveries) == count:
            return deliveries
    raise AssertionError(f"{len(deliveries)} of {count} came within {within:g} s")


@asynccontextmanager
async def open_client(server):
    """Yield the plain NATS client, and JetStream's API in its own JSON."""
    client = await nats.connect(server.url)

    async def call_api(endpoint, **fields):
        answer = await client.request(f"$JS.API.{endpoint}", json.dumps(fields).encode() if fields else b"", timeout=5)
        return json.loads(answer.data)

    try:
        yield client, call_api
    finally:
        await client.close()
