"""Tracing: what a connector knows of one transaction, as a history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ergon_framework.connectors.base import Connector
from ergon_framework.connectors.deadletters import DeadLetterQuery, DeadLetterRecord
from ergon_framework.failure import Attempt, Failure
from ergon_framework.history import Event, History, Kind, Place, State, Value, deferral_events, in_order, tried

#: The most of one id that are told of.
MOST = 100
_TOLD = ("type", "tenant", "correlation", "causation", "key")


def traced(connector: Connector, transaction_id: str) -> list[History]:
    """What any connector can say: its dead letters of that id, and whether it is in the queue."""
    found = []
    if connector.capabilities.dead_letters:
        found = [_buried(record) for record in connector.list_dead(DeadLetterQuery.load(id=transaction_id), limit=MOST)]
    if transaction_id in (connector.queued([transaction_id]) or ()):
        place = Place(state=State.QUEUED)
        found.append(History(kind=Kind.TRANSACTION, id=transaction_id, where=connector.name, place=place))
    return found


def unsearchable(connector: Connector) -> bool:
    """Whether it cannot say of an id that it is in the queue."""
    return connector.queued([]) is None


def about(fields: Mapping[str, Any]) -> dict[str, Value]:
    """What of an envelope is told: never a payload."""
    return {name: fields[name] for name in _TOLD if fields.get(name)}


def created(at: float | None) -> tuple[Event, ...]:
    """The beginning, if somebody has written it down."""
    return () if at is None else (Event(at=at, what="created"),)


def dead(
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
    """A dead letter with the attempts that led to it."""
    history: Sequence[Attempt] = envelope.get("history", ())
    told = about(envelope)
    words = reason
    if failure is not None:
        # The record has the attempts of its last delivery too; the message itself only those before.
        history = failure.history or history
        told |= _rules(failure)
        words = f"{reason} ({_error(failure)})"
    end = Event(
        at=at,
        what="dead letter",
        verdict="" if failure is None else failure.category.value,
        words=words,
        values={"deliveries": deliveries},
        traceback=None if failure is None else failure.traceback,
    )
    return History(
        kind=Kind.TRANSACTION,
        id=transaction_id,
        where=queue,
        about=told,
        events=in_order(
            (
                *created(envelope.get("created_at")),
                *tried(history),
                *deferral_events(envelope.get("deferral")),
                *_handler_error_events(at, failure),
                end,
            )
        ),
        place=Place(state=State.DEAD, since=at, handle=handle, words=reason),
    )


def _handler_error_events(at: float, failure: Failure | None) -> tuple[Event, ...]:
    """The failure of the exception handler, if it failed too."""
    error = None if failure is None else failure.handler_error
    if error is None:
        return ()
    return (
        Event(
            at=at,
            what="exception handler failed",
            verdict=error.category.value,
            words=error.error_message if error.code is None else f"{error.code}: {error.error_message}",
            traceback=error.traceback,
        ),
    )


def _rules(failure: Failure) -> dict[str, Value]:
    told: dict[str, Value | None] = {
        "task": failure.task_name,
        "step": failure.step,
        "attempts": failure.attempts,
        "trace": failure.trace_id,
    }
    if failure.provider_name is not None:
        told |= {
            "provider": failure.provider_name,
            "capability": failure.capability,
            "operation": failure.operation,
            "idempotency key": failure.idempotency_key,
        }
    return {name: value for name, value in told.items() if value is not None}


def _error(failure: Failure) -> str:
    # Errors that are none of ours say their type in their message.
    message = failure.error_message
    return message if message.startswith(failure.error_type) else f"{failure.error_type}: {message}"


def _buried(record: DeadLetterRecord) -> History:
    return dead(
        record.id,
        record.queue,
        handle=record.place,
        at=record.at,
        reason=record.reason,
        deliveries=record.deliveries,
        failure=record.failure,
        envelope=dict(record.envelope),
    )
