"""Check surprising behaviour of RabbitMQ, one test each, on a real server."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from datetime import UTC, datetime

import pika
import pytest

from ergon_framework.connectors.base import Ack, ConnectorError, DeadLetter, Defer, Release, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult
from ergon_framework.connectors.foreign_codec import ForeignCodec, from_header
from ergon_framework.connectors.rabbitmq import RabbitMQQueue, topology
from ergon_framework.connectors.rabbitmq.topology import TopologyDeclarer
from ergon_framework.errors import ConfigurationError, ConnectionLostError
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy

ALL_DEAD_LETTERS = DeadLetterQuery()
TIMEOUT_SECONDS = 15.0


@pytest.fixture
def name():
    return f"trap-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def queue(rabbitmq, name):
    queue = RabbitMQQueue(name, url=rabbitmq)
    yield queue
    queue.close()


@pytest.fixture
def raw_channel(rabbitmq):
    """Yield a channel of a third-party client."""
    connection = pika.BlockingConnection(pika.URLParameters(f"{rabbitmq[:-2]}/%2F"))
    yield connection.channel()
    connection.close()


def make_orders(count, **fields):
    return [Transaction({"n": n}, id=f"order-{n}", **fields) for n in range(count)]


def claim(queue, count=1, *, timeout=TIMEOUT_SECONDS):
    deliveries, deadline = [], time.monotonic() + timeout
    while len(deliveries) < count:
        deliveries += queue.fetch_transactions(count - len(deliveries), wait=0.2)
        assert time.monotonic() < deadline, f"{len(deliveries)} of {count} came"
    return deliveries


def wait_until(condition, message):
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.02)


@pytest.mark.spec("CNN-09")
def test_a_short_delay_does_not_wait_behind_a_long_one(queue):
    queue.dispatch(make_orders(2))
    first, second = claim(queue, 2)
    queue.settle([(first, Defer(60.0)), (second, Defer(0.2))])
    assert [delivery.transaction.id for delivery in claim(queue, timeout=5.0)] == [second.transaction.id]


@pytest.mark.spec("CNN-09")
def test_a_cycle_of_delays_is_never_dropped(queue):
    """The server silently drops messages dead-lettered in a cycle, so its note of the cycle is not sent on."""
    queue.dispatch(make_orders(1))
    for attempts in range(1, 6):
        (delivery,) = claim(queue)
        assert queue.settle([(delivery, Defer(0.01, attempts=attempts))]) == [SettleResult.SETTLED]
    (delivery,) = claim(queue)
    assert (delivery.transaction.attempts, delivery.deliveries) == (5, 1)


@pytest.mark.spec("CNN-09")
@pytest.mark.parametrize(
    "delay, expected",
    [(0.0001, 10), (0.4, 470), (1.0, 1000), (9.99, 10_000), (86_400.0, 100_000_000), (1e12, 2**32 - 1)],
)
def test_a_delay_is_rounded_up_to_a_step(delay, expected):
    assert topology.delay_bucket_ms(delay) == expected


@pytest.mark.spec("CNN-04")
def test_a_delivery_lost_with_its_connection_is_counted_and_a_released_one_is_not(rabbitmq, name, queue):
    queue.dispatch(make_orders(1))
    for expected in (1, 2, 3):
        other = RabbitMQQueue(name, url=f"{rabbitmq}?client_properties={{'connection_name':'{expected}'}}")
        (delivery,) = claim(other)
        assert delivery.deliveries == expected
        assert other.settle([(delivery, Release())]) == [SettleResult.SETTLED]
        (delivery,) = claim(other)
        assert delivery.deliveries == expected
        other.close()


@pytest.mark.spec("CNN-04", "CNN-08")
def test_an_uncounted_message_is_dead_lettered_by_the_server_and_listed(queue, raw_channel, monkeypatch):
    monkeypatch.setattr(topology, "DELIVERY_LIMIT", 2)
    queue.dispatch(make_orders(1, correlation="basket"))
    for _ in range(3):
        method, _, _ = raw_channel.basic_get(queue.name)
        raw_channel.basic_reject(method.delivery_tag, requeue=True)  # counted by all versions, unlike a nack
    wait_until(lambda: queue.list_dead(ALL_DEAD_LETTERS), "the server has not dead-lettered it")
    (record,) = queue.list_dead(ALL_DEAD_LETTERS)
    assert (record.id, record.reason, record.payload) == ("order-0", "delivery_limit", {"n": 0})
    assert [result.outcome for result in queue.replay_dead([record.handle])] == [DeadLetterResult.REPLAYED]
    (delivery,) = claim(queue)
    assert (delivery.transaction.correlation, delivery.deliveries) == ("basket", 1)


@pytest.mark.spec("CNN-02")
def test_a_dispatch_to_a_deleted_queue_creates_it_again(queue, raw_channel):
    queue.dispatch(make_orders(1))
    raw_channel.queue_delete(queue.name)
    queue.dispatch(make_orders(3))
    assert sorted(delivery.transaction.id for delivery in claim(queue, 3)) == ["order-0", "order-1", "order-2"]
    assert not queue.fetch_transactions(1, wait=0.2)


@pytest.mark.spec("CNN-02")
def test_a_dispatch_that_finds_no_queue_twice_is_an_error(queue, monkeypatch):
    async def do_nothing(*_):
        """Do nothing, as if another client had deleted the queue immediately after its creation."""

    monkeypatch.setattr(TopologyDeclarer, "bind_durably", do_nothing)
    with pytest.raises(ConnectorError, match=r"2 of 2 .*order-0.*there is no such queue; dispatch them again"):
        queue.dispatch(make_orders(2))


@pytest.mark.spec("CNN-02", "CNN-09")
def test_only_returned_messages_are_sent_again(queue):
    """First delays go to a queue that does not exist; the other messages go to one that exists."""
    queue.dispatch(make_orders(6))
    deliveries = claim(queue, 6)
    settlements = [(delivery, Defer(0.3) if number % 2 else Release()) for number, delivery in enumerate(deliveries)]
    assert queue.settle(settlements) == [SettleResult.SETTLED] * 6
    assert sorted(delivery.transaction.id for delivery in claim(queue, 6)) == [f"order-{n}" for n in range(6)]
    assert not queue.fetch_transactions(1, wait=0.5)


@pytest.mark.spec("CNN-02")
def test_a_deleted_exchange_is_created_again(queue, raw_channel):
    queue.dispatch(make_orders(1))
    raw_channel.exchange_delete(topology.publish_exchange(queue.name))
    wait_until(lambda: _can_dispatch(queue), "it is not made again")
    assert len(claim(queue, 2)) == 2


@pytest.mark.spec("CNN-08")
def test_a_replay_creates_a_deleted_queue(queue, raw_channel):
    queue.dispatch(make_orders(1))
    queue.settle([(delivery, DeadLetter("why")) for delivery in claim(queue)])
    queue.close()
    raw_channel.queue_delete(queue.name)
    (record,) = queue.list_dead(ALL_DEAD_LETTERS)
    assert [result.outcome for result in queue.replay_dead([record.handle])] == [DeadLetterResult.REPLAYED]
    assert [delivery.transaction.id for delivery in claim(queue)] == ["order-0"]


@pytest.mark.spec("CNN-02")
def test_no_message_enters_a_queue_whose_declaration_is_incomplete(rabbitmq, name, queue, raw_channel):
    """Until a declaration has completed, messages published over the framework's exchange are returned."""
    queue.open()
    raw_channel.queue_delete(name)
    raw_channel.queue_declare(name, durable=True, arguments=topology.work_queue_arguments(name))
    raw_channel.confirm_delivery()
    with pytest.raises(pika.exceptions.UnroutableError):
        raw_channel.basic_publish(topology.publish_exchange(name), name, b"{}", mandatory=True)
    queue.dispatch(make_orders(1))
    raw_channel.basic_publish(topology.publish_exchange(name), name, b"{}", mandatory=True)
    assert len(claim(queue, 2)) == 2


@pytest.mark.spec("CNN-01")
def test_an_existing_queue_with_other_arguments_is_rejected_with_the_argument(queue, raw_channel):
    arguments = {**topology.work_queue_arguments(queue.name), "x-delivery-limit": 5}
    raw_channel.queue_declare(queue.name, durable=True, arguments=arguments)
    with pytest.raises(
        ConfigurationError, match=r"a different argument 'x-delivery-limit': expected .*1000.*found .*5.*; .*delete"
    ):
        queue.open()
    with pytest.raises(ConfigurationError, match="x-delivery-limit"):
        queue.fetch_transactions(1)


class ClaimListener:
    def __init__(self):
        self.lost_receipts = []
        self.notified = threading.Event()

    def wake(self): ...

    def on_lost(self, receipts):
        self.lost_receipts += receipts
        self.notified.set()


@pytest.mark.spec("CNN-07", "CNN-12")
def test_a_deleted_queue_ends_its_claims_and_is_created_again(queue, raw_channel):
    queue.dispatch(make_orders(3))
    deliveries = claim(queue, 2)
    assert queue.settle([(deliveries[0], Ack())]) == [SettleResult.SETTLED]
    listener = ClaimListener()
    queue.listen(listener)
    raw_channel.queue_delete(queue.name)
    assert listener.notified.wait(TIMEOUT_SECONDS)
    assert deliveries[1].receipt in listener.lost_receipts
    assert queue.settle([(deliveries[1], Ack())]) == [SettleResult.LOST]
    wait_until(lambda: _can_dispatch(queue), "it is not made again")
    assert claim(queue)[0].transaction.id == "order-0"


def _can_dispatch(queue):
    try:
        queue.dispatch(make_orders(1))
    except (ConnectorError, ConnectionLostError):
        return False
    return True


@pytest.mark.spec("CNN-07", "CNN-12")
def test_channels_and_connections_are_restored_and_do_not_accumulate(new_rabbitmq):
    server = new_rabbitmq()
    queue = RabbitMQQueue("orders", url=server.url, timeout=5.0)
    queue.dispatch(make_orders(40))
    listener = ClaimListener()
    queue.listen(listener)
    first_counts = None
    for _ in range(4):
        (delivery,) = claim(queue)
        counts = [int(server.run_rabbitmqctl(f"list_{what}", "pid").count("<")) for what in ("connections", "channels")]
        first_counts = first_counts or counts
        assert counts <= first_counts
        listener.notified.clear()
        server.run_rabbitmqctl("close_all_connections", "--limit", "10", "a test")
        assert listener.notified.wait(TIMEOUT_SECONDS)
        assert delivery.receipt in listener.lost_receipts
        assert queue.settle([(delivery, Ack())]) == [SettleResult.LOST]
        wait_until(lambda: _is_connected(queue), "it does not connect again")
    queue.close()
    assert "<" not in server.run_rabbitmqctl("list_connections", "pid")


def _is_connected(queue):
    try:
        queue.depth()
    except ConnectionLostError:
        return False
    return True


@pytest.mark.spec("CNN-06")
def test_a_lifecycle_longer_than_the_consumer_timeout_is_rejected_at_startup(rabbitmq, name):
    queue = RabbitMQQueue(name, url=rabbitmq, consumer_timeout=60.0)
    policy = ConsumerPolicy.load({"loop": {"transaction_timeout": 60.0}})

    class OnThreads(ConsumerMixin, Task):
        def process_transaction(self, transaction): ...

    class OnAsyncio(AsyncConsumerMixin, AsyncTask):
        async def process_transaction(self, transaction): ...

    with pytest.raises(ConfigurationError, match="redelivers a claim after 60 s"):
        OnThreads(queue).consume_transactions(policy)
    with pytest.raises(ConfigurationError, match="redelivers a claim after 60 s"):
        asyncio.run(OnAsyncio(queue).consume_transactions(policy))


@pytest.mark.spec("CNN-16")
def test_foreign_messages_are_read_deferred_and_replayed_with_their_own_id(rabbitmq, name, raw_channel):
    queue = RabbitMQQueue(name, url=rabbitmq, codec=ForeignCodec(id=from_header("x-order")))
    queue.open()
    properties = pika.BasicProperties(headers={"x-order": "A7", "x-number": 5}, user_id="guest", expiration="60000")
    raw_channel.basic_publish("", name, b'{"total": 5}', properties)
    (delivery,) = claim(queue)
    assert (delivery.transaction.id, delivery.transaction.payload) == ("A7", {"total": 5})
    queue.settle([(delivery, Defer(0.01, attempts=1))])
    (delivery,) = claim(queue)
    assert (delivery.transaction.id, delivery.transaction.attempts) == ("A7", 1)
    queue.settle([(delivery, DeadLetter("why"))])
    (record,) = queue.list_dead(ALL_DEAD_LETTERS)
    queue.replay_dead([record.handle])
    (delivery,) = claim(queue)
    assert (delivery.transaction.id, delivery.transaction.attempts, delivery.deliveries) == ("A7", 0, 1)
    queue.close()


@pytest.mark.spec("CNN-08")
def test_concurrent_listings_of_dead_letters_are_complete(rabbitmq, queue):
    queue.dispatch(make_orders(20))
    queue.settle([(delivery, DeadLetter("why")) for delivery in claim(queue, 20)])
    counts, threads = [], []
    for _ in range(4):
        threads.append(threading.Thread(target=lambda: counts.append(len(queue.list_dead(ALL_DEAD_LETTERS)))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert counts == [20] * 4


@pytest.mark.spec("CNN-01")
def test_messages_that_no_fetch_requests_go_to_other_workers(rabbitmq, name, queue):
    """A worker that has stopped fetching keeps no more than it was delivered."""
    queue.dispatch(make_orders(4))
    deliveries = claim(queue, 2)
    queue.settle([(delivery, Ack()) for delivery in deliveries])  # the server pushes two more in their place
    other = RabbitMQQueue(name, url=f"{rabbitmq}?client_properties={{'connection_name':'other'}}")
    redelivered = claim(other, 2)
    assert [delivery.deliveries for delivery in redelivered] == [1, 1]
    other.close()


@pytest.mark.spec("CNN-17")
def test_durability_states_what_a_power_loss_can_lose(queue):
    assert queue.capabilities.durable is None
    queue.open()
    assert queue.capabilities.durable is True
    assert "confirmed data survives a power loss" in queue.durability


def test_unreadable_addresses_are_rejected_without_their_password():
    with pytest.raises(ConfigurationError, match="the address of RabbitMQ is invalid") as caught:
        RabbitMQQueue("orders", url="http://user:secret@host").open()
    assert "secret" not in str(caught.value)


def test_a_wrong_password_is_not_an_outage(rabbitmq):
    queue = RabbitMQQueue("orders", url=rabbitmq.replace("guest:guest", "guest:wrong"))
    with pytest.raises(ConfigurationError, match="rejected the user"):
        queue.open()
    queue.close()


@pytest.mark.spec("CNN-01")
def test_messages_requested_by_a_cancelled_fetch_go_to_the_next_fetch(rabbitmq, name):
    async def cancel_fetch():
        queue = RabbitMQQueue(name, url=rabbitmq)
        await queue.dispatch_async(make_orders(1))
        fetching = asyncio.ensure_future(queue.fetch_transactions_async(1))
        await asyncio.sleep(0)  # the request is sent, and the server will answer
        fetching.cancel()
        await asyncio.wait((fetching,))
        deliveries = [] if fetching.cancelled() else list(fetching.result())
        deliveries += await queue.fetch_transactions_async(1, wait=5.0) if not deliveries else []
        await queue.close_async()
        return [(delivery.transaction.id, delivery.deliveries) for delivery in deliveries]

    assert asyncio.run(cancel_fetch()) == [("order-0", 1)]


@pytest.mark.spec("CNN-13", "CNN-02")
def test_acks_out_of_order_end_no_other_claim(rabbitmq, name, queue):
    """A group is acked up to a tag below which all have ended, and one by one otherwise."""
    queue.dispatch(make_orders(6))
    deliveries = sorted(claim(queue, 6), key=lambda delivery: delivery.receipt.tag)
    assert queue.settle([(deliveries[n], Ack()) for n in (3, 1, 5)]) == [SettleResult.SETTLED] * 3
    assert queue.settle([(deliveries[0], Ack())]) == [SettleResult.SETTLED]
    queue.close()
    unsettled = {delivery.transaction.id for delivery in claim(queue, 2)}
    assert unsettled == {deliveries[2].transaction.id, deliveries[4].transaction.id}
    assert not queue.fetch_transactions(5, wait=0.3)


@pytest.mark.spec("CNN-02", "CNN-07")
def test_an_ack_ends_no_message_of_another_channel(queue):
    """Tags restart with every channel; a silently lost channel must leave no tag behind that is taken for a new one.

    An ack for a whole group ends all claims below its last tag, so one in the wrong order would end unhandled messages.
    """

    async def lose_channel(station):
        channel = station.consumer._channel
        channel._close_callbacks.clear()
        channel.close()

    queue.dispatch(make_orders(8))
    queue.settle([(delivery, Ack()) for delivery in claim(queue, 8)[:4]])
    queue._run(lose_channel)
    queue.dispatch([Transaction({"n": n}, id=f"late-{n}") for n in range(4)])
    deliveries = sorted(claim(queue, 8), key=lambda delivery: delivery.receipt.tag)
    assert queue.settle([(delivery, Ack()) for delivery in deliveries[4:]]) == [SettleResult.SETTLED] * 4
    queue.close()
    unsettled = {delivery.transaction.id for delivery in claim(queue, 4)}
    assert unsettled == {delivery.transaction.id for delivery in deliveries[:4]}


@pytest.mark.spec("CNN-13")
def test_a_delay_that_the_server_rejects_fails_and_the_claim_can_be_settled_otherwise(queue, raw_channel):
    queue.dispatch(make_orders(2))
    first, second = claim(queue, 2)
    raw_channel.queue_declare(
        topology.delay_queue(queue.name, topology.delay_bucket_ms(5.0))
    )  # without the required arguments
    assert queue.settle([(first, Defer(5.0)), (second, Ack())]) == [SettleResult.FAILED, SettleResult.SETTLED]
    assert queue.settle([(first, Release())]) == [SettleResult.SETTLED]
    (again,) = claim(queue)
    assert (again.transaction.id, again.deliveries) == ("order-0", 1)


@pytest.mark.spec("CNN-01")
def test_consumers_do_not_accumulate_in_the_client(queue):
    """Pushing starts and stops many times during the life of a slow worker."""

    async def stop_pushing(channels):
        channels.consumer._stop_pushing()
        await channels.consumer._wait_for_drain()
        return len(channels.consumer._channel.raw.consumer_tags)

    queue.dispatch(make_orders(30))
    counts = []
    for _ in range(15):
        deliveries = claim(queue, 2)
        counts.append(queue._run(stop_pushing))
        queue.settle([(delivery, Ack()) for delivery in deliveries])
    assert counts == [0] * 15


@pytest.mark.spec("CNN-01")
def test_priorities_are_those_of_the_server(rabbitmq, name, raw_channel):
    queue = RabbitMQQueue(name, url=rabbitmq, priority=lambda transaction: transaction.payload["n"])
    assert queue.capabilities.priority is None
    queue.dispatch([Transaction({"n": n}, id=f"order-{n}") for n in (0, 1, 27)])
    assert queue.capabilities.priority is (raw_channel.connection._impl.server_properties["version"] >= "4")
    priorities = [raw_channel.basic_get(name)[1].priority for _ in range(3)]
    assert sorted(priority or 4 for priority in priorities) == [4, 5, 31]
    with pytest.raises(ConfigurationError, match="a priority of RabbitMQ must be between -4 and 27, not 28"):
        queue.dispatch([Transaction({"n": 28}, id="order-28")])
    queue.close()


@pytest.mark.spec("CNN-01")
@pytest.mark.parametrize("variant", ["sync", "async"])
def test_the_priority_of_a_transaction_is_sent_where_the_server_has_priorities(rabbitmq, name, raw_channel, variant):
    queue = RabbitMQQueue(name, url=rabbitmq)
    urgent = Transaction(id="urgent", priority=3)

    def dispatch():
        if variant == "sync":
            queue.dispatch([urgent])
        else:
            asyncio.run(queue.dispatch_async([urgent]))

    try:
        if raw_channel.connection._impl.server_properties["version"] < "4":
            # The queue is not open yet: the dispatch connects to find out.
            with pytest.raises(ConfigurationError, match=f"connector of '{name}' has no priorities.*priority 3.*4.0"):
                dispatch()
        else:
            dispatch()
            _, properties, _ = raw_channel.basic_get(name)
            assert (properties.priority, properties.headers["ergon-priority"]) == (7, "3")
    finally:
        queue.close()


@pytest.mark.spec("CNN-09")
def test_a_delayed_message_of_another_producer_is_not_delivered_early(queue, name, raw_channel):
    queue.dispatch([Transaction(id="first")])
    (first,) = claim(queue)
    due = time.time() + 0.7
    headers = {
        "ergon-id": "theirs",
        "ergon-not-before": datetime.fromtimestamp(due, UTC).isoformat().replace("+00:00", "Z"),
    }
    raw_channel.basic_publish("", name, b"{}", pika.BasicProperties(headers=headers))
    assert queue.settle([(first, Ack())]) == [SettleResult.SETTLED]
    (delivery,) = claim(queue)
    assert time.time() >= due
    assert (delivery.transaction.id, delivery.deliveries) == ("theirs", 1)
    queue.settle([(delivery, Ack())])
