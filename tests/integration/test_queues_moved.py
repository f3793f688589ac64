"""Check that one changed line of ergon.toml moves a handler to another broker, on real servers, in both variants."""

from __future__ import annotations

import asyncio
import importlib
import shutil
import sys
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest

from ergon_framework import Transaction
from ergon_framework.connectors.dead_letters import DeadLetterQuery
from ergon_framework.runner import queues
from ergon_framework.worker.report import OutcomeKind
from tests.servers.nats import PrivateNats
from tests.servers.redis import PrivateRedis

HANDLER_MODULE = """
from ergon_framework import BusinessError, ConsumerPolicy, consumer, queue
from ergon_framework.scope import current

orders = queue("{name}")
seen = []
policy = ConsumerPolicy.load({{"steps": {{"process": {{"retry": {{"max_attempts": 2, "backoff": 0.01}}}}}}}})


@consumer(orders, policy=policy)
{flavour} charge(order, transaction):
    seen.append((transaction.id, current().attempt))
    if order["card"] == "slow" and current().attempt == 0:
        raise ConnectionError("the bank did not answer")
    if order["card"] == "empty":
        raise BusinessError("card declined", code="declined")
"""
ATTEMPTS_BY_CARD = {"good": [0], "slow": [0, 1], "empty": [0]}


@pytest.fixture(scope="module")
def nats_url():
    yield from _run_server(PrivateNats)


@pytest.fixture(scope="module")
def redis_url():
    yield from _run_server(PrivateRedis)


def _run_server(server_class):
    folder = Path(tempfile.mkdtemp(prefix="ergon-moved-"))
    server = server_class(folder)
    try:
        server.start()
        yield server.url
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["def", "async def"])
def import_handler(tmp_path, monkeypatch, request):
    """Yield a function that imports the module again, as a new process would; the settings say where its queue is."""
    name = f"shop_{uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(HANDLER_MODULE.format(flavour=request.param, name=name), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(queues, "_chosen", [])

    def import_again(setting):
        (tmp_path / "ergon.toml").write_text(f"[queues.{name}]\n{setting}\n", encoding="utf-8")
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    yield import_again
    sys.modules.pop(name, None)


def _run_orders(module):
    """Run three orders; return the attempts of each, the dead letters with their reasons, and the success count."""
    module.orders.dispatch([Transaction({"card": card}, id=card) for card in ATTEMPTS_BY_CARD])
    report = module.charge.run()
    if asyncio.iscoroutine(report):
        report = asyncio.run(report)
    attempts = {card: [attempt for name, attempt in module.seen if name == card] for card in ATTEMPTS_BY_CARD}
    dead = [(letter.id, letter.reason) for letter in module.orders.list_dead(DeadLetterQuery())]
    module.orders.discard_dead([letter.handle for letter in module.orders.list_dead(DeadLetterQuery())])
    module.orders.close()
    return attempts, dead, report.counts[OutcomeKind.SUCCEEDED]


@pytest.fixture
def addresses(database, nats_url, redis_url):
    return {
        "MemoryConnector": f"memory://{uuid4().hex}",
        "PostgresQueue": database,
        "NatsQueue": nats_url,
        "RedisQueue": redis_url,
    }


@pytest.mark.spec("CNN-01", "CNN-08")
def test_a_handler_behaves_the_same_on_every_broker_and_moves_by_one_line(
    import_handler, addresses, rabbitmq, monkeypatch
):
    for connector_class, url in addresses.items():
        module = import_handler(f'url = "{url}"')
        assert _run_orders(module) == (ATTEMPTS_BY_CARD, [("empty", "declined")], 2), connector_class
        assert type(module.orders.connector).__name__ == connector_class
    # This broker's address has a password, which the file would reject, so the environment holds the line.
    module = import_handler("")
    monkeypatch.setenv(f"ERGON_QUEUES__{module.orders.name.upper()}__URL", rabbitmq)
    assert _run_orders(module) == (ATTEMPTS_BY_CARD, [("empty", "declined")], 2)
    assert type(module.orders.connector).__name__ == "RabbitMQQueue"
