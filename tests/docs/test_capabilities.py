"""The table of what differs between brokers says what the connectors say of themselves."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from ergon_framework import Capabilities, MemoryConnector
from ergon_framework.connectors.nats import NatsQueue
from ergon_framework.connectors.postgres import PostgresQueue
from ergon_framework.connectors.rabbitmq import RabbitMQQueue
from ergon_framework.connectors.redis import RedisQueue

GUIDE = Path(__file__).parents[2] / "docs/guides/choose-a-broker.md"
CONNECTORS = {
    "MemoryConnector": lambda: MemoryConnector("orders"),
    "PostgresQueue": lambda: PostgresQueue("orders", dsn="postgresql://localhost/nowhere"),
    "RabbitMQQueue": lambda: RabbitMQQueue("orders", url="amqp://localhost"),
    "NatsQueue": lambda: NatsQueue("orders", url="nats://localhost"),
    "RedisQueue": lambda: RedisQueue("orders", url="redis://localhost"),
}


def table() -> dict[str, dict[str, str]]:
    """What the guide says, by connector and capability."""
    first = GUIDE.read_text(encoding="utf-8").partition("| | ")[2].partition("\n\n")[0]
    lines = f"| | {first}".splitlines()
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    heads, body = rows[0][1:], [row for row in rows[1:] if not row[0].startswith("---")]
    return {head: {row[0]: row[number] for row in body} for number, head in enumerate(heads, start=1)}


def told(name: str, value: Any) -> str:
    if value is None:
        return "not known before it is opened" if name == "durable" else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.spec("CNN-01")
def test_every_connector_to_a_broker_has_a_column():
    assert table().keys() == CONNECTORS.keys()


@pytest.mark.spec("CNN-01")
@pytest.mark.parametrize("name", CONNECTORS)
def test_the_guide_says_what_the_connector_can_do(name):
    found = CONNECTORS[name]().capabilities
    assert table()[name] == {field.name: told(field.name, getattr(found, field.name)) for field in fields(Capabilities)}
