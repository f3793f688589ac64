"""Durability: what a commit of this server is worth when the power fails, read from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Durability(NamedTuple):
    """Whether what was committed survives, and in words what was found."""

    durable: bool
    words: str


def judged(settings: Mapping[str, str]) -> Durability:
    """What *settings* mean.

    >>> judged({"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}).durable
    True
    >>> judged({"fsync": "on", "synchronous_commit": "off", "full_page_writes": "on"}).words
    'a power loss may cost the last commits: synchronous_commit is off'
    """
    if settings.get("fsync") != "on":
        return Durability(durable=False, words="a power loss may cost the whole database: fsync is off")
    if settings.get("full_page_writes") != "on":
        return Durability(durable=False, words="a power loss may tear pages of the database: full_page_writes is off")
    if settings.get("synchronous_commit") == "off":
        return Durability(durable=False, words="a power loss may cost the last commits: synchronous_commit is off")
    return Durability(durable=True, words="a power loss costs nothing that was confirmed")
