"""A good hand-written loop: fetch, bound the concurrency, settle in batches. Nothing else.

No timeouts, no retries, no handlers, no report, no shutdown: this is the baseline for the overhead of the engine. Each
loop is at most 60 lines.
"""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue

from ergon_framework.connectors.base import Ack, DeadLetter


async def consume_async(connector, handle, *, concurrency=10, batch=10):
    """Run tasks that live as long as the loop, fed by one fetcher."""
    work = asyncio.Queue(maxsize=batch)
    results = []

    async def settle():
        ready, results[:] = results[:], []
        await connector.settle_async(ready)

    async def worker():
        while (delivery := await work.get()) is not None:
            try:
                await handle(delivery.transaction)
                results.append((delivery, Ack()))
            except Exception as error:  # noqa: BLE001 - the worker outlives its transactions
                results.append((delivery, DeadLetter(repr(error))))
            if len(results) >= batch:
                await settle()

    workers = [asyncio.create_task(worker()) for _ in range(concurrency)]
    count = 0
    while deliveries := await connector.fetch_transactions_async(batch):
        count += len(deliveries)
        for delivery in deliveries:
            await work.put(delivery)
    for _ in workers:
        await work.put(None)
    await asyncio.gather(*workers)
    await settle()
    return count


def consume(connector, handle, *, concurrency=10, batch=10):  # noqa: C901 - by hand it stands in one place
    """Run threads that live as long as the loop; the caller's thread fetches and settles."""
    work, results = SimpleQueue(), SimpleQueue()

    def worker():
        while (delivery := work.get()) is not None:
            try:
                handle(delivery.transaction)
                results.put((delivery, Ack()))
            except Exception as error:  # noqa: BLE001 - the worker outlives its transactions
                results.put((delivery, DeadLetter(repr(error))))

    workers = [threading.Thread(target=worker, daemon=True) for _ in range(concurrency)]
    for thread in workers:
        thread.start()
    count = running = 0
    while True:
        deliveries = connector.fetch_transactions(min(batch, concurrency - running))
        count += len(deliveries)
        running += len(deliveries)
        for delivery in deliveries:
            work.put(delivery)
        if not running:
            break
        ready = [results.get()]
        # A fetch for every single free slot would cost more than it saves.
        while not results.empty() or running - len(ready) > concurrency // 2:
            ready.append(results.get())
        running -= len(ready)
        connector.settle(ready)
    for _ in workers:
        work.put(None)
    for thread in workers:
        thread.join()
    return count
