"""The dead letters of a queue, as messages of a separate stream.

A dead letter is the original message, byte for byte, with one additional header that records the reason.

Requests to delete pass ``no_erase`` unless ``connection.loses_deletes`` is set, which is so for servers before 2.10:
killed, these restore messages that were deleted without being erased. Erasing overwrites the message and costs more.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery, MissingKeyError
from ergon_framework.connectors.codec import PROGRESS_HEADERS, Codec, decode
from ergon_framework.connectors.dead_letters import (
    DeadLetterQuery,
    DeadLetterRecord,
    DeadLetterResult,
    ReplayResult,
    parse_handle,
)
from ergon_framework.connectors.encryption import (
    get_codec_keys,
    hide_errors,
    hide_failure,
    reveal_errors,
    reveal_failure,
)
from ergon_framework.connectors.nats import api
from ergon_framework.connectors.nats.claims import NatsClaim
from ergon_framework.connectors.nats.connection import Connection, Request
from ergon_framework.connectors.nats.fast_client import RawMessage
from ergon_framework.connectors.nats.publish import check_size
from ergon_framework.connectors.nats.streams import StreamNames
from ergon_framework.errors import ConnectionLostError
from ergon_framework.telemetry import logs
from ergon_framework.transaction import Transaction

_log = logging.getLogger(__name__)

_RECORD_HEADER: Final = "Ergon-Dead"
_EXPECTED_SEQUENCE_HEADER: Final = "Nats-Expected-Last-Subject-Sequence"
_LAST_SEQUENCE: Final = re.compile(r"wrong last sequence: ([0-9]+)")
#: The header names that the client accepts.
_MATCH_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch
#: Headers that a replay removes, so that attempts and history are reset.
_RESET_HEADERS: Final = frozenset(PROGRESS_HEADERS)
_NOT_FOUND_CODES: Final = frozenset({api.NO_MESSAGE, api.NO_SUCH_SEQUENCE})
#: Fields left out of the record's header, because the message itself carries them.
_EXCLUDED_FIELDS: Final = {"payload", "raw", "headers", "handle"}
#: The key in the record's header of the encrypted error texts of its envelope.
_ERRORS_KEY: Final = "errors"


def dead_letter_request(
    names: StreamNames, queue: str, delivery: Delivery, claim: NatsClaim, settlement: DeadLetter, *, codec: Codec
) -> Request:
    """Return the request that dead-letters a message; sent twice, it stores one dead letter."""
    transaction = delivery.transaction
    history, deferral, errors = hide_errors(
        get_codec_keys(codec), transaction, transaction.history, transaction.deferral
    )
    if isinstance(delivery.error, MissingKeyError):
        # Its error texts need the same key, so they are copied as they are.
        history, deferral, errors = transaction.history, transaction.deferral, delivery.error.errors
    hidden_delivery = replace(delivery, transaction=transaction.replace(history=history, deferral=deferral))
    dead_letter = replace(settlement, failure=hide_failure(get_codec_keys(codec), settlement.failure))
    record = DeadLetterRecord.from_delivery(hidden_delivery, dead_letter, queue=queue, at=time.time())
    fields = record.model_dump(mode="json", exclude=_EXCLUDED_FIELDS) | {"readable": claim.readable}
    if errors is not None:
        fields[_ERRORS_KEY] = errors
    headers = {
        **strip_server_headers(claim.headers),
        _RECORD_HEADER: json.dumps(fields),
        # The server stores it only if its subject, which is unique to the message, has no message yet.
        _EXPECTED_SEQUENCE_HEADER: "0",
    }
    return Request(f"{names.dead_subject}.{claim.key}", claim.body, headers)


def existing_dead_letter(error: api.ApiError) -> int:
    """Return the number of an earlier dead letter of the same message that caused *error*; 0 if none did.

    >>> existing_dead_letter(api.ApiError("wrong last sequence: 17", number=api.WRONG_LAST_SEQUENCE))
    17
    """
    match = _LAST_SEQUENCE.search(str(error)) if error.number == api.WRONG_LAST_SEQUENCE else None
    return int(match[1]) if match else 0


def without_dedup(request: Request | None) -> Request | None:
    """Return *request* without its check for an earlier dead letter of the same message.

    For a worker that must store its own copy: the earlier one is deleted again if its worker has lost its claim.
    """
    if request is None:
        return None
    headers = {name: text for name, text in (request.headers or {}).items() if name != _EXPECTED_SEQUENCE_HEADER}
    return request._replace(headers=headers)


def truncate_to_limit(request: Request, max_bytes: int) -> Request | None:
    """Shorten the record of *request* to the server's limit; return None if that does not suffice."""
    if request.size <= max_bytes or request.headers is None:
        return request if request.size <= max_bytes else None
    record = json.loads(request.headers.get(_RECORD_HEADER, "{}"))
    if not record:
        return None
    for shorten in (_drop_tracebacks, _drop_history, _drop_failure):
        shorten(record)
        shorter = request._replace(headers={**request.headers, _RECORD_HEADER: json.dumps(record)})
        if shorter.size <= max_bytes:
            return shorter
    return None


def _drop_tracebacks(record: dict[str, Any]) -> None:
    for error in (record["failure"], (record["failure"] or {}).get("handler_error")):
        if error:
            error["traceback"] = None


def _drop_history(record: dict[str, Any]) -> None:
    record["envelope"]["history"] = []
    record["envelope"]["deferral"] = None
    record.pop(_ERRORS_KEY, None)
    if record["failure"]:
        record["failure"]["history"] = []


def _drop_failure(record: dict[str, Any]) -> None:
    record["failure"] = None


def strip_server_headers(headers: dict[str, str]) -> dict[str, str]:
    """Return those headers of a message that can be published with it again.

    Headers for the server would take effect again, and the record of a dead letter belongs to the dead letter. Names
    that the client does not accept cannot be sent.
    """
    return {
        name: text
        for name, text in headers.items()
        if _MATCH_HEADER_NAME(name) and not name.startswith("Nats-") and name != _RECORD_HEADER
    }


def log_rejected(queue: str, reason: str) -> None:
    """Log that a dead letter or a message state was not stored; its claim is kept."""
    logs.log_event(logging.ERROR, "settlement rejected", {"queue": queue, "error": reason}, to=_log)


def log_leftover(queue: str, count: int) -> None:
    """Log that obsolete message states were not deleted; they are never read again."""
    logs.log_event(logging.WARNING, "message state cleanup failed", {"queue": queue, "states": count}, to=_log)


# -- listing ----------------------------------------------------------------------------------------


async def list_dead(
    connection: Connection,
    names: StreamNames,
    name: str,
    codec: Codec,
    query: DeadLetterQuery,
    *,
    after: str | None,
    limit: int,
) -> list[DeadLetterRecord]:
    """Return one page of the dead letters that match *query*."""
    records: list[DeadLetterRecord] = []
    last_seq = 0 if after is None else parse_handle(after)
    if limit < 1:
        return records
    letters = api.scan(connection, names.dead, after=last_seq)
    try:
        async for letter in letters:
            record = _to_record(letter, name, codec)
            if query.matches(record):
                records.append(record)
                if len(records) >= limit:
                    break
    finally:
        await letters.aclose()  # type: ignore[attr-defined] # generators have it
    return records


def _to_record(letter: api.StoredMessage, name: str, codec: Codec) -> DeadLetterRecord:
    """Return the record of a dead letter, or of a message that other programs published to its stream."""
    headers = strip_server_headers(letter.headers)
    fields: dict[str, Any] = json.loads(letter.headers.get(_RECORD_HEADER, "{}"))
    transaction, error = decode(codec, letter.body, headers, source=name)
    readable = bool(fields.pop("readable", False)) and error is None
    if not fields:
        # A third-party message in the dead-letter stream: listed, so that it can be discarded.
        delivery = Delivery(transaction, None)
        return DeadLetterRecord.from_delivery(
            delivery, DeadLetter("stranger"), queue=name, at=letter.at, headers=headers, handle=str(letter.seq)
        )
    content = {"payload": transaction.payload} if readable else {"raw": letter.body, "headers": headers}
    errors = fields.pop(_ERRORS_KEY, None)
    record = DeadLetterRecord.model_validate({**fields, **content, "handle": str(letter.seq)})
    envelope, owner = record.envelope, record.transaction()
    history, deferral = reveal_errors(get_codec_keys(codec), owner, envelope.history, envelope.deferral, errors)
    changes = {
        "failure": reveal_failure(get_codec_keys(codec), record.failure),
        "envelope": envelope.model_copy(update={"history": history, "deferral": deferral}),
    }
    return record.model_copy(update=changes)


# -- moving -----------------------------------------------------------------------------------------


async def replay_dead(
    connection: Connection, names: StreamNames, codec: Codec, queue: str, handles: Sequence[str]
) -> list[ReplayResult]:
    """Replay dead letters: publish first, delete afterwards, so that a crash in between leaves both copies."""
    batch = _MoveBatch(handles)
    letters: dict[str, api.StoredMessage] = {}
    for handle, fields in await batch.request_all(
        connection, lambda seq: api.request(f"STREAM.MSG.GET.{names.dead}", seq=seq)
    ):
        letters[handle] = api.parse_stored_message(fields)
    requests = [_replay_request(names, codec, queue, letter) for letter in letters.values()]
    for handle, answer in zip(letters, await connection.request_many(requests), strict=True):
        batch.read(handle, answer)
    return await _delete(connection, names, batch, DeadLetterResult.REPLAYED)


def _replay_request(names: StreamNames, codec: Codec, queue: str, letter: api.StoredMessage) -> Request:
    headers = {name: text for name, text in strip_server_headers(letter.headers).items() if name not in _RESET_HEADERS}
    transaction, _ = decode(codec, letter.body, headers, source=queue)
    headers["Nats-Msg-Id"] = _deduplication_id(letter)
    return Request(names.subject_for(transaction.id), letter.body, headers)


def _deduplication_id(letter: api.StoredMessage) -> str:
    """Return a deduplication id by which the server drops the second copy of a concurrent or repeated move."""
    return f"replay.{letter.subject}.{letter.seq}.{letter.at}"


async def replace_dead(
    connection: Connection, names: StreamNames, handle: str, transaction: Transaction, *, codec: Codec
) -> ReplayResult:
    """Publish *transaction*, then delete the dead letter with *handle*; a concurrent second call publishes nothing."""
    batch = _MoveBatch([handle])
    for _, fields in await batch.request_all(  # at most one, because the batch has one handle
        connection, lambda seq: api.request(f"STREAM.MSG.GET.{names.dead}", seq=seq)
    ):
        body, headers = codec.encode(transaction)
        headers["Nats-Msg-Id"] = _deduplication_id(api.parse_stored_message(fields))
        request = Request(names.subject_for(transaction.id), body, headers)
        check_size(transaction, request, connection.max_payload)
        (answer,) = await connection.request_many([request])
        published = batch.read(handle, answer)
        (result,) = await _delete(connection, names, batch, DeadLetterResult.REPLAYED)
        if published is None:
            return result
        if published.get("duplicate"):
            return ReplayResult(handle, DeadLetterResult.GONE)
        # Another operator, whose correction was a duplicate, may have deleted the dead letter first.
        return ReplayResult(handle, DeadLetterResult.REPLAYED) if result.outcome is DeadLetterResult.GONE else result
    return batch.results[handle]


async def discard_dead(connection: Connection, names: StreamNames, handles: Sequence[str]) -> list[ReplayResult]:
    """Delete dead letters."""
    return await _delete(connection, names, _MoveBatch(handles), DeadLetterResult.DISCARDED)


async def _delete(
    connection: Connection, names: StreamNames, batch: _MoveBatch, outcome: DeadLetterResult
) -> list[ReplayResult]:
    """Delete the dead letters of *batch*; those that were deleted get *outcome*, those that do not exist GONE."""
    for handle, _ in await batch.request_all(
        connection,
        lambda seq: api.request(f"STREAM.MSG.DELETE.{names.dead}", seq=seq, no_erase=not connection.loses_deletes),
    ):
        batch.results[handle] = ReplayResult(handle, outcome)
    # The server's error for an unknown number depends on its other messages, so the number is checked.
    for handle, result in batch.results.items():
        if result.outcome is DeadLetterResult.FAILED and not await _is_stored(connection, names, handle):
            batch.results[handle] = ReplayResult(handle, DeadLetterResult.GONE)
    return batch.list_results()


async def _is_stored(connection: Connection, names: StreamNames, handle: str) -> bool:
    try:
        await api.call(connection, f"STREAM.MSG.GET.{names.dead}", seq=parse_handle(handle))
    except api.ApiError as error:
        return error.number not in _NOT_FOUND_CODES
    return True


class _MoveBatch:
    """A batch of dead letters that are being moved, and the results so far."""

    def __init__(self, handles: Sequence[str]) -> None:
        self._handles = handles
        self._seqs = {handle: _parse_sequence(handle) for handle in handles}
        self.results: dict[str, ReplayResult] = {
            handle: ReplayResult(handle, DeadLetterResult.GONE) for handle, seq in self._seqs.items() if seq is None
        }

    async def request_all(
        self, connection: Connection, request: Callable[[int], Request]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Send *request* for all letters without a result; return the successful responses, record the errors."""
        pending = [
            (handle, seq) for handle, seq in self._seqs.items() if seq is not None and handle not in self.results
        ]
        answers = await connection.request_many([request(seq) for _, seq in pending])
        parsed = [(handle, self.read(handle, answer)) for (handle, _), answer in zip(pending, answers, strict=True)]
        return [(handle, fields) for handle, fields in parsed if fields is not None]

    def read(self, handle: str, answer: RawMessage | None) -> dict[str, Any] | None:
        """Parse *answer*; for an error record the result and return None."""
        try:
            return api.parse_response(answer)
        except api.ApiError as error:
            outcome = DeadLetterResult.GONE if error.number in _NOT_FOUND_CODES else DeadLetterResult.FAILED
            self.results[handle] = ReplayResult(handle, outcome, "" if outcome is DeadLetterResult.GONE else str(error))
        except ConnectionLostError as error:
            self.results[handle] = ReplayResult(handle, DeadLetterResult.FAILED, str(error))
        return None

    def list_results(self) -> list[ReplayResult]:
        """Return one result each, in order; a repeated handle counts once."""
        seen: set[str] = set()
        results = []
        for handle in self._handles:
            results.append(ReplayResult(handle, DeadLetterResult.GONE) if handle in seen else self.results[handle])
            seen.add(handle)
        return results


def _parse_sequence(handle: str) -> int | None:
    """Return the number of *handle*; None if no dead letter here can have that handle."""
    try:
        return parse_handle(handle) or None
    except ConnectorError:
        return None
