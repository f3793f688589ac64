"""Replica: how far the facts of another zone have come here, and what is in their way."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ergon_framework.errors import ErgonError, text
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
from ergon_framework.facts.model import Pair
from ergon_framework.finding import Page


class Status(StrEnum):
    """How a replica is doing."""

    STARTING = "starting"
    #: It copies, or has all there is.
    FOLLOWING = "following"
    #: The source does not answer; it is asked again and again.
    UNREACHABLE = "unreachable"
    #: The source does not let this zone in; a certificate that is replaced is used from then on.
    DENIED = "denied"
    #: The own store does not answer; the same.
    UNWRITABLE = "unwritable"
    #: One of the two answers what it must not, and is asked again.
    FAULTY = "faulty"
    #: The own store has no room; facts wait at the source.
    FULL = "full"
    #: An artifact cannot be had, and all facts from the one on that names it wait for it.
    ARTIFACT_LOST = "artifact_lost"
    #: From here on it stands still until somebody has looked at it and started it again.
    EPOCH_CHANGED = "epoch_changed"
    CONFLICT = "conflict"
    GONE = "gone"
    REFUSED = "refused"
    STOPPED = "stopped"

    @property
    def halted(self) -> bool:
        """Whether it stands still until an operator acts."""
        return self in _ACTIONS and self not in _WAITING


_RUNBOOK: Final = Page.FACTS_RUNBOOK.named
#: What whoever is called does about it.
_ACTIONS: Final = {
    Status.UNREACHABLE: "nothing is lost, facts wait at the source; see whether the line and the other zone are up",
    Status.DENIED: "nothing is lost, facts wait at the source; see whose certificate this is, and whether it is valid",
    Status.UNWRITABLE: "nothing is lost, facts wait at the source; see whether this zone's store is up",
    Status.FAULTY: f"nothing was taken over; look at the store that answered so, and see {_RUNBOOK}",
    Status.FULL: f"give the store more room, or have its readers confirm; see 'The disk is filling' in {_RUNBOOK}",
    Status.ARTIFACT_LOST: f"have its producer store the same bytes again; see 'An artifact is lost' in {_RUNBOOK}",
    Status.EPOCH_CHANGED: f"a store was put back from a backup: see 'A store was restored' in {_RUNBOOK}, then restart",
    Status.CONFLICT: f"two different things have one name: see 'A conflict' in {_RUNBOOK}, then restart",
    Status.GONE: f"the source has dropped facts that are missing here: see 'Facts are gone' in {_RUNBOOK}",
    Status.REFUSED: f"this store will never take the fact as it is: see 'A conflict' in {_RUNBOOK}, then restart",
}
#: The replica keeps trying in these states and goes on without a restart.
_WAITING: Final = frozenset(
    (
        Status.UNREACHABLE,
        Status.DENIED,
        Status.UNWRITABLE,
        Status.FAULTY,
        Status.FULL,
        Status.ARTIFACT_LOST,
    )
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is in the way, and what is to be done about it."""

    status: Status
    error: BaseException
    #: The fact that cannot go on, if it is one.
    message_id: str | None = None
    offset: int | None = None

    @property
    def reason(self) -> str:
        """What happened, in one line."""
        where = "" if self.offset is None else f"at offset {self.offset}: "
        return f"{where}{type(self.error).__name__}: {text(self.error)}"

    @property
    def action(self) -> str:
        """What whoever is called does about it."""
        return _ACTIONS[self.status]

    @property
    def retry_after(self) -> float:
        """Seconds that it takes at least."""
        return (self.error.retry_after or 0.0) if isinstance(self.error, ErgonError) else 0.0


class SilenceError(FactError):
    """A call did not come back in time; nobody knows whether it was done."""

    code = "silence"


class FaultyError(FactError):
    """A store answered what no store may answer."""

    code = "faulty"


def judge(
    error: BaseException, *, at_source: bool, message_id: str | None = None, offset: int | None = None
) -> Trouble:
    """What *error* means for the pair of zones; whatever nobody has foreseen is tried again."""
    return Trouble(_status(error, at_source=at_source), error, message_id, offset)


_MEANINGS: Final[tuple[tuple[Status, tuple[type[FactError], ...]], ...]] = (
    (Status.EPOCH_CHANGED, (EpochChanged,)),
    (Status.CONFLICT, (FactConflict, ArtifactConflict)),
    (Status.GONE, (OffsetGone,)),
    (Status.FULL, (BufferFull,)),
    (Status.ARTIFACT_LOST, (ArtifactLost, ArtifactUnknown)),
    (Status.DENIED, (AccessDenied, TooManyReaders)),
    # What was believed of the store is not so: it is asked how it is, and then it goes on from there.
    (Status.FAULTY, (OffsetAhead, ArtifactRefused, ArtifactMismatch, UploadLost, ReaderUnknown, FaultyError)),
)


def _status(error: BaseException, *, at_source: bool) -> Status:
    if at_source and isinstance(error, OffsetAhead):
        # It has never given the offset that this zone has: put back from a backup that shows no other epoch.
        return Status.EPOCH_CHANGED
    for status, errors in _MEANINGS:
        if isinstance(error, errors):
            return status
    if at_source:
        return Status.UNREACHABLE
    return Status.REFUSED if isinstance(error, FactError) and error.final else Status.UNWRITABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """What the source has and this zone has not, as far as is known: asked at *asked_at*, in seconds since 1970."""

    facts: int
    #: Of the facts' objects; artifacts are not counted.
    bytes: int
    #: Since the oldest of them was stored, or since the source was last heard of: what may be waiting for longer.
    seconds: float
    asked_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """One pair of zones as its replicator sees it."""

    name: str
    pair: Pair
    status: Status
    #: In seconds since 1970.
    since: float
    #: The last offset that this zone's store has confirmed, in the source's epoch.
    offset: int
    #: How far the source knows about it, and may prune.
    confirmed: int
    lag: Lag | None
    trouble: Trouble | None = None

    @property
    def halted(self) -> bool:
        return self.status.halted
