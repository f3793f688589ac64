"""Queues in NATS for tests, and a look at what is behind them."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import asynccontextmanager, suppress

import nats

from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.errors import ConnectionLost


def name():
    """One that nobody else has."""
    return f"orders-{uuid.uuid4().hex[:8]}"


@asynccontextmanager
async def opened(server, queue=None, **options):
    """A queue, open and as quick to give up as a test is."""
    made = NatsQueue(queue or name(), url=server.url, **{"timeout": 2.0, "patience": 3.0, **options})
    try:
        await made.open_async()
        yield made
    finally:
        await made.close_async()


async def claimed(queue, count, *, within=5.0):
    """Exactly *count* deliveries, in as many fetches as it takes."""
    found, end = [], time.monotonic() + within
    while time.monotonic() < end:
        with suppress(ConnectionLost):
            found += await queue.fetch_transactions_async(count - len(found), wait=0.1)
        if len(found) == count:
            return found
    raise AssertionError(f"{len(found)} of {count} came within {within:g} s")


@asynccontextmanager
async def bare(server):
    """The client itself, and JetStream's API in its own JSON."""
    line = await nats.connect(server.url)

    async def api(what, **given):
        answer = await line.request(f"$JS.API.{what}", json.dumps(given).encode() if given else b"", timeout=5)
        return json.loads(answer.data)

    try:
        yield line, api
    finally:
        await line.close()
