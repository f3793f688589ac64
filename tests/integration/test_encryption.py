"""Encryption at rest on every broker: stored bytes, key rotation, dead letters, and behaviour without the key."""

from __future__ import annotations

import base64
import json
import sys
import time
import uuid
from dataclasses import dataclass
from typing import Any

import amqp
import psycopg
import pytest
import redis
from typer.testing import CliRunner

from ergon_framework import ConsumerPolicy, MemoryConnector, Transaction, consumer
from ergon_framework.cli.app import app
from ergon_framework.cli.dlq_view import DlqExit
from ergon_framework.connectors.base import Ack, Connector, DeadLetter, Defer, MissingKeyError, UndecodableError
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.codec import ENCRYPTION_KEY, JsonCodec
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterResult
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.registry import create_connector
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt, Deferral, Failure, HandlerError

pytestmark = [pytest.mark.spec("SEC-26"), pytest.mark.invariant]

KEYS_VARIABLE = "ERGON_ENCRYPTION__KEYS"
OLD_KEY = f"2026-05:{base64.b64encode(bytes(range(32))).decode()}"
NEW_KEY = f"2026-11:{base64.b64encode(bytes(range(100, 132))).decode()}"
#: Texts of a payload and of a failure; none of them may be readable where messages are stored.
CARD, ERROR_TEXT, TRACEBACK_TEXT, ATTEMPT_TEXT, HANDLER_TEXT, DEFERRAL_TEXT = (
    f"{word}-{uuid.uuid4().hex}" for word in ("card", "message", "trace", "past", "handler", "late")
)
SECRETS = (CARD, ERROR_TEXT, TRACEBACK_TEXT, ATTEMPT_TEXT, HANDLER_TEXT, DEFERRAL_TEXT)
BROKERS = ["postgres", "redis", "nats", "rabbitmq", "memory"]


@dataclass
class BrokerQueue:
    """A queue of one broker, and all bytes that its server has stored of it."""

    broker: str
    name: str
    url: str
    request: Any

    def connect(self) -> Connector:
        """Make a connector as a new process would, with the keys in the current environment."""
        if self.broker == "memory":
            return MemoryConnector(self.name, codec=JsonCodec())
        connector = as_sync(create_connector(self.name, self.url, {}))
        connector.open()
        self.request.addfinalizer(connector.close)
        return connector

    def count_messages(self) -> tuple[int, int]:
        """Return the number of messages in the queue, in flight or delayed, and the number of dead letters."""
        depth = self.connect().depth()
        alive = depth.ready + depth.delayed + depth.in_flight
        if self.broker == "rabbitmq":  # does not report delays that another connection has used
            connection = amqp.Connection(self.url.partition("@")[2].rstrip("/"))
            connection.connect()
            with connection:
                delayed = topology.delay_queue(self.name, topology.delay_bucket_ms(30))
                alive += connection.channel().queue_declare(delayed, passive=True).message_count
        return alive, depth.dead

    def read_stored(self) -> bytes:
        return getattr(self, f"_{self.broker}")()

    def _postgres(self) -> bytes:
        parts = []
        with psycopg.connect(self.url) as connection:
            tables = connection.execute("select tablename from pg_tables where schemaname = 'ergon'").fetchall()
            for (table,) in tables:
                parts += [row[0] for row in connection.execute(f"select t::text from ergon.{table} t").fetchall()]
            for table in ("ready", "content", "dead_letter"):
                parts += [row[0] for row in connection.execute(f"select body from ergon.{table}").fetchall()]
        return b"\n".join(each if isinstance(each, bytes) else each.encode() for each in parts)

    def _redis(self) -> bytes:
        client = redis.Redis.from_url(self.url)
        parts = []
        for key in client.scan_iter():
            if client.type(key) == b"stream":
                parts += [part for _, fields in client.xrange(key) for pair in fields.items() for part in pair]
        client.close()
        return b"\n".join(parts)

    def _nats(self) -> bytes:
        folder = self.request.getfixturevalue("nats_server").folder / "data"
        return b"\n".join(file.read_bytes() for file in folder.rglob(f"*{self.name}/**/*.blk"))

    def _rabbitmq(self) -> bytes:
        connection, parts = amqp.Connection(self.url.partition("@")[2].rstrip("/")), []
        connection.connect()
        with connection:
            for queue_name in (
                self.name,
                topology.dead_letter_queue(self.name),
                topology.delay_queue(self.name, topology.delay_bucket_ms(300)),
            ):
                channel = connection.channel()
                try:
                    while (message := channel.basic_get(queue_name)) is not None:
                        body = message.body if isinstance(message.body, bytes) else message.body.encode()
                        parts.append(body + json.dumps(message.headers, default=str).encode())
                except amqp.exceptions.NotFound:
                    continue
                channel.close()  # releases the messages that were fetched
        return b"\n".join(parts)


def delete_queues(url, names):
    """Remove queues: the server may be shared with other users of the machine."""
    connection = amqp.Connection(url.partition("@")[2].rstrip("/"))
    connection.connect()
    with connection:
        for queue_name in names:
            connection.channel().queue_delete(queue_name)


def make_broker_queue(request, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr("ergon_framework.runner.queues._chosen", [])
    monkeypatch.setenv(KEYS_VARIABLE, OLD_KEY)
    broker, name = request.param, f"sealed{uuid.uuid4().hex[:8]}"
    addresses = {
        "postgres": lambda: request.getfixturevalue("database"),
        "redis": lambda: request.getfixturevalue("new_redis")().url,
        "nats": lambda: request.getfixturevalue("nats_server").url,
        "rabbitmq": lambda: request.getfixturevalue("rabbitmq"),
        "memory": lambda: "memory://",
    }
    url = addresses[broker]()
    monkeypatch.setenv(f"ERGON_QUEUES__{name.upper()}__URL", url)
    if broker == "rabbitmq":
        later = [topology.delay_queue(name, topology.delay_bucket_ms(seconds)) for seconds in (1.5, 30, 300)]
        queues = (name, topology.dead_letter_queue(name), *later)
        request.addfinalizer(lambda: delete_queues(url, queues))
    return BrokerQueue(broker, name, url, request)


@pytest.fixture(params=BROKERS)
def broker_queue(request, monkeypatch, tmp_path):
    """A queue of every kind."""
    return make_broker_queue(request, monkeypatch, tmp_path)


@pytest.fixture(params=BROKERS[:-1])
def server_queue(request, monkeypatch, tmp_path):
    """A queue of every kind that other processes can use."""
    return make_broker_queue(request, monkeypatch, tmp_path)


def fetch_one(queue):
    [delivery] = queue.fetch_transactions(1, wait=20.0)
    return delivery


def make_order(name="order-1"):
    return Transaction({"card": CARD}, id=name, type="order", tenant="acme", correlation="basket")


def make_failure(name="order-1"):
    attempt = Attempt(attempt=0, category=Category.SYSTEM, code="declined", error=ATTEMPT_TEXT, at=1.0)
    handler = HandlerError(error_type="ValueError", error_message=HANDLER_TEXT, category=Category.SYSTEM)
    return Failure(
        task_name="pay",
        reason_code="declined",
        error_type="RuntimeError",
        error_message=ERROR_TEXT,
        attempts=2,
        occurred_at=2.0,
        transaction_id=name,
        source="shop",
        category=Category.SYSTEM,
        history=(attempt,),
        traceback=TRACEBACK_TEXT,
        handler_error=handler,
        detail={"body": CARD},
    )


def assert_nothing_readable(broker_queue):
    stored = broker_queue.read_stored()
    assert stored, "nothing is stored, so nothing was looked at"
    for secret in SECRETS:
        encodings = {secret.encode(), base64.b64encode(secret.encode()), secret.encode().hex().encode()}
        assert not any(each in stored for each in encodings), secret.partition("-")[0]


def test_payload_and_failure_are_stored_encrypted_and_read_back(broker_queue):
    queue = broker_queue.connect()
    queue.dispatch([make_order()])
    delivery = fetch_one(queue)
    assert (delivery.error, delivery.transaction.payload) == (None, {"card": CARD})
    history = (Attempt(attempt=0, category=Category.SYSTEM, code="declined", error=ATTEMPT_TEXT, at=1.0, delay=0.0),)
    deferral = Deferral(count=1, since=1.0, at=1.0, until=time.time() + 60, code="down", error=DEFERRAL_TEXT)
    queue.settle([(delivery, Defer(0.0, 1, history, deferral))])
    delivery = fetch_one(queue)
    assert (delivery.deliveries, delivery.transaction.payload) == (1, {"card": CARD})
    assert (delivery.transaction.attempts, delivery.transaction.history) == (1, history)
    assert delivery.transaction.deferral == deferral
    queue.settle([(delivery, DeadLetter("declined", make_failure()))])
    [record] = queue.list_dead(DeadLetterQuery())
    assert (record.payload, record.raw, record.headers) == ({"card": CARD}, None, {})
    assert (record.failure, record.envelope.history) == (make_failure(), history)
    for filters in ({"error_type": "RuntimeError"}, {"task": "pay"}, {"tenant": "acme"}, {"reason": "declined"}):
        assert [each.id for each in queue.list_dead(DeadLetterQuery(**filters))] == ["order-1"], filters
    [result] = queue.replay_dead([record.handle])
    assert result.outcome is DeadLetterResult.REPLAYED
    delivery = fetch_one(queue)
    assert (delivery.transaction.payload, delivery.transaction.history) == ({"card": CARD}, ())
    assert (delivery.transaction.deferral, delivery.deliveries) == (None, 1)
    queue.settle([(delivery, Ack())])


def test_no_server_stores_a_readable_text(server_queue):
    queue = server_queue.connect()
    queue.dispatch([make_order()])
    assert_nothing_readable(server_queue)
    history = (Attempt(attempt=0, category=Category.SYSTEM, code="declined", error=ATTEMPT_TEXT, at=1.0, delay=0.0),)
    deferral = Deferral(count=1, since=1.0, at=1.0, until=time.time() + 60, code="down", error=DEFERRAL_TEXT)
    queue.settle([(fetch_one(queue), Defer(300.0, 1, history, deferral))])
    assert_nothing_readable(server_queue)
    queue.dispatch([make_order("order-2")])
    delivery = fetch_one(queue)
    delivery.transaction = delivery.transaction.replace(history=history, deferral=deferral)
    queue.settle([(delivery, DeadLetter("declined", make_failure("order-2")))])
    assert_nothing_readable(server_queue)


def test_an_older_key_decrypts_and_the_first_one_encrypts(server_queue, monkeypatch):
    server_queue.connect().dispatch([make_order()])
    monkeypatch.setenv(KEYS_VARIABLE, f"{NEW_KEY},{OLD_KEY}")
    queue = server_queue.connect()
    delivery = fetch_one(queue)
    assert delivery.transaction.payload == {"card": CARD}
    queue.settle([(delivery, DeadLetter("declined", make_failure()))])
    result = CliRunner().invoke(
        app, ["dlq", "edit", server_queue.name, "order-1", "--set", "card=4111", "--actor", "kim"]
    )
    assert result.exit_code == DlqExit.OK, result.output
    monkeypatch.setenv(KEYS_VARIABLE, NEW_KEY)
    delivery = fetch_one(server_queue.connect())
    assert (delivery.error, delivery.transaction.payload) == (None, {"card": 4111})
    assert [past.error for past in delivery.transaction.history] == ["by kim: card"]


def test_without_the_key_a_message_stays_and_its_deliveries_are_not_counted(server_queue, monkeypatch):
    server_queue.connect().dispatch([make_order()])
    for keys in ("", NEW_KEY):
        monkeypatch.setenv(KEYS_VARIABLE, keys)
        queue = server_queue.connect()
        for _ in range(3):
            delivery = fetch_one(queue)
            assert isinstance(delivery.error, MissingKeyError)
            assert "'2026-05'" in str(delivery.error)
            assert KEYS_VARIABLE in str(delivery.error)
            assert (delivery.transaction.id, delivery.transaction.type, delivery.deliveries) == ("order-1", "order", 1)
            queue.settle([(delivery, Defer.from_transaction(0.0, delivery.transaction))])
    monkeypatch.setenv(KEYS_VARIABLE, f"{NEW_KEY},{OLD_KEY}")
    delivery = fetch_one(server_queue.connect())
    assert (delivery.error, delivery.transaction.payload, delivery.deliveries) == (None, {"card": CARD}, 1)


@pytest.mark.parametrize("keys", ["", NEW_KEY])
def test_a_worker_without_the_key_loses_nothing_and_says_which_key_is_missing(server_queue, monkeypatch, caplog, keys):
    server_queue.connect().dispatch([make_order(), make_order("order-2")])
    monkeypatch.setenv(KEYS_VARIABLE, keys)
    handled = []

    @consumer(server_queue.connect())
    def pay(order):
        handled.append(order)

    with caplog.at_level("INFO"):
        report = pay.run()
    assert (handled, report.counts["deferred"], report.counts["failed"]) == ([], 2, 0)
    assert not report.rejected
    [error_record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "2026-05" in str(error_record.__dict__)
    assert KEYS_VARIABLE in str(error_record.__dict__)
    assert server_queue.count_messages() == (2, 0)


def run_until_rejected(pay):
    """Run *pay* until it has rejected a message; between runs the broker delays the message for a moment."""
    for _ in range(20):
        report = pay.run()
        if report.rejected:
            return report
        time.sleep(0.2)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("keys", ["", NEW_KEY])
def test_a_message_whose_key_stays_missing_becomes_a_dead_letter_that_can_be_replayed(server_queue, monkeypatch, keys):
    history = (Attempt(attempt=0, category=Category.SYSTEM, code="declined", error=ATTEMPT_TEXT, at=1.0, delay=0.0),)
    queue = server_queue.connect()
    queue.dispatch([make_order()])
    queue.settle([(fetch_one(queue), Defer(0.0, 1, history))])
    queue.close()
    monkeypatch.setenv(KEYS_VARIABLE, keys)
    policy = ConsumerPolicy.load({"loop": {"max_deferral": 1.5}})

    @consumer(server_queue.connect(), policy=policy)
    def pay(_order):
        raise AssertionError("a message without its key was handled")

    began = time.monotonic()
    report = run_until_rejected(pay)
    assert (report.rejected, time.monotonic() - began >= 1.5) == ({"missing_key": 1}, True)
    queue = server_queue.connect()
    depth = queue.depth()
    assert (depth.ready, depth.dead) == (0, 1)
    [record] = queue.list_dead(DeadLetterQuery())
    assert (record.reason, record.headers[ENCRYPTION_KEY], record.deliveries) == ("missing_key", "2026-05", 1)
    assert "'2026-05'" in record.failure.error_message
    assert "replay" in record.failure.error_message
    assert_nothing_readable(server_queue)
    monkeypatch.setenv(KEYS_VARIABLE, OLD_KEY)
    owner = server_queue.connect()
    [readable] = owner.list_dead(DeadLetterQuery())
    assert (readable.payload, readable.envelope.history) == ({"card": CARD}, history)
    # An operator without the key replays the bytes as they were sent.
    [result] = queue.replay_dead([record.handle])
    assert result.outcome is DeadLetterResult.REPLAYED
    queue.close()
    delivery = fetch_one(owner)
    assert (delivery.error, delivery.transaction.payload, delivery.deliveries) == (None, {"card": CARD}, 1)
    assert (delivery.transaction.deferral, delivery.transaction.history) == (None, ())


def test_without_the_key_dead_letters_are_listed_and_replayed_as_they_are(server_queue, monkeypatch):
    queue = server_queue.connect()
    queue.dispatch([make_order()])
    queue.settle([(fetch_one(queue), DeadLetter("declined", make_failure()))])
    monkeypatch.delenv(KEYS_VARIABLE)
    list_result = CliRunner().invoke(
        app, ["dlq", "list", server_queue.name, "--error-type", "RuntimeError", "--payload"]
    )
    assert list_result.exit_code == DlqExit.OK, list_result.output
    assert "order-1" in list_result.output
    assert list_result.output.count("[encrypted, key 2026-05]") == 2, list_result.output
    show_result = CliRunner().invoke(app, ["dlq", "show", server_queue.name, "order-1", "--payload"])
    assert "[encrypted, key 2026-05]" in show_result.output
    assert not any(secret in list_result.output + show_result.output for secret in SECRETS)
    edit_result = CliRunner().invoke(
        app, ["dlq", "edit", server_queue.name, "order-1", "--set", "card=1", "--actor", "kim"]
    )
    assert edit_result.exit_code == DlqExit.USAGE
    assert "'2026-05'" in edit_result.output
    assert KEYS_VARIABLE in edit_result.output
    replay_result = CliRunner().invoke(app, ["dlq", "replay", server_queue.name, "--all"])
    assert replay_result.exit_code == DlqExit.OK, replay_result.output
    monkeypatch.setenv(KEYS_VARIABLE, OLD_KEY)
    delivery = fetch_one(server_queue.connect())
    assert (delivery.error, delivery.transaction.payload, delivery.deliveries) == (None, {"card": CARD}, 1)


def test_unencrypted_messages_are_accepted_until_encryption_is_required(server_queue, monkeypatch):
    monkeypatch.delenv(KEYS_VARIABLE)
    server_queue.connect().dispatch([make_order(), make_order("order-2")])
    monkeypatch.setenv(KEYS_VARIABLE, OLD_KEY)
    queue = server_queue.connect()
    delivery = fetch_one(queue)
    assert (delivery.error, delivery.transaction.payload) == (None, {"card": CARD})
    queue.settle([(delivery, Ack())])
    queue.close()
    monkeypatch.setenv("ERGON_ENCRYPTION__REQUIRE", "true")
    delivery = fetch_one(server_queue.connect())
    assert isinstance(delivery.error, UndecodableError)
    assert "not encrypted" in str(delivery.error)


def test_a_changed_body_is_an_undecodable_dead_letter(monkeypatch, database):
    monkeypatch.setenv(KEYS_VARIABLE, OLD_KEY)
    queue = as_sync(create_connector("orders", database, {}))
    queue.open()
    queue.dispatch([make_order(f"order-{number}") for number in (1, 2, 3)])
    with psycopg.connect(database) as connection:
        connection.execute(
            "update ergon.ready set body = set_byte(body, 20, get_byte(body, 20) # 1) where transaction_id = 'order-1'"
        )
        # The payload of another message, and another tenant.
        connection.execute(
            "update ergon.ready r set body = o.body from ergon.ready o "
            "where r.transaction_id = 'order-2' and o.transaction_id = 'order-3'"
        )
        connection.execute(
            "update ergon.ready set headers = headers || jsonb_build_object('ergon-tenant', 'other') "
            "where transaction_id = 'order-3'"
        )

    @consumer(queue)
    def pay(_order):
        raise AssertionError("a changed message was handled")

    report = pay.run()
    assert report.rejected == {"undecodable": 3}
    records = queue.list_dead(DeadLetterQuery())
    assert [record.reason for record in records] == ["undecodable"] * 3
    assert all(record.headers[ENCRYPTION_KEY] == "2026-05" for record in records)
    queue.close()
