"""Diagnose a server and a queue in it.

Nothing permanent is changed: a temporary exclusive queue shows the permissions, and a queue that exists is declared
again with the arguments that Ergon needs, which the server only compares. A finding with ``shared=False`` is about the
queue, one without it about the server that several queues share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.rabbitmq import topology
from ergon_framework.connectors.rabbitmq.connection import ChannelClosedError, Connection, assess_durability
from ergon_framework.connectors.rabbitmq.topology import TopologyDeclarer
from ergon_framework.diagnostics import Diagnostic, Severity, check_durability, check_version
from ergon_framework.errors import ConfigurationError, error_message

#: The first release whose queues forward dead letters at least once.
_MIN_VERSION: Final = (3, 10)


async def diagnose(
    connection: Connection, name: str, *, dead_days: float | None, declare: bool, deadline: float
) -> list[Diagnostic]:
    """Return diagnostics of the server and of the queue called *name*.

    *dead_days* and *declare* are the options of its ``RabbitMQQueue``, and *deadline* its ``consumer_timeout``.
    """
    # Opening a channel connects, which reads the properties of the server.
    channel = await connection.channel()
    channel.close()
    product, version = (_to_text(connection.server.get(key)) for key in ("product", "version"))
    findings = [Diagnostic("connection", Severity.OK, f"connected to {product or 'the server'}")]
    if product == "RabbitMQ":
        findings.append(check_version(version, server=product, number=_parse_version(version), minimum=_MIN_VERSION))
    durability = assess_durability(connection.server)
    remedy = "use RabbitMQ, or check that server's documentation on durability"
    findings.append(check_durability(durability.message, durable=durability.durable, remedy=remedy))
    try:
        await _probe(connection, f"{name}.doctor")
    except (ConfigurationError, ConnectorError) as error:
        observed, _, remedy = error_message(error).partition("; ")  # messages state the problem, then the remedy
        return [
            *findings,
            Diagnostic("permissions", Severity.ERROR, observed, remedy or "check the server's log", shared=False),
        ]
    findings.append(
        Diagnostic("permissions", Severity.OK, f"the user may declare the queues of {name!r}", shared=False)
    )
    findings += [
        await _check_queue(connection, name, each, dead_days=dead_days, declare=declare)
        for each in (topology.dead_letter_queue(name), name)
    ]
    observed = (
        f"a claim ends after {deadline:g} s, the consumer_timeout= of this queue; the server does not report its own "
        "consumer_timeout, which must not be shorter"
    )
    findings.append(Diagnostic("deadline", Severity.OK, observed, shared=False))
    return findings


async def _probe(connection: Connection, name: str) -> None:
    """Declare and delete an exclusive queue. Permissions are patterns of names, so its name begins like the others."""
    channel = await connection.channel()
    try:
        async with connection.timeout(f"declare the queue {name!r}"):
            await channel.request(
                lambda callback: channel.raw.queue_declare(name, exclusive=True, auto_delete=True, callback=callback)
            )
            await channel.request(lambda callback: channel.raw.queue_delete(name, callback=callback))
    except ChannelClosedError as error:
        raise topology.declare_error(name.removesuffix(".doctor"), str(error)) from error
    finally:
        channel.close()


async def _check_queue(
    connection: Connection, name: str, queue: str, *, dead_days: float | None, declare: bool
) -> Diagnostic:
    """Return whether *queue* exists with the required arguments; a missing queue is not declared."""
    channel = await connection.channel()
    try:
        async with connection.timeout(f"look for the queue {queue!r}"):
            await channel.request(lambda callback: channel.raw.queue_declare(queue, passive=True, callback=callback))
    except ChannelClosedError:
        return Diagnostic(
            "topology",
            Severity.OK,
            f"queue {queue!r} does not exist yet; it is created on first use",
            "",
            shared=False,
        )
    finally:
        channel.close()
    declarer = TopologyDeclarer(name, connection, dead_days=dead_days, declare=declare)
    try:
        await declarer.ensure_queue(queue)
    except (ConfigurationError, ConnectorError) as error:
        observed, _, remedy = error_message(error).partition("; ")
        return Diagnostic("topology", Severity.ERROR, observed, remedy or "check the server's log", shared=False)
    finally:
        declarer.close()
    return Diagnostic("topology", Severity.OK, f"queue {queue!r} exists with the required arguments", shared=False)


def _parse_version(version: str) -> Sequence[int]:
    return [int(part) if part.isdigit() else 0 for part in version.split(".")]


def _to_text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
