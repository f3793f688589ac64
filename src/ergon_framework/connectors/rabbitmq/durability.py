"""Durability of this server's confirmations after a power loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class RabbitMQDurability(NamedTuple):
    """Whether confirmed messages survive a power loss, None for unknown, and a description of the finding."""

    durable: bool | None
    message: str


def assess_durability(server: Mapping[str, Any]) -> RabbitMQDurability:
    """Assess the properties that a server presents; the queues are quorum queues, or were rejected.

    >>> assess_durability({"product": "RabbitMQ", "version": "3.10.8"}).durable
    True
    >>> assess_durability({"product": "LavinMQ", "version": "2.0"}).durable is None
    True
    """
    product, version = (_to_text(server.get(name)) for name in ("product", "version"))
    if product != "RabbitMQ":
        return RabbitMQDurability(
            None, f"what a power loss costs is unknown: {product or 'the server'} is not RabbitMQ"
        )
    return RabbitMQDurability(
        durable=True,
        message=f"a power loss costs nothing that was confirmed: RabbitMQ {version} syncs its quorum queues' log "
        "first, unless somebody changed ra's write strategy, which no client can see",
    )


def _to_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
