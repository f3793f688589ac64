"""Durability of a confirmed write of this server after a power loss, read from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ergon_framework.errors import ConfigurationError

#: The settings that are read.
DURABILITY_SETTINGS: Final = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")


class RedisDurability(NamedTuple):
    """Whether confirmed data survives a power loss, None if that is unknown, with the finding as text."""

    durable: bool | None
    message: str


#: For a server whose settings cannot be read.
UNKNOWN_DURABILITY: Final = RedisDurability(
    None, "what a power loss costs is unknown: the server does not let CONFIG GET be used; appendfsync must be always"
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
            message="a power loss or a crash of the server may cost all since its last snapshot: appendonly is not yes",
        )
    fsync_policy = settings["appendfsync"]
    if fsync_policy == "everysec":
        return RedisDurability(
            durable=False,
            message="a power loss may cost what was confirmed in the last two seconds: appendfsync is everysec, "
            "not always",
        )
    if fsync_policy != "always":
        return RedisDurability(
            durable=False,
            message=f"a power loss may cost whatever the kernel had not written yet: appendfsync is "
            f"{fsync_policy}, not always",
        )
    return RedisDurability(durable=True, message="a power loss costs nothing that was confirmed")


def reject_evicting_server(settings: Mapping[str, str]) -> None:
    """Reject a server that evicts keys when its memory is full: a queue is a key, and has no copy.

    >>> reject_evicting_server({"maxmemory": "0", "maxmemory-policy": "allkeys-lru"})
    >>> reject_evicting_server({"maxmemory": "100", "maxmemory-policy": "volatile-lru"})
    """
    policy = settings.get("maxmemory-policy", "")
    # A volatile policy evicts only keys with a time to live, and no key of a queue has one.
    if settings.get("maxmemory", "0") != "0" and policy.startswith("allkeys"):
        raise ConfigurationError(
            f"the server throws any key away when its memory is full (maxmemory-policy is {policy}), and a queue is a "
            "key: set maxmemory-policy to noeviction, or give the queue a server of its own"
        )
