"""Durability of a confirmed commit of this server, after a power loss or the promotion of a standby."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from psycopg.errors import InsufficientPrivilege

from ergon_framework.connectors.postgres import statements
from ergon_framework.schema.operation import Operation, Query


class PostgresDurability(NamedTuple):
    """Whether committed data survives a power loss, with the finding as text."""

    durable: bool
    message: str
    #: Whether standbys are known; None where only the address has several hosts.
    has_standbys: bool | None = False
    #: What the promotion of a standby can lose, as text; empty if it loses nothing or no standby is known.
    promotion: str = ""

    @property
    def summary(self) -> str:
        return f"{self.message}; {self.promotion}" if self.promotion else self.message


def read_durability(hosts: int) -> Operation[PostgresDurability]:
    """Read the durability of a commit; *hosts* is the number of servers in the address."""
    settings: dict[str, str] = dict((yield Query(statements.SELECT_SETTINGS)))
    try:
        ((standbys,),) = yield Query(statements.COUNT_STANDBYS)
    except InsufficientPrivilege:
        standbys = 0
    has_standbys = True if standbys else None if hosts > 1 else False
    promotion = "" if has_standbys is False else assess_promotion(settings)
    return assess_durability(settings)._replace(has_standbys=has_standbys, promotion=promotion)


def assess_promotion(settings: Mapping[str, str]) -> str:
    """Return what the promotion of a standby can lose under *settings*; empty if it loses nothing.

    >>> assess_promotion({"synchronous_commit": "on", "synchronous_standby_names": "FIRST 1 (a, b)"})
    ''
    >>> assess_promotion({"synchronous_commit": "on", "synchronous_standby_names": ""}).partition(": ")[2]
    'no standby is synchronous (synchronous_standby_names is empty)'
    """
    loss = "the promotion of a standby can cost confirmed work"
    if not settings.get("synchronous_standby_names", "").strip():
        return f"{loss}: no standby is synchronous (synchronous_standby_names is empty)"
    if settings.get("synchronous_commit") in ("off", "local"):
        return f"{loss}: commits do not wait for it (synchronous_commit is {settings['synchronous_commit']})"
    return ""


def assess_durability(settings: Mapping[str, str]) -> PostgresDurability:
    """Assess the durability that *settings* give.

    >>> assess_durability({"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on"}).durable
    True
    >>> assess_durability({"fsync": "on", "synchronous_commit": "off", "full_page_writes": "on"}).durable
    False
    """
    if settings.get("fsync") != "on":
        return PostgresDurability(durable=False, message="a power loss may cost the whole database: fsync is off")
    if settings.get("full_page_writes") != "on":
        return PostgresDurability(
            durable=False, message="a power loss may tear pages of the database: full_page_writes is off"
        )
    if settings.get("synchronous_commit") == "off":
        return PostgresDurability(
            durable=False, message="a power loss may cost the last commits: synchronous_commit is off"
        )
    return PostgresDurability(durable=True, message="a power loss costs nothing that was confirmed")
