"""Durability: what a confirmation of this server is worth when the power fails."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

#: The first release that can be told to sync each write.
_CAN_SYNC: Final = (2, 10)


class Durability(NamedTuple):
    """Whether what was confirmed survives, None for unknown, and in words what was found."""

    durable: bool | None
    words: str


def judged(*, version: tuple[int, int], storage: str, monitored: dict[str, Any] | None) -> Durability:
    """What the stream's storage and the server's settings mean; *monitored* is what /varz says of JetStream.

    >>> judged(version=(2, 15), storage="file", monitored={"sync_always": True}).durable
    True
    >>> judged(version=(2, 15), storage="file", monitored=None).durable is None
    True
    """
    if storage != "file":
        return Durability(durable=False, words=f"a restart costs everything: the stream is kept in {storage}")
    if version < _CAN_SYNC:
        return Durability(
            durable=False, words="a power loss may cost the last two minutes: this server cannot sync each write"
        )
    if monitored is None:
        return Durability(
            durable=None,
            words="what a power loss may cost is unknown: give monitor=, the server's monitoring address, to look at "
            "its sync_interval",
        )
    if monitored.get("sync_always"):
        return Durability(durable=True, words="a power loss costs nothing that was confirmed")
    seconds = int(monitored.get("sync_interval") or 120_000_000_000) / 1_000_000_000
    return Durability(durable=False, words=f"a power loss may cost the last {seconds:g} s: sync_interval is not always")
