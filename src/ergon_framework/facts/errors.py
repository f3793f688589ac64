"""What can go wrong with facts and artifacts: one class for each thing that a caller does about it."""

from __future__ import annotations

from typing import Any

from ergon_framework.errors import Category, ErgonError


class FactError(ErgonError):
    """A boundary refused, or could not do, what it was asked."""

    code = "fact"


class InvalidFactError(FactError):
    """A fact, an envelope or a reference breaks a rule of its own; it has to be made otherwise."""

    category = Category.BUSINESS
    final = True
    code = "invalid_fact"


class FactConflict(FactError):
    """The id is taken by another payload. Nothing was written; whoever makes the ids must look at it."""

    category = Category.BUSINESS
    final = True
    code = "fact_conflict"

    def __init__(self, message: str, *, from_zone: str, message_id: str, **verdict: Any) -> None:
        super().__init__(message, **verdict)
        self.from_zone = from_zone
        self.message_id = message_id


class ArtifactConflict(FactError):
    """Other bytes are stored under that bucket and key, for ever; a correction takes a new key."""

    category = Category.BUSINESS
    final = True
    code = "artifact_conflict"


class ArtifactMismatch(FactError):
    """What was uploaded is not what it was said to be, and nothing is kept of it: send all of it again."""

    code = "artifact_mismatch"


class UploadLost(FactError):
    """Somebody else has gone on with the upload, or it lay too long: ask what was received, and go on from there."""

    code = "upload_lost"


class ArtifactRefused(FactError):
    """A fact names an artifact that is not there, or is another: store the artifact first."""

    category = Category.BUSINESS
    final = True
    code = "artifact_refused"


class ArtifactUnknown(FactError):
    """Nothing is stored under that bucket and key, and no fact says that there should be."""

    final = True
    code = "artifact_unknown"


class ArtifactLost(FactError):
    """A retained fact names an artifact that is missing or damaged: a defect on the side of its producer."""

    final = True
    code = "artifact_lost"

    def __init__(self, message: str, *, from_zone: str, message_id: str, bucket: str, key: str, **verdict: Any) -> None:
        super().__init__(message, **verdict)
        self.from_zone = from_zone
        self.message_id = message_id
        self.bucket = bucket
        self.key = key


class BufferFull(FactError):
    """There is no room, and nothing was written: come back when somebody has confirmed, or given it more."""

    # Nobody's fault and nobody's attempt: a handler that meets it is run again later, as often as it takes.
    later = True
    retry_after = 5.0
    code = "buffer_full"


class EpochChanged(FactError):
    """The store is not the one that the cursor was read from: a backup was put back, so offsets mean other facts."""

    final = True
    code = "epoch_changed"


class OffsetGone(FactError):
    """The facts from there on are no longer retained; a reader can begin at the first that is."""

    final = True
    code = "offset_gone"


class OffsetAhead(FactError):
    """No fact has that offset yet, so nobody can have read it, or a fact before it is missing here."""

    final = True
    code = "offset_ahead"


class ReaderUnknown(FactError):
    """Nobody of that name has read there, or an operator has retired the name."""

    final = True
    code = "reader_unknown"


class TooManyReaders(FactError):
    """The zone has as many readers in the store as are allowed, and none was added: an operator retires some."""

    final = True
    code = "too_many_readers"


class PublishError(FactError):
    """It was tried for as long as the policy allows; no layer above tries again at once. The cause says why it failed.

    ``temporary`` where the boundary was unavailable: a consumer's process step defers the transaction.
    """

    final = True
    code = "unpublished"


class AccessDenied(FactError):
    """The caller's certificate does not allow it, and nothing was done: it takes another one, or other zones."""

    final = True
    code = "access_denied"


class LimitExceeded(FactError):
    """The caller, or all callers together, have too much in flight; nothing was done, try again later."""

    # It is no attempt of the handler: the limit is free again as soon as other calls have ended.
    later = True
    retry_after = 1.0
    code = "limit_exceeded"


class NotOffered(FactError):
    """It is done where the store is, and nobody can ask for it over the line."""

    final = True
    code = "not_offered"


class ServiceFailed(FactError):
    """The service met an error of its own. Nobody knows whether it was done; the same call may be made again."""

    code = "service_failed"
