"""Conversion between the model and protocol buffers.

Every message is rebuilt by the model, which checks it, so invalid data never passes.
"""

from __future__ import annotations

from google.protobuf.message import Message

from ergon_framework.facts.boundary import BoundaryCapabilities, LogState, NewFact, ReaderLag
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import (
    BoundarySide,
    Buffer,
    Cursor,
    Envelope,
    Fact,
    FactConfirmation,
    StoredArtifact,
    ZonePair,
    check_digest_and_size,
    check_zone,
)
from ergon_framework.facts.service import boundary_pb2 as wire

#: Maximum length of an epoch name that is read.
MAX_EPOCH_CHARS = 128


def encode(message: Message) -> bytes:
    """Serialize *message*."""
    data: bytes = message.SerializeToString()
    return data


# -- facts ----------------------------------------------------------------------------------------------


def read_envelope(message: wire.Envelope) -> Envelope:
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


def read_fact(message: wire.Fact) -> Fact:
    return Fact(subject=message.subject, predicate=message.predicate, object_json=message.object_json)


def write_appending(envelope: Envelope, fact: Fact) -> wire.Appending:
    message = wire.Appending()
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


def read_appending(message: wire.Appending) -> NewFact:
    try:
        return read_envelope(message.envelope), read_fact(message.fact)
    except InvalidFactError as error:
        # Checked only after a failure: a missing submessage reads as empty, which is invalid for both.
        for name in ("envelope", "fact"):
            if not message.HasField(name):
                reason = f"a fact that is appended has an {name} of its own, and this one has none"
                raise InvalidFactError(reason) from error
        raise


def write_confirmation(confirmation: FactConfirmation) -> wire.Confirmation:
    return wire.Confirmation(
        message_id=confirmation.message_id,
        offset=confirmation.offset,
        epoch=confirmation.epoch,
        digest=confirmation.digest,
        buffer=confirmation.buffer.value,
        duplicate=confirmation.duplicate,
    )


def read_confirmation(message: wire.Confirmation) -> FactConfirmation:
    return FactConfirmation(
        message_id=message.message_id,
        offset=message.offset,
        epoch=message.epoch,
        digest=message.digest,
        buffer=Buffer(message.buffer),
        duplicate=message.duplicate,
    )


# -- reading --------------------------------------------------------------------------------------------


def write_pair(pair: ZonePair) -> wire.Pair:
    return wire.Pair(from_zone=pair.from_zone, to_zone=pair.to_zone)


def read_pair(message: wire.Pair) -> ZonePair:
    check_zone("from_zone", message.from_zone)
    check_zone("to_zone", message.to_zone)
    return ZonePair(message.from_zone, message.to_zone)


def write_cursor(cursor: Cursor) -> wire.Cursor:
    return wire.Cursor(epoch=cursor.epoch, offset=cursor.offset)


def read_cursor(message: wire.Cursor) -> Cursor:
    if len(message.epoch) > MAX_EPOCH_CHARS:
        raise InvalidFactError(
            f"the epoch of a cursor has at most {MAX_EPOCH_CHARS} characters, not {len(message.epoch)}"
        )
    return Cursor(message.epoch, message.offset)


def write_log(state: LogState) -> wire.LogState:
    return wire.LogState(
        pair=write_pair(state.pair),
        buffer=state.buffer.value,
        epoch=state.epoch,
        first=state.first,
        last=state.last,
        bytes=state.bytes,
        readers={
            reader: wire.Behind(offset=lag.offset, facts=lag.facts, bytes=lag.bytes, since_unix_ms=lag.since_unix_ms)
            for reader, lag in state.readers.items()
        },
    )


def read_log(message: wire.LogState) -> LogState:
    return LogState(
        pair=ZonePair(message.pair.from_zone, message.pair.to_zone),
        buffer=Buffer(message.buffer),
        epoch=message.epoch,
        first=message.first,
        last=message.last,
        bytes=message.bytes,
        readers={reader: _read_lag(lag) for reader, lag in message.readers.items()},
    )


def _read_lag(message: wire.Behind) -> ReaderLag:
    since = message.since_unix_ms if message.HasField("since_unix_ms") else None
    return ReaderLag(message.offset, message.facts, message.bytes, since)


# -- artifacts, and the store itself --------------------------------------------------------------------


def write_artifact(stored: StoredArtifact) -> wire.Stored:
    return wire.Stored(digest=stored.digest, size=stored.size)


def read_artifact(message: wire.Stored) -> StoredArtifact:
    check_digest_and_size(message.digest, message.size)
    return StoredArtifact(message.digest, message.size)


def write_description(epoch: str, capabilities: BoundaryCapabilities) -> wire.Description:
    return wire.Description(
        epoch=epoch,
        durable=capabilities.durable,
        side=capabilities.side.value,
        artifacts=capabilities.artifacts,
    )


def read_description(message: wire.Description) -> tuple[str, BoundaryCapabilities]:
    durable = message.durable if message.HasField("durable") else None
    return message.epoch, BoundaryCapabilities(
        durable=durable, side=BoundarySide(message.side), artifacts=message.artifacts
    )
