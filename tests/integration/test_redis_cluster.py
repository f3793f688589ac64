"""Check a queue in a cluster: found on its node, followed when it moves, with all keys in one slot."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Release, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.errors import ConnectionLostError
from ergon_framework.transaction import Transaction
from tests.integration.redises import make_stream_key, wait_until
from tests.servers.redis import PrivateCluster, find_program
from tests.servers.releases import in_release

SETTLED = SettleResult.SETTLED


@pytest.fixture(scope="module")
def cluster():
    folder = tempfile.mkdtemp(prefix="ergon-cluster-")
    cluster = PrivateCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def make_transactions(count):
    return [Transaction({"number": number}, id=f"tx-{number}") for number in range(count)]


@pytest.mark.spec("CNN-01")
def test_every_call_works_on_whichever_node_has_the_queue(cluster):
    # More queues than nodes, each asked for at the same node.
    for name in ("orders", "payments", "mails", "invoices", "reports"):
        queue = RedisQueue(name, url=cluster.nodes[0].url, lease=5.0)
        queue.open()
        assert queue.capabilities.durable is True
        queue.dispatch(make_transactions(6))
        done, later, dead, back, soon, _ = deliveries = queue.fetch_transactions(10)
        assert None not in queue.extend(deliveries)
        settlements = [
            (done, Ack()),
            (later, Defer(60)),
            (dead, DeadLetter("why")),
            (back, Release()),
            (soon, Defer(0)),
        ]
        assert queue.settle(settlements) == [SETTLED] * 5
        depth = queue.depth()
        assert (depth.ready, depth.delayed, depth.in_flight, depth.dead) == (2, 1, 1, 1)
        assert len(queue.find_queued([f"tx-{number}" for number in range(6)])) == 4
        (record,) = queue.list_dead(DeadLetterQuery())
        queue.replay_dead([record.handle])
        assert len(queue.fetch_transactions(10, wait=1.0)) == 3
        queue.close()


@pytest.mark.spec("CNN-01")
def test_the_async_connector_and_its_notifications_use_the_node_that_has_the_queue(cluster):
    async def main(name):
        queue, sender = (RedisQueue(name, url=cluster.nodes[1].url) for _ in range(2))
        waiting = asyncio.ensure_future(queue.fetch_transactions_async(1, wait=10.0))
        await asyncio.sleep(0.1)
        await sender.dispatch_async(make_transactions(1))
        deliveries = await waiting
        assert await queue.settle_async([(delivery, Ack()) for delivery in deliveries]) == [SETTLED]
        await queue.close_async()
        await sender.close_async()

    for name in ("a", "b", "c", "d"):
        asyncio.run(main(name))


@pytest.mark.spec("CNN-07")
def test_a_queue_that_moves_to_another_node_is_followed(cluster):
    queue = RedisQueue("moving", url=cluster.nodes[0].url)
    queue.dispatch(make_transactions(3))
    (delivery, *_) = queue.fetch_transactions(3)
    nodes = {}
    for node in cluster.nodes:
        with node.client() as client:
            nodes[node.port] = client.execute_command("CLUSTER MYID").decode()
            slot = client.execute_command("CLUSTER KEYSLOT", make_stream_key("moving"))
    with cluster.nodes[0].client() as client:
        slots = client.execute_command("CLUSTER SLOTS")
    owner = next(node[1] for first, last, node in slots if first <= slot <= last)
    target = next(port for port in nodes if port != owner)
    # redis-cli would move the requested number of slots from the first on; these are its commands for one slot.
    by_port = {node.port: node for node in cluster.nodes}
    with by_port[owner].client() as source, by_port[target].client() as other:
        other.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", nodes[owner])
        source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", nodes[target])
        keys = source.execute_command("CLUSTER GETKEYSINSLOT", slot, 100)
        source.execute_command("MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *keys)
    for node in (by_port[target], by_port[owner], *cluster.nodes):
        with node.client() as client:
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", nodes[target])
    assert queue.settle([(delivery, Ack())]) == [SETTLED]
    assert queue.depth().in_flight == 2
    queue.dispatch(make_transactions(1))
    assert len(queue.fetch_transactions(5)) == 1
    queue.close()


@pytest.mark.spec("CNN-01")
def test_all_keys_of_a_queue_are_in_one_slot(cluster):
    check = in_release([find_program("cli"), "--cluster", "check", f"127.0.0.1:{cluster.nodes[0].port}"])
    assert "All 16384 slots covered" in subprocess.run(check, capture_output=True, text=True, check=True).stdout
    queue = RedisQueue("one-slot", url=cluster.nodes[2].url)
    queue.dispatch(make_transactions(4))
    deliveries = queue.fetch_transactions(4)
    queue.settle([(deliveries[0], Defer(60)), (deliveries[1], Release()), (deliveries[2], DeadLetter("why"))])
    slots = set()
    for node in cluster.nodes:
        with node.client() as client:
            keys = [key for key in client.keys("*") if b"{one-slot}" in key]
            slots |= {client.execute_command("CLUSTER KEYSLOT", key) for key in keys}
            if keys:
                assert len(keys) == 6
    assert len(slots) == 1
    wait_until(lambda: queue.fetch_transactions(1), "the released one is redelivered")
    queue.close()


@pytest.mark.spec("CNN-07")
def test_a_restarted_node_is_found_again(cluster):
    queue = RedisQueue("dying", url=f"{cluster.nodes[0].url}?socket_timeout=2&socket_connect_timeout=2")
    queue.dispatch(make_transactions(2))
    with cluster.nodes[0].client() as client:
        slot = client.execute_command("CLUSTER KEYSLOT", make_stream_key("dying"))
        slots = client.execute_command("CLUSTER SLOTS")
    port = next(node[1] for first, last, node in slots if first <= slot <= last)
    owner = next(node for node in cluster.nodes if node.port == port)
    owner.kill()
    with pytest.raises(ConnectionLostError):
        queue.fetch_transactions(2)
    owner.start()

    def try_fetch():
        try:
            return queue.fetch_transactions(2)
        except ConnectionLostError:  # the cluster has not noticed yet
            return []

    assert [delivery.transaction.id for delivery in wait_until(try_fetch, "the node is found", within=30.0)] == [
        "tx-0",
        "tx-1",
    ]
    queue.close()
