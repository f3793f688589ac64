"""Claims that their owner leaves unsettled return with the lease, although the process lives and renews others."""

from __future__ import annotations

import asyncio
import time

import psycopg
import pytest

from ergon_framework.connectors.base import Ack, Later, SettleResult
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.postgres.claiming import DOUBT
from ergon_framework.transaction import Transaction

pytestmark = pytest.mark.invariant

LEASE = 1.0
#: Longest that a claim may be out: its lease, and the time in which somebody looks.
LATEST = 2 * LEASE
#: No timestamp of the server can hold it.
FOR_EVER = Later(1e14)


class Threads:
    """A queue as threads use it."""

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


class Asyncio(Threads):
    """The same as an event loop uses it."""

    async def fetch(self):
        return await self.queue.fetch_transactions_async(10)

    async def settle(self, *settlings):
        return await self.queue.settle_async(settlings)

    async def extend(self, *deliveries):
        return await self.queue.extend_async(deliveries)

    async def close(self):
        await self.queue.close_async()


VARIANTS = pytest.mark.parametrize("variant", [Threads, Asyncio], ids=["threads", "asyncio"])


def dispatch(dsn, *names, keys=None):
    queue = PostgresQueue("orders", dsn=dsn)
    queue.dispatch([Transaction(name, 1, key=keys) for name in names])
    queue.close()


async def redelivered(clients, *, within):
    """The first delivery that one of *clients* fetches, all of them asked in turn, and the seconds until then."""
    began = time.monotonic()
    while (took := time.monotonic() - began) < within:
        for client in clients:
            if found := await client.fetch():
                return found, time.monotonic() - began
        await asyncio.sleep(0.02)
    raise AssertionError(f"nothing came within {took:.1f} s")


@VARIANTS
@pytest.mark.spec("DX-22", "CNN-08")
@pytest.mark.parametrize("key", [None, "customer-7"], ids=["plain", "keyed"])
def test_what_a_closed_queue_held_returns_with_the_lease_while_another_queue_works(database, variant, key):
    async def story():
        dispatch(database, "held", keys=key)
        closing = variant(PostgresQueue("orders", dsn=database, lease=LEASE))
        other = variant(PostgresQueue("invoices", dsn=database, lease=LEASE))
        # Another lease is another instance, as another process would be.
        stranger = variant(PostgresQueue("orders", dsn=database, lease=LEASE * 3))
        assert await other.fetch() == []
        (held,) = await closing.fetch()
        await closing.close()
        assert await stranger.fetch() == []  # not before
        (again,), _ = await redelivered([other, stranger], within=LATEST)
        assert (again.transaction.id, again.deliveries) == ("held", 2)
        assert await other.settle((held, Ack())) == [SettleResult.LOST]
        assert await stranger.settle((again, Ack())) == [SettleResult.SETTLED]
        await other.close()
        await stranger.close()

    asyncio.run(story())


@VARIANTS
@pytest.mark.spec("DX-22")
def test_what_a_closed_queue_held_may_still_be_settled_before_the_lease_ends(database, variant):
    async def story():
        dispatch(database, "held")
        queue = variant(PostgresQueue("orders", dsn=database, lease=30.0))
        other = variant(PostgresQueue("invoices", dsn=database, lease=30.0))
        assert await other.fetch() == []
        (held,) = await queue.fetch()
        await queue.close()
        assert await queue.settle((held, Ack())) == [SettleResult.SETTLED]
        await queue.close()
        await other.close()

    asyncio.run(story())


@VARIANTS
@pytest.mark.spec("DX-22", "CNN-08")
def test_a_claim_whose_settlement_failed_returns_with_the_lease(database, variant):
    async def story():
        dispatch(database, "bad", "good")
        client = variant(PostgresQueue("orders", dsn=database, lease=LEASE))
        found = {delivery.transaction.id: delivery for delivery in await client.fetch()}
        settled = await client.settle((found["bad"], FOR_EVER), (found["good"], Ack()))
        assert settled == [SettleResult.FAILED, SettleResult.SETTLED]
        assert await client.fetch() == []  # not before
        (again,), _ = await redelivered([client], within=LATEST)
        assert (again.transaction.id, again.deliveries) == ("bad", 2)
        assert await client.settle((found["bad"], Ack())) == [SettleResult.LOST]
        # The second time from content, where what came back is.
        assert await client.settle((again, FOR_EVER)) == [SettleResult.FAILED]
        (third,), _ = await redelivered([client], within=LATEST)
        assert third.deliveries == 3
        assert await client.settle((third, Ack())) == [SettleResult.SETTLED]
        await client.close()
        with psycopg.connect(database) as connection:
            assert connection.execute("select count(*) from ergon.held").fetchone() == (0,)

    asyncio.run(story())


@VARIANTS
@pytest.mark.spec("DX-22")
def test_a_claim_whose_settlement_failed_is_kept_while_it_is_extended(database, variant):
    async def story():
        dispatch(database, "kept")
        client = variant(PostgresQueue("orders", dsn=database, lease=LEASE))
        (held,) = await client.fetch()
        assert await client.settle((held, FOR_EVER)) == [SettleResult.FAILED]
        end = time.monotonic() + 2.5 * LEASE
        while time.monotonic() < end:
            (until,) = await client.extend(held)
            assert until is not None
            assert await client.fetch() == []
            await asyncio.sleep(LEASE / 5)
        assert await client.settle((held, Ack())) == [SettleResult.SETTLED]
        await client.close()

    asyncio.run(story())


@pytest.mark.spec("DX-22")
def test_a_claim_that_reaches_the_server_long_after_its_fetch_was_given_up_is_given_back(database):
    dispatch(database, "late")
    now = [1000.0]
    queue = PostgresQueue("orders", dsn=database)
    assert queue.fetch_transactions(0) == []
    queue.open()
    queue._claiming._clock = lambda: now[0]
    worker = queue._run(lambda home: home.tenure.present())
    # A fetch was cut off, and its statement is carried out when nobody has doubted it for long.
    queue._claiming._doubted[worker, 99] = now[0] + DOUBT
    for _ in range(3):
        now[0] += DOUBT
        (delivery,) = queue.fetch_transactions(1)
        queue.settle([(delivery, Later(0.0))])
    with psycopg.connect(database) as connection:
        number = connection.execute("select id from ergon.queue where name = 'orders'").fetchone()[0]
        claim = "select id from ergon.claim(%s, 1, %s, 99, null, 0, false)"
        assert len(connection.execute(claim, [number, worker]).fetchall()) == 1
    assert queue.fetch_transactions(1) == []
    now[0] += DOUBT
    assert [delivery.transaction.id for delivery in queue.fetch_transactions(1)] == ["late"]
    queue.close()
