"""Work of ``ergon dlq edit``: correct the payload of one dead letter, and replay it under its own id."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer

from ergon_framework.audit import act_as
from ergon_framework.cli.dlq_change import Difference, PayloadEdit, differences, format_differences
from ergon_framework.cli.dlq_exits import DlqExit
from ergon_framework.cli.dlq_view import sanitize
from ergon_framework.cli.dlq_work import MAX_LETTERS_PER_ID, MAX_MESSAGE_CHARS, with_connector
from ergon_framework.cli.summary import print_rows
from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord, DeadLetterResult
from ergon_framework.connectors.encryption import find_missing_key
from ergon_framework.errors import ConfigurationError, error_message
from ergon_framework.runner.loading import load_target
from ergon_framework.task.exceptions import TransactionException
from ergon_framework.transaction import Transaction


@dataclass(frozen=True, kw_only=True)
class EditRequest:
    """A correction of one dead letter: the new payload, the operator, and the safety options."""

    id: str
    handle: str | None
    payload_edit: PayloadEdit
    actor: str
    reason: str
    #: Task whose payload type must match too, besides the task named as the target.
    task: str | None
    show_values: bool
    dry_run: bool
    as_json: bool


def edit_dead_letter(target: str, request: EditRequest) -> DlqExit:
    """Correct and replay the dead letter that *request* selects."""
    return with_connector(target, lambda connector: _edit_record(connector, target, request))


def _edit_record(connector: Connector, target: str, request: EditRequest) -> DlqExit:
    reject_log_connector(connector)
    record = _select_record(connector, target, request)
    if record is None:
        return DlqExit.FAILED
    key_id = find_missing_key(record)
    if key_id is not None:
        raise ConfigurationError(
            f"the dead letter is encrypted with the key {key_id!r} and cannot be read: add the key to "
            "ERGON_ENCRYPTION__KEYS; if it is there, the message was changed after it was encrypted"
        )
    payload = request.payload_edit.apply(record)
    changes = (
        [Difference("", "bytes", payload)] if record.raw is not None else list(differences(record.payload, payload))
    )
    if not changes:
        raise ConfigurationError("nothing was changed, so nothing was replayed; ergon dlq replay takes it as it is")
    actor = request.actor
    corrected = record.with_payload(
        payload, by=actor, at=time.time(), summary=format_differences(changes, values=request.show_values)
    )
    for name in dict.fromkeys(name for name in (target, request.task) if name is not None):
        _reject_mismatch(name, corrected)
    if request.dry_run:
        _report(connector, request, record, changes, actor=actor, outcome="would be replayed")
        return DlqExit.OK
    with act_as(actor, reason=request.reason):
        return _replace_record(connector, request, record, corrected, changes, actor=actor)


def reject_log_connector(connector: Connector) -> None:
    """Reject log connectors: all readers share a log's records, so a corrected record would reach all of them."""
    capabilities = connector.capabilities
    if capabilities.mode == "log" or capabilities.deduplicates_ids:
        raise ConfigurationError(
            f"{connector.name!r} is a log: what is in it stays as it is, and a corrected record would reach all of its "
            "readers; have its producer send the correction, under an id of its own"
        )


def _select_record(connector: Connector, target: str, request: EditRequest) -> DeadLetterRecord | None:
    records = connector.list_dead(DeadLetterQuery.load(id=request.id), limit=MAX_LETTERS_PER_ID)
    if request.handle is not None:
        records = [record for record in records if record.handle == request.handle]
    if not records:
        handle_text = "" if request.handle is None else f" at {sanitize(request.handle, MAX_MESSAGE_CHARS)!r}"
        _print_stderr(
            f"{connector.name} has no dead letter of transaction "
            f"{sanitize(request.id, MAX_MESSAGE_CHARS)!r}{handle_text}, or no longer; to see those it "
            f"has, run: ergon dlq list {target}"
        )
        return None
    if len(records) > 1:
        handles = ", ".join(record.handle for record in records)
        raise ConfigurationError(f"{len(records)} dead letters have this id; say which one with --place: {handles}")
    return records[0]


def _reject_mismatch(name: str, corrected: Transaction) -> None:
    """Reject a payload that the task would reject, before anything is moved."""
    read_payload: Any = getattr(load_target(name), "read_payload", None)
    if read_payload is None:
        return
    try:
        read_payload(corrected)
    except TransactionException as error:
        raise ConfigurationError(f"{error_message(error)}; nothing was changed") from error


def _replace_record(
    connector: Connector,
    request: EditRequest,
    record: DeadLetterRecord,
    corrected: Transaction,
    changes: Sequence[Difference],
    *,
    actor: str,
) -> DlqExit:
    """Replace the dead letter with *corrected*; of two concurrent operators one succeeds."""
    result = connector.replace_dead(record.handle, corrected)
    if result.outcome is DeadLetterResult.REPLAYED:
        _report(connector, request, record, changes, actor=actor, outcome="replayed")
        return DlqExit.OK
    if result.outcome is DeadLetterResult.GONE:
        _print_stderr(
            "the dead letter was edited, replayed or discarded by another operator in the meantime; this correction "
            "was not sent"
        )
    else:
        _print_stderr(
            f"the correction was not sent: {sanitize(result.message, MAX_MESSAGE_CHARS)}; the dead letter is unchanged"
        )
    return DlqExit.FAILED


def _report(
    connector: Connector,
    request: EditRequest,
    record: DeadLetterRecord,
    changes: Sequence[Difference],
    *,
    actor: str,
    outcome: str,
) -> None:
    descriptions = [each.format(values=request.show_values) for each in changes]
    if request.as_json:
        payload = {
            "queue": connector.name,
            "id": record.id,
            "place": record.handle,
            "by": actor,
            "changed": descriptions,
            "dry_run": request.dry_run,
            "replayed": outcome == "replayed",
        }
        typer.echo(json.dumps(payload))
        return
    rows = [("changed", sanitize(each, MAX_MESSAGE_CHARS)) for each in descriptions]
    print_rows(
        sanitize(record.id, MAX_MESSAGE_CHARS),
        [*rows, ("by", sanitize(actor, MAX_MESSAGE_CHARS)), (connector.name, outcome)],
    )


def _print_stderr(message: str) -> None:
    typer.echo(f"ergon: {message}", err=True)
