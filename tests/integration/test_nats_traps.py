"""Check each JetStream behaviour that a queue must not expose to its users."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Release, SettleResult
from ergon_framework.connectors.codec import JsonCodec, UnencodableError
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult
from ergon_framework.connectors.nats import NatsQueue, dead_letters
from ergon_framework.connectors.nats.streams import CONSUMER, stream_names
from ergon_framework.errors import Category, ConfigurationError, ConnectionLostError
from ergon_framework.failure import Failure, HandlerError
from ergon_framework.transaction import Transaction
from tests.integration.nats_queues import claim_deliveries, new_queue_name, open_client, open_queue

SETTLED, LOST = SettleResult.SETTLED, SettleResult.LOST
#: Seconds within which an expected event has to happen.
TIMEOUT_SECONDS = 10.0


def make_orders(count):
    return [Transaction({"number": number}, id=f"order-{number}") for number in range(count)]


async def get_consumer_field(server, queue, field):
    async with open_client(server) as (_, api):
        return (await api(f"CONSUMER.INFO.{stream_names(queue.name).work}.{CONSUMER}"))[field]


async def count_unacked(server, queue):
    return await get_consumer_field(server, queue, "num_ack_pending")


async def wait_for_consumer(server, queue, field, count):
    """Wait until the consumer's *what* is *count*, for instance until a fetch request has arrived."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (value := await get_consumer_field(server, queue, field)) != count:
        assert time.monotonic() < deadline, f"{field} is {value}, not {count}"
        await asyncio.sleep(0.01)


async def forget_deliveries(server, queue):
    """Make the server forget its deliveries, as a killed server does."""
    work = stream_names(queue.name).work
    async with open_client(server) as (_, api):
        info = await api(f"CONSUMER.INFO.{work}.{CONSUMER}")
        await api(f"CONSUMER.DELETE.{work}.{CONSUMER}")
        await api(f"CONSUMER.DURABLE.CREATE.{work}.{CONSUMER}", stream_name=work, config=info["config"])


# -- claims --------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-07")
@pytest.mark.parametrize("count", [1, 3])
def test_a_delivery_that_the_server_has_forgotten_is_settled(nats_server, count):
    async def run():
        async with open_queue(nats_server, lease=30.0, timeout=0.5) as queue:
            await queue.dispatch_async(make_orders(count))
            deliveries = await claim_deliveries(queue, count)
            await forget_deliveries(nats_server, queue)
            assert await queue.settle_async([(each, Ack()) for each in deliveries]) == [SETTLED] * count
            assert (await queue.depth_async()).ready == 0
            assert await queue.fetch_transactions_async(count, wait=0.1) == []

    asyncio.run(run())


@pytest.mark.spec("CNN-07")
def test_a_message_deleted_by_an_unconfirmed_settlement_is_settled_when_retried(nats_server):
    async def run():
        async with open_queue(nats_server, lease=30.0, timeout=0.5) as queue:
            await queue.dispatch_async(make_orders(2))
            deliveries = await claim_deliveries(queue, 2)
            async with open_client(nats_server) as (_, api):
                for each in deliveries:
                    await api(f"STREAM.MSG.DELETE.{stream_names(queue.name).work}", seq=each.receipt.seq)
            assert await queue.settle_async([(each, Ack()) for each in deliveries]) == [SETTLED] * 2

    asyncio.run(run())


@pytest.mark.spec("CNN-12")
def test_the_ack_of_a_stale_worker_is_not_sent(nats_server):
    async def run():
        async with (
            open_queue(nats_server, lease=0.5) as stale,
            open_queue(nats_server, stale.name, lease=0.5) as successor,
        ):
            await stale.dispatch_async(make_orders(1))
            (old,) = await claim_deliveries(stale, 1)
            (delivery,) = await claim_deliveries(successor, 1)
            assert await stale.settle_async([(old, Ack())]) == [LOST]
            assert await stale.extend_async([old]) == [None]
            assert await count_unacked(nats_server, successor) == 1
            async with open_client(nats_server) as (client, _):
                # The reason for the check: the server accepts the stale ack.
                await client.request(old.receipt.ack_subject, b"+ACK", timeout=2)
            assert await count_unacked(nats_server, successor) == 0
            assert delivery.deliveries == 2

    asyncio.run(run())


@pytest.mark.spec("CNN-12", "CNN-06")
def test_a_delivery_that_waits_in_the_socket_of_a_busy_loop_uses_up_its_lease(nats_server):
    lease = 0.6

    async def run():
        async with open_queue(nats_server, lease=lease) as queue:
            fetch_task = asyncio.ensure_future(queue.fetch_transactions_async(1, wait=TIMEOUT_SECONDS))
            await wait_for_consumer(nats_server, queue, "num_waiting", 1)

            async def send():
                async with open_queue(nats_server, queue.name, lease=lease) as producer:
                    await producer.dispatch_async(make_orders(1))
                await wait_for_consumer(nats_server, queue, "num_ack_pending", 1)

            producer_thread = threading.Thread(target=lambda: asyncio.run(send()))
            producer_thread.start()
            # The server has delivered the message by then. The loop does not read it for longer than the lease.
            producer_thread.join()
            time.sleep(lease * 1.2)  # noqa: ASYNC251 - the blocked loop is what is tested
            (delivery,) = await fetch_task
            if delivery.deliveries == 1:
                assert delivery.lease_until <= time.monotonic()
                assert await queue.settle_async([(delivery, Ack())]) == [LOST]
                (delivery,) = await claim_deliveries(queue, 1)
            assert delivery.deliveries == 2
            assert await queue.settle_async([(delivery, Ack())]) == [SETTLED]

    asyncio.run(run())


@pytest.mark.spec("CNN-12", "CNN-06")
def test_a_delivery_for_a_cancelled_fetch_uses_up_its_lease_while_the_loop_is_busy(nats_server):
    lease = 0.6

    async def run():
        async with open_queue(nats_server, lease=lease) as queue:
            fetch_task = asyncio.ensure_future(queue.fetch_transactions_async(1, wait=TIMEOUT_SECONDS))
            await wait_for_consumer(nats_server, queue, "num_waiting", 1)
            fetch_task.cancel()
            await asyncio.wait([fetch_task])

            async def send():
                async with open_queue(nats_server, queue.name, lease=lease) as producer:
                    await producer.dispatch_async(make_orders(1))
                await wait_for_consumer(nats_server, queue, "num_ack_pending", 1)

            producer_thread = threading.Thread(target=lambda: asyncio.run(send()))
            producer_thread.start()
            # The server has delivered the message for the cancelled fetch by then.
            producer_thread.join()
            sent_at = time.monotonic()
            time.sleep(lease / 2)  # noqa: ASYNC251 - the blocked loop is what is tested
            (delivery,) = await claim_deliveries(queue, 1)
            assert delivery.deliveries > 1 or delivery.lease_until <= sent_at + lease
            assert await queue.settle_async([(delivery, Ack())]) == [SETTLED]

    asyncio.run(run())


@pytest.mark.spec("CNN-06")
def test_a_listener_is_notified_of_an_expired_claim(nats_server):
    class LostClaimListener:
        lost_receipts: tuple = ()

        def wake(self):
            pass

        def on_lost(self, receipts):
            self.lost_receipts = (*self.lost_receipts, *receipts)

    async def run():
        listener = LostClaimListener()
        async with open_queue(nats_server, lease=1.0) as queue:
            queue.listen(listener)
            await queue.dispatch_async(make_orders(2))
            first, second = await claim_deliveries(queue, 2)
            deadline = time.monotonic() + TIMEOUT_SECONDS
            while not listener.lost_receipts:
                assert time.monotonic() < deadline, "the listener was not notified"
                assert (await queue.extend_async([first]))[0] is not None
                await asyncio.sleep(0.05)
            assert listener.lost_receipts == (second.receipt,)
            assert await queue.settle_async([(first, Ack())]) == [SETTLED]

    asyncio.run(run())


@pytest.mark.spec("CNN-04", "CNN-10")
def test_a_delivery_too_late_for_its_fetch_is_released_and_not_counted(nats_server):
    async def run():
        async with (
            open_queue(nats_server, lease=4.0) as first_queue,
            open_queue(nats_server, first_queue.name, lease=4.0) as second_queue,
        ):
            fetch_task = asyncio.ensure_future(first_queue.fetch_transactions_async(1, wait=TIMEOUT_SECONDS))
            await wait_for_consumer(nats_server, first_queue, "num_waiting", 1)
            fetch_task.cancel()
            await asyncio.gather(fetch_task, return_exceptions=True)
            await second_queue.dispatch_async(make_orders(1))
            (delivery,) = await claim_deliveries(second_queue, 1, within=3.0)
            assert delivery.deliveries == 1
            assert await second_queue.settle_async([(delivery, Ack())]) == [SETTLED]

    asyncio.run(run())


@pytest.mark.spec("CNN-13")
def test_one_answer_settles_a_whole_batch(nats_server):
    async def run():
        async with open_queue(nats_server) as queue:
            await queue.dispatch_async(make_orders(500))
            deliveries = await claim_deliveries(queue, 500)
            assert set(await queue.settle_async([(delivery, Ack()) for delivery in deliveries])) == {SETTLED}
            assert await count_unacked(nats_server, queue) == 0

    asyncio.run(run())


# -- delays --------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-09")
def test_a_delay_may_be_longer_than_the_lease(nats_server):
    async def run():
        async with open_queue(nats_server, lease=0.5) as queue:
            await queue.dispatch_async(make_orders(1))
            (delivery,) = await claim_deliveries(queue, 1)
            began = time.monotonic()
            await queue.settle_async([(delivery, Defer(1.6))])
            (redelivered,) = await claim_deliveries(queue, 1)
            assert time.monotonic() - began >= 1.55
            assert redelivered.deliveries == 1

    asyncio.run(run())


@pytest.mark.spec("CNN-09")
def test_deferred_messages_do_not_block_other_messages(nats_server):
    """By default a consumer stops at 1,000 unacked messages in the whole fleet."""

    async def run():
        async with open_queue(nats_server, timeout=10.0) as queue:
            await queue.dispatch_async(make_orders(1200))
            deliveries = await claim_deliveries(queue, 1200)
            assert set(await queue.settle_async([(delivery, Defer(600.0)) for delivery in deliveries])) == {SETTLED}
            await queue.dispatch_async([Transaction({}, id="another")])
            (delivery,) = await claim_deliveries(queue, 1)
            assert delivery.transaction.id == "another"
            depth = await queue.depth_async()
            assert (depth.ready, depth.delayed, depth.in_flight) == (0, 1200, 1)

    asyncio.run(run())


@pytest.mark.spec("CNN-04")
def test_the_state_of_a_deferred_message_is_deleted_when_it_is_settled(nats_server):
    async def run():
        async with open_queue(nats_server) as queue:
            await queue.dispatch_async(make_orders(2))
            deliveries = await claim_deliveries(queue, 2)
            await queue.settle_async([(deliveries[0], Defer(0, attempts=1)), (deliveries[1], Release())])
            redelivered = await claim_deliveries(queue, 2)
            async with open_client(nats_server) as (_, api):
                states = stream_names(queue.name).states
                assert (await api(f"STREAM.INFO.{states}"))["state"]["messages"] == 2
                await queue.settle_async([(redelivered[0], Ack()), (redelivered[1], DeadLetter("why"))])
                assert (await api(f"STREAM.INFO.{states}"))["state"]["messages"] == 0

    asyncio.run(run())


# -- ids -----------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-02", "CNN-08")
def test_a_message_dispatched_or_replayed_twice_is_not_deduplicated(nats_server):
    async def run():
        async with open_queue(nats_server) as queue:
            (order,) = make_orders(1)
            await queue.dispatch_async([order])
            await queue.dispatch_async([order])
            await queue.settle_async([(each, DeadLetter("why")) for each in await claim_deliveries(queue, 2)])
            for _ in range(2):  # both, and then both again
                handles = [record.handle for record in await queue.list_dead_async(DeadLetterQuery())]
                results = await queue.replay_dead_async([*handles, handles[0], "999", "no place"])
                assert [result.outcome for result in results] == [
                    *[DeadLetterResult.REPLAYED] * 2,
                    *[DeadLetterResult.GONE] * 3,
                ]
                await queue.settle_async([(each, DeadLetter("again")) for each in await claim_deliveries(queue, 2)])
            assert await queue.find_queued_async([order.id]) == set()

    asyncio.run(run())


@pytest.mark.spec("CNN-08")
def test_an_interrupted_replay_is_finished_by_the_next(nats_server, monkeypatch):
    async def raise_connection_lost(*_):
        raise ConnectionLostError("the process died here")

    async def run():
        async with open_queue(nats_server) as queue:
            await queue.dispatch_async(make_orders(3))
            await queue.settle_async([(each, DeadLetter("why")) for each in await claim_deliveries(queue, 3)])
            handles = [record.handle for record in await queue.list_dead_async(DeadLetterQuery())]
            with monkeypatch.context() as patched:
                patched.setattr(dead_letters, "_delete", raise_connection_lost)
                with pytest.raises(ConnectionLostError):
                    await queue.replay_dead_async(handles)
            # The messages are in both streams and lost in neither; the second replay adds nothing. The consumer's
            # count is updated a moment after its stream has confirmed.
            await wait_for_consumer(nats_server, queue, "num_pending", 3)
            assert {result.outcome for result in await queue.replay_dead_async(handles)} == {DeadLetterResult.REPLAYED}
            depth = await queue.depth_async()
            assert (depth.ready, depth.dead) == (3, 0)

    asyncio.run(run())


@pytest.mark.spec("CNN-08")
def test_an_interrupted_dead_lettering_leaves_one_dead_letter(nats_server, monkeypatch):
    async def run():
        async with open_queue(nats_server, lease=0.5) as queue:
            await queue.dispatch_async(make_orders(1))
            (delivery,) = await claim_deliveries(queue, 1)

            async def raise_connection_lost(*_):
                raise ConnectionLostError("the process died here")

            with monkeypatch.context() as patched:
                patched.setattr(queue._settler, "_send_acks", raise_connection_lost)
                with pytest.raises(ConnectionLostError):
                    await queue.settle_async([(delivery, DeadLetter("first"))])
            (redelivered,) = await claim_deliveries(queue, 1)
            assert await queue.settle_async([(redelivered, DeadLetter("second"))]) == [SETTLED]
            (record,) = await queue.list_dead_async(DeadLetterQuery())
            assert record.reason == "second"
            assert (await queue.depth_async()).in_flight == 0

    asyncio.run(run())


@pytest.mark.spec("CNN-01")
def test_the_queue_reports_which_ids_it_contains(nats_server):
    async def run():
        async with open_queue(nats_server) as queue:
            await queue.dispatch_async(make_orders(3))
            first, second, third = sorted(await claim_deliveries(queue, 3), key=lambda each: each.transaction.id)
            await queue.settle_async([(first, Ack()), (second, Defer(60.0))])
            assert await queue.find_queued_async(["order-0", "order-1", "order-2", "order-9"]) == {"order-1", "order-2"}
            await queue.settle_async([(third, DeadLetter("why"))])
            assert await queue.find_queued_async(["order-2"]) == set()

    asyncio.run(run())


# -- rejections ----------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-02")
def test_a_message_over_the_servers_limit_is_rejected_before_it_is_sent(nats_server):
    """The server counts the headers too and closes the connection of a client that exceeds its limit."""

    async def run():
        async with open_queue(nats_server, codec=JsonCodec(max_bytes=64 * 1024 * 1024)) as queue:
            connection = (await queue._get_session()).connection
            for size in (connection.max_payload + 1, connection.max_payload - 10):
                with pytest.raises(UnencodableError, match="max_payload"):
                    await queue.dispatch_async([*make_orders(1), Transaction("x" * (size - 2), id="large")])
            assert (await queue.depth_async()).ready == 0
            await queue.dispatch_async(make_orders(1))
            assert not connection.is_lost

    asyncio.run(run())


@pytest.mark.spec("CNN-08", "CNN-04")
def test_a_dead_letter_near_the_size_limit_is_stored_without_its_failure(nats_server):
    failure = Failure(
        task_name="Shop",
        reason_code="declined",
        error_type="BusinessError",
        error_message="no",
        attempts=1,
        occurred_at=1.0,
        transaction_id="large",
        category=Category.BUSINESS,
        detail={"why": "y" * 4000},
    )

    async def run():
        async with open_queue(nats_server, codec=JsonCodec(max_bytes=64 * 1024 * 1024), timeout=15.0) as queue:
            max_payload = (await queue._get_session()).connection.max_payload
            await queue.dispatch_async([Transaction("x" * (max_payload - 3000), id="large")])
            async with open_client(nats_server) as (client, _):
                await client.jetstream().publish(
                    stream_names(queue.name).subject, b"z" * (max_payload - 100), timeout=10
                )
            large, larger = await claim_deliveries(queue, 2)
            results = await queue.settle_async([(large, DeadLetter("declined", failure)), (larger, DeadLetter("why"))])
            # One more character would not fit: the second keeps its claim, and the connection stays open.
            assert results == [SETTLED, SettleResult.FAILED]
            assert await queue.settle_async([(larger, Ack())]) == [SETTLED]
            (record,) = await queue.list_dead_async(DeadLetterQuery())
            assert (record.id, record.reason, record.failure) == ("large", "declined", None)

    asyncio.run(run())


@pytest.mark.spec("CNN-08", "DX-04")
def test_a_dead_letter_that_is_too_large_loses_its_tracebacks_first(nats_server):
    handler = HandlerError(error_type="OSError", error_message="down", category=Category.SYSTEM, traceback="y" * 8000)
    failure = Failure(
        task_name="Shop",
        reason_code="system",
        error_type="KeyError",
        error_message="KeyError: 'totl'",
        attempts=1,
        occurred_at=1.0,
        transaction_id="large",
        category=Category.SYSTEM,
        traceback="x" * 8000,
        handler_error=handler,
    )
    shorter = handler.model_copy(update={"traceback": None})

    async def run():
        async with open_queue(nats_server, codec=JsonCodec(max_bytes=64 * 1024 * 1024), timeout=15.0) as queue:
            max_payload = (await queue._get_session()).connection.max_payload
            await queue.dispatch_async([Transaction("x" * (max_payload - 10_000), id="large")])
            (large,) = await claim_deliveries(queue, 1)
            assert await queue.settle_async([(large, DeadLetter("system", failure))]) == [SETTLED]
            (record,) = await queue.list_dead_async(DeadLetterQuery())
            assert record.failure == failure.model_copy(update={"traceback": None, "handler_error": shorter})

    asyncio.run(run())


@pytest.mark.spec("CNN-05")
def test_an_unreadable_delivery_state_blocks_no_message(nats_server):
    async def run():
        async with open_queue(nats_server) as queue, open_client(nats_server) as (client, _):
            await queue.dispatch_async(make_orders(1))
            (delivery,) = await claim_deliveries(queue, 1)
            await queue.settle_async([(delivery, Release())])
            subject = f"{stream_names(queue.name).state_subject}.{delivery.receipt.key}"
            await client.jetstream().publish(subject, b"no note")
            (redelivered,) = await claim_deliveries(queue, 1)
            assert redelivered.deliveries == 2
            assert await queue.settle_async([(redelivered, Ack())]) == [SETTLED]

    asyncio.run(run())


def test_a_password_in_an_address_is_in_no_error():
    async def run():
        queue = NatsQueue("orders", url="nats://me:geheim@127.0.0.1:1", timeout=1.0, patience=0.1)
        with pytest.raises(ConnectionLostError) as caught:
            await queue.open_async()
        assert "geheim" not in str(caught.value)
        assert "127.0.0.1:1" in str(caught.value)

    asyncio.run(run())


@pytest.mark.spec("CNN-07")
def test_connecting_has_a_deadline(new_nats):
    server = new_nats()
    server.partition_network()

    async def run():
        began = time.monotonic()
        for url in (server.url, "nats://127.0.0.1:1"):
            queue = NatsQueue("orders", url=url, timeout=0.5)
            with pytest.raises(ConnectionLostError):
                await queue.open_async()
            await queue.close_async()
        assert time.monotonic() - began < 5.0

    asyncio.run(run())


@pytest.mark.parametrize(
    "config, message",
    [({"ack_wait": 5_000_000_000}, "same"), ({"max_deliver": 3}, "max_deliver")],
)
@pytest.mark.spec("CNN-04", "CNN-12")
def test_a_consumer_that_would_lose_or_duplicate_work_is_rejected(nats_server, config, message):
    async def run():
        async with open_queue(nats_server) as queue:
            streams = stream_names(queue.name)
        async with open_client(nats_server) as (_, api):
            consumer_config = (await api(f"CONSUMER.INFO.{streams.work}.{CONSUMER}"))["config"]
            await api(f"CONSUMER.DELETE.{streams.work}.{CONSUMER}")
            response = await api(
                f"CONSUMER.DURABLE.CREATE.{streams.work}.{CONSUMER}",
                stream_name=streams.work,
                config={**consumer_config, **config},
            )
            assert "error" not in response
        with pytest.raises(ConfigurationError, match=message):
            async with open_queue(nats_server, queue.name):
                pass

    asyncio.run(run())


@pytest.mark.parametrize(
    "config, message",
    [
        ({"retention": "limits"}, "workqueue"),
        ({"retention": "workqueue", "max_msgs": 5, "discard": "old"}, "discard"),
        ({"retention": "workqueue", "subjects": ["elsewhere.>"]}, "listen"),
    ],
)
@pytest.mark.spec("CNN-02")
def test_a_stream_that_would_lose_or_keep_work_is_rejected(nats_server, config, message):
    async def run():
        queue_name = new_queue_name()
        streams = stream_names(queue_name)
        stream_config = {"subjects": [streams.subject, f"{streams.subject}.>"], "storage": "memory", **config}
        stream_config["subjects"] = [
            f"{each}.{queue_name}" if each.startswith("else") else each for each in stream_config["subjects"]
        ]
        stream_config["subjects"] = [each.replace(">.", "x.") for each in stream_config["subjects"]]
        async with open_client(nats_server) as (_, api):
            response = await api(f"STREAM.CREATE.{streams.work}", name=streams.work, num_replicas=1, **stream_config)
            assert "error" not in response
            with pytest.raises(ConfigurationError, match=message):
                async with open_queue(nats_server, queue_name):
                    pass
            await api(f"STREAM.DELETE.{streams.work}")

    asyncio.run(run())


@pytest.mark.parametrize(
    "options",
    [{"lease": 0.0}, {"lease": float("inf")}, {"timeout": -1.0}, {"patience": 0.0}, {"monitor": "127.0.0.1:8222"}],
)
def test_invalid_settings_are_rejected(options):
    with pytest.raises(ConfigurationError):
        NatsQueue("orders", **options)


def test_a_queue_without_an_address_names_the_setting(monkeypatch):
    monkeypatch.delenv("ERGON_NATS__URL", raising=False)
    with pytest.raises(ConfigurationError, match="ERGON_NATS__URL"):
        asyncio.run(NatsQueue("orders").open_async())
    with pytest.raises(ConfigurationError, match="200"):
        NatsQueue("")


@pytest.mark.spec("CNN-08", "CNN-12")
def test_a_late_dead_lettering_does_not_remove_the_next_dead_letter(nats_server, monkeypatch):
    async def run():
        async with (
            open_queue(nats_server, lease=0.5) as stale,
            open_queue(nats_server, stale.name, lease=0.5) as successor,
        ):
            await stale.dispatch_async(make_orders(1))
            (old,) = await claim_deliveries(stale, 1)
            store = stale._settler._store

            async def store_late(*arguments):
                """Write the dead letter, then wait until another worker has dead-lettered and acked the message."""
                await store(*arguments)
                (delivery,) = await claim_deliveries(successor, 1)
                assert await successor.settle_async([(delivery, DeadLetter("second"))]) == [SETTLED]

            monkeypatch.setattr(stale._settler, "_store", store_late)
            assert await stale.settle_async([(old, DeadLetter("first"))]) == [LOST]
            assert [letter.reason for letter in await successor.list_dead_async(DeadLetterQuery())] == ["second"]

    asyncio.run(run())


def delay_answers(queue, monkeypatch):
    """Delay *queue*'s reading of answers until the lease is over; the server receives its acks in time."""
    settler = queue._settler
    send = settler._send_acks

    async def send_and_wait(connection, acks, *arguments):
        answers = await send(connection, acks, *arguments)
        await asyncio.sleep(max(claim.until for claim, _ in acks) - time.monotonic() + 0.05)
        return answers

    monkeypatch.setattr(settler, "_send_acks", send_and_wait)


@pytest.mark.spec("CNN-08", "CNN-12")
@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("others", [0, 2])
def test_a_dead_letter_whose_answer_is_late_stays_the_only_one_of_its_message(nats_server, monkeypatch, erase, others):
    async def run():
        async with open_queue(nats_server, lease=0.5, erase=erase) as queue:
            await queue.dispatch_async(make_orders(1 + others))
            first, *rest = await claim_deliveries(queue, 1 + others)
            delay_answers(queue, monkeypatch)
            settlements = [(first, DeadLetter("first")), *((each, Ack()) for each in rest)]
            assert await queue.settle_async(settlements) == [SETTLED] * (1 + others)
            assert [letter.reason for letter in await queue.list_dead_async(DeadLetterQuery())] == ["first"]
            assert await queue.fetch_transactions_async(3, wait=1.0) == []

    asyncio.run(run())


@pytest.mark.spec("CNN-07", "CNN-12")
@pytest.mark.parametrize("count", [1, 3])
def test_acks_that_the_server_received_settle_even_if_the_answer_is_late(nats_server, monkeypatch, count):
    async def run():
        async with open_queue(nats_server, lease=0.5) as queue:
            await queue.dispatch_async(make_orders(count))
            deliveries = await claim_deliveries(queue, count)
            delay_answers(queue, monkeypatch)
            assert await queue.settle_async([(each, Ack()) for each in deliveries]) == [SETTLED] * count
            assert await queue.fetch_transactions_async(3, wait=1.0) == []

    asyncio.run(run())


@pytest.mark.spec("CNN-06", "CNN-12")
def test_a_release_answered_after_the_lease_is_reported_as_lost(nats_server, monkeypatch):
    async def run():
        async with open_queue(nats_server, lease=0.5) as queue:
            await queue.dispatch_async(make_orders(1))
            (delivery,) = await claim_deliveries(queue, 1)
            delay_answers(queue, monkeypatch)
            assert await queue.settle_async([(delivery, Release())]) == [LOST]
            assert len(await claim_deliveries(queue, 1)) == 1

    asyncio.run(run())


@pytest.mark.spec("CNN-08", "CNN-12")
def test_a_dead_letter_of_a_message_acked_by_another_worker_is_withdrawn(nats_server, monkeypatch):
    async def run():
        async with (
            open_queue(nats_server, lease=0.5) as stale,
            open_queue(nats_server, stale.name, lease=0.5) as successor,
        ):
            await stale.dispatch_async(make_orders(1))
            (old,) = await claim_deliveries(stale, 1)
            send = stale._settler._send_acks

            async def send_late(*arguments):
                """Send after another worker is done, although the lease was checked in time."""
                (delivery,) = await claim_deliveries(successor, 1)
                assert await successor.settle_async([(delivery, Ack())]) == [SETTLED]
                return await send(*arguments)

            monkeypatch.setattr(stale._settler, "_send_acks", send_late)
            assert await stale.settle_async([(old, DeadLetter("first"))]) == [LOST]
            assert await successor.list_dead_async(DeadLetterQuery()) == []

    asyncio.run(run())
