"""Examining: how a server and a queue in it are, told as findings; it is only read."""

from __future__ import annotations

from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError
from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.durability import judged
from ergon_framework.connectors.nats.layout import Layout, looked_at
from ergon_framework.connectors.nats.line import Line
from ergon_framework.errors import ConfigurationError, ConnectionLost, text
from ergon_framework.finding import Finding, Wall, Weight, of_clocks, of_durability, of_version

#: The oldest release of the server that tests run with, and the first that can sync each write.
_OLDEST: Final = (2, 9)
#: Servers say in an answer when it was written; older ones do not.
_WRITTEN: Final = "ts"


async def examined(
    line: Line, layout: Layout, name: str, *, limit: int, monitored: dict[str, Any] | None, wall: Wall
) -> list[Finding]:
    """How the server is, and the queue called *name* in it; *monitored* is what /varz says of JetStream.

    *limit* is the bytes that one fetch of the queue may load.
    """
    major, minor = line.version
    found = [
        Finding("connection", Weight.FINE, "connected to NATS"),
        of_version(f"{major}.{minor}", server="NATS", number=line.version, needed=_OLDEST),
    ]
    try:
        await api.call(line, "INFO")
    except (ConnectionLost, api.ApiError) as error:
        seen = f"JetStream does not answer: {text(error)}"
        do = "start the server with -js, or give this account JetStream and the rights to $JS.API.> and _INBOX.>"
        return [*found, Finding("jetstream", Weight.BROKEN, seen, do)]
    found += await _clock(line, layout, wall)
    storage: str | None = None
    try:
        storage = await looked_at(line, layout)
    except (ConfigurationError, ConnectorError) as error:
        words, _, do = text(error).partition("; ")
        found.append(Finding("topology", Weight.BROKEN, words, do or "look at it with nats stream info", shared=False))
    else:
        there = "is there as it must be" if storage is not None else "is not there yet; its first user makes it"
        found.append(Finding("topology", Weight.FINE, f"the stream of {name!r} {there}", shared=False))
    durability = judged(version=line.version, storage=storage or "file", monitored=monitored)
    do = "set sync_interval: always in the server's jetstream block, and give the queue monitor= to see it"
    found.append(of_durability(durability.words, durable=durability.durable, do=do))
    return found + _payload(line.max_payload, limit)


def _payload(most: int, limit: int) -> list[Finding]:
    """A server that takes more than one fetch may load: a worker receives every message whole, of whatever size."""
    if most <= limit:
        return []
    seen = f"max_payload of the server is {most} bytes: one message can be over the {limit} bytes of a fetch"
    do = "lower max_payload well below the memory of a worker, or raise max_fetch_bytes of the queue"
    return [Finding("payload", Weight.WARNING, seen, do, shared=False)]


async def _clock(line: Line, layout: Layout, wall: Wall) -> list[Finding]:
    """What the server says of the time, where it says it."""
    before = wall()
    try:
        told = await api.call(line, f"STREAM.INFO.{layout.names.work}")
    except api.ApiError:
        return []
    written = told.get(_WRITTEN)
    return [] if written is None else [of_clocks(api.moment(str(written)), before, wall(), server="NATS")]
