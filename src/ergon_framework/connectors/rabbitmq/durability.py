"""Durability: what a confirmation of this server is worth when the power fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Durability(NamedTuple):
    """Whether what was confirmed survives, None where nobody knows; and in words what was found."""

    durable: bool | None
    words: str


def judged(server: Mapping[str, Any]) -> Durability:
    """What the properties mean that a server presents itself with; the queues are quorum queues, or were refused.

    >>> judged({"product": "RabbitMQ", "version": "3.10.8"}).durable
    True
    >>> judged({"product": "LavinMQ", "version": "2.0"}).durable is None
    True
    """
    product, version = (_text(server.get(name)) for name in ("product", "version"))
    if product != "RabbitMQ":
        return Durability(None, f"what a power loss costs is unknown: {product or 'the server'} is not RabbitMQ")
    return Durability(
        durable=True,
        words=f"a power loss costs nothing that was confirmed: RabbitMQ {version} syncs its quorum queues' log first, "
        "unless somebody changed ra's write strategy, which no client can see",
    )


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
