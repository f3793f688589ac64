"""Examining: how a server and a queue in it are, told as findings; it is only read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.declaring import Declarer
from ergon_framework.connectors.rabbitmq.durability import judged
from ergon_framework.connectors.rabbitmq.line import Connection, Refused
from ergon_framework.errors import ConfigurationError, text
from ergon_framework.finding import Finding, Weight, of_durability, of_version

#: The first release whose queues hand dead letters on at least once.
_OLDEST: Final = (3, 10)


async def examined(connection: Connection, name: str, *, dead_days: float | None, deadline: float) -> list[Finding]:
    """How the server is, and the queue called *name* in it."""
    channel = await connection.channel()
    channel.close()
    product, version = (_text(connection.server.get(key)) for key in ("product", "version"))
    found = [Finding("connection", Weight.FINE, f"connected to {product or 'the server'}")]
    if product == "RabbitMQ":
        found.append(of_version(version, server=product, number=_number(version), needed=_OLDEST))
    durability = judged(connection.server)
    do = "use RabbitMQ, or see what that server's documentation says of power losses"
    found.append(of_durability(durability.words, durable=durability.durable, do=do))
    try:
        await _probe(connection, f"{name}.doctor")
    except (ConfigurationError, ConnectorError) as error:
        words, _, do = text(error).partition("; ")
        return [*found, Finding("permissions", Weight.BROKEN, words, do or "look into the server's log", shared=False)]
    found.append(Finding("permissions", Weight.FINE, f"the user may make the queues of {name!r}", shared=False))
    found += [await _queue(connection, name, each, dead_days=dead_days) for each in (topology.dead(name), name)]
    words = f"a claim ends after {deadline:g} s, consumer_timeout= of this queue; the server does not tell its own"
    found.append(Finding("deadline", Weight.FINE, words, shared=False))
    return found


async def _probe(connection: Connection, name: str) -> None:
    """Make a queue that is gone with this channel's connection: its name begins as those that are needed do."""
    channel = await connection.channel()
    try:
        async with connection.answering(f"declare the queue {name!r}"):
            await channel.ask(
                lambda told: channel.raw.queue_declare(name, exclusive=True, auto_delete=True, callback=told)
            )
            await channel.ask(lambda told: channel.raw.queue_delete(name, callback=told))
    except Refused as error:
        raise topology.refusal(name.removesuffix(".doctor"), str(error)) from error
    finally:
        channel.close()


async def _queue(connection: Connection, name: str, queue: str, *, dead_days: float | None) -> Finding:
    """Whether *queue* is there as it must be; one that is not there is not made."""
    channel = await connection.channel()
    try:
        async with connection.answering(f"look for the queue {queue!r}"):
            await channel.ask(lambda told: channel.raw.queue_declare(queue, passive=True, callback=told))
    except Refused:
        return Finding(
            "topology", Weight.FINE, f"the queue {queue!r} is not there yet; its first user makes it", "", shared=False
        )
    finally:
        channel.close()
    declarer = Declarer(name, connection, dead_days=dead_days)
    try:
        await declarer.needed(queue)
    except (ConfigurationError, ConnectorError) as error:
        words, _, do = text(error).partition("; ")
        return Finding("topology", Weight.BROKEN, words, do or "look into the server's log", shared=False)
    finally:
        declarer.close()
    return Finding("topology", Weight.FINE, f"the queue {queue!r} is there as it must be", shared=False)


def _number(version: str) -> Sequence[int]:
    return [int(part) if part.isdigit() else 0 for part in version.split(".")]


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
