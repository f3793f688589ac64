"""The table of broker differences equals the capabilities of the connectors."""

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


def read_table() -> dict[str, dict[str, str]]:
    """Return the table of the guide, by connector and capability."""
    first = GUIDE.read_text(encoding="utf-8").partition("| | ")[2].partition("\n\n")[0]
    lines = f"| | {first}".splitlines()
    rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
    headings, body = rows[0][1:], [row for row in rows[1:] if not row[0].startswith("---")]
    return {head: {row[0]: row[number] for row in body} for number, head in enumerate(headings, start=1)}


def format_value(name: str, value: Any) -> str:
    if value is None:
        return "not known before it is opened" if name in {"durable", "priority"} else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


@pytest.mark.spec("CNN-01")
def test_every_connector_to_a_broker_has_a_column():
    assert read_table().keys() == CONNECTORS.keys()


@pytest.mark.spec("CNN-01")
@pytest.mark.parametrize("name", CONNECTORS)
def test_the_guide_says_what_the_connector_can_do(name):
    capabilities = CONNECTORS[name]().capabilities
    assert read_table()[name] == {
        field.name: format_value(field.name, getattr(capabilities, field.name)) for field in fields(Capabilities)
    }
