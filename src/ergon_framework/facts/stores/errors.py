"""Error constructors that all stores share, so that equal errors have equal messages.

A store has two buffers: facts of its own zones are appended to the one, facts of other zones are forwarded to the
other. Within a pair of zones, facts are numbered by offsets; an epoch is the incarnation of the store that assigned
them.
"""

from __future__ import annotations

from ergon_framework.errors import ConfigurationError
from ergon_framework.facts.errors import (
    ArtifactConflict,
    ArtifactLost,
    ArtifactMismatch,
    ArtifactRefused,
    ArtifactUnknown,
    BufferFull,
    EpochChanged,
    FactConflict,
    FactError,
    InvalidFactError,
    OffsetAhead,
    OffsetGone,
    ReaderUnknown,
    TooManyReaders,
)
from ergon_framework.facts.model import (
    ArtifactReference,
    Buffer,
    Envelope,
    FactConfirmation,
    ObjectName,
    StoredArtifact,
    ZonePair,
)


class WrongBufferError(FactError, ConfigurationError):
    """The facts of one pair of zones cannot be stored in both buffers of one store."""

    final = True
    code = "misplaced"


class NoContentStoreError(FactError, ConfigurationError):
    """The store has no content store for the bytes of artifacts."""

    final = True
    code = "no_contents"


# -- facts ----------------------------------------------------------------------------------------------


def fact_conflict_error(envelope: Envelope, stored: FactConfirmation, digest: str) -> FactConflict:
    """Return the error for an id that another payload already has."""
    return FactConflict(
        f"the fact {envelope.message_id!r} of {envelope.from_zone!r} is stored at offset {stored.offset} "
        f"with {stored.digest}, and this one has {digest}; build ids from everything that distinguishes two facts",
        from_zone=envelope.from_zone,
        message_id=envelope.message_id,
    )


def wrong_buffer_error(pair: ZonePair, actual: Buffer, expected: Buffer) -> WrongBufferError:
    """Return the error for a pair whose facts are in the other buffer of this store."""
    return WrongBufferError(
        f"facts from {pair.from_zone!r} to {pair.to_zone!r} are in the {actual} of this store, and cannot be stored in "
        f"its {expected} too: append at their origin, and forward to their destination"
    )


def offset_gap_error(message_id: str, offset: int, end: int) -> OffsetAhead:
    """Return the error for a forwarded fact that does not follow the last one."""
    return OffsetAhead(
        f"fact {message_id!r} has offset {offset}, but the last one here is {end}; forward the facts in between first"
    )


def buffer_full_error(unit: str, retained: int, limit: int | None) -> BufferFull:
    """Return the error for an exceeded bound; *unit* is what the bound counts."""
    return BufferFull(f"buffer is full: {retained} {unit} are retained, the limit is {limit}; nothing was stored")


# -- cursors --------------------------------------------------------------------------------------------


def epoch_changed_error(cursor_epoch: str, store_epoch: str) -> EpochChanged:
    """Return the error for a cursor of another epoch."""
    return EpochChanged(
        f"cursor has epoch {cursor_epoch!r}, store has {store_epoch!r}: the store was restored from a backup, and "
        "offsets may mean other facts; compare the two stores before reading on"
    )


def offset_ahead_error(pair: ZonePair, offset: int, end: int) -> OffsetAhead:
    """Return the error for an offset that no fact has."""
    return OffsetAhead(
        f"offset {offset} from {pair.from_zone!r} to {pair.to_zone!r} was never assigned; the last is {end}"
    )


def offset_gone_error(pair: ZonePair, begin: int, dropped: int) -> OffsetGone:
    """Return the error for facts that are no longer retained."""
    return OffsetGone(
        f"facts up to offset {dropped} from {pair.from_zone!r} to {pair.to_zone!r} are no longer retained, and "
        f"{begin + 1} was requested; begin after {dropped}"
    )


def unknown_reader_error(reader: str, pair: ZonePair) -> ReaderUnknown:
    """Return the error for a reader that has never fetched."""
    return ReaderUnknown(
        f"{reader!r} is not registered for facts from {pair.from_zone!r} to {pair.to_zone!r}; fetching registers a "
        "reader"
    )


def too_many_readers_error(reader: str, zone: str, count: int, limit: int) -> TooManyReaders:
    """Return the error for a zone that may not register a further reader."""
    return TooManyReaders(
        f"{reader!r} is not registered: zone {zone!r} has {count} readers in this store, and {limit} is the limit; "
        "read under a name that is registered, or have an operator retire readers (ergon facts lag, ergon facts retire)"
    )


# -- artifacts ------------------------------------------------------------------------------------------


def artifact_missing_error(reference: ArtifactReference) -> ArtifactRefused:
    """Return the error for a fact that references an artifact that is not stored."""
    return ArtifactRefused(
        f"the fact references {reference.bucket}/{reference.key}, which its zone has not stored; store it, wait for "
        "its confirmation, then append"
    )


def artifact_differs_error(reference: ArtifactReference, stored: StoredArtifact) -> ArtifactRefused:
    """Return the error for a fact whose reference differs from the stored artifact."""
    return ArtifactRefused(
        f"fact references {reference.bucket}/{reference.key} with {reference.digest}, {reference.size} bytes, but "
        f"stored is {stored.digest} with {stored.size}; use the values that put_object has confirmed"
    )


def artifact_conflict_error(name: ObjectName, stored: StoredArtifact, uploaded: StoredArtifact) -> ArtifactConflict:
    """Return the error for a name that is stored with other bytes."""
    return ArtifactConflict(
        f"{name} is stored with digest {stored.digest} and cannot become {uploaded.digest}; store a "
        "correction under another key, and append a fact that references it"
    )


def artifact_mismatch_error(name: ObjectName, expected: StoredArtifact, received: StoredArtifact) -> ArtifactMismatch:
    """Return the error for an upload that differs from the expected content."""
    return ArtifactMismatch(
        f"{name}: expected {expected.digest} with {expected.size} bytes, got {received.digest} with {received.size}; "
        "nothing was kept, upload all of it again"
    )


def upload_offset_error(name: ObjectName, begin: int, stored_bytes: int) -> InvalidFactError:
    """Return the error for an upload that resumes after the bytes that are stored."""
    return InvalidFactError(
        f"upload of {name} resumes at byte {begin}, but {stored_bytes} bytes are stored; call uploaded_bytes() "
        "first, and pass expected=…"
    )


def no_capacity_error(name: ObjectName, size: int | None, used: int, limit: int) -> BufferFull:
    """Return the error for an upload that exceeds the capacity; *size* is what was announced."""
    size_text = "" if size is None else f" of {size} bytes"
    message = (
        f"no space for the upload of {name}{size_text}: {used} bytes are retained, the limit is {limit}; "
        "nothing was stored"
    )
    if size is not None and size > limit:
        return BufferFull(f"{message}; raise max_bytes, or store less", final=True, not_attempted=False)
    return BufferFull(f"{message}; delete old data, or raise max_bytes")


def artifact_lost_error(
    name: ObjectName, problem: str, reference: tuple[str, str] | None
) -> ArtifactLost | ArtifactUnknown:
    """Return the error for an unreadable artifact.

    *reference* is the zone and id of a retained fact that references it; None if there is none.
    """
    if reference is None:
        hint = "" if name.zone else "; for an artifact of another zone pass zone=…, the zone that its fact comes from"
        return ArtifactUnknown(f"artifact {name} {problem}, and no retained fact references it{hint}")
    from_zone, message_id = reference
    return ArtifactLost(
        f"artifact {name} {problem}, but fact {message_id!r} of zone {from_zone!r} references it: a defect of "
        "its producer, which must store it again",
        from_zone=from_zone,
        message_id=message_id,
        bucket=name.bucket,
        key=name.key,
    )


def no_content_store_error() -> NoContentStoreError:
    """Return the error for a store that was created without a content store."""
    return NoContentStoreError("this store has no content store: pass contents=… when creating it, or omit artifacts")


def not_at_end_error(pair: ZonePair, offset: int, end: int | None) -> OffsetAhead:
    """Return the error for an epoch that is to be adopted at an offset other than the end of the forward buffer."""
    position = "there is no forward buffer of it here" if end is None else f"the last one here is {end}"
    return OffsetAhead(
        f"cannot adopt an epoch for facts from {pair.from_zone!r} to {pair.to_zone!r} at offset {offset}: "
        f"{position}; compare the two stores at the end of this one"
    )
