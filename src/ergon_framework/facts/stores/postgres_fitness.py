"""Check whether a database has the required schema and keeps committed data."""

from __future__ import annotations

import logging

from ergon_framework.connectors.postgres.durability import PostgresDurability, assess_durability
from ergon_framework.connectors.postgres.statements import SELECT_REVISION, SELECT_SETTINGS
from ergon_framework.errors import ConfigurationError
from ergon_framework.schema.operation import Operation, Query
from ergon_framework.schema.revisions import is_compatible
from ergon_framework.telemetry import logs

_log = logging.getLogger(__name__)


def check_database(
    data_name: str, *, required: str, accept_loss: bool, known: PostgresDurability | None = None
) -> Operation[PostgresDurability]:
    """Return the durability of a commit; raise if the schema is outdated or if *data_name* could be lost.

    The durability is logged, unless it equals *known*.
    """
    rows = yield Query(SELECT_REVISION)
    revision = rows[0][0] if rows else None
    if not is_compatible(revision, required):
        raise ConfigurationError(
            f"the database is at revision {revision or 'none'}, {data_name} need {required}; run: ergon db upgrade"
        )
    durability = assess_durability(dict((yield Query(SELECT_SETTINGS))))
    if durability != known:
        level = logging.INFO if durability.durable else logging.WARNING
        logs.log_event(
            level, "postgres durability", {"durable": durability.durable, "words": durability.message}, to=_log
        )
    if not durability.durable and not accept_loss:
        raise ConfigurationError(
            f"this database is no place for {data_name}: {durability.message}; set it on, or say accept_loss=True if "
            f"confirmed {data_name} may be lost"
        )
    return durability
