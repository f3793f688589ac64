"""Encryption at rest on every broker: what is stored, rotation, dead letters, and what happens without the key."""

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
from ergon_framework.cli.dlq_exits import DlqExit
from ergon_framework.connectors.base import Ack, Connector, DeadLetter, Later, MissingKeyError, UndecodableError
from ergon_framework.connectors.bridge import as_sync
from ergon_framework.connectors.codec import ENCRYPTION_KEY, JsonCodec
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.schemes import connect
from ergon_framework.errors import Category
from ergon_framework.failure import Attempt, Deferral, Failure, HandlerError

pytestmark = [pytest.mark.spec("SEC-26"), pytest.mark.invariant]

VARIABLE = "ERGON_ENCRYPTION__KEYS"
OLD = f"2026-05:{base64.b64encode(bytes(range(32))).decode()}"
NEW = f"2026-11:{base64.b64encode(bytes(range(100, 132))).decode()}"
#: Texts of a payload and of a failure; none of them may be found where messages are stored.
CARD, MESSAGE, TRACE, PAST, HANDLER, LATE = (
    f"{word}-{uuid.uuid4().hex}" for word in ("card", "message", "trace", "past", "handler", "late")
)
SECRETS = (CARD, MESSAGE, TRACE, PAST, HANDLER, LATE)
EVERY = ["postgres", "redis", "nats", "rabbitmq", "memory"]


@dataclass
class Place:
    """A queue of one broker, and all bytes that its server has stored of it."""

    broker: str
    name: str
    url: str
    request: Any

    def connect(self) -> Connector:
        """Make a connector as a new process would: with the keys that the environment has now."""
        if self.broker == "memory":
            return MemoryConnector(self.name, codec=JsonCodec())
        made = as_sync(connect(self.name, self.url, {}))
        made.open()
        self.request.addfinalizer(made.close)
        return made

    def count(self) -> tuple[int, int]:
        """Return how many messages are in the queue, in hand or put off, and how many are dead."""
        depth = self.connect().depth()
        alive = depth.ready + depth.delayed + depth.in_flight
        if self.broker == "rabbitmq":  # which does not tell of delays that another connection has used
            line = amqp.Connection(self.url.partition("@")[2].rstrip("/"))
            line.connect()
            with line:
                delayed = topology.later(self.name, topology.step(30))
                alive += line.channel().queue_declare(delayed, passive=True).message_count
        return alive, depth.dead

    def stored(self) -> bytes:
        return getattr(self, f"_{self.broker}")()

    def _postgres(self) -> bytes:
        found = []
        with psycopg.connect(self.url) as connection:
            tables = connection.execute("select tablename from pg_tables where schemaname = 'ergon'").fetchall()
            for (table,) in tables:
                found += [row[0] for row in connection.execute(f"select t::text from ergon.{table} t").fetchall()]
            for table in ("ready", "content", "dead_letter"):
                found += [row[0] for row in connection.execute(f"select body from ergon.{table}").fetchall()]
        return b"\n".join(each if isinstance(each, bytes) else each.encode() for each in found)

    def _redis(self) -> bytes:
        client = redis.Redis.from_url(self.url)
        found = []
        for key in client.scan_iter():
            if client.type(key) == b"stream":
                found += [part for _, fields in client.xrange(key) for pair in fields.items() for part in pair]
        client.close()
        return b"\n".join(found)

    def _nats(self) -> bytes:
        folder = self.request.getfixturevalue("nats_server").folder / "data"
        return b"\n".join(file.read_bytes() for file in folder.rglob(f"*{self.name}/**/*.blk"))

    def _rabbitmq(self) -> bytes:
        line, found = amqp.Connection(self.url.partition("@")[2].rstrip("/")), []
        line.connect()
        with line:
            for each in (self.name, topology.dead(self.name), topology.later(self.name, topology.step(300))):
                channel = line.channel()
                try:
                    while (message := channel.basic_get(each)) is not None:
                        body = message.body if isinstance(message.body, bytes) else message.body.encode()
                        found.append(body + json.dumps(message.headers, default=str).encode())
                except amqp.exceptions.NotFound:
                    continue
                channel.close()  # what was taken goes back
        return b"\n".join(found)


def remove(url, names):
    """Take queues away: the server may be the machine's own, and is left as it was."""
    line = amqp.Connection(url.partition("@")[2].rstrip("/"))
    line.connect()
    with line:
        for each in names:
            line.channel().queue_delete(each)


def prepare(request, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr("ergon_framework.runner.queues._chosen", [])
    monkeypatch.setenv(VARIABLE, OLD)
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
        later = [topology.later(name, topology.step(seconds)) for seconds in (1.5, 30, 300)]
        queues = (name, topology.dead(name), *later)
        request.addfinalizer(lambda: remove(url, queues))
    return Place(broker, name, url, request)


@pytest.fixture(params=EVERY)
def place(request, monkeypatch, tmp_path):
    """A queue of every kind."""
    return prepare(request, monkeypatch, tmp_path)


@pytest.fixture(params=EVERY[:-1])
def server(request, monkeypatch, tmp_path):
    """A queue of every kind that other processes can use."""
    return prepare(request, monkeypatch, tmp_path)


def fetched(queue):
    [delivery] = queue.fetch_transactions(1, wait=20.0)
    return delivery


def order(name="order-1"):
    return Transaction(name, {"card": CARD}, type="order", tenant="acme", correlation="basket")


def failure(name="order-1"):
    attempt = Attempt(attempt=0, category=Category.SYSTEM, code="declined", error=PAST, at=1.0)
    handler = HandlerError(error_type="ValueError", error_message=HANDLER, category=Category.SYSTEM)
    return Failure(
        task_name="pay",
        reason_code="declined",
        error_type="RuntimeError",
        error_message=MESSAGE,
        attempts=2,
        occurred_at=2.0,
        transaction_id=name,
        source="shop",
        category=Category.SYSTEM,
        history=(attempt,),
        traceback=TRACE,
        handler_error=handler,
        detail={"body": CARD},
    )


def nothing_readable(place):
    stored = place.stored()
    assert stored, "nothing is stored, so nothing was looked at"
    for secret in SECRETS:
        encodings = {secret.encode(), base64.b64encode(secret.encode()), secret.encode().hex().encode()}
        assert not any(each in stored for each in encodings), secret.partition("-")[0]


def test_payload_and_failure_are_stored_encrypted_and_come_back(place):
    queue = place.connect()
    queue.dispatch([order()])
    delivery = fetched(queue)
    assert (delivery.error, delivery.transaction.payload) == (None, {"card": CARD})
    history = (Attempt(attempt=0, category=Category.SYSTEM, code="declined", error=PAST, at=1.0, delay=0.0),)
    deferral = Deferral(count=1, since=1.0, at=1.0, until=time.time() + 60, code="down", error=LATE)
    queue.settle([(delivery, Later(0.0, 1, history, deferral))])
    delivery = fetched(queue)
    assert (delivery.deliveries, delivery.transaction.payload) == (1, {"card": CARD})
    assert (delivery.transaction.attempts, delivery.transaction.history) == (1, history)
    assert delivery.transaction.deferral == deferral
    queue.settle([(delivery, DeadLetter("declined", failure()))])
    [record] = queue.list_dead(DeadLetterQuery())
    assert (record.payload, record.raw, record.headers) == ({"card": CARD}, None, {})
    assert (record.failure, record.envelope.history) == (failure(), history)
    for filters in ({"error_type": "RuntimeError"}, {"task": "pay"}, {"tenant": "acme"}, {"reason": "declined"}):
        assert [each.id for each in queue.list_dead(DeadLetterQuery(**filters))] == ["order-1"], filters
    [result] = queue.replay_dead([record.place])
    assert result.became is Became.REPLAYED
    delivery = fetched(queue)
    assert (delivery.transaction.payload, delivery.transaction.history) == ({"card": CARD}, ())
    assert (delivery.transaction.deferral, delivery.deliveries) == (None, 1)
    queue.settle([(delivery, Ack())])


def test_no_server_stores_a_readable_text(server):
    queue = server.connect()
    queue.dispatch([order()])
    nothing_readable(server)
    history = (Attempt(attempt=0, category=Category.SYSTEM, code="declined", error=PAST, at=1.0, delay=0.0),)
    deferral = Deferral(count=1, since=1.0, at=1.0, until=time.time() + 60, code="down", error=LATE)
    queue.settle([(fetched(queue), Later(300.0, 1, history, deferral))])
    nothing_readable(server)
    queue.dispatch([order("order-2")])
    delivery = fetched(queue)
    delivery.transaction = delivery.transaction.replace(history=history, deferral=deferral)
    queue.settle([(delivery, DeadLetter("declined", failure("order-2")))])
    nothing_readable(server)


def test_an_older_key_decrypts_and_the_first_one_encrypts(server, monkeypatch):
    server.connect().dispatch([order()])
    monkeypatch.setenv(VARIABLE, f"{NEW},{OLD}")
    queue = server.connect()
    delivery = fetched(queue)
    assert delivery.transaction.payload == {"card": CARD}
    queue.settle([(delivery, DeadLetter("declined", failure()))])
    done = CliRunner().invoke(app, ["dlq", "edit", server.name, "order-1", "--set", "card=4111", "--actor", "kim"])
    assert done.exit_code == DlqExit.OK, done.output
    monkeypatch.setenv(VARIABLE, NEW)
    delivery = fetched(server.connect())
    assert (delivery.error, delivery.transaction.payload) == (None, {"card": 4111})
    assert [past.error for past in delivery.transaction.history] == ["by kim: card"]


def test_without_the_key_a_message_stays_and_its_deliveries_are_not_counted(server, monkeypatch):
    server.connect().dispatch([order()])
    for keys in ("", NEW):
        monkeypatch.setenv(VARIABLE, keys)
        queue = server.connect()
        for _ in range(3):
            delivery = fetched(queue)
            assert isinstance(delivery.error, MissingKeyError)
            assert "'2026-05'" in str(delivery.error)
            assert VARIABLE in str(delivery.error)
            assert (delivery.transaction.id, delivery.transaction.type, delivery.deliveries) == ("order-1", "order", 1)
            queue.settle([(delivery, Later.unchanged(0.0, delivery.transaction))])
    monkeypatch.setenv(VARIABLE, f"{NEW},{OLD}")
    delivery = fetched(server.connect())
    assert (delivery.error, delivery.transaction.payload, delivery.deliveries) == (None, {"card": CARD}, 1)


@pytest.mark.parametrize("keys", ["", NEW])
def test_a_worker_without_the_key_loses_nothing_and_says_which_key_is_missing(server, monkeypatch, caplog, keys):
    server.connect().dispatch([order(), order("order-2")])
    monkeypatch.setenv(VARIABLE, keys)
    handled = []

    @consumer(server.connect())
    def pay(order):
        handled.append(order)

    with caplog.at_level("INFO"):
        report = pay.run()
    assert (handled, report.counts["deferred"], report.counts["failed"]) == ([], 2, 0)
    assert not report.refused
    [said] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "2026-05" in str(said.__dict__)
    assert VARIABLE in str(said.__dict__)
    assert server.count() == (2, 0)


def run_until_refused(pay):
    """Run *pay* until it has refused a message; the broker holds the message for a moment in between."""
    for _ in range(20):
        report = pay.run()
        if report.refused:
            return report
        time.sleep(0.2)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("keys", ["", NEW])
def test_a_key_that_stays_missing_ends_as_a_dead_letter_that_can_be_replayed(server, monkeypatch, keys):
    history = (Attempt(attempt=0, category=Category.SYSTEM, code="declined", error=PAST, at=1.0, delay=0.0),)
    queue = server.connect()
    queue.dispatch([order()])
    queue.settle([(fetched(queue), Later(0.0, 1, history))])
    queue.close()
    monkeypatch.setenv(VARIABLE, keys)
    policy = ConsumerPolicy.load({"loop": {"max_deferral": 1.5}})

    @consumer(server.connect(), policy=policy)
    def pay(_order):
        raise AssertionError("a message without its key was handled")

    began = time.monotonic()
    report = run_until_refused(pay)
    assert (report.refused, time.monotonic() - began >= 1.5) == ({"missing_key": 1}, True)
    queue = server.connect()
    depth = queue.depth()
    assert (depth.ready, depth.dead) == (0, 1)
    [record] = queue.list_dead(DeadLetterQuery())
    assert (record.reason, record.headers[ENCRYPTION_KEY], record.deliveries) == ("missing_key", "2026-05", 1)
    assert "'2026-05'" in record.failure.error_message
    assert "replay" in record.failure.error_message
    nothing_readable(server)
    monkeypatch.setenv(VARIABLE, OLD)
    owner = server.connect()
    [readable] = owner.list_dead(DeadLetterQuery())
    assert (readable.payload, readable.envelope.history) == ({"card": CARD}, history)
    # Replayed by an operator without the key, the bytes are those that were sent.
    [result] = queue.replay_dead([record.place])
    assert result.became is Became.REPLAYED
    queue.close()
    delivery = fetched(owner)
    assert (delivery.error, delivery.transaction.payload, delivery.deliveries) == (None, {"card": CARD}, 1)
    assert (delivery.transaction.deferral, delivery.transaction.history) == (None, ())


def test_without_the_key_dead_letters_are_listed_and_replayed_as_they_are(server, monkeypatch):
    queue = server.connect()
    queue.dispatch([order()])
    queue.settle([(fetched(queue), DeadLetter("declined", failure()))])
    monkeypatch.delenv(VARIABLE)
    listed = CliRunner().invoke(app, ["dlq", "list", server.name, "--error-type", "RuntimeError", "--payload"])
    assert listed.exit_code == DlqExit.OK, listed.output
    assert "order-1" in listed.output
    assert listed.output.count("[encrypted, key 2026-05]") == 2, listed.output
    shown = CliRunner().invoke(app, ["dlq", "show", server.name, "order-1", "--payload"])
    assert "[encrypted, key 2026-05]" in shown.output
    assert not any(secret in listed.output + shown.output for secret in SECRETS)
    edited = CliRunner().invoke(app, ["dlq", "edit", server.name, "order-1", "--set", "card=1", "--actor", "kim"])
    assert edited.exit_code == DlqExit.USAGE
    assert "'2026-05'" in edited.output
    assert VARIABLE in edited.output
    replayed = CliRunner().invoke(app, ["dlq", "replay", server.name, "--all"])
    assert replayed.exit_code == DlqExit.OK, replayed.output
    monkeypatch.setenv(VARIABLE, OLD)
    delivery = fetched(server.connect())
    assert (delivery.error, delivery.transaction.payload, delivery.deliveries) == (None, {"card": CARD}, 1)


def test_messages_from_before_are_accepted_until_encryption_is_required(server, monkeypatch):
    monkeypatch.delenv(VARIABLE)
    server.connect().dispatch([order(), order("order-2")])
    monkeypatch.setenv(VARIABLE, OLD)
    queue = server.connect()
    delivery = fetched(queue)
    assert (delivery.error, delivery.transaction.payload) == (None, {"card": CARD})
    queue.settle([(delivery, Ack())])
    queue.close()
    monkeypatch.setenv("ERGON_ENCRYPTION__REQUIRE", "true")
    delivery = fetched(server.connect())
    assert isinstance(delivery.error, UndecodableError)
    assert "not encrypted" in str(delivery.error)


def test_a_changed_body_is_an_undecodable_dead_letter(monkeypatch, database):
    monkeypatch.setenv(VARIABLE, OLD)
    queue = as_sync(connect("orders", database, {}))
    queue.open()
    queue.dispatch([order(f"order-{number}") for number in (1, 2, 3)])
    with psycopg.connect(database) as connection:
        connection.execute(
            "update ergon.ready set body = set_byte(body, 20, get_byte(body, 20) # 1) where transaction_id = 'order-1'"
        )
        # The body of another message, and another tenant.
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
    assert report.refused == {"undecodable": 3}
    records = queue.list_dead(DeadLetterQuery())
    assert [record.reason for record in records] == ["undecodable"] * 3
    assert all(record.headers[ENCRYPTION_KEY] == "2026-05" for record in records)
    queue.close()
