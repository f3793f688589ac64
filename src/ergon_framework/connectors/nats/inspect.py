"""Diagnostics of a server and of a queue in it, and the durability of its confirmations; all checks only read.

Durability says whether a confirmed message survives a power loss of the server. A diagnostic with ``shared=False`` is
about one queue; the others are about the server, and are reported once for all queues there.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.connection import Connection
from ergon_framework.connectors.nats.streams import StreamConfig, StreamStorage, inspect_streams
from ergon_framework.diagnostics import (
    Diagnostic,
    Severity,
    WallClock,
    check_clock_skew,
    check_durability,
    check_version,
)
from ergon_framework.errors import ConfigurationError, ConnectionLostError, error_message

#: The first release that can sync each write.
_MIN_SYNC_VERSION: Final = (2, 10)
#: The server's default.
_DEFAULT_SYNC_INTERVAL_NS: Final = 120_000_000_000


class NatsDurability(NamedTuple):
    """Whether confirmed messages survive a power loss, None for unknown, and a description of the finding."""

    durable: bool | None
    message: str


def assess_durability(
    *, version: tuple[int, int], storage: StreamStorage, monitored: dict[str, Any] | None
) -> NatsDurability:
    """Assess the stream's storage and the server's settings; *monitored* is the JetStream part of /varz.

    >>> assess_durability(version=(2, 15), storage=StreamStorage(), monitored={"sync_always": True}).durable
    True
    >>> assess_durability(version=(2, 15), storage=StreamStorage(), monitored=None).durable is None
    True
    """
    if storage.kind != "file":
        return NatsDurability(
            durable=False, message=f"a restart loses all messages: the stream is stored in {storage.kind}"
        )
    if storage.confirms_early:
        return NatsDurability(
            durable=False,
            message="a crash of the server loses its last confirmed messages: persist_mode of the stream is async",
        )
    if version < _MIN_SYNC_VERSION:
        return NatsDurability(
            durable=False, message="after a power loss the last 2 min may be lost: this server cannot sync each write"
        )
    if monitored is None:
        return NatsDurability(
            durable=None,
            message="durability after a power loss is unknown: pass monitor=, the server's monitoring address, to read "
            "its sync_interval",
        )
    if monitored.get("sync_always"):
        return NatsDurability(durable=True, message="after a power loss no confirmed message is lost")
    seconds = int(monitored.get("sync_interval") or _DEFAULT_SYNC_INTERVAL_NS) / 1_000_000_000
    return NatsDurability(
        durable=False, message=f"after a power loss the last {seconds:g} s may be lost: sync_interval is not 'always'"
    )


#: The oldest server release that is tested.
_MIN_VERSION: Final = (2, 9)
#: The field in a response with the time of its creation; older servers do not send it.
_TIMESTAMP_FIELD: Final = "ts"


async def diagnose(
    connection: Connection,
    layout: StreamConfig,
    name: str,
    *,
    limit: int,
    monitored: dict[str, Any] | None,
    wall: WallClock,
) -> list[Diagnostic]:
    """Return diagnostics of the server and of the queue called *name*.

    *layout* is the configuration that the queue's streams must have. *monitored* is the JetStream part of /varz, the
    server's monitoring page; None if it was not read. *limit* is the bytes that one fetch of the queue may load.
    """
    major, minor = connection.version
    findings = [
        Diagnostic("connection", Severity.OK, "connected to NATS"),
        check_version(f"{major}.{minor}", server="NATS", number=connection.version, minimum=_MIN_VERSION),
    ]
    try:
        await api.call(connection, "INFO")
    except (ConnectionLostError, api.ApiError) as error:
        observation = f"JetStream does not answer: {error_message(error)}"
        remedy = "start the server with -js, or enable JetStream for this account and allow $JS.API.> and _INBOX.>"
        return [*findings, Diagnostic("jetstream", Severity.ERROR, observation, remedy)]
    findings += await _check_clock(connection, layout, wall)
    storage: StreamStorage | None = None
    try:
        storage = await inspect_streams(connection, layout)
    except (ConfigurationError, ConnectorError) as error:
        # The messages of these errors consist of a problem and a remedy.
        problem, _, remedy = error_message(error).partition("; ")
        findings.append(
            Diagnostic("topology", Severity.ERROR, problem, remedy or "inspect it with nats stream info", shared=False)
        )
    else:
        status = "exists as configured" if storage is not None else "does not exist yet; it is created on first use"
        findings.append(Diagnostic("topology", Severity.OK, f"the stream of {name!r} {status}", shared=False))
    # A stream that does not exist yet is created with file storage.
    durability = assess_durability(version=connection.version, storage=storage or StreamStorage(), monitored=monitored)
    remedy = "set sync_interval: always in the server's jetstream block, and pass monitor= to the queue to check it"
    findings.append(check_durability(durability.message, durable=durability.durable, remedy=remedy))
    return findings + _check_payload_limit(connection.max_payload, limit)


def _check_payload_limit(max_payload: int, limit: int) -> list[Diagnostic]:
    """Warn about a server limit above the fetch limit: a worker receives every message whole, whatever its size."""
    if max_payload <= limit:
        return []
    observation = (
        f"max_payload of the server is {max_payload} bytes: one message can be over the {limit} bytes of a fetch"
    )
    remedy = "lower max_payload well below the memory of a worker, or raise max_fetch_bytes of the queue"
    return [Diagnostic("payload", Severity.WARNING, observation, remedy, shared=False)]


async def _check_clock(connection: Connection, layout: StreamConfig, wall: WallClock) -> list[Diagnostic]:
    """Compare the server's clock, if the server reports it."""
    before = wall()
    try:
        info = await api.call(connection, f"STREAM.INFO.{layout.names.work}")
    except api.ApiError:
        return []  # for example, the stream does not exist yet
    timestamp = info.get(_TIMESTAMP_FIELD)
    return (
        []
        if timestamp is None
        else [check_clock_skew(api.parse_timestamp(str(timestamp)), before, wall(), server="NATS")]
    )
