"""Error constructors that all stores share, so that equal errors have equal messages."""

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
        f"with {stored.digest}, and this one has {digest}; make ids of all that tells two facts apart",
        from_zone=envelope.from_zone,
        message_id=envelope.message_id,
    )


def wrong_buffer_error(pair: ZonePair, actual: Buffer, expected: Buffer) -> WrongBufferError:
    """Return the error for a pair whose facts are in the other buffer of this store."""
    return WrongBufferError(
        f"facts from {pair.from_zone!r} to {pair.to_zone!r} are in the {actual} of this store, and cannot be put into "
        f"its {expected} too: append where they come from, and forward to where they go"
    )


def offset_gap_error(message_id: str, offset: int, end: int) -> OffsetAhead:
    """Return the error for a forwarded fact that does not follow the last one."""
    return OffsetAhead(
        f"the fact {message_id!r} has offset {offset}, and the last one here is {end}; forward those in between first"
    )


def buffer_full_error(unit: str, retained: int, limit: int | None) -> BufferFull:
    """Return the error for an exceeded bound; *unit* is what the bound counts."""
    return BufferFull(f"{retained} {unit} are retained and {limit} is the most: nothing was stored")


# -- cursors --------------------------------------------------------------------------------------------


def epoch_changed_error(cursor_epoch: str, store_epoch: str) -> EpochChanged:
    """Return the error for a cursor of another epoch."""
    return EpochChanged(
        f"the cursor is of epoch {cursor_epoch!r} and the store is in {store_epoch!r}: it was put back from a backup, "
        "and offsets may mean other facts; compare the two before you go on"
    )


def offset_ahead_error(pair: ZonePair, offset: int, end: int) -> OffsetAhead:
    """Return the error for an offset that no fact has."""
    return OffsetAhead(
        f"offset {offset} from {pair.from_zone!r} to {pair.to_zone!r} was never given; the last is {end}"
    )


def offset_gone_error(pair: ZonePair, begin: int, dropped: int) -> OffsetGone:
    """Return the error for facts that are no longer retained."""
    return OffsetGone(
        f"facts up to offset {dropped} from {pair.from_zone!r} to {pair.to_zone!r} are no longer retained, and "
        f"{begin + 1} was asked for; begin behind {dropped}"
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
        f"the fact names {reference.bucket}/{reference.key}, which its zone has not stored; put the object, wait for "
        "its confirmation, and append then"
    )


def artifact_differs_error(reference: ArtifactReference, stored: StoredArtifact) -> ArtifactRefused:
    """Return the error for a fact whose reference differs from the stored artifact."""
    return ArtifactRefused(
        f"the fact names {reference.bucket}/{reference.key} with {reference.digest} and {reference.size} bytes, and "
        f"stored is {stored.digest} with {stored.size}; say what put_object has confirmed"
    )


def artifact_conflict_error(name: ObjectName, stored: StoredArtifact, uploaded: StoredArtifact) -> ArtifactConflict:
    """Return the error for a name that is stored with other bytes."""
    return ArtifactConflict(
        f"{name} is stored with digest {stored.digest} and never changes, and this is {uploaded.digest}; store a "
        "correction under another key, and append a fact that says so"
    )


def artifact_mismatch_error(name: ObjectName, expected: StoredArtifact, received: StoredArtifact) -> ArtifactMismatch:
    """Return the error for an upload that differs from the expected content."""
    return ArtifactMismatch(
        f"{name} was to be {expected.digest} with {expected.size} bytes, and {received.digest} with {received.size} "
        "came: nothing of it is kept, send all of it again"
    )


def upload_offset_error(name: ObjectName, begin: int, stored_bytes: int) -> InvalidFactError:
    """Return the error for an upload that resumes after the bytes that are stored."""
    return InvalidFactError(
        f"the upload of {name} goes on at byte {begin}, and {stored_bytes} bytes of it are here; call "
        "uploaded_bytes() first, and say what is expected"
    )


def no_capacity_error(name: ObjectName, size: int | None, used: int, limit: int) -> BufferFull:
    """Return the error for an upload that exceeds the capacity; *size* is what was announced."""
    size_text = "" if size is None else f" of {size} bytes"
    message = (
        f"there is no room for the upload of {name}{size_text}: {used} bytes are retained and {limit} is the most; "
        "nothing was stored"
    )
    if size is not None and size > limit:
        return BufferFull(f"{message}; raise max_bytes, or store less", final=True, not_attempted=False)
    return BufferFull(f"{message}; let go of what is old, or raise max_bytes")


def artifact_lost_error(
    name: ObjectName, problem: str, reference: tuple[str, str] | None
) -> ArtifactLost | ArtifactUnknown:
    """Return the error for an unreadable artifact; *by* is the zone and id of a retained fact that references it."""
    if reference is None:
        hint = "" if name.zone else "; one of another zone is read with zone=…, the zone that its fact comes from"
        return ArtifactUnknown(f"the artifact {name} {problem}, and no retained fact names it{hint}")
    from_zone, message_id = reference
    return ArtifactLost(
        f"the artifact {name} {problem}, and the fact {message_id!r} of zone {from_zone!r} names it: a defect of "
        "its producer, who has to store it again",
        from_zone=from_zone,
        message_id=message_id,
        bucket=name.bucket,
        key=name.key,
    )


def no_content_store_error() -> NoContentStoreError:
    """Return the error for a store that was created without a content store."""
    return NoContentStoreError(
        "this store keeps no artifacts: give it contents=… when it is made, or leave artifacts out"
    )


def not_at_end_error(pair: ZonePair, offset: int, end: int | None) -> OffsetAhead:
    """Return the error for an epoch that is to be adopted at an offset other than the end of the forward buffer."""
    position = "there is no forward buffer of it here" if end is None else f"the last one here is {end}"
    return OffsetAhead(
        f"an epoch for facts from {pair.from_zone!r} to {pair.to_zone!r} was to be adopted at offset {offset}, and "
        f"{position}; compare the two stores at the end of this one"
    )
