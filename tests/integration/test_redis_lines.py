"""Check connections to Redis: their number, how they end, and that no caller waits without limit."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework.connectors.base import Ack, SettleResult
from ergon_framework.errors import ConnectionLostError
from ergon_framework.transaction import Transaction
from tests.integration.redises import QueueFactory, run_server, wait_until

SETTLED = SettleResult.SETTLED


@pytest.fixture(scope="module")
def server():
    with run_server(appendonly="no") as server:
        yield server


@pytest.fixture
def queues(server):
    queues = QueueFactory(server)
    yield queues
    queues.close()


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


def make_transactions(count):
    return [Transaction({"number": number}, id=f"tx-{number}") for number in range(count)]


def count_connections(client):
    return sum(each["name"] == "ergon" for each in client.client_list())


@pytest.mark.spec("CNN-13")
def test_many_threads_share_sixteen_connections(queues, client):
    queue = queues("crowd")
    queue.open()
    errors, max_connections = [], 0

    def send(number):
        try:
            for each in range(20):
                queue.dispatch([Transaction({}, id=f"tx-{number}-{each}")])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        max_connections = max(max_connections, count_connections(client))
    assert not errors
    assert queue.depth().ready == 800
    assert max_connections <= 16
    queue.close()
    wait_until(lambda: count_connections(client) == 0, "all are closed")


@pytest.mark.spec("CNN-01")
def test_one_queue_serves_threads_and_several_event_loops(queues, client):
    queue = queues("flavours")

    async def once(number):
        await queue.dispatch_async(make_transactions(1))
        (delivery,) = await queue.fetch_transactions_async(1, wait=2.0)
        assert await queue.settle_async([(delivery, Ack())]) == [SETTLED]

    for number in range(3):
        asyncio.run(once(number))
        queue.dispatch(make_transactions(1))
        assert queue.settle([(each, Ack()) for each in queue.fetch_transactions(1)]) == [SETTLED]
    queue.close()
    wait_until(lambda: count_connections(client) == 0, "all are closed")


@pytest.mark.spec("CNN-01")
def test_many_tasks_of_one_event_loop_share_sixteen_connections(queues, client):
    queue = queues("tasks")

    async def main():
        await queue.open_async()
        await asyncio.gather(*(queue.dispatch_async(make_transactions(1)) for _ in range(100)))
        count = await asyncio.to_thread(count_connections, client)
        depth = await queue.depth_async()
        await queue.close_async()
        return count, depth.ready

    count, ready = asyncio.run(main())
    assert ready == 100
    assert 1 < count <= 16


@pytest.mark.spec("CNN-07")
@pytest.mark.parametrize("variant", ["sync", "async"])
def test_no_call_outlasts_a_server_that_hangs(queues, server, variant):
    queue = queues(f"hangs-{variant}", url=f"{server.url}?socket_timeout=0.5&socket_connect_timeout=0.5")

    async def main():
        await queue.open_async()
        server.pause()
        try:
            for call in (queue.fetch_transactions_async(1, wait=0.2), queue.dispatch_async(make_transactions(2))):
                started_at = time.monotonic()
                with pytest.raises(ConnectionLostError):
                    await call
                assert time.monotonic() - started_at < 3.0
        finally:
            server.resume()
        await queue.dispatch_async(make_transactions(1))
        await queue.close_async()

    if variant == "async":
        asyncio.run(main())
        return
    queue.open()
    server.pause()
    try:
        for call in (lambda: queue.fetch_transactions(1, wait=0.2), lambda: queue.dispatch(make_transactions(2))):
            started_at = time.monotonic()
            with pytest.raises(ConnectionLostError):
                call()
            assert time.monotonic() - started_at < 3.0
    finally:
        server.resume()
    queue.dispatch(make_transactions(1))


@pytest.mark.spec("CNN-07")
def test_a_worker_that_waits_through_a_restart_is_woken_afterwards():
    with run_server() as server:
        queues = QueueFactory(server)
        queue, sender = queues("restarted"), queues("restarted")
        wake_times = []

        class RecordingListener:
            def wake(self):
                wake_times.append(time.monotonic())

            def on_lost(self, receipts): ...

        queue.listen(RecordingListener())
        assert queue.fetch_transactions(1) == []
        server.stop()
        server.start()
        sender.dispatch(make_transactions(1))
        # No fetch has polled since: the notification listener reconnects automatically on its own connection.
        wait_until(lambda: wake_times, "the bell rings")
        assert len(queue.fetch_transactions(1)) == 1
        queues.close()


@pytest.mark.spec("CNN-01")
def test_a_busy_queue_is_not_notified_and_a_waiting_one_is_notified_once(queues):
    queue, sender = queues("quiet"), queues("quiet")
    wake_times = []

    class RecordingListener:
        def wake(self):
            wake_times.append(time.monotonic())

        def on_lost(self, receipts): ...

    unlisten = queue.listen(RecordingListener())
    assert queue.fetch_transactions(1) == []
    for number in range(50):
        sender.dispatch([Transaction({}, id=f"tx-{number}")])
    wait_until(lambda: wake_times, "it rings")
    time.sleep(0.2)
    assert len(wake_times) == 1
    assert len(queue.fetch_transactions(50)) == 50
    unlisten()
