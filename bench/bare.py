"""What a good engineer writes by hand: fetch, bound the concurrency, settle in groups. Nothing else.

No timeouts, no retries, no handlers, no report, no shutdown: this is the floor from which the engine's price is
measured. Each loop is at most 60 lines.
"""

from __future__ import annotations

import asyncio
import threading
from queue import SimpleQueue

from ergon_framework.connectors.base import Ack, DeadLetter


async def consume_async(connector, handle, *, concurrency=10, batch=10):
    """Workers that live as long as the loop, fed by one fetcher."""
    work = asyncio.Queue(maxsize=batch)
    done = []

    async def settle():
        ready, done[:] = done[:], []
        await connector.settle_async(ready)

    async def worker():
        while (delivery := await work.get()) is not None:
            try:
                await handle(delivery.transaction)
                done.append((delivery, Ack()))
            except Exception as error:  # noqa: BLE001 - the worker outlives its transactions
                done.append((delivery, DeadLetter(repr(error))))
            if len(done) >= batch:
                await settle()

    workers = [asyncio.create_task(worker()) for _ in range(concurrency)]
    count = 0
    while found := await connector.fetch_transactions_async(batch):
        count += len(found)
        for delivery in found:
            await work.put(delivery)
    for _ in workers:
        await work.put(None)
    await asyncio.gather(*workers)
    await settle()
    return count


def consume(connector, handle, *, concurrency=10, batch=10):  # noqa: C901 - by hand it stands in one place
    """Threads that live as long as the loop; the caller's thread fetches and settles."""
    work, done = SimpleQueue(), SimpleQueue()

    def worker():
        while (delivery := work.get()) is not None:
            try:
                handle(delivery.transaction)
                done.put((delivery, Ack()))
            except Exception as error:  # noqa: BLE001 - the worker outlives its transactions
                done.put((delivery, DeadLetter(repr(error))))

    workers = [threading.Thread(target=worker, daemon=True) for _ in range(concurrency)]
    for thread in workers:
        thread.start()
    count = running = 0
    while True:
        found = connector.fetch_transactions(min(batch, concurrency - running))
        count += len(found)
        running += len(found)
        for delivery in found:
            work.put(delivery)
        if not running:
            break
        ready = [done.get()]
        # Fetching again for every single free slot would cost more than it brings.
        while not done.empty() or running - len(ready) > concurrency // 2:
            ready.append(done.get())
        running -= len(ready)
        connector.settle(ready)
    for _ in workers:
        work.put(None)
    for thread in workers:
        thread.join()
    return count
