"""What RabbitMQ does that surprises people, one test each, on a real server."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid

import pika
import pytest

from ergon_framework.connectors.base import Ack, ConnectorError, DeadLetter, Later, Release, SettleResult
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery
from ergon_framework.connectors.foreign import ForeignCodec, header
from ergon_framework.connectors.rabbitmq import RabbitMQQueue, topology
from ergon_framework.connectors.rabbitmq.declaring import Declarer
from ergon_framework.errors import ConfigurationError, ConnectionLost
from ergon_framework.task.base import AsyncTask, Task
from ergon_framework.task.mixins.consumer import AsyncConsumerMixin, ConsumerMixin
from ergon_framework.task.mixins.policies import ConsumerPolicy
from ergon_framework.transaction import Transaction

EVERYTHING = DeadLetterQuery()
SOON = 15.0


@pytest.fixture
def name():
    return f"trap-{uuid.uuid4().hex[:10]}"


@pytest.fixture
def queue(rabbitmq, name):
    made = RabbitMQQueue(name, url=rabbitmq)
    yield made
    made.close()


@pytest.fixture
def raw(rabbitmq):
    """A channel of somebody else's client."""
    connection = pika.BlockingConnection(pika.URLParameters(f"{rabbitmq[:-2]}/%2F"))
    yield connection.channel()
    connection.close()


def orders(count, **fields):
    return [Transaction(f"order-{n}", {"n": n}, **fields) for n in range(count)]


def claimed(queue, count=1, *, within=SOON):
    found, end = [], time.monotonic() + within
    while len(found) < count:
        found += queue.fetch_transactions(count - len(found), wait=0.2)
        assert time.monotonic() < end, f"{len(found)} of {count} came"
    return found


def until(holds, words):
    end = time.monotonic() + SOON
    while not holds():
        assert time.monotonic() < end, words
        time.sleep(0.02)


@pytest.mark.spec("CNN-09")
def test_a_short_delay_does_not_wait_behind_a_long_one(queue):
    queue.dispatch(orders(2))
    first, second = claimed(queue, 2)
    queue.settle([(first, Later(60.0)), (second, Later(0.2))])
    assert [delivery.transaction.id for delivery in claimed(queue, within=5.0)] == [second.transaction.id]


@pytest.mark.spec("CNN-09")
def test_a_cycle_of_delays_is_never_dropped(queue):
    """A server drops, silently, what was dead-lettered in a circle; so what it notes of that is not sent on."""
    queue.dispatch(orders(1))
    for attempts in range(1, 6):
        (delivery,) = claimed(queue)
        assert queue.settle([(delivery, Later(0.01, attempts=attempts))]) == [SettleResult.SETTLED]
    (delivery,) = claimed(queue)
    assert (delivery.transaction.attempts, delivery.deliveries) == (5, 1)


@pytest.mark.spec("CNN-09")
@pytest.mark.parametrize(
    "delay, kept",
    [(0.0001, 10), (0.4, 470), (1.0, 1000), (9.99, 10_000), (86_400.0, 100_000_000), (1e12, 2**32 - 1)],
)
def test_a_delay_is_kept_in_a_step_that_is_never_shorter(delay, kept):
    assert topology.step(delay) == kept


@pytest.mark.spec("CNN-04")
def test_what_returns_with_its_connection_is_counted_and_what_is_given_back_is_not(rabbitmq, name, queue):
    queue.dispatch(orders(1))
    for expected in (1, 2, 3):
        other = RabbitMQQueue(name, url=f"{rabbitmq}?client_properties={{'connection_name':'{expected}'}}")
        (delivery,) = claimed(other)
        assert delivery.deliveries == expected
        assert other.settle([(delivery, Release())]) == [SettleResult.SETTLED]
        (delivery,) = claimed(other)
        assert delivery.deliveries == expected
        other.close()


@pytest.mark.spec("CNN-04", "CNN-08")
def test_what_nobody_counts_is_put_aside_by_the_server_and_listed(queue, raw, monkeypatch):
    monkeypatch.setattr(topology, "DELIVERY_LIMIT", 2)
    queue.dispatch(orders(1, correlation="basket"))
    for _ in range(3):
        method, _, _ = raw.basic_get(queue.name)
        raw.basic_nack(method.delivery_tag, requeue=True)
    until(lambda: queue.list_dead(EVERYTHING), "the server has not put it aside")
    (record,) = queue.list_dead(EVERYTHING)
    assert (record.id, record.reason, record.payload) == ("order-0", "delivery_limit", {"n": 0})
    assert [result.became for result in queue.replay_dead([record.place])] == [Became.REPLAYED]
    (delivery,) = claimed(queue)
    assert (delivery.transaction.correlation, delivery.deliveries) == ("basket", 1)


@pytest.mark.spec("CNN-02")
def test_a_dispatch_to_a_queue_that_is_gone_makes_it_again(queue, raw):
    queue.dispatch(orders(1))
    raw.queue_delete(queue.name)
    queue.dispatch(orders(3))
    assert sorted(delivery.transaction.id for delivery in claimed(queue, 3)) == ["order-0", "order-1", "order-2"]
    assert not queue.fetch_transactions(1, wait=0.2)


@pytest.mark.spec("CNN-02")
def test_what_finds_no_queue_twice_is_an_error(queue, monkeypatch):
    async def nothing(*_):
        """Somebody else deletes it, as soon as it is made."""

    monkeypatch.setattr(Declarer, "trust", nothing)
    with pytest.raises(ConnectorError, match=r"2 of 2 .*order-0.*there is no such queue; dispatch them again"):
        queue.dispatch(orders(2))


@pytest.mark.spec("CNN-02", "CNN-09")
def test_only_what_came_back_is_sent_again(queue):
    """Beside what is put off for the first time, into a queue that is not there, others go to one that is."""
    queue.dispatch(orders(6))
    held = claimed(queue, 6)
    mixed = [(delivery, Later(0.3) if number % 2 else Release()) for number, delivery in enumerate(held)]
    assert queue.settle(mixed) == [SettleResult.SETTLED] * 6
    assert sorted(delivery.transaction.id for delivery in claimed(queue, 6)) == [f"order-{n}" for n in range(6)]
    assert not queue.fetch_transactions(1, wait=0.5)


@pytest.mark.spec("CNN-02")
def test_an_exchange_that_is_gone_is_made_again(queue, raw):
    queue.dispatch(orders(1))
    raw.exchange_delete(topology.ready(queue.name))
    until(lambda: _dispatched(queue), "it is not made again")
    assert len(claimed(queue, 2)) == 2


@pytest.mark.spec("CNN-08")
def test_a_replay_makes_the_queue_where_it_is_gone(queue, raw):
    queue.dispatch(orders(1))
    queue.settle([(delivery, DeadLetter("why")) for delivery in claimed(queue)])
    queue.close()
    raw.queue_delete(queue.name)
    (record,) = queue.list_dead(EVERYTHING)
    assert [result.became for result in queue.replay_dead([record.place])] == [Became.REPLAYED]
    assert [delivery.transaction.id for delivery in claimed(queue)] == ["order-0"]


@pytest.mark.spec("CNN-02")
def test_nothing_is_let_into_a_queue_whose_name_may_not_be_written_yet(rabbitmq, name, queue, raw):
    """Whoever made it: until somebody has seen to that, what is published over our exchange comes back."""
    queue.open()
    raw.queue_delete(name)
    raw.queue_declare(name, durable=True, arguments=topology.work_arguments(name))
    raw.confirm_delivery()
    with pytest.raises(pika.exceptions.UnroutableError):
        raw.basic_publish(topology.ready(name), name, b"{}", mandatory=True)
    queue.dispatch(orders(1))
    raw.basic_publish(topology.ready(name), name, b"{}", mandatory=True)
    assert len(claimed(queue, 2)) == 2


@pytest.mark.spec("CNN-01")
def test_a_queue_that_is_there_otherwise_is_refused_by_its_argument(queue, raw):
    theirs = {**topology.work_arguments(queue.name), "x-delivery-limit": 5}
    raw.queue_declare(queue.name, durable=True, arguments=theirs)
    with pytest.raises(
        ConfigurationError, match=r"another argument 'x-delivery-limit': wanted was .*1000.*there is .*5.*; .*delete"
    ):
        queue.open()
    with pytest.raises(ConfigurationError, match="x-delivery-limit"):
        queue.fetch_transactions(1)


class Ear:
    def __init__(self):
        self.gone = []
        self.heard = threading.Event()

    def wake(self): ...

    def lost(self, receipts):
        self.gone += receipts
        self.heard.set()


@pytest.mark.spec("CNN-07", "CNN-12")
def test_a_deleted_queue_ends_its_claims_and_is_made_again(queue, raw):
    queue.dispatch(orders(3))
    held = claimed(queue, 2)
    assert queue.settle([(held[0], Ack())]) == [SettleResult.SETTLED]
    ear = Ear()
    queue.listen(ear)
    raw.queue_delete(queue.name)
    assert ear.heard.wait(SOON)
    assert held[1].receipt in ear.gone
    assert queue.settle([(held[1], Ack())]) == [SettleResult.LOST]
    until(lambda: _dispatched(queue), "it is not made again")
    assert claimed(queue)[0].transaction.id == "order-0"


def _dispatched(queue):
    try:
        queue.dispatch(orders(1))
    except (ConnectorError, ConnectionLost):
        return False
    return True


@pytest.mark.spec("CNN-07", "CNN-12")
def test_channels_and_connections_come_back_and_do_not_pile_up(new_rabbitmq):
    server = new_rabbitmq()
    queue = RabbitMQQueue("orders", url=server.url, timeout=5.0)
    queue.dispatch(orders(40))
    ear = Ear()
    queue.listen(ear)
    before = None
    for _ in range(4):
        (held,) = claimed(queue)
        now = [int(server.control(f"list_{what}", "pid").count("<")) for what in ("connections", "channels")]
        before = before or now
        assert now <= before
        ear.heard.clear()
        server.control("close_all_connections", "--limit", "10", "a test")
        assert ear.heard.wait(SOON)
        assert held.receipt in ear.gone
        assert queue.settle([(held, Ack())]) == [SettleResult.LOST]
        until(lambda: _recovered(queue), "it does not connect again")
    queue.close()
    assert "<" not in server.control("list_connections", "pid")


def _recovered(queue):
    try:
        queue.depth()
    except ConnectionLost:
        return False
    return True


@pytest.mark.spec("CNN-06")
def test_a_lifecycle_longer_than_the_consumer_timeout_is_refused_at_start(rabbitmq, name):
    queue = RabbitMQQueue(name, url=rabbitmq, consumer_timeout=60.0)
    policy = ConsumerPolicy.load({"loop": {"transaction_timeout": 60.0}})

    class OnThreads(ConsumerMixin, Task):
        def process_transaction(self, transaction): ...

    class OnAsyncio(AsyncConsumerMixin, AsyncTask):
        async def process_transaction(self, transaction): ...

    with pytest.raises(ConfigurationError, match="takes a delivery back after 60 s"):
        OnThreads(queue).consume_transactions(policy)
    with pytest.raises(ConfigurationError, match="takes a delivery back after 60 s"):
        asyncio.run(OnAsyncio(queue).consume_transactions(policy))


@pytest.mark.spec("CNN-16")
def test_foreign_messages_are_read_put_off_and_replayed_with_their_own_id(rabbitmq, name, raw):
    queue = RabbitMQQueue(name, url=rabbitmq, codec=ForeignCodec(id=header("x-order")))
    queue.open()
    properties = pika.BasicProperties(headers={"x-order": "A7", "x-number": 5}, user_id="guest", expiration="60000")
    raw.basic_publish("", name, b'{"total": 5}', properties)
    (delivery,) = claimed(queue)
    assert (delivery.transaction.id, delivery.transaction.payload) == ("A7", {"total": 5})
    queue.settle([(delivery, Later(0.01, attempts=1))])
    (delivery,) = claimed(queue)
    assert (delivery.transaction.id, delivery.transaction.attempts) == ("A7", 1)
    queue.settle([(delivery, DeadLetter("why"))])
    (record,) = queue.list_dead(EVERYTHING)
    queue.replay_dead([record.place])
    (delivery,) = claimed(queue)
    assert (delivery.transaction.id, delivery.transaction.attempts, delivery.deliveries) == ("A7", 0, 1)
    queue.close()


@pytest.mark.spec("CNN-08")
def test_two_who_look_at_dead_letters_at_once_both_see_all(rabbitmq, queue):
    queue.dispatch(orders(20))
    queue.settle([(delivery, DeadLetter("why")) for delivery in claimed(queue, 20)])
    seen, threads = [], []
    for _ in range(4):
        threads.append(threading.Thread(target=lambda: seen.append(len(queue.list_dead(EVERYTHING)))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert seen == [20] * 4


@pytest.mark.spec("CNN-01")
def test_what_nobody_asks_for_goes_back_to_others(rabbitmq, name, queue):
    """A worker that has stopped asking keeps no more than it was handed."""
    queue.dispatch(orders(4))
    held = claimed(queue, 2)
    queue.settle([(delivery, Ack()) for delivery in held])  # the server pushes two more in their place
    other = RabbitMQQueue(name, url=f"{rabbitmq}?client_properties={{'connection_name':'other'}}")
    found = claimed(other, 2)
    assert [delivery.deliveries for delivery in found] == [1, 1]
    other.close()


@pytest.mark.spec("CNN-17")
def test_it_says_what_a_power_loss_could_cost(queue):
    assert queue.capabilities.durable is None
    queue.open()
    assert queue.capabilities.durable is True
    assert "costs nothing that was confirmed" in queue.durability


def test_addresses_that_cannot_be_read_are_refused_without_their_password():
    with pytest.raises(ConfigurationError, match="cannot be read") as caught:
        RabbitMQQueue("orders", url="http://user:secret@host").open()
    assert "secret" not in str(caught.value)


def test_a_wrong_password_is_no_outage(rabbitmq):
    queue = RabbitMQQueue("orders", url=rabbitmq.replace("guest:guest", "guest:wrong"))
    with pytest.raises(ConfigurationError, match="does not let this user in"):
        queue.open()
    queue.close()


@pytest.mark.spec("CNN-01")
def test_what_a_cancelled_fetch_had_asked_for_is_there_for_the_next(rabbitmq, name):
    async def cancelled():
        queue = RabbitMQQueue(name, url=rabbitmq)
        await queue.dispatch_async(orders(1))
        fetching = asyncio.ensure_future(queue.fetch_transactions_async(1))
        await asyncio.sleep(0)  # it is on its way, and the server will answer
        fetching.cancel()
        await asyncio.wait((fetching,))
        found = [] if fetching.cancelled() else list(fetching.result())
        found += await queue.fetch_transactions_async(1, wait=5.0) if not found else []
        await queue.close_async()
        return [(delivery.transaction.id, delivery.deliveries) for delivery in found]

    assert asyncio.run(cancelled()) == [("order-0", 1)]


@pytest.mark.spec("CNN-13", "CNN-02")
def test_acks_out_of_order_end_nobody_else(rabbitmq, name, queue):
    """A group is acked up to a number where all below it have ended, and one by one where they have not."""
    queue.dispatch(orders(6))
    held = sorted(claimed(queue, 6), key=lambda delivery: delivery.receipt.tag)
    assert queue.settle([(held[n], Ack()) for n in (3, 1, 5)]) == [SettleResult.SETTLED] * 3
    assert queue.settle([(held[0], Ack())]) == [SettleResult.SETTLED]
    queue.close()
    found = {delivery.transaction.id for delivery in claimed(queue, 2)}
    assert found == {held[2].transaction.id, held[4].transaction.id}
    assert not queue.fetch_transactions(5, wait=0.3)


@pytest.mark.spec("CNN-02", "CNN-07")
def test_an_ack_ends_nothing_that_came_over_another_channel(queue):
    """Tags begin anew with every channel; one that is gone without a word must leave none behind to be taken for new.

    An ack for a whole group ends all below its last tag, so that one in the wrong order would end the unhandled.
    """

    async def gone_without_a_word(station):
        channel = station.consumer._channel
        channel._closed.clear()
        channel.close()

    queue.dispatch(orders(8))
    queue.settle([(delivery, Ack()) for delivery in claimed(queue, 8)[:4]])
    queue._run(gone_without_a_word)
    queue.dispatch([Transaction(f"late-{n}", {"n": n}) for n in range(4)])
    came = sorted(claimed(queue, 8), key=lambda delivery: delivery.receipt.tag)
    assert queue.settle([(delivery, Ack()) for delivery in came[4:]]) == [SettleResult.SETTLED] * 4
    queue.close()
    left = {delivery.transaction.id for delivery in claimed(queue, 4)}
    assert left == {delivery.transaction.id for delivery in came[:4]}


@pytest.mark.spec("CNN-13")
def test_a_delay_that_the_server_refuses_fails_and_the_claim_can_be_settled_otherwise(queue, raw):
    queue.dispatch(orders(2))
    first, second = claimed(queue, 2)
    raw.queue_declare(topology.later(queue.name, topology.step(5.0)))  # not as it is needed
    assert queue.settle([(first, Later(5.0)), (second, Ack())]) == [SettleResult.FAILED, SettleResult.SETTLED]
    assert queue.settle([(first, Release())]) == [SettleResult.SETTLED]
    (again,) = claimed(queue)
    assert (again.transaction.id, again.deliveries) == ("order-0", 1)
