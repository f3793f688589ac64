"""Durability: what a commit of this server is worth when the power fails or a standby is promoted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from psycopg.errors import InsufficientPrivilege

from ergon_framework.connectors.postgres import statements
from ergon_framework.schema.operation import Operation, Query


class Durability(NamedTuple):
    """Whether what was committed survives a power loss, and in words what was found."""

    durable: bool
    words: str
    #: Whether standbys are known; None where only the address has several hosts.
    has_standbys: bool | None = False
    #: What the promotion of a standby can cost, in words; empty if it costs nothing or no standby is known.
    promotion: str = ""

    @property
    def summary(self) -> str:
        return f"{self.words}; {self.promotion}" if self.promotion else self.words


def read_durability(hosts: int) -> Operation[Durability]:
    """Read what a commit is worth; *hosts* is the number of servers in the address."""
    settings: dict[str, str] = dict((yield Query(statements.SETTINGS)))
    try:
        ((standbys,),) = yield Query(statements.STANDBYS)
    except InsufficientPrivilege:
        standbys = 0
    has_standbys = True if standbys else None if hosts > 1 else False
    promotion = "" if has_standbys is False else judge_promotion(settings)
    return judged(settings)._replace(has_standbys=has_standbys, promotion=promotion)


def judge_promotion(settings: Mapping[str, str]) -> str:
    """Return what the promotion of a standby can cost under *settings*; empty if it costs nothing.

    >>> judge_promotion({"synchronous_commit": "on", "synchronous_standby_names": "FIRST 1 (a, b)"})
    ''
    >>> judge_promotion({"synchronous_commit": "on", "synchronous_standby_names": ""})
    'the promotion of a standby can cost confirmed work: no standby is synchronous (synchronous_standby_names is empty)'
    """
    cost = "the promotion of a standby can cost confirmed work"
    if not settings.get("synchronous_standby_names", "").strip():
        return f"{cost}: no standby is synchronous (synchronous_standby_names is empty)"
    if settings.get("synchronous_commit") in ("off", "local"):
        return f"{cost}: commits do not wait for it (synchronous_commit is {settings['synchronous_commit']})"
    return ""


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
