"""What JetStream does that a queue must not do: each of its traps, and that we do not fall into it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Later, Release, SettleResult
from ergon_framework.connectors.codec import JsonCodec, UnencodableError
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery
from ergon_framework.connectors.nats import NatsQueue, burials
from ergon_framework.connectors.nats.naming import CONSUMER, names
from ergon_framework.errors import Category, ConfigurationError, ConnectionLost
from ergon_framework.failure import Failure, HandlerError
from ergon_framework.transaction import Transaction
from tests.integration.nats_queues import bare, claimed, name, opened

SETTLED, LOST = SettleResult.SETTLED, SettleResult.LOST
#: Seconds within which what must come has come.
SOON = 10.0


def orders(count):
    return [Transaction(f"order-{number}", {"number": number}) for number in range(count)]


async def told(server, queue, what):
    async with bare(server) as (_, api):
        return (await api(f"CONSUMER.INFO.{names(queue.name).work}.{CONSUMER}"))[what]


async def pending(server, queue):
    return await told(server, queue, "num_ack_pending")


async def until(server, queue, what, count):
    """Wait until the server says that of the consumer: for instance that somebody's question has arrived."""
    end = time.monotonic() + SOON
    while (found := await told(server, queue, what)) != count:
        assert time.monotonic() < end, f"{what} is {found}, not {count}"
        await asyncio.sleep(0.01)


async def forget(server, queue):
    """What a server that is killed does: it no longer knows what it has just delivered."""
    work = names(queue.name).work
    async with bare(server) as (_, api):
        told = await api(f"CONSUMER.INFO.{work}.{CONSUMER}")
        await api(f"CONSUMER.DELETE.{work}.{CONSUMER}")
        await api(f"CONSUMER.DURABLE.CREATE.{work}.{CONSUMER}", stream_name=work, config=told["config"])


# -- claims --------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-07")
@pytest.mark.parametrize("count", [1, 3])
def test_what_the_server_has_forgotten_to_have_delivered_is_settled_all_the_same(nats_server, count):
    async def run():
        async with opened(nats_server, lease=30.0, timeout=0.5) as queue:
            await queue.dispatch_async(orders(count))
            held = await claimed(queue, count)
            await forget(nats_server, queue)
            assert await queue.settle_async([(each, Ack()) for each in held]) == [SETTLED] * count
            assert (await queue.depth_async()).ready == 0
            assert await queue.fetch_transactions_async(count, wait=0.1) == []

    asyncio.run(run())


@pytest.mark.spec("CNN-07")
def test_what_was_deleted_by_a_settlement_that_nobody_heard_of_is_settled_when_asked_again(nats_server):
    async def run():
        async with opened(nats_server, lease=30.0, timeout=0.5) as queue:
            await queue.dispatch_async(orders(2))
            held = await claimed(queue, 2)
            async with bare(nats_server) as (_, api):
                for each in held:
                    await api(f"STREAM.MSG.DELETE.{names(queue.name).work}", seq=each.receipt.seq)
            assert await queue.settle_async([(each, Ack()) for each in held]) == [SETTLED] * 2

    asyncio.run(run())


@pytest.mark.spec("CNN-12")
def test_the_ack_of_a_stale_worker_is_not_sent(nats_server):
    async def run():
        async with opened(nats_server, lease=0.5) as stale, opened(nats_server, stale.name, lease=0.5) as heir:
            await stale.dispatch_async(orders(1))
            (old,) = await claimed(stale, 1)
            (held,) = await claimed(heir, 1)
            assert await stale.settle_async([(old, Ack())]) == [LOST]
            assert await stale.extend_async([old]) == [None]
            assert await pending(nats_server, heir) == 1
            async with bare(nats_server) as (line, _):
                # This is why: the server takes it.
                await line.request(old.receipt.ack, b"+ACK", timeout=2)
            assert await pending(nats_server, heir) == 0
            assert held.deliveries == 2

    asyncio.run(run())


@pytest.mark.spec("CNN-12", "CNN-06")
def test_what_lay_in_the_socket_of_a_busy_loop_is_as_old_as_it_is(nats_server):
    lease = 0.6

    async def run():
        async with opened(nats_server, lease=lease) as queue:
            fetching = asyncio.ensure_future(queue.fetch_transactions_async(1, wait=SOON))
            await until(nats_server, queue, "num_waiting", 1)

            async def send():
                async with opened(nats_server, queue.name, lease=lease) as producer:
                    await producer.dispatch_async(orders(1))
                await until(nats_server, queue, "num_ack_pending", 1)

            producing = threading.Thread(target=lambda: asyncio.run(send()))
            producing.start()
            # When it is over the server has handed it out. Then nobody looks for longer than it is ours.
            producing.join()
            time.sleep(lease * 1.2)  # noqa: ASYNC251 - that is what is tried
            (delivery,) = await fetching
            if delivery.deliveries == 1:
                assert delivery.lease_until <= time.monotonic()
                assert await queue.settle_async([(delivery, Ack())]) == [LOST]
                (delivery,) = await claimed(queue, 1)
            assert delivery.deliveries == 2
            assert await queue.settle_async([(delivery, Ack())]) == [SETTLED]

    asyncio.run(run())


@pytest.mark.spec("CNN-06")
def test_who_listens_is_told_of_a_claim_that_ran_out(nats_server):
    class Ear:
        gone: tuple = ()

        def wake(self):
            pass

        def lost(self, receipts):
            self.gone = (*self.gone, *receipts)

    async def run():
        ear = Ear()
        async with opened(nats_server, lease=1.0) as queue:
            queue.listen(ear)
            await queue.dispatch_async(orders(2))
            first, second = await claimed(queue, 2)
            end = time.monotonic() + SOON
            while not ear.gone:
                assert time.monotonic() < end, "nobody was told"
                assert (await queue.extend_async([first]))[0] is not None
                await asyncio.sleep(0.05)
            assert ear.gone == (second.receipt,)
            assert await queue.settle_async([(first, Ack())]) == [SETTLED]

    asyncio.run(run())


@pytest.mark.spec("CNN-04", "CNN-10")
def test_what_came_too_late_for_its_fetch_is_given_back_at_no_cost(nats_server):
    async def run():
        async with opened(nats_server, lease=4.0) as gave_up, opened(nats_server, gave_up.name, lease=4.0) as other:
            fetching = asyncio.ensure_future(gave_up.fetch_transactions_async(1, wait=SOON))
            await until(nats_server, gave_up, "num_waiting", 1)
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            await other.dispatch_async(orders(1))
            (delivery,) = await claimed(other, 1, within=3.0)
            assert delivery.deliveries == 1
            assert await other.settle_async([(delivery, Ack())]) == [SETTLED]

    asyncio.run(run())


@pytest.mark.spec("CNN-13")
def test_one_answer_settles_a_whole_group(nats_server):
    async def run():
        async with opened(nats_server) as queue:
            await queue.dispatch_async(orders(500))
            held = await claimed(queue, 500)
            assert set(await queue.settle_async([(delivery, Ack()) for delivery in held])) == {SETTLED}
            assert await pending(nats_server, queue) == 0

    asyncio.run(run())


# -- delays --------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-09")
def test_a_delay_may_be_longer_than_the_lease(nats_server):
    async def run():
        async with opened(nats_server, lease=0.5) as queue:
            await queue.dispatch_async(orders(1))
            (delivery,) = await claimed(queue, 1)
            began = time.monotonic()
            await queue.settle_async([(delivery, Later(1.6))])
            (again,) = await claimed(queue, 1)
            assert time.monotonic() - began >= 1.55
            assert again.deliveries == 1

    asyncio.run(run())


@pytest.mark.spec("CNN-09")
def test_what_is_put_off_leaves_room_for_others(nats_server):
    """Unless told otherwise a consumer stops at 1,000 that wait for an ack, in the whole fleet."""

    async def run():
        async with opened(nats_server, timeout=10.0) as queue:
            await queue.dispatch_async(orders(1200))
            held = await claimed(queue, 1200)
            assert set(await queue.settle_async([(delivery, Later(600.0)) for delivery in held])) == {SETTLED}
            await queue.dispatch_async([Transaction("another", {})])
            (delivery,) = await claimed(queue, 1)
            assert delivery.transaction.id == "another"
            depth = await queue.depth_async()
            assert (depth.ready, depth.delayed, depth.in_flight) == (0, 1200, 1)

    asyncio.run(run())


@pytest.mark.spec("CNN-04")
def test_the_note_of_what_was_put_off_goes_when_it_is_settled(nats_server):
    async def run():
        async with opened(nats_server) as queue:
            await queue.dispatch_async(orders(2))
            held = await claimed(queue, 2)
            await queue.settle_async([(held[0], Later(0, attempts=1)), (held[1], Release())])
            again = await claimed(queue, 2)
            async with bare(nats_server) as (_, api):
                notes = names(queue.name).notes
                assert (await api(f"STREAM.INFO.{notes}"))["state"]["messages"] == 2
                await queue.settle_async([(again[0], Ack()), (again[1], DeadLetter("why"))])
                assert (await api(f"STREAM.INFO.{notes}"))["state"]["messages"] == 0

    asyncio.run(run())


# -- ids -----------------------------------------------------------------------------------------------


@pytest.mark.spec("CNN-02", "CNN-08")
def test_no_window_swallows_what_is_sent_or_replayed_again(nats_server):
    async def run():
        async with opened(nats_server) as queue:
            (order,) = orders(1)
            await queue.dispatch_async([order])
            await queue.dispatch_async([order])
            await queue.settle_async([(each, DeadLetter("why")) for each in await claimed(queue, 2)])
            for _ in range(2):  # both, and then both once more
                places = [record.place for record in await queue.list_dead_async(DeadLetterQuery())]
                moved = await queue.replay_dead_async([*places, places[0], "999", "no place"])
                assert [one.became for one in moved] == [*[Became.REPLAYED] * 2, *[Became.GONE] * 3]
                await queue.settle_async([(each, DeadLetter("again")) for each in await claimed(queue, 2)])
            assert await queue.queued_async([order.id]) == set()

    asyncio.run(run())


@pytest.mark.spec("CNN-08")
def test_a_replay_that_died_half_way_is_finished_by_the_next(nats_server, monkeypatch):
    async def died(*_):
        raise ConnectionLost("the process died here")

    async def run():
        async with opened(nats_server) as queue:
            await queue.dispatch_async(orders(3))
            await queue.settle_async([(each, DeadLetter("why")) for each in await claimed(queue, 3)])
            places = [record.place for record in await queue.list_dead_async(DeadLetterQuery())]
            with monkeypatch.context() as patched:
                patched.setattr(burials, "_deleted", died)
                with pytest.raises(ConnectionLost):
                    await queue.replay_dead_async(places)
            # In both, in none of them lost; and the second replay adds nothing. A consumer counts a moment after its
            # stream has confirmed.
            await until(nats_server, queue, "num_pending", 3)
            assert {one.became for one in await queue.replay_dead_async(places)} == {Became.REPLAYED}
            depth = await queue.depth_async()
            assert (depth.ready, depth.dead) == (3, 0)

    asyncio.run(run())


@pytest.mark.spec("CNN-08")
def test_a_burial_that_died_half_way_is_one_dead_letter(nats_server, monkeypatch):
    async def run():
        async with opened(nats_server, lease=0.5) as queue:
            await queue.dispatch_async(orders(1))
            (delivery,) = await claimed(queue, 1)

            async def died(*_):
                raise ConnectionLost("the process died here")

            with monkeypatch.context() as patched:
                patched.setattr(queue._settler, "_say", died)
                with pytest.raises(ConnectionLost):
                    await queue.settle_async([(delivery, DeadLetter("first"))])
            (again,) = await claimed(queue, 1)
            assert await queue.settle_async([(again, DeadLetter("second"))]) == [SETTLED]
            (record,) = await queue.list_dead_async(DeadLetterQuery())
            assert record.reason == "second"
            assert (await queue.depth_async()).in_flight == 0

    asyncio.run(run())


@pytest.mark.spec("CNN-01")
def test_the_queue_knows_what_is_in_it(nats_server):
    async def run():
        async with opened(nats_server) as queue:
            await queue.dispatch_async(orders(3))
            first, second, third = sorted(await claimed(queue, 3), key=lambda each: each.transaction.id)
            await queue.settle_async([(first, Ack()), (second, Later(60.0))])
            assert await queue.queued_async(["order-0", "order-1", "order-2", "order-9"]) == {"order-1", "order-2"}
            await queue.settle_async([(third, DeadLetter("why"))])
            assert await queue.queued_async(["order-2"]) == set()

    asyncio.run(run())


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.spec("CNN-02")
def test_what_the_server_would_answer_with_a_cut_is_refused_before(nats_server):
    """The server counts the headers too, and closes the line on whoever sends more than it takes."""

    async def run():
        async with opened(nats_server, codec=JsonCodec(max_bytes=64 * 1024 * 1024)) as queue:
            line = (await queue._opened()).line
            for size in (line.max_payload + 1, line.max_payload - 10):
                with pytest.raises(UnencodableError, match="max_payload"):
                    await queue.dispatch_async([*orders(1), Transaction("large", "x" * (size - 2))])
            assert (await queue.depth_async()).ready == 0
            await queue.dispatch_async(orders(1))
            assert not line.lost

    asyncio.run(run())


@pytest.mark.spec("CNN-08", "CNN-04")
def test_a_dead_letter_that_just_fits_is_told_in_fewer_words(nats_server):
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
        async with opened(nats_server, codec=JsonCodec(max_bytes=64 * 1024 * 1024), timeout=15.0) as queue:
            most = (await queue._opened()).line.max_payload
            await queue.dispatch_async([Transaction("large", "x" * (most - 3000))])
            async with bare(nats_server) as (line, _):
                await line.jetstream().publish(names(queue.name).subject, b"z" * (most - 100), timeout=10)
            large, larger = await claimed(queue, 2)
            settled = await queue.settle_async([(large, DeadLetter("declined", failure)), (larger, DeadLetter("why"))])
            # The second cannot be kept with a single word more; it keeps its claim, and the line is whole.
            assert settled == [SETTLED, SettleResult.FAILED]
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
        async with opened(nats_server, codec=JsonCodec(max_bytes=64 * 1024 * 1024), timeout=15.0) as queue:
            most = (await queue._opened()).line.max_payload
            await queue.dispatch_async([Transaction("large", "x" * (most - 10_000))])
            (large,) = await claimed(queue, 1)
            assert await queue.settle_async([(large, DeadLetter("system", failure))]) == [SETTLED]
            (record,) = await queue.list_dead_async(DeadLetterQuery())
            assert record.failure == failure.model_copy(update={"traceback": None, "handler_error": shorter})

    asyncio.run(run())


@pytest.mark.spec("CNN-05")
def test_a_note_that_nobody_can_read_stops_nobody(nats_server):
    async def run():
        async with opened(nats_server) as queue, bare(nats_server) as (line, _):
            await queue.dispatch_async(orders(1))
            (delivery,) = await claimed(queue, 1)
            await queue.settle_async([(delivery, Release())])
            subject = f"{names(queue.name).note_subject}.{delivery.receipt.key}"
            await line.jetstream().publish(subject, b"no note")
            (again,) = await claimed(queue, 1)
            assert again.deliveries == 2
            assert await queue.settle_async([(again, Ack())]) == [SETTLED]

    asyncio.run(run())


def test_a_password_in_an_address_is_in_no_error():
    async def run():
        queue = NatsQueue("orders", url="nats://me:geheim@127.0.0.1:1", timeout=1.0, patience=0.1)
        with pytest.raises(ConnectionLost) as caught:
            await queue.open_async()
        assert "geheim" not in str(caught.value)
        assert "127.0.0.1:1" in str(caught.value)

    asyncio.run(run())


@pytest.mark.spec("CNN-07")
def test_connecting_has_a_deadline(new_nats):
    server = new_nats()
    server.cut()

    async def run():
        began = time.monotonic()
        for url in (server.url, "nats://127.0.0.1:1"):
            queue = NatsQueue("orders", url=url, timeout=0.5)
            with pytest.raises(ConnectionLost):
                await queue.open_async()
            await queue.close_async()
        assert time.monotonic() - began < 5.0

    asyncio.run(run())


@pytest.mark.parametrize(
    "config, words",
    [({"ack_wait": 5_000_000_000}, "same"), ({"max_deliver": 3}, "max_deliver")],
)
@pytest.mark.spec("CNN-04", "CNN-12")
def test_a_consumer_that_would_lose_or_double_work_is_refused(nats_server, config, words):
    async def run():
        async with opened(nats_server) as queue:
            its = names(queue.name)
        async with bare(nats_server) as (_, api):
            found = (await api(f"CONSUMER.INFO.{its.work}.{CONSUMER}"))["config"]
            await api(f"CONSUMER.DELETE.{its.work}.{CONSUMER}")
            made = await api(
                f"CONSUMER.DURABLE.CREATE.{its.work}.{CONSUMER}", stream_name=its.work, config={**found, **config}
            )
            assert "error" not in made
        with pytest.raises(ConfigurationError, match=words):
            async with opened(nats_server, queue.name):
                pass

    asyncio.run(run())


@pytest.mark.parametrize(
    "config, words",
    [
        ({"retention": "limits"}, "workqueue"),
        ({"retention": "workqueue", "max_msgs": 5, "discard": "old"}, "discard"),
        ({"retention": "workqueue", "subjects": ["elsewhere.>"]}, "listen"),
    ],
)
@pytest.mark.spec("CNN-02")
def test_a_stream_that_would_lose_or_keep_work_is_refused(nats_server, config, words):
    async def run():
        queue = name()
        its = names(queue)
        given = {"subjects": [its.subject, f"{its.subject}.>"], "storage": "memory", **config}
        given["subjects"] = [f"{each}.{queue}" if each.startswith("else") else each for each in given["subjects"]]
        given["subjects"] = [each.replace(">.", "x.") for each in given["subjects"]]
        async with bare(nats_server) as (_, api):
            made = await api(f"STREAM.CREATE.{its.work}", name=its.work, num_replicas=1, **given)
            assert "error" not in made
            with pytest.raises(ConfigurationError, match=words):
                async with opened(nats_server, queue):
                    pass
            await api(f"STREAM.DELETE.{its.work}")

    asyncio.run(run())


@pytest.mark.parametrize(
    "options",
    [{"lease": 0.0}, {"lease": float("inf")}, {"timeout": -1.0}, {"patience": 0.0}, {"monitor": "127.0.0.1:8222"}],
)
def test_odd_settings_are_refused(options):
    with pytest.raises(ConfigurationError):
        NatsQueue("orders", **options)


def test_a_queue_without_an_address_says_where_to_put_it(monkeypatch):
    monkeypatch.delenv("ERGON_NATS__URL", raising=False)
    with pytest.raises(ConfigurationError, match="ERGON_NATS__URL"):
        asyncio.run(NatsQueue("orders").open_async())
    with pytest.raises(ConfigurationError, match="200"):
        NatsQueue("")


@pytest.mark.spec("CNN-08", "CNN-12")
def test_a_burial_that_comes_too_late_does_not_take_the_next_ones_with_it(nats_server, monkeypatch):
    async def run():
        async with opened(nats_server, lease=0.5) as stale, opened(nats_server, stale.name, lease=0.5) as heir:
            await stale.dispatch_async(orders(1))
            (old,) = await claimed(stale, 1)
            store = stale._settler._store

            async def slowly(*given):
                """It has written the dead letter, and hangs until another has buried the same and acked it."""
                await store(*given)
                (held,) = await claimed(heir, 1)
                assert await heir.settle_async([(held, DeadLetter("second"))]) == [SETTLED]

            monkeypatch.setattr(stale._settler, "_store", slowly)
            assert await stale.settle_async([(old, DeadLetter("first"))]) == [LOST]
            assert [letter.reason for letter in await heir.list_dead_async(DeadLetterQuery())] == ["second"]

    asyncio.run(run())


def heard_late(queue, monkeypatch):
    """What it says to a consumer is heard in time, and the answer read when the lease is over."""
    settler = queue._settler
    say = settler._say

    async def slowly(line, said, *given):
        told = await say(line, said, *given)
        await asyncio.sleep(max(claim.until for claim, _ in said) - time.monotonic() + 0.05)
        return told

    monkeypatch.setattr(settler, "_say", slowly)


@pytest.mark.spec("CNN-08", "CNN-12")
@pytest.mark.parametrize("erase", [True, False])
@pytest.mark.parametrize("others", [0, 2])
def test_a_dead_letter_whose_answer_comes_too_late_stays_the_only_one_of_its_message(
    nats_server, monkeypatch, erase, others
):
    async def run():
        async with opened(nats_server, lease=0.5, erase=erase) as queue:
            await queue.dispatch_async(orders(1 + others))
            first, *rest = await claimed(queue, 1 + others)
            heard_late(queue, monkeypatch)
            settlings = [(first, DeadLetter("first")), *((each, Ack()) for each in rest)]
            assert await queue.settle_async(settlings) == [SETTLED] * (1 + others)
            assert [letter.reason for letter in await queue.list_dead_async(DeadLetterQuery())] == ["first"]
            assert await queue.fetch_transactions_async(3, wait=1.0) == []

    asyncio.run(run())


@pytest.mark.spec("CNN-07", "CNN-12")
@pytest.mark.parametrize("count", [1, 3])
def test_acks_that_were_heard_settle_whenever_their_answer_comes(nats_server, monkeypatch, count):
    async def run():
        async with opened(nats_server, lease=0.5) as queue:
            await queue.dispatch_async(orders(count))
            held = await claimed(queue, count)
            heard_late(queue, monkeypatch)
            assert await queue.settle_async([(each, Ack()) for each in held]) == [SETTLED] * count
            assert await queue.fetch_transactions_async(3, wait=1.0) == []

    asyncio.run(run())


@pytest.mark.spec("CNN-06", "CNN-12")
def test_what_is_given_back_too_late_may_be_anothers(nats_server, monkeypatch):
    async def run():
        async with opened(nats_server, lease=0.5) as queue:
            await queue.dispatch_async(orders(1))
            (held,) = await claimed(queue, 1)
            heard_late(queue, monkeypatch)
            assert await queue.settle_async([(held, Release())]) == [LOST]
            assert len(await claimed(queue, 1)) == 1

    asyncio.run(run())


@pytest.mark.spec("CNN-08", "CNN-12")
def test_a_dead_letter_of_what_another_has_done_meanwhile_is_withdrawn(nats_server, monkeypatch):
    async def run():
        async with opened(nats_server, lease=0.5) as stale, opened(nats_server, stale.name, lease=0.5) as heir:
            await stale.dispatch_async(orders(1))
            (old,) = await claimed(stale, 1)
            say = stale._settler._say

            async def late(*given):
                """It looked at its clock in time; what it says lies on the line until another is done."""
                (held,) = await claimed(heir, 1)
                assert await heir.settle_async([(held, Ack())]) == [SETTLED]
                return await say(*given)

            monkeypatch.setattr(stale._settler, "_say", late)
            assert await stale.settle_async([(old, DeadLetter("first"))]) == [LOST]
            assert await heir.list_dead_async(DeadLetterQuery()) == []

    asyncio.run(run())
