"""Check third-party streams: their messages, their groups, and the entries that must not be trimmed."""

from __future__ import annotations

import pytest

from ergon_framework.connectors.base import Ack, DeadLetter, Defer, SettleResult
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.connectors.foreign_codec import ForeignCodec, from_header, from_json_pointer
from ergon_framework.connectors.redis import scripts
from ergon_framework.errors import ConfigurationError
from ergon_framework.transaction import Transaction
from tests.integration.redises import QueueFactory, make_stream_key, run_server

SETTLED = SettleResult.SETTLED
GROUP = "ergon"


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


@pytest.mark.spec("CNN-16")
def test_plain_fields_of_another_producer_are_a_message(queues, client):
    client.xadd("shop:orders", {"order": "7", "cents": "250"})
    queue = queues("plain", stream="shop:orders", codec=ForeignCodec(id=from_json_pointer("/order"), type="order"))
    (delivery,) = queue.fetch_transactions(5)
    transaction = delivery.transaction
    assert (transaction.id, transaction.payload, transaction.type) == ("7", {"order": "7", "cents": "250"}, "order")
    assert queue.find_queued(["7", "8"]) == {"7"}
    assert queue.settle([(delivery, Defer(0, attempts=2))]) == [SETTLED]
    (again,) = queue.fetch_transactions(5)
    assert (again.transaction.id, again.transaction.attempts, again.deliveries) == ("7", 2, 1)
    assert queue.settle([(again, DeadLetter("why"))]) == [SETTLED]
    (record,) = queue.list_dead(DeadLetterQuery(id="7"))
    assert record.payload["cents"] == "250"
    queue.replay_dead([record.handle])
    (replayed,) = queue.fetch_transactions(5)
    assert (replayed.transaction.id, replayed.transaction.attempts) == ("7", 0)


@pytest.mark.spec("CNN-16")
def test_a_body_in_a_separate_field_and_an_id_among_the_others_are_read(queues, client):
    client.xadd("shop:paid", {"__data__": b'{"cents": 250}', "x-order": "7"})
    queue = queues("data", stream="shop:paid", body="__data__", codec=ForeignCodec(id=from_header("x-order")))
    queue.dispatch([Transaction({"cents": 1}, id="ours")])
    theirs, ours = queue.fetch_transactions(5)
    assert (theirs.transaction.id, theirs.transaction.payload) == ("7", {"cents": 250})
    assert (ours.transaction.id, ours.transaction.payload) == ("ours", {"cents": 1})


@pytest.mark.spec("CNN-05", "CNN-16")
@pytest.mark.parametrize("count", [3_499, 3_500, 3_501, 20_000])
def test_a_message_of_any_number_of_fields_is_deferred_dead_lettered_and_replayed_unchanged(queues, client, count):
    name = f"wide-{count}"
    fields = {f"field-{number}": f"value: {number}\r\n" for number in range(count - 1)} | {"order": "7"}
    client.xadd(f"shop:{name}", fields)
    queue = queues(name, stream=f"shop:{name}", codec=ForeignCodec(id=from_json_pointer("/order"), type="order"))

    def fetch_expected(*, attempts):
        (delivery,) = queue.fetch_transactions(5, wait=30.0)
        transaction = delivery.transaction
        assert (transaction.id, transaction.attempts, delivery.deliveries) == ("7", attempts, 1)
        assert transaction.payload.items() >= fields.items()
        return delivery

    assert queue.settle([(fetch_expected(attempts=0), Defer(0, attempts=2))]) == [SETTLED]
    assert queue.find_queued(["7", "8"]) == {"7"}
    assert queue.settle([(fetch_expected(attempts=2), Defer(0.001, attempts=3))]) == [SETTLED]
    assert queue.settle([(fetch_expected(attempts=3), DeadLetter("why"))]) == [SETTLED]
    (record,) = queue.list_dead(DeadLetterQuery(id="7"))
    assert (record.reason, record.payload.items() >= fields.items()) == ("why", True)
    assert queue.depth().ready == queue.depth().in_flight == 0
    queue.replay_dead([record.handle])
    assert queue.settle([(fetch_expected(attempts=0), DeadLetter("again"))]) == [SETTLED]
    (record,) = queue.list_dead(DeadLetterQuery(id="7"))
    assert (record.reason, record.payload.items() >= fields.items()) == ("again", True)


@pytest.mark.spec("CNN-05", "CNN-16")
@pytest.mark.parametrize("packed", ["", "1:a", "1:a2:b", "1:a:", "9:a", "-1:a1:b", "x:y", "1:a1:b1", "9999999999:a1:b"])
def test_a_field_that_only_looks_packed_is_an_ordinary_field(queues, client, packed):
    queue = queues("looks")
    client.xadd(make_stream_key("looks"), {"ergon-packed": packed, "ergon-id": "7", "body": b'{"cents": 1}'})
    (delivery,) = queue.fetch_transactions(5)
    assert (delivery.transaction.id, delivery.error) == ("7", None)
    assert queue.settle([(delivery, Defer(0))]) == [SETTLED]
    (again,) = queue.fetch_transactions(5)
    assert queue.settle([(again, DeadLetter("why"))]) == [SETTLED]
    (record,) = queue.list_dead(DeadLetterQuery(id="7"))
    assert queue.discard_dead([record.handle])[0].outcome == "discarded"


@pytest.mark.spec("CNN-05", "CNN-16")
def test_hostile_fields_stop_no_worker(queues, client):
    queue = queues("hostile")
    queue.open()
    hostile = [
        {"ergon-id": b"\xff\xfe", "body": b"{}"},
        {"ergon-id": "one", "ergon-deliveries": "many", "body": b"{}"},
        {"ergon-id": "two", "ergon-deliveries": "9" * 30, "ergon-dead-reason": "forged", "body": b"{}"},
        {b"\xff": b"\xff", "body": b"\x00\xff"},
        {"": ""},
    ]
    for fields in hostile:
        client.xadd(make_stream_key("hostile"), fields)
    deliveries = queue.fetch_transactions(10)
    assert [delivery.error is None for delivery in deliveries] == [False, True, True, False, False]
    assert {delivery.deliveries for delivery in deliveries} == {1}
    assert queue.settle([(delivery, Defer(0)) for delivery in deliveries]) == [SETTLED] * 5
    deliveries = queue.fetch_transactions(10)
    assert queue.settle([(delivery, DeadLetter("why")) for delivery in deliveries]) == [SETTLED] * 5
    records = queue.list_dead(DeadLetterQuery())
    assert [record.reason for record in records] == ["why"] * 5
    assert records[3].raw == b"\x00\xff"
    for record in records:
        record.model_dump_json()


@pytest.mark.spec("CNN-02")
def test_entries_that_another_group_has_not_read_are_never_trimmed(queues, client):
    key = "shop:shared"
    for number in range(6):
        client.xadd(key, {"n": str(number)})
    client.xgroup_create(key, "audit", id="0")
    queue = queues("shared", stream=key, codec=ForeignCodec(id=from_json_pointer("/n")))
    assert queue.settle([(each, Ack()) for each in queue.fetch_transactions(4)]) == [SETTLED] * 4
    trim = lambda: client.eval(scripts.CLEAN_UP.text, 1, key, GROUP, 10**9)  # noqa: E731 - short, and asked thrice
    assert (trim(), client.xlen(key)) == (0, 6)
    assert queue.depth().ready == 2
    ((_, theirs),) = client.xreadgroup("audit", "auditor", {key: ">"}, count=5)
    client.xack(key, "audit", *(entry_id for entry_id, _ in theirs[1:3]))
    # The first message is still claimed there.
    assert (trim(), client.xlen(key)) == (0, 6)
    client.xack(key, "audit", theirs[0][0], theirs[3][0], theirs[4][0])
    assert trim() == 3
    assert [fields[b"n"] for _, fields in client.xrange(key)] == [b"3", b"4", b"5"]
    assert [each.transaction.id for each in queue.fetch_transactions(10)] == ["4", "5"]


@pytest.mark.spec("CNN-16")
def test_a_stream_whose_slot_cannot_be_shared_is_rejected(queues):
    for key in ("", "a}b", "a}{b"):
        with pytest.raises(ConfigurationError, match="slot"):
            queues("odd", stream=key)
