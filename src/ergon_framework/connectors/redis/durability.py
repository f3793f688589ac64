"""Durability: what an answer of this server is worth when the power fails, read from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ergon_framework.errors import ConfigurationError

#: What is asked for.
SETTINGS: Final = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")


class Durability(NamedTuple):
    """Whether what was confirmed survives, None where nobody can say, and in words what was found."""

    durable: bool | None
    words: str


#: A server that does not let its settings be read.
HIDDEN: Final = Durability(
    None, "what a power loss costs is unknown: the server does not let CONFIG GET be used; appendfsync must be always"
)


def judged(settings: Mapping[str, str]) -> Durability:
    """What *settings* mean.

    >>> judged({"appendonly": "yes", "appendfsync": "always"}).durable
    True
    >>> judged({"appendonly": "yes", "appendfsync": "everysec"}).words
    'a power loss may cost what was confirmed in the last two seconds: appendfsync is everysec, not always'
    >>> judged({"appendonly": "no", "appendfsync": "always"}).durable
    False
    >>> judged({}).durable
    """
    if not settings.get("appendonly") or not settings.get("appendfsync"):
        return HIDDEN
    if settings["appendonly"] != "yes":
        return Durability(
            durable=False,
            words="a power loss or a crash of the server may cost all since its last snapshot: appendonly is not yes",
        )
    how = settings["appendfsync"]
    if how == "everysec":
        return Durability(
            durable=False,
            words="a power loss may cost what was confirmed in the last two seconds: appendfsync is everysec, "
            "not always",
        )
    if how != "always":
        return Durability(
            durable=False,
            words=f"a power loss may cost whatever the kernel had not written yet: appendfsync is {how}, not always",
        )
    return Durability(durable=True, words="a power loss costs nothing that was confirmed")


def refuse_eviction(settings: Mapping[str, str]) -> None:
    """Refuse a server that throws keys away when its memory is full: a queue is a key, and has no copy.

    >>> refuse_eviction({"maxmemory": "0", "maxmemory-policy": "allkeys-lru"})
    >>> refuse_eviction({"maxmemory": "100", "maxmemory-policy": "volatile-lru"})
    """
    policy = settings.get("maxmemory-policy", "")
    # Keys with a time to live are no concern of ours: none of a queue's has one.
    if settings.get("maxmemory", "0") != "0" and policy.startswith("allkeys"):
        raise ConfigurationError(
            f"the server throws any key away when its memory is full (maxmemory-policy is {policy}), and a queue is a "
            "key: set maxmemory-policy to noeviction, or give the queue a server of its own"
        )
