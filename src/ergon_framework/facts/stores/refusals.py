"""Refusals: what every store says when it does not do what it was asked, in the same words."""

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
    Pair,
    Stored,
)


class MisplacedError(FactError, ConfigurationError):
    """Facts of one pair of zones are to go into two buffers of one store."""

    final = True
    code = "misplaced"


class NoContentsError(FactError, ConfigurationError):
    """The store has no place for the bytes of artifacts."""

    final = True
    code = "no_contents"


# -- facts ----------------------------------------------------------------------------------------------


def conflict(envelope: Envelope, known: FactConfirmation, digest: str) -> FactConflict:
    """The id is taken by another payload."""
    return FactConflict(
        f"the fact {envelope.message_id!r} of {envelope.from_zone!r} is stored at offset {known.offset} "
        f"with {known.digest}, and this one has {digest}; make ids of all that tells two facts apart",
        from_zone=envelope.from_zone,
        message_id=envelope.message_id,
    )


def misplaced(pair: Pair, found: Buffer, wanted: Buffer) -> MisplacedError:
    """The pair is in the other buffer of this store."""
    return MisplacedError(
        f"facts from {pair.from_zone!r} to {pair.to_zone!r} are in the {found} of this store, and cannot be put into "
        f"its {wanted} too: append where they come from, and forward to where they go"
    )


def gap(message_id: str, offset: int, end: int) -> OffsetAhead:
    """A forwarded fact does not follow the last one."""
    return OffsetAhead(
        f"the fact {message_id!r} has offset {offset}, and the last one here is {end}; forward those in between first"
    )


def full(what: str, retained: int, most: int | None) -> BufferFull:
    """There is no room; *what* is counted."""
    return BufferFull(f"{retained} {what} are retained and {most} is the most: nothing was stored")


# -- cursors --------------------------------------------------------------------------------------------


def changed(given: str, now: str) -> EpochChanged:
    """What is given is of another epoch."""
    return EpochChanged(
        f"the cursor is of epoch {given!r} and the store is in {now!r}: it was put back from a backup, and offsets "
        "may mean other facts; compare the two before you go on"
    )


def never_given(pair: Pair, offset: int, end: int) -> OffsetAhead:
    """No fact has that offset."""
    return OffsetAhead(
        f"offset {offset} from {pair.from_zone!r} to {pair.to_zone!r} was never given; the last is {end}"
    )


def gone(pair: Pair, begin: int, dropped: int) -> OffsetGone:
    """Those facts are no longer retained."""
    return OffsetGone(
        f"facts up to offset {dropped} from {pair.from_zone!r} to {pair.to_zone!r} are no longer retained, and "
        f"{begin + 1} was asked for; begin behind {dropped}"
    )


def unknown_reader(reader: str, pair: Pair) -> ReaderUnknown:
    """Nobody of that name has fetched."""
    return ReaderUnknown(
        f"{reader!r} is not registered for facts from {pair.from_zone!r} to {pair.to_zone!r}; fetching registers a "
        "reader"
    )


def too_many_readers(reader: str, zone: str, count: int, most: int) -> TooManyReaders:
    """The zone may have no further reader."""
    return TooManyReaders(
        f"{reader!r} is not registered: zone {zone!r} has {count} readers in this store, and {most} is the limit; read "
        "under a name that is registered, or have an operator retire readers (ergon facts lag, ergon facts retire)"
    )


# -- artifacts ------------------------------------------------------------------------------------------


def not_stored(reference: ArtifactReference) -> ArtifactRefused:
    """A fact names what is not there."""
    return ArtifactRefused(
        f"the fact names {reference.bucket}/{reference.key}, which its zone has not stored; put the object, wait for "
        "its confirmation, and append then"
    )


def another(reference: ArtifactReference, known: Stored) -> ArtifactRefused:
    """A fact names what is there, but differs."""
    return ArtifactRefused(
        f"the fact names {reference.bucket}/{reference.key} with {reference.digest} and {reference.size} bytes, and "
        f"stored is {known.digest} with {known.size}; say what put_object has confirmed"
    )


def taken(name: ObjectName, known: Stored, given: Stored) -> ArtifactConflict:
    """Other bytes have that name."""
    return ArtifactConflict(
        f"{name} is stored with digest {known.digest} and never changes, and this is {given.digest}; store a "
        "correction under another key, and append a fact that says so"
    )


def mismatch(name: ObjectName, expected: Stored, found: Stored) -> ArtifactMismatch:
    """An upload is not what it was said to be."""
    return ArtifactMismatch(
        f"{name} was to be {expected.digest} with {expected.size} bytes, and {found.digest} with {found.size} "
        "came: nothing of it is kept, send all of it again"
    )


def too_far(name: ObjectName, begin: int, here: int) -> InvalidFactError:
    """An upload is to go on behind what is here."""
    return InvalidFactError(
        f"the upload of {name} goes on at byte {begin}, and {here} bytes of it are here; ask received() first, "
        "and say what is expected"
    )


def no_room(name: ObjectName, size: int | None, used: int, most: int) -> BufferFull:
    """An upload has more bytes than there is room for; *size* is what was announced."""
    announced = "" if size is None else f" of {size} bytes"
    error = (
        f"there is no room for the upload of {name}{announced}: {used} bytes are retained and {most} is the most; "
        "nothing was stored"
    )
    if size is not None and size > most:
        return BufferFull(f"{error}; raise max_bytes, or store less", final=True, later=False)
    return BufferFull(f"{error}; let go of what is old, or raise max_bytes")


def missing(name: ObjectName, what: str, by: tuple[str, str] | None) -> ArtifactLost | ArtifactUnknown:
    """An artifact cannot be read; *by* is the zone and the id of a retained fact that names it, if there is one."""
    if by is None:
        hint = "" if name.zone else "; one of another zone is read with zone=…, the zone that its fact comes from"
        return ArtifactUnknown(f"the artifact {name} {what}, and no retained fact names it{hint}")
    from_zone, message_id = by
    return ArtifactLost(
        f"the artifact {name} {what}, and the fact {message_id!r} of zone {from_zone!r} names it: a defect of "
        "its producer, who has to store it again",
        from_zone=from_zone,
        message_id=message_id,
        bucket=name.bucket,
        key=name.key,
    )


def no_contents() -> NoContentsError:
    """Artifacts were not provided for."""
    return NoContentsError("this store keeps no artifacts: give it contents=… when it is made, or leave artifacts out")


def not_the_end(pair: Pair, offset: int, end: int | None) -> OffsetAhead:
    """Of an epoch that is to be adopted at an offset where the forward buffer does not end."""
    found = "there is no forward buffer of it here" if end is None else f"the last one here is {end}"
    return OffsetAhead(
        f"an epoch for facts from {pair.from_zone!r} to {pair.to_zone!r} was to be adopted at offset {offset}, and "
        f"{found}; compare the two stores at the end of this one"
    )
