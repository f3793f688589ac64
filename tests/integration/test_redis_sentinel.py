"""A primary and a replica that sentinels watch: after a failover the queue is at the new primary."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from ergon_framework import ConsumerPolicy, consumer
from ergon_framework.connectors.base import Ack, SettleResult
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.transaction import Transaction
from tests.integration.test_redis_connections import Caller
from tests.log_events import get_event

FAILOVER_TIMEOUT_SECONDS = 60.0


def retry(call):
    """Repeat *call* while it loses its connection, as a loop does; return its result."""
    deadline = time.monotonic() + FAILOVER_TIMEOUT_SECONDS
    while True:
        try:
            return call()
        except ConnectionLostError:
            assert time.monotonic() < deadline, "no failover"
            time.sleep(0.05)


def make_transactions(count, name="order"):
    return [Transaction(number, id=f"{name}-{number}") for number in range(count)]


@pytest.fixture(params=["sync", "async"])
def variant(request):
    return request.param


@pytest.mark.spec("CNN-02", "CNN-07", "CNN-17")
def test_after_a_failover_the_queue_is_at_the_new_primary(new_sentinels, variant):
    # The replica writes less often: the report must be about the server that is in use.
    servers = new_sentinels(replica_settings={"appendfsync": "everysec"})
    with Caller(variant, "orders", url=servers.url, lease=120.0) as queue:
        queue.call("dispatch", make_transactions(10))
        claimed = queue.call("fetch_transactions", 3)
        assert queue.host == f"127.0.0.1:{servers.primary.port}"
        assert queue.capabilities.durable is True
        servers.wait_for_replication()
        servers.primary.kill()
        retry(lambda: queue.call("dispatch", make_transactions(1, "later")))
        assert queue.host == f"127.0.0.1:{servers.replica.port}"
        assert queue.capabilities.durable is False
        # Claims are replicated like the messages.
        results = queue.call("settle", [(delivery, Ack()) for delivery in claimed])
        assert results == [SettleResult.SETTLED] * 3
        deliveries = queue.call("fetch_transactions", 20)
        assert [each.transaction.id for each in deliveries] == [*(f"order-{n}" for n in range(3, 10)), "later-0"]


@pytest.mark.spec("CNN-07")
def test_a_demoted_primary_is_not_used_any_more(new_sentinels, variant):
    servers = new_sentinels()
    with Caller(variant, "orders", url=servers.url) as queue:
        queue.call("dispatch", make_transactions(1))
        servers.wait_for_replication()
        with servers.sentinels[0].client() as client:
            client.execute_command("SENTINEL", "FAILOVER", servers.service)

        def is_switched():
            retry(lambda: queue.call("dispatch", make_transactions(1)))
            return queue.host == f"127.0.0.1:{servers.replica.port}"

        deadline = time.monotonic() + FAILOVER_TIMEOUT_SECONDS
        while not is_switched():
            assert time.monotonic() < deadline, "the queue has not switched"
            time.sleep(0.05)
        before = queue.call("depth").ready
        queue.call("dispatch", make_transactions(5))
        with servers.replica.client() as client:
            assert client.xlen("ergon:{orders}") == before + 5


@pytest.mark.spec("CNN-07")
def test_a_connection_to_an_earlier_primary_is_not_reused(new_sentinels, new_redis, variant):
    servers, other = new_sentinels(sentinels=1), new_redis()
    with Caller(variant, "orders", url=servers.url) as queue:
        queue.dispatch(1)
        with servers.sentinels[0].client() as client:
            client.execute_command("SENTINEL", "REMOVE", servers.service)
            client.execute_command("SENTINEL", "MONITOR", servers.service, "127.0.0.1", other.port, 1)
        # No failover, so that the idle connection stays open; a new one of the same process finds the other server.
        queue.client.pool(None).connect().disconnect()
        queue.dispatch(2)
        with other.client() as client:
            assert client.xlen("ergon:{orders}") == 1


@pytest.mark.spec("CNN-02", "CNN-07", "DX-12")
def test_a_worker_goes_on_after_a_failover(new_sentinels, variant, caplog):
    servers = new_sentinels()
    queue = RedisQueue("orders", url=servers.url, lease=5.0)
    names, handled = {each.id for each in make_transactions(60)}, set()
    begun = threading.Event()
    policy = ConsumerPolicy.load(
        {"loop": {"streaming": True, "concurrency": {"value": 2}, "empty_queue": {"backoff": 0.05, "cap": 0.1}}}
    )

    def note(number):
        handled.add(f"order-{number}")
        if len(handled) >= 5:
            begun.set()
        if handled >= names:
            charge.stop()

    if variant == "sync":

        @consumer(queue)
        def charge(number):
            time.sleep(0.05)  # the work of a handler: the primary is killed in the middle
            note(number)
    else:

        @consumer(queue)
        async def charge(number):
            await asyncio.sleep(0.05)
            note(number)

    queue.dispatch(make_transactions(60))
    servers.wait_for_replication()
    with caplog.at_level(logging.INFO, logger="ergon_framework"):
        worker = threading.Thread(
            target=lambda: charge.run(policy) if variant == "sync" else asyncio.run(charge.run(policy))
        )
        worker.start()
        assert begun.wait(30)
        servers.primary.kill()
        worker.join(FAILOVER_TIMEOUT_SECONDS)
        charge.stop()
        worker.join(30)
    assert names <= handled
    hosts = {
        event: [record.host for record in caplog.records if get_event(record) == event]
        for event in ("connection lost", "connection restored")
    }
    assert hosts["connection lost"][0] == f"127.0.0.1:{servers.primary.port}"
    assert hosts["connection restored"][-1] == f"127.0.0.1:{servers.replica.port}"
    queue.close()


# -- sentinels -----------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-07")
def test_any_sentinel_names_the_primary_and_without_one_the_connection_is_lost(new_sentinels, variant):
    servers = new_sentinels()
    servers.sentinels[0].kill()
    with Caller(variant, "orders", url=servers.url) as queue:
        assert queue.dispatch() == 1
    for sentinel in servers.sentinels:
        sentinel.kill()
    with (
        Caller(variant, "orders", url=servers.url) as queue,
        pytest.raises(ConnectionLostError, match=r"no sentinel at 127\.0\.0\.1") as raised,
    ):
        queue.dispatch()
    assert all(str(sentinel.port) in str(raised.value) for sentinel in servers.sentinels)


def test_an_unknown_service_is_an_error_of_the_configuration(new_sentinels, variant):
    servers = new_sentinels(sentinels=1)
    with (
        Caller(variant, "orders", url=servers.url.replace("/orders/", "/unknown/")) as queue,
        pytest.raises(ConfigurationError, match="watch no service 'unknown'; correct its name"),
    ):
        queue.dispatch()
