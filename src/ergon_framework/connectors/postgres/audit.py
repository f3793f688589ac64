"""Audit rows in the database, written in the transaction of the action or on their own.

An audit row records who did what to which queue, task, job or provider, and why: for example a replay or a pause.
Rows are inserted and listed, and never changed. An action on another broker has two rows: the intent before it, and the
outcome, which names the intent, after it. An entry (``audit.create_entry``) is a row before it is written; it is None
for an action that is part of another one with a row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Final

from ergon_framework.audit import AuditEntry
from ergon_framework.connectors.audit import log_entry
from ergon_framework.connectors.base import ConnectorError
from ergon_framework.database.operation import Operation, Query
from ergon_framework.database.pool import ConnectionPool

#: Timeout of a write or a list.
_TIMEOUT_SECONDS: Final = 10.0

#: The database may have no tables yet.
_TABLE_EXISTS: Final = "select to_regclass('ergon.audit') is not null"
_INSERT_ENTRY: Final = """
insert into ergon.audit (actor, action, name, targets, selection, reason, count, outcome, error, origin, intent)
values (
    %(actor)s, %(action)s, %(name)s, %(targets)s::text[], %(selection)s::jsonb, %(reason)s, %(count)s::bigint,
    %(outcome)s, %(error)s, %(origin)s, %(intent)s::bigint
) returning id
"""
#: An intent and its outcome are one row; the audit tables of providers and of fact readers are included.
_SELECT_ROWS: Final = """
select extract(epoch from a.at)::float8, a.actor, a.action, a.name, a.targets, a.selection, a.reason, a.count,
    a.outcome, a.error, a.origin
from (
    select i.at, i.actor, i.action, i.name, coalesce(r.targets, i.targets) as targets, i.selection, i.reason,
        coalesce(r.count, i.count) as count, coalesce(r.outcome, i.outcome) as outcome, r.error, i.origin
    from ergon.audit i left join ergon.audit r on r.intent = i.id where i.intent is null
    union all
    select o.at, o.actor, 'provider.' || o.action, o.provider_name || '/' || o.capability, array[o.tenant_id],
        jsonb_strip_nulls(jsonb_build_object('until', o.until, 'calls', o.calls)), o.reason, 1, 'done', null, ''
    from ergon.provider_overrides o
    union all
    select f.at, f.actor, 'facts.retire', f.from_zone || '/' || f.to_zone, array[f.reader], '{}', '', 1, 'done', null,
        ''
    from ergon.fact_reader_audit f
) as a
where (%(action)s::text is null or a.action = %(action)s) and (%(name)s::text is null or a.name = %(name)s)
    and (%(actor)s::text is null or a.actor = %(actor)s)
    and (%(since)s::float8 is null or a.at >= to_timestamp(%(since)s::float8))
order by a.at desc limit %(limit)s
"""


@dataclass(frozen=True, slots=True)
class AuditRow:
    """A recorded action; *at* is in seconds since the epoch, *origin* is the host and process of the operator.

    Without an outcome, its result is unknown.
    """

    at: float
    actor: str
    action: str
    name: str
    targets: tuple[str, ...]
    selection: dict[str, Any]
    reason: str
    count: int | None
    outcome: str | None
    error: str | None
    origin: str


_FIELDS: Final = tuple(each.name for each in fields(AuditRow))


def write_entry(entry: AuditEntry | None) -> Operation[None]:
    """Insert *entry*, unless it is None, in the open database transaction; log it where the schema has no table."""
    if entry is not None and (yield from _insert_entry(entry, intent=None)) is None:
        log_entry(entry, problem="its schema has no table for it; run: ergon db upgrade")


def write_row(dsn: str, entry: AuditEntry, *, intent: int | None) -> int | None:
    """Insert *entry* into the database *dsn* now; return the row's id, None where the schema has no table for it."""
    pool = ConnectionPool(dsn, max_size=1, error_type=ConnectorError)
    try:
        return pool.run(_insert_entry(entry, intent=intent), timeout_seconds=_TIMEOUT_SECONDS)
    finally:
        pool.close()


def list_rows(
    dsn: str,
    *,
    action: str | None = None,
    name: str | None = None,
    actor: str | None = None,
    since: float | None = None,
    limit: int = 100,
) -> list[AuditRow]:
    """Return the recorded actions of operators, the newest first."""
    pool = ConnectionPool(dsn, max_size=1, error_type=ConnectorError)
    filters = {"action": action, "name": name, "actor": actor, "since": since, "limit": limit}
    try:
        return pool.run(_select_rows(filters), timeout_seconds=_TIMEOUT_SECONDS)
    finally:
        pool.close()


def _select_rows(filters: dict[str, Any]) -> Operation[list[AuditRow]]:
    ((has_table,),) = yield Query(_TABLE_EXISTS)
    if not has_table:
        raise ConnectorError("the database has no table of audit rows; run: ergon db upgrade")
    rows = yield Query(_SELECT_ROWS, filters)
    records = [dict(zip(_FIELDS, row, strict=True)) for row in rows]
    return [AuditRow(**each | {"targets": tuple(each["targets"])}) for each in records]


def _insert_entry(entry: AuditEntry, *, intent: int | None) -> Operation[int | None]:
    ((has_table,),) = yield Query(_TABLE_EXISTS)
    if not has_table:
        return None
    parameters = {
        "actor": _sanitize(entry.actor),
        "action": entry.action,
        "name": _sanitize(entry.name),
        "targets": [_sanitize(target) for target in entry.targets],
        "selection": json.dumps(entry.selection, default=str).replace("\\u0000", "\\ufffd"),
        "reason": _sanitize(entry.reason),
        "count": entry.count,
        "outcome": entry.outcome,
        "error": None if entry.error is None else _sanitize(entry.error),
        "origin": _sanitize(entry.origin),
        "intent": intent,
    }
    ((row_id,),) = yield Query(_INSERT_ENTRY, parameters)
    return int(row_id)


def _sanitize(text: str) -> str:
    """Replace what a text column cannot hold: NULs and lone surrogates."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()
