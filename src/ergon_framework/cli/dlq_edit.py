"""What ``ergon dlq edit`` does: correct the payload of one dead letter, and replay it under its own id."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from ergon_framework.audit import acting
from ergon_framework.cli.dlq_change import Change, Difference, differences, told
from ergon_framework.cli.dlq_exits import DlqExit
from ergon_framework.cli.dlq_view import clean
from ergon_framework.cli.dlq_work import LONGEST, SAME, with_connector
from ergon_framework.cli.summary import tell
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.deadletters import Became, DeadLetterQuery, DeadLetterRecord
from ergon_framework.connectors.encryption import missing_key
from ergon_framework.errors import ConfigurationError, text
from ergon_framework.runner.loading import load_anything
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.transaction import Transaction


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What is to be corrected, by whom, and how carefully."""

    id: str
    place: str | None
    change: Change
    actor: str
    reason: str
    #: Whose payload it must fit, besides that of the task that was named.
    task: str | None
    values: bool
    dry_run: bool
    as_json: bool


def edited(where: str, edit: Edit) -> DlqExit:
    """Correct and replay the dead letter that *edit* means."""
    return with_connector(where, lambda connector: _edit(connector, where, edit))


def _edit(connector: Connector, where: str, edit: Edit) -> DlqExit:
    refuse_a_log(connector)
    record = _chosen(connector, where, edit)
    if record is None:
        return DlqExit.FAILED
    key_id = missing_key(record)
    if key_id is not None:
        raise ConfigurationError(
            f"the dead letter is encrypted with the key {key_id!r} and cannot be read: add the key to "
            "ERGON_ENCRYPTION__KEYS; if it is there, the message was changed after it was encrypted"
        )
    payload = edit.change.made(record)
    found = [Difference("", "bytes", payload)] if record.raw is not None else list(differences(record.payload, payload))
    if not found:
        raise ConfigurationError("nothing was changed, so nothing was replayed; ergon dlq replay takes it as it is")
    by = edit.actor
    corrected = record.corrected(payload, by=by, at=time.time(), words=told(found, values=edit.values))
    for name in dict.fromkeys(name for name in (where, edit.task) if name is not None):
        _refuse_misfit(name, corrected)
    if edit.dry_run:
        _report(connector, edit, record, found, by=by, became="would be replayed")
        return DlqExit.OK
    with acting(by, reason=edit.reason):
        return _replayed(connector, edit, record, corrected, found, by=by)


def refuse_a_log(connector: Connector) -> None:
    """A record of a log is everybody's who reads it: another one beside it would be news for all of them."""
    can = connector.capabilities
    if can.mode == "log" or can.once_per_id:
        raise ConfigurationError(
            f"{connector.name!r} is a log: what is in it stays as it is, and a corrected record would reach all of its "
            "readers; have its producer send the correction, under an id of its own"
        )


def _chosen(connector: Connector, where: str, edit: Edit) -> DeadLetterRecord | None:
    records = connector.list_dead(DeadLetterQuery.load(id=edit.id), limit=SAME)
    if edit.place is not None:
        records = [record for record in records if record.place == edit.place]
    if not records:
        at = "" if edit.place is None else f" at {clean(edit.place, LONGEST)!r}"
        _say(
            f"{connector.name} has no dead letter of transaction {clean(edit.id, LONGEST)!r}{at}, or no longer; to see "
            f"those it has, run: ergon dlq list {where}"
        )
        return None
    if len(records) > 1:
        places = ", ".join(record.place for record in records)
        raise ConfigurationError(f"{len(records)} dead letters have this id; say which one with --place: {places}")
    return records[0]


def _refuse_misfit(name: str, corrected: Transaction) -> None:
    """A payload that the task would refuse is refused here, before anything has moved."""
    read: Any = getattr(load_anything(name), "read_payload", None)
    if read is None:
        return
    try:
        read(corrected)
    except TransactionException as error:
        raise ConfigurationError(f"{text(error)}; nothing was changed") from error


def _replayed(
    connector: Connector,
    edit: Edit,
    record: DeadLetterRecord,
    corrected: Transaction,
    found: Sequence[Difference],
    *,
    by: str,
) -> DlqExit:
    """Replace the dead letter with *corrected*; of two operators who do so at the same time one succeeds."""
    result = connector.replace_dead(record.place, corrected)
    if result.became is Became.REPLAYED:
        _report(connector, edit, record, found, by=by, became="replayed")
        return DlqExit.OK
    if result.became is Became.GONE:
        _say(
            "the dead letter was edited, replayed or discarded by another operator in the meantime; this correction "
            "was not sent"
        )
    else:
        _say(f"the correction was not sent: {clean(result.words, LONGEST)}; the dead letter is unchanged")
    return DlqExit.FAILED


def _report(
    connector: Connector, edit: Edit, record: DeadLetterRecord, found: Sequence[Difference], *, by: str, became: str
) -> None:
    changed = [each.told(values=edit.values) for each in found]
    if edit.as_json:
        line = {
            "queue": connector.name,
            "id": record.id,
            "place": record.place,
            "by": by,
            "changed": changed,
            "dry_run": edit.dry_run,
            "replayed": became == "replayed",
        }
        typer.echo(json.dumps(line))
        return
    rows = [("changed", clean(each, LONGEST)) for each in changed]
    tell(clean(record.id, LONGEST), [*rows, ("by", clean(by, LONGEST)), (connector.name, became)])


def _say(words: str) -> None:
    typer.echo(f"ergon: {words}", err=True)
