"""Lookup: what a connector knows about one transaction, as a history, for ``ergon why`` and similar reports.

A history has the events of a transaction, for example its failed attempts, and where it is now. The state QUEUED means
that the queue knows of the transaction and reports no more: whether it is ready, delayed or claimed is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord
from ergon_framework.failure import Attempt, Failure
from ergon_framework.history import (
    History,
    HistoryEvent,
    Location,
    Value,
    WorkKind,
    WorkState,
    attempt_events,
    deferral_events,
    sort_events,
)

#: Maximum number of dead letters of one id that a history reports.
MAX_DEAD_LETTERS = 100
_REPORTED_FIELDS = ("type", "tenant", "correlation", "causation", "key")


def lookup_transaction(connector: Connector, transaction_id: str) -> list[History]:
    """Return what every connector can report: its dead letters of that id, and whether it is in the queue."""
    histories = []
    if connector.capabilities.dead_letters:
        histories = [
            _to_history(record)
            for record in connector.list_dead(DeadLetterQuery.load(id=transaction_id), limit=MAX_DEAD_LETTERS)
        ]
    if transaction_id in (connector.find_queued([transaction_id]) or ()):
        location = Location(state=WorkState.QUEUED)
        histories.append(History(kind=WorkKind.TRANSACTION, id=transaction_id, where=connector.name, location=location))
    return histories


def lacks_search(connector: Connector) -> bool:
    """Return whether the connector cannot tell if an id is in the queue."""
    return connector.find_queued([]) is None


def envelope_fields(fields: Mapping[str, Any]) -> dict[str, Value]:
    """Return the fields of an envelope that are reported: never a payload."""
    return {name: fields[name] for name in _REPORTED_FIELDS if fields.get(name)}


def created_event(at: float | None) -> tuple[HistoryEvent, ...]:
    """Return the creation event, if the time of creation is known."""
    return () if at is None else (HistoryEvent(at=at, event="created"),)


def dead_letter_history(
    transaction_id: str,
    queue: str,
    *,
    handle: str,
    at: float,
    reason: str,
    deliveries: int,
    failure: Failure | None,
    envelope: Mapping[str, Any],
) -> History:
    """Return a dead letter with the attempts that led to it."""
    history: Sequence[Attempt] = envelope.get("history", ())
    fields = envelope_fields(envelope)
    message = reason
    if failure is not None:
        # The record includes the attempts of its last delivery; the message itself only those before.
        history = failure.history or history
        fields |= _failure_fields(failure)
        message = f"{reason} ({_describe_error(failure)})"
    last_event = HistoryEvent(
        at=at,
        event="dead letter",
        result="" if failure is None else failure.category.value,
        details=message,
        values={"deliveries": deliveries},
        traceback=None if failure is None else failure.traceback,
    )
    return History(
        kind=WorkKind.TRANSACTION,
        id=transaction_id,
        where=queue,
        attributes=fields,
        events=sort_events(
            (
                *created_event(envelope.get("created_at")),
                *attempt_events(history),
                *deferral_events(envelope.get("deferral")),
                *_handler_error_events(at, failure),
                last_event,
            )
        ),
        location=Location(state=WorkState.DEAD, since=at, handle=handle, details=reason),
    )


def _handler_error_events(at: float, failure: Failure | None) -> tuple[HistoryEvent, ...]:
    """Return the failure of the exception handler, if it failed too."""
    error = None if failure is None else failure.handler_error
    if error is None:
        return ()
    return (
        HistoryEvent(
            at=at,
            event="exception handler failed",
            result=error.category.value,
            details=error.error_message if error.code is None else f"{error.code}: {error.error_message}",
            traceback=error.traceback,
        ),
    )


def _failure_fields(failure: Failure) -> dict[str, Value]:
    fields: dict[str, Value | None] = {
        "task": failure.task_name,
        "step": failure.step,
        "attempts": failure.attempts,
        "trace": failure.trace_id,
    }
    if failure.provider_name is not None:
        fields |= {
            "provider": failure.provider_name,
            "capability": failure.capability,
            "operation": failure.operation,
            "idempotency key": failure.idempotency_key,
        }
    return {name: value for name, value in fields.items() if value is not None}


def _describe_error(failure: Failure) -> str:
    # Third-party errors have their type in their message.
    message = failure.error_message
    return message if message.startswith(failure.error_type) else f"{failure.error_type}: {message}"


def _to_history(record: DeadLetterRecord) -> History:
    return dead_letter_history(
        record.id,
        record.queue,
        handle=record.handle,
        at=record.at,
        reason=record.reason,
        deliveries=record.deliveries,
        failure=record.failure,
        envelope=dict(record.envelope),
    )
