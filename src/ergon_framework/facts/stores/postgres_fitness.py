"""Fitness: whether a database may be trusted with what is to be kept in it."""

from __future__ import annotations

import logging

from ergon_framework.connectors.postgres.durability import Durability, judged
from ergon_framework.connectors.postgres.statements import REVISION, SETTINGS
from ergon_framework.errors import ConfigurationError
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.schema.revisions import suffices
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)


def examined(things: str, *, needed: str, accept_loss: bool, known: Durability | None = None) -> Operation[Durability]:
    """What a commit is worth there, for *things*; refused where their tables are missing or they could be lost.

    It is said in the log, unless it is what was *known*.
    """
    found = yield Query(REVISION)
    revision = found[0][0] if found else None
    if not suffices(revision, needed):
        raise ConfigurationError(
            f"the database is at revision {revision or 'none'}, {things} need {needed}; run: ergon db upgrade"
        )
    durability = judged(dict((yield Query(SETTINGS))))
    if durability != known:
        level = logging.INFO if durability.durable else logging.WARNING
        logs.say(level, "postgres durability", {"durable": durability.durable, "words": durability.words}, to=_log)
    if not durability.durable and not accept_loss:
        raise ConfigurationError(
            f"this database is no place for {things}: {durability.words}; set it on, or say accept_loss=True if "
            f"confirmed {things} may be lost"
        )
    return durability
