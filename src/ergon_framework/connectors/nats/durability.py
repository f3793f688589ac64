"""Durability of this server's confirmations after a power loss."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

#: The first release that can sync each write.
_MIN_SYNC_VERSION: Final = (2, 10)


class NatsDurability(NamedTuple):
    """Whether confirmed messages survive a power loss, None for unknown, and a description of the finding."""

    durable: bool | None
    message: str


def assess_durability(*, version: tuple[int, int], storage: str, monitored: dict[str, Any] | None) -> NatsDurability:
    """Assess the stream's storage and the server's settings; *monitored* is the JetStream part of /varz.

    >>> assess_durability(version=(2, 15), storage="file", monitored={"sync_always": True}).durable
    True
    >>> assess_durability(version=(2, 15), storage="file", monitored=None).durable is None
    True
    """
    if storage != "file":
        return NatsDurability(durable=False, message=f"a restart costs everything: the stream is kept in {storage}")
    if version < _MIN_SYNC_VERSION:
        return NatsDurability(
            durable=False, message="a power loss may cost the last two minutes: this server cannot sync each write"
        )
    if monitored is None:
        return NatsDurability(
            durable=None,
            message="what a power loss may cost is unknown: give monitor=, the server's monitoring address, to look at "
            "its sync_interval",
        )
    if monitored.get("sync_always"):
        return NatsDurability(durable=True, message="a power loss costs nothing that was confirmed")
    seconds = int(monitored.get("sync_interval") or 120_000_000_000) / 1_000_000_000
    return NatsDurability(
        durable=False, message=f"a power loss may cost the last {seconds:g} s: sync_interval is not always"
    )
