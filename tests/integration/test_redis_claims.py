"""Claims on a Redis stream: the fence, renewal, what dead workers held, and consumers that come and go."""

from __future__ import annotations

import os
import threading
import time
import uuid

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Later, Release, SettleResult
from ergon_framework.connectors.redis import scripts
from ergon_framework.errors import ConnectionLost
from ergon_framework.transaction import Transaction
from tests.integration.redises import Queues, beside, running, stream, until

pytestmark = pytest.mark.invariant

SETTLED, LOST = SettleResult.SETTLED, SettleResult.LOST
GROUP = "ergon"


@pytest.fixture(scope="module")
def server():
    # Nothing is killed here: what is confirmed need not be on a disk.
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


def sent(queue, count):
    queue.dispatch([Transaction(f"tx-{number}", {"number": number}) for number in range(count)])


def taken(queue, count=1):
    found = []
    until(lambda: found.extend(queue.fetch_transactions(count - len(found))) or len(found) == count, "all come")
    return found


def owners(client, name):
    return {each["message_id"]: each["consumer"] for each in client.xpending_range(stream(name), GROUP, "-", "+", 1000)}


@pytest.mark.spec("CNN-12")
@pytest.mark.parametrize("stale", [Ack(), Later(0), Later(9), DeadLetter("stale"), Release()])
def test_a_stale_claim_settles_nothing_though_the_server_would_let_it(queues, client, stale):
    name = f"stale-{type(stale).__name__}-{getattr(stale, 'delay', '')}"
    one, other = queues(name, lease=0.1), queues(name, lease=0.1)
    sent(one, 1)
    (held,) = taken(one)
    (heir,) = taken(other)
    before = owners(client, name)
    assert one.settle([(held, stale)]) == [LOST]
    assert owners(client, name) == before
    assert other.settle([(heir, Ack())]) == [SETTLED]
    # What XACK itself says to somebody who holds nothing:
    sent(other, 1)
    (held,) = taken(other)
    assert client.xack(stream(name), GROUP, held.receipt.id) == 1


@pytest.mark.spec("CNN-12")
def test_what_was_given_back_and_taken_again_is_another_claim(queues):
    queue = queues("again")
    sent(queue, 1)
    (first,) = taken(queue)
    assert queue.settle([(first, Release())]) == [SETTLED]
    assert queue.settle([(first, Ack())]) == [LOST]
    (second,) = taken(queue)
    assert (second.deliveries, second.receipt.consumer) == (1, first.receipt.consumer)
    assert queue.settle([(first, Ack()), (second, Ack())]) == [LOST, SETTLED]


@pytest.mark.spec("CNN-13")
def test_a_claim_is_settled_once_also_within_one_group(queues):
    queue = queues("twice")
    sent(queue, 8)
    held = taken(queue, 8)
    both = [(held[0], Ack()), (held[0], Ack()), (held[0], DeadLetter("too")), (held[1], Later(0)), (held[1], Ack())]
    assert sorted(queue.settle(both)) == sorted([SETTLED, LOST, LOST, SETTLED, LOST])
    # In a large group, which is looked through at once, too.
    assert queue.settle([(each, Ack()) for each in [*held, *held]]) == [LOST] * 2 + [SETTLED] * 6 + [LOST] * 8


@pytest.mark.spec("CNN-13")
def test_a_group_is_settled_however_much_else_is_in_hand(queues):
    queue = queues("many")
    sent(queue, 700)
    held = taken(queue, 700)
    last = [(each, Ack()) for each in held[-10:]]
    assert queue.settle(last) == [SETTLED] * 10
    assert queue.settle([(each, Ack()) for each in held[:-10]]) == [SETTLED] * 690
    assert queue.depth().in_flight == 0


@pytest.mark.spec("CNN-06")
def test_renewal_counts_no_delivery(queues, client):
    lease = 0.5
    queue = queues("renewed", lease=lease)
    sent(queue, 1)
    (held,) = taken(queue)
    lapsed = time.monotonic() + 1.2 * lease
    while time.monotonic() < lapsed:
        assert queue.extend([held])[0] > time.monotonic()
        time.sleep(lease / 20)
    ((pending),) = client.xpending_range(stream("renewed"), GROUP, "-", "+", 10)
    assert pending["times_delivered"] == 1
    assert pending["time_since_delivered"] < 1000 * lease
    assert queue.settle([(held, Ack())]) == [SETTLED]


@pytest.mark.spec("CNN-04")
def test_what_the_dead_held_is_found_behind_much_that_is_alive(queues, client):
    alive, dead, heir = (queues("cursor", lease=0.3) for _ in range(3))
    sent(alive, 400)
    held = taken(alive, 400)
    sent(dead, 2)
    taken(dead, 2)
    found, calls, end = [], 0, time.monotonic() + 5
    while len(found) < 2 and time.monotonic() < end:
        assert None not in alive.extend(held)
        # One at a time: the server then looks through ten claims, and goes on where it was told to.
        found += heir.fetch_transactions(1)
        calls += 1
    assert sorted(each.transaction.id for each in found) == ["tx-0", "tx-1"]
    assert [each.deliveries for each in found] == [2, 2]
    assert calls > 40, "they were found without a cursor"


@pytest.mark.spec("CNN-06")
def test_who_loses_claims_to_himself_is_told(queues):
    queue = queues("slept", lease=0.1)
    sent(queue, 1)
    (held,) = taken(queue)
    told = []

    class Ear:
        def wake(self): ...

        def lost(self, receipts):
            told.extend(receipts)

    queue.listen(Ear())
    (again,) = taken(queue)
    assert told == [held.receipt]
    assert queue.settle([(held, Ack()), (again, Ack())]) == [LOST, SETTLED]


def consumers(client, name):
    return {each["name"].decode(): each["pending"] for each in client.xinfo_consumers(stream(name), GROUP)}


@pytest.mark.spec("CNN-04")
def test_a_consumer_is_forgotten_only_with_empty_hands(queues, client):
    busy, idle = queues("forgotten"), queues("forgotten")
    sent(busy, 1)
    (held,) = taken(busy)
    sent(busy, 1)
    assert idle.settle([(each, Ack()) for each in taken(idle)]) == [SETTLED]
    assert sorted(consumers(client, "forgotten").values()) == [0, 1]
    until(lambda: min(each["idle"] for each in client.xinfo_consumers(stream("forgotten"), GROUP)) > 1, "all are idle")
    client.eval(scripts.TIDY.text, 1, stream("forgotten"), GROUP, 1)
    # Thrown away with its consumer, the claim would have been lost with nobody to claim it.
    assert consumers(client, "forgotten") == {held.receipt.consumer: 1}
    busy.close()
    assert consumers(client, "forgotten") == {held.receipt.consumer: 1}
    busy.open()
    assert busy.settle([(held, Ack())]) == [SETTLED]
    busy.close()
    assert consumers(client, "forgotten") == {}


@pytest.mark.spec("CNN-04")
def test_nothing_is_left_of_what_is_done(queues, client):
    queue = queues("clean")
    sent(queue, 50)
    held = taken(queue, 50)
    queue.settle([(each, Release()) for each in held])
    queue.settle([(each, Later(0.01)) for each in taken(queue, 50)])
    held = taken(queue, 50)
    assert {each.deliveries for each in held} == {1}
    queue.settle([(each, Ack()) for each in held])
    assert client.xlen(stream("clean")) == 0
    assert not client.exists(*(beside("clean", part) for part in ("due", "free", "dead")))
    assert client.xlen(beside("clean", "later")) == 0


@pytest.mark.spec("CNN-04")
def test_a_forked_child_is_a_consumer_of_its_own(queues):
    queue = queues("forked")
    sent(queue, 2)
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
def test_an_ack_whose_answer_was_lost_is_told_as_settled_when_it_is_asked_again(queues, server, client):
    queue = queues("unanswered", url=f"{server.url}?socket_timeout=0.5")
    sent(queue, 3)
    first, done, given = taken(queue, 3)
    assert queue.settle([(first, Ack())]) == [SETTLED]  # from now on the server knows the script
    for settling in ((done, Ack()), (given, Release())):
        server.pause()
        try:
            with pytest.raises(ConnectionLost):
                queue.settle([settling])
        finally:
            server.resume()
        queue.depth()  # a new line, before the server hangs again
    until(lambda: scripts.RETURNED.encode() in owners(client, "unanswered").values(), "both arrive")
    # Another settlement than the one that was carried out is none.
    assert queue.settle([(done, Ack()), (given, Ack())]) == [SETTLED, LOST]


@pytest.mark.spec("CNN-04", "CNN-07")
def test_what_a_lost_fetch_took_comes_back_soon_and_costs_nothing(queues, server, client):
    queue = queues("lost-answer", url=f"{server.url}?socket_timeout=0.5", lease=60.0)
    assert not queue.fetch_transactions(1)  # from now on the server knows the script
    sent(queue, 3)
    server.pause()
    try:
        with pytest.raises(ConnectionLost):
            queue.fetch_transactions(3)
    finally:
        server.resume()
    until(lambda: len(owners(client, "lost-answer")) == 3, "the claim arrives")
    found = taken(queue, 3)
    assert [each.deliveries for each in found] == [1, 1, 1]
    assert queue.settle([(each, Ack()) for each in found]) == [SETTLED] * 3


# -- two loops on one queue -------------------------------------------------------------------------------------


NAME = "orders-of-two"


def cut_off(queue):
    """As after a fetch whose answer never came: what it may have claimed is looked for."""
    with pytest.raises(TimeoutError), queue._claiming.fetching():
        raise TimeoutError


def last(operation, answer):
    """What *operation* comes to with the *answer* to its last command."""
    with pytest.raises(StopIteration) as ended:
        operation.send(answer)
    return ended.value.value


@pytest.mark.spec("DX-23", "CNN-08")
def test_a_look_for_unknown_claims_leaves_alone_what_another_fetch_of_the_queue_claims_meanwhile(queues, client):
    queue = queues(f"{NAME}-{uuid.uuid4().hex[:8]}")
    queue.open()
    cut_off(queue)
    sent(queue, 1)
    client.script_load(scripts.READ.text)
    for command in ("XPENDING", "XREADGROUP"):
        client.set_response_callback(command, lambda answer, **_: answer)  # as the server sends it
    claiming = queue._claiming
    with claiming.fetching():
        look = claiming.unknown()
        question = next(look)  # nobody else fetches, so it asks the server
        with claiming.fetching():
            fetch = claiming._read(1)
            claimed = client.execute_command(*next(fetch))  # on its way to the other loop, which does not know it yet
            pending = client.execute_command(*question)
            assert len(pending) == 1
            assert last(look, pending) == []
            (found,) = last(fetch, list(claimed.items()) if isinstance(claimed, dict) else claimed)
    assert queues(queue.name).fetch_transactions(1) == []  # nobody else is handed it
    assert queue.settle([(found, Ack())]) == [SETTLED]


@pytest.mark.spec("DX-23")
def test_what_a_cut_off_fetch_claimed_is_given_back_by_the_next_fetch(queues, client):
    queue = queues(f"{NAME}-{uuid.uuid4().hex[:8]}")
    queue.open()
    sent(queue, 1)
    client.xreadgroup(GROUP, queue._claiming.consumer, {stream(queue.name): ">"})
    cut_off(queue)
    (found,) = taken(queue)
    assert found.deliveries == 1


@pytest.mark.spec("DX-23")
def test_two_loops_on_one_queue_never_hold_the_same_while_fetches_are_cut_off(queues):
    queue = queues(f"{NAME}-{uuid.uuid4().hex[:8]}")
    queue.open()
    sent(queue, 300)
    held, twice, done = set(), [], []
    lock = threading.Lock()

    def loop():
        while len(done) < 300:
            cut_off(queue)
            queue._claiming._disowned = float("-inf")  # look at every fetch, and not once a second
            for delivery in queue.fetch_transactions(5):
                with lock:
                    if delivery.transaction.id in held:
                        twice.append(delivery.transaction.id)
                    held.add(delivery.transaction.id)
                result = queue.settle([(delivery, Ack())])
                with lock:
                    done.append(result)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert twice == []
    assert done == [[SETTLED]] * 300
