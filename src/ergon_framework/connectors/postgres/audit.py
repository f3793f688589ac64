"""Audit rows in the database: written in the transaction of the action, or on their own; listed, and never changed."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Final

from ergon_framework.audit import AuditEntry
from ergon_framework.connectors.audit import log_entry
from ergon_framework.connectors.base import ConnectorError
from ergon_framework.schema.lines import Lines
from ergon_framework.schema.operation import Operation, Query

#: Seconds that a row or a list may take.
_WITHIN: Final = 10.0

#: A database of an earlier release has none.
_THERE: Final = "select to_regclass('ergon.audit') is not null"
_WRITE: Final = """
insert into ergon.audit (actor, action, name, targets, selection, reason, count, outcome, error, origin, intent)
values (
    %(actor)s, %(action)s, %(name)s, %(targets)s::text[], %(selection)s::jsonb, %(reason)s, %(count)s::bigint,
    %(outcome)s, %(error)s, %(origin)s, %(intent)s::bigint
) returning id
"""
#: An intent and its outcome are one line; the tables that say the same of providers and of readers of facts join in.
_LIST: Final = """
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
    select f.at, f.by_whom, 'facts.retire', f.from_zone || '/' || f.to_zone, array[f.reader], '{}', '', 1, 'done', null,
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
    """An action as it was recorded; *at* is in seconds since the epoch. Without an outcome, its end is not known."""

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


def note(entry: AuditEntry | None) -> Operation[None]:
    """Write *entry* in the database transaction that is open; to the log where the schema has no table for it."""
    if entry is not None and (yield from _write(entry, intent=None)) is None:
        log_entry(entry, problem="its schema has no table for it; run: ergon db upgrade")


def write_row(dsn: str, entry: AuditEntry, *, intent: int | None) -> int | None:
    """Write *entry* to the database *dsn* now; its number, None where the schema has no table for it."""
    lines = Lines(dsn, most=1, other=ConnectorError)
    try:
        return lines.run(_write(entry, intent=intent), within=_WITHIN)
    finally:
        lines.close()


def list_rows(
    dsn: str,
    *,
    action: str | None = None,
    name: str | None = None,
    actor: str | None = None,
    since: float | None = None,
    limit: int = 100,
) -> list[AuditRow]:
    """Return what operators have done, the newest first."""
    lines = Lines(dsn, most=1, other=ConnectorError)
    filters = {"action": action, "name": name, "actor": actor, "since": since, "limit": limit}
    try:
        return lines.run(_select_rows(filters), within=_WITHIN)
    finally:
        lines.close()


def _select_rows(filters: dict[str, Any]) -> Operation[list[AuditRow]]:
    ((there,),) = yield Query(_THERE)
    if not there:
        raise ConnectorError("the database has no table of audit rows; run: ergon db upgrade")
    rows = yield Query(_LIST, filters)
    named = [dict(zip(_FIELDS, row, strict=True)) for row in rows]
    return [AuditRow(**each | {"targets": tuple(each["targets"])}) for each in named]


def _write(entry: AuditEntry, *, intent: int | None) -> Operation[int | None]:
    ((there,),) = yield Query(_THERE)
    if not there:
        return None
    parameters = {
        "actor": _storable(entry.actor),
        "action": entry.action,
        "name": _storable(entry.name),
        "targets": [_storable(target) for target in entry.targets],
        "selection": json.dumps(entry.selection, default=str).replace("\\u0000", "\\ufffd"),
        "reason": _storable(entry.reason),
        "count": entry.count,
        "outcome": entry.outcome,
        "error": None if entry.error is None else _storable(entry.error),
        "origin": _storable(entry.origin),
        "intent": intent,
    }
    ((number,),) = yield Query(_WRITE, parameters)
    return int(number)


def _storable(text: str) -> str:
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()
