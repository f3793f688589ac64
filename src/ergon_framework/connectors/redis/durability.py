"""Durability of a confirmed write after a power loss, as the server's settings give it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ergon_framework.errors import ConfigurationError

#: The server settings that decide whether confirmed writes are durable, and whether queues may be evicted.
DURABILITY_SETTINGS: Final = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")


class RedisDurability(NamedTuple):
    """Whether confirmed data survives a power loss, None if that is unknown, with the finding as text."""

    durable: bool | None
    message: str


#: For a server whose settings cannot be read.
UNKNOWN_DURABILITY: Final = RedisDurability(
    None, "durability is unknown: the server does not allow CONFIG GET; appendfsync must be always"
)


def assess_durability(settings: Mapping[str, str]) -> RedisDurability:
    """Assess the durability that *settings* give.

    >>> assess_durability({"appendonly": "yes", "appendfsync": "always"}).durable
    True
    >>> assess_durability({"appendonly": "yes", "appendfsync": "everysec"}).durable
    False
    >>> assess_durability({"appendonly": "no", "appendfsync": "always"}).durable
    False
    >>> assess_durability({}).durable
    """
    if not settings.get("appendonly") or not settings.get("appendfsync"):
        return UNKNOWN_DURABILITY
    if settings["appendonly"] != "yes":
        return RedisDurability(
            durable=False,
            message="after a power loss or a crash all data since the last snapshot may be lost: appendonly is not yes",
        )
    fsync_policy = settings["appendfsync"]
    if fsync_policy == "everysec":
        return RedisDurability(
            durable=False,
            message="after a power loss the last two seconds of confirmed data may be lost: appendfsync is everysec, "
            "not always",
        )
    if fsync_policy != "always":
        return RedisDurability(
            durable=False,
            message=f"after a power loss data still in the kernel may be lost: appendfsync is {fsync_policy}, "
            "not always",
        )
    return RedisDurability(durable=True, message="confirmed data survives a power loss")


def reject_evicting_server(settings: Mapping[str, str]) -> None:
    """Reject a server that evicts keys when its memory is full: a queue is a key, and has no copy.

    >>> reject_evicting_server({"maxmemory": "0", "maxmemory-policy": "allkeys-lru"})
    >>> reject_evicting_server({"maxmemory": "100", "maxmemory-policy": "volatile-lru"})
    """
    policy = settings.get("maxmemory-policy", "")
    # A volatile policy evicts only keys with a time to live, and no key of a queue has one.
    if settings.get("maxmemory", "0") != "0" and policy.startswith("allkeys"):
        raise ConfigurationError(
            f"the server evicts any key when its memory is full (maxmemory-policy is {policy}), and a queue is a "
            "key: set maxmemory-policy to noeviction, or use a dedicated server for the queue"
        )
