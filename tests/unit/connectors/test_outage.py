"""An outage is logged once when it begins and once when it ends, whatever else was under way."""

from __future__ import annotations

import logging
import os
import time
import uuid

import pytest

from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.outage import outage_log
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.connectors.redis import RedisQueue
from ergon_framework.errors import ConnectionLostError
from tests.log_events import list_events

LOST = ConnectionLostError("the server at amqp://someone:open-sesame@host is gone")


@pytest.fixture
def outage(caplog):
    caplog.set_level(logging.INFO)
    return outage_log(f"orders-{uuid.uuid4().hex}", "amqp://host:5672")


@pytest.mark.spec("DX-12")
def test_two_users_of_a_queue_log_one_outage(outage, caplog):
    for _ in range(3):
        outage.note_failure(LOST, began=time.monotonic())
    for _ in range(3):
        outage.note_answer(began=time.monotonic())
    lost, restored = caplog.records
    assert list_events(caplog.records) == ["connection lost", "connection restored"]
    assert (lost.levelno, lost.address, lost.error_type) == (logging.WARNING, "amqp://host:5672", "ConnectionLostError")
    assert (restored.levelno, restored.queue) == (logging.INFO, lost.queue)
    assert 0 <= restored.seconds < 60
    assert "open-sesame" not in caplog.text + str(vars(lost))


@pytest.mark.spec("DX-12")
def test_the_result_of_a_call_from_before_a_state_change_is_ignored(outage, caplog):
    before = time.monotonic()
    outage.note_answer(began=before)
    outage.note_failure(LOST, began=time.monotonic())
    outage.note_answer(began=before)
    assert list_events(caplog.records) == ["connection lost"]
    during = time.monotonic()
    outage.note_answer(began=time.monotonic())
    outage.note_failure(LOST, began=during)
    assert list_events(caplog.records) == ["connection lost", "connection restored"]
    outage.note_failure(LOST, began=time.monotonic())
    assert list_events(caplog.records) == ["connection lost", "connection restored", "connection lost"]


def test_a_queue_has_one_outage_log_and_a_forked_child_another(outage):
    name = uuid.uuid4().hex
    log = outage_log(name, None)
    assert outage_log(name, None) is log
    assert outage_log(name, "amqp://host") is not log
    child = os.fork()
    if child == 0:
        os._exit(0 if outage_log(name, None) is not log else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.spec("DX-12")
@pytest.mark.parametrize(
    "queue, address",
    [
        (RabbitMQQueue("q", url="amqp://someone:open-sesame@host:5673/shop?heartbeat=9"), "amqp://host:5673/shop"),
        (RabbitMQQueue("q", url="amqp://someone:12/open-sesame@host"), "amqp://someone:12"),
        (RabbitMQQueue("q", url="amqp://host:open-sesame"), None),
        (RabbitMQQueue("q", url="amqp://someone:12,open-sesame/more@host"), None),
        (RedisQueue("q", url="rediss://:open-sesame@host/2"), "rediss://host/2"),
        (RedisQueue("q", url="redis://[::1]:6380"), "redis://[::1]:6380"),
        (
            RedisQueue("q", url="redis+sentinel://:open-sesame@one,two:7/shop/1?sentinel_password=open-sesame"),
            "redis+sentinel://one,two:7/shop/1",
        ),
        (RedisQueue("q", url="unix:///run/redis.sock?password=open-sesame"), "unix:///run/redis.sock"),
        (NatsQueue("q", url="nats://open-sesame@one:4222, two:4223"), "nats://one:4222,nats://two:4223"),
        (NatsQueue("q", url="tls://someone:open-sesame@one:4222,two"), "tls://one:4222,tls://two"),
        (NatsQueue("q", url="someone:open-sesame@one:4222"), "nats://one:4222"),
        (PostgresQueue("q", dsn="postgresql://a:open-sesame@host/shop?sslmode=require"), "postgresql://host/shop"),
        (
            PostgresQueue("q", dsn="host=one,two port=5433 dbname=shop password=open-sesame"),
            "postgresql://one:5433,two:5433/shop",
        ),
        (PostgresQueue("q", dsn="host=/run/pg dbname=shop"), "postgresql:///run/pg/shop"),
        (PostgresQueue("q", dsn="hostaddr=10.0.0.1 port=5433"), "postgresql://10.0.0.1:5433/"),
        (PostgresQueue("q", dsn="what is this"), None),
        (RedisQueue("q", url=None), None),
        (PostgresQueue("q", dsn=None), None),
    ],
)
def test_an_address_is_shown_without_credentials_and_options(monkeypatch, queue, address):
    for name in ("RABBITMQ__URL", "REDIS__URL", "NATS__URL", "POSTGRES__DSN"):
        monkeypatch.delenv(f"ERGON_{name}", raising=False)
    assert queue.server_address == address
    assert "open-sesame" not in str(queue.server_address)
