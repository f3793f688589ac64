"""Check claims on a Redis stream: the fence, renewal, claims of dead workers, and consumers that come and go."""

from __future__ import annotations

import os
import threading
import time
import uuid

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, Release, SettleResult
from ergon_framework.connectors.redis import scripts
from ergon_framework.errors import ConnectionLostError
from ergon_framework.transaction import Transaction
from tests.integration.redises import QueueFactory, make_part_key, make_stream_key, run_server, wait_until

pytestmark = pytest.mark.invariant

SETTLED, LOST = SettleResult.SETTLED, SettleResult.LOST
GROUP = "ergon"


@pytest.fixture(scope="module")
def server():
    # No test kills this server, so confirmed data need not be on disk.
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


def dispatch_transactions(queue, count):
    queue.dispatch([Transaction({"number": number}, id=f"tx-{number}") for number in range(count)])


def claim(queue, count=1):
    deliveries = []
    wait_until(
        lambda: deliveries.extend(queue.fetch_transactions(count - len(deliveries))) or len(deliveries) == count,
        "all come",
    )
    return deliveries


def read_owners(client, name):
    return {
        entry["message_id"]: entry["consumer"]
        for entry in client.xpending_range(make_stream_key(name), GROUP, "-", "+", 1000)
    }


@pytest.mark.spec("CNN-12")
@pytest.mark.parametrize("stale", [Ack(), Defer(0), Defer(9), DeadLetter("stale"), Release()])
def test_a_stale_claim_settles_nothing_although_the_server_would_accept_it(queues, client, stale):
    name = f"stale-{type(stale).__name__}-{getattr(stale, 'delay', '')}"
    queue, other = queues(name, lease=0.1), queues(name, lease=0.1)
    dispatch_transactions(queue, 1)
    (delivery,) = claim(queue)
    (redelivered,) = claim(other)
    before = read_owners(client, name)
    assert queue.settle([(delivery, stale)]) == [LOST]
    assert read_owners(client, name) == before
    assert other.settle([(redelivered, Ack())]) == [SETTLED]
    # The answer of XACK itself to a client without the claim:
    dispatch_transactions(other, 1)
    (delivery,) = claim(other)
    assert client.xack(make_stream_key(name), GROUP, delivery.receipt.id) == 1


@pytest.mark.spec("CNN-12")
def test_a_message_that_was_released_and_claimed_again_is_another_claim(queues):
    queue = queues("again")
    dispatch_transactions(queue, 1)
    (first,) = claim(queue)
    assert queue.settle([(first, Release())]) == [SETTLED]
    assert queue.settle([(first, Ack())]) == [LOST]
    (second,) = claim(queue)
    assert (second.deliveries, second.receipt.consumer) == (1, first.receipt.consumer)
    assert queue.settle([(first, Ack()), (second, Ack())]) == [LOST, SETTLED]


@pytest.mark.spec("CNN-13")
def test_a_claim_is_settled_once_also_within_one_group(queues):
    queue = queues("twice")
    dispatch_transactions(queue, 8)
    deliveries = claim(queue, 8)
    settlements = [
        (deliveries[0], Ack()),
        (deliveries[0], Ack()),
        (deliveries[0], DeadLetter("too")),
        (deliveries[1], Defer(0)),
        (deliveries[1], Ack()),
    ]
    assert sorted(queue.settle(settlements)) == sorted([SETTLED, LOST, LOST, SETTLED, LOST])
    # Also in a large group, which the server scans in one call.
    assert (
        queue.settle([(delivery, Ack()) for delivery in [*deliveries, *deliveries]])
        == [LOST] * 2 + [SETTLED] * 6 + [LOST] * 8
    )


@pytest.mark.spec("CNN-13")
def test_a_group_is_settled_however_many_other_claims_exist(queues):
    queue = queues("many")
    dispatch_transactions(queue, 700)
    deliveries = claim(queue, 700)
    settlements = [(delivery, Ack()) for delivery in deliveries[-10:]]
    assert queue.settle(settlements) == [SETTLED] * 10
    assert queue.settle([(delivery, Ack()) for delivery in deliveries[:-10]]) == [SETTLED] * 690
    assert queue.depth().in_flight == 0


@pytest.mark.spec("CNN-06")
def test_renewal_counts_no_delivery(queues, client):
    lease = 0.5
    queue = queues("renewed", lease=lease)
    dispatch_transactions(queue, 1)
    (delivery,) = claim(queue)
    lease_passed_at = time.monotonic() + 1.2 * lease
    while time.monotonic() < lease_passed_at:
        assert queue.extend([delivery])[0] > time.monotonic()
        time.sleep(lease / 20)
    ((pending),) = client.xpending_range(make_stream_key("renewed"), GROUP, "-", "+", 10)
    assert pending["times_delivered"] == 1
    assert pending["time_since_delivered"] < 1000 * lease
    assert queue.settle([(delivery, Ack())]) == [SETTLED]


@pytest.mark.spec("CNN-04")
def test_claims_of_a_dead_worker_are_found_behind_many_live_ones(queues, client):
    live_queue, dead_queue, other_queue = (queues("cursor", lease=0.3) for _ in range(3))
    dispatch_transactions(live_queue, 400)
    live_deliveries = claim(live_queue, 400)
    dispatch_transactions(dead_queue, 2)
    claim(dead_queue, 2)
    deliveries, calls, deadline = [], 0, time.monotonic() + 5
    while len(deliveries) < 2 and time.monotonic() < deadline:
        assert None not in live_queue.extend(live_deliveries)
        # One at a time: the server then scans ten claims and continues at the returned position.
        deliveries += other_queue.fetch_transactions(1)
        calls += 1
    assert sorted(delivery.transaction.id for delivery in deliveries) == ["tx-0", "tx-1"]
    assert [delivery.deliveries for delivery in deliveries] == [2, 2]
    assert calls > 40, "they were found without a cursor"


@pytest.mark.spec("CNN-06")
def test_a_worker_that_loses_claims_to_itself_is_notified(queues):
    queue = queues("slept", lease=0.1)
    dispatch_transactions(queue, 1)
    (delivery,) = claim(queue)
    lost_receipts = []

    class LossListener:
        def wake(self): ...

        def on_lost(self, receipts):
            lost_receipts.extend(receipts)

    queue.listen(LossListener())
    (again,) = claim(queue)
    assert lost_receipts == [delivery.receipt]
    assert queue.settle([(delivery, Ack()), (again, Ack())]) == [LOST, SETTLED]


def read_consumers(client, name):
    return {
        consumer["name"].decode(): consumer["pending"]
        for consumer in client.xinfo_consumers(make_stream_key(name), GROUP)
    }


@pytest.mark.spec("CNN-04")
def test_a_consumer_is_deleted_only_without_claims(queues, client):
    busy, idle = queues("forgotten"), queues("forgotten")
    dispatch_transactions(busy, 1)
    (delivery,) = claim(busy)
    dispatch_transactions(busy, 1)
    assert idle.settle([(item, Ack()) for item in claim(idle)]) == [SETTLED]
    assert sorted(read_consumers(client, "forgotten").values()) == [0, 1]
    wait_until(
        lambda: min(item["idle"] for item in client.xinfo_consumers(make_stream_key("forgotten"), GROUP)) > 1,
        "all are idle",
    )
    client.eval(scripts.CLEAN_UP.text, 1, make_stream_key("forgotten"), GROUP, 1)
    # Deleted with its consumer, the claim could not be claimed again.
    assert read_consumers(client, "forgotten") == {delivery.receipt.consumer: 1}
    busy.close()
    assert read_consumers(client, "forgotten") == {delivery.receipt.consumer: 1}
    busy.open()
    assert busy.settle([(delivery, Ack())]) == [SETTLED]
    busy.close()
    assert read_consumers(client, "forgotten") == {}


@pytest.mark.spec("CNN-04")
def test_settled_messages_leave_nothing_on_the_server(queues, client):
    queue = queues("clean")
    dispatch_transactions(queue, 50)
    deliveries = claim(queue, 50)
    queue.settle([(delivery, Release()) for delivery in deliveries])
    queue.settle([(delivery, Defer(0.01)) for delivery in claim(queue, 50)])
    deliveries = claim(queue, 50)
    assert {delivery.deliveries for delivery in deliveries} == {1}
    queue.settle([(delivery, Ack()) for delivery in deliveries])
    assert client.xlen(make_stream_key("clean")) == 0
    assert not client.exists(*(make_part_key("clean", part) for part in ("due", "free", "dead")))
    assert client.xlen(make_part_key("clean", "later")) == 0


@pytest.mark.spec("CNN-04")
def test_a_forked_child_is_a_separate_consumer(queues):
    queue = queues("forked")
    dispatch_transactions(queue, 2)
    mine = queue.fetch_transactions(1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            (theirs,) = queue.fetch_transactions(1)
            queue.settle([(theirs, Ack())])
            os.write(writer, theirs.receipt.consumer.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    theirs = os.read(reader, 200).decode()
    os.close(reader)
    assert theirs
    assert theirs != mine[0].receipt.consumer
    assert queue.settle([(mine[0], Ack())]) == [SETTLED]
    assert queue.depth().ready + queue.depth().in_flight == 0


@pytest.mark.spec("CNN-12")
def test_an_ack_whose_response_was_lost_is_reported_as_settled_when_retried(queues, server, client):
    queue = queues("unanswered", url=f"{server.url}?socket_timeout=0.5")
    dispatch_transactions(queue, 3)
    first, acked, released = claim(queue, 3)
    assert queue.settle([(first, Ack())]) == [SETTLED]  # from now on the server knows the script
    for settling in ((acked, Ack()), (released, Release())):
        server.pause()
        try:
            with pytest.raises(ConnectionLostError):
                queue.settle([settling])
        finally:
            server.resume()
        queue.depth()  # a new connection, before the server hangs again
    wait_until(lambda: scripts.RETURNED_CONSUMER.encode() in read_owners(client, "unanswered").values(), "both arrive")
    # A settlement that differs from the completed one is lost.
    assert queue.settle([(acked, Ack()), (released, Ack())]) == [SETTLED, LOST]


@pytest.mark.spec("CNN-04", "CNN-07")
def test_claims_of_a_lost_fetch_return_soon_without_a_counted_delivery(queues, server, client):
    queue = queues("lost-answer", url=f"{server.url}?socket_timeout=0.5", lease=60.0)
    assert not queue.fetch_transactions(1)  # from now on the server knows the script
    dispatch_transactions(queue, 3)
    server.pause()
    try:
        with pytest.raises(ConnectionLostError):
            queue.fetch_transactions(3)
    finally:
        server.resume()
    wait_until(lambda: len(read_owners(client, "lost-answer")) == 3, "the claim arrives")
    deliveries = claim(queue, 3)
    assert [delivery.deliveries for delivery in deliveries] == [1, 1, 1]
    assert queue.settle([(delivery, Ack()) for delivery in deliveries]) == [SETTLED] * 3


# -- two event loops on one queue -------------------------------------------------------------------------------


QUEUE_PREFIX = "orders-of-two"


def simulate_lost_fetch(queue):
    """Simulate a fetch without a response: the queue then searches for the claims it may have made."""
    with pytest.raises(TimeoutError), queue._claims.track_fetch():
        raise TimeoutError


def finish_operation(operation, response):
    """Return the result of *operation* for the *answer* to its last command."""
    with pytest.raises(StopIteration) as stop:
        operation.send(response)
    return stop.value.value


@pytest.mark.spec("DX-23", "CNN-08")
def test_a_search_for_unknown_claims_ignores_concurrent_claims_of_the_same_queue(queues, client):
    queue = queues(f"{QUEUE_PREFIX}-{uuid.uuid4().hex[:8]}")
    queue.open()
    simulate_lost_fetch(queue)
    dispatch_transactions(queue, 1)
    client.script_load(scripts.READ.text)
    for command in ("XPENDING", "XREADGROUP"):
        client.set_response_callback(command, lambda answer, **_: answer)  # as the server sends it
    claiming = queue._claims
    with claiming.track_fetch():
        search = claiming.find_unknown()
        query = next(search)  # no other fetch is running, so it queries the server
        with claiming.track_fetch():
            fetch = claiming._fetch_new(1)
            response = client.execute_command(*next(fetch))  # on its way to the other loop, which does not know it yet
            pending = client.execute_command(*query)
            assert len(pending) == 1
            assert finish_operation(search, pending) == []
            (delivery,) = finish_operation(fetch, list(response.items()) if isinstance(response, dict) else response)
    assert queues(queue.name).fetch_transactions(1) == []  # no other client receives it
    assert queue.settle([(delivery, Ack())]) == [SETTLED]


@pytest.mark.spec("DX-23")
def test_claims_of_an_interrupted_fetch_are_released_by_the_next_fetch(queues, client):
    queue = queues(f"{QUEUE_PREFIX}-{uuid.uuid4().hex[:8]}")
    queue.open()
    dispatch_transactions(queue, 1)
    client.xreadgroup(GROUP, queue._claims.consumer, {make_stream_key(queue.name): ">"})
    simulate_lost_fetch(queue)
    (delivery,) = claim(queue)
    assert delivery.deliveries == 1


@pytest.mark.spec("DX-23")
def test_two_loops_on_one_queue_never_claim_the_same_message_while_fetches_are_interrupted(queues):
    queue = queues(f"{QUEUE_PREFIX}-{uuid.uuid4().hex[:8]}")
    queue.open()
    dispatch_transactions(queue, 300)
    claimed, twice, results = set(), [], []
    lock = threading.Lock()

    def run_loop():
        while len(results) < 300:
            simulate_lost_fetch(queue)
            queue._claims._last_unconfirmed_search = float("-inf")  # search at every fetch, and not once a second
            for delivery in queue.fetch_transactions(5):
                with lock:
                    if delivery.transaction.id in claimed:
                        twice.append(delivery.transaction.id)
                    claimed.add(delivery.transaction.id)
                result = queue.settle([(delivery, Ack())])
                with lock:
                    results.append(result)

    threads = [threading.Thread(target=run_loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert twice == []
    assert results == [[SETTLED]] * 300
