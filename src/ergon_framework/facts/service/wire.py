"""Conversion between the model of facts and protocol buffers, for single facts and for batches.

A fact has an envelope (ids, zones and times) and a content (subject, predicate and object).

Every message is rebuilt by the model, which checks it, so invalid data never passes. A batch is encoded in columns of
values: a message per fact takes several times as long to write and to read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeGuard, TypeVar

from google.protobuf.message import Message

from ergon_framework.facts import columns
from ergon_framework.facts.boundary import AppendResult, BoundaryCapabilities, LogState, NewFact, ReaderLag
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import (
    BoundarySide,
    Buffer,
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    StoredArtifact,
    StoredFact,
    ZonePair,
    check_digest_and_size,
    check_zone,
)
from ergon_framework.facts.service import boundary_pb2 as pb
from ergon_framework.facts.service import errors

#: Maximum length of an epoch name that is read.
MAX_EPOCH_CHARS = 128


def encode(message: Message) -> bytes:
    """Serialize *message*."""
    data: bytes = message.SerializeToString()
    return data


# -- facts ------------------------------------------------------------------------------------------


def read_envelope(message: pb.Envelope) -> Envelope:
    labels = message.labels
    return Envelope(
        message_id=message.message_id,
        from_zone=message.from_zone,
        to_zone=message.to_zone,
        produced_at_unix_ms=message.produced_at_unix_ms,
        correlation_id=message.correlation_id if message.HasField("correlation_id") else None,
        causation_id=message.causation_id if message.HasField("causation_id") else None,
        labels=dict(labels) if len(labels) else {},
    )


def read_fact(message: pb.Fact) -> Fact:
    return Fact(subject=message.subject, predicate=message.predicate, object_json=message.object_json)


def write_appending(envelope: Envelope, fact: Fact) -> pb.Appending:
    message = pb.Appending()
    # Fields are set in place: building the submessages separately and copying them takes three times as long.
    wire_envelope = message.envelope
    wire_envelope.message_id = envelope.message_id
    wire_envelope.from_zone = envelope.from_zone
    wire_envelope.to_zone = envelope.to_zone
    wire_envelope.produced_at_unix_ms = envelope.produced_at_unix_ms
    if envelope.correlation_id is not None:
        wire_envelope.correlation_id = envelope.correlation_id
    if envelope.causation_id is not None:
        wire_envelope.causation_id = envelope.causation_id
    if envelope.labels:
        wire_envelope.labels.update(envelope.labels)
    wire_fact = message.fact
    wire_fact.subject = fact.subject
    wire_fact.predicate = fact.predicate
    wire_fact.object_json = fact.object_json
    return message


def read_appending(message: pb.Appending) -> NewFact:
    try:
        return read_envelope(message.envelope), read_fact(message.fact)
    except InvalidFactError as error:
        # Checked only after a failure: a missing submessage reads as empty, which is invalid for both.
        for name in ("envelope", "fact"):
            if not message.HasField(name):
                reason = f"an appended fact must have its own {name}, and this one has none"
                raise InvalidFactError(reason) from error
        raise


def write_confirmation(confirmation: FactConfirmation) -> pb.Confirmation:
    return pb.Confirmation(
        message_id=confirmation.message_id,
        offset=confirmation.offset,
        epoch=confirmation.epoch,
        digest=confirmation.digest,
        buffer=confirmation.buffer.value,
        duplicate=confirmation.duplicate,
    )


def read_confirmation(message: pb.Confirmation) -> FactConfirmation:
    return FactConfirmation(
        message_id=message.message_id,
        offset=message.offset,
        epoch=message.epoch,
        digest=message.digest,
        buffer=Buffer(message.buffer),
        duplicate=message.duplicate,
    )


# -- reading ----------------------------------------------------------------------------------------


def write_pair(pair: ZonePair) -> pb.Pair:
    return pb.Pair(from_zone=pair.from_zone, to_zone=pair.to_zone)


def read_pair(message: pb.Pair) -> ZonePair:
    check_zone("from_zone", message.from_zone)
    check_zone("to_zone", message.to_zone)
    return ZonePair(message.from_zone, message.to_zone)


def write_cursor(cursor: Cursor) -> pb.Cursor:
    return pb.Cursor(epoch=cursor.epoch, offset=cursor.offset)


def read_cursor(message: pb.Cursor) -> Cursor:
    if len(message.epoch) > MAX_EPOCH_CHARS:
        raise InvalidFactError(
            f"the epoch of a cursor has at most {MAX_EPOCH_CHARS} characters, not {len(message.epoch)}"
        )
    return Cursor(message.epoch, message.offset)


def write_log(state: LogState) -> pb.LogState:
    return pb.LogState(
        pair=write_pair(state.pair),
        buffer=state.buffer.value,
        epoch=state.epoch,
        first=state.first,
        last=state.last,
        bytes=state.bytes,
        readers={
            reader: pb.Behind(offset=lag.offset, facts=lag.facts, bytes=lag.bytes, since_unix_ms=lag.since_unix_ms)
            for reader, lag in state.readers.items()
        },
    )


def read_log(message: pb.LogState) -> LogState:
    return LogState(
        pair=ZonePair(message.pair.from_zone, message.pair.to_zone),
        buffer=Buffer(message.buffer),
        epoch=message.epoch,
        first=message.first,
        last=message.last,
        bytes=message.bytes,
        readers={reader: _read_lag(lag) for reader, lag in message.readers.items()},
    )


def _read_lag(message: pb.Behind) -> ReaderLag:
    since = message.since_unix_ms if message.HasField("since_unix_ms") else None
    return ReaderLag(message.offset, message.facts, message.bytes, since)


# -- artifacts and the store ------------------------------------------------------------------------


def write_artifact(stored: StoredArtifact) -> pb.Stored:
    return pb.Stored(digest=stored.digest, size=stored.size)


def read_artifact(message: pb.Stored) -> StoredArtifact:
    check_digest_and_size(message.digest, message.size)
    return StoredArtifact(message.digest, message.size)


def write_description(epoch: str, capabilities: BoundaryCapabilities) -> pb.Description:
    return pb.Description(
        epoch=epoch,
        durable=capabilities.durable,
        side=capabilities.side.value,
        artifacts=capabilities.artifacts,
    )


def read_description(message: pb.Description) -> tuple[str, BoundaryCapabilities]:
    durable = message.durable if message.HasField("durable") else None
    return message.epoch, BoundaryCapabilities(
        durable=durable, side=BoundarySide(message.side), artifacts=message.artifacts
    )


# -- batches ----------------------------------------------------------------------------------------

#: Maximum encoded bytes of a fact besides its texts: lengths of texts and labels, numbers, a digest.
_MAX_FRAME_BYTES: Final = 512

_STORE_BUFFERS: Final = {side.store_buffer.value: side.store_buffer for side in BoundarySide}

V = TypeVar("V", str, int)


def max_encoded_size(envelope: Envelope, fact: Fact) -> int:
    """Return the maximum encoded size of a fact in bytes."""
    chars = len(envelope.message_id) + len(envelope.from_zone) + len(envelope.to_zone)
    chars += len(fact.subject) + len(fact.predicate)
    chars += len(envelope.correlation_id or "") + len(envelope.causation_id or "")
    if envelope.labels:
        chars += sum(len(name) + len(value) for name, value in envelope.labels.items())
    # A character has at most four bytes; the bytes of the object, which may be large, are counted exactly.
    object_json = fact.object_json
    return _MAX_FRAME_BYTES + 4 * chars + (len(object_json) if object_json.isascii() else len(object_json.encode()))


# -- batches: facts ---------------------------------------------------------------------------------


def fill_facts(facts: Sequence[NewFact], message: pb.Facts) -> None:
    """Fill *message*, which is a field of another message, with facts: copying it there would take as long again."""
    envelopes = [envelope for envelope, _ in facts]
    message.message_ids.extend([envelope.message_id for envelope in envelopes])
    message.from_zones.extend(_compress_column([envelope.from_zone for envelope in envelopes]))
    message.to_zones.extend(_compress_column([envelope.to_zone for envelope in envelopes]))
    message.produced_at_unix_ms.extend([envelope.produced_at_unix_ms for envelope in envelopes])
    message.subjects.extend([fact.subject for _, fact in facts])
    message.predicates.extend([fact.predicate for _, fact in facts])
    message.objects_json.extend([fact.object_json for _, fact in facts])
    message.correlation_ids.extend(_omit_empty_column([envelope.correlation_id for envelope in envelopes]))
    message.causation_ids.extend(_omit_empty_column([envelope.causation_id for envelope in envelopes]))
    for index, envelope in enumerate(envelopes):
        if envelope.labels:
            message.labels[index].values.update(envelope.labels)


def read_facts(message: pb.Facts) -> Sequence[NewFact | InvalidFactError]:
    """Return each fact or its error; raise InvalidFactError if the columns do not match."""
    try:
        converted = _to_columns(message)
    except ValueError as error:
        raise InvalidFactError(str(error)) from error
    return columns.columns_to_results(converted)


def _to_columns(message: pb.Facts) -> columns.FactColumns:
    """Return the columns; raise ValueError if they do not match each other."""
    count = len(message.message_ids)
    # There may be far more labels than facts; then one of the first labels already has an invalid index.
    for index in message.labels:
        if not 0 <= index < count:
            raise ValueError(f"labels refer to fact number {index}, and there are {count} facts, counted from 0")
    return columns.FactColumns(
        message_ids=list(message.message_ids),
        from_zones=_expand_column("from_zones", message.from_zones, count),
        to_zones=_expand_column("to_zones", message.to_zones, count),
        produced_at_unix_ms=_check_column("produced_at_unix_ms", message.produced_at_unix_ms, count),
        subjects=_check_column("subjects", message.subjects, count),
        predicates=_check_column("predicates", message.predicates, count),
        objects=_check_column("objects_json", message.objects_json, count),
        correlations=_expand_optional_column("correlation_ids", message.correlation_ids, count),
        causations=_expand_optional_column("causation_ids", message.causation_ids, count),
        labels={index: dict(entry.values) for index, entry in message.labels.items()},
    )


def _compress_column(values: list[str]) -> list[str]:
    """Return a single value for the whole column if all values are equal."""
    return values[:1] if len(set(values)) == 1 else values


def _omit_empty_column(values: Sequence[str | None]) -> list[str]:
    return [value or "" for value in values] if any(values) else []


def _check_column(name: str, values: Sequence[V], count: int) -> list[V]:
    if len(values) != count:
        raise ValueError(f"{count} facts have {count} {name}, and not {len(values)}")
    return list(values)


def _expand_column(name: str, values: Sequence[str], count: int) -> list[str]:
    return list(values) * count if len(values) == 1 else _check_column(name, values, count)


def _expand_optional_column(name: str, values: Sequence[str], count: int) -> list[str | None]:
    return [value or None for value in _check_column(name, values, count)] if values else [None] * count


# -- batches: results -------------------------------------------------------------------------------


def write_append_answer(results: Sequence[AppendResult]) -> pb.AppendFactsAnswer:
    """Write new confirmations as columns, and every other result as a separate message, marked by the offset 0."""
    answer = pb.AppendFactsAnswer()
    epoch, buffer = next(((result.epoch, result.buffer) for result in results if _is_new(result)), ("", None))
    offsets, digests = [], []
    for index, result in enumerate(results):
        if _is_new(result) and result.epoch == epoch and result.buffer is buffer:
            offsets.append(result.offset)
            digests.append(result.digest)
        else:
            offsets.append(0)
            digests.append("")
            _write_other(answer.others[index], result)
    answer.offsets.extend(offsets)
    answer.digests.extend(digests)
    answer.epoch = epoch
    answer.buffer = "" if buffer is None else buffer.value
    return answer


def _is_new(result: AppendResult) -> TypeGuard[FactConfirmation]:
    return isinstance(result, FactConfirmation) and not result.duplicate


def _write_other(message: pb.Appended, result: AppendResult) -> None:
    if isinstance(result, FactConfirmation):
        message.confirmation.CopyFrom(write_confirmation(result))
    else:
        message.fault.CopyFrom(errors.to_wire(result))


def read_append_answer(message: pb.AppendFactsAnswer, message_ids: Sequence[str]) -> Sequence[AppendResult]:
    """Return the results of the facts with these ids; raise ValueError if the answer is invalid."""
    count = len(message_ids)
    offsets, digests = (
        _check_column("offsets", message.offsets, count),
        _check_column("digests", message.digests, count),
    )
    new_count = count - offsets.count(0)
    if len(message.others) != count - new_count:
        raise ValueError(f"{new_count} of {count} facts are new, and {len(message.others)} are others")
    if not new_count:
        return [_read_other(message, *each) for each in enumerate(message_ids)]
    if min(offsets) < 0:
        raise ValueError(f"offset {min(offsets)} is invalid")
    epoch, buffer = message.epoch, _STORE_BUFFERS.get(message.buffer)
    if buffer is None:
        raise ValueError(f"facts are confirmed in {' or '.join(_STORE_BUFFERS)}, and not in {message.buffer!r:.20}")
    return [
        FactConfirmation(message_id=message_id, offset=offset, epoch=epoch, digest=digest, buffer=buffer)
        if offset
        else _read_other(message, index, message_id)
        for index, (message_id, offset, digest) in enumerate(zip(message_ids, offsets, digests, strict=True))
    ]


def _read_other(message: pb.AppendFactsAnswer, index: int, message_id: str) -> AppendResult:
    other = message.others.get(index)
    kind = None if other is None else other.WhichOneof("result")
    if other is None or kind is None:
        raise ValueError(f"fact number {index} has no result")
    if kind == "fault":
        return errors.from_wire(other.fault)
    if other.confirmation.message_id != message_id:
        raise ValueError(f"the fact {message_id!r} was confirmed as {other.confirmation.message_id!r:.60}")
    return read_confirmation(other.confirmation)


# -- batches: fetched facts -------------------------------------------------------------------------


def write_fetch_answer(facts: Sequence[StoredFact]) -> pb.FetchFactsAnswer:
    """Write facts with the offset, epoch, digest and time that their store has assigned."""
    answer = pb.FetchFactsAnswer()
    fill_facts([(stored.envelope, stored.fact) for stored in facts], answer.facts)
    answer.digests.extend([stored.digest for stored in facts])
    answer.offsets.extend([stored.offset for stored in facts])
    answer.stored_at_unix_ms.extend([stored.stored_at_unix_ms for stored in facts])
    answer.epochs.extend(_compress_column([stored.epoch for stored in facts]))
    return answer


def read_fetch_answer(message: pb.FetchFactsAnswer, limit: int) -> Sequence[StoredFact]:
    """Return at most *limit* facts; raise the error of the first invalid one, or ValueError for an invalid answer."""
    count = len(message.facts.message_ids)
    if count > limit:
        raise ValueError(f"{count} facts were returned, and at most {limit} were requested")
    digests, offsets = (
        _check_column("digests", message.digests, count),
        _check_column("offsets", message.offsets, count),
    )
    times = _check_column("stored_at_unix_ms", message.stored_at_unix_ms, count)
    epochs = _expand_column("epochs", message.epochs, count)
    return [
        StoredFact(envelope=envelope, fact=fact, digest=digest, offset=offset, epoch=epoch, stored_at_unix_ms=time)
        for (envelope, fact), digest, offset, epoch, time in zip(
            columns.columns_to_facts(_to_columns(message.facts)), digests, offsets, epochs, times, strict=True
        )
    ]
