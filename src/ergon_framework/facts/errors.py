"""Errors of facts and artifacts: one class for each way a caller can respond.

A boundary is the interface to the store of a zone, a site that exchanges facts with others. A reader is a named
consumer; its cursor is an offset in an epoch, the incarnation of the store that assigned the offsets. An artifact is a
file that a fact refers to.
"""

from __future__ import annotations

from typing import Any

from ergon_framework.errors import Category, ErgonError


class FactError(ErgonError):
    """A boundary rejected a call or could not perform it."""

    code = "fact"


class InvalidFactError(FactError):
    """A fact, an envelope or a reference is invalid by itself; the caller must build it differently."""

    category = Category.BUSINESS
    final = True
    code = "invalid_fact"


class FactConflict(FactError):
    """The id belongs to another payload. Nothing was written; the code that generates the ids must be checked."""

    category = Category.BUSINESS
    final = True
    code = "fact_conflict"

    def __init__(self, message: str, *, from_zone: str, message_id: str, **verdict: Any) -> None:
        super().__init__(message, **verdict)
        self.from_zone = from_zone
        self.message_id = message_id


class ArtifactConflict(FactError):
    """Other bytes are stored under that bucket and key, permanently; a correction needs a new key."""

    category = Category.BUSINESS
    final = True
    code = "artifact_conflict"


class ArtifactMismatch(FactError):
    """The uploaded bytes differ from the expected ones, and none are kept: upload the whole artifact again."""

    code = "artifact_mismatch"


class UploadLost(FactError):
    """Another caller resumed the upload, or it expired: query the uploaded bytes and resume from there."""

    code = "upload_lost"


class ArtifactRefused(FactError):
    """A fact refers to an artifact that is missing or differs: store the artifact first."""

    category = Category.BUSINESS
    final = True
    code = "artifact_refused"


class ArtifactUnknown(FactError):
    """Nothing is stored under that bucket and key, and no fact refers to it."""

    final = True
    code = "artifact_unknown"


class ArtifactLost(FactError):
    """A retained fact refers to an artifact that is missing or damaged: a defect on the producer's side."""

    final = True
    code = "artifact_lost"

    def __init__(self, message: str, *, from_zone: str, message_id: str, bucket: str, key: str, **verdict: Any) -> None:
        super().__init__(message, **verdict)
        self.from_zone = from_zone
        self.message_id = message_id
        self.bucket = bucket
        self.key = key


class BufferFull(FactError):
    """The buffer has no free space, and nothing was written: retry after readers have confirmed or space was added."""

    # Not counted as an attempt: the handler runs again later, as often as necessary.
    not_attempted = True
    retry_after = 5.0
    code = "buffer_full"


class EpochChanged(FactError):
    """The store was restored from a backup since the cursor was read, so offsets may mean other facts."""

    final = True
    code = "epoch_changed"


class OffsetGone(FactError):
    """The facts from that offset on are no longer retained; a reader can start at the first retained fact."""

    final = True
    code = "offset_gone"


class OffsetAhead(FactError):
    """The offset has not been assigned yet, so no reader can have read it, or a fact before it is missing here."""

    final = True
    code = "offset_ahead"


class ReaderUnknown(FactError):
    """No reader is registered under that name, or an operator has retired it."""

    final = True
    code = "reader_unknown"


class TooManyReaders(FactError):
    """The zone has reached its limit of readers in the store, and none was added: an operator must retire some."""

    final = True
    code = "too_many_readers"


class PublishError(FactError):
    """The append was retried for as long as the policy allows; no outer layer retries immediately. See the cause.

    ``temporary`` if the boundary was unavailable: a consumer's process step then defers the transaction.
    """

    final = True
    code = "unpublished"


class AccessDenied(FactError):
    """The caller's certificate does not allow the call; nothing was done: use another certificate or other zones."""

    final = True
    code = "access_denied"


class LimitExceeded(FactError):
    """The caller, or all callers together, have too much in flight; nothing was done, retry later."""

    # Not counted as an attempt of the handler: the limit is free again as soon as other calls have ended.
    not_attempted = True
    retry_after = 1.0
    code = "limit_exceeded"


class NotSupportedRemotely(FactError):
    """The operation is available only where the store is, not over the network."""

    final = True
    code = "not_offered"


class ServiceError(FactError):
    """The service failed with an internal error. The outcome is unknown; the same call may be made again."""

    code = "service_failed"
