"""Connections to Redis: how many there are, how they end, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework.connectors.base import Ack, SettleResult
from ergon_framework.errors import ConnectionLost
from ergon_framework.transaction import Transaction
from tests.integration.redises import Queues, running, until

SETTLED = SettleResult.SETTLED


@pytest.fixture(scope="module")
def server():
    with running(appendonly="no") as server:
        yield server


@pytest.fixture
def queues(server):
    made = Queues(server)
    yield made
    made.close()


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def some(count):
    return [Transaction(f"tx-{number}", {"number": number}) for number in range(count)]


def lines(client):
    return sum(each["name"] == "ergon" for each in client.client_list())


@pytest.mark.spec("CNN-13")
def test_many_threads_share_sixteen_connections(queues, client):
    queue = queues("crowd")
    queue.open()
    failed, most = [], 0

    def send(number):
        try:
            for each in range(20):
                queue.dispatch([Transaction(f"tx-{number}-{each}", {})])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        most = max(most, lines(client))
    assert not failed
    assert queue.depth().ready == 800
    assert most <= 16
    queue.close()
    until(lambda: lines(client) == 0, "all are closed")


@pytest.mark.spec("CNN-01")
def test_one_queue_serves_threads_and_several_event_loops(queues, client):
    queue = queues("flavours")

    async def once(number):
        await queue.dispatch_async(some(1))
        (delivery,) = await queue.fetch_transactions_async(1, wait=2.0)
        assert await queue.settle_async([(delivery, Ack())]) == [SETTLED]

    for number in range(3):
        asyncio.run(once(number))
        queue.dispatch(some(1))
        assert queue.settle([(each, Ack()) for each in queue.fetch_transactions(1)]) == [SETTLED]
    queue.close()
    until(lambda: lines(client) == 0, "all are closed")


@pytest.mark.spec("CNN-01")
def test_many_tasks_of_one_event_loop_share_sixteen_connections(queues, client):
    queue = queues("tasks")

    async def main():
        await queue.open_async()
        await asyncio.gather(*(queue.dispatch_async(some(1)) for _ in range(100)))
        count = await asyncio.to_thread(lines, client)
        depth = await queue.depth_async()
        await queue.close_async()
        return count, depth.ready

    count, ready = asyncio.run(main())
    assert ready == 100
    assert 1 < count <= 16


@pytest.mark.spec("CNN-07")
@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_no_call_outlasts_a_server_that_hangs(queues, server, flavour):
    queue = queues(f"hangs-{flavour}", url=f"{server.url}?socket_timeout=0.5&socket_connect_timeout=0.5")

    async def main():
        await queue.open_async()
        server.pause()
        try:
            for call in (queue.fetch_transactions_async(1, wait=0.2), queue.dispatch_async(some(2))):
                began = time.monotonic()
                with pytest.raises(ConnectionLost):
                    await call
                assert time.monotonic() - began < 3.0
        finally:
            server.resume()
        await queue.dispatch_async(some(1))
        await queue.close_async()

    if flavour == "async":
        asyncio.run(main())
        return
    queue.open()
    server.pause()
    try:
        for call in (lambda: queue.fetch_transactions(1, wait=0.2), lambda: queue.dispatch(some(2))):
            began = time.monotonic()
            with pytest.raises(ConnectionLost):
                call()
            assert time.monotonic() - began < 3.0
    finally:
        server.resume()
    queue.dispatch(some(1))


@pytest.mark.spec("CNN-07")
def test_whoever_sleeps_through_a_restart_is_woken_afterwards():
    with running() as server:
        queues = Queues(server)
        queue, sender = queues("restarted"), queues("restarted")
        rung = []

        class Ear:
            def wake(self):
                rung.append(time.monotonic())

            def lost(self, receipts): ...

        queue.listen(Ear())
        assert queue.fetch_transactions(1) == []
        server.stop()
        server.start()
        sender.dispatch(some(1))
        # Nobody has looked since: the bell hears of it by itself, on a line of its own that it has made anew.
        until(lambda: rung, "the bell rings")
        assert len(queue.fetch_transactions(1)) == 1
        queues.close()


@pytest.mark.spec("CNN-01")
def test_a_busy_queue_rings_no_bells_and_an_armed_one_rings_once(queues):
    queue, sender = queues("quiet"), queues("quiet")
    rung = []

    class Ear:
        def wake(self):
            rung.append(time.monotonic())

        def lost(self, receipts): ...

    unlisten = queue.listen(Ear())
    assert queue.fetch_transactions(1) == []
    for number in range(50):
        sender.dispatch([Transaction(f"tx-{number}", {})])
    until(lambda: rung, "it rings")
    time.sleep(0.2)
    assert len(rung) == 1
    assert len(queue.fetch_transactions(50)) == 50
    unlisten()
