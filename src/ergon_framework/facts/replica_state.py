"""The state of a replica: how far the facts of another zone are copied, and the current problem.

A replicator copies the facts of a source, the store of another zone, into the store of this zone, the replica. An epoch
is the incarnation of a store that assigned the facts' offsets; it changes when a backup is restored.

The checks compare the answers of two stores with the facts that were queried; they make no calls themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ergon_framework.diagnostics import DocPage
from ergon_framework.errors import ErgonError, error_message
from ergon_framework.facts.boundary import AppendResult
from ergon_framework.facts.errors import (
    AccessDenied,
    ArtifactConflict,
    ArtifactLost,
    ArtifactMismatch,
    ArtifactRefused,
    ArtifactUnknown,
    BufferFull,
    EpochChanged,
    FactConflict,
    FactError,
    OffsetAhead,
    OffsetGone,
    ReaderUnknown,
    TooManyReaders,
    UploadLost,
)
from ergon_framework.facts.model import Cursor, FactConfirmation, StoredFact, ZonePair, fact_digest, is_contiguous


class ReplicaStatus(StrEnum):
    """The status of a replica."""

    STARTING = "starting"
    #: The replica copies facts or is caught up.
    FOLLOWING = "following"
    #: The source does not answer; calls are retried.
    UNREACHABLE = "unreachable"
    #: The source denies access; calls are retried, and a replaced certificate is used from then on.
    DENIED = "denied"
    #: The local store does not answer; calls are retried.
    UNWRITABLE = "unwritable"
    #: One of the stores returns invalid answers; calls are retried.
    FAULTY = "faulty"
    #: The local store has no free space; facts wait at the source.
    FULL = "full"
    #: An artifact is unavailable; the fact that refers to it and all later facts wait.
    ARTIFACT_LOST = "artifact_lost"
    #: From here on, the replica is blocked until an operator has resolved the problem and restarted it.
    EPOCH_CHANGED = "epoch_changed"
    CONFLICT = "conflict"
    GONE = "gone"
    REJECTED = "rejected"
    STOPPED = "stopped"

    @property
    def needs_operator(self) -> bool:
        """Whether the replica is blocked until an operator acts and restarts it."""
        return self in _ACTIONS and self not in _RETRYING_STATUSES


_RUNBOOK: Final = DocPage.FACTS_RUNBOOK.label
#: The operator's response to each status.
_ACTIONS: Final = {
    ReplicaStatus.UNREACHABLE: "nothing is lost, facts wait at the source; check the network and the other zone",
    ReplicaStatus.DENIED: (
        "nothing is lost, facts wait at the source; check the identity and validity of the certificate"
    ),
    ReplicaStatus.UNWRITABLE: "nothing is lost, facts wait at the source; check this zone's store",
    ReplicaStatus.FAULTY: f"nothing was stored; check the store that gave this answer, and see {_RUNBOOK}",
    ReplicaStatus.FULL: (
        f"give the store more space, or have its readers confirm; see 'The disk is filling' in {_RUNBOOK}"
    ),
    ReplicaStatus.ARTIFACT_LOST: (
        f"have its producer store the same bytes again; see 'An artifact is lost' in {_RUNBOOK}"
    ),
    ReplicaStatus.EPOCH_CHANGED: (
        f"a store was restored from a backup: see 'A store was restored' in {_RUNBOOK}, then restart"
    ),
    ReplicaStatus.CONFLICT: f"two different contents have the same name: see 'A conflict' in {_RUNBOOK}, then restart",
    ReplicaStatus.GONE: f"the source has deleted facts that are missing here: see 'Facts are gone' in {_RUNBOOK}",
    ReplicaStatus.REJECTED: f"this store permanently rejects the fact: see 'A conflict' in {_RUNBOOK}, then restart",
}
#: In these states the replica keeps retrying and continues without a restart.
_RETRYING_STATUSES: Final = frozenset(
    (
        ReplicaStatus.UNREACHABLE,
        ReplicaStatus.DENIED,
        ReplicaStatus.UNWRITABLE,
        ReplicaStatus.FAULTY,
        ReplicaStatus.FULL,
        ReplicaStatus.ARTIFACT_LOST,
    )
)


@dataclass(frozen=True, slots=True)
class ReplicaProblem:
    """The problem that blocks a replica, and the operator's response to it."""

    status: ReplicaStatus
    error: BaseException
    #: The fact that is blocked, if the problem concerns a single fact.
    message_id: str | None = None
    offset: int | None = None

    @property
    def reason(self) -> str:
        """The cause, in one line."""
        where = "" if self.offset is None else f"at offset {self.offset}: "
        return f"{where}{type(self.error).__name__}: {error_message(self.error)}"

    @property
    def action(self) -> str:
        """The response expected from the operator."""
        return _ACTIONS[self.status]

    @property
    def retry_after(self) -> float:
        """Minimum seconds until the next attempt."""
        return (self.error.retry_after or 0.0) if isinstance(self.error, ErgonError) else 0.0


class CallTimeoutError(FactError):
    """A call did not return in time; its outcome is unknown."""

    code = "silence"


class InconsistentStoreError(FactError):
    """A store returned an answer that violates its contract."""

    code = "faulty"


def classify_error(
    error: BaseException, *, at_source: bool, message_id: str | None = None, offset: int | None = None
) -> ReplicaProblem:
    """Classify *error* for the zone pair; unexpected errors are retried."""
    return ReplicaProblem(_to_status(error, at_source=at_source), error, message_id, offset)


_STATUS_ERRORS: Final[tuple[tuple[ReplicaStatus, tuple[type[FactError], ...]], ...]] = (
    (ReplicaStatus.EPOCH_CHANGED, (EpochChanged,)),
    (ReplicaStatus.CONFLICT, (FactConflict, ArtifactConflict)),
    (ReplicaStatus.GONE, (OffsetGone,)),
    (ReplicaStatus.FULL, (BufferFull,)),
    (ReplicaStatus.ARTIFACT_LOST, (ArtifactLost, ArtifactUnknown)),
    (ReplicaStatus.DENIED, (AccessDenied, TooManyReaders)),
    # The known state of the store is outdated: its state is queried again, and replication continues from there.
    (
        ReplicaStatus.FAULTY,
        (OffsetAhead, ArtifactRefused, ArtifactMismatch, UploadLost, ReaderUnknown, InconsistentStoreError),
    ),
)


def _to_status(error: BaseException, *, at_source: bool) -> ReplicaStatus:
    if at_source and isinstance(error, OffsetAhead):
        # The source never assigned the offset that this zone has: a restored backup that shows no other epoch.
        return ReplicaStatus.EPOCH_CHANGED
    for status, errors in _STATUS_ERRORS:
        if isinstance(error, errors):
            return status
    if at_source:
        return ReplicaStatus.UNREACHABLE
    return ReplicaStatus.REJECTED if isinstance(error, FactError) and error.final else ReplicaStatus.UNWRITABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """The known lag of this zone behind the source, measured at *asked_at*, in seconds since 1970."""

    facts: int
    #: Size of the facts' objects; artifacts are not counted.
    bytes: int
    #: Since the oldest of them was stored, or since the last contact with the source, whichever is longer.
    seconds: float
    asked_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """The state of one zone pair, as its replicator sees it."""

    name: str
    pair: ZonePair
    status: ReplicaStatus
    #: In seconds since 1970.
    since: float
    #: The last offset that this zone's store has confirmed, in the source's epoch.
    offset: int
    #: The offset up to which the source has a confirmation and may prune.
    confirmed: int
    lag: Lag | None
    problem: ReplicaProblem | None = None

    @property
    def needs_operator(self) -> bool:
        return self.status.needs_operator


def check_fetch(pair: ZonePair, after: Cursor, epoch: str, facts: Sequence[StoredFact]) -> FactError | None:
    """Return the error in a source's answer to a fetch after that cursor; None if the answer is valid.

    *epoch* is that of the source's facts which this zone's store has, empty if it has none.
    """
    if not is_contiguous(facts, after.offset):
        return InconsistentStoreError(
            f"the source was queried for facts after offset {after.offset} and returned "
            f"{[stored.offset for stored in facts][:3]}; offsets have no gaps, so its store is defective"
        )
    for stored in facts:
        if stored.envelope.pair != pair:
            return InconsistentStoreError(
                f"the source was queried for facts of {pair} and returned one of {stored.envelope.pair}"
            )
        if epoch and stored.epoch != epoch:
            return EpochChanged(
                f"facts of this zone have epoch {epoch!r} and the source has epoch {stored.epoch!r}: it was restored "
                "from a backup, and offsets may mean other facts; compare the stores before continuing"
            )
        if fact_digest(stored.envelope, stored.fact) != stored.digest:
            return InconsistentStoreError(
                f"the fact {stored.envelope.message_id!r} at offset {stored.offset} has a digest that does not "
                "match it: it was damaged at the source or in transit"
            )
    return None


def check_same_source(facts: Sequence[StoredFact], end: Cursor, remembered: StoredFact | None) -> FactError | None:
    """Return the error if the source is not the one read before; None if it may be the same.

    *facts* starts with the source's fact at *end*, where this zone's copy ends. *remembered* is the last fact that this
    zone has, if the replicator has forwarded it since its start.
    """
    if not facts:
        return source_changed_error(f"it has no fact at offset {end.offset}, but this zone has")
    first = facts[0]
    if remembered is None or remembered.offset != first.offset:
        return None
    if (remembered.envelope.message_id, remembered.digest) != (first.envelope.message_id, first.digest):
        return source_changed_error(f"it has another fact at offset {end.offset} than this zone")
    return None


def check_confirmation(stored: StoredFact, confirmation: FactConfirmation | None) -> FactError | None:
    """Return the error if the source is not the one read before, else None; *stored* is the fact that it returned.

    *confirmation* is what this zone's store has under the id of that fact.
    """
    message_id = stored.envelope.message_id
    if confirmation is None:
        return source_changed_error(f"it has {message_id!r} at offset {stored.offset}, which this zone does not have")
    if (confirmation.digest, confirmation.offset) != (stored.digest, stored.offset):
        return source_changed_error(
            f"it has {message_id!r} at offset {stored.offset}, which this zone has at {confirmation.offset}"
        )
    return None


def source_changed_error(reason: str) -> EpochChanged:
    """Return the error for a source that is not the one read before."""
    return EpochChanged(
        f"the source has changed: {reason}; it was restored from a backup, and offsets may mean "
        "other facts; compare the stores before continuing"
    )


def check_forwarded(stored: StoredFact, result: AppendResult) -> FactError | None:
    """Return why the destination does not have *stored* at its offset and epoch; None if it has."""
    if not isinstance(result, FactConfirmation):
        return result
    if (result.epoch, result.offset) == (stored.epoch, stored.offset):
        return None
    # The same fact elsewhere: offsets were assigned again, which happens after a backup was restored.
    return EpochChanged(
        f"the fact {stored.envelope.message_id!r} has offset {stored.offset} in epoch {stored.epoch!r} and is here at "
        f"{result.offset} in {result.epoch!r}: one of the two stores was restored from a backup"
    )
