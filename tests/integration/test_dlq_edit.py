"""``ergon dlq edit`` on every broker, and its result for effects that were made with the old values."""

from __future__ import annotations

import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import amqp
import pytest
from typer.testing import CliRunner

from ergon_framework.cli import dlq_edit
from ergon_framework.cli.app import app
from ergon_framework.cli.dlq_edit import PayloadEdit
from ergon_framework.cli.dlq_view import DlqExit
from ergon_framework.connectors.base import Ack, DeadLetter
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult
from ergon_framework.connectors.nats import dead_letters
from ergon_framework.connectors.nats.connection import Connection
from ergon_framework.connectors.registry import create_connector
from ergon_framework.failure import EDITED_CODE
from ergon_framework.transaction import Transaction
from ergon_framework.worker.policies import ConsumerPolicy


@pytest.fixture(autouse=True)
def _isolate(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr("ergon_framework.runner.queues._chosen", [])


@pytest.fixture(params=["postgres", "redis", "nats", "rabbitmq"])
def url(request):
    """The address of a broker of each kind."""
    if request.param == "postgres":
        return request.getfixturevalue("database")
    if request.param == "redis":
        return request.getfixturevalue("new_redis")().url
    if request.param == "nats":
        return request.getfixturevalue("nats_server").url
    return request.getfixturevalue("rabbitmq")


@pytest.fixture
def queue(url, monkeypatch):
    """A queue by name, and the same queue for direct use in the test."""
    name = f"edit{uuid.uuid4().hex[:8]}"
    monkeypatch.setenv(f"ERGON_QUEUES__{name.upper()}__URL", url)
    queue = as_sync(create_connector(name, url, {}))
    queue.open()
    yield queue
    queue.close()
    if url.startswith("amqp"):
        # The server may be shared with other users of the machine, so the queues are removed.
        connection = amqp.Connection(url.partition("@")[2].rstrip("/"))
        connection.connect()
        with connection:
            for queue_name in (name, f"{name}.dead"):
                connection.channel().queue_delete(queue_name)


def fetch_one(queue):
    [delivery] = queue.fetch_transactions(1, wait=20.0)
    return delivery


def test_on_every_broker_a_corrected_dead_letter_is_redelivered_under_its_id(queue):
    queue.dispatch([Transaction({"total": 450}, id="order-1", correlation="basket", tenant="acme", type="order")])
    queue.settle([(fetch_one(queue), DeadLetter("declined"))])
    result = CliRunner().invoke(app, ["dlq", "edit", queue.name, "order-1", "--set", "total=45", "--actor", "kim"])
    assert result.exit_code == DlqExit.OK, result.output
    assert list(queue.list_dead(DeadLetterQuery())) == []
    delivery = fetch_one(queue)
    transaction = delivery.transaction
    assert (transaction.id, transaction.correlation, transaction.tenant, transaction.type) == (
        "order-1",
        "basket",
        "acme",
        "order",
    )
    assert (transaction.payload, transaction.attempts, delivery.deliveries) == ({"total": 45}, 0, 1)
    assert [(past.code, past.error) for past in transaction.history] == [(EDITED_CODE, "by kim: total")]
    # If it is dead-lettered again, its record says so.
    queue.settle([(delivery, DeadLetter("again"))])
    [record] = queue.list_dead(DeadLetterQuery())
    assert [past.error for past in record.envelope.history] == ["by kim: total"]
    queue.discard_dead([record.handle])


@pytest.mark.spec("SEC-21")
@pytest.mark.invariant
def test_on_every_broker_one_of_two_operators_succeeds_and_the_other_gets_an_error(queue, monkeypatch):
    """Both operators read the dead letter before one of them writes."""
    queue.dispatch([Transaction({"total": 450}, id="order-1")])
    queue.settle([(fetch_one(queue), DeadLetter("declined"))])
    both_have_read = Barrier(2)
    replay = dlq_edit._replace_record

    def write_after_both_have_read(*args, **options):
        both_have_read.wait(30)
        return replay(*args, **options)

    monkeypatch.setattr(dlq_edit, "_replace_record", write_after_both_have_read)

    def correct(total):
        edit = dlq_edit.EditRequest(
            id="order-1",
            handle=None,
            payload_edit=PayloadEdit(assignments=[f"total={total}"]),
            actor="kim",
            reason="",
            task=None,
            show_values=False,
            dry_run=False,
            as_json=False,
        )
        return dlq_edit.edit_dead_letter(queue.name, edit)

    with ThreadPoolExecutor(2) as operators:
        codes = list(operators.map(correct, (100, 200)))
    assert sorted(codes) == [DlqExit.OK, DlqExit.FAILED]
    sent = [total for code, total in zip(codes, (100, 200), strict=True) if code is DlqExit.OK]
    deliveries = [fetch_one(queue), *queue.fetch_transactions(10)]
    assert [delivery.transaction.payload["total"] for delivery in deliveries] == sent
    assert list(queue.list_dead(DeadLetterQuery())) == []
    queue.settle([(delivery, Ack()) for delivery in deliveries])


@pytest.mark.spec("SEC-21")
@pytest.mark.invariant
@pytest.mark.parametrize("url", ["nats"], indirect=True)
def test_a_correction_that_was_sent_is_reported_although_another_operator_deleted_the_dead_letter(queue, monkeypatch):
    """The second of two operators publishes nothing and deletes the dead letter before the first one does."""
    queue.dispatch([Transaction({"total": 450}, id="order-1")])
    queue.settle([(fetch_one(queue), DeadLetter("declined"))])
    [record] = queue.list_dead(DeadLetterQuery())
    delete = dead_letters._delete

    async def delete_after_another_operator(line, names, moving, became):
        await delete(line, names, dead_letters._MoveBatch([record.handle]), DeadLetterResult.REPLAYED)
        return await delete(line, names, moving, became)

    monkeypatch.setattr(dead_letters, "_delete", delete_after_another_operator)
    result = queue.replace_dead(record.handle, Transaction({"total": 100}, id="order-1"))
    assert result.outcome is DeadLetterResult.REPLAYED
    assert fetch_one(queue).transaction.payload == {"total": 100}


@pytest.mark.spec("SEC-21")
@pytest.mark.invariant
@pytest.mark.parametrize("url", ["nats"], indirect=True)
def test_a_correction_that_was_not_sent_is_not_reported_when_another_operator_deleted_the_dead_letter(
    queue, monkeypatch
):
    queue.dispatch([Transaction({"total": 450}, id="order-1")])
    queue.settle([(fetch_one(queue), DeadLetter("declined"))])
    [record] = queue.list_dead(DeadLetterQuery())
    ask_all, delete = Connection.request_many, dead_letters._delete

    async def lose_the_publication(line, requests, **options):
        if any(request.payload == b'{"total":100}' for request in requests):
            return [None] * len(requests)
        return await ask_all(line, requests, **options)

    async def delete_after_another_operator(line, names, moving, became):
        await delete(line, names, dead_letters._MoveBatch([record.handle]), DeadLetterResult.DISCARDED)
        return await delete(line, names, moving, became)

    monkeypatch.setattr(Connection, "request_many", lose_the_publication)
    monkeypatch.setattr(dead_letters, "_delete", delete_after_another_operator)
    result = queue.replace_dead(record.handle, Transaction({"total": 100}, id="order-1"))
    assert result.outcome is DeadLetterResult.GONE
    assert list(queue.fetch_transactions(1)) == []


SHOP = """
from ergon_framework import MemoryConnector, consumer
from ergon_framework.facts.append import Facts
from ergon_framework.facts.stores.memory import MemoryBoundary
from ergon_framework.providers.base import ProviderBase

boundary = MemoryBoundary()
facts = Facts(boundary, zone="shop")
orders = MemoryConnector("orders")
charged = []
breaks = [True]

class Bank(ProviderBase):
    provider_name = "bank"
    capability = "charging"

    def _execute_impl(self, *, payload, **_):
        charged.append(payload["amount"])
        return {"status": "paid"}

bank = Bank()

@consumer(orders, uses=[bank])
def pay(order):
    bank.call("charge", {"amount": order["total"]})
    fail()

@consumer(orders)
def announce(order):
    facts.append("headquarters", subject="order:1", predicate="paid", object={"total": order["total"]})
    fail()

def fail():
    if breaks:
        raise ValueError("after the effect")
"""


@pytest.mark.parametrize(
    "task, message", [("pay", "the effect 'bank.charge'"), ("announce", "of 'shop' is stored at offset 1")]
)
def test_an_effect_made_with_other_values_is_a_conflict_that_names_it(tmp_path, task, message):
    (tmp_path / "editshop.py").write_text(SHOP, encoding="utf-8")
    import editshop as shop  # noqa: PLC0415 - written above

    try:
        policy = ConsumerPolicy.load({"steps": {"process": {"retry": {"max_attempts": 1}}}})
        shop.orders.dispatch([shop.orders.transaction({"total": 450, "note": ""}, id="order-1", tenant="acme")])
        consumer = getattr(shop, task)
        consumer.run(policy)
        shop.breaks.clear()
        assert run_edit("--set", "total=45").exit_code == DlqExit.OK
        report = consumer.run(policy)
        assert report.counts["succeeded"] == 0
        [record] = shop.orders.list_dead(DeadLetterQuery())
        assert message in record.failure.error_message
        assert shop.charged in ([450], [])
        # A change that does not touch the effect succeeds, and the effect remains one.
        assert run_edit("--set", "total=450", "--set", "note=checked").exit_code == DlqExit.OK
        assert consumer.run(policy).counts["succeeded"] == 1
        assert shop.charged in ([450], [])
    finally:
        sys.modules.pop("editshop")


def run_edit(*args):
    return CliRunner().invoke(app, ["dlq", "edit", "editshop:orders", "order-1", *args])


def test_a_dead_letter_during_a_correction_is_always_in_at_least_one_place(queue):
    """The corrected message is queued before the old dead letter is deleted."""
    queue.dispatch([Transaction({"total": 450}, id="order-1")])
    queue.settle([(fetch_one(queue), DeadLetter("declined"))])
    [record] = queue.list_dead(DeadLetterQuery())
    corrected = record.with_payload({"total": 45}, by="kim", at=1_700_000_000.0, summary="total")
    queue.dispatch([corrected])
    # As if the process had ended here: both exist, and the old one can still be discarded.
    assert [each.id for each in queue.list_dead(DeadLetterQuery())] == ["order-1"]
    delivery = fetch_one(queue)
    assert delivery.transaction.payload == {"total": 45}
    queue.settle([(delivery, Ack())])
    queue.discard_dead([record.handle])
    assert list(queue.list_dead(DeadLetterQuery())) == []
