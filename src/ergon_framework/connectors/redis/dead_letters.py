"""The dead letters of a queue, in their own stream: list, replay, replace and discard them.

A dead letter is a message that no worker processes again automatically, with the record of its failure. A replay moves
it back into the queue; a replacement does that with another payload.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from ergon_framework.connectors.base import ConnectorError, DeadLetter, Delivery, MissingKeyError
from ergon_framework.connectors.codec import Codec
from ergon_framework.connectors.dead_letters import DeadLetterQuery, DeadLetterRecord, DeadLetterResult, ReplayResult
from ergon_framework.connectors.encryption import get_codec_keys, hide_failure, reveal_failure
from ergon_framework.connectors.redis import scripts
from ergon_framework.connectors.redis.connection import Operation, Pipeline
from ergon_framework.connectors.redis.messages import CHANGING_HEADERS, Messages, QueueKeys
from ergon_framework.failure import Failure
from ergon_framework.transaction import Transaction

#: Prefix of the fields that describe the dead letter and not the message.
_FIELD_PREFIX: Final = "ergon-dead-"
#: Maximum characters of a stored reason.
_MAX_REASON_CHARS: Final = 1000
_match_handle = re.compile(r"[0-9]{1,20}-[0-9]{1,20}").fullmatch
#: Entries that one script call handles: the server does nothing else meanwhile.
_MAX_BATCH: Final = 500
#: By the letter that the scripts of replay and replacement return.
_OUTCOME_BY_LETTER: Final = {"g": DeadLetterResult.GONE, "f": DeadLetterResult.FAILED, "s": DeadLetterResult.REPLAYED}


def encode_dead_letter(delivery: Delivery, settlement: DeadLetter, codec: Codec) -> str:
    """Encode the fields that a dead letter adds to its message, as JSON."""
    fields = {
        "id": delivery.transaction.id,
        "reason": settlement.reason.encode(errors="replace").decode()[:_MAX_REASON_CHARS],
        "deliveries": str(delivery.receipt.deliveries),
        "readable": str(int(delivery.receipt.readable)),
    }
    failure = hide_failure(get_codec_keys(codec), settlement.failure)
    if failure is not None:
        fields["failure"] = failure.model_dump_json()
    return json.dumps([part for name, text in fields.items() for part in (_FIELD_PREFIX + name, text)])


def list_dead(
    keys: QueueKeys,
    messages: Messages,
    name: str,
    query: DeadLetterQuery,
    *,
    after: str | None,
    limit: int,
    max_bytes: int,
) -> Operation[Sequence[DeadLetterRecord]]:
    """Return one page of the dead letters that match *query*.

    A body that the codec rejects, or that is larger than *max_bytes*, is described by its size.
    """
    if after is not None and not _match_handle(after):
        raise ConnectorError(f"{after[:20]!r} is not the handle of a dead letter; pass one from a listing")
    # A handle begins with the time of dead-lettering, so that the times of a query are bounds.
    start = _to_lower_bound(query.since) if after is None else f"({after}"
    records: list[DeadLetterRecord] = []
    body_limit = min(max_bytes, messages.max_body_bytes)
    while len(records) < limit:
        entries = yield from scripts.LIST.run(
            (keys.dead,), start, _to_upper_bound(query), _MAX_BATCH, messages.body_field, body_limit, max_bytes
        )
        for entry in entries:
            record = _to_record(entry, messages, name)
            if query.matches(record) and len(records) < limit:
                records.append(record)
        if not entries:
            break
        start = f"({entries[-1][0].decode()}"
    return records


def _to_lower_bound(seconds: float | None) -> str:
    return "-" if seconds is None or seconds < 0 else f"{int(seconds * 1000)}-0"


def _to_upper_bound(query: DeadLetterQuery) -> str:
    if query.until is None:
        return "+"
    return f"{max(0, int(query.until * 1000) + 1)}-0"


def _to_record(entry: Sequence[Any], messages: Messages, name: str) -> DeadLetterRecord:
    """Return the record of an entry: its id, its fields, and the size of a body that was not loaded or -1."""
    handle, fields, size = entry[0].decode(), entry[1], entry[2]
    dead_fields: dict[str, str] = {}
    message_fields: list[bytes] = []
    pairs = iter(fields)
    prefix = _FIELD_PREFIX.encode()
    for field, value in zip(pairs, pairs, strict=True):
        if field.startswith(prefix):
            dead_fields[field[len(prefix) :].decode(errors="replace")] = value.decode(errors="replace")
        else:
            message_fields += (field, value)
    body, headers = messages.split(message_fields)
    transaction, error = messages.decode(body, headers) if size < 0 else messages.describe(size, headers)
    readable = error is None and dead_fields.get("readable") != "0"
    if not readable and not isinstance(error, MissingKeyError):
        transaction = Transaction(body if size < 0 else None, id=dead_fields.get("id") or transaction.id, source=name)
    failure = None if "failure" not in dead_fields else Failure.model_validate_json(dead_fields["failure"])
    settlement = DeadLetter(dead_fields.get("reason", ""), reveal_failure(get_codec_keys(messages.codec), failure))
    return DeadLetterRecord.from_delivery(
        Delivery(transaction, handle, int(dead_fields.get("deliveries", 1))),
        settlement,
        queue=name,
        at=int(handle.partition("-")[0]) / 1000,
        headers=None if readable else headers,
        handle=handle,
        size=None if size < 0 else size,
    )


def replay_dead(keys: QueueKeys, handles: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
    """Move dead letters back into the queue, without their delivery count and history."""
    valid = [handle for handle in handles if _match_handle(handle)]
    letters = ""
    for start in range(0, len(valid), _MAX_BATCH):
        batch = valid[start : start + _MAX_BATCH]
        answer = yield from scripts.REPLAY.run(
            (keys.stream, keys.dead), len(CHANGING_HEADERS), *CHANGING_HEADERS, *batch
        )
        letters += answer.decode()
    return _build_results(handles, [_OUTCOME_BY_LETTER[letter] for letter in letters])


def discard_dead(keys: QueueKeys, handles: Sequence[str]) -> Operation[Sequence[ReplayResult]]:
    """Delete dead letters."""
    valid = [handle for handle in handles if _match_handle(handle)]
    answers = (yield Pipeline([("XDEL", keys.dead, handle) for handle in valid])) if valid else []
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return _build_results(
        handles, [DeadLetterResult.DISCARDED if answer else DeadLetterResult.GONE for answer in answers]
    )


def replace_dead(keys: QueueKeys, handle: str, fields: Sequence[str | bytes]) -> Operation[ReplayResult]:
    """Replace a dead letter by the queued message of *fields*, in one step."""
    outcomes: list[DeadLetterResult] = []
    if _match_handle(handle):
        answer = yield from scripts.REPLACE.run((keys.stream, keys.dead), handle, *fields)
        outcomes = [_OUTCOME_BY_LETTER[answer.decode()]]
    return _build_results([handle], outcomes)[0]


def _build_results(handles: Sequence[str], outcomes: Sequence[DeadLetterResult]) -> list[ReplayResult]:
    """Return one result for each handle, in order; an invalid handle has the result GONE."""
    remaining = iter(outcomes)
    results = []
    for handle in handles:
        outcome = next(remaining) if _match_handle(handle) else DeadLetterResult.GONE
        message = "the server rejects writes; its memory may be full" if outcome is DeadLetterResult.FAILED else ""
        results.append(ReplayResult(handle, outcome, message))
    return results


def find_queued(keys: QueueKeys, messages: Messages, ids: Collection[str]) -> Operation[set[str]]:
    """Return those of *ids* whose transactions are in the queue; reads the whole queue."""
    found_ids: set[str] = set()
    for stream in (keys.stream, keys.later) if ids else ():
        start = "-"
        while True:
            last, names, unnamed_entries = yield from scripts.FIND_IDS.run(
                (stream,), start, _MAX_BATCH, "ergon-id", *ids
            )
            found_ids |= {name.decode() for name in names}
            # The id of a third-party message is known only after decoding.
            found_ids |= {messages.decode(*messages.split(fields))[0].id for fields in unnamed_entries} & set(ids)
            if last is None:
                break
            start = f"({last.decode()}"
    return found_ids
