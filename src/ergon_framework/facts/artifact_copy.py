"""ArtifactCopier: the script that copies artifacts between stores, several concurrently. It does no I/O itself.

An artifact is a file that a fact refers to. A script is a generator that yields what is to be done: calls, waits, and
scripts to start. A started script runs in a slot of its own, and its result arrives in the mailbox of the script that
started it. An abandoned copy is one that is no longer waited for; its call may continue to run.

Stored artifacts are not copied again, and partial uploads are resumed. A large artifact may take hours: a copy is
abandoned when it has made no progress for the policy's timeout, not when it is slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ergon_framework.engine.effects import (
    Call,
    CallResult,
    Err,
    Expired,
    Interrupted,
    Ok,
    Script,
    await_exit,
    call,
    interrupt,
    spawn,
    wait,
)
from ergon_framework.errors import ErgonError
from ergon_framework.facts.errors import InvalidFactError
from ergon_framework.facts.model import ArtifactReference, StoredArtifact
from ergon_framework.facts.policy import ReplicationPolicy
from ergon_framework.facts.replica_state import CallTimeoutError, InconsistentStoreError

if TYPE_CHECKING:
    from ergon_framework.engine.scheduler import Scheduler, Slot


class CopyAbandonedError(ErgonError):
    """Signal that the copy was abandoned and no caller waits for it any longer."""

    code = "left"


class CopyProgress:
    """The progress of a copy, updated by the copying thread or task, and whether the copy was abandoned."""

    def __init__(self) -> None:
        self.bytes = 0
        #: Set by ``ArtifactCopier``: the next chunk then raises, because a thread cannot be cancelled.
        self.abandoned = False
        #: Set by the copying call when it exits.
        self.exited = False
        #: The error of reading: an error of the source, whatever error the destination raises because of it.
        self.read_error: Exception | None = None

    def add_chunk(self, piece: bytes) -> bytes:
        """Count *piece*, which goes to the destination, and return it."""
        if self.abandoned:
            raise CopyAbandonedError(
                "the copy was abandoned: its bytes so far are kept, and the next copy resumes there"
            )
        self.bytes += len(piece)
        return piece

    def track_chunks(self, pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
        """Yield *pieces* and record their progress."""
        try:
            for piece in pieces:
                yield self.add_chunk(piece)
        except Exception as error:
            self.read_error = error
            raise


class ArtifactId(NamedTuple):
    """The identifier of an artifact in a store."""

    bucket: str
    key: str

    @classmethod
    def from_reference(cls, reference: ArtifactReference) -> ArtifactId:
        return cls(reference.bucket, reference.key)


class CopyFailed(NamedTuple):
    """The reason why an artifact was not copied; *at_source* if the source store failed and not the destination."""

    error: BaseException
    at_source: bool


@dataclass(frozen=True, slots=True)
class CopyCalls:
    """The calls that copy an artifact, sync or async."""

    #: (bucket, key, expected) -> number of bytes that the destination has.
    uploaded_bytes: Callable[[str, str, StoredArtifact], Any]
    #: (artifact, first byte to copy, progress to update).
    copy: Callable[[ArtifactReference, int, CopyProgress], Any]


@dataclass(slots=True, eq=False)
class _RunningCopy:
    reference: ArtifactReference
    #: When it last made progress, and at which byte.
    progress_at: float
    progress_bytes: int = 0
    progress: CopyProgress = field(default_factory=CopyProgress)

    @property
    def expected(self) -> StoredArtifact:
        return StoredArtifact(self.reference.digest, self.reference.size)


class ArtifactCopier:
    """Copies artifacts between two stores; ``run`` must not be called concurrently."""

    def __init__(self, calls: CopyCalls, *, policy: ReplicationPolicy, scheduler: Scheduler) -> None:
        self._calls = calls
        self._policy = policy
        self._scheduler = scheduler
        self._running: dict[Slot, _RunningCopy] = {}
        self._abandoned_copies: list[CopyProgress] = []
        #: Artifacts that the store reported as stored and then turned out not to have.
        self._recheck_ids: set[ArtifactId] = set()
        #: Number of copied artifacts, and of bytes sent over the network.
        self.copied = 0
        self.bytes = 0

    @property
    def abandoned(self) -> int:
        """The number of abandoned copies that have not exited."""
        self._abandoned_copies = [progress for progress in self._abandoned_copies if not progress.exited]
        return len(self._abandoned_copies)

    def recheck(self, name: ArtifactId) -> None:
        """Copy the artifact again: the store reports it as stored but rejects the fact that refers to it."""
        self._recheck_ids.add(name)

    def run(self, references: Iterable[ArtifactReference]) -> Script[Mapping[ArtifactId, CopyFailed]]:
        """Copy all artifacts and return the failures. After the first failure no further copy starts."""
        mailbox = self._scheduler.create_mailbox()
        todo = deque({ArtifactId.from_reference(reference): reference for reference in references}.values())
        failures: dict[ArtifactId, CopyFailed] = {}
        while todo or self._running:
            while todo and not failures and len(self._running) < self._policy.copies:
                copy = _RunningCopy(todo.popleft(), self._scheduler.monotonic())
                self._running[(yield from spawn(self._copy_artifact(copy), notify=mailbox, counted=False))] = copy
            # The facts are forwarded in order, up to the first failure: the rest would be copied for nothing now.
            while todo and failures:
                failures[ArtifactId.from_reference(todo.popleft())] = next(iter(failures.values()))
            if not self._running:
                break
            events = yield from wait(mailbox, until=self._scheduler.monotonic() + self._policy.timeout / 4)
            if isinstance(events, Interrupted):
                failures.update(self._fail_remaining(todo))
                yield from self._abandon(list(self._running))
                continue
            for event in events:
                # An abandoned call that exits later is also reported, and its slot is no longer listed.
                finished = self._running.pop(event.slot, None)
                if finished is not None and event.value is not None:
                    failures[ArtifactId.from_reference(finished.reference)] = event.value
            yield from self._abandon([slot for slot, copy in self._running.items() if self._is_stalled(copy)])
        return failures

    @staticmethod
    def _fail_remaining(todo: deque[ArtifactReference]) -> dict[ArtifactId, CopyFailed]:
        failures = {
            ArtifactId.from_reference(reference): CopyFailed(
                CopyAbandonedError("the copy was not started"), at_source=True
            )
            for reference in todo
        }
        todo.clear()
        return failures

    def _is_stalled(self, copy: _RunningCopy) -> bool:
        now, progress = self._scheduler.monotonic(), copy.progress
        if progress.bytes != copy.progress_bytes:
            copy.progress_bytes, copy.progress_at = progress.bytes, now
        return not progress.abandoned and now - copy.progress_at >= self._policy.timeout

    def _abandon(self, slots: Iterable[Slot]) -> Script[None]:
        for slot in slots:
            progress = self._running[slot].progress
            if not progress.abandoned:
                progress.abandoned = True
                self._abandoned_copies.append(progress)
                yield from interrupt(slot)

    def _copy_artifact(self, copy: _RunningCopy) -> Script[CopyFailed | None]:
        """Copy an artifact, from the bytes on that the destination has; return the failure, if any."""
        reference, name = copy.reference, ArtifactId.from_reference(copy.reference)
        request = Call(
            "uploaded_bytes",
            self._calls.uploaded_bytes,
            (reference.bucket, reference.key, copy.expected),
            self._scheduler.monotonic() + self._policy.timeout,
        )
        answer = yield from self._await_call(request)
        if not isinstance(answer, Ok):
            copy.progress.exited = True
            return CopyFailed(_to_error(answer, self._policy.timeout), at_source=False)
        # An empty artifact has no missing bytes, whether it is stored or not, so it is always put.
        begin = min(answer.value, reference.size)
        if name not in self._recheck_ids and begin == reference.size > 0:
            copy.progress.exited = True
            return None
        answer = yield from self._await_call(Call("copy", self._calls.copy, (reference, begin, copy.progress)))
        self.bytes += copy.progress.bytes
        if isinstance(answer, Ok):
            self._recheck_ids.discard(name)
            self.copied += 1
            return None
        error = _to_error(answer, self._policy.timeout)
        if begin and isinstance(error, InvalidFactError):
            # Another caller has resumed this upload since the lookup.
            error = InconsistentStoreError(
                f"{reference.bucket}/{reference.key} cannot be resumed at byte {begin}: it has changed"
            )
        return CopyFailed(error, at_source=error is copy.progress.read_error or isinstance(error, CallTimeoutError))

    def _await_call(self, request: Call) -> Script[CallResult]:
        answer = yield from call(request)
        if isinstance(answer, Interrupted | Expired) and answer.call is not None:
            # Ask the abandoned call to exit, where that is possible; the script does not wait for it.
            yield from await_exit(answer.call, self._scheduler.monotonic())
        return answer


def _to_error(answer: CallResult, timeout: float) -> BaseException:
    if isinstance(answer, Err):
        return answer.error
    return CallTimeoutError(f"no progress for {timeout:g} s: the copy was abandoned")
