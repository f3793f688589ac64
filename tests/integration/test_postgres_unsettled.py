"""Check that claims their owner leaves unsettled return with the lease although the process renews others."""

from __future__ import annotations

import asyncio
import time

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, Defer, SettleResult
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.postgres.claims import UNCONFIRMED_RELEASE_SECONDS
from ergon_framework.transaction import Transaction

pytestmark = pytest.mark.invariant

LEASE_SECONDS = 1.0
#: Longest time that a claim may be out: its lease and the poll interval.
MAX_CLAIM_SECONDS = 2 * LEASE_SECONDS
#: No timestamp of the server can represent it.
UNREPRESENTABLE_DELAY = Defer(1e14)


class ThreadClient:
    """A queue as used by threads."""

    def __init__(self, queue):
        self.queue = queue

    async def fetch(self):
        return self.queue.fetch_transactions(10)

    async def settle(self, *settlings):
        return self.queue.settle(settlings)

    async def extend(self, *deliveries):
        return self.queue.extend(deliveries)

    async def close(self):
        self.queue.close()


class AsyncioClient(ThreadClient):
    """A queue as used by an event loop."""

    async def fetch(self):
        return await self.queue.fetch_transactions_async(10)

    async def settle(self, *settlings):
        return await self.queue.settle_async(settlings)

    async def extend(self, *deliveries):
        return await self.queue.extend_async(deliveries)

    async def close(self):
        await self.queue.close_async()


VARIANTS = pytest.mark.parametrize("variant", [ThreadClient, AsyncioClient], ids=["threads", "asyncio"])


def dispatch(dsn, *names, keys=None):
    queue = PostgresQueue("orders", dsn=dsn)
    queue.dispatch([Transaction(1, id=name, key=keys) for name in names])
    queue.close()


async def fetch_redelivered(clients, *, timeout):
    """Fetch from *clients* in turn; return the first delivery and the seconds until it came."""
    started_at = time.monotonic()
    while (elapsed := time.monotonic() - started_at) < timeout:
        for client in clients:
            if deliveries := await client.fetch():
                return deliveries, time.monotonic() - started_at
        await asyncio.sleep(0.02)
    raise AssertionError(f"nothing came within {elapsed:.1f} s")


@VARIANTS
@pytest.mark.spec("DX-22", "CNN-08")
@pytest.mark.parametrize("key", [None, "customer-7"], ids=["plain", "keyed"])
def test_claims_of_a_closed_queue_return_with_the_lease_while_another_queue_works(database, variant, key):
    async def main():
        dispatch(database, "held", keys=key)
        closing = variant(PostgresQueue("orders", dsn=database, lease=LEASE_SECONDS))
        other = variant(PostgresQueue("invoices", dsn=database, lease=LEASE_SECONDS))
        # Another lease makes it another instance, as another process would be.
        other_instance = variant(PostgresQueue("orders", dsn=database, lease=LEASE_SECONDS * 3))
        assert await other.fetch() == []
        (delivery,) = await closing.fetch()
        await closing.close()
        assert await other_instance.fetch() == []  # not before
        (again,), _ = await fetch_redelivered([other, other_instance], timeout=MAX_CLAIM_SECONDS)
        assert (again.transaction.id, again.deliveries) == ("held", 2)
        assert await other.settle((delivery, Ack())) == [SettleResult.LOST]
        assert await other_instance.settle((again, Ack())) == [SettleResult.SETTLED]
        await other.close()
        await other_instance.close()

    asyncio.run(main())


@VARIANTS
@pytest.mark.spec("DX-22")
def test_claims_of_a_closed_queue_may_still_be_settled_before_the_lease_ends(database, variant):
    async def main():
        dispatch(database, "held")
        queue = variant(PostgresQueue("orders", dsn=database, lease=30.0))
        other = variant(PostgresQueue("invoices", dsn=database, lease=30.0))
        assert await other.fetch() == []
        (delivery,) = await queue.fetch()
        await queue.close()
        assert await queue.settle((delivery, Ack())) == [SettleResult.SETTLED]
        await queue.close()
        await other.close()

    asyncio.run(main())


@VARIANTS
@pytest.mark.spec("DX-22", "CNN-08")
def test_a_claim_whose_settlement_failed_returns_with_the_lease(database, variant):
    async def main():
        dispatch(database, "bad", "good")
        client = variant(PostgresQueue("orders", dsn=database, lease=LEASE_SECONDS))
        deliveries = {delivery.transaction.id: delivery for delivery in await client.fetch()}
        results = await client.settle((deliveries["bad"], UNREPRESENTABLE_DELAY), (deliveries["good"], Ack()))
        assert results == [SettleResult.FAILED, SettleResult.SETTLED]
        assert await client.fetch() == []  # not before
        (again,), _ = await fetch_redelivered([client], timeout=MAX_CLAIM_SECONDS)
        assert (again.transaction.id, again.deliveries) == ("bad", 2)
        assert await client.settle((deliveries["bad"], Ack())) == [SettleResult.LOST]
        # The second time from the content table, where redelivered messages are.
        assert await client.settle((again, UNREPRESENTABLE_DELAY)) == [SettleResult.FAILED]
        (third,), _ = await fetch_redelivered([client], timeout=MAX_CLAIM_SECONDS)
        assert third.deliveries == 3
        assert await client.settle((third, Ack())) == [SettleResult.SETTLED]
        await client.close()
        with psycopg.connect(database) as connection:
            assert connection.execute("select count(*) from ergon.claim").fetchone() == (0,)

    asyncio.run(main())


@VARIANTS
@pytest.mark.spec("DX-22")
def test_a_claim_whose_settlement_failed_is_kept_while_it_is_extended(database, variant):
    async def main():
        dispatch(database, "kept")
        client = variant(PostgresQueue("orders", dsn=database, lease=LEASE_SECONDS))
        (delivery,) = await client.fetch()
        assert await client.settle((delivery, UNREPRESENTABLE_DELAY)) == [SettleResult.FAILED]
        deadline = time.monotonic() + 2.5 * LEASE_SECONDS
        while time.monotonic() < deadline:
            (lease_end,) = await client.extend(delivery)
            assert lease_end is not None
            assert await client.fetch() == []
            await asyncio.sleep(LEASE_SECONDS / 5)
        assert await client.settle((delivery, Ack())) == [SettleResult.SETTLED]
        await client.close()

    asyncio.run(main())


@pytest.mark.spec("DX-22")
def test_a_claim_that_reaches_the_server_long_after_its_fetch_was_abandoned_is_released(database):
    dispatch(database, "late")
    now = [1000.0]
    queue = PostgresQueue("orders", dsn=database)
    assert queue.fetch_transactions(0) == []
    queue.open()
    queue._claims._clock = lambda: now[0]
    worker = queue._run(lambda home: home.worker_lease.ensure())
    # A fetch was interrupted, and its statement runs long after the worker stopped checking for it.
    queue._claims._unconfirmed[worker, 99] = now[0] + UNCONFIRMED_RELEASE_SECONDS
    for _ in range(3):
        now[0] += UNCONFIRMED_RELEASE_SECONDS
        (delivery,) = queue.fetch_transactions(1)
        queue.settle([(delivery, Defer(0.0))])
    with psycopg.connect(database) as connection:
        number = connection.execute("select id from ergon.queue where name = 'orders'").fetchone()[0]
        claim = "select id from ergon.claim_messages(%s, 1, %s, 99, null, 0, false, 1000, 1000, 5, true)"
        assert len(connection.execute(claim, [number, worker]).fetchall()) == 1
    assert queue.fetch_transactions(1) == []
    now[0] += UNCONFIRMED_RELEASE_SECONDS
    assert [delivery.transaction.id for delivery in queue.fetch_transactions(1)] == ["late"]
    queue.close()
